"""PyTorch's own int4 kernels, "tinygemm": adapters that run them, and what they compute where they cannot run.

Both operators take packed weights that no other kernel reads, so an adapter packs the codes in every call: a
permutation, small beside the multiplication that follows. A converted torchao layer holds the same packed codes and
calls the same operator.

On a CPU an output is one chain of float32 fused multiply-adds in k's order, whatever the shape and the number of
threads, so `cpu_reference` can follow it to the last bit (slowly: a float64 emulation for each k). The CUDA kernel adds
tiles of 16 k's in an order of its own; `cuda_reference` sums the same products in another.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from aoquant.formats import Encoded, Int4
from aoquant.formats.elements import fma
from aoquant.formats.tinygemm import fused_sums

from ..call import Call
from ..router import Backend, Request

CUDA_K = 1024  # torchao pads K to a multiple of it, with zeros
INNER_K_TILES = 8
_aten = torch.ops.aten


def pack_cpu(format: Int4, e: Encoded) -> tuple[Tensor, Tensor]:
    """(packed codes (N, K/2) uint8, scales and zeros (G, N, 2)) of the CPU operator. Its layout depends on the vector
    instructions here.
    """
    codes = (format.integers(e) + 8).to(torch.int32)
    return _aten._convert_weight_to_int4pack_for_cpu(codes, 1), _scales_and_zeros(e)


def pack_cuda(format: Int4, e: Encoded, rows: int = 8) -> tuple[Tensor, Tensor]:
    """(packed codes (N/8, K/128, 32, 4) int32, scales and zeros (G, N, 2)) of the CUDA operator, padded to `rows` and
    CUDA_K.

    Padding holds the codes, scale and zero of an encoded zero, so all of its values are 0.
    """
    scale, zero = _both(e)
    # nibble by nibble: q -> q + 8 is flipping the top bit, and this operator wants the even k in the high one
    pairs = (e.codes << 4).bitwise_or_(e.codes >> 4).bitwise_xor_(0x88)
    missing_k, missing_n = -e.k % CUDA_K, -pairs.shape[0] % rows
    if missing_k or missing_n:
        blank = _blank(format, scale.dtype)
        pairs = F.pad(pairs, (0, missing_k // 2, 0, missing_n), value=blank.code << 4 | blank.code)
        groups = (0, missing_k // format.group, 0, missing_n)
        scale, zero = F.pad(scale, groups, value=blank.scale), F.pad(zero, groups, value=blank.zero)
    packed = _aten._convert_weight_to_int4pack(pairs.contiguous(), INNER_K_TILES)
    return packed, _scales_and_zeros(e._replace(scale=scale, zero=zero))


class _Blank(NamedTuple):
    """What zeros are encoded as: code (0 to 15), scale and zero."""

    code: int
    scale: float
    zero: float


@cache
def _blank(format: Int4, dtype: torch.dtype) -> _Blank:
    """Made on a CPU, where reading them does not wait for a device."""
    e = format.encode(torch.zeros(1, format.group, dtype=dtype, device="cpu"))
    scale, zero = _both(e)
    return _Blank(int(format.integers(e)[0, 0]) + 8, float(scale[0, 0]), float(zero[0, 0]))


NOT_ON_META = (
    "its own kernel packs it, which the meta device has no data for, so neither a skeleton nor aoquant convert can make it: load the "
    "model and call aoquant.quantize_"
)


def why_not_pack(operator: str, device: torch.device) -> str | None:
    """Return why weights on `device` cannot be packed for the operator ("cpu" or "cuda"); None when they can."""
    name = {"cpu": "_convert_weight_to_int4pack_for_cpu", "cuda": "_convert_weight_to_int4pack"}[operator]
    if not hasattr(_aten, name):
        return f"this torch has no {name}"
    if device.type == "meta":
        return NOT_ON_META
    if device.type != operator:
        return (
            f"its weights are packed by aten::{name}, which runs on {operator.upper()}, and the weight is on {device.type}: "
            f"move the model there first, or convert with quantize_(..., device={operator!r})"
        )
    return None


def cpu_reference(c: Call) -> Tensor:
    """rn(acc) + bias, acc as the CPU operator sums it here: for each k, acc = fma(x, w, acc)."""
    x_KM1 = c.x_hp.reshape(-1, c.k).float().t().unsqueeze(-1)
    w_K1N = c.w_format.operand(c.w, torch.float32).t().unsqueeze(1)
    acc_MN = torch.zeros(x_KM1.shape[1], w_K1N.shape[2], dtype=torch.float32, device=x_KM1.device)
    fused = fused_sums()
    for x_M1, w_1N in zip(x_KM1, w_K1N, strict=True):
        acc_MN = fma(x_M1, w_1N, acc_MN) if fused else x_M1 * w_1N + acc_MN
    return c.plus_bias(acc_MN.to(c.dtype))


def cuda_reference(c: Call) -> Tensor:
    """rn_bf16(acc) + rn_bf16(bias), added in bf16, then in the input's dtype."""
    x_MK = c.x_hp.reshape(-1, c.k).bfloat16().float()
    return _cuda_epilogue(c, (x_MK @ c.w_format.operand(c.w, torch.float32).t()).bfloat16())


