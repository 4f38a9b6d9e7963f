"""The class of converted linear layers: it computes what F.linear on its weight computes, and follows its weight."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cpu_library import with_library
from support.linear_cases import BF16, BY_NAME, assert_equal, counting, data, inputs, layer, prepared
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import aoquant
from aoquant import WUSH, NVFP4WeightConfig, QATConfig, backend, explain, get_format, quantize_
from aoquant.layers.linear import LinearRecipe
from aoquant.layers.packed import PackedLinear, adopt
from aoquant.ops import native, router
from aoquant.ops.gemm import one_call
from aoquant.ops.router import Backend
from aoquant.tensor import PackedTensor

library = pytest.fixture(with_library)
CASES = ["int4-g32", "nvfp4-act", "nvfp4-h16", "fp8-row-act", "mxfp8-act"]
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def packed(name: str, bias: bool = True, kind: str = "normal") -> PackedLinear:
    case = BY_NAME[name]
    model = nn.Sequential(layer(case, BF16, bias=bias, kind=kind))
    quantize_(model, case.config)
    assert type(model[0]) is PackedLinear
    return model[0].requires_grad_(False)


def general(module: nn.Linear, x: Tensor) -> Tensor:
    """Under gradients, where nothing is remembered."""
    with torch.enable_grad():
        return F.linear(x, module.weight, module.bias)


def same(module: nn.Linear, x: Tensor) -> None:
    """Eager and compiled equal the general path."""
    want = general(module, x)
    with torch.no_grad():
        assert_equal(module(x), want, "module")
        assert_equal(F.linear(x, module.weight, module.bias), want, "F.linear")
        torch._dynamo.reset()
        assert_equal(torch.compile(module, backend="aot_eager", fullgraph=True)(x), want, "compiled")


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
                module.bias = nn.Parameter(torch.zeros(5, dtype=BF16))
                with pytest.raises(ValueError, match=r"bias needs 32 values, one for each output, got shape \(5,\)"):
                    module(x)


@cases
@pytest.mark.parametrize("kind", ["onehot", "outlier", "zero"])
def test_compiled_equals_eager(name: str, kind: str) -> None:
    same(packed(name), data(kind, 6, BY_NAME[name].k, BF16))


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
        with counting("scaled_mm") as calls:  # a mode sees the registered op
            module(x)
        assert len(calls["scaled_mm"]) == 1
    y = module(x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None


class Recorder:
    """A GEMM that multiplies as the reference does and counts what it is asked for, bound or not."""

    def __init__(self, binds: bool = True) -> None:
        self.bound = self.called = self.asked = 0
        self.backend = Backend("recorder", 50, self.why_not, self.run, bind=self.bind if binds else None)

    def why_not(self, r: Any) -> None:
        self.asked += 1

    def run(self, c: Any) -> Tensor:
        self.called += 1
        return next(b for b in router._backends if (b.name, b.role) == ("reference", "gemm")).run(c)

    def bind(self, r: Any, w: Any) -> Any:
        f = r.w_format

        def product(x: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
            self.bound += 1
            acc = x.float() @ f.operand(w, x.dtype).float().t()
            for alpha in (alpha_x, None if f.alpha(w) is None else f.alpha(w).t()):
                acc = acc if alpha is None else acc * alpha
            return (acc if bias is None else acc + bias.float()).to(x.dtype)

        return product


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(router, "_backends", list(router._backends))
    monkeypatch.setattr(router, "_routes", {})
    made = Recorder()
    router.register(made.backend)
    return made


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act", "fp8-row-act"])
def test_the_router_is_asked_once_for_each_number_of_rows(name: str, recorder: Recorder) -> None:
    module, k = packed(name), BY_NAME[name].k
    with torch.no_grad():
        for rows in (1, 3):
            x = data("normal", rows, k, BF16)
            with backend("reference"):
                want = module(x)
            for _ in range(3):
                assert_equal(module(x), want)
                assert_equal(module(x.view(1, rows, k)), want.view(1, rows, -1))
    assert recorder.bound == 12 and recorder.called == 0 and recorder.asked == 2
    assert explain(module).routes[-1].backend == "recorder"


@pytest.mark.parametrize("how", ["context", "environment", "registered"])
def test_what_is_forced_or_registered_later_rules(
    how: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = packed("int4-g32"), data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    with torch.no_grad():
        module(x)
        assert recorder.bound == 1
        if how == "context":
            with backend("reference"):
                module(x)
                F.linear(x, module.weight, module.bias)
        elif how == "environment":
            with monkeypatch.context() as m:
                m.setenv("AOQUANT_BACKEND", "reference")
                module(x)
                m.setenv("AOQUANT_BACKEND", "nothing")
                with pytest.raises(ValueError, match="nothing"):
                    module(x)
        else:
            later = Recorder()
            object.__setattr__(later.backend, "priority", 60)
            router.register(later.backend)
            module(x)
            assert later.bound == 1
        assert recorder.bound == 1 and recorder.called == 0


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


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "f16"])
def test_compiled_code_sees_a_weight_whose_content_was_replaced(dtype: torch.dtype) -> None:
    """By swap_tensors and part by part: before an eager forward, and after one, by the fast path again."""
    module, other = packed("int4-g32"), packed("int4-g32", kind="constant")
    x = data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    module.bias = None
    other.bias = None
    other.to(dtype)
    with torch.no_grad():
        compiled, theirs = torch.compile(module, backend="aot_eager"), torch.compile(other, backend="aot_eager")
        mine, new = compiled(x), theirs(x.to(dtype))
        torch.utils.swap_tensors(module.weight, other.weight)
        assert_equal(compiled(x.to(dtype)), new)
        assert_equal(theirs(x), mine)
        assert module._recipe_key is None
        assert_equal(module(x.to(dtype)), new)
        assert module._recipe_key is not None
        assert_equal(compiled(x.to(dtype)), new)
        old, w = copy.deepcopy(other.weight), module.weight
        compiled(x.to(dtype))
        w.qdata, w.zero_point = old.qdata, old.zero_point
        w.scale = old.scale
        if dtype is BF16:
            assert_equal(compiled(x), mine)
            assert_equal(module(x), mine)
            assert_equal(compiled(x), mine)


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


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act"])
def test_blocks_share_one_graph(name: str) -> None:
    case = BY_NAME[name]
    blocks = [nn.Sequential(packed(name), nn.ReLU()) for _ in range(3)]
    x = data("normal", 3, case.k, BF16)
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        for block in blocks:
            assert_equal(block(x), block[1](block[0](x)))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_compiled_step_has_one_op_and_guards_on_no_subclass() -> None:
    from torch._dynamo.backends.common import aot_autograd

    module, x = packed("int4-g32"), data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    graphs: list[Any] = []
    guards: list[Any] = []

    def keep(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def all_of(found: Any) -> list[bool]:
        guards.extend(found)
        return [True] * len(found)

    with torch.no_grad():
        run = torch.compile(
            module, fullgraph=True, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep),
            options={"guard_filter_fn": all_of},
        )  # fmt: skip
        assert_equal(run(x), module(x))
    ops = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function" and "aoquant" in str(n.target)]
    assert ops == ["aoquant.scaled_mm.default"]
    assert not [g.name for g in guards if "weight" in g.name]


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


@pytest.mark.parametrize(
    ("name", "number", "parts"),
    [
        ("int4-g32", 5 << 8 | 1 << 17, (True, False)),  # groups of 32, zeros
        ("nvfp4-dynamic", 1 | 4 << 8 | 1 << 18, (False, True)),  # groups of 16, alpha_w
    ],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_compiler_sees_one_operator_where_csrc_has_it(
    bias: bool, name: str, number: int, parts: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And today's op for more rows than it takes, under a forced backend, and where csrc is missing."""
    from torch._dynamo.backends.common import aot_autograd

    module, case = packed(name, bias), BY_NAME[name]
    library = torch.library.Library("aoquant_native", "FRAGMENT")
    library.define(
        "linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? alpha_w, Tensor? bias, int plan) -> Tensor"
    )
    told: list[int] = []

    def linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, alpha: Any, bias: Any, plan: int) -> Tensor:
        told.append(plan)
        assert codes.data_ptr() == module.weight.qdata.data_ptr() and (zero is not None, alpha is not None) == parts
        with backend("reference"):
            return F.linear(x, module.weight, bias)

    library.impl("linear", linear, "CPU")
    torch.library.register_fake("aoquant_native::linear", native._linear, lib=library)
    monkeypatch.setattr(one_call, "number", lambda *a: number if a[-1] <= 256 else None)
    module.weight = module.weight  # what it remembers of its weight is made anew
    graphs: list[list[str]] = []

    def keep(graph: Any, given: Any) -> Any:
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    compiler = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    with torch.no_grad():
        run = torch.compile(module, fullgraph=True, backend=compiler, dynamic=False)
        few, many = data("normal", 3, case.k, BF16).view(1, 3, -1), data("normal", 257, case.k, BF16)
        want = general(module, few)
        assert_equal(run(few), want)
        assert graphs == [["aoquant_native.linear.default"]] and told == [number]
        assert_equal(run(many), general(module, many))
        assert "aoquant_native.linear.default" not in graphs[-1] and len(graphs) == 2
        with backend("reference"):
            assert_equal(run(few), want)
        assert "aoquant.scaled_mm.default" in graphs[-1] and told == [number] and len(graphs) == 3
        with backend("reference"), backend("reference", role="gemm"):  # the number of blocks is guarded on by nothing
            assert_equal(run(few), want)
        assert len(graphs) == 3
        if bias:  # the operator reads N values side by side
            for odd in (module.bias.detach().repeat_interleave(2)[::2], torch.full((1,), 3.0, dtype=BF16)):
                module.bias = nn.Parameter(odd, requires_grad=False)
                assert_equal(run(few), general(module, few))
            assert told == [number] and "aoquant.scaled_mm.default" in graphs[-1]
            want = general(module, few)
    monkeypatch.setattr(one_call, "number", lambda *a: None)
    module.weight = module.weight
    with torch.no_grad():
        assert_equal(run(few), want)
    assert told == [number]
    library._destroy()


