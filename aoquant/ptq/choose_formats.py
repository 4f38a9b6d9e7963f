"""`choose_formats`: a format for each layer under a budget of stored bits.

The score of a layer and a candidate is sum (dL/dy * (y_q - y))^2 over calibration tokens: y_q is the layer's deployed
output, and L the cross entropy to tokens drawn from the model's own predictions, so that the score estimates KL
(ModelOpt's AutoQuantize; the Fisher information). Layers that engines fuse (q/k/v, gate/up) choose together. Scores
add up, so the best plan is a knapsack, solved exactly by dynamic programming over stored bytes. Scores rank, and do
not predict well: the plan is measured once, and a uniform plan that fits is returned where it loses less.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import FqnToConfig

from aoquant import serving
from aoquant._messages import check_model, track
from aoquant.config import by_layer, named
from aoquant.linear.function import quantized_linear
from aoquant.planning.choose import Filter
from aoquant.planning.fused import siblings
from aoquant.planning.plan import plan
from aoquant.ptq.blocks import tokens_that_count
from aoquant.ptq.sequential import listed_batches
from aoquant.quantize import quantize_
from aoquant.report.measure import logits_of, planned_bytes, run, undisturbed

SEED = 0  # of the drawn tokens


class Measured(NamedTuple):
    """A plan: bits a weight that it stores, and KL to the float model in thousandths of a nat a token."""

    name: str
    bits: float
    kl: float


class FormatChoice(FqnToConfig):
    """The `FqnToConfig` that `choose_formats` returns. `str` is a table of the plans that it measured.

    layers: the candidate of each layer. plans: the uniform plans and the mixed one. chosen: the name of the plan that
        this is.
    """

    layers: Mapping[str, str]
    plans: Sequence[Measured]
    chosen: str

    def __str__(self) -> str:
        lines = ["| plan | bits a weight | KL, 1e-3 nats | |", "|---|---|---|---|"]
        marks = {True: "chosen", False: ""}
        lines += [f"| {p.name} | {p.bits:.2f} | {p.kl:.1f} | {marks[p.name == self.chosen]} |" for p in self.plans]
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw KL against bits, as a picture."""
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(6, 4))
        axes = figure.add_subplot()
        for p in self.plans:
            axes.scatter(p.bits, p.kl, color="#e1812c" if p.name == self.chosen else "#4878a8")
            axes.annotate(p.name, (p.bits, p.kl), xytext=(4, 4), textcoords="offset points")
        axes.set_xlabel("bits a weight, scales included")
        axes.set_ylabel("KL to the float model, 1e-3 nats a token")
        figure.savefig(path, bbox_inches="tight")


def choose_formats(
    model: nn.Module,
    candidates: Sequence[Any],
    *,
    batches: Iterable[Any],
    bits: float,
    engine: str | None = None,
    filter_fn: Filter | None = None,
) -> FormatChoice:
    """Choose one of the candidates for each linear layer, so that they store at most `bits` a weight on average.

    candidates: names of recipes or formats, or PTQ configs, with dynamic scales. batches: as `calibrate_ptq` has them.
    bits: stored bits, scales included. engine: that has to serve every candidate, such as "vllm". The model is
        unchanged.

    Raises:
        ValueError: there are no batches or candidates; a layer cannot take a candidate; the engine does not serve one;
            one needs calibration by itself; or the budget is smaller than the smallest candidate.

    Example:

            choice = aoquant.choose_formats(model, ["intx3-g32", "int4-g32", "int8-weight"], batches=batches, bits=4.6)
            aoquant.calibrate_ptq(model, batches, CalibrateConfig(choice))
    """
    check_model(model)
    given = listed_batches(batches)
    configs = {c if isinstance(c, str) else repr(c): _config(c) for c in candidates}
    if not configs:
        raise ValueError("choose_formats: candidates must hold at least one recipe, format or config")
    changes = {
        name: {c.fqn.partition(", ")[0]: c for c in plan(model, config, filter_fn).layers if c.kind.gemm}
        for name, config in configs.items()
    }
    first = next(iter(changes.values()))
    _check(changes, engine)
    alike = siblings(first)
    groups = [*alike, *([fqn] for fqn in first if not any(fqn in group for group in alike))]
    sizes = {
        (fqn, name): planned_bytes(c.target.recipe.fprop_weight, c.matrix())
        for name, of in changes.items()
        for fqn, c in of.items()
    }
    weights = sum(c.weight.numel() for c in first.values())

    def stored(layers: Mapping[str, str]) -> float:
        return 8 * sum(sizes[pair] for pair in layers.items()) / weights

    uniform = {name: dict.fromkeys(first, name) for name in configs}
    smallest = min(map(stored, uniform.values()))
    if bits < smallest:
        raise ValueError(
            f"choose_formats: bits={bits} is below the smallest candidate, which stores {smallest:.3f} bits a weight: raise "
            "bits, or add a smaller candidate"
        )
    scores = _scores(model, changes, given)
    cost = [{n: sum(sizes[fqn, n] for fqn in group) for n in configs} for group in groups]
    lost = [{n: sum(scores[fqn, n] for fqn in group) for n in configs} for group in groups]
    chosen = solve(cost, lost, int(bits * weights / 8))
    mixed = {fqn: name for group, name in zip(groups, chosen, strict=True) for fqn in group}
    plans = uniform | ({"mixed": mixed} if mixed not in uniform.values() else {})
    kl = _divergences(model, {n: by_layer({f: configs[c] for f, c in of.items()}) for n, of in plans.items()}, given)
    measured = [Measured(n, stored(of), kl[n]) for n, of in plans.items()]
    best = min((m for m in measured if m.bits <= bits), key=lambda m: m.kl).name
    choice = FormatChoice({f: configs[c] for f, c in plans[best].items()})
    choice.layers, choice.plans, choice.chosen = plans[best], measured, best
    return choice


