"""FP-Quant's options (Hugging Face transformers' `FPQuantConfig`, "Quartet QAT") as aoquant configs.

config = FPQuantConfig(forward_dtype="mxfp4", forward_method="quest", store_master_weights=True)
quantize_(model, *from_fp_quant(config))

Eight options, three questions: which numbers forward uses (forward_dtype, forward_method, hadamard_group_size,
transform_init), what backward rounds (backward_dtype), and whether a high-precision weight stays to be trained
(store_master_weights). The first two are a config of ours with `numerics="qutlass"`, the kernels that FP-Quant runs;
the third decides between prepare and quantising at once, which deletes each weight as it is packed. pseudoquantization
is no property of a model here: every device computes the same numbers, and the router takes the fastest kernel that has
them.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from aoquant.config import MXFP4WeightConfig, NVFP4WeightConfig, QATConfig, WeightConfig, check_types
from aoquant.transforms import Hadamard

# FPQuantConfig's defaults
OPTIONS: dict[str, Any] = {
    "forward_dtype": "nvfp4",
    "forward_method": "abs_max",
    "backward_dtype": "bf16",
    "store_master_weights": False,
    "hadamard_group_size": None,
    "pseudoquantization": False,
    "transform_init": "hadamard",
    "modules_to_not_convert": None,
}
GROUPS = {"nvfp4": 16, "mxfp4": 32}  # values that share a scale
BACKWARD = {"bf16": None, "mxfp8": "mxfp8", "mxfp4": "quartet"}


class LeaveOut:
    """filter_fn: every nn.Linear but those whose name is one of `names`, ends with one, or lies inside one.

    unmet: the names that no layer has had so far; `quantize_` warns of them.
    """

    def __init__(self, names: list[str]) -> None:
        self.patterns = {name: re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?") for name in names}
        self.unmet = [name for name in names if name != "lm_head"]  # the default need not match a layer

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        met = [name for name, pattern in self.patterns.items() if pattern.fullmatch(fqn)]
        self.unmet = [name for name in self.unmet if name not in met]
        return isinstance(module, nn.Linear) and not met


def from_fp_quant(config: Any = None, **options: Any) -> tuple[QATConfig | WeightConfig, LeaveOut]:
    """Return (config, filter_fn) for `aoquant.quantize_`.

    config: transformers' `FPQuantConfig`, or the dictionary that it left in a config.json. options: the same by name,
        over the config's.

    A `QATConfig` to train with when store_master_weights is set, otherwise the config that quantises at once.

    Raises:
        ValueError: an unknown option, a value that FP-Quant does not have either, or one that has no equal here.
    """
    if config is not None and not isinstance(config, Mapping):
        config = getattr(config, "__dict__", {"quant_method": config})  # a string is no config, and its name is wrong
    given = dict(config or {})
    method = given.pop("quant_method", "fp_quant")
    if getattr(method, "value", method) != "fp_quant":
        raise ValueError(
            "from_fp_quant takes transformers' FPQuantConfig, its dictionary or its options, got quant_method "
            f"{method!r}"
        )
    given |= options
    if unknown := sorted(given.keys() - OPTIONS.keys()):
        raise ValueError(f"FP-Quant has no option {', '.join(unknown)}; there are: {', '.join(OPTIONS)}")
    o = OPTIONS | given
    check_types("from_fp_quant", dict.fromkeys(("store_master_weights", "pseudoquantization"), bool), o)
    dtype, rule = _choice(o, "forward_dtype", *GROUPS), _choice(o, "forward_method", "abs_max", "quest")
    backward, init = (
        _choice(o, "backward_dtype", *BACKWARD),
        _choice(o, "transform_init", "hadamard", "identity", "gsr"),
    )
    if dtype == "nvfp4" and (rule, backward) != ("abs_max", "bf16"):
        raise ValueError(
            f"FP-Quant's nvfp4 goes with forward_method='abs_max' and backward_dtype='bf16', got {rule!r} and "
            f"{backward!r}: for a 4-bit "
            "backward of NVFP4 use aoquant.QATConfig(NVFP4WeightConfig(rule='four_over_six'), backward='quartet2')"
        )
    transform = _transform(init, o["hadamard_group_size"], dtype)
    base: WeightConfig
    if dtype == "nvfp4":
        base = NVFP4WeightConfig(numerics="qutlass", transform=transform)
    else:
        base = MXFP4WeightConfig("quest" if rule == "quest" else "absmax", numerics="qutlass", transform=transform)
    names = ["lm_head"] if o["modules_to_not_convert"] is None else o["modules_to_not_convert"]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"modules_to_not_convert must be a list of layers' names, such as ['lm_head'], got {names!r}")
    skip = LeaveOut(list(names))
    if o["store_master_weights"]:
        mask = "clipped" if rule == "quest" else "identity"  # QuEST's trust mask; abs_max clips nothing
        return QATConfig(base, straight_through=mask, backward=BACKWARD[backward]), skip
    if backward != "bf16":
        raise ValueError(
            f"backward_dtype={backward!r} rounds the gradients of a weight, and store_master_weights=False leaves "
            "none to train: set store_master_weights=True, or backward_dtype='bf16' for adapters on packed weights"
        )
    return base, skip


def _transform(init: str, size: Any, dtype: str) -> Hadamard | None:
    group = GROUPS[dtype]
    size = group if size is None else size
    if size not in [s for s in (16, 32, 64, 128) if s >= group]:
        raise ValueError(f"hadamard_group_size must be 16 (nvfp4 alone), 32, 64 or 128, got {size!r} for {dtype}")
    if init == "gsr" and size != group:
        raise ValueError(
            f"transform_init='gsr' orders the rows of the Hadamard matrix by sequency. Within a block of {group} "
            "values, which share a scale, that order changes nothing, and beyond it there is no equal here, got "
            f"hadamard_group_size={size}: use {group}, or 'hadamard'"
        )
    return None if init == "identity" else Hadamard(size)


def _choice(options: dict[str, Any], name: str, *allowed: str) -> str:
    got = options[name]
    if got not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {got!r}")
    return str(got)
