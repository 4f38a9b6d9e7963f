"""FP4 dialects against their definitions, written again in numpy: bytes, error bars, what they say of zeros, NaN and
floors.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from support.golden_inputs import data_set
from support.numpy_oracle import element, equal
from torch import Tensor, nn

from aoquant import MXFP4WeightConfig, NVFP4WeightConfig, QATConfig, calibrate, quantize_
from aoquant.formats import (
    MX,
    NVFP4,
    Encoded,
    Format,
    MXFP4Dialect,
    NVFP4Dialect,
    get_format,
    layout,
    list_formats,
)
from aoquant.formats.elements import from_e2m1
from aoquant.ops import codec

F32 = np.float32
FLT_MAX = np.finfo(F32).max
BF16, F16 = torch.bfloat16, torch.float16
MX_NAMES = ["xx-mxfp4", "qutlass-mxfp4", "mxfp4-quest"]
NV_NAMES = [
    "xx-nvfp4",
    "xx-nvfp4-static:0.1",
    "qutlass-nvfp4",
    "qutlass-nvfp4-static:0.001",
    "te-nvfp4",
    "te-nvfp4-16x16",
]
SEARCH = ["nvfp4-search", "nvfp4-search-none", "nvfp4-search-static:0.001"]
FINITE = ("normal", "weights", "heavy", "special", "bits", "bits_in_rows")


def constant_of(name: str, default: np.float32) -> np.float32:
    return F32(name.rpartition(":")[2]) if ":" in name else default


def e4m3(v: np.ndarray) -> np.ndarray:
    return np.clip(v, F32(-448), F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)


def mx_oracle(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(byte, code values) of blocks (B, 32) of float32."""
    v = np.abs(x).max(1)
    if name == "mxfp4-quest":
        down = np.where(v > F32(2.0**60), F32(2.0**-96), F32(1))
        y = x * down[:, None]
        mean, square = y, y * y
        for _ in range(5):
            mean, square = mean[:, ::2] + mean[:, 1::2], square[:, ::2] + square[:, 1::2]
        mean, square = mean[:, 0] / F32(32), square[:, 0] / F32(32)
        v = np.sqrt(np.maximum(square - mean * mean, F32(0))) / down * F32(2.92247856 / 6)
    v = v + (F32(0) if name == "xx-mxfp4" else F32(1e-8))
    byte = np.where(v < 2.0**-126, 0, np.frexp(v.astype(np.float64))[1] - 1 + 127)
    gain = F32(1 if name == "mxfp4-quest" else 3)
    return byte, element((x * (2.0 ** (127.0 - byte))[:, None].astype(F32)) * gain, "e2m1")


