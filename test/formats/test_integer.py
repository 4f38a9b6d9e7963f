"""int4 in MSLK's dialect, against an oracle written from its definition in rational arithmetic. Tolerance 0.

MSLK needs a GPU, so here the definition is the oracle; `test_golden.py` holds MSLK's own bytes. The affine formats are
compared with torchao in `test_torchao.py`.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from support.golden_inputs import data_set
from support.rational import rounded
from torch import Tensor

from aoquant.formats import Affine, Encoded, Int4, get_format, layout
from aoquant.formats.scales import reciprocal

F32 = torch.float32
EPS = Fraction(float(np.float32(1e-6)))
FIFTEENTH = Fraction(reciprocal(15.0))


def unpacked(e: Encoded) -> Tensor:
    """int8 codes -8..7 out of two's complement nibbles."""
    low, high = e.codes & 15, e.codes >> 4
    nibbles = torch.stack((low, high), -1).flatten(1).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def rational_int4(group: list[float], dtype: torch.dtype) -> tuple[Fraction, Fraction, list[int]]:
    """Scale and zero in dtype, codes: spec of `int4_row_quantize_zp`, every float32 operation rounded once."""
    w = [Fraction(v) for v in group]
    low, high = min(w), max(w)
    scale = rounded(max(rounded(high - low, F32), EPS) * FIFTEENTH, F32)
    zero = rounded(low + 8 * scale, F32)
    codes = [max(0, min(15, round(rounded(rounded(v - low, F32) / scale, F32)))) - 8 for v in w]
    return rounded(scale, dtype), rounded(zero, dtype), codes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("data", ["weights", "heavy", "special"])
def test_int4_is_its_definition(data: str, dtype: torch.dtype) -> None:
    fmt = Int4(32)
    x = data_set(data, 24, 128, dtype)
    e = fmt.encode(x)
    assert e.scale is not None
    assert e.zero is not None
    operand = fmt.operand(e, torch.bfloat16)
    codes = unpacked(e)
    for r in range(24):
        for g in range(4):
            columns = slice(32 * g, 32 * g + 32)
            scale, zero, q = rational_int4(x[r, columns].tolist(), dtype)
            assert (e.scale[r, g].item(), e.zero[r, g].item()) == (float(scale), float(zero)), (r, g)
            assert codes[r, columns].tolist() == q, (r, g)
            for c, got in zip(q, operand[r, columns].tolist(), strict=True):
                value = c * scale + zero
                if dtype == F32:  # the fused multiply-add rounds to float32 before the tensor core's bf16
                    value = rounded(value, F32)
                assert got == float(rounded(value, torch.bfloat16)), (r, g, c)


def test_int4_operand_at_a_false_midpoint() -> None:
    e = Encoded(
        layout.pack(torch.full((1, 32), 3, dtype=torch.uint8), 4),
        torch.tensor([[129 / 128]]).bfloat16(),
        torch.tensor([[-1e-9]]).bfloat16(),
        None,
        32,
    )
    assert (Int4(32).operand(e, torch.bfloat16) == 3.015625).all()


def test_int4_of_a_constant_group_is_exact() -> None:
    for value in (0.0, 0.75, -0.75, 448.0, -0.099609375):
        x = torch.full((2, 64), value, dtype=torch.bfloat16)
        assert torch.equal(Int4(64).fake_quantize(x), x)
        assert Int4(64).floored(Int4(64).encode(x)).all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_symmetric_codes_clip_at_the_highest_alone(bits: int) -> None:
    """absmax / ((2^b - 1) / 2) puts absmax on a half: at code top - 1 or, clipped, at top; -absmax at -top or -top +
    1.
    """
    fmt = get_format(f"intx{bits}-row")
    assert isinstance(fmt, Affine)
    top = 2 ** (bits - 1)
    x = torch.randn(64, 32)
    x[:, 0] = torch.where(torch.arange(64) % 2 == 0, 5.0, -5.0)
    e = fmt.encode(x)
    q = fmt.integers(e)
    assert q.min() >= -top
    assert (q[::2, 0] == top - 1).all()
    assert ((q[1::2, 0] == -top) | (q[1::2, 0] == -top + 1)).all()
    saturated = fmt.saturated(x, e)
    assert not saturated[q < top - 1].any()
    assert e.scale is not None
    assert torch.equal(saturated, (x * (1.0 / e.scale)).round() > top - 1)


def test_asymmetric_zero_point_by_hand() -> None:
    e = get_format("intx8-row-asym").encode(torch.tensor([[0.0, 2.55], [-2.55, 0.0], [-1.0, 1.55]]))
    assert e.zero is not None
    assert e.zero.flatten().tolist() == [-128, 127, -28]
    assert e.codes.tolist() == [[-128, 127], [-128, 127], [-128, 127]]


def test_a_zero_point_beyond_the_codes_is_clamped() -> None:
    """In bfloat16 the scale of 170 is rounded down so far that -170 lies 128 steps below zero, and seven bits hold
    127.
    """
    fmt = get_format("intx7-row-asym")
    assert isinstance(fmt, Affine)
    x = torch.tensor([[-170.0, 0.0, -85.0, -1.0]]).bfloat16()
    e = fmt.encode(x)
    assert e.scale is not None and e.zero is not None
    scale = rounded(rounded(Fraction(170) * Fraction(reciprocal(127.0)), F32), torch.bfloat16)
    assert e.scale.item() == float(scale)
    assert round(rounded(Fraction(170) / scale, torch.bfloat16)) == 128
    assert e.zero.item() == 63  # not -64 + 128
    assert fmt.integers(e)[0, :2].tolist() == [-64, 63]
    assert fmt.decode(e, torch.bfloat16)[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_smallest_scale_that_is_measured(dtype: torch.dtype) -> None:
    for name, least in (
        ("intx4-g32", torch.finfo(dtype).smallest_normal),
        ("int8-row", torch.finfo(torch.float32).eps),
    ):
        s = get_format(name).measure(torch.zeros(2, 32, dtype=dtype))
        assert s.scale is not None and s.scale.shape == (2, 1)
        assert (s.scale.float() == torch.tensor(least, dtype=s.scale.dtype).float()).all()


@pytest.mark.parametrize("name", ["int8-row", "int8-row-asym", "intx4-g32", "intx3-g32-asym"])
def test_codes_of_no_number_are_zero(name: str) -> None:
    """Their scale is NaN. Every device stores the same bytes, also where PyTorch leaves a cast undefined."""
    f, x = get_format(name), torch.randn(2, 64)
    x[1, 7] = torch.nan
    e = f.encode(x)
    blocks = f.integers(e)[1].view(-1, f.block or 64)
    assert not blocks[0].any() and f.decode(e, torch.float32)[1, : blocks.shape[1]].isnan().all()
    assert f.integers(e)[0].any()
