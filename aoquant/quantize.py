"""`quantize_`: plan the whole model, check it, apply, and put everything back if anything fails.

Prepare swaps a layer's class in place; convert replaces its weight and swaps the class back. In both cases the module object, its
name, hooks, attributes, mode and bias stay what they were.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.config import QATConfig
from aoquant.formats import Scales
from aoquant.linear import Prepared, QATLinear
from aoquant.plan import Filter, Step, plan
from aoquant.progress import track


def quantize_(
    model: nn.Module, config: Any, filter_fn: Filter | None = None, device: torch.device | str | None = None
) -> None:
    """Prepare, convert or quantise the linear layers of `model` in place.

    config: a `QATConfig`, or a PTQ config of torchao's or ours (quantises at once), or torchao's `FqnToConfig` of either, whose
        keys are layer names, "re:" patterns and "_default".
    filter_fn: (module, fully qualified name) -> bool; by default every nn.Linear but the output head.
    device: where weights are quantised, and where the model is afterwards.

    Raises:
        ValueError: naming every layer that cannot take its config. The model is unchanged then, and after any other error too.
    """
    steps = plan(model, config, filter_fn)
    before = [
        (s.module, s.module.__class__, dict(vars(s.module)), dict(s.module._parameters), dict(s.module._buffers))
        for s in steps
    ]
    packed: dict[int, nn.Parameter] = {}  # tied weights are packed once and stay tied
    try:
        for step in track(steps, steps[0].kind):
            apply(step, packed, device)
    except BaseException:
        for module, cls, attributes, parameters, buffers in before:
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
        raise
    if device is not None:
        model.to(device)


def apply(
    step: Step, packed: dict[int, nn.Parameter] | None = None, device: torch.device | str | None = None
) -> nn.Linear:
    """Carry out one layer's step. packed: weights done so far, by the id of the original.

    A converted layer remembers its PTQ config as `aoquant_config`: torchao's tensors do not hold all of it, and checkpoints name it.
    """
    module = step.module
    if step.kind == "prepare":
        return QATLinear.prepare(module, Prepared(step.target.recipe, step.config, step.fqn))
    packed = {} if packed is None else packed
    weight = module.weight
    if id(weight) not in packed:
        packed[id(weight)] = nn.Parameter(_pack(step, device), requires_grad=False)
    config = step.config
    if isinstance(module, QATLinear):
        if isinstance(config, QATConfig) and config.base_config is None:
            config = module.prepared.config
        module = module.unprepare()
    module.weight = packed[id(weight)]
    vars(module)["aoquant_config"] = config.base_config if isinstance(config, QATConfig) else config
    module.extra_repr = functools.partial(_extra_repr, module)  # type: ignore[method-assign]  # a bound method cannot be pickled
    return module


@torch.no_grad()
def _pack(step: Step, device: torch.device | str | None) -> Tensor:
    """The deployed weight, with the scales that the layer holds, if it holds any."""
    module, target, weight, scales = step.module, step.target, step.module.weight.detach(), None
    if device is not None:
        weight = weight.to(device)
    if isinstance(module, QATLinear):
        if (input_scales := module.deployed_input_scales()) is not None:
            assert target.fix is not None
            target = target.fix(input_scales)
        if (scales := module.held_scales("weight")) is not None:
            scales = Scales(*(t if t is None else t.to(weight.device) for t in scales))
    return target.build(target.recipe.fprop_weight.encode(weight, scales), weight)


def _extra_repr(self: nn.Linear) -> str:
    describe = getattr(self.weight, "_quantization_type", None)
    kind = type(self.weight.data).__name__ if describe is None else f"{type(self.weight).__name__}({describe()})"
    return (
        f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, weight={kind}"
    )
