"""Make a release: build it twice, check it, install it into empty environments, and try it there.

    make release                                    # everything; dist/ holds what `twine upload dist/*` takes
    python -m tools.release build                   # source distribution and wheels alone
    python -m tools.release try --python python3.12 --constraints constraints-oldest.txt

check    The version of aoquant/__init__.py has a dated section in CHANGELOG.md and CITATION.cff names it; HEAD has the
         tag vVERSION and nothing is uncommitted.
build    A source distribution, and from it two wheels: pure Python, and Linux x86-64 with the CPU kernels, which serve
         every Python and every torch from 2.11 on (they use LibTorch's stable ABI). Both are made twice under the
         commit's date, and must have the same bytes. `auditwheel` finds the oldest glibc; torch's libraries stay
         outside. `twine check --strict` reads the descriptions.
try      The wheel in an empty environment, outside of the checkout: import and `aoquant doctor` without extras; with
         them the doctor, the demo, and the tests of formats, layers and files. Gigabytes of torch for each environment.

CUDA kernels are no part of a wheel: `pip install --no-build-isolation aoquant` builds them from the source
distribution, where nvcc and a CUDA torch are.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
OUTSIDE = ("libtorch.so", "libtorch_cpu.so", "libc10.so")  # torch brings them
TRIED = (("python3.11", "constraints-oldest.txt"), ("python3.12", None), ("python3.13", None))
TESTS = ("test/formats", "test/model/test_state_dict.py", "test/integrations/test_hf.py")


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Return what a command prints, and show it.

    Raises:
        SystemExit: it failed.
    """
    print("+", *command, flush=True)
    found = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(found.stdout, flush=True)
    if found.returncode:
        raise SystemExit(f"{command[0]} failed with {found.returncode}")
    return found.stdout


def version(root: Path = ROOT) -> str:
    """Return the version, without importing the package."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "aoquant/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def disagreements(root: Path, tags: Sequence[str], changed: str) -> list[str]:
    """Return what speaks against a release of `root`. tags: those of HEAD. changed: what is not committed."""
    named, found = version(root), []
    if not re.search(
        rf"^## \[{re.escape(named)}\] - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    ):
        found.append(f"CHANGELOG.md has no section '## [{named}] - DATE': rename Unreleased")
    if f"\nversion: {named}\n" not in (root / "CITATION.cff").read_text("utf-8"):
        found.append(f"CITATION.cff does not say 'version: {named}'")
    if f"v{named}" not in tags:
        found.append(f"HEAD has no tag v{named}: git tag -a v{named} -m 'aoquant {named}'")
    if changed.strip():
        found.append(f"not committed: {changed.strip()}")
    return found


def check() -> None:
    """Raise SystemExit unless version, changelog, citation and tag agree."""
    tags = run("git", "tag", "--points-at", "HEAD").split()
    if found := disagreements(ROOT, tags, run("git", "status", "--porcelain")):
        raise SystemExit("no release: " + "; ".join(found))


def missing(wheel: Path, tracked: Sequence[str]) -> list[str]:
    """Return the files of the package that a wheel lacks. tracked: paths in the repository."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = [name.replace("eval/assets/", "aoquant/assets/") for name in tracked]
    return [name for name in wanted if name.startswith("aoquant/") and name not in held]


