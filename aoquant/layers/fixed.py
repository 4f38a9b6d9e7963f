"""Fixed weights: several calls with one set of weights, each side of which is encoded once.

Between two optimizer steps the weights of a model stay what they are, and so do their codes. Inside
`fixed_weights(model)` a prepared layer keeps what it made of its weight: the rows that the forward multiplies, and the
columns that the gradient of the input reads. Nothing else changes, so every result has the bits that it has without.
Sides that are drawn at random are drawn anew each time.

Without gradients a layer is then what convert would make of it: codes, and a recipe that stays. So it multiplies by a
`BoundWeight` of these codes, as the converted layer does, and a call costs the host as little.

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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from aoquant import ops
from aoquant.formats import Encoded
from aoquant.layers.bound import BoundWeight
from aoquant.layers.qat import QATLinear
from aoquant.parallel import fsdp


class _State:
    """What changes with a write. The address of memory says nothing: FSDP2 frees and takes it around each use."""

    def __init__(self, w: Tensor) -> None:
        self._version = _version(w)
        self._storage = StorageWeakRef(w.untyped_storage())  # held, so that its number is no other storage's
        self._offset, self._stride = w.storage_offset(), w.stride()

    def is_of(self, w: Tensor) -> bool:
        return (
            self._version == _version(w)
            and self._storage.cdata == w.untyped_storage()._cdata
            and self._offset == w.storage_offset()
            and self._stride == w.stride()
        )


def _version(w: Tensor) -> int:
    return 0 if w.is_inference() else w._version


class FixedWeight:
    """Codes of one layer's weight, made when they are first read. A copy of the layer is outside of the block."""

    def __init__(self, layer: QATLinear) -> None:
        self._layer, self._fqn = weakref.ref(layer), layer.prepared.fqn
        self._weight: weakref.ref[Tensor] | None = None
        self._state: _State | None = None
        self._rows: Encoded | None = None
        self._columns: dict[torch.dtype, Encoded] = {}
        self._bound: BoundWeight | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copied and pickled as None."""
        return type(None), ()

    def anew(self) -> FixedWeight:
        """For a layer with another recipe; a backward to come reads what this one has."""
        return FixedWeight(self._owner)

    @property
    def _owner(self) -> QATLinear:
        layer = self._layer()
        assert layer is not None
        return layer

    def rows(self, encode: Callable[[], Encoded]) -> Encoded:
        """The codes that forward multiplies: `encode()`, the first time.

        Raises:
            ValueError: the layer's weight is not what it was then.
        """
        w = self._owner.weight
        whole = w if w._base is None else w._base
        if self._rows is None:
            with torch.inference_mode(False), torch.no_grad():  # a training step may read them too
                self._weight, self._state, self._rows = weakref.ref(whole), _State(whole), encode()
        elif not self._is(whole):
            raise ValueError(_CHANGED)
        return self._rows

    def product(self, x: Tensor) -> Tensor | None:
        """y (..., N) of x (..., K), without gradients, as the converted layer makes it; None for a call that is not
        ordinary.

        Raises:
            ValueError: the layer's weight is not what it was.
        """
        layer = self._owner
        w, recipe = layer._parameters.get("weight"), layer.prepared.recipe
        if type(w) is not nn.Parameter or recipe.fitted or recipe.input_scales != "dynamic":
            return None  # sharded, gathered or parametrised; or the input's scales are read in each call
        if self._bound is None:
            e = self.rows(partial(ops.encode, layer.matrix(), recipe.fprop_weight, layer.held_scales("weight")))
            self._bound = BoundWeight(e.by_row, recipe, w.dtype, None)
        elif not self._is(w if w._base is None else w._base):
            raise ValueError(_CHANGED)
        return self._bound.product(x, layer.bias)

    def written(self) -> None:
        """The weight is another one from now on, whatever its version says."""
        self._weight = None

    def end(self) -> None:
        """Let go of the codes that calls without gradients multiply, now and not at a garbage collection."""
        if self._bound is not None:
            self._bound.end()

    def columns(self, dtype: torch.dtype, encode: Callable[[], Encoded]) -> Encoded:
        """The codes that the gradient of the input reads, for gradients of `dtype`: `encode()`, the first time.

        Raises:
            ValueError: the weight is not what forward encoded, naming the layer.
        """
        whole = None if self._weight is None else self._weight()
        if whole is None or not self._is(whole):
            raise ValueError(f"{self._fqn or 'linear'}: {_CHANGED}")
        if dtype not in self._columns:
            self._columns[dtype] = encode()
        return self._columns[dtype]

    def _is(self, whole: Tensor) -> bool:
        """Whether `whole` is the weight that was encoded, and was not written since."""
        seen, state = self._weight, self._state
        return seen is not None and state is not None and seen() is whole and state.is_of(whole)


_CHANGED = (
    "its weight changed inside aoquant.fixed_weights(model), which multiplies the codes of the first micro-batch: leave the block "
    "before optimizer.step() and before loading weights"
)


@contextmanager
def fixed_weights(model: nn.Module) -> Iterator[None]:
    """Encode each side of the weights of `model`'s prepared linear layers once inside the block: for micro-batches, and
    for `generate` of a model in training, whose layers then multiply as converted ones do.

        with aoquant.fixed_weights(model):
            ids = model.generate(prompts)
            for batch in micro_batches:
                loss(model, batch).backward()
        optimizer.step()

    The codes live until the block ends: as much memory as the packed model, once for each side. Stacked experts,
    compiled layers, and layers that tensor parallelism or FSDP1 shards encode as usual.

    Raises:
        ValueError: inside the block, where a weight has changed, naming the layer.
    """
    layers = [m for m in model.modules() if isinstance(m, QATLinear) and m.fixed is None and not fsdp.is_flattened(m)]
    for layer in layers:
        layer.fixed = FixedWeight(layer)

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
            if layer.fixed is not None:
                layer.fixed.end()
            layer.fixed = None


def _weights(model: nn.Module, layers: list[QATLinear]) -> Iterator[tuple[QATLinear, Tensor]]:
    """Each layer with its weight, the weight's learned scale, and the shard that an optimizer has under FSDP2."""
    for layer in layers:
        yield from ((layer, p) for name, p in layer.named_parameters(recurse=False) if name.startswith("weight"))
    ids = {id(layer) for layer in layers}
    for _, p in fsdp.sharded_parameters(model):
        for module in (p._module_info.module, *p._module_info.shared_modules):
            if id(module) in ids:
                yield module, p.sharded_param
