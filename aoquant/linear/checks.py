"""What a call of a quantised linear layer is checked for, as nn.Linear checks its own, and the dtype it computes in."""

from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from aoquant import ops
from aoquant.distributed import sharded_linear as sharding
from aoquant.distributed.gathered import GatheredWeight
from aoquant.formats import FLOAT_DTYPES, Encoded
from aoquant.linear.recipe import LinearRecipe

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
    """Return whether autocast is on for this type of device; meta has none, and torch raises where it is asked."""
    return device != "meta" and torch.is_autocast_enabled(device)


def cast(x: Tensor) -> Tensor:
    """x in the dtype that a linear layer computes in."""
    dtype = compute_dtype(x)
    return x if x.dtype is dtype else x.to(dtype)


def checked(x: Tensor, w: Tensor | Encoded, recipe: LinearRecipe) -> Tensor:
    """x in the dtype that the layer computes in, after every check that a call needs.

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
        return x  # its shards are checked
    if given_x.dtype not in FLOAT_DTYPES:  # autocast leaves them alone
        raise ValueError(f"the layer's input must be float32, bfloat16 or float16, got {given_x.dtype}: cast it")
    if packed is None:
        check_dtype(given_x, rows.dtype, recipe.contract)
    if recipe.contract != "aoquant":  # which takes everything
        stored = rows.dtype if packed is None or packed.scale is None else packed.scale.dtype
        if (reason := ops.input_error(recipe.contract, x.dtype, stored)) is not None:
            raise ValueError(reason)
    return x


def refuse_transforms() -> None:
    """Raise under a transform of torch.func, or a forward-mode derivative: they would differentiate or batch the
    rounding itself.

    Raises:
        ValueError: one is active.
    """
    if not torch.compiler.is_compiling() and (_are_functorch_transforms_active() or forward_ad._current_level >= 0):
        raise ValueError(
            "torch.func's transforms (grad, vmap, jvp, ...) and forward-mode derivatives do not go through a quantised layer: use backward() or "
            "torch.autograd.grad, and a batch in the place of vmap; or apply them to the float model"
        )


def refuse_second_derivative() -> None:
    """Refuse a backward that is differentiated itself (create_graph=True): rounding has no second derivative.

    Raises:
        ValueError: autograd records this backward.
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "a prepared layer cannot be differentiated twice (create_graph=True): take second derivatives of the float model, or switch fake "
            "quantisation off for them with aoquant.set_fake_quant(model, False)"
        )
