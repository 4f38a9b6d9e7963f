"""LoRA adapters on layers of aoquant's, through plain `peft.get_peft_model` (docs/peft.md)."""

import peft as _peft  # noqa: F401  first: its import makes aoquant import what is in this folder

from aoquant.integrations.peft.layers import PackedLoraLinear, QATLoraLinear, QATParamWrapper

__all__ = ["PackedLoraLinear", "QATLoraLinear", "QATParamWrapper"]
