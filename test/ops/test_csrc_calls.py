"""The calls of csrc's encoders, on a CPU: what Python passes, against the schemas that the sources define. The
operators are stand-ins.

What the operators compute is test_csrc_grids.py's and test/gpu/test_grids.py's.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.csrc import schemas
from support.grid_inputs import name_arguments
from torch import Tensor

from aoquant import get_format
from aoquant.formats import Scales, as_operand, get_operand
from aoquant.ops import CodecRequest, native
from aoquant.ops.codec import cuda, fitted, triton, triton_kernels
from aoquant.ops.quantized import Ask, Side


@pytest.mark.parametrize(
    "name",
    [
        "encode_grids",
        "encode_search",
        "finite_absmax",
        "outer_scale",
        "linear",
        "encode_rows",
        "encode_tensor",
        "transform_fitted",
        "encode_fitted",
    ],
)
def test_fakes_take_what_the_operators_take(name: str) -> None:
    assert list(inspect.signature(native._FAKES[name]).parameters) == [a.name for a in schemas()[name].arguments]


def test_fakes_have_the_shapes_of_products() -> None:
    """Of 3 rows of x and 5 of W, K = 64; in two experts with as many each, and with x in two batches."""
    x, codes, rows = torch.empty(3, 64), torch.empty(5, 32), torch.empty(2, 3, 64)
    fakes = native._FAKES
    assert fakes["decode_mm"](x, codes).shape == (3, 5)
    assert fakes["linear"](rows, codes, *(None,) * 5).shape == (2, 3, 5)
    assert [y.shape for y in fakes["siblings"](rows, [codes, codes[:4]])] == [(2, 3, 5), (2, 3, 4)]
    assert [t.shape for t in fakes["encode_rows"](x, 1, False)] == [(3, 64), (3, 1)]
    assert fakes["experts_mm"](x, torch.empty(2), torch.empty(10, 32)).shape == (3, 5)
    assert fakes["finite_absmax"](x).shape == (native.PARTIALS,) and fakes["outer_scale"](x, 1.0, 0.0).shape == (1, 1)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fouroversix", ["finite_absmax", "encode_grids"]),
        ("gridflip-sided-c0.2-alternating", ["finite_absmax", "encode_grids"]),
        ("fouroversix-mae-16x16", ["finite_absmax", "encode_grids"]),
        ("gridflip-static:2.0", ["encode_grids"]),
        ("nvfp4-search", ["outer_scale", "encode_search"]),
        ("nvfp4-search-none", ["encode_search"]),
        ("nvfp4-search-static:0.001", ["encode_search"]),
    ],
)
def test_encoders_call_the_operators_as_they_are_defined(
    name: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each argument has its schema's type, the names lead to the options, and the results are taken for what they
    are.
    """
    fmt, types, calls = get_format(name), {"Tensor": Tensor, "int": int, "float": float, "bool": bool}, []

    def operator(called: str) -> Any:
        def run(*args: Any) -> Any:
            arguments = schemas()[called].arguments
            assert len(args) == len(arguments)
            assert all(type(given) is types[str(a.type)] for given, a in zip(args, arguments, strict=True)), args
            calls.append((called, dict(zip((a.name for a in arguments), args, strict=True))))
            return native._FAKES[called](*args)

        return run

    monkeypatch.setattr(native, "operator", operator)
    x = torch.randn(40, 96, dtype=torch.bfloat16)
    want = fmt.encode(x)
    got = cuda.quantize(as_operand(fmt), x, Ask()).codes
    assert [c for c, _ in calls] == wanted
    quantized = cuda.quantize(as_operand(fmt), x, Ask(values=torch.float16))
    assert quantized.values is not None
    assert (
        quantized.values.dtype == torch.float16 and quantized.values.shape == x.shape and quantized.encoded is not None
    )
    for e in (got, quantized.encoded):
        for a, b in zip(e[:4], want[:4], strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or (a.shape == b.shape and a.dtype == b.dtype)
    last = calls[-1][1]
    assert last["out"] == 2 and last["operand"] is True
    if "search" in wanted[-1]:
        if len(wanted) == 2:  # that the stand-in leaves as it is
            how = calls[0][1]
            top = x.float().abs().max() * how["times"]
            assert want.outer is not None and torch.equal(top.clamp(min=how["least"]).view(1, 1), want.outer)
            assert last["outer"].shape == (1, 1)
        else:
            assert (want.outer is None and last["outer"].numel() == 0) or torch.equal(last["outer"], want.outer)
        again = cuda.quantize(as_operand(fmt), x, Ask(values=torch.float16, measured=torch.full((1, 1), 3.0)))
        assert again.alpha is not None and again.alpha.item() == 3.0
    else:
        effort, metric, tile, c, alternating = name_arguments(name)
        assert (last["effort"], last["metric"], last["tile"], last["alternating"]) == (
            effort,
            metric,
            tile,
            alternating,
        )
        assert last["c"] == c and last["known"] == (2.0 if "static" in name else 0.0)


def test_a_fitted_transform_reads_rows_that_lie_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []
    monkeypatch.setattr(native, "operator", lambda name: lambda x, *rest: read.append(x) or x)
    operand, matrix = as_operand(get_format("wush16+nvfp4")), torch.eye(16).expand(4, 16, 16)
    columns, shifted = torch.randn(64, 8).t(), torch.randn(8 * 64 + 1)[1:].view(8, 64)
    for x in (columns, shifted):
        fitted.transform(operand, x, matrix, False, None)
        assert torch.equal(read[-1], x) and read[-1].is_contiguous() and read[-1].data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("wush16+nvfp4", fitted.FIND),
        ("wush16+nvfp4-static:0.001", torch.tensor(0.001).item()),
        ("wush16+nvfp4-none", 0.0),
        ("wush32+mxfp4", 0.0),
    ],
)
def test_an_encoder_behind_a_fitted_transform_is_told_the_outer_scale(
    name: str, known: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of the result are those that the format's own encoder makes."""
    operand, given = get_operand(name), []

    def run(*args: Any) -> Any:
        given.append(dict(zip((a.name for a in schemas()["encode_fitted"].arguments), args, strict=True)))
        return native._FAKES["encode_fitted"](*args)

    monkeypatch.setattr(native, "operator", lambda called: run)
    size = operand.period
    x, matrix = torch.randn(8, 64), torch.eye(size).expand(64 // size, size, size)
    want = operand.encode(x, Scales(transform=matrix))
    got = fitted.quantize(operand, x, Ask(held=Scales(transform=matrix))).encoded
    assert given[0]["known"] == pytest.approx(known) and given[0]["block"] == operand.format.block
    for a, b in zip(got[:4], want[:4], strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape == b.shape and a.dtype == b.dtype)


@pytest.mark.parametrize("name", ["wush16+nvfp4", "wush16+high-precision"])
@pytest.mark.parametrize("back", [False, True])
def test_a_fitted_transform_calls_its_operator_as_it_is_defined(
    name: str, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 values for an encoder, else x's dtype. The gradient of clipped values is zero."""
    given: list[dict[str, Any]] = []
    called = [a.name for a in schemas()["transform_fitted"].arguments]
    monkeypatch.setattr(native, "operator", lambda name: lambda *a: given.append(dict(zip(called, a, strict=True))))
    operand, matrix = get_operand(name), torch.randn(16, 16, 4).bfloat16().permute(2, 0, 1)
    x, bits = torch.randn(8, 64).bfloat16(), torch.zeros(8, 8, dtype=torch.uint8)
    bits[3, 2] = 1 << 4
    fitted.transform(operand, x, matrix, back, bits if back else None)
    want = x.clone()
    if back:
        want[3, 20] = 0
    (got,) = given
    assert torch.equal(got["x"], want) and got["back"] is back
    assert got["out"] == native.OUT[torch.bfloat16 if back or operand.format.lossless else torch.float32]
    assert torch.equal(got["matrix"], matrix.float()) and got["matrix"].is_contiguous()
    assert got["matrix"].dtype == torch.float32


def test_a_fitted_transform_without_its_matrices_is_refused_by_name() -> None:
    operand, x = get_operand("wush16+nvfp4"), torch.randn(8, 64)
    with pytest.raises(ValueError, match=r"^wush16: its matrices are found by calibration, and none were given"):
        fitted.transform(operand, x, None, False, None)
    for ask in (Ask(), Ask(held=Scales(outer=torch.ones(1, 1)))):
        with pytest.raises(ValueError, match=r"^wush16: its matrices are found"):
            cuda.quantize(operand, x, ask)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("wush16+nvfp4", {"held": Scales(transform=torch.eye(16).expand(4, 16, 16))}, "encode_fitted"),
        ("nvfp4", {}, "encode_tensor"),
        ("nvfp4", {"measured": torch.ones(1, 1)}, "triton"),
        ("nvfp4-row", {"codes": False, "values": torch.bfloat16}, "encode_rows"),
        ("nvfp4-row", {"codes": False, "values": torch.float32}, "triton"),
        ("hadamard16+fouroversix", {}, "triton, finite_absmax, encode_grids"),
    ],
)
def test_which_kernels_make_what_the_codec_asks_for(
    name: str, given: dict[str, Any], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton takes outer scales that are measured already, values of another dtype, and Hadamard transforms."""
    calls, made = [], Side()

    def operator(called: str) -> Any:
        return lambda *args: (calls.append(called), native._FAKES[called](*args))[1]

    monkeypatch.setattr(native, "operator", operator)
    monkeypatch.setattr(triton, "quantize", lambda *args: (calls.append("triton"), made)[1])
    monkeypatch.setattr(triton, "transform", lambda operand, x, matrix: (calls.append("triton"), x.float())[1])
    got = cuda.quantize(get_operand(name), torch.randn(8, 64).bfloat16(), Ask(**given))
    assert ", ".join(calls) == wanted
    assert (got is made) == (wanted == "triton")
    if wanted == "encode_rows":
        assert got.encoded is None and got.values.dtype == torch.bfloat16 and got.alpha.shape == (8, 1)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["nvfp4", "fp8-tensor"])
def test_a_whole_tensor_is_encoded_as_its_operator_is_defined(
    name: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of the result are those that the format's own encoder makes."""
    given: list[dict[str, Any]] = []

    def run(*args: Any) -> Any:
        given.append(dict(zip((a.name for a in schemas()["encode_tensor"].arguments), args, strict=True)))
        return native._FAKES["encode_tensor"](*args)

    monkeypatch.setattr(native, "operator", lambda called: run)
    operand, x = get_operand(name), torch.randn(8, 64).bfloat16()
    made, want = cuda.quantize(operand, x, Ask(keep, torch.float16)), operand.encode(x)
    assert given[0]["kind"] == (name == "fp8-tensor") and given[0]["keep"] is keep and given[0]["out"] == 2
    assert made.values is not None and made.values.dtype == torch.float16 and made.alpha is not None
    assert (made.encoded is not None) == keep and (not keep or made.encoded.k == 64)
    for a, b in zip(made.encoded[:4] if keep else (), want[:4] if keep else (), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape == b.shape and a.dtype == b.dtype)


@pytest.mark.parametrize("operand", [True, False])
def test_rows_are_encoded_as_an_operand_or_decoded(operand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(native, "operator", lambda name: lambda *a: (given.append(a), native._FAKES[name](*a))[1])
    x = torch.randn(8, 64).bfloat16()
    cuda.quantize(get_operand("fp8-row"), x, Ask(False, torch.bfloat16, operand))
    assert given[0][1:] == (2, not operand)


def test_what_an_encoder_of_rows_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.setattr(native, "why_not_on", lambda device: None)

    def reason(k: int, dtype: torch.dtype = torch.bfloat16, rows: int = 4) -> str | None:
        operand = as_operand(get_format("nvfp4-row"))
        return cuda._why_not_rows(CodecRequest("quantize", operand, torch.device("cpu"), dtype, rows, k, False))

    assert reason(64) is None and reason(64, torch.float16) is None
    for refused in (reason(72), reason(64, torch.float32)):
        assert refused is not None and refused.startswith("reads rows of bfloat16 or float16 by 16")


def test_which_codes_are_moved_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "lacks_triton", lambda device: None)

    def reason(name: str, rows: int, k: int) -> str | None:
        operand = as_operand(get_format(name))
        request = CodecRequest("transpose", operand, torch.device("cpu"), torch.uint8, rows, k)
        return triton._why_not_transpose(request)

    assert reason("mxfp8-32x32", 32, 32) is None and reason("te-nvfp4-16x16", 16, 16) is None
    for name, rows, k in (("te-fp8-tensor", 4, 33), ("te-fp8-tensor", 0, 32), ("intx3-g32", 4, 32)):
        assert (reason(name, rows, k) or "").startswith("moves codes of 4 and 8 bits of an even K")


@pytest.mark.parametrize(
    ("rows", "columns", "strips"),
    [
        ("te-nvfp4", "te-hadamard16-sd7e8+te-nvfp4", True),
        ("mxfp8", "te-nvfp4", True),
        ("nvfp4-sr", "te-hadamard16-sd7e8+nvfp4-sr", True),
        (None, "mxfp4", True),
        ("te-hadamard16-sd7e8+te-nvfp4", "te-nvfp4", False),  # a strip is one block high, and not one wide
        ("te-nvfp4", "te-hadamard16-sd7e8+mxfp8", False),
        ("te-nvfp4", "rht32+nvfp4-sr", False),
        ("te-nvfp4-16x16", "te-nvfp4", False),
        ("te-nvfp4", "ms-eden", False),
        ("nvfp4", "te-nvfp4", False),
    ],
)
def test_which_operands_of_x_and_its_transpose_one_kernel_makes(
    rows: str | None, columns: str | None, strips: bool
) -> None:
    of_x, of_t = (None if name is None else get_operand(name) for name in (rows, columns))
    assert triton_kernels.in_strips(of_x, of_t) is strips


def test_which_formats_write_both_sides_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "lacks_triton", lambda device: None)

    def reason(name: str) -> str:
        operand = as_operand(get_format(name))
        request = CodecRequest(
            "sides", operand, torch.device("cpu"), torch.bfloat16, 32, 32, columns=operand, column_codes=True
        )
        return triton._why_not_sides(request) or ""

    assert not reason("te-fp8-tensor")
    for name in ("mxfp8-32x32", "te-fp8-1x128", "hadamard16+te-nvfp4", "int8-row"):
        assert name in reason(name)
