"""The router: which backend runs a GEMM, and why the others do not.

A backend states for a request (contract, formats, device, dtype, shape) either None, "I keep this contract", or the reason why
not. The router takes the willing backend of highest priority; the reference is willing always. Forcing a backend, by
`with backend("reference"):` or AOQUANT_BACKEND=reference, either runs it or raises with its reason: nothing falls back silently.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aoquant.formats import Affine, Encoded, Format

_forced: ContextVar[str | None] = ContextVar("aoquant_backend", default=None)


@dataclass(frozen=True)
class Request:
    """What a GEMM is asked for, without its data: y (m, n) = x (m, k) w (n, k)^T."""

    contract: str
    x_format: Format | None
    w_format: Format
    device: torch.device
    dtype: torch.dtype
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Call:
    """A GEMM with its data: x_hp (*lead, K) when activations stay in high precision, else x with x_format.

    strides: of the (*lead, K) input before it was encoded, None when it was contiguous.
    """

    contract: str
    x_hp: Tensor
    x: Encoded | None
    x_format: Format
    w: Encoded
    w_format: Format
    bias: Tensor | None
    lead: Sequence[int]
    dtype: torch.dtype
    strides: Sequence[int] | None = None

    @property
    def k(self) -> int:
        return self.w.k

    @property
    def alpha_x(self) -> Tensor | None:
        return None if self.x is None else self.x_format.alpha(self.x)

    @property
    def alpha_w(self) -> Tensor | None:
        return self.w_format.alpha(self.w)

    def integers(self) -> tuple[Tensor, Tensor]:
        """x (M, K) and w (N, K) int8 codes."""
        assert self.x is not None and isinstance(self.x_format, Affine) and isinstance(self.w_format, Affine)
        return self.x_format.integers(self.x), self.w_format.integers(self.w)

    def shaped(self, y_MN: Tensor) -> Tensor:
        """(M, N) -> (*lead, N)."""
        return y_MN.reshape(*self.lead, y_MN.shape[-1])

    def plus_bias(self, y_MN: Tensor) -> Tensor:
        """(M, N) product, rounded to its dtype already -> (*lead, N) in `dtype`, the bias added with a rounding of its own."""
        return self.shaped((y_MN if self.bias is None else (y_MN + self.bias).to(y_MN.dtype)).to(self.dtype))

    def request(self) -> Request:
        rows = self.x_hp.numel() // self.k if self.x is None else self.x.codes.shape[0]
        x_format = None if self.x is None else self.x_format
        return Request(
            self.contract, x_format, self.w_format, self.w.codes.device, self.dtype, rows, self.w.codes.shape[0], self.k
        )


@dataclass(frozen=True)
class Backend:
    """A kernel: why_not(request) is None when it keeps the request's contract, otherwise the reason, for people."""

    name: str
    priority: int
    why_not: Callable[[Request], str | None] = field(repr=False)
    run: Callable[[Call], Tensor] = field(repr=False)


_backends: list[Backend] = []


def register(*backends: Backend) -> None:
    """Add backends; the list stays sorted by falling priority."""
    _backends.extend(backends)
    _backends.sort(key=lambda b: -b.priority)


def backend_names() -> list[str]:
    return [b.name for b in _backends]


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Run every GEMM inside the block on backend `name`.

    Raises:
        ValueError: no backend has that name; and inside the block, when it cannot run a request, with its reason.
    """
    if name not in backend_names():
        raise ValueError(f"no backend is called {name!r}; there are: {', '.join(backend_names())}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def explain(request: Request) -> list[tuple[str, str]]:
    """(backend, "runs" | "willing, lower priority" | reason why not) for a request, by falling priority."""
    rows, chosen = [], False
    for b in _backends:
        reason = b.why_not(request)
        rows.append((b.name, reason or ("willing, lower priority" if chosen else "runs")))
        chosen = chosen or reason is None
    return rows


def route(request: Request) -> Backend:
    """The backend that runs `request`.

    Raises:
        ValueError: the forced backend does not exist or cannot run it.
    """
    forced = _forced.get() or os.environ.get("AOQUANT_BACKEND")
    if forced is None:
        return next(b for b in _backends if b.why_not(request) is None)
    found = next((b for b in _backends if b.name == forced), None)
    reason = f"there is none; known: {', '.join(backend_names())}" if found is None else found.why_not(request)
    if found is None or reason is not None:
        raise ValueError(
            f"backend {forced!r} was forced, but cannot run this GEMM ({request.contract}, M = {request.m}, "
            f"N = {request.n}, K = {request.k}, {request.device.type}): {reason}. Unset it or choose another"
        )
    return found
