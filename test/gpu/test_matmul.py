"""The emulated GEMM on tensor cores: within a stated bound of float64; prepared equals converted for every M."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aoquant import QATConfig, backend, quantize_
from aoquant.ops.gemm.tensor_cores import accumulate
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu

BF16, CUDA = torch.bfloat16, torch.device("cuda")


def operands(m: int, n: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k, device=CUDA).to(dtype), (torch.randn(n, k, device=CUDA) * 0.02).to(dtype)


@pytest.mark.parametrize("per", ["tensor", "row", "none"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 512, 1024), (8192, 4096, 4096), (1111, 2056, 520), (1, 8, 72)])
def test_fused_epilogue_is_the_contract(m: int, n: int, k: int, dtype: torch.dtype, per: str) -> None:
    """Bound, an element: truncation of each product and sum to 25 bits, three float32 roundings, one of the output."""
    from aoquant.ops.triton import epilogue, matmul  # triton is where a GPU is

    x, w = operands(m, n, k, dtype)
    alpha_x = alpha_w = None
    if per != "none":
        alpha_x = torch.rand(m if per == "row" else 1, 1, device=CUDA) + 0.5
        alpha_w = torch.rand(n if per == "row" else 1, 1, device=CUDA) + 0.5
    for bias in (None, torch.randn(n, device=CUDA).to(dtype)):
        assert matmul.why_not(x, w) is None
        y = matmul.matmul(x, w, alpha_x, alpha_w, bias)
        scale = (alpha_x.double() * alpha_w.double().t()) if alpha_x is not None and alpha_w is not None else 1.0
        exact = x.double() @ w.double().t() * scale
        magnitude = x.double().abs() @ w.double().abs().t() * scale
        if bias is not None:
            exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
        slack = magnitude * (k / 16 + 4) * 2.0**-23 + exact.abs() * torch.finfo(dtype).eps / 2
        assert ((y.double() - exact).abs() <= slack * (1 + 2.0**-6)).all()
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
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-weight", "mxfp4", "mxfp8", "fp8", "int8", "int4-g128", "int8-int4"])
def test_prepared_equals_converted_and_the_reference_bound(recipe: str, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(2048, 4096, bias=bias, dtype=BF16, device=CUDA))
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    xs = [torch.randn(m, 2048, device=CUDA, dtype=BF16) for m in (1, 3, 64, 700, 2048)]
    with torch.no_grad():
        prepared = [model(x) for x in xs]
        with backend("reference"):
            reference = [model(x) for x in xs]
        quantize_(model, QATConfig(get_recipe(recipe).make(), step="convert"))
        for x, y, want in zip(xs, prepared, reference, strict=True):
            assert torch.equal(model(x), y)
            noise = (y.double() - want.double()).square().sum() / want.double().square().sum()
            assert noise < 10**-5.5, f"{recipe}: {10 * noise.log10():.1f} dB from the reference"


def requested() -> int:
    """Bytes that live tensors asked for; what the allocator gives them depends on what it has lying about."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@pytest.mark.parametrize(
    ("recipe", "limit"), [("nvfp4", 0.57), ("mxfp4", 0.54), ("mxfp8", 1.04), ("int8-int4", 1.02), ("int4-g128", 0.0)]
)
def test_saved_bytes_for_each_input_value(recipe: str, limit: float) -> None:
    """What forward makes and keeps for backward, for each value of x; nothing but x itself for weights alone."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False, dtype=BF16, device=CUDA))
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    x = torch.randn(1024, 4096, device=CUDA, dtype=BF16).requires_grad_()
    model(x).sum().backward()  # compiles
    torch.cuda.synchronize()
    before = requested()
    y = model(x)
    kept = requested() - before - y.numel() * y.element_size()
    assert kept <= limit * x.numel() + 4096


@pytest.mark.parametrize(
    ("recipe", "limit"), [("nvfp4", 0.57), ("mxfp4", 0.54), ("mxfp8", 1.04), ("int8-int4", 1.02), ("int4-g128", 0.0)]
)
def test_saved_bytes_when_compiled(recipe: str, limit: float) -> None:
    """torch.compile saves what eager saves: the ops are opaque to it, so it has nothing else to keep."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False, dtype=BF16, device=CUDA))
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    run = torch.compile(model, fullgraph=True)
    x = torch.randn(1024, 4096, device=CUDA, dtype=BF16).requires_grad_()
    for _ in range(2):
        run(x).sum().backward()
    torch.cuda.synchronize()
    before = requested()
    y = run(x)
    kept = requested() - before - y.numel() * y.element_size()
    assert kept <= limit * x.numel() + 4096
