"""The emulated GEMM on tensor cores: within a stated bound of float64; prepared equals converted for every M."""

from __future__ import annotations

import copy

import pytest
import torch
from support.gpu import BF16, CUDA, assert_within, prepared
from torch import Tensor

from aoquant import QATConfig, backend, quantize_
from aoquant.ops.gemm.tensor_cores import accumulate

pytestmark = pytest.mark.gpu

RECIPES = ["nvfp4", "nvfp4-weight", "mxfp4", "mxfp4-weight", "mxfp8", "mxfp8-weight"]
RECIPES += ["fp8", "int8", "int4-g128", "int8-int4", "gridflip"]
EVERY_M = (*range(1, 34), 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 512, 700, 1023, 1024, 1025, 2048, 3000)
EVERY_M += (4096,)


def operands(m: int, n: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k, device=CUDA).to(dtype), (torch.randn(n, k, device=CUDA) * 0.02).to(dtype)


@pytest.mark.parametrize("per", ["tensor", "row", "none"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 512, 1024), (8192, 4096, 4096), (1111, 2056, 520), (1, 8, 72)])
def test_fused_epilogue_is_the_contract(m: int, n: int, k: int, dtype: torch.dtype, per: str) -> None:
    from aoquant.ops.triton import epilogue, matmul  # triton is where a GPU is

    x, w = operands(m, n, k, dtype)
    alpha_x = alpha_w = None
    if per != "none":
        alpha_x = torch.rand(m if per == "row" else 1, 1, device=CUDA) + 0.5
        alpha_w = torch.rand(n if per == "row" else 1, 1, device=CUDA) + 0.5
    for bias in (None, torch.randn(n, device=CUDA).to(dtype)):
        assert matmul.why_not(x, w) is None
        y = matmul.matmul(x, w, alpha_x, alpha_w, bias)
        scaled_x, scaled_w = (t.double() * (1.0 if a is None else a.double()) for t, a in ((x, alpha_x), (w, alpha_w)))
        assert_within(y, scaled_x, scaled_w, bias, sums=4)
        apart = epilogue.rescale(accumulate(x, w, False), alpha_x, alpha_w, bias, dtype)
        assert (y == apart).double().mean() > 0.98  # two orders of additions differ by a last bit here and there


def test_rows_do_not_depend_on_their_number() -> None:
    from aoquant.ops.triton import matmul

    x, w = operands(8192, 4096, 4096)
    alpha = torch.rand(1, 1, device=CUDA) + 0.5
    whole = matmul.matmul(x, w, alpha, alpha, None)
    for m in (1, 7, 128, 1000, 4096):
        assert torch.equal(matmul.matmul(x[:m], w, alpha, alpha, None), whole[:m])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_prepared_equals_converted_at_every_m(recipe: str, bias: bool) -> None:
    """Prepared without gradients, under gradients and compiled; here and there within the reference's bound."""
    n, k = (2048, 1024) if bias else (1024, 4096)
    model = prepared(recipe, n, k, bias=bias)
    deployed = copy.deepcopy(model)
    quantize_(deployed, QATConfig(step="convert"))
    xs = torch.randn(max(EVERY_M), k, dtype=BF16, device=CUDA)
    torch._dynamo.reset()
    compiled = torch.compile(deployed, fullgraph=True)
    for m in EVERY_M:
        trained = model(xs[:m]).detach()
        with torch.no_grad():
            y = model(xs[:m])
            assert torch.equal(deployed(xs[:m]), y) and torch.equal(trained, y), m
            if m == 4:
                assert torch.equal(compiled(xs[:m]), y)
            if m in (1, 3, 64, 700, 2048):
                with backend("reference"):
                    want = model(xs[:m])
                noise = (y.double() - want.double()).square().sum() / want.double().square().sum()
                assert noise < 10**-5.5, f"{10 * noise.log10():.1f} dB from the reference"


def requested() -> int:
    """Bytes that live tensors asked for; what the allocator gives them depends on what it has lying about."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("recipe", "limit"), [("nvfp4", 0.57), ("mxfp4", 0.54), ("mxfp8", 1.04), ("int8-int4", 1.02), ("int4-g128", 0.0)]
)
def test_saved_bytes_for_each_input_value(recipe: str, limit: float, compiled: bool) -> None:
    """What forward makes and keeps for backward, for each value of x; nothing but x itself for weights alone.

    torch.compile saves what eager saves: the ops are opaque to it, so it has nothing else to keep.
    """
    torch._dynamo.reset()
    model = prepared(recipe, 4096, 4096, bias=False)
    run = torch.compile(model, fullgraph=True) if compiled else model
    x = torch.randn(1024, 4096, device=CUDA, dtype=BF16).requires_grad_()
    for _ in range(2):
        run(x).sum().backward()  # compiles
    torch.cuda.synchronize()
    before = requested()
    y = run(x)
    kept = requested() - before - y.numel() * y.element_size()
    assert kept <= limit * x.numel() + 4096
