"""MSLK's kernels, formerly FBGEMM GenAI's: int4 with bf16 and with fp8 activations, and fp8 rows.

`torch.ops.mslk` (package mslk-cuda) and `torch.ops.fbgemm` (fbgemm-gpu-genai) hold the same operators, so one adapter
asks both. A package that is called mslk may be a placeholder without kernels, and the real one cannot be imported
without a GPU. So the adapter asks whether the operator is registered, on a machine that has a GPU.

A converted torchao layer calls these operators, and with them the prepared layer equals it whatever M is. Without them
torch.mm and torch._scaled_mm sum the same products, in the same order wherever cuBLAS does not split K. The preshuffled
layouts need no adapter of their own: with bf16 activations shuffled and plain kernels return the same bytes. With fp8
the shuffle runs on the host, which no training step could afford; the fp8 GEMM over the operand tile has the shuffled
kernel's sums and epilogue, and returns its bytes.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import Format

from ..call import Call
from ..router import Backend, Request

_PACKAGES = (("mslk", "mslk.gemm"), ("fbgemm", "fbgemm_gpu.experimental.gen_ai"))
OPERATORS = {
    "bias_after": "bf16i4bf16_rowwise",
    "fp8_bias_after": "f8i4bf16_rowwise",
    "fp8_mslk": "f8f8bf16_rowwise",
    "fp8_mslk_precise": "f8f8bf16_rowwise",
}


def operator(name: str) -> Callable[..., Any]:
    """The operator called `name`, MSLK's or FBGEMM's.

    Raises:
        ValueError: there is none here, and why.
    """
    found, reason = _find(name)
    if found is None:
        raise ValueError(reason)
    return found


def why_not_operator(name: str) -> str | None:
    """Return why there is no operator `name` here; None when there is."""
    _, reason = _find(name)
    return reason


@cache
def _find(name: str) -> tuple[Callable[..., Any] | None, str | None]:
    if not torch.cuda.is_available():
        return None, f"the MSLK operator {name} needs a GPU, and torch sees none here"
    problems = []
    for namespace, module in _PACKAGES:
        try:
            importlib.import_module(module)
            return getattr(getattr(torch.ops, namespace), name), None
        except Exception as error:  # a package of binaries fails to import in any way it likes
            problems.append(f"{module}: {type(error).__name__}")
    return None, f"no package here has the MSLK operator {name} ({', '.join(problems)}): install mslk-cuda"


def int4_limit(n: int, k: int, group: int, contract: str) -> str | None:
    """Return why the plain int4 kernel of `contract` cannot take an (n, k) weight in groups of `group`."""
    multiple = 64 if contract == "bias_after" else 128  # with bf16 activations, and with fp8
    if group % multiple and group != k:
        return (
            f"the MSLK int4 kernel returns wrong numbers, silently, for groups that are not a multiple of {multiple}, got {group}: "
            f"use group_size 64 or 128, or aoquant.Int4WeightConfig(group_size={group})"
        )
    if k % 32 or n % 8:
        return f"the MSLK int4 kernel needs K % 32 == 0 and N % 8 == 0, got N = {n}, K = {k}: leave the layer out"
    return None


def _why_not(r: Request) -> str | None:
    if r.contract not in OPERATORS:
        return f"computes {', '.join(OPERATORS)}, not {r.contract}"
    if r.device.type != "cuda" or torch.cuda.get_device_capability(r.device)[0] != 9:
        return "the MSLK kernels need a Hopper GPU (compute capability 9.0)"
    group = r.w_format.block if r.w_format.element == "int4" else None
    if group and (reason := int4_limit(r.n, r.k, group, r.contract)) is not None:
        return reason
    return why_not_operator(_name(r.contract, r.w_format))


def _name(contract: str, format: Format) -> str:
    return "f8f8bf16_rowwise" if format.reach == "row" else OPERATORS[contract]


def _run(c: Call) -> Tensor:
    call = operator(_name(c.contract, c.w_format))
    if c.w.outer is not None:
        tile_NK = c.w_format.operand(c.w, torch.float8_e4m3fn)
        return c.plus_bias(call(c.x.codes, tile_NK, c.x.scales, c.w.outer, bias=None, use_fast_accum=True))
    if c.contract.startswith("fp8_mslk"):
        fast = c.contract == "fp8_mslk"
        return c.shaped(call(c.x.codes, c.w.codes, c.x.scales, c.w.scales, bias=c.bias, use_fast_accum=fast))
    scale_GN = c.w.scales.t().contiguous()
    zero_GN = torch.zeros_like(scale_GN) if c.w.zero is None else c.w.zero.t().contiguous()
    weight = (c.w.codes.view(torch.int8), scale_GN, zero_GN)
    if c.x is None:
        return c.plus_bias(call(c.x_hp.reshape(-1, c.k), *weight))
    return c.plus_bias(call(c.x.codes, weight[0], c.x.scales.flatten(), *weight[1:]))


BACKENDS = (Backend("mslk", 20, _why_not, _run, reads_codes=True),)
