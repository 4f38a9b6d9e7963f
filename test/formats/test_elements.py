"""Elements and e8m0 scales against ml_dtypes and exact rational arithmetic, on every 16-bit value. Tolerance 0."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from support.golden_inputs import DATA
from support.rational import exponent, rounded
from torch import Tensor

from aoquant.formats.elements import ELEMENTS, FLOAT8, fma_round, from_e2m1, to_e2m1, to_float8
from aoquant.formats.scales import absmax, divide, e8m0_bytes, e8m0_values, reciprocal

NUMPY = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def every(dtype: torch.dtype) -> Tensor:
    """Every finite value of a 16-bit dtype, as float32; 2^20 random finite bit patterns of float32."""
    if dtype == torch.float32:
        return DATA["bits"](1024, 1024, dtype).flatten()
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return x[x.isfinite()]


def ties(element: str) -> Tensor:
    """Midpoints of all neighbouring codes and the float32 values next to them, both signs."""
    codes = np.arange(8 if element == "e2m1" else 256, dtype=np.uint8)
    values = np.unique(np.abs(codes.view(NUMPY[element]).astype(np.float32)))
    values = torch.from_numpy(values[np.isfinite(values)])
    middle = (values[1:] + values[:-1]) / 2
    near = torch.cat((middle, middle.nextafter(torch.tensor(torch.inf)), middle.nextafter(torch.tensor(-torch.inf))))
    return torch.cat((near, -near))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "ties"])
def test_element_is_ml_dtypes(element: str, source: str) -> None:
    x = ties(element) if source == "ties" else every(getattr(torch, source))
    limit = ELEMENTS[element].largest
    # ml_dtypes turns overflow of float8 into NaN or Inf; ours saturates, so its input is clipped
    expected = np.clip(x.numpy(), -limit, limit).astype(NUMPY[element]).view(np.uint8)
    got = to_e2m1(x) if element == "e2m1" else to_float8(x, element).view(torch.uint8)
    assert torch.equal(got, torch.from_numpy(expected))
    if element != "e2m1" and source == "bfloat16":
        unclipped = x.numpy().astype(NUMPY[element]).astype(np.float32)
        overflow = torch.from_numpy(~np.isfinite(unclipped))
        assert overflow.any()
        assert (got.view(FLOAT8[element])[overflow].float().abs() == limit).all()


def test_e2m1_ties_go_to_even_by_hand() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 1e30, 0.0])
    assert to_e2m1(x).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 0]
    assert to_e2m1(-x).tolist() == [8, 10, 10, 12, 12, 14, 14, 15, 15, 8]


def test_nan_has_one_e2m1_code() -> None:
    """Whatever its sign, which differs between processors; the block's scale is what shows it."""
    nan = torch.tensor([torch.nan, -torch.nan]).copysign(torch.tensor([1.0, -1.0]))
    assert nan.signbit().tolist() == [False, True]
    assert to_e2m1(nan).tolist() == [0, 0]


def test_values_of_all_e2m1_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    expected = torch.from_numpy(codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert torch.equal(from_e2m1(codes), expected)
    assert torch.equal(from_e2m1(codes).signbit(), expected.signbit())  # -0.0 keeps its sign
    assert torch.equal(to_e2m1(from_e2m1(codes)), codes)


@pytest.mark.parametrize("element", FLOAT8)
def test_nan_and_inf_in_float8(element: str) -> None:
    got = to_float8(torch.tensor([torch.nan, torch.inf, -torch.inf]), element).float()
    assert got[0].isnan()
    assert got[1:].tolist() == [ELEMENTS[element].largest, -ELEMENTS[element].largest]


def test_e8m0_values_of_all_bytes() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    expected = byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = e8m0_values(byte)
    assert got[255].isnan()
    assert torch.equal(got[:255], torch.from_numpy(expected[:255]))
    assert got[0] == 2.0**-127


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_e8m0_rules_are_exact(rule: str, element: str) -> None:
    of = ELEMENTS[element]
    x = every(torch.bfloat16)
    edges = torch.tensor([top * 2.0**e for e in range(-126, 100) for top in (of.largest, 1.0, 1.75, 2 - 2.0**-7)])
    edges = torch.cat((edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(3e38))))
    x = torch.cat((x[x >= 0][::9], every(torch.float32)[:2000].abs(), edges))
    got = e8m0_bytes(x, rule, of)
    expected = [_byte(float(v), rule, *of) for v in x]
    assert got.tolist() == expected
    special = e8m0_bytes(torch.tensor([torch.nan, torch.inf]), rule, of)
    assert special.tolist() == [255, 254 if rule == "rceil" else 255 - of.max_pow2]


