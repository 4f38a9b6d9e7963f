"""The two models of `pretrain.py`, a Llama and a Mixtral of its size, and their losses.

Mixtral is a Llama whose MLP is replaced by experts of which a router picks a few for each token. They run in
transformers' "grouped_mm": tokens are sorted by expert and multiplied in one call, without a copy to the CPU, so that a
step can be a CUDA graph. Autocast does not know that call, so weights are cast to bf16 in front of it.

The experts are kept busy by the loss of Switch Transformer (Fedus et al., arXiv:2101.03961, (4) to (6)). transformers'
function for it is given a mask of ones, because without one it counts by `bincount`, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pretrain_config import Config, prepare_config
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from aoquant import quantize_

Model = LlamaForCausalLM | MixtralForCausalLM


class Losses(NamedTuple):
    """token: mean next-token loss in nats. balance: what is added to it for the experts, 0 without any."""

    token: Tensor
    balance: Tensor | float


def causal_attention(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """SDPA, causal by flag: under torch.compile transformers' own makes a mask, which rules the flash kernel out."""
    assert mask is None
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2), None


def autocast_experts(experts: Any, *inputs: Tensor) -> Tensor:
    """transformers' grouped experts; under autocast with weights in its dtype."""
    device = inputs[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        weights = {name: p.to(dtype) for name, p in experts.named_parameters()}
        # every number and flag, since each release of transformers reads more of them
        kept = {name: value for name, value in vars(experts).items() if isinstance(value, bool | int)}
        experts = SimpleNamespace(**kept, **weights, _apply_gate=experts._apply_gate)
    return grouped_mm_experts_forward(experts, *inputs)


AttentionInterface.register("causal_sdpa", causal_attention)  # not in the mask registry: no mask is made for it
ExpertsInterface.register("autocast_grouped_mm", autocast_experts)


def build_model(config: Config) -> Model:
    """The model on its device, in f32, prepared for the recipe: the ONE place that makes it."""
    torch.manual_seed(config.seed)
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.window,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model: Model
    if config.arch == "moe":
        routing = {"num_local_experts": config.experts, "num_experts_per_tok": config.top_k}
        routing["router_aux_loss_coef"] = config.balance
        rotary = {"rope_type": "default", "rope_theta": 10000.0}  # Llama's; Mixtral's own is for 32k tokens
        model = MixtralForCausalLM(MixtralConfig(**sizes, **routing, rope_parameters=rotary))
        model.set_experts_implementation("autocast_grouped_mm")
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.set_attn_implementation("causal_sdpa")
    model.to(config.device)
    if (prepared := prepare_config(config)) is not None:
        quantize_(model, prepared)
    return model


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def window_loss(model: Model, windows: Tensor, loss: Callable[..., Tensor] = token_loss) -> Losses:
    """Losses of windows_B,T+1, under bf16 autocast on CUDA."""
    windows, c = windows.long(), model.config
    routed = {"output_router_logits": True} if isinstance(model, MixtralForCausalLM) else {}
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        output = model.model(input_ids=windows[:, :-1], use_cache=False, **routed)
        logits = model.lm_head(output.last_hidden_state)
    balance: Tensor | float = 0.0
    if routed:
        mask = torch.ones_like(windows[:, 1:])
        shares = load_balancing_loss_func(output.router_logits, c.num_local_experts, c.num_experts_per_tok, mask)
        balance = c.router_aux_loss_coef * shares
    return Losses(loss(logits, windows[:, 1:]), balance)


def compiled(model: Model) -> Callable[[Model, Tensor], Losses]:
    """`window_loss` with compiled decoder layers, which take their weights as inputs: one of them is compiled, and
    serves all. Of layers with experts all is compiled but those: transformers records what their router says.
    """
    for layer in model.model.layers:
        moe = isinstance(model, MixtralForCausalLM)
        parts = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm) if moe else (layer,)
        for part in parts:
            part.compile(dynamic=False)
    return partial(window_loss, loss=torch.compile(token_loss, dynamic=False))
