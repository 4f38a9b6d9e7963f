"""One cast per operand on a GPU: every operand's bytes are the reference's, FP8 pairs run on FP8 tensor cores, and
what is prepared equals what is converted.

python -m pytest -m gpu test/gpu/test_hybrid_gpu.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.bits import compare, differing, same
from support.gemm import with_values
from support.kernel_inputs import BF16, CUDA, F32, inputs
from torch import Tensor, nn

from aoquant import Cast, HybridConfig, QATConfig, backend, explain, get_format, quantize_
from aoquant.formats import Encoded, Operand, Random, as_operand, get_operand
from aoquant.linear.prepared import RANDOM
from aoquant.ops import CodecRequest, Request, backward, codec, router
from aoquant.ops.encoding import padded
from aoquant.ops.quantized import Ask
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu
MIXES = ("mxfp8-nvfp4", "nvfp4-mxfp8", "fp8-hybrid", "nvfp4-training", "mxfp8-hp", "nvfp4-hp")
SQUARE = ("te-fp8-tensor", "te-fp8-e5m2-tensor", "te-fp8-128x128", "mxfp8-32x32", "te-nvfp4-16x16")
N, K, M = 512, 1024, 304


def layer(config: Any, n: int = N, k: int = K) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(k, n, dtype=BF16, device=CUDA)})
    quantize_(model, config)
    return model["layer"]


def data(m: int = M, n: int = N, k: int = K) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return tuple(torch.randn(m, width, dtype=BF16, device=CUDA, generator=generator) for width in (k, n))


def by_both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the results on the fastest backend and on the reference."""
    got = call()
    with backend("reference"):
        return got, call()


def triton_runs(request: CodecRequest) -> bool:
    return dict(explain(request))["triton"] == "runs"


def matrices(dtype: torch.dtype, **shapes: tuple[int, int]) -> dict[str, Tensor]:
    """Return random matrices of these shapes, and values of every kind."""
    return {kind: torch.randn(*shape, dtype=dtype) for kind, shape in shapes.items()} | inputs(dtype)


def step(linear: nn.Linear, x: Tensor, g: Tensor) -> list[Tensor]:
    """y, dx, dW, db; the random numbers are those of step 0."""
    if RANDOM in linear._buffers:
        linear._buffers[RANDOM][2:].zero_()
    linear.zero_grad()
    leaf = x.detach().requires_grad_()
    y = linear(leaf)
    y.backward(g)
    return [y.detach(), leaf.grad, linear.weight.grad.clone(), linear.bias.grad.clone()]


@pytest.mark.parametrize("rows", [33, 128, 300])
@pytest.mark.parametrize("name", SQUARE)
def test_transposed_codes_are_the_references(name: str, rows: int) -> None:
    operand = as_operand(get_format(name))
    e = operand.encode(torch.randn(rows, 384, dtype=BF16, device=CUDA))
    assert triton_runs(CodecRequest("transpose", operand, CUDA, torch.uint8, rows, 384))
    compare(*by_both(lambda: codec.transposed(operand, e, padded(rows, 128))), name)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [(33, 384), (300, 1040), (1031, 256)])
