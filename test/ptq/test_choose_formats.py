"""Formats for each layer under a budget: the solver is exact, siblings agree, and the plan is no worse than uniform."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import llama
from torchao.quantization import FqnToConfig

from aoquant import CalibrateConfig, PackedTensor, calibrate_ptq, choose_formats, quantize_
from aoquant.planning.sizes import stored_bytes
from aoquant.ptq.choose_formats import solve

CANDIDATES = ["intx3-g32", "int4-g32", "int8-weight"]


def model() -> Any:
    torch.manual_seed(0)
    return llama(dtype=torch.float32, attention_bias=False, num_hidden_layers=1, vocab_size=64)


def batches() -> list[torch.Tensor]:
    return [torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(3))]


def test_the_solver_is_exact() -> None:
    """Against every combination."""
    draw = random.Random(0)
    for _ in range(20):
        cost = [{n: draw.randint(1, 30) for n in "abc"} for _ in range(5)]
        lost = [{n: draw.random() for n in "abc"} for _ in range(5)]
        budget = sum(min(c.values()) for c in cost) + draw.randint(0, 40)

        def total(of: Any, plan: Any) -> Any:
            return sum(each[n] for each, n in zip(of, plan, strict=True))

        plans = [p for p in itertools.product("abc", repeat=5) if total(cost, p) <= budget]
        found = solve(cost, lost, budget)
        assert total(cost, found) <= budget
        assert total(lost, found) == pytest.approx(min(total(lost, p) for p in plans))


@pytest.mark.filterwarnings("ignore:.*tokens for K")
def test_a_plan_fits_loses_no_more_than_uniform_ones_and_is_a_config(tmp_path: Path) -> None:
    net = model()
    before = dict(net.named_parameters())
    found = choose_formats(net, CANDIDATES, batches=batches(), bits=5.5)
    assert isinstance(found, FqnToConfig) and all(before[n] is p and p.requires_grad for n, p in net.named_parameters())
    fits = {p.name: p for p in found.plans if p.bits <= 5.5}
    assert fits[found.chosen].kl == min(p.kl for p in fits.values())
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        assert len({found.layers[n] for n in found.layers if n.endswith(group)}) == 1
    quantize_(net, found)
    packed = [m.weight for m in net.modules() if isinstance(getattr(m, "weight", None), PackedTensor)]
    bits = 8 * stored_bytes(*packed) / sum(w.shape[0] * w.shape[1] for w in packed)
    assert len(packed) == 7 and bits == pytest.approx(fits[found.chosen].bits)
    assert "chosen" in str(found)
    found.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    assert len(calibrate_ptq(model(), batches(), CalibrateConfig(found)).rows) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 2.0}, "below the smallest candidate"),
        ({"batches": []}, "no batches"),
        ({"candidates": []}, "at least one"),
        ({"candidates": ["int8-static"]}, "calibration finds"),
        ({"candidates": ["gridflip"], "engine": "vllm", "bits": 16}, "vllm does not serve it"),
        ({"engine": "onnx"}, "engine is one of"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"candidates": CANDIDATES, "batches": batches(), "bits": 5.0} | changes
    with pytest.raises(ValueError, match=message):
        choose_formats(model(), arguments.pop("candidates"), **arguments)
