"""`torchrun -m aoquant run`: one job on two ranks, its checkpoints, and another number of ranks after a stop."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.gpu import LateResult
from support.light_runs import lightly
from support.models import tiny_llama
from support.two_ranks import on_two_ranks
from torch.multiprocessing import SimpleQueue
from transformers import AutoTokenizer, LlamaForCausalLM

from aoquant import cli
from aoquant.files.safetensors_file import header
from aoquant.integrations import finetune as finetune_module
from aoquant.integrations import job
from aoquant.integrations.finetune import finetune
from aoquant.integrations.finetune_checkpoints import NEWEST, Checkpoints
from aoquant.integrations.job.options import Options
from aoquant.integrations.job.resuming import Folder
from aoquant.integrations.launched import Ranks, joined
from aoquant.integrations.lm_eval import evaluate

ROOT = Path(__file__).parents[2]
BLOCKS = torch.arange(12 * 16).view(12, 16) % 31
STEPS = 4
llama = partial(tiny_llama, num_hidden_layers=2)


def tune(model: Any, checkpoints: Path | None, loss: str = "kl", *, shared: bool = True) -> list[float]:
    teacher = llama(None) if loss == "kl" else None
    return finetune(
        model, BLOCKS, steps=STEPS, batch_size=4, learning_rate=1e-2, loss=loss, teacher=teacher, seed=3, label="tune",
        checkpoints=checkpoints, shared=shared,
    )  # fmt: skip


def launched(rank: int, size: int, port: int) -> None:
    """The variables that torchrun sets."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)


def folder() -> Path:
    return Path(os.environ["AOQUANT_TEST_FOLDER"])


def options(out: str) -> job.Options:
    text = {"train_text": [folder() / "text.txt"], "wikitext": str(folder()), "model": str(folder() / "model")}
    budget: Any = {"steps": 2, "batch_size": 2, "block": 16, "learning_rate": 1e-2, "freeze": ["model.layers.0"]}
    return job.Options(recipe="int8-weight", device="cpu", out=folder() / out, **text, **budget)


def worker(rank: int, port: int, queue: SimpleQueue[Any]) -> None:
    launched(rank, 2, port)
    with joined("cpu") as ranks:
        fine_tunes = [stop_and_go_on(ranks, late) for late in (False, True)]
        with redirect_stderr(io.StringIO()) as said:
            shared = evaluate(*scored(), wikitext=folder(), shared=True)
        alone = evaluate(*scored(), wikitext=folder(), progress=False)
    os.environ["MASTER_PORT"] = str(port + 1)
    with lightly():
        result = job.run(options("out"))
    perplexities = [stage.perplexity.word_perplexity for stage in result.stages]
    equal = shared.loglikelihoods == alone.loglikelihoods
    windows = [line for line in said.getvalue().splitlines() if " windows, " in line]
    queue.put((rank, fine_tunes, equal, perplexities, result.min_sqnr_db, windows))


def scored() -> tuple[Any, Any]:
    return LlamaForCausalLM.from_pretrained(folder() / "model"), AutoTokenizer.from_pretrained(folder() / "model")


def stop_and_go_on(ranks: Ranks, late: bool) -> tuple[list[float], list[float], int, bool]:
    """Losses of a run, of one that is stopped in its second step and goes on, and whether weights are equal.

    late: results are read as on a GPU, so that all ranks know of the stop one step later.
    """
    kept = folder() / ("kept, late" if late else "kept")
    to_host = LateResult.to_host if late else finetune_module._to_host
    straight, stopped, calls = llama("quartet"), llama("quartet"), 0  # its backward draws random numbers
    losses, wishes = tune(straight, None), Checkpoints.wishes

    def interrupted(keeper: Checkpoints) -> tuple[bool, bool]:
        nonlocal calls
        calls += 1
        if calls == 2 and ranks.first:
            signal.raise_signal(signal.SIGINT)  # of one rank alone: all stop
        return wishes(keeper)

    with (
        mock.patch.object(Checkpoints, "wishes", interrupted),
        mock.patch.object(finetune_module, "_to_host", to_host),
        pytest.raises(KeyboardInterrupt),
    ):
        tune(stopped, kept)
    step = int(header(kept / NEWEST).metadata["step"])
    if ranks.first and not late:
        for goes_on in ("one rank", "one process"):
            shutil.copytree(kept, folder() / goes_on)
    again, done = tune(stopped, kept), llama("quartet")
    assert tune(done, kept) == again  # read from the file of its last step
    same = all(
        torch.equal(value, model.state_dict()[name])
        for name, value in straight.state_dict().items()
        for model in (stopped, done)
    )
    return losses, again, step, same


