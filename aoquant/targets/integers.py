"""torchao's integer configs: Intx and Int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao.quantization.granularity import PerAxis, PerGroup, PerRow, PerTensor
from torchao.quantization.quant_primitives import MappingType
from torchao.quantization.quantize_.workflows import (
    Int8Tensor,
    IntxChooseQParamsAlgorithm,
    IntxPackingFormat,
    IntxUnpackedToInt8Tensor,
    QuantizeTensorToInt8Kwargs,
)

from aoquant.formats import Affine, AffineHQQ, Encoded
from aoquant.linear import LinearRecipe

from .base import Target, require

_MAPPINGS = {MappingType.SYMMETRIC: "symmetric", MappingType.ASYMMETRIC: "asymmetric"}


def mapping(argument: str, got: MappingType) -> str:
    """aoquant's name of a torchao mapping type."""
    return _MAPPINGS[require(argument, got, *_MAPPINGS, instead="other mappings are not simulated exactly yet")]


def intx_format(dtype: torch.dtype, granularity: Any, mapping_name: str) -> Affine:
    """The format of an IntxUnpackedToInt8Tensor weight."""
    bits = int(str(dtype).removeprefix("torch.int"))
    require("bits", bits, *range(2, 9))
    if isinstance(granularity, PerGroup):
        return Affine(bits, "group", granularity.group_size, mapping_name)
    assert isinstance(granularity, PerAxis) and granularity.axis == 0  # torchao's config checks it
    return Affine(bits, "row", mapping=mapping_name)


INT8_TOKEN = Affine(8, "row", mapping="asymmetric", native=True)  # torchao's per-token activations


def _intx_weight_only(config: Any) -> Target:
    return _intx(config, config.granularity, config.mapping_type, config.scale_dtype, activation=None)


def _int8_dynamic_intx(config: Any) -> Target:
    require(
        "act_mapping_type", config.act_mapping_type, MappingType.ASYMMETRIC, instead="torchao's convert takes no other"
    )
    return _intx(
        config, config.weight_granularity, config.weight_mapping_type, config.weight_scale_dtype, activation=INT8_TOKEN
    )


def _intx(config: Any, granularity: Any, mapping_type: Any, scale_dtype: Any, activation: Affine | None) -> Target:
    require("intx_packing_format", config.intx_packing_format, IntxPackingFormat.UNPACKED_TO_INT8)
    require("scale_dtype", scale_dtype, None, instead="scales take the weight's dtype")
    format = intx_format(config.weight_dtype, granularity, mapping("mapping_type", mapping_type))
    if config.intx_choose_qparams_algorithm == IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY:
        format = AffineHQQ(format.width, format.per, format.group)  # torchao ignores the mapping: it is symmetric

    def build(e: Encoded, w: Tensor) -> Tensor:
        q = format.integers(e)
        assert e.scale is not None
        zero = torch.zeros_like(e.scale, dtype=torch.int8) if e.zero is None else e.zero
        block = (1, format.group or e.k)
        return IntxUnpackedToInt8Tensor(
            q, e.scale, zero, config.weight_dtype, block, w.dtype, "int8_asym_per_token" if activation else None
        )

    return Target(LinearRecipe(activation, format, "dequantize"), build, "IntxUnpackedToInt8Tensor")


def _int8_format(granularity: Any, mapping_name: str = "symmetric", *, native: bool = False) -> Affine:
    if isinstance(granularity, PerGroup):
        return Affine(8, "group", granularity.group_size, mapping_name, "float32", native)
    if isinstance(granularity, PerRow) and granularity.dim not in (-1, 1):
        raise ValueError(f"granularity must be PerRow(dim=-1), PerTensor or PerGroup, got {granularity}")
    return Affine(8, "tensor" if isinstance(granularity, PerTensor) else "row", 0, mapping_name, "float32", native)


def _int8_tensor(format: Affine, e: Encoded, w: Tensor, act: QuantizeTensorToInt8Kwargs | None) -> Tensor:
    block = {"group": [1, format.group], "row": [1, e.k], "tensor": list(w.shape)}[format.per]
    assert e.scale is not None
    return Int8Tensor(
        e.codes, e.scale, block, w.dtype, zero_point=torch.zeros_like(e.scale, dtype=torch.int8), act_quant_kwargs=act
    )


def _int8_weight_only(config: Any) -> Target:
    format = _int8_format(config.granularity)
    return Target(
        LinearRecipe(None, format, "int8_rescale"), lambda e, w: _int8_tensor(format, e, w, None), "Int8Tensor"
    )


def _int8_dynamic(config: Any) -> Target:
    require("reduce_range", bool(config.reduce_range), False)
    require("weight_only_decode", config.weight_only_decode, False)
    act_granularity, weight_granularity = Int8Tensor._normalize_granularity(config.granularity)
    weight = _int8_format(weight_granularity)
    activation = _int8_format(act_granularity, mapping("act_mapping_type", config.act_mapping_type), native=True)
    act = QuantizeTensorToInt8Kwargs(granularity=act_granularity, mapping_type=config.act_mapping_type)
    recipe = LinearRecipe(activation, weight, "int8_dynamic")
    return Target(recipe, lambda e, w: _int8_tensor(weight, e, w, act), "Int8Tensor")


TARGETS: dict[str, Callable[[Any], Target]] = {
    "IntxWeightOnlyConfig": _intx_weight_only,
    "Int8DynamicActivationIntxWeightConfig": _int8_dynamic_intx,
    "Int8WeightOnlyConfig": _int8_weight_only,
    "Int8DynamicActivationInt8WeightConfig": _int8_dynamic,
}
