"""What is read, encoded and written at a time when a checkpoint is converted: a layer's weight, or one expert's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

from aoquant.experts.families import is_transposed
from aoquant.experts.packed_experts import packed_experts
from aoquant.files.safetensors_file import StoredTensor
from aoquant.planning.changes import Change
from aoquant.planning.fused import shared_at_once
from aoquant.planning.plan import not_finite
from aoquant.planning.stack_changes import pack_expert
from aoquant.quantize import pack


@dataclass(frozen=True)
class Source:
    """A layer's weight, or a stacked parameter of experts, to quantise.

    names: several when layers share a weight.
    stored: where it is stored: one tensor; or for each expert the tensors whose rows are its weight (N, K), in order.
    dtype: to load it in.
    experts: how many a stack has, each of which is a unit; None for a layer, which is one unit.
    """

    change: Change
    names: list[str]
    stored: StoredTensor | Sequence[Sequence[StoredTensor]]
    dtype: torch.dtype
    experts: int | None = None

    @property
    def place(self) -> tuple[Path, int]:
        """Return where its first byte is stored."""
        first = self.stored if isinstance(self.stored, StoredTensor) else self.stored[0][0]
        return first.path, first.start

    @property
    def size(self) -> int:
        """Bytes to read."""
        if isinstance(self.stored, StoredTensor):
            return self.stored.size
        return sum(source.size for sources in self.stored for source in sources)

    @property
    def units(self) -> Sequence[int | None]:
        """Return the experts, or None for the one unit of a layer."""
        return (None,) if self.experts is None else range(self.experts)

    def rebuilt(self) -> type[Tensor]:
        """Return the class of the tensor that loaders make."""
        return type(self.change.weight.data)

    @torch.no_grad()
    def encode(self, unit: int | None, device: torch.device | str) -> dict[str, Tensor]:
        """Return a unit's stored parts by name, those of an expert as one row (1, ...).

        Raises:
            ValueError: the weight holds NaN or Inf.
        """
        weight, change = self.read(unit), self.change
        if change.layer is not None:
            packed = pack(change, weight, device)
        else:
            one = pack_expert(change, weight, device)
            packed = packed_experts([one], transposed=is_transposed(change.module))
        return flatten_tensor_state_dict(dict.fromkeys(self.names, packed))[0]

    def read(self, unit: int | None) -> Tensor:
        """Return a unit's float weight (N, K). Raises ValueError: it holds NaN or Inf."""
        if not isinstance(self.stored, StoredTensor):
            assert unit is not None
            weight = torch.cat([source.read() for source in self.stored[unit]])
        elif unit is None:
            weight = self.stored.read()
        else:
            weight = self.stored.rows(unit, unit + 1)[0]
            weight = weight.t() if is_transposed(self.change.module) else weight
        weight = weight.to(self.dtype)
        if reason := not_finite(weight):
            expert = "" if unit is None else f", expert {unit}"
            raise ValueError(f"{self.change.fqn}{expert} {tuple(weight.shape)}: {reason}")
        return weight


def with_shared_scales(sources: Sequence[Source], device: torch.device | str) -> list[Source]:
    """Return `sources` with the outer scales that siblings share, found in a pass of its own, one weight in memory."""
    layers = {s.change.fqn: (s, s.change) for s in sources if s.change.layer is not None}

    def weight_of(change: Change) -> Tensor:
        return change.kind.matrix(layers[change.fqn][0].read(None).to(device))

    shared = shared_at_once((change for _, change in layers.values()), weight_of)
    return [
        replace(s, change=replace(s.change, scales=scales))
        if s.change.layer is not None and (scales := shared.get(s.change.fqn))
        else s
        for s in sources
    ]
