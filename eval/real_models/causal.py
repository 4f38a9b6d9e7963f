"""Language models: how they are trained on a token file, and how they are scored.

Scores. A page is cut into windows of `WINDOW` tokens, and every window begins with BOS: without it a Gemma loses a nat
a token. A later window sees BOS and one token before those that it predicts, and the last one reaches back to be full:
lm-eval's rolling windows with a context of two tokens, the first of which is BOS. `aoquant eval` scores so, too. KL and
top-1 agreement are to the float model, over the same predictions.

Training. Blocks begin with BOS and hold the stream `document BOS document BOS ...`. Head and loss are computed a chunk
of tokens at a time, as in `aoquant run` (`losses.chunked_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aoquant.integrations.finetune import block_loss
from aoquant.integrations.losses import IGNORED, hidden_states, logits_of

WINDOW, CHUNK = 1024, 1024
PROMPT, GREEDY = 64, 32  # tokens of a prompt, and tokens that follow greedily
TEXTS = ("wikitext", "other")


class CausalLM:
    """What `worker.py` asks of a kind of model. teacher: the float model. texts: of a token file. batch, block: of a
    training step. scored: names of the texts that models are scored on.
    """

    def __init__(
        self,
        teacher: Any,
        texts: Mapping[str, Tensor],
        bos: int,
        batch: int,
        block: int,
        scored: Sequence[str] = TEXTS,
    ) -> None:
        self.teacher, self.texts, self.bos, self.batch, self.scored = teacher, texts, bos, batch, scored
        self.device = teacher.device
        stream = _documents(texts, "train", bos)
        blocks = len(stream) // (block - 1)
        cut_BT = stream[: blocks * (block - 1)].view(blocks, block - 1)
        self.blocks_BT = torch.cat((cut_BT.new_full((blocks, 1), bos), cut_BT), 1).long()

    def loss(self, student: Any, ids_BT: Tensor, loss: str) -> Tensor:
        """Return a step's loss, in nats a token, "kl" to the teacher or "ce". Nothing waits for a GPU."""
        return block_loss(student, self.teacher, ids_BT, torch.arange(len(ids_BT), device=ids_BT.device), loss)

    @torch.no_grad()
    def score(self, model: Any) -> dict[str, Any]:
        """Return word perplexity, KL and top-1 agreement for each text, by column name; under `nats`, the nats of each
        prediction of all texts, float32 on the CPU.
        """
        found: dict[str, Any] = {"nats": []}
        for name in self.scored:
            nats = list[Tensor]()
            divergence, equal = torch.zeros(2, dtype=torch.float64, device=self.device)
            for inputs_BT, targets_BT in self._windows(name):
                scored_BT = targets_BT != IGNORED
                student_TK, teacher_TK = (
                    hidden_states(m, input_ids=inputs_BT)[scored_BT] for m in (model, self.teacher)
                )
                for start in range(0, len(student_TK), CHUNK):
                    rows = slice(start, start + CHUNK)
                    made_TV = logits_of(model, student_TK[rows])
                    float_TV = logits_of(self.teacher, teacher_TK[rows])
                    of_rows = _fast(_compare, made_TV, float_TV, targets_BT[scored_BT][rows])
                    nats.append(of_rows[0])
                    divergence += of_rows[1]
                    equal += of_rows[2]
            all_nats = torch.cat(nats).cpu()
            words = int(self.texts[f"{name}.words"].sum())
            found[f"{name}_word_perplexity"] = math.exp(float(all_nats.double().sum()) / words)
            found[f"{name}_kl"] = float(divergence) / len(all_nats)
            found[f"{name}_top1"] = float(equal) / len(all_nats)
            found["nats"].append(all_nats)
        found["nats"] = torch.cat(found["nats"])
        return found

    def _windows(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets (B, T), on the device; targets that are not scored are `IGNORED`."""
        full, short = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for page in self.texts[f"{name}.ids"].long().split(self.texts[f"{name}.lengths"].tolist()):
            start = 0
            while start < len(page):
                end = min(start + WINDOW - (start > 0), len(page))
                first = max(0, end - WINDOW)
                inputs = torch.cat((page.new_tensor([self.bos]), page[first : end - 1]))
                targets = page[first:end].clone()
                targets[: start - first] = IGNORED
                (full if end - first == WINDOW else short).append((inputs, targets))
                start = end
        batches = [full[i : i + 8] for i in range(0, len(full), 8)] + [[window] for window in short]
        for batch in batches:
            inputs, targets = (torch.stack(part).to(self.device) for part in zip(*batch, strict=True))
            yield inputs, targets

    @torch.no_grad()
    def differing(self, trained: Any, served: Any, prompts: int) -> dict[str, Any]:
        """Compare greedy tokens of the model as trained and as served, over prompts from the test pages."""
        if not prompts:
            return {}
        step = max(PROMPT, len(self.texts["wikitext.ids"]) // prompts)
        starts = range(0, len(self.texts["wikitext.ids"]) - PROMPT, step)
        ids_BT = torch.stack([self.texts["wikitext.ids"][i : i + PROMPT - 1].long() for i in starts][:prompts])
        ids_BT = torch.cat((ids_BT.new_full((len(ids_BT), 1), self.bos), ids_BT), 1).to(self.device)
        options = {"do_sample": False, "min_new_tokens": GREEDY, "max_new_tokens": GREEDY}
        made = [
            torch.cat([m.generate(part, attention_mask=torch.ones_like(part), **options) for part in ids_BT.split(250)])
            for m in (trained, served)
        ]
        same_BT = made[0] == made[1]
        return {"prompts": len(ids_BT), "prompts_changed": int((~same_BT.all(1)).sum())}


def _fast(rows: Callable[..., Any], *logits: Tensor) -> Any:
    """Call a function of rows of logits; for a full chunk on a GPU as one or two kernels, without its float32 matrices.

    Not for other chunks: after a second size torch.compile makes kernels for any, whose sums have another order, and
    then the first pass over the texts would not give the bits of the second one.
    """
    return (_compiled(rows) if logits[0].is_cuda and len(logits[0]) == CHUNK else rows)(*logits)


_compiled = cache(partial(torch.compile, dynamic=False))


def _compare(made_TV: Tensor, float_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nats of each target; KL to the float model, summed; how often both models' likeliest tokens are equal."""
    q_TV, p_TV = made_TV.float().log_softmax(-1), float_TV.float().log_softmax(-1)
    nats_T = -q_TV.gather(1, targets_T[:, None])[:, 0]
    same = (made_TV.argmax(-1) == float_TV.argmax(-1)).sum()
    return nats_T, F.kl_div(q_TV, p_TV, log_target=True, reduction="sum"), same


def _documents(texts: Mapping[str, Tensor], name: str, bos: int) -> Tensor:
    """Token ids of `document BOS document BOS ...`."""
    pages = texts[f"{name}.ids"].split(texts[f"{name}.lengths"].tolist())
    between = torch.tensor([bos], dtype=torch.int32)
    return torch.cat([part for page in pages for part in (page, between)])
