"""Four-over-six and GridFlip against their definition: bytes of an independent oracle, the published errors, and blocks
at the edges.
"""

import numpy as np
import pytest
import torch
from support import grids_oracle as oracle
from support.golden_inputs import DATA, data_set
from torch import Tensor

from aoquant.formats import Encoded, FourOverSix, GridFlip, Scales, get_format, layout
from aoquant.formats.contest import Contest, Outer
from aoquant.formats.elements import from_e2m1, nearest_e2m1, to_e2m1
from aoquant.formats.four_over_six import _rows

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, dict[str, object]] = {
    "fouroversix": {},
    "fouroversix-mae": {"metric": "mae"},
    "fouroversix-absmax": {"metric": "absmax"},
    "fouroversix-16x16": {"tile": 16},
    "gridflip": {"effort": "base"},
    "gridflip-sided": {"effort": "sided"},
    "gridflip-search": {"effort": "search"},
    "gridflip-c0.2": {"effort": "base", "c": 0.2},
    "gridflip-sided-alternating": {"effort": "sided", "alternating": True},
    "gridflip-sided-c0.3-16x16": {"effort": "sided", "c": 0.3, "tile": 16},
}
every_case = pytest.mark.parametrize("name", CASES)


def unpacked(e: Encoded) -> tuple[np.ndarray, np.ndarray]:
    """(scale bytes, codes)."""
    assert e.scale is not None
    return e.scale.view(torch.uint8).numpy(), layout.unpack(e.codes, 4, e.k).numpy()


def check(name: str, x: Tensor, what: str) -> None:
    """Bytes of t, scales and codes; below scale 0 codes mean nothing, and far from 1 they depend on the power that x is
    multiplied by.
    """
    e = get_format(name).encode(x)
    want = oracle.encode(x.float().numpy(), **CASES[name])  # type: ignore[arg-type]
    scales, codes = unpacked(e)
    assert e.outer is not None
    assert e.outer.shape == (1, 1)
    assert e.outer.item() == want.t, what
    assert (scales == want.scales).all(), what
    tile = get_format(name).tile_rows
    spread = want.scales.repeat(tile, 0)[: x.shape[0]].repeat(16, 1)
    compared = np.ones_like(spread, bool) if 2.0**-70 < want.t < 2.0**50 else spread != 0
    assert (codes == want.codes)[compared].all(), what
    assert compared.any(), what


ORACLES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[] if often else [pytest.mark.slow])
    for name in CASES
    for dtype, often in ((BF16, True), (F16, False), (F32, name in ("fouroversix", "gridflip-sided-alternating")))
]


@pytest.mark.parametrize(("name", "dtype"), ORACLES)
def test_bytes_are_the_oracles(name: str, dtype: torch.dtype) -> None:
    for kind in DATA:
        check(name, data_set(kind, 20, 64, dtype), kind)
    for power in (-120, -61, -60, 59, 60, 61, 110) if dtype != F16 else ():
        check(name, (data_set("normal", 20, 64, F32) * 2.0**power).to(dtype), f"times 2^{power}")


@pytest.mark.parametrize("name", ["fouroversix", "gridflip-sided"])
def test_an_amax_from_elsewhere(name: str) -> None:
    """Larger than the tensor's: coarser. Smaller, by any factor: saturated, never NaN."""
    fmt, x = get_format(name), data_set("normal", 20, 64, BF16)
    for amax in (8.0, 1.0, 1e-3, 1e-20, 1e30):
        e = fmt.encode(x, Scales(outer=torch.full((1, 1), amax)))
        want = oracle.encode(x.float().numpy(), amax=amax, **CASES[name])  # type: ignore[arg-type]
        scales, codes = unpacked(e)
        assert (scales == want.scales).all()
        assert (codes == want.codes).all()
        got = fmt.decode(e, F32)
        assert got.isfinite().all()
        clipped = fmt.saturated(x, e)
        assert clipped.any() == (amax < 2.0)
        assert (got[clipped].abs() < x[clipped].abs()).all()
    fixed = fmt.fix(1.0)
    assert fixed.name == f"{name}-static:1.0"
    held = fmt.encode(x, Scales(outer=torch.ones(1, 1)))
    for one, two in zip(unpacked(fixed.encode(x)), unpacked(held), strict=True):
        assert (one == two).all()


