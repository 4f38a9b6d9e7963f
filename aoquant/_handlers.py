"""torchao's own `quantize_` takes our configs through these handlers.

A handler sees one module and no name: its errors give shapes only, layers that were changed before an error stay
changed, and nothing that concerns the whole model is seen. torchao's `QATConfig` refuses configs that are not
torchao's, so its handler is registered again, chained: our configs, and layers that we prepared, come to us.
"""

import weakref
from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.transform_module import _QUANTIZE_CONFIG_HANDLER, register_quantize_module_handler

from aoquant import config as configs
from aoquant._messages import advice, warn
from aoquant.config import QATConfig, WeightConfig
from aoquant.formats import Format, Operand
from aoquant.hybrid import HybridConfig
from aoquant.linear.kinds import is_layer, is_linear, kind_of, why_no_kind
from aoquant.linear.prepared import QATLayer
from aoquant.linear.tensor import same_bits
from aoquant.planning.plan import plan_layer
from aoquant.quantize import apply

OWN_CONFIGS = tuple(
    c for c in vars(configs).values() if isinstance(c, type) and issubclass(c, WeightConfig) and c is not WeightConfig
)


# the packed weight that a float one became, for as long as another layer still holds the float one
_packed: MutableMapping[Tensor, weakref.ref[Any]] = WeakTensorKeyDictionary()


def handle(module: nn.Module, config: Any, *, parameter_name: str = "weight") -> nn.Module:
    """Apply `config` to one linear layer or embedding, in place.

    Raises:
        ValueError: the layer cannot take the config.
    """
    if parameter_name == "bias" and is_linear(module):
        return module  # HF, quantising on the fly with FqnToConfig, offers every parameter of a layer that a key names
    if parameter_name != "weight":
        raise ValueError(
            f"aoquant quantises the weight of a layer, not {parameter_name!r}: name the layer, not the parameter"
        )
    if not is_layer(module):
        raise ValueError(
            f"aoquant quantises nn.Linear and nn.Embedding, got {type(module).__name__}: "
            f"choose layers with {advice('filter_fn', '--layers NAME')}"
        )
    if kind_of(module) is None:
        warn(f"{type(module).__name__} is left alone: {why_no_kind(module)}")
        return module
    change = plan_layer(module, config)
    if change is None:
        return module
    if change.step == "prepare":
        if not change.module.weight.requires_grad:
            warn(
                "a layer with a frozen weight was prepared and will not train: right for adapters; to train it, call "
                "weight.requires_grad_() before"
            )
        return apply(change)
    weight = change.module.weight
    earlier = _packed[weight]() if weight in _packed else None
    apply(change)
    if earlier is not None and same_bits(earlier, change.module.weight):
        module.weight = earlier
    else:
        _packed[weight] = weakref.ref(module.weight)
    return module


def register() -> None:
    """Enter the handlers into torchao's table."""
    for config_type in (QATConfig, HybridConfig, *OWN_CONFIGS):
        register_quantize_module_handler(config_type)(handle)
    before = _QUANTIZE_CONFIG_HANDLER[TorchaoQATConfig]

    def chained(module: nn.Module, config: Any) -> nn.Module:
        own = isinstance(config.base_config, WeightConfig) or any(
            isinstance(c, Format | Operand | str) for c in (config.weight_config, config.activation_config)
        )
        return handle(module, config) if own or isinstance(module, QATLayer) else before(module, config)

    register_quantize_module_handler(TorchaoQATConfig)(chained)
