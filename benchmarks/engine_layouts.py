"""Packed weights in the layouts that vLLM's kernels read: codes and scales are moved, none is changed.

Marlin and Machete read 4-bit codes packed along K into int32, low bits first, then repacked by an operator of their
own; Marlin's scales are permuted as its threads read them. Its NVFP4 scales lose their sign bit and gain one of the
exponent; the outer scale carries the difference, powers of two. Sources: vLLM 0.32 `marlin_utils.py`,
`marlin_utils_fp4.py`, `kernels/linear/mixed_precision/machete.py`, `scalar_type.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aoquant import PackedTensor
from aoquant.formats import Affine

# vLLM's numbers for types: with a bias of 8 or 128, unsigned, and e2m1
UINT4B8, UINT8B128, UINT4, E2M1 = 1125899907892224, 1125899923621888, 1125899906843648, 562949953487106
BF16 = torch.bfloat16
ACROSS = [i + 8 * j for i in range(8) for j in range(8)]  # Marlin's order of scales, several groups along K
SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]  # one group


@dataclass(frozen=True)
class Weight:
    """multiply: (M, K) bf16 -> (M, N) bf16."""

    multiply: Callable[[Tensor], Tensor]


def along_k(q_NK: Tensor, bits: int) -> Tensor:
    """Unsigned codes (N, K) as int32 (K * bits / 32, N)."""
    per = 32 // bits
    words = q_NK.t().to(torch.int64).unflatten(0, (-1, per))
    packed = sum(words[:, i] << (bits * i) for i in range(per))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def permuted(s_GN: Tensor) -> Tensor:
    """Marlin's order of scales."""
    order = ACROSS if s_GN.shape[0] > 1 else SINGLE
    return s_GN.reshape(-1, len(order))[:, order].reshape(s_GN.shape).contiguous()


def zero_points(z_GN: Tensor) -> Tensor:
    """Marlin's order of unsigned 4-bit zero points, packed along N."""
    z = z_GN.reshape(-1, len(ACROSS))[:, ACROSS].reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]
    return along_k(z.reshape(z_GN.shape), 4).t().contiguous()


def _integers(w: PackedTensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Unsigned codes (N, K), scales (G, N), unsigned zero points (G, N), bits."""
    format, e = w.weight_format, w.encoded
    assert isinstance(format, Affine) and e.scale is not None
    bias = 1 << (format.width - 1)
    zero = None if e.zero is None else (e.zero.to(torch.int32) + bias).t().contiguous()
    return format.integers(e).to(torch.int32) + bias, e.scale.t().contiguous(), zero, format.width


def _marlin(ops: Any, w: PackedTensor, codes: Tensor, scales: Tensor, type: int, **parts: Any) -> Weight:
    n, k = w.shape
    workspace = torch.zeros(torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int32, device="cuda")
    outer, zeros = parts.get("outer"), parts.get("zeros")

    def multiply(x: Tensor) -> Tensor:
        m = x.shape[0]
        made: Tensor = ops.marlin_gemm(
            x, None, codes, None, scales, None, outer, zeros, workspace, type, m, n, k, False, True, False
        )
        return made

    return Weight(multiply)


def marlin(ops: Any, w: PackedTensor) -> Weight:
    """Integers of 4 or 8 bits in groups."""
    n, k = w.shape
    q, s, zero, bits = _integers(w)
    codes = ops.gptq_marlin_repack(along_k(q, bits), k, n, bits, False)
    type = UINT4 if zero is not None else UINT4B8 if bits == 4 else UINT8B128
    return _marlin(ops, w, codes, permuted(s), type, zeros=None if zero is None else zero_points(zero))


def marlin_fp4(ops: Any, w: PackedTensor) -> Weight:
    """MXFP4 and NVFP4."""
    n, k = w.shape
    e = w.encoded
    assert e.scale is not None
    codes = ops.gptq_marlin_repack(e.codes.view(torch.int32).t().contiguous(), k, n, 4, False)
    s = permuted(e.scale.t().contiguous().to(BF16))
    s = s.view(-1, 4)[:, [0, 2, 1, 3]].reshape(s.shape)
    if e.outer is None:
        return _marlin(ops, w, codes, s.to(torch.float8_e8m0fnu), E2M1)
    high, factor = e5m3(s)
    return _marlin(ops, w, codes, high, E2M1, outer=e.outer[:1, 0].clone() * 2.0 ** (126 - 7) / factor)


def e5m3(s: Tensor) -> tuple[Tensor, float]:
    """Marlin's scales of NVFP4, (G, N) bf16 to bytes without sign and with five bits of exponent, and their factor."""
    factor = max(1.0, 2.0 ** math.floor(math.log2(448 / s.max().item())))
    half = (s.float() * factor).to(torch.float16) * 2**7
    half[half < 2] = 0
    return (half.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous(), factor


def machete(ops: Any, w: PackedTensor) -> Weight:
    """Integers of 4 bits in groups; asymmetric ones with -s * zp, rounded, as a second scale."""
    q, s, zero, bits = _integers(w)
    type = UINT4B8 if zero is None else UINT4
    packed = along_k(q, bits).t().contiguous().t()
    codes = ops.machete_prepack_B(packed, BF16, type, BF16)
    shift = None if zero is None else (-1.0 * s * zero.to(BF16)).contiguous()
    group = w.k // s.shape[0]

    def multiply(x: Tensor) -> Tensor:
        made: Tensor = ops.machete_mm(x, codes, type, None, s, shift, group, None, None, None)
        return made

    return Weight(multiply)
