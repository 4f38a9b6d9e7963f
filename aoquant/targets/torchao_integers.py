"""torchao's integer configs: Intx and Int8."""

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

from aoquant.formats import FLOAT_DTYPES, Affine, AffineHQQ, Encoded, Scales, Stretched
from aoquant.linear.recipe import LinearRecipe

from .target import Build, Target, group, numbers, require

_MAPPINGS = {
    MappingType.SYMMETRIC: "symmetric",
    MappingType.ASYMMETRIC: "asymmetric",
    MappingType.SYMMETRIC_NO_CLIPPING_ERR: "noclip",
}


def mapping(argument: str, got: MappingType, *allowed: MappingType) -> str:
    """Return aoquant's name of a torchao mapping type. allowed: by default every one."""
    return _MAPPINGS[require(argument, got, *(allowed or _MAPPINGS))]


def stored(argument: str, dtype: torch.dtype | None) -> str:
    """aoquant's name of the dtype that scales are stored in; None is the weight's own."""
    return str(require(argument, dtype, None, *FLOAT_DTYPES) or "").removeprefix("torch.")


def intx_format(dtype: torch.dtype, granularity: Any, mapping_name: str, stored: str) -> Affine:
    """The format of an IntxUnpackedToInt8Tensor weight."""
    require("the dtype", dtype, *(getattr(torch, f"int{bits}") for bits in range(1, 9)))
    bits = int(str(dtype).removeprefix("torch.int"))
    if bits == 1 and mapping_name != "asymmetric":
        raise ValueError(
            "symmetric int1 has the codes -1 and 0, and torchao's scale rounds every weight to 0 or divides by it: use "
            "MappingType.ASYMMETRIC, or StretchedIntxWeightConfig(b=1), whose levels are +- one value"
        )
    if isinstance(granularity, PerGroup):
        return Affine(bits, "group", group(granularity.group_size), mapping_name, stored=stored)
    require("granularity", granularity, PerAxis(0), instead="or give PerGroup")
    return Affine(bits, "row", mapping=mapping_name, stored=stored)


INT8_TOKEN = Affine(8, "row", mapping="asymmetric", native=True)  # torchao's per-token activations


def _intx_weight_only(config: Any) -> Target:
    dtype = stored("scale_dtype", config.scale_dtype)
    return _intx(config, config.granularity, config.mapping_type, dtype, activation=None)


def _int8_dynamic_intx(config: Any) -> Target:
    require(
        "act_mapping_type",
        config.act_mapping_type,
        MappingType.ASYMMETRIC,
        instead="torchao's own convert takes no other; aoquant.IntxWeightConfig(activation='intx8-row') is symmetric",
    )
    dtype = stored("weight_scale_dtype", config.weight_scale_dtype)
    return _intx(config, config.weight_granularity, config.weight_mapping_type, dtype, activation=INT8_TOKEN)


def _intx(config: Any, granularity: Any, mapping_type: Any, scale_dtype: str, activation: Affine | None) -> Target:
    require(
        "intx_packing_format",
        config.intx_packing_format,
        IntxPackingFormat.UNPACKED_TO_INT8,
        instead="the opaque formats need torchao's ARM kernels (KleidiAI, lowbit) and quantise activations in their own way; train "
        "with UNPACKED_TO_INT8, whose codes and scales they pack",
    )
    format = intx_format(config.weight_dtype, granularity, mapping("mapping_type", mapping_type), scale_dtype)
    if config.intx_choose_qparams_algorithm == IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY:
        require("scale_dtype", scale_dtype, "", instead="HQQ's scales take the weight's dtype")
        require(
            "mapping_type", mapping_type, MappingType.SYMMETRIC, instead="torchao's HQQ ignores it and is symmetric"
        )
        format = AffineHQQ(format.width, format.per, format.group)
    return Target(
        LinearRecipe(activation, format, "dequantize"),
        intx_tensor(format, config.weight_dtype, "int8_asym_per_token" if activation else None),
        "IntxUnpackedToInt8Tensor",
    )


def intx_tensor(format: Affine | Stretched, dtype: torch.dtype, activation: str | None) -> Build:
    """A function that builds torchao's tensor from codes; a stretched grid has half a step as its zero point."""

    def build(e: Encoded, w: Tensor) -> Tensor:
        zero = torch.zeros_like(e.scales, dtype=torch.int8) if e.zero is None else e.zero
        if isinstance(format, Stretched):
            zero = torch.full_like(e.scales, -0.5)
        block = (1, format.group or e.k)
        return IntxUnpackedToInt8Tensor(format.integers(e), e.scale, zero, dtype, block, w.dtype, activation)

    return build


def _stretched(config: Any) -> Target:
    require("version", config.version, 2)
    bits = require("b", config.b, *range(1, 8), instead="8 bits overflow int8 in bfloat16")
    limit = 2.0 ** (bits - 1) - 0.5
    require("quant_min and quant_max", (config.quant_min, config.quant_max), (-limit, limit))
    activation = require("activation_quantization", config.activation_quantization, "int8_asym_per_token", None)
    if not isinstance(config.granularity, PerGroup) and config.granularity != PerAxis(0):
        raise ValueError(f"granularity must be PerGroup or PerAxis(0), got {config.granularity}")
    format = Stretched(bits, group(config.granularity.group_size) if isinstance(config.granularity, PerGroup) else 0)
    return Target(
        LinearRecipe(INT8_TOKEN if activation else None, format, "dequantize"),
        intx_tensor(format, getattr(torch, f"int{bits}"), activation),
        "IntxUnpackedToInt8Tensor",
    )


