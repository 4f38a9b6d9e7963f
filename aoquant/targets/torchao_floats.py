"""torchao's float configs: Float8, MX and NVFP4.

Float8 with dynamic activations is stamped KernelPreference.TORCH: with AUTO, what torchao computes depends on whether
mslk happens to be installed on the machine that serves, and a prepared layer cannot equal both. TORCH is what prepare
computed. MSLK is kept: its rows are quantised by another formula (formats/mslk.py) and multiplied by another kernel,
which the recipe names. NVFP4 is stamped use_triton_kernel=False: MSLK's quantiser multiplies by 1 / pts where torch's
divides, and lets block scales fall below 2^-6, so small blocks get other codes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao.quantization import Float8Tensor, PerBlock, PerGroup, PerRow, PerTensor
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import Float8PackingFormat, QuantizeTensorToFloat8Kwargs

from aoquant.formats import MX, NVFP4, Encoded, Float8, Float8Mslk, Scales, layout
from aoquant.linear.recipe import LinearRecipe

from .target import Build, Target, group, numbers, require
from .torchao_int4 import float8_dialect

_PREFERENCES = ("AUTO", "TORCH", "MSLK")
_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float4_e2m1fn_x2: "e2m1"}


def float8_format(
    dtype: torch.dtype, granularity: Any, *, native: bool = False, low: float | None = None, high: float | None = None
) -> Float8:
    """The format of a Float8Tensor; low and high bound its absmax."""
    low, high = (None if bound is None else float(bound) for bound in (low, high))
    require("float8 dtype", dtype, torch.float8_e4m3fn, torch.float8_e5m2)
    element = _ELEMENTS[dtype]
    if isinstance(granularity, PerGroup):
        return Float8(element, "block", native, cols=group(granularity.group_size), low=low, high=high)
    if isinstance(granularity, PerBlock) and len(granularity.block_size) == 2:
        rows, cols = granularity.block_size
        return Float8(element, "block", native, rows=rows, cols=cols, low=low, high=high)
    if granularity not in (PerRow(), PerRow(1), PerTensor()):
        raise ValueError(
            f"granularity must be PerRow(dim=-1), PerTensor(), PerGroup or PerBlock of two numbers here, got {granularity}"
        )
    return Float8(element, "row" if isinstance(granularity, PerRow) else "tensor", native, low=low, high=high)


def _float8_build(format: Float8, scale: Tensor | None = None, kind: Any = Float8Tensor, **options: Any) -> Build:
    """Return what builds a Float8Tensor, or its prototype with a static scale of activations."""

    def build(e: Encoded, w: Tensor) -> Tensor:
        block = {"row": [1, w.shape[1]], "tensor": list(w.shape), "block": [format.rows, format.cols]}[format.per]
        scales = (e.scale,) if scale is None else (e.scale, scale.detach().to(w.device))
        return kind(e.codes, *scales, block_size=block, dtype=w.dtype, **options)

    return build


def _float8_weight_only(config: Any) -> Target:
    format = float8_format(config.weight_dtype, config.granularity)
    return Target(LinearRecipe(None, format, "matmul_bias"), _float8_build(format), "Float8Tensor")


def _float8_dynamic(config: Any) -> Target:
    require(
        "packing_format",
        config.packing_format,
        Float8PackingFormat.PLAIN,
        instead="2:4 sparse layers need a mask that training respects and sparse GPU kernels, and have no prepare here",
    )
    # pad_inner_dim changes nothing: the GEMM takes multiples of 16 alone, and pads to 16
    require(
        "mm_config.emulate",
        config.mm_config.emulate,
        False,
        instead="torchao's inference ignores it; aoquant computes the same layer where no fp8 GEMM exists",
    )
    low, high = config.activation_value_lb, config.activation_value_ub
    if not isinstance(config.granularity, list | tuple) or len(config.granularity) != 2:
        raise ValueError(f"granularity must be a pair here, of activations and of weights, got {config.granularity}")
    act_granularity, weight_granularity = config.granularity
    weight = float8_format(config.weight_dtype, weight_granularity)
    activation = float8_format(config.activation_dtype, act_granularity, native=True, low=low, high=high)
    require("kernel_preference", config.kernel_preference, *(getattr(KernelPreference, p) for p in _PREFERENCES))
    preference, contract = KernelPreference.TORCH, "fp8_scaled_mm"
    if config.kernel_preference == KernelPreference.MSLK:
        if (weight.name, activation.name) != ("fp8-row", "fp8-row-native"):
            raise ValueError(
                "kernel_preference MSLK goes with e4m3 and PerRow without bounds alone: torchao's MSLK GEMM takes nothing else"
            )
        if (reason := float8_dialect()) is not None:
            raise ValueError(reason)
        weight = activation = Float8Mslk()
        preference, contract = KernelPreference.MSLK, "fp8_mslk"
    act = QuantizeTensorToFloat8Kwargs(
        config.activation_dtype, act_granularity, hp_value_lb=low, hp_value_ub=high, kernel_preference=preference
    )

    def limit(n: int, k: int, dtype: torch.dtype) -> str | None:
        if weight.per == "block" and (n % 128 or dtype != torch.bfloat16):
            return (
                f"torchao's fp8 blocks of 128 x 128 take bfloat16 layers with N a multiple of 128, got N = {n}, "
                f'{str(dtype).removeprefix("torch.")}: use aoquant.FP8WeightConfig(granularity="block")'
            )
        if reason := _fp8_limit(n, k, dtype):
            return reason
        if weight.per == "row" and dtype != torch.bfloat16:
            return f"the row-wise fp8 GEMM takes bfloat16 layers, got {str(dtype).removeprefix('torch.')}: cast it, or use aoquant.FP8WeightConfig"
        return None

    build = _float8_build(weight, mm_config=config.mm_config, act_quant_kwargs=act, kernel_preference=preference)
    contract += "" if config.mm_config.use_fast_accum else "_precise"
    if weight.per == "block":
        contract = "fp8_blocks"  # torchao's kernel has one way to accumulate, whatever mm_config says
    return Target(LinearRecipe(activation, weight, contract), build, "Float8Tensor", limit)


def _float8_static(config: Any) -> Target:
    """torchao's tensor takes inputs of as many dimensions as its activation scale has: those that calibration saw."""
    from torchao.prototype.quantization.float8_static_quant.prototype_float8_tensor import PrototypeFloat8Tensor

    outputs = (config.quantize_and_dequantize_output, config.output_act_quant_scale is not None)
    require("quantize_and_dequantize_output", outputs, (False, False), instead="outputs stay in high precision")
    granularity = config.granularity or PerTensor()
    require("granularity", granularity, PerTensor(), instead="a static scale per row fits one shape of batch")
    require("kernel_preference", config.kernel_preference, KernelPreference.AUTO, KernelPreference.TORCH)
    require("mm_config.emulate", config.mm_config.emulate, False)
    weight, dynamic = (float8_format(d, granularity) for d in (config.weight_dtype, config.activation_dtype))
    act = QuantizeTensorToFloat8Kwargs(
        config.activation_dtype, granularity, config.mm_config, kernel_preference=KernelPreference.TORCH
    )
    scale = config.act_quant_scale

    def fix(scales: Scales) -> Target:
        return _float8_static(config.replaced(act_quant_scale=scales.scale))

    build = _float8_build(
        weight,
        scale,
        PrototypeFloat8Tensor,
        mm_config=config.mm_config,
        act_quant_kwargs=act,
        kernel_preference=KernelPreference.TORCH,
    )
    contract = "fp8_scaled_mm" if config.mm_config.use_fast_accum else "fp8_scaled_mm_precise"
    kind = "PrototypeFloat8Tensor"
    if scale is None:
        return Target(LinearRecipe(dynamic, weight, contract, input_scales="static"), build, kind, _fp8_limit, fix)
    return Target(LinearRecipe(dynamic.fix(*numbers(Scales(scale))), weight, contract), build, kind, _fp8_limit)


