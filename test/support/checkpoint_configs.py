"""One config of each kind whose packed model goes through a checkpoint: ours, and torchao's."""

from __future__ import annotations

import torch
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig
from torchao.prototype.parq.quant.config_torchao import StretchedIntxWeightConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
)
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    PackedWeightConfig,
)

OURS = {
    "nvfp4": NVFP4WeightConfig(),
    "nvfp4-weight": NVFP4WeightConfig(activation=None),
    "nvfp4-static": NVFP4WeightConfig(outer="static", pts=0.001),
    "fouroversix-tiles": NVFP4WeightConfig(rule="four_over_six", activation="fouroversix", tile=16),
    "gridflip": GridFlipFP4WeightConfig("sided", c=0.2),
    "int4-g32": Int4WeightConfig(32),
    "intx3-g32": IntxWeightConfig(3),
    "int8": Int8WeightConfig(activation="int8-row"),
    "int8-tensor": Int8WeightConfig("tensor"),
    "fp8": FP8WeightConfig(),
    "mxfp4": MXFP4WeightConfig(),
    "mxfp8": MXFP8WeightConfig(activation=None),
    "fp8-block": FP8WeightConfig(granularity="block"),
    "activations alone": PackedWeightConfig("high-precision", "intx8-row-asym", "dequantize"),
}
TORCHAO = {
    "intx": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "int8-intx": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
    "int8-weight": Int8WeightOnlyConfig(),
    "int8-int8": Int8DynamicActivationInt8WeightConfig(),
    "fp8-weight": Float8WeightOnlyConfig(),
    "fp8-groups": Float8WeightOnlyConfig(granularity=PerGroup(32)),
    "stretched": StretchedIntxWeightConfig(PerGroup(32), b=2, quant_min=-1.5, quant_max=1.5),
    "fp8-fp8": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "nvfp4-weight-only": NVFP4WeightOnlyConfig(),
    "mxfp8-emulated": MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED),
}
