"""What the packed layer's kernels are asked for, and what they refuse; the kernels themselves run in
test/gpu/test_decode.py.
"""

from __future__ import annotations

import pytest
import torch
from support.gemm import request_of
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand, as_operand, get_format
from aoquant.ops import Request, explain
from aoquant.ops.call import Call
from aoquant.ops.gemm import few_rows

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.device("cuda", 0)


def asked(x: Tensor, w: Tensor | Encoded, of: Format | Operand) -> Request:
    """What the GEMM of x with a weight of `of`, encoded or not, asks the router for."""
    return request_of(Call("aoquant", x, None, w, as_operand(of), None, [len(x)], x.dtype))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("int4-g128", "int4"),
        ("nvfp4", "e4m3"),
        ("nvfp4-search", "e4m3"),
        ("fouroversix", "e4m3"),
        ("te-nvfp4", "e4m3"),
        ("mxfp4", "e8m0"),
        ("xx-mxfp4", "e8m0"),
        ("gridflip-sided", "gridflip"),
        ("mxfp8", None),
        ("int4-e4m3-g128", None),
        ("intx4-g32", None),
        ("fp8-row", "fp8"),
        ("fp8-tensor", None),
        ("fp8-e5m2-row", None),
    ],
)
def test_kinds(name: str, kind: str | None) -> None:
    assert few_rows.kind(get_format(name)) == kind


@pytest.mark.parametrize("c", ["", "-c0.375", "-c1.5"])
def test_shifts_are_the_formats(c: str) -> None:
    for alternating in ("", "-alternating"):
        f = get_format(f"gridflip{c}{alternating}")
        assert torch.equal(torch.tensor([f.shifts]), torch.ones(1, 2) * f._shift(torch.ones(1, 2)))
    assert get_format("nvfp4").shifts == (0.0, 0.0)


@pytest.mark.parametrize("name", ["int4-g128", "int4-bf16-g128", "nvfp4", "gridflip", "mxfp4", "fp8-row"])
def test_prepared_and_packed_ask_for_the_same(name: str) -> None:
    f, x = get_format(name), torch.randn(3, 256, dtype=BF16)
    for dtype in (BF16, F16, F32):
        w = torch.randn(16, 256, dtype=dtype)
        prepared, converted = (asked(x, p, f) for p in (w, f.encode(w)))
        assert prepared == converted


def test_int4_scales_of_another_type_are_refused() -> None:
    f = get_format("int4-g128")
    for scales, said in ((F32, "in one type"), (BF16, None), (None, None)):
        reason = few_rows._why_not(Request("aoquant", None, f, CUDA, BF16, 1, 256, 256, scales))
        assert reason is None if said is None else reason is not None and said in reason
    behind = get_format("hadamard16+int4-g128")
    x, w = torch.randn(3, 256, dtype=BF16), torch.randn(16, 256, dtype=BF16)
    assert asked(x, w, behind) == asked(x, behind.encode(w), behind)
    assert asked(x, w, behind).scale_dtype == F32


def test_every_refusal_says_why_and_the_cpu_has_the_reference() -> None:
    rows = dict(explain(Request("aoquant", None, get_format("nvfp4"), torch.device("cpu"), BF16, 1, 256, 256)))
    assert rows["cuda-decode"] == rows["triton-decode"] == "needs a CUDA device" and rows["reference"] == "runs"

    def why(name: str, dtype: torch.dtype = BF16, k: int = 256, contract: str = "aoquant") -> str:
        return few_rows._why_not(Request(contract, None, get_format(name), CUDA, dtype, 1, 256, k)) or ""

    assert why("nvfp4") == why("int4-g128") == why("gridflip") == ""
    assert "bias_after" in why("int4-g128", contract="bias_after")
    assert "mxfp8" in why("mxfp8") and "float32" in why("nvfp4", F32) and "K = 272" in why("nvfp4", k=272)
    assert "up to 64 rows" in str(
        few_rows._too_many(Request("aoquant", None, get_format("nvfp4"), CUDA, BF16, 65, 256, 256), 64)
    )
