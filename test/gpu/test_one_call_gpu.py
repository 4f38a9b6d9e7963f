"""One operator for a packed layer of few rows: the bytes of the encoder and of the GEMM that it stands for; W in blocks
for many rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bits import same, same_bytes
from support.gemm import with_values
from support.gpu import BF16, CUDA, F16, launched
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from aoquant import backend, explain, get_format, quantize_
from aoquant.formats import Operand, as_operand, tiles
from aoquant.linear.packed import PackedLinear
from aoquant.ops import codec, gemm_request, linear_plan, native
from aoquant.ops.call import Call
from aoquant.ops.gemm import few_rows, one_call
from aoquant.ops.router import CodecRequest, runner
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu

RECIPES = ["int4-g128", "nvfp4-weight", "mxfp4-weight", "nvfp4", "fp8", "mxfp4", "nvfp4-4over6", "gridflip-4over6"]
# of a call with some rows and one with one row; 2 where x is not encoded
LAUNCHES = {"nvfp4": 3, "fp8": 3, "mxfp4": 4, "nvfp4-4over6": 4, "gridflip-4over6": 4}
N, K = 512, 1024


@pytest.fixture(autouse=True)
def needs_the_library() -> None:
    if (reason := native.why_not()) is not None:
        pytest.skip(reason)


def layer(name: str, bias: bool = False, n: int = N, k: int = K, dtype: torch.dtype = BF16) -> PackedLinear:
    torch.manual_seed(n + k)
    model = nn.Sequential(nn.Linear(k, n, bias=bias, device=CUDA, dtype=dtype)).requires_grad_(False)
    quantize_(model, get_recipe(name).make())
    assert type(model[0]) is PackedLinear
    return model[0]


def hard_rows(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Normal rows, and where there are many, some with outliers, zeros, subnormals, Inf, NaN, huge and tiny values."""
    torch.manual_seed(rows + k)
    x = torch.randn(rows, k, device=CUDA)
    if rows > 2:
        x[1::9] *= torch.randn(k, device=CUDA).exp() ** 3
        x[2::9] = 0.0
        x[3::9] *= 1e-38
        x[4::9] *= 1e30
        x[5::9, k // 2] = float("inf")
        x[6::9, 0] = float("nan")
        x[7::9, :16] = -0.0
        x[8::9] *= torch.tensor([1.0, 1e-6], device=CUDA).repeat(k // 2)
    return x.to(dtype)


@pytest.mark.parametrize("k", [16, 32, 48, 96, 1152, 2048, 14336, 20000])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_rows_are_encoded_as_triton_encodes_them(k: int, dtype: torch.dtype) -> None:
    formats = [get_format(name) for name in linear_plan.ROW_FORMATS]
    for of in (as_operand(f) for f in formats if k % (f.block or 16) == 0):
        assert runner(CodecRequest("quantize", of, CUDA, dtype, 3, k, False, True)).name == "cuda"
        for rows in (1, 3, 20, 256):
            x = hard_rows(rows, k, dtype)
            for operand in (True, False):
                made = with_values(of, x, dtype, operand=operand)
                with backend("triton", role="quantize"):
                    want = with_values(of, x, dtype, operand=operand)
                where = of.name, rows, operand
                assert same_bytes(made.values, want.values) and same_bytes(made.alpha, want.alpha), where
                assert (made.alpha is None) == (of.name == "mxfp4")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [None, BF16, torch.float32], ids=["no-bias", "bf16", "f32"])
def test_it_equals_its_encoder_and_its_gemm(name: str, bias: torch.dtype | None) -> None:
    module = layer(name)
    b = None if bias is None else torch.randn(N, device=CUDA).to(bias)
    for rows in (1, 2, 4, 5, 8, 9, 16, 17, 64, 65, 256):
        for x in (hard_rows(rows, K, BF16), torch.eye(K, device=CUDA, dtype=BF16)[torch.arange(rows) * 7 % K]):
            with torch.no_grad():
                y = module.weight.bound.product(x, b)
                with backend("triton", role="quantize"):  # a forced backend takes the general way
                    want = nn.functional.linear(x, module.weight, b)
                assert y is not None and ((y == want) | (y.isnan() & want.isnan())).all(), rows


@pytest.mark.parametrize(
    "shape", [(200, 160), (512, 1056), (2048, 8192), (2100, 2048), (5000, 1120), (8300, 1024), (14336, 512)], ids=str
)
@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_a_product_that_encodes_gives_the_bits_of_two_launches(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """For each kernel, by itself and for siblings; steps of 128 and rows of 512 do not divide every K."""
    n, k = shape
    module = layer(name, True, n, k, dtype)
    codes, scale, zero, alpha, bias, number = _arguments(module)
    encodes = linear_plan.ROW_FORMATS[f"{name}-row"]
    assert number >> 4 & 15 == encodes
    how = (linear_plan.CUDA_FORMATS["fp8"], 1) if name == "fp8" else (linear_plan.CUDA_FORMATS["e4m3"], 16)
    for rows in (1, 2, 3, 4, 5, 8, 9, 11, 16, 17, 32, 33, 100, 200):
        x = hard_rows(rows, k, dtype)
        operand, alpha_x = native.operator("encode_rows")(x, encodes, False)
        want = native.operator("decode_mm")(operand, codes, scale, zero, alpha_x, alpha, bias, *how, 1, 0.0, 0.0)
        got = native.operator("linear")(x, codes, scale, zero, alpha, bias, number)
        several = native.operator("siblings")(x, *([part] * 3 for part in _arguments(module)))
        for y in (got, *several):
            assert same(y, want), rows


@pytest.mark.parametrize("weight", ["int4-g128", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_rows_in_mxfp4_go_with_any_weight(weight: str, dtype: torch.dtype) -> None:
    """They have no scale of their own, beside W's."""
    of, f = as_operand(get_format("mxfp4")), get_format(weight)
    e = f.encode(torch.randn(N, K, device=CUDA).to(dtype))
    number = one_call.number("aoquant", of, as_operand(f), e, dtype, 1)
    if weight == "mxfp4" and dtype == F16:  # W's e8m0 scales leave float16's range
        assert number is None
        return
    assert number is not None and linear_plan.encodes(number) == linear_plan.ROW_FORMATS["mxfp4"]
    for rows in (1, 4, 17, 100):
        x = hard_rows(rows, K, dtype)
        with backend("triton", role="quantize"):
            operand = with_values(of, x, dtype, operand=True).values
        want = product(f, e, operand)
        got = native.operator("linear")(x, e.codes, e.scale, e.zero, few_rows.alpha_of(f, e), None, number)
        assert same(got, want), rows


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_what_runs(name: str) -> None:
    """As many launches as it says, for any layout of x, and nothing where a request is another's."""
    module = layer(name)
    said = {r.step: r for r in explain(module).routes}
    together = said["in one call"]
    assert together.backend == one_call.NAME and (together.first, together.last) == (1, 256)
    with torch.no_grad():
        x = torch.randn(2, 2, K, dtype=BF16, device=CUDA)
        want = module(x)
        # one row is encoded by the product itself in nvfp4-row and fp8-row
        kernels = launched(lambda: (module(x), module(x[0, 0])))
        assert len(kernels) == LAUNCHES.get(name, 2), kernels
        with torch.profiler.profile() as seen:
            module(x)
        assert any("aoquant_native::linear" in e.name for e in seen.events()), [e.name for e in seen.events()]
        assert want.shape == (2, 2, N)
        shifted = torch.randn(4 * K + 1, dtype=BF16, device=CUDA)[1:].view(2, 2, K)
        strided = torch.randn(2, 2, 2 * K, dtype=BF16, device=CUDA)[..., ::2]
        for other in (shifted, strided):
            other.copy_(x)
            assert torch.equal(module(other), want)
        assert torch.equal(module(x.view(4, K)), want.view(4, N)) and torch.equal(module(x[0, 0]), want[0, 0])


@pytest.mark.parametrize("name", ["int4-g128", "nvfp4", "fp8", "mxfp4", "nvfp4-4over6"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_compiler_sees_one_operator(name: str, bias: bool) -> None:
    module, x = layer(name, bias), torch.randn(1, 3, K, dtype=BF16, device=CUDA)
    graphs: list[Any] = []

    def keep(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep))
        assert torch.equal(run(x), module(x))
        called = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
        assert called == ["aoquant_native.linear.default"], called
        with backend("reference"):  # what is forced later rules
            assert torch.equal(run(x), module(x))
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["int4-g128", "nvfp4", "nvfp4-weight"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_blocks_of_a_large_weight(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a block of W's values is there at once, and y has the bits of the whole W's product."""
    n, k = 14336, 4096
    module = layer(name, bias, n, k)
    for rows in (257, 1024):
        x = torch.randn(rows, k, dtype=BF16, device=CUDA)
        with torch.no_grad():
            module(x)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = module(x)
            peak = torch.cuda.max_memory_allocated() - before
            rest = y.numel() * 2 + x.numel() * 2 + rows * (n * 4 if rows == 257 else 4) + (1 << 20)
            assert peak <= tiles.BLOCK + rest + (y.numel() * 2 if rows == 257 else 0), peak
            with monkeypatch.context() as whole:
                whole.setattr(tiles, "BLOCK", 1 << 40)
                assert torch.equal(layer(name, bias, n, k)(x), y)  # a layer that was not bound to blocks
        assert torch.equal(module(x).detach(), y)  # under gradients


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_few_rows_of_fp8(dtype: torch.dtype) -> None:
    """One-hot rows give the codes, NaN included, for each number of rows and of W's rows that has a kernel of its own.
    Sums are test_decode.py's.
    """
    f = get_format("fp8-row")
    for n, k in ((264, 1152), (2048, 2048), (2200, 96), (5000, 4128), (40, 32), (8200, 1120), (14336, 512)):
        torch.manual_seed(n)
        w = torch.randn(n, k, device=CUDA) * torch.randn(n, 1, device=CUDA).exp() * 0.02
        e = f.encode(w.to(dtype))
        assert e.scale is not None
        every = torch.arange(n * k, device=CUDA, dtype=torch.int32).to(torch.uint8).view(n, k)
        every[every & 127 == 127] = 1
        of_nan = torch.tensor([5, 22, n - 1], device=CUDA)
        every[of_nan, torch.tensor([k // 2, 0, k - 1], device=CUDA)] = torch.tensor(
            [0xFF, 0x7F, 0x7F], dtype=torch.uint8, device=CUDA
        )
        without = torch.ones(n, dtype=torch.bool, device=CUDA).index_fill_(0, of_nan, False)  # there 0 * NaN is NaN
        codes = e._replace(codes=every.view(torch.float8_e4m3fn), scale=torch.ones(n, 1, device=CUDA))
        for rows in (8, 9, 16, 32, 64, 128, 256):
            for start in (0, 60, -rows):
                at = (torch.arange(rows, device=CUDA) + start) % k
                x = torch.zeros(rows, k, device=CUDA, dtype=dtype).scatter_(1, at[:, None], 1.0)
                y = product(f, codes, x)
                want = codes.codes.to(dtype)[:, at].t()
                assert torch.equal(y[:, without], want[:, without]) and y[:, of_nan].isnan().all(), (n, k, rows)


def product(f: Any, e: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    with backend("cuda-decode"):
        return Call("aoquant", x, None, e, as_operand(f), bias, [x.shape[0]], x.dtype).run()


def test_operands_that_it_does_not_encode_are_left_to_others() -> None:
    assert one_call.number("aoquant", Operand(get_format("nvfp4")), *_of(layer("nvfp4-weight")), BF16, 4) is None
    assert one_call.number("aoquant", None, *_of(layer("nvfp4-weight")), torch.float32, 4) is None
    assert one_call.number("aoquant", None, *_of(layer("nvfp4-weight")), BF16, 257) is None
    assert one_call.number("aoquant", None, *_of(layer("nvfp4-weight")), BF16, 256) is not None


def _of(module: PackedLinear) -> tuple[Operand, Any]:
    weight: Any = module.weight
    return weight.recipe.fprop_weight, weight.encoded


@pytest.mark.parametrize("name", ["int4-g128", "int4-g32", "nvfp4", "mxfp4", "gridflip", "gridflip-16x16", "fp8-row"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("shape", [(512, 1024), (48, 32 * 131), (1, 128)], ids=str)
def test_decoded_values_are_the_operand(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Of hard rows, NaN and infinities among them, and of all bytes as codes."""
    if name == "mxfp4" and dtype == F16:
        pytest.skip("e8m0 scales leave float16's range, and the operator refuses them")
    f = get_format(name)
    if f.block and shape[1] % f.block:
        pytest.skip("K is no multiple of the block")
    e = f.encode(hard_rows(*shape, dtype))
    request = gemm_request("aoquant", None, as_operand(f), e, dtype, 4096)
    assert few_rows.decodes(request)
    decode = native.operator("decode_values")
    anything = torch.randint(0, 256, e.codes.shape, device=CUDA, dtype=torch.uint8).view(e.codes.dtype)
    for codes in (e.codes, anything):
        w = e._replace(codes=codes)
        got = decode(codes, e.scale, e.zero, few_rows.plan_of(f, w, dtype))
        assert same(got, codec.decode(f, w, dtype, operand=True))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 100])
@pytest.mark.parametrize(
    "outputs",
    [(512, 512, 512), (2048, 512, 512), (4096, 512, 512), (512, 1024), (4096, 40, 8192), (48, 48, 48, 48)],
    ids=str,
)
def test_siblings_are_the_layers_one_by_one(name: str, rows: int, outputs: tuple[int, ...]) -> None:
    """In one launch where K is cut alike, else in several, with biases here and there."""
    layers = [layer(name, bias=i % 2 == 1, n=n) for i, n in enumerate(outputs)]
    x = hard_rows(rows, K, BF16)
    ys = torch.ops.aoquant_native.siblings(x, *map(list, zip(*map(_arguments, layers), strict=True)))
    with torch.no_grad():
        for y, module in zip(ys, layers, strict=True):
            assert same_bytes(y, module(x))


def _arguments(module: PackedLinear) -> tuple[Any, ...]:
    """Of `linear`, behind x."""
    number = int(module._one_call)
    alpha = (
        None if not linear_plan.has_alpha(number) else module._scale if linear_plan.is_fp8(number) else module._outer
    )
    zero = module._zero if linear_plan.has_zero(number) else None
    return module._codes, module._scale, zero, alpha, module.bias, number


class Attention(nn.Module):
    """q, k, v of one input, and o."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (layer(name, n=n) for n in (K, K, K, N))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(self.q(x) * self.k(x).sigmoid() + self.v(x))
        return y


@pytest.mark.parametrize("name", RECIPES)
def test_compiled_siblings_are_one_operator(name: str) -> None:
    from torch._inductor import config

    assert config.post_grad_custom_pre_pass is not None
    torch._dynamo.reset()
    model, x = Attention(name), torch.randn(1, 2, K, device=CUDA, dtype=BF16)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        compiled(x)
        with torch.profiler.profile() as seen:
            y = compiled(x)
        counts = {e.key: e.count for e in seen.key_averages()}
        assert counts.get("aoquant_native::siblings") == 1 and counts.get("aoquant_native::linear") == 1
        parts = [m(x).float() for m in (model.q, model.k, model.v)]
        want = model.o((parts[0] * parts[1].sigmoid() + parts[2]).to(BF16))
        assert torch.allclose(
            y.float(), want.float(), rtol=0.02, atol=0.02
        )  # between layers, Inductor rounds elsewhere
