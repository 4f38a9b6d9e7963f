"""Defining an op: a Python function behind PyTorch's dispatcher, with as little as possible between the two.

`torch.library.custom_op` calls a function through kernels of its own for autograd, views and aliasing checks, each of them Python.
Our ops run inside an `autograd.Function`, where none of that has work to do, and compiled code calls four of them in a training step. So
they are defined the plain way: one kernel, for every device, which compilers leave alone. That outputs do not alias inputs is for
`opcheck` to see, in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("aoquant", "FRAGMENT")


def op(body: Callable[..., Any]) -> Any:
    """The op "aoquant::NAME" of a typed function called NAME, which mutates nothing: an `OpOverload`, whose `body` is that function."""
    name = body.__name__
    schema = torch.library.infer_schema(body, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, torch.compiler.disable(body), "CompositeExplicitAutograd")
    overload = getattr(torch.ops.aoquant, name).default
    overload.body = body
    return overload


def fake(overload: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: shapes and dtypes of what `overload` returns, without data."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(overload.name(), function, lib=_LIBRARY)
        return function

    return register
