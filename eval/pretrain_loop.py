"""The training of `pretrain.py`: batches, learning rate, steps, checkpoints, validation.

The batch of a step is a function of (seed, step) alone, so the data position is the step, and a run that stops and
resumes ends with bit for bit the weights of one that did not. (On CUDA the backward passes of flash attention and
embedding add in no fixed order: there the same holds only with `--deterministic`, which is slower.)

How many steps fill `seconds` is known once some were timed. They are part of the training: during warm-up nothing
depends on the number of steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from corpus import Corpus
from data_parallel import Ranks
from graphed import graphed
from pretrain_config import COMPILING, MAY_CHANGE, MEASURED, Config
from pretrain_model import Model, compiled, window_loss
from provenance import plain
from tqdm import tqdm

MARGIN = 0.03  # of `seconds`, for steps that get slower
UNKNOWN = 2**31  # steps of a run whose first ones are being timed


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
def validate(config: Config, model: Model, data: Corpus) -> dict[str, float]:
    """Bits per byte and perplexity per token of the validation text in consecutive windows, each without a past; eager,
    as it runs seldom.
    """
    windows = data.validation.unfold(0, config.window + 1, config.window)
    parts = windows.split(config.batch)
    with torch.compiler.set_stance("force_eager"):
        nats = sum(float(window_loss(model, part).token) * part[:, 1:].numel() for part in parts)
    nats /= windows[:, 1:].numel()
    bits = nats / math.log(2) * len(data.validation) / data.validation_bytes
    return {"bits_per_byte": bits, "perplexity": math.exp(nats)}


def train(config: Config, data: Corpus, model: Model, began: float | None = None) -> dict[str, Any]:
    """Run or continue the steps; returns what the log states. `model` is left trained.

    began: the time, by `perf_counter`, that `limit` counts from; now by default.
    """
    run = Run(config, data, model, began or time.perf_counter())
    if config.timed:
        run.to(MEASURED)
        run.plan()
    run.to(run.config.stop_at or run.config.steps)
    return run.finish()


class Run:
    """A training that stands at `step`."""

    def __init__(self, config: Config, data: Corpus, model: Model, began: float) -> None:
        self.config, self.data, self.model, self.began = config, data, model, began
        self.ranks = Ranks(config.device)
        share = config.accumulate * self.ranks.world
        if config.batch % share:
            raise ValueError(f"batch must be a multiple of accumulate x ranks = {share}, got {config.batch}")
        self.optimizer = self._optimizer()
        self.step = 0
        # On the device, as reading a loss stalls its queue.
        self.losses = torch.zeros(config.steps, device=config.device)
        self.text_hash = hashlib.sha256(data.ids.cpu().numpy().tobytes()).hexdigest()
        if config.resume:
            self._load()
        elif config.timed:  # a schedule without an end, until there is one
            self.config = replace(config, steps=UNKNOWN)
        self.first, self.clock, self.clock_step = self.step, time.perf_counter(), self.step
        self.start = self.clock
        self.loss_of = compiled(model) if config.compile else window_loss
        self.step_of = self._one_step
        if config.graph:
            self.step_of = graphed(self._one_step, model, self.optimizer, self._batch(self.step))

    def _optimizer(self) -> torch.optim.AdamW:
        c, parameters = self.config, list(self.model.parameters())
        decayed, others = ([p for p in parameters if (p.dim() >= 2) == matrix] for matrix in (True, False))
        groups = [{"params": decayed, "weight_decay": c.weight_decay}, {"params": others, "weight_decay": 0.0}]
        lr = torch.tensor(c.lr, device=c.device) if c.graph else c.lr  # a graph reads it from the device
        fused = c.device.startswith("cuda")
        return torch.optim.AdamW(groups, lr=lr, betas=(c.beta1, c.beta2), fused=fused, capturable=c.graph)

    def _batch(self, step: int) -> torch.Tensor:
        return self.ranks.part(batch_at(self.config, self.data, step))

    def _one_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), device=self.config.device)
        for windows in batch.chunk(self.config.accumulate):
            part = self.loss_of(self.model, windows)
            ((part.token + part.balance) / self.config.accumulate).backward()
            loss += part.token.detach() / self.config.accumulate
        self.ranks.average([p.grad for p in self.model.parameters() if p.grad is not None] + [loss])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def to(self, last: int) -> None:
        """Step until `last`, or until `limit` is over."""
        c, known = self.config, self.config.steps != UNKNOWN
        options = {"initial": self.step, "total": c.steps if known else None, "disable": not self.ranks.first}
        for step in (bar := tqdm(range(self.step, last), desc="train", unit="step", **options)):
            for group in self.optimizer.param_groups:
                if c.graph:
                    group["lr"].fill_(lr_at(c, step))
                else:
                    group["lr"] = lr_at(c, step)
            self.losses[step] = self.step_of(self._batch(step))
            self.step = step + 1
            if self.step == self.first + COMPILING:
                self.losses[step].item()
                self.clock, self.clock_step = time.perf_counter(), self.step
            if self.step % c.log_every == 0:
                bar.set_postfix(self._recent(), refresh=False)
            if known and self.step < last:
                if self.step % c.log_every == 0 and self._over():
                    return
                self._look_around()

    def _recent(self) -> dict[str, str]:
        """What the progress bar says; it empties the device's queue."""
        loss = self.losses[max(self.first, self.step - self.config.log_every) : self.step].mean().item()
        tokens = self.config.batch * self.config.window * (self.step - self.clock_step)
        seconds = max(time.perf_counter() - self.clock, 1e-6)  # some clocks stand still for milliseconds
        return {"loss": f"{loss:.4f}", "tokens_s": f"{tokens / seconds:.3g}"}

    def _over(self) -> bool:
        """Whether `limit` is over; the same on all ranks."""
        seconds = time.perf_counter() - self.began
        return self.ranks.agreed(float(self.config.limit is not None and seconds > self.config.limit)) > 0

    def _look_around(self) -> None:
        """Between two steps: a checkpoint, a validation."""
        c = self.config
        if self.step % c.checkpoint_every == 0:
            self.save()
        if c.validate_every and self.step % c.validate_every == 0 and self.ranks.first:
            found = {"step": self.step, **validate(c, self.model, self.data)}
            with (c.out / "validation.jsonl").open("a") as file:
                print(json.dumps(found), file=file)

    def plan(self) -> None:
        """Find the number of steps that fill `seconds`."""
        self.losses[self.step - 1].item()
        now, seconds = time.perf_counter(), self.config.seconds or 0.0
        a_step = max(now - self.clock, 1e-6) / (self.step - self.clock_step)
        left = seconds * (1 - MARGIN) - (now - self.start)
        steps = int(self.ranks.agreed(self.step + max(0, left / a_step)))
        self.config = replace(self.config, steps=steps)
        if steps * (1 - self.config.anneal_fraction) < self.step:
            raise ValueError(f"seconds must last for more than the {self.step} steps that are timed, got {seconds}")
        self.losses = torch.cat([self.losses[: self.step], self.losses.new_zeros(steps)])[:steps]

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        rng = {"rng": torch.get_rng_state()}
        if self.config.device.startswith("cuda"):
            rng["cuda_rng"] = torch.cuda.get_rng_state()
        trained = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses}
        about = {"step": self.step, "config": plain(asdict(self.config)), "text_hash": self.text_hash}
        return {**about, "ranks": self.ranks.world, **trained, **rng}

    def save(self) -> None:
        """Checkpoint, whole or not at all."""
        if self.ranks.first:
            partial = self.config.checkpoint.with_suffix(".partial")
            torch.save(self.state(), partial)
            partial.replace(self.config.checkpoint)

    def _load(self) -> None:
        state = torch.load(self.config.checkpoint, map_location=self.config.device, weights_only=True)
        before, may_change = state["config"], set(MAY_CHANGE)
        if self.config.seconds is not None:  # the first half found the steps
            self.config = replace(self.config, steps=before["steps"])
        now = plain(asdict(self.config))
        changed = [
            f"{k} from {before.get(k)!r} to {now[k]!r}" for k in now.keys() - may_change if before.get(k) != now[k]
        ]
        if state.get("ranks", 1) != self.ranks.world:
            changed.append(f"ranks from {state.get('ranks', 1)} to {self.ranks.world}")
        if changed or state["text_hash"] != self.text_hash:
            raise ValueError(
                f"resume needs the settings and the text of the run in {self.config.out}; changed: {', '.join(sorted(changed)) or 'the text'}. "
                "Give them as they were, or another out without resume"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        if self.config.device.startswith("cuda"):
            torch.cuda.set_rng_state(state["cuda_rng"].cpu())
        self.step, self.losses = state["step"], state["losses"]

    def finish(self) -> dict[str, Any]:
        """Save, validate, and say what was done."""
        c, last = self.config, self.step
        self.losses[last - 1].item()
        ended = time.perf_counter()
        self.save()
        found = validate(c, self.model, self.data) if len(self.data.validation) and self.ranks.first else {}
        tokens = c.batch * c.window
        losses = [round(part.mean().item(), 5) for part in self.losses[:last].split(c.log_every)]
        steps = [min((i + 1) * c.log_every, last) for i in range(len(losses))]
        return {
            "first_step": self.first,
            "last_step": last,
            "steps": c.steps,
            "tokens_trained": last * tokens,
            "train_seconds": round(ended - self.start, 1),
            "tokens_per_second": round(tokens * (last - self.clock_step) / max(ended - self.clock, 1e-6)),
            "ranks": self.ranks.world,
            "losses": losses,
            "curve": [
                {"step": step, "tokens": step * tokens, "learning_rate": lr_at(c, step - 1), "loss": loss}
                for step, loss in zip(steps, losses, strict=True)
            ],
            "validation_bits_per_byte": found.get("bits_per_byte"),
            "validation_perplexity": found.get("perplexity"),
        }
