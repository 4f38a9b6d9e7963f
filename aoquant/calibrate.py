"""Calibration: static scales found by running the model on a few batches.

Every prepared layer whose recipe holds scales is watched during one forward loop, in eval mode, without gradients and without fake
quantisation: the running minimum and maximum of its input, two scalars a layer however long the loop is. The format's own `measure`
then makes the scale of a two-element tensor that holds the two, and that is the scale of everything the layer saw, because a
per-tensor scale depends on nothing else. Held weight scales are measured anew on the weights as they are.

On several ranks the extrema are reduced before anything is measured, so every rank holds the same scales. Nothing is written unless
all layers have been reached and all scales are usable; a second calibration replaces the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from aoquant import held
from aoquant.formats import Scales
from aoquant.linear import cast
from aoquant.progress import track
from aoquant.qat import QATLayer, QATLinear
from aoquant.report.measure import run, undisturbed


def calibrate(model: nn.Module, forward_loop: Callable[[nn.Module], Any] | Iterable[Any]) -> None:
    """Find the scales that `model`'s prepared layers hold, static ones and the start values of learned ones, in place.

    forward_loop: runs the model on representative data, as forward_loop(model); or the batches themselves, each a tensor, positional
        arguments (tuple, list) or keyword arguments (dict). Scales come from the smallest and the largest input value of each layer.

    Raises:
        ValueError: no layer holds scales; or naming each layer that the loop did not reach, or that saw nothing but zeros, NaN or
            Inf. The scales are what they were then.
    """
    layers = {fqn: m for fqn, m in model.named_modules() if isinstance(m, QATLinear) and m.prepared.recipe.holds}
    if not layers:
        raise ValueError(
            "nothing to calibrate: no prepared layer holds scales. Prepare with a static activation format, such as "
            "Int8WeightConfig(activation='int8-tensor-static'), or with QATConfig(..., scales='static')"
        )
    watched = {fqn: m for fqn, m in layers.items() if m.prepared.recipe.input_scales != "dynamic"}
    ranges = {fqn: Range() for fqn in watched}
    if watched:
        with undisturbed(model), _plain(model), _observed(watched, ranges):
            if callable(forward_loop):
                forward_loop(model)
            else:
                for batch in track(forward_loop, "calibrate", "batch"):
                    run(model, batch)
        _reduce(list(ranges.values()))
    found = {fqn: _scales(m, ranges.get(fqn)) for fqn, m in layers.items()}
    if problems := [f"{fqn}: {reason}" for fqn, (_, reason) in found.items() if reason]:
        shown = "\n  ".join(problems[:10]) + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise ValueError(f"{len(problems)} layer(s) cannot be calibrated; scales are as they were:\n  {shown}")
    for fqn, layer in layers.items():
        for side, scales in found[fqn][0].items():
            held.write(layer, side, scales, ranges[fqn].dims if side == "input" else 2)
        layer.calibrated = True


def uncalibrated(model: nn.Module) -> list[str]:
    """Names of the prepared layers whose scales have no values yet."""
    return [fqn for fqn, m in model.named_modules() if isinstance(m, QATLinear) and not m.calibrated]


class Range:
    """Running minimum and maximum of a layer's input, (2,) in its dtype; None before the first value. dims: of the last input."""

    def __init__(self) -> None:
        self.extrema: Tensor | None = None
        self.dims = 2

    def add(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        seen = torch.stack(x.aminmax())
        if self.extrema is not None:
            before = self.extrema.to(seen)
            seen = torch.stack((torch.minimum(before[0], seen[0]), torch.maximum(before[1], seen[1])))
        self.extrema, self.dims = seen, x.dim()


@contextmanager
def _plain(model: nn.Module) -> Iterator[None]:
    """No fake quantisation inside; every layer's switch as it was afterwards."""
    switches = [(m, m.fake_quant) for m in model.modules() if isinstance(m, QATLayer)]
    try:
        for layer, _ in switches:
            layer.fake_quant = False
        yield
    finally:
        for layer, before in switches:
            layer.fake_quant = before


@contextmanager
def _observed(layers: dict[str, QATLinear], ranges: dict[str, Range]) -> Iterator[None]:
    def watch(fqn: str, seen: Range) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x, format = cast(next(iter((*args, *kwargs.values())))), layers[fqn].prepared.recipe.fprop_input
            assert format is not None
            seen.add(format.transformed(x.reshape(-1, x.shape[-1])).view(x.shape) if x.numel() else x)

        return hook

    hooks = [m.register_forward_pre_hook(watch(fqn, ranges[fqn]), with_kwargs=True) for fqn, m in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _reduce(ranges: list[Range]) -> None:
    """The extrema over all ranks, the same on each; a rank may have missed layers that another one reached."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    mine = [None if r.extrema is None else (r.dims, r.extrema.cpu()) for r in ranges]
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, mine)
    for i, r in enumerate(ranges):
        if reached := [rank[i] for rank in ranks if rank[i] is not None]:
            extrema = torch.stack([pair for _, pair in reached])
            r.dims, r.extrema = reached[0][0], torch.stack((extrema[:, 0].amin(), extrema[:, 1].amax()))


def _scales(layer: QATLinear, seen: Range | None) -> tuple[dict[str, Scales], str | None]:
    """New scales by side, and why they cannot be used."""
    recipe = layer.prepared.recipe
    scales: dict[str, Scales] = {}
    if any(isinstance(t, DTensor) for t in (*layer._parameters.values(), *layer._buffers.values())) and (
        recipe.weight_scales != "dynamic"
    ):
        return (
            scales,
            "it is sharded, and held weight scales are measured on whole weights: calibrate first, then shard",
        )
    if recipe.weight_scales != "dynamic":
        scales["weight"] = recipe.fprop_weight.measure(layer.weight.detach())
    if seen is not None:
        assert recipe.fprop_input is not None
        if seen.extrema is None:
            return scales, "the forward loop did not reach it: run batches that use every layer, or leave the layer out"
        low, high = seen.extrema.tolist()
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            return scales, f"its input ranged from {low} to {high}: look for the NaN or Inf in the data or the weights"
        if low == high == 0:
            return (
                scales,
                "its input was zero throughout, which gives no scale: run other batches, or leave the layer out",
            )
        scales["input"] = recipe.fprop_input.base.measure(seen.extrema.view(1, 2))
        used = (scales["input"].scale, scales["input"].outer)
        if any(t is not None and not bool((t > 0).all()) for t in used):
            narrow = str(seen.extrema.dtype).removeprefix("torch.")
            return (
                scales,
                f"its input ranged from {low} to {high}, too little for a scale in {narrow}: calibrate in bfloat16 or float32",
            )
    return scales, None
