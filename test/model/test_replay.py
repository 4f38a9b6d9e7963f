"""A step that is repeated without its Python has the bits of the page (linear/function.py), in every way to train."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from support.bits import same_bytes
from support.cpu_library import with_library, with_step_library
from support.linear_cases import counting
from support.meters import saved
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from aoquant import QATConfig, calibrate, ops, quantize_
from aoquant.calibrate import uncalibrated
from aoquant.linear import function, replay
from aoquant.ops import native_step, program, repeat
from aoquant.recipes import get_recipe, list_recipes

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
SOME = ("int4-g128", "nvfp4", "fp8-hybrid", "quartet")
RECIPES = [r.name for r in list_recipes() if not (r.experts or r.kv_cache)]
SLOW = ("gridflip-search", "nvfp4-search", "quartet2", "quartet2-gridflip")
# beginnings of recipes that no program is made of: their CPU kernels read a value back; torchao launches its own kernel
UNRECORDED = {"cpu": ("int4-g", "torchao-int4"), "cuda": ("torchao-fp8-block",)}
Layers = nn.ModuleList
Call = Callable[[nn.Module, Tensor], Tensor]
Run = Callable[[Layers, int], list[Tensor | None]]


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Repeat calls on CPUs, too, by csrc's libraries where they can be built."""
    monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
    monkeypatch.setattr(replay, "_forwards", repeat.Repeats())
    with ExitStack() as library:
        with suppress(pytest.skip.Exception):
            library.enter_context(contextmanager(with_library)())
            library.enter_context(contextmanager(with_step_library)())
        yield


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the forwards and backwards that run their Python."""
    count: Counter[str] = Counter()
    for name in ("multiply", "_gradients"):
        monkeypatch.setattr(function, name, partial(_counted, count, name, getattr(function, name)))
    return count


def _counted(count: Counter[str], name: str, real: Any, *args: Any) -> Any:
    count[name] += 1
    return real(*args)


def prepared(recipe: str, device: Any = "cpu", *, n: int = 2, k: int = 128, bias: bool = True) -> Layers:
    """Return n layers (k, k) with other weights each, the same in every call."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(k, k, bias=bias, dtype=BF16) for _ in range(n)]).to(device)
    quantize_(layers, get_recipe(recipe).prepare())
    return layers


def tokens(layers: Layers, i: int, *shape: int) -> Tensor:
    w = layers[0].weight
    return torch.randn(*(shape or (2, 24)), w.shape[1], generator=torch.Generator().manual_seed(i)).to(w)


def wave(y: Tensor) -> Tensor:
    return torch.sin(y * 7)


def plain(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h)


def step(layers: Layers, x: Tensor, call: Call = plain, grad: Callable[[Tensor], Tensor] = wave) -> list[Tensor | None]:
    """Return the outputs and all gradients of layers that share one input."""
    layers.zero_grad()
    x = x.detach().requires_grad_()
    h = x * 1
    ys = [call(layer, h) for layer in layers]
    assert not any(y._is_view() for y in ys)  # which activations could not change in place
    torch.autograd.backward(ys, [grad(y.detach()) for y in ys])
    return [*(y.detach() for y in ys), x.grad, *(p.grad for p in layers.parameters())]


def called(call: Call, *shape: int) -> Run:
    return lambda layers, i: step(layers, tokens(layers, i, *shape), call)


@contextmanager
def on_the_page_alone() -> Iterator[None]:
    """Repeat nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeat, "FIRST_DEVICE", 1 << 10)
        yield


def on_the_page(run: Run, layers: Layers, steps: int) -> list[Any]:
    """Return what the steps of `run` give without this file's subject."""
    with on_the_page_alone():
        return [run(layers, i) for i in range(steps)]


def check(run: Run, layers: Layers, pages: Counter[str], *, kinds: int = 1, repeated: bool = True) -> None:
    """Compare six steps of each kind with the page's, bit for bit. From the third on they are to be repeated, and from
    the fifth on by the step library.
    """
    want = on_the_page(run, copy.deepcopy(layers), 6 * kinds)
    for i in range(6 * kinds):
        if i == 2 * kinds:
            pages.clear()
        got = run(layers, i)
        assert len(got) == len(want[i]) and all(map(same_bytes, got, want[i])), f"step {i}"
    assert not (repeated and pages), pages