def _byte(v: float, rule: str, max_pow2: int, max_value: float, mantissa_bits: int) -> int:
    if v == 0:
        return 0
    if rule == "rceil":
        quotient = Fraction(v) / Fraction(max_value)
        if quotient < Fraction(2) ** -126:  # a float32 subnormal, which is rounded before the exponent is taken
            quotient = rounded(quotient, torch.float32)
        return min(max(exponent(quotient, up=True), -127), 127) + 127 if quotient else 0
    # float32's exponent field: subnormals count as 2^-127, which is 0 after the clamp whatever their mantissa
    if v < 2.0**-126:
        return 0
    e = exponent(Fraction(v), up=rule == "ceil")
    if rule == "even":  # the mantissa is rounded half up to the element's bits; only a carry matters
        e += Fraction(v) / Fraction(2) ** e >= 2 - Fraction(1, 2 ** (mantissa_bits + 1))
    return min(max(e - max_pow2 + 127, 0), 255)


def test_divide_multiplies_by_the_float32_reciprocal() -> None:
    x = every(torch.float32)
    for c in (6.0, 15.0, 448.0, 2688.0, 127.5):
        assert reciprocal(c) == float(np.float32(1) / np.float32(c))
        assert torch.equal(divide(x, c), x * torch.tensor(1.0).div(torch.tensor(c)))
        assert torch.equal(divide(x, c, native=True), x / c)
        # not vacuous: the two rules are different numbers
        assert (divide(x, c) != x / c).float().mean() > 0.05
    # in bfloat16 they never are; in float16 only where the quotient is subnormal
    for dtype, differing in ((torch.bfloat16, 0), (torch.float16, 78)):
        x = every(dtype).to(dtype)
        quotient = x / 448.0
        wrong = divide(x, 448.0) != quotient
        assert int(wrong.sum()) == differing
        assert (quotient[wrong].abs() < torch.finfo(dtype).smallest_normal).all()
    assert torch.equal(divide(x, 6.0), x / 6.0)


def test_absmax() -> None:
    x = torch.tensor([[[1.0, -3.0], [torch.nan, 2.0], [-0.0, 0.0]]])
    got = absmax(x)
    assert got.shape == (1, 3)
    assert got[0, 0] == 3
    assert got[0, 1].isnan()
    assert got[0, 2] == 0
    assert not got[0, 2].signbit()
    assert absmax(torch.zeros(2, 3, 0)).tolist() == [[0.0] * 3] * 2


def test_fma_round_is_one_rounding() -> None:
    q = torch.arange(-8.0, 8.0)
    s = torch.tensor([129 / 128, 1.0, 0.0078125, 1.9921875, 127.0]).repeat_interleave(40)
    z = torch.cat([torch.tensor([-1e-9, 1e-9, 1e-30, 0.0, -0.4]), torch.randn(35)]).repeat(5)
    q, s, z = (t.flatten() for t in torch.broadcast_tensors(q[:, None], s, z))
    for source in (torch.bfloat16, torch.float16, torch.float32):
        sd, zd = s.to(source), z.to(source)
        for dtype in (torch.bfloat16,) if source == torch.float16 else (torch.bfloat16, torch.float32):
            expected = []
            for a, b, c in zip(q.tolist(), sd.tolist(), zd.tolist(), strict=True):
                exact = Fraction(a) * Fraction(b) + Fraction(c)
                # float32 scales: the fused multiply-add rounds to float32 first
                first = rounded(exact, torch.float32) if source == torch.float32 else exact
                expected.append(float(rounded(first, dtype)))
            got = fma_round(q, sd, zd, dtype).double()
            assert torch.equal(got, torch.tensor(expected, dtype=torch.float64)), (source, dtype)


def test_fma_round_where_plain_arithmetic_is_wrong() -> None:
    q, s, z = torch.tensor([3.0]), torch.tensor([129 / 128]).bfloat16(), torch.tensor([-1e-9]).bfloat16()
    got = fma_round(q, s, z, torch.bfloat16)
    assert got.item() == 3.015625  # 387/128 is a midpoint; the tiny z pulls it down
    assert (q * s.float() + z.float()).bfloat16().item() == 3.03125  # what two roundings give
    assert math.isnan(fma_round(q, s * torch.nan, z, torch.bfloat16).item())
    assert fma_round(q, s * torch.inf, z, torch.bfloat16).item() == math.inf
