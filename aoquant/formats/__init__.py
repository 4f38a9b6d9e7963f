"""Number formats: the one place where numerics live. QAT and PTQ both call these frozen instances.

`get_format(name)` returns one, `list_formats()` names them. docs/architecture.md says how a format is added; training,
packing, reports, checkpoints and the command line follow. A format defined in another package is known here by
`register_format(instance)`, in processes that import that package.
"""

import dataclasses
import difflib
import re
from functools import cache

import torch

from aoquant import transforms

from . import delayed, layout, stochastic
from .base import FLOAT_DTYPES, Encoded, Format, Scales
from .blockscaled import MX, NVFP4
from .dialects import MXFP4Dialect, NVFP4Dialect
from .elements import FLOAT8
from .float8 import Float8
from .four_over_six import FourOverSix
from .ggml import KINDS as _GGML
from .ggml import Ggml
from .gridflip import GridFlip
from .high import HighPrecision
from .hqq import AffineHQQ
from .int4 import Int4, Int4Float8, Int4Float8Row
from .integer import Affine
from .kv import KVFormat, get_kv_format
from .mslk import Float8Mslk
from .mx_square import MXSquare
from .operand import Operand, as_operand, is_composed
from .random import Random
from .search import NVFP4Search
from .stochastic import Randomized
from .stretched import Stretched
from .te_float8 import TEFloat8
from .tinygemm import TinyGemm
from .vllm import VLLM, Float8Vllm, Int8Vllm, Int8VllmReciprocal, NVFP4PowerOfTwo

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
    "Float8Vllm",
    "Format",
    "FourOverSix",
    "Ggml",
    "GridFlip",
    "HighPrecision",
    "Int4",
    "Int4Float8",
    "Int4Float8Row",
    "Int8Vllm",
    "Int8VllmReciprocal",
    "KVFormat",
    "MXFP4Dialect",
    "MXSquare",
    "NVFP4Dialect",
    "NVFP4PowerOfTwo",
    "NVFP4Search",
    "Operand",
    "Random",
    "Randomized",
    "Scales",
    "Stretched",
    "TEFloat8",
    "TinyGemm",
    "as_operand",
    "delayed",
    "get_format",
    "get_kv_format",
    "get_operand",
    "layout",
    "list_formats",
    "register_format",
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
    *(MXSquare(element) for element in ("e4m3", "e5m2")),
    NVFP4(),
    NVFP4("row"),
    NVFP4("none"),
    NVFP4("static", 0.001),
    *(FourOverSix(metric) for metric in ("mse", "mae", "absmax")),
    FourOverSix(outer="row"),
    FourOverSix(tile=16),
    *(GridFlip(effort=effort) for effort in ("base", "sided", "search")),
    GridFlip(alternating=True),
    GridFlip(outer="row"),
    GridFlip(tile=16),
    NVFP4Search(),
    NVFP4Search("row"),
    NVFP4Search("none"),
    *(MXFP4Dialect(name) for name in ("mxfp4-quest", "xx-mxfp4", "qutlass-mxfp4")),
    *(NVFP4Dialect(dialect) for dialect in ("xx", "qutlass", "te")),
    NVFP4Dialect("xx", fixed=(0.1,)),
    NVFP4Dialect("te", tile=16),
    *(TEFloat8(element) for element in ("e4m3", "e5m2")),
    *(TEFloat8(per="block", rows=rows, cols=128, pow2=pow2) for rows in (1, 128) for pow2 in (True, False)),
)
# named, but not listed: a forward costs twenty iterations
_FITTED: tuple[Format, ...] = (TinyGemm(hqq=True), TinyGemm(device="cpu", hqq=True))
# what serving engines store or compute, where it differs from the standard: named, and described in `COMPOSED`
_ENGINES: tuple[Format, ...] = (*(Ggml(kind) for kind in _GGML), *VLLM)
# second names for the same numerics
_ALIASES = {"qutlass-mxfp4-quest": "mxfp4-quest", "fp8-row-vllm": "fp8-row-mslk"}
# names that are put together, by an example of each, and what its parts mean
COMPOSED = {
    "hadamard16+nvfp4": "any format behind a Hadamard transform of 16, 32, 64 or 128 values: transform=aoquant.Hadamard(16) of a config",
    "hadamard32-s1f+mxfp4": "the same with random signs, a hexadecimal mask: aoquant.Hadamard(32, signs=0x1f)",
    "hadamard32-inverse+mxfp4": "the weight side of 32 and 128, where the two sides differ",
    "te-hadamard16-sd7e8+te-nvfp4": "TransformerEngine's, rounded to the tensor's dtype: for both operands of wgrad",
    "wush16+nvfp4": "any format behind a transform that calibration fits: aoquant.WUSH(16)",
    "mxfp4-sr": "for gradients, rounded at random: QATConfig(backward='mxfp4-sr')",
    "nvfp4-sr": "the same in NVFP4",
    "te-nvfp4-sr": "the same in NVFP4 under TransformerEngine's scales, which clip: recipe te-nvfp4-sr",
    "ms-eden": "the same in NVFP4, rounded to nearest under random scales",
    "rht32+mxfp4-sr": "for gradients, any format behind a random rotation of 16, 32, 64 or 128 values: backward='quartet'",
    "rht128+ms-eden": "backward='quartet2'",
    "int8-tensor-static:0.02": "any format of one scale with a constant in its place; without the number, as activation=, calibration finds it",
    "int4-g512": "other groups of integers; intx3-g64-asym, -noclip, -hqq (scales by HQQ), -sfloat32 (float32 scales)",
    "fp8-e5m2-row-wide": "a float8 or integer format of a float16 weight, computed in float32: what configs of aoquant's prepare there",
    "fp8-tensor-pow2": "a float8 format whose scales are rounded up to powers of two: also fp8-row-pow2, fp8-128x128-pow2",
    "stretched2-g32": "integers without a zero",
    "gridflip-search-c0.2-alternating-16x16": "GridFlip's effort, shift, alternating sign and tile",
    "fouroversix-mae-16x16": "four-over-six's metric and tile",
    "gridflip-sided-row": "an outer scale for each row, in place of one for the tensor and its tiles",
    "high-precision": "values as they are",
    "q4_0": "llama.cpp's blocks of 32 with float16 scales, rounded as llama-quantize does; also q4_1 and q8_0",
    "q8_0-x86": "activations as llama.cpp quantises them on a CPU, beside any of its weights",
    "fp8-row-vllm-reciprocal": "fp8 activations of vLLM on a CPU or compiled; fp8-row-vllm, which is fp8-row-mslk, of its CUDA kernel",
    "int8-row-vllm": "int8 activations as vLLM quantises them on a GPU",
    "int8-row-vllm-reciprocal": "int8 activations as vLLM quantises them on a CPU",
    "nvfp4-pow2": "NVFP4 with an outer scale that is a power of two, which engines can fuse and store either way round",
}

