"""Formats for gradients: their random numbers, that they are right on average, and how far off a single draw is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.transform_cases import sylvester
from torch import Tensor

from aoquant import get_format
from aoquant.formats import Random, layout
from aoquant.formats.elements import E2M1_MAX
from aoquant.formats.random import Place, Span, fresh_state, module_id, philox
from aoquant.transforms import Rotation
from aoquant.transforms.transform import SIZES

# relative MSE on N(0, 1), within 1.5 %
BARS = {"mxfp4-sr": 0.0282, "nvfp4-sr": 0.0235, "ms-eden": 0.0095}
every = pytest.mark.parametrize("name", BARS)
clipping_too = pytest.mark.parametrize("name", [*BARS, "te-nvfp4-sr"])
DRAWS = 64


def drawn(name: str, x: Tensor, step: int = 0, side: int = 0) -> Tensor:
    """x as it is after a round trip, in float32."""
    f = get_format(name)
    assert f.draws
    state = torch.tensor([7, module_id("layer"), step])
    return f.decode(f.encode(x, random=Random(state, side)), torch.float32)


def slope(y: Tensor, x: Tensor) -> float:
    return float((y.double() * x.double()).sum() / (x.double() ** 2).sum())


def relative_mse(y: Tensor, x: Tensor) -> float:
    return float(((y.double() - x.double()) ** 2).sum() / (x.double() ** 2).sum())


# Random numbers


def test_philox_gives_the_published_words() -> None:
    """Random123's known answers for philox4x32-10: counter, key, words."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for given, want in (
        ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(int(w) for w in philox(*(torch.tensor(v) for v in given))) == want


def test_an_element_has_its_number_whatever_is_drawn_beside_it() -> None:
    random = Random(fresh_state(0, "a"), 2)
    assert torch.equal(random.words(1000)[:33], random.words(33))


def test_an_element_of_a_part_has_the_number_of_its_place_in_the_whole() -> None:
    """Rows and columns of a part: some that follow each other, and runs that repeat with a stride."""
    whole, device = torch.arange(12 * 10).view(12, 10), torch.device("cpu")
    for rows, columns, part in (
        (Span(2, 12), Span(4, 10), whole[2:7, 4:8]),
        (Span(1, 12, 2, 6), Span(0, 10, 1, 5), whole[[1, 2, 7, 8]][:, [0, 5]]),
    ):
        assert torch.equal(Place(rows, columns).elements(part.shape, device), part)


def test_key_and_counter_are_where_the_documentation_puts_them() -> None:
    """Element 6 is word 2 of counter 1; the step is the counter's upper half; the side is in the key's lowest three
    bits.
    """
    state = torch.tensor([5, 9, (3 << 32) + 4])
    words = philox(*(torch.tensor(v) for v in (1, 0, 4, 3, 5, (9 << 3) | 2)))
    assert int(Random(state, 2).words(8)[6]) == int(words[2])


def test_seed_module_step_and_side_each_make_other_numbers() -> None:
    base = fresh_state(0, "a")
    states = [base, fresh_state(1, "a"), fresh_state(0, "b"), base + torch.tensor([0, 0, 1])]
    randoms = [Random(s, 0) for s in states] + [Random(base, side) for side in (1, 2, 3)]
    numbers = torch.stack([r.uniform(torch.empty(4096)) for r in randoms]) - 0.5
    correlation = torch.corrcoef(numbers)
    assert (correlation - torch.eye(len(randoms))).abs().max() < 5 / math.sqrt(4096)
    assert abs(float(numbers.mean())) < 5 * math.sqrt(1 / 12 / numbers.numel())


def test_the_operands_of_a_gemm_share_their_signs_and_the_gemms_do_not() -> None:
    signs = [Random(fresh_state(0, "a"), side).signs(128) for side in range(4)]
    assert torch.equal(signs[0], signs[1]) and torch.equal(signs[2], signs[3])
    assert not torch.equal(signs[0], signs[2])
    assert set(signs[0].tolist()) == {1.0, -1.0}


def test_the_state_is_the_same_in_every_process() -> None:
    """CRC-32 of the name, by its known answer, to 29 bits: a number that runs depend on."""
    assert fresh_state(3, "123456789").tolist() == [3, 0xCBF43926 & 0x1FFFFFFF, 0]


# Values


@every
def test_error_is_the_specifications(name: str) -> None:
    x = torch.randn(1 << 13, 128)
    assert relative_mse(drawn(name, x), x) == pytest.approx(BARS[name], rel=0.015)


