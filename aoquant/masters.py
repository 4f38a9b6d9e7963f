"""`quantized_model_init`: a model whose layers and experts multiply codes, and float32 masters for the optimizer.

A layer holds the codes and scales of a float32 master (`linear/mastered.py`), which is the parameter; after
`optimizer.step()` every layer takes the codes of its master anew. Training is that of the prepared float32 model, bit
for bit, without encoding weights more than once a step, and without a second copy of them in bf16. A model in bf16
stays one: its layers take and give bf16.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torchao.quantization import FqnToConfig

from aoquant._messages import check_model
from aoquant.config import QATConfig
from aoquant.distributed.gathered import GatheredWeight
from aoquant.experts.mastered_experts import MasteredExperts
from aoquant.experts.prepared import QATExperts
from aoquant.hybrid import HybridConfig
from aoquant.linear.kinds import kind_of
from aoquant.linear.mastered import MasterCodes, Mastered, codes_of, hold_codes, release_codes
from aoquant.linear.prepared import Prepared, PreparedModule, QATLinear
from aoquant.linear.weight_codes import reads_values
from aoquant.quantize import quantize_


class Masters(nn.Module):
    """The parameters and buffers of a model under the model's names: float32 masters, and what was not packed. They are
    those that the model has at any time, also after `model.to("cuda")` gave it other ones.

    Give its `parameters()` to the optimizer, and its `state_dict()` to a checkpoint; loading one packs the weights
    again. The model's own serve as well. `refresh()` makes the codes after a change
    that PyTorch does not count, such as `p.data.mul_(2)`; `restore()` gives the model its weights back, before convert.
    """

    def __init__(self, model: nn.Module, layers: list[QATLinear | QATExperts]) -> None:
        super().__init__()
        self._layers = layers
        done: dict[int, MasterCodes] = {}

        def packed(layer: QATLinear | QATExperts, name: str, prepared: Prepared, turned: bool) -> MasterCodes:
            weight = layer._parameters[name]
            assert isinstance(weight, nn.Parameter)
            if id(weight) not in done:
                master = weight  # a float32 weight is its own
                if weight.dtype != torch.float32:
                    master = nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad)
                codes = MasterCodes(master, prepared.recipe, prepared.fqn, turned, weight.dtype, layer._buffers)
                done[id(weight)] = codes
            return done[id(weight)]

        for layer in layers:
            if isinstance(layer, QATExperts):
                turned = layer.is_transposed
                hold_codes(layer, {n: packed(layer, n, p, turned) for n, p in layer.stacks.items()}, MasteredExperts)
            else:
                kind = kind_of(layer)
                made = packed(layer, "weight", layer.prepared, kind is not None and kind.transposed)
                hold_codes(layer, {"weight": made})
        _mirror(self, model, {})
        self.register_load_state_dict_pre_hook(_refuse_assign)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]
        _watch_optimizers()

    def masters(self) -> Iterator[nn.Parameter]:
        """Return the float32 masters of packed weights."""
        return (p for p in self.parameters() if codes_of(p) is not None)

    def refresh(self) -> None:
        """Let every layer take the codes of its master."""
        for codes in _codes(self.parameters()):
            codes.refresh()

    def restore(self) -> None:
        """Make the masters the weights of the layers, in float32."""
        for codes in _codes(self.parameters()):
            codes.end()
        for layer in self._layers:
            release_codes(layer)


def quantized_model_init(
    model: nn.Module, config: Any, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> Masters:
    """Prepare the linear layers and stacked experts of `model` in place as `quantize_` does, and pack their weights.

    Make the optimizer, and wrap the model in DDP, afterwards: masters are new parameters unless the model is float32.

    config, filter_fn: as `quantize_` has them; a config that prepares.

    Returns:
        The masters, for the optimizer: `torch.optim.AdamW(masters.parameters())`.

    Raises:
        ValueError: as `quantize_`; or a layer reads the weight itself (a high-precision dgrad of the original, learned
            or held scales, a clipped straight-through), or is sharded; or the config prepares embeddings. The model is
            prepared then, and nothing packed.
    """
    if not isinstance(config, QATConfig | HybridConfig | FqnToConfig):
        raise ValueError(
            f"quantized_model_init needs a config that prepares linear layers, such as QATConfig({config!r}), got {config!r}"
        )
    check_model(model)
    before = {m for m in model.modules() if isinstance(m, PreparedModule)}
    quantize_(model, config, filter_fn)
    layers: list[QATLinear | QATExperts] = []
    for fqn, layer in model.named_modules():
        reasons: dict[str, str | None] = {}
        if isinstance(layer, QATLinear):
            layers.append(layer)
            reasons[fqn] = _why_not(layer, "weight", layer.prepared)
        elif isinstance(layer, QATExperts):
            layers.append(layer)
            reasons = {p.fqn: _why_not(layer, name, p) for name, p in layer.stacks.items()}
        elif isinstance(layer, PreparedModule) and layer not in before:
            name = type(layer).plain.__name__  # type: ignore[attr-defined]
            reasons[fqn] = f"packs the weights of linear layers and stacked experts, and this one is of class {name}"
        for name, reason in reasons.items():
            if reason:
                raise ValueError(f"{name or 'linear'}: quantized_model_init: {reason}: leave the layer out (filter_fn)")
    if not layers:
        raise ValueError("quantized_model_init: the config prepares no nn.Linear and no stacked experts")
    return Masters(model, layers)


def _why_not(layer: QATLinear | QATExperts, name: str, prepared: Prepared) -> str | None:
    if isinstance(layer, Mastered):
        return "an earlier call packed its weight: give one call all configs, as FqnToConfig"
    weight = layer._parameters.get(name)
    if isinstance(weight, DTensor):
        return "its weight is sharded: use quantized_all_gather"
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed in every call (an adapter, a parametrisation)"
    if prepared.recipe.history and not weight.requires_grad:
        return (
            "its weight is frozen, and the delayed scale of codes moves only when they are written: use amax_history=0"
        )
    return reads_values(prepared.recipe)


@functools.cache
def _watch_optimizers() -> None:
    """From now on, after a step of any optimizer, masters among its parameters are packed again: a fused one writes
    without a trace. Before a step, codes among its parameters are refused: they would never move.
    """

    def refuses(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p, GatheredWeight) and p.master is not None and (p.requires_grad or p.grad is not None):
                    codes = codes_of(p.master)
                    raise ValueError(
                        f"{(codes.fqn if codes else '') or 'linear'}: its weight is packed by quantized_model_init, and a step of this optimizer "
                        "would not move it: give the optimizer masters.parameters()"
                    )

    def packs(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for codes in _codes(group["params"]):
                codes.refresh()

    register_optimizer_step_pre_hook(refuses)
    register_optimizer_step_post_hook(packs)


def _mirror(view: nn.Module, module: nn.Module, made: dict[nn.Module, nn.Module]) -> None:
    """Let `view` have the parameters and buffers of `module` and of all in it. made: views by module."""
    made[module] = view
    # the dictionaries themselves: a cast or a move puts other buffers into them
    view._parameters, view._buffers = module._parameters, module._buffers
    view._non_persistent_buffers_set = module._non_persistent_buffers_set
    for name, child in module._modules.items():
        if child is not None:
            if child not in made:
                _mirror(nn.Module(), child, made)
            view._modules[name] = made[child]


def _refuse_assign(masters: Masters, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
    packed = [layer for layer in masters._layers if isinstance(layer, Mastered)]
    if packed and metadata.get("assign_to_params_buffers"):
        fqn = next(iter(packed[0].codes.values())).fqn or "linear"
        raise ValueError(
            f"{fqn}: load_state_dict(assign=True) would put another tensor in place of its master, which its codes follow: load without assign"
        )


def _loaded(masters: Masters, keys: Any) -> None:
    for codes in _codes(masters.parameters()):
        codes.refresh(loaded=True)


def _codes(parameters: Iterable[Any]) -> list[MasterCodes]:
    return [codes for p in parameters if (codes := codes_of(p)) is not None]
