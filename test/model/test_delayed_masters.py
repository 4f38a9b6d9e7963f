"""Delayed scaling in `quantized_model_init`: a weight's scale moves when its codes are written, never in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aoquant import HybridConfig, PackedWeightConfig, QATConfig, quantize_, quantized_model_init
from aoquant.linear.mastered import codes_of

WIDTH = 64
E4M3, E5M2 = "te-fp8-tensor", "te-fp8-e5m2-tensor"
DY = {"dgrad_grad_output": E5M2, "wgrad_grad_output": E5M2}
pytestmark = pytest.mark.filterwarnings("error::aoquant.AoquantWarning")
CONFIGS: dict[str, Any] = {
    "max": lambda: HybridConfig.fwd_bwd(E4M3, E4M3, amax_history=3).replaced(**DY),
    "most_recent": lambda: HybridConfig.fwd_bwd(E4M3, E4M3, amax_history=2, amax_select="most_recent").replaced(**DY),
    "margin": lambda: HybridConfig.fwd_bwd(E4M3, E4M3, amax_history=16, amax_margin=1).replaced(**DY),
    "fp8-hybrid": lambda: QATConfig(
        "fp8-hybrid", backward=HybridConfig(dgrad_weight=E4M3, wgrad_input=E4M3, **DY, amax_history=4)
    ),
}
STATE = ("amax_history", "amax_factor")


def network(tied: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
    if tied:
        model[2].weight = model[0].weight
    return model


def data(step: int) -> Tensor:
    return torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(step))


def backward(model: Any, step: int) -> Tensor:
    x = data(step)
    y: Tensor = model(x)
    ((y - x.flip(1)).square().mean() * 64).backward()
    return y.detach()


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


def train(model: Any, optimizer: Any, steps: range) -> list[Tensor]:
    found = []
    for step in steps:
        found.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_alike(a: nn.Module, b: nn.Module) -> None:
    want = b.state_dict()
    assert a.state_dict().keys() == want.keys()
    assert all(torch.equal(t, want[key]) for key, t in a.state_dict().items())


@pytest.mark.parametrize("name", CONFIGS)
def test_one_backward_a_step_is_the_prepared_models_training(name: str) -> None:
    """Outputs, gradients, weights, histories and factors of every step; and what convert deploys."""
    plain, packed = network(), network()
    quantize_(plain, CONFIGS[name]())
    masters = quantized_model_init(packed, CONFIGS[name]())
    optimizers, factors = (adamw(plain), adamw(masters)), set()
    for step in range(5):
        want, got = (train(m, o, range(step, step + 1)) for m, o in zip((plain, packed), optimizers, strict=True))
        assert torch.equal(got[0], want[0])
        assert_alike(packed, plain)
        factors.add(float(packed[0].amax_factor[1]))
        for layer in (packed[0], packed[2]):
            assert torch.equal(layer.weight.rows.scale, layer.amax_factor[1].reciprocal().view(1, 1))
    assert len(factors) > 2, "the weight's factor moves"
    masters.restore()
    for model in (plain, packed):
        config = "fp8-hybrid" if name == "fp8-hybrid" else PackedWeightConfig(E4M3, E4M3)
        quantize_(model, QATConfig(config, step="convert"))
    assert torch.equal(packed(data(9)), plain(data(9)))


def test_micro_batches_of_a_step_multiply_the_same_codes() -> None:
    model = network()
    masters = quantized_model_init(model, CONFIGS["max"]())
    optimizer = adamw(masters)
    train(model, optimizer, range(2))
    before, factor = model[0].weight.rows.codes.clone(), float(model[0].amax_factor[1])
    amax = float(model[0].codes["weight"].master.detach().abs().max())
    for i in range(3):
        backward(model, 2 + i)
        assert torch.equal(model[0].weight.rows.codes, before) and float(model[0].amax_factor[1]) == factor
    optimizer.step()
    history = model[0].amax_history[1].tolist()
    assert history[-1] == amax and history.count(amax) == 1, "once for a write"
    masters.refresh()
    masters.refresh()
    assert model[0].amax_history[1].tolist() == history, "a write without a backward in between moves no scale"


@pytest.mark.parametrize("how", ["masters", "model"])
def test_a_resumed_run_goes_on_bit_for_bit(how: str) -> None:
    """Also into a model that has trained already, in the middle of a step: nothing of its own is left."""
    first = network()
    masters = quantized_model_init(first, CONFIGS["max"]())
    optimizer = adamw(masters)
    train(first, optimizer, range(3))
    saved, moments = copy.deepcopy((masters if how == "masters" else first).state_dict()), optimizer.state_dict()
    moments = copy.deepcopy(moments)
    want = train(first, optimizer, range(3, 6))
    for used in (False, True):
        again = network()
        others = quantized_model_init(again, CONFIGS["max"]())
        if used:
            train(again, adamw(others), range(7, 9))
            backward(again, 9)
            others.zero_grad()
        (others if how == "masters" else again).load_state_dict(saved)
        resumed = adamw(others)
        resumed.load_state_dict(copy.deepcopy(moments))
        assert all(torch.equal(a, b) for a, b in zip(train(again, resumed, range(3, 6)), want, strict=True))
        assert_alike(again, first)


def test_a_float32_models_state_goes_either_way() -> None:
    plain, packed = network(), network()
    quantize_(plain, CONFIGS["max"]())
    masters = quantized_model_init(packed, CONFIGS["max"]())
    train(plain, adamw(plain), range(3))
    masters.load_state_dict(plain.state_dict())
    assert torch.equal(packed(data(5)), plain(data(5)))
    train(packed, adamw(masters), range(3, 5))
    plain.load_state_dict(packed.state_dict())
    assert torch.equal(packed(data(5)), plain(data(5)))


def test_tied_weights_are_refused_and_a_shared_layer_has_one_history() -> None:
    with pytest.raises(ValueError, match="0: its weight is tied"):
        quantized_model_init(network(tied=True), CONFIGS["max"]())
    model = network()
    model[2] = model[0]
    train(model, adamw(quantized_model_init(model, CONFIGS["max"]())), range(1))
    amax = float(network()[0].weight.detach().abs().max())
    assert model[0].amax_history[1].tolist() == [0.0, 0.0, pytest.approx(amax, rel=1e-6)]


def test_a_step_under_a_pending_backward_is_refused_by_name() -> None:
    model = network()
    masters = quantized_model_init(model, CONFIGS["max"]())
    optimizer = adamw(masters)
    pending = model(data(0)).square().mean()
    train(model, optimizer, range(1))
    with pytest.raises(ValueError, match=r"^[02]: its codes were written.*before the step"):
        pending.backward()
    optimizer.zero_grad()
    train(model, optimizer, range(1, 2))


@pytest.mark.parametrize("how", ["autograd.grad", "by hand"])
def test_other_ways_to_a_gradient_move_the_scale_too(how: str) -> None:
    model, plain = network(), network()
    masters = quantized_model_init(model, CONFIGS["max"]())
    quantize_(plain, CONFIGS["max"]())
    for step in range(3):
        for m in (model, plain):
            weights = list(m.parameters())
            loss = m(data(step)).square().mean() * 64
            if how == "autograd.grad":
                grads = torch.autograd.grad(loss, weights)
            else:
                loss.backward()
                grads = tuple(w.grad for w in weights)  # type: ignore[misc]
            with torch.no_grad():
                for w, g in zip(weights, grads, strict=True):
                    w.sub_(g, alpha=0.1)
                    w.grad = None
    masters.refresh()
    assert_alike(model, plain)
    assert float(model[0].amax_factor[1]) != 1


def test_a_compiled_model_trains_as_the_eager_one() -> None:
    states = []
    for compiled in (False, True):
        model = network()
        masters = quantized_model_init(model, CONFIGS["max"]())
        run: Any = torch.compile(model, backend="aot_eager") if compiled else model
        train(run, adamw(masters), range(4))
        states.append(copy.deepcopy(masters.state_dict()))
        if compiled:
            pending = run(data(0)).square().mean()
            train(run, adamw(masters), range(1))
            with pytest.raises((ValueError, RuntimeError), match=r"inplace|written"):
                pending.backward()
    assert all(torch.equal(t, states[1][key]) for key, t in states[0].items())
    torch._dynamo.reset()


@pytest.mark.parametrize("change", ["bfloat16", "double"])
def test_a_cast_keeps_scale_and_history(change: str) -> None:
    model = network()
    masters = quantized_model_init(model, CONFIGS["max"]())
    train(model, adamw(masters), range(3))
    state = [{name: getattr(model[i], name).clone() for name in STATE} for i in (0, 2)]
    codes = [model[i].weight.rows.codes.clone() for i in (0, 2)]
    model.to(getattr(torch, change))
    for i, before, own in zip((0, 2), state, codes, strict=True):
        assert all(torch.equal(getattr(model[i], name), value) for name, value in before.items())
        assert torch.equal(model[i].weight.rows.codes, own)
    assert all(codes_of(m) is not None and m.dtype == torch.float32 for m in masters.masters())


def test_frozen_weights() -> None:
    """Under delayed scaling a frozen weight would keep its first factor, 1: refused. Under scales of the step it stays
    as it is, and trains from when it is thawed.
    """
    model = network()
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^0: .*frozen.*amax_history=0"):
        quantized_model_init(model, CONFIGS["max"]())
    model = network()
    model[0].weight.requires_grad_(False)
    masters = quantized_model_init(model, QATConfig("fp8-hybrid"))
    before = model[0].codes["weight"].master.detach().clone()
    train(model, adamw(masters), range(1))
    assert torch.equal(model[0].codes["weight"].master, before) and model[0].weight.grad is None
    model[0].weight.requires_grad_()
    train(model, adamw(masters), range(1))
    assert not torch.equal(model[0].codes["weight"].master, before)
