"""How `aoquant run` trains: presets, validation pages, early stop, the choice of a rate, frozen parts, a cached
teacher.
"""

from __future__ import annotations

import copy
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu import LateResult
from support.light_runs import light_runs
from support.models import tiny_llama
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from aoquant import QATConfig, quantize_
from aoquant.integrations import finetune as tuning
from aoquant.integrations import finetune_checkpoints, job, lm_eval
from aoquant.integrations.finetune import alias, finetune, rate_at, scored_tokens
from aoquant.integrations.job.models import convert
from aoquant.integrations.job.training import PRESETS, best_rate, freeze, hold_out, validation_loss
from aoquant.integrations.lm_eval import Perplexity
from aoquant.integrations.text import ONE_TEXT, Documents
from aoquant.linear.prepared import PreparedModule
from aoquant.recipes import list_recipes

BLOCKS = torch.arange(12 * 16).view(12, 16) % 31
light = pytest.fixture(autouse=True)(light_runs)


def tune(model: Any, steps: int = 20, **options: Any) -> list[float]:
    return finetune(
        model, BLOCKS, steps=steps, batch_size=2, learning_rate=1e-2, loss="ce", teacher=None, seed=3, label="tune",
        **options,
    )  # fmt: skip


def test_a_line_of_progress_has_the_loss_of_its_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aoquant._messages.SECONDS", 0.0)
    losses = tune(tiny_llama(), steps=4)
    said = [re.search(r"tune: (\d) of 4.*loss=([0-9.]+),", line) for line in capsys.readouterr().err.splitlines()]
    assert [(int(m[1]), m[2]) for m in said if m] == [(i + 1, f"{loss:.4f}") for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("name", "loss", "peak", "final"), [("qad", "kl", 1e-5, 1e-6), ("sft", "ce", 1e-5, 1e-6), ("demo", "kl", 3e-4, 0)]
)
def test_a_preset_gives_defaults_and_options_win(name: str, loss: str, peak: float, final: float) -> None:
    o = job.Options(preset=name, device="cpu")
    assert (o.loss, o.learning_rate, o.final_rate(peak)) == (loss, peak, pytest.approx(final))
    mine = job.Options(preset=name, device="cpu", steps=7, learning_rate=1e-3, loss="ce", final_learning_rate=0.0)
    assert (mine.steps, mine.learning_rate, mine.loss, mine.final_rate(1e-3)) == (7, 1e-3, "ce", 0.0)
    assert job.Options(preset=name, device="cpu", learning_rate=1e-4).final_rate(1e-4) == pytest.approx(
        1e-4 * final / peak
    )


def test_the_steps_of_a_preset_are_tokens() -> None:
    qad = PRESETS["qad"]
    assert qad.steps_for(10**9, 512, 32_768) == 1000  # NVIDIA's own batch
    assert qad.steps_for(10**9, 512, 4096) == 8000  # the same tokens
    assert qad.steps_for(403, 8, 256) == 50  # a small text, once
    assert qad.steps_for(3, 8, 256) == 1
    assert PRESETS["demo"].steps_for(403, 8, 256) == 80


def test_the_embedded_model_has_its_own_preset() -> None:
    assert job.Options(device="cpu").preset == "demo" and job.Options(model="m", device="cpu").preset == "qad"


def test_a_schedule_ends_at_its_final_rate() -> None:
    rates = [rate_at(1e-5, step, 100, 1e-6) for step in range(101)]
    assert max(rates) == 1e-5 and rates[100] == pytest.approx(1e-6)
    assert [rate_at(1.0, s, 40) for s in range(40)] == [rate_at(1.0, s, 40, 0.0) for s in range(40)]


