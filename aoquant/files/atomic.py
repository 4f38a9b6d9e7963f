"""Write the files of a checkpoint so that a kill at any moment leaves the old checkpoint or the new one.

Everything is written into a staging folder first, checked and flushed to the disk. A folder that does not exist yet is
staged beside itself and appears by one rename. A folder that exists keeps its place (it may be a mount point, the
target of a symlink or somebody's working directory) and its other files, and is staged in itself. Its commit is the
rename of config.json: the new config names the staged weights in `transformers_weights`, which transformers and
`checkpoint.files` read before any other name. Then each file gets its place as a second hard link, and a config.json
without that entry ends the save. A save that was killed after its commit is finished by the next one.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout  # torch needs it too
from safetensors import SafetensorError

CONFIG = "config.json"
POINTER = "transformers_weights"  # transformers' entry of config.json for weights under another name
PARTIAL = ".aoquant-partial"  # the staging folder of a folder that exists
_LOCK = ".aoquant-lock"
LEFT = (PARTIAL, _LOCK)  # names that a killed process may leave in a folder
_OWN = ".publish"  # files in a staging folder that are no part of the checkpoint
_FRESH = "fresh"  # in _OWN: the folder was empty before
_INDEX = ".safetensors.index.json"
_WEIGHTS = re.compile(
    r"model(\.(?!safetensors)[^.]+?)?(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index(\.[^.]+)?\.json"
)


class Staged:
    """A folder that is written. Inside `with`, the files go to `path`, and `publish` gives them their place.

    out: the folder that appears, or whose checkpoint is replaced. fresh: refuse a folder that holds anything, and one
    that another process writes; otherwise wait for that process. resumable: keep the staged files after an interrupt.

    Raises:
        ValueError: the folder is in use, holds what cannot be replaced, or cannot be written. A checkpoint in it is as
            it was then.
    """

    def __init__(self, out: Path, *, fresh: bool = False, resumable: bool = False) -> None:
        self.out, self.fresh, self.resumable = out, fresh, resumable
        self.committed, self.made = False, list[Path]()

    def __enter__(self) -> Self:
        try:
            self._lock()
        except OSError as error:
            raise ValueError(f"{self.out}: cannot be written: {error}") from error
        try:
            if self.inside:
                self._check_content()
        except BaseException:
            self._unlock()
            raise
        return self

    def begin(self, size: int = 0) -> None:
        """Make an empty staging folder. size: bytes that will be written, compared with the space on the disk."""
        if self.path.exists():
            shutil.rmtree(self.path)
        if (free := shutil.disk_usage(self.path.parent).free) < size:
            raise ValueError(f"{self.out}: needs {size / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB left")
        self.path.mkdir()

    def publish(self) -> None:
        """Give the staged files their place, whole or not at all."""
        names = _names(self.path)
        if self.inside:
            self._check_replaceable(names)
        for folder, _, files in os.walk(self.path):
            for file in files:
                flush(Path(folder, file))
            flush(Path(folder))
        if not self.inside:
            self.path.rename(self.place)
            self.committed = True
            flush(self.place.parent)
            return
        if CONFIG in names and any(map(_WEIGHTS.fullmatch, names)):
            _point(self.place, names, fresh=self.fresh)
        self.committed = True
        _finish(self.place)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            kept = self.resumable and isinstance(error, KeyboardInterrupt)
            if error is not None and not self.committed and not kept:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            self._unlock()
        if isinstance(error, (OSError, SafetensorError)):
            raise ValueError(f"{self.out}: cannot be written: {error}") from error

    def _lock(self) -> None:
        """Hold the folder: beside it where it does not exist yet, in it where it does."""
        while True:
            self.place = Path(os.path.realpath(self.out))
            self.inside = self.place.exists()
            if self.inside and not self.place.is_dir():
                raise ValueError(f"{self.out} exists and is not an empty folder: remove it or choose another one")
            beside = [self.place.parent / f".{self.place.name}.{kind}" for kind in ("partial", "lock")]
            if self.inside:
                _remove_unheld(*beside)  # of a process that was killed before the folder appeared
                self.path, lock = self.place / PARTIAL, self.place / _LOCK
            else:
                self.made = absent(self.place.parent)
                self.place.parent.mkdir(parents=True, exist_ok=True)
                self.path, lock = beside
            self.lock = FileLock(lock, timeout=0 if self.fresh else -1)
            try:
                self.lock.acquire()
            except Timeout:
                raise ValueError(
                    f"{self.out} is in use, another process writes it: wait until it ends, or choose another folder"
                ) from None
            if self.place.exists() == self.inside:
                return
            self._unlock()  # it appeared while this process waited

    def _unlock(self) -> None:
        unlock(self.lock, self.made)

    def _check_content(self) -> None:
        """Finish a save that was killed after its commit, or take an interrupted export back."""
        if not self.fresh:
            if _is_pending(self.place):
                _finish(self.place)
            self._check_replaceable([CONFIG, "model.safetensors", f"model{_INDEX}"])
            return
        if _is_taken_back(self.place):  # config.json goes last: a kill here leaves a folder that is pending still
            for name in sorted(_names(self.path), key=lambda name: name == CONFIG):
                (self.place / name).unlink(missing_ok=True)
        check_free(self.out)

    def _check_replaceable(self, names: Iterable[str]) -> None:
        """Raise ValueError for names that no file can take by a rename: folders, and mount points."""
        mounted = _mount_points()
        for name in names:
            path = self.place / name
            if (path.is_dir() and not path.is_symlink()) or str(path) in mounted:
                what = "a mount point" if str(path) in mounted else "a folder"
                raise ValueError(
                    f"{path}: is {what}, and a file has to be written in its place: choose another folder, or "
                    "move it away; nothing was written"
                )


def unlock(lock: FileLock, made: Iterable[Path] = ()) -> None:
    """Release a lock and remove its file, if this process holds it; then remove those folders of `made` that are empty.

    made: folders that this process made, the innermost first.
    """
    if lock.is_locked:
        with suppress(OSError):
            os.unlink(lock.lock_file)  # before the release: nobody else may hold this file then
        lock.release()
    with suppress(OSError):  # another process has put something there
        for folder in made:
            folder.rmdir()


def absent(folder: Path) -> list[Path]:
    """Return a folder and its parents as far as they do not exist yet, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def check_writable(path: Path) -> None:
    """Raise ValueError where no file or folder can be made as `path`, before hours of work that end there."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise ValueError(f"{path}: cannot be written, because {there} is no folder: choose another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: cannot be written, because nothing can be made in {there}: choose another place")


def check_file(path: Path) -> None:
    """Raise ValueError where no file can be written as `path`, before the work that it will hold."""
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder: make it, or choose another place for {path.name}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file")
    check_writable(path.parent)


def check_free(out: Path) -> None:
    """Raise ValueError for a folder that cannot be written, or holds anything but what an interrupted write left."""
    if not out.exists():
        check_writable(out)
    if out.exists() and (
        not out.is_dir() or (not _is_taken_back(out) and any(p.name not in LEFT for p in out.iterdir()))
    ):
        raise ValueError(f"{out} exists and is not an empty folder: remove it or choose another one")


def is_main(model: object, is_main_process: bool) -> bool:
    """Return whether transformers' `save_pretrained` writes files on this rank."""
    asked = getattr(model, "should_save_on_this_rank", None)
    return bool(asked(is_main_process)) if asked is not None else is_main_process


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole, as it was or as it is now."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    give_place(partial, path)