def test_transformer_engines_rule_rounds_under_its_own_scales() -> None:
    """Scales are te-nvfp4's. A code is one of the two around the scaled value, or 6 beyond it: up where the element's
    number is less than the fraction, written again in NumPy.
    """
    f, nearest, random = get_format("te-nvfp4-sr"), get_format("te-nvfp4"), Random(fresh_state(3, "layer"), 2)
    x = torch.randn(64, 256) * 2.0 ** torch.randint(-3, 4, (64, 1))
    e, want = f.encode(x, random=random), nearest.encode(x)
    assert e.scale is not None and want.scale is not None and e.outer is not None and want.outer is not None
    assert torch.equal(e.scale.view(torch.uint8), want.scale.view(torch.uint8)) and torch.equal(e.outer, want.outer)

    amax, one = e.outer.numpy(), np.float32(1)
    inverse = one / (e.scale.float().numpy() * (one / (np.float32(2688) / amax)))
    y = x.numpy() * inverse.repeat(16, 1)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, np.inf], np.float32)
    size = np.minimum(np.abs(y), np.float32(6))
    below = np.searchsorted(grid, size, side="right") - 1
    fraction = (size - grid[below]) / (grid[below + 1] - grid[below])
    code = below + (random.uniform(x).numpy() < fraction) + 8 * np.signbit(y)
    assert np.array_equal(layout.unpack(e.codes, 4, 256).numpy(), code)
    assert 0.02 < (np.abs(y) > 6).mean() < 0.05  # why the mean is not exact


def test_transformer_engines_rule_is_biased_by_what_clips() -> None:
    x = torch.randn(256, 128)
    mean = torch.stack([drawn("te-nvfp4-sr", x, step) for step in range(DRAWS)]).mean(0)
    assert slope(mean, x) == pytest.approx(0.996, abs=0.001)


@every
def test_slope_is_one_over_64_draws(name: str) -> None:
    x = torch.randn(256, 128)
    mean = torch.stack([drawn(name, x, step) for step in range(DRAWS)]).mean(0)
    assert slope(mean, x) == pytest.approx(1, abs=0.002)


def neighbours(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The grid points below and above each value of x, under the scales that the format gives it."""
    f = get_format(name)
    assert f.draws
    e = f.encode(x, random=Random(fresh_state(0, "a"), 0))
    unit = f.decode(e._replace(codes=torch.full_like(e.codes, 0x22)), torch.float32)  # what code 1.0 stands for
    assert ((x / unit).abs() <= E2M1_MAX * (1 + 1e-6)).all(), "nothing clips"
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat((-grid.flip(0), grid[1:]))
    above = torch.searchsorted(grid, (x / unit).clamp(-E2M1_MAX, E2M1_MAX).contiguous()).clamp(1, len(grid) - 1)
    return grid[above - 1] * unit, grid[above] * unit


@pytest.mark.parametrize("name", ["mxfp4-sr", "nvfp4-sr"])
def test_only_neighbours_are_drawn_and_each_value_is_right_on_average(name: str) -> None:
    """Over 512 draws each mean within 5.5 standard deviations of its value: no value's error hides in a sum."""
    x = torch.randn(16, 64)
    low, high = neighbours(name, x)
    draws = torch.stack([drawn(name, x, step) for step in range(512)])
    gap = high - low
    off = torch.minimum((draws - low).abs(), (draws - high).abs()) / gap
    assert off.max() < 1e-5
    up = ((x - low) / gap).clamp(0, 1)
    deviation = (draws.mean(0) - x).abs()
    assert (deviation <= gap * (5.5 * (up * (1 - up) / 512).sqrt() + 0.01)).all()
    assert (deviation / gap).mean() < 0.02


def test_values_on_the_grid_stay() -> None:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, -4, -3, -2, -1.5, -1, -0.5, 0, 4, 4]).repeat(4).view(2, 32)
    assert torch.equal(drawn("mxfp4-sr", grid * torch.tensor(4 / 3)), grid * torch.tensor(4 / 3))


def test_values_on_the_grid_stay_when_zero_is_drawn() -> None:
    """Up where the number is less than the fraction: of a fraction of zero none is. One number in 2^24 is zero."""
    random = Random(torch.tensor([20524, 0, 0]), 0)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, -4, -3, -2, -1.5, -1, -0.5, 0, 4, 4]).repeat(128).view(64, 32)
    for turn in range(16):  # every value of the grid in its turn
        x = grid.roll(turn) * torch.tensor(4 / 3)
        assert random.uniform(x).flatten()[1552] == 0
        f = get_format("mxfp4-sr")
        assert f.draws
        assert torch.equal(f.decode(f.encode(x, random=random), torch.float32), x)


def test_quartets_scale_reaches_from_three_to_six() -> None:
    x = torch.randn(4096, 32)
    f = get_format("mxfp4-sr")
    e = f.encode(x, random=Random(fresh_state(0, "a"), 0))
    largest = x.abs().amax(1) / (e.scale.float().squeeze(1) * 4 / 3)
    assert largest.min() >= 3 and largest.max() < 6 and largest.max() - largest.min() > 2.9
    assert float(f.alpha(e)) == pytest.approx(4 / 3)  # of each operand: the product carries 16/9


