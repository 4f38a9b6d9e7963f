"""qutlass: FP4 kernels for Blackwell (sm_100, 101, 110, 120) by IST Austria, for the GEMM and for making codes.

GEMM: `matmul_mxf4_bf16_tn(a, b, a_sf, b_sf, alpha)` and `matmul_nvf4_bf16_tn`: packed codes, block scales swizzled in
tiles of 128 x 4, one float32 alpha on the device, bf16 out. K is padded to a multiple of 128 with zero codes and zero
scales; NVFP4's scales go as a matrix of K / 16 columns, MX's flat. The kernel itself rounds acc * alpha to bf16, where
alpha is the product of both sides' scales. So a bias is added after that rounding and rounded again. If rows of the
weight differ in their outer scale (q, k and v loaded into one), the ratio to the first row's is applied after it too.

Codes: `fusedQuantizeMx(x, B, method=...)` and `fusedQuantizeNv(x, B, global_scale)` quantise x B, B the identity or a
Hadamard matrix. Their global scale multiplies x, so it is the reciprocal of our outer scale. The kernels divide
approximately, so a few codes in ten thousand differ from `Format.encode`: the router never chooses them; they run when
forced.

Contract-tested against a double that checks every argument and multiplies what they stand for
(test/ops/test_qutlass.py). Not run on hardware, since none was at hand. Older builds give the scales of
`fusedQuantize*` as padded rows, newer ones swizzled; both are read. Each symbol is probed by itself: a build without
one of them still serves the others.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aoquant.formats import Encoded, Format, Operand, layout

from ..call import Call
from ..quantized import Ask, Side
from ..router import Backend, CodecRequest, Request
from .packed_fp4 import why_not_packed

NAME = "qutlass"
BLACKWELL = (10, 11, 12)
K_MULTIPLE = 128


@cache
def _package() -> Any:
    """The package, or None."""
    try:
        import qutlass
    except ImportError:  # not there, or its extension was built for another torch
        return None
    return qutlass


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _lacks(device: torch.device, dtype: torch.dtype, symbol: str) -> str | None:
    """Return why `symbol` cannot run here."""
    capability, wants = _capability(device), list[str]()
    if capability is None or capability[0] not in BLACKWELL:
        wants.append("qutlass's FP4 kernels need a Blackwell GPU (sm_100, 101, 110 or 120)")
    if _package() is None:
        wants.append(
            "qutlass is not installed (the package index has only an empty 0.0.0: build it from its repository)"
        )
    if wants:
        return "; ".join(wants)
    if dtype != torch.bfloat16:
        return f"qutlass computes bfloat16, got {dtype}"
    if not hasattr(_package(), symbol):
        return f"this build of qutlass has no {symbol}"
    return None


def _symbol(f: Format) -> str:
    return "matmul_mxf4_bf16_tn" if f.block == 32 else "matmul_nvf4_bf16_tn"


def _why_not(r: Request) -> str | None:
    if r.contract != "aoquant":
        return f"computes aoquant, not {r.contract}"
    if reason := why_not_packed(r.x_format) or why_not_packed(r.w_format):
        return reason
    assert r.x_format is not None
    if r.x_format.block != r.w_format.block:
        return f"multiplies MX by MX and NVFP4 by NVFP4, got {r.x_format.name} by {r.w_format.name}"
    if r.x_format.reach == "row":
        return f"has one alpha for the whole product, got one a row of x: choose activations with one for all, not {r.x_format.name}"
    return _lacks(r.device, r.dtype, _symbol(r.w_format))


def _run(c: Call) -> Tensor:
    (x_codes, x_scale), (w_codes, w_scale) = (operand(e, c.k) for e in (c.x, c.w))
    alpha_w = c.alpha_w
    alpha = torch.ones(1, dtype=torch.float32, device=x_codes.device)
    for a in (c.alpha_x, alpha_w):
        alpha = alpha if a is None else alpha * a[:1, 0]
    y_MN = getattr(_package(), _symbol(c.w_format))(x_codes, w_codes, x_scale, w_scale, alpha)
    if alpha_w is not None and alpha_w.shape[0] > 1:
        first = alpha_w[:1]
        ratio = torch.where(
            alpha_w == first, 1.0, alpha_w / first
        )  # 1 in every row but those of weights loaded into one
        y_MN = (y_MN.float() * ratio.t()).to(c.dtype)
    return c.plus_bias(y_MN)


def operand(e: Encoded, k: int) -> tuple[Tensor, Tensor]:
    """Codes (R, K' / 2) with K padded to K', a multiple of 128, and swizzled block scales: a zero byte where there is
    no block.
    """
    padded, block = -(-k // K_MULTIPLE) * K_MULTIPLE, k // e.scales.shape[1]
    codes = F.pad(e.codes, (0, (padded - k) // 2)).contiguous()
    scale = F.pad(e.scales.view(torch.uint8), (0, (padded - k) // block))
    flat = layout.swizzle_128x4(scale).view(e.scales.dtype)
    return codes, flat if block == 32 else flat.view(-1, padded // block)


_METHODS = {"qutlass-mxfp4": "abs_max", "mxfp4-quest": "quest"}


def _why_not_quantize(r: CodecRequest) -> str | None:
    made, inner = r.operand, r.operand.format
    if inner.name not in _METHODS and not inner.name.startswith("qutlass-nvfp4"):
        return f"makes qutlass-mxfp4, mxfp4-quest and qutlass-nvfp4, not {inner.name}"
    if made.transform is not None:
        if made.fitted or made.inverse:
            return f"takes one bf16 matrix for every block of activations, got {made.name}"
        if made.transform.size < (inner.block or 1):
            return f"mixes {inner.block} values or more, got {made.name}"
    if r.k % K_MULTIPLE or r.rows == 0:
        return f"makes codes of rows that are a multiple of {K_MULTIPLE} long, got {r.rows} x {r.k}"
    return _lacks(r.device, r.dtype, "fusedQuantizeMx" if inner.block == 32 else "fusedQuantizeNv")


def _encode(made_as: Operand, x_RK: Tensor) -> Encoded:
    inner, block = made_as.format, made_as.format.block
    assert block is not None
    size = made_as.transform.size if made_as.transform else block
    eye = torch.eye(size, dtype=torch.float32, device=x_RK.device)
    matrix = made_as.transformed(eye).to(torch.bfloat16)  # e_i T^T is row i of T^T
    x_RK, outer = x_RK.contiguous(), None
    if block == 32:
        codes, scale = _package().fusedQuantizeMx(x_RK, matrix, method=_METHODS[inner.name])
        made = _package().fusedQuantizeMx
    else:
        outer = made_as.measure(x_RK).outer
        assert outer is not None
        made = _package().fusedQuantizeNv
        codes, scale = made(x_RK, matrix, outer.reciprocal().flatten())
    rows, k = x_RK.shape
    return Encoded(codes.view(torch.uint8), row_major(scale, rows, k // block, _swizzles(made)), None, outer, k)


@cache
def _swizzles(function: Any) -> bool:
    """Return whether this build's quantiser gives its scales swizzled."""
    return "is_sf_swizzled_layout" in inspect.signature(function).parameters


def row_major(scale: Tensor, rows: int, groups: int, swizzled: bool) -> Tensor:
    """(rows, groups) of the padded buffer that a quantiser returns, whatever shape it gives it; the padding is
    uninitialised.
    """
    if swizzled:
        return layout.unswizzle_128x4(scale.flatten(), rows, groups)
    columns = -(-groups // 4) * 4
    return scale.view(torch.uint8).reshape(-1, columns)[:rows, :groups].contiguous().view(scale.dtype)


def _quantize(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    e, f = _encode(operand, x_RK), operand.format
    values = None if ask.values is None else (f.operand if ask.operand else f.decode)(e, ask.values)
    return Side(e if ask.codes else None, values, f.alpha(e))


BACKENDS = (
    Backend(NAME, 8, _why_not, _run, reads_codes=True),
    Backend(NAME, -1, _why_not_quantize, _quantize, "quantize"),
)
