"""A cheap step on a GPU has the same results: launches, bodies of ops, scales measured once, siblings, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import same_bytes, unequal_parts
from support.gemm import with_values
from support.gpu import BF16, CUDA
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from aoquant import QATConfig, backend, get_format, quantize_
from aoquant.ops import codec
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu
RECIPES = ["nvfp4", "mxfp4", "mxfp8", "int8-int4", "int4-g128", "torchao-fp8", "fp8"]
FORMATS = ["nvfp4", "mxfp4", "mxfp8", "int4-g128", "int8-row", "int8-tensor", "intx8-row-asym", "fp8-row", "fp8-tensor"]


def layer(recipe: str, k: int = 1024, n: int = 768) -> nn.Module:
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=BF16, device=CUDA))
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    return model


@pytest.mark.parametrize("name", FORMATS)
def test_later_launches_read_the_tensors_they_are_given(name: str) -> None:
    """Other values, another address, another alignment, another dtype; each twice."""
    fmt = get_format(name)
    store = torch.randn(64 * 512 + 1, device=CUDA)
    with backend("triton"):
        for dtype in (BF16, torch.float32, torch.float16):
            for start in (0, 1, 0, 1):
                x = store.to(dtype)[start : start + 64 * 512].view(64, 512) * (1 if start else 3)
                x = x if start == 0 else store.to(dtype)[1:].view(64, 512)
                e = fmt.encode(x)
                got, values, alpha = with_values(fmt, x, dtype, operand=True, keep=True)
                assert got is not None
                assert not unequal_parts(got, e)
                assert same_bytes(values, fmt.operand(e, dtype))
                assert same_bytes(codec.decode(fmt, got, dtype), fmt.decode(e, dtype))
                again = with_values(fmt, x, dtype, operand=True, measured=alpha)
                assert same_bytes(again.values, values) and same_bytes(again.alpha, alpha)


def test_a_profilers_hooks_hear_of_later_launches() -> None:
    """Triton's hooks, which profilers add, see each launch before and after, by name, until they are removed."""
    from triton import knobs

    fmt, x = get_format("nvfp4"), torch.randn(64, 512, device=CUDA, dtype=BF16)
    heard: list[str] = []
    with backend("triton"):
        quantized = [with_values(fmt, x, BF16, operand=True, keep=True) for _ in range(2)]
        hooks = (lambda m: heard.append(f"enter {m.get()['name']}"), lambda m: heard.append("exit"))
        knobs.runtime.launch_enter_hook.add(hooks[0])
        knobs.runtime.launch_exit_hook.add(hooks[1])
        try:
            quantized.append(with_values(fmt, x, BF16, operand=True, keep=True))
        finally:
            knobs.runtime.launch_enter_hook.remove(hooks[0])
            knobs.runtime.launch_exit_hook.remove(hooks[1])
        assert heard == ["enter _absmax", "exit", "enter _encode", "exit"]
        quantized.append(with_values(fmt, x, BF16, operand=True, keep=True))
    assert len(heard) == 4
    assert all(same_bytes(q.values, quantized[0].values) for q in quantized)


def test_a_descriptor_is_the_one_that_its_constructor_makes() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from aoquant.ops.triton.launch import described

    store = torch.randn(2 * 256 * 512 + 1, device=CUDA).to(BF16)
    for _ in range(3):  # the second is not checked again
        for t in (store[: 256 * 512].view(256, 512), store[256 * 512 : -1].view(256, 512)):
            assert described(t, 128, 64) == TensorDescriptor(t, [256, 512], [512, 1], [128, 64])
            assert described(t, 128, 64).base is t
    with pytest.raises(AssertionError, match="16-byte aligned"):
        described(store[1 : 256 * 512 + 1].view(256, 512), 128, 64)


