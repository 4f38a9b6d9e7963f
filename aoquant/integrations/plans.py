"""Plans of the commands, for work that takes long: warnings of an interactive session are errors here.

A name or pattern that matches no layer is a slip of the pen. Where the result is seen at once a warning is enough;
before an hour of conversion or training it stops the work.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from aoquant.linear.kinds import is_linear
from aoquant.planning import caches
from aoquant.planning.choose import Choice, each
from aoquant.planning.heads import output_embeddings
from aoquant.planning.plan import Plan, plan
from aoquant.planning.tied import identity
from aoquant.recipes import get_recipe
from aoquant.targets import resolve


def with_embeddings(model: nn.Module, recipe: str, layers: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """Return `layers`, as `recipes.mixed` takes them, and every embedding and the output head that is not named yet.

    recipe: of these. An embedding that shares its weight with no linear layer has no inputs to quantise, and gets the
    recipe's weight format alone.
    """
    head: Any = output_embeddings(model)
    target = resolve(each(get_recipe(recipe).make())[0]).recipe
    alone = recipe if target.fprop_input is None else f"{target.fprop_weight.name}/"
    named = {entry.rpartition("=")[0] or entry for entry in layers} | set(skip)
    modules: list[tuple[str, Any]] = list(model.named_modules())
    shared = {identity(m.weight) for _, m in modules if is_linear(m)}
    found = [(n, m) for n, m in modules if n not in named and (m is head or isinstance(m, nn.Embedding))]
    return [*layers, *(f"{n}={recipe if identity(m.weight) in shared else alone}" for n, m in found)]


def checked_plan(model: nn.Module, config: Any, *, skip_incompatible: bool = False) -> Plan:
    """Return the plan of `quantize_` for layers; KV caches are checked.

    Raises:
        ValueError: a layer cannot take its config (unless skip_incompatible), or a name or pattern matches no layer.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the name or pattern .* matches no (linear layer|attention module)")
        try:
            layers = caches.plan(model, config, None, skip_incompatible=skip_incompatible).layers
            if layers is None and config is not None:  # KV caches alone
                return Plan([], {}, Choice())
            return plan(model, layers, None, skip_incompatible=skip_incompatible)
        except UserWarning as warning:
            raise ValueError(str(warning)) from None


def ptq_plan(model: nn.Module, config: Any, *, skip_incompatible: bool = False) -> Plan:
    """The plan of quantising without training. Raises ValueError: as `checked_plan`, or `config` is one of training."""
    found = checked_plan(model, config, skip_incompatible=skip_incompatible)
    steps = {change.step for change in found.layers} | {change.step for change in found.experts}
    if steps - {"quantize"}:
        raise ValueError("a checkpoint is converted with a PTQ config, not with a QATConfig: give its base")
    return found
