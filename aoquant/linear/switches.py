"""Fake quantisation of a whole model: off and on, and the plain modules back."""

from torch import nn

from aoquant._messages import check_model
from aoquant.distributed import fsdp
from aoquant.distributed.gathered import PACKED, GatheredWeight
from aoquant.kv import hook
from aoquant.linear import fast_path, replaced
from aoquant.linear.mastered import Mastered
from aoquant.linear.prepared import PreparedModule, QATLayer


def set_fake_quant(model: nn.Module, enabled: bool) -> int:
    """Switch fake quantisation of every prepared layer and KV cache in `model`; returns how many there are.

    Raises:
        ValueError: no layer is prepared.
    """
    check_model(model)
    layers = [m for m in model.modules() if isinstance(m, PreparedModule)]
    caches = [m.kv_quant for m in hook.quantised(model).values() if not m.kv_quant.converted]
    if not layers and not caches:
        raise ValueError(
            f"the {type(model).__name__} has no prepared layer: call quantize_(model, QATConfig(base, step='prepare')) before "
            "training, or aoquant.unpack_(model) where it is packed"
        )
    for layer in (*layers, *caches):
        layer.fake_quant = enabled
    return len(layers) + len(caches)


def unprepare(model: nn.Module) -> int:
    """Make every prepared layer of `model` a plain nn.Linear or nn.Embedding again, in place, and every prepared KV
    cache a plain one; returns their number.

    Weights, state_dict, hooks, attributes, mode and tying stay as they are; the weights keep their training.

    Raises:
        ValueError: no layer is prepared, or one has an adapter, or is packed by `quantized_model_init`.
    """
    check_model(model)
    fsdp.reshard(model)
    for name, module in model.named_modules():  # peft's tuner layers
        if isinstance(getattr(module, "base_layer", None), PreparedModule) and hasattr(module, "merged"):
            raise ValueError(
                f"{name}.base_layer: is under an adapter that trains the merged weight: call merge_and_unload(), or unload(), first"
            )
    for name, module in model.named_modules():
        gathered = isinstance(module, QATLayer) and isinstance(module.weight, GatheredWeight)
        if gathered or isinstance(module, Mastered):
            raise ValueError(f"{name or 'linear'}: {PACKED}")
    layers = [m for m in model.modules() if isinstance(m, PreparedModule)]
    caches = [m for m in hook.quantised(model).values() if not m.kv_quant.converted]
    if not layers and not caches:
        raise ValueError(
            f"nothing to unprepare: no layer of the {type(model).__name__} is prepared; aoquant.unpack_(model) prepares packed ones"
        )
    fsdp.gather_values(model)
    for layer in layers:
        layer.unprepare()
    for module in caches:
        hook.detach(module)
    fast_path.sync(model)
    replaced.forget(model)
    return len(layers) + len(caches)
