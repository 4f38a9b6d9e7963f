"""Embedding models: mean pooling over a sentence's tokens, normalised, as sentence-transformers does.

Scores are against the float model's embeddings of held-out sentences: 1 - cosine, the overlap of the ten nearest
sentences, and how often the nearest sentence is the same. Training makes the student's embeddings the float model's:
the loss is 1 - cosine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SENTENCES, NEAREST = 768, 10


class Embedding:
    """As `causal.CausalLM`. texts: "train" and "test" of a token file, a sentence a page."""

    def __init__(self, teacher: Any, texts: Mapping[str, Tensor], batch: int) -> None:
        self.teacher, self.batch, self.device = teacher, batch, teacher.device
        train, test = (
            list(texts[f"{name}.ids"].long().split(texts[f"{name}.lengths"].tolist())) for name in ("train", "test")
        )
        # rows of token ids, -1 after the end of a sentence
        self.blocks_BT = torch.nn.utils.rnn.pad_sequence(train, batch_first=True, padding_value=-1)
        self.test: Sequence[Tensor] = test[:SENTENCES]
        with torch.no_grad():
            self.float_SK = self._embeddings(teacher)

    def loss(self, student: Any, ids_BT: Tensor, loss: str) -> Tensor:
        """Return a step's loss: "cosine" to the float model's embeddings."""
        with torch.no_grad():
            target_BK = embed(self.teacher, ids_BT)
        return (1 - (embed(student, ids_BT) * target_BK).sum(1)).mean()

    @torch.no_grad()
    def score(self, model: Any) -> dict[str, Any]:
        """Return the scores by column name; under `nats`, the embeddings themselves, on the CPU."""
        made_SK = self._embeddings(model)
        near = [(e_SK @ e_SK.T).fill_diagonal_(-1).topk(NEAREST).indices for e_SK in (made_SK, self.float_SK)]
        both = (near[0][:, :, None] == near[1][:, None, :]).any(2).float().mean()
        return {
            "nats": made_SK.cpu(),
            "one_minus_cosine": float((1 - (made_SK * self.float_SK).sum(1)).mean()),
            "top10": float(both),
            "top1": float((near[0][:, 0] == near[1][:, 0]).float().mean()),
        }

    def differing(self, trained: Any, served: Any, prompts: int) -> dict[str, Any]:
        """Compare nothing: there are no greedy tokens."""
        return {}

    def _embeddings(self, model: Any) -> Tensor:
        padded = torch.nn.utils.rnn.pad_sequence(list(self.test), batch_first=True, padding_value=-1)
        return torch.cat([embed(model, part_BT.to(self.device)) for part_BT in padded.split(64)])


def embed(model: Any, ids_BT: Tensor) -> Tensor:
    """Normalised embeddings (B, K), float32. ids_BT: token ids, -1 after the end of a sentence."""
    ids_BT = ids_BT[:, : int((ids_BT >= 0).sum(1).max())]
    mask_BT = ids_BT >= 0
    hidden_BTK = model(input_ids=ids_BT.clamp(min=0), attention_mask=mask_BT.long()).last_hidden_state.float()
    pooled_BK = (hidden_BTK * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
    return F.normalize(pooled_BK, dim=1)
