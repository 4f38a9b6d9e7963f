"""`aoquant run` goes on where it stopped: stages, fine-tunes bit for bit, and a clear line for all in between."""

from __future__ import annotations

import gc
import json
import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from support.gpu import LateResult, no_waiting
from support.light_runs import light_runs
from transformers import LlamaConfig, LlamaForCausalLM

from aoquant import Int4WeightConfig, QATConfig, cli, quantize_
from aoquant.files.safetensors_file import header
from aoquant.integrations import finetune as tuning
from aoquant.integrations import finetune_checkpoints, job
from aoquant.integrations.finetune import finetune, master_adamw
from aoquant.integrations.finetune_checkpoints import NEWEST, Checkpoints
from aoquant.integrations.job import models, resuming
from aoquant.integrations.job.options import Options
from aoquant.integrations.lm_eval import Perplexity
from aoquant.integrations.text import ONE_TEXT, Documents
from aoquant.linear.tensor import PackedTensor

STEPS = 4
BLOCKS = torch.arange(12 * 16).view(12, 16) % 31
light = pytest.fixture(autouse=True)(light_runs)


def llama(recipe: str | None, seed: int = 0, **size: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, **size}
    model = LlamaForCausalLM._from_config(
        LlamaConfig(vocab_size=32, max_position_embeddings=32, tie_word_embeddings=True, **sizes), dtype=torch.bfloat16
    )
    if recipe:
        quantize_(model, QATConfig(recipe))
    return model


