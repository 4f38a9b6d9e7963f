"""The estimate of a run: near what training takes, for several families, and refused where it does not fit."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.meters import peak_bytes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from aoquant import QATConfig, quantize_
from aoquant.integrations import job
from aoquant.integrations.finetune import finetune
from aoquant.integrations.job import needs
from aoquant.integrations.launched import Ranks
from aoquant.integrations.text import assets

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


@pytest.fixture(params=["llama", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[request.param](**SIZES, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def options(folder: Path, **more: Any) -> job.Options:
    sizes: Any = {"steps": 1, "batch_size": 4, "block": 64, "dtype": "bfloat16", **more}
    return job.Options(model=str(folder), device="cpu", wikitext="hub", **sizes)


@pytest.fixture
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no speed where only bytes are looked at."""
    monkeypatch.setattr(needs, "_speed", lambda *_: 1e10)


@pytest.mark.usefixtures("any_speed")
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_near_what_training_takes(folder: Path, micro_batch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """QAT beside its teacher: all that is made while it trains, with the optimizer, and the sum over micro-batches."""
    monkeypatch.setattr(needs, "BLOCK_BYTES", 1 << 18)
    found = needs.estimate(options(folder, micro_batch=micro_batch))
    assert found is not None
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(4 * 64).view(4, 64) % 512

    def train() -> None:
        student = copy.deepcopy(teacher)
        quantize_(student, QATConfig("int8-weight"))
        shared: Any = {"learning_rate": 1e-3, "loss": "kl", "teacher": teacher, "seed": 0, "label": "train"}
        finetune(student, ids, steps=1, batch_size=4, micro_batch=micro_batch, **shared)

    weights = found.parts["float model"]
    assert weights == sum(p.nbytes for p in teacher.parameters())
    assert 0.95 < (found.needed - weights) / peak_bytes(train) < 1.5


def test_activations_follow_the_micro_batch(folder: Path) -> None:
    whole, half = (needs.trace(str(folder), torch.bfloat16, "cpu", block) for block in (64, 32))
    assert whole is not None and half is not None
    assert whole.operations == pytest.approx(half.operations, rel=0.1)
    assert 1.9 < whole.saved / half.saved < 2.5


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_in_float32_are_traced(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fake tensors know their grouped products in bfloat16 alone."""
    config = CONFIG_MAPPING[family](**SIZES, num_local_experts=4, num_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = [needs.trace(str(tmp_path), dtype, "cpu", 64) for dtype in (torch.float32, torch.bfloat16)]
    assert found[0] and found[1] and found[0].operations == found[1].operations
    assert found[0].saved >= 1.5 * found[1].saved and "fake_tensor" not in capfd.readouterr().err


@pytest.mark.usefixtures("any_speed")
def test_a_loss_in_several_chunks_sums_the_heads_gradient_in_float32(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside logits of half as many tokens; a loss in one chunk does not."""

    def loss(rows: int) -> int:
        monkeypatch.setattr(needs, "chunk_rows", lambda *_: rows)
        found = needs.estimate(options(folder))
        assert found is not None
        return found.parts["loss"]

    whole, halves, more = loss(256), loss(128), loss(300)
    logits, head = 256 * 512 * 2, 512 * 128
    assert whole == more == 3 * logits + 4 * needs.BLOCK_BYTES and halves == whole - 3 * logits // 2 + 4 * head


@pytest.mark.usefixtures("any_speed")
def test_frozen_parts_have_no_optimizer(folder: Path) -> None:
    whole, part = (needs.estimate(options(folder, freeze=names)) for names in ([], ["model.embed_tokens"]))
    assert whole is not None and part is not None
    embedding = 512 * 128
    assert whole.parts["optimizer"] - part.parts["optimizer"] == 12 * embedding
    assert whole.parts["trained model"] - part.parts["trained model"] == 2 * embedding


@pytest.mark.parametrize(
    ("device", "cached", "beside"), [("cuda", True, False), ("cuda", False, True), ("cpu", True, True)]
)
def test_a_cached_teacher_takes_no_memory_of_a_gpu(
    device: str, cached: bool, beside: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a model of 30 B parameters trains where two of them would not fit."""
    traced = needs.Traced(30 * 10**9, 30 * 10**9, 1000, 64, 1, 1.0, 256)
    made = {"trace": traced, "free_memory": 1 << 40, "_speed": 1e10, "chunk_rows": 8}
    for name, value in made.items():
        monkeypatch.setattr(needs, name, lambda *_, value=value: value)
    o = options(folder, teacher_cache=folder / "cache" if cached else None)
    o.device = device
    found = needs.estimate(o)
    assert found is not None and found.parts.get("float model", 0) == (60 * 10**9 if beside else 0)


@pytest.mark.usefixtures("any_speed")
@pytest.mark.parametrize("name", ["block", "window"])
def test_more_tokens_than_positions_are_named_before_memory(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "free_memory", lambda device: 0)
    with pytest.raises(ValueError, match=rf"{name} must be at most .* 256, got 257"):
        needs.fitting(options(folder, **{name: 257}), 1)


def test_a_run_that_does_not_fit_is_refused_before_it_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "test.jsonl").write_text('{"page": "a page"}')
    monkeypatch.setattr(needs, "free_memory", lambda device: 10**6)
    monkeypatch.setattr(job, "load_float", lambda *_: pytest.fail("loaded"))
    o = options(folder, out=tmp_path / "out", train_text=[tmp_path / "text.txt"])
    o.wikitext = str(tmp_path)
    with pytest.raises(ValueError, match="--micro-batch"):
        job.run(o)
    assert not (tmp_path / "out" / "stages").exists()


def test_a_large_batch_or_window_is_what_does_not_fit() -> None:
    few, many = (needs.estimate(job.Options(device="cpu", batch_size=n, limit=1)) for n in (1, 1024))
    assert few is not None and many is not None
    assert many.stage == "training" and many.parts["activations"] > 500 * few.parts.get("activations", 1)
    assert many.seconds > few.seconds > 0
    micro = needs.estimate(job.Options(device="cpu", batch_size=1024, micro_batch=1, limit=1))
    assert micro is not None and micro.needed < many.needed / 10
    assert needs.trace(str(assets() / "nothing"), torch.bfloat16, "cpu", 8) is None


def test_memory_that_is_free_is_a_part_of_the_machine() -> None:
    assert 0 < needs.free_memory("cpu") < 1 << 50


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", "100", 1000), ("600", "100", 500), ("5000", "100", 1000), ("600", None, 1000), (None, None, 1000)],
)
def test_memory_that_is_free_is_within_the_cgroup(
    limit: str | None, used: str | None, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("memory.max", limit), ("memory.current", used)):
        if content is not None:
            (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setattr(needs, "Path", lambda _: tmp_path)
    monkeypatch.setattr(needs.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert needs.free_memory("cpu") == free


def test_a_run_may_need_all_that_is_free_and_no_more() -> None:
    found = needs.Estimate("training", {"float model": 3, "loss": 4}, 7, 1.0)
    assert found.needed == 7
    found.check()
    with pytest.raises(ValueError, match="--micro-batch"):
        dataclasses.replace(found, available=6).check()


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7170, "120 min"), (7200, "2.0 h")]
)
def test_seconds_are_said_in_a_unit_that_fits(seconds: float, said: str) -> None:
    assert needs._duration(seconds) == said


@pytest.mark.parametrize(("found", "rank", "said"), [("1 GB", 0, "1 GB\n"), (None, 0, ""), ("1 GB", 1, "")])
def test_the_estimate_is_said_once_and_before_anything_is_loaded(
    found: str | None, rank: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "fitting", lambda o, ranks: found)
    monkeypatch.setattr(job, "load_float", stop)
    folder: Any = None
    with pytest.raises(KeyboardInterrupt):
        job._stages(job.Options(device="cpu"), folder, Ranks(rank, 2))
    assert capsys.readouterr().err == said
