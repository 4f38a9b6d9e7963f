"""The class of converted linear layers: it computes what F.linear on its weight computes, and follows its weight."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cpu_library import with_library
from support.linear_cases import BF16, BY_NAME, assert_equal, counting, data, inputs, layer, prepared
from support.packed_cases import cases, general, packed, same
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import aoquant
from aoquant import get_format, quantize_
from aoquant.linear.packed import PackedLinear, adopt
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
library = pytest.fixture(with_library)


@cases
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_every_shape_equals_the_general_path_and_the_prepared_layer(name: str, bias: bool) -> None:
    case = BY_NAME[name]
    qat = prepared(case, layer(case, BF16, bias=bias))
    module = packed(name, bias)
    for what, x in inputs("normal", case.k, BF16).items():
        with torch.no_grad():
            assert_equal(module(x), qat(x), what)
        assert_equal(module(x).detach(), general(module, x).detach(), what)


def test_a_deleted_layer_is_freed_without_a_collection() -> None:
    """A cycle would keep the weights of a deleted model on the GPU until Python looks for cycles."""
    module = packed("int4-g32", True)
    assert ", weight=PackedTensor(" in repr(module)
    assert repr(copy.deepcopy(module)) == repr(module)
    with torch.no_grad():
        module(data("normal", 2, module.in_features, BF16))
    weight = weakref.ref(module.weight)
    gc.disable()
    try:
        del module
        assert weight() is None
    finally:
        gc.enable()


def test_a_deleted_weight_takes_its_codes_along() -> None:
    """The layer reads views of them, and gets another weight later."""
    module, x = packed("int4-g32", True), data("normal", 2, BY_NAME["int4-g32"].k, BF16)
    weight, codes = module.weight, weakref.ref(module.weight.qdata)
    with torch.no_grad():
        wanted = module(x)
        del module.weight, weight
        assert codes() is None
        with pytest.raises(AttributeError, match="weight"):
            module(x)
        module.weight = packed("int4-g32", True).weight
        assert_equal(module(x), wanted)


class Doubled(nn.Module):
    def forward(self, b: Tensor) -> Tensor:
        return b * 2


def make_buffer(module: nn.Module, name: str) -> None:
    value = getattr(module, name).detach()
    delattr(module, name)
    module.register_buffer(name, value)


BIASES = {
    "pruned": prune.identity,
    "parametrised": lambda module, name: parametrize.register_parametrization(module, name, Doubled()),
    "a buffer": make_buffer,
}


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act"])
@pytest.mark.parametrize("how", BIASES)
@pytest.mark.parametrize("kind", ["packed", "prepared"])
def test_a_bias_that_is_no_parameter_is_added(name: str, how: str, kind: str) -> None:
    """In the second call too: the first one is watched, and takes the general path."""
    case = BY_NAME[name]
    module = packed(name) if kind == "packed" else prepared(case, layer(case, BF16)).requires_grad_(False)
    x = data("normal", 3, case.k, BF16)
    with torch.no_grad():
        module.bias.fill_(100.0)
        BIASES[how](module, "bias")
        assert "bias" not in module._parameters
        want = F.linear(x, module.weight, module.bias) if kind == "packed" else module(x)
        for _ in range(2):
            assert_equal(module(x), want)
        assert want.float().mean() > (150 if how == "parametrised" else 90)
        if kind == "packed":
            assert_equal(torch.compile(module, backend="eager")(x), want)


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act", "int8-act", "torchao-int8"])
@pytest.mark.parametrize("kernels", [True, False], ids=["csrc", "no csrc"])
def test_a_bias_is_read_as_nn_linear_reads_it(name: str, kernels: bool, request: pytest.FixtureRequest) -> None:
    """One value for all, and values that do not lie side by side; another number of them is refused in words."""
    if kernels:
        request.getfixturevalue("library")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, dtype=BF16)).requires_grad_(False)
    recipe = {"nvfp4-act": "nvfp4", "int8-act": "int8"}.get(name, name)
    quantize_(model, recipe)
    module = model[0]
    for rows in (1, 5, 100):
        x = torch.randn(rows, 64, dtype=BF16)
        with torch.no_grad():
            for odd, plain in (
                (torch.tensor([3.0]), torch.full((32,), 3.0)),
                (torch.arange(64.0)[::2], torch.arange(0.0, 64, 2)),
            ):
                module.bias = nn.Parameter(plain.to(BF16))
                want = module(x)
                module.bias = nn.Parameter(odd.to(BF16), requires_grad=False)
                assert_equal(module(x), want)
                assert_equal(F.linear(x, module.weight, module.bias), want)
            if not name.startswith("torchao"):
                for shape in ((5,), (3, 32)):
                    module.bias = nn.Parameter(torch.zeros(shape, dtype=BF16))
                    said = rf"bias needs 32 values, one for each output, got shape {re.escape(str(shape))}"
                    with pytest.raises(ValueError, match=said):
                        module(x)


def through_torch(module: nn.Module) -> nn.Module:
    torch.save(module, stored := io.BytesIO())
    stored.seek(0)
    return torch.load(stored, weights_only=False)  # type: ignore[no-any-return]


@cases
def test_state_is_that_of_a_linear_layer(name: str) -> None:
    module, x = packed(name), data("normal", 3, BY_NAME[name].k, BF16)
    assert isinstance(module, nn.Linear) and list(module.state_dict()) == ["weight", "bias"]
    assert [n for n, _ in module.named_parameters()] == ["weight", "bias"] and not list(module.buffers())
    with torch.no_grad():
        want = module(x)
    ways = [copy.deepcopy, through_torch]
    if name == "int4-g32":  # torch's plain pickles hold no float8
        ways.append(lambda m: pickle.loads(pickle.dumps(m)))
    for how in ways:
        copied = how(module)
        assert type(copied) is PackedLinear
        assert copied.weight.qdata.data_ptr() != module.weight.qdata.data_ptr()
        with torch.no_grad():
            assert_equal(copied(x), want)
        same(copied, x)
    torch.save(module.state_dict(), state := io.BytesIO())
    weight = torch.load(io.BytesIO(state.getvalue()))["weight"]
    assert not [k for k in vars(weight) if k.startswith("_") and k != "_is_param"]


def _parts(module: nn.Linear, other: nn.Linear) -> None:
    w, new = module.weight, other.weight
    w.qdata, w.zero_point = new.qdata, new.zero_point
    w.scale = new.scale


def _parameter(module: nn.Linear, other: nn.Linear) -> None:
    module._parameters["weight"] = other.weight  # as hooks do it


def _data(module: nn.Linear, other: nn.Linear) -> None:
    module.weight.data = other.weight


CHANGES: dict[str, Callable[[nn.Linear, nn.Linear], Any]] = {
    "state_dict, in place": lambda module, other: module.load_state_dict(other.state_dict()),
    "state_dict, assigned": lambda module, other: module.load_state_dict(other.state_dict(), assign=True),
    "assigned": lambda module, other: setattr(module, "weight", other.weight),
    "parameter": _parameter,
    "data": _data,
    "swapped": lambda module, other: torch.utils.swap_tensors(module.weight, other.weight),
    "part by part": _parts,
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_it_follows_its_weight(change: str, dtype: torch.dtype) -> None:
    """Whether compiled or eager code comes first after the change; and back to its own weight. What is written behind
    the module's back, compiled code sees after an eager call.
    """
    if dtype != BF16 and change in ("state_dict, in place", "part by part"):
        pytest.skip("which keeps the dtype")
    x = data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    for compiled_first in (True, False) if change != "parameter" else (False,):
        module, own = packed("int4-g32", bias=False), packed("int4-g32", bias=False)
        other = packed("int4-g32", bias=False, kind="constant").to(dtype)
        want = F.linear(x.to(dtype), other.weight)
        compiled = torch.compile(module, backend="aot_eager")
        first = compiled(x)
        assert_equal(module(x), first)
        CHANGES[change](module, other)
        for run in (compiled, module) if compiled_first else (module, compiled):
            assert_equal(run(x.to(dtype)), want)
        assert dtype != BF16 or not torch.equal(first, want)
        module.weight = own.weight
        assert_equal(module(x), first)
        assert_equal(compiled(x), first)


@torch.no_grad()
def test_it_follows_a_cast() -> None:
    module, x = packed("int4-g32"), data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    same(module.to(torch.float16), x.half())
    same(module.float(), x.float())


def test_a_float_weight_makes_it_a_linear_layer_again() -> None:
    case = BY_NAME["int4-g32"]
    module, x = packed("int4-g32"), data("normal", 3, case.k, BF16)
    weight, values = module.weight, module.weight.dequantize()
    module.weight = nn.Parameter(values)
    assert type(module) is nn.Linear
    assert_equal(module(x), F.linear(x, values, module.bias))
    module.weight = weight
    adopt(module)
    assert type(module) is PackedLinear
    same(module, x)


def test_functional_call_takes_its_weights() -> None:
    module, other = packed("int4-g32"), packed("int4-g32", kind="constant")
    x = data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    with torch.no_grad():
        want = module(x)
        given = {"weight": other.weight, "bias": other.bias}
        assert_equal(functional_call(module, given, (x,)), other(x))
        assert_equal(module(x), want)
        floats = other.weight.dequantize()
        assert_equal(functional_call(module, {"weight": floats}, (x,)), F.linear(x, floats, module.bias))
        assert_equal(module(x), want)
    assert type(module) is PackedLinear
    same(module, x)


def test_calls_that_are_not_ordinary_are_checked_as_before() -> None:
    case = BY_NAME["nvfp4-act"]
    module, x = packed("nvfp4-act"), data("normal", 3, case.k, BF16)
    with torch.no_grad():
        module(x)
        with pytest.raises(ValueError, match="K = "):
            module(x[:, :-1])
        with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
            module(x.double())
        with pytest.raises(ValueError, match="move one of them"):
            module(x.to("meta"))
        with pytest.raises(ValueError, match=r"input is torch.float32 and its weight torch.bfloat16: cast one of them"):
            module(x.float())
        with torch.autocast("cpu", dtype=torch.float16):
            assert module(x).dtype == torch.float16
        with counting("matmul") as calls:  # a mode sees the registered op
            module(x)
        assert len(calls["matmul"]) == 1
    y = module(x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("how", ["context", "environment"])
def test_a_backend_that_is_forced_later_rules(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after calls whose kernel was chosen, in the module and in F.linear."""
    module, x = packed("int4-g32"), data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    with torch.no_grad():
        want = module(x)
        for name in ("nothing", "reference"):
            with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
                if how == "environment":
                    patch.setenv("AOQUANT_BACKEND", name)
                for run in (module, lambda x: F.linear(x, module.weight, module.bias)):
                    if name == "reference":
                        if how == "context":
                            stack.enter_context(aoquant.backend(name))
                        assert_equal(run(x), want)
                    elif how == "environment":
                        with pytest.raises(ValueError, match="nothing"):
                            run(x)
        assert_equal(module(x), want)


def test_a_weight_whose_kernel_takes_bfloat16_alone_says_so() -> None:
    e, recipe = (f := get_format("int4-g32")).encode(torch.randn(16, 64)), LinearRecipe(None, f, "bias_after")
    weight = PackedTensor.from_encoded(e, recipe, torch.float32)
    with torch.no_grad(), pytest.raises(ValueError, match="takes bfloat16 activations"):
        F.linear(torch.randn(3, 64), weight)
