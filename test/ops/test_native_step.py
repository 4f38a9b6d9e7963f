"""The step library: wrong arguments, another torch's library, compiled autograd and functorch, hooks and threads that
raise or race, blocks that choose kernels, and the ops of compiled steps.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked
from support.bits import same_bytes
from support.cpu_library import with_library, with_step_library
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from aoquant import ops, quantize_
from aoquant.linear import function, replay
from aoquant.ops import define, native_step, repeat, router, sources
from aoquant.recipes import get_recipe


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[Path]:
    for _ in with_library():
        yield from with_step_library()


def operator(name: str) -> Any:
    return getattr(torch.ops.aoquant_step, name).default


def pair() -> list[Tensor]:
    return [torch.randn(2, 4, requires_grad=True), torch.randn(4, 4)]


def test_a_call_that_is_not_known_is_left_to_python() -> None:
    assert operator("forward")(1 << 40, pair(), None, None) == ([], -1, 0)


def test_a_forward_without_a_weight_is_an_error() -> None:
    for given in ([], pair()[:1]):
        with pytest.raises(RuntimeError, match="input and a weight"):
            operator("forward")(1, given, None, None)


def test_a_backward_that_python_does_not_know_is_an_error() -> None:
    replay._implement()
    with pytest.raises(KeyError):
        operator("gradients")(1 << 40, pair())


def test_a_library_of_another_torch_is_not_loaded(library: Path, tmp_path: Path) -> None:
    other, version = tmp_path / library.name, torch.__version__.encode()
    other.write_bytes(
        library.read_bytes().replace(b"torch " + version + b"\0", b"torch " + b"9" * len(version) + b"\0")
    )
    assert "another torch" in str(native_step._load(other))
    assert native_step._load(tmp_path / "absent.so") is not None and not sources.holds(library, "no such text")


def test_compiled_autograd_is_switched_on_before_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
    monkeypatch.setattr(replay, "_forwards", repeat.Repeats())
    model = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16))
    quantize_(model, get_recipe("int4-g128").prepare())
    compiled = partial(compiled_autograd._enable, torch.compile(backend="eager"))

    def step(around_all: Any = nullcontext, around_backward: Any = nullcontext) -> tuple[Tensor | None, bool]:
        x = torch.ones(2, 128, dtype=torch.bfloat16, requires_grad=True)
        with around_all():
            y = model(x)
            with around_backward():
                y.backward(torch.ones_like(y))
        return x.grad, isinstance(y.grad_fn, BackwardCFunction)

    grads, in_python = zip(*[step() for _ in range(8)], strict=True)
    assert in_python[0] and not in_python[-1]
    got, in_python_again = step(around_all=compiled)
    assert in_python_again and all(map(same_bytes, grads, [got] * 8))
    with pytest.raises(RuntimeError, match="before the forward"):
        step(around_backward=compiled)


def test_a_watcher_is_told_of_blocks_that_are_open() -> None:
    told: list[int] = []
    with ops.backend("reference"):
        router.watch(told.append)
        with ops.backend("reference"):
            pass
    assert told == [1, 1, -1, -1]
    router._watchers.remove(told.append)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return a layer whose steps on (2, 128) the library runs."""
    monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
    monkeypatch.setattr(replay, "_forwards", repeat.Repeats())
    model = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16))
    quantize_(model, get_recipe("int4-g128").prepare())
    for _ in range(6):
        y = model(tokens())
        y.backward(torch.ones_like(y))
    assert not isinstance(y.grad_fn, BackwardCFunction)
    return model


def tokens(device: torch.device | None = None) -> Tensor:
    return torch.ones(2, 128, dtype=torch.bfloat16, device=device, requires_grad=True)


def test_vmap_goes_through_a_backward(model: nn.Module) -> None:
    x = tokens()
    y, grads = model(x), torch.randn(3, 2, 128, dtype=torch.bfloat16)
    one = partial(torch.autograd.grad, y, x, retain_graph=True)
    got = torch.func.vmap(lambda grad: one(grad)[0])(grads)
    assert torch.equal(got, torch.stack([one(grad)[0] for grad in grads]))


def test_an_error_of_a_hook_of_saved_tensors_is_the_callers(model: nn.Module) -> None:
    calls = list[Tensor]()

    def pack(t: Tensor) -> Tensor:
        calls.append(t)
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"), saved_tensors_hooks(pack, lambda t: t):
        model(tokens())
    assert len(calls) == 1


