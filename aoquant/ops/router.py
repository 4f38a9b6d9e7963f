"""The router: which backend runs a GEMM, or a role of the codec, and why the others do not.

A backend states for a request (contract, formats, device, dtype, shape) either None, "I keep this contract", or the
reason why not. The router takes the willing backend of highest priority; a role's reference is always willing. Forcing
a backend, by `with backend("reference"):` or AOQUANT_BACKEND=reference, either runs it or raises with its reason:
nothing falls back silently.

Backends compete within a role: "gemm", or one of the codec's (quantize, sides, decode, transform, saturate, transpose;
see `codec`). A forced name rules every role that has a backend of that name, or the one role that is named with it:
`backend("triton", role="gemm")`, AOQUANT_BACKEND=gemm=triton,quantize=reference. Some roles have no reference: what
their backends make in one pass is then made in several (`fused`).
"""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand, as_operand

# (role or None for all, name), the innermost last
_Blocks = tuple[tuple[str | None, str], ...]
_forced: ContextVar[_Blocks] = ContextVar("aoquant_backend", default=())
_log = logging.getLogger("aoquant.router")
_ENVIRONMENT = "AOQUANT_BACKEND"
# the dictionary beneath os.environ, which encodes a name and raises an exception in every look-up that finds nothing
_variables: Any = getattr(os.environ, "_data", os.environ)
_VARIABLE: Any = os.environ.encodekey(_ENVIRONMENT) if hasattr(os.environ, "_data") else _ENVIRONMENT


# (x (M, K) as the contract reads it, alpha_x or, beside codes, their scale, bias) -> y (M, N)
Multiply = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


# (x (M, K), alpha_x, w (N, K), alpha_w) -> y (M, N)
Multiplier = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


B = TypeVar("B")


@dataclass(frozen=True)
class CodecRequest:
    """A request to the codec: a role of a (rows, k) matrix.

    role: as above. operand: a `Format` stands for itself without a transform. dtype: of the values that are read, or of
    those that "decode" makes. codes, values, held: whether these are in the `Ask` of "quantize", or in that of the rows
    of "sides". columns: of "sides", how x^T is made, and whether its codes are kept; `operand` stands for both where x
    itself is not made.
    """

    role: str
    operand: Operand
    device: torch.device
    dtype: torch.dtype
    rows: int
    k: int
    codes: bool = True
    values: bool = False
    held: bool = False
    columns: Operand | None = None
    column_codes: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "operand", as_operand(self.operand))

    def __str__(self) -> str:
        return f"{self.role} ({self.operand.name}, {self.rows} x {self.k}, {self.dtype}, {self.device.type})"


@dataclass(frozen=True)
class Request:
    """A request for a GEMM, without its data: y (m, n) = x (m, k) w (n, k)^T.

    x_format, w_format: of codes; an `Operand` stands for its format, since a GEMM multiplies codes and knows nothing of
    a transform before them. scale_dtype: what `Operand.scale_dtype` says of the weight; None: `dtype`.
    """

    role: ClassVar[str] = "gemm"

    contract: str
    x_format: Format | None
    w_format: Format
    device: torch.device
    dtype: torch.dtype
    m: int
    n: int
    k: int
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for side in ("x_format", "w_format"):
            if isinstance(given := getattr(self, side), Operand):
                object.__setattr__(self, side, given.format)

    def __str__(self) -> str:
        return f"GEMM ({self.contract}, M = {self.m}, N = {self.n}, K = {self.k}, {self.device.type})"


@dataclass(frozen=True)
class Backend:
    """A kernel: why_not(request) is None when it keeps the request's contract, otherwise the reason, for people.

    priority: of those that serve a request the highest runs; docs/architecture.md ("Add a kernel") has the package's.
    run: takes a `Call` and returns y, when the role is "gemm"; `codec` says what its roles take.
    reads_codes: whether a GEMM takes W's codes and scales, and decodes them inside: `explain` shows no step for it.
    multiply: (x (M, K), alpha_x, w (N, K), alpha_w) -> y (M, N), the bits of `run` without a bias, for a GEMM that
    needs no codes of either; x and w may lie in memory as their transposes do. Or None.
    bind: (request, W) -> the product alone, (x (M, K) as the contract reads it, alpha_x, bias) -> y (M, N) with the
    bits of `run`, with all about W looked up once and nothing of it copied; or None, for a W that it would have to
    copy. Not for an x that is read as codes with a zero point or an outer scale.
    """

    name: str
    priority: int
    why_not: Callable[[Any], str | None] = field(repr=False)
    run: Callable[..., Any] = field(repr=False)
    role: str = "gemm"
    reads_codes: bool = False
    multiply: Multiplier | None = field(default=None, repr=False)
    bind: Callable[[Request, Encoded], Multiply | None] | None = field(default=None, repr=False)

    def refusal(self, request: Any) -> str | None:
        """Return `why_not`'s answer.

        Raises:
            TypeError: it is neither None nor a reason.
        """
        reason = self.why_not(request)
        if reason is not None and not (isinstance(reason, str) and reason):
            raise TypeError(
                f"backend {self.name!r}: why_not answered {reason!r} to this {request}: return None where the backend serves a request, "
                "and a reason, as text, where it does not"
            )
        return reason


