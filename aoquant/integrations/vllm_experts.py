"""Packed experts inside vLLM's mixture-of-experts layer: a quantisation method whose weights are `PackedExperts`.

vLLM's own loader selects an expert, narrows to this rank's rows or columns and copies into placeholders of packed
codes. The forward has the bits of the converted layer; routing is vLLM's own. A config names experts as transformers
does, and vLLM as checkpoint files do, so a model without values is asked for both names. Source: vLLM 0.32,
`layers/fused_moe/routed_experts.py` and `fused_moe_method_base.py`.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from aoquant.config import WeightConfig
from aoquant.experts.families import experts_of
from aoquant.experts.packed_experts import PackedExperts
from aoquant.files.stored_names import pieces_of, stored_name
from aoquant.planning.choose import each, key_of
from aoquant.ptq.blocks import Call, call_of
from aoquant.quantize import quantize_

STACKS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
_OUTLINE = "_aoquant_outline"


def method_in_vllm(config: Any, layer: Any, prefix: str) -> Any:
    """`method_for` inside a running vLLM, for configs of aoquant's."""
    if not any(isinstance(c, WeightConfig) for c in each(config.torchao_config)):
        return None
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    if (outline := getattr(config, _OUTLINE, None)) is None:
        outline = Outline(get_current_vllm_config().model_config.hf_config)
        setattr(config, _OUTLINE, outline)
    return method_for(config.torchao_config, layer, prefix, outline, FusedMoEMethodBase)


