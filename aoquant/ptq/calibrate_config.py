"""Say what a user asks of calibrated PTQ."""

from dataclasses import dataclass
from typing import Any

METHODS = ("nearest", "gptq", "awq", "smoothquant", "clip", "r1", "r2")


@dataclass(frozen=True)
class CalibrateConfig:
    """Hold the arguments of `aoquant.calibrate_ptq`.

    recipe: a recipe's name, a PTQ config of aoquant's or torchao's, or torchao's `FqnToConfig` of these.
    method: one of the following, or several joined by "+", in any order, such as "r1+r2+gptq" or "awq+clip".
        "nearest" rounds to the nearest. "gptq" chooses codes. "awq" searches a scale for each input channel, and
        "smoothquant" computes one from `alpha`, for recipes that quantise activations; both are folded into the layer
        before. "clip" searches smaller scales for blocks. "r1" rotates the residual stream and "r2" the values of each
        head, fused into the weights. Without "gptq", codes are the nearest.
    asymmetric: let each layer make up for part of the errors of the layers before it, too (GPTAQ, Qronos): three
        quarters, or half where its input is rounded. The float model then runs beside the quantised one, which doubles
        the time of the forward passes. False is GPTQ as published.
    act_order: round the columns with the largest inputs first. Scales are those of the original weight.
    damping: share of the mean of the Gram matrix's diagonal that is added to it; 10 and 100 times that where this is
        not enough, which the report says.
    alpha: exponent of the activations' largest values in SmoothQuant's scales, 0 to 1.
    grid: exponents that AWQ tries.
    strict: refuse layers and experts whose codes are not chosen on data. A layer whose input is always zero is rounded
        to the nearest. An expert of a stack needs as many tokens as it has
        inputs, and .5 % of all; others are rounded to the nearest, which the report and a warning say.
    all_experts: let every expert see all tokens, not those alone that the router gives it.

    Raises:
        ValueError: an argument is out of its range.
    """

    recipe: Any
    method: str = "gptq"
    asymmetric: bool = True
    act_order: bool = True
    damping: float = 0.01
    alpha: float = 0.5
    grid: int = 20
    strict: bool = False
    all_experts: bool = False

    def __post_init__(self) -> None:
        wrong = not isinstance(self.method, str) or not self.steps <= set(METHODS)
        if wrong or len(self.steps) < self.method.count("+") + 1:
            raise ValueError(
                f"CalibrateConfig: method is {', '.join(METHODS)}, or some of them joined by +, got {self.method!r}"
            )
        for pair in ({"awq", "smoothquant"}, {"nearest", "gptq"}):
            if pair <= self.steps:
                raise ValueError(f"CalibrateConfig: method has {' or '.join(sorted(pair))}, got {self.method!r}")
        if not 0 < self.damping < 1:
            raise ValueError(f"CalibrateConfig: damping is above 0 and below 1, got {self.damping!r}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"CalibrateConfig: alpha is from 0 to 1, got {self.alpha!r}")
        if isinstance(self.grid, bool) or not isinstance(self.grid, int) or self.grid < 1:
            raise ValueError(f"CalibrateConfig: grid is an integer of at least 1, got {self.grid!r}")

    @property
    def steps(self) -> frozenset[str]:
        """Return the methods that `method` joins."""
        return frozenset(self.method.split("+"))

    @property
    def folds(self) -> bool:
        """Return whether input channels are scaled."""
        return bool(self.steps & {"awq", "smoothquant"})

    @property
    def rotates(self) -> bool:
        """Return whether weights are rotated."""
        return bool(self.steps & {"r1", "r2"})

    @property
    def chooses(self) -> bool:
        """Return whether codes are other than the nearest under scales of the weight's own."""
        return bool(self.steps & {"gptq", "clip"})

    @property
    def towards_float(self) -> bool:
        """Return whether codes are chosen for the float model's outputs."""
        return self.asymmetric and "gptq" in self.steps

    @classmethod
    def of(cls, config: Any) -> "CalibrateConfig":
        """Return `config`, or torchao's GPTQConfig, AWQConfig or SmoothQuantConfig as one.

        Raises:
            ValueError: it is something else, or has no base config.
        """
        if isinstance(config, cls):
            return config
        kind = type(config).__name__
        if kind not in ("GPTQConfig", "AWQConfig", "SmoothQuantConfig"):
            raise ValueError(
                f"calibrate_ptq: config must be a CalibrateConfig or torchao's GPTQConfig, AWQConfig or SmoothQuantConfig, got {kind}: "
                "give CalibrateConfig(recipe, method='gptq')"
            )
        base = config.base_config
        if base is None:
            raise ValueError(f"calibrate_ptq: {kind} needs base_config, the PTQ config of the weights")
        if kind == "GPTQConfig":
            return cls(base, asymmetric=False, act_order=False, damping=config.percdamp)
        if kind == "AWQConfig":
            return cls(base, "awq", grid=config.scale_search_space_size)
        return cls(base, "nearest") if config.alpha is None else cls(base, "smoothquant", alpha=config.alpha)
