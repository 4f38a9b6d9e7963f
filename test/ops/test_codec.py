"""The codec's roles on a CPU: the reference runs and the others say why not; its values are the format's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.bits import same_bytes, unequal_parts
from support.formats import EXTRA
from support.gemm import coded, scaled_mm, with_values
from support.linear_cases import BF16, F32, assert_equal, data, dtype_name
from torch import Tensor

from aoquant import backend, explain, get_format, list_formats, ops
from aoquant.formats import Format, Scales, as_operand, get_operand, layout, tiles
from aoquant.ops import CodecRequest, backward, codec, router
from aoquant.ops.codec import cuda, triton
from aoquant.ops.encoding import padded
from aoquant.ops.quantized import Ask, Side

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROLES = ("decode", "quantize")
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "int4-g64", "intx3-g32", "int8-row-asym", "int8-tensor", "fp8-row", "fp8-tensor")


def request(role: str, name: str, device: torch.device = CPU) -> CodecRequest:
    return CodecRequest(role, get_format(name), device, BF16, 6, 192)


@pytest.mark.parametrize("role", ROLES)
def test_the_reference_runs_and_the_others_say_why_not(role: str) -> None:
    rows = explain(request(role, "nvfp4"))
    assert dict(rows)["triton"] == "its kernels are for CUDA devices"
    assert (dict(rows).get("cuda") == "its kernels are for CUDA devices") == (role == "quantize"), (
        "csrc has encoders alone"
    )
    cpu, reference, *rest = rows[[name for name, _ in rows].index("cpu") :]
    assert cpu[0] == "cpu" and "nvfp4" in cpu[1] and reference == ("reference", "runs")
    # below the reference, so that only forcing runs it
    below = [(name, "not nvfp4" in why) for name, why in rest]
    assert below == ([] if role == "decode" else [("qutlass", True)])


@pytest.mark.parametrize(
    ("name", "k", "reason"),
    [
        ("nvfp4", 256, "decodes int4 and int8, not nvfp4"),
        ("fp8-row", 256, "decodes int4 and int8, not fp8-row"),
        ("mxfp4", 40, "decodes int4 and int8, not mxfp4"),
        ("int8-row", 40, "decodes K and groups that are multiples of 32, not K = 40 of int8-row"),
        ("intx4-g16", 256, "decodes K and groups that are multiples of 32, not K = 256 of intx4-g16"),
    ],
)
def test_the_cpu_kernels_say_what_they_do_not_decode(name: str, k: int, reason: str) -> None:
    """The format where it is the reason, and its width only where the format is taken."""
    assert dict(explain(CodecRequest("decode", get_format(name), CPU, BF16, 6, k)))["cpu"] == reason


def test_codes_under_scales_from_elsewhere() -> None:
    x, s = data("outlier", 6, 192, BF16), Scales(outer=torch.full((1, 1), 2.0**-10))
    fmt = get_format("nvfp4")
    assert not unequal_parts(codec.encode(fmt, x, s), fmt.hold(x, s))
    assert codec.encode(fmt, x, s).outer is s.outer and fmt.encode(x).outer != s.outer
    names = ("nvfp4", "nvfp4-pow2", "nvfp4-row", "int8-row")
    requests = (CodecRequest("quantize", get_format(name), CPU, BF16, 6, 192, held=True) for name in names)
    asked = [dict(explain(request))["triton"] for request in requests]
    assert asked[:2] == ["its kernels are for CUDA devices"] * 2
    assert asked[2:] == [f"has no kernel for {name} under scales from elsewhere" for name in ("nvfp4-row", "int8-row")]
    with backend("triton", role="quantize"), pytest.raises(ValueError, match=r"quantize \(nvfp4, 6 x 192"):
        codec.encode(fmt, x, s)


def test_forcing_triton_on_a_cpu_is_an_error_with_its_reason() -> None:
    x = data("normal", 6, 192, BF16)
    with backend("triton"), pytest.raises(ValueError, match=r"quantize \(nvfp4, 6 x 192, .*for CUDA devices.*another"):
        codec.encode(get_format("nvfp4"), x)


def test_a_backend_of_gemms_leaves_the_codec_free() -> None:
    x, fmt = data("normal", 6, 192, BF16), get_format("mxfp4")
    with backend("torch._int_mm"):
        assert_equal(codec.encode(fmt, x).codes, fmt.encode(x).codes)
    with (
        backend("triton"),
        pytest.raises(ValueError, match="CUDA"),
    ):  # and the other way round: the GEMM is free, the codec is not
        scaled_mm(fmt.encode(x), x, None, "mxfp4", "mxfp4", "aoquant", [6], BF16)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_the_formats(name: str, dtype: torch.dtype) -> None:
    fmt, x = get_format(name), data("outlier", 6, 192, dtype)
    e = fmt.encode(x)
    for operand in (True, False):
        want = fmt.operand(e, dtype) if operand else fmt.decode(e, dtype)
        kept, values, alpha = with_values(fmt, x, dtype, operand=operand, keep=True)
        assert kept is not None
        assert_equal(values, want)
        assert_equal(kept.codes, e.codes)
        assert same_bytes(alpha, fmt.alpha(e))
        assert_equal(codec.decode(fmt, e, dtype, operand=operand), want)
        assert with_values(fmt, x, dtype, operand=operand).encoded is None
        again = ops.encode(x, get_operand(name), reads="operand" if operand else "decoded").row
        assert again is not None
        assert_equal(again.values, want)
        assert not unequal_parts(again.codes, e)


@pytest.mark.parametrize("name", FORMATS)
def test_a_gemm_takes_values_made_in_passing_and_a_weight_as_it_is(name: str) -> None:
    x, w = data("normal", 6, 192, BF16, 1), data("normal", 16, 192, BF16, 2)
    rest = (None, name, name, "aoquant", [6], BF16)
    made = ops.encode(x, get_operand(name), reads="operand").row
    assert made is not None
    want = scaled_mm(made.codes, coded(w, get_operand(name)), *rest)
    assert_equal(scaled_mm(made.codes, w, *rest, made.values), want)


@pytest.mark.parametrize("name", ["intx1-g32", "intx4-g32-noclip", "fp8-64x64", "intx8-row-sfloat32", "fp8-row:lb0.5"])
def test_options_without_a_kernel_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has Triton and a GPU, an option that the kernels do not know goes to the reference."""
    monkeypatch.setattr(triton, "lacks_triton", lambda device: None)
    rows = dict(explain(request("quantize", name, CUDA)))
    assert rows["reference"] == "runs"
    assert name in rows["triton"]
    assert dict(explain(request("quantize", "nvfp4", CUDA)))["triton"] == "runs"


