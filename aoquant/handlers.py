"""torchao's own `quantize_` takes our configs through these handlers.

A handler sees one module and no name, so its errors give shapes only, and what was done before an error stays done; the numerics
are those of `aoquant.quantize_`. torchao's `QATConfig` refuses foreign bases in a closed chain of isinstance checks; its handler is
registered again, chained: our configs, and layers that we prepared, come to us, everything else goes where it went before.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.transform_module import _QUANTIZE_CONFIG_HANDLER, register_quantize_module_handler

from aoquant import config as configs
from aoquant.config import QATConfig, WeightConfig
from aoquant.formats import Format
from aoquant.linear import QATLinear
from aoquant.plan import plan_layer
from aoquant.quantize import apply

OWN_CONFIGS = tuple(
    c for c in vars(configs).values() if isinstance(c, type) and issubclass(c, WeightConfig) and c is not WeightConfig
)


def handle(module: nn.Module, config: Any, *, parameter_name: str = "weight") -> nn.Module:
    """Apply `config` to one linear layer, in place.

    Raises:
        ValueError: the layer cannot take the config.
    """
    if parameter_name == "bias" and isinstance(module, nn.Linear):
        return module  # HF, quantising on the fly with FqnToConfig, offers every parameter of a layer that a key names
    if parameter_name != "weight":
        raise ValueError(
            f"aoquant quantises the weight of a linear layer, not {parameter_name!r}: name the layer, not the parameter"
        )
    if not isinstance(module, nn.Linear):
        raise ValueError(f"aoquant quantises nn.Linear, got {type(module).__name__}: choose layers with filter_fn")
    if type(module) not in (nn.Linear, QATLinear):
        warnings.warn(
            f"{type(module).__name__} is left alone: it subclasses nn.Linear and its forward may differ", stacklevel=2
        )
        return module
    step = plan_layer(module, config)
    if step is not None and step.kind == "prepare" and not module.weight.requires_grad:
        warnings.warn(
            "a layer with a frozen weight was prepared and will not train: right for adapters; HF's TorchAoConfig(QATConfig) "
            "freezes every weight, so load the model first and call aoquant.quantize_(model, QATConfig(...)) on it",
            stacklevel=2,
        )
    return module if step is None else apply(step)


def register() -> None:
    """Enter the handlers into torchao's table."""
    for config_type in (QATConfig, *OWN_CONFIGS):
        register_quantize_module_handler(config_type)(handle)
    before = _QUANTIZE_CONFIG_HANDLER[TorchaoQATConfig]

    def chained(module: nn.Module, config: Any) -> nn.Module:
        own = isinstance(config.base_config, WeightConfig) or any(
            isinstance(c, Format | str) for c in (config.weight_config, config.activation_config)
        )
        return handle(module, config) if own or isinstance(module, QATLinear) else before(module, config)

    register_quantize_module_handler(TorchaoQATConfig)(chained)