def give_place(partial: Path, path: Path) -> None:
    """Rename a file to the one that it becomes, in the same folder, once its contents are on the disk."""
    flush(partial)
    os.replace(partial, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's (or folder's) contents are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unheld(partial: Path, lock: Path) -> None:
    """Remove what a killed process left beside a folder, unless its lock is held."""
    if lock.exists():
        with suppress(OSError, Timeout), FileLock(lock, timeout=0):
            shutil.rmtree(partial, ignore_errors=True)
            lock.unlink()


def _names(staged: Path) -> list[str]:
    """Return the files of a staged checkpoint, relative to its folder."""
    return sorted(
        str(path.relative_to(staged))
        for path in staged.rglob("*")
        if path.is_file() and path.relative_to(staged).parts[0] != _OWN
    )


def _is_pending(place: Path) -> bool:
    """Return whether config.json names staged weights: a save was committed and is not finished."""
    try:
        pointer = json.loads((place / CONFIG).read_text(encoding="utf-8")).get(POINTER)
    except (OSError, ValueError, AttributeError):
        return False
    return isinstance(pointer, str) and pointer.startswith(f"{PARTIAL}/")


def _is_taken_back(place: Path) -> bool:
    """Return whether a folder holds nothing but what an interrupted write of a new folder put there."""
    return _is_pending(place) and (place / PARTIAL / _OWN / _FRESH).exists()


def _point(place: Path, names: list[str], *, fresh: bool) -> None:
    """Commit: rename a config.json that names the staged weights."""
    staged, own = place / PARTIAL, place / PARTIAL / _OWN
    own.mkdir(exist_ok=True)
    if fresh:
        (own / _FRESH).touch()
    weights = [name for name in names if _WEIGHTS.fullmatch(name)]
    index = next((name for name in weights if name.endswith(".json")), None)
    pointer = f"{PARTIAL}/{weights[0]}"
    if index is not None:
        content = json.loads((staged / index).read_text(encoding="utf-8"))
        content["weight_map"] = {name: f"{PARTIAL}/{file}" for name, file in content["weight_map"].items()}
        pointer = f"{PARTIAL}/{_OWN}/model{_INDEX}"
        replace_text(place / pointer, json.dumps(content))
    config = json.loads((staged / CONFIG).read_text(encoding="utf-8"))
    moving = own / CONFIG
    moving.write_text(json.dumps({**config, POINTER: pointer}, indent=2) + "\n", encoding="utf-8")
    flush(moving)
    flush(own)
    os.replace(moving, place / CONFIG)
    flush(place)


def _finish(place: Path) -> None:
    """Give every staged file its place, config.json last, and remove the staging folder. May be repeated."""
    staged = place / PARTIAL
    names = _names(staged)
    (staged / _OWN).mkdir(exist_ok=True)
    kinds = {match.groups() for name in names if (match := _WEIGHTS.fullmatch(name))}
    variants = {weights or index for weights, index in kinds}
    for path in list(place.iterdir()):
        match = _WEIGHTS.fullmatch(path.name)
        if match and (match[1] or match[2]) in variants and path.name not in names:
            path.unlink()
    for name in sorted(names, key=lambda name: (name == CONFIG, bool(_WEIGHTS.fullmatch(name)), name)):
        if name == CONFIG:
            flush(place)
        _give(staged / name, place / name, staged / _OWN / "moving")
    flush(place)
    shutil.rmtree(staged)


def _give(source: Path, target: Path, moving: Path) -> None:
    """Give a file its second name, by a rename over what is there. moving: a name for the moment before."""
    moving.unlink(missing_ok=True)
    try:
        os.link(source, moving)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, moving)
        flush(moving)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(moving, target)


def _mount_points() -> set[str]:
    """Return the mount points, files included; none where the system does not list them."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {line.split()[4].replace("\\040", " ") for line in lines}
