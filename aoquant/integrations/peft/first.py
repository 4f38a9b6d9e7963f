"""Adapters first, then prepare: peft's adapters on float layers become those that a prepared model is given.

`quantize_` prepares the layers with the adapters taken off (`planning/adapters.py`). A LoRA layer of aoquant's holds
what peft's holds, so that its class is all that changes; A, B, their optimizer and hooks stay.
"""

from collections.abc import Iterable
from typing import Any

from peft.tuners.lora.layer import Linear, ParamWrapper
from torch import nn

from aoquant._messages import warn
from aoquant.integrations.peft.layers import KEEP_BASE, QATLoraLinear, QATParamWrapper
from aoquant.linear.learned_scales import learned_scales
from aoquant.linear.prepared import PreparedModule
from aoquant.planning.changes import Change

_KINDS: dict[type, type] = {Linear: QATLoraLinear, ParamWrapper: QATParamWrapper}
_MERGE = "leave the layer out, or merge the adapters (merge_and_unload) and then prepare"


def why_not(model: nn.Module, change: Change, on: list[Any]) -> str | None:
    """Return why a layer of `model` cannot be prepared beneath the adapters `on` it, and what to do; or None."""
    if isinstance(change.module, PreparedModule):
        return "is part of an adapted layer: quantise or prepare the model first, and add adapters to it then"
    for adapter in on:
        cls = _KINDS.get(type(adapter))
        if cls is None or (cls is QATLoraLinear and len(on) > 1):
            kind = f"{type(adapter).__module__}.{type(adapter).__name__}"
            return f"its adapter is {kind}, and only plain LoRA has an exact meaning on a prepared layer: use LoraConfig, {_MERGE}"
        if adapter.merged:
            return "its adapter is merged into the float weight: call unmerge_adapter() first, or merge_and_unload() and then prepare"
        if "forward" in vars(adapter):
            return "the forward of its adapter is replaced on the instance, so a prepared one would never run: remove the replacement first"
        if cls is QATLoraLinear and (reason := _option(model, change, adapter)) is not None:
            return f"{reason}; {_MERGE}"
    return None


def _option(model: nn.Module, change: Change, adapter: Linear) -> str | None:
    """Return which option of a LoRA adapter has no exact meaning on a prepared layer."""
    if (known := change.layer) is not None and known.transposed:
        return f"adapters on a quantised {known.plain.__name__} are not supported: leave it out of target_modules, or out of quantize_"
    configs: dict[str, Any] = {}
    for module in model.modules():
        configs |= vars(module).get("peft_config") or {}
    prepared = object.__new__(QATLoraLinear)
    prepared.__dict__ = vars(adapter)
    for name in adapter.lora_A:
        if name not in configs:
            return f"nothing here says which LoraConfig its adapter {name} has: give quantize_ the whole model that peft made"
        if (reason := prepared.why_not(configs[name])) is not None:
            return reason
        start = configs[name].init_lora_weights
        if change.target.recipe.weight_scales != "dynamic" and start not in KEEP_BASE:
            return f"init_lora_weights={start!r} has changed the base weight, of which its held scales would be made: use True or 'gaussian'"
    return None


def adopt(model: nn.Module, adapted: Iterable[list[Any]]) -> None:
    """Make adapters, layer by layer, those of a prepared model, and freeze its learned scales, as peft does."""
    for on in adapted:
        for adapter in on:
            adapter.__class__ = _KINDS[type(adapter)]
    trained = (
        (name, scale) for name, scale in learned_scales(model).items() if "modules_to_save" not in name.split(".")
    )
    scales = {name: scale for name, scale in trained if scale.requires_grad}
    for scale in scales.values():
        scale.requires_grad_(False)
    tell_frozen(list(scales))


def tell_frozen(scales: list[str]) -> None:
    """Warn of learned scales that do not train beside adapters."""
    if scales:
        warn(
            f"peft froze {len(scales)} learned scales ({scales[0]}, ...), as all that is no adapter: they keep their values; to train "
            "them too, call requires_grad_(True) on them, and keep the base's state_dict, as peft saves adapters alone"
        )