def test_a_backward_reads_what_the_environment_forces(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, real = list[Any](), function._gradients
    monkeypatch.setattr(function, "_gradients", lambda *given: ran.append(given) or real(*given))
    for forced in ("", "reference"):
        y = model(tokens())
        monkeypatch.setenv("AOQUANT_BACKEND", forced)
        y.backward(torch.ones_like(y))
        assert len(ran) == bool(forced)


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_without_gradients_is_the_librarys_where_it_is_ordinary(
    grad: bool, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, not where something watches, changes or chooses the operators; the bits are the same."""
    found, real = list[Tensor | None](), replay.product
    monkeypatch.setattr(replay, "product", lambda *given: found.append(real(*given)) or found[-1])
    x, want = tokens().detach(), model(tokens()).detach()
    model.requires_grad_(False)
    forced = partial(ops.backend, "reference")
    changed = [partial(FlopCounterMode, display=False), forced, BaseTorchFunctionMode]
    within: list[Any] = [*[nullcontext] * 5, *changed, partial(torch.autocast, "cpu", torch.bfloat16), nullcontext]
    with torch.set_grad_enabled(grad):
        for i, around in enumerate(within):
            found.clear()
            with around():
                y = model(x)
            whole = i == 4 or i == len(within) - 1
            assert torch.equal(y, want) and (i < 4 or ([t is y for t in found if t is not None] == [True] * whole)), i
        monkeypatch.setenv("AOQUANT_BACKEND", "reference")
        assert torch.equal(model(x), want) and found[1] is None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("recipe", ["int4-g128", "fp8-hybrid"])
def test_bad_input_is_refused_where_the_layers_calls_are_known(
    recipe: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before it ran: of another width, dtype or device, and under torch.func's transforms and derivatives."""
    monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
    monkeypatch.setattr(replay, "_forwards", repeat.Repeats())
    model = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16))
    quantize_(model, get_recipe(recipe).prepare())
    x = torch.ones(16, 128, dtype=torch.bfloat16)
    bad: list[Any] = [x[:, :64], x.long(), x.to("meta"), torch.ones((), dtype=x.dtype), x.double()]
    with torch.set_grad_enabled(grad):
        for _ in range(6):
            y = model(x)
            if grad:
                y.backward(torch.ones_like(y))
        assert replay._forwards.told and not isinstance(y.grad_fn, BackwardCFunction)
        for t in bad:
            with pytest.raises(ValueError, match="0: "):
                model(t)
        with pytest.raises(ValueError, match="0: "):
            torch.func.vmap(model)(x.unsqueeze(0))
        with pytest.raises(ValueError, match="0: "), torch.autograd.forward_ad.dual_level():
            model(torch.autograd.forward_ad.make_dual(x, x))
        with torch.autocast("cpu", torch.float16):
            assert model(x).dtype == torch.float16
        assert torch.equal(model(x), y)


PACKED = ["fp8-hybrid", "nvfp4", "nvfp4-training", "int8-int4", "mxfp8", "int8"]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """Hold what the library returned to each layer that asked it for y without gradients."""
    found, real = list[Tensor | None](), replay._product
    monkeypatch.setattr(replay, "_product", lambda *given: found.append(real(*given)) or found[-1])
    for name in ("_forwards", "_packed_products"):
        monkeypatch.setattr(replay, name, repeat.Repeats())
    return found


