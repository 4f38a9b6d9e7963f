"""One launch for formats with one scale for the whole tensor: the bytes of the reference, whatever the values."""

from __future__ import annotations

import pytest
import torch
from support.bits import compare, differing
from support.gpu import captured
from support.kernel_inputs import BF16, CUDA, F16, F32, inputs

from aoquant import backend, get_format
from aoquant.formats import as_operand
from aoquant.ops import CodecRequest, codec, explain
from aoquant.ops.codec import whole

pytestmark = pytest.mark.gpu

NAMES = ("nvfp4", "fp8-tensor")


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "LEAST", 1)  # it is right for small ones too
    request = CodecRequest("quantize", get_format("nvfp4"), CUDA, BF16, 640, 4096)
    if (reason := dict(explain(request))["cuda"]) != "runs":
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_number(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    for kind, x_cpu in inputs(dtype).items():
        x = x_cpu.to(CUDA)
        want = fmt.encode(x)
        made = whole.encode(fmt, x, None, False, True)
        assert made.encoded is not None
        compare(made.encoded, want, kind)
        for operand, out in ((True, BF16), (False, BF16), (False, F32)):
            values = fmt.operand(want, out) if operand else fmt.decode(want, out)
            for keep in (True, False):
                both = whole.encode(fmt, x, out, operand, keep)
                assert (both.encoded is None) == (not keep)
                if both.encoded is not None:
                    compare(both.encoded, want, kind)
                assert differing(both.values, values) == 0, f"{kind} {operand} {out}"
                assert differing(both.alpha, fmt.alpha(want)) == 0, kind


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "k"), [(1, 16), (3, 5456), (1033, 4096), (8192, 4096), (20011, 4112)])
def test_every_share_of_the_chip(name: str, rows: int, k: int, dtype: torch.dtype) -> None:
    """All of x on the chip, some of it, and more than the cache holds; the largest value first, and last."""
    fmt = get_format(name)
    x = torch.randn(rows, k, device=CUDA, dtype=dtype)
    for at in (0, -1):
        x.view(-1)[at] = 37.0
        got = codec.encode(fmt, x)
        with backend("triton"):
            compare(got, codec.encode(fmt, x), f"largest at {at}")
        x.view(-1)[at] = 0.5


def test_what_it_takes() -> None:
    for name, taken in (("nvfp4", True), ("nvfp4-row", False), ("fp8-tensor", True), ("fp8-e5m2-tensor", False),
                        ("fp8-tensor-native", True), ("fp8-tensor:ub1.0", False), ("hadamard16+nvfp4", False)):  # fmt: skip
        assert whole.has(as_operand(get_format(name))) == taken, name


def test_graphs_capture_it() -> None:
    fmt = get_format("nvfp4")
    x = torch.randn(2048, 4096, device=CUDA, dtype=BF16)
    graph, made = captured(lambda: [codec.encode(fmt, x) for _ in range(3)])
    for seed in range(3):
        x.copy_(torch.randn(2048, 4096, generator=torch.Generator().manual_seed(seed)) * 10**seed)
        graph.replay()
        for e in made:
            compare(e, fmt.encode(x), str(seed))
