"""What of a call crosses PyTorch's dispatcher, and what it becomes on the other side.

Callers and bodies of ops speak of operands, encoded matrices and scales, with None for what is missing. An argument has
one part or more:

    Operand                   its name
    Encoded, Tensor | Encoded codes (or the tensor), scale, zero, outer, and K, which is None for a plain tensor
    Scales | None             scale, zero, outer, transform
    another NamedTuple        its fields, each as above; None for it is None for each of them

The dispatcher takes the host's time for each argument, also for one that is None, and a backward has forty parts. So
three arguments cross: the tensors that are there, the integers, which may be symbolic, and one string with a word for
each part:

    T      the next tensor        -            None
    #      the next integer       + or !       True or False
    #3     the next three, a list :bfloat16    a dtype
                                  'text        a string

A step of training repeats its calls word by word. So what the words say is worked out once and becomes a Python
expression (`Arguments.read`), in which what holds neither a tensor nor an integer is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from aoquant.formats import Encoded, Operand, Scales, get_operand

SCHEMA = "Tensor[] tensors, SymInt[] numbers, str words"
_LITERALS = {"-": None, "+": True, "!": False}
_WORDS = {value: word for word, value in _LITERALS.items()}


class Flat(NamedTuple):
    """The arguments of a registered op."""

    tensors: list[Tensor]
    numbers: list[int]
    words: str


def flat(parts: Iterable[Any]) -> Flat:
    """Parts of arguments, sorted."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    words: list[str] = []
    for part in parts:
        if isinstance(part, Tensor):
            tensors.append(part)
            words.append("T")
        elif part is None or isinstance(part, bool):
            words.append(_WORDS[part])
        elif isinstance(part, str):
            words.append(f"'{part}")
        elif isinstance(part, torch.dtype):
            words.append(f":{str(part).removeprefix('torch.')}")
        elif isinstance(part, Sequence):
            numbers.extend(part)
            words.append(f"#{len(part)}")
        else:
            numbers.append(part)
            words.append("#")
    return Flat(tensors, numbers, "|".join(words))


class _Part(NamedTuple):
    """A part of an argument, or what is made of several: a constant, or the source of one that each call has anew."""

    constant: Any = None
    source: str = ""
    make: Callable[..., Any] | None = None
    parts: Sequence[_Part] = ()

    @property
    def known(self) -> bool:
        return not self.source and self.make is None

    @property
    def missing(self) -> bool:
        return self.known and self.constant is None


def _of(make: Callable[..., Any], parts: Sequence[_Part]) -> _Part:
    """`make` of parts: now, if they are known."""
    if all(part.known for part in parts):
        return _Part(make(*(part.constant for part in parts)))
    return _Part(make=make, parts=parts)


def _written(part: _Part, names: dict[str, Any]) -> str:
    """The expression of a part, in the tensors t and the numbers n of a call and in `names`, to which it adds."""
    if part.source:
        return part.source
    name = f"c{len(names)}"
    names[name] = part.constant if part.make is None else part.make
    return name if part.make is None else f"{name}({', '.join(_written(p, names) for p in part.parts)})"


def _read(words: str) -> Iterator[_Part]:
    """A part for each word."""
    tensors = numbers = 0
    for word in words.split("|"):
        if word == "T":
            yield _Part(source=f"t[{tensors}]")
            tensors += 1
        elif word == "#":
            yield _Part(source=f"n[{numbers}]")
            numbers += 1
        elif word[0] == "#":
            first, numbers = numbers, numbers + int(word[1:])
            yield _Part(source=f"n[{first}:{numbers}]")
        elif word[0] == ":":
            yield _Part(getattr(torch, word[1:]))
        else:
            yield _Part(word[1:] if word[0] == "'" else _LITERALS[word])


class ArgumentType(NamedTuple):
    """How arguments of one type cross.

    parts: from an argument's name to the type and name of each of its parts.
    flat: from an argument to its parts.
    made: from parts to the argument.
    tensors: where an argument holds tensors: None, it is one or is made of some; a number, that field of it holds some.
    """

    parts: Callable[[str], list[str]]
    flat: Callable[[Any], Sequence[Any]]
    made: Callable[[Sequence[_Part]], _Part]
    tensors: tuple[int | None, ...] = ()


def _simple(type_: str) -> ArgumentType:
    tensors = (None,) if type_.startswith("Tensor") else ()
    return ArgumentType(lambda name: [f"{type_} {name}"], lambda value: (value,), lambda parts: parts[0], tensors)


def _matrix_flat(value: Tensor | Encoded | None) -> Sequence[Any]:
    return value if type(value) is Encoded else (value, None, None, None, None)


_MATRIX = ArgumentType(
    lambda n: [f"Tensor {n}", f"Tensor? {n}_scale", f"Tensor? {n}_zero", f"Tensor? {n}_outer", f"SymInt? {n}_k"],
    _matrix_flat,
    lambda parts: parts[0] if parts[4].missing else _of(Encoded, parts),
    (None,),
)
_NO_SCALES = (None,) * len(Scales._fields)
_SCALES = ArgumentType(
    lambda n: [f"Tensor? {n}_{field}" for field in Scales._fields],
    lambda value: value or _NO_SCALES,
    lambda parts: _Part(None) if all(part.missing for part in parts) else _of(Scales, parts),
    (None,),
)
_OPERAND = ArgumentType(
    lambda n: [f"str {n}"],
    lambda value: (None if value is None else value.name,),
    lambda parts: _of(lambda name: None if name is None else get_operand(name), parts),
)
_TYPES: dict[Any, ArgumentType] = {
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
    str: _simple("str"),
}


