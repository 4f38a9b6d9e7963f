"""What crosses the dispatcher comes out as it went in: every kind of argument, there and missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gemm import kept
from torch import Tensor

from aoquant import ops
from aoquant.formats import Encoded, Scales, get_operand
from aoquant.ops.boundary import Arguments, flat

X, Y, S = torch.randn(4, 32), torch.randn(4, 32), torch.ones(4, 1)
FP8, NVFP4 = get_operand("te-fp8-tensor"), get_operand("te-hadamard16-sd7e8+te-nvfp4")
CODED = Encoded(X, S, None, Y, 32)
GEMM = (CODED, Y, None, FP8, NVFP4, "aoquant", [4, 3], torch.bfloat16, None, [3, 1], True, Scales(S))
KEPT = kept(CODED, None, Scales(S, None, S), "square", (FP8, FP8))
CALLS: dict[str, tuple[Any, tuple[Any, ...], int, list[int]]] = {
    "missing": (ops.matmul, (X, Y, None, None, FP8, "dequantize", [], torch.float32, None, None, False, None), 2, []),
    "encoded": (ops.matmul, GEMM, 5, [32, 4, 3, 3, 1]),
    "nested": (ops.gradients, (X, KEPT, kept(Y, gemm=(NVFP4, FP8, "c")), S, None), 8, [32]),
    "no tuple": (ops.gradients, (X, None, kept(Y), None, Scales(S)), 3, []),
    "a side": (ops.encode, (X, FP8, None, None, "operand", 1), 1, [1]),
    "the other side": (ops.encode, (X, None, NVFP4, Scales(S), "", 32), 2, [32]),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(b, tuple):
        return type(a) is type(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b if isinstance(b, Tensor) else type(a) is type(b) and a == b


@pytest.mark.parametrize("name", CALLS)
def test_arguments_come_back(name: str) -> None:
    op, given, tensors, numbers = CALLS[name]
    made = flat(given)
    assert len(made.tensors) == tensors and made.numbers == numbers
    for _ in range(2):  # worked out, and known
        back = op.arguments.read(*made)
        assert len(back) == len(given) and all(same(a, b) for a, b in zip(back, given, strict=True))


def test_other_tensors_of_a_call_that_is_known() -> None:
    """The same words mean other tensors in the next call."""
    arguments = Arguments({"x": Tensor | Encoded, "n": int})
    first, second = (flat((Encoded(t, None, None, None, k), n)) for t, k, n in ((X, 32, 1), (Y, 16, 2)))
    assert first.words == second.words == "(Encoded|T|-|-|-|#|)|#"
    for t, k, n, made in ((X, 32, 1, first), (Y, 16, 2, second)):
        e, m = arguments.read(*made)
        assert e.codes is t and e.k == k and m == n


def test_few_arguments_cross() -> None:
    """The dispatcher takes the host's time for each."""
    for op in (ops.encode, ops.matmul, ops.gradients):
        assert [a.name for a in op.overload._schema.arguments] == ["tensors", "numbers", "words"]


def test_a_missing_result_is_none() -> None:
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    codes, scale, zero, outer, *rest = ops.encode.overload(*ops.encode.flat(x, FP8))
    assert all(t is None for t in rest)
    assert zero is None and outer is None
    want = FP8.encode(x)
    assert torch.equal(codes.view(torch.uint8), want.codes.view(torch.uint8)) and torch.equal(scale, want.scale)
