"""The Triton kernels against the reference on their device: codes, scales, operands and values, to the last bit.

The reference's own CUDA bytes are compared with its CPU bytes too, except for "-native" formats, which divide as their
device does. NaN equals NaN whatever its payload: processors differ in the one they make.
"""

from __future__ import annotations

import pytest
import torch
from support.bits import compare, differing
from support.gemm import scaled_mm, with_values
from support.golden_inputs import DATA
from support.gpu import no_waiting
from support.kernel_inputs import BF16, CUDA, F16, F32, inputs

from aoquant import backend, explain, get_format, list_formats
from aoquant.formats import Format, FourOverSix, Scales
from aoquant.formats.blockscaled import PTS_FLOOR
from aoquant.ops import CodecRequest, codec

pytestmark = pytest.mark.gpu

ALL = (BF16, F16, F32)
NATIVE = ("intx8-row-asym-native", "intx8-row-native", "int8-row-native", "fp8-row-native", "fp8-tensor-native")
LISTED = [
    n for n in list_formats() if not isinstance(get_format(n), FourOverSix)
]  # test_grids.py has inputs that decide between grids
TE = ("te-fp8-e5m2-1x128", "te-fp8-e5m2-128x128", "te-fp8-e5m2-128x128-f32")
ENGINES = ("q4_0", "q4_1", "q8_0", "q8_0-x86", "int8-row-vllm", "int8-row-vllm-reciprocal", "nvfp4-pow2")
ENGINES += ("fp8-row-vllm", "fp8-row-vllm-reciprocal")
BITS = ("intx2-row-asym", "intx3-g24", "intx5-g32", "intx6-g32-asym", "intx7-tensor")
NAMES = [
    *LISTED,
    *TE,
    *ENGINES,
    *BITS,
    "int4-g96",
    "intx4-g128",
    "intx4-g64-asym",
    "int8-tensor-asym",
    "intx4-g32-noclip",
    *NATIVE,
]


def has_kernel(name: str, role: str = "quantize", codes: bool = True, held: bool = False) -> bool:
    fmt = get_format(name)
    request = CodecRequest(role, fmt, CUDA, BF16, 8, 2 * (fmt.block or 384), codes, not codes, held)
    return dict(explain(request))["triton"] in ("runs", "willing, lower priority")


@pytest.mark.parametrize("role", ["decode", "quantize"])
@pytest.mark.parametrize(
    "name",
    [
        *(n for n in NAMES if n.startswith(("te-", "mxfp8"))),
        *("q4_0", "q4_1", "q8_0", "q8_0-x86", "int8-row-vllm", "intx2-g32", "intx3-g32", "nvfp4-pow2"),
    ],
)
def test_formats_of_backward_of_engines_and_of_few_bits_have_kernels(name: str, role: str) -> None:
    assert has_kernel(name, role)
    assert name != "nvfp4-pow2" or has_kernel(name, held=True)


by_dtype = pytest.mark.parametrize("dtype", ALL, ids=lambda d: str(d).removeprefix("torch."))


@by_dtype
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """Results in the input's dtype and in bfloat16, which layers ask for; codes of bfloat16 decode to every dtype."""
    outs = {dtype, BF16}
    check(name, dtype, quantized=outs, decoded=set(ALL) if dtype == BF16 else outs)


@pytest.mark.nightly  # as many kernels again to compile
@by_dtype
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_equals_the_reference_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, quantized=set(ALL), decoded=set(ALL))


