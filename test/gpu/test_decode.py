"""Few rows of x against a packed W: operands to the bit, sums within a stated bound, rows whatever their number."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.gemm import scaled_mm
from support.gpu import BF16, CUDA, F16, assert_within, captured, no_waiting
from torch import Tensor, nn

import aoquant
from aoquant import QATConfig, backend, get_format, quantize_
from aoquant.formats import Encoded, Format
from aoquant.ops import Request, code_readers, codec, explain, native
from aoquant.ops.gemm import few_rows
from aoquant.ops.router import route
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu

BACKENDS = ("cuda-decode", "triton-decode")
FORMATS = (
    "int4-g128",
    "int4-g32",
    "nvfp4",
    "mxfp4",
    "fouroversix",
    "gridflip",
    "gridflip-alternating",
    "gridflip-16x16",
    "te-nvfp4-16x16",
    "xx-mxfp4",
    "fp8-row",
)
# up to 32 and 33 to 64 rows have different kernels, and one order of additions
RANGES = {"cuda-decode": ((1, 4), (5, 16), (17, 64), (65, 256)), "triton-decode": ((1, 16), (17, 32), (33, 64))}
FP8_RANGES = ((1, 8), (9, 64), (65, 256))
SHAPES = (
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (5000, 1152),
    (200, 1152),
    (1000, 160),
    (56, 32),
    (333, 8224),
)  # N, K
# csrc's kernel for large weights: scales copied by 16, 4 and 1 bytes, a K that steps of 128 do not divide, a last block
# that overlaps
LARGE = ((3100, 11008), (5001, 8224), (12001, 4224), (2100, 28672))


def skip_without(name: str, format: Format, dtype: torch.dtype = BF16) -> None:
    request = Request("aoquant", None, format, CUDA, dtype, 1, 128, 256)
    if (reason := dict(explain(request))[name]) not in ("runs", "willing, lower priority"):
        pytest.skip(f"{name}: {reason}")


def packed(name: str, n: int, k: int, dtype: torch.dtype = BF16) -> tuple[Format, Encoded]:
    torch.manual_seed(n + k)
    format = get_format(name)
    w = torch.randn(n, k, device=CUDA) * torch.randn(n, 1, device=CUDA).exp() * 0.02
    return format, format.encode(w.to(dtype))


def product(name: str, format: Format, e: Encoded, x: Tensor, bias: Tensor | None = None) -> Tensor:
    with backend(name):
        return scaled_mm(x, e, bias, "", format.name, "aoquant", list(x.shape[:-1]), x.dtype)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_within_the_bound_of_float64(format_name: str, name: str) -> None:
    cuda = name == "cuda-decode"
    for dtype in (
        (BF16, F16) if cuda or format_name == "int4-g128" else (BF16,)
    ):  # each is another compilation for Triton
        format = get_format(format_name)
        if cuda and dtype == F16 and few_rows.kind(format) == "e8m0":
            continue  # refused: test_what_is_refused
        skip_without(name, format, dtype)
        for n, k in SHAPES + LARGE if cuda else SHAPES:
            if k % (format.period or 32):
                continue
            _, e = packed(format_name, n, k, dtype)
            alpha = format.alpha(e)
            values = format.operand(e, dtype).double() * (1.0 if alpha is None else alpha.double())
            for m in (1, 2, 5, 16, 17, 32, 33, 64, 65, 200, 256) if cuda else (3, 64):
                x = torch.randn(m, k, device=CUDA, dtype=dtype)
                for bias in (None, torch.randn(n, device=CUDA).to(dtype), torch.randn(n, device=CUDA))[
                    : 3 if m == 5 else 2
                ]:
                    assert_within(product(name, format, e, x, bias), x, values, bias)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("m", [8, 17, 32, 33, 64, 128])
def test_identity_gives_the_operand(format_name: str, name: str, m: int) -> None:
    if name == "triton-decode" and m > few_rows.TRITON_ROWS:
        pytest.skip("more rows than it takes")
    format, e = packed(format_name, 264, 1152)
    skip_without(name, format)
    values = rounded_once(format, e)
    for start in range(0, 1152, m):
        x = torch.eye(1152, device=CUDA, dtype=BF16)[start : start + m]
        assert torch.equal(product(name, format, e, x), values[:, start : start + m].t())


@pytest.mark.parametrize(
    ("format_name", "n", "k"), [(f, n, k) for f in FORMATS for n, k in LARGE if k % (get_format(f).period or 32) == 0]
)
def test_a_large_weight_s_operand(format_name: str, n: int, k: int) -> None:
    """One-hot rows at both ends of K, in every lane's place of a step, and in the last, where it is short."""
    format, e = packed(format_name, n, k)
    skip_without("cuda-decode", format)
    values = rounded_once(format, e)
    places = torch.tensor([*range(0, 128, 8), *range(k - 144, k, 9)], device=CUDA)
    x = torch.zeros(len(places), k, device=CUDA, dtype=BF16).scatter_(1, places[:, None], 1.0)
    for rows in (3, 16):
        for start in range(0, len(places), rows):
            y = product("cuda-decode", format, e, x[start : start + rows])
            assert torch.equal(y, values[:, places[start : start + rows]].t())