@pytest.mark.parametrize(
    ("name", "k", "runs"),
    [
        ("intx3-row", 16, "triton"),
        ("intx3-row", 12, "reference"),
        ("intx3-g16", 48, "triton"),
        ("intx3-g12", 48, "reference"),
        ("intx4-row", 12, "triton"),
        ("intx4-row", 11, "reference"),
        ("int8-row", 11, "triton"),
        ("int8-row", 1 << 14, "triton"),
        ("int8-row", (1 << 14) + 1, "reference"),
        ("fp8-row", 32, "triton"),
        ("fp8-row", 24, "reference"),
        ("fp8-1x128", 256, "triton"),
        ("fp8-128x128", 256, "triton"),
        ("fp8-1x64", 256, "reference"),
    ],
)
def test_widths_without_a_kernel_are_refused(name: str, k: int, runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has Triton and a GPU, codes that a kernel cannot pack or hold go to the reference."""
    monkeypatch.setattr(triton, "lacks_triton", lambda device: None)
    rows = explain(CodecRequest("quantize", get_format(name), CUDA, BF16, 6, k))
    assert [backend for backend, verdict in rows if verdict == "runs"] == [runs]


def test_the_kernel_of_fitted_transforms_takes_no_others() -> None:
    for name, reason in (
        ("wush16+nvfp4", "its kernels are for CUDA devices"),
        ("rht16+nvfp4", "transforms by fitted matrices alone"),
    ):
        assert dict(explain(request("transform", name)))["cuda-fitted"] == reason


@pytest.mark.parametrize(("dtype", "rows", "k"), [(torch.float64, 6, 64), (BF16, 0, 64), (BF16, 6, 0)])
def test_the_kernel_of_fitted_transforms_takes_no_empty_matrix_nor_float64(
    dtype: torch.dtype, rows: int, k: int
) -> None:
    asked = CodecRequest("transform", get_format("wush16+nvfp4"), CUDA, dtype, rows, k)
    assert f"with values in them, got {rows} x {k} of {dtype}" in dict(explain(asked))["cuda-fitted"]


@pytest.mark.parametrize("name", ["te-nvfp4", "mxfp8"])
def test_both_sides_at_once_take_whole_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has Triton and a GPU."""
    monkeypatch.setattr(triton, "lacks_triton", lambda device: None)
    operand = get_operand(name)
    whole, cut = (CodecRequest("sides", operand, CUDA, BF16, 32, k, True, True, False, operand, True) for k in (64, 60))
    assert triton._why_not_sides(whole) is None and triton._why_not_sides(cut) is not None


@pytest.mark.parametrize("name", sorted({*list_formats(), *EXTRA, "fouroversix-mae", "fouroversix-absmax-16x16"}))
def test_tiles_are_the_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Some rows at a time, encoded and decoded, also where a scale spans rows and where the last tile is short."""
    monkeypatch.setattr(tiles, "TILE", 1 << 10)
    fmt = get_format(name)
    x = data("outlier", 605, 2 * (fmt.block or 32), BF16)
    want, calls = fmt.encode(x), []
    real = type(fmt).quantize
    monkeypatch.setattr(type(fmt), "quantize", lambda self, *a: (calls.append(1), real(self, *a))[1])
    got = tiles.encode(fmt, x)
    assert not unequal_parts(got, want)
    assert len(calls) > 2 or not (fmt.by_rows or fmt.per_tensor or fmt.tile_rows > 1)
    for out in (BF16, F32):
        assert_equal(tiles.decode(fmt, got, out), fmt.decode(want, out))
        assert_equal(tiles.decode(fmt, got, out, operand=True), fmt.operand(want, out))


@pytest.mark.parametrize("name", sorted(list_formats()))
def test_floored_blocks_are_counted_in_tiles(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fmt = get_format(name)
    x = data("normal", 600, 2 * (fmt.block or 32), BF16)
    x[100:300] *= 2.0**-120
    e = fmt.encode(x)
    want = fmt.floored(e).float().mean()
    monkeypatch.setattr(tiles, "TILE", 1 << 10)
    real, calls = type(fmt).floored, []
    monkeypatch.setattr(type(fmt), "floored", lambda self, e: (calls.append(1), real(self, e))[1])
    assert torch.isclose(tiles.floored(fmt, e), want, rtol=1e-6)
    assert len(calls) > 1


@pytest.mark.parametrize("name", ["fouroversix", "gridflip", "nvfp4-search"])
def test_the_cuda_encoder_takes_what_the_codec_hands_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands in for its library: what is tested is how it is called, in every role."""

    def library(f: Format, x: Tensor, ask: Ask) -> Side:
        e = f.encode(x)
        assert ask.measured is None or (e.outer is not None and torch.equal(ask.measured, e.outer))
        values = x.new_empty(0) if ask.values is None else (f.operand if ask.operand else f.decode)(e, ask.values)
        return Side(e, values, e.outer)

    fmt, x = get_format(name), data("outlier", 6, 192, BF16)
    monkeypatch.setitem(cuda._ENCODERS, type(fmt), library)
    runs = {b.role: b.run for b in router._backends if b.name == "cuda"}
    e = fmt.encode(x)
    assert_equal(runs["quantize"](as_operand(fmt), x, Ask()).codes.codes, e.codes)
    for measured in (None, e.outer):
        for keep in (True, False):
            made = runs["quantize"](as_operand(fmt), x, Ask(keep, BF16, measured=measured))
            assert (made.encoded is not None) == keep
            if keep:
                assert_equal(made.encoded.codes, e.codes)
            assert_equal(made.values, fmt.operand(e, BF16))
            assert_equal(made.alpha, fmt.alpha(e))


def test_what_triton_takes_of_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has Triton and a GPU."""
    monkeypatch.setattr(triton, "lacks_triton", lambda device: None)

    def said(role: str, name: str, k: int = 192) -> str:
        return dict(explain(CodecRequest(role, get_operand(name), CUDA, BF16, 6, k)))["triton"]

    for role, name in (("quantize", "hadamard16+high-precision"), ("quantize", "hadamard16+nvfp4"),
                       ("quantize", "rht32+mxfp4-sr"), ("quantize", "mxfp4-sr")):  # fmt: skip
        assert said(role, name) == "runs"
    for role, name, why in (
        ("quantize", "wush16+high-precision", "wush16"),
        ("quantize", "hadamard16+intx1-g32", "intx1-g32"),
        ("decode", "rht32+mxfp4-sr", "to decode rht32"),
        ("quantize", "fouroversix-16x16", "blocks of 16"),
    ):
        assert why in said(role, name), (role, name)
    assert said("quantize", "rht32+mxfp4-sr", 208) == "rotates and scales 32 values at once, got K = 208"


def test_triton_hands_on_what_a_transform_makes_of_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands in for the kernel."""
    monkeypatch.setattr(triton, "transform", lambda operand, x, matrix: operand.transformed(x, matrix))
    operand, x = get_operand("hadamard16+high-precision"), data("normal", 6, 192, BF16)
    want = operand.transformed(x)
    made = triton.in_one_pass(operand, x, Ask(True, F32))
    assert made.alpha is None and made.encoded is not None and made.values is not None
    assert_equal(made.encoded.codes, want)
    assert_equal(made.values, want.float())
    assert triton.in_one_pass(operand, x, Ask(False)) == Side()


def test_what_the_cuda_encoder_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "why_not_encode", lambda format, device: None)
    wanted = get_operand("fouroversix")
    for rows, k, dtype, reads in (
        (6, 192, BF16, True),
        (0, 192, BF16, False),
        (6, 0, BF16, False),
        (6, 192, torch.float64, False),
    ):
        reason = cuda._why_not(CodecRequest("quantize", wanted, CUDA, dtype, rows, k))
        assert (reason is None) == reads
        assert reads or f"matrices with values in them, got {rows} x {k}" in (reason or "")


