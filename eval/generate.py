"""Let the float model write its own training text: the data of data-free QAT (LLM-QAT, arXiv:2305.17888).

    python eval/generate.py --model demo/model --out text

Every document starts from a fresh `<|endoftext|>` and is sampled until the next `<|endoftext|>` or the end of the
model's window, so no document needs a longer past than the model has. The default is plain sampling: temperature 1,
no top-k, no top-p. Text drawn so is the float model's own distribution p, whose best predictor is p itself: on it,
the loss of a quantised model q exceeds the float model's by exactly KL(p || q) in expectation (but for the few
documents dropped). Truncated sampling would reward a q that is merely sharper. LLM-QAT's own setting (first token
uniform over the vocabulary, then a few greedy ones, then sampled) is `--first vocabulary --greedy 4`.

`out` receives `train.jsonl` and `heldout.jsonl`, lines of `{"page": ...}` as lm-eval's wikitext task reads them, and
`manifest.json`. The two sets come from two seeds, and a held-out document that shares any 12-word run with the train
documents is dropped. Dropped as well: documents shorter than `min_tokens`, and those that are not valid UTF-8 (a
byte-level model can end amid a character). The same seed, device and versions give the same text; another device
rounds otherwise and soon writes other words.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from provenance import plain, provenance, sha256
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM

RUN = 12


@dataclass(frozen=True)
class Config:
    """Command line of the generation script."""

    model: Path
    out: Path
    train_bytes: int = 400_000
    held_out_bytes: int = 60_000
    first: Literal["model", "vocabulary"] = "model"
    """Where a document's first token comes from: sampled as the others, or uniform over the vocabulary."""
    greedy: int = 0
    """Tokens after the first that are taken greedily."""
    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_tokens: int = 32
    batch: int = 128
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        require(any(self.model.glob("model*.safetensors")), "model", "a folder with a model's safetensors")
        require(self.temperature > 0, "temperature", "positive")
        require(0 < self.top_p <= 1, "top_p", "in 0 < p <= 1")
        for name in ("train_bytes", "held_out_bytes", "batch", "min_tokens"):
            require(getattr(self, name) > 0, name, "positive")
        for name in ("top_k", "greedy", "seed"):
            require(getattr(self, name) >= 0, name, "zero or more")


def truncate(logits_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits outside the k likeliest tokens, and outside the smallest set of probability `top_p`, set to -inf."""
    if 0 < top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(descending=True)
        share_BV = sorted_BV.softmax(-1)
        outside_BV = share_BV.cumsum(-1) - share_BV >= top_p  # the likeliest token always stays
        logits_BV = logits_BV.masked_fill(outside_BV.scatter(-1, order_BV, outside_BV), -torch.inf)
    return logits_BV


@torch.inference_mode()
def sample_batch(config: Config, model: LlamaForCausalLM, generator: torch.Generator) -> torch.Tensor:
    """ids_B,T of one batch of documents, the end token first; what follows a row's next end token is meaningless."""
    end, vocab = model.config.eos_token_id, model.config.vocab_size
    token_B1 = torch.full((config.batch, 1), end, device=config.device)
    ended_B1 = torch.zeros_like(token_B1, dtype=torch.bool)
    ids, cache = [token_B1], DynamicCache(config=model.config)
    for position in range(model.config.max_position_embeddings - 1):
        logits_BV = model(input_ids=token_B1, past_key_values=cache, use_cache=True).logits[:, -1].float()
        if position == 0 and config.first == "vocabulary":
            token_B1 = torch.randint(vocab, (config.batch, 1), generator=generator, device=config.device)
        elif 1 <= position <= config.greedy:
            token_B1 = logits_BV.argmax(-1, keepdim=True)
        else:
            chance_BV = truncate(logits_BV / config.temperature, config.top_k, config.top_p).softmax(-1)
            token_B1 = torch.multinomial(chance_BV, 1, generator=generator)
        ids.append(token_B1)
        ended_B1 |= token_B1 == end
        if position % 32 == 31 and ended_B1.all():  # a test every step would stall the GPU's queue
            break
    return torch.cat(ids, dim=1)


def runs(page: str) -> set[tuple[str, ...]]:
    """All runs of `RUN` words of a page (the whole of a shorter one)."""
    words = page.split()
    return {tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}


@dataclass
class Documents:
    """Pages with what the manifest states of them."""

    pages: list[str]
    seed: int
    ended_at_window: int = 0
    dropped_short: int = 0
    dropped_invalid: int = 0
    dropped_shared: int = 0


def write_documents(
    config: Config, model: LlamaForCausalLM, bpe: Tokenizer, seed: int, size: int, avoid: set[tuple[str, ...]]
) -> Documents:
    """Documents of at least `size` bytes together, none with a run in `avoid`."""
    generator = torch.Generator(config.device).manual_seed(seed)
    end, documents, written, barren = model.config.eos_token_id, Documents([], seed), 0, 0
    with tqdm(total=size, desc=f"text of seed {seed}", unit="B", unit_scale=True) as progress:
        while written < size:
            before = written
            for row in sample_batch(config, model, generator).tolist():
                ids = row[1:]
                ends = end in ids
                ids = ids[: ids.index(end)] if ends else ids
                page = bpe.decode(ids)
                if len(ids) < config.min_tokens or not page.strip():
                    documents.dropped_short += 1
                elif "\ufffd" in page:
                    documents.dropped_invalid += 1
                elif runs(page) & avoid:
                    documents.dropped_shared += 1
                elif written < size:
                    documents.pages.append(page)
                    documents.ended_at_window += not ends
                    written += len(page.encode())
                    progress.update(len(page.encode()))
            barren = barren + 1 if written == before else 0
            if barren == 10:
                wanted = f"documents of min_tokens = {config.min_tokens} or more"
                raise ValueError(f"model must write {wanted}, but 10 batches gave none: {documents}")
    return documents


def main(config: Config) -> None:
    began = time.perf_counter()
    config.out.mkdir(parents=True, exist_ok=True)
    model = LlamaForCausalLM.from_pretrained(config.model, dtype=torch.float32).to(config.device).eval()
    bpe = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False).backend_tokenizer
    train = write_documents(config, model, bpe, 2 * config.seed, config.train_bytes, set())
    seen = set().union(*map(runs, train.pages))
    held_out = write_documents(config, model, bpe, 2 * config.seed + 1, config.held_out_bytes, seen)
    assert not seen & set().union(*map(runs, held_out.pages))
    manifest = {
        **provenance(config.device),
        "what": "text written by the model itself (eval/generate.py); no human text",
        "settings": plain(asdict(config)),
        "model_sha256": {file.name: sha256(file) for file in sorted(config.model.glob("model*.safetensors"))},
        "window": model.config.max_position_embeddings,
    }
    for name, documents in (("train", train), ("heldout", held_out)):
        file = config.out / f"{name}.jsonl"
        lines = (json.dumps({"page": page}, ensure_ascii=False) + "\n" for page in documents.pages)
        file.write_text("".join(lines), encoding="utf-8", newline="\n")
        counts = {key: value for key, value in asdict(documents).items() if key != "pages"}
        size = sum(len(page.encode()) for page in documents.pages)
        manifest[name] = {"documents": len(documents.pages), "bytes": size, "sha256": sha256(file)} | counts
    manifest["seconds"] = round(time.perf_counter() - began, 1)
    (config.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