def is_recorded(recipe: str, layers: Layers) -> bool:
    """Return whether a recipe's ordinary steps are recorded: its layers hold nothing, and all launches are seen."""
    return not layers[0].prepared.recipe.holds and not recipe.startswith(UNRECORDED[layers[0].weight.device.type])


@pytest.mark.filterwarnings("ignore:.*matches no linear layer")
@pytest.mark.parametrize("recipe", [pytest.param(r, marks=[pytest.mark.slow] * (r in SLOW)) for r in RECIPES])
def test_two_layers_with_one_input(recipe: str, device: torch.device, pages: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(program, "LARGE", 1 << 12)
    layers = prepared(recipe, device, k=256)
    if uncalibrated(layers):
        calibrate(layers, lambda model: [layer(tokens(layers, 9)) for layer in model])
    check(called(plain), layers, pages, repeated=is_recorded(recipe, layers))


def _through_packed(layers: Layers, i: int) -> list[Tensor | None]:
    """Ask for the input's gradient alone, as under LoRA, and for y without gradients, by no bound kernel."""
    x = tokens(layers, i).requires_grad_()
    ys = [layer(x) for layer in layers]
    with torch.no_grad():
        codes = [layer.weight.encoded for layer in layers]
        apart = [
            function.quantized_linear(x, w, layer.bias, layer.weight.recipe)
            for layer, w in zip(layers, codes, strict=True)
        ]
    return [*ys, *torch.autograd.grad(ys, x, [wave(y.detach()) for y in ys]), *apart]


@pytest.mark.parametrize("recipe", [*SOME, "int8", "mxfp4"])
def test_packed_layers(recipe: str, device: torch.device, pages: Counter[str]) -> None:
    layers = prepared(recipe, device)
    quantize_(layers, QATConfig(step="convert"))
    check(_through_packed, layers, pages, kinds=1, repeated=not recipe.startswith(UNRECORDED[device.type]))


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the ops that run their Python."""
    count: Counter[str] = Counter()
    for name in ("encode", "matmul", "gradients"):
        op = getattr(ops, name)
        monkeypatch.setattr(op, "body", partial(_counted, count, name, op.body))
        monkeypatch.setattr(op, "_repeats", repeat.Repeats())
    return count


@pytest.mark.parametrize("recipe", SOME)
def test_the_ops_of_a_compiled_step(recipe: str, device: torch.device, bodies: Counter[str]) -> None:
    torch._dynamo.reset()
    layers = prepared(recipe, device)
    compiled = torch.compile(plain, backend="aot_eager" if device.type == "cpu" else "inductor")
    repeated = is_recorded(recipe, layers)
    check(called(compiled), layers, bodies, repeated=repeated)
    assert not repeated or any(op._repeats.kinds for op in (ops.encode, ops.matmul, ops.gradients))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 24, 4096])
@pytest.mark.parametrize(
    "recipe", ["int4-g128", "nvfp4", "fp8", "mxfp4", "fp8-hybrid", "nvfp4-training", "nvfp4-4over6", "int8"]
)
def test_on_a_gpu_csrc_runs_the_programs(recipe: str, rows: int, pages: Counter[str]) -> None:
    """Wherever tensors lie: at 4096 rows the GEMM's tiles come through the copy engine, by maps that hold addresses."""
    layers, held = prepared(recipe, "cuda", n=1, k=1024), list[Tensor]()

    def call(layer: nn.Module, h: Tensor) -> Tensor:
        held.append(h)  # so that no later one lies there
        return layer(h)

    check(called(call, rows), layers, pages)
    with torch.no_grad():
        for i in range(3):
            layers[0](tokens(layers, i, 1))
    kinds = [*replay._forwards.kinds.values()]
    kinds += [backward for kind in kinds for backward in kind.note.backward.kinds.values()]
    assert len({h.data_ptr() for h in held}) == len(held)
    assert [kind.program.native is not None for kind in kinds] == [True] * 3


@pytest.mark.parametrize("recipe", ["int4-g128", "nvfp4", "fp8-hybrid"])
def test_the_step_librarys_node_asks_the_page_for_an_unusual_backward(
    recipe: str, device: torch.device, pages: Counter[str]
) -> None:
    if reason := native_step.why_not():
        pytest.skip(reason)
    layers = prepared(recipe, device, n=1)
    forced = partial(ops.backend, "reference")
    unusual = [nullcontext, forced, partial(FlopCounterMode, display=False), partial(torch.autocast, device.type, BF16)]
    for i in range(9):
        within = unusual[max(i - 5, 0)]
        h, grads = tokens(layers, i).requires_grad_(), list[Any]()
        for on_page in (True, False):
            with on_the_page_alone() if on_page else nullcontext():
                h.grad = None
                layers.zero_grad()
                y = layers[0](h)
                assert isinstance(y.grad_fn, BackwardCFunction) is (on_page or i < 4)
                pages.clear()
                with within():
                    y.backward(wave(y.detach()))
            grads.append([h.grad, *(p.grad for p in layers.parameters())])
        assert all(map(same_bytes, *grads)) and pages["_gradients"] == (i < 2 or i > 5), i


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-hybrid"])
def test_layers_of_one_shape_share_their_programs(recipe: str, pages: Counter[str]) -> None:
    """The second layer is recorded, and the third repeats it."""
    layers = prepared(recipe, n=3)
    for seen in (2, 0):
        pages.clear()
        step(layers, tokens(layers, 0), lambda layer, h: layer(h.clone()))
        assert pages["multiply"] == pages["_gradients"] == seen and len(replay._forwards.kinds) == 1


# Ways to train


def _offloaded(layer: nn.Module, h: Tensor) -> Tensor:
    with save_on_cpu():
        return layer(h)


def _copied(layer: nn.Module, h: Tensor) -> Tensor:
    with saved_tensors_hooks(torch.clone, torch.clone):
        return layer(h)


def _retained(layers: Layers, i: int) -> list[Tensor | None]:
    x = tokens(layers, i).requires_grad_()
    ys = [layer(x) for layer in layers]
    given = ys, [x, *layers.parameters()], [wave(y.detach()) for y in ys]
    first, second = (torch.autograd.grad(*given, retain_graph=True) for _ in range(2))
    assert layers[0].prepared.recipe.draws or all(map(same_bytes, first, second))
    return [*first, *second]


def _frozen(layers: Layers, i: int) -> list[Tensor | None]:
    """Weights, biases or nothing."""
    for name, p in layers.named_parameters():
        p.requires_grad_(i % 3 == 0 or not name.endswith(("weight", "bias")[i % 3 - 1]))
    return step(layers, tokens(layers, i))


def _without_gradient(layers: Layers, i: int) -> list[Tensor | None]:
    return step(layers, tokens(layers, i), lambda layer, h: layer(h if i % 2 else h.detach()))


def _strides(layers: Layers, i: int) -> list[Tensor | None]:
    return step(layers, tokens(layers, i, 6, 6), lambda layer, h: layer(h if i % 2 else h.transpose(0, 1)))


def _bias(layers: Layers, i: int) -> list[Tensor | None]:
    """With a frozen bias, without one, and with one that starts at an odd address."""
    for layer in layers:
        odd = torch.cat((layer.weight[0, :1], layer.weight[0])).detach()[1:]
        layer.bias = None if i % 3 == 1 else nn.Parameter(odd if i % 3 else odd.clone(), requires_grad=False)
    return step(layers, tokens(layers, i))


def _layouts(layers: Layers, i: int) -> list[Tensor | None]:
    """Gradients that are contiguous, expanded, as behind a sum, and transposed."""
    transposed: Callable[[Tensor], Tensor] = lambda y: wave(y).mT.contiguous().mT  # noqa: E731
    return step(
        layers, tokens(layers, i), grad=(wave, lambda y: y.new_full((), 0.25).expand(y.shape), transposed)[i % 3]
    )


def _autocast(layers: Layers, i: int) -> list[Tensor | None]:
    with torch.autocast(layers[0].weight.device.type, BF16):
        return step(layers.float(), tokens(layers, i))


def _no_backward(layers: Layers, i: int) -> list[Tensor | None]:
    with (torch.no_grad, torch.inference_mode)[i % 2]():
        return [layer(tokens(layers, i)) for layer in layers]


WAYS: dict[str, tuple[Run, dict[str, Any]]] = {
    "no backward": (_no_backward, {}),
    "checkpoint": (called(partial(checkpoint, use_reentrant=False)), {}),
    "reentrant checkpoint": (called(partial(checkpoint, use_reentrant=True)), {}),
    "save_on_cpu": (called(_offloaded), {}),
    "saved tensors are copies": (called(_copied), {}),
    "retain_graph": (_retained, {}),
    "frozen": (_frozen, {"kinds": 3}),
    "input without gradient": (_without_gradient, {"kinds": 2}),
    "biases": (_bias, {"kinds": 3, "repeated": False}),
    "layouts of gradients": (_layouts, {"kinds": 3}),
    "shapes": (lambda layers, i: step(layers, tokens(layers, i, *((2, 24), (48,), (7,))[i % 3])), {"kinds": 3}),
    "strides": (_strides, {"kinds": 2}),
    "no rows": (called(plain, 0), {"repeated": False}),
    "every second row": (called(lambda layer, h: layer(h[:, ::2])), {}),
    "odd address": (called(lambda layer, h: layer(h.view(-1)[1:].unfold(0, 128, 128)), 9), {"repeated": False}),
    "a layer behind itself": (called(lambda layer, h: layer(layer(h))), {}),
    "autocast": (_autocast, {"repeated": False}),
}


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        pytest.param(r, way, marks=[pytest.mark.slow] * (r == "quartet" and options.get("kinds", 1) > 1))
        for r in SOME
        for way, (_, options) in WAYS.items()
    ],
)
def test_ways_to_train(recipe: str, way: str, device: torch.device, pages: Counter[str]) -> None:
    (run, options), layers = WAYS[way], prepared(recipe, device)
    check(run, layers, pages, **{"repeated": is_recorded(recipe, layers), **options})