def inputs(path: Path) -> None:
    """A model and text in `path`."""
    llama(None, 8192).save_pretrained(path / "model")
    AutoTokenizer.from_pretrained(ROOT / "eval" / "assets").save_pretrained(path / "model")
    words = [20, 99, 20, 99, 20]  # with two ranks the second has more
    pages = [" ".join(f"word {i * j % 7}" for i in range(count)) for j, count in enumerate(words)]
    (path / "text.txt").write_text("\n<|endoftext|>\n".join(pages))
    (path / "test.jsonl").write_text("\n".join(json.dumps({"page": page}) for page in pages))


def test_two_ranks_make_one_job_and_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOQUANT_TEST_FOLDER", str(tmp_path))
    inputs(tmp_path)
    first, second = sorted(on_two_ranks(worker))
    assert first[1:-1] == second[1:-1]
    _, (at_once, late), scores_are_equal, perplexities, sqnr, progress = first
    assert " windows, 100 %" in progress[-1] and second[-1] == []
    losses, again, step, same = at_once
    assert again == losses and same and step == 2
    assert late == (losses, losses, 3, True)
    assert scores_are_equal  # of each document, shared out or not
    assert perplexities[2] == perplexities[3] != perplexities[0] and sqnr == float("inf")
    record = json.loads((tmp_path / "out" / job.RESULTS).read_text())
    assert record["ranks"] == 2 and record["reload"] == "logits bit-equal"
    assert (tmp_path / "out" / "report.md").is_file() and not list((tmp_path / "out").rglob(NEWEST))

    # one goes on with the checkpoint of two, by torchrun and without
    with one_rank(monkeypatch):
        alone = tune(llama("quartet"), tmp_path / "one rank")
    assert alone[:step] == losses[:step]
    assert alone[step:] == pytest.approx(losses[step:], rel=0.1) and alone[step:] != alone[:step]
    assert tune(llama("quartet"), tmp_path / "one process", shared=False) == alone


def refused(rank: int, port: int, queue: SimpleQueue[Any]) -> None:
    launched(rank, 2, port)
    arguments = ["--model", "model", "--train-text", "text.txt", "--wikitext", ".", "--batch-size", "2"]
    arguments += ["--recipe", "int8-weight", "--device", "cpu", "--out", "out"]
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as stopped:
        cli.main(["run", *arguments])
    queue.put((rank, stopped.value.code, said.getvalue()))


def test_ranks_learn_that_a_folder_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Folder(Options(out=Path("out"))):
        said = "aoquant: --out out is in use by another aoquant run: wait until it ends, or choose another --out\n"
        assert sorted(on_two_ranks(refused)) == [(0, 2, said), (1, 2, "")]


def one_rank(monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Ranks]:
    """A process group of this process alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    return joined("cpu")


@pytest.mark.parametrize("loss", ["kl", pytest.param("ce", marks=pytest.mark.slow)])
def test_one_process_trains_as_torchrun_with_one_rank(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ranked = llama("quartet"), llama("quartet")
    losses = tune(plain, None, loss, shared=False)
    with one_rank(monkeypatch):
        assert tune(ranked, None, loss) == losses
    assert all(torch.equal(value, ranked.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.slow
def test_accelerate_launches_the_same_job(tmp_path: Path) -> None:
    inputs(tmp_path)
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "--module"]
    arguments = ["--model", tmp_path / "model", "--recipe", "int8-weight", "--train-text", tmp_path / "text.txt"]
    arguments += ["--wikitext", tmp_path, "--out", tmp_path / "out", "--device", "cpu", "--steps", 2]
    arguments += ["--batch-size", 2, "--block", 16]
    command = [sys.executable, "-m", *launcher, "aoquant", "run", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "out" / job.RESULTS).read_text())
    assert record["ranks"] == 2 and record["reload"] == "logits bit-equal"


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # alone it launches nothing
    with joined("cpu") as ranks:
        assert ranks == Ranks() and not torch.distributed.is_initialized()
    assert ranks.share(lambda: 5) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": 1}, r"2 ranks need as many documents to share.* limit=1"),
        ({"batch_size": 3}, r"batch_size must be a multiple of the 2 ranks, got 3"),
    ],
    ids=["documents", "batch"],
)
def test_what_ranks_cannot_share_is_refused_before_a_model_is_loaded(
    given: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs(tmp_path)
    monkeypatch.setattr(job, "joined", lambda device: nullcontext(Ranks(size=2)))
    monkeypatch.setattr(job, "load_float", lambda *_: pytest.fail("a model was loaded"))
    text: Any = {"train_text": [tmp_path / "text.txt"], "wikitext": str(tmp_path)}
    o = Options(model=str(tmp_path / "model"), **text, **given, out=tmp_path / "out", device="cpu")
    with pytest.raises(ValueError, match=message):
        job.run(o)
