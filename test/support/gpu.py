"""What tests on a GPU share: layers of a recipe, steps that may not wait, CUDA graphs, launches, bounds of sums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aoquant import QATConfig, quantize_
from aoquant.formats import Encoded, Format
from aoquant.integrations import losses
from aoquant.recipes import get_recipe

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.device("cuda")


def prepared(
    recipe: str, n: int = 512, k: int = 1024, *, bias: bool = True, dtype: torch.dtype = BF16
) -> nn.Sequential:
    """Return one prepared layer, with the same weights in every test."""
    torch.manual_seed(n + k)
    model = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype, device=CUDA))
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    return model


def rows(m: int, k: int = 1024, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Return (m, k) normal values, equal in every test."""
    return torch.randn(m, k, dtype=dtype, device=CUDA, generator=torch.Generator("cuda").manual_seed(seed))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise inside the block where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return a device on which Triton computes the losses: CUDA, or the CPU by Triton's interpreter. A fixture."""
    if (device.type == "cpu") != (os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("TRITON_INTERPRET=1, with Triton installed, runs the kernel on the CPU and there alone")
    if device.type == "cpu":
        monkeypatch.setattr(losses, "has_triton", lambda _: True)
    return device


class LateResult:
    """Stand, on a CPU, for the event behind which a GPU has written a result: it is there when someone waits."""

    made = waited_behind_another = 0  # how many there were; and whose waiting began when a later one was made

    def __init__(self, result: Tensor) -> None:
        LateResult.made += 1
        self.number, self.result, self.here = LateResult.made, result.clone(), torch.full_like(result, torch.nan)

    def synchronize(self) -> None:
        self.here.copy_(self.result)
        LateResult.waited_behind_another += LateResult.made > self.number

    @classmethod
    def to_host(cls, t: Tensor) -> tuple[Tensor, LateResult]:
        """Stand for `finetune._to_host`."""
        written = cls(t)
        return written.here, written


def warmed(call: Callable[[], Any], times: int = 1) -> None:
    """Run `call` on a stream beside the current one, as CUDA wants it before a capture: it compiles and allocates."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def captured(call: Callable[[], Any], times: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record `call`, which has run `times` before; return the graph and the results that a replay writes."""
    warmed(call, times)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def launched(call: Callable[[], Any]) -> list[str]:
    """Return the names of the kernels of a call, without what this suite fills torch.empty with."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if "Fill" not in name]


def assert_within(
    y: Tensor, x: Tensor, values_NK: Tensor, bias: Tensor | None = None, *, sums: int = 24, room: float = 2.0**-6
) -> None:
    """Compare y with the exact product of x and the float64 values (operand times alpha).

    Bound of an element: each product and each of K / 16 + `sums` sums is truncated to 25 bits of the largest, and y is
    rounded once; `room` is relative.
    """
    k = values_NK.shape[1]
    exact, magnitude = x.double() @ values_NK.t(), x.double().abs() @ values_NK.abs().t()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    slack = magnitude * (k / 16 + sums) * 2.0**-23 + exact.abs() * torch.finfo(y.dtype).eps / 2
    assert ((y.double() - exact).abs() <= slack * (1 + room) + torch.finfo(y.dtype).tiny).all()


def ends_of(sizes: tuple[int, ...]) -> Tensor:
    """Return where each expert's rows end."""
    return torch.tensor(sizes, device=CUDA).cumsum(0).to(torch.int32)


def rows_of_experts(sizes: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Yield each expert and its rows."""
    start = 0
    for expert, size in enumerate(sizes):
        yield expert, slice(start, start + size)
        start += size


def check_experts(
    product: Callable[[Tensor], Tensor], format: Format, experts: Sequence[Encoded], sizes: tuple[int, ...], behind: int
) -> tuple[Tensor, Tensor]:
    """Check a product of rows with their experts, and return the one-hot and the random rows that it was given.

    One-hot rows give the operand to the bit, random rows lie within the bound, and rows of no expert are zero.
    """
    s, k = sum(sizes) + behind, experts[0].k
    column = torch.randint(0, k, (s,), device=CUDA)
    eye, x = torch.nn.functional.one_hot(column, k).to(BF16), torch.randn(s, k, device=CUDA).to(BF16)
    y_eye, y = product(eye), product(x)
    for e, at in rows_of_experts(sizes):
        if at.start == at.stop:
            continue
        values, alpha = format.operand(experts[e], BF16), format.alpha(experts[e])
        by = torch.ones(1, 1, device=CUDA) if alpha is None else alpha
        assert torch.equal(y_eye[at], (values[:, column[at]].t().float() * by.t()).to(BF16))
        assert_within(y[at], x[at], values.double() * by.double(), room=0)
    assert torch.count_nonzero(y[sum(sizes) :]) == torch.count_nonzero(y_eye[sum(sizes) :]) == 0
    return eye, x
