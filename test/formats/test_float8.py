"""float8: what `test_torchao.py` cannot ask of torchao, which stores NaN for rows of zeros. Tolerance 0."""

import ml_dtypes
import numpy as np
import pytest
import torch
from support.golden_inputs import data_set

from aoquant.formats import Scales, get_format
from aoquant.formats.elements import ELEMENTS, FLOAT8
from aoquant.formats.scales import reciprocal

NAMES = ["fp8-row", "fp8-tensor", "fp8-e5m2-row", "fp8-e5m2-tensor"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_ml_dtypes_of_the_quotient(name: str, dtype: torch.dtype) -> None:
    """An oracle without torch's casts: numpy divides, ml_dtypes rounds."""
    fmt = get_format(name)
    numpy_type = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt.element]
    limit = np.float32(ELEMENTS[fmt.element].largest)
    for data in ("weights", "heavy", "normal"):
        x = data_set(data, 24, 256, dtype)
        e = fmt.encode(x)
        assert e.scale is not None
        amax = x.abs().amax(1, keepdim=True) if fmt.per == "row" else x.abs().amax().reshape(1, 1)
        scale = (amax.float() * reciprocal(float(limit))).to(dtype).float()
        assert torch.equal(e.scale, scale)
        codes = np.clip(x.float().numpy() / scale.numpy(), -limit, limit).astype(numpy_type).view(np.uint8)
        assert torch.equal(e.codes.view(torch.uint8), torch.from_numpy(codes))


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_are_zeros_where_torchao_stores_nan(name: str) -> None:
    from support.torchao_oracle import torchao_encode

    fmt = get_format(name)
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[1] = -0.0
    if fmt.per == "row":
        x[2] = 1.0
    e = fmt.encode(x)
    assert torch.equal(fmt.decode(e, torch.bfloat16), x)
    assert (e.codes[:2].view(torch.uint8) == 0).all()
    theirs = torchao_encode(fmt, x)
    assert theirs.codes[:2].float().isnan().all()
    if fmt.per == "row":
        assert torch.equal(e.codes[2].float(), theirs.codes[2].float())


def test_float16_scales_that_underflow_become_zero_rows() -> None:
    """absmax / 448 below float16's smallest subnormal is 0: torchao divides by it and clips every value to 448."""
    fmt = get_format("fp8-row")
    x = torch.full((1, 16), 1e-5, dtype=torch.float16)
    e = fmt.encode(x)
    assert (e.codes.view(torch.uint8) == 0).all()
    assert fmt.floored(e).all()
    assert (fmt.decode(e, torch.float16) == 0).all()


@pytest.mark.parametrize("element", FLOAT8)
def test_saturated_means_clipped(element: str) -> None:
    """bfloat16 rounds the scale, so a row's largest value may lie above the largest code."""
    fmt = get_format("fp8-row" if element == "e4m3" else "fp8-e5m2-row")
    x = data_set("normal", 24, 256, torch.bfloat16)
    e = fmt.encode(x)
    assert e.scale is not None
    assert not fmt.saturated(x, e).any()  # half a bf16 step is less than half a float8 step
    assert fmt.saturated(x * 2, e).any()
    edge = {"e4m3": 464.0, "e5m2": 61440.0}[element]  # half a step above the largest code
    x = torch.tensor([[edge, edge * (1 + 2.0**-20)]])
    e = fmt.hold(x, Scales(torch.ones(1, 1)))
    assert fmt.saturated(x, e).tolist() == [[False, True]]
