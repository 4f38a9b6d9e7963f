"""The contract "ggml": block sums of integers, exact, in any dtype of the model."""

from __future__ import annotations

import pytest
import torch

from aoquant import PackedWeightConfig, QATConfig, quantize_
from aoquant.formats import get_format


@pytest.mark.parametrize("weight", ["q4_0", "q4_1", "q8_0"])
def test_against_float64(weight: str) -> None:
    """The exact sum of the decoded products, within float32's rounding of as many additions."""
    torch.manual_seed(0)
    x, w = torch.randn(5, 256), torch.randn(48, 256)
    layer = torch.nn.Sequential(torch.nn.Linear(256, 48, bias=False))
    layer[0].weight.data = w
    quantize_(layer, PackedWeightConfig(weight, "q8_0-x86", "ggml"))
    xq, wq = (get_format(n).fake_quantize(t).double() for n, t in (("q8_0-x86", x), (weight, w)))
    bound = (xq.abs() @ wq.abs().t()) * 2.0**-21
    assert ((layer(x).double() - xq @ wq.t()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["q8_0-x86", None])
def test_prepared_and_converted_are_equal_and_not_rounded_twice(activation: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64, dtype=dtype))
    quantize_(model, QATConfig(PackedWeightConfig("q4_0", activation, "ggml"), step="prepare"))
    x = torch.randn(2, 3, 128, dtype=dtype)
    y = model(x)
    w = get_format("q4_0").decode(model[0].encode_weight(), torch.float32)  # type: ignore[operator]
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y) and y.dtype == dtype
    if activation is None:
        wanted = (x.float().reshape(-1, 128) @ w.t() + model[0].bias.float()).to(dtype)
        assert torch.equal(y.reshape(-1, 64), wanted)
