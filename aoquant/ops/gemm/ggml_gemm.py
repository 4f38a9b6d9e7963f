"""llama.cpp's product of quantised rows: integer sums of 32 products, each times the product of its two scales, added
in float32.

    y = rn(sum over blocks, in K's order, of (sum q_x q_w) * (d_x * d_w) [+ m_w * (d_x * sum q_x)] + bias)

Integer sums and products of two float16 scales are exact in float32, so a block is rounded when they are multiplied and
when it is added; m, q4_1's minimum, is a product and a sum of its own.
ggml's kernels add the blocks in lanes, in an order that differs by CPU, so their results are within float32's rounding
of this one. If one side is not in ggml's blocks, both are decoded to float32, exactly, and multiplied there. On a GPU
a Triton kernel makes the same sums, bit for bit. Source: ggml `ggml_vec_dot_q4_0_q8_0_generic` and its like.
"""

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Ggml
from aoquant.formats.ggml import KINDS

from .. import codec
from ..call import Call
from ..codec.triton_kernels import imported
from ..router import Backend, Request


def scaled_mm(c: Call) -> Tensor:
    """y under the contract "ggml"."""
    if c.x is not None and _in_blocks(c.x_format, c.w_format):
        acc_MN = _blocks(c.x, c.x_format, c.w, c.w_format)
    else:
        x_MK = c.x_hp.reshape(-1, c.k).float() if c.x is None else c.x_format.decode(c.x, torch.float32)
        acc_MN = x_MK @ c.w_format.decode(c.w, torch.float32).t()
    if c.bias is not None:
        acc_MN = acc_MN + c.bias.float()
    return c.shaped(acc_MN.to(c.dtype))


def _in_blocks(x: Format | None, w: Format) -> bool:
    """Return whether both are in ggml's blocks, x in 8 bits, so that integers are multiplied."""
    return x is not None and x.standard == "q8_0" and w.standard in KINDS


def _blocks(x: Encoded, x_format: Ggml, w: Encoded, w_format: Ggml) -> Tensor:
    """(M, N) float32."""
    x_GMB, w_GNB = _split(x_format, x), _split(w_format, w)
    dx_GM, dw_GN = x.scales.float().t(), w.scales.float().t()
    acc_MN = dx_GM.new_zeros(dx_GM.shape[1], dw_GN.shape[1])
    for g, (x_MB, w_NB) in enumerate(zip(x_GMB, w_GNB, strict=True)):
        acc_MN += (x_MB @ w_NB.t()) * (dx_GM[g].unsqueeze(1) * dw_GN[g])
        if w.zero is not None:
            acc_MN += (dx_GM[g] * x_MB.sum(-1)).unsqueeze(1) * w.zero[:, g].float()
    return acc_MN


def _split(format: Ggml, e: Encoded) -> Tensor:
    """(G, R, 32) float32 integers: sums of 32 products of them are exact."""
    return format.integers(e).float().unflatten(1, (-1, 32)).transpose(0, 1)


def _why_not(r: Request) -> str | None:
    if r.contract != "ggml":
        return f"computes ggml, not {r.contract}"
    if not _in_blocks(r.x_format, r.w_format):
        x = r.x_format.name if r.x_format else "floats"
        return f"multiplies integers in ggml's blocks, x in 8 bits, not {x} and {r.w_format.name}"
    return codec.lacks_triton(r.device)


def _triton(c: Call) -> Tensor:
    y_MN: Tensor = imported("ggml_matmul").matmul(c.x, c.x_format, c.w, c.w_format, c.bias, c.dtype)
    return c.shaped(y_MN)


BACKENDS = (Backend("triton-ggml", 10, _why_not, _triton, reads_codes=True),)