@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_a_packed_layer_of_few_rows_is_the_librarys(
    recipe: str, shape: tuple[int, ...], found: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both layers by one program, with the bits of the bound kernels; codes that are written in place are seen."""
    model = nn.ModuleList([nn.Linear(256, 128, dtype=torch.bfloat16) for _ in range(2)])
    quantize_(model, get_recipe(recipe).make())
    x = torch.randn(*shape, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        want = [layer(x) for layer in model]
        assert not found
        monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
        first, second = copy.deepcopy(model)
        for i in range(4):
            assert torch.equal(first(x), want[0]), i
        assert torch.equal(second(x), want[1]) and [y is None for y in found] == [True] * 3 + [False] * 2
        first.load_state_dict(second.state_dict())
        assert torch.equal(first(x), want[1]) and found[-1] is not None
        apart = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].copy_(x.flatten()).view_as(x)  # no program reads it
        assert torch.equal(first(apart), want[1]) and found[-1] is None
        many = torch.randn(129, 256, dtype=torch.bfloat16)
        assert torch.equal(first(many), model[1](many)) and len(found) == 7
    assert not replay._forwards.kinds
    codes = weakref.ref(first.weight.bound._w.codes)
    gc.disable()
    del first
    assert codes() is None
    gc.enable()


def test_a_packed_layer_without_the_library_keeps_its_bound_kernel(
    found: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
    monkeypatch.setattr(native_step, "why_not", lambda: "absent")
    model = nn.Sequential(nn.Linear(256, 128, dtype=torch.bfloat16))
    quantize_(model, get_recipe("fp8-hybrid").make())
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        ys = [model(x) for _ in range(5)]
    assert not found and all(torch.equal(y, ys[0]) for y in ys)


@pytest.mark.parametrize("grad", [False, True])
def test_a_task_that_began_in_a_block_is_forced_after_it(grad: bool, model: nn.Module) -> None:
    """A copied context forces a backend when no block is open any more."""
    with torch.set_grad_enabled(grad):
        for _ in range(6):
            model(tokens())
        with ops.backend("cuda-decode"):
            copied = contextvars.copy_context()
        with pytest.raises(ValueError, match="cuda-decode"):
            copied.run(model, tokens())
        model(tokens())


def test_a_layer_whose_calls_are_known_is_traced(model: nn.Module) -> None:
    x = tokens().detach()
    with torch.no_grad():
        want = [model(x) for _ in range(6)][-1]
        assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), want)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compilers_graph_holds_the_layers_ops_alone(model: nn.Module) -> None:
    called = list[str]()

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(model, backend=backend, fullgraph=True)(tokens())
    assert called and not [name for name in called if "functorch" in name]


def test_a_program_that_fails_is_left_to_python() -> None:
    """An error of the forward's own, by a program that reads a tensor before any is there."""
    given = pair()
    program = operator("program_make")([4, 0, 1, 4, 1, 2, 1, 3], "", 2, [])
    operator("family_bind")(1 << 41, program, given)
    operator("learn")(program, 1 << 41, 1 << 41, 0, [], 1)
    with pytest.raises(RuntimeError, match="not there"):
        operator("program_run")(program, given)
    assert operator("forward")(1 << 41, given, None, None) == ([], -1, 0)
    assert operator("product")(1 << 41, given) is None
    operator("family_forget")(1 << 41)
    operator("program_forget")(program)


@pytest.mark.parametrize("at", [2, 3])
def test_a_step_without_memory_leaves_the_next_ones_to_the_library(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail once, in a forward or a backward; the first runs of both are checks."""
    runs, real = list[Any](), native_step.operator

    def run(*given: Any) -> Any:
        runs.append(given)
        if len(runs) == at + 1:
            raise torch.OutOfMemoryError("no room")
        return real("program_run")(*given)

    monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
    monkeypatch.setattr(replay, "_forwards", repeat.Repeats())
    monkeypatch.setattr(native_step, "operator", lambda name: run if name == "program_run" else real(name))
    layer, made = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16)), list[Any]()
    quantize_(layer, get_recipe("int4-g128").prepare())
    for _ in range(8):
        x = tokens()
        y = layer(x)
        y.backward(torch.ones_like(y))
        made.append((y.detach(), x.grad))
    assert not isinstance(y.grad_fn, BackwardCFunction) and len(runs) > at
    assert all(all(map(same_bytes, got, made[0])) for got in made)


def _find(call: int, ended: threading.Event) -> None:
    while not ended.is_set():
        operator("shared")(call)


def _end_nodes_while_codes_are_found() -> None:
    """End nodes in one thread, with the GIL, while another one finds codes that Python alone keeps."""
    repeat.FIRST_DEVICE = -1
    for _ in with_step_library():
        layer = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))
        quantize_(layer, get_recipe("nvfp4").prepare())
        x = torch.ones(2, 32, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(6):
            layer(x.clone()).sum().backward()
        h = x.clone()
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            y = layer(h)
        (call,) = (call for call in range(1, 100) if operator("shared")(call))
        ended = threading.Event()
        finder = threading.Thread(target=_find, args=(call, ended))
        finder.start()
        for _ in range(3):
            nodes = [
                layer(x.clone()).grad_fn,
                [[] for _ in range(1 << 20)],
            ]  # the last one takes long to end, and first
            time.sleep(0.02)
            nodes.clear()
        ended.set()
        finder.join()
        assert y.grad_fn is not None and operator("shared")(call)


def test_nodes_end_while_another_thread_finds_codes() -> None:
    begun = forked.process(_end_nodes_while_codes_are_found)
    begun.join(60)
    begun.kill()
    begun.join()
    assert begun.exitcode == 0, "a thread with the GIL waits for one that waits for the GIL"


def test_threads_that_learn_at_once_give_the_library_one_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    class Slow:
        def __init__(self, *_: Any) -> None:
            time.sleep(0.05)
            made.append(self)
            self.ready = False

        def impl(self, *_: Any) -> None:
            time.sleep(0.05)
            self.ready = True

    monkeypatch.setattr(replay, "_implementation", [])
    monkeypatch.setattr(torch.library, "Library", Slow)
    with ThreadPoolExecutor(4) as pool:
        ready = list(pool.map(lambda _: replay._implement() or made[0].ready, range(4)))
    assert ready == [True] * 4 and len(made) == 1


def test_the_library_takes_the_ops_that_compiled_steps_repeat() -> None:
    every = [op for op in vars(ops).values() if isinstance(op, define.Op)]
    taken = {
        op.__name__: [
            torch._C._dispatch_has_kernel_for_dispatch_key(op.overload.name(), key) for key in ("CPU", "CUDA")
        ]
        for op in every
    }
    repeated = {"encode", "matmul", "gradients"}
    assert len(every) > 9 and taken == {op.__name__: [op.__name__ in repeated] * 2 for op in every}
    assert {op.__name__ for op in every if op._repeats is not None} == repeated


class Compiled:
    """Make a compiled layer's steps.

    seen: the calls of its ops that Python repeats, by the ops' names. repeats: what repeats them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recipe: str, device: torch.device) -> None:
        self.seen, self.device = list[str](), device
        monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
        self.repeats = {name: Seen(self.seen, name) for name in ("encode", "matmul", "gradients")}
        for name, repeats in self.repeats.items():
            monkeypatch.setattr(getattr(ops, name), "_repeats", repeats)
        self.layer = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16, device=device))
        quantize_(self.layer, get_recipe(recipe).prepare())
        torch._dynamo.reset()
        self.compiled = torch.compile(self.layer, backend="aot_eager" if device.type == "cpu" else "inductor")

    def step(self, layer: Any = None) -> list[Tensor | None]:
        """Return output and gradients."""
        x = tokens(self.device)
        self.layer.zero_grad()
        y = (layer or self.compiled)(x)
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad, *(p.grad for p in self.layer.parameters())]

    def asked(self) -> set[str]:
        """Make a step with the eager one's bits; return the ops that Python repeated in it."""
        want = self.step(self.layer)
        self.seen.clear()
        assert all(map(same_bytes, self.step(), want))
        return set(self.seen)


