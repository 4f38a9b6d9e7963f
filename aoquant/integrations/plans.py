"""Plans for work that takes long: warnings of an interactive session are errors here.

A name or pattern that matches no layer is a slip of the pen. Where the result is seen at once a warning is enough;
before an hour of conversion or training it stops the work.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from aoquant.planning.plan import Plan, plan


def checked_plan(model: nn.Module, config: Any, *, skip_incompatible: bool = False) -> Plan:
    """Return the plan of `quantize_`.

    Raises:
        ValueError: a layer cannot take its config (unless skip_incompatible), or a name or pattern matches no layer.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the name or pattern .* matches no linear layer")
        try:
            return plan(model, config, None, skip_incompatible=skip_incompatible)
        except UserWarning as warning:
            raise ValueError(str(warning)) from None


def ptq_plan(model: nn.Module, config: Any, *, skip_incompatible: bool = False) -> Plan:
    """The plan of quantising without training. Raises ValueError: as `checked_plan`, or `config` is one of training."""
    found = checked_plan(model, config, skip_incompatible=skip_incompatible)
    steps = {change.step for change in found.layers} | {change.step for change in found.experts}
    if steps - {"quantize"}:
        raise ValueError("a checkpoint is converted with a PTQ config, not with a QATConfig: give its base")
    return found
