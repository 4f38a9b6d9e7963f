"""A recorded program gives the bits of its function on other tensors, and there is none where that is not certain."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from support.bits import same_bytes
from support.cpu_library import with_step_library
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from aoquant.ops import native_step, program
from aoquant.ops.native_program import Boxes, Kernel
from aoquant.ops.program import Program, record

Function = Callable[..., Sequence[Tensor | None]]
AT = torch.tensor([2, 0])


@pytest.fixture(autouse=True)
def as_in_an_autograd_function() -> Iterator[None]:
    with torch.no_grad():
        yield
    assert not program.recorders


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randn(4, 6)


def recorded(function: Function, *arguments: Tensor | None) -> Program | None:
    """Record a call, and check that its results and its arguments are as in a call that is not recorded."""
    given = [None if t is None else t.clone() for t in arguments]
    with torch.random.fork_rng(devices=[]):
        want = function(*given)
    results, made = record(lambda: function(*arguments), arguments)
    assert all(map(same_bytes, results, want)) and all(map(same_bytes, arguments, given))
    return made


# What is repeated


def _written(x: Tensor, y: Tensor) -> list[Tensor]:
    t = torch.empty_like(x)
    t[0].fill_(3)
    t[1:] = x[1:]
    t.view(-1)[5:7].add_(y[0, :2])
    t.t().mul_(2)
    before = t + 1
    return [t, t[2:], before, t.exp_().sum(0)]


def _several(x: Tensor, y: Tensor) -> list[Tensor]:
    first, second = x.split(2)
    return [second, *torch.max(y, 1), *x.unbind(1)[:2], *torch.frexp(first + 1)]


REPEATED: dict[str, Any] = {
    "operators": lambda x, y: [x * y + 1, x @ y.t(), torch.addmm(y[:, :4], x, y.t()).to(torch.bfloat16)],
    "views": lambda x, y: [x.t(), y.view(-1), x[1:, ::2] + y[1:, ::2], x.view(torch.int32), x.detach()],
    "writes of intermediates": _written,
    "lists": lambda x, y: [torch.cat((x, y)), torch.stack([y, x, y], 1), torch.zeros(4, 6).index_put_((AT,), y[:2])],
    "several results": _several,
    "keywords": lambda x, y: [torch.mul(x, other=y, out=torch.empty_like(x)), torch.addcmul(x, tensor1=y, tensor2=x)],
    "numbers in front": lambda x, y: [2**x, 1 - y, torch.where(x > 0, 1.0, y), torch.clamp(x, max=y)],
    "arguments as results": lambda x, y: [y, None, x, x + 1, y],
    "constants": lambda x, y: [x + AT.sum(), y * torch.tensor(3.0), x[AT]],
    "lists with None": lambda x, y: [x[:, AT]],
}


@pytest.mark.parametrize("large", [1, 1 << 20], ids=["let-go-early", "let-go-late"])
@pytest.mark.parametrize("function", REPEATED.values(), ids=REPEATED)
def test_a_program_has_the_bits_of_its_function(function: Function, large: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(program, "LARGE", large)
    check(recorded(function, *pair()), function)


def check(repeat: Program | None, function: Function) -> None:
    assert repeat is not None
    for _ in range(2):
        given = pair()
        before = [t.clone() for t in given]
        got, want = repeat(given), function(*given)
        assert len(got) == len(want) and all(map(same_bytes, got, want)) and all(map(same_bytes, given, before))
        for t, w in zip(got, want, strict=True):  # an argument is returned itself
            assert t is w or (t is not None and w is not None and t.stride() == w.stride())


# What csrc's library repeats


@pytest.fixture
def library() -> Iterator[Any]:
    yield from with_step_library()


def _of_words(x: Tensor, y: Tensor) -> list[Tensor]:
    made = torch.empty_strided((6, 4), (1, 6), dtype=torch.float64)
    made.copy_(x.t())
    product = torch.mm(x.t(), y)
    normal = torch.native_layer_norm(product, [6], None, y[0], 1e-3)
    parts = torch.cat((product[1:, ::2], product.view(-1)[3:21].view(6, 3)), 0).detach()
    return [made, made.t()[1:], *normal, parts, y.sum([0], dtype=torch.float64), x.mul_(y).to(torch.bfloat16), x]


IN_WORDS: dict[str, Function] = {
    "of every kind": lambda x, y: _of_words(x.clone(), y),
    "arguments as results": lambda x, y: [y, None, x, torch.mm(x, y.t()), y],
    "constants": lambda x, y: [x * ROWS, torch.mm(y, ROWS.t())],
    "an overload without a name at the end": lambda x, y: [torch.mm(x, y.mT)],
    "numbers for tensors": lambda x, y: [x * 0.1, x.bfloat16() * 0.7, torch.div(y, 3.0), y.exp().mul_(1.0 / 3)],
    "copies": lambda x, y: [x.t().contiguous(), y.t().clone(), torch.cat((x.t(), x.new_zeros(6, 2)), 1)],
}
ROWS = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize("large", [1, 1 << 20], ids=["let-go-early", "let-go-late"])
@pytest.mark.parametrize("function", IN_WORDS.values(), ids=IN_WORDS)
def test_the_library_gives_the_bits_of_a_function(
    function: Function, large: int, library: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(program, "LARGE", large)
    repeat = recorded(function, *pair())
    assert repeat is not None and repeat.native is not None
    repeat._steps.clear()  # only the library knows them now
    check(repeat, function)


def test_the_library_skips_an_argument_that_is_missing(library: Any) -> None:
    (x, y), given = pair(), pair()
    repeat = recorded(lambda x, bias, y: [None, torch.mm(x, y.t()) if bias is None else bias], x, None, y)
    assert repeat is not None and repeat.native is not None
    first, product = repeat([given[0], None, given[1]])
    assert first is None and same_bytes(product, torch.mm(given[0], given[1].t()))


def test_a_view_that_is_a_result_shares_the_version_of_what_it_views(library: Any) -> None:
    """So that autograd sees a write through either."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        made = torch.mm(x, y.t())
        return [made, made.view(-1)]

    repeat = recorded(function, *pair())
    assert repeat is not None and repeat.native is not None
    made, view = repeat(pair())
    before = view._version
    made.add_(1)
    assert view._version == before + 1


