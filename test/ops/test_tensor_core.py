"""Products recorded on an H200, reproduced on a CPU to the last bit: operands from the formats, sums from the model of
the tensor core.
"""

import pytest
import torch
from support.accumulation import KINDS, adversarial, bound
from support.golden_inputs import normal, recorded_int4, weights
from support.tensor_core import BF16, E4M3, TensorCore, matmul
from torch import Tensor

from aoquant import get_format
from aoquant.formats import Encoded, Format

N, K, M = 32, 512, 16
GOLDEN = recorded_int4()
PRODUCTS = [(case, contract) for case in GOLDEN if case.startswith("gemm/") for contract in GOLDEN[case]]


def tinygemm(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """PyTorch's CUDA kernel: each k16 product from zero; eight warps take tiles in runs of eight and add in order, then
    warp by warp.
    """
    tiles = [matmul(x, w, BF16) for x, w in zip(x_MK.split(16, 1), w_NK.split(16, 1), strict=True)]
    warps = []
    for warp in range(8):
        acc = torch.zeros(x_MK.shape[0], w_NK.shape[0])
        for tile in [t for i, t in enumerate(tiles) if i // 8 % 8 == warp]:
            acc = acc + tile
        warps.append(acc)
    total = torch.zeros_like(warps[0])
    for acc in warps:
        total = total + acc
    return total


def accumulated(contract: str, x: Tensor, fmt: Format, e: Encoded) -> Tensor:
    """(M, N) float32 before the weight's outer scale."""
    if contract == "tinygemm_cuda":
        return tinygemm(x, fmt.operand(e, torch.bfloat16))
    if contract == "bias_after":
        return matmul(x, fmt.operand(e, torch.bfloat16), BF16)
    rows = get_format("fp8-row-mslk").encode(x)
    assert rows.scale is not None
    w = fmt.operand(e, torch.float32).to(torch.float8_e4m3fn)
    # "precise" adds what 128 values along K gave in float32; otherwise all of K stays in the tensor core
    pieces = zip(*(t.split(128 if contract.endswith("precise") else K, 1) for t in (rows.codes, w)), strict=True)
    acc = torch.zeros(M, N)
    for x_Mk, w_Nk in pieces:
        acc = acc + matmul(x_Mk, w_Nk, E4M3)
    return rows.scale * acc


@pytest.mark.parametrize(("case", "contract"), PRODUCTS)
def test_kernels_of_an_h200(case: str, contract: str) -> None:
    fmt = get_format(case.removeprefix("gemm/"))
    e = fmt.encode(weights(N, K, torch.bfloat16, 61))
    acc = accumulated(contract, normal(M, K, torch.bfloat16, 62), fmt, e)
    alpha = fmt.alpha(e)
    y = (acc if alpha is None else alpha.t() * acc).bfloat16() + normal(1, N, torch.bfloat16, 63)[0]
    assert torch.equal(y, GOLDEN[case][contract])


@pytest.mark.parametrize("core", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_small_integers_are_exact(core: TensorCore) -> None:
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-3, 4, (8, 96), generator=g).float() for _ in range(2))
    assert torch.equal(matmul(a.to(core.dtype), b.to(core.dtype), core), a @ b.t())


def test_what_lies_below_the_largest_exponent_is_dropped() -> None:
    a, b = torch.zeros(1, 32), torch.ones(1, 32)
    a[0, 0], a[0, 1] = 256.0, 2.0**-6  # 14 powers of two apart: e4m3 keeps 13
    assert matmul(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), E4M3).item() == 256.0
    assert matmul(a.bfloat16(), b.bfloat16(), BF16).item() == 256.0 + 2.0**-6


@pytest.mark.parametrize("kind", KINDS)
def test_sums_keep_the_stated_bound(kind: str) -> None:
    """And "dust" nearly reaches it: a bound that nothing comes near would prove nothing."""
    k = 1024
    x, w = adversarial(kind, 8, k), adversarial("spread" if kind == "spread" else "normal", 8, k)
    if kind == "dust":
        w = torch.full((8, k), 1.9375 * 2.0**-13, dtype=torch.bfloat16)
        w[:, :32], w[:, -32:] = 1.0, 1.0
    error = (matmul(x, w, BF16).double() - x.double() @ w.double().t()).abs()
    limit = bound(x, w)
    assert (error <= limit).all()
    assert float((error / limit).max()) > (0.25 if kind == "dust" else 1e-5)
