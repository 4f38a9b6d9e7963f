"""Measurements on one layer or one pair of tensors: SQNR, the values that a layer multiplies by, and what it stores.

SQNR = 10 log10(sum a^2 / sum (a - b)^2) dB, in float64;  inf when a and b are equal;  nan when either holds a NaN
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aoquant.experts.families import stacks_of
from aoquant.experts.prepared import QATExperts
from aoquant.formats import Encoded, Int4, Int4Float8, Operand, Scales
from aoquant.linear.kinds import is_packed, matrix_of
from aoquant.linear.prepared import QATLayer
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.planning.sizes import stored_bytes

CHUNK = 1 << 22  # values that are in float64 at a time


def energies(a: Tensor, b: Tensor) -> tuple[float, float]:
    """(sum a^2, sum (a - b)^2) in float64."""
    if a.shape != b.shape:
        raise ValueError(f"the two sides have different shapes, {tuple(a.shape)} and {tuple(b.shape)}")
    signal = noise = 0.0
    for x, y in zip(a.reshape(-1).split(CHUNK), b.to(a.device).reshape(-1).split(CHUNK), strict=True):
        x, y = x.double(), y.double()
        signal += float(x.square().sum())
        noise += float((x - y).square().sum())
    return signal, noise


def decibels(signal: float, noise: float) -> float:
    """SQNR of two energies."""
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf if ratio == 0 else math.nan


def sqnr(a: Tensor, b: Tensor) -> float:
    """SQNR of b against a, in dB."""
    return decibels(*energies(a.detach(), b.detach()))


def weight_of(module: nn.Module) -> Any:
    """Return the module's weight: a tensor, of any class; None without one."""
    return getattr(module, "weight", None)


def is_quantised(module: nn.Module) -> bool:
    if isinstance(module, QATExperts) or any(is_packed(getattr(module, name)) for name in stacks_of(module)):
        return True
    return isinstance(module, QATLayer) or is_packed(weight_of(module))


def recipe_of(module: nn.Module) -> LinearRecipe | None:
    """Return the recipe of a layer whose numerics are aoquant's; None for a plain layer and for torchao's tensors."""
    if isinstance(module, QATLayer):
        return module.prepared.recipe
    weight = weight_of(module)
    return weight.recipe if isinstance(weight, PackedTensor) else None


def weight_value(module: nn.Module) -> Tensor:
    """(N, K) values that the layer multiplies by, in its weight's dtype.

    Raises:
        ValueError: a torchao tensor that cannot be dequantised.
    """
    w: Tensor = matrix_of(module).detach()
    if isinstance(module, QATLayer):
        return module.quantised_weight() if module.fake_quant else w
    return packed_value(w) if is_packed(w) else w


def packed_value(w: Any) -> Tensor:
    """(N, K) values of a packed weight, ours or torchao's, in its dtype.

    Raises:
        ValueError: a torchao tensor that cannot be dequantised.
    """
    # torchao gives it no dequantize: its codes and (G, N) scales are ours, transposed
    if type(w).__name__ == "Int4Tensor":
        e = Encoded(w.qdata.view(torch.uint8), w.scale.t(), w.zero_point.t(), None, w.shape[1])
        kind = Int4Float8 if w.activation_dtype == torch.float8_e4m3fn else Int4
        return kind(w.block_size[-1]).decode(e, w.dtype)
    if not has_value(w):
        raise ValueError(f"{type(w).__name__} has no dequantize()")
    return w.dequantize()


def has_value(w: Any) -> bool:
    """Return whether `packed_value` can tell the values of a packed weight."""
    return type(w).__name__ == "Int4Tensor" or type(w).dequantize is not Tensor.dequantize


def check_batch(batch: Any, name: str = "a batch") -> None:
    """Raise ValueError for a batch of Python's numbers and strings alone."""
    if all(isinstance(part, bool | int | float | str | None) for part in tree_leaves(batch)):
        raise ValueError(
            f"{name} holds no tensor, got {type(batch).__name__}: give torch.tensor([tokens]), of shape (sequences, tokens)"
        )


def run(model: nn.Module, batch: Any) -> Any:
    """Call `model` on a tensor, positional arguments (tuple, list) or keyword arguments (dict, BatchEncoding).

    The batch stays as it was: a model writes into a copy of a KV cache.
    """
    check_batch(batch)
    if isinstance(batch, Mapping):
        return model(**{name: _own(v) for name, v in batch.items()})
    if not isinstance(batch, tuple | list):
        return model(batch)
    try:
        inspect.signature(model.forward).bind(*batch)
    except TypeError as error:
        raise ValueError(
            f"a batch of {len(batch)} parts gives {type(model).__name__} its positional arguments, and it does not take them ({error}): leave out "
            "what is no input, such as labels ((x for x, y in loader)), or give a dict of keyword arguments"
        ) from None
    return model(*map(_own, batch))


def _own(value: Any) -> Any:
    """Return a copy of a KV cache, and anything else as it is."""
    return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value


def logits_of(output: Any) -> Tensor:
    """Return the tensor to compare of a model's output: its logits if it has any, otherwise its first tensor."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    logits = getattr(output, "logits", output.get("logits") if isinstance(output, Mapping) else None)
    found = next((v for v in (logits, *values) if isinstance(v, Tensor)), None)
    if found is None:
        raise ValueError(f"a model's output must be a tensor or hold one, got {type(output).__name__}")
    return found


@contextmanager
def undisturbed(*models: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients and nothing compiled inside; every module's mode as it was afterwards."""
    modes = [(m, m.training) for model in models for m in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Remove hooks when the block ends. handles: of hooks, which a generator may register one by one."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


@contextmanager
def having(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Let an attribute of objects have another value inside."""
    before = [(o, getattr(o, name)) for o in objects]
    try:
        for o, _ in before:
            setattr(o, name, value)
        yield
    finally:
        for o, was in before:
            setattr(o, name, was)


@contextmanager
def with_forward(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Give modules another forward inside."""
    before = [(vars(m), vars(m).get("forward")) for m in modules]
    try:
        for held, _ in before:
            held["forward"] = forward
        yield
    finally:
        for held, own in before:
            del held["forward"]
            if own is not None:
                held["forward"] = own


def shares(
    operand: Operand, hp: Tensor | None, packed: Encoded | None, held: Scales | None = None
) -> tuple[float | None, float | None]:
    """(share of saturated values, share of blocks on the floor); None where the given weights do not tell.

    hp: the (N, K) high-precision weight. packed: its codes as they are stored. held: the scales that its layer holds.
    """
    encoded = packed if hp is None or (held is None and operand.fitted) else operand.encode(hp, held)
    saturated = None
    if hp is not None and encoded is not None and not (held is None and operand.fitted):
        y = operand.transformed(hp, None if held is None else held.transform)
        saturated = float(operand.format.saturated(y, encoded).double().mean())
    stored = packed or encoded
    return saturated, None if stored is None else float(operand.floored(stored).double().mean())


def planned_bytes(operand: Operand, w: Tensor) -> int:
    """Bytes that aoquant's packed tensor will need for w."""
    e = operand.planned(torch.empty(w.shape, dtype=w.dtype, device="meta"))
    outer = 0 if e.outer is None else 4 * w.shape[0]
    return outer + operand.matrix_bytes(w.shape[1]) + stored_bytes(*(t for t in e[:3] if t is not None))
