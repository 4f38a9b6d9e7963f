"""The settings of `pretrain.py`: its command line, what it refuses, and the sizes of its two models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from aoquant import QATConfig
from aoquant.config import WeightConfig
from aoquant.recipes import get_recipe

# May differ between the two halves of a resumed run; everything else must not.
MAY_CHANGE = {
    *("out", "resume", "stop_at", "seconds", "limit", "checkpoint_every", "validate_every"),
    *("text", "anneal", "validation", "held_out", "corpus", "shard_mb"),
}
# Steps that `seconds` measures the speed by. The first ones hold the compilation.
MEASURED, COMPILING = 50, 10


@dataclass(frozen=True)
class Config:
    """Command line; the defaults are the demo model: 4 983 552 parameters, 9.97 MB in bf16."""

    text: tuple[Path, ...]
    out: Path
    anneal: tuple[Path, ...] = ()
    """Text to repeat at the end, usually the pages nearest to the figure of merit."""
    validation: tuple[Path, ...] = ()
    held_out: tuple[Path, ...] = ()
    """Text that must not be trained on: the share of its word runs that the training text holds goes into the log."""
    corpus: Path | None = None
    """Folder of the encoded text, written by the first run and read by all others; `out`/corpus by default."""
    tokenizer: Path | None = None
    """A saved tokenizer to use instead of training one."""
    tokenizer_bytes: int = 60_000_000
    """Train the tokenizer on about this much text, evenly spread over the documents."""
    arch: Literal["llama", "moe"] = "llama"
    """Llama, or Mixtral, whose layers hold `experts` of `intermediate` each."""
    experts: int = 8
    top_k: int = 2
    """Experts a token."""
    balance: float = 0.01
    """Weight of the loss that keeps the experts' shares of the tokens equal."""
    vocab: int = 4096
    hidden: int = 256
    intermediate: int = 768
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    window: int = 1024
    steps: int = 10_000
    seconds: float | None = None
    """In place of `steps`: as many as take about so many seconds, by the speed of the first 50. The log states them,
    and the same run with that many `steps` has the same weights."""
    batch: int = 128
    """Windows a step, over all GPUs."""
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
    shard_mb: float = 15
    """Largest file of the saved model, in 10^6 bytes."""
    resume: bool = False
    """Continue from `out`/checkpoint.pt."""
    stop_at: int | None = None
    """Stop after this step, with a checkpoint; `steps` still sets the schedule."""
    limit: float | None = None
    """Stop, with a checkpoint, when the run has taken so many seconds, encoding included; `resume` goes on."""

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                given = getattr(self, name)
                files = ", ".join(map(str, given)) if isinstance(given, tuple) else None
                raise ValueError(f"{name} must be {rule}, got {files or repr(given)}")

        require(len(self.text) > 0, "text", "at least one file")
        for name in ("text", "anneal", "validation", "held_out"):
            require(all(path.is_file() for path in getattr(self, name)), name, "paths of existing files")
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            require(value > 0 and value % 128 == 0, name, "a positive multiple of 128 (the K of a linear)")
        for name in ("heads", "kv_heads", "layers", "window", "steps", "batch", "accumulate", "lr", "shard_mb"):
            require(getattr(self, name) > 0, name, "positive")
        for name in ("tokenizer_bytes", "log_every", "checkpoint_every", "validate_every", "seconds", "limit"):
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "positive")
        require(not self.graph or self.device.startswith("cuda"), "graph", f"False on device {self.device}")
        require(self.batch % self.accumulate == 0, "accumulate", f"a divisor of batch = {self.batch}")
        require(self.recipe != "bf16" or self.backward is None, "backward", "None with recipe bf16")
        base = None if (prepared := prepare_config(self)) is None else prepared.base_config
        held = isinstance(base, WeightConfig) and base.recipe().holds
        require(not held, "recipe", "one without calibration: there is no model yet that it could look at")
        self._check_experts(require)
        rule = f"a divisor of hidden / 2 = {self.hidden // 2} (rotary embeddings need an even head)"
        require(self.hidden % (2 * self.heads) == 0, "heads", rule)
        require(self.heads % self.kv_heads == 0, "kv_heads", f"a divisor of heads = {self.heads}")
        require(257 <= self.vocab <= 65536, "vocab", "in 257 (all bytes, end token) .. 65536 (uint16 ids)")
        require(0 <= self.warmup <= self.steps, "warmup", f"in 0 .. steps = {self.steps}")
        needed = f"at least {MEASURED} with seconds: the rate of the steps that are timed cannot know how many follow"
        require(self.seconds is None or self.warmup >= MEASURED, "warmup", needed)
        require(self.seconds is None or self.resume or self.stop_at is None, "stop_at", "None with seconds")
        for name in ("decay_fraction", "anneal_fraction", "anneal_share"):
            require(0 <= getattr(self, name) <= 1, name, "in 0 .. 1")
        require(self.stop_at is None or 0 < self.stop_at <= self.steps, "stop_at", f"in 1 .. steps = {self.steps}")
        found = self.checkpoint.is_file()
        if self.resume and not found:
            raise ValueError(
                f"resume needs a run that stopped, and there is no {self.checkpoint}: leave it out to begin"
            )
        if found and not self.resume:
            raise ValueError(f"out has the checkpoint of a run, {self.checkpoint}: give resume too, or another folder")

    def _check_experts(self, require: Any) -> None:
        moe = self.arch == "moe"
        require(not moe or self.experts > 1, "experts", "at least 2")
        require(not moe or 0 < self.top_k <= self.experts, "top_k", f"in 1 .. experts = {self.experts}")
        alone = self.recipe.endswith("-experts")
        require(moe or not alone, "recipe", "one of linear layers with arch llama: it has no experts")
        rule = "False with quantised experts: a recipe may multiply them in a loop, which waits for the device"
        require(not (self.graph and moe and self.recipe != "bf16"), "graph", rule)

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    @property
    def timed(self) -> bool:
        """Whether the number of steps is still to be found from their speed."""
        return self.seconds is not None and not self.resume


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
