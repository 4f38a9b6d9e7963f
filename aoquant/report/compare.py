"""One pass that compares two models layer by layer.

The comparison is local. One model runs the batch, and behind each of its layers the same layer of the other model is called with
the same input. So a layer's figure is that layer's alone: an early error does not reappear in every later row, nothing is stored
but two sums a layer, and "inf" means that this GEMM is reproduced bit for bit. What does add up is measured once more on the whole
models, each running by itself from the same random state.

A kernel that cannot run here is a result, not a crash: the row keeps the reason instead of a number. When it is in the model
that drives the pass, the other one drives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.layers.qat import QATLayer
from aoquant.ops import gemm_request
from aoquant.ops.router import route
from aoquant.report.measure import (
    decibels,
    energies,
    is_packed,
    is_quantised,
    logits_of,
    recipe_of,
    run,
    sqnr,
    weight_of,
)
from aoquant.tensor import PackedTensor


@dataclass
class Pair:
    """One layer of both models, and what has been measured on it so far. values: compared output values; problem: why none."""

    fqn: str
    a: nn.Module
    b: nn.Module
    signal: float = 0.0
    noise: float = 0.0
    values: int = 0
    backend: str = ""
    problem: str = ""

    @property
    def output_sqnr(self) -> float | None:
        return decibels(self.signal, self.noise) if self.values and not self.problem else None

    def add(self, mine: Tensor, theirs: Tensor, swapped: bool) -> None:
        """Add one call's outputs; swapped: b made the first."""
        a, b = (theirs, mine) if swapped else (mine, theirs)
        signal, noise = energies(a, b)
        self.signal, self.noise, self.values = self.signal + signal, self.noise + noise, self.values + a.numel()
        both = [_backend(module, y) for module, y in ((self.a, a), (self.b, b))]
        self.backend = " → ".join(dict.fromkeys(both))


def _backend(module: nn.Module, y: Tensor) -> str:
    recipe = recipe_of(module)
    if recipe is None:
        return "torchao" if is_packed(weight_of(module)) else "torch"
    if isinstance(module, QATLayer) and not module.fake_quant:
        return "torch"
    if isinstance(module, nn.Embedding):
        return "lookup"  # no GEMM
    weight = weight_of(module)
    held = weight.encoded if isinstance(weight, PackedTensor) else weight
    operands = recipe.fprop_input, recipe.fprop_weight
    return route(gemm_request(recipe.contract, *operands, held, y.dtype, y.numel() // len(weight))).name


def _shape(module: nn.Module) -> tuple[int, ...]:
    return tuple(getattr(weight_of(module), "shape", ()))


def why(error: Exception) -> str:
    """One line for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def pairs_of(a: nn.Module, b: nn.Module) -> list[Pair]:
    """Every layer that is prepared or quantised in a or in b, with the layer of the same name.

    Raises:
        ValueError: there is none, or the models do not match.
    """
    in_a, in_b = (dict(m.named_modules(remove_duplicate=False)) for m in (a, b))
    names = [n for n, m in (*a.named_modules(), *b.named_modules()) if is_quantised(m)]
    pairs: dict[tuple[int, int], Pair] = {}
    for fqn in dict.fromkeys(names):
        mine, theirs = in_a.get(fqn), in_b.get(fqn)
        if mine is None or theirs is None or not (_shape(mine) and _shape(theirs)):
            raise ValueError(
                f"{fqn}: is quantised in one model, and the other has no such layer: compare two forms of one model"
            )
        if _shape(mine) != _shape(theirs):
            raise ValueError(
                f"{fqn}: the weights have shapes {_shape(mine)} and {_shape(theirs)}: compare two forms of one model"
            )
        if mine is theirs:
            raise ValueError(
                f"{fqn}: is one object in both models; quantize_ works in place, so copy.deepcopy the model before it"
            )
        pairs.setdefault((id(mine), id(theirs)), Pair(fqn, mine, theirs))
    if not pairs:
        raise ValueError("no layer of either model is prepared or quantised: call quantize_ on one of them")
    return list(pairs.values())


def compare(
    a: nn.Module, b: nn.Module, pairs: list[Pair], batch: Any, tick: Callable[[], object]
) -> tuple[float | None, str]:
    """Run `batch` through both models, filling `pairs`; (SQNR of the models' outputs, or None and why).

    Raises:
        ValueError: a model fails outside the layers that are compared.
    """
    outputs: list[Tensor] = []
    failures: list[str] = []
    for side, model in enumerate((a, b)):
        devices = {t.device.index for m in (a, b) for t in m.parameters() if t.is_cuda}
        inside: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(sorted(devices)))  # both models start from the same state
            for pair in pairs:
                _watch(pair, side == 1, not outputs, inside, tick, stack)
            try:
                outputs.append(logits_of(run(model, batch)))
            except Exception as error:
                if not inside:
                    raise ValueError(f"model_{'ab'[side]} does not run this batch: {why(error)}") from error
                failures.append(f"{inside[-1]}: {why(error)}")
    for pair in pairs:
        if not pair.values and not pair.problem:
            pair.problem = failures[-1] if len(failures) == 2 else "this batch does not reach the layer"
    if failures:
        return None, failures[0]
    if not outputs[0].numel():
        return None, "the models return nothing for this batch"
    return sqnr(*outputs), ""


def _watch(
    pair: Pair, swapped: bool, drives: bool, inside: list[str], tick: Callable[[], object], stack: ExitStack
) -> None:
    """Hook a pair into the model that runs: note which layer is running, and compare behind it if that model drives."""
    module, other = (pair.b, pair.a) if swapped else (pair.a, pair.b)

    def before(module: nn.Module, args: Any) -> None:
        inside.append(pair.fqn)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        inside.pop()
        if not drives:
            return
        try:
            pair.add(output, other(*args, **kwargs), swapped)
        except Exception as error:
            pair.problem = why(error)
        tick()

    handles = module.register_forward_pre_hook(before), module.register_forward_hook(after, with_kwargs=True)
    for handle in handles:
        stack.callback(handle.remove)
