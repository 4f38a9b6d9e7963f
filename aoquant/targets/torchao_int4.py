"""torchao's int4 configs: one target for each layout, since no two layouts compute the same numbers.

    Int4WeightOnlyConfig                     plain, preshuffled: MSLK's bf16 kernel
                                             tile_packed_to_4d: PyTorch's CUDA kernel
    PrototypeInt4WeightOnlyConfig            opaque: PyTorch's CPU kernel
    Float8DynamicActivationInt4WeightConfig  preshuffled, plain: two MSLK kernels with fp8 activations

Preparing and training work on any machine. Packing for a layout is its kernel's own business: where the operator that
packs is missing, convert says so and leaves the model as it was. Layouts without a published kernel are refused
by name.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao.quantization.quantize_.workflows import (
    Int4ChooseQParamsAlgorithm,
    Int4PackingFormat,
    Int4PreshuffledTensor,
    Int4Tensor,
    Int4TilePackedTo4dTensor,
)

from aoquant.formats import Encoded, Float8Mslk, Int4, Int4Float8, Int4Float8Row, TinyGemm
from aoquant.linear.recipe import LinearRecipe
from aoquant.ops.gemm import mslk, torch_int4

from .target import Target, group, require

_MSLK = (1, 1)  # the first release whose fp8 quantiser has the formula of formats/mslk.py
_FLOAT8_GROUP = 128  # torchao's only choice


def _int4_weight_only(config: Any) -> Target:
    layouts = (Int4PackingFormat.PLAIN, Int4PackingFormat.PRESHUFFLED, Int4PackingFormat.TILE_PACKED_TO_4D)
    layout = Int4PackingFormat(config.int4_packing_format)
    if layout not in layouts:
        raise ValueError(
            f"int4_packing_format must be one of {', '.join(f.value for f in layouts)}, got {layout.value}: its kernels are for Intel "
            "and Ascend accelerators, and none of them was there to be compared with"
        )
    if layout == Int4PackingFormat.TILE_PACKED_TO_4D:
        return _tile_packed(config)
    shuffled = layout == Int4PackingFormat.PRESHUFFLED
    format = Int4(group(config.group_size), "bfloat16") if shuffled else Int4(group(config.group_size))
    return _mslk(format, None, shuffled=shuffled)


def _float8_dynamic(config: Any) -> Target:
    reason = float8_dialect()
    if reason is not None:
        raise ValueError(reason)
    layout = str(getattr(config.int4_packing_format, "value", config.int4_packing_format))
    require("int4_packing_format", layout, "preshuffled", "plain")
    if layout == "preshuffled":
        return _mslk(Int4Float8Row(_FLOAT8_GROUP), Float8Mslk(), shuffled=True)
    return _mslk(Int4Float8(_FLOAT8_GROUP), Float8Mslk(), shuffled=False)


def _mslk(format: Int4 | Int4Float8 | Int4Float8Row, activation: Float8Mslk | None, *, shuffled: bool) -> Target:
    """Return the target of MSLK's kernels: codes as they are, or shuffled; activations bfloat16, or fp8 per row."""
    contract = "bias_after" if activation is None else "fp8_bias_after"

    def limit(n: int, k: int, dtype: torch.dtype) -> str | None:
        if shuffled and (n % 16 or k % 64):
            return (
                f"MSLK's preshuffled int4 needs N % 16 == 0 and K % 64 == 0, got N = {n}, K = {k}: leave the layer out"
            )
        if reason := mslk.int4_limit(n, k, format.group, contract):
            return reason
        if dtype == torch.float16:
            return "the MSLK int4 kernel takes bfloat16 activations: cast the layer from float16 to bfloat16"
        return None

    def build(e: Encoded, w: Tensor) -> Tensor:
        codes, scale_GN = e.codes.view(torch.int8), e.scales.t().contiguous()  # (N, K/2), (G, N)
        zero_GN = torch.zeros_like(scale_GN) if e.zero is None else e.zero.t().contiguous()
        if not shuffled:
            act = torch.bfloat16 if activation is None else torch.float8_e4m3fn
            return Int4Tensor(codes, scale_GN, zero_GN, [1, format.group], w.shape, activation_dtype=act)
        scales = {"group_zero": zero_GN} if e.outer is None else {"row_scale": e.outer.flatten()}
        return Int4PreshuffledTensor(*_shuffled(codes, scale_GN), [1, format.group], w.shape, **scales)

    kind = "Int4PreshuffledTensor" if shuffled else "Int4Tensor"
    return Target(LinearRecipe(activation, format, contract), build, kind, limit)