def test_a_bound_weight_takes_the_operator_of_a_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = packed("int4-g32"), list[int]()
    x = data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    monkeypatch.setattr(one_call, "number", lambda *a: 7)
    monkeypatch.setattr(one_call, "step", lambda number, f, w, dtype, general: made.append(number) or general)
    weight = PackedTensor.from_encoded(module.weight.encoded, module.weight.recipe, BF16)
    with torch.no_grad():
        assert_equal(F.linear(x, weight, module.bias), general(module, x))
    assert made == [7]


def test_what_a_compiler_sees_leaves_autocast_and_odd_shapes_to_the_general_path() -> None:
    module, x = packed("nvfp4-act").float(), data("normal", 3, BY_NAME["nvfp4-act"].k, torch.float32)
    with torch.no_grad():
        assert_equal(module._traced(x), general(module, x))
        with torch.autocast("cpu", BF16):
            assert module._traced(x).dtype == BF16
            assert_equal(module._traced(x), general(module, x))
        for odd in (x[0, 0], x[:, :-1]):
            with pytest.raises(ValueError, match="K = "):
                module._traced(odd)


def test_bound_weights_answer_ordinary_calls_alone() -> None:
    module = packed("nvfp4-act")
    bound, x = module.weight.bound, data("normal", 3, BY_NAME["nvfp4-act"].k, BF16)
    with torch.no_grad():
        y = bound.product(x, None)
        assert y is not None and bound.ordinary
        assert_equal(y, F.linear(x, module.weight))
        assert_equal(bound.product(x[:0], None), F.linear(x, module.weight)[:0])
        assert bound.product(x[0, 0], None) is None and bound.product(x[:, :-1], None) is None
        with torch.autocast("cpu", torch.float16):
            assert bound.product(x, None) is None
            assert F.linear(x, module.weight).dtype == torch.float16
        assert bound.product(x, None) is not None


