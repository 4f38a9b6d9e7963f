"""`choose_formats`: a format for each layer under a budget of stored bits.

The score of a layer and a candidate is sum (dL/dy * (y_q - y))^2 over calibration tokens: y_q is the layer's deployed
output, and L the cross entropy to tokens drawn from the model's own predictions, so that the score estimates KL
(ModelOpt's AutoQuantize; the Fisher information). Layers that engines fuse (q/k/v, gate/up, all experts of a module)
choose together. Scores add up, so the best plan is a knapsack, solved exactly by dynamic programming over stored bytes.
Scores rank, and do not predict well: the plan is measured once, and a uniform plan that fits is returned where it
loses less.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import FqnToConfig

from aoquant import serving
from aoquant._messages import check_model, listed, refuse, track
from aoquant.config import QATConfig, by_layer
from aoquant.experts.families import is_transposed
from aoquant.experts.prepared import QATExperts
from aoquant.formats import Encoded
from aoquant.kv import KVCacheConfig
from aoquant.linear.function import quantized_linear
from aoquant.linear.prepared import Prepared
from aoquant.planning.changes import Change
from aoquant.planning.choose import Filter
from aoquant.planning.fused import siblings
from aoquant.planning.plan import ours, plan
from aoquant.ptq.blocks import Call, tokens_that_count
from aoquant.ptq.experts import showing
from aoquant.ptq.gram import ALL_PADDING, NOT_FINITE, of_tokens
from aoquant.ptq.prepare import weight_problems
from aoquant.ptq.sequential import NOT_REACHED, listed_batches
from aoquant.quantize import quantize_
from aoquant.recipes import of_recipe_or_format
from aoquant.report.measure import having, hooked, logits_of, planned_bytes, run, undisturbed
from aoquant.report.render import need

SEED = 0  # of the drawn tokens
EXPERTS = re.compile(r"((?:.*\.)?experts)\..+")  # a stack of experts, or a layer of one expert of a list
NOT_FINITE_LOGITS = (
    "choose_formats: the model's logits hold NaN or Inf, and the inputs of its layers do not: look for it in the weights "
    "behind the last layer, such as a norm or the output head"
)
NO_PRODUCT = (
    "an embedding, which multiplies no input, has no score: leave it out with filter_fn, and give it a format by itself"
)
NOT_FINITE_SCORE = (
    "its output under a candidate or the gradient holds NaN or Inf: give the model in float32 or bfloat16"
)


class Measured(NamedTuple):
    """A plan: bits a weight that it stores, and KL to the float model in thousandths of a nat a token."""

    name: str
    bits: float
    kl: float


class FormatChoice(FqnToConfig):
    """The `FqnToConfig` that `choose_formats` returns. `str` is a table of the plans that it measured.

    layers: the candidate of each layer and stack of experts. plans: the uniform plans and the mixed one. chosen: the
        name of the plan that this is.
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
        figure = need("matplotlib.figure", "plot").Figure(figsize=(6, 4))
        axes = figure.add_subplot()
        for p in self.plans:
            axes.scatter(p.bits, p.kl, color="#e1812c" if p.name == self.chosen else "#4878a8")
            axes.annotate(p.name, (p.bits, p.kl), xytext=(4, 4), textcoords="offset points")
        axes.set_xlabel("bits a weight, scales included")
        axes.set_ylabel("KL to the float model, 1e-3 nats a token")
        figure.savefig(path, bbox_inches="tight")


def check_picture(path: Path) -> None:
    """Raise ValueError for a kind of picture that `FormatChoice.plot` cannot write. It needs matplotlib."""
    kinds = need("matplotlib.figure", "plot").Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise ValueError(f"{path}: matplotlib writes no {path.suffix}: name it .png, .svg or .pdf")


