"""Find modules with stacked experts: parameters (E, N, K), or (E, K, N) where the module stores them transposed.

transformers gives its experts modules one protocol: the attributes of `PROTOCOL`, and the parameters of `STACKS`. The
class of a module is not asked, so that transformers is not imported here. Classes that multiply in a forward of their
own, without the protocol, are listed in `READINGS` by name.
"""

from typing import Any, NamedTuple

from torch import nn

PROTOCOL = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")
STACKS = ("gate_up_proj", "up_proj", "down_proj")


class Reading(NamedTuple):
    """How a class reads its experts. parameters: the stacked ones; transposed: (E, K, N), not (E, N, K)."""

    parameters: tuple[str, ...]
    transposed: bool


READINGS = {
    "Llama4TextExperts": Reading(("gate_up_proj", "down_proj"), True),
    "AriaGroupedExpertsGemm": Reading(("weight",), True),
    "JetMoeParallelExperts": Reading(("weight",), False),
    "LongcatFlashExperts": Reading(("gate_up_proj", "down_proj"), False),
    "Step3p7Experts": Reading(("gate_up_proj", "down_proj"), False),
    "GroupedExperts": Reading(("w1", "w2", "w3"), False),  # torchtitan's
}


def reading_of(cls: type[nn.Module]) -> Reading | None:
    """Return how a class, or a class that it derives from, reads its experts; None for other classes."""
    return next((READINGS[c.__name__] for c in cls.__mro__ if c.__name__ in READINGS), None)


def stacks_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's stacked parameters; none where it holds no stacked experts."""
    return tuple(n for n in stacked_names(module) if (p := module._parameters.get(n)) is not None and p.dim() == 3)


def stacked_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the stacked parameters of a module's class, whatever the module holds under them."""
    reading = reading_of(type(module))
    if reading is not None:
        return reading.parameters
    return STACKS if all(hasattr(module, name) for name in PROTOCOL) else ()


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module stores its experts as (E, K, N)."""
    reading = reading_of(type(module))
    transposed: Any = module.is_transposed if reading is None else reading.transposed
    return bool(transposed)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with stacked experts, by name."""
    return {name: m for name, m in model.named_modules() if stacks_of(m)}


def lacks(module: nn.Module) -> list[str]:
    """Return the attributes of transformers' protocol that a module lacks."""
    missing = [name for name in PROTOCOL if not hasattr(module, name)]
    return missing + ([] if any(n in module._parameters for n in STACKS) else ["gate_up_proj or up_proj"])


def why_not_read(module: nn.Module) -> str | None:
    """Return why the forward of a class in `READINGS`, as it is set, cannot run over packed experts; None if it can."""
    if reading_of(type(module)) is not None and getattr(module, "use_grouped_mm", True) is False:
        return "use_grouped_mm=False multiplies by w[e].transpose(-2, -1), which packed experts do not answer: set use_grouped_mm=True"
    return None
