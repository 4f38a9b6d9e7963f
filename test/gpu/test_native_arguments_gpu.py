"""Every operator of csrc with each argument wrong in turn, on a GPU: an error in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.csrc import schemas
from support.wrong_arguments import accepted, wrong_calls

from aoquant.ops import linear_plan, native

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = torch.bfloat16
M, N, K, GROUP = 4, 256, 256, 128
PLAN = linear_plan.packed("int4", None, GROUP, 1, 0.0, False, True, True, BF16)


def calls() -> dict[str, dict[str, Any]]:
    """Operator -> a right call."""
    cuda = {"device": "cuda"}
    x, codes = torch.randn(M, K, dtype=BF16, **cuda), torch.zeros(N, K // 2, dtype=torch.uint8, **cuda)
    scale, zero = (torch.ones(N, K // GROUP, dtype=BF16, **cuda) for _ in range(2))
    alpha_w, bias = torch.ones(N, 1, **cuda), torch.ones(N, dtype=BF16, **cuda)
    weight: dict[str, Any] = {"codes": codes, "scale": scale, "zero": zero, "alpha_w": alpha_w}
    matrix = torch.eye(16, **cuda).repeat(K // 16, 1, 1)
    return {
        "finite_absmax": {"x": x},
        "outer_scale": {"x": x, "times": 1.0, "least": 0.0},
        "encode_grids": {
            "x": x, "amax": torch.ones(1, dtype=torch.int32, **cuda), "known": 0.0, "effort": 0, "metric": 0, "tile": 1, "c": 0.0,
            "alternating": False, "out": 1, "operand": True,
        },
        "encode_search": {"x": x, "outer": torch.ones(1, 1, **cuda), "out": 1, "operand": True},
        "encode_tensor": {"x": x, "kind": 0, "keep": True, "out": 1, "operand": True},
        "transform_fitted": {"x": x, "matrix": matrix, "back": False, "out": 1},
        "encode_fitted": {"x": x, "matrix": matrix, "block": 16, "known": 1.0},
        "encode_rows": {"x": x, "format": 1, "decoded": False},
        "decode_mm": {
            "x": x, **weight, "alpha_x": torch.ones(M, 1, **cuda), "bias": bias, "format": 0, "group": GROUP, "tile": 1, "shift": 0.0,
            "odd_shift": 0.0,
        },
        "linear": {"x": x, **weight, "bias": bias, "plan": PLAN},
        "decode_values": {"codes": codes, "scale": scale, "zero": zero, "plan": PLAN},
        "experts_mm": {
            "x": x, "ends": torch.full((2,), M, dtype=torch.int32, **cuda), **weight, "alpha_x": torch.ones(M, 1, **cuda), "plan": PLAN,
            "many": False,
        },
    }  # fmt: skip


# Right calls: these operators take any shape, or any numbers of these arguments.
RIGHT = {
    ("finite_absmax", "x", "dim"), ("finite_absmax", "x", "empty"), ("finite_absmax", "x", "huge"), ("outer_scale", "x", "dim"),
    ("outer_scale", "x", "empty"), ("outer_scale", "x", "huge"), ("linear", "x", "dim"), ("linear", "x", "non-contiguous"),
    ("encode_grids", "amax", "empty"), ("encode_grids", "amax", "dim"), ("encode_grids", "out", "0"), ("encode_search", "out", "0"),
    ("encode_search", "outer", "empty"), ("encode_search", "outer", "smaller"), ("encode_tensor", "out", "0"),
    ("encode_grids", "amax", "smaller"), ("encode_grids", "amax", "non-contiguous"), ("encode_search", "outer", "non-contiguous"),
    ("experts_mm", "ends", "smaller"), ("encode_grids", "x", "empty"), ("encode_search", "x", "empty"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def library() -> None:
    if (reason := native.why_not()) is not None:
        pytest.skip(reason)


def test_every_operator_has_a_call() -> None:
    assert set(calls()) | {"siblings"} == set(schemas())


@pytest.mark.parametrize("name", [*schemas()])
def test_a_wrong_argument_is_an_error(name: str) -> None:
    if name == "siblings":
        good, schema = calls()["linear"], schemas()["linear"]

        def operator(x: Any, codes: Any, scale: Any, zero: Any, alpha_w: Any, bias: Any, plan: Any) -> Any:
            two = ([t, t] for t in (codes, scale, zero, alpha_w, bias, plan))
            return native.operator("siblings")(x, *two)

    else:
        good, schema, operator = calls()[name], schemas()[name], native.operator(name)
    assert accepted(operator, [good[a.name] for a in schema.arguments]) is not None
    right = {(argument, label) for op, argument, label in RIGHT if op == ("linear" if name == "siblings" else name)}
    wrong = [
        (argument, label)
        for argument, label, args in wrong_calls(schema, good)
        if (argument, label) not in right and accepted(operator, args) is not None
    ]
    assert not wrong
    assert accepted(operator, [good[a.name] for a in schema.arguments]) is not None  # the device still works
