"""Options of configs: whether a value has its type, and is one of those allowed. The messages name the config."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, get_args

from aoquant.transforms import Transform

# how messages call a type
TYPES: dict[type, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Transform: "aoquant.Hadamard(size) or aoquant.WUSH(size)",
    NoneType: "None",
}


def check_types(owner: str, types: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError unless each of the given values has its type, which is among `TYPES` or a union of them; others
    are not checked.

    True and False are no numbers here, though Python counts them as integers; an integer is a number.
    """
    for name, type_ in types.items():
        allowed = get_args(type_) if isinstance(type_, UnionType) else (type_,)
        if not TYPES.keys() >= set(allowed):
            continue
        got = given[name]
        wide = (*allowed, int) if float in allowed else allowed
        if not (bool in allowed if isinstance(got, bool) else isinstance(got, wide)):
            raise ValueError(f"{owner}: {name} takes {' or '.join(TYPES[t] for t in allowed)}, got {got!r}")


def group_size(config: str, got: int) -> int:
    """`got`, which has to be at least 1."""
    if got < 1:
        raise ValueError(f"{config}: group_size must be an integer of at least 1, got {got!r}")
    return got


def rule_of(config: str, rules: Mapping[str, tuple[str, ...]], numerics: str, got: str) -> str:
    """`got`, which has to be one of the rules of those numerics."""
    if got not in rules[numerics]:
        homes = [repr(n) for n, found in rules.items() if got in found]
        raise ValueError(
            f"{config}: with numerics={numerics!r}, rule must be one of {', '.join(rules[numerics])}, got {got!r}"
            + (f", which goes with numerics={' or '.join(homes)}" if homes else "")
        )
    return got


def choice(config: Any, name: str, *allowed: str) -> str:
    """A config's value of that name, which has to be one of `allowed`."""
    got: str = getattr(config, name)
    if got not in allowed:
        raise ValueError(f"{type(config).__name__}: {name} must be one of {', '.join(allowed)}, got {got!r}")
    return got
