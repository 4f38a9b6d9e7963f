"""The CUDA library that `csrc/` builds: found, loaded, and asked for its operators.

It lies beside this file when the install had nvcc and a CUDA torch (`csrc/builder.py`), and it need not be there:
`why_not` says in words why not, and no backend is offered without it. A library of other sources (sources.py) counts as
none. Its operators are called inside this package's own opaque ones, or by bound weights (linear/bound.py); `linear`
and `siblings` stand in compiled graphs by themselves. Their fakes serve these, and those who trace others.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import linear_plan, sources

LIBRARY = Path(__file__).with_name("_native.so")
PARTIALS = 528  # as csrc/amax.cu
OUT = {None: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # how operators are told the dtype of values


def why_not() -> str | None:
    """Return why the library's operators cannot be called here, and what to do; None when they can."""
    return _load(LIBRARY)


@cache
def _load(library: Path) -> str | None:
    """Load the library once; the reason when there is none, it is another version's, or it does not load."""
    if library.exists() and torch.version.cuda is None:
        return "aoquant's CUDA library needs a torch with CUDA"
    if (reason := sources.load(library, "CUDA", "nvcc and a CUDA torch", "kernels")) is not None:
        return reason
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"aoquant_native::{name}", fake)
    return None


@cache
def why_not_on(device: torch.device) -> str | None:
    """Return why the library's encoders cannot run on `device`, a CUDA one: it may have been built for others. Asked by
    trying its smallest kernel.
    """
    try:
        operator("finite_absmax")(torch.zeros(16, dtype=torch.float32, device=device))
    except RuntimeError as error:
        return f"aoquant's CUDA library has no code for {device} ({error}): build it again where that GPU is"
    return None


def operator(name: str) -> Callable[..., Any]:
    """The operator itself; ask `why_not` first."""
    reason = why_not()
    assert reason is None, reason
    return getattr(torch.ops.aoquant_native, name).default


def is_aligned(t: Tensor) -> bool:
    """Return whether kernels can read t as it lies: contiguous, from an address that is a multiple of 16."""
    return t.is_contiguous() and t.data_ptr() % 16 == 0


def aligned(t: Tensor) -> Tensor:
    """Contiguous, from an address that is a multiple of 16: itself, but for some views."""
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def _values(x: Tensor, out: int) -> Tensor:
    return x.new_empty(x.shape if out else (0, 0), dtype=list(OUT)[out] or torch.uint8)


def _encode_grids(
    x: Tensor,
    amax: Tensor,
    known: float,
    effort: int,
    metric: int,
    tile: int,
    c: float,
    alternating: bool,
    out: int,
    operand: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, k = x.shape
    return (
        x.new_empty(rows, k // 2, dtype=torch.uint8),
        x.new_empty(-(-rows // tile), k // 16, dtype=torch.uint8),
        x.new_empty(1, 1, dtype=torch.float32),
        _values(x, out),
    )


def _encode_search(x: Tensor, outer: Tensor, out: int, operand: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, k = x.shape
    codes, scale = (x.new_empty(rows, k // each, dtype=torch.uint8) for each in (2, 16))
    return codes, scale, _values(x, out)


def _encode_tensor(x: Tensor, kind: int, keep: bool, out: int, operand: bool) -> list[Tensor]:
    rows, k = x.shape
    made = [x.new_empty(1, 1, dtype=torch.float32)]
    if keep:
        made += [x.new_empty(rows, k // n, dtype=torch.uint8) for n in ((1,) if kind else (2, 16))]
    return [*made, _values(x, out)] if out else made


def _encode_fitted(x: Tensor, matrix: Tensor, block: int, known: float) -> tuple[Tensor, Tensor, Tensor]:
    (rows, k), outer = x.shape, int(block == 16 and known != 0)
    codes, scale = (x.new_empty(rows, k // each, dtype=torch.uint8) for each in (2, block))
    return codes, scale, x.new_empty(outer, outer, dtype=torch.float32)


def _decode_values(codes: Tensor, scale: Tensor, zero: Tensor | None, plan: int) -> Tensor:
    k = codes.shape[1] if linear_plan.is_fp8(plan) else codes.shape[1] * 2
    return codes.new_empty(codes.shape[0], k, dtype=linear_plan.dtype_of(plan))


_FAKES: dict[str, Callable[..., Any]] = {
    "finite_absmax": lambda x: x.new_empty(PARTIALS, dtype=torch.int32),
    "outer_scale": lambda x, times, least: x.new_empty(1, 1, dtype=torch.float32),
    "encode_grids": _encode_grids,
    "encode_search": _encode_search,
    "encode_tensor": _encode_tensor,
    "transform_fitted": lambda x, matrix, back, out: _values(x, out),
    "encode_fitted": _encode_fitted,
    "decode_mm": lambda x, codes, *rest: x.new_empty(x.shape[0], codes.shape[0]),
    "linear": lambda x, codes, scale, zero, alpha_w, bias, plan: x.new_empty(*x.shape[:-1], codes.shape[0]),
    "siblings": lambda x, codes, *rest: [x.new_empty(*x.shape[:-1], w.shape[0]) for w in codes],
    "encode_rows": lambda x, format, decoded: (x.new_empty(x.shape), x.new_empty(len(x), 1, dtype=torch.float32)),
    "decode_values": _decode_values,
    "experts_mm": lambda x, ends, codes, *rest: x.new_empty(x.shape[0], codes.shape[0] // ends.shape[0]),
}
