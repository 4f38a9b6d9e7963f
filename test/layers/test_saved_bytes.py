"""What forward keeps for backward: never more than nn.Linear's for weights alone, packed codes and scales for
activations.

Two meters. `saved` counts the storages that reach autograd's saved-tensor hooks, which a compiled graph's go through as
well. `alive` counts, after an eager forward, the storages made in it that still live: activation checkpointing hides
what it keeps from the hooks of others. Parameters are not counted, and each storage once.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.linear_cases import AOQUANT_CASES, BF16, BY_NAME, TORCHAO_CASES, Case, data, layer, prepared
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

ROWS, K, N = 96, 192, 64  # divisible by every block, and by torch._scaled_mm's 16

Run = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _key(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _input(dtype: torch.dtype = BF16, k: int = K) -> Tensor:
    # not a leaf, as in a model: nobody else holds it
    return data("normal", ROWS, k, dtype, 1).requires_grad_() * 1


def saved(module: nn.Module, run: Run, x: Tensor) -> int:
    """Bytes that reach the saved-tensor hooks during `run(x)`."""
    own = {_key(p) for p in module.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # a storage that dies would give its address to another

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        if _key(t) not in own:
            sizes[_key(t)] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(x)
    y.float().sum().backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad), "backward did not run"
    module.zero_grad()
    return sum(sizes.values())


def alive(module: nn.Module, run: Run, x: Tensor) -> int:
    """Bytes made during `run(x)`, or its input, that live on after it while its output does, without the output."""
    own = {_key(p) for p in module.parameters()}
    made: list[tuple[weakref.ref[Any], int, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    made.append((_StorageRef(t), _key(t), t.untyped_storage().nbytes()))
            return out

    key, nbytes, ref = _key(x), x.untyped_storage().nbytes(), _StorageRef(x)
    box = [x]
    del x
    with Watch():
        y = run(box.pop())
    made.append((ref, key, nbytes))
    gc.collect()
    sizes = {k: n for r, k, n in made if not r.expired() and k not in own and k != _key(y)}
    y.float().sum().backward()
    module.zero_grad()
    return sum(sizes.values())


class _StorageRef:
    """A weak reference to a tensor's storage, which autograd's saved variables keep and Python does not see."""

    def __init__(self, t: Tensor) -> None:
        self.ref = torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage())

    def expired(self) -> bool:
        return bool(self.ref.expired())


def linear(n: int = N, k: int = K, dtype: torch.dtype = BF16) -> nn.Linear:
    return nn.Linear(k, n, dtype=dtype)


def qat(name: str, n: int = N, k: int = K) -> nn.Linear:
    case = replace(BY_NAME[name], n=n, k=k)
    return prepared(case, layer(case, BF16))


WEIGHT_ONLY = [
    c.name for c in (*AOQUANT_CASES, *TORCHAO_CASES) if not c.variant and not re.search(r"act|ao\.mx|-h\d", c.name)
]
# bytes for each element of the input: codes, and scales of 1 / 16 or 1 / 32 byte, or 4 or 2 bytes a row
ACTIVATIONS = {
    "nvfp4-act": 0.5 + 1 / 16 + 4 / K,
    "nvfp4-static-act": 0.5 + 1 / 16,
    "mxfp4-act": 0.5 + 1 / 32,
    "mxfp8-act": 1 + 1 / 32,
    "fp8-row-act": 1 + 4 / K,
    "fp8-tensor-act": 1.0,
    "int8-row-act": 1 + 4 / K,
    "int8-row-asymact": 1 + 5 / K,
    "int4-int8act": 1 + 4 / K,
    "ao.int8act-intx4-g32": 1 + 3 / K,
    "ao.int8act-int8-row": 1 + 4 / K,
    "ao.fp8act-fp8-row": 1 + 4 / K,
    "ao.mxfp4-rceil": 0.5 + 1 / 32,
    "nvfp4-h16": 0.5 + 1 / 16 + 4 / K,
    "nvfp4-h64-signs": 0.5 + 1 / 16 + 4 / K,
    "nvfp4-h16-weight": 2.0,  # the transformed input instead of the input
    "mxfp4-h32": 0.5 + 1 / 32,
}
PER_TENSOR = 8  # bytes of scales that are one a tensor: NVFP4's outer scale


def budget(name: str) -> float:
    return ACTIVATIONS[name] * ROWS * K + PER_TENSOR


def test_meters_read_what_nn_linear_keeps() -> None:
    """Its input, both ways; and a layer that keeps a second copy is seen."""
    plain, x_bytes = linear(), ROWS * K * 2
    assert saved(plain, plain, _input()) == x_bytes
    assert saved(plain, torch.compile(plain, fullgraph=True), _input()) == x_bytes
    assert alive(plain, plain, _input()) == x_bytes
    double = nn.Sequential(linear(), nn.Sigmoid())
    assert saved(double, double, _input()) == alive(double, double, _input()) + ROWS * N * 2  # Sigmoid keeps its output


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weight_only_keeps_what_nn_linear_keeps(name: str) -> None:
    module = qat(name)
    assert module.prepared.recipe.fprop_input is None
    assert saved(module, module, _input()) == ROWS * K * 2
    assert alive(module, module, _input()) == ROWS * K * 2


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantised_activations_keep_packed_codes_only(name: str) -> None:
    module = qat(name)
    for bytes_ in (saved(module, module, _input()), alive(module, module, _input())):
        assert 0.5 * ROWS * K <= bytes_ <= budget(name), f"{bytes_ / (ROWS * K):.3f} bytes an element"


@pytest.mark.parametrize(
    "name",
    [
        "int4-g32",
        "nvfp4-act",
        "fp8-row-act",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("nvfp4-dynamic", "mxfp8-act", "int8-row-act", "ao.int8act-intx4-g32")
        ),
    ],
)
def test_compiled_keeps_no_more(name: str) -> None:
    """The partitioner could keep the weight's codes, or a decoded operand: there are none to keep outside the ops."""
    module = qat(name)
    bytes_ = saved(module, torch.compile(module, fullgraph=True), _input())
    assert bytes_ <= (budget(name) if name in ACTIVATIONS else ROWS * K * 2), (
        f"{bytes_ / (ROWS * K):.3f} bytes an element"
    )
    assert bytes_ > 0


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act", "fp8-row-act", "int8-row-act"])
def test_checkpointed_keeps_what_nn_linear_keeps(name: str, reentrant: bool) -> None:
    """Only the block's input, whatever the block computes."""

    def block(first: nn.Linear, second: nn.Linear) -> tuple[nn.Module, Run]:
        both = nn.Sequential(first, nn.ReLU(), second)
        return both, lambda x: checkpoint(both, x, use_reentrant=reentrant)

    want = alive(*block(linear(), linear(K, N)), _input())
    assert want == ROWS * K * 2
    assert alive(*block(qat(name), qat(name, K, N)), _input()) == want


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4-act",
        pytest.param("int4-g32", marks=pytest.mark.slow),
        pytest.param("fp8-row-act", marks=pytest.mark.slow),
    ],
)
def test_compiled_and_checkpointed_keeps_what_nn_linear_keeps(name: str) -> None:
    def measure(first: nn.Linear, second: nn.Linear) -> int:
        torch._dynamo.reset()
        both = nn.Sequential(first, nn.ReLU(), second)

        def run(x: Tensor) -> Tensor:
            return checkpoint(both, x, use_reentrant=False)

        return saved(both, torch.compile(run, fullgraph=True), _input())

    want = measure(linear(), linear(K, N))
    assert want == ROWS * K * 2
    assert measure(qat(name), qat(name, K, N)) <= want


def test_clipped_straight_through_adds_one_bit_an_element() -> None:
    case = replace(BY_NAME["nvfp4-act"], n=N, k=K)
    module = prepared(case, layer(case, BF16), straight_through="clipped")
    assert saved(module, module, _input()) <= budget("nvfp4-act") + ROWS * K / 8


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act"])
def test_frozen_weight_keeps_no_activations(name: str) -> None:
    """dx needs the weight alone, which is a parameter."""
    module = qat(name)
    module.weight.requires_grad_(False)
    assert saved(module, module, _input()) == 0


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act"])
def test_nothing_is_kept_without_gradients(name: str) -> None:
    module = qat(name)
    with torch.no_grad():
        kept: list[Case] = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
            module(data("normal", ROWS, K, BF16))
    assert not kept