def test_a_schedule_warms_up_for_a_twentieth_and_falls_by_half_a_cosine() -> None:
    rates = [rate_at(1.0, step, 105, 0.5) for step in range(106)]
    assert rates[:7] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, rates[6]]) and rates[6] < 1.0
    assert rates[55] == pytest.approx(0.75) and rates[5:] == sorted(rates[5:], reverse=True)
    for steps in (100, 119):  # five steps of warm-up each
        assert [rate_at(1.0, step, steps) for step in (3, 4)] == [0.8, 1.0]
    assert rate_at(1.0, 0, 1) == rate_at(1.0, 0, 19) == 1.0  # a step of warm-up at least
    assert [rate_at(1.0, step, 2, 0.5) for step in range(3)] == [1.0, 1.0, 0.5]
    assert rate_at(1.0, 1, 1, 0.5) == 1.0


@pytest.mark.parametrize(
    ("check", "good", "bad", "name"),
    [
        (tuning.check_switch, [(0, 5), (4, 5)], [(5, 5), (-1, 5)], "fake_quant_after_n_steps"),
        (tuning.check_batch, [(8, 4), (3, 1)], [(6, 4), (1, 2)], "batch_size"),
        (partial(lm_eval.check_within, "block"), [(64, 64), (1, 64), (65, 0)], [(65, 64)], "block"),
    ],
)
def test_limits_of_a_fine_tune(check: Any, good: list[Any], bad: list[Any], name: str) -> None:
    for values in good:
        check(*values)
    for values in bad:
        with pytest.raises(ValueError, match=name):
            check(*values)


def test_a_loss_is_a_mean_over_the_tokens_that_it_predicts() -> None:
    blocks = torch.tensor([[1, 2, 3, 1, 4], [1, 5, 6, 7, 1]])
    assert scored_tokens(blocks, "kl", ONE_TEXT) == scored_tokens(blocks, "kl", Documents(unscored=1)) == 10
    assert scored_tokens(blocks, "ce", ONE_TEXT) == 8
    assert scored_tokens(blocks, "ce", Documents(unscored=1)) == 6  # which begins documents


def test_fake_quantisation_begins_after_n_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen, step = list[set[bool]](), tuning.block_loss

    def watched(model: Any, *args: Any, **options: Any) -> Any:
        seen.append({m.fake_quant for m in model.modules() if isinstance(m, PreparedModule)})
        return step(model, *args, **options)

    late, early, plain = tiny_llama("int4-g32"), tiny_llama("int4-g32"), tiny_llama()
    losses = tune(plain, 6)
    monkeypatch.setattr(tuning, "block_loss", watched)
    late_losses = tune(late, 6, fake_quant_after_n_steps=4)
    assert seen == [{False}] * 4 + [{True}] * 2
    assert late_losses[:4] == losses[:4] and late_losses[4] != losses[4] and tune(early, 6)[0] != losses[0]
    assert all(m.fake_quant for m in late.modules() if isinstance(m, PreparedModule))
    with pytest.raises(ValueError, match=r"must be in 0 .. 5, below the 6 steps"):
        tune(late, 6, fake_quant_after_n_steps=6)