class Outline:
    """A transformers model without values, of a config. owners: its modules of experts, by their names in files."""

    def __init__(self, config: Any) -> None:
        config = copy.copy(config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.owners = {owner_in_files(self.model, name): name for name in experts_of(self.model)}

    def rounds_routing(self, name: str) -> bool:
        """Return whether the model rounds the weights of each token's experts to its own dtype, as Qwen3-MoE does;
        Mixtral keeps float32. The block of the experts is run without values up to them.
        """
        block = self.model.get_submodule(name.rpartition(".")[0])
        x = torch.empty(1, 1, self.model.config.get_text_config().hidden_size, dtype=torch.bfloat16, device="meta")
        call = call_of(block, self.model.get_submodule(name), Call((x,), {}, None))
        assert call is not None
        _, _, weights = (*call.args, *call.kwargs.values())
        return bool(weights.dtype == torch.bfloat16)


def owner_in_files(model: Any, name: str) -> str:
    """Return the name in files of an experts' module."""
    down = f"{name}.down_proj"
    pieces = pieces_of(model, down)
    if pieces:  # "...experts.0.w2.weight"
        return pieces[0].name.rsplit(".", 3)[0]
    return stored_name(model, down).rpartition(".")[0]


def method_for(config: Any, layer: Any, prefix: str, outline: Outline, base: type) -> Any:
    """Return the quantisation method of vLLM's experts `layer`, which it calls `prefix`; None where they stay float.

    config: an `FqnToConfig`, which names experts that are quantised. outline: of the model that is served. base: vLLM's
    FusedMoEMethodBase.

    Raises:
        ValueError: the experts are quantised and are computed in a way that packed experts have no form for.
    """
    by_name, name = getattr(config, "fqn_to_config", {}), outline.owners.get(prefix, prefix)
    keys = {weight: key_of(by_name, name, default=False, parameter=stack) for weight, stack in STACKS.items()}
    configs = {weight: None if key is None else by_name[key] for weight, key in keys.items()}
    if all(c is None for c in configs.values()):
        return None
    moe = layer.moe_config
    for met, what in (
        (layer.activation.value in _GATES, f"the activation {layer.activation.value}"),
        (not moe.has_bias, "biases"),
        (layer.swiglu_limit is None, "a clamped gate (swiglu_limit)"),
        (not layer.apply_router_weight_on_input, "routing weights on their input"),
        (not moe.is_lora_enabled, "LoRA adapters (enable_lora)"),
    ):
        if not met:
            raise ValueError(
                f"{name}: packed experts are not served with {what}: leave the experts out of quantize_, or serve what "
                "aoquant.export writes"
            )
    return _class(base)(moe, configs, _GATES[layer.activation.value], outline.rounds_routing(name))


class ExpertsMethod:
    """The part of a vLLM quantisation method that is ours; its base class is vLLM's FusedMoEMethodBase.

    configs: of `w13_weight` and `w2_weight`, None for float. act: of the gate. rounds: `Outline.rounds_routing`.
    """

    moe: Any

    def __init__(self, moe: Any, configs: Mapping[str, Any], act: Callable[[Tensor], Tensor], rounds: bool) -> None:
        super().__init__(moe)  # type: ignore[call-arg]
        self.configs, self.act, self.rounds = configs, act, rounds

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Register `w13_weight` (E, 2 I, H) and `w2_weight` (E, H, I), of zeros; packed where they have a config."""
        shapes = {
            "w13_weight": (2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (hidden_size, intermediate_size_per_partition),
        }
        for name, (n, k) in shapes.items():
            weight = nn.Parameter(placeholder(self.configs[name], num_experts, n, k, params_dtype), requires_grad=False)
            for key, value in attributes.items():  # weight_loader
                setattr(weight, key, value)
            layer.register_parameter(name, weight)

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *_: Any) -> tuple[int, int]:
        """No padding."""
        return hidden_size, intermediate_size

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: vLLM's kernels are not used."""

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """(T, H) of x (T, H) and each token's experts and weights (T, top k)."""
        if layer.expert_map is not None:  # this rank has some experts; -1 is another's
            topk_ids = layer.expert_map[topk_ids]
            topk_ids = topk_ids.masked_fill(topk_ids < 0, layer.w2_weight.shape[0])
        topk_weights = topk_weights.to(x.dtype) if self.rounds else topk_weights  # vLLM's are float32
        return multiplied(x, topk_ids, topk_weights, layer.w13_weight, layer.w2_weight, self.act)


@cache
def _class(base: type) -> type:
    return type("PackedExpertsMethod", (ExpertsMethod, base), {})


def placeholder(config: Any, experts: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """(E, N, K) zeros, which a checkpoint overwrites: packed as `config` says, or float where it is None. vLLM builds a
    model under the default device that it is to have.
    """
    device = torch.get_default_device()
    if config is None:
        return torch.zeros(experts, n, k, dtype=dtype, device=device)
    one = nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype, device=device))
    nn.init.zeros_(next(one.parameters()))
    quantize_(one, config)
    w: Any = one[0].weight.data
    parts = [w.qdata, w.scale, w.zero_point, w.per_tensor_scale]
    stacked = [None if t is None else t.new_zeros((experts, *t.shape)) for t in parts]
    return w._like(PackedExperts, [*stacked, None], None, None)


def multiplied(
    x_TH: Tensor, ids_TJ: Tensor, weights_TJ: Tensor, w13: Tensor, w2: Tensor, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """(T, H): the sum over each token's experts of weight * (act(x gate^T) * (x up^T)) down^T.

    w13: (E, 2 I, H), gate's rows before up's. w2: (E, H, I). Both `PackedExperts` or float. ids: experts; E for those
    of other ranks, which add nothing. Nothing waits for the routing where the grouped products do not.
    """
    tokens, top_k = ids_TJ.shape
    experts = w2.shape[0]
    ids, perm = torch.sort(ids_TJ.reshape(-1))
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True).int()
    gate, up = F.grouped_mm(x_TH[perm // top_k], w13.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(act(gate) * up, w2.transpose(-2, -1), offs=ends)
    y = y.masked_fill((ids >= experts).unsqueeze(-1), 0.0)  # behind the last row of a float product is no value
    y = y * weights_TJ.reshape(-1)[perm].unsqueeze(-1)
    by_token = torch.empty_like(y).index_copy_(0, perm, y)
    return by_token.view(tokens, top_k, -1).sum(1).to(x_TH.dtype)
