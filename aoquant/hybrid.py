"""`HybridConfig`: a cast for each of the six operands of a linear layer's three GEMMs.

    fprop  y  = x  W^T     fprop_input          fprop_weight
    dgrad  dx = dy W       dgrad_grad_output    dgrad_weight
    wgrad  dW = dy^T x     wgrad_grad_output    wgrad_input

A cast is a format and its source: "original", the high-precision tensor, which loses least; or "forward", the value
that fprop made of it, so that backward differentiates the function that forward computed. `linear/law.py` says which
casts may meet; a config that breaks the law is never built.

The forward's pair is what convert deploys. Configs are values: a change of mind is another config, given to `quantize_`
again.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torchao.core.config import AOBaseConfig

from aoquant._messages import naming
from aoquant.formats import HighPrecision, Operand, get_operand
from aoquant.formats.delayed import SELECTS
from aoquant.linear import law
from aoquant.linear.law import SAVES
from aoquant.linear.recipe import BACKWARD, LinearRecipe

BASE = "base"  # the format of an operand of fprop that QATConfig's base_config names
SOURCES = {"dgrad_weight": "forward"}  # default source of each cast; "original" for the casts that are not here
METHODS = {"quartet": "rht32+mxfp4-sr", "quartet2": "rht128+ms-eden"}  # named methods; any format's name will do
MARGIN = 16  # largest of delayed factors, either way
FPROP = ("fprop_input", "fprop_weight")
PAIRS = {"dgrad": BACKWARD[:2], "wgrad": BACKWARD[2:]}


@dataclass(frozen=True)
class Cast:
    """Describe how one operand is made.

    format: a name of `list_formats()`, with a transform in front where it has one; None is high precision. source:
        "original" or "forward".
    """

    format: str | None = None
    source: str = "original"

    def operand(self) -> Operand | None:
        """Return the recipe's operand; None for high precision."""
        return None if self.format in (None, "high-precision") else get_operand(self.format)


