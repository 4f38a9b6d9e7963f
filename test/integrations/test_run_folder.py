"""The folder of a run: held by one process at a time, freed with it, and left as it was by a refusal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support import forked

from aoquant.integrations import job
from aoquant.integrations.job.resuming import Folder


def held(out: Path, begun: Any) -> None:
    with Folder(job.Options(out=out)):
        begun.put(True)
        time.sleep(600)


def test_a_killed_process_frees_its_folder(tmp_path: Path) -> None:
    begun = forked.context.SimpleQueue()
    process = forked.process(held, tmp_path / "out", begun)
    assert begun.get()
    with pytest.raises(ValueError, match="is in use"), Folder(job.Options(out=tmp_path / "out")):
        pass
    process.kill()
    process.join()
    with Folder(job.Options(out=tmp_path / "out")) as folder:
        assert folder.lock.is_locked
    assert not folder.lock.is_locked


def test_a_refusal_keeps_a_run_that_can_go_on_and_the_lock_of_another_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Folder(job.Options(out=out)) as folder:
        folder.begin()
        (folder.stages / "float.json").write_text("{}")
    kept = {*out.rglob("*")}
    assert {path.name for path in kept} == {"stages", "command.json", "float.json"}
    with pytest.raises(ValueError, match="another command"), Folder(job.Options(out=out, steps=7)):
        pass
    assert {*out.rglob("*")} == kept
    with Folder(job.Options(out=tmp_path / "new")) as folder:
        with pytest.raises(ValueError, match="is in use"), Folder(job.Options(out=tmp_path / "new")):
            pass
        assert Path(folder.lock.lock_file).exists() and folder.lock.is_locked
    assert not (tmp_path / "new").exists()
