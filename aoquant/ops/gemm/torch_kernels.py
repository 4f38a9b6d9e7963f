"""Kernels that other people ship. Each adapter probes the symbol it calls and says why when it cannot run.

Here: PyTorch's own. `torch._scaled_mm` is the fp8 GEMM that torchao's Float8Tensor calls; `torch._int_mm` the int8 one.
Both take the codes that our formats made, so a prepared linear and a converted torchao tensor call one kernel with
equal inputs. torchao's own Triton kernel multiplies float8 blocks. It tunes its tiles by shape, once a process, so two
processes may add in different orders; within one, prepared and converted agree. `torch.mm` on CUDA multiplies MSLK's
int4 operand tile by cuBLAS, which equals MSLK's own kernel bit for bit unless it splits K, and `torch._scaled_mm` with
unit scales does the same for the kernels with fp8 activations, whose epilogues follow it; it multiplies tinygemm's CPU
contract on CUDA, too. MSLK's own operators have higher priority where they are installed (mslk.py).
"""

import importlib.util
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from aoquant.formats import Encoded

from ..call import Call
from ..router import Backend, Multiply, Request
from .reference import fp8_epilogue, int8_epilogue, rescaled


def _why_not_scaled_mm(r: Request) -> str | None:
    if not r.contract.startswith("fp8_scaled_mm"):
        return f"computes fp8_scaled_mm, not {r.contract}"
    if not hasattr(torch, "_scaled_mm"):
        return "this torch has no torch._scaled_mm"
    if r.device.type == "cuda" and torch.cuda.get_device_capability(r.device) < (8, 9):
        return "torch._scaled_mm needs compute capability 8.9 (Ada, Hopper) or later"
    if r.device.type == "cpu" and r.w_format.reach == "row" and not _cpu_row_scales():
        return f"torch._scaled_mm of torch {torch.__version__} takes per-tensor scales only on a CPU (2.13 takes rows)"
    if r.k % 16 or r.n % 16:
        return f"torch._scaled_mm needs K and N to be multiples of 16, got K = {r.k}, N = {r.n}"
    return None