def choose_formats(
    model: nn.Module,
    candidates: Sequence[Any],
    *,
    batches: Iterable[Any],
    bits: float,
    engine: str | None = None,
    filter_fn: Filter | None = None,
    skip: Sequence[str] = (),
) -> FormatChoice:
    """Choose one of the candidates for each linear layer and each module of stacked experts, so that they store at most
    `bits` a weight on average.

    candidates: names of recipes or formats, or PTQ configs, with dynamic scales. batches: as `calibrate_ptq` has them.
    bits: stored bits, scales included. engine: that has to serve every candidate, such as "vllm". skip: names of layers
        that stay in high precision, or "re:" and a pattern. The model is unchanged.

    Raises:
        ValueError: there are no batches or candidates, or no token that is no padding; a layer cannot take a candidate,
            is not reached by a batch, has an input that holds NaN or Inf, or a tied or sharded weight; the engine does
            not serve a candidate, or a candidate needs calibration by itself or chooses its layers itself; bits is no
            finite number, or smaller than the smallest candidate.

    Example:

            choice = aoquant.choose_formats(model, ["intx3-g32", "int4-g32", "int8-weight"], batches=batches, bits=4.6)
            aoquant.calibrate_ptq(model, batches, CalibrateConfig(choice))
    """
    check_model(model)
    given, configs = listed_batches(batches), _configs(candidates)
    if isinstance(bits, bool) or not isinstance(bits, Real) or not math.isfinite(bits):
        raise ValueError(
            f"choose_formats: bits must be a finite number of stored bits a weight, such as 4.6, got {bits!r}"
        )
    changes = {name: _changes(model, config, filter_fn, skip) for name, config in configs.items()}
    first = next(iter(changes.values()))
    _check(changes, engine)
    groups = _groups(first)
    sizes = {(fqn, name): _stored(c) for name, of in changes.items() for fqn, c in of.items()}
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
    every = {n: {f: c for label, c in of.items() for f in first[label].fqn.split(", ")} for n, of in plans.items()}
    kl = _divergences(model, {n: by_layer({f: configs[c] for f, c in of.items()}) for n, of in every.items()}, given)
    measured = [Measured(n, stored(of), kl[n]) for n, of in plans.items()]
    best = min((m for m in measured if m.bits <= bits), key=lambda m: m.kl).name
    choice = FormatChoice({f: configs[c] for f, c in every[best].items()})
    choice.layers, choice.plans, choice.chosen = every[best], measured, best
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


def _configs(candidates: Any) -> dict[str, Any]:
    """Return the PTQ config of each candidate, by its name."""
    if isinstance(candidates, str | Mapping) or not isinstance(candidates, Iterable):
        raise ValueError(
            f"choose_formats: candidates is a list of recipes, formats or configs, got {candidates!r}: give "
            "['int4-g32', 'int8-weight']"
        )
    found = {}
    for c in candidates:
        config = ours(of_recipe_or_format(c).make() if isinstance(c, str) else c)
        if isinstance(config, FqnToConfig | QATConfig | KVCacheConfig):
            raise ValueError(
                f"choose_formats: candidate {c!r} is for some layers, for training or for KV caches: give a PTQ config that "
                "every layer can have, such as 'int4-g32'"
            )
        found[c if isinstance(c, str) else repr(c)] = config
    if not found:
        raise ValueError("choose_formats: candidates must hold at least one recipe, format or config")
    return found


def _changes(model: nn.Module, config: Any, filter_fn: Filter | None, skip: Sequence[str] = ()) -> dict[str, Change]:
    """Return the change of each layer and each stack of experts under a config, by name, but of those to skip."""
    planned = plan(model, by_layer({**dict.fromkeys(skip), "_default": config}) if skip else config, filter_fn)
    chosen = [*(c for c in planned.layers if c.kind.gemm), *planned.experts]
    problems = weight_problems(chosen)
    problems += [f"{c.fqn}: {NO_PRODUCT}" for c in planned.layers if not c.kind.gemm]
    if problems:
        raise ValueError(
            f"choose_formats: {len(problems)} layer(s) cannot be scored; the model is unchanged:{listed(problems)}"
        )
    return {c.fqn.partition(", ")[0]: c for c in chosen}


def _groups(changes: Mapping[str, Change]) -> list[list[str]]:
    """Return groups of layers that choose together, because an engine makes one layer of them: all experts of a module
    or a list, which vLLM serves under one scheme, q/k/v and gate/up. Every other layer is a group of its own.
    """
    experts: dict[str, list[str]] = {}
    for fqn, c in changes.items():
        listed_in = EXPERTS.fullmatch(fqn)
        if c.layer is None or listed_in:
            experts.setdefault(listed_in[1] if listed_in else fqn.rpartition(".")[0], []).append(fqn)
    rest = [fqn for fqn in changes if not any(fqn in group for group in experts.values())]
    alike = siblings(rest)
    return [*experts.values(), *alike, *([fqn] for fqn in rest if not any(fqn in group for group in alike))]


def _matrices(change: Change) -> list[Tensor]:
    """Return the weight of a layer, or that of each expert of a stack, as (N, K)."""
    if change.layer is not None:
        return [change.matrix()]
    weight = change.weight.detach()
    return list(weight.mT if is_transposed(change.module) else weight)


def _stored(change: Change) -> int:
    w_NK, *others = _matrices(change)
    return (1 + len(others)) * planned_bytes(change.target.recipe.fprop_weight, w_NK)


