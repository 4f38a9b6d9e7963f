"""`quantized_model_init`: a model whose linear layers hold codes, and float32 masters for the optimizer.

A prepared layer normally holds its weight in float32 or bf16 and encodes it in every step. Here it holds what the
encoding gives, the codes and scales that its GEMMs read (`GatheredWeight`), and a `Masters` holds the float32 weights:

    layer.weight.grad   is the master's: autograd accumulates there
    optimizer.step()    moves the masters, and then every layer takes the codes of its master anew
    state_dict()        of the masters is that of the float32 model, names and values

So training is that of the prepared float32 model, bit for bit. What it saves is the weights at rest in the model, and
encoding them more than once a step when there are micro-batches; not the masters, which are as large as ever. A model
in bf16 stays one: its layers take and give bf16, and their codes are those of the float32 masters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torchao.quantization import FqnToConfig

from aoquant.config import QATConfig
from aoquant.hybrid import HybridConfig
from aoquant.layers.qat import QATLinear
from aoquant.parallel.gather import encoded_sides, reads_values
from aoquant.parallel.gathered import GatheredWeight
from aoquant.quantize import quantize_

_PACKS = "_aoquant_packs"  # attribute of a master: what writes its codes into the layers
_LAYER = "_aoquant_layer"  # attribute of a packed weight: the name of its layer


class Masters(nn.Module):
    """The parameters and buffers of a model under the model's names, with float32 masters in place of packed weights.

    Give its `parameters()` to the optimizer, and its `state_dict()` to a checkpoint; loading one packs the weights
    again. `refresh()` does so after any other change of the masters; `restore()` gives the model its weights back,
    before convert. A packed weight and its master have one gradient, so `clip_grad_norm_` and `zero_grad()` take
    either's. A step of an optimizer that has packed weights of the model itself raises ValueError.
    """

    def __init__(self, model: nn.Module, layers: list[QATLinear]) -> None:
        super().__init__()
        self._layers, packed = layers, {}
        for layer in layers:
            if id(layer.weight) not in packed:
                packed[id(layer.weight)] = _pack(layer.weight)
        for name, p in model.named_parameters(remove_duplicate=False):
            _put(self, name, packed.get(id(p), p))
        for name, b in model.named_buffers(remove_duplicate=False):
            path, _, last = name.rpartition(".")
            _put(self, name, b, last not in model.get_submodule(path)._non_persistent_buffers_set)
        weights = {
            key: _packed(master, layer) for layer in layers for key, master in packed.items() if key == id(layer.weight)
        }
        for layer in layers:
            layer._parameters["weight"] = weights[id(layer.weight)]
        self.register_load_state_dict_post_hook(_refreshed)  # type: ignore[no-untyped-call]
        _watch_optimizers()

    def masters(self) -> Iterator[nn.Parameter]:
        """The float32 masters of packed weights."""
        return (p for p in self.parameters() if hasattr(p, _PACKS))

    def refresh(self) -> None:
        """Let every layer take the codes of its master."""
        for master in self.masters():
            getattr(master, _PACKS)()

    def restore(self) -> None:
        """Put the masters back into the layers as their weights, in float32."""
        by_weight = {id(getattr(m, _PACKS).keywords["weight"]): m for m in self.masters()}
        for layer in self._layers:
            layer._parameters["weight"] = by_weight[id(layer._parameters["weight"])]


def quantized_model_init(
    model: nn.Module, config: Any, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> Masters:
    """Prepare the linear layers of `model` in place as `quantize_` does, and pack their weights.

    config, filter_fn: as `quantize_` has them; a config that prepares.

    Returns:
        The masters, for the optimizer: `torch.optim.AdamW(masters.parameters())`.

    Raises:
        ValueError: as `quantize_`; or a layer reads the weight itself (a high-precision dgrad of the original, learned
            or held scales, a clipped straight-through), or is sharded. The model is prepared then, and nothing packed.
    """
    if not isinstance(config, QATConfig | HybridConfig | FqnToConfig):
        raise ValueError(
            f"quantized_model_init needs a config that prepares linear layers, such as QATConfig({config!r}), got {config!r}"
        )
    quantize_(model, config, filter_fn)
    layers = []
    for fqn, layer in model.named_modules():
        if not isinstance(layer, QATLinear):
            continue
        reason = "its weight is sharded: use quantized_all_gather" if isinstance(layer.weight, DTensor) else None
        if reason := reason or reads_values(layer.prepared.recipe):
            raise ValueError(f"{fqn or 'linear'}: quantized_model_init: {reason}: leave the layer out (filter_fn)")
        layers.append(layer)
    if not layers:
        raise ValueError("quantized_model_init: the config prepares no nn.Linear")
    return Masters(model, layers)


def _pack(weight: Tensor) -> nn.Parameter:
    """The master of a weight."""
    return nn.Parameter(weight.detach().float().clone(), requires_grad=weight.requires_grad)


def _packed(master: nn.Parameter, layer: QATLinear) -> nn.Parameter:
    """The packed weight that follows `master`."""
    recipe = layer.prepared.recipe
    with torch.no_grad():
        sides = encoded_sides(recipe, master.detach())
    assert sides is not None
    data = GatheredWeight(master.shape, layer.weight.dtype, recipe.key, sides.rows, sides.columns)
    weight = nn.Parameter(data, requires_grad=master.requires_grad)
    weight.master = master  # type: ignore[attr-defined]
    setattr(weight, _LAYER, layer.prepared.fqn)
    setattr(master, _PACKS, functools.partial(_repack, master=master, layer=layer, weight=weight))
    if master.requires_grad:
        weight.register_post_accumulate_grad_hook(functools.partial(_hand_over, master))
    return weight


@torch.no_grad()
def _repack(master: Tensor, layer: QATLinear, weight: Any) -> None:
    sides = encoded_sides(layer.prepared.recipe, master.detach())
    assert sides is not None
    weight.take_parts([t for e in sides if e is not None for t in e.tensors if t is not None])


def _hand_over(master: Tensor, weight: Tensor) -> None:
    """The gradient of a packed weight becomes its master's."""
    assert isinstance(weight, GatheredWeight) and weight.accumulated is not None
    grad, weight.accumulated = weight.accumulated.to(master.dtype), None
    master.grad = grad if master.grad is None else master.grad + grad


@functools.cache
def _watch_optimizers() -> None:
    """From now on, after a step of any optimizer, masters among its parameters are packed again. Before it, packed
    weights among them are refused: they would never move.
    """

    def refuses(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p, GatheredWeight) and (p.requires_grad or p.grad is not None):
                    raise ValueError(
                        f"{getattr(p, _LAYER, '') or 'linear'}: its weight is packed by quantized_model_init, and a step of this optimizer "
                        "would not move it: give the optimizer masters.parameters()"
                    )

    def packs(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if (pack := getattr(p, _PACKS, None)) is not None:
                    pack()

    register_optimizer_step_pre_hook(refuses)
    register_optimizer_step_post_hook(packs)


def _put(root: nn.Module, name: str, value: Tensor, persistent: bool = True) -> None:
    """Register a parameter or buffer under a name with dots. persistent: of a buffer."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value, persistent)


def _refreshed(masters: nn.Module, keys: Any) -> None:
    """After a state_dict was loaded."""
    assert isinstance(masters, Masters)
    masters.refresh()