def rounded_once(format: Format, e: Encoded) -> Tensor:
    """(N, K): the operand times the outer scale in float32, rounded once: what a one-hot row of x gives."""
    operand, alpha = format.operand(e, BF16), format.alpha(e)
    return operand if alpha is None else (operand.float() * alpha).to(BF16)


@pytest.mark.parametrize("k", [128, 1024])  # 1024: csrc's kernel for large weights
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_scale_of_int4(name: str, dtype: torch.dtype, k: int) -> None:
    """All 65536 bit patterns of a scale with random ones of a zero, subnormals, both signs, each with all 16 codes."""
    format = get_format("int4-g128")
    skip_without(name, format, dtype)
    torch.manual_seed(0)
    n = 1 << 16
    bits = torch.arange(n, device=CUDA, dtype=torch.int32).to(torch.int16)
    scale = bits.view(dtype).view(n, 1).expand(n, k // 128).contiguous()
    for zero_like in (False, True):
        zero = torch.randint(0, n, (n, k // 128), device=CUDA).to(torch.int16).view(dtype)
        if zero_like:  # of the scale's size, where the sum rounds
            zero = (scale.float() * torch.randn(n, k // 128, device=CUDA) * 8).to(dtype)
        nibbles = torch.arange(k, device=CUDA, dtype=torch.uint8) % 16
        codes = (nibbles[0::2] | nibbles[1::2] << 4).expand(n, -1).contiguous()
        e = Encoded(codes, scale, zero, None, k)
        operand = format.operand(e, dtype)
        finite, operand = operand.isfinite().all(1), operand[:, :16]
        y = product(name, format, e, torch.eye(k, device=CUDA, dtype=dtype)[:16]).t()
        assert finite.sum() > n // 8
        assert torch.equal(y[finite], operand[finite])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4", "gridflip"])
def test_every_scale_byte_of_fp4(format_name: str, name: str) -> None:
    format = get_format(format_name)
    skip_without(name, format)
    block, k = format.block or 16, 32
    nibbles = torch.arange(k, device=CUDA, dtype=torch.uint8) % 16
    codes = (nibbles[0::2] | nibbles[1::2] << 4).expand(256, -1).contiguous()
    dtype = torch.float8_e8m0fnu if format_name == "mxfp4" else torch.float8_e4m3fn
    scale = torch.arange(256, device=CUDA, dtype=torch.uint8).view(256, 1).repeat(1, k // block).view(dtype)
    e = Encoded(codes, scale, None, None if format_name == "mxfp4" else torch.ones(256, 1, device=CUDA), k)
    operand = format.operand(e, BF16)
    y = product(name, format, e, torch.eye(k, device=CUDA, dtype=BF16)).t()
    finite = operand.isfinite().all(1)
    assert finite.sum() >= 250 and torch.equal(y[finite], operand[finite])
    assert y[~finite].isnan().any(1).all()  # what is NaN or Inf stays visible


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("format_name", ["int4-g128", "nvfp4", "mxfp4", "gridflip", "fp8-row"])
def test_rows_do_not_depend_on_their_number(format_name: str, name: str) -> None:
    least = 128 if format_name == "int4-g128" else 32  # of K: a group
    shapes = (
        (4096, 4096),
        (8192, 2048),
        (2048, 8192),
        (14336, 4096),
        (4096, 14336),
        (1000, 1152),
        (56, least),
        LARGE[0],
        LARGE[2],
    )
    dtypes = (BF16, F16) if (name, format_name) == ("cuda-decode", "fp8-row") else (BF16,)
    for (n, k), dtype in itertools.product(shapes, dtypes):
        format, e = packed(format_name, n, k, dtype)
        skip_without(name, format, dtype)
        for first, last in FP8_RANGES if format_name == "fp8-row" else RANGES[name]:
            x = torch.randn(last, k, device=CUDA, dtype=dtype)
            whole = product(name, format, e, x)
            assert torch.equal(product(name, format, e, x), whole)
            ends = {m for m in (32, 33) if first <= m <= last}
            for m in sorted({first, first + 1, first + 2, (first + last) // 2, last - 1} | ends):
                assert torch.equal(product(name, format, e, x[:m]), whole[:m]), (n, k, m)
                assert torch.equal(product(name, format, e, x[-m:].contiguous()), whole[-m:]), (n, k, m)


def test_graphs_views_and_no_synchronisation() -> None:
    for name in ("int4-g128", "nvfp4", "gridflip", "fp8-row"):
        format, e = packed(name, 1024, 2048)
        for m in (1, 16, 32, 64, 256):
            x = torch.randn(m, 2048, device=CUDA, dtype=BF16)
            args = (x, e, None, "", format.name, "aoquant", [m], BF16)
            y = scaled_mm(*args)
            with no_waiting():
                scaled_mm(*args)
            graph, again = captured(lambda: scaled_mm(*args), 0)  # noqa: B023
            again.fill_(float("nan"))
            graph.replay()
            assert torch.equal(again, y)
            shifted = torch.randn(m * 2048 + 1, device=CUDA, dtype=BF16)[1:].view(m, 2048)  # not aligned to 16 bytes
            shifted.copy_(x)
            assert torch.equal(scaled_mm(shifted, *args[1:]), y)
            strided = torch.randn(m, 4096, device=CUDA, dtype=BF16)[:, ::2]
            strided.copy_(x)
            assert torch.equal(scaled_mm(strided, *args[1:]), y)


def _request(format: Format, m: int, dtype: torch.dtype = BF16, k: int = 2048) -> Request:
    return Request("aoquant", None, format, CUDA, dtype, m, 1024, k)


def test_what_is_refused() -> None:
    for format_name, dtype, k, word in (
        ("mxfp4", F16, 2048, "bfloat16"),
        ("nvfp4", torch.float32, 2048, "multiplies"),
        ("nvfp4", BF16, 2064, "K % 32"),
        ("gridflip-c0.2", BF16, 2048, "4 bits"),
        ("mxfp8", BF16, 2048, "decodes"),
    ):
        request = _request(get_format(format_name), 4, dtype, k)
        assert word in str(dict(explain(request))["cuda-decode"]) or "CUDA kernels" in str(
            dict(explain(request))["cuda-decode"]
        )
        assert route(request).name != "cuda-decode"
    assert "up to" in dict(explain(_request(get_format("nvfp4"), 4096)))["triton-decode"]
    assert packed("nvfp4", 16, 32)[1].k == 32


@pytest.mark.parametrize("recipe", ["nvfp4-weight", "int4-g128", "fp8"])
def test_explain_says_when_the_weight_is_decoded(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first M that decodes W is the first whose GEMM does not read codes; below it the codec never sees W."""
    layer = nn.Linear(1024, 512, dtype=BF16, device=CUDA)
    model = nn.Sequential(layer)
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    quantize_(model, QATConfig(step="convert"))
    routes = aoquant.explain(layer).routes
    (decoding,) = [r for r in routes if r.step == "decode the weight"]
    reading = {r.last for r in routes if r.step == "multiply" and r.backend in code_readers()}
    assert decoding.first - 1 in reading and decoding.last is None
    calls = []
    real, find = codec.decode, native.operator

    def operator(name: str) -> Any:
        found = find(name)
        return found if name != "decode_values" else lambda *a: calls.append(a) or found(*a)

    monkeypatch.setattr(codec, "decode", lambda *a, **k: calls.append(a) or real(*a, **k))
    monkeypatch.setattr(native, "operator", operator)
    with torch.no_grad():
        for m in (1, decoding.first - 1, decoding.first):
            calls.clear()
            model(torch.randn(m, 1024, dtype=BF16, device=CUDA))
            assert bool(calls) == (m >= decoding.first), m