def _codes(change: Change) -> list[Encoded]:
    operand = change.target.recipe.fprop_weight
    return [operand.encode(w_NK.to(change.dtype).contiguous()) for w_NK in _matrices(change)]


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
    model: nn.Module, changes: Mapping[str, Mapping[str, Change]], batches: Sequence[Any]
) -> dict[tuple[str, str], float]:
    """Return the score of each layer or stack and candidate, per token."""
    first = next(iter(changes.values()))
    codes = {(fqn, name): _codes(c) for name, of in changes.items() for fqn, c in of.items()}
    scores, reached, broken = dict.fromkeys(codes, 0.0), set[str](), list[str]()
    tokens, batch = 0, None

    def scored(fqn: str, x: Tensor, exact: Tensor, bias: Tensor | None = None, expert: int = 0) -> Tensor:
        """Return the output `exact` of a layer, whose gradient will give the scores of the layer's candidates."""
        reached.add(fqn)
        x, y = x.detach(), exact if exact.requires_grad else exact.detach().requires_grad_()
        exact = exact.detach()

        def seen(grad: Tensor) -> None:
            grad_MN = _counted(grad, batch).float()
            for name, of in changes.items():
                made = quantized_linear(x, codes[fqn, name][expert], bias, of[fqn].target.recipe)
                error_MN = _counted(made - exact, batch).float()
                scores[fqn, name] += float((grad_MN * error_MN).square().sum())

        y.register_hook(seen)
        return y

    def watch(fqn: str, module: Any, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        x = Call(args, kwargs, None).input
        if not _counted(x, batch).isfinite().all():
            raise ValueError(f"{fqn}: {NOT_FINITE}")
        return scored(fqn, x, y, module.bias)

    def product(fqn: str, matrices: Sequence[Tensor], expert: int, x: Tensor) -> Tensor:
        y = F.linear(x, matrices[expert])
        if not len(x):
            return y
        # rows of padding may hold NaN, and rows of experts do not tell padding from tokens: the logits do
        if not x.isfinite().all():
            broken.append(fqn)
        return scored(fqn, x, y, expert=expert)

    layers = {fqn: c.module for fqn, c in first.items() if c.layer is not None}
    hooks = hooked(m.register_forward_hook(partial(watch, fqn), with_kwargs=True) for fqn, m in layers.items())
    frozen = having([p for p in model.parameters() if p.requires_grad], "requires_grad", False)
    with undisturbed(model), frozen, _multiplied(first, product), hooks, torch.enable_grad():
        for batch in track(batches, "score", "batch", lines=True):
            flat = _counted(logits_of(run(model, batch)), batch)
            shares = flat.detach().float().softmax(-1)
            if not shares.isfinite().all():
                raise ValueError(f"{broken[0]}: {NOT_FINITE}" if broken else NOT_FINITE_LOGITS)
            if not len(flat):
                continue
            generator = torch.Generator(device=flat.device).manual_seed(SEED + tokens)
            drawn = torch.multinomial(shares, 1, generator=generator).squeeze(-1)
            F.cross_entropy(flat.float(), drawn, reduction="sum").backward()
            tokens += len(flat)
    refuse({fqn: NOT_REACHED for fqn in first if fqn not in reached})
    if not tokens:
        raise ValueError(f"{next(iter(first))}: {ALL_PADDING}")
    refuse({fqn: NOT_FINITE_SCORE for (fqn, _), score in scores.items() if not math.isfinite(score)})
    return {pair: score / tokens for pair, score in scores.items()}


@contextmanager
def _multiplied(
    changes: Mapping[str, Change], product: Callable[[str, Sequence[Tensor], int, Tensor], Tensor]
) -> Iterator[None]:
    """Let `product` make the products of stacks inside, from a stack's name, its matrices, an expert and its rows."""
    stacks = [(fqn, c) for fqn, c in changes.items() if c.layer is None]
    shows: dict[Any, dict[str, Any]] = {}
    try:
        for fqn, c in stacks:
            QATExperts.prepare_stack(c.module, c.parameter, Prepared(c.target.recipe, c.config, fqn))
            shows.setdefault(c.module, {})[c.parameter] = partial(product, fqn, _matrices(c))
        with ExitStack() as showings:
            for module, show in shows.items():
                showings.enter_context(showing(module, show))
            yield
    finally:
        for module, show in shows.items():
            for name in show:
                module.unprepare_stack(name)


@torch.no_grad()
def _divergences(model: nn.Module, plans: Mapping[str, Any], batches: Sequence[Any]) -> dict[str, float]:
    """Return the KL of each plan, one quantised copy of the model at a time."""
    found = {}
    for name, config in track(plans.items(), "measure", "plan", lines=True):
        quantised, total, tokens = copy.deepcopy(model), 0.0, 0
        quantize_(quantised, config)
        with undisturbed(model, quantised):
            for batch in batches:
                p, q = (_counted(logits_of(run(m, batch)), batch).float().log_softmax(-1) for m in (model, quantised))
                total += float(F.kl_div(q, p, log_target=True, reduction="sum"))
                tokens += len(p)
        found[name] = 1000 * total / max(tokens, 1)  # where every token is padding
    return found


def _counted(y: Tensor, batch: Any) -> Tensor:
    return of_tokens(y, tokens_that_count(batch))