def test_edens_scales_keep_each_block_as_long_as_it_was() -> None:
    """<x, x^> = <x, x> for each block, averaged over the two e4m3 neighbours that its scale is drawn from."""
    x = torch.randn(64, 64)
    draws = torch.stack([drawn("ms-eden", x, step) for step in range(512)]).view(512, 64, 4, 16)
    blocks = x.view(64, 4, 16)
    found = (draws * blocks).sum(-1) / (blocks * blocks).sum(-1)
    assert all(len(found[:, r, b].unique()) <= 2 for r in range(64) for b in range(4))
    assert (found.mean(0) - 1).abs().max() < 5.5 * 0.0625 / math.sqrt(512)
    assert (found.amax(0) >= 1 - 1e-5).all() and (found.amin(0) <= 1 + 1e-5).all()


@clipping_too
def test_rounding_follows_the_numbers_alone(name: str) -> None:
    """Same state, same bytes; the global generator is neither read nor moved; another step or side, other codes."""
    x = torch.randn(8, 128)
    before = torch.get_rng_state()
    first = drawn(name, x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(drawn(name, x), first)
    assert not torch.equal(drawn(name, x, step=1), first) and not torch.equal(drawn(name, x, side=1), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@clipping_too
def test_awkward_values(name: str, dtype: torch.dtype) -> None:
    """Zeros stay, NaN and Inf show in their block at least, large and small numbers neither overflow nor turn to
    NaN.
    """
    info = torch.finfo(dtype)
    assert torch.equal(drawn(name, torch.zeros(4, 128, dtype=dtype)), torch.zeros(4, 128))
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(4, 128).to(dtype)
        x[1, 40] = bad
        assert not drawn(name, x)[1, 40].isfinite()
    # TransformerEngine decodes (scale * absmax) / 2688, which overflows earlier
    for size in (info.max / (1024 if name.startswith("te-") else 8), info.tiny):
        x = (torch.randn(4, 128).clamp(-1, 1) * size).to(dtype)
        assert drawn(name, x).isfinite().all(), size
    lonely = torch.zeros(1, 128, dtype=dtype)
    lonely[0, 5] = 1
    assert drawn(name, lonely)[0, 5] == pytest.approx(1, abs=0.34)
    assert (drawn(name, lonely)[0, 6:] == 0).all()


# Rotation


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    return Rotation(len(signs)).apply(x, False, signs)


@pytest.mark.parametrize("size", SIZES)
def test_rotation_is_sylvesters_after_the_signs(size: int) -> None:
    x, signs = torch.randn(3, 2 * size), Random(fresh_state(0, "a"), 0).signs(size)
    want = (x.double().view(3, 2, size) * signs.double()) @ sylvester(size) / math.sqrt(size)
    torch.testing.assert_close(rotate(x, signs).double(), want.view(3, -1), rtol=1e-5, atol=1e-6)


def test_rotations_of_two_operands_cancel() -> None:
    a, b, signs = torch.randn(5, 256), torch.randn(7, 256), Random(fresh_state(0, "a"), 3).signs(128)
    torch.testing.assert_close(rotate(a, signs) @ rotate(b, signs).t(), a @ b.t(), rtol=1e-4, atol=1e-4)


def test_rotated_format_is_the_inner_one_of_the_rotated_values() -> None:
    x, random = torch.randn(8, 128, dtype=torch.bfloat16), Random(fresh_state(0, "a"), 0)
    rotated, inner = get_format("rht128+ms-eden"), get_format("ms-eden")
    got, want = rotated.encode(x, random=random), inner.encode(rotate(x, random.signs(128)), random=random)
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scale.float(), want.scale.float())


# Refusals


@clipping_too
def test_encoding_without_random_numbers_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} rounds at random"):
        get_format(name).encode(torch.randn(4, 128))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fouroversix-sr", "under stochastic rounding that choice is biased"),
        ("rht48+mxfp4-sr", "sizes 16, 32, 64, 128, got 48"),
        ("rht32+nonsense", "no format is called 'nonsense'"),
    ],
)
def test_names_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        get_format(name)


@pytest.mark.parametrize("name", [*BARS, "te-nvfp4-sr", "rht128+ms-eden", "rht32+mxfp4-sr", "rht32+mxfp4-floor"])
def test_names_come_back(name: str) -> None:
    assert get_format(name).name == name


@pytest.mark.parametrize("name", ["nvfp4-sr", "ms-eden"])
def test_the_outer_scale_of_zeros_leaves_room_below(name: str) -> None:
    """Its reciprocal is finite, and so is that of the outer scale times the smallest block scale."""
    outer = get_format(name).measure(torch.zeros(2, 32)).outer
    assert outer is not None and outer.item() == 2.0**-118
