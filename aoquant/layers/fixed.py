"""Fixed weights: several calls with one set of weights, each side of which is encoded once.

Between two optimizer steps the weights of a model stay what they are, and so do their codes. Inside
`fixed_weights(model)` a prepared layer keeps what it made of its weight: the rows that the forward multiplies, and the
columns that the gradient of the input reads. Nothing else changes, so every result has the bits that it has without.
Sides that are drawn at random are drawn anew each time.

Without gradients a layer is then what convert would make of it: codes, and a recipe that stays. So it multiplies by a
`BoundWeight` of these codes, as the converted layer does, and a call costs the host as little.

A weight that is written inside the block raises: PyTorch counts a version for each in-place operation, and
`weight.data = new` gives it another storage. Two writers move no version: a fused optimizer, and FSDP2 when it gathers
a weight into the memory of the last one. So a step of an optimizer counts as a write of each of its weights that has a
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

from aoquant._messages import check_model
from aoquant.formats import Encoded
from aoquant.layers import held
from aoquant.layers.bound import BoundWeight
from aoquant.layers.function import codes
from aoquant.layers.qat import QATLinear
from aoquant.parallel import fsdp
from aoquant.parallel.gathered import GatheredWeight


class Seen:
    """A tensor that codes were made of, and what changes with a write. The address of memory says nothing: FSDP2 frees
    and takes it around each use.
    """

    def __init__(self, t: Tensor) -> None:
        self._tensor, self._version = weakref.ref(t), t._version
        self._storage = StorageWeakRef(t.untyped_storage())  # held, so that its number is no other storage's
        self._offset, self._stride = t.storage_offset(), t.stride()

    def is_still(self, t: Tensor | None) -> bool:
        return (
            t is not None
            and self._tensor() is t
            and self._version == t._version
            and self._storage.cdata == t.untyped_storage()._cdata
            and self._offset == t.storage_offset()
            and self._stride == t.stride()
        )

    @property
    def tensor(self) -> Tensor | None:
        return self._tensor()


class FixedWeight:
    """Codes of one layer's weight, made when they are first read. A copy of the layer is outside of the block."""

    def __init__(self, layer: QATLinear) -> None:
        self._layer, self._fqn = weakref.ref(layer), layer.prepared.fqn
        self._weight: Seen | None = None
        self._scales: list[Seen] = []  # that the layer holds for it
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

    @property
    def of_this_call(self) -> FixedWeight | None:
        """This; or None for a call that encodes as usual, for one of two reasons.

        - Its codes would serve this call alone: an adapter merges the weight, a parametrisation computes it, or
          `functional_call` gives it.
        - Nothing would tell that they are old: a weight made in inference mode counts no writes, and delayed scales
          move with every backward.
        """
        w = self._owner._parameters.get("weight")
        watched = isinstance(w, nn.Parameter) and not w.is_inference() and not self._owner.prepared.recipe.history
        return self if watched else None

    def rows(self, encode: Callable[[], Encoded]) -> Encoded:
        """The codes that forward multiplies: `encode()`, the first time.

        Raises:
            ValueError: the layer's weight, or a scale of it, is not what it was then.
        """
        w = self._owner.weight
        whole = w if w._base is None else w._base
        if self._rows is None:
            with torch.inference_mode(False), torch.no_grad():  # a training step may read them too
                self._weight, self._scales, self._rows = Seen(whole), list(map(Seen, self._held())), encode()
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
            return None  # sharded or gathered; or the input's scales are read in each call
        if self._bound is None:
            e = self.rows(partial(codes, layer.matrix(), recipe.fprop_weight, layer.held_scales("weight")))
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
        if self._weight is None or not self._is(self._weight.tensor):
            raise ValueError(f"{self._fqn or 'linear'}: {_CHANGED}")
        if dtype not in self._columns:
            self._columns[dtype] = encode()
        return self._columns[dtype]

    def _held(self) -> list[Tensor]:
        """What else the layer holds for the weight: learned or static scales, a fitted transform."""
        recipe = self._owner.prepared.recipe
        if recipe.weight_scales == "dynamic" and not recipe.fitted:
            return []
        return [t for t in held.read(self._owner, "weight") if t is not None]

    def _is(self, whole: Tensor | None) -> bool:
        """Whether `whole` is the weight that was encoded, and neither it nor its scales were written since."""
        if self._weight is None or not self._weight.is_still(whole):
            return False
        return not self._scales or all(seen.is_still(t) for seen, t in zip(self._scales, self._held(), strict=True))


_CHANGED = (
    "its weight, or a scale of it, changed inside aoquant.fixed_weights(model), which multiplies the codes of the first micro-batch: leave the block "
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
    compiled layers, layers that tensor parallelism or FSDP1 shards, weights that are computed for each call (merged
    adapters, parametrisations) or made in inference mode, and delayed scales encode as usual.

    A model without prepared layers stays as it is: converted ones hold their codes, float ones have none.

    Raises:
        ValueError: `model` is no module; or inside the block, where a weight has changed, naming the layer.
    """
    check_model(model)
    layers = [m for m in model.modules() if isinstance(m, QATLinear) and m.fixed is None and not fsdp.is_flattened(m)]
    layers = [m for m in layers if not isinstance(m.weight, GatheredWeight)]  # codes already
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