def test_what_is_made_elsewhere_is_left_to_python(library: Any) -> None:
    repeat = recorded(lambda x, y: [torch.empty(3, device="meta"), torch.mm(x, y.t())][1:], *pair())
    assert repeat is not None and repeat.native is not None  # nothing reads it
    results, repeat = record(lambda: [torch.empty(3, device="meta")], pair())
    assert repeat is None and results[0].device.type == "meta"


NOT_IN_WORDS: dict[str, Function] = {
    "a number of as many dimensions": lambda x, y: [x.sum() * 0.1, y],
    "a number beside integers": lambda x, y: [x.int() * 0.5, y],
    "another format of memory": lambda x, y: [x.view(1, 4, 6, 1).clone(memory_format=torch.channels_last), y],
}


@pytest.mark.parametrize("function", NOT_IN_WORDS.values(), ids=NOT_IN_WORDS)
def test_what_the_library_would_make_otherwise_is_left_to_python(function: Function, library: Any) -> None:
    repeat = recorded(function, *pair())
    assert repeat is not None and repeat.native is None
    check(repeat, function)


def test_a_number_beside_integers_takes_the_default_dtype_of_its_run(library: Any) -> None:
    function: Function = lambda x, y: [x.int() * 0.5, y]  # noqa: E731
    try:
        torch.set_default_dtype(torch.float64)
        repeat = recorded(function, *pair())
    finally:
        torch.set_default_dtype(torch.float32)
    check(repeat, function)


