"""The process's default dtype and device are no part of any number: every byte is the one that float32 on a CPU as the
default gives.

`torch.tensor(1.0)`, `torch.where(mask, 2.0, 1.0)` and integers times a float take the default dtype, and new tensors
the default device; a format must not.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.bits import same
from torch import Tensor

from aoquant.formats import COMPOSED, Random, Scales, get_operand, list_formats
from aoquant.formats.random import fresh_state
from aoquant.transforms.wush import fit, gram

EXTRA = ("int4-tinygemm-hqq-g32", "int4-tinygemm-cpu-hqq-g64", "intx4-g32-hqq", "hadamard64-s5+nvfp4-row", "te-nvfp4-static:4.5",
         "gridflip-search-c0.2-alternating", "mxfp4-sr", "nvfp4-sr", "ms-eden", "rht32+mxfp4-sr", "rht128+ms-eden", "rht16+mxfp8")  # fmt: skip
NAMES = sorted({*list_formats(), *COMPOSED, *EXTRA})
DEFAULTS = (torch.bfloat16, torch.float16, torch.float64)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def data(dtype: torch.dtype) -> Tensor:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(5), dtype=torch.float32, device="cpu")
    x[3], x[4, :16] = 2.0**70 * x[3], 0.0
    x[5, 7], x[6, 9] = torch.nan, torch.inf
    return (x * 0.3).to(dtype)


def numbers(name: str) -> list[Tensor]:
    """Everything that a format computes, of a float32 and of a bfloat16 matrix."""
    format, found = get_operand(name), list[Tensor]()
    for dtype in (torch.float32, torch.bfloat16):
        x = data(dtype)
        if format.draws:
            e = format.encode(x, random=Random(fresh_state(3, "layer"), 1))
        elif format.fitted:
            finite = x.nan_to_num(0.0, 0.0, 0.0).clamp(-9, 9).float()
            matrix, _ = fit(
                gram(finite, 16) / 20 + torch.eye(16, dtype=torch.float64, device="cpu"),
                gram(finite.flip(1), 16) / 20 + 1e-3,
            )
            held = Scales(transform=matrix)
            e = format.encode(x, held)
            found += [matrix, format.pull_back(x, matrix)]
        else:
            e = format.encode(x)
            found += [format.saturated(x, e), format.floored(e)]
            if format.per_tensor and "hqq" not in name:
                found += [t for t in format.encode(x, format.measure(x * 0.5))[:4] if t is not None]
        found += [t for t in e[:4] if t is not None]
        for out in (torch.float32, torch.bfloat16):
            found += [format.operand(e, out), format.decode(e, out)]
        found += [] if format.alpha(e) is None else [format.alpha(e)]  # type: ignore[list-item]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_format(name: str) -> None:
    want = numbers(name)
    for dtype in DEFAULTS:
        with default(dtype):
            got = numbers(name)
        assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want], dtype
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert same(a, b), (dtype, i)


@pytest.mark.parametrize("name", NAMES)
def test_every_format_beside_another_default_device(name: str) -> None:
    """A model on a CPU, in a process that makes new tensors elsewhere."""
    with torch.device("meta"):
        got = numbers(name)
    for i, (a, b) in enumerate(zip(got, numbers(name), strict=True)):
        assert a.device.type == "cpu" and same(a, b), i
