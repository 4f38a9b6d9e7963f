"""A packed weight where PyTorch and accelerate move, share and count tensors: what nn.Linear's weight can do there."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from aoquant import quantize_
from aoquant.linear.packed import PackedLinear
from aoquant.linear.tensor import PackedTensor, same_bits
from aoquant.ops import flops
from aoquant.recipes import get_recipe

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(3, 64, dtype=BF16)


def packed(recipe: str = "int4-g32", seed: int = 0, dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32, dtype=dtype)).requires_grad_(False)
    quantize_(model, recipe)
    assert type(model[0]) is PackedLinear
    with torch.no_grad():
        model(X.to(dtype))  # the first forward is watched
    return model


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("recipe", ["int4-g32", "int8", "nvfp4", "hadamard16+nvfp4/hadamard16+nvfp4"])
def test_a_model_on_meta_gives_shapes(recipe: str, grad: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32, dtype=BF16), nn.Linear(32, 16, dtype=BF16))
    quantize_(model, recipe)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            y = model(X.to("meta"))
            assert y.is_meta and y.shape == (3, 16) and y.dtype == BF16


@pytest.mark.parametrize("how", [lambda m: m.float(), lambda m: m.to(F16), lambda m: m.to("meta"), lambda m: m.to("cpu"),
                                 lambda m: m.to("meta", F32), lambda m: m.to(torch.empty(0, dtype=F16))],
                         ids=["float", "dtype", "device", "its device", "both", "like another"])  # fmt: skip
def test_a_model_is_moved_under_inference_mode(how: object) -> None:
    assert callable(how)
    model, want = packed(), how(packed())
    with torch.inference_mode():
        how(model)
    w, other = model[0].weight, want[0].weight
    assert type(w) is PackedTensor and (w.dtype, w.device) == (other.dtype, other.device)
    assert not w.is_inference() and not w.qdata.is_inference()
    if not w.is_meta:
        assert same_bits(w, other) and torch.equal(model(X.to(w.dtype)), want(X.to(w.dtype)))
        model.load_state_dict(how(packed(seed=1)).state_dict())  # in place


def test_parts_lie_in_shared_memory() -> None:
    """A child process writes the codes, and the layer sees it."""
    model = packed()
    with torch.no_grad():
        want = model(X)
        assert not model[0].weight.is_shared()
        assert model.share_memory() is model and model[0].weight.is_shared() and model[0].weight.qdata.is_shared()
        assert torch.equal(model(X), want)
        child = os.fork()
        if not child:
            model[0].weight.qdata.zero_()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not model[0].weight.qdata.any() and not torch.equal(model(X), want)


@torch.no_grad()
def test_data_shares_the_other_weights_codes() -> None:
    model, other = packed(), packed("int8", 1)
    model[0].bias = other[0].bias = None
    model[0].weight.data = other[0].weight
    want = other(X)
    assert torch.equal(model(X), want)
    other[0].weight.qdata.zero_()  # it is the other's memory, as of any tensor
    assert torch.equal(model(X), other(X)) and not torch.equal(model(X), want)
    with pytest.raises(ValueError, match=r"data of a PackedTensor \(int8-row\)"):
        model[0].weight.data = torch.zeros(32, 64)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=i > 0, dtype=BF16) for i in range(3))
        self.k.weight = self.q.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.v(self.q(x) + self.k(x))
        return y


@pytest.mark.parametrize("recipe", ["int4-g32", "int8", "nvfp4"])
def test_accelerate_offloads_packed_layers(recipe: str) -> None:
    model = Projections().requires_grad_(False)
    quantize_(model, recipe)
    with torch.no_grad():
        want = model(X)
        cpu_offload(model, torch.device("cpu"))
        for _ in range(3):
            assert model.q.weight.is_meta and type(model.v.weight) is PackedTensor
            assert torch.equal(model(X), want)


@pytest.mark.parametrize("recipe", ["int4-g32", "int8", "nvfp4-weight"])
def test_products_are_counted(recipe: str) -> None:
    model, x = packed(recipe), X.view(3, 1, 64)
    for grad in (False, True):
        with FlopCounterMode(display=False) as seen, torch.set_grad_enabled(grad):
            model(X)
            model(x)
        assert seen.get_total_flops() == 2 * (2 * 3 * 64 * 32)


def test_products_are_counted_where_nothing_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(flops, "register", lambda: asked.append(1))
    quantize_(nn.Sequential(nn.Linear(64, 32)), "int4-g32")
    assert asked


@pytest.mark.parametrize("recipe", ["int4-g32", "mxfp8-hp", "quartet"])
def test_products_of_a_training_step_are_counted(recipe: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 32, dtype=BF16)), X.repeat(32, 1).requires_grad_()
    quantize_(model, get_recipe(recipe).prepare())
    model(x)
    with FlopCounterMode(display=False) as seen:
        model(x).sum().backward()
    assert seen.get_total_flops() == 3 * (2 * 96 * 64 * 32)


def test_a_weight_is_an_inference_tensor_where_its_codes_are() -> None:
    """torch refuses to save an inference tensor for backward, and refuses a view that is ordinary."""
    ordinary, x = nn.Linear(64, 32).bfloat16(), torch.randn(3, 64, dtype=torch.bfloat16)
    quantize_(nn.Sequential(ordinary), "int4-g32")
    with torch.inference_mode():
        inside = nn.Linear(64, 32).bfloat16()
        quantize_(nn.Sequential(inside), "int4-g32")
        for layer, infers in ((ordinary, False), (inside, True)):
            w = layer.weight.data
            moved = (w, w.detach(), w[:16], w.to(torch.float16))
            assert [part.is_inference() for part in moved] == [infers] * 4
            assert [part.qdata.is_inference() for part in moved] == [infers] * 4
    assert ordinary(x).shape == (3, 32)


def test_packed_weights_of_other_dtypes_or_shapes_are_not_the_same_bits() -> None:
    """Their codes and scales are, or hold none."""
    model = nn.Linear(64, 32)
    weights = []
    for dtype in (F32, BF16, F32):
        layer = nn.Linear(64, 32, dtype=dtype)
        layer.weight.data.copy_(model.weight.bfloat16())
        quantize_(nn.Sequential(layer), "mxfp4")
        weights.append(layer.weight)
    one, other, again = weights
    assert torch.equal(one.qdata, other.qdata) and same_bits(one, again)
    assert not same_bits(one, other) and not same_bits(one, one[:16]) and not same_bits(one, model.weight)
