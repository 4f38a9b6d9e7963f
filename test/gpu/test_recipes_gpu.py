"""Every recipe on a GPU, prepared and converted: compiled equals eager, no sync with the device, CUDA graphs work.

A recipe whose converted layer needs a package that is not installed is tested up to there; the test skips the rest.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from support.gpu import BF16, CUDA, captured, no_waiting
from torch import Tensor, nn

from aoquant import QATConfig, backend, calibrate, quantize_
from aoquant.linear.prepared import RANDOM
from aoquant.recipes import get_recipe, list_recipes

pytestmark = pytest.mark.gpu

N, K, M = 512, 1024, 192
NO_GPU = {"torchao-int4-cpu"}  # its converted layer is a CPU's
PRINTS = "torchao-int8"  # torchao's int8 layer looks for "FakeTensor" in its input's repr, which waits for the values
# what convert says, or refuses, of torchao's layers whose kernels are in mslk, where it is absent
MISSING, NOT_PACKED = "raise in forward here", "cannot be packed here"
WITHOUT_MSLK = find_spec("mslk") is None
TUNED = "torchao-fp8-block"  # torchao's kernel is tuned for half a minute, for each N and K, once a process
RECIPES = [
    pytest.param(r.name, marks=pytest.mark.xdist_group("512x1024")) if r.name == TUNED else r.name
    for r in list_recipes()
    if not (r.experts or r.kv_cache)
]


def prepared(recipe: str, *, bias: bool = True, dtype: torch.dtype = BF16) -> nn.Sequential:
    """One prepared layer, calibrated where it has to be."""
    model = nn.Sequential(nn.Linear(K, N, bias=bias, dtype=dtype, device=CUDA))
    quantize_(model, get_recipe(recipe).prepare())
    if not model[0].calibrated:
        calibrate(model, [tokens().to(dtype)])
    return model


def converted(model: nn.Module, recipe: str) -> nn.Module:
    if recipe in NO_GPU:
        pytest.skip("its converted layer runs on a CPU alone")
    model = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            quantize_(model, QATConfig(step="convert"))
        except ValueError as error:
            if WITHOUT_MSLK and NOT_PACKED in str(error) and "mslk" in str(error).lower():
                pytest.skip(str(error))
            raise
    for warning in said:
        if WITHOUT_MSLK and MISSING in str(warning.message) and "mslk" in str(warning.message):
            pytest.skip(str(warning.message))
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(M, K, dtype=BF16, device=CUDA, generator=torch.Generator("cuda").manual_seed(seed))


def rewind(model: nn.Module) -> None:
    """The next backward draws the numbers of step 0."""
    for name, state in model.named_buffers():
        if name.endswith(RANDOM):
            state[2:].zero_()


def step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Forward and backward: [y, dx, dW, db]; gradients of parameters are made anew."""
    rewind(model)
    for p in model.parameters():
        p.grad = None
    leaf = x.detach().requires_grad_()
    leaf.grad = None
    y = run(leaf)
    y.backward(g)
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_waits_for_the_device(recipe: str) -> None:
    model, x = prepared(recipe), tokens()
    g = torch.randn(M, N, dtype=BF16, device=CUDA)
    step(model, model, x, g)  # compiles and tunes
    with no_waiting():
        step(model, model, x, g)
    deployed = converted(model, recipe)
    with torch.no_grad():
        deployed(x)
        with no_waiting(), pytest.raises(RuntimeError, match="synchronizing") if recipe == PRINTS else nullcontext():
            deployed(x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_output_is_the_same_with_and_without_gradients(recipe: str) -> None:
    """Without them the product encodes the input, and no codes are made where a GEMM reads values; the calls repeat."""
    model = prepared(recipe)
    for rows in (1, 16, M):
        x, ys = tokens(rows)[:rows], list[Tensor]()
        for _ in range(3):
            ys.append(model(x.detach().requires_grad_()).detach())
            with torch.no_grad():
                ys.append(model(x))
        assert all(torch.equal(y, ys[0]) for y in ys[1:])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cuda_graph_of_the_converted_layer_computes_new_inputs(recipe: str) -> None:
    if recipe == PRINTS:
        pytest.skip("torchao's int8 layer prints its input")
    deployed = converted(prepared(recipe), recipe)
    for m in (M,) if recipe == TUNED else (1, M):
        x = tokens()[:m].clone()
        with torch.no_grad():
            graph, y = captured(lambda: deployed(x), 3)  # noqa: B023
            for seed in (1, 2):
                x.copy_(tokens(seed)[:m])
                graph.replay()
                assert torch.equal(y, deployed(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cuda_graph_of_a_training_step_computes_new_gradients(recipe: str) -> None:
    model = prepared(recipe)
    x, g = tokens().requires_grad_(), torch.randn(M, N, dtype=BF16, device=CUDA)

    def forward_backward() -> list[Tensor]:
        for t in (x, *model.parameters()):
            t.grad = None
        y = model(x)
        y.backward(g)
        return [y.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]

    graph, results = captured(forward_backward, 3)
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(tokens(seed))
            model[0].weight.mul_(0.9)
        rewind(model)
        graph.replay()
        got = [t.clone() for t in results]
        rewind(model)
        want = forward_backward()
        assert len(got) == len(want) > 1
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_of_another_dtype_is_the_references(recipe: str, dtype: torch.dtype) -> None:
    """But for the order of additions. Kernels of torchao's layers take bfloat16 alone, and refuse others."""
    x, g = tokens().to(dtype), torch.randn(M, N, dtype=dtype, device=CUDA)
    try:
        model = prepared(recipe, dtype=dtype)
        got = step(model, model, x, g)
    except ValueError as error:
        if not recipe.startswith("torchao") or "bfloat16" not in str(error):
            raise
        return
    with backend("reference"):
        want = step(model, model, x, g)
    assert len(got) == len(want) >= 3
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-3 * b.double().norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_equals_eager(recipe: str) -> None:
    """Forward, backward, and the converted layer where torch.compile takes it: fullgraph, so without a break."""
    torch._dynamo.reset()
    model, x = prepared(recipe), tokens()
    g = torch.randn(M, N, dtype=BF16, device=CUDA)
    eager = [t.clone() for t in step(model, model, x, g)]
    for got, want in zip(step(torch.compile(model, fullgraph=True), model, x, g), eager, strict=True):
        assert torch.equal(got, want)
    if recipe.startswith("torchao"):
        return  # a compiled torchao tensor is inductor's arithmetic, not ours
    deployed = converted(model, recipe)
    with torch.no_grad():
        assert torch.equal(torch.compile(deployed, fullgraph=True)(x), eager[0])