def tune(model: Any, checkpoints: Path | None, steps: int = STEPS) -> list[float]:
    return finetune(
        model, BLOCKS, steps=steps, batch_size=2, learning_rate=1e-2, loss="ce", teacher=None, seed=3, label="tune",
        checkpoints=checkpoints,
    )  # fmt: skip


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the results of steps come late."""
    monkeypatch.setattr(tuning, "_to_host", LateResult.to_host)
    monkeypatch.setattr(LateResult, "waited_behind_another", 0)


def test_a_gpus_results_are_read_when_the_next_step_was_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    arguments: Any = {"steps": STEPS, "batch_size": 2, "learning_rate": 1e-2, "loss": "ce", "teacher": None, "seed": 3}
    wanted = finetune(llama(None), BLOCKS, label="tune", **arguments)
    as_on_a_gpu(monkeypatch)
    assert finetune(llama(None), BLOCKS, label="tune", times=times, **arguments) == wanted
    assert LateResult.waited_behind_another == STEPS - 1 and len(times) == STEPS


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("recipe", "fused"), [(None, False), ("nvfp4", False), ("nvfp4", True), ("quartet", False)])
def test_a_fine_tune_that_is_interrupted_ends_where_one_that_was_not_does(
    recipe: str | None, fused: bool, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, losses and, for a backward that draws, the random state; the float32 masters are part of it.

    fused: AdamW's kernel, which a GPU gets, and which counts steps on the device. late: results are read as on a GPU.
    """
    if late:
        as_on_a_gpu(monkeypatch)
    if fused:
        monkeypatch.setattr(tuning, "master_adamw", lambda model, rate, **_: master_adamw(model, rate, fused=True))
    whole = llama(recipe)
    losses = tune(whole, None)
    calls = 0
    step = tuning.block_loss

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return step(*args, **kwargs)

    monkeypatch.setattr(tuning, "block_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(llama(recipe), tmp_path)
    assert calls == 2  # the step was finished, and no other begun
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = llama(recipe, seed=9)
    assert tune(resumed, tmp_path) == losses
    assert calls == STEPS
    again = llama(recipe, seed=10)
    assert tune(again, tmp_path) == losses
    assert calls == STEPS  # nothing was trained a second time
    kept = header(tmp_path / NEWEST).tensors
    assert {t.dtype for name, t in kept.items() if name.startswith("weight.")} == {torch.bfloat16}
    assert not any(name.startswith(("master.", "exp_avg")) for name in kept)  # which no step needs any more
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("device", range(2))
def test_losses_that_a_gpu_tells_late_are_those_that_it_tells_at_once(
    device: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint after each step, and without; on another GPU than the current one, too."""
    if device >= torch.cuda.device_count():
        pytest.skip("one GPU")
    monkeypatch.setattr(finetune_checkpoints, "CHECKPOINT_SECONDS", 0.0)
    late = [tune(llama("nvfp4").to(f"cuda:{device}"), folder) for folder in (None, tmp_path)]
    monkeypatch.setattr(tuning, "_to_host", lambda t: (t.cpu(), None))
    wanted = tune(llama("nvfp4").to(f"cuda:{device}"), None)
    assert late == [wanted, wanted]


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_step_of_the_loop_waits_for_no_gpu(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first steps, which compile and record."""
    model, teacher, steps = llama("nvfp4").cuda(), llama(None, seed=1).cuda(), 6
    step, calls = tuning.block_loss, []
    refusing = ExitStack()

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            refusing.enter_context(no_waiting())
        if len(calls) == 6:
            refusing.close()
        return step(*args, **kwargs)

    monkeypatch.setattr(tuning, "block_loss", watched)
    with refusing:
        finetune(
            model, BLOCKS, steps=steps, batch_size=2, learning_rate=1e-2, loss=loss, teacher=teacher, seed=3, label=""
        )
    assert len(calls) == steps


@pytest.mark.parametrize(("recipe", "loss"), [(None, "ce"), ("int8-weight", "kl")])
def test_micro_batches_are_one_step(recipe: str | None, loss: str) -> None:
    """Blocks differ in how many of their tokens are scored: a mean of means would differ by a third."""
    blocks = BLOCKS.clone()
    blocks[::2, 4:] = 1  # begins documents, and is never a target
    layout, found = Documents(unscored=1), []
    for micro_batch in (None, 1):
        model, teacher = llama(recipe).float(), llama(None, seed=1).float()
        options: Any = {"teacher": teacher, "loss": loss, "documents": layout, "micro_batch": micro_batch}
        losses = finetune(
            model, blocks, steps=2, batch_size=4, learning_rate=1e-2, seed=3, label="tune", **options
        )  # fmt: skip
        found.append((losses, model.model.layers[0].mlp.up_proj.weight.detach()))
    for losses, weight in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-4)
        torch.testing.assert_close(weight, found[0][1], rtol=1e-3, atol=2e-4)


def test_gradients_of_micro_batches_are_weighted_by_tokens_and_rounded_once() -> None:
    blocks = BLOCKS.clone()
    blocks[::2, 4:] = 1
    layout, rows = Documents(unscored=1), torch.arange(12)
    weight = 1 / tuning.scored_tokens(blocks, "ce", layout)
    grads = []
    for dtype, parts in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 12)):
        model = llama("int8-weight").to(dtype)
        of = partial(tuning.block_loss, model, None, blocks, loss="ce", weight=weight, documents=layout)
        assert not tuning.accumulate(model, rows.chunk(parts), of).requires_grad  # a graph would keep each part's model
        grads.append(model.model.layers[0].mlp.up_proj.weight.grad.double())
    one, many = ((g - grads[0]).norm() / grads[0].norm() for g in grads[1:])
    assert many < 2 * one


def test_a_second_interrupt_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(tuning, "block_loss", twice)
    with pytest.raises(KeyboardInterrupt):
        tune(llama(None), tmp_path)
    assert not (tmp_path / NEWEST).exists()


@pytest.mark.parametrize("late", [False, True])
def test_checkpoints_are_kept_as_time_passes(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(finetune_checkpoints, "CHECKPOINT_SECONDS", 0.0)
    saved: list[int] = []
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step: (saved.append(step), save(self, step)))
    tune(llama(None), tmp_path)
    assert saved == [1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == [NEWEST]


def test_parameters_without_a_gradient_are_kept_too(tmp_path: Path) -> None:
    def with_unused() -> LlamaForCausalLM:
        model = llama(None)
        model.model.norm.weight.requires_grad_(False)
        model.model.unused = torch.nn.Parameter(torch.ones(3))
        return model

    losses = tune(with_unused(), tmp_path)
    assert tune(with_unused(), tmp_path) == losses


def test_a_lap_is_the_time_and_memory_since_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, resets = job.Folder(job.Options(device="cpu", out=tmp_path / "run")), list[int]()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(7))
    folder.began -= 100
    assert 100 <= folder.lap()[0] < 150 and folder.lap()[0] < 50 and folder.lap()[1] == 0 and resets == []
    folder.cuda = True
    assert folder.lap()[1] == 7 and resets == [7]


