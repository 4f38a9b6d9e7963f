"""Number formats: the one place where numerics live. QAT and PTQ both call these frozen instances.

`get_format(name)` returns one, `list_formats()` names them. A new format is a frozen instance in `_STANDARD` and a row in
`test/formats/test_formats.py`; training, packing, reports, checkpoints and the command line follow.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from functools import cache

from aoquant import transforms

from . import layout, stochastic
from .base import FLOAT_DTYPES, Encoded, Format, Scales
from .blockscaled import MX, NVFP4
from .dialects import MXFP4Dialect, NVFP4Dialect
from .float8 import Float8
from .four_over_six import FourOverSix
from .gridflip import GridFlip
from .high import HighPrecision
from .hqq import AffineHQQ
from .int4 import Int4, Int4Float8, Int4Float8Row
from .integer import Affine
from .mslk import Float8Mslk
from .operand import Operand, as_operand, is_composed
from .random import Random
from .search import NVFP4Search
from .stochastic import Randomized
from .stretched import Stretched
from .tinygemm import TinyGemm

__all__ = [
    "COMPOSED",
    "FLOAT_DTYPES",
    "MX",
    "NVFP4",
    "Affine",
    "AffineHQQ",
    "Encoded",
    "Float8",
    "Float8Mslk",
    "Format",
    "FourOverSix",
    "GridFlip",
    "HighPrecision",
    "Int4",
    "Int4Float8",
    "Int4Float8Row",
    "MXFP4Dialect",
    "NVFP4Dialect",
    "NVFP4Search",
    "Operand",
    "Random",
    "Randomized",
    "Scales",
    "Stretched",
    "TinyGemm",
    "as_operand",
    "get_format",
    "get_operand",
    "layout",
    "list_formats",
]

_STANDARD: tuple[Format, ...] = (
    *(Int4(g) for g in (32, 64, 128, 256)),
    *(Int4(g, "bfloat16") for g in (64, 128, 256)),
    *(TinyGemm(g) for g in (32, 64, 128, 256)),
    *(TinyGemm(g, device="cpu") for g in (32, 64, 128)),
    Int4Float8(),
    Int4Float8Row(),
    *(Affine(bits, "group", 32) for bits in range(2, 9)),
    *(Affine(bits) for bits in range(2, 9)),
    Affine(8, mapping="asymmetric"),
    *(Affine(8, per, scales="float32") for per in ("row", "tensor")),
    Affine(8, "group", 32, scales="float32"),
    Affine(8, "row", mapping="asymmetric", scales="float32"),
    *(Float8(element, per) for element in ("e4m3", "e5m2") for per in ("row", "tensor")),
    Float8Mslk(),
    *(Float8("e4m3", "block", rows=rows, cols=128) for rows in (1, 128)),
    *(MX("e2m1", rule) for rule in ("rceil", "floor", "ceil", "even")),
    *(MX(element, rule) for element in ("e4m3", "e5m2") for rule in ("rceil", "floor", "ceil", "even")),
    NVFP4(),
    NVFP4("none"),
    NVFP4("static", 0.001),
    *(FourOverSix(metric) for metric in ("mse", "mae", "absmax")),
    FourOverSix(tile=16),
    *(GridFlip(effort=effort) for effort in ("base", "sided", "search")),
    GridFlip(alternating=True),
    GridFlip(tile=16),
    NVFP4Search(),
    NVFP4Search("none"),
    *(MXFP4Dialect(name) for name in ("mxfp4-quest", "xx-mxfp4", "qutlass-mxfp4")),
    *(NVFP4Dialect(dialect) for dialect in ("xx", "qutlass", "te")),
    NVFP4Dialect("xx", fixed=(0.1,)),
    NVFP4Dialect("te", tile=16),
)
# named, but not listed: a forward costs twenty iterations
_FITTED: tuple[Format, ...] = (TinyGemm(hqq=True), TinyGemm(device="cpu", hqq=True))
# second names for the same numerics
_ALIASES = {"qutlass-mxfp4-quest": "mxfp4-quest"}
# names that are put together, by an example of each, and what its parts mean
COMPOSED = {
    "hadamard16+nvfp4": "any format behind a Hadamard transform of 16, 32, 64 or 128 values: transform=aoquant.Hadamard(16) of a config",
    "hadamard32-s1f+mxfp4": "the same with random signs, a hexadecimal mask: aoquant.Hadamard(32, signs=0x1f)",
    "hadamard32-inverse+mxfp4": "the weight side of 32 and 128, where the two sides differ",
    "wush16+nvfp4": "any format behind a transform that calibration fits: aoquant.WUSH(16)",
    "mxfp4-sr": "for gradients, rounded at random: QATConfig(backward='mxfp4-sr')",
    "nvfp4-sr": "the same in NVFP4",
    "ms-eden": "the same in NVFP4, rounded to nearest under random scales",
    "rht32+mxfp4-sr": "for gradients, any format behind a random rotation of 16, 32, 64 or 128 values: backward='quartet'",
    "rht128+ms-eden": "backward='quartet2'",
    "int8-tensor-static:0.02": "any format of one scale with a constant in its place; without the number, as activation=, calibration finds it",
    "int4-g512": "other groups of integers; intx3-g64-asym, -noclip, -hqq (scales by HQQ), -sfloat32 (float32 scales)",
    "stretched2-g32": "integers without a zero",
    "gridflip-search-c0.2-alternating-16x16": "GridFlip's effort, shift, alternating sign and tile",
    "fouroversix-mae-16x16": "four-over-six's metric and tile",
    "high-precision": "values as they are",
}


@cache
def get_format(name: str) -> Format | Operand:
    """The format called `name`; an `Operand`, which encodes and decodes like one, for a name with a transform: "hadamard16+nvfp4".

    Sizes and static scales are part of the name: "int4-g64", "intx3-g128", "fp8-1x64", "int8-tensor-static:0.02", with a zero point
    "int8-tensor-asym-static:0.02:-3", "nvfp4-static:0.001". So are options: "intx4-g32-asym", "intx4-g32-noclip",
    "intx4-g32-sfloat32" (scales stored in float32), "fp8-row:lb0.5:ub10.0" (bounds of the absmax); "-native" makes an integer or
    float8 activation format divide as its device does, "-hqq" lets HQQ choose the scales of symmetric intx weights.
    "gridflip-search-c0.2-alternating-16x16" has every option of GridFlip, "fouroversix-mae-16x16" of four-over-six.
    "stretched2-g32" is an integer grid without zero, "high-precision" leaves values as they are. "hadamard16+nvfp4" is nvfp4 of values
    that a transform has mixed, "hadamard32-inverse+mxfp4" the weight side where the sides differ, "-s1f" a mask of signs. For gradients
    there are "mxfp4-sr", "nvfp4-sr" and "ms-eden", which round at random, and "rht32+" in front of any format, which rotates at random.
    FP4 as other libraries compute it has their prefix: "xx-", "qutlass-", "te-"; "qutlass-mxfp4-quest" is another name of "mxfp4-quest".

    Raises:
        ValueError: no format has that name; the message lists the nearest ones.
    """
    if not isinstance(name, str):
        raise ValueError(f"a format is named by a string, such as 'nvfp4', got {name!r}")
    return get_operand(name) if is_composed(name) and transforms.parse(name.partition("+")[0]) else _plain(name)


@cache
def get_operand(name: str) -> Operand:
    """The operand called `name`, with dynamic scales: a format's name, or a transform's, a plus and a format's.

    Raises:
        ValueError: no operand has that name.
    """
    prefix, _, inner = name.partition("+")
    found = transforms.parse(prefix) if is_composed(name) else None
    if found is None:
        return Operand(_plain(name))
    if is_composed(inner):
        raise ValueError(f"{name!r}: a format stands behind one transform, not behind several")
    operand = Operand(_plain(inner), *found)
    if operand.name != name:
        raise ValueError(f"{name!r}: a transformed format has one name, this one {operand.name!r}")
    return operand


@cache
def _plain(name: str) -> Format:
    """The format called `name`, without a transform."""
    table = {f.name: f for f in _STANDARD}
    found: Format | None = table.get(_ALIASES.get(name, name))
    if found is not None:
        return found
    dynamic, static, numbers = name.partition("-static:")
    if static:
        fixed = _plain(dynamic).fix(*_numbers(name, numbers))
        if fixed.name != name:
            raise ValueError(f"{name!r}: a static format has one name, this one {fixed.name!r}")
        return fixed
    found = Affine.parse(name) or Float8.parse(name) or Stretched.parse(name)
    found = found or FourOverSix.parse(name) or GridFlip.parse(name) or stochastic.parse(name)
    if name == "high-precision":
        found = HighPrecision()
    if match := re.fullmatch(r"(int4.*-g)([1-9]\d*)", name):
        stem = next((f for f in (*_STANDARD, *_FITTED) if f.name == f"{match[1]}{f.block}"), None)
        found = dataclasses.replace(stem, group=int(match[2])) if isinstance(stem, Int4) else None
    if name.endswith("-hqq") and (plain := Affine.parse(name.removesuffix("-hqq"))):
        found = AffineHQQ(plain.width, plain.per, plain.group)
    if found is None or found.name != name:
        near = difflib.get_close_matches(name.lower(), [*table, *COMPOSED], 5, 0.4)
        raise ValueError(
            f"no format is called {name!r}; near it: {', '.join(near) or 'none'}. `aoquant formats` lists them, and how names are put together"
        )
    return found


def _numbers(name: str, numbers: str) -> list[float]:
    """The constants at the end of a static format's name: a scale, and perhaps a zero point."""
    try:
        scale, *zero = numbers.split(":")
        return [float(scale), *map(int, zero)]
    except ValueError:
        raise ValueError(
            f"{name!r}: after '-static:' stand a scale and perhaps ':' and an integer zero point"
        ) from None


def list_formats() -> list[str]:
    """Names of the standard formats; names that are put together are formats too, see `get_format`, and `COMPOSED` for examples."""
    return [f.name for f in _STANDARD]
