"""Checks that two processes make together: FSDP2, DDP and tensor parallelism of prepared and converted models.

`run(backend, device)` starts the processes once, lets them make every check in turn and returns what went wrong in
each. The checks know a device and a mesh, nothing else, so gloo on CPUs and NCCL on GPUs make the same ones. "One
process" is the same model, not distributed, computed beside it by every rank: plain tensors, equal on both.

`same` is torch.equal where the arithmetic is the same. A GPU's GEMM may choose another kernel, with another order of
additions, for half of the columns, so there results of GEMMs over random numbers are compared within a bound; integers
are equal everywhere.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import forked
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup

from aoquant import (
    FP8WeightConfig,
    Hadamard,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    quantize_,
)
from aoquant.integrations.distributed import full_state_dict

WORLD = 2
K, HIDDEN, N = 64, 128, 48
BF16, F32 = torch.bfloat16, torch.float32

CONFIGS: dict[str, Any] = {
    "nvfp4": NVFP4WeightConfig(activation="nvfp4"),
    "nvfp4-row": NVFP4WeightConfig(),
    "nvfp4-h16": NVFP4WeightConfig(transform=Hadamard(16, 0xA5C3)),
    "fp8-row": FP8WeightConfig(),
    "fp8-tensor": FP8WeightConfig(granularity="tensor", activation="fp8-tensor"),
    "int8-tensor": Int8WeightConfig("tensor", activation="int8-row-asym"),
    "mxfp4": MXFP4WeightConfig(),
    "int4-g32": Int4WeightConfig(32),
    "intx3-row": IntxWeightConfig(3, None, activation="intx8-row-asym"),
    "ao.int8act-intx4": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
}
DTYPES = {"bf16": BF16, "f32": F32}


@dataclass(frozen=True)
class Ranks:
    """Where a check runs. directory: one for both ranks."""

    device: str
    rank: int
    mesh: DeviceMesh
    directory: Path

    def same(self, got: Tensor, want: Tensor, what: str = "") -> None:
        """Equal, and on a GPU, where another shape may be another kernel, equal to a few roundings."""
        if self.device == "cpu" or not want.numel():
            equal(got, want, what)
        else:
            close(got, want, what, 4)

    def half(self, t: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of a tensor."""
        return t.chunk(WORLD, dim)[self.rank]


def equal(got: Any, want: Any, what: str = "") -> None:
    got, want = (t.full_tensor() if isinstance(t, DTensor) else t for t in (got, want))
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    )
    off = int((got != want).sum())
    assert not off, f"{what}: {off} of {got.numel()} differ, by up to {(got.double() - want.double()).abs().max():.3g}"


def close(got: Tensor, want: Tensor, what: str, roundings: float) -> None:
    """Within so many roundings of the largest value; two results that differ in the order of additions alone."""
    unit = torch.finfo(want.dtype).eps * float(want.detach().abs().max())
    error = float((got.detach().double() - want.detach().double()).abs().max())
    assert error <= roundings * unit, f"{what}: off by {error:.3g}, {error / unit:.2f} roundings"


def raises(call: Callable[[], Any], *words: str) -> None:
    message = "nothing was raised"
    try:
        call()
    except ValueError as error:
        message = str(error)
    missing = [w for w in words if w not in message]
    assert not missing, f"the message lacks {missing}: {message}"


class MLP(nn.Module):
    """norm, up, activation, down: what tensor and sequence parallelism are made for."""

    def __init__(self, dtype: torch.dtype, device: str, k: int = K, hidden: int = HIDDEN, n: int = N) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(k, dtype=dtype, device=device)
        self.up = nn.Linear(k, hidden, dtype=dtype, device=device)
        self.act = nn.ReLU()
        self.down = nn.Linear(hidden, n, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


def mlp(c: Ranks, dtype: torch.dtype) -> MLP:
    """Equal on all ranks; the largest weights are in one shard alone."""
    g = torch.Generator().manual_seed(0)
    model = MLP(dtype, c.device)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.2 if p.ndim == 2 else 1))
            if p.ndim == 2:
                p[0, -1], p[-1, 0] = 5, -4
    return model


def integer_mlp(c: Ranks, low: int, high: int) -> MLP:
    """Weights are integers, every 32 of them in a row with the same extremes; no norm."""
    model, g = MLP(F32, c.device), torch.Generator().manual_seed(0)
    model.norm = nn.Identity()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-1, 2, p.shape, generator=g))
            if p.ndim == 2:
                p[:, ::32], p[:, 1::32] = low, high
    return model


def batch(c: Ranks, dtype: torch.dtype, seed: int = 1, rows: int = 6) -> Tensor:
    x = torch.randn(2, rows, K, generator=torch.Generator().manual_seed(seed))
    x[0, 0, 0], x[1, 2] = 9, 0  # an outlier in one half, and a padding token
    return x.to(c.device, dtype)


def prepare(model: nn.Module, config: Any) -> nn.Module:
    quantize_(model, QATConfig(config))
    return model