def test_the_library_views_what_lies_far_behind(library: Any) -> None:
    x = torch.empty((1 << 31) + 8, dtype=torch.uint8)
    x[-8:] = torch.arange(8, dtype=torch.uint8)
    results, repeat = record(lambda: [x[1 << 31 :] + 1], (x,))
    assert repeat is not None and repeat.native is not None and results[0].tolist() == [*range(1, 9)]


def test_the_library_makes_what_is_empty(library: Any) -> None:
    words = [3, 0, 2, 0, 2, 6, 2, 0, 0, 2, *[(1 << 63) - 1] * 2, 1, 1, 0, 6, 3, 2, 0, 4, 2, 6, 1, 2, 1, 2]
    program = native_step.operator("program_make")(words, "", 1, [])
    view, made = native_step.operator("program_run")(program, pair()[:1])
    assert view.shape == (0, 4) and made.shape == (0, 0)


def test_the_library_fills_its_memory_where_torch_does(library: Any) -> None:
    """Show as NaN what no kernel writes, where algorithms are deterministic, as in all tests."""
    repeat = recorded(lambda x, y: [torch.empty_like(x), x + y], *pair())
    assert repeat is not None and repeat.native is not None
    made = repeat(pair())[0]
    assert made is not None and bool(made.isnan().all())


def test_an_error_in_the_library_is_the_operators_own(library: Any) -> None:
    repeat = recorded(lambda x, y: [torch.mm(x, y.t())], *pair())
    assert repeat is not None and repeat.native is not None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        repeat([torch.ones(4, 6), torch.ones(4, 5)])


def test_the_library_forgets_a_program_that_is_gone(library: Any) -> None:
    repeat = recorded(lambda x, y: [torch.mm(x, y.t())], *pair())
    assert repeat is not None and repeat.native is not None
    number, run = repeat.native, native_step.operator("program_run")
    assert len(run(number, pair())) == 1
    del repeat
    gc.collect()
    with pytest.raises(RuntimeError, match=f"no program {number}"):
        run(number, pair())


