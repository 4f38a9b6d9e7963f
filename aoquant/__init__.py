"""aoquant: quantisation-aware training whose fake quantisation is the deployed kernel.

from aoquant import QATConfig, quantize_

quantize_(model, QATConfig(base, step="prepare"))  # train as usual
quantize_(model, QATConfig(base, step="convert"))  # the same outputs, packed
"""

from typing import TYPE_CHECKING, Any

from aoquant import _register as _register  # first: it checks torchao
from aoquant.calibrate import calibrate
from aoquant.config import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    Packed4WeightConfig,
    PackedWeightConfig,
    QATConfig,
)
from aoquant.export import export
from aoquant.formats import get_format, list_formats
from aoquant.layers.linear import LinearRecipe
from aoquant.layers.qat import set_fake_quant, unprepare
from aoquant.ops import backend
from aoquant.quantize import quantize_
from aoquant.refresh import refresh_
from aoquant.report import Report, report, verify
from aoquant.tensor import PackedTensor
from aoquant.tools.explain import explain
from aoquant.tools.packed_linear import packed_linear
from aoquant.transforms import WUSH, Hadamard
from aoquant.unpack import unpack_

if TYPE_CHECKING:
    from aoquant.integrations.hf import load_pretrained, save_pretrained
    from aoquant.integrations.stream import convert_checkpoint

__version__ = "0.1.0"

__all__ = [
    "WUSH",
    "FP8WeightConfig",
    "GridFlipFP4WeightConfig",
    "Hadamard",
    "Int4WeightConfig",
    "Int8WeightConfig",
    "IntxWeightConfig",
    "LinearRecipe",
    "MXFP4WeightConfig",
    "MXFP8WeightConfig",
    "NVFP4WeightConfig",
    "Packed4WeightConfig",
    "PackedTensor",
    "PackedWeightConfig",
    "QATConfig",
    "Report",
    "backend",
    "calibrate",
    "convert_checkpoint",
    "explain",
    "export",
    "get_format",
    "list_formats",
    "load_pretrained",
    "packed_linear",
    "quantize_",
    "refresh_",
    "report",
    "save_pretrained",
    "set_fake_quant",
    "unpack_",
    "unprepare",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import what needs transformers only when somebody asks for it."""
    home = {"load_pretrained": "hf", "save_pretrained": "hf", "convert_checkpoint": "stream"}.get(name)
    if home is not None:
        from importlib import import_module

        return getattr(import_module(f"aoquant.integrations.{home}"), name)
    raise AttributeError(f"module 'aoquant' has no attribute {name!r}")
