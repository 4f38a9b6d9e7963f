"""Pretrain a small Llama from text files: the float model that the demos and evaluations quantise, or a quantised one
from scratch.

    python eval/pretrain.py --text mix.txt.xz --anneal wikitext2_train.txt.xz --out demo --steps 10000
    python eval/pretrain.py --text mix.txt.xz --out demo-quartet2 --recipe quartet2

`corpus.prepare` trains the tokenizer and encodes the text. `build_model` makes the LlamaForCausalLM, embeddings tied;
every linear contracts over `hidden` or `intermediate`, both multiples of 128, so that the groups of every block
format (16, 32, 128) divide them. `train` is AdamW on random windows. The batch of a step is a function of (seed,
step) alone, so the data position is the step, and a run that stops and resumes ends with bit for bit the weights of
one that did not. (On CUDA the backward passes of flash attention and embedding add in no fixed order: there the same
holds only with `--deterministic`, which is slower.)

With `--recipe` every linear layer but the head is prepared for that recipe of `aoquant recipes` before the first step,
so that forward is the deployed layer's from the beginning, and so is backward quantised where the recipe says how
("quartet", "quartet2"); `--backward` sets another one. Layers draw their numbers from a state that is part of the
checkpoint. `accumulate` splits a batch into micro-batches. `--graph` makes a step one CUDA graph, several times as fast
at this size (see `graphed.py`).

Learning rate: warm-up, then "wsd" (flat, then linear to zero; Hu et al., arXiv:2404.06395) or "cosine" to zero. A
decay fraction of 1 is the linear-to-zero schedule (Bergsma et al., arXiv:2502.15938). In the last `anneal_fraction`
of the steps a share of every batch comes from the anneal text: text near to the target helps most while the rate
falls.

`out` receives `model/` (bf16 safetensors of the high-precision weights, config, tokenizer), `checkpoint.pt` (f32
weights, optimizer, RNG, step), `train_log.json`, and `validation.jsonl`, a line for every `validate_every` steps.
Validation is bits per byte over consecutive windows, a harder measure than lm-eval's only in that pages are not aligned
to windows.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from corpus import Corpus, Sources, prepare
from graphed import graphed
from provenance import plain, provenance, sha256
from tqdm import tqdm
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from aoquant import QATConfig, quantize_, unprepare
from aoquant.config import WeightConfig
from aoquant.recipes import get_recipe

# May differ between the two halves of a resumed run; everything else must not.
MAY_CHANGE = {"out", "resume", "stop_at", "checkpoint_every", "validate_every", "text", "anneal", "validation"}


@dataclass(frozen=True)
class Config:
    """Command line; the defaults are the demo model: 4 983 552 parameters, 9.97 MB in bf16."""

    text: tuple[Path, ...]
    out: Path
    anneal: tuple[Path, ...] = ()
    """Text to repeat at the end, usually the pages nearest to the figure of merit."""
    validation: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    """A saved tokenizer to use instead of training one."""
    tokenizer_bytes: int = 60_000_000
    """Train the tokenizer on about this much text, evenly spread over the documents."""
    vocab: int = 4096
    hidden: int = 256
    intermediate: int = 768
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    window: int = 1024
    steps: int = 10_000
    batch: int = 128
    """Windows a step."""
    accumulate: int = 1
    """Micro-batches a step."""
    recipe: str = "bf16"
    """What is trained: bf16, or a recipe's name."""
    backward: str | None = None
    """In place of the recipe's own: quartet, quartet2, a format, or high-precision."""
    lr: float = 4e-3
    schedule: Literal["wsd", "cosine"] = "wsd"
    warmup: int = 300
    decay_fraction: float = 0.6
    anneal_fraction: float = 0.25
    anneal_share: float = 0.2
    """Share of a batch drawn from the anneal text during the last `anneal_fraction` of the steps."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    compile: bool = False
    """Fuse what is not quantised; with `graph` too."""
    graph: bool = False
    """A step is one CUDA graph."""
    deterministic: bool = False
    checkpoint_every: int = 2000
    validate_every: int | None = None
    """Steps between validations on the way; after the last step there is one in any case."""
    log_every: int = 50
    resume: bool = False
    """Continue from `out`/checkpoint.pt."""
    stop_at: int | None = None
    """Stop after this step, with a checkpoint; `steps` still sets the schedule."""

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        require(len(self.text) > 0, "text", "at least one file")
        for name in ("text", "anneal", "validation"):
            require(all(path.is_file() for path in getattr(self, name)), name, "paths of existing files")
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            require(value > 0 and value % 128 == 0, name, "a positive multiple of 128 (the K of a linear)")
        for name in ("heads", "kv_heads", "layers", "window", "steps", "batch", "accumulate", "lr"):
            require(getattr(self, name) > 0, name, "positive")
        for name in ("tokenizer_bytes", "log_every", "checkpoint_every", "validate_every"):
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "positive")
        require(not self.graph or self.device.startswith("cuda"), "graph", f"False on device {self.device}")
        require(self.batch % self.accumulate == 0, "accumulate", f"a divisor of batch = {self.batch}")
        require(self.recipe != "bf16" or self.backward is None, "backward", "None with recipe bf16")
        config = prepare_config(self)  # a wrong name is an error before the text is read
        base = None if config is None else config.base_config
        held = isinstance(base, WeightConfig) and base.recipe().holds
        require(not held, "recipe", "one without calibration: there is no model yet that it could look at")
        rule = f"a divisor of hidden / 2 = {self.hidden // 2} (rotary embeddings need an even head)"
        require(self.hidden % (2 * self.heads) == 0, "heads", rule)
        require(self.heads % self.kv_heads == 0, "kv_heads", f"a divisor of heads = {self.heads}")
        require(257 <= self.vocab <= 65536, "vocab", "in 257 (all bytes, end token) .. 65536 (uint16 ids)")
        require(0 <= self.warmup <= self.steps, "warmup", f"in 0 .. steps = {self.steps}")
        for name in ("decay_fraction", "anneal_fraction", "anneal_share"):
            require(0 <= getattr(self, name) <= 1, name, "in 0 .. 1")
        require(self.stop_at is None or 0 < self.stop_at <= self.steps, "stop_at", f"in 1 .. steps = {self.steps}")
        found = self.checkpoint.is_file()
        require(found or not self.resume, "resume", f"False, as there is no {self.checkpoint}")
        require(self.resume or not found, "out", "a folder without a checkpoint.pt, or be given with --resume")

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"


def prepare_config(config: Config) -> QATConfig | None:
    """How the recipe trains; None for bf16."""
    if config.recipe == "bf16":
        return None
    options: dict[str, Any] = {"seed": config.seed}
    if config.backward is not None:
        options["backward"] = None if config.backward == "high-precision" else config.backward
    recipe = get_recipe(config.recipe)
    if "backward" in options:  # the mask belongs to the forward, whatever backward does
        options["straight_through"] = recipe.prepare().straight_through
    return recipe.prepare(**options)


def causal_attention(
    module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """SDPA, causal by flag: under torch.compile transformers' own makes a mask, which rules the flash kernel out."""
    assert mask is None
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2), None