def test_transforms_and_masks_of_the_reference() -> None:
    operand, x = get_operand("hadamard16+mxfp4-floor"), torch.randn(64, 192).bfloat16()
    assert_equal(codec.transform(operand, x, None), operand.transformed(x))
    clipped = operand.format.saturated(operand.transformed(x), operand.encode(x))
    assert 0 < clipped.sum() < clipped.numel()
    bits, grad = codec.saturated(operand, x), data("normal", 64, 192, BF16, 1)
    ids = torch.tensor([5, 1])
    assert_equal(ops.saturated(x, operand), bits)
    assert_equal(ops.saturated(x, operand, None, ids), bits[ids])
    assert_equal(codec.masked(grad, bits), torch.where(clipped, 0.0, grad))
    assert_equal(ops.pull_back(grad, operand, None, bits), operand.pull_back(torch.where(clipped, 0.0, grad)))


def test_the_gradient_of_an_operand_without_a_transform_is_masked_alone() -> None:
    operand, grad = get_operand("mxfp4"), data("normal", 6, 192, BF16)
    clipped = torch.arange(6 * 192).view(6, 192) % 3 == 0
    bits = layout.pack(clipped.to(torch.uint8), 1)
    assert_equal(ops.pull_back(grad, operand, None, bits), grad.masked_fill(clipped, 0))
    whole = ops.pull_back(grad, operand)
    assert_equal(whole, grad)
    assert whole.data_ptr() != grad.data_ptr()  # an op's output may not be its input


