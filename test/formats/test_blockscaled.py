"""MX and NVFP4: error bars, zero tensors, extremes, and the exactness of their operands."""

import pytest
import torch
from support.golden_inputs import DATA, data_set
from support.torchao_oracle import torchao_encode

from aoquant.formats import MX, NVFP4, MXFP4Dialect, NVFP4Dialect, Scales, get_format, list_formats

NAMES = [n for n in list_formats() if isinstance(get_format(n), MX | NVFP4 | MXFP4Dialect | NVFP4Dialect)]
MX_NAMES = [n for n in NAMES if isinstance(get_format(n), MX)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_operands_are_exact_in_bfloat16(name: str, dtype: torch.dtype) -> None:
    """The claim that a bf16 GEMM sums the very products of the FP4 tensor core."""
    fmt = get_format(name)
    for data in ("normal", "weights", "heavy", "special", "bits", "bits_in_rows"):
        e = fmt.encode(data_set(data, 24, 256, dtype))
        exact = fmt.operand(e, torch.float32)
        # below 2^-126 bfloat16 has fewer bits than 6
        normal = (exact.abs() >= 2.0**-126) | (exact == 0)
        assert torch.equal(fmt.operand(e, torch.bfloat16).float()[normal], exact[normal]), data
        assert normal.float().mean() > 0.8, data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nvfp4_zero_and_tiny_tensors_are_zeros_where_torchao_gives_nan(dtype: torch.dtype) -> None:
    fmt = get_format("nvfp4")
    for value in (0.0, -0.0, 1e-44, 1e-37, 6e-8):
        x = torch.full((2, 32), value, dtype=dtype)
        # outer scale 2^-121, block scale 2^-6, code .5: the smallest step is 2^-128
        torch.testing.assert_close(fmt.fake_quantize(x), x, rtol=0.05, atol=2.0**-129)
        assert torch.equal(fmt.encode(x * 0).codes & 0x77, torch.zeros(2, 16, dtype=torch.uint8))
        assert (fmt.encode(x.abs() * 0).codes == 0).all()  # no sign of a NaN on the way
    # nor an infinite inverse of the scales, which would make the largest code of the smallest value
    assert (fmt.fake_quantize(torch.full((2, 32), 1e-44, dtype=dtype)) == 0).all()
    if dtype != torch.float16:
        x = torch.zeros(2, 32, dtype=dtype)
        theirs = torchao_encode(fmt, x)
        assert (theirs.outer == 0).all()
        assert theirs.scale.float().isnan().all()


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
def test_only_floor_and_even_clip(rule: str) -> None:
    fmt = MX("e2m1", rule)
    x = DATA["heavy"](64, 256, torch.float32)
    e = fmt.encode(x)
    clipped = fmt.saturated(x, e)
    assert clipped.any() == (rule == "floor")
    # 6 < absmax / scale < 7 still rounds to 6; floor lets it reach 8
    assert (fmt.decode(e, torch.float32)[clipped].abs() < x[clipped].abs()).all()


@pytest.mark.parametrize("name", MX_NAMES)
def test_mx_values_are_idempotent(name: str) -> None:
    """What a power-of-two scale represents, it represents again, though with a smaller scale at times."""
    fmt = get_format(name)
    for data in ("normal", "heavy", "special", "weights"):
        once = fmt.fake_quantize(data_set(data, 24, 256, torch.bfloat16).float())
        assert torch.equal(fmt.fake_quantize(once), once), data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_largest_values(dtype: torch.dtype) -> None:
    """Up to the largest finite value nothing becomes NaN; floor clips, the others may round up to Inf, as in
    torchao.
    """
    x = torch.full((1, 32), torch.finfo(dtype).max, dtype=dtype)
    for name in NAMES:
        got = get_format(name).fake_quantize(x)
        assert not got.isnan().any(), name
    assert get_format("mxfp4-floor").fake_quantize(x).isfinite().all()


def test_static_outer_scale() -> None:
    fmt = get_format("nvfp4-static:0.001")
    e = fmt.encode(data_set("normal", 24, 256, torch.bfloat16))
    assert e.outer is not None
    assert e.outer.item() == pytest.approx(0.001)
    # 448 * 6 * pts is the largest value; weights of 1e-5 sit on the floor of the block scales
    assert fmt.saturated(torch.full((1, 16), 4.0), fmt.encode(torch.full((1, 16), 4.0))).all()
    assert fmt.floored(fmt.encode(torch.full((1, 16), 1e-5))).all()
    for outer, pts in (
        ("static", None),
        ("dynamic", 1.0),
        ("static", 0.0),
        ("static", 1e-40),
        ("static", float("nan")),
    ):
        with pytest.raises(ValueError, match="finite pts of at least"):
            NVFP4(outer, pts)


@pytest.mark.parametrize(
    ("name", "edge"), [("mxfp4-floor", 7.0), ("mxfp8-floor", 464.0), ("mxfp8-e5m2-floor", 61440.0)]
)
def test_an_mx_value_saturates_beyond_half_a_step_above_the_largest_code(name: str, edge: float) -> None:
    """The block's scale is 1, since floor takes the power of two of `edge`."""
    fmt = get_format(name)
    for value, clipped in ((edge * (1 - 2.0**-20), False), (edge, False), (edge * (1 + 2.0**-20), True)):
        x = torch.full((1, 32), value)
        e = fmt.encode(x)
        assert e.scale is not None and (e.scale.float() == 1).all()
        assert (fmt.saturated(x, e) == clipped).all(), value


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("nvfp4-none", 448.0),
        ("nvfp4-static:2.0", 896.0),
        ("xx-nvfp4-static:2.0", 896.0),
        ("te-nvfp4-static:2688.0", 448.0),
        ("fouroversix-static:1536.0", 448.0),
    ],
)
def test_a_value_saturates_beyond_half_a_step_above_the_largest_code(name: str, unit: float) -> None:
    """From 6 to 7 a value rounds to 6 as any other value rounds. unit: the largest scale there is."""
    fmt = get_format(name)
    for value, clipped in ((6.0, False), (6.5, False), (7.0, False), (7.0625, True), (7.5, True)):
        x = torch.full((16, 32), value * unit)
        assert (fmt.saturated(x, fmt.encode(x)) == clipped).all(), value