def nv_oracle(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(scale, code values, outer) of (R, K) float32; te's tiles of 16 x 16 where the name says so."""
    blocks = x.reshape(x.shape[0], -1, 16)
    amax, top = np.abs(blocks).max(2), np.abs(x).max()
    rows = 16 if name.endswith("16x16") else 1
    amax = np.stack([amax[r : r + rows].max(0) for r in range(0, len(amax), rows)])
    sixth, g = F32(1) / F32(6), np.maximum(top * (F32(1) / F32(2688)), F32(2.0**-121))
    with np.errstate(all="ignore"):
        if name.startswith("te"):
            g = constant_of(name, top)
            encode = F32(1) if g == 0 else np.minimum(F32(2688) / g, FLT_MAX)
            scale = e4m3(amax * (encode * sixth))
            factor = np.minimum(F32(1) / (scale * (F32(1) / encode)), FLT_MAX)
        elif name.startswith("qutlass"):
            g = constant_of(name, g)
            encode = F32(1) / g
            scale = e4m3(encode * (amax * sixth))
            factor = F32(1) / (scale * (F32(1) / encode))
        else:
            g = constant_of(name, g)
            scale = e4m3(amax / (F32(6) * g))
            factor = scale * g
        factor = factor.repeat(rows, 0)[: len(blocks), :, None]
        y = blocks / factor if name.startswith("xx") else blocks * factor
    return scale, element(np.nan_to_num(y, nan=0.0, posinf=9.0, neginf=-9.0), "e2m1").reshape(x.shape), g


def search_oracle(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.float32 | None]:
    """(scale, code values, outer) of (R, K) float32, one block and one candidate at a time."""
    g = np.maximum(np.abs(x).max() * (F32(1) / F32(1536)), F32(2.0**-121))
    g = None if name.endswith("none") else constant_of(name, g)
    inverse = F32(1) if g is None else F32(1) / g
    table = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
    scales, codes = [], []
    with np.errstate(all="ignore"):
        for block in x.reshape(-1, 16):
            ratio = np.abs(block).max() * (F32(1) / F32(6))
            ratio = np.clip(ratio if g is None else ratio / g, F32(2.0**-6), F32(448))
            usual = int(np.array(ratio).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
            best: tuple[np.float32, int, np.ndarray] | None = None
            for byte in (usual, *(min(max(usual + d, 0x08), 0x7E) for d in range(-4, 9))):
                code = element(block * (inverse / table[byte]), "e2m1")
                lost = code * table[byte] - block * inverse
                error = np.add.accumulate(lost * lost)[-1]  # one after the other
                if best is None or error < best[0]:
                    best = error, byte, code
            assert best is not None
            scales.append(table[best[1]])
            codes.append(best[2])
    return np.array(scales).reshape(x.shape[0], -1), np.concatenate(codes).reshape(x.shape), g


def code_values(e: Encoded) -> np.ndarray:
    return from_e2m1(layout.unpack(e.codes, 4, e.k)).numpy()


@pytest.mark.parametrize("dtype", [BF16, F16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*MX_NAMES, *NV_NAMES, *SEARCH])
def test_dialects_equal_their_definition(name: str, dtype: torch.dtype) -> None:
    for data in FINITE:
        x = data_set(data, *((12, 64) if name in SEARCH else (24, 256)), dtype)
        e, values = get_format(name).encode(x), x.float().numpy()
        assert e.scale is not None
        if name in MX_NAMES:
            byte, codes = mx_oracle(values.reshape(-1, 32), name)
            assert (e.scale.view(torch.uint8).numpy().reshape(-1) == byte).all(), data
            outer = None
        else:
            scale, codes, outer = (search_oracle if name in SEARCH else nv_oracle)(values, name)
            assert (e.scale.float().numpy() == scale).all(), data
        assert equal(code_values(e), codes.reshape(x.shape)), data
        assert (e.outer is None) == (outer is None) and (e.outer is None or e.outer.item() == outer), data


@pytest.mark.parametrize("power", [55, 61, 62, 80, 119, 121])
def test_blocks_whose_squares_no_float32_holds_have_scales_of_their_size(power: int) -> None:
    """As far as a byte goes: 2^128 is beyond it."""
    fmt, x = get_format("mxfp4-quest"), data_set("normal", 24, 256, torch.float32)
    e, large = fmt.encode(x), fmt.encode(x * 2.0**power)
    assert e.scale is not None and large.scale is not None
    assert torch.equal(large.scale.view(torch.uint8), e.scale.view(torch.uint8) + power)
    assert torch.equal(large.codes, e.codes)


def test_quests_deviation_is_a_difference_of_two_means() -> None:
    """E[x^2] - E[x]^2 in float32, clamped at 0, as published: far from zero it is mostly its own rounding, and often
    negative.
    """
    for offset, size in ((1.0, 1e-4), (100.0, 1e-2), (-3.0, 1e-3), (1.0, 0.1)):
        x = offset + size * data_set("normal", 24, 256, torch.float32)
        e = get_format("mxfp4-quest").encode(x)
        assert e.scale is not None
        byte, codes = mx_oracle(x.numpy().reshape(-1, 32), "mxfp4-quest")
        assert (e.scale.view(torch.uint8).numpy().reshape(-1) == byte).all(), offset
        assert equal(code_values(e).reshape(-1, 32), codes), offset
        if size < 0.01 or offset == 100.0:  # not vacuous: the mean of (x - mean)^2 has other bytes
            deviation = x.double().reshape(-1, 32).std(1, correction=0) * (2.92247856 / 6)
            assert (torch.frexp(deviation + 1e-8)[1] + 126 != torch.from_numpy(byte)).float().mean() > 0.5


def lost(fmt: Format, x: Tensor) -> float:
    error = fmt.decode(codec.encode(fmt, x), torch.float32) - x.float()
    return (error.square().sum() / x.float().square().sum()).item()


def test_no_value_of_the_absmax_dialects_clips() -> None:
    x = torch.cat((torch.linspace(1, 2 - 2.0**-23, 4096).view(-1, 1), torch.zeros(4096, 31)), 1)
    for name in ("xx-mxfp4", "qutlass-mxfp4"):
        e = get_format(name).encode(x)
        assert e.scale is not None
        assert not get_format(name).saturated(x, e).any()
        assert set(code_values(e)[:, 0]) == {3.0, 4.0, 6.0}
        assert (e.scale.view(torch.uint8) == 127).all()


@pytest.mark.parametrize(
    "name", [n for n in list_formats() if isinstance(get_format(n), MX | MXFP4Dialect | NVFP4Dialect)]
)
def test_blocks_of_zeros_are_not_floored(name: str) -> None:
    fmt, x = get_format(name), torch.zeros(16, 64)
    x[:, :32] = torch.tensor([1.5, 0.5]).repeat(16)  # unequal: QuEST scales a block by its deviation
    assert not fmt.floored(fmt.encode(x)).any() and not fmt.floored(fmt.encode(-x)).any()


def test_the_trust_mask_saturates() -> None:
    fmt = get_format("mxfp4-quest")
    x = torch.randn(64, 256)
    e = fmt.encode(x)
    assert e.scale is not None
    clipped = fmt.saturated(x, e)
    assert 0.005 < clipped.float().mean() < 0.1
    step = fmt.scales(e).repeat_interleave(32, 1)  # type: ignore[attr-defined]
    assert torch.equal(clipped, (x / step).abs() >= 6)
    assert torch.equal(fmt.decode(e, torch.float32)[clipped].abs(), (6 * step)[clipped])


@pytest.mark.parametrize("name", [*NV_NAMES, *SEARCH, *MX_NAMES])
def test_tensors_of_zeros_and_of_tiny_values_are_finite(name: str) -> None:
    fmt = get_format(name)
    for value in (0.0, -0.0, 1e-45, 1e-40, 7.9e-36, 1e-30):
        x = torch.full((3, 64), value)
        e = fmt.encode(x)
        got = fmt.decode(e, torch.float32)
        assert got.isfinite().all(), value
        assert (got.abs() <= x.abs() * 1.2).all() or name in SEARCH, value
    assert (fmt.fake_quantize(torch.zeros(3, 64)) == 0).all()


@pytest.mark.parametrize("name", [*NV_NAMES, *SEARCH, *MX_NAMES])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_nan_in_the_scale(name: str, bad: float) -> None:
    fmt = get_format(name)
    x = torch.randn(2, 64)
    x[0, 3] = bad
    e = fmt.encode(x)
    assert e.scale is not None
    assert e.scale.float()[0, 0].isnan()
    assert fmt.decode(e, torch.float32)[0, 3].isnan()
    if fmt.reach == "block":
        assert fmt.decode(e, torch.float32)[:, 32:].isfinite().all()


def test_values_that_a_static_scale_loses() -> None:
    """Static .1: a block absmax below 2^-10 * 6 * .1 = 5.86e-4 is flushed, one above 448 * 6 * .1 = 268.8 clipped."""
    fmt = get_format("xx-nvfp4-static:0.1")
    for top, flushed, clipped in (
        (5.8e-4, True, False),
        (5.9e-4, False, False),
        (268.0, False, False),
        (315.0, False, True),
    ):
        x = torch.full((1, 16), top)
        e = fmt.encode(x)
        assert (fmt.decode(e, torch.float32) == 0).all() == flushed
        assert fmt.floored(e).item() == flushed
        assert fmt.saturated(x, e).all() == clipped
    assert fmt.decode(fmt.encode(torch.full((1, 16), 1e4)), torch.float32).max() == pytest.approx(268.8)


def test_no_outer_scale_puts_weights_on_the_floor_and_a_dynamic_one_does_not() -> None:
    w = torch.randn(1024, 1024) * 0.02
    none, dynamic, static = NVFP4("none"), NVFP4(), get_format("xx-nvfp4-static:0.1")
    scale = none.encode(w).scale
    assert scale is not None and (scale.float() == 2.0**-6).double().mean() > 0.9998
    assert none.floored(none.encode(w)).double().mean() > 0.9  # in the others the absmax rounds to 6 all the same
    assert not dynamic.floored(dynamic.encode(w)).any() and not static.floored(static.encode(w)).any()
    assert lost(none, w) == pytest.approx(0.0170, rel=0.015)
    assert lost(dynamic, w) == pytest.approx(0.0090, rel=0.015)
    assert (none.fake_quantize(w * 0.005) == 0).all()  # sigma 1e-4
    assert lost(dynamic, w * 0.005) == pytest.approx(0.0090, rel=0.015)
    assert static.floored(static.encode(w * 0.005)).double().mean() > 0.99


def test_square_tiles_are_transposed_exactly() -> None:
    fmt, row = NVFP4Dialect("te", tile=16), NVFP4Dialect("te")
    w = torch.randn(64, 96)
    assert torch.equal(fmt.fake_quantize(w), fmt.fake_quantize(w.t().contiguous()).t())
    assert not torch.equal(row.fake_quantize(w), row.fake_quantize(w.t().contiguous()).t())
    ragged = fmt.encode(w[:40])
    assert ragged.scale is not None and ragged.scale.shape == (3, 6)


CONFIGS = [
    (MXFP4WeightConfig(), "mxfp4", "mxfp4"),
    (MXFP4WeightConfig("floor"), "mxfp4-floor", "mxfp4"),
    (MXFP4WeightConfig("quest"), "mxfp4-quest", "mxfp4-quest"),
    (MXFP4WeightConfig(numerics="xx"), "xx-mxfp4", "xx-mxfp4"),
    (MXFP4WeightConfig(numerics="qutlass"), "qutlass-mxfp4", "qutlass-mxfp4"),
    (MXFP4WeightConfig("quest", numerics="qutlass"), "mxfp4-quest", "mxfp4-quest"),
    (MXFP4WeightConfig("quest", None), "mxfp4-quest", ""),
    (NVFP4WeightConfig(), "nvfp4", "nvfp4-row"),
    (NVFP4WeightConfig("none"), "nvfp4-none", "nvfp4-row"),
    (NVFP4WeightConfig("static", 0.5), "nvfp4-static:0.5", "nvfp4-row"),
    (NVFP4WeightConfig(rule="search"), "nvfp4-search", "nvfp4-row"),
    (NVFP4WeightConfig("none", rule="search"), "nvfp4-search-none", "nvfp4-row"),
    (NVFP4WeightConfig(numerics="te"), "te-nvfp4", "te-nvfp4"),
    (NVFP4WeightConfig(numerics="te", tile=16), "te-nvfp4-16x16", "te-nvfp4"),
    (NVFP4WeightConfig(rule="four_over_six", tile=16), "fouroversix-16x16", "nvfp4-row"),
    (NVFP4WeightConfig(numerics="xx"), "xx-nvfp4", "xx-nvfp4"),
    (NVFP4WeightConfig("static", numerics="xx"), "xx-nvfp4-static:0.1", "xx-nvfp4-static:0.1"),
    (NVFP4WeightConfig("static", 0.25, numerics="qutlass"), "qutlass-nvfp4-static:0.25", "qutlass-nvfp4-static:0.25"),
    (NVFP4WeightConfig(numerics="xx", activation="xx-nvfp4-static"), "xx-nvfp4", "xx-nvfp4"),  # to be calibrated
]


@pytest.mark.parametrize(("config", "weight", "activation"), CONFIGS, ids=[f"{w}-{a}" for _, w, a in CONFIGS])
def test_configs_name_their_formats(config: NVFP4WeightConfig, weight: str, activation: str) -> None:
    recipe = config.recipe()
    assert (recipe.fprop_weight.name, recipe.input_name) == (weight, activation)
    assert recipe.input_scales == ("static" if (config.activation or "").endswith("-static") else "dynamic")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MXFP4WeightConfig("absmax"), "rule must be .*'absmax'"),
        (lambda: MXFP4WeightConfig("quest", numerics="xx"), "rule must be .*'quest'"),
        (lambda: MXFP4WeightConfig("rceil", numerics="qutlass"), "rule must be .*'rceil'"),
        (lambda: MXFP4WeightConfig(numerics="te"), "numerics must be .*'te'"),
        (lambda: NVFP4WeightConfig(numerics="mx"), "numerics must be .*'mx'"),
        (lambda: NVFP4WeightConfig(numerics="te", metric="mae"), "got metric='mae', tile=1 .*numerics='te'"),
        (lambda: NVFP4WeightConfig(numerics="xx", tile=16), "got metric='mse', tile=16 .*numerics='xx'"),
        (lambda: NVFP4WeightConfig(numerics="te", rule="search"), "rule must be .*'search'"),
        (lambda: NVFP4WeightConfig("none", numerics="xx"), "outer must be .*'none'"),
        (lambda: NVFP4WeightConfig("static", 1.0, numerics="te"), "outer must be .*'static'"),
        (lambda: NVFP4WeightConfig("static", numerics="qutlass"), "needs pts.*pts=None"),
        (lambda: NVFP4WeightConfig(pts=1.0, numerics="xx"), "needs pts.*pts=1.0"),
        (lambda: NVFP4WeightConfig("static", -1.0, numerics="xx"), "positive finite scale, got -1.0"),
    ],
)
def test_what_does_not_exist_is_refused(make: type, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("numerics", ["xx", "qutlass", "te"])
def test_outer_scales_of_activations_are_calibrated(numerics: str) -> None:
    """The loop's largest absmax, in each dialect's own unit, becomes a constant of the converted layer."""
    name = f"{numerics}-nvfp4"
    model = nn.Sequential(nn.Linear(64, 32)).to(BF16)
    quantize_(model, QATConfig(NVFP4WeightConfig(numerics=numerics, activation=f"{name}-static")))
    batches = [torch.randn(8, 64).to(BF16) for _ in range(3)]
    calibrate(model, lambda m: [m(x) for x in batches])
    y = model(batches[0])
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(batches[0]), y)
    constant = get_format(name).measure(torch.cat(batches)).outer
    assert constant is not None
    assert model[0].weight.activation == get_format(name).fix(constant.item()).name
