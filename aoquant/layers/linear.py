"""A quantised linear layer as a function: checks, autocast and shards, then the one autograd function.

What is kept for backward: x itself when it is not quantised, its packed codes when it is (layers with one input share
them, see shared_inputs.py), and of the weight what `sides.py` says.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from aoquant import ops
from aoquant.formats import FLOAT_DTYPES, Encoded, Scales
from aoquant.formats.delayed import Delayed
from aoquant.layers import shared_inputs
from aoquant.layers.function import Given, QuantizedLinear, multiply, refuse_transforms
from aoquant.layers.recipe import LinearRecipe
from aoquant.parallel import linear as sharding
from aoquant.parallel.gathered import GatheredWeight, WithMaster
from aoquant.parallel.shards import Shards

if TYPE_CHECKING:
    from aoquant.layers.fixed import FixedWeight  # which imports this module

OWN_CONTRACTS = ("aoquant", "ggml")
NOT_CALIBRATED = (
    "static scales, or a fitted transform, have no values yet: call aoquant.calibrate(model, forward_loop) before training, or load a "
    "state_dict"
)


# Hooks on weights whose layers have not run since they were prepared, by the weight's id (direct_reads.py).
unread: WeakValueDictionary[int, RemovableHandle] = WeakValueDictionary()


def note_run(weight: Tensor | None) -> None:
    """Remove the hook on a weight whose layer runs. When a compiler traces it, remove all: their runs are not seen."""
    traced = isinstance(weight, FakeTensor) or torch.compiler.is_compiling()
    for key in list(unread) if traced else [id(weight)]:
        if (handle := unread.pop(key, None)) is not None:
            handle.remove()


def check_width(x: Tensor, k: int) -> None:
    """Raise ValueError unless x has K values in its last dimension."""
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"the layer's input needs K = {k} values in its last dimension, got shape {tuple(x.shape)}")


def check_device(x: Tensor, w: Tensor) -> None:
    """Raise ValueError when input and weight are on two devices: with one on meta, an op returns unwritten memory."""
    if x.device != w.device:
        empty = "; a weight on meta holds no values: load the checkpoint first" if w.is_meta else ""
        raise ValueError(f"the layer's input is on {x.device} and its weight on {w.device}: move one of them{empty}")


def check_dtype(x: Tensor, weight: torch.dtype, contract: str) -> None:
    """Raise ValueError where nn.Linear would: outside autocast x has another dtype than the weight. torchao's kernels
    have rules of their own.
    """
    if contract in OWN_CONTRACTS and x.dtype != weight and not autocasts(x.device.type):
        raise ValueError(f"the layer's input is {x.dtype} and its weight {weight}: cast one of them, or use autocast")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer computes in: its input's, or autocast's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if autocasts(device) else x.dtype


def autocasts(device: str) -> bool:
    """Whether autocast is on for this type of device; meta has none, and torch raises where it is asked."""
    return device != "meta" and torch.is_autocast_enabled(device)


def cast(x: Tensor) -> Tensor:
    """x in the dtype that a linear layer computes in."""
    dtype = compute_dtype(x)
    return x if x.dtype is dtype else x.to(dtype)


def quantized_linear(
    x: Tensor,
    w: Tensor | Encoded,
    bias: Tensor | None,
    recipe: LinearRecipe,
    x_held: Scales | None = None,
    w_held: Scales | None = None,
    random: Tensor | None = None,
    fixed: FixedWeight | None = None,
    delayed: Delayed | None = None,
    parts: Shards | None = None,
    rank: int = 0,
    master: Tensor | None = None,
) -> Tensor:
    """y (..., N) = x (..., K) W^T + bias with a quantised W, differentiable in x, a float W, bias and scales.

    Under autocast x and y take autocast's dtype; the weight is encoded from its stored dtype. DTensors go to
    `sharding.linear`.

    w: (N, K), float and encoded in the call (QAT), or encoded already (inference).
    x_held, w_held: static or learned scales and fitted transforms, where the recipe has them; for a shard, the scales
        of its whole.
    random: the state of the layer's random numbers (`formats.Random`), where its backward draws.
    fixed: keeps the weight's codes for further calls.
    delayed: the state of delayed scales, whose factors x_held and w_held hold.
    parts: this rank's part of the layer, where its backward is quantised.
    rank: its number among the ranks with other tokens; each of them draws other random numbers.
    master: takes the gradient of `w`, where `w` is codes alone.

    Raises:
        ValueError: under a transform of torch.func; x is no float32, bfloat16 or float16 tensor of width K, is on
            another device than the weight or, as in nn.Linear, of another dtype outside autocast; or the recipe's
            kernel cannot take its dtype.
    """
    refuse_transforms()
    packed, rows, k = (w, w.codes, w.k) if isinstance(w, Encoded) else (None, w, w.shape[1])
    check_width(x, k)
    check_device(x, rows)
    if isinstance(rows, GatheredWeight) and rows.key != recipe.key:
        raise ValueError("its weight is gathered as codes of another recipe: call quantized_all_gather again")
    given_x, x = x, cast(x)
    if sharding.is_sharded(x, rows):
        if recipe.backward_operands:
            return _sharded(x, rows, bias, recipe, x_held, w_held, random, rank)
        on_shard = functools.partial(_on_shard, recipe)
        sides = sharding.HeldOperand(recipe.fprop_input, x_held), sharding.HeldOperand(recipe.fprop_weight, w_held)
        return sharding.linear(on_shard, x, rows, bias, *sides)
    if given_x.dtype not in FLOAT_DTYPES:  # autocast leaves them alone
        raise ValueError(f"the layer's input must be float32, bfloat16 or float16, got {given_x.dtype}: cast it")
    if packed is None:
        check_dtype(given_x, rows.dtype, recipe.contract)
    if recipe.contract != "aoquant":  # which takes everything
        stored = rows.dtype if packed is None or packed.scale is None else packed.scale.dtype
        if (reason := ops.input_error(recipe.contract, x.dtype, stored)) is not None:
            raise ValueError(reason)
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        alone = Given(recipe.key, packed, x_held, w_held, fixed=fixed)
        y, _ = multiply(x, w if packed is None else None, bias, alone)  # type: ignore[arg-type]
        return y
    shared = columns = None
    leaf = rows if master is None else master
    if packed is None and x_held is None and parts is None:
        if recipe.fprop_input is not None:
            shared = shared_inputs.shared_input(given_x, x.dtype, recipe.fprop_input, leaf)
        if recipe.input_side.keeps == "columns":
            columns = shared_inputs.shared_input(given_x, x.dtype, recipe.input_side, leaf)
    x_scale = w_scale = None
    if recipe.holds:  # autograd sees tensors that are arguments, none inside a tuple
        if x_held is not None and recipe.input_scales == "learned":
            x_scale, x_held = x_held.scale, Scales(None, x_held.zero, x_held.outer, x_held.transform)
        if w_held is not None and recipe.weight_scales == "learned":
            w_scale, w_held = w_held.scale, Scales(None, w_held.zero, w_held.outer, w_held.transform)
    given = Given(recipe.key, packed, x_held, w_held, random, shared, columns, fixed, delayed, parts, rank)
    return _applied(x, rows if packed is None else None, bias, x_scale, w_scale, given, master)


@torch.compiler.allow_in_graph
def _applied(
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    given: Given,
    master: Tensor | None,
) -> Tensor:
    """`QuantizedLinear`, one call to a compiler, which traces the ops inside and skips the Python around them.

    Otherwise Dynamo would guard on everything that this Python reads, before every compiled step.
    """
    if unread:
        note_run(w)
    if master is not None:
        w = WithMaster.apply(master, w)  # type: ignore[no-untyped-call]
    y: Tensor = QuantizedLinear.apply(x, w, bias, x_scale, w_scale, given)  # type: ignore[no-untyped-call]
    return y


@torch.compiler.disable  # backward communicates too, where a compiler would trace it
def _sharded(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    recipe: LinearRecipe,
    x_held: Scales | None,
    w_held: Scales | None,
    random: Tensor | None,
    rank: int,
) -> Tensor:
    """A layer whose weight is a DTensor, and whose backward is quantised."""
    if recipe.history:
        raise ValueError("delayed scaling is not supported under tensor parallelism: use dynamic scales (fp8-hybrid)")
    if isinstance(random, DTensor):  # parallelize_module makes one of every buffer; the local tensor is the same memory
        random = random.to_local()
    on_shard = functools.partial(_on_shard, recipe, random=random, rank=rank)
    sides = sharding.HeldOperand(recipe.fprop_input, x_held), sharding.HeldOperand(recipe.fprop_weight, w_held)
    return sharding.linear(on_shard, x, w, bias, *sides, recipe)


def _on_shard(
    recipe: LinearRecipe,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    x_scales: Scales | None,
    w_scales: Scales | None,
    parts: Shards | None,
    random: Tensor | None = None,
    rank: int = 0,
) -> Tensor:
    """One rank's part of a layer whose weight is a DTensor."""
    return quantized_linear(x, w, bias, recipe, x_scales, w_scales, random, parts=parts, rank=rank)