@pytest.mark.parametrize("name", ["mxfp4-floor", "mxfp4-even"])
def test_at_byte_zero_torchao_divides_by_two_to_the_minus_126(name: str) -> None:
    """Its scale is 2^-127, so such blocks come back halved."""
    x = torch.full((1, 32), 2.0**-126)
    e = get_format(name).encode(x)
    assert e.scale is not None and e.scale.view(torch.uint8).item() == 0
    assert torch.equal(e.codes, torch.full((1, 16), 0x22, dtype=torch.uint8))  # 1.0
    assert torch.equal(get_format(name).decode(e, torch.float32), x / 2)


def test_a_held_scale_of_byte_zero_divides_by_one() -> None:
    """torchao's rule for RCEIL: a block of zeros that has grown under its scale keeps its values as they are."""
    e = get_format("mxfp8").hold(torch.full((1, 32), 3.0), Scales(torch.zeros(1, 1, dtype=torch.float8_e8m0fnu)))
    assert torch.equal(e.codes.view(torch.float8_e4m3fn).float(), torch.full((1, 32), 3.0))


def test_the_largest_held_scale_divides_and_the_scale_nan_makes_codes_nan() -> None:
    fmt, x = get_format("mxfp8"), torch.full((1, 32), 3 * 2.0**125)
    for byte, wanted in ((254, torch.full((1, 32), 0.75)), (255, torch.full((1, 32), float("nan")))):
        scale = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        codes = fmt.hold(x, Scales(scale)).codes.view(torch.float8_e4m3fn).float()
        assert torch.equal(codes.nan_to_num(-1.0), wanted.nan_to_num(-1.0))
