"""Language models: how they are trained on a token file, and how they are scored.

Scores. A page is cut into windows by lm-eval's rule for rolling log-likelihoods (`get_rolling_token_windows`, context
of one token): BOS and the page's tokens, windows of `WINDOW` predicted tokens, the last window filled with context from
the left. So word perplexity on WikiText-2's test pages is that of lm-eval's `wikitext` task with the same window, where
lm-eval's tokenizer adds no second BOS. KL and top-1 agreement are to the float model, over the same predictions.

Training. Blocks begin with BOS and hold the stream `document BOS document BOS ...`. The vocabulary of a Gemma is
262 144: one float32 matrix of logits for 4096 tokens is 4.3 GB. Head, loss and their gradients are therefore computed
for `CHUNK` tokens at a time, and the rest of the model gets the gradient of its last hidden states at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

WINDOW, CHUNK = 1024, 512
PROMPT, GREEDY = 64, 32  # tokens of a prompt, and tokens that follow greedily
IGNORED = -100
TEXTS = ("wikitext", "other", "validation")


class CausalLM:
    """What `worker.py` asks of a kind of model. teacher: the float model. texts: of a token file. batch, block: of a
    training step.
    """

    def __init__(self, teacher: Any, texts: Mapping[str, Tensor], bos: int, batch: int, block: int) -> None:
        """Raises ValueError for a model whose logits are more than the head of its hidden states."""
        self.teacher, self.texts, self.bos, self.batch = teacher, texts, bos, batch
        self.device = teacher.device
        ids = texts["wikitext.ids"][None, :8].long().to(self.device)
        with torch.no_grad():
            logits = teacher(input_ids=ids).logits
            if not torch.equal(teacher.get_output_embeddings()(_hidden(teacher, ids)), logits):
                raise ValueError(
                    f"{type(teacher).__name__}: its logits are not its head's output, such as capped ones. "
                    "The chunked loss does not know how: give another model"
                )
        stream = _documents(texts, "train", bos)
        blocks = len(stream) // (block - 1)
        cut_BT = stream[: blocks * (block - 1)].view(blocks, block - 1)
        self.blocks_BT = torch.cat((cut_BT.new_full((blocks, 1), bos), cut_BT), 1).long()

    def backward(self, student: Any, ids_BT: Tensor, loss: str) -> float:
        """Add one step's gradients. loss: "kl" to the teacher, or "ce". Returns it, in nats a token."""
        hidden_TK = _hidden(student, ids_BT).flatten(0, 1)
        below_TK = hidden_TK.detach().requires_grad_()
        with torch.no_grad():
            teacher_TK = _hidden(self.teacher, ids_BT).flatten(0, 1) if loss == "kl" else None
        targets_T = ids_BT.roll(-1, 1)
        targets_T[:, -1] = IGNORED
        targets_T = targets_T.flatten()
        tokens = len(targets_T) if loss == "kl" else int((targets_T != IGNORED).sum())
        total = torch.zeros((), device=self.device)
        for start in range(0, len(targets_T), CHUNK):
            rows = slice(start, start + CHUNK)
            logits_TV = student.get_output_embeddings()(below_TK[rows])
            with torch.no_grad():
                student_TV = logits_TV.float().log_softmax(-1)
                if teacher_TK is None:
                    keep_T = targets_T[rows] != IGNORED
                    index_T1 = targets_T[rows].clamp(min=0)[:, None]
                    total -= (student_TV.gather(1, index_T1)[:, 0] * keep_T).sum()
                    gradient_TV = student_TV.exp_().scatter_add_(1, index_T1, -torch.ones_like(index_T1).float())
                    gradient_TV *= keep_T[:, None]
                else:
                    teacher_TV = self.teacher.get_output_embeddings()(teacher_TK[rows]).float().log_softmax(-1)
                    p_TV = teacher_TV.exp()
                    total += (p_TV * teacher_TV.sub_(student_TV)).sum()
                    gradient_TV = student_TV.exp_().sub_(p_TV)
            logits_TV.backward(gradient_TV.div_(tokens).to(logits_TV.dtype))
        hidden_TK.backward(below_TK.grad)
        return float(total) / tokens

    @torch.no_grad()
    def score(self, model: Any, names: tuple[str, ...] = TEXTS) -> dict[str, Any]:
        """Return word perplexity, KL and top-1 agreement for each text, by column name; under `nats`, the nats of each
        prediction of all texts, float32 on the CPU.
        """
        found: dict[str, Any] = {"nats": []}
        for name in names:
            nats = list[Tensor]()
            divergence, equal = torch.zeros(2, dtype=torch.float64, device=self.device)
            for inputs_BT, targets_BT in self._windows(name):
                scored_BT = targets_BT != IGNORED
                student_TK, teacher_TK = (_hidden(m, inputs_BT)[scored_BT] for m in (model, self.teacher))
                for start in range(0, len(student_TK), CHUNK):
                    rows = slice(start, start + CHUNK)
                    p_TV, q_TV = (
                        m.get_output_embeddings()(h_TK[rows]).float().log_softmax(-1)
                        for m, h_TK in ((self.teacher, teacher_TK), (model, student_TK))
                    )
                    nats.append(-q_TV.gather(1, targets_BT[scored_BT][rows][:, None])[:, 0])
                    equal += (p_TV.argmax(-1) == q_TV.argmax(-1)).sum()
                    divergence += (p_TV.exp() * (p_TV - q_TV)).sum()
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
            page = torch.cat((page.new_tensor([self.bos]), page))
            for start in range(0, len(page) - 1, WINDOW):
                end = min(start + WINDOW, len(page) - 1)
                first = max(0, end - WINDOW)
                targets = page[first + 1 : end + 1].clone()
                targets[: start - first] = IGNORED
                (full if end - first == WINDOW else short).append((page[first:end], targets))
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


def _hidden(model: Any, ids_BT: Tensor) -> Tensor:
    """Last hidden states (B, T, K), what the head reads."""
    hidden: Tensor = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return hidden


def _documents(texts: Mapping[str, Tensor], name: str, bos: int) -> Tensor:
    """Token ids of `document BOS document BOS ...`."""
    pages = texts[f"{name}.ids"].split(texts[f"{name}.lengths"].tolist())
    between = torch.tensor([bos], dtype=torch.int32)
    return torch.cat([part for page in pages for part in (page, between)])