def solve(cost: Sequence[Mapping[str, int]], lost: Sequence[Mapping[str, float]], budget: int) -> list[str]:
    """Return the choice of each group with the smallest total loss whose total cost is within the budget, which the
    cheapest choices are.

    A partial plan that costs no less and loses no less than another one is dropped: what is left stays exact.
    """
    least = [min(c.values()) for c in cost]
    reserve = sum(least)
    front: dict[int, tuple[float, tuple[str, ...]]] = {0: (0.0, ())}
    for costs, losses, smallest in zip(cost, lost, least, strict=True):
        reserve -= smallest
        new: dict[int, tuple[float, tuple[str, ...]]] = {}
        for spent, (loss, plan_) in front.items():
            for name, own in costs.items():
                total, value = spent + own, (loss + losses[name], (*plan_, name))
                if total + reserve <= budget and (total not in new or value[0] < new[total][0]):
                    new[total] = value
        front, best = {}, float("inf")
        for total in sorted(new):
            if new[total][0] < best:
                front[total], best = new[total], new[total][0]
    return list(min(front.values())[1])


def _config(candidate: Any) -> Any:
    """Return a PTQ config of a recipe's name, a format's name, or a config."""
    if not isinstance(candidate, str):
        return candidate
    try:
        return named(candidate)
    except ValueError:
        return named(candidate if "/" in candidate else f"{candidate}/")


def _check(changes: Mapping[str, Mapping[str, Any]], engine: str | None) -> None:
    """Raise ValueError for a candidate that the engine does not serve, or that needs calibration by itself."""
    if engine is not None and engine not in serving.ENGINES:
        raise ValueError(f"choose_formats: engine is one of {', '.join(serving.ENGINES)}, got {engine!r}")
    for name, of in changes.items():
        for recipe in {c.target.recipe for c in of.values()}:
            if recipe.holds or recipe.history:
                raise ValueError(
                    f"candidate {name}: its scales or transform are calibrated: give one with dynamic scales"
                )
            refuses = serving.REFUSALS.get(engine or "")
            if refuses is not None and (reason := refuses(recipe, False)) is not None:
                raise ValueError(f"candidate {name}: {engine} does not serve it: {reason}")


def _scores(
    model: nn.Module, changes: Mapping[str, Mapping[str, Any]], batches: Sequence[Any]
) -> dict[tuple[str, str], float]:
    """Return the score of each layer and candidate, per token."""
    codes = {
        (fqn, name): c.target.recipe.fprop_weight.encode(c.matrix().to(c.dtype))
        for name, of in changes.items()
        for fqn, c in of.items()
    }
    scores = dict.fromkeys(codes, 0.0)

    def watch(fqn: str) -> Any:
        def hook(module: Any, args: Any, y: Tensor) -> Tensor:
            x, exact = args[0].detach(), y.detach()

            def seen(grad: Tensor) -> None:
                for name, of in changes.items():
                    made = quantized_linear(x, codes[fqn, name], module.bias, of[fqn].target.recipe)
                    scores[fqn, name] += float((grad.float() * (made - exact).float()).square().sum())

            y = y if y.requires_grad else y.detach().requires_grad_()
            y.register_hook(seen)
            return y

        return hook

    tokens = 0
    layers = {fqn: c.module for fqn, c in next(iter(changes.values())).items()}
    with undisturbed(model), _without_gradients(model), torch.enable_grad():
        hooks = [module.register_forward_hook(watch(fqn)) for fqn, module in layers.items()]
        try:
            for batch in track(batches, "score", "batch"):
                logits = logits_of(run(model, batch))
                flat = _counted(logits, batch)
                generator = torch.Generator(device=flat.device).manual_seed(SEED + tokens)
                drawn = torch.multinomial(flat.detach().float().softmax(-1), 1, generator=generator).squeeze(-1)
                F.cross_entropy(flat.float(), drawn, reduction="sum").backward()
                tokens += len(flat)
        finally:
            for hook in hooks:
                hook.remove()
    return {pair: score / max(tokens, 1) for pair, score in scores.items()}


@torch.no_grad()
def _divergences(model: nn.Module, plans: Mapping[str, Any], batches: Sequence[Any]) -> dict[str, float]:
    """Return the KL of each plan, one quantised copy of the model at a time."""
    found = {}
    for name, config in track(plans.items(), "measure", "plan"):
        quantised, total, tokens = copy.deepcopy(model), 0.0, 0
        quantize_(quantised, config)
        with undisturbed(model, quantised):
            for batch in batches:
                p, q = (_counted(logits_of(run(m, batch)), batch).float().log_softmax(-1) for m in (model, quantised))
                total += float(F.kl_div(q, p, log_target=True, reduction="sum"))
                tokens += len(p)
        found[name] = 1000 * total / max(tokens, 1)
    return found


def _counted(logits: Tensor, batch: Any) -> Tensor:
    """Return (tokens, classes): logits of the tokens that are no padding."""
    mask, flat = tokens_that_count(batch), logits.reshape(-1, logits.shape[-1])
    return flat if mask is None or mask.shape != logits.shape[:-1] else flat[mask.flatten().to(flat.device)]


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Ask for no gradients of parameters inside, for those of outputs alone."""
    before = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in before:
            p.requires_grad_(False)
        yield
    finally:
        for p in before:
            p.requires_grad_(True)
