"""Calibration: static scales, and fitted transforms, found by running the model on a few batches.

Every prepared layer whose recipe holds scales is watched during one forward loop, in eval mode, without gradients and
without fake quantisation: two scalars a layer, the running minimum and maximum of its input, from which the format's
own `measure` makes the scale. A layer with a fitted transform adds up the Gram matrices of its input's blocks instead
(`transforms/wush.py`). Ranks are reduced before anything is measured, and nothing is written unless all is usable.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from aoquant._messages import check_model, naming, refuse, track
from aoquant.formats import Operand, Scales
from aoquant.formats.operand import SCALES
from aoquant.kv import hook
from aoquant.linear import held
from aoquant.linear.checks import cast, check_width
from aoquant.linear.prepared import PreparedModule, QATLinear
from aoquant.planning.fused import share_outer_scales
from aoquant.report.measure import having, hooked, run, undisturbed
from aoquant.transforms import wush

SHARDED = "it is sharded, and held weight scales and transforms are made of whole weights: calibrate first, then shard"
NOT_REACHED = "the forward loop did not reach it: run batches that use every layer, or leave the layer out"


def calibrate(model: nn.Module, forward_loop: Callable[[nn.Module], Any] | Iterable[Any]) -> None:
    """Find the scales that `model`'s prepared layers hold, static ones and the start values of learned ones, and
    fitted transforms, and static scales of KV caches, in place.

    forward_loop: runs the model on representative data, as forward_loop(model); or the batches themselves, each a
        tensor, positional arguments (tuple, list) or keyword arguments (dict). Scales come from the smallest and the
        largest input value of each layer, transforms from all of its input values.

    Raises:
        ValueError: `model` is no module, or forward_loop neither; no layer holds scales; or naming each layer that the
            loop did not reach, or that saw nothing but zeros, NaN or Inf, or the first that got an input of a wrong
            width. The scales are what they were then.

    Example:

            quantize_(model, QATConfig(Int8WeightConfig(activation="int8-tensor-static"), step="prepare"))
            calibrate(model, [batch_1, batch_2])
    """
    check_model(model)
    one = isinstance(forward_loop, Tensor | Mapping | str)  # iterating over these gives no batches
    if not callable(forward_loop) and (
        one or not (isinstance(forward_loop, Iterable) or hasattr(forward_loop, "__getitem__"))
    ):
        raise ValueError(
            "calibrate: forward_loop must be a function that runs the model it is given, or an iterable of batches, "
            f"got {type(forward_loop).__name__}{': put one batch into a list, [batch]' if one else ''}"
        )
    layers = {fqn: m for fqn, m in model.named_modules() if isinstance(m, QATLinear) and m.prepared.recipe.holds}
    caches = hook.to_calibrate(model)
    if not layers and not caches:
        raise ValueError(
            "nothing to calibrate: no prepared layer holds scales or a fitted transform, and no KV cache static scales. "
            "Prepare with a static activation format, such as "
            "Int8WeightConfig(activation='int8-tensor-static'), with QATConfig(..., scales='static'), or with transform=aoquant.WUSH(16)"
        )
    refuse({fqn: SHARDED for fqn, m in layers.items() if _is_sharded(m)}, "scales are as they were")
    seen: dict[str, Range | Gram] = {fqn: s for fqn, m in layers.items() if (s := _observer(m)) is not None}
    if seen or caches:
        prepared = [m for m in model.modules() if isinstance(m, PreparedModule)]
        observed = hooked(_observed(layers, seen))
        with undisturbed(model), having(prepared, "fake_quant", False), observed, hook.observing(caches.values()):
            if callable(forward_loop):
                forward_loop(model)
            else:
                for batch in track(forward_loop, "calibrate", "batch"):
                    run(model, batch)
        if distributed.is_initialized():
            _reduce([s for s in seen.values() if isinstance(s, Range)])
            for s in seen.values():
                if isinstance(s, Gram):
                    s.reduce()
    found: dict[str, Any] = {fqn: _scales(layers[fqn], seen.get(fqn)) for fqn in track(layers, "measure")}
    cached = hook.calibrated(caches)
    problems = {fqn: why for fqn, why in (*found.items(), *cached.items()) if isinstance(why, str)}
    refuse(problems, "scales are as they were")
    for fqn, module in caches.items():
        for name, scale in dict(cached[fqn]).items():  # type: ignore[arg-type]
            module.get_buffer(name).copy_(scale)
        module.kv_quant.calibrated = True
    for fqn, layer in layers.items():
        for side, scales in found[fqn].items():
            watched = seen.get(fqn)
            held.write(layer, side, scales, watched.dims if side == "input" and isinstance(watched, Range) else 2)
        layer.calibrated = True
    share_outer_scales(model)


def _is_sharded(layer: QATLinear) -> bool:
    """Return whether what the layer holds is made of a whole weight, and the weight is not whole."""
    recipe = layer.prepared.recipe
    tensors = (*layer._parameters.values(), *layer._buffers.values())
    return (recipe.weight_scales != "dynamic" or recipe.fitted) and any(isinstance(t, DTensor) for t in tensors)


def uncalibrated(model: nn.Module) -> list[str]:
    """Names of the prepared layers and KV caches whose scales have no values yet."""
    layers = [fqn for fqn, m in model.named_modules() if isinstance(m, QATLinear) and not m.calibrated]
    return layers + hook.uncalibrated(hook.to_calibrate(model).values())


class Range:
    """Running minimum and maximum of what `format` rounds of a layer's input, (2,) in its dtype; None before values.

    dims: of the last input.
    """

    def __init__(self, format: Operand) -> None:
        self.format = format
        self.extrema: Tensor | None = None
        self.dims = 2

    def add(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        seen = torch.stack(self.format.transformed(x.reshape(-1, x.shape[-1])).aminmax())
        if self.extrema is not None:
            (low, high), (new_low, new_high) = self.extrema.to(seen), seen
            seen = torch.stack((torch.minimum(low, new_low), torch.maximum(high, new_high)))
        self.extrema, self.dims = seen, x.dim()


class Gram:
    """Sum of the Grams of a layer's input, (K / size, size, size) float64, and of how many rows."""

    def __init__(self, size: int, like: Tensor) -> None:
        k, self.rows = like.shape[1], 0
        self.total = torch.zeros(k // size, size, size, dtype=torch.float64, device=like.device)

    def add(self, x: Tensor) -> None:
        self.total += wush.gram(x.reshape(-1, x.shape[-1]), self.total.shape[-1])
        self.rows += x.numel() // x.shape[-1]

    def reduce(self) -> None:
        """Add up the ranks' sums."""
        rows = self.total.new_tensor([float(self.rows)])
        distributed.all_reduce(self.total)
        distributed.all_reduce(rows)
        self.rows = int(rows)


def _observer(layer: QATLinear) -> Range | Gram | None:
    recipe = layer.prepared.recipe
    if recipe.fitted and recipe.transform is not None:
        return Gram(recipe.transform.size, layer.matrix().detach())
    if recipe.input_scales not in SCALES[1:]:
        return None
    assert recipe.fprop_input is not None
    return Range(recipe.fprop_input)


def _observed(layers: dict[str, QATLinear], seen: dict[str, Range | Gram]) -> Iterator[Any]:
    """Register hooks that show layers' inputs to their observers."""

    def watch(fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(iter((*args, *kwargs.values())))
        with naming(fqn or "linear"):
            check_width(x, layers[fqn].in_features)
        seen[fqn].add(cast(x))

    return (layers[fqn].register_forward_pre_hook(partial(watch, fqn), with_kwargs=True) for fqn in seen)


def _reduce(ranges: list[Range]) -> None:
    """The extrema over all ranks, the same on each; a rank may have missed layers that another one reached."""
    mine = [None if r.extrema is None else (r.dims, r.extrema.cpu()) for r in ranges]
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, mine)
    for i, r in enumerate(ranges):
        if reached := [rank[i] for rank in ranks if rank[i] is not None]:
            dims, extrema = zip(*reached, strict=True)
            low, high = torch.stack(extrema).unbind(1)
            r.dims, r.extrema = dims[0], torch.stack((low.amin(), high.amax()))


def _scales(layer: QATLinear, seen: Range | Gram | None) -> dict[str, Scales] | str:
    """Return new scales by side, or why they cannot be used."""
    recipe = layer.prepared.recipe
    scales: dict[str, Scales] = {}
    if recipe.weight_scales in SCALES[1:]:
        scales["weight"] = recipe.fprop_weight.measure(layer.matrix().detach())
    if isinstance(seen, Gram):
        return _fitted(layer, seen)
    if seen is not None:
        assert recipe.fprop_input is not None
        if seen.extrema is None:
            return NOT_REACHED
        low, high = seen.extrema.tolist()
        ranged = f"its input ranged from {low} to {high}"
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            return f"{ranged}: look for the NaN or Inf in the data or the weights"
        if low == high == 0:
            return "its input was zero throughout, which gives no scale: run other batches, or leave the layer out"
        scales["input"] = recipe.fprop_input.format.measure(seen.extrema.view(1, 2))
        used = (scales["input"].scale, scales["input"].outer)
        if any(t is not None and not bool((t > 0).all()) for t in used):
            narrow = str(seen.extrema.dtype).removeprefix("torch.")
            return f"{ranged}, too little for a scale in {narrow}: calibrate in bfloat16 or float32"
    return scales


def _fitted(layer: QATLinear, seen: Gram) -> dict[str, Scales] | str:
    """The transform of both sides, or why none is fitted; on the CPU, where all ranks have one eigensolver."""
    if seen.rows == 0:
        return NOT_REACHED
    weight, size = layer.matrix().detach(), seen.total.shape[-1]
    try:
        of_x, of_w = wush.fit((seen.total / seen.rows).cpu(), (wush.gram(weight, size) / len(weight)).cpu())
    except ValueError as error:
        return str(error)
    if distributed.is_initialized():
        of_x, of_w = of_x.to(weight.device), of_w.to(weight.device)
        for t in (of_x, of_w):
            distributed.broadcast(t, 0)
    return {"input": Scales(transform=of_x), "weight": Scales(transform=of_w)}