@pytest.mark.parametrize("late", [False, True])
def test_training_ends_when_it_is_enough_and_goes_on_from_there(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """late: the results of a step are read one step late, as on a GPU."""
    if late:
        monkeypatch.setattr(tuning, "_to_host", LateResult.to_host)
    looks: list[int] = []

    def third(_: Any) -> bool:
        looks.append(1)
        return len(looks) % 3 == 0

    model = tiny_llama("int4-g32")
    losses = tune(model, 40, enough=third, checkpoints=tmp_path)
    assert len(losses) == 6 and len(looks) == 3  # every second step of 40
    again = tiny_llama("int4-g32")
    assert tune(again, 40, enough=lambda _: True, checkpoints=tmp_path) == losses
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_is_written_at_the_end_where_none_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    monkeypatch.setattr(finetune_checkpoints.Checkpoints, "save", lambda self, step: saved.append(step))
    tune(tiny_llama(), 2, checkpoints=tmp_path)
    assert saved == [2]


def test_validation_blocks_are_the_last_and_are_not_trained_on() -> None:
    blocks = torch.arange(100)[:, None].expand(100, 4)
    train, held_out = hold_out(blocks, 2)
    assert train[:, 0].tolist() == list(range(96)) and held_out[:, 0].tolist() == [96, 97, 98, 99]
    assert len(hold_out(torch.zeros(10**4, 2), 1)[1]) == 64
    with pytest.raises(ValueError, match=r"takes 2 blocks .* it has 2"):
        hold_out(blocks[:2], 2)


def test_the_validation_loss_is_the_mean_over_tokens() -> None:
    model = tiny_llama().train()
    with torch.no_grad():
        expected = model(input_ids=BLOCKS, labels=BLOCKS).loss
    assert validation_loss(model, BLOCKS, shared=False) == pytest.approx(float(expected), rel=1e-4)
    assert model.training


def test_the_best_rate_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {1e-5: 3.0, 1e-4: 2.0, 1e-3: math.nan}
    assert best_rate([1e-3, 1e-5, 1e-4], losses.__getitem__) == 1e-4
    assert "try" not in capsys.readouterr().err
    assert best_rate([1e-5, 1e-4], {1e-5: 1.0, 1e-4: 2.0}.__getitem__) == 1e-5
    assert "chosen 1e-05 (the smallest" in capsys.readouterr().err
    with pytest.raises(ValueError, match="diverges"):
        best_rate([1e-3], losses.__getitem__)


def test_frozen_modules_are_named() -> None:
    model = tiny_llama()
    freeze(model, ["model.embed_tokens", r"re:.*\.q_proj"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"}
    with pytest.raises(ValueError, match=r"--freeze model\.nothing: .* no module"):
        freeze(model, ["model.nothing"])
    with pytest.raises(ValueError, match="nothing to train"):
        freeze(model, ["model"])


def test_a_student_shares_what_is_frozen_with_its_teacher() -> None:
    teacher = tiny_llama(num_hidden_layers=2)
    freeze(teacher, ["model.embed_tokens", "model.layers.0"])
    student = alias(teacher, frozen=True)
    quantize_(student, QATConfig("int4-g32"))
    own = dict(student.named_parameters())
    shared = {name for name, p in teacher.named_parameters() if p.data_ptr() == own[name].data_ptr()}
    assert shared == {name for name, p in teacher.named_parameters() if not p.requires_grad} != set()
    before = copy.deepcopy(teacher.state_dict())
    finetune(
        student, BLOCKS, steps=3, batch_size=2, learning_rate=1e-2, loss="kl", teacher=teacher, seed=0, label="tune"
    )
    convert(student)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


QUICK = ("int4-g32", "nvfp4", "nvfp4-h16", "gguf-q4_0", "torchao-int8-int4", "quartet2")


@pytest.mark.parametrize(
    "recipe", [r.name if r.name in QUICK else pytest.param(r.name, marks=pytest.mark.slow) for r in list_recipes()]
)
def test_a_copy_that_shares_memory_is_quantised_without_a_trace(recipe: str) -> None:
    """PTQ of a run shares the float model's weights, and the converted model those of the prepared one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
    ).bfloat16()
    before = copy.deepcopy(model.state_dict())
    shared = alias(model)
    try:
        quantize_(shared, QATConfig(recipe))
        convert(shared)
    except ValueError as error:  # its kernel packs on a GPU alone, or it is for experts
        assert recipe not in QUICK
        pytest.skip(str(error)[:80])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- the whole job


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a small run, whose scores are those of a few tokens."""

    def evaluate(model: Any, *_: Any, **__: Any) -> Perplexity:
        with torch.no_grad():
            nats = -float(model(input_ids=BLOCKS[:2], labels=BLOCKS[:2]).loss)
        rest: Any = dict.fromkeys(("window", "documents", "limit", "batch_size"), 1)
        texts: Any = dict.fromkeys(("source", "task", "task_version"), "fake")
        return Perplexity(math.exp(-nats), 2.0, 1.0, **rest, **texts, loglikelihoods=(nats, nats - 1), words=(10, 11))

    monkeypatch.setattr(job, "evaluate", evaluate)
    tiny_llama(vocabulary=8192).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(job.assets()).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("all that glitters is not gold, often have you heard that told. " * 40)
    (tmp_path / "test.jsonl").write_text('{"page": "all that glitters"}')
    text = {"train_text": [tmp_path / "text.txt"], "wikitext": str(tmp_path), "model": str(tmp_path / "model")}
    return {"recipe": "int4-g32", "batch_size": 2, "block": 16, "device": "cpu", **text}


def numbers(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / job.RESULTS).read_text())
    return found


def test_a_run_with_a_cached_teacher(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While QAT trains, the float model is not on the device; a second recipe takes what is there."""
    cache, teachers = tmp_path / "teacher", []

    def watched(*args: Any, **more: Any) -> list[float]:
        teachers.append(type(more["teacher"]).__name__)
        return finetune(*args, **more)

    monkeypatch.setattr(job, "finetune", watched)
    budget = {"steps": 3, "learning_rate": 1e-2, "teacher_cache": cache, "teacher_top_k": 16}
    first = job.run(job.Options(**options, **budget, out=tmp_path / "a"))
    assert teachers == ["TeacherCache"] and first.min_sqnr_db == math.inf
    files = {p: p.stat().st_mtime_ns for p in cache.glob("*.safetensors")}
    assert files
    job.run(job.Options(**{**options, "recipe": "int8-weight"}, **budget, out=tmp_path / "b"))
    assert {p: p.stat().st_mtime_ns for p in cache.glob("*.safetensors")} == files
    # before anything is scored, so that the same folder takes the command that is advised
    with pytest.raises(ValueError, match="another top k"):
        job.run(job.Options(**options, **{**budget, "teacher_top_k": 4}, out=tmp_path / "c"))
    assert not (tmp_path / "c" / "stages").exists()
    again = {**budget, "teacher_top_k": 4, "teacher_cache": tmp_path / "another"}
    assert job.run(job.Options(**options, **again, out=tmp_path / "c")).min_sqnr_db == math.inf


def test_a_run_that_chooses_its_rate_and_stops_early(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def watched(*args: Any, **more: Any) -> list[float]:
        tried.append(more["learning_rate"])
        return finetune(*args, **more)

    monkeypatch.setattr(job, "finetune", watched)
    budget: dict[str, Any] = {"steps": 20, "learning_rates": [1e-6, 1e-2], "stop_at_gap": 1.0, "freeze": ["lm_head"]}
    result = job.run(job.Options(**options, **budget, out=tmp_path / "out"))
    assert tried == [1e-6, 1e-2, 1e-2]  # two trials, and QAT
    assert result.trained_on.startswith("1 step ") and "stopped early" in result.trained_on
    assert "20 were planned" in numbers(tmp_path / "out")["trained_on"]
    assert job.run(job.Options(**options, **budget, out=tmp_path / "out")) == result and len(tried) == 3


@pytest.mark.slow
def test_a_preset_reads_the_text_once(options: dict[str, Any], tmp_path: Path) -> None:
    result = job.run(job.Options(**options, preset="sft", out=tmp_path / "out"))
    blocks = int(result.trained_on.split()[0]) * 2
    tokens = len(AutoTokenizer.from_pretrained(job.assets())((tmp_path / "text.txt").read_text())["input_ids"]) + 1
    assert blocks <= tokens // 16 < blocks + 2 and result.trained_on.endswith("at 1e-05")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"preset": "nvidia"}, "preset must be one of demo, qad, sft"),
        ({"learning_rate": 1e-3, "learning_rates": [1e-4]}, "not both"),
        ({"learning_rates": [1e-3, -1.0]}, "learning_rates must be"),
        ({"final_learning_rate": math.nan}, "final_learning_rate must be"),
        ({"stop_at_gap": math.inf}, "stop_at_gap"),
        ({"fake_quant_after_n_steps": 80}, "fake_quant_after_n_steps must be in 0 .. 79"),
        ({"teacher_cache": Path("a"), "loss": "ce"}, "teacher_cache is for loss kl"),
        ({"teacher_top_k": 0}, "teacher_top_k must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_train_is_refused_at_once(given: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        job.run(job.Options(**given, device="cpu", out=tmp_path / "out"))
