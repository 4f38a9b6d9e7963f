"""The CPU library that `csrc/cpu/` builds: found, loaded, and asked whether it can run here.

It lies beside this file when the install had torch and a C++ compiler (`csrc/cpu_builder.py`), and it need not be
there: `why_not` says so in words. Its operators are called inside this package's own opaque ones, and by bound weights
where nothing watches the dispatcher (linear/bound.py), so they need no fakes.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import Affine, Encoded, Format, Int4

from . import sources

LIBRARY = Path(__file__).with_name("_native_cpu.so")
KINDS = {"int4": 0, "intx4": 1, "int8": 2}  # `Kind` of csrc/cpu/kernels.h


def why_not() -> str | None:
    """Return why the library's operators cannot be called here, and what to do; None when they can."""
    return _load(LIBRARY)


@cache
def _load(library: Path) -> str | None:
    """Load the library once; the reason where there is none, it is another version's, or it cannot run here."""
    if (reason := sources.load(library, "CPU", "torch and a C++ compiler", "cpu-kernels")) is not None:
        return reason
    return None if torch.ops.aoquant_cpu.level() else "aoquant's CPU kernels need AVX2 and fused multiply-adds"


def operator(name: str) -> Callable[..., Any]:
    """The operator itself; ask `why_not` first."""
    reason = why_not()
    assert reason is None, reason
    return _found(name)


@cache
def _found(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch.ops.aoquant_cpu, name).default
    return found


def level() -> str:
    """The instructions that the library's kernels are made of here; ask `why_not` first."""
    return {1: "AVX2" if platform.machine() in ("x86_64", "AMD64") else "portable code", 2: "AVX-512"}[
        operator("level")()
    ]


@cache
def torch_multiplies_integers() -> bool:
    """Return whether torch._int_mm has instructions for its products on this CPU, and keeps every bit, asked by the
    largest ones. Below AVX-512 it is a plain loop, 20 times slower than a float32 GEMM; without VNNI sums of two may be
    held in 16 bits, and saturate.
    """
    if not hasattr(torch, "_int_mm") or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    extremes = torch.tensor([-128, 127], dtype=torch.int8, device="cpu")
    x_MK = extremes.repeat(16).unsqueeze(1).repeat(1, 64)
    return bool((torch._int_mm(x_MK, x_MK.t()).double() == x_MK.double() @ x_MK.double().t()).all())


def kind(f: Format) -> str | None:
    """Return how codes become operands: "int4", q * s + z; "intx4", (q - z) * s; "int8", the code itself; None:
    otherwise.
    """
    how = _KIND_OF.get(type(f))
    return how(f) if how else None


def _kind_of_affine(f: Any) -> str | None:
    if f.width == 4 and f.per == "group" and f.scales == "input":
        return "intx4"
    return "int8" if f.width == 8 and f.per in ("row", "tensor") and f.mapping != "asymmetric" else None


# exactly these classes: a subclass is another format
_KIND_OF: dict[type[Format], Callable[[Format], str | None]] = {Int4: lambda f: "int4", Affine: _kind_of_affine}


@dataclass(frozen=True)
class PackedWeight:
    """W as the kernels of csrc/cpu are told of it."""

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    kind: int
    group: int


def told(f: Format, w: Encoded, dtype: torch.dtype) -> PackedWeight | None:
    """None where W's values are not what the kernels make: its scales are not in the type of the operands."""
    how = kind(f)
    if how is None or (how != "int8" and (w.scale is None or w.scale.dtype != dtype)):
        return None
    scale, zero = (None, None) if how == "int8" else (w.scale, w.zero)
    scale, zero = (None if t is None else t.contiguous() for t in (scale, zero))
    return PackedWeight(w.codes.contiguous(), scale, zero, KINDS[how], f.block or 0)