def build(out: Path) -> list[Path]:
    """Return the files of a release, made in the empty folder `out` from what is committed.

    Raises:
        SystemExit: a build failed, or a wheel lacks a file of the package.
    """
    date = run("git", "log", "-1", "--format=%ct").strip()
    env = os.environ | {"SOURCE_DATE_EPOCH": date, "AOQUANT_BUILD_CSRC": "0", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as scratch:
        archive, source = Path(scratch, "source.tar"), Path(scratch, "source")
        run("git", "archive", "--output", archive, "HEAD")
        shutil.unpack_archive(archive, source)
        # torch is here already: isolated builds would fetch it anew
        run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", scratch, source, env=env)
        (sdist,) = Path(scratch).glob("*.tar.gz")
        plain = shutil.copy(_repacked(sdist, int(date)), out)
        unpacked = Path(scratch, "unpacked")
        shutil.unpack_archive(plain, unpacked)
        (tree,) = unpacked.iterdir()
        wheel = (sys.executable, "-m", "build", "--no-isolation", "--wheel")
        run(*wheel, "--outdir", out, tree, env=env)
        native = Path(scratch, "native")
        run(*wheel, "--outdir", native, tree, env={k: v for k, v in env.items() if k != "AOQUANT_BUILD_CSRC"})
        (linux,) = native.glob("*linux*.whl")
        outside = [word for name in OUTSIDE for word in ("--exclude", name)]
        run(sys.executable, "-m", "auditwheel", "repair", *outside, "--wheel-dir", out, linux, env=env)
    tracked = run("git", "ls-files").splitlines()
    for made in out.glob("*.whl"):
        if lost := missing(made, tracked):
            raise SystemExit(f"{made.name} lacks {lost}")
    return sorted(out.iterdir())


def _repacked(sdist: Path, date: int) -> Path:
    """Return a copy of the archive with one date and no owner: setuptools writes those of the day and the user."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = date, 0, 0, "", ""
        entry.pax_headers = {}
        return entry

    made = sdist.parent / "plain" / sdist.name
    made.parent.mkdir()
    with (
        tarfile.open(sdist) as old,
        gzip.GzipFile(filename="", fileobj=made.open("wb"), mode="wb", mtime=date) as packed,
        tarfile.open(fileobj=packed, mode="w") as new,
    ):
        for entry in sorted(old, key=lambda entry: entry.name):
            new.addfile(plain(entry), old.extractfile(entry) if entry.isfile() else None)
    return made


def hashes(files: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def build_twice() -> None:
    """Build into dist/, and once more elsewhere.

    Raises:
        SystemExit: the bytes differ, or PyPI would refuse a file.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    made = build(DIST)
    with tempfile.TemporaryDirectory() as again:
        if (first := hashes(made)) != (second := hashes(build(Path(again)))):
            raise SystemExit(f"the build is not reproducible: {first} and {second}")
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    for name, found in first.items():
        print(found, name)


def try_out(python: str, constraints: str | None) -> None:
    """Install the wheel of dist/ into an empty environment of `python`, and use it there.

    constraints: a file of versions; without it pip takes the newest.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        run(python, "-m", "venv", home / "venv")
        bin = home / "venv/bin"
        pins = ("-c", ROOT / constraints) if constraints else ()
        pip = (bin / "pip", "install", "--quiet", "--find-links", DIST, "--only-binary", "aoquant", *pins)
        run(*pip, f"aoquant=={version()}", env=env)
        asked = "import aoquant, torch; print(aoquant.__version__, aoquant.__file__, torch.__version__)"
        where = run(bin / "python", "-c", asked, cwd=home, env=env)
        if version() not in where or str(home) not in where:
            raise SystemExit(f"another aoquant was imported: {where}")
        run(bin / "aoquant", "doctor", cwd=home, env=env)
        run(*pip, f"aoquant[all,test]=={version()}", env=env)
        for folder in {name.split("/")[1] for name in TESTS} | {"support", "golden"}:
            shutil.copytree(ROOT / "test" / folder, home / "test" / folder)
        for name in ("test/conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, home / name)
        run(bin / "aoquant", "doctor", cwd=home, env=env)
        run(bin / "aoquant", "run", "--out", home / "run", cwd=home, env=env)
        marks = "not gpu and not slow and not nightly"
        run(bin / "python", "-m", "pytest", "-q", "-n", "2", "-m", marks, *TESTS, cwd=home, env=env)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the steps that the command line names; all without one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=("check", "build", "try", "all"), default="all")
    parser.add_argument("--python", help="try: one Python, in place of 3.11, 3.12 and 3.13")
    parser.add_argument("--constraints", help="try: a file of versions for that Python")
    given = parser.parse_args(arguments)
    if given.step in ("check", "all"):
        check()
    if given.step in ("build", "all"):
        build_twice()
    if given.step in ("try", "all"):
        for python, constraints in ((given.python, given.constraints),) if given.python else TRIED:
            try_out(python, constraints)


if __name__ == "__main__":
    main()