def _int8_format(
    granularity: Any, mapping_name: str = "symmetric", *, native: bool = False, reduce_range: bool = False
) -> Affine:
    width = 7 if reduce_range else 8  # for CPUs without VNNI, whose 16-bit sums would overflow; still a byte each
    if isinstance(granularity, PerGroup):
        return Affine(width, "group", group(granularity.group_size), mapping_name, "float32", native)
    if not isinstance(granularity, PerTensor) and granularity not in (PerRow(), PerRow(1)):
        raise ValueError(f"granularity must be PerRow(dim=-1), PerTensor or PerGroup, got {granularity}")
    return Affine(width, "tensor" if isinstance(granularity, PerTensor) else "row", 0, mapping_name, "float32", native)


def _int8_build(
    format: Affine, act: Any = None, scales: tuple[Tensor | None, ...] = (None, None), reduced: bool | None = False
) -> Build:
    """Return what builds an Int8Tensor. scales: static scale and zero point of activations."""

    def build(e: Encoded, w: Tensor) -> Tensor:
        block = {"group": [1, format.group], "row": [1, e.k], "tensor": list(w.shape)}[format.per]
        zero = torch.zeros_like(e.scales, dtype=torch.int8)
        held = (None if t is None else t.detach().to(w.device) for t in scales)
        codes = format.integers(e)
        return Int8Tensor(codes, e.scale, block, w.dtype, zero, *held, act_quant_kwargs=act, reduce_range=reduced)

    return build


def _int8_weight_only(config: Any) -> Target:
    format = _int8_format(config.granularity)
    return Target(LinearRecipe(None, format, "int8_rescale"), _int8_build(format), "Int8Tensor")


def _int8_limit(n: int, k: int, dtype: torch.dtype) -> str | None:
    if k == 1:
        return "torch._int_mm, the deployed kernel, returns uninitialised memory when K = 1: leave the layer out"
    return None


def _int8_operands(config: Any, *granularities: Any, native: bool, instead: str = "") -> tuple[Affine, Affine, Any]:
    """Return the formats of activations and weights, and torchao's arguments of the former."""
    reduced = config.reduce_range
    act_granularity, weight_granularity = Int8Tensor._normalize_granularity(config.granularity)
    require("activation granularity", act_granularity, *granularities, instead=instead)
    weight = _int8_format(weight_granularity, reduce_range=bool(reduced))
    sides = mapping("act_mapping_type", config.act_mapping_type, MappingType.SYMMETRIC, MappingType.ASYMMETRIC)
    activation = _int8_format(act_granularity, sides, native=native, reduce_range=bool(reduced))
    act = QuantizeTensorToInt8Kwargs(
        granularity=act_granularity, mapping_type=config.act_mapping_type, reduce_range=reduced
    )
    return activation, weight, act


def _int8_dynamic(config: Any) -> Target:
    require(
        "weight_only_decode",
        config.weight_only_decode,
        False,
        instead="torchao ignores it; Int8WeightOnlyConfig keeps activations in high precision",
    )
    activation, weight, act = _int8_operands(config, PerRow(), PerRow(1), PerTensor(), native=True)
    build = _int8_build(weight, act, reduced=config.reduce_range)
    return Target(LinearRecipe(activation, weight, "int8_dynamic"), build, "Int8Tensor", _int8_limit)


def _int8_static(config: Any) -> Target:
    """torchao's tensor takes inputs of as many dimensions as its activation scale has: those that calibration saw."""
    dynamic, weight, act = _int8_operands(
        config,
        PerTensor(),
        native=False,
        instead="a static scale per row fits one shape of batch; give granularity=[PerTensor(), PerRow()]",
    )
    scale, zero = config.act_quant_scale, config.act_quant_zero_point
    if zero is not None and (scale is None or (dynamic.mapping == "symmetric" and bool(zero.any()))):
        raise ValueError(
            "act_quant_zero_point goes with act_quant_scale and act_mapping_type=MappingType.ASYMMETRIC: give all three, or leave it out"
        )

    def fix(scales: Scales) -> Target:
        return _int8_static(config.replaced(act_quant_scale=scales.scale, act_quant_zero_point=scales.zero))

    build = _int8_build(weight, act, (scale, zero), config.reduce_range)
    recipe = LinearRecipe(dynamic, weight, "int8_dynamic", input_scales="static")
    if scale is None:
        return Target(recipe, build, "Int8Tensor", _int8_limit, fix)
    given = Scales(scale, torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero)
    fixed = dynamic.fix(*numbers(given)[: 1 if dynamic.mapping == "symmetric" else 2])
    return Target(LinearRecipe(fixed, weight, "int8_dynamic"), build, "Int8Tensor", _int8_limit)


TARGETS: dict[str, Callable[[Any], Target]] = {
    "IntxWeightOnlyConfig": _intx_weight_only,
    "Int8DynamicActivationIntxWeightConfig": _int8_dynamic_intx,
    "Int8WeightOnlyConfig": _int8_weight_only,
    "Int8DynamicActivationInt8WeightConfig": _int8_dynamic,
    "StretchedIntxWeightConfig": _stretched,
    "Int8StaticActivationInt8WeightConfig": _int8_static,
}