def test_the_scale_for_four_is_one_and_a_half_times_the_unrounded_scale_for_six() -> None:
    """1.5 * (a / 6 * T), and not a / 4 * T: they differ by an ulp, which decides where the second is a tie of e4m3."""
    e4m3 = torch.arange(0x40, 0x70, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (e4m3[1:] + e4m3[:-1]) / 2
    for third in (3, 5, 7, 13, 15):  # amax = 3 * third makes a / 4 * T an exact tie, but for its roundings
        a = third * ties / 128
        x = torch.cat((torch.full((1, 16), 3.0 * third), torch.rand(len(a), 16) * a.unsqueeze(1)))
        x[1:, 5] = -a
        check("fouroversix", x, str(third))


@pytest.mark.parametrize("name", ["fouroversix", "gridflip-sided"])
def test_an_absmax_below_the_smallest_bfloat16_counts_as_that(name: str) -> None:
    """Else t, a float32, would have hardly a bit left."""
    for power in (-134, -140, -148):
        x = torch.zeros(4, 32)
        x[1, 3], x[2, 20] = 2.0**power, -(2.0**power)
        e = get_format(name).encode(x)
        assert e.outer is not None
        assert e.outer.item() == oracle.encode(x.numpy(), **CASES[name]).t == 2.0**-133 / 1536  # type: ignore[arg-type]
        check(name, torch.cat((x, torch.full((1, 32), 2.0**-133))), f"2^{power}")


def test_rounding_to_values_is_rounding_to_codes() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    y = torch.tensor([*ties, *(-t for t in ties)])
    want = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(nearest_e2m1(y), torch.cat((want, -want)))
    bits = torch.arange(-(1 << 31), 1 << 31, 65537, dtype=torch.int64).to(torch.int32).view(F32)
    wide = torch.cat((bits, torch.linspace(-8, 8, 100001), y))
    wide = wide[~wide.isnan()]
    assert torch.equal(nearest_e2m1(wide), from_e2m1(to_e2m1(wide)))
    assert nearest_e2m1(torch.tensor([torch.nan])).isnan().all()


def test_ties_after_the_shift() -> None:
    """A flipped candidate rounds -y - c, half to even, here under t = 1 and scale 1."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    want = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    x_EB = torch.cat((-ties - 0.25, ties - 0.25)).unsqueeze(1)
    contest = Contest(x_EB, Outer(torch.tensor(1536.0)), shift=0.25)
    contest.enter(torch.ones(1), flipped=True)
    scale, codes = contest.result(torch.ones(1, dtype=torch.bool))
    assert scale.float().item() == -1.0
    assert torch.equal(from_e2m1(codes).flatten(), torch.cat((want, -want)))


def edges(dtype: torch.dtype) -> dict[str, Tensor]:
    """name -> (4, 32)."""
    made = {name: torch.zeros(4, 32, dtype=dtype) for name in ("zero", "one-hot", "mixed")}
    made["one-hot"][1, 5] = -3.0
    made["mixed"][0], made["mixed"][1, 0] = 1e-8, 448.0
    top = torch.finfo(BF16).max if dtype != F16 else torch.finfo(F16).max
    made["largest"] = torch.full((4, 32), top, dtype=dtype)
    made["around the largest"] = (
        (torch.rand(4, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1).mul(top).to(dtype)
    )
    made["around the largest"][0, 0], made["around the largest"][2, 30] = top, -top
    # a larger scale suits all values but the largest, which it would decode to Inf or -Inf
    made["beyond the largest"] = torch.full((4, 32), 0.4375 * top, dtype=dtype)
    made["beyond the largest"][:, 1::2] *= -1
    made["beyond the largest"][:, ::16] = torch.tensor([-top, top, -top, top], dtype=dtype)[:, None]
    made["constant"], made["negative"] = torch.full((4, 32), 0.3, dtype=dtype), -torch.rand(4, 32).to(dtype) - 0.1
    made["subnormal"] = (
        (torch.randn(4, 32) * 1e-39).to(dtype) if dtype != F16 else (torch.randn(4, 32) * 1e-7).to(dtype)
    )
    made["smallest"] = torch.full((4, 32), 2.0**-133 if dtype != F16 else 2.0**-24, dtype=dtype)
    return made


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@every_case
def test_blocks_at_the_edges(name: str, dtype: torch.dtype) -> None:
    """Bytes are the oracle's, values finite, and a scale is never -0; a block on the floor is told from zeros."""
    fmt = get_format(name)
    for kind, x in edges(dtype).items():
        check(name, x, kind)
        e = fmt.encode(x)
        assert fmt.decode(e, F32).isfinite().all() and (unpacked(e)[0] != 0x80).all(), kind
        assert fmt.floored(e).any() == (kind == "mixed" and dtype != F16)  # 1e-8 is 0 in float16


def test_options_that_there_are_not() -> None:
    for says, make in (
        ("FourOverSix: metric is one of mse, mae, absmax, got 'huber'", lambda: FourOverSix("huber")),
        ("FourOverSix: tile must be 1 or 16 rows, got 4", lambda: FourOverSix(tile=4)),
        ("GridFlip: tile must be 1 or 16 rows, got 4", lambda: GridFlip(tile=4)),
        ("effort is one of", lambda: GridFlip(effort="hard")),
        *(("c a shift of at least", lambda c=c: GridFlip(c=c)) for c in (2.0, 0.0, 0.00009, True)),
        ("squared error alone, got metric='mae'", lambda: GridFlip("mae")),
        ("that choice is biased: use 'nvfp4-sr'", lambda: get_format("fouroversix-sr")),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    assert get_format("gridflip-c0.0001") == GridFlip(c=0.0001)
    assert "multiple of 16, got K = 40" in (get_format("gridflip").why_not(40, BF16) or "")


def test_floored_blocks_hold_no_four_under_the_smallest_scale() -> None:
    fmt = get_format("fouroversix")
    for index, byte, floored in (
        (0, 0, False),
        (1, 0, True),
        (0, 1, False),
        (5, 1, True),
        (6, 1, False),
        (5, 2, False),
    ):
        codes = torch.zeros(1, 16, dtype=torch.uint8)
        codes[0, 3] = index
        scale = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        e = Encoded(layout.pack(codes, 4), scale, None, torch.ones(1, 1), 16)
        assert fmt.floored(e).tolist() == [[floored]], (index, byte)


def test_rows_of_any_length_are_looked_at() -> None:
    """A row of more than a million values is one piece."""
    assert _rows(torch.empty(1).expand(3, (1 << 20) + 16)) == 1
    assert _rows(torch.empty(1).expand(3, 1 << 18)) == 4


@pytest.mark.parametrize("name", ["fouroversix", "fouroversix-row"])
def test_no_number_counts_as_zero_in_the_outer_scale(name: str) -> None:
    x = torch.randn(4, 64) / 64
    wanted = get_format(name).measure(x.index_fill(1, torch.tensor([3]), 0.0)).outer
    x[:, 3] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    assert torch.equal(get_format(name).measure(x).outer, wanted)
