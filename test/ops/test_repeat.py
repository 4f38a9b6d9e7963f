"""Calls of a function that are alike run its kernels alone; others run the function, with the same results."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.bits import same_bytes
from support.cpu_library import with_step_library
from torch import Tensor

from aoquant.ops import native_step, program, repeat
from aoquant.ops.repeat import Repeats


@pytest.fixture(autouse=True, params=["python", "csrc"])
def repeated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Repeat calls on CPUs, too, with and without csrc's library."""
    monkeypatch.setattr(repeat, "FIRST_DEVICE", -1)
    if request.param == "python":
        monkeypatch.setattr(native_step, "why_not", lambda: "not asked for")
    with torch.no_grad():
        if request.param == "python":
            yield request.param
        else:
            for _ in with_step_library():
                yield request.param


def product(x: Tensor, y: Tensor, bias: Tensor | None = None) -> list[Tensor | None]:
    made = torch.mm(x, y.t())
    return [None, made if bias is None else made + bias, made[1:]]


class Counted:
    """Count how often a function runs."""

    def __init__(self, function: Callable[..., Sequence[Tensor | None]] = product) -> None:
        self.function, self.repeats, self.runs = function, Repeats(), 0

    def __call__(self, *arguments: Tensor | None, how: str = "") -> Sequence[Tensor | None]:
        return self.repeats(lambda: self._run(*arguments), arguments, how)

    def _run(self, *arguments: Tensor | None) -> Sequence[Tensor | None]:
        self.runs += not program.recording()
        return self.function(*arguments)

    def is_repeated(self, *arguments: Tensor | None, how: str = "") -> bool:
        """Call it and compare the results; return whether the function did not run."""
        before, want = self.runs, self.function(*arguments)
        assert all(map(same_bytes, self(*arguments, how=how), want))
        return self.runs == before


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape or (4, 8)), torch.randn(shape or (4, 8))


def unaligned(*shape: int) -> Tensor:
    return torch.randn(1 + torch.Size(shape).numel())[1:].view(shape)


def other_calls() -> dict[str, Any]:
    (x, y), bias = pair(), torch.randn(4)
    return {
        "another shape": ((x[:2].clone(), y), ""),
        "another layout": ((x.t().contiguous().t(), y), ""),
        "another dtype": ((x.double(), y.double()), ""),
        "an address between": ((unaligned(4, 8), y), ""),
        "one tensor twice": ((x, x), ""),
        "an argument more": ((x, y, bias), ""),
        "none for an argument": ((x, y, None), ""),
        "another key": ((x, y), "other"),
        "a subclass": ((x.as_subclass(Marked), y), ""),
        "yet to be negated": ((x, torch.randn(4, 8, dtype=torch.complex64).conj().imag), ""),
    }


NEVER_REPEATED = ("an address between", "one tensor twice", "a subclass", "yet to be negated")


class Marked(Tensor):
    pass


def test_the_third_call_of_a_kind_does_not_run_the_function(repeated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth does not look for its program in Python either, where the library is."""
    call = Counted()
    for _ in range(2):
        assert call(*pair()) is not None
    assert call.is_repeated(*pair())
    looked, real = list[Any](), Repeats._kind
    monkeypatch.setattr(Repeats, "_kind", lambda *args: looked.append(args) or real(*args))
    for _ in range(2):
        assert call.is_repeated(*pair())
    assert len(looked) == (0 if repeated == "csrc" else 2)


@pytest.mark.parametrize("what", other_calls())
def test_calls_that_differ_share_no_program(what: str) -> None:
    call = Counted()
    for _ in range(4):
        call(*pair())
    arguments, how = other_calls()[what]
    assert not call.is_repeated(*arguments, how=how)
    again = [call.is_repeated(*arguments, how=how) for _ in range(4)]
    assert again[2:] == [what not in NEVER_REPEATED] * 2
    assert call.is_repeated(*pair())


def test_each_layout_keeps_its_own_program() -> None:
    call, shapes = Counted(), [(4, 8), (2, 8), (4, 16), (8, 4)]
    for _ in range(3):
        for shape in shapes:
            call(*pair(*shape))
    assert all(call.is_repeated(*pair(*shape)) for shape in shapes * 2)


def test_an_error_is_the_functions_own() -> None:
    limit = torch.tensor([3])

    def function(x: Tensor) -> list[Tensor | None]:
        return [torch.index_select(x, 0, limit)]

    call = Counted(function)
    for _ in range(4):
        call(torch.randn(4, 8))
    limit.fill_(9)
    with pytest.raises(IndexError):
        call(torch.randn(4, 8))
    limit.fill_(1)
    assert call.is_repeated(torch.randn(4, 8))


@pytest.mark.parametrize("repeated", ["csrc"], indirect=True)
@pytest.mark.usefixtures("repeated")
def test_programs_go_with_what_repeats_them() -> None:
    call = Counted()
    for _ in range(4):
        call(*pair())
    (family,) = call.repeats._families.values()
    (kind,) = call.repeats.kinds.values()
    number, run, native = family.number, family.run, kind.program.native
    assert run(number, pair())[1] == native
    assert run(number + 1000, pair())[1] == run(number, [])[1] == run(number, pair()[:1])[1] == -1
    for tensors, program_number in ((pair()[:1], native), ([], native), (pair(), native + 1000)):
        with pytest.raises(RuntimeError, match="program"):
            family._bind(number, program_number, tensors)
    del call, family, kind
    gc.collect()
    assert run(number, pair()) == ([], -1)
    with pytest.raises(RuntimeError, match=f"no program {native}"):
        native_step.operator("program_run")(native, pair())


def test_a_call_inside_a_recording_is_not_recorded_by_itself() -> None:
    inner = Counted()
    outer = Counted(lambda x, y: [inner(x, y)[1]])
    for _ in range(3):
        outer(*pair())
    assert outer.is_repeated(*pair()) and not any(kind.program is repeat.NEVER for kind in inner.repeats.kinds.values())
    for _ in range(2):
        inner(*pair())
    assert inner.is_repeated(*pair())
