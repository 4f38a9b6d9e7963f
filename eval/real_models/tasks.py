"""Two tasks of lm-eval that need no download: RULER's documents are made by lm-eval's own code (arXiv:2404.06654).

    python eval/real_models/tasks.py --model DIR --documents 100 --out gemma_tasks.safetensors

`niah_single_1` asks for the seven digits that one sentence of a monotonous text names; `ruler_fwe` asks for the three
commonest of coded words. Prompts have up to 4096 tokens, answers are greedy, of as many tokens as lm-eval asks for, and
the score is lm-eval's: the share of the answer's parts that the text contains. `ruler_vt` is left out: Gemma 3 270M
finds no variable even in 750 tokens.

The file holds prompts as token ids, with the tokenizer, so that a machine without lm-eval can score. Making it needs
`pip install 'lm_eval[ruler]'`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

LENGTH, BATCH = 4096, 50
ANSWER = {"niah_single_1": 128, "ruler_fwe": 50}  # tokens


def documents(tokenizer: Any, count: int) -> dict[str, list[dict[str, Any]]]:
    """Return the first documents of both tasks, as lm-eval makes them."""
    from lm_eval.tasks.ruler import fwe_utils, niah_utils, prepare_niah

    random.seed(0)
    np.random.seed(1234)  # both as lm-eval's command line does
    kinds: Any = {"type_haystack": "repeat", "type_needle_k": "words", "type_needle_v": "numbers"}
    text = prepare_niah.get_haystack(type_haystack="repeat")
    sizes: Any = {"max_seq_length": LENGTH, "num_samples": count}
    needles = prepare_niah.generate_samples(text, template=niah_utils.TEMPLATE, TOKENIZER=tokenizer, **kinds, **sizes)
    return {"niah_single_1": list(needles), "ruler_fwe": fwe_utils.sys_kwext(tokenizer, **sizes)}


class Tasks:
    """The tasks of a file, ready to score models. pad: any token, which is masked."""

    def __init__(self, path: Path, pad: int = 0) -> None:
        with safe_open(path, "pt") as file:
            self.tokenizer = Tokenizer.from_buffer(lzma.decompress(bytes(file.get_tensor("tokenizer").tolist())))
            self.answers: dict[str, list[list[str]]] = json.loads(file.metadata()["answers"])
            self.prompts = {
                name: file.get_tensor(f"{name}.ids").long().split(file.get_tensor(f"{name}.lengths").tolist())
                for name in self.answers
            }
        self.pad = pad

    def score(self, model: Any) -> dict[str, float]:
        """Return the mean share of answers found, by task."""
        found = {}
        for name, prompts in self.prompts.items():
            texts = [t for i in range(0, len(prompts), BATCH) for t in self._texts(model, prompts[i : i + BATCH], name)]
            shares = [
                sum(part.lower() in text.lower() for part in answer) / len(answer)
                for text, answer in zip(texts, self.answers[name], strict=True)
            ]
            found[name] = sum(shares) / len(shares)
        return found

    @torch.no_grad()
    def _texts(self, model: Any, prompts: tuple[Tensor, ...], name: str) -> list[str]:
        longest = max(map(len, prompts))
        ids_BT = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0), value=self.pad) for p in prompts])
        seen_BT = torch.stack([torch.arange(longest) >= longest - len(p) for p in prompts]).long()
        made_BT = model.generate(
            ids_BT.to(model.device), attention_mask=seen_BT.to(model.device), do_sample=False, pad_token_id=self.pad,
            max_new_tokens=ANSWER[name],
        )  # fmt: skip
        return [str(self.tokenizer.decode(row.tolist())) for row in made_BT[:, longest:]]


def main() -> None:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--documents", type=int, default=100, help="of each task")
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(str(o.model), trust_remote_code=False)
    content = json.loads((o.model / "tokenizer.json").read_text(encoding="utf-8"))
    if "merges" in content["model"]:
        content["model"]["merges"] = []  # it decodes alone
    packed = lzma.compress(json.dumps(content).encode())
    tensors = {"tokenizer": torch.frombuffer(bytearray(packed), dtype=torch.uint8)}
    answers = {}
    for name, found in documents(tokenizer, o.documents).items():
        prompts = [tokenizer(f"{d['input']} {d['gen_prefix']}")["input_ids"] for d in found]
        tensors[f"{name}.ids"] = torch.cat([torch.tensor(ids, dtype=torch.int32) for ids in prompts])
        tensors[f"{name}.lengths"] = torch.tensor([len(ids) for ids in prompts])
        answers[name] = [d["outputs"] for d in found]
    save_file(tensors, o.out, {"answers": json.dumps(answers)})


if __name__ == "__main__":
    main()