def test_decoded_values_in_high_precision_are_memory_of_their_own() -> None:
    """An op's output may not be its input."""
    operand, x = get_operand("high-precision"), data("normal", 6, 192, BF16)
    e = operand.encode(x)
    values = ops.decode(e, operand, BF16)
    assert_equal(values, x)
    assert values.data_ptr() != e.codes.data_ptr()


@pytest.mark.parametrize("rows", [64, 48, 40, 0])
@pytest.mark.parametrize("name", ["te-nvfp4-16x16", "fouroversix-16x16", "fp8-16x16", "fp8-tensor", "mxfp8-32x32"])
def test_transposed_codes_are_those_of_the_transpose(name: str, rows: int) -> None:
    """Padded along the new K alike."""
    operand, x = get_operand(name), data("outlier", rows, 96, F32)
    found = backward.columns(x, operand, 32)
    assert found.codes.shape[0] == 96 and found.k == (64 if rows else 32)
    assert found.codes.is_contiguous()
    if rows:
        turned = codec.transposed(operand, operand.encode(x), padded(len(x), 32))
        assert not unequal_parts(turned, found)


def test_matrices_of_two_tiles_are_cut() -> None:
    assert tiles._rows(4, 512, 1024, 1) == 2
    assert tiles._rows(4, 511, 1024, 1) is None and tiles._rows(3, 1024, 1024, 1) is None
    assert tiles._rows(64, 32, 1024, 16) == 32 and tiles._rows(63, 64, 1024, 16) is None


def test_ordinary_tensors_meet_no_dispatcher() -> None:
    """Scales that are held are looked at one by one."""
    operand, x = get_operand("nvfp4"), data("normal", 6, 192, BF16)
    held = operand.measure(x)
    assert held.outer is not None
    with torch.no_grad(), mock.patch.object(type(ops.encode), "_dispatched", side_effect=AssertionError):
        assert_equal(coded(x, operand, held).codes, operand.encode(x, held).codes)
        with pytest.raises(AssertionError):
            coded(x.to("meta"), operand)