def _tile_packed(config: Any) -> Target:
    hqq = config.int4_choose_qparams_algorithm == Int4ChooseQParamsAlgorithm.HQQ
    require("group_size", config.group_size, 32, 64, 128, 256, instead="PyTorch's CUDA int4 kernel takes no other")
    format = TinyGemm(config.group_size, hqq=hqq)
    rows = config.int4_tile_packed_ntile

    def limit(n: int, k: int, dtype: torch.dtype) -> str | None:
        if dtype != torch.bfloat16:
            return f"torchao's Int4TilePackedTo4dTensor is bfloat16, got {str(dtype).removeprefix('torch.')}: cast the layer"
        if hqq and (k % torch_int4.CUDA_K or n % rows):
            return (
                f"HQQ in this layout stops by the mean error over zero padding too, so N must be a multiple of {rows} and K of "
                f"{torch_int4.CUDA_K}, got N = {n}, K = {k}: use the default int4_choose_qparams_algorithm for this layer"
            )
        return None

    def build(e: Encoded, w: Tensor) -> Tensor:
        _can("Int4TilePackedTo4dTensor", torch_int4.why_not_pack("cuda", w.device))
        return Int4TilePackedTo4dTensor(*torch_int4.pack_cuda(format, e, rows), [1, format.group], w.shape)

    return Target(LinearRecipe(None, format, "tinygemm_cuda"), build, "Int4TilePackedTo4dTensor", limit)


def _opaque(config: Any) -> Target:
    hqq = config.int4_choose_qparams_algorithm == Int4ChooseQParamsAlgorithm.HQQ
    require("group_size", config.group_size, 32, 64, 128, instead="torchao's CPU layout takes no other")
    format = TinyGemm(config.group_size, device="cpu", hqq=hqq)

    def limit(n: int, k: int, dtype: torch.dtype) -> str | None:
        if n % 16:
            return f"PyTorch's CPU int4 kernel needs N to be a multiple of 16, got N = {n}: leave the layer out"
        return None

    def build(e: Encoded, w: Tensor) -> Tensor:
        from torchao.prototype.quantization.int4 import Int4OpaqueTensor

        _can("Int4OpaqueTensor", torch_int4.why_not_pack("cpu", w.device))
        return Int4OpaqueTensor(*torch_int4.pack_cpu(format, e), [1, format.group], w.shape)

    return Target(LinearRecipe(None, format, "tinygemm_cpu"), build, "Int4OpaqueTensor", limit)


def float8_dialect() -> str | None:
    """Return why the MSLK here quantises fp8 rows by another formula than ours; None when it does not, or is absent."""
    for package in ("mslk-cuda", "mslk"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if (0, 0) < tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _MSLK:
            return f"{package} {version} quantises fp8 rows by another formula: install mslk-cuda 1.1 or later"
    return None


def _shuffled(codes: Tensor, scale_GN: Tensor) -> tuple[Tensor, Tensor]:
    """MSLK's shuffle of codes and scales, on a GPU; it may reorder its inputs in place."""
    _can("Int4PreshuffledTensor", torch_int4.NOT_ON_META if codes.is_meta else mslk.why_not_operator("preshuffle_i4"))
    if not codes.is_cuda:
        raise ValueError(
            "Int4PreshuffledTensor is packed on a GPU, and the weight is on a CPU: move the model to the GPU first, or convert with "
            "quantize_(..., device='cuda')"
        )
    qdata, group_scale = mslk.operator("preshuffle_i4")(codes.clone(), scale_GN.clone())
    return qdata, group_scale


def _can(tensor: str, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"{tensor} cannot be packed here: {reason}")


TARGETS: dict[str, Callable[[Any], Target]] = {
    "Int4WeightOnlyConfig": _int4_weight_only,
    "PrototypeInt4WeightOnlyConfig": _opaque,
    "Float8DynamicActivationInt4WeightConfig": _float8_dynamic,
}
