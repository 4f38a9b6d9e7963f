"""A layer some of whose tensors are on meta, as offloading leaves them, is refused: its result would be memory that
nobody wrote.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from aoquant import Int8WeightConfig, QATConfig, calibrate, quantize_, recipes

HELD = QATConfig(Int8WeightConfig(activation="int8-tensor-static"), scales="static")
CONFIGS: dict[str, Any] = {name: QATConfig(name) for name in ("nvfp4", "int4-g32", "int8", "gguf-q4_0", "nvfp4-wush")}
CONFIGS |= {"held": HELD, "nvfp4-training": recipes.get_recipe("nvfp4-training").prepare()}


def tensors(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the module and the name of each parameter and buffer."""
    named = [(module, name) for module in model.modules() for name in (*module._parameters, *module._buffers)]
    return [(module, name) for module, name in named if getattr(module, name) is not None]


def run(model: nn.Module, x: torch.Tensor, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        y = model(x)
    if y.requires_grad:
        y.float().sum().backward()


@pytest.mark.parametrize("step", ["prepared", "converted"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_tensor_on_meta_is_refused(name: str, step: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32)).bfloat16(), torch.randn(4, 64).bfloat16()
    quantize_(model, CONFIGS[name])
    if name in ("held", "nvfp4-wush"):
        calibrate(model, [x])
    if step == "converted":
        quantize_(model, QATConfig(step="convert"))
    run(model, x, True)
    for module, attribute in tensors(model):
        t = getattr(module, attribute)
        away = t.to("meta")
        setattr(module, attribute, nn.Parameter(away, t.requires_grad) if isinstance(t, nn.Parameter) else away)
        for gradients in (True,) if attribute == "backward_random" else (False, True):  # which backward alone reads
            with pytest.raises(ValueError, match="meta"):
                run(model, x, gradients)
        setattr(module, attribute, t)
    run(model, x, True)
