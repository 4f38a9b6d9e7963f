"""What every format promises: names, shapes, strides, visible NaN, nearest codes, bits. Tolerance 0 unless said."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.bits import same_bytes, unequal_parts
from support.formats import ENGINES, EXTRA, NATIVE, OTHERS
from support.golden_inputs import DATA, data_set
from torch import Tensor

from aoquant import formats
from aoquant.formats import (
    COMPOSED,
    MX,
    NVFP4,
    Affine,
    Encoded,
    Float8,
    Format,
    GridFlip,
    Int4,
    NVFP4Dialect,
    NVFP4Search,
    Stretched,
    get_format,
    get_operand,
    list_formats,
)
from aoquant.formats.elements import ELEMENTS, FLOAT8, from_e2m1

STANDARD = """
int4-g32 int4-g64 int4-g128 int4-g256 int4-bf16-g64 int4-bf16-g128 int4-bf16-g256 int4-tinygemm-g32
int4-tinygemm-g64 int4-tinygemm-g128 int4-tinygemm-g256 int4-tinygemm-cpu-g32 int4-tinygemm-cpu-g64
int4-tinygemm-cpu-g128 int4-e4m3-g128 int4-e4m3-row-g128 intx2-g32 intx3-g32 intx4-g32 intx5-g32 intx6-g32
intx7-g32 intx8-g32 intx2-row intx3-row intx4-row intx5-row intx6-row intx7-row intx8-row intx8-row-asym
int8-row int8-tensor int8-g32 int8-row-asym fp8-row fp8-tensor fp8-e5m2-row fp8-e5m2-tensor fp8-row-mslk
fp8-1x128 fp8-128x128 mxfp4 mxfp4-floor mxfp4-ceil mxfp4-even mxfp8 mxfp8-floor mxfp8-ceil mxfp8-even mxfp8-e5m2
mxfp8-e5m2-floor mxfp8-e5m2-ceil mxfp8-e5m2-even mxfp8-32x32 mxfp8-e5m2-32x32 nvfp4 nvfp4-row nvfp4-none
nvfp4-static:0.001 fouroversix fouroversix-mae fouroversix-absmax fouroversix-row fouroversix-16x16 gridflip
gridflip-sided gridflip-search gridflip-alternating gridflip-row gridflip-16x16 nvfp4-search nvfp4-search-row
nvfp4-search-none mxfp4-quest xx-mxfp4 qutlass-mxfp4 xx-nvfp4 qutlass-nvfp4 te-nvfp4 xx-nvfp4-static:0.1
te-nvfp4-16x16 te-fp8-tensor te-fp8-e5m2-tensor te-fp8-1x128 te-fp8-1x128-f32 te-fp8-128x128 te-fp8-128x128-f32
"""
NAMES = [*list_formats(), *EXTRA, *ENGINES]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
every_format = pytest.mark.parametrize("name", NAMES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
bf16_is_enough = pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])], ids=str
)


def by_themselves(name: str) -> bool:
    """Whether no two rows share a scale."""
    return get_format(name).reach != "tensor" and get_format(name).tile_rows == 1


@pytest.mark.parametrize("name", [*NAMES, *NATIVE, *OTHERS])
def test_name_round_trip(name: str) -> None:
    fmt = get_format(name)
    assert fmt.name == name
    assert get_format(fmt.name) == fmt
    assert hash(dataclasses.replace(fmt)) == hash(fmt)  # type: ignore[type-var]


def test_standard_names_stay() -> None:
    """Checkpoints, plans and programs name formats by them. A new name is added here, too."""
    assert list_formats() == STANDARD.split()


def test_names_are_unique_and_numerics_differ_by_name() -> None:
    assert len(set(NAMES + NATIVE)) == len(NAMES + NATIVE)
    assert get_format("int4-g96") == Int4(96)
    assert get_format("intx3-g128") == Affine(3, "group", 128)
    assert get_format("intx8-row-asym-native") == Affine(8, mapping="asymmetric", native=True)
    assert get_format("fp8-e5m2-tensor-native") == Float8("e5m2", "tensor", native=True)
    assert get_format("nvfp4-static:0.001") == NVFP4("static", 0.001)
    assert get_format("mxfp8-e5m2-even") == MX("e5m2", "even")
    assert get_format("fp8-128x128") == Float8("e4m3", "block", rows=128, cols=128)
    assert get_format("fp8-row-native:lb0.5:ub10.0") == Float8("e4m3", "row", True, low=0.5, high=10.0)
    assert get_format("intx4-g32-noclip-sfloat32") == Affine(4, "group", 32, "noclip", stored="float32")
    assert get_format("stretched2-g32") == Stretched(2, 32)
    assert get_format("te-nvfp4-16x16") == NVFP4Dialect("te", tile=16)
    assert get_format("nvfp4-search-static:0.5") == NVFP4Search("static", 0.5)
    assert [get_format(name).name for name in COMPOSED] == list(COMPOSED)
    assert get_format("qutlass-mxfp4-quest") is get_format("mxfp4-quest")  # one numerics, two names


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("mxfp-4", "mxfp4"),
        ("nvfp", "nvfp4"),
        ("int4g128", "int4-g128"),
        ("int4-g0", "int4-g32"),
        ("int4-g032", "int4-g32"),
        ("int4-g64-asym", "int4-g64"),
        ("mxfp4-native", "mxfp4"),
        ("intx9-row", "intx8-row"),
        ("intx4-g32-sfloat64", "intx4-g32"),
        ("fp8-128x0", "fp8-128x128"),
        ("fp8-row:ub10", "fp8-row"),
        ("fp8-row:ubten", "fp8-row"),
        ("stretched8-row", "intx8-row"),
        ("gridflip-c0.25", "gridflip"),
        ("gridflip-c2.5", "gridflip"),
        ("gridflip-c2.0", "gridflip"),
        ("fouroversix-32x32", "fouroversix-16x16"),
        ("wush16", "near it: wush16+nvfp4."),
        ("hadamard24+nvfp4", "hadamard16+nvfp4"),
        ("mxfp4-stochastic", "mxfp4-sr"),
        ("NVFP4", "nvfp4"),
        ("", "near it: none. `aoquant formats` lists them"),
    ],
)
def test_unknown_names_list_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match="no format is called") as error:
        get_format(wrong)
    assert near in str(error.value)


@every_format
def test_refusals_say_what_to_do(name: str) -> None:
    fmt = get_format(name)
    for dtype in DTYPES:
        assert fmt.why_not(512, dtype) is None
    refused = fmt.why_not(512, torch.float64)
    assert refused is not None
    assert "float64" in refused
    assert "cast" in refused
    ragged = fmt.why_not(33, torch.bfloat16)
    if fmt.block is None:
        assert ragged is None
    else:
        assert ragged is not None
        assert f"multiple of {fmt.block}, got K = 33" in ragged and ragged.endswith("or leave the layer out")
    empty = fmt.why_not(0, torch.bfloat16)
    assert empty is not None and empty.endswith("got K = 0: leave the layer out")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "int8-row-vllm"])  # which takes no scales
def test_nan_shows_under_held_scales(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(2 * fmt.tile_rows, 2 * (fmt.block or 16), generator=torch.Generator().manual_seed(0))
    scales = fmt.measure(x)
    x[0, 0] = torch.nan
    assert not fmt.decode(fmt.hold(x, scales), torch.float32).isfinite().all()


@bf16_is_enough
@every_format
def test_strides_do_not_matter(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    x = data_set("heavy", 24, 512, dtype)[:6]
    expected = fmt.encode(x)
    wide = torch.full((12, 1024), torch.nan, dtype=dtype)
    wide[::2, ::2] = x
    for view in (x.t().contiguous().t(), wide[::2, ::2], torch.cat((x, x), 1)[:, :512]):
        assert not view.is_contiguous()
        assert not unequal_parts(fmt.encode(view), expected)


@bf16_is_enough
@every_format
def test_rows_do_not_depend_on_their_neighbours(name: str, dtype: torch.dtype) -> None:
    """Each row alone gives the same bytes, unless one scale serves the whole tensor; no row at all gives no row."""
    fmt = get_format(name)
    x = data_set("heavy", 24, 512, dtype)
    whole = fmt.encode(x)
    assert fmt.operand(whole, dtype).shape == fmt.decode(whole, dtype).shape == x.shape
    if by_themselves(name):
        one = fmt.encode(x[5:6])
        assert torch.equal(fmt.decode(one, dtype), fmt.decode(whole, dtype)[5:6])
        assert torch.equal(one.codes.view(torch.uint8), whole.codes[5:6].view(torch.uint8))
    none = fmt.encode(x[:0])
    assert none.codes.shape == (0, whole.codes.shape[1])
    assert fmt.decode(none, dtype).shape == (0, 512)
    for field, full in zip(none[:4], whole[:4], strict=True):
        assert (field is None) == (full is None)
        if field is not None and full is not None:
            assert field.dtype == full.dtype
            assert field.shape[1] == full.shape[1]


@pytest.mark.parametrize("name", [*NAMES, "high-precision"])
def test_a_row_has_a_scale_for_each_block(name: str) -> None:
    """Count one where there is no block, and none for values in high precision."""
    format = get_operand(name).format
    scale = format.encode(torch.randn(2 * format.tile_rows, 512, dtype=torch.bfloat16)).scale
    if name == "high-precision":
        assert scale is None and format.block is None
    else:
        assert scale is not None
        assert scale.shape[-1] == (1 if format.block is None else 512 // format.block)


@pytest.mark.parametrize("name", [n for n in NAMES if get_format(n).block is None])
def test_ragged_rows(name: str) -> None:
    fmt = get_format(name)
    x = DATA["normal"](7, 33, torch.float32, 11)
    padded = torch.nn.functional.pad(x, (0, 31))
    expected = fmt.decode(fmt.encode(padded), torch.float32)[:, :33]
    assert torch.equal(fmt.fake_quantize(x), expected)


@every_dtype
@every_format
def test_nan_and_inf_stay_visible(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    x = data_set("nonfinite", 24, 512, dtype)
    got = fmt.fake_quantize(x)
    assert not got[~x.isfinite()].isfinite().any()
    assert got[x.isnan()].isnan().all()
    if by_themselves(name):
        assert got[4:].isfinite().all()  # the first four rows hold what is not finite, the others are clean
        assert torch.equal(got[4:], fmt.fake_quantize(x[4:]))
        if fmt.block and fmt.encode(x).outer is None:  # an outer scale per row carries it through the row
            clean = x[:4].reshape(4, -1, fmt.block).isfinite().all(-1)
            assert got[:4].reshape(4, -1, fmt.block)[clean].isfinite().all()


@every_dtype
@every_format
def test_zeros_are_zeros(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    # int4 rounds scale and zero to float16, where 1e-6 / 15 is a subnormal and 8 of it no longer cancel: one step is
    # left
    limit = 2.0**-24 if isinstance(fmt, Int4) and dtype == torch.float16 else 0.0
    for x in (torch.zeros(3, 512, dtype=dtype), -torch.zeros(3, 512, dtype=dtype)):
        assert fmt.fake_quantize(x).abs().max() <= limit
        assert not fmt.saturated(x, fmt.encode(x)).any()
    x = data_set("special", 24, 512, dtype)
    assert fmt.fake_quantize(x)[0].abs().max() <= limit
    if dtype != torch.float16:
        assert fmt.fake_quantize(x).isfinite().all()


@every_format
def test_decode_is_operand_times_alpha(name: str) -> None:
    fmt = get_format(name)
    e = fmt.encode(data_set("normal", 24, 512, torch.float32))
    alpha = fmt.alpha(e)
    product = fmt.operand(e, torch.float32) * (1.0 if alpha is None else alpha)
    # NVFP4's value is code * (outer * scale), torchao's order
    torch.testing.assert_close(
        fmt.decode(e, torch.float32), product, rtol=2.0**-22 if e.outer is not None else 0, atol=0
    )


@pytest.mark.parametrize(
    ("name", "rows", "k", "bits"),
    [
        ("int4-g128", 64, 1024, 4 + 32 / 128),
        ("int4-g32", 64, 1024, 5.0),
        ("intx4-g32", 64, 1024, 4.5),
        ("intx3-g64", 64, 1024, 3.25),
        ("intx5-row", 64, 1024, 5 + 16 / 1024),
        ("intx8-row-asym", 64, 1024, 8 + 24 / 1024),
        ("int8-row", 64, 1024, 8 + 32 / 1024),
        ("int8-tensor", 64, 1024, 8 + 32 / 65536),
        ("fp8-row", 64, 1024, 8 + 32 / 1024),
        ("fp8-tensor", 64, 1024, 8 + 32 / 65536),
        ("fp8-1x128", 64, 1024, 8.25),
        ("fp8-128x128", 256, 1024, 8 + 32 / 128**2),
        ("intx1-g32-asym", 64, 1024, 1.75),
        ("intx4-g32-sfloat32", 64, 1024, 5.0),
        ("stretched3-g32", 64, 1024, 3.5),
        ("high-precision", 64, 1024, 16.0),
        ("mxfp4", 64, 1024, 4.25),
        ("mxfp8", 64, 1024, 8.25),
        ("nvfp4-none", 64, 1024, 4.5),
        ("nvfp4", 64, 1024, 4.5 + 32 / 65536),
        ("fouroversix", 64, 1024, 4.5 + 32 / 65536),
        ("gridflip-search", 64, 1024, 4.5 + 32 / 65536),
        ("gridflip-16x16", 64, 1024, 4 + 8 / 256 + 32 / 65536),
        ("xx-mxfp4", 64, 1024, 4.25),
        ("te-nvfp4-16x16", 64, 1024, 4 + 8 / 256 + 32 / 65536),
    ],
)
def test_bits_per_weight(name: str, rows: int, k: int, bits: float) -> None:
    assert get_format(name).bits_per_weight(rows, k) == bits


def grid(fmt: Format, e: Encoded) -> Tensor:
    """(R, K, C): every value that each element could have been given, with the scales as stored. float64."""
    assert e.scale is not None
    alpha = fmt.alpha(e)  # of float8 and integers the scale itself
    outer = torch.ones(1, 1, dtype=torch.float64) if alpha is None or alpha is e.scale else alpha.double()
    scale, zero = e.scale.double(), None if e.zero is None else e.zero.double()
    if fmt.tile_rows > 1:
        scale = scale.repeat_interleave(fmt.tile_rows, 0)[: e.codes.shape[0]]
    if fmt.block:
        scale = scale.repeat_interleave(fmt.block, 1)
        zero = None if zero is None else zero.repeat_interleave(fmt.block, 1)
    if isinstance(fmt, Int4):
        codes = torch.arange(-8.0, 8.0)
    elif isinstance(fmt, Affine):
        codes = torch.arange(fmt.limits[0], fmt.limits[1] + 1).double()
    elif fmt.element == "e2m1":
        codes = from_e2m1(torch.arange(16, dtype=torch.uint8))
    else:
        assert fmt.element in FLOAT8, f"{fmt.name}: say here which values its codes stand for"
        codes = torch.arange(256).to(torch.uint8).view(FLOAT8[fmt.element]).float()  # type: ignore[attr-defined]
        codes = codes[codes.isfinite()]
    codes = codes.double()
    if isinstance(fmt, Int4):
        assert zero is not None
        return codes * scale.unsqueeze(-1) + zero.unsqueeze(-1)
    if zero is not None:
        codes = codes - zero.unsqueeze(-1)
    if isinstance(fmt, GridFlip):
        sign = torch.where(torch.arange(scale.shape[1]) // 16 % 2 == 0, 1.0, -1.0 if fmt.alternating else 1.0)
        return (codes * scale.unsqueeze(-1) + (sign * fmt.c * scale.clamp(max=0)).unsqueeze(-1)) * outer.unsqueeze(-1)
    return codes * (scale * outer).unsqueeze(-1)


magnitudes = st.floats(2.0**-20, 2.0**20, width=32)
values = st.one_of(st.just(0.0), magnitudes, magnitudes.map(lambda v: -v))
# operands, or scales of float32 weights, that are rounded to fewer bits afterwards: test_int4_layouts.py
ROUNDED = ("int4-tinygemm-g", "int4-e4m3", "int4-bf16")
NEAREST = [
    *(n for n in NAMES if n not in ("int4-g512", "intx3-g128", "int4-g256", *ENGINES) and not n.startswith(ROUNDED)),
    *NATIVE,
]


@pytest.mark.parametrize("name", NEAREST)
@settings(max_examples=5)
@given(row=st.lists(values, min_size=4, max_size=24), exponent=st.integers(-8, 8))
def test_no_other_code_is_nearer(name: str, row: list[float], exponent: int) -> None:
    """Every element gets the code nearest to it under the stored scales, clipped ones included; ties may go either
    way.
    """
    fmt = get_format(name)
    k = fmt.block or 24
    x = torch.zeros(2, k)
    x[0, : min(k, len(row))] = torch.tensor(row[:k]) * 2.0**exponent
    x[1] = x[0].flip(0) * 0.37
    e = fmt.encode(x)
    assert e.scale is not None
    got = fmt.decode(e, torch.float32).double()
    candidates = grid(fmt, e)
    best = (candidates - x.double().unsqueeze(-1)).abs().min(-1).values
    span = candidates.abs().max(-1).values + x.double().abs()
    assert got.isfinite().all()
    # float32 roundings of the quotient and of the decoded value, and of int4's zero, made from the unrounded minimum
    assert ((got - x.double()).abs() <= best + 2.0**-21 * span).all()


@settings(max_examples=100)
@given(
    name=st.sampled_from([n for n in NAMES if isinstance(get_format(n), MX)]),
    row=st.lists(values, min_size=1, max_size=32),
    exponent=st.integers(-60, 60),
)
def test_mx_scales_bound_the_largest_value(name: str, row: list[float], exponent: int) -> None:
    """rceil and ceil never clip; every rule keeps absmax above a quarter of the largest code, so that no bit is
    wasted.
    """
    fmt = get_format(name)
    assert isinstance(fmt, MX)
    x = torch.zeros(1, 32)
    x[0, : len(row)] = torch.tensor(row) * 2.0**exponent
    top = x.abs().max().item()
    e = fmt.encode(x)
    assert e.scale is not None
    scale, limit = e.scale.float().item(), ELEMENTS[fmt.element].largest
    if top:
        assert top <= scale * limit * (1 if fmt.rule in ("rceil", "ceil") else 2)
        assert top > scale * limit / 4


@every_format
def test_values_have_the_dtype_asked_for(name: str) -> None:
    fmt = get_format(name)
    for source in DTYPES:
        e = fmt.encode(torch.ones(16, 512, dtype=source))
        for dtype in DTYPES:
            assert fmt.decode(e, dtype).dtype == fmt.operand(e, dtype).dtype == dtype


def test_a_stretched_value_saturates_half_a_step_beyond_the_largest_level() -> None:
    """31 ones and an outlier: the scale is twice their mean magnitude / 1.5, the outlier lies at 1.8 and 2.2 scales."""
    fmt = Stretched()
    assert fmt.name == "stretched2-row"
    for steps, clipped in ((1.8, False), (2.2, True)):
        x = torch.ones(1, 32)
        x[0, 5] = 31 / (32 * 1.5 / (2 * steps) - 1)
        e = fmt.encode(x)
        assert e.scale is not None and (x[0, 5] / e.scale).item() == pytest.approx(steps)
        assert fmt.saturated(x, e).nonzero().tolist() == ([[0, 5]] if clipped else [])


@pytest.mark.parametrize("name", ["stretched1-g32", "stretched2-g32", "stretched4-row"])
def test_stretched_values_are_the_nearest_levels(name: str) -> None:
    fmt, x = get_format(name), torch.randn(8, 64)
    e = fmt.encode(x)
    assert e.scale is not None
    scale = e.scale.repeat_interleave(64 // e.scale.shape[1], 1)
    top = (2.0 ** (fmt.bits - 1) - 0.5) * scale
    want = ((x.clamp(-top, top) / scale - 0.5).round() + 0.5) * scale
    assert torch.equal(fmt.decode(e, torch.float32), want)


@dataclasses.dataclass(frozen=True)
class _Own(Float8):
    """A format of another package: float8 per row under another name."""

    called: str = "own.row-1"

    @property
    def name(self) -> str:
        return self.called


def test_a_registered_format_is_found_by_name_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_REGISTERED", {})
    own = _Own()
    with pytest.raises(ValueError, match="no format is called"):
        get_format("own.row-1")
    assert formats.register_format(own) is own and formats.register_format(_Own()) == own
    assert get_format("own.row-1") is own and "own.row-1" in list_formats()
    assert get_format("hadamard16+own.row-1").format is own
    for taken in ("nvfp4", "int4-g48", "hadamard16+nvfp4"):  # listed, parsed, put together
        with pytest.raises(ValueError, match="registered format"):
            formats.register_format(_Own(called=taken))
    for odd in ("Own", "own+own", "own-static:1", ""):
        with pytest.raises(ValueError, match="lower-case letters"):
            formats.register_format(_Own(called=odd))
    for cached in (formats.get_operand, formats._plain):
        cached.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*list_formats(), "int4-tinygemm-g64", "int4-tinygemm-hqq-g64"])
def test_codes_are_the_same_under_autocast(name: str, dtype: torch.dtype) -> None:
    """On a CPU autocast joins no float16 and no float8 tensors."""
    format = get_format(name)
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = format.encode(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = format.encode(x)
        assert same_bytes(format.decode(found, dtype), format.decode(want, dtype))
    assert unequal_parts(found, want) == []
