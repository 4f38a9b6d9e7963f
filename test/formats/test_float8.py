"""float8: what `test_torchao.py` cannot ask of torchao, which stores NaN for rows of zeros. Tolerance 0."""

import ml_dtypes
import numpy as np
import pytest
import torch
from support.golden_inputs import data_set
from torch import nn

from aoquant import HybridConfig, PackedWeightConfig, QATConfig, quantize_
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


POW2 = ["fp8-tensor-pow2", "fp8-e5m2-tensor-pow2", "fp8-row-pow2", "fp8-1x128-pow2", "fp8-128x128-pow2"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", POW2)
def test_scales_are_the_least_powers_of_two_that_do_not_clip(name: str, dtype: torch.dtype) -> None:
    """2^ceil(log2(absmax / max)), by frexp in float64; codes are ml_dtypes' of the exact quotient."""
    fmt = get_format(name)
    numpy_type = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt.element]
    limit = ELEMENTS[fmt.element].largest
    x = torch.randn(256, 256) * 2.0 ** torch.randint(-30, 30, (256, 1))
    x[3, :] = 0
    x[5] = torch.cat((torch.tensor([limit / 8]), torch.zeros(255)))  # a scale of 1/8 as it is
    x = x.to(dtype)
    rows, columns = {"row": (1, 256), "tensor": (256, 256), "block": (fmt.rows, fmt.cols)}[fmt.per]
    values = x.double().numpy()
    tiles = np.abs(values).reshape(256 // rows, rows, 256 // columns, columns).max((1, 3))
    fraction, exponent = np.frexp(tiles / limit)
    scale = np.where(tiles == 0, 0, 2.0 ** np.where(fraction == 0.5, exponent - 1, exponent))
    e = fmt.encode(x)
    assert e.scale is not None
    assert np.array_equal(e.scale.double().numpy(), scale)
    steps = np.where(scale == 0, 1, scale).repeat(rows, 0).repeat(columns, 1)
    codes = (values / steps).astype(np.float32).astype(numpy_type).view(np.uint8)
    assert torch.equal(e.codes.view(torch.uint8), torch.where(x == 0, 0, torch.from_numpy(codes)))


@pytest.mark.parametrize("name", ["fp8-tensor-pow2", "fp8-e5m2-tensor-pow2", "fp8-row-pow2"])
def test_powers_of_two_are_torchaos(name: str) -> None:
    """float8 training's round_scales_to_power_of_2; in bfloat16, since its float32 log2 rounds beside powers of two."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    fmt = get_format(name)
    how = ScalingGranularity.TENSORWISE if fmt.per == "tensor" else ScalingGranularity.AXISWISE
    for data in ("weights", "heavy", "normal"):
        x = data_set(data, 24, 256, torch.bfloat16)
        options = {"scaling_granularity": how, "axiswise_dim": -1, "round_scales_to_power_of_2": True}
        factor = tensor_to_scale(x, FLOAT8[fmt.element], **options)
        e = fmt.encode(x)
        assert e.scale is not None
        assert torch.equal(e.scale, 1 / factor.reshape(e.scale.shape))
        assert torch.equal(e.codes.float(), to_fp8_saturated(x.float() * factor, FLOAT8[fmt.element]).float())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_powers_of_two_show_what_is_not_finite(bad: float) -> None:
    x = torch.randn(4, 64)
    x[1, 3] = bad
    values = get_format("fp8-row-pow2").fake_quantize(x)
    assert values[1, 3].isnan() and values[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("contract", ["aoquant", "fp8_scaled_mm"])
def test_a_prepared_layer_with_powers_of_two_is_the_converted_one(contract: str) -> None:
    name = "fp8-tensor-pow2"
    model, x = nn.Sequential(nn.Linear(128, 64)), torch.randn(16, 128)
    quantize_(model, QATConfig(PackedWeightConfig(name, name, contract), backward=HybridConfig.bwd(name)))
    y = model(x)
    y.square().sum().backward()
    assert model[0].weight.grad is not None and model[0].weight.grad.isfinite().all()
    quantize_(model, QATConfig(step="convert"))
    assert model[0].weight.recipe.fprop_weight.name == name
    assert torch.equal(model(x), y)
