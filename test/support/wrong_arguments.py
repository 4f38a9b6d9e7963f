"""Calls of the operators of csrc with one argument wrong at a time.

A call is (operator, arguments by name). Every wrong call must raise an error in Python: a kernel that runs with such an
argument reads or writes memory that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

INTEGERS = (-1, 0, 1 << 40)


def without_storage(t: Tensor) -> Tensor:
    """Return a tensor of t's shape whose storage is freed, as FSDP leaves a sharded parameter."""
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def wrong_tensors(t: Tensor) -> dict[str, Tensor | None]:
    """Return wrong tensors, by what is wrong."""
    other = torch.device("cpu" if t.is_cuda else "meta")
    return {
        "absent": None,
        "empty": t.new_empty((0,) * t.dim()),
        "device": torch.empty_like(t, device=other),
        "dtype": t.double() if t.dtype != torch.int32 else t.long(),
        "dim": torch.stack([t, t]),
        "huge": t.new_empty(1 << 31, 0),
        "smaller": t.flatten()[:-1].clone(),
        "non-contiguous": torch.stack([t, t], -1)[..., 0],
        "no storage": without_storage(t),
    }


def wrong_calls(schema: Any, good: dict[str, Any]) -> Iterator[tuple[str, str, list[Any]]]:
    """(argument, what is wrong, all arguments in the schema's order) for each argument of a call."""
    for argument in schema.arguments:
        given = good[argument.name]
        if isinstance(given, Tensor):
            for label, tensor in wrong_tensors(given).items():
                if tensor is None and str(argument.type) == "Optional[Tensor]":
                    continue
                yield argument.name, label, [{**good, argument.name: tensor}[a.name] for a in schema.arguments]
        elif type(given) is int:
            for number in (n for n in INTEGERS if n != given):
                yield argument.name, str(number), [{**good, argument.name: number}[a.name] for a in schema.arguments]


def accepted(operator: Callable[..., Any], args: list[Any]) -> Any:
    """Return the operator's result, or None where it raises."""
    try:
        result = operator(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return result
