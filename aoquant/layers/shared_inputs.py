"""Shared inputs: layers that read the same input, such as q, k and v or gate and up, encode it once and keep it once.

Between a layer's forward and its backward autograd keeps the codes of its input. As long as it does, another layer that
is given the same input, in the same format, takes those codes instead of making them again, and both keep one. This
keeps no codes alive: an encoding is remembered as weak references to its storages. (One exception: where autograd
keeps the column side alone, or the input itself, the row codes of the latest input are held until that input goes.)
Without gradients, or with a frozen weight, autograd keeps no codes, so nothing is shared; after backward the codes are
gone, and so is the record of them.

The same input means: the same tensor object, or an equal view of it, with the same address and version counter, on the
same stream. Every in-place operation that autograd can see moves that counter. A write that it cannot see (through
`.data`, NumPy or a raw pointer) to a tensor that autograd keeps for backward is wrong in any PyTorch program, since the
gradients would be another input's; here it also leaves the other layers on the old codes. Where such a write is
harmless, because nothing of the input is kept any more, it is harmless here too. As a second guard a layer never takes
an encoding that it took or made before: when it comes by again, the input is encoded anew, for the other layers as
well.

Nothing is shared while a compiler traces (it removes repeated calls itself), under inference mode, between streams, and
while a CUDA graph is captured, whose memory lives by other rules.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from aoquant.formats import Encoded, Operand
from aoquant.layers.sides import Side


class _Part(NamedTuple):
    """A tensor that autograd keeps alive, or not any more."""

    storage: StorageWeakRef
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> _Part:
        storage = StorageWeakRef(t.untyped_storage())
        return cls(storage, t.dtype, t.device, int(t.storage_offset()), t.shape, t.stride())

    def tensor(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        t = torch.empty(0, dtype=self.dtype, device=self.device)
        return t.set_(storage, self.offset, self.shape, self.stride)


class _Encoding:
    """The record of an encoding: its tensors, one scale as it is, its K, and the layers that have it, by the identity
    of their weight.
    """

    def __init__(self) -> None:
        self.parts: list[_Part | Tensor | None] = []
        self.k = 0
        self.layers: set[int] = set()
        self.held: Encoded | None = None


class _Input:
    """An input, and its encodings at one version of it."""

    def __init__(self, x: Tensor, key: int) -> None:
        self.ref = weakref.ref(x, lambda _: _inputs.pop(key, None))
        self.version = x._version
        self.encodings: dict[tuple[Any, ...], _Encoding] = {}


_inputs: dict[int, _Input] = {}
_latest: weakref.ref[_Encoding] | None = None  # the encoding that is held


class SharedInput:
    """Where one layer, in one forward, finds the encoding of its input, or leaves it for others."""

    def __init__(self, encoding: _Encoding, layer: int) -> None:
        self._encoding, self._layer = encoding, layer

    @property
    def known(self) -> bool:
        """Whether `get` may have an encoding."""
        return bool(self._encoding.parts) and self._layer not in self._encoding.layers

    def get(self) -> Encoded | None:
        """The encoding; None when no layer made it, autograd does not keep it, or this layer has had it."""
        if not self.known:
            return None
        found = [part.tensor() if type(part) is _Part else part for part in self._encoding.parts]
        if any(t is None and part is not None for t, part in zip(found, self._encoding.parts, strict=True)):
            return None
        self._encoding.layers.add(self._layer)
        codes, scale, zero, outer = cast(list[Tensor | None], found)
        assert codes is not None
        return Encoded(codes, scale, zero, outer, self._encoding.k)

    def put(self, encoded: Encoded, *, alive: bool = False) -> None:
        """Remember what this layer made.

        alive: autograd keeps another form of the input, so these are held until the input goes, or the next one is
            encoded.
        """
        global _latest
        if alive:
            if _latest is not None and (last := _latest()) is not None:
                last.held = None
            self._encoding.held, _latest = encoded, weakref.ref(self._encoding)
        codes, *rest = encoded.tensors
        small = [t if t is None or t.numel() == 1 else _Part.of(t) for t in rest]
        self._encoding.parts, self._encoding.k = [_Part.of(codes), *small], encoded.k
        self._encoding.layers = {self._layer}


def shared_input(x: Tensor, dtype: torch.dtype, operand: Operand | Side, w: Tensor) -> SharedInput | None:
    """The place of x's encoding by `operand`, as `dtype`, or of a column side, for the layer with weight `w`; None
    where nothing may be shared.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and w.requires_grad):
        return None
    if type(x) not in (Tensor, torch.nn.Parameter) or x.is_inference():
        return None
    stream = 0
    if x.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    whole = x if x._base is None else x._base
    key = id(whole)
    found = _inputs.get(key)
    if found is None or found.ref() is not whole or found.version != whole._version:
        found = _inputs[key] = _Input(whole, key)
    what = x.data_ptr(), x.shape, x.stride(), x.dtype, dtype, operand, stream
    return SharedInput(found.encodings.setdefault(what, _Encoding()), id(w))
