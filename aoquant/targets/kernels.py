"""The kernels that torchao's converted layers call, where not every machine has them.

aoquant's own layers run everywhere. A torchao tensor calls one kernel, and raises an error of torchao's, or of
Python's, where that is missing. Whether the kernel runs here is known when a layer is converted, from the backend that
calls the same kernel for the prepared layer.
"""

import torch

from aoquant import ops
from aoquant.linear.recipe import LinearRecipe

from .target import Target

# GEMM contract of a torchao tensor that one kernel alone computes: its backend, and the package that brings it
_KERNELS = {
    "bias_after": ("mslk", "mslk-cuda"),
    "fp8_bias_after": ("mslk", "mslk-cuda"),
    "fp8_mslk": ("mslk", "mslk-cuda"),
    "fp8_mslk_precise": ("mslk", "mslk-cuda"),
    "fp8_blocks": ("torchao.blockwise", "triton"),
}


def why_not_run(target: Target, device: torch.device, dtype: torch.dtype, n: int, k: int) -> str | None:
    """Return why a converted (n, k) layer on `device` will raise in forward; None when it runs, or nothing tells."""
    contract = target.recipe.contract
    if target.tensor == "PackedTensor" or contract not in _KERNELS or device.type == "meta":
        return None
    backend, package = _KERNELS[contract]
    said = refusal(backend, target.recipe, device, dtype, n, k)
    return said and f"{said}; its kernel is in the package {package}, and the weight is on {device}"


def refusal(backend: str, recipe: LinearRecipe, device: torch.device, dtype: torch.dtype, n: int, k: int) -> str | None:
    """Return why a backend does not multiply 64 rows by an (n, k) weight; None when it does, or is willing to."""
    x_format = None if recipe.fprop_input is None else recipe.fprop_input.format
    request = ops.Request(recipe.contract, x_format, recipe.fprop_weight.format, device, dtype, 64, n, k)
    said = dict(ops.explain(request))[backend]
    return None if said == "runs" or said.startswith("willing") else said
