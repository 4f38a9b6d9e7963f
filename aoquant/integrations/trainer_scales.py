"""Learned scales in transformers' Trainer, with or without `QATCallback`: not decayed, and watched.

Trainer decays every parameter but biases and norms, which it knows by their names. Importing aoquant takes learned
scales out of that list, and gives every Trainer a callback that warns of an optimizer that decays them or takes them
for matrices, and, when the Trainer logs or saves, of scales that are not positive. A step costs nothing.
"""

from __future__ import annotations

import functools
import re
import warnings
from types import ModuleType
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aoquant._warning import AoquantWarning
from aoquant.layers.learned_scales import learned_scales, not_positive

# optimizers that treat what has two dimensions as a matrix
_MATRICES = re.compile("muon|dion|shampoo|soap|galore", re.IGNORECASE)


class ScaleCallback(TrainerCallback):
    """Warn of optimizers and of values that learned scales cannot have. Each warning comes once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        if problem := misplaced(model, kwargs.get("optimizer")):
            warnings.warn(problem, AoquantWarning, stacklevel=2)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        self._check(model, "log")

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        self._check(model, "save")

    def _check(self, model: nn.Module, when: str) -> None:
        if when not in self.said and (problem := not_positive(model)):
            self.said.add(when)
            warnings.warn(problem, AoquantWarning, stacklevel=2)


def misplaced(model: nn.Module, optimizer: Any) -> str | None:
    """Return a sentence about an optimizer that decays learned scales or takes them for matrices; None without one."""
    names = {id(p): name for name, p in learned_scales(model).items()}
    kinds = type(optimizer).__name__, type(getattr(optimizer, "optimizer", None)).__name__
    by_class = any(_MATRICES.search(kind) for kind in kinds)
    for group in getattr(optimizer, "param_groups", ()):
        found = [names[id(p)] for p in group["params"] if id(p) in names]
        matrices = group.get("use_muon", by_class)
        if found and (matrices or group.get("weight_decay")):
            does = f"takes {len(found)} learned scale(s)" if matrices else f"decays {len(found)} learned scale(s)"
            return (
                f"the optimizer {kinds[0]} {does}, such as {found[0]}, {'for matrices' if matrices else 'towards zero'}, which makes them too "
                "small or negative: give it aoquant.parameter_groups(model)"
            )
    return None


def install(module: ModuleType) -> None:
    """Take learned scales out of the decayed parameters of `transformers.trainer`, and watch them in each Trainer."""
    module.DEFAULT_CALLBACKS.append(ScaleCallback)
    before = module.Trainer.get_decay_parameter_names

    @functools.wraps(before)
    def get_decay_parameter_names(self: Any, model: nn.Module) -> list[str]:
        scales = learned_scales(model)
        return [name for name in before(self, model) if name not in scales]

    module.Trainer.get_decay_parameter_names = get_decay_parameter_names