def test_a_bound_weight_refuses_what_its_kernel_cannot_take() -> None:
    format = get_format("int4-g32")
    e = format.encode(torch.randn(16, 64))
    weights = {
        d: PackedTensor.from_encoded(e, LinearRecipe(None, format, "bias_after"), d) for d in (BF16, torch.float32)
    }
    assert weights[BF16].bound.ordinary and not weights[torch.float32].bound.ordinary
    with torch.no_grad(), pytest.raises(ValueError, match="takes bfloat16 activations"):
        F.linear(torch.randn(3, 64), weights[torch.float32])


def test_what_a_product_of_codes_alone_cannot_do_takes_the_general_path(recorder: Recorder) -> None:
    """A batch without rows, and a fitted transform, whose matrices the bound product is not given."""
    module = packed("int4-g32")
    with torch.no_grad():
        assert module(data("normal", 3, BY_NAME["int4-g32"].k, BF16)[:0]).shape == (0, module.out_features)
    assert recorder.bound == 0
    fitted = nn.Sequential(nn.Linear(64, 32).bfloat16())
    quantize_(fitted, QATConfig(NVFP4WeightConfig(activation="nvfp4", transform=WUSH(16))))
    x = torch.randn(8, 64).bfloat16()
    aoquant.calibrate(fitted, [x])
    y = fitted(x)
    quantize_(fitted, QATConfig(step="convert"))
    with torch.no_grad():
        assert_equal(fitted(x), y)
    assert recorder.bound == 0


def test_a_weight_remembers_a_bounded_number_of_rows() -> None:
    """Where every batch has another number: a step takes a kilobyte, and a model has hundreds of layers."""
    module, case = packed("int4-g32"), BY_NAME["int4-g32"]
    with torch.no_grad():
        for rows in range(1, 300):
            x = data("normal", rows, case.k, BF16)
            y = module(x)
        assert_equal(y, general(module, x))
    assert len(module.weight.bound._steps) <= 128
