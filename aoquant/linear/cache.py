"""Cache codes: what was encoded is not encoded again, while what it was made of is the same.

A tensor is the same if it is the same object, at the same version, in the same memory: every in-place operation that
autograd can see moves the version. Two things are remembered here (`mastered.MasterCodes`, which holds the codes of a
float32 master, finds writes by the same `Seen`):

- the codes of an input (`codes_of_input`): layers that read the same one, such as q, k and v or gate and up, encode
  it once and keep it once. Between a layer's forward and its backward autograd keeps the codes of its input. As long
  as it does, another layer takes those codes, and both keep one; here they are weak references. (One exception: where
  autograd keeps the column side alone, or the input itself, the row codes of the latest input are held until it goes.)
- the sides of a weight (`FixedWeight`), inside `aoquant.fixed_weights`.

Without gradients autograd keeps nothing of an input, and a program may write it through `.data`, NumPy or a raw
pointer, which moves no version. So then nothing is shared. With gradients such a write is wrong in any PyTorch program,
since the gradients would be another input's. As a second guard a layer never takes an encoding that it took or made
before: when it comes by again, the input is encoded anew, for the other layers as well.

Nothing is shared while a compiler traces (it removes repeated calls itself), under inference mode, between streams, and
while a CUDA graph is captured, whose memory lives by other rules.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from aoquant import ops
from aoquant.formats import Encoded
from aoquant.linear import held
from aoquant.ops.repeat import PLAIN

_CHANGED = (
    "its weight, or a scale of it, changed inside aoquant.fixed_weights(model), which multiplies the codes of the first micro-batch: leave the block "
    "before optimizer.step() and before loading weights"
)


class InputCodes:
    """Find one encoding of an input, and name the layers that have it, each by the identity of its weight.

    find: returns its four tensors, or None where one of them is gone. It has weak references to them, and the values of
        its single scales; csrc's step library has them of a call that it ran.
    """

    find: Callable[[], Sequence[Tensor | None] | None] | None = None
    k = 0
    layers: frozenset[int] = frozenset()
    held: Encoded | None = None

    def take(self, layer: int) -> Encoded | None:
        """The codes, for one more layer; None when no layer made them, autograd does not keep them, or this layer has
        had them.
        """
        if self.find is None or layer in self.layers or (found := self.find()) is None:
            return None
        self.layers |= {layer}
        return Encoded(*found, self.k)  # type: ignore[call-arg, arg-type]

    def leave(self, encoded: Any, layer: int, kept: bool) -> None:
        """Leave the codes that `layer` made.

        kept: autograd keeps them; otherwise they are held until the input goes, or the next one is encoded.
        """
        global _latest
        if not kept:
            if _latest is not None and (last := _latest()) is not None:
                last.held = None
            self.held, _latest = encoded, weakref.ref(self)
        parts: list[Any] = [TensorWeakRef(encoded.codes)]
        for t in encoded[1:4]:
            parts.append(t if t is None or t.numel() == 1 else TensorWeakRef(t))
        self.find, self.k, self.layers = partial(_alive, parts), encoded.k, frozenset((layer,))


def _alive(parts: Sequence[Any]) -> Sequence[Tensor | None] | None:
    """Return the tensors that `parts` are or refer to; None where one is gone."""
    found = [part() if type(part) is TensorWeakRef else part for part in parts]
    return None if any(t is None and part is not None for t, part in zip(found, parts, strict=True)) else found


class _Input:
    """An input, and its encodings at one version of it."""

    def __init__(self, x: Tensor, key: int) -> None:
        self.ref = weakref.ref(x, lambda _: _inputs.pop(key, None))
        self.version = x._version
        self.encodings: dict[tuple[Any, ...], InputCodes] = {}


_inputs: dict[int, _Input] = {}
_latest: weakref.ref[InputCodes] | None = None  # the encoding that is held


def codes_of_input(x: Tensor, dtype: torch.dtype, ways: Sequence[Hashable]) -> list[InputCodes | None]:
    """Return where layers find and leave each encoding of x, as values of `dtype`, that is made as a way says; None for
    a way that is None, and where nothing may be shared.
    """
    if type(x) not in PLAIN or x.is_inference() or x.is_neg():  # whose memory has the other sign
        return [None] * len(ways)
    stream = 0
    if x.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return [None] * len(ways)
        stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    whole = x if x._base is None else x._base
    key = id(whole)
    seen = _inputs.get(key)
    if seen is None or seen.ref() is not whole or seen.version != whole._version:
        seen = _inputs[key] = _Input(whole, key)
    view = x.data_ptr(), x.shape, x.stride(), x.dtype, dtype, stream
    found = list[InputCodes | None]()
    for way in ways:
        codes = None
        if way is not None and (codes := seen.encodings.get((view, way))) is None:
            codes = seen.encodings[view, way] = InputCodes()
        found.append(codes)
    return found


class Seen:
    """A tensor that codes were made of, and what changes with a write. The address of memory says nothing: FSDP2 frees
    and takes it around each use.
    """

    def __init__(self, t: Tensor) -> None:
        self._tensor, self._version = weakref.ref(t), t._version
        self._storage = StorageWeakRef(t.untyped_storage())  # held, so that its number is no other storage's
        self._offset, self._stride = t.storage_offset(), t.stride()

    def is_still(self, t: Tensor | None) -> bool:
        """Return whether t is that tensor, and has not been written since."""
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
    """Codes of one layer's weight, each side made when it is first read. A copy of the layer is outside of the block.

    bind: from rows, as `Encoded`, to what multiplies by them without gradients (`BoundWeight`).
    """

    def __init__(self, layer: Any, bind: Callable[[Any, Encoded], Any]) -> None:
        self._layer, self._bind, self._fqn = weakref.ref(layer), bind, layer.prepared.fqn
        self._weight: Seen | None = None
        self._scales: list[Seen] = []  # that the layer holds for it
        self._rows: Encoded | None = None
        self._columns: dict[torch.dtype, Encoded] = {}
        self._bound: Any = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copied and pickled as None."""
        return type(None), ()

    def anew(self) -> "FixedWeight":
        """For a layer with another recipe; a backward to come reads what this one has."""
        return FixedWeight(self._owner, self._bind)

    @property
    def _owner(self) -> Any:
        layer = self._layer()
        assert layer is not None
        return layer

    @property
    def of_this_call(self) -> "FixedWeight | None":
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
            how = layer.matrix(), recipe.fprop_weight, layer.held_scales("weight")
            self._bound = self._bind(layer, self.rows(partial(ops.codes, *how)).by_row)
        elif not self._is(w if w._base is None else w._base):
            raise ValueError(_CHANGED)
        y: Tensor | None = self._bound.product(x, layer.bias)
        return y

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
        """Return what else the layer holds for the weight: learned or static scales, a fitted transform."""
        recipe = self._owner.prepared.recipe
        if recipe.weight_scales == "dynamic" and not recipe.fitted:
            return []
        return [t for t in held.read(self._owner, "weight") if t is not None]

    def _is(self, whole: Tensor | None) -> bool:
        """Return whether `whole` is the weight that was encoded, and neither it nor its scales were written since."""
        if self._weight is None or not self._weight.is_still(whole):
            return False
        return not self._scales or all(seen.is_still(t) for seen, t in zip(self._scales, self._held(), strict=True))
