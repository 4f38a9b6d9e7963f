"""aoquant: quantisation-aware training whose fake quantisation is the deployed kernel.

from aoquant import QATConfig, quantize_

quantize_(model, QATConfig("nvfp4", step="prepare"))  # train as usual
quantize_(model, QATConfig(step="convert"))  # the same outputs, packed
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from aoquant import _register as _register  # first: it checks torchao
from aoquant._messages import AoquantWarning
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
from aoquant.experts.packed_experts import packed_experts
from aoquant.experts.routers import freeze_routers
from aoquant.export import export
from aoquant.formats import get_format, list_formats
from aoquant.hybrid import Cast, HybridConfig
from aoquant.kv import KVCacheConfig
from aoquant.linear.fixed_weights import fixed_weights
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.switches import set_fake_quant, unprepare
from aoquant.linear.tensor import PackedTensor
from aoquant.masters import Masters, quantized_model_init
from aoquant.ops import backend
from aoquant.optimizer_groups import parameter_groups
from aoquant.planning.coverage import Coverage, coverage
from aoquant.ptq.calibrate_config import CalibrateConfig
from aoquant.quantize import quantize_
from aoquant.recipes import Recipe, get_recipe, list_recipes
from aoquant.refresh import refresh_
from aoquant.report import Report, report, verify
from aoquant.report.routing import RouterDrift, router_drift
from aoquant.tools.explain import explain
from aoquant.tools.packed_linear import packed_linear
from aoquant.transforms import WUSH, Hadamard
from aoquant.unpack import unpack_

if TYPE_CHECKING:
    from aoquant.integrations.hf import load_pretrained, save_pretrained
    from aoquant.integrations.stream import convert_checkpoint
    from aoquant.integrations.vllm_sync import sync_vllm
    from aoquant.ptq.choose_formats import FormatChoice, choose_formats
    from aoquant.ptq.ptq_report import PTQReport
    from aoquant.ptq.sequential import calibrate_ptq

__version__ = "0.1.0"

__all__ = [
    "WUSH",
    "AoquantWarning",
    "CalibrateConfig",
    "Cast",
    "Coverage",
    "FP8WeightConfig",
    "FormatChoice",
    "GridFlipFP4WeightConfig",
    "Hadamard",
    "HybridConfig",
    "Int4WeightConfig",
    "Int8WeightConfig",
    "IntxWeightConfig",
    "KVCacheConfig",
    "LinearRecipe",
    "MXFP4WeightConfig",
    "MXFP8WeightConfig",
    "Masters",
    "NVFP4WeightConfig",
    "PTQReport",
    "Packed4WeightConfig",
    "PackedTensor",
    "PackedWeightConfig",
    "QATConfig",
    "Recipe",
    "Report",
    "RouterDrift",
    "backend",
    "calibrate",
    "calibrate_ptq",
    "choose_formats",
    "coverage",
    "explain",
    "export",
    "fixed_weights",
    "freeze_routers",
    "get_format",
    "get_recipe",
    "list_formats",
    "list_recipes",
    "packed_experts",
    "packed_linear",
    "parameter_groups",
    "quantize_",
    "quantized_model_init",
    "refresh_",
    "report",
    "router_drift",
    "set_fake_quant",
    "unpack_",
    "unprepare",
    "verify",
]


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # its import is blocked
        return False


if TYPE_CHECKING or _installed("transformers"):  # `from aoquant import *` asks for every name
    __all__ += ["convert_checkpoint", "load_pretrained", "save_pretrained", "sync_vllm"]


_HOMES = {
    "load_pretrained": "integrations.hf",
    "save_pretrained": "integrations.hf",
    "convert_checkpoint": "integrations.stream",
    "sync_vllm": "integrations.vllm_sync",
    "FormatChoice": "ptq.choose_formats",
    "choose_formats": "ptq.choose_formats",
    "PTQReport": "ptq.ptq_report",
    "calibrate_ptq": "ptq.sequential",
}


def __getattr__(name: str) -> Any:
    """Import what few programs need, or what needs transformers, when it is asked for."""
    home = _HOMES.get(name)
    if home is not None:
        from importlib import import_module

        return getattr(import_module(f"aoquant.{home}"), name)
    raise AttributeError(f"module 'aoquant' has no attribute {name!r}")
