"""Formats and the transform that backward adds, against their definitions written again in NumPy; zero tolerance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import numpy_oracle
from torch import Tensor

from aoquant import QATConfig, get_format, quantize_
from aoquant.formats import Encoded, layout
from aoquant.formats.operand import as_operand
from aoquant.transforms import RoundedHadamard

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def inputs(kind: str, dtype: torch.dtype) -> Tensor:
    """(100, 96): rows are no multiple of 32."""
    x = torch.randn(100, 96, generator=torch.Generator().manual_seed(2))
    if kind == "outliers":
        x[5, 7], x[64:] = 3e4, x[64:] * 1e-3
    if kind == "tiny":
        x *= 1e-37
    if kind == "zeros":
        x[:32], x[:, 40:] = 0, 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny", "zeros"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_9_square_mx_bytes(element: str, kind: str, dtype: str) -> None:
    f = get_format("mxfp8-32x32" if element == "e4m3" else "mxfp8-e5m2-32x32")
    x = inputs(kind, DTYPES[dtype])
    e = f.encode(x)
    padded = np.zeros((128, 96), np.float32)
    padded[:100] = x.float().numpy()
    tiles = padded.reshape(4, 32, 3, 32).swapaxes(1, 2).reshape(12, 1024)
    byte, values = numpy_oracle.mx(tiles, element, "rceil")
    codes = values.reshape(4, 3, 32, 32).swapaxes(1, 2).reshape(128, 96)[:100]
    assert e.scale is not None and e.scale.shape == (4, 3)
    assert np.array_equal(e.scale.view(torch.uint8).numpy(), byte.reshape(4, 3))
    assert np.array_equal(e.codes.float().numpy(), codes)
    power = np.repeat(np.repeat(2.0 ** (byte.reshape(4, 3) - 127.0), 32, 0), 32, 1)[:100]
    assert np.array_equal(f.decode(e, torch.float32).double().numpy(), codes * power)


def test_9_square_mx_keeps_nan_and_inf_in_their_tile() -> None:
    f, x = get_format("mxfp8-32x32"), inputs("normal", torch.float32)
    x[3, 3], x[70, 70] = torch.nan, torch.inf
    y = f.fake_quantize(x)
    bad = ~y.isfinite()
    assert bad[3, 3] and bad[70, 70] and not bad[32:64].any() and not bad[:, 32:64].any()


def hadamard(x: np.ndarray) -> np.ndarray:
    """Blocks of 16 of (R, K) times diag(s) H16 / 4, H by its definition, in float64."""
    h = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
    return ((x.reshape(-1, 16) * np.array(SIGNS)) @ h / 4).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["te-nvfp4", "mxfp8"])
def test_9_the_hadamard_transform_rounds_before_it_quantises(name: str, dtype: str) -> None:
    operand, x = as_operand(get_format(f"te-hadamard16-sd7e8+{name}")), inputs("normal", DTYPES[dtype])
    # integers: every order of sums is exact, and the definition has one answer
    x = (x.float() * 8).round().to(x.dtype)
    rotated = torch.from_numpy(hadamard(x.double().numpy())).float().to(x.dtype)
    e, wanted = operand.encode(x), get_format(name).encode(rotated)
    assert torch.equal(e.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert e.scale is not None and wanted.scale is not None
    assert torch.equal(e.scale.view(torch.uint8), wanted.scale.view(torch.uint8))
    if e.outer is not None and wanted.outer is not None:
        assert torch.equal(e.outer, wanted.outer) and e.outer.item() == rotated.float().abs().max()


def test_9_it_is_another_transform_than_ours() -> None:
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    ours, theirs = (get_format(f"{n}hadamard16-sd7e8+te-nvfp4").encode(x).codes for n in ("", "te-"))
    apart = (layout.unpack(ours, 4, 256) != layout.unpack(theirs, 4, 256)).float().mean()
    assert 1e-3 < apart < 0.05, "rounding to bf16 first moves about one code in a hundred"


def test_it_cancels_in_a_product() -> None:
    x, w = (torch.randn(8, 64, dtype=torch.float32) for _ in range(2))
    t = RoundedHadamard()
    torch.testing.assert_close(t.apply(x, False, None) @ t.apply(w, False, None).t(), x @ w.t())
    assert t.name == "te-hadamard16-sd7e8"
    with pytest.raises(ValueError, match="te-hadamard transforms 16 values, got size = 32"):
        RoundedHadamard(32)


def test_it_is_refused_before_the_forward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(ValueError, match="stands before both operands of wgrad, not of forward"):
        quantize_(model, QATConfig(weight_config="te-hadamard16-sd7e8+mxfp8"))


def test_9_a_tile_on_the_floor_holds_data_under_the_smallest_scale() -> None:
    codes, bytes = torch.zeros(64, 96), torch.tensor([[0, 0, 1], [0, 3, 0]], dtype=torch.uint8)
    codes[5, 7] = codes[33, 95] = codes[63, 40] = codes[0, 90] = 1.0
    e = Encoded(codes.to(torch.float8_e4m3fn), bytes.view(torch.float8_e8m0fnu), None, None, 96)
    assert get_format("mxfp8-32x32").floored(e).tolist() == [[True, False, False], [False, False, True]]
