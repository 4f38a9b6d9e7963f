"""The class of converted linear layers: it computes what F.linear on its weight computes, and follows its weight."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import threading
import weakref

import pytest
import torch
from support.cpu_library import with_library
from support.linear_cases import BF16, BY_NAME, assert_equal, counting, data, inputs, layer, prepared
from support.packed_cases import cases, dynamo_afresh, general, packed, same
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import aoquant
from aoquant import QATConfig, quantize_
from aoquant.layers.packed import PackedLinear, adopt
from aoquant.tensor import PackedTensor

fresh_dynamo = pytest.fixture(dynamo_afresh, autouse=True)
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


@cases
def test_state_is_that_of_a_linear_layer(name: str) -> None:
    module, x = packed(name), data("normal", 3, BY_NAME[name].k, BF16)
    assert isinstance(module, nn.Linear) and list(module.state_dict()) == ["weight", "bias"]
    assert [n for n, _ in module.named_parameters()] == ["weight", "bias"] and not list(module.buffers())
    with torch.no_grad():
        want = module(x)
        copied = copy.deepcopy(module)
        assert copied.weight.qdata.data_ptr() != module.weight.qdata.data_ptr()
        assert copied._codes.data_ptr() == copied.weight.qdata.data_ptr()
        assert_equal(copied(x), want)
        stored = io.BytesIO()
        torch.save(module, stored)
        loaded = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
        assert type(loaded) is PackedLinear and loaded._codes.data_ptr() == loaded.weight.qdata.data_ptr()
        same(loaded, x)
    state = io.BytesIO()
    torch.save(module.state_dict(), state)
    weight = torch.load(io.BytesIO(state.getvalue()))["weight"]
    assert not [k for k in vars(weight) if k.startswith("_") and k != "_is_param"]


def test_pickle_keeps_the_class() -> None:
    module, x = packed("int4-g32"), data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    same(pickle.loads(pickle.dumps(module)), x)


def test_it_follows_its_weight() -> None:
    case = BY_NAME["int4-g32"]
    module, x = packed("int4-g32"), data("normal", 3, case.k, BF16)
    other = packed("int4-g32", kind="constant")
    same(module, x)
    with torch.no_grad():
        compiled = torch.compile(module, backend="aot_eager")
        first = compiled(x)
        module.load_state_dict(other.state_dict())  # in place
        assert_equal(module(x), other(x))
        assert_equal(compiled(x), other(x))
        assert not torch.equal(first, other(x))
    module.load_state_dict(packed("int4-g32").state_dict(), assign=True)
    same(module, x)
    with torch.no_grad():
        compiled(x)
        module.weight = other.weight
        assert_equal(compiled(x), other(x))
    same(module, x)
    assert_equal(module(x), other(x))
    module._parameters["weight"] = packed("int4-g32").weight  # as hooks do it
    with torch.no_grad():
        assert_equal(module(x), first)
    same(module, x)
    same(module.to(torch.float16), x.half())
    same(module.float(), x.float())


def test_a_float_weight_makes_it_a_linear_layer_again() -> None:
    case = BY_NAME["int4-g32"]
    module, x = packed("int4-g32"), data("normal", 3, case.k, BF16)
    weight, values = module.weight, module.weight.dequantize()
    module.weight = nn.Parameter(values)
    assert type(module) is nn.Linear and not [n for n in vars(module) if n in ("_codes", "_recipe_key", "_parts_of")]
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


def test_a_changed_part_is_seen() -> None:
    module, x = packed("int4-g32"), data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    other = packed("int4-g32", kind="constant")
    with torch.no_grad():
        module(x)
        w = module.weight
        assert isinstance(w, PackedTensor) and w.__tensor_flatten__() is w.__tensor_flatten__()
        w.qdata, w.scale, w.zero_point = other.weight.qdata, other.weight.scale, other.weight.zero_point
        assert_equal(F.linear(x, w, module.bias), F.linear(x, other.weight, module.bias))
        assert_equal(module(x), F.linear(x, other.weight, module.bias))


def test_refreshed_codes_are_seen() -> None:
    case = BY_NAME["int4-g32"]
    training = nn.Sequential(layer(case, BF16))
    quantize_(training, QATConfig(case.config, step="prepare"))
    served = copy.deepcopy(training)
    quantize_(served, QATConfig(case.config, step="convert"))
    x = data("normal", 3, case.k, BF16)
    with torch.no_grad():
        run = torch.compile(served, backend="aot_eager")
        before = served(x)
        assert_equal(run(x), before)
        training[0].weight.mul_(-0.5)
        aoquant.refresh_(served, training)
        assert_equal(served(x), training(x))
        assert_equal(run(x), training(x))
        assert not torch.equal(before, served(x))


def test_threads_give_the_tokens_of_one() -> None:
    model = nn.Sequential(packed("nvfp4-act", bias=False)).eval()
    k = BY_NAME["nvfp4-act"].k
    xs = [data("normal", rows, k, BF16, seed) for seed, rows in enumerate((1, 2, 3, 5))]
    with torch.no_grad():
        want = [packed("nvfp4-act", bias=False)(x) for x in xs]
    found: dict[int, list[Tensor]] = {}

    def run(which: int) -> None:
        with torch.no_grad():
            found[which] = [model(x) for _ in range(20) for x in xs]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in found.values():
        for i, y in enumerate(made):
            assert_equal(y, want[i % len(xs)])
    assert len(found) == 2
