"""Take the arguments of a call apart for PyTorch's dispatcher, and make them again on the other side.

Callers and bodies of ops speak of operands, encoded matrices and scales, with None for what is missing. The dispatcher
takes the host's time for each argument, also for one that is None, and a backward has forty parts. So three arguments
cross: the tensors that are there, the integers, which may be symbolic, and one string of words:

    T      the next tensor        -            None
    #      the next integer       + or !       True or False
    #3     the next three, a list :bfloat16    a dtype
    @nvfp4 an operand             'text        a string
    (Encoded ... )                a NamedTuple of what stands between; one without any part is None

A step of training repeats its calls word by word. So what the words say is worked out once (`Arguments.read`), and what
holds neither a tensor nor an integer is made then.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
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


def flat(values: Sequence[Any]) -> Flat:
    """Sort values into tensors, integers and words."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    words: list[str] = []
    for value in values:
        _put(value, tensors, numbers, words)
    return Flat(tensors, numbers, "|".join(words))


# no closure: one that calls itself would keep the tensors until a collection of cycles
def _put(value: Any, tensors: list[Tensor], numbers: list[int], words: list[str]) -> None:
    """Add a value."""
    if isinstance(value, Tensor):
        tensors.append(value)
        words.append("T")
    elif value is None or isinstance(value, bool):
        words.append(_WORDS[value])
    elif isinstance(value, str):
        words.append(f"'{value}")
    elif isinstance(value, torch.dtype):
        words.append(f":{str(value).removeprefix('torch.')}")
    elif isinstance(value, Operand):
        words.append(f"@{value.name}")
    elif hasattr(value, "_fields"):
        if all(field is None for field in value):
            words.append("-")
            return
        words.append(f"({type(value).__name__}")
        for field in value:
            _put(field, tensors, numbers, words)
        words.append(")")
    elif isinstance(value, Sequence):
        numbers.extend(value)
        words.append(f"#{len(value)}")
    else:
        numbers.append(value)
        words.append("#")


Part = partial[Any]  # a function of a call's tensors and numbers; one of `_known` reads neither


class _Reader:
    """Turn words into parts of a call's arguments, which are functions of its tensors and numbers.

    types: the NamedTuples that words name.
    """

    def __init__(self, words: str, types: dict[str, Any]) -> None:
        self._words, self._types = iter(words.split("|")), types
        self._tensors, self._numbers = count(), 0

    def parts(self) -> Iterator[Part]:
        """Yield each part up to the end of the words, or of the tuple that they are in."""
        for word in self._words:
            if word == ")":
                return
            if word == "T":
                yield partial(_tensor, next(self._tensors))
            elif word[0] == "#":
                first, self._numbers = self._numbers, self._numbers + int(word[1:] or 1)
                yield partial(_number, slice(first, self._numbers) if word[1:] else first)
            elif word[0] == "(":
                make, parts = self._types[word[1:]], list(self.parts())
                made = partial(_made, make, parts)
                yield partial(_known, made((), ())) if all(part.func is _known for part in parts) else made
            else:
                yield partial(_known, _LITERALS[word] if word in _LITERALS else _CONSTANTS[word[0]](word[1:]))


def _known(value: Any, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
    return value


def _tensor(at: int, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    return tensors[at]


def _number(at: Any, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
    return numbers[at]


def _made(make: Any, parts: Sequence[Part], tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
    return make(*[part(tensors, numbers) for part in parts])


_CONSTANTS: dict[str, Callable[[str], Any]] = {"'": str, ":": partial(getattr, torch), "@": get_operand}


def _any_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of which a type hint allows one."""
    return hint, *get_args(hint)


def _tuples(hint: Any) -> Iterator[Any]:
    """Yield the NamedTuples of a type hint, and those in their fields."""
    for named in _any_of(hint):
        if hasattr(named, "_fields"):
            yield named
            for field in get_type_hints(named).values():
                yield from _tuples(field)


def _places(hint: Any) -> list[int | None]:
    """Return where an argument holds tensors. None: it is one, or is made of some; a number: that field of it holds
    some.
    """
    if set(_any_of(hint)) & _OF_TENSORS:
        return [None]
    fields = [get_type_hints(named).values() for named in _any_of(hint) if hasattr(named, "_fields")]
    return [i for types in fields for i, t in enumerate(types) if set(_any_of(t)) & _OF_TENSORS]


_OF_TENSORS = {Tensor, Encoded, Scales}


class Arguments:
    """The arguments of an op, by name."""

    def __init__(self, hints: dict[str, Any]) -> None:
        self.names = list(hints)
        self.tensors = [(i, at) for i, hint in enumerate(hints.values()) for at in _places(hint)]
        self.types = {named.__name__: named for hint in hints.values() for named in _tuples(hint)}
        self._parts: dict[str, list[Part]] = {}  # by words

    def read(self, tensors: Sequence[Tensor], numbers: Sequence[int], words: str) -> list[Any]:
        """`flat`'s inverse."""
        parts = self._parts.get(words)
        if parts is None:
            parts = self._parts[words] = list(_Reader(words, self.types).parts())
        return [part(tensors, numbers) for part in parts]

    def named(self, given: Sequence[Any]) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(self.names, given, strict=True)))


class _Field(NamedTuple):
    """A part of a result: a tensor, an Encoded, or a NamedTuple of `fields`."""

    type: Any
    fields: "tuple[_Field, ...]" = ()

    @classmethod
    def of(cls, hint: Any) -> "_Field":
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
