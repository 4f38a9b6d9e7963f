"""aoquant: quantisation-aware training whose fake quantisation is the deployed kernel.

    from aoquant import QATConfig, quantize_
    quantize_(model, QATConfig(base, step="prepare"))   # train as usual
    quantize_(model, QATConfig(base, step="convert"))   # the same outputs, packed
"""

from aoquant import _register
from aoquant.config import (
    FP8WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
)
from aoquant.formats import get_format, list_formats
from aoquant.linear import LinearRecipe, set_fake_quant
from aoquant.ops import backend, explain
from aoquant.quantize import quantize_
from aoquant.tensor import PackedTensor

__version__ = "0.1.0"

__all__ = [
    "FP8WeightConfig",
    "Int4WeightConfig",
    "Int8WeightConfig",
    "IntxWeightConfig",
    "LinearRecipe",
    "MXFP4WeightConfig",
    "MXFP8WeightConfig",
    "NVFP4WeightConfig",
    "PackedTensor",
    "QATConfig",
    "backend",
    "explain",
    "get_format",
    "list_formats",
    "quantize_",
    "set_fake_quant",
]

_register.register()
