"""Prepare the layers that calibrated PTQ chooses codes for, so that recipes, scales and refusals are those of QAT."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from aoquant._messages import advice, listed, warn
from aoquant.config import QATConfig, by_layer
from aoquant.linear.prepared import QATLinear
from aoquant.planning.changes import Chosen
from aoquant.planning.choose import Filter, choose
from aoquant.planning.fused import share_outer_scales
from aoquant.planning.plan import plan, plan_layer, prepare_target
from aoquant.planning.stack_changes import apply as apply_stack
from aoquant.planning.tied import identity
from aoquant.ptq.ptq_report import PTQRow
from aoquant.quantize import apply
from aoquant.report.measure import energies
from aoquant.unpack import why_not_held


def weight_problems(chosen: Iterable[Chosen]) -> list[str]:
    """Return why layers cannot be calibrated one by one: their weights are sharded, tied, or on the meta device."""
    found, weights = [], dict[Any, str]()
    for c in chosen:
        fqn = c.fqn.partition(", ")[0]
        if isinstance(c.weight, DTensor):
            found.append(f"{fqn}: its weight is sharded (DTensor): calibrate the whole model, and shard it then")
        elif c.weight.is_meta:
            found.append(f"{fqn}: its weight is on the meta device and has no values: load it first")
        elif (other := weights.setdefault(identity(c.weight), fqn)) != fqn:
            found.append(f"{fqn}: its weight is tied to that of {other}: leave both out, or untie them")
    return found


def prepare_layers(
    model: nn.Module, recipe: Any, filter_fn: Filter | None, step: str | None, skip_incompatible: bool, *, chooses: bool
) -> tuple[dict[str, Any], dict[str, Any], list[PTQRow]]:
    """Prepare the chosen layers, and switch them to high precision; convert embeddings, unless step is "prepare".

    chooses: whether codes will be chosen. Layers that train on from chosen codes hold their scales. Returns linear
    layers by name, modules with stacked experts by name, and rows of embeddings, which no data chooses codes for: their
    error is that of the rows that they hold.

    Raises:
        ValueError: naming each layer that cannot be prepared, or no layer is chosen.
    """
    configs, choice = {}, choose(model, recipe, filter_fn)
    if not choice.layers and not choice.stacks:
        look = advice("filter_fn, or at the names in the config", "--layers and --skip")
        raise ValueError(f"calibrate_ptq: no layer is chosen: look at {look}")
    problems = weight_problems([*choice.layers, *choice.stacks])
    for chosen, stacked in [*((c, False) for c in choice.layers), *((c, True) for c in choice.stacks)]:
        fqn = chosen.fqn.partition(", ")[0]
        is_qat = isinstance(chosen.config, QATConfig)
        if is_qat and not stacked and (step is None or chosen.config.step != "prepare"):
            raise ValueError(
                f"{fqn}: give calibrate_ptq a PTQ config, or with step='prepare' a QATConfig that prepares"
            )
        gemm = not isinstance(chosen.module, nn.Embedding)
        of_one = chosen.config if is_qat else QATConfig(chosen.config, step="prepare")
        holding = (chooses and step == "prepare") if stacked else gemm and (chooses or step is None)
        why = why_not_held(prepare_target(of_one).recipe) if holding else None
        if step == "prepare" and why is not None:
            problems.append(f"{fqn}: {why}")
        holds = holding and not stacked and why is None and of_one.scales == "dynamic"
        configs[fqn] = dataclasses.replace(of_one, scales="static") if holds else of_one
    if problems:
        raise ValueError(f"{len(problems)} layer(s) cannot be calibrated; the model is unchanged:{listed(problems)}")
    planned = plan(model, by_layer(configs), None, skip_incompatible=skip_incompatible)
    if planned.skipped:
        warn(
            f"{len(planned.skipped)} layer(s) cannot take their config and stay float:{listed(planned.skipped.values())}"
        )
    rows: list[PTQRow] = []
    for change in planned.layers:
        layer: Any = apply(change)
        if isinstance(layer, QATLinear):
            continue
        signal, noise = energies(layer.matrix(), layer.quantised_weight())
        error, name = noise / max(signal, 1e-300), layer.prepared.recipe.fprop_weight.name
        rows.append(PTQRow(change.fqn, name, 0, error, error, 0.0, "an embedding, which is rounded to the nearest"))
        if step is None:
            apply(plan_layer(layer, QATConfig(step="convert"), change.fqn))  # type: ignore[arg-type]
    for stack in planned.experts:
        apply_stack(stack)
    share_outer_scales(model)
    found = {c.fqn.partition(", ")[0]: c.module for c in planned.layers if isinstance(c.module, QATLinear)}
    stacks = {c.fqn.partition(", ")[0].rpartition(".")[0]: c.module for c in planned.experts}
    for layer in (*found.values(), *stacks.values()):
        layer.fake_quant = False
    return found, stacks, rows
