"""The calls of csrc's encoders, on a CPU: what Python passes, against the schemas that the sources define. The
operators are stand-ins.

What the operators compute is test_csrc_grids.py's and test/gpu/test_grids.py's.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.grid_inputs import name_arguments
from torch import Tensor

from aoquant import get_format
from aoquant.formats import as_operand
from aoquant.ops import native
from aoquant.ops.codec import cuda

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "csrc"))
import builder


def schemas() -> dict[str, Any]:
    """Operator -> its schema, as the sources define it."""
    found = {}
    for source in builder.sources():
        for literals in re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)', source.read_text()):
            text = "".join(re.findall(r'"([^"]*)"', literals))
            found[text.split("(")[0]] = torch._C.parse_schema(f"aoquant_native::{text}")
    return found


@pytest.mark.parametrize("name", ["encode_grids", "encode_search", "finite_absmax"])
def test_fakes_take_what_the_operators_take(name: str) -> None:
    assert list(inspect.signature(native._FAKES[name]).parameters) == [a.name for a in schemas()[name].arguments]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fouroversix", ["finite_absmax", "encode_grids"]),
        ("gridflip-sided-c0.2-alternating", ["finite_absmax", "encode_grids"]),
        ("fouroversix-mae-16x16", ["finite_absmax", "encode_grids"]),
        ("gridflip-static:2.0", ["encode_grids"]),
        ("nvfp4-search", ["encode_search"]),
        ("nvfp4-search-none", ["encode_search"]),
        ("nvfp4-search-static:0.001", ["encode_search"]),
    ],
)
def test_encoders_call_the_operators_as_they_are_defined(
    name: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each argument has its schema's type, the names lead to the options, and the results are taken for what they
    are.
    """
    fmt, types, calls = get_format(name), {"Tensor": Tensor, "int": int, "float": float, "bool": bool}, []

    def operator(called: str) -> Any:
        def run(*args: Any) -> Any:
            arguments = schemas()[called].arguments
            assert len(args) == len(arguments)
            assert all(type(given) is types[str(a.type)] for given, a in zip(args, arguments, strict=True)), args
            calls.append((called, dict(zip((a.name for a in arguments), args, strict=True))))
            return native._FAKES[called](*args)

        return run

    monkeypatch.setattr(native, "operator", operator)
    x = torch.randn(40, 96, dtype=torch.bfloat16)
    want = fmt.encode(x)
    got = cuda.encode(as_operand(fmt), x)
    assert [c for c, _ in calls] == wanted
    quantized = cuda.encode_with_values(as_operand(fmt), x, torch.float16, operand=True, keep=True)
    assert (
        quantized.values.dtype == torch.float16 and quantized.values.shape == x.shape and quantized.encoded is not None
    )
    for e in (got, quantized.encoded):
        for a, b in zip(e[:4], want[:4], strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or (a.shape == b.shape and a.dtype == b.dtype)
    last = calls[-1][1]
    assert last["out"] == 2 and last["operand"] is True
    if "search" in wanted[-1]:
        assert (want.outer is None and last["outer"].numel() == 0) or torch.equal(last["outer"], want.outer)
        again = cuda.encode_with_values(as_operand(fmt), x, torch.float16, True, True, torch.full((1, 1), 3.0))
        assert again.alpha is not None and again.alpha.item() == 3.0
    else:
        effort, metric, tile, c, alternating = name_arguments(name)
        assert (last["effort"], last["metric"], last["tile"], last["alternating"]) == (
            effort,
            metric,
            tile,
            alternating,
        )
        assert last["c"] == c and last["known"] == (2.0 if "static" in name else 0.0)
