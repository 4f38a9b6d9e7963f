"""Say what a user asks of calibrated PTQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

METHODS = ("gptq",)


@dataclass(frozen=True)
class CalibrateConfig:
    """Arguments of `aoquant.calibrate_ptq`.

    recipe: a recipe's name, a PTQ config of aoquant's or torchao's, or torchao's `FqnToConfig` of these.
    method: how codes are chosen, "gptq".
    asymmetric: let each layer make up for the errors of the layers before it, too (GPTAQ, Qronos). The float model then
        runs beside the quantised one, which doubles the time of the forward passes. False is GPTQ as published.
    act_order: round the columns with the largest inputs first. Scales are those of the original weight.
    damping: share of the mean of the Gram matrix's diagonal that is added to it; 10 and 100 times that where this is
        not enough, which the report says.

    Raises:
        ValueError: an argument is out of its range.
    """

    recipe: Any
    method: str = "gptq"
    asymmetric: bool = True
    act_order: bool = True
    damping: float = 0.01

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"CalibrateConfig: method is {' or '.join(METHODS)}, got {self.method!r}")
        if not 0 < self.damping < 1:
            raise ValueError(f"CalibrateConfig: damping is above 0 and below 1, got {self.damping!r}")

    @classmethod
    def of(cls, config: Any) -> CalibrateConfig:
        """Return `config`, or torchao's GPTQConfig as one.

        Raises:
            ValueError: it is something else, or has no base config.
        """
        if isinstance(config, cls):
            return config
        if type(config).__name__ == "GPTQConfig":
            if config.base_config is None:
                raise ValueError("calibrate_ptq: GPTQConfig needs base_config, the PTQ config of the weights")
            return cls(config.base_config, asymmetric=False, act_order=False, damping=config.percdamp)
        raise ValueError(
            f"calibrate_ptq: config must be a CalibrateConfig or torchao's GPTQConfig, got {type(config).__name__}: "
            "give CalibrateConfig(recipe, method='gptq')"
        )
