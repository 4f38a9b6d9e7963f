"""A calibration whose blocks visit a device one at a time makes the codes of one whose model is there.

The other device is the CPU: a tensor that is no copy yet counts as elsewhere and is copied, as it would be to a GPU.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import equal_weights
from support.killed import interrupted
from support.meters import is_mapped
from support.models import llama
from support.moe_models import model_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aoquant import CalibrateConfig, QATConfig, calibrate_ptq, quantize_
from aoquant.linear.packed import PackedLinear
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
    assert all(equal_weights(t, tensors(there)[n]) for n, t in tensors(here).items())
    if step is not None:
        for model in (here, there):
            quantize_(model, QATConfig(step="convert"))
        assert all(equal_weights(t, tensors(there)[n]) for n, t in tensors(here).items())


class Sides(TorchDispatchMode):
    """Refuse operations on tensors of the host and of the device, as a GPU does. What neither side has made yet, such
    as zeros, joins the side of the first operation.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, str]] = {}
        for t in (*model.parameters(), *model.buffers()):
            self.put(t, "host")

    def put(self, t: Tensor, side: str) -> Tensor:
        self.known[t.untyped_storage()._cdata] = StorageWeakRef(t.untyped_storage()), side
        return t

    def side(self, t: Tensor) -> str | None:
        found = self.known.get(t.untyped_storage()._cdata)
        return found[1] if found and not found[0].expired() else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if type(t) in (Tensor, nn.Parameter)]
        sides = {side for t in given if t.dim() and (side := self.side(t))}
        if len(sides) == 2 and func is not torch.ops.aten.copy_.default:
            raise AssertionError(f"{func} of tensors on two devices: {[(self.side(t), t.shape) for t in given]}")
        out = func(*args, **(kwargs or {}))
        for t in (*given, *tree_leaves(out)) if len(sides) == 1 else ():
            if type(t) in (Tensor, nn.Parameter) and t.dim() and self.side(t) is None:
                self.put(t, *sides)
        return out


@pytest.mark.parametrize(
    ("recipe", "method"),
    [("int4-g32", "gptq"), pytest.param("nvfp4", "clip+gptq", marks=pytest.mark.slow)],
)
def test_no_operation_takes_tensors_of_two_devices(recipe: str, method: str, monkeypatch: Any) -> None:
    model = net()
    sides, copied, aside = Sides(model), offload._copied, offload.aside

    def crossed(copy: Tensor, of: Tensor) -> Tensor:
        return sides.put(copy, "host" if sides.side(of) == "device" else "device")

    def moved(t: Any, device: torch.device) -> Any:
        """Copy a tensor, or the parts of a packed one, to the other side."""
        copy = copied(t, device)
        if not hasattr(t, "__tensor_flatten__"):
            return crossed(copy, t)
        for part in t.__tensor_flatten__()[0]:
            setattr(copy, part, crossed(getattr(copy, part).clone(), getattr(t, part)))
        return copy

    def elsewhere(t: Any, device: torch.device) -> bool:
        part = t.qdata if hasattr(t, "__tensor_flatten__") else t
        return sides.side(part) == ("host" if device.index == 0 else "device")

    monkeypatch.setattr(offload, "_copied", moved)
    monkeypatch.setattr(offload, "elsewhere", elsewhere)
    monkeypatch.setattr(offload, "aside", lambda x: sides.put(aside(x), "host"))
    monkeypatch.setattr(offload, "brought", lambda x, device: sides.put(x.clone(), "device"))
    with sides:
        calibrate_ptq(model, batches(), CalibrateConfig(recipe, method), device="cpu:0")
    assert {sides.side(t) for t in (*model.parameters(), *model.buffers()) if type(t) in (Tensor, nn.Parameter)} == {
        "host"
    }


def test_blocks_that_are_not_run_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of the first block are captured without the blocks behind it, for any number of batches."""
    copied, moved = offload._copied, list[int]()
    for count in (1, 5):
        model, seen = net(), list[Tensor]()
        monkeypatch.setattr(offload, "_copied", lambda t, device, seen=seen: seen.append(t) or copied(t, device))
        weight = model.model.layers[1].mlp.up_proj.weight
        calibrate_ptq(model, batches()[:1] * count, CalibrateConfig("int4-g32"), device="cpu")
        moved.append(sum(t is weight for t in seen))
    assert moved[0] == moved[1] > 0


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_finished_blocks_are_mapped_from_their_files(kind: str, device: str | None, tmp_path: Path) -> None:
    model, wanted = (net() if kind == "llama" else model_of(kind) for _ in range(2))
    calibrate_ptq(wanted, batches(), CalibrateConfig("int4-g32"))
    calibrate_ptq(model, batches(), CalibrateConfig("int4-g32"), device=device, checkpoint=tmp_path)
    packed = {n: t for n, t in model.named_parameters() if hasattr(t, "__tensor_flatten__")}
    assert packed and all(equal_weights(t, tensors(wanted)[n]) for n, t in packed.items())
    assert all(is_mapped(part, tmp_path) for t in packed.values() for part in (t.qdata, t.scale))
    ids = batches()[0]
    assert torch.equal(model(ids).logits, wanted(ids).logits)
    assert all(m._codes.data_ptr() == m.weight.qdata.data_ptr() for m in model.modules() if isinstance(m, PackedLinear))


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
    assert all(equal_weights(t, tensors(there)[n]) for n, t in tensors(here).items())


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
    assert all(equal_weights(t, tensors(model)[n]) for n, t in tensors(whole).items())
