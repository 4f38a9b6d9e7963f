"""A converted layer whose weight is sharded, as it was in training: each rank holds the codes and scales of its shard.

The weight is a DTensor over `PackedTensor`s, with the mesh and the placements that the float weight had, so a converted
model takes 1/ranks of the packed bytes and no rank ever holds a float weight whole. Forward depends on the
input:

- a DTensor (tensor parallelism): each rank multiplies its shard, exactly as the prepared layer did (`sharding.linear`);
- a plain tensor (FSDP2): the codes and scales are gathered for the call, as FSDP gathers parameters, and at a fraction
  of the bytes.

`gather` puts a weight together again: what converting the whole model would have made, byte for byte. The parts of an
`Encoded` are plain matrices, so every part travels as a DTensor of its own: cut like the weight, or replicated along a
cut that it has no share in.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from aoquant.distributed import sharded_linear as sharding
from aoquant.distributed.fsdp import is_flattened, is_managed
from aoquant.distributed.shards import Shards
from aoquant.formats import Encoded, Scales
from aoquant.linear.checks import check_dtype
from aoquant.linear.function import quantized_linear
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor


class ShardedLinear(nn.Linear):
    """nn.Linear whose weight is a DTensor of `PackedTensor`s. Made by swapping the class of a converted nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        w, bias = self.weight, self.bias
        assert isinstance(w, DTensor)
        recipe = _local(w).recipe
        check_dtype(input, _local(w).dtype, recipe.contract)
        if not isinstance(input, DTensor):
            whole_bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
            return quantized_linear(input, gather(w), whole_bias, recipe)
        on_shard = functools.partial(_on_shard, recipe)
        return sharding.linear(
            on_shard,
            input,
            _on_mesh(w, input.device_mesh),
            bias,
            sharding.HeldOperand(recipe.fprop_input, None),
            sharding.HeldOperand(None, None),
        )


def _on_shard(
    recipe: LinearRecipe,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    x_scales: Scales | None,
    w_scales: Scales | None,
    parts: Shards | None,
) -> Tensor:
    """Return one rank's part of a layer. parts: not used, as packed layers have an exact backward."""
    assert isinstance(w, PackedTensor)
    return quantized_linear(x, w.encoded, bias, recipe, x_scales)


def why_not(module: nn.Module, step: str, recipe: LinearRecipe, dtype: torch.dtype | None) -> str | None:
    """Return why a step ("prepare", "convert", "quantize") cannot be taken on a layer's shards; None when it can, and
    for plain weights.

    dtype: that a forward sees the weight in; None where no FSDP module is known to hold it.
    """
    dynamic = step == "prepare" and recipe.weight_scales == "dynamic"
    if is_flattened(module) and not (dynamic and "weight" in module._parameters):
        return (
            "FSDP1 (FullyShardedDataParallel) holds its weight in one flat parameter with others: prepare first, then wrap; to convert, "
            "gather the float state dict (torch.distributed.checkpoint.state_dict), load it into an unsharded model and convert that"
        )
    weight, managed = module.weight, is_managed(module)
    if not isinstance(weight, DTensor):
        return None
    whole = "gather the float state dict (torch.distributed.checkpoint.state_dict), load it into an unsharded model and convert that"
    if step == "prepare":
        if recipe.weight_scales != "dynamic":
            return "static and learned weight scales are measured on the whole weight: prepare first, then shard"
        if isinstance(module, nn.Embedding) and not managed:
            return "embeddings under tensor parallelism are not supported: leave it out"
        return None if managed else sharding.why_not(weight, (recipe.fprop_weight, recipe.fprop_input))
    if isinstance(module, nn.Embedding) or recipe.holds:
        return f"sharded embeddings, and sharded layers that hold scales, are not converted in place: {whole}"
    if managed and dtype is None:
        return (
            "FSDP shards its weight from a module above the one given, and would put the float weight back: call aoquant.quantize_ "
            "on the module that holds all that fully_shard was given"
        )
    byte = {8: 1, 16: 1, 4: 2}.get(recipe.fprop_weight.bits, 8)  # values that share a byte, see formats.layout
    return sharding.why_not(weight, (recipe.fprop_weight, None if managed else recipe.fprop_input), byte)


def pack(weight: DTensor, recipe: LinearRecipe) -> Tensor:
    """The weight (N, K) in its format, every rank its shard, with the codes and scales of the whole."""
    format, shard = recipe.fprop_weight, weight.to_local().detach()
    scales = sharding.scales(format, shard, weight.device_mesh, weight.placements)
    packed = PackedTensor.from_encoded(format.encode(shard, scales), recipe, weight.dtype)
    return sharding.dtensor(packed, weight.device_mesh, weight.placements, weight.shape)


def gather(w: DTensor) -> Encoded:
    """The whole weight's codes and scales, on every rank. A collective."""
    return _kept(w, [False] * w.device_mesh.ndim)


def _on_mesh(w: DTensor, mesh: DeviceMesh) -> DTensor:
    """The weight on the input's mesh, gathered over the other dimensions of its own, such as FSDP's."""
    if w.device_mesh == mesh:
        return w
    names, wanted = w.device_mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if not wanted or any(n not in names for n in wanted):
        raise ValueError(
            f"the layer's input is on the device mesh {mesh} and its weight on {w.device_mesh}: use one mesh"
        )
    keep = [n in wanted for n in names]
    packed = PackedTensor.from_encoded(_kept(w, keep), _local(w).recipe, w.dtype)
    return sharding.dtensor(packed, mesh, [w.placements[names.index(n)] for n in wanted], w.shape)


def _kept(w: DTensor, keep: Sequence[bool]) -> Encoded:
    """This rank's part of the weight, cut along those mesh dimensions alone that are to be kept."""
    packed, mesh = _local(w), w.device_mesh
    format, (n, k) = packed.weight_format, w.shape
    sizes = (torch.empty(f * n, f * k, dtype=w.dtype, device="meta") for f in (1, 2))
    whole, double = (format.encode(w_NK).by_row.tensors for w_NK in sizes)
    gathered: list[Tensor | None] = []
    for part, one, two in zip(packed.encoded.by_row.tensors, whole, double, strict=True):
        if part is None or one is None or two is None:
            gathered.append(None)
            continue
        # a part that does not grow with the weight along a dimension is the same on all ranks that cut it there
        grows = {d: one.shape[d] != two.shape[d] for d in (0, 1)}
        have = [p if grows.get(getattr(p, "dim", -1)) else Replicate() for p in w.placements]
        want = [p if kept else Replicate() for p, kept in zip(have, keep, strict=True)]
        gathered.append(sharding.gathered(part, mesh, have, want, one.shape))
    cut = any(kept and getattr(p, "dim", None) == 1 for p, kept in zip(w.placements, keep, strict=True))
    return Encoded.of(gathered, packed.k if cut else k)


def _local(w: DTensor) -> PackedTensor:
    local = w.to_local()
    assert isinstance(local, PackedTensor)
    return local