@pytest.mark.parametrize("name", ["te-fp8-tensor", "te-fp8-e5m2-tensor"])
def test_one_pass_writes_the_codes_of_both_sides(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    operand, x = as_operand(get_format(name)), torch.randn(*shape, dtype=dtype, device=CUDA)
    request = CodecRequest("sides", operand, CUDA, dtype, *shape, columns=operand, column_codes=True)
    assert triton_runs(request) == (dtype is not F32)  # which takes two passes
    for view in (x, x.t().contiguous().t()):
        how = view, operand, operand, codec.Lengths(padded(shape[0], 16), shape[1]), Ask(), Ask()
        for side, other in zip(*by_both(lambda: codec.sides(*how)), strict=True):  # noqa: B023
            compare(side.codes, other.codes, name)


ACROSS = ("mxfp8", "mxfp8-e5m2", "mxfp4", "nvfp4", "te-nvfp4", "xx-nvfp4", "qutlass-mxfp4", "mxfp4-quest")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", ACROSS)
def test_a_transposed_view_is_encoded_where_it_lies(name: str, dtype: torch.dtype) -> None:
    """Bytes are the reference's, in tiles that the matrix fills and in others, and no copy of the view is made."""
    fmt = get_format(name)
    for kind, x in matrices(dtype, ragged=(33, 160), filled=(128, 256)).items():
        view, want = x.to(CUDA).t().contiguous().t(), fmt.encode(x.contiguous())
        for operand in (True, False):
            with backend("triton"):
                e, values, alpha = with_values(fmt, view, BF16, operand=operand, keep=True)
            assert e is not None
            compare(e, want, f"{name} {kind}")
            assert differing(values, fmt.operand(want, BF16) if operand else fmt.decode(want, BF16)) == 0, kind
            assert differing(alpha, fmt.alpha(want)) == 0, kind
    view = torch.randn(1024, 4096, dtype=dtype, device=CUDA).t()
    with backend("triton"):
        codec.encode(fmt, view)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        codec.encode(fmt, view)
        assert torch.cuda.max_memory_allocated() - before < 1.2 * view.numel()


PAIRS = [("te-nvfp4", "te-nvfp4"), ("mxfp8", "mxfp8"), ("mxfp8-e5m2", "mxfp4"), ("mxfp4", "te-nvfp4")]
PAIRS += [("te-nvfp4", "mxfp8"), (None, "te-nvfp4"), ("te-nvfp4", None), ("mxfp8", None), (None, "mxfp8")]
RHT = "te-hadamard16-sd7e8+"
PAIRS += [("nvfp4-sr", f"{RHT}nvfp4-sr"), ("nvfp4-sr", "nvfp4-sr"), ("nvfp4-sr", None), (None, f"{RHT}nvfp4-sr")]
PAIRS += [("te-nvfp4", f"{RHT}te-nvfp4"), ("mxfp8", f"{RHT}te-nvfp4"), ("mxfp8", "nvfp4-sr"), (None, f"{RHT}te-nvfp4")]
KEPT = [("mxfp8", "te-nvfp4"), ("te-nvfp4", f"{RHT}te-nvfp4"), ("te-nvfp4", "te-nvfp4"), ("te-nvfp4", "mxfp8")]
KEPT += [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", f"{RHT}te-nvfp4"), ("mxfp8-e5m2", "mxfp4")]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("rows", "columns"), PAIRS)
def test_operands_of_both_sides_are_the_references(rows: str | None, columns: str | None, dtype: torch.dtype) -> None:
    """Where strips fill the matrix and where they do not, with zeros behind it, where a program has several strips, and
    for values of every kind.
    """
    of_x, of_t = (None if name is None else get_operand(name) for name in (rows, columns))
    state = torch.tensor([1 << 31, 12345, 7], device=CUDA)
    randoms = [Random(state, side) if o is not None and o.draws else None for o, side in ((of_x, 0), (of_t, 2))]
    shapes = {"filled": (128, 1024), "ragged": (33, 1080), "narrow": (300, 48), "many": (2064, 4096)}
    for kind, cpu in matrices(dtype, **shapes).items():
        x, (m, n) = cpu.to(CUDA), cpu.shape
        lengths = -(-m // (of_t.block if of_t else 1)) * (of_t.block if of_t else 1), -(-n // 32) * 32
        how = x, of_x, of_t, codec.Lengths(*lengths), *(Ask(False, BF16, random=r) for r in randoms)
        first = Operand(of_t.format) if of_x is None else of_x
        request = CodecRequest("sides", first, CUDA, dtype, m, n, False, True, False, of_t)
        assert triton_runs(request)
        for side, a, b in zip(("rows", "columns"), *by_both(lambda: codec.sides(*how)), strict=True):  # noqa: B023
            assert (a is None) == (b is None)
            assert a is None or (same(a.values, b.values) and same(a.alpha, b.alpha)), (kind, side)


def test_places_of_a_large_matrix_are_64_bits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2^31 values; here for a small one, whose operands stay what they are."""
    import triton.language as tl

    from aoquant.ops.triton import operands as kernel

    x, state = (
        torch.randn(96, 2080, dtype=BF16, device=CUDA),
        torch.tensor([1 << 31, 12345, 7 + (5 << 32)], device=CUDA),
    )
    asked = (Ask(False, BF16, random=Random(state, side)) for side in (0, 2))
    drawn = get_operand("nvfp4-sr"), get_operand(f"{RHT}nvfp4-sr"), codec.Lengths(96, 2080), *asked
    want = codec.sides(x, *drawn)
    assert kernel._place(1 << 16, 1 << 15) is tl.int64 and kernel._place(96, 2080) is tl.int32
    for launches in (kernel._launch, kernel._finder):
        monkeypatch.setattr(kernel, launches.__name__, launches.__wrapped__)
    monkeypatch.setattr(kernel, "_place", lambda m, n: tl.int64)
    for a, b in zip(codec.sides(x, *drawn), want, strict=True):
        assert a is not None and b is not None and same(a.values, b.values) and same(a.alpha, b.alpha)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("rows", "columns"), KEPT)
def test_codes_of_both_sides_are_the_references(rows: str, columns: str, dtype: torch.dtype) -> None:
    """Codes, scales, outer scales of x and of x^T, and the operand of x."""
    of_x, of_t = get_operand(rows), get_operand(columns)
    shapes = {"filled": (128, 1024), "ragged": (33, 1088), "narrow": (300, 64), "many": (2064, 4096)}
    for kind, cpu in matrices(dtype, **shapes).items():
        if cpu.shape[1] % 32:
            continue
        lengths = codec.Lengths(32 * -(-cpu.shape[0] // 32), cpu.shape[1])
        how = cpu.to(CUDA), of_x, of_t, lengths, Ask(True, dtype), Ask()
        request = CodecRequest("sides", of_x, CUDA, dtype, *cpu.shape, True, True, False, of_t, True)
        assert triton_runs(request)
        got, want = by_both(lambda: codec.sides(*how))  # noqa: B023
        compare(got.row.codes, want.row.codes, f"{rows} {kind}")
        compare(got.col.codes, want.col.codes, f"{columns} {kind}")
        assert same(got.row.values, want.row.values) and same(got.row.alpha, want.row.alpha), kind


@pytest.mark.parametrize(("name", "kernels"), [("nvfp4-training", 11), ("mxfp8-nvfp4", 12), ("nvfp4-mxfp8", 9)])
def test_launches_of_a_step(name: str, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Triton's, at a shape whose GEMMs need no kernel behind them: x and dy are read once, after their maxima are
    found.
    """
    from aoquant.ops.triton import launch

    linear, (x, g) = layer(get_recipe(name).prepare(), 4096, 4096), data(1024, 4096, 4096)
    step(linear, x, g)
    seen: list[str] = []
    real = launch.Launch.__call__

    def counted(self: Any, *tensors: Any) -> None:
        seen.append(self._fn.__name__)
        real(self, *tensors)

    monkeypatch.setattr(launch.Launch, "__call__", counted)
    step(linear, x, g)
    assert len(seen) <= kernels, seen


def test_gemms_read_operands_that_lie_as_their_transposes() -> None:
    """The bits of the GEMM do not depend on where its operands lie."""
    from aoquant.ops.triton import matmul

    generator = torch.Generator("cuda").manual_seed(2)
    m, n, k = 1024, 4096, 512
    a, b = (torch.randn(rows, k, dtype=BF16, device=CUDA, generator=generator) for rows in (m, n))
    alpha = torch.full((1, 1), 0.37, dtype=F32, device=CUDA)
    want = matmul.matmul(a, b, alpha, alpha, None)
    turned = [t.t().contiguous().t() for t in (a, b)]
    for x, w in ((turned[0], b), (a, turned[1]), turned):
        assert matmul.why_not(x, w) is None
        assert torch.equal(matmul.matmul(x, w, alpha, alpha, None), want)


@pytest.fixture
def operands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor | None] | Encoded]:
    """Both operands of every backward GEMM, and their alphas; codes where the GEMM reads these."""
    seen: list[tuple[Tensor, Tensor | None] | Encoded] = []
    call, multiplier, of_codes = backward.Call, backward.BackwardGemm.multiplier, backward.of_codes

    def called(*given: Any) -> Any:
        if len(given) > 8:  # with values
            seen.extend(((given[9], given[11]), (given[10], given[12])))
        return call(*given)

    def multiplied(pair: Any, *given: Any) -> Any:
        real = multiplier(pair, *given)

        def multiply(a: Tensor, alpha_a: Tensor | None, b: Tensor, alpha_b: Tensor | None) -> Tensor:
            seen.extend(((a, alpha_a), (b, alpha_b)))
            return real(a, alpha_a, b, alpha_b)

        return None if real is None else multiply

    def codes(a: Encoded, b: Encoded, *rest: Any) -> Tensor:
        seen.extend((a, b))
        return of_codes(a, b, *rest)

    monkeypatch.setattr(backward, "Call", called)
    monkeypatch.setattr(backward.BackwardGemm, "multiplier", multiplied)
    monkeypatch.setattr(backward, "of_codes", codes)
    return seen


@pytest.mark.parametrize("name", MIXES)
def test_operands_of_backward_are_the_references(name: str, operands: list[Any]) -> None:
    linear, (x, g) = layer(get_recipe(name).prepare()), data()
    step(linear, x, g)
    kernels = list(operands)
    operands.clear()
    with backend("reference"):
        step(linear, x, g)
    assert len(kernels) == len(operands) == (0 if name.endswith("-hp") else 4)
    for i, (got, want) in enumerate(zip(kernels, operands, strict=True)):
        assert type(got) is type(want)
        if isinstance(got, Encoded):
            compare(got, want, f"{name}, operand {i}")
        else:
            assert same(got[0], want[0]) and (want[1] is None or same(got[1], want[1]))


@pytest.mark.parametrize("name", MIXES)
def test_prepared_equals_converted(name: str) -> None:
    linear, (x, _) = layer(get_recipe(name).prepare()), data()
    model = nn.ModuleDict({"layer": copy.deepcopy(linear)})
    quantize_(model, QATConfig(step="convert"))
    with torch.no_grad():
        assert torch.equal(linear(x), model["layer"](x))


@pytest.mark.parametrize("tokens", [M, 33])
@pytest.mark.parametrize("grad", ["te-fp8-tensor", "te-fp8-e5m2-tensor"])
def test_fp8_pairs_run_on_fp8_tensor_cores(grad: str, tokens: int) -> None:
    """The same operands as the emulation; Hopper's fp8 sums keep fewer bits than float32."""
    config = HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor")
    config = config.replaced(dgrad_grad_output=grad, wgrad_grad_output=grad)
    linear, (x, g) = layer(config), data(tokens)
    other = get_format("te-fp8-tensor"), get_format(grad)
    request = Request("fp8_scaled_mm_precise", other[1], other[0], CUDA, BF16, N, K, 16 * -(-tokens // 16))
    assert dict(explain(request))["torch._scaled_mm"] == "runs"
    kernel, emulated = by_both(lambda: step(linear, x, g))
    for a, b in zip(kernel[1:3], emulated[1:3], strict=True):
        found = float(10 * torch.log10(b.double().square().sum() / (a.double() - b.double()).square().sum()))
        print(f"fp8 tensor cores against the emulation, {grad}, {tokens} tokens: {found:.1f} dB")
        assert found > 50


@pytest.mark.parametrize("save", ["col", "hp"])
@pytest.mark.parametrize("name", ["fp8-hybrid", "nvfp4-training", "mxfp8-nvfp4"])
def test_what_is_saved_changes_no_gradient(name: str, save: str) -> None:
    recipe = get_recipe(name)
    config = recipe.prepare(backward=recipe.training["backward"].replaced(save=save))
    x, g = data()
    for got, want in zip(step(layer(config), x, g), step(layer(get_recipe(name).prepare()), x, g), strict=True):
        assert torch.equal(got, want)


def test_one_side_of_a_layer_that_fp8_tensor_cores_cannot_take() -> None:
    """N and K are no multiples of 16: the emulation runs, and gradients are finite."""
    linear, (x, g) = layer(HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor"), 72, 40), data(33, 72, 40)
    assert all(t.isfinite().all() for t in step(linear, x, g))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_the_rounded_hadamard_transform_is_the_references(dtype: torch.dtype) -> None:
    operand = as_operand(get_format("te-hadamard16-sd7e8+te-nvfp4"))
    x = torch.randn(300, 512, dtype=dtype)
    for view in (x, x.t().contiguous().t()):
        compare(codec.encode(operand, view.to(CUDA)), operand.encode(view))


def test_a_forward_source_transposes_no_one_dimensional_codes() -> None:
    """mxfp8 from mxfp8's values, and te-nvfp4 from te-nvfp4's: two encodings, equal on every backend."""
    for name in ("mxfp8", "te-nvfp4"):
        config = HybridConfig.fwd_bwd(name, name).replaced(wgrad_input=Cast(name, "forward"))
        linear, (x, g) = layer(config), data()
        kernel = step(linear, x, g)
        with backend("reference", role="quantize"), backend("reference", role="decode"):
            for got, want in zip(kernel, step(linear, x, g), strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", ["fp8-hybrid", "nvfp4", "mxfp4", "int4-g128"])
def test_tensors_that_torch_has_yet_to_negate(recipe: str) -> None:
    """The imaginary parts of a conjugate are a view that says so, and kernels read its memory alone."""
    x, dy = (torch.randn(64, 256, dtype=torch.complex64, device="cuda").conj().imag for _ in range(2))
    assert x.is_neg() and dy.is_neg()
    model = nn.Sequential(nn.Linear(256, 256, device="cuda"))
    quantize_(model, get_recipe(recipe).prepare())

    def step(x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        return [y := model(x), *torch.autograd.grad(y, [x, model[0].weight], dy)]

    for _ in range(4):
        want = step(x.resolve_neg(), dy.resolve_neg())
        assert all(map(torch.equal, step(x, dy), want))
    quantize_(model, QATConfig(step="convert"))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), model(x.resolve_neg()))


def test_a_block_rules_the_backwards_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule what autograd runs in a thread of its own, and no backward after the block."""
    model, chosen = nn.Sequential(nn.Linear(256, 256, dtype=torch.bfloat16, device="cuda")), list[str]()
    quantize_(model, get_recipe("fp8-hybrid").prepare())
    monkeypatch.setattr(router, "told", lambda request, name: chosen.append(name))
    x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for _ in range(4):
        model(x).sum().backward()
    for force in (True, False, True):
        router._routes.clear()
        y = model(x).sum()
        chosen.clear()
        with backend("reference") if force else nullcontext():
            y.backward()
        assert ("reference" in chosen) == force
