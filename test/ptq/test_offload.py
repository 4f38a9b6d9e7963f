"""A calibration whose blocks visit a device one at a time makes the codes of one whose model is there.

The other device is the CPU: a tensor that is no copy yet counts as elsewhere and is copied, as it would be to a GPU.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.killed import interrupted
from support.models import llama
from support.moe_models import model_of
from torch import Tensor, nn

from aoquant import CalibrateConfig, QATConfig, calibrate_ptq, quantize_
from aoquant.linear.packed import PackedLinear
from aoquant.linear.tensor import same_bits
from aoquant.ptq import gptq, offload

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens for K", "ignore:.*too few tokens", "ignore:R1 unties")


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copy every tensor, and return the bytes of the copies that exist at once, after each of them."""
    there: dict[int, int] = {}  # bytes of the copies that exist
    seen: list[int] = []
    copied = offload._copied

    def counted(t: Tensor, device: torch.device) -> Tensor:
        copy = copied(t, device)
        there[id(copy)] = 0 if hasattr(copy, "__tensor_flatten__") else copy.nbytes
        weakref.finalize(copy, there.pop, id(copy))
        seen.append(sum(there.values()))
        return copy

    monkeypatch.setattr(offload, "_copied", counted)
    monkeypatch.setattr(offload, "elsewhere", lambda t, device: id(t) not in there)
    return seen


def batches() -> list[Tensor]:
    return [torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]


def equal(a: Any, b: Any) -> bool:
    return same_bits(a, b) if hasattr(a, "__tensor_flatten__") else torch.equal(a, b)


def net(**changes: Any) -> Any:
    torch.manual_seed(0)
    return llama(dtype=torch.float32, **changes)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize(
    ("recipe", "method", "step"),
    [
        ("int4-g32", "gptq", None),
        ("int4-g32", "gptq", "prepare"),
        pytest.param("nvfp4", "clip+gptq", None, marks=pytest.mark.slow),
        pytest.param("int8", "r1+r2+awq+gptq", None, marks=pytest.mark.slow),
    ],
)
def test_codes_are_those_of_a_model_on_the_device(
    recipe: str, method: str, step: str | None, copies: list[int]
) -> None:
    here, there = net(), net()
    config = CalibrateConfig(recipe, method)
    wanted = calibrate_ptq(here, batches(), config, step=step)
    assert not copies
    assert calibrate_ptq(there, batches(), config, step=step, device="cpu") == wanted
    assert tensors(here).keys() == tensors(there).keys()
    assert all(equal(t, tensors(there)[n]) for n, t in tensors(here).items())
    if step is not None:
        for model in (here, there):
            quantize_(model, QATConfig(step="convert"))
        assert all(equal(t, tensors(there)[n]) for n, t in tensors(here).items())


def test_one_block_is_there_at_a_time(copies: list[int]) -> None:
    model = net(num_hidden_layers=4)
    largest = max(sum(p.nbytes for p in unit.parameters()) for unit in offload._units(model))
    calibrate_ptq(model, batches(), CalibrateConfig("int4-g32"), device="cpu")
    assert 0 < max(copies) < 1.5 * largest


def test_a_packed_layer_holds_no_view_of_codes_that_were_there() -> None:
    model = net()
    calibrate_ptq(model, batches(), CalibrateConfig("int4-g32"), device="cpu")
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert layers and all(m._codes.data_ptr() == m.weight.qdata.data_ptr() for m in layers)


def test_stacked_experts_go_along() -> None:
    here, there = model_of("qwen3-moe"), model_of("qwen3-moe")
    wanted = calibrate_ptq(here, batches(), CalibrateConfig("int4-g32"))
    assert calibrate_ptq(there, batches(), CalibrateConfig("int4-g32"), device="cpu") == wanted
    assert all(equal(t, tensors(there)[n]) for n, t in tensors(here).items())


def test_a_failure_and_a_kill_leave_the_model_as_it_was_and_it_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    model, whole = net(num_hidden_layers=3), net(num_hidden_layers=3)
    calibrate_ptq(whole, batches(), CalibrateConfig("int4-g32"))
    before = tensors(model)
    values = {n: t.clone() for n, t in before.items()}
    norm = model.model.layers[2].post_attention_layernorm
    torch.nn.init.constant_(norm.weight, torch.inf)
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.gate_proj.*NaN or Inf"):
        calibrate_ptq(model, batches(), CalibrateConfig("int4-g32"), device="cpu")
    torch.nn.init.ones_(norm.weight)
    after = tensors(model)
    assert all(after[n] is t and torch.equal(t, values[n]) for n, t in before.items())
    interrupted(monkeypatch, gptq, "factor", 6)  # in the second block
    with pytest.raises(KeyboardInterrupt):
        calibrate_ptq(model, batches(), CalibrateConfig("int4-g32"), device="cpu", checkpoint=tmp_path)
    assert all(tensors(model)[n] is t for n, t in before.items())
    calibrate_ptq(model, batches(), CalibrateConfig("int4-g32"), device="cpu", checkpoint=tmp_path)
    assert all(equal(t, tensors(model)[n]) for n, t in tensors(whole).items())