def two_of(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def tensor_parallel(c: Ranks, model: nn.Module, **options: Any) -> nn.Module:
    return parallelize_module(model, c.mesh, {"up": ColwiseParallel(**options), "down": RowwiseParallel()})


def sequence_parallel(c: Ranks, model: nn.Module) -> nn.Module:
    """Cut tokens for the norm, gather them before up and scatter them after down."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, c.mesh, plan)
    tokens = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    return parallelize_module(model, c.mesh, tokens)


def replicate(c: Ranks, *layers: nn.Module) -> None:
    """Make DTensors of the layers' parameters, whole on every rank."""
    for layer in layers:
        for name, p in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(p, c.mesh, [Replicate()])))


def gradients(one: nn.Module, two: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, two's and one's gradient of every parameter, gathered."""
    for (key, p1), p2 in zip(one.named_parameters(), two.parameters(), strict=True):
        assert p1.grad is not None and p2.grad is not None, key
        yield key, full(p2.grad), full(p1.grad)


def same_parameters(one: nn.Module, two: nn.Module, what: str = "") -> None:
    for (key, p1), p2 in zip(one.named_parameters(), two.parameters(), strict=True):
        equal(full(p2.detach()), full(p1.detach()), f"{what} {key}")


def converts(c: Ranks, one: nn.Module, two: nn.Module, x: Tensor, want: Tensor | None, what: str = "converted") -> None:
    """Convert both: two, sharded, computes `want` where that is given, and gathered it is one."""
    for model in (two, one):
        quantize_(model, QATConfig(step="convert"))
    with torch.no_grad():
        c.same(two(x), one(x), what) if want is None else equal(two(x), want, what)
    same_state(full_state_dict(two), one.state_dict())


def trace(model: nn.Module, names: tuple[str, ...] = ("up", "down")) -> dict[str, Tensor]:
    """Inputs and outputs of those layers in the next forward, as they enter and leave forward itself."""
    seen: dict[str, Tensor] = {}

    def hook(name: str, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        seen[f"{name}.x"], seen[f"{name}.y"] = args[0], y

    for name in names:
        model.get_submodule(name).register_forward_hook(functools.partial(hook, name), prepend=True)
    return seen


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def same_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """State dicts of equal keys, tensor classes and bytes."""
    assert list(got) == list(want)
    for key, a in got.items():
        b = want[key]
        assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape, f"{key}: {a} and {b}"
        names, attributes = a.__tensor_flatten__() if hasattr(a, "__tensor_flatten__") else ([], None)
        assert not names or (names, attributes) == b.__tensor_flatten__(), key
        for x, y in [(getattr(a, n), getattr(b, n)) for n in names] or [(a, b)]:
            assert x.dtype == y.dtype and x.shape == y.shape, key
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), key


def shard(c: Ranks, model: nn.Module, *, leaves: bool = False, **options: Any) -> nn.Module:
    """Block by block; leaves: the linear layers themselves too, whose class FSDP then swaps."""
    for module in (model.up, model.down) if leaves else ():
        fully_shard(module, mesh=c.mesh, **options)
    return fully_shard(model, mesh=c.mesh, **options)


def train(
    c: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, *, own: bool = True
) -> list[Tensor]:
    """Each rank its own batch, or all the same; returns this rank's outputs."""
    outputs = []
    for step in range(first, first + steps):
        y = model(batch(c, BF16, seed=10 * step + c.rank * own))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach())
    return outputs


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)


CHECKS: dict[str, Callable[[Ranks], None]] = {}
SLOW: set[str] = set()


def check(*cases: Any, slow: tuple[Any, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a check, once per case; `slow` cases are left to the wide sweep."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        for case in (*cases, *slow) or ((),):
            arguments = case if isinstance(case, tuple) else (case,)
            name = "-".join((function.__name__, *(str(a) for a in arguments)))
            CHECKS[name] = lambda c, f=function, a=arguments: f(c, *a)
            if case in slow and case not in cases:
                SLOW.add(name)
        return function

    return enter


def run(backend: str, device: str, directory: Path, names: Sequence[str]) -> dict[str, str]:
    """Name of each of these checks that both ranks reached -> "" or what went wrong, on which rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # a rank that dies takes what it would have checked with it: those results are missing
    with contextlib.suppress(mp.ProcessRaisedException, mp.ProcessExitedException):
        arguments = (backend, device, port, str(directory), tuple(names))
        mp.start_processes(_process, arguments, WORLD, start_method=forked.METHOD if device == "cpu" else "spawn")
    ranks = [json.loads(_results(directory, rank).read_text()) for rank in range(WORLD)]
    return {name: "\n".join(filter(None, (r[name] for r in ranks))) for name in ranks[0] if name in ranks[1]}


def _results(directory: Path, rank: int) -> Path:
    return directory / f"results-{rank}.json"


def _process(rank: int, backend: str, device: str, port: int, directory: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # poisons torch.empty, see test/conftest.py
    if device == "cuda":
        torch.cuda.set_device(rank)
    patience = timedelta(seconds=30 if device == "cpu" else 120)  # for the other process, which may compile a kernel
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD, timeout=patience
    )
    from support import distributed_checks  # the modules that enter the checks import this one

    assert distributed_checks.CHECKS is CHECKS
    c = Ranks(device, rank, init_device_mesh(device, (WORLD,)), Path(directory))
    results: dict[str, str] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            CHECKS[name](c)
            results[name] = ""
        except BaseException:  # DCP's CheckpointException is no Exception
            results[name] = f"rank {rank}: {traceback.format_exc()}"
        _results(c.directory, rank).write_text(json.dumps(results))
    dist.destroy_process_group()
