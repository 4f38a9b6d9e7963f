"""Models that are built before their weights exist (meta device), that accelerate moves about, and the way back
(`unprepare`).
"""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model, init_empty_weights
from accelerate.hooks import remove_hook_from_module
from support.checkpoint_configs import OURS as FORMATS
from support.checkpoint_configs import TORCHAO as THEIRS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from aoquant import PackedTensor, QATConfig, quantize_, set_fake_quant, unprepare

OURS = {name: FORMATS[name] for name in ("nvfp4", "fouroversix-tiles", "gridflip", "int4-g32", "intx3-g32", "mxfp8")}
TORCHAO = {name: THEIRS[name] for name in ("int8-weight", "intx")}
X = torch.linspace(-2, 2, 4 * 64).view(4, 64).bfloat16()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False)).bfloat16()


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return net()


def empty() -> nn.Sequential:
    with init_empty_weights():
        return net()


def assert_plain(model: nn.Sequential) -> None:
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]


# ---- prepare and convert before the weights are there


@pytest.mark.parametrize(("build", "device"), [(net, "cpu"), (net, "meta"), (on_meta, "meta")])
@pytest.mark.parametrize("config", ["int4-g32", QATConfig("int4-g32", step="prepare")], ids=["quantise", "prepare"])
def test_a_device_takes_weights_with_values_and_meta_takes_those_without(build: Any, device: str, config: Any) -> None:
    model = build()
    quantize_(model, config, device=device)
    assert {t.device.type for t in model.state_dict().values()} == {device}


@pytest.mark.parametrize("build", [on_meta, empty], ids=["torch.device", "init_empty_weights"])
@pytest.mark.parametrize("load", ["assign", "to_empty"])
@pytest.mark.parametrize("config", (OURS | TORCHAO).values(), ids=OURS | TORCHAO)
def test_preparing_before_loading_equals_preparing_after(config: Any, load: str, build: Any) -> None:
    loaded = net()
    state = copy.deepcopy(loaded.state_dict())
    quantize_(loaded, QATConfig(config))
    model = build()
    quantize_(model, QATConfig(config))
    if load == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(state, assign=load == "assign")
    outputs = [m(X) for m in (model, loaded)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(model[0].weight.grad, loaded[0].weight.grad)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(X), outputs[1])


def holding_nan() -> nn.Sequential:
    state = net().state_dict()
    state["2.weight"][3, 4] = torch.nan
    model = on_meta()
    quantize_(model, QATConfig("nvfp4"))
    model.load_state_dict(state, assign=True)
    return model


def with_a_forward_of_its_own() -> nn.Sequential:
    model = net()
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    return model


def prepared_and_offloaded() -> nn.Module:
    model = offloaded(net())
    quantize_(model, QATConfig("nvfp4"))
    return model


PREPARE, CONVERT = QATConfig("nvfp4"), QATConfig(step="convert")
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "moved from meta": (on_meta, partial(quantize_, config=PREPARE, device="cpu"), "0.weight .*meta"),
    "NaN loaded after prepare": (holding_nan, partial(quantize_, config=CONVERT), r"2 \(64, 96\): .*NaN or Inf"),
    "another forward": (with_a_forward_of_its_own, partial(quantize_, config=PREPARE), r"0 \(96, 64\)"),
    "offloaded": (
        lambda: offloaded(net()),
        partial(quantize_, config="nvfp4"),
        r"0 \(96, 64\): accelerate",
    ),
    "offloaded, prepared": (prepared_and_offloaded, partial(quantize_, config=CONVERT), r"0 \(96, 64\): accelerate"),
    "unprepared": (net, unprepare, "nothing to unprepare"),
    "switched off": (net, partial(set_fake_quant, enabled=False), "Sequential has no prepared layer"),
}


@pytest.mark.parametrize(("make", "call", "name"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_by_name(make: Any, call: Any, name: str) -> None:
    model = make()
    classes = [type(m) for m in model]
    with pytest.raises(ValueError, match=name):
        call(model)
    assert [type(m) for m in model] == classes


@pytest.mark.parametrize("step", [QATConfig("int8-weight"), "int8-weight"], ids=["prepared", "skeleton"])
def test_weights_and_inputs_on_two_devices_are_an_error_and_not_uninitialised_memory(step: Any) -> None:
    model, there = on_meta(), net()
    with torch.device("meta"):
        embedding = nn.Embedding(32, 64)
    for made in (model, there, embedding):
        quantize_(made, step, filter_fn=lambda m, fqn: isinstance(m, nn.Linear | nn.Embedding))
    for made, x in ((model, X), (there, X.to("meta")), (embedding, torch.arange(4))):
        with pytest.raises(ValueError, match="on meta"):
            made(x)


class Moves(TorchDispatchMode):
    """Counts the float matrices on the target device that are alive when another one arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Any] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.is_meta and not args[0].is_meta and out.dim() == 2:
            self.alive = [r for r in self.alive if r() is not None] + [weakref.ref(out)]
            self.most = max(self.most, len(self.alive))
        return out


def test_device_moves_one_weight_at_a_time() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    with Moves() as moves:
        quantize_(model, "int4-g32", device="meta")
    assert moves.most == 1
    assert all(m.weight.is_meta and type(m.weight) is PackedTensor for m in model)


# ---- accelerate's hooks


def split(model: nn.Module) -> nn.Module:
    return dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "cpu"}, main_device="cpu", force_hooks=True)


def offloaded(model: nn.Module) -> nn.Module:
    return cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("hook", [split, offloaded], ids=["split", "offloaded"])
@pytest.mark.parametrize("order", ["hook, prepare", "prepare, hook"])
def test_prepared_layers_compute_under_accelerates_hooks(hook: Any, order: str) -> None:
    model, config = net(), QATConfig("nvfp4")
    plain = model(X)
    reference = copy.deepcopy(model)
    quantize_(reference, config)
    if order == "hook, prepare":
        model = hook(model)
        quantize_(model, config)
    else:
        quantize_(model, config)
        model = hook(model)
    assert hasattr(model[0], "_hf_hook")
    assert torch.equal(model(X), reference(X))
    assert not torch.equal(model(X), plain)
    set_fake_quant(model, False)
    assert torch.equal(model(X), plain)
    set_fake_quant(model, True)
    assert unprepare(model) == 2
    assert torch.equal(model(X), plain)
    quantize_(model, config)
    if hook is split:
        converted = copy.deepcopy(model)
        quantize_(converted, QATConfig(step="convert"))
        assert torch.equal(converted(X), reference(X))
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(X), reference(X))


# ---- unprepare


def test_unprepare_leaves_the_model_as_it_was() -> None:
    model = net().eval()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    model[0].note = "kept"
    model[2].weight.requires_grad_(False)
    before, weights, output = dict(vars(model[0])), list(model.parameters()), model(X)
    quantize_(model, QATConfig("nvfp4"))
    assert not torch.equal(model(X), output)
    assert unprepare(model) == 2
    assert_plain(model)
    assert vars(model[0]) == before
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert not model[2].weight.requires_grad
    assert not model[0].training
    assert torch.equal(model(X), output)
    assert calls == ["hook"] * 3
    layer = model[0]
    quantize_(layer, QATConfig("int4-g32"))  # and can be prepared again, for another config, alone
    layer(X).sum().backward()
    torch.optim.SGD(layer.parameters(), 0.5).step()
    trained = layer.weight.detach().clone()
    assert unprepare(layer) == 1 and torch.equal(layer.weight, trained)