def _fp8_limit(n: int, k: int, dtype: torch.dtype) -> str | None:
    if n % 16 or k % 16:
        return (
            f"the fp8 GEMM needs N and K to be multiples of 16, got N = {n}, K = {k}: leave the layer out, or use aoquant.FP8WeightConfig, "
            "which takes any"
        )
    return None


def _swizzled(scale: Tensor, cols_per_tile: int, rows: int, k: int) -> Tensor:
    """128x4 tiles in the 2-D shape that torchao's tensors keep them in."""
    return layout.swizzle_128x4(scale).view(-(-rows // 128) * 32, -(-k // cols_per_tile) * 16)


def _mx(config: Any) -> Target:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs

    require("block_size", config.block_size, 32, instead="torchao's own convert fails with any other")
    require("weight_dtype", config.weight_dtype, *_ELEMENTS)
    preference = require(
        "kernel_preference", config.kernel_preference, KernelPreference.EMULATED, KernelPreference.AUTO
    )
    if preference == KernelPreference.AUTO and config.weight_dtype == torch.float8_e5m2:
        raise ValueError(
            "torchao has no MX kernel for e5m2: use KernelPreference.EMULATED, or aoquant.MXFP8WeightConfig('e5m2')"
        )
    require(
        "activation_dtype", config.activation_dtype, config.weight_dtype, instead="torchao's kernel takes one dtype"
    )
    format = MX(_ELEMENTS[config.weight_dtype], str(config.scaling_mode.value).lower())
    contract = "dequantize_flat" if preference == KernelPreference.EMULATED else "aoquant"
    act = QuantizeTensorToMXKwargs(
        elem_dtype=config.activation_dtype,
        block_size=32,
        kernel_preference=preference,
        is_swizzled_scales=True,
        scaling_mode=config.scaling_mode,
    )

    def limit(n: int, k: int, dtype: torch.dtype) -> str | None:
        if dtype != torch.bfloat16:
            return f"torchao's MX layers are bfloat16, got {dtype}: cast it, or use aoquant.MXFP8WeightConfig"
        return None

    def build(e: Encoded, w: Tensor) -> Tensor:
        scale = _swizzled(e.scales, 128, w.shape[0], e.k)
        return MXTensor(e.codes, scale, config.weight_dtype, 32, w.dtype, preference, act, True)

    return Target(LinearRecipe(format, format, contract), build, "MXTensor", limit)


def _nvfp4_limit(n: int, k: int, dtype: torch.dtype) -> str | None:
    if n % 16 or k % 16:
        return f"torchao's NVFP4 needs N and K to be multiples of 16, got N = {n}, K = {k}: leave the layer out"
    if dtype == torch.float16:
        return (
            "torchao's NVFP4 takes bfloat16 or float32 layers, got float16: cast it, or use aoquant.NVFP4WeightConfig"
        )
    return None


def _nvfp4(config: Any, act_scale: Tensor | None = None) -> Target:
    """A config with a step, either one, has a static outer scale for activations; act_scale: what calibration found."""
    from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

    static, dynamic = config.step is not None, config.use_dynamic_per_tensor_scale
    if static:
        require("use_dynamic_per_tensor_scale", dynamic, False, instead="calibration finds the scale of activations")
    require("use_triton_kernel", config.use_triton_kernel, True, False)  # the deployed tensor has False, see above
    act = QuantizeTensorToNVFP4Kwargs(
        use_dynamic_per_tensor_scale=dynamic, use_triton_kernel=False, is_swizzled_scales=True
    )
    format = NVFP4("dynamic" if dynamic or static else "none")
    recipe = LinearRecipe(format, format, "aoquant" if format.outer == "none" else "nvfp4_rescale")
    if static:
        recipe = dataclasses.replace(recipe, input_scales="static")
    build = _nvfp4_build(act, act_scale)

    def fix(scales: Scales) -> Target:
        return _nvfp4(config, scales.outer)

    return Target(recipe, build, "NVFP4Tensor", _nvfp4_limit, fix)


def _nvfp4_weight_only(config: Any) -> Target:
    format = NVFP4("dynamic" if config.use_dynamic_per_tensor_scale else "none")
    return Target(LinearRecipe(None, format, "dequantize"), _nvfp4_build(None), "NVFP4Tensor", _nvfp4_limit)


def _nvfp4_build(act: Any, act_scale: Tensor | None = None) -> Build:
    def build(e: Encoded, w: Tensor) -> Tensor:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        scale = _swizzled(e.scales, 64, w.shape[0], e.k)
        pts = None if e.outer is None else e.outer.reshape(())
        act_pts = None if act_scale is None else act_scale.detach().to(w.device).reshape(())
        return NVFP4Tensor(e.codes, scale, 16, w.dtype, pts, act_pts, True, False, act)

    return build


TARGETS: dict[str, Callable[[Any], Target]] = {
    "Float8WeightOnlyConfig": _float8_weight_only,
    "Float8DynamicActivationFloat8WeightConfig": _float8_dynamic,
    "Float8StaticActivationFloat8WeightConfig": _float8_static,
    "MXDynamicActivationMXWeightConfig": _mx,
    "NVFP4DynamicActivationNVFP4WeightConfig": _nvfp4,
    "NVFP4WeightOnlyConfig": _nvfp4_weight_only,
}
