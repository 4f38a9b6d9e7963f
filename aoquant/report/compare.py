"""Compare two models layer by layer, and by their own outputs.

One model runs the batch, and behind each of its layers the same layer of the other model is called with the same input,
so a figure is that layer's alone. For the models' own outputs each runs by itself from the same random state, without
hooks, which change the path that torch takes. A kernel that cannot run here is a result: the row keeps the reason, and
the other model drives the pass.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.experts.families import stacks_of
from aoquant.kv import hook
from aoquant.linear.kinds import is_packed, matrix_of
from aoquant.linear.prepared import QATLayer
from aoquant.linear.tensor import PackedTensor
from aoquant.ops import gemm_request
from aoquant.ops.router import route
from aoquant.planning.adapters import is_adapter
from aoquant.report.measure import decibels, energies, is_quantised, logits_of, recipe_of, run, sqnr, weight_of


@dataclass
class Pair:
    """One layer of both models, and what has been measured on it so far.

    values: compared output values. problem: why there are none. calls: of the layer in model a and in model b; (0, 0)
    when one of them fails.
    """

    fqn: str
    a: nn.Module
    b: nn.Module
    signal: float = 0.0
    noise: float = 0.0
    values: int = 0
    calls: list[int] = field(default_factory=lambda: [0, 0])
    backend: str = ""
    problem: str = ""

    @property
    def output_sqnr(self) -> float | None:
        return decibels(self.signal, self.noise) if self.values and not self.problem else None

    @property
    def uneven(self) -> str:
        """Return how often the layer's forward ran, where one model ran it more often than the other."""
        a, b = self.calls
        return f"its forward ran {a} time(s) in model_a and {b} in model_b" if a != b else ""

    def add(self, mine: Tensor, theirs: Tensor, swapped: bool) -> None:
        """Add one call's outputs; swapped: b made the first."""
        a, b = (theirs, mine) if swapped else (mine, theirs)
        signal, noise = energies(a, b)
        self.signal, self.noise, self.values = self.signal + signal, self.noise + noise, self.values + a.numel()
        both = [_backend(module, y) for module, y in ((self.a, a), (self.b, b))]
        self.backend = " → ".join(dict.fromkeys(both))


def _backend(module: nn.Module, y: Tensor) -> str:
    if stacks_of(module):
        return "grouped"  # a product for each expert, which explain shows
    recipe = recipe_of(module)
    if recipe is None:
        return "torchao" if is_packed(weight_of(module)) else "torch"
    if isinstance(module, QATLayer) and not module.fake_quant:
        return "torch"
    if isinstance(module, nn.Embedding):
        return "lookup"  # no GEMM
    matrix = matrix_of(module)
    held = matrix.encoded if isinstance(matrix, PackedTensor) else matrix
    operands = recipe.fprop_input, recipe.fprop_weight
    return route(gemm_request(recipe.contract, *operands, held, y.dtype, y.numel() // len(matrix))).name


def _shape(module: nn.Module) -> tuple[int, ...]:
    shapes = [tuple(getattr(module, name).shape) for name in stacks_of(module)]
    return tuple(n for shape in shapes for n in shape) or tuple(getattr(matrix_of(module), "shape", ()))


def why(error: Exception) -> str:
    """Return one line for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def pairs_of(a: nn.Module, b: nn.Module) -> list[Pair]:
    """Return every layer that is prepared or quantised in a or in b, with the layer of the same name.

    Raises:
        ValueError: there is none, nor a quantised KV cache, or the models do not match.
    """
    for side, model, other in (("a", a, b), ("b", b, a)):
        unmerged = [fqn for fqn, m in model.named_modules() if is_adapter(m) and not m.merged]
        if unmerged and not any(map(is_adapter, other.modules())):
            raise ValueError(
                f"model_{side} has adapters that are not merged ({unmerged[0]}), and the other model has none: call merge_and_unload() "
                "first, and compare what it returns"
            )
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
    if not pairs and not any(map(hook.quantised, (a, b))):
        raise ValueError("no layer of either model is prepared or quantised: call quantize_ on one of them")
    return list(pairs.values())


def compare(
    a: nn.Module, b: nn.Module, pairs: list[Pair], batch: Any, tick: Callable[[], object]
) -> tuple[float | None, str]:
    """Run `batch` through both models, filling `pairs`; (SQNR of the models' own outputs, or None and why).

    Raises:
        ValueError: a model fails outside the layers that are compared.
    """
    failures: list[str] = []
    for side, model in enumerate((a, b)):
        inside: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(_same_random_state(a, b))
            for pair in pairs:
                _watch(pair, side, side == len(failures), inside, tick, stack)
            try:
                logits_of(run(model, batch))
            except Exception as error:
                if not inside:
                    raise ValueError(f"model_{'ab'[side]} does not run this batch: {why(error)}") from error
                failures.append(f"{inside[-1]}: {why(error)}")
    for pair in pairs:
        if not pair.problem and not pair.values:
            pair.problem = failures[-1] if len(failures) == 2 else pair.uneven or "this batch does not reach the layer"
    if failures:
        for pair in pairs:  # what ran before the failure is no count
            pair.calls = [0, 0]
        return None, failures[0]
    outputs: list[Tensor] = []
    for model in (a, b):
        with _same_random_state(a, b):
            outputs.append(logits_of(run(model, batch)))
    if not outputs[0].numel():
        return None, "the models return nothing for this batch"
    return sqnr(*outputs), ""


def _same_random_state(a: nn.Module, b: nn.Module) -> AbstractContextManager[None]:
    """Both models start from the state of now, and it is the same afterwards."""
    devices = {t.device.index for m in (a, b) for t in m.parameters() if t.is_cuda}
    return torch.random.fork_rng(sorted(devices))


def _watch(
    pair: Pair, side: int, drives: bool, inside: list[str], tick: Callable[[], object], stack: ExitStack
) -> None:
    """Hook a pair into the model that runs: note which layer is running, and compare behind it if that model drives."""
    module, other = (pair.b, pair.a) if side else (pair.a, pair.b)

    def before(module: nn.Module, args: Any) -> None:
        pair.calls[side] += 1
        inside.append(pair.fqn)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        inside.pop()
        if not drives:
            return
        try:
            pair.add(output, other(*args, **kwargs), side == 1)
        except Exception as error:
            pair.problem = why(error)
        tick()

    stack.enter_context(module.register_forward_pre_hook(before))
    stack.enter_context(module.register_forward_hook(after, with_kwargs=True))
