"""Fixed weights: several micro-batches with one set of weights, each side of which is encoded once.

Between two optimizer steps the weights of a model stay what they are, and so do their codes. Inside
`fixed_weights(model)` a prepared layer keeps what it made of its weight: the rows that the forward multiplies, and the
columns that the gradient of the input reads. Nothing else changes, so every result has the bits that it has without.
Sides that are drawn at random are drawn anew each time.

A weight that is written inside the block raises: PyTorch counts a version for each in-place operation, and
`weight.data = new` gives it another storage. Fused optimizers do not move that version, nor does FSDP2 when it gathers
a weight into the memory of the last one, so a step of an optimizer counts as a write of every weight of its that has a
gradient. Writes in place that PyTorch does not count (`weight.data.mul_(2)`, through NumPy or a raw pointer, or to
FSDP2's shards) are not seen: only a pass over the weight could find them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from aoquant.formats import Encoded
from aoquant.parallel import fsdp

if TYPE_CHECKING:
    from aoquant.layers.qat import QATLinear  # which imports this module


class _State(NamedTuple):
    """What changes with a write. The address of memory says nothing: FSDP2 frees and takes it around each use."""

    version: int
    storage: StorageWeakRef
    offset: int
    stride: tuple[int, ...]

    @classmethod
    def of(cls, w: Tensor) -> _State:
        version = 0 if w.is_inference() else w._version
        return cls(version, StorageWeakRef(w.untyped_storage()), int(w.storage_offset()), w.stride())


class FixedWeight:
    """Codes of one layer's weight, made when they are first read.

    fqn: the layer's name, for errors.
    """

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn
        self._weight: weakref.ref[Tensor] | None = None
        self._state: _State | None = None
        self._rows: Encoded | None = None
        self._columns: dict[torch.dtype, Encoded] = {}

    def rows(self, w: Tensor, encode: Callable[[], Encoded]) -> Encoded:
        """The codes that forward multiplies: `encode()`, the first time.

        Raises:
            ValueError: w is not what it was then.
        """
        whole = w if w._base is None else w._base
        if self._rows is None:
            self._rows, self._weight, self._state = encode(), weakref.ref(whole), _State.of(whole)
        elif self._weight is None or self._weight() is not whole or self._state != _State.of(whole):
            raise ValueError(_CHANGED)
        return self._rows

    def written(self) -> None:
        """The weight is another one from now on, whatever its version says."""
        self._weight = None

    def columns(self, dtype: torch.dtype, encode: Callable[[], Encoded]) -> Encoded:
        """The codes that the gradient of the input reads, for gradients of `dtype`: `encode()`, the first time.

        Raises:
            ValueError: the weight is not what forward encoded, naming the layer.
        """
        whole = None if self._weight is None else self._weight()
        if whole is None or self._state != _State.of(whole):
            raise ValueError(f"{self._fqn or 'linear'}: {_CHANGED}")
        if dtype not in self._columns:
            self._columns[dtype] = encode()
        return self._columns[dtype]


_CHANGED = (
    "its weight changed inside aoquant.fixed_weights(model), which multiplies the codes of the first micro-batch: leave the block "
    "before optimizer.step() and before loading weights"
)


@contextmanager
def fixed_weights(model: nn.Module) -> Iterator[None]:
    """Encode each side of the weights of `model`'s prepared linear layers once inside the block: for micro-batches.

        with aoquant.fixed_weights(model):
            for batch in micro_batches:
                loss(model, batch).backward()
        optimizer.step()

    The codes live until the block ends: as much memory as the packed model, once for each side. Stacked experts,
    compiled layers, and layers that tensor parallelism or FSDP1 shards encode as usual.

    Raises:
        ValueError: inside the block, where a weight has changed, naming the layer.
    """
    from aoquant.layers.qat import QATLinear

    layers = [m for m in model.modules() if isinstance(m, QATLinear) and m.fixed is None and not fsdp.is_flattened(m)]
    for layer in layers:
        layer.fixed = FixedWeight(layer.prepared.fqn)

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        written = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for layer, weight in _weights(model, layers):
            if id(weight) in written and layer.fixed is not None:
                layer.fixed.written()

    steps = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        steps.remove()
        for layer in layers:
            layer.fixed = None


def _weights(model: nn.Module, layers: list[QATLinear]) -> Iterator[tuple[QATLinear, Tensor]]:
    """Each layer with its weight, and with the shard of it that an optimizer has under FSDP2."""
    yield from ((layer, layer.weight) for layer in layers)
    ids = {id(layer) for layer in layers}
    for _, p in fsdp.sharded_parameters(model):
        for module in (p._module_info.module, *p._module_info.shared_modules):
            if id(module) in ids:
                yield module, p.sharded_param