def argument_type(hint: Any) -> ArgumentType:
    """Return how arguments with this type hint cross."""
    found = _TYPES.get(hint)
    return _fields(hint) if found is None else found


def _fields(hint: Any) -> ArgumentType:
    """Of a NamedTuple that is none of the above."""
    named = hint if hasattr(hint, "_fields") else next(t for t in get_args(hint) if t is not NoneType)
    types = {name: argument_type(of) for name, of in get_type_hints(named).items()}
    missing = (None,) * len(types)

    def flat(value: Any) -> list[Any]:
        fields = zip(types.values(), value or missing, strict=True)
        return [part for t, field in fields for part in t.flat(field)]

    def made(parts: Sequence[_Part]) -> _Part:
        fields = _each(types.values(), iter(parts))
        return _Part(None) if all(field.missing for field in fields) else _of(named, fields)

    return ArgumentType(
        lambda n: [f for name, t in types.items() for f in t.parts(f"{n}_{name}")],
        flat,
        made,
        tuple(i for i, t in enumerate(types.values()) if t.tensors),
    )


def _each(types: Iterable[ArgumentType], parts: Iterator[_Part]) -> list[_Part]:
    """The argument of each type, of parts that lie one behind the other."""
    return [t.made([next(parts) for _ in t.parts("")]) for t in types]


class Arguments:
    """The arguments of an op, by name."""

    def __init__(self, hints: dict[str, Any]) -> None:
        self.names = list(hints)
        self.types = [argument_type(hint) for hint in hints.values()]
        # where tensors are: an argument, or a field of one that is a NamedTuple of ours
        self.tensors = [(i, at) for i, t in enumerate(self.types) for at in t.tensors]
        self.parts = [part for name, t in zip(hints, self.types, strict=True) for part in t.parts(name)]
        self._readers: dict[str, Callable[[Sequence[Tensor], Sequence[int]], list[Any]]] = {}

    def flat(self, given: Sequence[Any]) -> Flat:
        """Return what crosses of a call."""
        return flat(part for t, value in zip(self.types, given, strict=True) for part in t.flat(value))

    def read(self, tensors: Sequence[Tensor], numbers: Sequence[int], words: str) -> list[Any]:
        """`flat`'s inverse."""
        reader = self._readers.get(words)
        if reader is None:
            names: dict[str, Any] = {}
            written = ", ".join(_written(part, names) for part in _each(self.types, _read(words)))
            reader = self._readers[words] = eval(f"lambda t, n: [{written}]", names)
        return reader(tensors, numbers)

    def named(self, given: Sequence[Any]) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(self.names, given, strict=True)))


class _Field(NamedTuple):
    """A part of a result: a tensor, an Encoded, or a NamedTuple of `fields`."""

    type: Any
    fields: tuple[_Field, ...] = ()

    @classmethod
    def of(cls, hint: Any) -> _Field:
        named = next((t for t in (hint, *get_args(hint)) if hasattr(t, "_fields")), Tensor)
        if named in (Tensor, Encoded):
            return cls(named)
        return cls(named, tuple(map(cls.of, get_type_hints(named).values())))

    def flat(self, value: Any) -> list[Tensor | None]:
        """The tensors of a value, None for each that is missing."""
        if self.type is Tensor:
            return [value]
        if self.type is Encoded:
            return [None, None, None, None] if value is None else list(value.tensors)
        parts: list[Tensor | None] = []
        for i, field in enumerate(self.fields):
            parts += field.flat(None if value is None else value[i])
        return parts

    def made(self, tensors: Iterator[Any], widths: Iterator[int]) -> Any:
        """The inverse; None of nothing."""
        if self.type is Tensor:
            return next(tensors)
        if self.type is Encoded:
            made = Encoded(next(tensors), next(tensors), next(tensors), next(tensors), next(widths))
            return None if made.codes is None else made
        parts = [field.made(tensors, widths) for field in self.fields]
        missing = [part for part in parts if part is None]
        return None if len(missing) == len(parts) else self.type(*parts)


class Result:
    """The result of an op: a tensor, an Encoded, or a NamedTuple of such, also of NamedTuples. What is missing is None,
    which the dispatcher knows as undefined tensors.
    """

    def __init__(self, hint: Any) -> None:
        self._whole = _Field.of(hint)
        self.tensors = self._whole.flat
        self.single = self._whole.type is Tensor
        count = len(self.tensors(None))
        self.schema = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    def flat(self, value: Any) -> Any:
        """A tensor, or several."""
        return value if self.single else tuple(self.tensors(value))

    def made(self, tensors: Any, widths: Sequence[int]) -> Any:
        """The inverse. widths: K of each Encoded, the last one of those that follow too."""
        if self._whole.type is Tensor:
            return tensors
        return self._whole.made(iter(tensors), iter((*widths, widths[-1])))
