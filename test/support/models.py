"""Small Llamas that tests share: one builder, and a name for each set of sizes that several files use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from aoquant import QATConfig, quantize_

IDS = torch.arange(24).view(2, 12)
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
NARROW: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}


def llama_config(**changes: Any) -> LlamaConfig:
    """SMALL and the changes to it."""
    return LlamaConfig(**(SMALL | {"tie_word_embeddings": False} | changes))


def llama(tied: bool = False, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LlamaForCausalLM:
    """SMALL with biases, in `dtype`, in eval mode; its weights come from torch's generator as it is.

    Made as `from_pretrained` makes it: `.to(dtype)` would also round the rotary frequencies, which no checkpoint holds.
    """
    config = llama_config(**({"attention_bias": True, "tie_word_embeddings": tied} | changes))
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def narrow_llama() -> LlamaForCausalLM:
    """No biases, no tie, 64 wide; its weights are always the same."""
    torch.manual_seed(0)
    return llama(attention_bias=False, **NARROW)


def tiny_llama(
    recipe: str | None = None, vocabulary: int = 32, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **size: int
) -> LlamaForCausalLM:
    """Return one block, 32 wide, with a tied head, prepared if a recipe is named, and always with the same weights."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, **size}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=32, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM._from_config(config, dtype=dtype)
    if recipe:
        quantize_(model, QATConfig(recipe))
    return model


def everything(module: nn.Module, name: str) -> bool:
    """Choose embeddings too, as a `filter_fn`."""
    return isinstance(module, nn.Linear | nn.Embedding)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of IDS."""
    return model(IDS).logits


def distillation_loss(student_BTV: torch.Tensor, teacher_BTV: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student), a mean over tokens, by torch's own kl_div."""
    student, teacher = (t.float().log_softmax(-1).flatten(0, -2) for t in (student_BTV, teacher_BTV))
    return nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")


class TiedLM(nn.Module):
    """An embedding, a layer, and an output head that is tied to the embedding, or not."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 64, dtype=torch.bfloat16)
        self.up = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lm_head(torch.tanh(self.up(self.embed(ids))))
        return y


class Unreached(nn.Module):
    """A model whose second layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[0](x)
        return y


def tied() -> nn.Module:
    """Two layers that share a weight."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    net[1].weight = net[0].weight
    return net