@pytest.mark.parametrize("special", ["normal", "zeros", "inf", "nan", "tiny", "huge"])
def test_a_measured_outer_scale_gives_the_same_bits(special: str) -> None:
    x = torch.randn(128, 1024, device=CUDA)
    x *= {"tiny": 1e-38, "huge": 1e37, "zeros": 0.0}.get(special, 1.0)
    x[3, 5] = {"inf": float("inf"), "nan": float("nan")}.get(special, 0.5 if special == "normal" else x[3, 5])
    fmt = get_format("nvfp4")
    for operand in (True, False):
        once = with_values(fmt, x, torch.float32, operand=operand)
        again = with_values(fmt, x, torch.float32, operand=operand, measured=once.alpha)
        assert same_bytes(once.values, again.values) and same_bytes(once.alpha, again.alpha)


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def step(model: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    grads = torch.autograd.grad(
        y, [leaf, *parameters], torch.linspace(-1, 1, y.numel(), device=CUDA).to(y.dtype).view_as(y)
    )
    return [y.detach(), *grads]


@pytest.mark.parametrize("recipe", RECIPES)
def test_bodies_and_ops_agree(recipe: str) -> None:
    """Under a dispatch mode the registered ops are called, elsewhere their bodies."""
    model, x = layer(recipe), torch.randn(256, 1024, device=CUDA, dtype=BF16)
    plain = step(model, x, list(model.parameters()))
    with Watched():
        watched = step(model, x, list(model.parameters()))
    for a, b in zip(plain, watched, strict=True):
        assert same_bytes(a, b)
    # forward through the bodies, backward through the ops
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    grad = torch.linspace(-1, 1, y.numel(), device=CUDA).to(y.dtype).view_as(y)
    with Watched():
        mixed = torch.autograd.grad(y, [leaf, *model.parameters()], grad)
    for a, b in zip(plain[1:], mixed, strict=True):
        assert same_bytes(a, b)


def test_a_weight_that_changes_before_backward_is_an_error() -> None:
    """Its outer scale is measured in forward and used in backward: autograd watches the weight in between."""
    model, x = layer("nvfp4"), torch.randn(64, 1024, device=CUDA, dtype=BF16, requires_grad=True)
    y = model(x)
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[index,union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Block(nn.Module):
    """A Llama block: attention over q, k, v; a gated MLP; pre-norms; residuals."""

    def __init__(self, d: int = 2048, hidden: int = 5632, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(d, hidden, bias=False),
            nn.Linear(d, hidden, bias=False),
            nn.Linear(hidden, d, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def memory(recipe: str) -> tuple[int, int]:
    """(bytes kept between forward and backward, peak over both) of a step, beyond parameters, gradients, input."""
    torch.manual_seed(0)
    model = Block().to(CUDA, BF16)
    if recipe:
        quantize_(model, QATConfig(get_recipe(recipe).make()))
    x = torch.randn(4, 2048, 2048, device=CUDA, dtype=BF16, requires_grad=True)
    model(x).sum().backward()  # compiles; makes the gradients
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = model(x)
    kept = torch.cuda.memory_allocated() - before
    y.backward(torch.ones_like(y))
    return kept, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_a_transformer_block_needs_no_more_memory_than_bf16(recipe: str) -> None:
    plain_kept, plain = memory("")
    kept, peak = memory(recipe)
    print(
        f"{recipe}: kept {kept / 2**20:.0f} MiB (bf16 {plain_kept / 2**20:.0f}), peak {peak / 2**20:.0f} MiB (bf16 {plain / 2**20:.0f})"
    )
    assert kept < plain_kept
    assert peak <= plain


def test_siblings_share_on_one_stream_only() -> None:
    layers = [layer("nvfp4"), layer("nvfp4"), layer("nvfp4")]
    x = torch.randn(512, 1024, device=CUDA, dtype=BF16)
    want = [m(x.clone()) for m in layers]
    del want[1:]
    torch.cuda.synchronize()

    def kept(run: Callable[[], Any]) -> int:
        before = torch.cuda.memory_allocated()
        ys = run()
        return torch.cuda.memory_allocated() - before - sum(y.numel() * 2 for y in ys)

    one = 0.57 * x.numel()
    assert kept(lambda: [m(x) for m in layers]) <= one + 4096
    side = torch.cuda.Stream()

    def two_streams() -> list[Tensor]:
        ys = [layers[0](x)]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ys.append(layers[1](x))
        torch.cuda.current_stream().wait_stream(side)
        return ys

    assert kept(two_streams) > 1.9 * 0.56 * x.numel()


def test_siblings_give_the_bits_of_layers_apart() -> None:
    """A layer that takes its sibling's codes decodes them; the other got values and codes from one pass."""
    for recipe in RECIPES:
        layers = nn.ModuleList([layer(recipe) for _ in range(3)])
        x = torch.randn(4, 128, 1024, device=CUDA, dtype=BF16)
        shared = step(lambda t: torch.cat([m(t) for m in layers], -1), x, list(layers.parameters()))  # noqa: B023
        apart = step(lambda t: torch.cat([m(t.clone()) for m in layers], -1), x, list(layers.parameters()))  # noqa: B023
        for a, b in zip(shared, apart, strict=True):
            assert same_bytes(a, b), recipe
