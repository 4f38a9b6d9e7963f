"""What is read, encoded and written at a time when a checkpoint is converted: a layer's weight, or one expert's.

Both say in which units they are encoded. A unit's parts are the tensors that files hold of it, in full for a layer;
for stacked experts they are one row of each part, the expert's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

from aoquant.integrations.safetensors_file import StoredTensor
from aoquant.layers.experts import is_transposed
from aoquant.layers.packed_experts import packed_experts
from aoquant.planning.experts import StackChange, pack_expert
from aoquant.planning.fused import shared_at_once
from aoquant.planning.plan import LayerChange, not_finite
from aoquant.quantize import pack


@dataclass(frozen=True)
class Layer:
    """A weight to quantise: its change, its names (several when layers share it), where it is stored, and in what dtype
    to load it.
    """

    change: LayerChange
    names: list[str]
    source: StoredTensor
    dtype: torch.dtype

    @property
    def place(self) -> tuple[Path, int]:
        """Where its first byte is stored."""
        return self.source.path, self.source.start

    @property
    def size(self) -> int:
        """Bytes to read."""
        return self.source.size

    @property
    def units(self) -> Sequence[int | None]:
        """One unit, the whole weight."""
        return (None,)

    def rebuilt(self) -> type[Tensor]:
        """The class of the tensor that loaders make."""
        return type(self.change.module.weight.data)

    @torch.no_grad()
    def encode(self, unit: int | None, device: torch.device | str) -> dict[str, Tensor]:
        """The stored parts of the layer's deployed weight, by name. Raises ValueError: it holds NaN or Inf."""
        packed = pack(self.change, self.read(), device)
        parts: dict[str, Tensor] = flatten_tensor_state_dict(dict.fromkeys(self.names, packed))[0]
        return parts

    def read(self) -> Tensor:
        """The float weight. Raises ValueError: it holds NaN or Inf."""
        weight = self.source.read().to(self.dtype)
        if reason := not_finite(weight):
            raise ValueError(f"{self.change.fqn} {tuple(weight.shape)}: {reason}")
        return weight


def with_shared_scales(layers: Sequence[Layer | Stack], device: torch.device | str) -> list[Layer | Stack]:
    """`layers` with the outer scales that siblings share, found in a pass of its own, one weight in memory."""
    own = {layer.change.fqn: layer for layer in layers if isinstance(layer, Layer)}

    def weight_of(change: LayerChange) -> Tensor:
        return change.layer.matrix(own[change.fqn].read().to(device))

    shared = shared_at_once((layer.change for layer in own.values()), weight_of)
    return [
        replace(y, change=replace(y.change, scales=scales))
        if isinstance(y, Layer) and (scales := shared.get(y.change.fqn))
        else y
        for y in layers
    ]


@dataclass(frozen=True)
class Stack:
    """A stacked parameter to quantise.

    sources: for each expert, the tensors whose rows are its weight (N, K), in order; or one tensor, the stack itself,
        in the parameter's layout.
    """

    change: StackChange
    names: list[str]
    sources: Sequence[Sequence[StoredTensor]] | StoredTensor
    experts: int
    dtype: torch.dtype

    @property
    def place(self) -> tuple[Path, int]:
        """Where its first byte is stored."""
        first = self.sources if isinstance(self.sources, StoredTensor) else self.sources[0][0]
        return first.path, first.start

    @property
    def size(self) -> int:
        """Bytes to read."""
        if isinstance(self.sources, StoredTensor):
            return self.sources.size
        return sum(source.size for sources in self.sources for source in sources)

    @property
    def units(self) -> Sequence[int]:
        """The experts."""
        return range(self.experts)

    def rebuilt(self) -> type[Tensor]:
        """The class of the tensor that loaders make."""
        return type(self.change.weight.data)

    @torch.no_grad()
    def encode(self, unit: int | None, device: torch.device | str) -> dict[str, Tensor]:
        """One expert's stored parts, by name, (1, ...) each. Raises ValueError: it holds NaN or Inf."""
        assert unit is not None
        transposed = is_transposed(self.change.module)
        w_NK = self._read(unit).to(self.dtype)
        if reason := not_finite(w_NK):
            raise ValueError(f"{self.change.fqn}, expert {unit} {tuple(w_NK.shape)}: {reason}")
        packed = packed_experts([pack_expert(self.change, w_NK, device)], transposed=transposed)
        parts: dict[str, Tensor] = flatten_tensor_state_dict(dict.fromkeys(self.names, packed))[0]
        return parts

    def _read(self, expert: int) -> Tensor:
        """The weight (N, K) of one expert."""
        if isinstance(self.sources, StoredTensor):
            weight = self.sources.rows(expert, expert + 1)[0]
            return weight.t() if is_transposed(self.change.module) else weight
        return torch.cat([source.read() for source in self.sources[expert]])
