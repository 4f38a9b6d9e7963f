"""Targets of `QATConfig(weight_config=, activation_config=)`: formats, their names, or torchao's fake-quantisation
configs.

There is no deployed tensor to imitate, so such layers convert to aoquant's packed tensor, with the GEMM that the
fake-quantisation config implies.
"""

from typing import Any

import torch
from torchao.quantization.granularity import PerAxis, PerGroup, PerToken
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig, Int4WeightFakeQuantizeConfig
from torchao.quantization.quant_primitives import ZeroPointDomain

from aoquant.config import activated
from aoquant.formats import (
    MX,
    NVFP4,
    Affine,
    Float8Mslk,
    Format,
    HighPrecision,
    Int4,
    Int4Float8Row,
    Operand,
    get_format,
    get_operand,
)
from aoquant.linear.recipe import LinearRecipe

from .target import Fields, Target, group, packed_target, require
from .torchao_floats import _ELEMENTS, float8_format
from .torchao_integers import intx_format, mapping, stored


def target(weight_config: Any, activation_config: Any) -> Target:
    """The target for a pair of fake-quantisation configs; either may be None, which is high precision.

    Raises:
        ValueError: one of them has no exact format here.
    """
    if isinstance(weight_config, Int4WeightFakeQuantizeConfig) and weight_config.activation_dtype != torch.bfloat16:
        return packed_target(_int4_float8(Fields(weight_config), activation_config))
    weight, contract, scales = (
        _side(weight_config, activation=False) if weight_config is not None else (None, "", "dynamic")
    )
    named = isinstance(activation_config, str)
    activation, other, _ = (
        (None, "aoquant", "") if named or activation_config is None else _side(activation_config, activation=True)
    )
    recipe = LinearRecipe(activation, weight or HighPrecision(), contract or other, weight_scales=scales)
    return packed_target(activated(recipe, activation_config) if named else recipe)


def _side(config: Any, *, activation: bool) -> tuple[Format | Operand, str, str]:
    """Return the format, the GEMM contract and, of a weight, how its scales are trained."""
    if isinstance(config, str):
        return get_operand(config), "aoquant", "dynamic"
    if isinstance(config, Format | Operand):
        return _known(config), "aoquant", "dynamic"
    fields = Fields(config)
    scales = "dynamic"
    if isinstance(config, IntxFakeQuantizeConfig) and not activation and not fields.is_dynamic:
        scales = "learned" if fields.range_learning else "static"
    found = _format(config, fields, activation=activation)
    fields.check()
    return *found, scales


def _format(config: Any, fields: Fields, *, activation: bool) -> tuple[Format | Operand, str]:
    """Return the format and the GEMM contract of one of torchao's configs, whose fields are read from `fields`."""
    if isinstance(config, IntxFakeQuantizeConfig):
        return _intx(fields, activation=activation), "dequantize"
    if isinstance(config, Int4WeightFakeQuantizeConfig):
        if activation:
            raise ValueError("Int4WeightFakeQuantizeConfig is for weights: give it as weight_config")
        require("Int4WeightFakeQuantizeConfig.activation_dtype", fields.activation_dtype, torch.bfloat16)
        return Int4(group(fields.group_size)), "bias_after"
    if isinstance(config, Float8FakeQuantizeConfig):
        low, high = fields.hp_value_lb, fields.hp_value_ub
        return float8_format(fields.dtype, fields.granularity, native=activation, low=low, high=high), "aoquant"
    kind = type(config).__name__
    if kind == "NVFP4FakeQuantizeConfig":
        return NVFP4("dynamic" if fields.use_per_tensor_scale else "none"), "aoquant"
    if kind == "MXFakeQuantizeConfig":
        require("block_size", fields.block_size, 32)
        element = _ELEMENTS[require("dtype", fields.dtype, *_ELEMENTS)]
        return MX(element, str(fields.scaling_mode.value).lower()), "aoquant"
    raise ValueError(
        f"weight_config and activation_config take a format, its name, or torchao's fake-quantisation configs, got {kind}"
    )


def _int4_float8(weight: Fields, activation: Any) -> LinearRecipe:
    """The pair that torchao infers from `Float8DynamicActivationInt4WeightConfig`: int4 of fp8 rows, as the preshuffled
    layout has them, and fp8 activations by MSLK's formula. Both belong to one kernel.
    """
    dtype = require("Int4WeightFakeQuantizeConfig.activation_dtype", weight.activation_dtype, torch.float8_e4m3fn)
    if not isinstance(activation, Float8FakeQuantizeConfig):
        raise ValueError(
            f"Int4WeightFakeQuantizeConfig.activation_dtype {dtype} goes with activation_config=Float8FakeQuantizeConfig(), got {activation}; "
            "for bfloat16 activations give activation_dtype=torch.bfloat16"
        )
    rows, _, _ = _side(activation, activation=True)
    require("Float8FakeQuantizeConfig beside Int4WeightFakeQuantizeConfig", rows.name, "fp8-row-native")
    format = Int4Float8Row(group(weight.group_size))
    weight.check()
    return LinearRecipe(Float8Mslk(), format, "fp8_bias_after")


def _known(format: Format | Operand) -> Format | Operand:
    """`format`, if its name leads back to it, as recipes and checkpoints need."""
    plain = format.format if isinstance(format, Operand) else format
    try:
        found = get_format(plain.name)
    except ValueError:
        found = None
    if found != plain:
        raise ValueError(
            f"the format {plain.name!r} is not registered, and layers and checkpoints know formats by their names: call "
            "aoquant.formats.register_format(format) first"
        )
    return format


def _intx(config: Fields, *, activation: bool) -> Affine:
    require("zero_point_domain", config.zero_point_domain, ZeroPointDomain.INT)
    require("zero_point_precision", config.zero_point_precision, torch.int32, instead="zero points are integers")
    require("eps", config.eps, None)
    sides, dtype = mapping("mapping_type", config.mapping_type), stored("scale_precision", config.scale_precision)
    if activation:
        require(
            "IntxFakeQuantizeConfig.is_dynamic of an activation",
            config.is_dynamic,
            True,
            instead="a static scale per token fits one shape of batch; use activation_config='int8-tensor-static', or "
            "'int8-tensor-asym-static', and QATConfig(scales='learned') to learn it",
        )
        require("activation dtype", config.dtype, torch.int8)
        require("activation granularity", config.granularity, PerToken())
        return Affine(8, "row", 0, sides, native=True, stored=dtype)
    if not isinstance(config.granularity, PerGroup | PerAxis):
        raise ValueError(
            f"IntxFakeQuantizeConfig: weights are quantised per group or per channel, got {config.granularity}"
        )
    return intx_format(config.dtype, config.granularity, sides, dtype)