def _cuda_epilogue(c: Call, y_MN: Tensor) -> Tensor:
    return c.shaped((y_MN if c.bias is None else y_MN + c.bias.bfloat16()).to(c.dtype))


def _scales_and_zeros(e: Encoded) -> Tensor:
    """(N, G) twice -> (G, N, 2)."""
    return torch.stack(_both(e), -1).transpose(0, 1).contiguous()


def _both(e: Encoded) -> tuple[Tensor, Tensor]:
    assert e.zero is not None
    return e.scales, e.zero


def _why_not_cpu(r: Request) -> str | None:
    if r.contract != "tinygemm_cpu":
        return f"computes tinygemm_cpu, not {r.contract}"
    if r.device.type != "cpu" or why_not_pack("cpu", r.device) is not None:
        return "computes tinygemm_cpu on a CPU alone, with a torch that has _weight_int4pack_mm_for_cpu"
    if r.n % 16:
        return f"the operator needs N to be a multiple of 16, got N = {r.n}"
    return None


def _cpu(c: Call) -> Tensor:
    packed, scales = pack_cpu(c.w_format, c.w)
    x_MK = c.x_hp.reshape(-1, c.k).contiguous()
    return c.plus_bias(_aten._weight_int4pack_mm_for_cpu(x_MK, packed, c.w_format.group, scales))


def _why_not_cuda(r: Request) -> str | None:
    if r.contract != "tinygemm_cuda":
        return f"computes tinygemm_cuda, not {r.contract}"
    if r.device.type != "cuda":
        return "computes tinygemm_cuda on a CUDA device alone"
    if (r.scale_dtype or r.dtype) != torch.bfloat16:
        return f"reads scales in bfloat16, got {r.scale_dtype or r.dtype}"
    if torch.cuda.get_device_capability(r.device) < (8, 0):
        return "the operator needs compute capability 8.0 (Ampere) or later"
    return None


def _cuda(c: Call) -> Tensor:
    packed, scales = pack_cuda(c.w_format, c.w)
    x_MK = F.pad(c.x_hp.reshape(-1, c.k).bfloat16(), (0, -c.k % CUDA_K))
    y_MN: Any = _aten._weight_int4pack_mm(x_MK, packed, c.w_format.group, scales)
    return _cuda_epilogue(c, y_MN[:, : c.w.codes.shape[0]])


BACKENDS = (
    Backend("torch._weight_int4pack_mm_for_cpu", 10, _why_not_cpu, _cpu, reads_codes=True),
    Backend("torch._weight_int4pack_mm", 10, _why_not_cuda, _cuda, reads_codes=True),
)