AttentionInterface.register("causal_sdpa", causal_attention)  # not in the mask registry: no mask is made for it


def build_model(config: Config) -> LlamaForCausalLM:
    """The model on its device, in f32, prepared for the recipe: the ONE place that makes it."""
    torch.manual_seed(config.seed)
    llama = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.window,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(llama)
    model.set_attn_implementation("causal_sdpa")
    model.to(config.device)
    if (prepared := prepare_config(config)) is not None:
        quantize_(model, prepared)
    return model


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def window_loss(
    model: LlamaForCausalLM, windows: torch.Tensor, loss: Callable[..., torch.Tensor] = token_loss
) -> torch.Tensor:
    """Mean next-token loss (nats) of windows_B,T+1, under bf16 autocast on CUDA."""
    windows = windows.long()
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        hidden = model.model(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return loss(logits, windows[:, 1:])


def compiled(model: LlamaForCausalLM) -> Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]:
    """`window_loss` with compiled decoder layers, which take their weights as inputs: one of them is compiled, and
    serves all.
    """
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    return partial(window_loss, loss=torch.compile(token_loss, dynamic=False))


def batch_at(config: Config, data: Corpus, step: int) -> torch.Tensor:
    """windows_B,T+1 of a step: random places, a function of (seed, step) alone."""
    # A CPU generator takes 32 bits of its seed: steps count from the seed's own place among them, and seed 0's from 0.
    generator = torch.Generator().manual_seed((config.seed * 0x9E3779B9 + step) & 0xFFFFFFFF)
    starts = torch.randint(data.main - config.window, (config.batch,), generator=generator)
    extra = len(data.ids) - data.main
    if extra and step >= round(config.steps * (1 - config.anneal_fraction)):
        share = round(config.batch * config.anneal_share)
        starts[:share] = data.main + torch.randint(extra - config.window, (share,), generator=generator)
    starts = starts.to(data.ids.device, non_blocking=True)
    return data.ids[starts[:, None] + torch.arange(config.window + 1, device=data.ids.device)]


