"""Changes of stacked experts: each stacked parameter of an experts module takes a config of its own.

`FqnToConfig` names the module ("model.layers.0.mlp.experts") or one of its parameters ("....experts.down_proj"). By
default experts take the config that linear layers take. A config that a parameter cannot take is refused together
with those that layers cannot take, before any change.

Conversion encodes one expert at a time, so that what is in memory beside the codes is one expert.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aoquant import ops
from aoquant.distributed.fsdp import GATHER, layer_class, swap_class
from aoquant.distributed.sharded_linear import all_finite
from aoquant.experts import sharded
from aoquant.experts.families import is_transposed, lacks, reading_of, why_not_read
from aoquant.experts.packed_experts import PackedExperts, packed_experts
from aoquant.experts.prepared import QATExperts
from aoquant.formats import Scales
from aoquant.linear.prepared import Prepared
from aoquant.linear.tensor import PackedTensor
from aoquant.planning import half
from aoquant.planning.changes import Change, Chosen
from aoquant.targets import Target


def why_not(chosen: Chosen, step: str, target: Target) -> str | None:
    """Return why experts cannot have `target`; None when they can."""
    weight, recipe = chosen.weight, target.recipe
    rows, columns = weight.shape[1:]
    n, k = (columns, rows) if is_transposed(chosen.module) else (rows, columns)
    if target.tensor != "PackedTensor":
        return f"stacked experts become aoquant's packed tensors, and the config makes {target.tensor}: use a config of aoquant's"
    if step != "convert" and recipe.history:
        return (
            "stacked experts keep no history of maxima, and the config has delayed scaling (amax_history): use scales of the step, as "
            "fp8-hybrid has"
        )
    if step != "convert" and not recipe.fitted and recipe.input_scales != "dynamic":
        return (
            f"stacked experts hold no calibrated activation scale, and the config has one ({recipe.input_name}-{recipe.input_scales}): "
            "give them a config of their own with dynamic or no activations (for vllm-nvfp4: vllm-nvfp4-weight)"
        )
    if recipe.holds and step != "convert":
        how = "a fitted transform" if recipe.fitted else "static or learned scales"
        return f"stacked experts hold no scales of their own, and the config has {how}: use scales that are dynamic"
    managed = bool(getattr(chosen.module, "_is_fsdp_managed_module", False))
    if isinstance(weight, DTensor) and reading_of(layer_class(chosen.module)) and not (managed and step == "prepare"):
        return f"it is sharded, and its class multiplies by it in a forward of its own: {GATHER}, and quantise that"
    if (reason := why_not_read(chosen.module) or sharded.why_not(weight, step, recipe, managed=managed)) is not None:
        return reason
    if (reason := target.why_not(n, k, weight.dtype)) is not None:
        return reason
    replaced = "forward" in vars(chosen.module) and "_old_forward" not in vars(chosen.module)
    if replaced and step == "prepare":
        return "the forward of its module is replaced on the instance, so a prepared forward would never run: remove the replacement"
    if not weight.is_meta and not all_finite(weight):
        return "it holds NaN or Inf: restore a good checkpoint before quantising"
    return None


def with_own_scales(target: Target) -> Target:
    """`target`, where its weight scales are static for the sake of layers that share one, with dynamic ones: an engine
    fuses gate and up, which are rows of one matrix of an expert.
    """
    recipe = target.recipe
    if recipe.weight_scales != "static" or not recipe.fprop_weight.format.power_of_two:
        return target
    return replace(target, recipe=replace(recipe, weight_scales="dynamic"))


def why_unsupported(module: nn.Module) -> str:
    """Return why the stacked parameters of a module are not quantised."""
    missing = ", ".join(lacks(module)) or "3-D parameters"
    name = type(module).__name__
    return f"experts stacked into one parameter of {name}, whose class lacks what transformers' experts protocol has: {missing}"


def apply(change: Change, device: torch.device | str | None = None) -> None:
    """Carry out the change of one stacked parameter, in place."""
    module = change.module
    if change.step == "prepare":
        QATExperts.prepare_stack(module, change.parameter, Prepared(change.target.recipe, change.config, change.fqn))
        weight = change.weight.detach()
        if weight.dtype == torch.float16 and not isinstance(weight, DTensor) and not weight.is_meta:
            matrices = weight.mT if is_transposed(module) else weight
            made = [pack_expert(change, w_NK, None, e) for e, w_NK in enumerate(matrices)]
            _warn_of_half(change, weight, made, 0)
        return
    weight = change.weight
    packed = nn.Parameter(pack(change, weight, device), requires_grad=False)
    if isinstance(module, QATExperts) and change.parameter in module.stacks:
        module.unprepare_stack(change.parameter)
    setattr(module, change.parameter, packed)
    if isinstance(weight, DTensor):
        if getattr(module, "_is_fsdp_managed_module", False):
            vars(module)[sharded.GATHERS] = True
        if not isinstance(module, QATExperts):
            swap_class(module, sharded.sharded_class(layer_class(module)))


@torch.no_grad()
def pack(change: Change, weight: Tensor, device: torch.device | str | None) -> Tensor:
    """The packed experts of a float stack, encoded expert by expert on `device`, by default the weight's; of a sharded
    one, every rank its own.
    """
    if isinstance(weight, DTensor):
        own = _packed_stack(change, weight.to_local(), device, sharded.first_of(weight))
        stride = torch.empty(weight.shape, device="meta").stride()
        placed = weight.device_mesh, weight.placements
        return DTensor.from_local(own, *placed, run_check=False, shape=weight.shape, stride=stride)
    return _packed_stack(change, weight, device)


def _packed_stack(change: Change, weight: Tensor, device: torch.device | str | None, first: int = 0) -> PackedExperts:
    """first: the number of the first of these experts."""
    transposed = is_transposed(change.module)
    if len(weight) == 0:  # a rank without experts has parts without rows
        like = weight.new_zeros(1, *weight.shape[1:])
        return _packed_stack(change, like, device)[:0]
    matrices = (expert.t() if transposed else expert for expert in weight.detach())
    if weight.is_meta:  # where all experts are alike
        made = [pack_expert(change, next(matrices), device)] * len(weight)
    else:
        made = [pack_expert(change, w_NK, device, first + e) for e, w_NK in enumerate(matrices)]
    _warn_of_half(change, weight.detach(), made, first)
    return packed_experts(made, transposed=transposed)


def _warn_of_half(change: Change, weight: Tensor, made: list[PackedTensor], first: int) -> None:
    """Warn once for a float16 stack, by the expert that loses most."""
    operand, module = change.target.recipe.fprop_weight, change.module
    if change.dtype != torch.float16 or not made or change.codes is not None:  # prepare has looked at their scales
        return
    shares = []
    for e, (w, packed) in enumerate(zip(weight, made, strict=True)):
        w_NK = (w.t() if is_transposed(module) else w).to(packed.device, change.dtype).contiguous()
        held = module.held_scales(change.parameter, first + e) if isinstance(module, QATExperts) else None
        shares.append(half.share_lost(operand, packed.encoded, w_NK, held))
    half.warn_of_loss(change.fqn, operand, max(shares))


@torch.no_grad()
def pack_expert(change: Change, w_NK: Tensor, device: torch.device | str | None, expert: int = 0) -> PackedTensor:
    """Return one packed expert of a float weight. expert: its number, by which its module holds scales for it."""
    module, operand = change.module, change.target.recipe.fprop_weight
    w_NK = w_NK.to(device, change.dtype).contiguous()
    held = module.held_scales(change.parameter, expert) if isinstance(module, QATExperts) else None
    if change.codes is not None:
        encoded = change.codes[expert]
    elif held is None:
        encoded = ops.codec.encode(operand, w_NK)
    else:
        encoded = operand.encode(w_NK, Scales(*(t if t is None else t.to(w_NK.device) for t in held)))
    built = change.target.build(encoded, w_NK)
    assert isinstance(built, PackedTensor)
    return built