@pytest.mark.parametrize("launches", [False, True])
def test_the_library_refuses_words_that_are_wrong(
    launches: bool, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each word in turn: an error, or another program, and no signal."""

    def function() -> list[Tensor]:
        made = torch.mm(x, y.t())
        if launches:
            parameters = [None, Boxes(9, 3, [6, 4], [24], [6, 4]), 4, 6, 6, 1]
            kernel = Kernel(1 << 40, [2, 1, 1], 256, 0, parameters)
            program.recorders[threading.get_ident()].launched(lambda *_: None, [x, made], False, kernel)
        return [made[1:], torch.empty_strided((2, 2), (2, 1))[0].zero_()]

    seen, real, (x, y) = list[Any](), native_step.operator, pair()
    spied = lambda *a: seen.append(a) or real("program_make")(*a)  # noqa: E731
    monkeypatch.setattr(native_step, "operator", lambda name: spied if name == "program_make" else real(name))
    record(function, (x, y))
    make, run, (words, *others) = real("program_make"), real("program_run"), seen[0]
    if launches:
        with pytest.raises(RuntimeError, match="a CPU launches no kernels"):
            run(make(words, *others), list(pair()))
    for at in range(len(words)):
        for wrong in (-1, -(1 << 62), 1 << 40, (1 << 62) + 1):
            with suppress(Exception):
                run(make([*words[:at], wrong, *words[at + 1 :]], *others), list(pair()))
        with pytest.raises(RuntimeError, match=r"a program.s word"):
            make(words[:at], *others)
    with pytest.raises(RuntimeError, match="behind its end"):
        make([*words, 0], *others)
    for given in (pair()[:1], [*pair(), pair()[0]], []):
        with pytest.raises(RuntimeError, match="takes 2 tensors"):
            run(make(words, *others), list(given))


def test_an_argument_may_be_missing() -> None:
    function: Function = lambda x, bias, y: [x * y if bias is None else x * y + bias]  # noqa: E731
    (x, y), given = pair(), pair()
    repeat = recorded(function, x, None, y)
    assert repeat is not None
    assert same_bytes(repeat([given[0], None, given[1]])[0], given[0] * given[1])


def test_steps_that_nothing_reads_are_left_out() -> None:
    def function(x: Tensor) -> list[Tensor]:
        (torch.empty_like(x) + x).t().softmax(0).split(2)
        return [x * 2]

    repeat = recorded(function, pair()[0])
    assert repeat is not None and len(repeat._steps) == 1


def test_large_results_are_let_go_behind_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LARGE", 4 * 24)
    repeat = recorded(lambda x: [(x * 2 + 1).sum()], pair()[0])
    assert repeat is not None
    assert [function is None for function, *_ in repeat._steps] == [False, False, True, False, True]


def test_of_many_steps_few_results_are_alive_at_once() -> None:
    """Let go of results of 256 KiB, too: a step of many small tiles has hundreds of them."""

    def function(x: Tensor) -> list[Tensor]:
        for _ in range(20):
            x = x + 1
        return [x]

    repeat = recorded(function, torch.zeros(1 << 16))
    assert repeat is not None and [step.function for step in repeat._steps].count(None) == 19


# What is not recorded

UNCERTAIN: dict[str, Any] = {
    "item": lambda x, y: [x * y.sum().item()],
    "branch": lambda x, y: [x if (y > 0).all() else -x],
    "equal": lambda x, y: [x * torch.equal(x, y)],
    "place in a storage": lambda x, y: [x.as_strided((4,), (1,), 3)],
    "random numbers": lambda x, y: [x + torch.rand_like(y)],
    "a write whose indices are used": lambda x, y: [
        torch.max(y, 1, out=(torch.zeros(4), AT.new_zeros(4)))[0] + x[:, 0]
    ],
    "size": lambda x, y: [x * len(x[y > 0])],
}
WRITES: dict[str, Any] = {
    "write": lambda x, y: [x.mul_(2) + y],
    "view": lambda x, y: [x.t()[1].mul_(2), y],
    "out": lambda x, y: [torch.add(x, y, out=x) + 1],
    "list": lambda x, y: [torch._foreach_mul_([x[1:]], 2.0), x + y][1:],
}


@pytest.mark.parametrize("function", UNCERTAIN.values(), ids=UNCERTAIN)
def test_there_is_no_program_where_another_call_may_differ(function: Function) -> None:
    assert recorded(function, *pair()) is None


@pytest.mark.parametrize("function", WRITES.values(), ids=WRITES)
def test_there_is_no_program_where_an_argument_is_written(function: Function) -> None:
    x, y = pair()
    once = x.clone()
    want = function(once, y)
    results, repeat = record(lambda: function(x, y), (x, y))
    assert repeat is None and same_bytes(x, once) and all(map(same_bytes, results, want))


def test_there_is_no_program_where_a_view_was_made_before() -> None:
    x, y = pair()
    for function in (lambda t: [t * 2], lambda t: [t]):
        for view in (x.t(), x.detach()):
            results, repeat = record(lambda f=function, view=view: f(view), (x, y))  # type: ignore[misc]
            assert repeat is None and same_bytes(results[0], function(view)[0])


@pytest.mark.parametrize("function", [lambda a, b: [a - 2 * b]])
def test_two_arguments_that_are_one_tensor_may_be_two_later(function: Function) -> None:
    x, y = pair()
    repeat = recorded(function, x, x)
    assert repeat is None or same_bytes(repeat([x, y])[0], function(x, y)[0])


STATE = {
    "read": lambda state, x: [x * state.add_(1)],
    "result": lambda state, x: [state.add_(1)],
    "unread": lambda state, x: [state.add_(1), x + 1][1:],
}


@pytest.mark.parametrize("function", STATE.values(), ids=STATE)
def test_there_is_no_program_of_a_function_with_state(function: Function) -> None:
    state, (x, _) = torch.zeros(()), pair()
    results, repeat = record(lambda: function(state, x), (x,))
    assert repeat is None and same_bytes(results[0], function(torch.zeros(()), x)[0])


@pytest.mark.parametrize("unseen", [0, 1])
def test_there_is_no_program_where_a_launch_was_not_seen(unseen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Launch` tells the recorder of each launch, and Triton's hook counts all. Both are played here."""
    total = [0]

    @contextmanager
    def counted() -> Iterator[list[int]]:
        yield total

    def kernel(read: Tensor, write: Tensor) -> None:  # reads addresses alone
        write.view(-1).copy_(read.view(-1) + 1)

    def function() -> list[Tensor]:
        out = torch.empty(24)
        given = [x.view(-1), out[:24]]
        total[0] += 1 + unseen
        program.recorders[threading.get_ident()].launched(kernel, given, True, None)
        with _disable_current_modes():
            kernel(*given)
        return [out.view(4, 6) * 2]

    monkeypatch.setattr(program, "count_launches", [counted])
    x, other = pair()
    results, repeat = record(function, (x,))
    assert same_bytes(results[0], (x + 1) * 2) and (repeat is None) == bool(unseen)
    if repeat is not None:
        assert same_bytes(repeat((other,))[0], (other + 1) * 2)
        assert program.Step(kernel, [0, 1], -1) in repeat._steps  # it reads addresses: the views are not made again


# Threads and errors


def test_what_another_thread_runs_is_not_recorded() -> None:
    x, other = pair()

    def function() -> list[Tensor]:
        made = x * 3
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: [program.recording(), x.sum().item() > 1e9]).result() == [False, False]
        assert program.recording()
        return [made.mul(2).add_(1)]

    results, repeat = record(function, (x,))
    assert repeat is not None and len(repeat._steps) == 3
    assert same_bytes(results[0], x * 3 * 2 + 1) and same_bytes(repeat((other,))[0], other * 3 * 2 + 1)