def lr_at(config: Config, step: int) -> float:
    """Learning rate of a step (0-based); the last step's is just above zero."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    left = (config.steps - step) / max(1, config.steps - config.warmup)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 - math.cos(math.pi * left))
    return config.lr * min(1.0, left / config.decay_fraction) if config.decay_fraction else config.lr


@torch.no_grad()
def validate(config: Config, model: LlamaForCausalLM, data: Corpus) -> float:
    """Bits per byte of the validation text in consecutive windows, each without a past; eager, as it runs seldom."""
    windows = data.validation.unfold(0, config.window + 1, config.window)
    parts = windows.split(config.batch)
    with torch.compiler.set_stance("force_eager"):
        nats = sum(float(window_loss(model, part)) * part[:, 1:].numel() for part in parts)
    read = data.validation_bytes * windows[:, 1:].numel() / len(data.validation)
    return nats / math.log(2) / read


def save(config: Config, state: dict[str, Any]) -> None:
    """Checkpoint, whole or not at all."""
    partial = config.checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(config.checkpoint)


def train(config: Config, data: Corpus, model: LlamaForCausalLM) -> dict[str, Any]:
    """Run or continue the steps; returns what the log states. `model` is left trained."""
    cuda = config.device.startswith("cuda")
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    lr = (
        torch.tensor(config.lr, device=config.device) if config.graph else config.lr
    )  # a graph reads it from the device
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=cuda, capturable=config.graph)
    # On the device, as reading a loss stalls its queue.
    losses = torch.zeros(config.steps, device=config.device)
    text_hash = hashlib.sha256(data.ids.cpu().numpy().tobytes()).hexdigest()
    first = 0
    if config.resume:
        state = torch.load(config.checkpoint, map_location=config.device, weights_only=True)
        now, before = plain(asdict(config)), state["config"]
        changed = [
            f"{k} from {before.get(k)!r} to {now[k]!r}" for k in now.keys() - MAY_CHANGE if before.get(k) != now[k]
        ]
        if changed or state["text_hash"] != text_hash:
            raise ValueError(
                f"resume needs the settings and the text of the run in {config.out}; changed: {', '.join(sorted(changed)) or 'the text'}. "
                "Give them as they were, or another out without resume"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        if cuda:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu())
        first, losses = state["step"], state["losses"]
    last = config.stop_at or config.steps

    def state_after(step: int) -> dict[str, Any]:
        rng = {"rng": torch.get_rng_state()} | ({"cuda_rng": torch.cuda.get_rng_state()} if cuda else {})
        trained = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
        return {"step": step, "config": plain(asdict(config)), "text_hash": text_hash, **trained, **rng}

    loss_of = compiled(model) if config.compile else window_loss

    def one_step(batch: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), device=config.device)
        for windows in batch.chunk(config.accumulate):
            part = loss_of(model, windows) / config.accumulate
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    began = clock = time.perf_counter()
    step_of = graphed(one_step, model, optimizer, batch_at(config, data, first)) if config.graph else one_step
    clock_step = first
    progress = tqdm(range(first, last), initial=first, total=config.steps, desc="train", unit="step")
    for step in progress:
        for group in optimizer.param_groups:
            if config.graph:
                group["lr"].fill_(lr_at(config, step))
            else:
                group["lr"] = lr_at(config, step)
        losses[step] = step_of(batch_at(config, data, step))
        if step == first + 9:  # the steps before hold the compilation
            losses[step].item()
            clock, clock_step = time.perf_counter(), step + 1
        if (step + 1) % config.log_every == 0:
            recent = losses[max(first, step + 1 - config.log_every) : step + 1].mean().item()
            speed = config.batch * config.window * (step + 1 - clock_step) / (time.perf_counter() - clock)
            progress.set_postfix(loss=f"{recent:.4f}", tokens_s=f"{speed:.3g}", refresh=False)
        if (step + 1) % config.checkpoint_every == 0 and step + 1 < last:
            save(config, state_after(step + 1))
        if config.validate_every and (step + 1) % config.validate_every == 0 and step + 1 < last:
            line = {"step": step + 1, "bits_per_byte": validate(config, model, data)}
            with (config.out / "validation.jsonl").open("a") as file:
                print(json.dumps(line), file=file)
    losses[last - 1].item()
    ended = time.perf_counter()
    save(config, state_after(last))
    return {
        "first_step": first,
        "last_step": last,
        "tokens_trained": last * config.batch * config.window,
        "train_seconds": round(ended - began, 1),
        "tokens_per_second": round(config.batch * config.window * (last - clock_step) / (ended - clock)),
        "losses": [round(part.mean().item(), 5) for part in losses[:last].split(config.log_every)],
        "validation_bits_per_byte": validate(config, model, data) if len(data.validation) else None,
    }


def main(config: Config) -> None:
    began = time.perf_counter()
    config.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    # A resumed run reads the tokenizer that its first half wrote.
    tokenizer = config.out / "model" if config.resume else config.tokenizer
    files = (config.text, config.anneal, config.validation)
    sources = Sources(*files, tokenizer, config.tokenizer_bytes, config.vocab, config.window)
    data = prepare(sources, config.out / "model", config.device)
    prepared = time.perf_counter() - began
    model = build_model(config)
    result = train(config, data, model)
    if config.recipe != "bf16":
        unprepare(model)
    model.to(torch.bfloat16).save_pretrained(config.out / "model")
    file = config.out / "model" / "model.safetensors"
    log = {
        **provenance(config.device),
        "config": plain(asdict(config)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_bytes": file.stat().st_size,
        "model_sha256": sha256(file),
        "tokens_in_text": data.main,
        "tokens_in_anneal": len(data.ids) - data.main,
        "prepare_seconds": round(prepared, 1),
        "all_seconds": round(time.perf_counter() - began, 1),
        **result,
    }
    (config.out / "train_log.json").write_text(json.dumps(log, indent=1) + "\n")
    print(json.dumps({k: v for k, v in log.items() if k not in ("config", "losses")}, indent=1))


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Config, description=__doc__))
    except ValueError as error:  # what a user can mend is one line
        sys.exit(f"pretrain.py: {error}")
