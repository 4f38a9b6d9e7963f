"""The router: which backend runs a GEMM, or a role of the codec, and why the others do not.

A backend states for a request (contract, formats, device, dtype, shape) either None, "I keep this contract", or the reason why
not. The router takes the willing backend of highest priority; the reference is willing always. Forcing a backend, by
`with backend("reference"):` or AOQUANT_BACKEND=reference, either runs it or raises with its reason: nothing falls back silently.

Backends compete within a role: "gemm", or one of `codec.py`'s. A forced name rules every role that has a backend of that name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format

_forced: ContextVar[str | None] = ContextVar("aoquant_backend", default=None)


class Quantized(NamedTuple):
    """What the codec's role "quantize" returns: encoded, if it was to be kept; values (R, K); alpha, (R, 1) or (1, 1) float32, by
    which an operand's accumulator is multiplied, or None.
    """

    encoded: Encoded | None
    values: Tensor
    alpha: Tensor | None


class Asks(Protocol):
    """A request: its role, and in words what it wants."""

    @property
    def role(self) -> str: ...


@dataclass(frozen=True)
class Request:
    """What a GEMM is asked for, without its data: y (m, n) = x (m, k) w (n, k)^T."""

    role: ClassVar[str] = "gemm"

    contract: str
    x_format: Format | None
    w_format: Format
    device: torch.device
    dtype: torch.dtype
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"GEMM ({self.contract}, M = {self.m}, N = {self.n}, K = {self.k}, {self.device.type})"


@dataclass(frozen=True)
class Backend:
    """A kernel: why_not(request) is None when it keeps the request's contract, otherwise the reason, for people.

    run: takes a `Call` and returns y, when the role is "gemm"; `codec.py` says what its roles take.
    """

    name: str
    priority: int
    why_not: Callable[[Any], str | None] = field(repr=False)
    run: Callable[..., Any] = field(repr=False)
    role: str = "gemm"


_backends: list[Backend] = []


def register(*backends: Backend) -> None:
    """Add backends; the list stays sorted by falling priority."""
    _backends.extend(backends)
    _backends.sort(key=lambda b: -b.priority)


def backend_names(role: str = "gemm") -> list[str]:
    return [b.name for b in _backends if b.role == role]


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Run everything inside the block, in the roles that it has, on backend `name`.

    Raises:
        ValueError: no backend has that name; and inside the block, when it cannot run a request, with its reason.
    """
    if name not in _all_names():
        raise ValueError(f"no backend is called {name!r}; there are: {', '.join(_all_names())}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def explain(request: Asks) -> list[tuple[str, str]]:
    """(backend, "runs" | "willing, lower priority" | reason why not) for a request, by falling priority.

    Where a backend is forced, it alone runs: the others are "willing, but NAME is forced".
    """
    rivals = [b for b in _backends if b.role == request.role]
    forced = _forced.get() or os.environ.get("AOQUANT_BACKEND")
    rules = any(b.name == forced for b in rivals)
    rows, chosen = [], False
    for b in rivals:
        reason = b.why_not(request)
        if rules and b.name != forced:
            rows.append((b.name, reason or f"willing, but {forced} is forced"))
            continue
        rows.append((b.name, reason or ("willing, lower priority" if chosen else "runs")))
        chosen = chosen or reason is None
    return rows


def route(request: Asks) -> Backend:
    """The backend that runs `request`.

    Raises:
        ValueError: the forced backend does not exist or cannot run it.
    """
    rivals = [b for b in _backends if b.role == request.role]
    forced = _forced.get() or os.environ.get("AOQUANT_BACKEND")
    found = next((b for b in rivals if b.name == forced), None)
    if forced is None or (found is None and forced in _all_names()):
        return next(b for b in rivals if b.why_not(request) is None)
    reason = f"there is none; known: {', '.join(_all_names())}" if found is None else found.why_not(request)
    if found is None or reason is not None:
        raise ValueError(
            f"backend {forced!r} was forced, but cannot run this {request}: {reason}. Unset it or choose another"
        )
    return found


def _all_names() -> list[str]:
    """Names in any role, by falling priority, each once."""
    return list(dict.fromkeys(b.name for b in _backends))