@cache
def _cpu_row_scales() -> bool:
    """Return whether this torch's CPU kernel takes a scale per row: 2.11's does not, 2.13's does."""
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device="cpu")
    scale = torch.ones(16, 1, device="cpu")
    try:
        torch._scaled_mm(codes, codes.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def _scaled_mm(c: Call) -> Tensor:
    return c.shaped(_product(c.contract, c.x.codes, c.x.scales, c.w, c.bias, c.dtype))


def _bind_scaled_mm(r: Request, w: Encoded) -> Multiply:
    def product(x_MK: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        assert scale is not None
        return _product(r.contract, x_MK, scale, w, bias, r.dtype)

    return product


def _product(contract: str, x_MK: Tensor, scale: Tensor, w: Encoded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(M, N) of codes and their scales, by the GEMM that takes them or by another with the same sums."""
    fast = contract == "fp8_scaled_mm"
    if bias is not None and bias.data_ptr() % 16:  # a part of a flat buffer: cuBLAS loads vectors
        bias = bias.clone()
    # under autocast a bias may be float32, which cuBLAS refuses beside an output of 16 bits
    taken = bias is None or bias.dtype is dtype or dtype is torch.float32
    if taken and (not _refused or _asked(contract, x_MK, scale, w, bias, dtype) not in _refused):
        # cuBLAS takes no bias with a float32 output; torchao adds it afterwards there, as we do
        late = bias if dtype == torch.float32 else None
        try:
            y_MN = torch._scaled_mm(
                x_MK,
                w.codes.t(),
                scale_a=scale,
                scale_b=w.scales if w.scales.numel() == 1 else w.scales.t(),
                bias=None if late is not None else bias,
                out_dtype=dtype,
                use_fast_accum=fast,
            )
            return y_MN if late is None else y_MN + late
        except RuntimeError as error:
            if "NOT_SUPPORTED" not in str(error):
                raise
        _refused.add(_asked(contract, x_MK, scale, w, bias, dtype))  # an exception costs more than the GEMM
    # torchao's layer raises here: with a bias and a scale per row cuBLAS has no kernel that splits K; with one scale it
    # has, and the same sums
    return rescaled(_accumulated(x_MK, w.codes, fast), scale, w.scales, bias, dtype)


_refused: set[tuple[object, ...]] = set()  # operands, by `_asked`, for which cuBLAS has no kernel


def _asked(
    contract: str, x_MK: Tensor, scale: Tensor, w: Encoded, bias: Tensor | None, dtype: torch.dtype
) -> tuple[object, ...]:
    """Return what cuBLAS asks for when it chooses a kernel: shapes, dtypes and the device."""
    shapes = x_MK.shape, scale.shape, w.codes.shape, w.scales.shape
    return (*shapes, x_MK.dtype, w.codes.dtype, x_MK.device, bias is None, dtype, contract)


def _accumulated(x_MK: Tensor, w_NK: Tensor, fast: bool) -> Tensor:
    """(M, N) float32 sums of fp8 products, by the GEMM that has one scale for each side."""
    one = torch.ones((), dtype=torch.float32, device=w_NK.device)
    return torch._scaled_mm(x_MK, w_NK.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast)


FEWEST_ROWS = (
    64  # below it cuBLAS splits K in many layers, and sums in another order than MSLK's kernels; above, in narrow ones
)
_FP8_EPILOGUES = ("fp8_bias_after", "fp8_mslk", "fp8_mslk_precise")


def _why_not_fp8_operands(r: Request) -> str | None:
    if r.contract not in _FP8_EPILOGUES:
        return f"computes {', '.join(_FP8_EPILOGUES)}, not {r.contract}"
    if r.device.type != "cuda" or torch.cuda.get_device_capability(r.device) < (8, 9):
        return (
            f"computes {r.contract} on fp8 tensor cores alone: needs a CUDA device of compute capability 8.9 or later"
        )
    if r.k % 16 or r.n % 16:
        return f"torch._scaled_mm needs K and N to be multiples of 16, got K = {r.k}, N = {r.n}"
    return None


def _fp8_operands(c: Call) -> Tensor:
    w_NK = c.w_format.operand(c.w, torch.float8_e4m3fn)  # exact: e4m3 is what the kernel's operand is rounded to
    rows = c.x.codes.shape[0]
    short = max(0, FEWEST_ROWS - rows)
    x_MK = F.pad(c.x.codes.view(torch.uint8), (0, 0, 0, short)).view(c.x.codes.dtype)
    acc_MN = _accumulated(x_MK, w_NK, not c.contract.endswith("_precise"))
    return fp8_epilogue(c, acc_MN[:rows])


def _why_not_int_mm(r: Request) -> str | None:
    if r.contract != "int8_dynamic":
        return f"computes int8_dynamic, not {r.contract}"
    if not hasattr(torch, "_int_mm"):
        return "this torch has no torch._int_mm"
    if r.device.type == "cuda" and (r.k % 8 or r.n % 8):
        return f"cuBLAS int8 needs K and N to be multiples of 8, got K = {r.k}, N = {r.n}"
    if r.k == 1:
        return "torch._int_mm leaves its output unwritten on a CPU when K = 1"
    return None


def _int_mm(c: Call) -> Tensor:
    x_MK, w_NK = c.integers()
    short = 17 - x_MK.shape[0] if x_MK.is_cuda else 0  # cuBLAS int8 wants more than 16 rows; zero rows change nothing
    acc_MN = torch._int_mm(F.pad(x_MK, (0, 0, 0, short)) if short > 0 else x_MK, w_NK.t())
    return int8_epilogue(c, acc_MN[: x_MK.shape[0]])


def _why_not_mm(r: Request) -> str | None:
    if r.contract not in ("bias_after", "tinygemm_cpu"):
        return f"computes bias_after and tinygemm_cpu, not {r.contract}"
    if r.device.type != "cuda" or (r.contract == "bias_after" and r.dtype != torch.bfloat16):
        return f"computes {r.contract} by cuBLAS alone: needs a CUDA device and, for bias_after, bfloat16 activations"
    return None


def _mm(c: Call) -> Tensor:
    if (
        c.contract == "tinygemm_cpu"
    ):  # its operand is float32; one chain of additions is what only the CPU's kernel keeps
        y_MN = c.x_hp.reshape(-1, c.k).float() @ c.w_format.operand(c.w, torch.float32).t()
        return c.plus_bias(y_MN.to(c.dtype))
    # the operand tile is what MSLK's kernel builds; cuBLAS then adds in K's order wherever it does not split K
    return c.plus_bias(c.x_matrix() @ c.w_matrix().t())


def _why_not_blockwise(r: Request) -> str | None:
    if r.contract != "fp8_blocks":
        return f"computes fp8_blocks, not {r.contract}"
    if r.device.type != "cuda" or r.dtype != torch.bfloat16:
        return "torchao's blockwise fp8 kernel needs a CUDA device and bfloat16 activations"
    if torch.cuda.get_device_capability(r.device) < (8, 9):
        return "torchao's blockwise fp8 kernel needs compute capability 8.9 (Ada, Hopper) or later"
    if importlib.util.find_spec("triton") is None:
        return "torchao's blockwise fp8 kernel needs triton"
    if _blockwise_kernel() is None:
        return "this torchao has no torchao.kernel.blockwise_quantization, whose kernel the layer is exact with: install torchao 0.18"
    return None


@cache
def _blockwise_kernel() -> Callable[..., Tensor] | None:
    """Return torchao's kernel, or None where this torchao has another one or none."""
    try:
        kernels = importlib.import_module("torchao.kernel.blockwise_quantization")
    except ImportError:
        return None
    return getattr(kernels, "blockwise_fp8_gemm", None)


def _blockwise(c: Call) -> Tensor:
    kernel = _blockwise_kernel()
    assert kernel is not None
    y_MN = kernel(c.x.codes, c.x.scales, c.w.codes.contiguous(), c.w.scales.contiguous(), 128)
    return c.shaped(y_MN if c.bias is None else (y_MN + c.bias).to(c.dtype))


BACKENDS = (
    Backend("torch.mm", 10, _why_not_mm, _mm),
    Backend("torchao.blockwise", 10, _why_not_blockwise, _blockwise, reads_codes=True),
    Backend("torch._scaled_mm", 10, _why_not_scaled_mm, _scaled_mm, reads_codes=True, bind=_bind_scaled_mm),
    Backend("torch._scaled_mm.operands", 10, _why_not_fp8_operands, _fp8_operands, reads_codes=True),
    Backend("torch._int_mm", 10, _why_not_int_mm, _int_mm, reads_codes=True),
)