_REGISTERED: dict[str, Format] = {}


# what a format of another package defines: without one of them training, conversion or a report would stop halfway
REQUIRED = ("name", "bits", "measure", "quantize", "operand", "saturated", "floored")


def register_format(format: Format) -> Format:
    """Make a format that is defined elsewhere known by its name, as ops, recipes and checkpoints look formats up.

    Call it where the format is defined: a process that loads a checkpoint of it has to import that module first, and
    the command line, which imports none, does not know it. Names are lower-case letters, digits, dots and hyphens.
    Returns the format.

    Raises:
        TypeError: it is no instance of a class that derives from `Format`.
        ValueError: the class lacks a method of `REQUIRED`, or a method fails on a small matrix, or gives another type,
            shape or dtype than it should; the name has another form, or belongs to a format with other numerics.
    """
    if not isinstance(format, Format):
        raise TypeError(f"register_format takes an instance of a class that derives from Format, got {format!r}")
    if missing := [m for m in REQUIRED if getattr(type(format), m, None) in (None, getattr(Format, m))]:
        raise ValueError(
            f"{type(format).__name__} cannot be registered without {', '.join(missing)}: define "
            f"{'it' if len(missing) == 1 else 'them'} as docs/reference/formats.md describes"
        )
    name = format.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise ValueError(
            f"a registered format's name consists of lower-case letters, digits, dots and hyphens, got {name!r} of {format!r}"
        )
    try:
        known: Format | Operand | None = get_format(name)
    except ValueError:
        known = None
    if known not in (None, format):
        raise ValueError(
            f"a registered format needs a name of its own, and {name!r} names {known!r} already: choose another, such as 'own-{name}'; "
            "after a change of the class, start Python anew"
        )
    if not format.draws:
        for device in ("meta", "cpu"):
            _try(format, torch.device(device))
    _REGISTERED[name] = format
    return format


