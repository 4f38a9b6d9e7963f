"""FSDP2 gathers the weights of prepared layers as the codes that their GEMMs read, in place of bf16.

A rank encodes its rows and sends codes and scales (gathered.py); what all ranks then hold is what encoding the whole
weight gives, byte for byte, so training computes what it computes without this. A pass sends one of three things:

- The codes of fprop alone, if dgrad reads the same value: the source "forward", a square tile, one scale for the
  tensor, or no quantised backward.
- These codes and the column side that dgrad reads, if that side is made from the original.
- bf16, as without this, if the codes are no fewer bytes, or if dgrad reads the original itself.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of the sharded tensor, which is a subclass here
(`EncodingShard`): it shares the memory of the plain one, optimizers and checkpoints see a plain tensor, and a copy on
another device (CPU offload) stays one. A scale of the whole tensor is made by all ranks before each gather: one
maximum of 8 bytes for each weight. Of stacked experts a rank has whole ones, whose scales are its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from aoquant._messages import check_model, naming
from aoquant.distributed import fsdp
from aoquant.distributed.gathered import GatheredWeight, Layout
from aoquant.experts.prepared import QATExperts
from aoquant.formats import Encoded, Operand
from aoquant.linear.embedding import QATEmbedding
from aoquant.linear.prepared import QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.weight_codes import encoded_experts, encoded_sides, reads_values


def quantized_all_gather(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> dict[str, str]:
    """From now on FSDP2 gathers the weights of prepared layers of `model` as codes. Call it on every rank after
    `quantize_` and `fully_shard`, and again after a change of recipe or `model.to`; what an earlier call chose is
    forgotten.

    filter_fn: (module, name) -> bool, which layers; by default all.

    Returns:
        For each prepared layer and each stack of experts that FSDP2 shards, what a pass gathers: "rows", "rows and
            columns", or "bf16: ..." and why.

    Raises:
        ValueError: a rank's rows would cut through a tile or a block; found from shapes, on every rank alike, before
            any communicates.
    """
    check_model(model)
    names = {module: fqn for fqn, module in model.named_modules()}
    fsdp.reshard(model)
    fsdp.gather_values(model)
    found: dict[str, str] = {}
    planned: list[tuple[Any, Gathering]] = []
    for group, p in fsdp.sharded_parameters(model):
        layers = [p._module_info.module, *p._module_info.shared_modules]
        if filter_fn is not None and not all(filter_fn(m, names.get(m, "")) for m in layers):
            continue
        parameters = [p._module_info.param_name, *p._module_info.shared_param_names]
        read = [_prepared(m, name) for m, name in zip(layers, parameters, strict=True)]
        if any(r is None for r in read):
            pairs = zip(layers, parameters, strict=True)
            if embedding := next((m for m, n in pairs if isinstance(m, QATEmbedding) and n == "weight"), None):
                found[names.get(embedding, "")] = "bf16: an embedding reads rows of its weight"
            continue
        fqn = names.get(layers[0], "")
        stack = isinstance(layers[0], QATExperts)
        fqn = f"{fqn}.{parameters[0]}" if stack else fqn
        recipe = read[0].recipe
        why = "bf16: tied layers have different recipes" if len({r.recipe.key for r in read}) > 1 else None
        why = why or _why_not(recipe, p)
        if why is None:
            dtype = group.mp_policy.param_dtype or p.sharded_param.dtype
            with naming(fqn or "linear"):
                shape, part = p.sharded_param.shape, p.padded_sharded_param_size[0]
                if stack:
                    made = Gathering.of_experts(recipe, shape, part, dtype, fqn, layers[0].is_transposed)
                else:
                    made = Gathering.of(recipe, shape, part, dtype)
            if made.length > 2 * p.padded_sharded_param_size.numel():
                why = (
                    f"bf16: its codes take {made.length / p.padded_sharded_param_size.numel():.2f} bytes for each value"
                )
            else:
                planned.append((p, made))
                why = "rows" if made.columns is None else "rows and columns"
        found[fqn] = why
    for p, made in planned:
        fsdp.gather(p, EncodingShard.of(p.sharded_param._local_tensor, made))
    return found


def _prepared(module: nn.Module, parameter: str) -> Any:
    """Prepare's note on a linear layer's weight or on stacked experts; None for any other parameter."""
    if isinstance(module, QATExperts):
        return module.stacks.get(parameter)
    return module.prepared if isinstance(module, QATLinear) and parameter == "weight" else None


def _why_not(recipe: LinearRecipe, p: Any) -> str | None:
    if p.fsdp_placement.dim != 0 or p.is_dtensor:
        return "bf16: its shards are no whole rows"
    reason = reads_values(recipe)
    if recipe.history:
        reason = "its scales are delayed, and codes are made outside of the layer, which has their history: use scales of the step (amax_history=0)"
    return None if reason is None else f"bf16: {reason}"


@dataclass(frozen=True)
class Gathering:
    """How a weight (n, k) is gathered, or experts (E, n, k), (E, k, n) when `transposed`. recipe: of its layers. rows,
    columns: the sides in a buffer. dtype: that it is encoded from. fqn: of experts. length: bytes of a buffer.
    """

    recipe: LinearRecipe
    shape: torch.Size
    dtype: torch.dtype
    rows: Layout
    columns: Layout | None
    fqn: str = ""
    transposed: bool = False

    @classmethod
    def of(cls, recipe: LinearRecipe, shape: torch.Size, part: int, dtype: torch.dtype) -> "Gathering":
        """part: rows of the first rank.

        Raises:
            ValueError: they cut through a tile or a block.
        """
        (n, k), gemm = shape, recipe.dgrad
        _whole_blocks(recipe.fprop_weight, "tile of rows", recipe.fprop_weight.tile_rows, n, part)
        rows, columns = Layout.of(recipe.fprop_weight, (part, k), (n, k), 0, dtype, 0), None
        if gemm.keeps == "values" and gemm.forward is None:
            assert gemm.other is not None
            _whole_blocks(gemm.other, "block of dgrad", gemm.multiple, n, part)
            padded = [gemm.padded(size) for size in (part, n)]
            columns = Layout.of(gemm.other, (k, padded[0]), (k, padded[1]), 1, dtype, rows.end)
        return cls(recipe, shape, dtype, rows, columns)

    @classmethod
    def of_experts(
        cls, recipe: LinearRecipe, shape: torch.Size, part: int, dtype: torch.dtype, fqn: str, transposed: bool
    ) -> "Gathering":
        """part: experts of the first rank, whole ones."""
        experts, n, k = shape[0], *(shape[:0:-1] if transposed else shape[1:])
        gemm = recipe.dgrad

        def planned(operand: Operand, *size: int) -> Encoded:
            return operand.planned(torch.empty(size, dtype=dtype, device="meta"))

        rows, columns = Layout.of_stack(planned(recipe.fprop_weight, n, k), part, experts, 0), None
        if gemm.keeps == "values" and gemm.forward is None:
            assert gemm.other is not None
            columns = Layout.of_stack(planned(gemm.other, k, gemm.padded(n)), part, experts, rows.end)
        return cls(recipe, shape, dtype, rows, columns, fqn, transposed)

    @property
    def length(self) -> int:
        return (self.columns or self.rows).end

    def sent(self, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return (length,) uint8: this rank's buffer. A collective where a scale is of the whole tensor."""
        buffer = torch.zeros(self.length, dtype=torch.uint8, device=shard.device)
        w = shard.to(self.dtype)
        if w.dim() == 3:
            made = encoded_experts(self.recipe, w.transpose(1, 2) if self.transposed else w)
        else:
            made = encoded_sides(self.recipe, w, [group])
        if made is not None:
            self.rows.write(made.rows, buffer)
            if self.columns is not None and made.columns is not None:
                self.columns.write(made.columns, buffer)
        return buffer

    def received(self, buffers: Tensor, out: GatheredWeight | None) -> tuple[GatheredWeight, list[Tensor]] | None:
        """Return the weight and its tensors, from the buffers of all ranks in a row; written into `out`, if given."""
        buffers_RL = buffers.view(-1, self.length)
        rows, columns = self.rows.read(buffers_RL), [] if self.columns is None else self.columns.read(buffers_RL)
        if out is not None:
            same_version = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
            with same_version(tuple(out.parts)):
                out.take_parts((*rows, *columns))
            return None
        made = self.rows.encoded(rows), None if self.columns is None else self.columns.encoded(columns)
        weight = GatheredWeight(self.shape, self.dtype, self.recipe.key, *made)
        weight.fqn, weight.transposed = self.fqn, self.transposed
        return weight, weight.parts


class EncodingShard(Tensor):
    """A rank's shard of a weight, which is gathered as codes. Everything else sees the plain tensor."""

    gathering: Gathering

    @classmethod
    def of(cls, shard: Tensor, gathering: Gathering) -> "EncodingShard":
        """Return the same memory."""
        made: EncodingShard = torch.Tensor._make_subclass(cls, shard.detach())
        made.gathering = gathering
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        if func is Tensor.to and type(made) is Tensor:  # CPU offload moves it before each gather
            return cls.of(made, args[0].gathering)
        return made

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        """Return what this rank sends."""
        with torch._C.DisableTorchFunctionSubclass():
            return (self.gathering.sent(self.detach(), mesh.get_group()),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return what the layers read."""
        return self.gathering.received(all_gather_outputs[0], out)


def _whole_blocks(operand: Operand, what: str, block: int, n: int, part: int) -> None:
    if part < n and part % block:
        raise ValueError(
            f"a {what} of {operand.name} is {block} long, and each rank has {part} of the weight's N = {n} rows: shard over ranks "
            f"that get multiples of {block}, or leave the layer out of quantized_all_gather (filter_fn)"
        )
