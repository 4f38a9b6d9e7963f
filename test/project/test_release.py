"""A release is refused while its parts disagree, and its source archive does not depend on the day or the user."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

from tools import release

ROOT = Path(__file__).parents[2]
VERSION = release.version()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of a release that agree."""
    (tmp_path / "aoquant").mkdir()
    shutil.copy(ROOT / "aoquant/__init__.py", tmp_path / "aoquant")
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{VERSION}] - 2026-01-02\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("tagged", ["", "abc"])
def test_parts_that_agree_are_released(tree: Path, tagged: str) -> None:
    assert release.disagreements(tree, "abc", tagged, "") == []


def test_each_disagreement_is_named(tree: Path) -> None:
    assert len(release.disagreements(tree, "abc", "def", " M setup.py")) == 2
    (tree / "CHANGELOG.md").write_text("## [Unreleased]\n", encoding="utf-8")
    (tree / "CITATION.cff").write_text("\nversion: 9\n", encoding="utf-8")
    assert len(release.disagreements(tree, "abc", "def", " M setup.py")) == 4


def test_a_step_that_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "WORK", tmp_path)
    calls: list[str] = []

    def act() -> str:
        calls.append("")
        if len(calls) == 1:
            raise SystemExit("failed")
        return "hashes"

    with pytest.raises(SystemExit):
        release.once("abc", "build", act)
    assert [release.once("abc", "build", act) for _ in range(2)] == ["hashes"] * 2 and len(calls) == 2
    assert release.once("def", "build", act) == "hashes" and len(calls) == 3


def test_this_checkout_cites_its_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == VERSION


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_templates_are_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


def test_issue_templates_ask_for_the_doctor() -> None:
    for name in ("bug", "request"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8"))
        assert any(part.get("id") == "doctor" and part["validations"]["required"] for part in form["body"])


def test_the_tests_of_a_wheel_are_there() -> None:
    assert [name for name in release.TESTS if not (ROOT / name).exists()] == []


def test_every_folder_of_the_package_is_one() -> None:
    """find_packages leaves out a folder without __init__.py, and the checkout would not tell."""
    folders = {path.parent for path in (ROOT / "aoquant").rglob("*.py")}
    found = {ROOT.joinpath(*name.split(".")) for name in find_packages(str(ROOT), include=["aoquant", "aoquant.*"])}
    assert folders == found


def test_an_archive_has_one_date_and_no_owner(tmp_path: Path) -> None:
    made = []
    for at, owner in enumerate(("ada", "bob")):
        folder = tmp_path / owner
        folder.mkdir()
        (folder / "a.py").write_text("1\n", encoding="utf-8")
        with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
            entry = archive.gettarinfo(folder / "a.py", "pkg/a.py")
            entry.mtime, entry.uname, entry.uid = 1000 + at, owner, at
            with (folder / "a.py").open("rb") as content:
                archive.addfile(entry, content)
        made.append(release._repacked(folder / "a.tar.gz", 5).read_bytes())
    assert made[0] == made[1]
