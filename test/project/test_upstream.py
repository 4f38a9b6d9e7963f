"""What upstream/ says of other projects still holds under the versions that are installed."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2] / "upstream"
FOLDERS = sorted(path for path in ROOT.iterdir() if path.is_dir())
NEEDS_MSLK, NEEDS_NO_GPU, COMPILES = "08", "19", "03"


NEEDS = {
    "modelopt": "modelopt",
    "vllm": "vllm",
}  # packages that are not in constraints.txt, by the folder's second word


def marked(folder: Path) -> object:
    number = folder.name[:2]
    package = NEEDS.get(folder.name.split("-")[1])
    if package and find_spec(package) is None:
        return pytest.param(folder, marks=pytest.mark.skip(reason=f"needs {package}"), id=folder.name)
    marks = {
        NEEDS_MSLK: [pytest.mark.gpu, pytest.mark.skipif(find_spec("mslk") is None, reason="needs mslk")],
        NEEDS_NO_GPU: [
            pytest.mark.skipif(
                torch.version.cuda is None or torch.cuda.is_available(),
                reason="needs a CUDA build of torch, and no GPU",
            )
        ],
        COMPILES: [pytest.mark.slow],
    }.get(number, [])
    return pytest.param(folder, marks=marks, id=folder.name)


@pytest.mark.parametrize("folder", [marked(folder) for folder in FOLDERS])
def test_the_finding_holds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["reproduce.py"])
    try:
        runpy.run_path(str(folder / "reproduce.py"), run_name="__main__")
    except AssertionError as error:
        raise AssertionError(f"upstream/{folder.name}: mended, or another finding now: read its README") from error
    assert not list(tmp_path.iterdir())


def test_every_folder_is_ready_to_be_filed() -> None:
    index = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in FOLDERS:
        assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["README.md", "reproduce.py"]
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert text.startswith("# ") and "\n\nVersions: " in text and f"({folder.name}/README.md)" in index
        assert "aoquant" not in (folder / "reproduce.py").read_text(encoding="utf-8").replace("# aoquant's", "")