def test_a_number_is_found_once(tmp_path: Path) -> None:
    for number in (0.0, 1.0):  # by this process, and by one after it
        with job.Folder(job.Options(device="cpu", out=tmp_path / "run")) as folder:
            folder.begin()
            assert [folder.number(name, lambda: number) for name in ("once", str(number))] == [0.0, number]  # noqa: B023


def test_the_order_visits_every_block_before_any_twice() -> None:
    order = tuning.order_of_blocks(7, steps=5, batch=2, seed=1).flatten().tolist()
    assert sorted(order[:7]) == list(range(7)) and len(set(order[7:])) == 3


# ---- the whole job, with a small model and an evaluation that costs nothing


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces lm-eval; what was scored, in order."""
    seen: list[str] = []

    def evaluate(model: Any, *_: Any, **__: Any) -> Perplexity:
        with torch.no_grad():
            nats = -float(model(BLOCKS[:2]).logits.float().logsumexp(-1).sum())
        seen.append(f"{nats:.6f}")
        rest: Any = dict.fromkeys(("window", "documents", "limit", "batch_size"), 1)
        texts: Any = dict.fromkeys(("source", "task", "task_version"), "fake")
        return Perplexity(2.0, 2.0, 1.0, **rest, **texts, loglikelihoods=(nats, nats - 1), words=(10, 11))

    monkeypatch.setattr(job, "evaluate", evaluate)
    return seen


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a small run; its model has one layer with K = 48."""
    folder = tmp_path / "model"
    llama(None, intermediate_size=48).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")

    class Tokenizer:
        bos_token_id, eos_token_id, vocab_size, vocab_files_names = 0, 0, 31, dict[str, str]()

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(c) % 31 for c in t] for t in texts]}

        def save_pretrained(self, folder: Path) -> None: ...

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", lambda *a, **k: Tokenizer())
    (tmp_path / "text.txt").write_text("all that glitters is not gold " * 30)
    (tmp_path / "test.jsonl").write_text('{"page": "all that glitters"}')
    monkeypatch.chdir(tmp_path)
    texts = {"train-text": "text.txt", "wikitext": "."}
    options = {"model": folder, **texts, "steps": 2, "batch-size": 2, "block": 16, "device": "cpu"}
    return [str(a) for name, value in options.items() for a in (f"--{name}", value)]