class Seen(repeat.Repeats):
    """List the calls."""

    def __init__(self, seen: list[str], name: str) -> None:
        super().__init__()
        self.seen, self.name = seen, name

    def repeated(self, *given: Any) -> Any:
        """Note one."""
        self.seen.append(self.name)
        return super().repeated(*given)


REPEATED = ("int4-g128", "int8", "nvfp4", "fp8-hybrid")
ON_A_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in REPEATED]


@pytest.mark.parametrize(("recipe", "device"), [*((r, "cpu") for r in REPEATED), *ON_A_GPU])
def test_a_compiled_step_asks_python_for_what_is_unusual(
    recipe: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Compiled(monkeypatch, recipe, torch.device(device))
    every = compiled.asked()
    assert {"matmul", "gradients"} <= every
    for _ in range(3):
        compiled.asked()
    assert not compiled.asked()
    with ops.backend("reference"):
        assert compiled.asked() == every
    assert not compiled.asked()
    monkeypatch.setenv("AOQUANT_BACKEND", "reference")
    assert compiled.asked() == every
    monkeypatch.delenv("AOQUANT_BACKEND")
    assert not compiled.asked()
    router.register()
    assert compiled.asked() == every
    for _ in range(3):
        compiled.asked()
    assert not compiled.asked()


def test_an_op_whose_program_fails_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(monkeypatch, "int4-g128", torch.device("cpu"))
    for _ in range(5):
        every = compiled.asked()
    (family,) = compiled.repeats["matmul"]._families.values()
    (kind,) = compiled.repeats["matmul"].kinds.values()
    assert "matmul" not in every
    operator("program_forget")(kind.program.native)
    operator("family_forget")(family.number)
    assert "matmul" in compiled.asked()
