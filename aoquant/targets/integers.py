"""torchao's integer configs: Intx, Int4 plain, Int8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao.quantization.granularity import PerAxis, PerGroup, PerRow, PerTensor
from torchao.quantization.quant_primitives import MappingType
from torchao.quantization.quantize_.workflows import (
    Int4ChooseQParamsAlgorithm,
    Int4PackingFormat,
    Int4Tensor,
    Int8Tensor,
    IntxChooseQParamsAlgorithm,
    IntxPackingFormat,
    IntxUnpackedToInt8Tensor,
    QuantizeTensorToInt8Kwargs,
)

from aoquant.formats import Affine, Encoded, Int4, Scales
from aoquant.linear import LinearRecipe

from .base import Target, numbers, require

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
    require("intx_choose_qparams_algorithm", config.intx_choose_qparams_algorithm, IntxChooseQParamsAlgorithm.AFFINE)
    require("scale_dtype", scale_dtype, None, instead="scales take the weight's dtype")
    format = intx_format(config.weight_dtype, granularity, mapping("mapping_type", mapping_type))

    def build(e: Encoded, w: Tensor) -> Tensor:
        q = format.integers(e)
        assert e.scale is not None
        zero = torch.zeros_like(e.scale, dtype=torch.int8) if e.zero is None else e.zero
        block = (1, format.group or e.k)
        return IntxUnpackedToInt8Tensor(
            q, e.scale, zero, config.weight_dtype, block, w.dtype, "int8_asym_per_token" if activation else None
        )

    return Target(LinearRecipe(activation, format, "dequantize"), build, "IntxUnpackedToInt8Tensor")


def _int4_weight_only(config: Any) -> Target:
    later = "other layouts have other numerics and are not simulated exactly yet"
    require("int4_packing_format", config.int4_packing_format, Int4PackingFormat.PLAIN, instead=later)
    require("int4_choose_qparams_algorithm", config.int4_choose_qparams_algorithm, Int4ChooseQParamsAlgorithm.TINYGEMM)
    format = Int4(config.group_size)

    def limit(n: int, k: int, dtype: torch.dtype) -> str | None:
        if format.group % 64 and format.group != k:
            return (
                f"the MSLK plain int4 kernel returns wrong numbers, silently, for groups that are not a multiple of 64, got "
                f"{format.group}: use group_size 64 or 128, or aoquant.Int4WeightConfig(group_size={format.group})"
            )
        if k % 32 or n % 8:
            return f"the MSLK int4 kernel needs K % 32 == 0 and N % 8 == 0, got N = {n}, K = {k}: leave the layer out"
        if dtype == torch.float16:
            return "the MSLK int4 kernel takes bfloat16 activations: cast the layer from float16 to bfloat16"
        return None

    def build(e: Encoded, w: Tensor) -> Tensor:
        assert e.scale is not None and e.zero is not None
        scale_GN, zero_GN = e.scale.t().contiguous(), e.zero.t().contiguous()
        return Int4Tensor(e.codes.view(torch.int8), scale_GN, zero_GN, [1, format.group], w.shape)

    return Target(LinearRecipe(None, format, "bias_after"), build, "Int4Tensor", limit)


def _int8_format(granularity: Any, mapping_name: str = "symmetric", *, native: bool = False) -> Affine:
    if isinstance(granularity, PerGroup):
        return Affine(8, "group", granularity.group_size, mapping_name, "float32", native)
    if isinstance(granularity, PerRow) and granularity.dim not in (-1, 1):
        raise ValueError(f"granularity must be PerRow(dim=-1), PerTensor or PerGroup, got {granularity}")
    return Affine(8, "tensor" if isinstance(granularity, PerTensor) else "row", 0, mapping_name, "float32", native)


def _int8_tensor(
    format: Affine, e: Encoded, w: Tensor, act: QuantizeTensorToInt8Kwargs | None, *act_scales: Tensor | None
) -> Tensor:
    block = {"group": [1, format.group], "row": [1, e.k], "tensor": list(w.shape)}[format.per]
    assert e.scale is not None
    zero = torch.zeros_like(e.scale, dtype=torch.int8)
    act_scale, act_zero = act_scales or (None, None)
    return Int8Tensor(e.codes, e.scale, block, w.dtype, zero, act_scale, act_zero, act_quant_kwargs=act)


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


def _int8_static(config: Any) -> Target:
    """torchao's tensor takes inputs of as many dimensions as its activation scale has: those that calibration saw."""
    require("reduce_range", bool(config.reduce_range), False)
    act_granularity, weight_granularity = Int8Tensor._normalize_granularity(config.granularity)
    require(
        "activation granularity",
        act_granularity,
        PerTensor(),
        instead="a static scale per row fits one shape of batch; give granularity=[PerTensor(), PerRow()]",
    )
    weight = _int8_format(weight_granularity)
    dynamic = _int8_format(act_granularity, mapping("act_mapping_type", config.act_mapping_type))
    act = QuantizeTensorToInt8Kwargs(granularity=act_granularity, mapping_type=config.act_mapping_type)
    scale, zero = config.act_quant_scale, config.act_quant_zero_point

    def fix(scales: Scales) -> Target:
        return _int8_static(dataclasses.replace(config, act_quant_scale=scales.scale, act_quant_zero_point=scales.zero))

    def build(e: Encoded, w: Tensor) -> Tensor:
        return _int8_tensor(weight, e, w, act, *(None if t is None else t.detach().to(w.device) for t in (scale, zero)))

    if scale is None:
        return Target(
            LinearRecipe(dynamic, weight, "int8_dynamic", input_scales="static"), build, "Int8Tensor", fix=fix
        )
    given = Scales(scale, torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero)
    activation = dynamic.fix(*numbers(given)[: 1 if dynamic.mapping == "symmetric" else 2])
    return Target(LinearRecipe(activation, weight, "int8_dynamic"), build, "Int8Tensor")


TARGETS: dict[str, Callable[[Any], Target]] = {
    "IntxWeightOnlyConfig": _intx_weight_only,
    "Int8DynamicActivationIntxWeightConfig": _int8_dynamic_intx,
    "Int4WeightOnlyConfig": _int4_weight_only,
    "Int8WeightOnlyConfig": _int8_weight_only,
    "Int8DynamicActivationInt8WeightConfig": _int8_dynamic,
    "Int8StaticActivationInt8WeightConfig": _int8_static,
}