def check(name: str, dtype: torch.dtype, quantized: set[torch.dtype], decoded: set[torch.dtype]) -> None:
    """All kinds of inputs of `dtype`; results in the dtypes of `quantized`, and of `decoded`."""
    fmt = get_format(name)
    if fmt.block and 768 % fmt.block:
        fmt_inputs = {k: x.repeat(1, 2)[:, : 2 * fmt.block] for k, x in inputs(dtype).items() if 2 * fmt.block <= 1536}
    else:
        fmt_inputs = inputs(dtype)
    encodes, decodes, merges = has_kernel(name), has_kernel(name, "decode"), has_kernel(name, "quantize", codes=False)
    for kind, x_cpu in fmt_inputs.items():
        x, what = x_cpu.to(CUDA), f"{name} {kind}"
        on_cpu, want = fmt.encode(x_cpu.contiguous()), fmt.encode(x)
        if not name.endswith("-native"):
            compare(want, on_cpu, f"{what}, reference on CUDA against CPU")
        if encodes:
            with backend("triton"):
                compare(codec.encode(fmt, x), want, what)
        for out in sorted(quantized | decoded, key=str) if encodes or decodes or merges else ():
            for operand in (True, False):
                values = fmt.operand(want, out) if operand else fmt.decode(want, out)
                which = f"{what} -> {out}, {'operand' if operand else 'values'}"
                with backend("triton"):
                    if decodes and out in decoded:
                        assert differing(codec.decode(fmt, want, out, operand=operand), values) == 0, which
                    if encodes and out in quantized:
                        e, got, _ = with_values(fmt, x, out, operand=operand, keep=True)
                        assert e is not None
                        compare(e, want, f"{which}, with values")
                        assert differing(got, values) == 0, f"{which}, in one pass"
                    if not (merges and out in quantized):
                        continue
                    none, got, alpha = with_values(fmt, x, out, operand=operand, keep=False)
                    assert none is None
                    assert differing(alpha, fmt.alpha(want)) == 0, f"{which}, alpha"
                    assert differing(got, values) == 0, f"{which}, in one pass, no codes kept"


