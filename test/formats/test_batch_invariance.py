"""A row is its own: the formats that claim it encode a row alike alone, in any batch and at any place in it.
Tolerance 0.

The neighbours are chosen to show what leaks: rows a thousand times as large, zeros (padding), NaN and Inf. A format
that does not claim it must be seen to fail, so that a claim that is missing is noticed too.
"""

import pytest
import torch
from support.bits import unequal_parts
from torch import Tensor

from aoquant.formats import COMPOSED, Encoded, Format, Operand, get_format, get_operand, list_formats
from aoquant.ops import codec
from aoquant.ops.codec import cuda
from aoquant.transforms.wush import fit, gram

BF16, F32 = torch.bfloat16, torch.float32
EXTRA = (
    "nvfp4-search-row", "gridflip-search-alternating-row", "fouroversix-absmax-row", "hadamard16+nvfp4-row", "hadamard64-s5+fouroversix-row",
    "wush16+nvfp4-row", "hadamard32+int8-row", "intx8-row-asym-native", "fp8-row-native", "fp8-row-mslk", "int4-tinygemm-hqq-g32",
    "stretched3-row", "intx4-row-asym-sfloat32", "fouroversix-static:3.5", "int8-tensor-asym-static:0.02:-3", "nvfp4-search-static:0.001",
)  # fmt: skip
NAMES = sorted({*list_formats(), *COMPOSED, *EXTRA})
ROW_NAMES = ("nvfp4-row", "nvfp4-search-row", "fouroversix-row", "gridflip-row", "gridflip-alternating-row")


def encode(format: Format | Operand, x: Tensor) -> Encoded:
    """By the kernel that serves x's device."""
    operand = format if isinstance(format, Operand) else Operand(format)
    if not operand.fitted:
        return codec.encode(operand, x)
    matrix, _ = fit(gram(FITTED.to(x.device), 16) / 64, gram(FITTED.flip(1).to(x.device), 16) / 64)
    return operand.encode(x, SCALES._replace(transform=matrix))


SCALES = get_format("high-precision").measure(torch.zeros(1, 1))  # none
FITTED = torch.randn(64, 512, generator=torch.Generator().manual_seed(7))


def batches(row: Tensor) -> list[tuple[Tensor, int]]:
    """(batch, the place in it of row (1, K))."""
    loud, padding = 1000.0 * row.flip(1).repeat(2, 1), torch.zeros_like(row).repeat(3, 1)
    broken = row.clone()
    broken[:, ::7], broken[:, 1::7] = torch.nan, torch.inf
    return [
        (torch.cat((row, loud)), 0),
        (torch.cat((loud, row, loud * 0.5)), 2),
        (torch.cat((padding, row)), 3),
        (torch.cat((broken, row)), 1),
        (torch.cat((row,) * 40 + (loud,)), 17),
    ]


def differing(one: Encoded, many: Encoded, place: int) -> list[str]:
    """The parts of a row that differ, as bytes, between the row alone and the row in a batch."""
    rows = many.codes.shape[0]
    row = [  # a part is one for all, or one for each tile of rows
        t if t is None else t[place : place + 1] if t.shape[0] == rows else t[:1] for t in many[:4]
    ]
    return unequal_parts(one, Encoded(*row, many.k))


def rows_of(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(1, 512, generator=generator)
    outlier = normal.clone()
    outlier[0, 77] = 55.0
    return [t.to(dtype).to(device) for t in (normal, outlier, normal * 2.0**-90)]


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", [n for n in NAMES if get_format(n).batch_invariant])
def test_a_row_is_its_own(name: str, dtype: torch.dtype, device: torch.device) -> None:
    format = get_format(name)
    for row in rows_of(dtype, device):
        one = encode(format, row)
        for batch, place in batches(row):
            assert differing(one, encode(format, batch), place) == [], (place, len(batch))


@pytest.mark.parametrize("name", [n for n in NAMES if not get_format(n).batch_invariant])
def test_a_format_that_does_not_claim_it_really_is_not(name: str) -> None:
    format = get_format(name)
    if get_operand(name).draws:
        with pytest.raises(ValueError, match="rounds at random"):  # no activation's format
            format.encode(rows_of(F32, torch.device("cpu"))[0])
        return
    assert any(
        differing(encode(format, row), encode(format, batch), place)
        for row in rows_of(F32, torch.device("cpu"))
        for batch, place in batches(row)
    ), name


@pytest.mark.parametrize("name", ROW_NAMES)
def test_a_row_alone_is_what_one_scale_for_the_tensor_makes(name: str) -> None:
    """Of a matrix of one row both outer scales are one number, so every byte is that of the format without "-row"."""
    format, whole = get_format(name), get_format(name.removesuffix("-row"))
    for dtype in (BF16, F32):
        for row in rows_of(dtype, torch.device("cpu")):
            assert differing(whole.encode(row), format.encode(row), 0) == []
    x = torch.cat(rows_of(F32, torch.device("cpu")))
    e = format.encode(x)
    assert e.outer is not None and e.outer.shape == (3, 1)
    for i, row in enumerate(x.split(1)):
        assert torch.equal(format.decode(e, F32)[i : i + 1], whole.fake_quantize(row))


def test_what_is_refused() -> None:
    for name in ("nvfp4-row-static:0.1", "fouroversix-row-static:0.1"):
        with pytest.raises(ValueError, match="for each row or block"):
            get_format(name)
    for name in ("fouroversix-16x16-row", "gridflip-16x16-row"):
        with pytest.raises(ValueError, match="no format is called"):
            get_format(name)
    from aoquant.formats import FourOverSix

    with pytest.raises(ValueError, match="tiles of one row"):
        FourOverSix(tile=16, outer="row")


@pytest.mark.parametrize("name", ["fouroversix-row", "gridflip-row", "nvfp4-search-row"])
def test_csrc_leaves_rows_to_other_kernels_and_says_so(name: str) -> None:
    """Its encoders hold one outer scale; Triton serves four-over-six and GridFlip, the reference the searched
    scales.
    """
    reason = cuda.why_not_encode(get_format(name), torch.device("cuda"))
    assert reason == f"encodes under one outer scale for the tensor, not one a row: {name}"