def test_a_mode_that_watches_operators_sees_them() -> None:
    def run(layers: Layers, i: int) -> list[int]:
        with FlopCounterMode(display=False) as flops:
            step(layers, tokens(layers, i))
        with counting("matmul", "gradients") as calls:
            step(layers, tokens(layers, i))
        return [flops.get_total_flops(), *map(len, calls.values())]

    layers = prepared("nvfp4")
    (want,) = on_the_page(run, layers, 1)
    for i in range(4):
        step(layers, tokens(layers, i))
        assert run(layers, i) == want == [want[0], 2, 2] and want[0] > 0


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-nvfp4", "nvfp4-hp"])
def test_layers_with_one_input_keep_its_codes_once(recipe: str, pages: Counter[str]) -> None:
    def run(layers: Layers, i: int) -> list[Tensor | None]:
        x = tokens(layers, i).requires_grad_()
        return [torch.tensor(saved(layers, lambda x: torch.cat([layer(x) for layer in layers]), x))]

    check(run, prepared(recipe), pages)


@pytest.mark.parametrize("recipe", SOME)
def test_a_forced_backend_is_used_where_programs_exist(recipe: str, pages: Any, monkeypatch: Any) -> None:
    layers, used = prepared(recipe), list[bool]()
    for i, force in enumerate(["", "", "", "block", "", "environment", ""]):
        pages.clear()
        with ops.backend("reference") if force == "block" else nullcontext(), monkeypatch.context() as patch:
            if force == "environment":
                patch.setenv("AOQUANT_BACKEND", "reference")
            step(layers, tokens(layers, i))
        used.append(pages["multiply"] == pages["_gradients"] == 2)
    unforced = used[2]
    assert used[2:] == [unforced, True] * 2 + [unforced]
    assert not unforced or recipe == "int4-g128"  # on a CPU without csrc's library


