"""torch's fused encoder layer reads weights directly in eval: it is kept off where layers are prepared, and verify sees
such a path.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from aoquant import NVFP4WeightConfig, QATConfig, quantize_, unprepare, verify

pytestmark = pytest.mark.filterwarnings("ignore:.*(left alone|stay float|nested tensors).*")


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()


def forms() -> tuple[nn.TransformerEncoder, nn.TransformerEncoder]:
    model = encoder()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    return model, converted


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_prepared_equals_converted_in_eval(padded: bool) -> None:
    prepared, converted = forms()
    x, mask = torch.randn(2, 8, 64), None
    if padded:
        mask = torch.zeros(2, 8, dtype=torch.bool)
        mask[0, 6:] = True
    with torch.no_grad():
        y = [m(x, src_key_padding_mask=mask) for m in (prepared, converted)]
        assert torch.equal(*y)
        assert not torch.allclose(y[0], encoder()(x, src_key_padding_mask=mask), atol=1e-4)  # and is quantised
    verify(prepared, converted, {"src": x, "src_key_padding_mask": mask})


def test_verify_sees_what_only_a_forward_without_hooks_computes() -> None:
    prepared, converted = forms()
    for layer in prepared.layers:
        layer.activation_relu_or_gelu = 1  # back on the fused path
    with pytest.raises(ValueError, match=r"1 of 5 row\(s\) are below inf dB:\n  \(model output\)"):
        verify(prepared, converted, torch.randn(2, 8, 64))


def test_the_fast_path_comes_back() -> None:
    plain, (prepared, converted) = encoder(), forms()
    unprepare(prepared)
    for model in (prepared, converted):
        assert [m.activation_relu_or_gelu for m in model.layers] == [m.activation_relu_or_gelu for m in plain.layers]
        assert model.use_nested_tensor == plain.use_nested_tensor
        assert not any("aoquant_fast_path" in vars(m) for m in model.modules())
