"""TransformerEngine's float8 against its definition, written again in NumPy with ml_dtypes' casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from aoquant.formats import Scales, TEFloat8, get_format

MAX = {"e4m3": 448.0, "e5m2": 57344.0}
CAST = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FLT_MAX = np.finfo(np.float32).max
NAMES = [
    "te-fp8-tensor", "te-fp8-e5m2-tensor", "te-fp8-1x128", "te-fp8-1x128-f32", "te-fp8-128x128", "te-fp8-128x128-f32", "te-fp8-e5m2-1x128",
]  # fmt: skip


def oracle(x: np.ndarray, f: TEFloat8) -> tuple[np.ndarray, np.ndarray]:
    """(codes as bytes (R, K), stored scales) of finite float32 x."""
    rows, k = x.shape
    height, width = (rows, k) if f.per == "tensor" else (f.rows, f.cols)
    codes = np.empty((rows, k), np.uint8)
    scales = np.empty((-(-rows // height), k // width), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            amax = np.abs(x[at]).max()
            with np.errstate(divide="ignore", over="ignore"):
                factor = np.float32(MAX[f.element]) / amax
            factor = np.float32(1) if amax == 0 else min(factor, FLT_MAX)
            if f.per == "block" and f.pow2:
                factor = np.float32(2.0 ** (np.frexp(factor)[1] - 1)) if amax else np.float32(1)
            with np.errstate(over="ignore"):
                y = np.clip((x[at] * np.float32(factor)).astype(np.float32), -MAX[f.element], MAX[f.element])
            codes[at] = y.astype(CAST[f.element]).view(np.uint8)
            scales[i, j] = np.float32(1) / np.float32(factor)
    return codes, scales


def inputs(kind: str) -> Tensor:
    """(300, 384): rows are no multiple of 128."""
    x = torch.randn(300, 384)
    if kind == "outliers":
        x[5, 7] = 3e4
        x[200:] *= 1e-3
    if kind == "tiny":
        x *= 1e-38
    if kind == "zeros":
        x[:, :128] = 0
        x[128:256] = 0
    return x


@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_oracles(name: str, dtype: torch.dtype, kind: str) -> None:
    f, x = get_format(name), inputs(kind).to(dtype)
    assert isinstance(f, TEFloat8)
    e = f.encode(x)
    codes, scales = oracle(x.float().numpy(), f)
    assert e.scale is not None
    assert torch.equal(e.scale, torch.from_numpy(scales))
    assert torch.equal(e.codes.view(torch.uint8), torch.from_numpy(codes))
    steps = f.spread(e.scale, len(x)).repeat_interleave(384 // e.scale.shape[1], 1)
    assert torch.equal(f.decode(e, torch.float32), e.codes.float() * steps)


@pytest.mark.parametrize("name", ["te-fp8-tensor", "te-fp8-128x128"])
def test_transposing_codes_and_scales_is_encoding_the_transpose(name: str) -> None:
    """Square tiles and one scale: the column side needs no second encoding."""
    f, x = get_format(name), torch.randn(256, 384)
    e, t = f.encode(x), f.encode(x.t())
    assert e.scale is not None and t.scale is not None
    assert torch.equal(e.codes.t().contiguous().view(torch.uint8), t.codes.view(torch.uint8))
    assert torch.equal(e.scale.t(), t.scale)


@pytest.mark.parametrize("name", ["te-fp8-tensor", "te-fp8-e5m2-tensor", "te-fp8-1x128"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_visible(name: str, bad: float) -> None:
    f, x = get_format(name), torch.randn(4, 256)
    x[1, 3] = bad
    values = f.fake_quantize(x)
    assert values[1, 3].isnan()
    assert values[1, 130:].isfinite().all()


def test_a_factor_from_elsewhere_saturates() -> None:
    """What delayed scaling does: the factor of an earlier step, and a value above it."""
    f, x = get_format("te-fp8-tensor"), torch.tensor([[1.0, -100.0, 0.25, 0.5]])
    e = f.encode(x, Scales(torch.full((1, 1), 448.0)))
    assert torch.equal(f.decode(e, torch.float32), torch.tensor([[1.0, -1.0, 0.25, 0.5]]))