def test_threads_record_at_once_and_an_error_ends_a_recording() -> None:
    gate = threading.Barrier(4)

    def work(i: int) -> bool:
        x, other = torch.full((4, 6), float(i)), torch.full((4, 6), float(i + 10))

        def function() -> list[Tensor]:
            made = x * i
            gate.wait(30)
            if i % 2:
                raise KeyError(i)
            return [made + x.cos()]

        try:
            _, repeat = record(function, (x,))
        except KeyError:
            return bool(i % 2) and not program.recording()
        return repeat is not None and same_bytes(repeat((other,))[0], other * i + other.cos())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


HELD = REPEATED | {"nothing, refused": lambda x, y: [x * y[y > 0].sum()]}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("function", HELD.values(), ids=HELD)
def test_recording_holds_no_tensor_behind_its_end(function: Function) -> None:
    """Neither the program nor a cycle of what recorded it does: a layer's weight may be as large as the room left."""
    given = list(pair())
    results, repeat = record(lambda: function(*given), given)
    seen = [weakref.ref(t) for t in (*given, *results) if t is not None]
    given.clear()
    del results
    assert not any(ref() is not None for ref in seen), repeat


@pytest.mark.usefixtures("uncollected")
def test_what_takes_more_room_than_a_recording_has_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "ROOM", 4 * 4 * 24)

    def held(count: int) -> tuple[int, Program | None]:
        """Record `count` sums of 24 float32 values each; return how many of them are there at the end."""
        seen = []

        def function() -> list[Tensor]:
            made = x
            for _ in range(count):
                made = made + 1
                seen.append(weakref.ref(made))
            alive.append(sum(ref() is not None for ref in seen))
            return [made]

        alive: list[int] = []
        _, repeat = record(function, [x])
        return alive[0], repeat

    x = torch.zeros(4, 6)
    there, repeat = held(4)
    assert there == 4 and repeat is not None
    assert held(9) == (1, None)


def test_where_memory_ends_the_function_runs_without_a_recorder() -> None:
    x, y = pair()

    def function() -> list[Tensor]:
        made = x * y
        if program.recording():
            raise torch.OutOfMemoryError
        return [made]

    results, repeat = record(function, (x, y))
    assert repeat is None and results[0] is not None and same_bytes(results[0], x * y)