ROLES = ("gemm", "quantize", "sides", "decode", "transform", "saturate", "transpose")
_backends: list[Backend] = []
_open = list[_Blocks]()  # what blocks of `backend` force, in all threads
any_open = False  # whether there is one: compiled code that calls an operator by itself guards on it, so it is no count
_opening = threading.Lock()
_watchers: list[Callable[[int], None]] = []  # of how many blocks are open
_generation = 0  # how often the list has changed
# what a process can run does not change while it runs, so the backend of a request is found once
_routes: dict[tuple[Any, ...], Any] = {}
_MOST_ROUTES = 1 << 16  # a bound for programs whose every batch has another shape


def register(*backends: Backend) -> None:
    """Add backends; the list stays sorted by falling priority.

    Raises:
        TypeError: one is no `Backend`, or a field of it has another type.
        ValueError: one has an unknown role, or a name that another one has in that role. Nothing is added then.
    """
    global _generation
    taken = {(b.role, b.name) for b in _backends}
    for b in backends:
        if not isinstance(b, Backend) or not (isinstance(b.name, str) and b.name and type(b.priority) is int):
            raise TypeError(f"a backend is a Backend with a name and a whole number as its priority, got {b!r}")
        if not (callable(b.why_not) and callable(b.run)):
            raise TypeError(f"backend {b.name!r}: why_not and run have to be functions")
        if b.role not in ROLES:
            raise ValueError(f"backend {b.name!r}: no role is called {b.role!r}; roles are {', '.join(ROLES)}")
        if (b.role, b.name) in taken:
            raise ValueError(
                f"there is a backend called {b.name!r} in role {b.role!r}: choose another name, or start Python anew to replace it"
            )
        taken.add((b.role, b.name))
    _backends.extend(backends)
    _backends.sort(key=lambda b: -b.priority)
    _routes.clear()
    _generation += 1
    _opened(0)


def generation() -> int:
    """Another number whenever backends were added: what was chosen before may not be the choice now."""
    return _generation


def forcing() -> bool:
    """Return whether any backend is forced now, by a block or by the environment."""
    return bool((_blocks() if any_open else _forced.get()) or _variables.get(_VARIABLE))


def backend_names(role: str = "gemm") -> list[str]:
    return [b.name for b in _backends if b.role == role]


def code_readers() -> set[str]:
    """Names of the GEMM backends that multiply W's codes and scales."""
    return {b.name for b in _backends if b.role == "gemm" and b.reads_codes}


@contextlib.contextmanager
def backend(name: str, role: str | None = None) -> Iterator[None]:
    """Run everything inside the block on backend `name`, in the roles that it has, or in `role` alone; blocks nest.

    A block rules its thread. Autograd runs a GPU's backwards in threads of its own, for all threads of the program: the
    block that any of them opened last rules those.

    role: "gemm", or one of the codec's.

    Raises:
        ValueError: no backend has that name, or none in that role; and inside the block, when it cannot run a request,
            with its reason.
    """
    roles = sorted({b.role for b in _backends})
    if role is not None and role not in roles:
        raise ValueError(f"there is no role {role!r}; roles are {', '.join(roles)}")
    known = _all_names() if role is None else backend_names(role)
    if name not in known:
        raise ValueError(
            f"no backend is called {name!r}{f' in role {role!r}' if role else ''}; there are: {', '.join(known)}"
        )
    whole = (*_forced.get(), (role, name))
    token = _forced.set(whole)
    _opened(1, whole)
    try:
        yield
    finally:
        _opened(-1, whole)
        _forced.reset(token)


def _blocks() -> _Blocks:
    """Return what blocks that are open force: here or, in a thread that Python did not begin, in the last that was
    opened anywhere: autograd runs a GPU's backwards in such threads. Where no block is open, `_forced` says all.
    """
    found = _forced.get()
    if found or not isinstance(threading.current_thread(), threading._DummyThread):
        return found
    last = _open[-1:]  # another thread may leave its block now
    return last[0] if last else ()


def _opened(change: int, forced: _Blocks = ()) -> None:
    """Tell the watchers that a block is open (1), or no longer (-1), or that backends were added (0).

    forced: what the block forces, with those around it.
    """
    global any_open
    with _opening:
        if change > 0:
            _open.append(forced)
        elif change < 0:
            del _open[next(i for i, blocks in enumerate(_open) if blocks is forced)]  # another may be equal
        any_open = bool(_open)
        for watcher in _watchers:
            watcher(change)


