"""Test what each kernel of the codec takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.linear_cases import BF16, F32

from aoquant import explain
from aoquant.formats import get_operand
from aoquant.ops import CodecRequest, native, native_cpu
from aoquant.ops.codec import triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for a Hopper GPU with Triton and aoquant's libraries."""
    monkeypatch.setattr(triton, "lacks_triton", lambda device: None)
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.setattr(native, "why_not_on", lambda device: None)
    monkeypatch.setattr(native_cpu, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def said(backend: str, role: str, name: str, **given: Any) -> str | None:
    """Return why a backend refuses a request of 6 x 192 bfloat16 values; None where it takes the request."""
    device = CPU if backend == "cpu" else CUDA
    fields = {"device": device, "dtype": BF16, "rows": 6, "k": 192} | given
    if isinstance(fields.get("columns"), str):
        fields["columns"] = get_operand(fields["columns"])
    reason = dict(explain(CodecRequest(role, get_operand(name), **fields)))[backend]
    return None if reason in ("runs", "willing, lower priority") else reason


@pytest.mark.parametrize("given", [{"rows": 0}, {"k": 0}, {"dtype": torch.float64}], ids=["rows", "k", "dtype"])
@pytest.mark.parametrize(
    ("backend", "role", "name"),
    [
        ("triton", "quantize", "nvfp4"),
        ("triton", "decode", "nvfp4"),
        ("triton", "transform", "hadamard16+nvfp4"),
        ("triton", "saturate", "xx-mxfp4"),
        ("triton", "sides", "te-nvfp4"),
        ("cuda", "quantize", "fouroversix"),
        ("cuda", "quantize", "wush16+nvfp4"),
        ("cuda-fitted", "transform", "wush16+nvfp4"),
        ("cpu", "decode", "int4-g32"),
        ("cpu", "quantize", "int8-row"),
    ],
)
@pytest.mark.usefixtures("every_kernel")
def test_a_kernel_refuses_what_it_cannot_read(backend: str, role: str, name: str, given: dict[str, Any]) -> None:
    both = {"columns": name, "column_codes": True, "values": True} if role == "sides" else {}
    assert said(backend, role, name, **both) is None
    assert said(backend, role, name, **both | given) is not None


@pytest.mark.parametrize(
    ("backend", "role", "name", "given", "takes"),
    [
        ("triton", "quantize", "nvfp4", {"k": 200}, False),
        ("triton", "quantize", "nvfp4", {"rows": 1, "dtype": F32}, True),
        ("triton", "quantize", "int8-row", {"k": 1}, True),
        ("triton", "quantize", "intx4-row", {"k": 16}, True),
        ("triton", "quantize", "int8-tensor", {"k": (1 << 14) + 1}, True),
        ("triton", "quantize", "nvfp4-search", {}, False),
        ("triton", "decode", "nvfp4-search", {}, True),
        ("triton", "quantize", "high-precision", {}, False),
        ("triton", "quantize", "fouroversix", {}, True),
        ("triton", "quantize", "fouroversix-mae", {}, False),
        ("triton", "decode", "fouroversix-mae", {}, True),
        ("triton", "decode", "fouroversix-16x16", {}, True),
        ("triton", "transform", "rht32+mxfp4-sr", {}, True),
        ("triton", "transform", "rht32+mxfp4-sr", {"k": 208}, False),
        ("triton", "transform", "wush16+nvfp4", {}, False),
        ("triton", "transform", "nvfp4", {}, False),
        ("triton", "saturate", "hadamard16+xx-mxfp4", {}, True),
        ("triton", "saturate", "wush16+xx-mxfp4", {}, False),
        ("triton", "saturate", "mxfp8", {}, False),
        ("triton", "saturate", "high-precision", {}, False),
        ("cuda", "quantize", "fouroversix", {"held": True}, False),
        ("cuda", "quantize", "mxfp8", {}, False),
        ("cuda", "quantize", "gridflip-row", {}, False),
        ("cuda", "quantize", "hadamard16+fouroversix", {}, True),
        ("cuda", "quantize", "rht16+fouroversix", {"k": 200}, False),
        ("cuda", "quantize", "wush16+nvfp4", {"values": True}, False),
        ("cuda", "quantize", "wush16+nvfp4-row", {}, False),
        ("cuda", "quantize", "wush32+mxfp8", {}, False),
        ("cuda", "quantize", "nvfp4", {"rows": 1 << 13, "k": 1 << 8}, True),
        ("cuda", "quantize", "nvfp4", {"rows": (1 << 13) - 1, "k": 1 << 8}, False),
        ("cuda", "quantize", "fp8-tensor", {"rows": 1 << 20, "k": 24}, False),
        ("cuda", "quantize", "nvfp4-row", {}, False),
        ("cuda", "quantize", "nvfp4-row", {"codes": False, "rows": 1 << 14, "k": 1 << 10}, True),
        ("cuda", "quantize", "nvfp4-row", {"codes": False, "rows": (1 << 14) + 1, "k": 1 << 10}, False),
        ("cuda", "quantize", "mxfp4", {"codes": False}, True),
        ("cuda", "quantize", "mxfp4", {"codes": False, "k": 48}, False),
        ("cuda", "quantize", "fp8-row", {"codes": False, "k": 16}, True),
        ("cuda", "quantize", "fp8-row", {"codes": False, "k": 34}, False),
        ("cpu", "decode", "int4-g32", {"device": CUDA}, False),
        ("cpu", "decode", "int8-row", {"rows": 1, "dtype": F32}, True),
        ("cpu", "decode", "int4-g64", {}, True),
        ("cpu", "quantize", "int8-row", {"device": CUDA}, False),
        ("cpu", "quantize", "int8-row", {"rows": 1, "k": 1}, True),
        ("cpu", "quantize", "int8-row", {"held": True}, False),
        ("cpu", "quantize", "hadamard16+int8-row", {}, False),
        ("cpu", "quantize", "int4-g64", {}, True),
        *(("cpu", "quantize", name, {}, False) for name in ("int4-bf16-g64", "int4-g48", "intx8-g32", "mxfp4")),
    ],
)
@pytest.mark.usefixtures("every_kernel")
def test_what_a_kernel_takes_and_refuses(
    backend: str, role: str, name: str, given: dict[str, Any], takes: bool
) -> None:
    assert (said(backend, role, name, **given) is None) == takes


@pytest.mark.parametrize(
    ("row", "columns", "codes", "column_codes", "values", "takes"),
    [
        ("te-nvfp4", "te-nvfp4", True, True, True, True),
        ("te-nvfp4", None, True, False, True, False),
        *(
            (row, columns, codes, not first, True, False)
            for row, columns, codes, first in (
                ("te-nvfp4", "te-nvfp4", True, True),
                ("te-nvfp4", "te-nvfp4", False, False),
                ("nvfp4", "te-nvfp4", True, False),
                ("te-nvfp4", "nvfp4-sr", True, False),
                ("nvfp4-sr", "te-nvfp4", True, False),
            )
        ),
        ("te-nvfp4", "te-nvfp4", False, False, True, True),
        ("nvfp4-sr", "nvfp4-sr", False, False, True, True),
        ("nvfp4", "te-nvfp4", False, False, True, False),
        ("te-fp8-tensor", "te-fp8-tensor", True, True, False, True),
        *(
            (row, columns, True, True, False, False)
            for row, columns in (
                ("te-fp8-tensor", "te-fp8-e5m2-tensor"),
                ("high-precision", "high-precision"),
                ("nvfp4", "nvfp4"),
            )
        ),
        ("te-fp8-tensor", None, True, False, False, False),
    ],
)
@pytest.mark.usefixtures("every_kernel")
def test_which_sides_one_kernel_makes_at_once(
    row: str, columns: str | None, codes: bool, column_codes: bool, values: bool, takes: bool
) -> None:
    given = {"codes": codes, "column_codes": column_codes, "values": values, "columns": columns}
    assert (said("triton", "sides", row, **given) is None) == takes
    if row == columns == "te-fp8-tensor":
        assert said("triton", "sides", row, **given, k=40) == "reads rows of float8 by 16, got K = 40"
        assert said("triton", "sides", row, **given, dtype=torch.float32) is not None


@pytest.mark.parametrize(
    ("backend", "role", "name", "given"),
    [
        ("cuda", "quantize", "fouroversix", {}),
        ("cuda", "quantize", "nvfp4", {"rows": 1 << 14}),
        ("cuda", "quantize", "fp8-row", {"codes": False}),
        ("cuda", "quantize", "wush16+nvfp4", {}),
        ("cuda-fitted", "transform", "wush16+nvfp4", {}),
    ],
)
@pytest.mark.usefixtures("every_kernel")
def test_a_library_that_cannot_run_is_the_reason(
    backend: str, role: str, name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First that there is no library, then that it has no code for this GPU."""
    assert said(backend, role, name, **given) is None
    monkeypatch.setattr(native, "why_not_on", lambda device: f"no code for {device}")
    assert said(backend, role, name, **given) == "no code for cuda"
    monkeypatch.setattr(native, "why_not", lambda: "no library")
    assert said(backend, role, name, **given) == "no library"


@pytest.mark.parametrize(
    ("capability", "whole", "fitted"),
    [((8, 9), False, False), ((9, 0), True, True), ((10, 0), True, True), ((12, 0), True, False)],
)
@pytest.mark.usefixtures("every_kernel")
def test_which_gpus_the_library_serves(
    capability: tuple[int, int], whole: bool, fitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    copies, sums = (
        "copies by an engine that Hopper and later have",
        "sums in float64 on tensor cores, which only Hopper and the large Blackwells have at speed",
    )
    assert said("cuda", "quantize", "nvfp4", rows=1 << 14) == (None if whole else copies)
    assert said("cuda", "quantize", "wush16+nvfp4") == (None if fitted else sums)
    assert said("cuda-fitted", "transform", "wush16+nvfp4") == (None if fitted else sums)


def test_which_encoders_find_an_outer_scale_first() -> None:
    names = ("nvfp4", "nvfp4-pow2", "nvfp4-none", "mxfp4", "fp8-tensor", "high-precision")
    assert [name for name in names if triton.finds_outer(get_operand(name))] == ["nvfp4", "nvfp4-pow2"]
