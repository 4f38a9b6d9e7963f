"""Language models: how they are trained on a token file, and how they are scored.

Scores. A page is cut into windows of `WINDOW` tokens, and every window begins with BOS: without it a Gemma loses a nat
a token. A later window sees BOS and one token before those that it predicts, and the last one reaches back to be full:
lm-eval's rolling windows with a context of two tokens, the first of which is BOS. `aoquant eval` scores so, too. KL and
top-1 agreement are to the float model, over the same predictions.

Training. Blocks begin with BOS and hold the stream `document BOS document BOS ...`. The vocabulary of a Gemma is
262 144: one float32 matrix of logits for 4096 tokens is 4.3 GB. Head, loss and their gradients are therefore computed
for `CHUNK` tokens at a time, and the rest of the model gets the gradient of its last hidden states at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

WINDOW, CHUNK = 1024, 1024
PROMPT, GREEDY = 64, 32  # tokens of a prompt, and tokens that follow greedily
IGNORED = -100
TEXTS = ("wikitext", "other")


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
                if teacher_TK is None:
                    value, gradient_TV = _cross_entropy(logits_TV, targets_T[rows])
                else:
                    target_TV = self.teacher.get_output_embeddings()(teacher_TK[rows])
                    value, gradient_TV = _fast(_divergence, logits_TV.detach(), target_TV)
                total += value
            logits_TV.backward(gradient_TV.div_(tokens))
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
                    made_TV, float_TV = (
                        m.get_output_embeddings()(h_TK[rows])
                        for m, h_TK in ((model, student_TK), (self.teacher, teacher_TK))
                    )
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
    """Call a function of rows of logits; on a GPU as one or two kernels, without its float32 matrices."""
    return (_compiled(rows) if logits[0].is_cuda else rows)(*logits)


_compiled = cache(torch.compile)


def _divergence(student_TV: Tensor, teacher_TV: Tensor) -> tuple[Tensor, Tensor]:
    """KL divergence to the teacher, summed over rows, in nats, and its gradient in the student's logits."""
    q_TV, p_TV = student_TV.float().log_softmax(-1), teacher_TV.float().log_softmax(-1)
    return (p_TV.exp() * (p_TV - q_TV)).sum(), (q_TV.exp() - p_TV.exp()).to(student_TV.dtype)


def _cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over rows that are not ignored, in nats, and its gradient in the logits."""
    nats_TV, kept_T1, at_T1 = (
        -logits_TV.float().log_softmax(-1),
        (targets_T != IGNORED)[:, None],
        targets_T.clamp(0)[:, None],
    )
    value = (nats_TV.gather(1, at_T1) * kept_T1).sum()
    gradient_TV = nats_TV.neg_().exp_().scatter_add_(1, at_T1, -torch.ones_like(at_T1, dtype=torch.float32))
    return value, gradient_TV.mul_(kept_T1).to(logits_TV.dtype)


def _compare(made_TV: Tensor, float_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nats of each target; KL to the float model, summed; how often both models' likeliest tokens are equal."""
    q_TV, p_TV = made_TV.float().log_softmax(-1), float_TV.float().log_softmax(-1)
    nats_T = -q_TV.gather(1, targets_T[:, None])[:, 0]
    same = (made_TV.argmax(-1) == float_TV.argmax(-1)).sum()
    return nats_T, (p_TV.exp() * (p_TV - q_TV)).sum(), same


def _hidden(model: Any, ids_BT: Tensor) -> Tensor:
    """Last hidden states (B, T, K), what the head reads."""
    hidden: Tensor = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return hidden


def _documents(texts: Mapping[str, Tensor], name: str, bos: int) -> Tensor:
    """Token ids of `document BOS document BOS ...`."""
    pages = texts[f"{name}.ids"].split(texts[f"{name}.lengths"].tolist())
    between = torch.tensor([bos], dtype=torch.int32)
    return torch.cat([part for page in pages for part in (page, between)])
