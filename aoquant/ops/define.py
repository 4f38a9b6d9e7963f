"""The boundary of an op: one typed Python function, and the `torch.library` op that is made of its signature.

Callers and bodies speak of operands, encoded matrices and scales, with None for what is missing. PyTorch's dispatcher
knows tensors, numbers and strings. Here, and nowhere else, the one becomes the other:

    Operand                   its name; "" for None
    Encoded, Tensor | Encoded codes (or the tensor), scale, zero, outer, and K, which is None for a plain tensor
    Scales | None             scale, zero, outer, transform
    another NamedTuple        its fields, each as above; None for it is None for its first field
    a result that is missing  an empty 1-D tensor, since a schema has no optional results

`torch.compile` keeps float32 between fused operations where eager rounds to bf16, which moves scales by an ulp and
codes by one. The registered op is opaque to it and runs the same body, so eager equals compiled by construction.

The dispatcher costs as much as the launch of a kernel, and a training step of a small layer waits for it. So where
nothing watches the dispatcher (ordinary CPU or CUDA tensors, no gradients, compiler or mode), a call goes straight to
the body.

`torch.library.custom_op` would put Python layers of its own between the two, for autograd, views and aliasing checks.
Our ops run inside an `autograd.Function`, so they are defined the plain way: one kernel for every device. `opcheck`, in
the tests, sees that outputs alias nothing.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from aoquant.formats import Encoded, Operand, Scales, get_operand

_LIBRARY = torch.library.Library("aoquant", "FRAGMENT")
_SCHEMAS: list[str] = []  # of every op
_ORDINARY = (Tensor, torch.nn.Parameter)
P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A function behind the dispatcher: call it like the function. `overload` is the registered op, for compilers and
    tests.
    """

    def __init__(self, body: Callable[P, R], fake: Callable[[Any], Any]) -> None:
        hints = get_type_hints(body)
        result = hints.pop("return")
        self.__doc__, self.__name__ = body.__doc__, body.__name__
        self.body: Callable[..., R] = body
        self._names = list(hints)
        self._kinds = [_kind(hint) for hint in hints.values()]
        self._defaults = [p.default for p in inspect.signature(body).parameters.values()]
        self._optional = sum(default is not inspect.Parameter.empty for default in self._defaults)
        # where tensors are: an argument, or a field of one that is a NamedTuple of ours
        self._tensors = [(i, at) for i, kind in enumerate(self._kinds) for at in kind.tensors]
        self._builders = _builders(self._kinds, 0)
        self._result = _Result(result)
        self._fake = fake
        schema = [f for name, kind in zip(self._names, self._kinds, strict=True) for f in kind.schema(name)]
        _SCHEMAS.append(f"{self.__name__}({', '.join(schema)}) -> {self._result.schema}")
        _LIBRARY.define(_SCHEMAS[-1], tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(self.__name__, torch.compiler.disable(self._registered), "CompositeExplicitAutograd")
        self.overload: Any = getattr(torch.ops.aoquant, self.__name__).default
        torch.library.register_fake(self.overload.name(), self._shapes, lib=_LIBRARY)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given: Sequence[Any] = args
        if kwargs or len(given) < len(self._kinds):
            given = self._whole(given, kwargs)
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or _len_torch_dispatch_stack():
            return self._dispatched(given)
        for i, at in self._tensors:  # no function for one of them: this loop stands in front of every kernel
            value = given[i] if at is None else given[i][at]
            if type(value) is Encoded:
                value = value.codes
            for t in value if type(value) is Scales else (value,):
                if t is not None and not (type(t) in _ORDINARY and (t.is_cuda or t.is_cpu)):
                    return self._dispatched(given)  # a subclass, or a tensor on meta, must meet the dispatcher
        first = given[0].codes if type(given[0]) is Encoded else given[0]
        return self._run(given) if torch.is_autocast_enabled(first.device.type) else self.body(*given)

    def flat(self, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        """The registered op's arguments for these."""
        return self._flat(self._whole(args, kwargs))

    def _flat(self, given: Sequence[Any]) -> list[Any]:
        return [part for kind, value in zip(self._kinds, given, strict=True) for part in kind.flat(value)]

    def _dispatched(self, args: Sequence[Any]) -> R:
        return self._result.made(self.overload(*self._flat(args)), args[0])

    def _registered(self, *flat: Any) -> Any:
        """The kernel of the registered op. Its results alias nothing; those of the function may."""
        return _apart(self._result.flat(self._run(self._built(flat))), flat)

    def _shapes(self, *flat: Any) -> Any:
        """Its shapes and dtypes, without data."""
        return self._result.flat(self._fake(SimpleNamespace(**dict(zip(self._names, self._built(flat), strict=True)))))

    def _run(self, args: Sequence[Any]) -> R:
        """The body, without autocast: the caller has cast its inputs."""
        device = (args[0].codes if type(args[0]) is Encoded else args[0]).device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.body(*args)
        return self.body(*args)

    def _built(self, flat: Sequence[Any]) -> list[Any]:
        return [built(flat) for built in self._builders]

    def _whole(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """All arguments in order, defaults filled in."""
        if not kwargs and len(args) + self._optional >= len(self._kinds):
            return [*args, *self._defaults[len(args) :]]
        rest = zip(self._names[len(args) :], self._defaults[len(args) :], strict=True)
        whole = [*args, *(kwargs.pop(name, default) for name, default in rest)]
        assert not kwargs and all(value is not inspect.Parameter.empty for value in whole), (
            f"arguments of {self.__name__}"
        )
        return whole


def schemas() -> str:
    """A number for the schemas of all ops, so that torch's cache returns no graph compiled for other schemas."""
    return f"{zlib.crc32(';'.join(_SCHEMAS).encode()):08x}"


def op(fake: Callable[[Any], Any]) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator: the op "aoquant::NAME" of a typed function called NAME, which mutates nothing and has a tensor as its
    first argument.

    fake: what the op returns in shapes and dtypes, a function of one namespace that holds the arguments by their names.
    """
    return lambda body: Op(body, fake)


Built = Callable[[Sequence[Any]], Any]


class _Kind(NamedTuple):
    """A type of argument: its part of a schema, and the way there and back.

    built: from the place of its first part to a function, of all parts of a call, that makes the argument: what is
        known before the call is looked up before it.
    tensors: where it holds some: None, itself; a number, that field of it.
    """

    schema: Callable[[str], list[str]]
    flat: Callable[[Any], Sequence[Any]]
    built: Callable[[int], Built]
    tensors: tuple[int | None, ...] = ()


def _simple(type_: str) -> _Kind:
    tensors = (None,) if type_.startswith("Tensor") else ()
    return _Kind(lambda name: [f"{type_} {name}"], lambda value: (value,), itemgetter, tensors)


def _matrix_flat(value: Tensor | Encoded | None) -> Sequence[Any]:
    return value if type(value) is Encoded else (value, None, None, None, None)


def _matrix_built(at: int) -> Built:
    k, end = at + 4, at + 5
    return lambda parts: parts[at] if parts[k] is None else Encoded(*parts[at:end])


_MATRIX = _Kind(
    lambda n: [f"Tensor {n}", f"Tensor? {n}_scale", f"Tensor? {n}_zero", f"Tensor? {n}_outer", f"SymInt? {n}_k"],
    _matrix_flat,
    _matrix_built,
    (None,),
)
_NO_SCALES = (None,) * len(Scales._fields)


def _scales_built(at: int) -> Built:
    end = at + len(Scales._fields)

    def built(parts: Sequence[Any]) -> Scales | None:
        for t in parts[at:end]:
            if t is not None:
                return Scales(*parts[at:end])
        return None

    return built


_SCALES = _Kind(
    lambda n: [f"Tensor? {n}_{field}" for field in Scales._fields],
    lambda value: value or _NO_SCALES,
    _scales_built,
    (None,),
)
_OPERAND = _Kind(
    lambda n: [f"str {n}"],
    lambda value: (value.name if value is not None else "",),
    lambda at: lambda parts: get_operand(parts[at]) if parts[at] else None,
)
_KINDS: dict[Any, _Kind] = {
    Tensor: _simple("Tensor"),
    Tensor | None: _simple("Tensor?"),
    Encoded: _MATRIX,
    Tensor | Encoded: _MATRIX,
    Scales | None: _SCALES,
    Operand: _OPERAND,
    Operand | None: _OPERAND,
    Sequence[int]: _simple("SymInt[]"),
    Sequence[int] | None: _simple("SymInt[]?"),
    torch.dtype: _simple("ScalarType"),
    int: _simple("SymInt"),
    bool: _simple("bool"),
    str: _simple("str")._replace(flat=lambda value: (value or "",)),  # None: of a NamedTuple that is missing
}


def _kind(hint: Any) -> _Kind:
    found = _KINDS.get(hint)
    return _fields(hint) if found is None else found


def _fields(hint: Any) -> _Kind:
    """Of a NamedTuple that is none of the above."""
    type_ = hint if hasattr(hint, "_fields") else next(t for t in get_args(hint) if t is not NoneType)
    kinds = {name: _kind(of) for name, of in get_type_hints(type_).items()}
    missing = (None,) * len(kinds)

    def flat(value: Any) -> list[Any]:
        fields = zip(kinds.values(), value or missing, strict=True)
        return [part for kind, field in fields for part in kind.flat(field)]

    def built(at: int) -> Built:
        first, *rest = _builders(kinds.values(), at)

        def made(parts: Sequence[Any]) -> Any:
            value = first(parts)
            return None if value is None else type_(value, *(build(parts) for build in rest))

        return made

    return _Kind(
        lambda n: [f for name, kind in kinds.items() for f in kind.schema(f"{n}_{name}")],
        flat,
        built,
        tuple(i for i, kind in enumerate(kinds.values()) if kind.tensors),
    )


def _builders(kinds: Iterable[_Kind], at: int) -> list[Built]:
    """`built` of each, whose parts lie one behind the other from `at`."""
    found = []
    for kind in kinds:
        found.append(kind.built(at))
        at += len(kind.schema(""))
    return found


class _Result:
    """The result of an op: a tensor, an Encoded, or a NamedTuple of tensors, which may be None, and Encodeds."""

    def __init__(self, hint: Any) -> None:
        self._type = hint
        self._fields: list[Any] = list(get_type_hints(hint).values()) if hasattr(hint, "_fields") else [hint]
        tensors = 4 if hint is Encoded else sum(4 if f is Encoded else 1 for f in self._fields)
        self.schema = "Tensor" if tensors == 1 else f"({', '.join(['Tensor'] * tensors)})"

    def flat(self, value: Any) -> Any:
        """Tensors, an empty one of its own for each that is missing: results must not alias each other."""
        if self._type is Tensor:
            return value
        parts: Sequence[Any] = value.tensors if self._type is Encoded else [t for v in value for t in _tensors(v)]
        return tuple(parts[0].new_empty(0, dtype=torch.uint8) if t is None else t for t in parts)

    def made(self, tensors: Any, first: Any) -> Any:
        """The inverse. first: the op's first argument, whose width is that of every matrix that the op encodes."""
        if self._type is Tensor:
            return tensors
        parts, k = iter(tensors), first.k if type(first) is Encoded else first.shape[-1]
        if self._type is Encoded:
            return _encoded(parts, k)
        return self._type(*(_encoded(parts, k) if f is Encoded else _present(next(parts), f) for f in self._fields))


def _apart(results: Any, given: Sequence[Any]) -> Any:
    """`results`, with a copy of each tensor that is a given one, or an earlier result."""
    taken, apart = set(map(id, given)), list[Tensor]()
    if isinstance(results, Tensor):
        return results.clone() if id(results) in taken else results
    for t in results:
        apart.append(t.clone() if id(t) in taken else t)
        taken.add(id(t))
    return tuple(apart)


def _tensors(value: Tensor | Encoded | None) -> Sequence[Tensor | None]:
    return value.tensors if isinstance(value, Encoded) else (value,)


def _encoded(parts: Iterator[Tensor], k: int) -> Encoded:
    codes, scale, zero, outer = (_present(next(parts), Tensor | None) for _ in range(4))
    assert codes is not None
    return Encoded(codes, scale, zero, outer, k)


def _present(t: Tensor, hint: Any) -> Tensor | None:
    optional = isinstance(hint, UnionType) and type(None) in get_args(hint)
    return None if optional and t.dim() == 1 else t