def watch(watcher: Callable[[int], None]) -> None:
    """Tell `watcher` by how many the open blocks of `backend`, in all threads, become more, at once for those that are
    open; and 0 when backends are added.
    """
    with _opening:
        _watchers.append(watcher)
        watcher(len(_open))


def forced(role: str, blocks: _Blocks | None = None) -> tuple[str | None, bool]:
    """(name that is forced for a role, by the innermost block about it or else by the environment; whether for that
    role alone). blocks: as `_blocks` says, where that was asked before.
    """
    for of, name in reversed(_blocks() if blocks is None else blocks):
        if of in (None, role):
            return name, of is not None
    by_role = _by_role(os.environ.get(_ENVIRONMENT, ""))
    return (by_role[role], True) if role in by_role else (by_role.get(""), False)


@functools.lru_cache
def _by_role(text: str) -> dict[str, str]:
    """The backends that the environment forces: a name for each role, "" for all of them.

    Raises:
        ValueError: it names an unknown role.
    """
    entries = [e.strip().rpartition("=") for e in text.split(",")]
    roles = sorted({b.role for b in _backends})
    for of, _, name in entries:
        if of and of not in roles:
            raise ValueError(f"{_ENVIRONMENT}: no role is called {of!r}, in {of}={name}; roles are {', '.join(roles)}")
    return {of: name for of, _, name in entries if name}


def explain(request: Request | CodecRequest) -> list[tuple[str, str]]:
    """(backend, "runs" | "willing, lower priority" | reason why not) for a request, by falling priority.

    Where a backend is forced, it alone runs: the others are "willing, but NAME is forced".
    """
    rivals = [b for b in _backends if b.role == request.role]
    name, _ = forced(request.role)
    rules = any(b.name == name for b in rivals)
    rows, chosen = [], False
    for b in rivals:
        reason = b.refusal(request)
        if rules and b.name != name:
            rows.append((b.name, reason or f"willing, but {name} is forced"))
            continue
        rows.append((b.name, reason or ("willing, lower priority" if chosen else "runs")))
        chosen = chosen or reason is None
    return rows


def route(request: Request | CodecRequest, blocks: _Blocks | None = None) -> Backend:
    """The backend that runs `request`. blocks: as for `forced`.

    Raises:
        ValueError: the forced backend does not exist or cannot run it.
    """
    rivals = [b for b in _backends if b.role == request.role]
    name, alone = forced(request.role, blocks)
    found = next((b for b in rivals if b.name == name), None)
    if name is None or (found is None and not alone and name in _all_names()):
        found = runner(request)
        told(request, found.name)
        return found
    known = [b.name for b in rivals] if alone else _all_names()
    reason = f"there is none; known: {', '.join(known)}" if found is None else found.refusal(request)
    if found is None or reason is not None:
        raise ValueError(
            f"backend {name!r} was forced, but cannot run this {request}: {reason}. Unset it or choose another"
        )
    told(request, found.name)
    return found


def told(request: Request | CodecRequest, name: str) -> None:
    """Log what runs a request, once for each that is remembered."""
    _log.debug("%s -> %s", request, name)


def runner(request: Request | CodecRequest) -> Backend:
    """The backend that runs `request` where none is forced."""
    return next(b for b in _backends if b.role == request.role and b.refusal(request) is None)


def routed(request: Callable[..., Request | CodecRequest], *fields: Any) -> Backend:
    """`route(request(*fields))`, remembered for what is forced now; fields are hashable, and say all that backends ask
    about.
    """
    blocks = _blocks() if any_open else _forced.get()
    key = request, fields, blocks, _variables.get(_VARIABLE)
    found = _routes.get(key)
    if found is None:
        found = _remembered(key, route(request(*fields), blocks))
    return found


def fused(*fields: Any) -> Backend | None:
    """The backend for a `CodecRequest` of these fields, in a role without a reference, remembered; None where its parts
    are made one after the other.
    """
    blocks = _blocks() if any_open else _forced.get()
    key = fused, fields, blocks, _variables.get(_VARIABLE)
    if key in _routes:
        return _routes[key]
    request = CodecRequest(*fields)
    rivals = [b for b in _backends if b.role == request.role]
    name, _ = forced(request.role, blocks)
    found: Backend | None
    if name is not None and (any(b.name == name for b in rivals) or name not in _all_names()):
        found = route(request, blocks)
    else:
        willing = (b for b in rivals if name != "reference" and b.refusal(request) is None)
        found = next(willing, None)
    return _remembered(key, found)


def _remembered(key: tuple[Any, ...], found: B) -> B:
    if len(_routes) >= _MOST_ROUTES:
        _routes.clear()
    _routes[key] = found
    return found


def _all_names() -> list[str]:
    """Names in any role, by falling priority, each once."""
    return list(dict.fromkeys(b.name for b in _backends))