@pytest.mark.parametrize(
    ("recipe", "written"),
    [("nvfp4", "weight"), ("nvfp4-weight", "weight"), ("nvfp4-weight", "input"), ("mxfp8-hp", "input")],
)
def test_a_write_between_forward_and_backward_is_refused(recipe: str, written: str, pages: Any) -> None:
    def run(i: int) -> None:
        h = tokens(layers, i, *(24,) * (1 + i % 2)).requires_grad_() * 1
        ys = [layer(h) for layer in layers]
        (layers[1].weight if written == "weight" else h).detach().mul_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            ys[1].sum().backward()

    layers = prepared(recipe)
    for i in range(8):
        if i == 4:
            pages.clear()
        run(i)
    assert not pages


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-hybrid"])
def test_a_second_derivative_is_refused(recipe: str) -> None:
    layers = prepared(recipe)
    for i in range(4):
        x = tokens(layers, i).requires_grad_()
        with pytest.raises(ValueError, match="cannot be differentiated twice"):
            torch.autograd.grad(layers[0](x).sum(), x, create_graph=True)
        step(layers, tokens(layers, i))


def test_more_kinds_of_calls_than_are_recorded(pages: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are repeated for good, so that ever new shapes do not record for ever."""
    monkeypatch.setattr(repeat, "MOST", 3)
    layers = prepared("int8", n=1)
    for rows in (9, 2, 3, 4, 5, 9, 3):
        pages.clear()
        check(called(plain, rows), layers, pages, repeated=rows not in (4, 5))
        assert len(replay._forwards.kinds) <= 3 and (pages["multiply"] == 4) is (rows in (4, 5))

    def wide(layers: Layers, i: int) -> list[Tensor | None]:
        return step(layers, tokens(layers, 0, 9), grad=lambda y: wave(y.new_ones(9, 200 + 8 * i))[:, :128])

    check(wide, layers, pages, kinds=2, repeated=False)
    assert max(len(kind.note.backward.kinds) for kind in replay._forwards.kinds.values()) == 3


@pytest.mark.parametrize("recipe", SOME)
def test_a_model_is_copied_and_pickled_after_its_steps(recipe: str) -> None:
    layers = prepared(recipe)
    for i in range(3):
        step(layers, tokens(layers, i))
    others = copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))
    want = step(layers, tokens(layers, 3))
    assert all(all(map(same_bytes, step(other, tokens(layers, 3)), want)) for other in others)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-hybrid"])
def test_threads_train_layers_at_once(recipe: str) -> None:
    models = [prepared(recipe) for _ in range(2)]
    want = on_the_page(called(plain), copy.deepcopy(models[0]), 6)

    def work(layers: Layers) -> bool:
        return all(all(map(same_bytes, called(plain)(layers, i), want[i])) for i in range(6))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, models)) == [True, True] and not program.recorders


# What a key has to tell apart


def _cast(layers: Layers, i: int) -> list[Tensor | None]:
    """Layers whose tensors have autocast's dtype, with and without it."""
    with torch.autocast(layers[0].weight.device.type, BF16, enabled=i % 4 > 1):
        return step(layers, tokens(layers, i))


def _weight_dtype(layers: Layers, i: int) -> list[Tensor | None]:
    layers[0].weight.data = layers[0].weight.data.to(torch.float32 if i % 2 else BF16) * (1 + i / 128)
    return step(layers, tokens(layers, i).to(BF16))


def _weight_as_input(layers: Layers, i: int) -> list[Tensor | None]:
    return step(layers, tokens(layers, i, 128), lambda layer, h: layer(layer.weight if i % 4 < 2 else h))


def _input_as_gradient(layers: Layers, i: int) -> list[Tensor | None]:
    x = tokens(layers, i, 128)
    return step(layers, x, lambda layer, h: layer(x), lambda y: x if i % 4 < 2 else wave(y))


def _rounded_by_hooks(layers: Layers, i: int) -> list[Tensor | None]:
    """Bring back what backward reads in another dtype."""

    def call(layer: nn.Module, h: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.bfloat16() if t.is_floating_point() and i % 4 > 1 else t, lambda t: t):
            return layer(h)

    return step(layers.float(), tokens(layers, i), call)


TOLD_APART: dict[str, tuple[str, Run]] = {
    "dtype of what is saved": ("int8", _rounded_by_hooks),
    "autocast": ("fp8-hybrid", _cast),
    "dtype of the weight": ("torchao-int8", _weight_dtype),
    "weight as input": ("nvfp4", _weight_as_input),
    "input as gradient": ("nvfp4-weight", _input_as_gradient),
}


@pytest.mark.parametrize("what", TOLD_APART)
def test_calls_that_are_not_alike_share_no_program(what: str, pages: Counter[str]) -> None:
    recipe, run = TOLD_APART[what]
    check(run, prepared(recipe, bias=False), pages, kinds=2, repeated=False)
