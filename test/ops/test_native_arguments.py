"""Every operator of csrc/cpu with each argument wrong in turn: an error in Python, no signal and no result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpu_library import with_library
from support.wrong_arguments import accepted, wrong_calls
from torch import Tensor

BF16 = torch.bfloat16
N, K, GROUP = 32, 64, 32


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[Path]:
    yield from with_library()


def calls() -> dict[str, tuple[str, dict[str, Any]]]:
    x, codes, bytes_NK = (
        torch.randn(3, K, dtype=BF16),
        torch.zeros(N, K // 2, dtype=torch.uint8),
        torch.ones(N, K).to(torch.int8),
    )
    scale, zero = torch.ones(N, K // GROUP, dtype=BF16), torch.zeros(N, K // GROUP, dtype=BF16)
    after: dict[str, Any] = {
        "alpha_x": torch.ones(3, 1),
        "alpha_w": torch.ones(N, 1),
        "bias": torch.ones(N, dtype=BF16),
    }
    packed: dict[str, Any] = {"codes": codes, "scale": scale, "zero": zero, "kind": 0, "group": GROUP}
    return {
        "decode_mm": ("decode_mm", {"x": x, **packed, **after}),
        "decode_mm, intx4": ("decode_mm", {"x": x, **packed, **after, "kind": 1, "zero": zero.to(torch.int8)}),
        "decode_mm, int8": (
            "decode_mm",
            {"x": x, **packed, **after, "codes": bytes_NK, "kind": 2, "scale": None, "zero": None},
        ),
        "integer_mm": (
            "integer_mm",
            {"x": torch.ones(3, K).to(torch.int8), "codes": bytes_NK, **after, "to_bfloat16": True},
        ),
        "decode": ("decode", {**packed, "to_bfloat16": True}),
        "encode_int8_rows": ("encode_int8_rows", {"x": x, "asymmetric": True, "operand": True}),
        "encode_int4": ("encode_int4", {"x": x, "group": GROUP}),
    }


def schema_of(name: str) -> Any:
    return getattr(torch.ops.aoquant_cpu, name).default._schema


def operator_of(name: str) -> Any:
    return getattr(torch.ops.aoquant_cpu, name).default


def test_every_operator_has_a_call() -> None:
    defined = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aoquant_cpu::")
    }
    assert defined == {name for name, _ in calls().values()} | {"level"}


@pytest.mark.parametrize("case", calls())
def test_a_wrong_argument_is_an_error(case: str) -> None:
    name, good = calls()[case]
    assert accepted(operator_of(name), [good[a.name] for a in schema_of(name).arguments]) is not None
    wrong = [
        (argument, label)
        for argument, label, args in wrong_calls(schema_of(name), good)
        if accepted(operator_of(name), args) is not None
        and not (argument == "group" and good["kind"] == 2)  # codes of bytes have no groups
    ]
    assert not wrong


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_are_no_sums(rows: int) -> None:
    for case in ("decode_mm", "decode_mm, int8", "integer_mm"):
        name, good = calls()[case]
        given = {**good, "x": good["x"][:rows], "alpha_x": good["alpha_x"][:rows]}
        y: Tensor = operator_of(name)(*(given[a.name] for a in schema_of(name).arguments))
        assert y.shape == (rows, N)