@pytest.fixture
def run(small: list[str], scored: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `aoquant run` on the small model; return its exit code and the last error, which may have several lines."""

    def command(*more: str, given: list[str] = small) -> tuple[int, str]:
        capsys.readouterr()
        code = 0
        try:
            cli.main(["run", *given, *more])
        except SystemExit as exit:
            code = int(exit.code or 0)
        err = capsys.readouterr().err
        return code, err[err.rfind("aoquant: ") :]

    return command


def numbers(out: str) -> dict[str, Any]:
    return json.loads((Path(out) / job.RESULTS).read_text())


def scores(stage: dict[str, Any]) -> dict[str, Any]:
    """Return a stage without what it took."""
    return {name: value for name, value in stage.items() if name not in ("seconds", "peak_bytes", "tokens_per_s")}


def test_a_run_is_asked_for_with_its_input_files(tmp_path: Path) -> None:
    """A text that changes, or another calibration, is another run."""
    files = {name: tmp_path / name for name in ("train.txt", "wiki.txt", "calibrate.txt")}
    for file in files.values():
        file.write_text("words")
    train, wiki, calibrate = files.values()
    options = Options(model=str(tmp_path), train_text=[train], wikitext=str(wiki), calibrate=calibrate)
    assert resuming._command(options)["input files"].keys() == {*map(str, files.values())}
    assert resuming._command(Options(calibrate=calibrate))["input files"].keys() == {str(calibrate)}


def test_an_interrupted_run_goes_on_and_gives_the_same_numbers(
    run: Any, scored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--recipe", "int8-weight", "--out", "whole")[0] == 0
    whole = list(scored)
    assert len(whole) == 4
    scored.clear()
    evaluate, parts = job.evaluate, ("--recipe", "int8-weight", "--out", "parts")

    def stop(*args: Any, **kwargs: Any) -> Any:
        if len(scored) == 3:
            raise KeyboardInterrupt
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(job, "evaluate", stop)
    code, said = run(*parts)
    assert code == 130 and "parts/" in said and scored == whole[:3]
    monkeypatch.setattr(job, "evaluate", evaluate)
    code, said = run(*parts, "--seed", "1")
    assert code == 2 and "seed was 0 and is 1" in said
    Path("text.txt").write_text(Path("text.txt").read_text())  # written again: another time
    code, said = run(*parts)
    assert code == 2 and "input files" in said
    stamp = json.loads(Path("whole/stages/command.json").read_text())["input files"]["text.txt"][1]
    os.utime("text.txt", ns=(stamp, stamp))
    assert run(*parts)[0] == 0
    assert scored == whole
    parts_are, whole_is = numbers("parts"), numbers("whole")
    assert parts_are["logits_sha256"] == whole_is["logits_sha256"]
    assert [scores(stage) for stage in parts_are["stages"]] == [scores(stage) for stage in whole_is["stages"]]
    for found in parts_are, whole_is:
        assert all(stage["seconds"] > 0 for stage in found["stages"]) and found["finish_seconds"] > 0
    assert [s["tokens_per_s"] > 0 for s in whole_is["stages"]] == [False, False, True, False]  # of QAT
    assert "tokens/s in training" in (Path("whole") / "report.md").read_text()
    assert list(Path("parts").rglob(NEWEST)) == []  # nothing needs it any more
    assert run(*parts)[0] == 0
    assert scored == whole  # the table again, and nothing is computed


def test_the_models_of_a_stage_do_not_outlive_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted embedding is in a reference cycle: without a collection PTQ's would be there during QAT."""
    left = []

    def counted(*args: Any, **kwargs: Any) -> list[float]:
        left.append(sum(type(o) is PackedTensor for o in gc.get_objects()))
        return finetune(*args, **kwargs)

    monkeypatch.setattr(job, "finetune", counted)
    gc.collect()
    gc.disable()
    try:
        assert run("--recipe", "int8-weight", "--embeddings", "--loss", "ce", "--out", "out")[0] == 0
    finally:
        gc.enable()
    assert len(left) == 2 and left[1] <= left[0]


@pytest.mark.parametrize(("recipe", "method"), [("nvfp4", "gptq"), ("nvfp4-4over6", "awq")])
def test_a_run_trains_from_calibrated_ptq_and_goes_on(
    run: Any, scored: list[str], monkeypatch: pytest.MonkeyPatch, recipe: str, method: str
) -> None:
    """Its PTQ is another one than the nearest codes, and the converted model equals the trained one."""
    assert run("--recipe", recipe, "--out", "nearest")[0] == 0
    nearest, given = list(scored), ("--recipe", recipe, "--ptq", method, "--samples", "4")
    scored.clear()
    assert run(*given, "--out", "whole")[0] == 0
    whole, evaluate = list(scored), job.evaluate
    assert whole[0] == nearest[0] and whole[1] != nearest[1] and whole[2] != nearest[2] and whole[3] == whole[2]
    scored.clear()

    def stop(*args: Any, **kwargs: Any) -> Any:
        if len(scored) == 2:
            raise KeyboardInterrupt
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(job, "evaluate", stop)
    assert run(*given, "--out", "parts")[0] == 130 and scored == whole[:2]
    monkeypatch.setattr(job, "evaluate", evaluate)
    assert run(*given, "--out", "parts")[0] == 0 and scored == whole


@pytest.mark.filterwarnings("ignore:.*tokens for K")
def test_calibrated_ptq_of_a_run_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of layers is printed, and that there are fewer blocks than --samples."""
    ids = torch.randint(32, (3, 8), generator=torch.Generator().manual_seed(0))
    for samples, said in ((2, ""), (3, ""), (4, "calibrated on 3 blocks, the whole text: --samples 4")):
        options = job.Options(ptq="gptq", samples=samples, batch_size=2)
        models.prepare_calibrated(llama(None), Int4WeightConfig(32), options, ids, ONE_TEXT)
        err = capsys.readouterr().err
        assert said in err and ("the whole text" in err) == bool(said)
        assert "| layers | number | format | error / nearest's |" in err and "| q_proj | 1 | int4-g32 | 0." in err


def test_a_second_run_in_a_folder_at_work_is_refused(
    run: Any, scored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    score, found = job.evaluate, list[tuple[int, str]]()

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        found.append(run("--recipe", "int8-weight", "--out", "a"))
        return score(*args, **kwargs)

    monkeypatch.setattr(job, "evaluate", meanwhile)
    assert run("--recipe", "int8-weight", "--out", "a")[0] == 0 and len(scored) == len(found) == 4
    assert all(code == 2 and said.startswith("aoquant: --out a is in use") for code, said in found)
    assert run("--recipe", "int8-weight", "--out", "a")[0] == 0  # free again


@pytest.mark.parametrize("there", [False, True])
def test_a_refused_run_leaves_the_disk_as_it_was(run: Any, scored: list[str], there: bool, tmp_path: Path) -> None:
    """Refused by a layer, by a block beyond the positions, and by an export that does not fit."""
    out = tmp_path / "a" / "b" / "out"
    if there:
        out.mkdir(parents=True)
    before = {*tmp_path.rglob("*")}
    for more in (
        ["--recipe", "int4-g32", "--skip", "model.layers.0.mlp.dwn_proj"],
        ["--recipe", "int8-weight", "--block", "33"],
        ["--recipe", "nvfp4", "--export", str(tmp_path / "served")],
    ):
        assert run(*more, "--out", str(out))[0] == 2 and scored == []
        assert {*tmp_path.rglob("*")} == before


def test_the_plan_is_checked_before_anything_is_scored(
    run: Any, scored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("cache").absolute())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    down = "model.layers.0.mlp.down_proj"
    for more, name in (
        (["--recipe", "int4-g32"], "--skip-incompatible"),
        (["--recipe", "int4-g32", "--skip", "model.layers.0.mlp.dwn_proj"], down),
        (["--recipe", "int4-g32", "--skip-incompatible", "--strict"], down),
        (["--wikitext", "hub"], "--wikitext"),
    ):
        code, said = run(*more, "--out", "a")
        assert code == 2 and said.startswith("aoquant: ") and name in said
    text = ("--train-text", "text.txt", "--wikitext", ".", "--device", "cpu")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, said = run("--model", "nosuchdir", *text, "--out", "b", given=[])
    assert code == 2 and said.startswith("aoquant: model must be") and "nosuchdir" in said
    assert scored == [] and not Path("b/stages").exists()  # so that the next command may use the folder


def test_layers_are_skipped_by_name_chosen_by_pattern_or_left_out_where_they_do_not_fit(run: Any) -> None:
    def packed(out: str) -> list[str]:
        config = json.loads((Path(out) / "checkpoint" / "config.json").read_text())["quantization_config"]
        return sorted(config["modules_to_not_convert"])

    down = "model.layers.0.mlp.down_proj"
    assert run("--recipe", "int4-g32", "--out", "named", "--skip", down)[0] == 0
    assert packed("named") == ["lm_head", down]
    assert run("--recipe", "int4-g32", "--out", "found", "--skip-incompatible")[0] == 0
    assert packed("found") == packed("named") and numbers("found")["skipped"].keys() == {down}
    assert run("--recipe", "int4-g32", "--out", "b", "--layers", r"re:.*self_attn\..*")[0] == 0
    assert [n for n in packed("b") if "self_attn" in n] == [] and len(packed("b")) == 4


def test_options_in_a_yaml_file(run: Any, small: list[str]) -> None:
    lines = [f"{small[i].removeprefix('--')}: {small[i + 1]}" for i in range(0, len(small), 2)]
    more = ["recipe: int8-weight", "learning_rate: 3e-4", "skip: []", "out: filed"]
    Path("run.yaml").write_text("\n".join([*lines, *more]))
    assert run("run.yaml", given=[])[0] == 0
    options = numbers("filed")["options"]
    assert (options["recipe"], options["learning_rate"], options["steps"]) == ("int8-weight", 3e-4, 2)
    assert run("--config", "run.yaml", "--steps", "1", "--out", "flags", given=[])[0] == 0
    assert numbers("flags")["options"]["steps"] == 1  # what is typed wins
    for text, name in (("stepz: 3", "stepz"), ("steps: many", "steps"), ("embeddings: 1", "embeddings"), ("a: [", "")):
        Path("run.yaml").write_text(text)
        code, said = run("run.yaml", given=[])
        assert code == 2 and "run.yaml" in said and name in said
