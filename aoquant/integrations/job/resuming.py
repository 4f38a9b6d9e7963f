"""The folder of a run: which stages are done, so that the same command goes on where it stopped.

    OUT/stages/command.json       what was asked for: options, versions, device, and the sizes and times of input files
    OUT/stages/NAME.json          a stage that is done, or a number that was measured on validation pages
    OUT/stages/NAME/              a fine-tune that is not scored yet; removed when nothing needs it any more
    OUT/aoquant_run.json          the run is complete
    OUT/.lock                     held by rank 0 while it runs, then removed; a kill leaves it, and the system frees it

A run that is refused before its first stage leaves no file, and no folder that it made.

Stages of two different commands must not be mixed into one table, so a folder goes on with its own command alone, and
with one process of it at a time.
"""

import gc
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock, Timeout  # torch needs it too

import aoquant
from aoquant.files.atomic import absent, unlock
from aoquant.files.safetensors_file import read_json
from aoquant.integrations.job.options import Options
from aoquant.integrations.job.records import RESULTS, T, environment, read_as, write_json
from aoquant.integrations.job.result import Result, Stage
from aoquant.integrations.launched import Ranks

LOCK = ".lock"


class Folder:
    """The out folder of one command. `with` holds it: no other process runs in it meanwhile."""

    def __init__(self, o: Options, ranks: Ranks | None = None) -> None:
        self.out, self.stages, self.ranks = o.out, o.out / "stages", ranks or Ranks()
        self.command_file, self.command = self.stages / "command.json", _command(o)
        self.lock, self.made = FileLock(self.out / LOCK, timeout=0), list[Path]()
        self.cuda, self.began = torch.device(o.device).type == "cuda", time.monotonic()

    def __enter__(self) -> "Folder":
        """Look at the folder, make it if it is not there, and lock it. Of several ranks the first alone does so.

        Raises:
            ValueError: it holds something else, or a run of another command; it is in use; or it cannot be made.
        """
        try:
            self.ranks.share(self._take)
        except BaseException:
            unlock(self.lock, self.made)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        unlock(self.lock, self.made)

    def _take(self) -> None:
        out = self.out
        foreign = not self.command_file.is_file() and out.exists()
        if foreign and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir())):
            raise ValueError(f"{out} exists and is not an empty folder: remove it or choose another --out")
        self.made = absent(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
        except Timeout:
            raise ValueError(
                f"--out {out} is in use by another aoquant run: wait until it ends, or choose another --out"
            ) from None
        except OSError as error:
            raise ValueError(f"--out {out} cannot be made: {error}") from None
        if not self.command_file.is_file():
            return
        before = read_json(self.command_file)
        begun = any(path != self.command_file for path in self.stages.iterdir()) or (out / RESULTS).is_file()
        if begun and (other := _differences(before, self.command)):
            raise ValueError(
                f"{out} holds a run of another command ({'; '.join(other)}): give the same options to go on "
                "with it, another --out, or remove the folder"
            )

    def begin(self) -> None:
        """Write down what the stages belong to."""

        def write() -> None:
            self.stages.mkdir(exist_ok=True)
            write_json(self.command_file, self.command)

        self.ranks.share(write)

    def finished(self) -> Result | None:
        """Return the result, if the run is complete."""
        return self._read(self.out / RESULTS, Result.from_json)

    def _read(self, path: Path, take: Callable[[dict[str, Any]], T]) -> T | None:
        return self.ranks.share(lambda: read_as(path, take) if path.is_file() else None)

    def stage(self, name: str, compute: Callable[[], Stage]) -> Stage:
        """Return the stage called so: read if it is done, otherwise computed, by every rank, and written down."""
        path = self._file(name)
        if (found := self._read(path, Stage.from_json)) is not None:
            self._say(f"{name}: done before, word perplexity {found.perplexity.word_perplexity:.3f}")
            return found
        self._say(f"{name}: begins")
        computed = compute()
        seconds, peak = self.lap()
        computed = replace(computed, seconds=seconds, peak_bytes=peak)
        gc.collect()  # its sharded layers, and those of torchao's tensors, are in reference cycles: they would stay
        self.ranks.share(lambda: write_json(path, asdict(computed)))
        self._say(f"{name}: word perplexity {computed.perplexity.word_perplexity:.3f}")
        return computed

    def lap(self) -> tuple[float, int]:
        """Return the seconds and the peak of this rank's GPU memory, in bytes, since the last call."""
        before, self.began = self.began, time.monotonic()
        if not self.cuda:
            return self.began - before, 0
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self.began - before, peak

    def number(self, name: str, compute: Callable[[], float]) -> float:
        """Return the number called so: read if it is known, otherwise computed, by every rank, and written down."""
        path = self._file(name)
        if (found := self._read(path, lambda found: float(found["value"]))) is not None:
            return found
        value = compute()
        gc.collect()
        self.ranks.share(lambda: write_json(path, {"value": value}))
        return value

    def _say(self, line: str) -> None:
        if self.ranks.first:
            print(line, file=sys.stderr, flush=True)

    def has(self, name: str) -> bool:
        """Return whether the stage called so is done."""
        return self._file(name).is_file()

    def checkpoints(self, name: str) -> Path:
        """Return where the fine-tune called so keeps its checkpoints."""
        return self.stages / name.replace(",", "").replace(" ", "_")

    def _file(self, name: str) -> Path:
        return Path(f"{self.checkpoints(name)}.json")

    def forget(self, name: str) -> None:
        """Remove the checkpoints of a fine-tune that is scored."""
        self.ranks.share(lambda: shutil.rmtree(self.checkpoints(name), ignore_errors=True))


def _command(o: Options) -> dict[str, Any]:
    """Return what is equal for all stages of one table: all settings but the number of ranks and where results go."""
    options = {name: value for name, value in o.as_json().items() if name not in ("out", "export")}
    here = environment(o.device)
    here.pop("threads", None)  # the last bits of a sum, and not worth a fine-tune
    inputs = [*([Path(o.model)] if o.model else []), *o.train_text, *([Path(o.wikitext)] if o.wikitext else [])]
    inputs += [o.calibrate] if o.calibrate else []
    files = [f for p in inputs for f in (sorted(p.iterdir()) if p.is_dir() else [p]) if f.is_file()]
    stamps = {str(f): [f.stat().st_size, f.stat().st_mtime_ns] for f in files}
    return {**options, **here, "aoquant": aoquant.__version__, "input files": stamps}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [
        "input files have changed" if name == "input files" else f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in names
    ]