@dataclass(frozen=True)
class HybridConfig(AOBaseConfig):
    """Train linear layers with a cast for each operand, and convert them to the formats of fprop.

    fprop_input, fprop_weight: "base" is what the base_config of a QATConfig deploys. dgrad_*, wgrad_*: of a backward
        GEMM, along the axis that it contracts. Each is a `Cast`, the name of a format, or None for high precision; a
        name alone has the source "original", and "forward" for dgrad_weight.
    save: what forward keeps of the input and the weight: "col", the codes that backward reads, where forward makes
        them, or "hp", no codes. Gradients are equal; "hp" encodes more in backward.
    seed: of the random numbers of casts that draw.
    amax_history: steps that delayed scaling remembers, for TransformerEngine's fp8 per tensor; 0: scales of the step.
    amax_select: "max" of them, or the "most_recent". amax_margin: bits that delayed factors leave above that maximum:
        factors are smaller by 2^amax_margin.

    Example: `quantize_(model, HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"))`, then train, then `quantize_(model,
        QATConfig(step="convert"))`.

    Raises:
        ValueError: the casts break the law (docs/hybrid.md); the message names the GEMM, its operands and their
            formats.
    """

    fprop_input: Cast | str | None = BASE
    fprop_weight: Cast | str | None = BASE
    dgrad_grad_output: Cast | str | None = None
    dgrad_weight: Cast | str | None = None
    wgrad_grad_output: Cast | str | None = None
    wgrad_input: Cast | str | None = None
    save: str = "col"
    seed: int = 0
    amax_history: int = 0
    amax_select: str = "max"
    amax_margin: int = 0

    def __post_init__(self) -> None:
        for slot in (*FPROP, *BACKWARD):
            given = getattr(self, slot)
            if not isinstance(given, Cast | str | None):
                raise ValueError(f"HybridConfig: {slot} is a Cast, the name of a format or None, got {given!r}")
            cast = given if isinstance(given, Cast) else Cast(given, SOURCES.get(slot, "original"))
            object.__setattr__(self, slot, cast)
            with naming(f"HybridConfig: {slot}"):
                self.has_base(slot) or cast.operand()
        if self.save not in SAVES[1:]:
            raise ValueError(f"HybridConfig: save is one of {', '.join(SAVES[1:])}, got {self.save!r}")
        check_seed("HybridConfig", self.seed)
        steps = self.amax_history
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0 or self.amax_select not in SELECTS:
            raise ValueError(
                f"HybridConfig: amax_history is a number of steps, and amax_select one of {', '.join(SELECTS)}, got "
                f"{steps!r} and {self.amax_select!r}"
            )
        margin = self.amax_margin
        if isinstance(margin, bool) or not isinstance(margin, int) or abs(margin) > MARGIN or (margin and not steps):
            raise ValueError(
                f"HybridConfig: amax_margin is a number of bits, -{MARGIN} to {MARGIN}, for delayed scaling (amax_history of 1 or more "
                f"steps), got {margin!r} and amax_history={steps}"
            )
        if reason := self._why_not():
            raise ValueError(f"HybridConfig: {reason}")

    @classmethod
    def fwd_bwd(cls, fwd: str | None, bwd: str | None, **options: Any) -> "HybridConfig":
        """Return one format for both operands of fprop, another for dgrad and wgrad. options: further fields."""
        return cls(fprop_input=fwd, fprop_weight=fwd, **dict.fromkeys(BACKWARD, bwd), **options)

    @classmethod
    def bwd(cls, bwd: str | None, **options: Any) -> "HybridConfig":
        """Return one format for the operands of dgrad and wgrad, beside a base_config: `QATConfig(base,
        backward=HybridConfig.bwd("te-nvfp4"))`.
        """
        return cls(**dict.fromkeys(BACKWARD, bwd), **options)

    def cast(self, slot: str) -> Cast:
        """Return the cast of an operand: a name of `LinearRecipe`'s slots."""
        return getattr(self, slot)

    def has_base(self, slot: str) -> bool:
        """Return whether an operand of fprop is what the base says."""
        return slot.startswith("fprop") and self.cast(slot).format == BASE

    def slots(self) -> dict[str, Any]:
        """Return the arguments of `LinearRecipe` that this config decides, fprop's formats apart."""
        operands = {slot: self.cast(slot).operand() for slot in BACKWARD}
        sources = {"weight_source": self.cast("dgrad_weight").source, "input_source": self.cast("wgrad_input").source}
        delayed = {"history": self.amax_history, "select": self.amax_select, "margin": self.amax_margin}
        return {**operands, **sources, "save": self.save, **delayed}

    def forward(self) -> dict[str, Operand | None]:
        """Return the operands of fprop that the config names, by slot."""
        return {s: self.cast(s).operand() for s in FPROP if not self.has_base(s)}

    def _why_not(self) -> str | None:
        for slot in FPROP:
            if self.cast(slot).source != "original":
                return f'fprop: {slot}: forward starts from the original, got source="forward"'
        for slot, operand in self.forward().items():
            if operand is not None and operand.draws:
                return f"fprop: {slot} {operand.name} rounds at random, and a deployed layer does not"
        for gemm, pair in PAIRS.items():
            casts = [self.cast(slot) for slot in pair]
            a, b = operands = [c.operand() for c in casts]
            for slot, c, operand in zip(pair, casts, operands, strict=True):
                if reason := law.why_not_cast(gemm, slot.removeprefix(f"{gemm}_"), operand, c.source):
                    return f"{reason}; {law.got_of(gemm, a, b)}"
            if reason := law.why_not(gemm, a, b):
                return reason
        return self._why_not_recipe()

    def _why_not_recipe(self) -> str | None:
        """Return why no recipe has these casts; None when one has, or when a base decides it."""
        named = self.forward()
        if self.amax_history:  # whose base has the operands of backward
            for slot, same in (("fprop_input", "wgrad_input"), ("fprop_weight", "dgrad_weight")):
                named.setdefault(slot, self.cast(same).operand())
        if len(named) < 2:
            return None
        try:
            LinearRecipe(named["fprop_input"], named["fprop_weight"] or HighPrecision(), **self.slots())
        except ValueError as error:
            return str(error)
        return None

    def replaced(self, **fields: Any) -> "HybridConfig":
        """Return this config with other fields."""
        return dataclasses.replace(self, **fields)


def check_seed(config: str, seed: object) -> None:
    """Raise ValueError unless the seed of a config is an integer that random numbers take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise ValueError(f"{config}: seed must be an integer of 0 to 2^32 - 1, got {seed!r}")


def backward_slots(backward: str | HybridConfig | None) -> dict[str, Any]:
    """`LinearRecipe`'s arguments for QATConfig's `backward`: four slots, a HybridConfig's sources; none for None."""
    if backward is None:
        return {}
    if isinstance(backward, HybridConfig):
        return backward.slots()
    if not isinstance(backward, str):
        raise ValueError(
            f"backward is {', '.join(METHODS)}, the name of a format for gradients, a HybridConfig or None, got {backward!r}"
        )
    with naming(f"backward is {', '.join(METHODS)}, or a format for gradients"):
        return dict.fromkeys(BACKWARD, get_operand(METHODS.get(backward, backward)))


torch.serialization.add_safe_globals([Cast, HybridConfig])  # torch.load(weights_only=True)