def _try(format: Format, device: torch.device) -> None:
    """Encode and decode a matrix of a few tiles and blocks.

    Raises:
        ValueError: a method fails, or gives something else than it should.
    """
    rows, k = 3 * format.tile_rows, 2 * (format.block or 16)
    for dtype in FLOAT_DTYPES:
        step = "measure"
        try:
            x = torch.linspace(-2, 2, rows * k, device=device).view(rows, k).to(dtype)
            scales = format.measure(x)
            _expect(isinstance(scales, Scales), f"returns {type(scales).__name__}, not Scales")
            step = "quantize"
            e = format.quantize(x, scales)
            _expect(isinstance(e, Encoded) and e.k == k, f"returns {type(e).__name__}, not Encoded with k = {k}")
            _expect(e.codes.element_size() == 1, f"has codes of {e.codes.dtype}, and codes are bytes (layout.pack)")
            _expect(len(e.codes) == rows and e.codes.dim() == 2, f"has codes {tuple(e.codes.shape)} of {rows} rows")
            if e.scale is not None:
                fits = e.scale.dim() == 2 and e.scale.dtype in (*FLOAT_DTYPES, *FLOAT8.values(), torch.float8_e8m0fnu)
                _expect(
                    fits, f"has scales {tuple(e.scale.shape)} of {e.scale.dtype}, not (R, G) floats of 32 bits or fewer"
                )
            if device.type == "meta":
                continue
            step = "operand"
            values = format.operand(e, dtype)
            _expect(values.shape == (rows, k), f"gives {tuple(values.shape)} of codes of {(rows, k)}")
            _expect(values.dtype is dtype, f"gives {values.dtype} where it is asked for {dtype}")
            step = "saturated"
            shape = tuple(format.saturated(x, e).shape)
            _expect(shape == (rows, k), f"gives {shape}, not a mask {(rows, k)}")
            step = "floored"
            format.floored(e)
        except Exception as error:
            meta = " on the meta device, whose tensors have shapes and no values" if device.type == "meta" else ""
            said = str(error) if isinstance(error, _Unlike) else f"raises {type(error).__name__}: {error}"
            raise ValueError(
                f"{format.name} cannot be registered: its {step}, of a {dtype} matrix {(rows, k)}{meta}, {said}"
            ) from error


class _Unlike(Exception):
    """Say what a method gives that it should not."""


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Unlike(otherwise)


def get_format(name: str) -> Format | Operand:
    """Return the format called `name`; an `Operand`, which encodes and decodes like one, for a name with a transform:
    "hadamard16+nvfp4".

    Sizes and static scales are part of the name: "int4-g64", "intx3-g128", "fp8-1x64", "int8-tensor-static:0.02", with
    a zero point "int8-tensor-asym-static:0.02:-3", "nvfp4-static:0.001". So are options: "intx4-g32-asym",
    "intx4-g32-noclip", "intx4-g32-sfloat32" (scales stored in float32), "fp8-row:lb0.5:ub10.0" (bounds of the absmax);
    "-native" makes an integer or float8 activation format divide as its device does, "-hqq" lets HQQ choose the scales
    of symmetric intx weights. "gridflip-search-c0.2-alternating-16x16" has every option of GridFlip,
    "fouroversix-mae-16x16" of four-over-six. "stretched2-g32" is an integer grid without zero, "high-precision" leaves
    values as they are. "hadamard16+nvfp4" is nvfp4 of values that a transform has mixed, "hadamard32-inverse+mxfp4" the
    weight side where the sides differ, "-s1f" a mask of signs. For gradients there are "mxfp4-sr", "nvfp4-sr",
    "te-nvfp4-sr" and "ms-eden", which round at random, and "rht32+" in front of any format, which rotates at random.
    FP4 as other libraries compute it has their prefix: "xx-", "qutlass-", "te-"; "qutlass-mxfp4-quest" is another name
    of "mxfp4-quest".

    Raises:
        ValueError: no format has that name; the message lists the nearest ones.
    """
    if not isinstance(name, str):
        raise ValueError(f"a format is named by a string, such as 'nvfp4', got {type(name).__name__}")
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
    table = {f.name: f for f in (*_STANDARD, *_ENGINES)} | _REGISTERED
    found: Format | None = table.get(_ALIASES.get(name, name))
    if found is not None:
        return found
    dynamic, static, numbers = name.partition("-static:")
    if static:
        fixed = _plain(dynamic).fix(*_numbers(name, numbers))
        if fixed.name != name:
            raise ValueError(f"{name!r}: a static format has one name, this one {fixed.name!r}")
        return fixed
    found = Affine.parse(name) or Float8.parse(name) or TEFloat8.parse(name) or Stretched.parse(name)
    found = found or FourOverSix.parse(name) or GridFlip.parse(name) or stochastic.parse(name)
    if name == "high-precision":
        found = HighPrecision()
    if match := re.fullmatch(r"(int4.*-g)([1-9]\d*)", name):
        stem = next((f for f in (*_STANDARD, *_FITTED) if f.name == f"{match[1]}{f.block}"), None)
        found = dataclasses.replace(stem, group=int(match[2])) if isinstance(stem, Int4) else None
    if name.endswith("-hqq") and (plain := Affine.parse(name.removesuffix("-hqq"))):
        found = AffineHQQ(plain.width, plain.per, plain.group)
    if found is None or found.name != name:
        near = difflib.get_close_matches(name.lower(), list(dict.fromkeys([*table, *COMPOSED])), 5, 0.4)
        raise ValueError(
            f"no format is called {name!r}; near it: {', '.join(near) or 'none'}. `aoquant formats` lists them, and how names "
            "are put together; for a format of your own, import the module that calls register_format first"
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
    """Return the names of the standard and registered formats; names put together are formats too: `get_format`,
    examples in `COMPOSED`.
    """
    return [*(f.name for f in _STANDARD), *_REGISTERED]