@by_dtype
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-pow2"])
def test_codes_under_an_outer_scale_from_elsewhere(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    for kind, x in inputs(dtype).items():
        for outer in (2.0**-10, 1.7e-3, PTS_FLOOR, float("inf"), float("nan")):
            s = Scales(outer=torch.full((1, 1), outer))
            want = fmt.hold(x, s)
            with backend("triton"):
                got = codec.encode(fmt, x.to(CUDA), Scales(outer=s.outer.to(CUDA)))  # type: ignore[union-attr]
            compare(got, want, f"{name}, {kind}, {outer}")


RAGGED = [
    (name, k) for name in ("int8-row", "int8-tensor", "intx8-row-asym", "intx4-row") for k in (2, 34, 1000, 16384)
]
RAGGED += [(name, k) for name in ("intx3-row", "intx2-tensor", "int8-row-vllm") for k in (8, 1000, 16384)]


@pytest.mark.parametrize(
    ("name", "k"),
    [
        *RAGGED,
        *((name, k) for name in ("fp8-row", "fp8-tensor", "te-fp8-tensor") for k in (16, 1008, 20000)),
        *(("te-nvfp4-16x16", k) for k in (16, 1040)),
        *(("mxfp8-32x32", k) for k in (32, 1056)),
        # held in one piece, in 3, 5 or 7, and read twice
        *(("nvfp4-row", k) for k in (16, 1040, 4096, 16384, 384, 640, 1792, 5120, 7168, 1152, 20000)),
        *(("hadamard16+nvfp4-row", k) for k in (16, 11008, 16400)),
        ("hadamard128+nvfp4-row", 20096),
    ],
)
def test_ragged_rows(name: str, k: int) -> None:
    equals_the_reference(name, 5, k)


@pytest.mark.parametrize("name", ["fp8-row", "fp8-row-mslk", "nvfp4-row"])
@pytest.mark.parametrize("k", [4096, 4112, 14336])
def test_many_long_rows_are_read_in_pieces(name: str, k: int) -> None:
    equals_the_reference(name, 256, k)


def equals_the_reference(name: str, rows: int, k: int) -> None:
    fmt, x = get_format(name), DATA["heavy"](rows, k, BF16, 3).to(CUDA)
    want = fmt.encode(x)
    with backend("triton"):
        e, values, alpha = with_values(fmt, x, BF16, keep=True)
        assert e is not None
        compare(e, want, name)
        assert differing(alpha, fmt.alpha(want)) == 0
        assert differing(values, fmt.decode(want, BF16)) == 0
        assert differing(codec.decode(fmt, want, F32), fmt.decode(want, F32)) == 0


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        "nvfp4-row",
        "mxfp4",
        "mxfp8",
        "int4-g128",
        "int4-bf16-g128",
        "int8-row-asym",
        "fp8-row",
        "fp8-tensor",
        "fp8-1x128",
        "fp8-128x128",
        "te-fp8-tensor",
        "te-fp8-1x128",
        "te-fp8-128x128",
        "mxfp8-32x32",
        "te-nvfp4-16x16",
        "q4_0",
        "q8_0-x86",
        "int8-row-vllm",
        "intx3-g32",
    ],
)
def test_strided_inputs_and_inputs_larger_than_a_wave(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(4100, 2048, device=CUDA, dtype=BF16)
    for view in (x, x.t().contiguous().t(), torch.cat((x, x), 1)[:, :2048], x[1:], x[:, 1:1025]):
        with backend("triton"):
            compare(codec.encode(fmt, view), fmt.encode(view), name)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4-row", "gridflip", "te-nvfp4-16x16"])
def test_codes_decode_from_any_address(name: str) -> None:
    """Codes of a flat buffer may begin at any byte; kernels read words of four."""
    fmt = get_format(name)
    e = fmt.encode(torch.randn(48, 768, device=CUDA, dtype=BF16))
    store = torch.empty(e.codes.numel() + 1, dtype=torch.uint8, device=CUDA)
    store[1:] = e.codes.flatten()
    with backend("triton"):
        got = codec.decode(fmt, e._replace(codes=store[1:].view(e.codes.shape)), BF16)
    assert differing(got, fmt.decode(e, BF16)) == 0


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nvfp4-row", "xx-nvfp4"])
def test_many_values_decode_by_larger_programs(name: str) -> None:
    from aoquant.ops.triton.blockscaled_kernels import MANY

    fmt = get_format(name)
    e = fmt.encode(torch.randn(1031, 4128, device=CUDA, dtype=BF16))
    assert e.codes.numel() * 2 > MANY
    with backend("triton"):
        assert differing(codec.decode(fmt, e, BF16), fmt.decode(e, BF16)) == 0


@pytest.mark.parametrize("name", ["nvfp4", "fp8-row"])
def test_an_outer_scale_per_row_decodes(name: str) -> None:
    """A packed tensor keeps its outer scale once for each row."""
    fmt = get_format(name)
    e = fmt.encode(torch.randn(48, 768, device=CUDA, dtype=BF16))
    if e.outer is not None:
        e = e._replace(outer=torch.rand(48, 1, device=CUDA) + 0.5)
    with backend("triton"):
        for operand in (True, False):
            want = fmt.operand(e, BF16) if operand else fmt.decode(e, BF16)
            assert differing(codec.decode(fmt, e, BF16, operand=operand), want) == 0


def test_explain_and_force() -> None:
    request = CodecRequest("quantize", get_format("nvfp4"), CUDA, BF16, 16, 64)
    said = dict(explain(request))
    assert said["triton"] == "runs" and said["reference"] == "willing, lower priority"
    odd = CodecRequest("quantize", get_format("intx3-row"), CUDA, BF16, 16, 60)
    assert dict(explain(odd))["reference"] == "runs" and "8 codes at once" in dict(explain(odd))["triton"]
    with backend("triton"), pytest.raises(ValueError, match=r"quantize.*intx3.*packs 3 bits of 8 codes at once"):
        codec.encode(get_format("intx3-row"), torch.randn(16, 60, device=CUDA))


def test_no_host_sync() -> None:
    x, w = torch.randn(256, 512, device=CUDA, dtype=BF16), torch.randn(128, 512, device=CUDA, dtype=BF16)
    for name in ("nvfp4", "nvfp4-row", "mxfp8", "int8-row", "fp8-tensor"):
        fmt: Format = get_format(name)
        for _ in range(2):  # the first call compiles
            with no_waiting():
                e, values, _ = with_values(fmt, x, BF16, operand=True, keep=True)
                assert e is not None
                scaled_mm(e, w, None, name, name, "aoquant", [256], BF16, values)
