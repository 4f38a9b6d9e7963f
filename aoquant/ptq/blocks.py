"""Blocks of a model, one after another, each with the inputs that it has behind the quantised blocks before it.

A block is the outermost child of a list of modules that holds chosen layers: a decoder layer. Layers outside of lists
are blocks of their own. Where a block's input is the output of the block before it, which the first batches show, its
inputs follow by running that block alone. Other blocks' inputs are captured by running the model up to them.
"""

import copy
import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aoquant.ptq import offload
from aoquant.report.measure import having, hooked, run, with_forward


class _Enough(Exception):
    """A forward has shown what it was run for."""


@dataclass(frozen=True)
class Call:
    """Arguments of a module in one forward of the model. mask: bool, the tokens that are no padding; or None.

    device: where the module runs, if its input is kept in host memory until then.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Tensor | None
    device: torch.device | None = None

    def run(self, module: nn.Module) -> Any:
        call = self if self.device is None else self._given(offload.brought(self.input, self.device))
        return module(*call.args, **call.kwargs)

    @property
    def input(self) -> Any:
        """Return the first tensor that the module is given."""
        return offload.passed(*self.args, **self.kwargs)

    def behind(self, output: Any) -> "Call":
        """Return the same call with the output of the block before as its input."""
        y = output if isinstance(output, Tensor) else output[0]
        return self._given(y if self.device is None else offload.aside(y))

    def without_input(self) -> "Call":
        """Return the same call with an empty input, which stays on the input's device."""
        return self._given(self.input.new_empty(0))

    def _given(self, y: Tensor) -> "Call":
        if self.args:
            return replace(self, args=(y, *self.args[1:]))
        name = next(n for n, a in self.kwargs.items() if isinstance(a, Tensor))
        return replace(self, kwargs=self.kwargs | {name: y})


@dataclass
class Block:
    """A block and its chosen layers by name.

    chained: its input is the output of the block before it. once: it runs once in each forward of the model.
    first: its first call, without the input. plain: it returns one tensor.
    """

    fqn: str
    module: nn.Module
    layers: dict[str, Any]
    chained: bool = False
    once: bool = False
    first: Call | None = None
    plain: bool = False


@dataclass
class Visit:
    """A block whose turn it is. calls: in the quantised model. twin, float_calls: the float block and its calls in the
    float model, for the asymmetric target.
    """

    block: Block
    calls: list[Call]
    twin: nn.Module | None = None
    float_calls: list[Call] = field(default_factory=list)


def find(layers: Mapping[str, nn.Module], model: nn.Module) -> list[Block]:
    """Return the blocks that hold `layers`, in the order of their names."""
    found: dict[str, Block] = {}
    for fqn, layer in layers.items():
        parts = fqn.split(".")
        paths = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
        home = next((p for p in paths if offload.is_list(model.get_submodule(p.rpartition(".")[0]))), fqn)
        found.setdefault(home, Block(home, model.get_submodule(home), {})).layers[fqn] = layer
    return list(found.values())


def below_head(model: nn.Module, blocks: Sequence[Block], batches: Sequence[Any]) -> nn.Module:
    """Return what is below the head of a transformers model, where the head is no block: logits are the largest tensor.

    The model itself, where there is no such part, or where the part does not take the batches.
    """
    inner = getattr(model, "base_model", None) if hasattr(model, "base_model_prefix") else None
    if not isinstance(inner, nn.Module) or not {b.module for b in blocks} <= {*inner.modules()}:
        return model
    names = {name for batch in batches if isinstance(batch, Mapping) for name in batch}
    return inner if names <= inspect.signature(inner.forward).parameters.keys() else model


def ordered(model: nn.Module, blocks: Sequence[Block], batches: Sequence[Any]) -> list[Block]:
    """Return the blocks in the order in which batches reach them, without those that no batch reaches."""
    counts: dict[str, int] = {}
    order: list[Block] = []
    last: list[Any] = [None]  # the output of the block that ran last

    def before(block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(args, kwargs, None)
        if block.fqn not in counts:
            block.chained = call.input is not None and last[0] is call.input
            block.first = None if call.input is None else call.without_input()
            order.append(block)
        counts[block.fqn] = counts.get(block.fqn, 0) + 1

    def after(block: Block, module: nn.Module, args: Any, output: Any) -> None:
        block.plain = isinstance(output, Tensor)
        last[0] = output[0] if isinstance(output, tuple | list) and output else output

    behind, seen = hooked(b.module.register_forward_hook(partial(after, b)) for b in blocks), 0
    with behind, _hooked((b.module, partial(before, b)) for b in blocks):
        for seen, batch in enumerate(batches, 1):  # noqa: B007
            run(model, batch)
            if len(order) == len(blocks):
                break
    for block in order:
        block.once = counts[block.fqn] == seen
    for previous, block in zip([None, *order[:-1]], order, strict=True):
        block.chained &= previous is not None and previous.once and block.once
    return order


def walk(
    model: nn.Module, blocks: list[Block], batches: Sequence[Any], *, twins: bool, device: torch.device | None
) -> Generator[Visit, None, None]:
    """Visit each block; what the caller does to it is seen by the blocks that follow. twins: run the float model
    beside it. device: where a block is while it is visited; its inputs are kept in host memory. None: they stay.
    """
    starts = [i for i, b in enumerate(blocks) if not b.chained]
    chains = [blocks[i:j] for i, j in zip(starts, [*starts[1:], len(blocks)], strict=True)]
    floats = [_captured(model, chain, batches, device) for chain in chains] if twins else []
    for number, chain in enumerate(chains):
        captured = floats[0] if floats and number == 0 else _captured(model, chain, batches, device)
        float_calls = list(floats[number][chain[0].fqn]) if twins else []
        calls = captured.pop(chain[0].fqn)
        for block, following in zip(chain, [*chain[1:], None], strict=True):
            with offload.on_device(block.module, device):
                # weights are shared: codes take their place in the block, and never change them
                shared = {id(p): p for p in block.module.parameters()}
                twin = copy.deepcopy(block.module, shared) if twins else None
                del shared
                visit = Visit(block, calls, twin, float_calls)
                yield visit
                if following is not None:
                    _advance(calls, block.module, captured[following.fqn])
                    if twin is not None:
                        _advance(float_calls, twin, floats[number][following.fqn])
                visit.twin = twin = None  # frees the block


def _advance(calls: list[Call], module: nn.Module, following: Sequence[Call]) -> None:
    """Replace the calls of a block by those of the next one, one after another: all inputs are gigabytes."""
    for i, then in enumerate(following):
        calls[i] = then.behind(calls[i].run(module))


def _captured(
    model: nn.Module, chain: Sequence[Block], batches: Sequence[Any], device: torch.device | None
) -> dict[str, list[Call]]:
    """Return the calls of each block of a chain, of which the first one alone keeps its input.

    The blocks are not run where the model's own code does not look at what they return.
    """
    if len(chain) > 1 and all(b.plain and b.once and b.first is not None for b in chain):
        with with_forward((b.module for b in chain), offload.passed):
            found = _calls(model, chain, batches[:1], device)
            if all(found[b.fqn] and _alike(b.first, found[b.fqn][0]) for b in chain[1:]):
                return _calls(model, chain, batches, device)
    return _calls(model, chain, batches, device)


def _alike(a: Call | None, b: Call) -> bool:
    """Return whether two calls without their inputs have the same arguments."""
    ours, theirs = ([] if c is None else tree_leaves((c.args, c.kwargs)) for c in (a, b))
    return len(ours) == len(theirs) and all(
        torch.equal(x, y)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else type(x) is type(y) and (x == y or not isinstance(x, bool | int | float | str))
        for x, y in zip(ours, theirs, strict=True)
    )


def _calls(
    model: nn.Module, chain: Sequence[Block], batches: Sequence[Any], device: torch.device | None
) -> dict[str, list[Call]]:
    """Run the model on each batch, up to the last block of a chain, and return the calls of the chain's blocks."""
    found: dict[str, list[Call]] = {b.fqn: [] for b in chain}

    def watch(block: Block, mask: Tensor | None, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(args, kwargs, mask, device)
        found[block.fqn].append(call.behind(call.input) if block is chain[0] else call.without_input())
        if block is chain[-1] and block.once:
            raise _Enough

    for batch in batches:
        mask = tokens_that_count(batch)
        with _hooked((b.module, partial(watch, b, mask)) for b in chain), suppress(_Enough):
            run(model, batch)
    return found


def groups(visit: Visit) -> list[list[str]]:
    """Return layers of a block that are given the same tensor, such as q, k and v, in the order in which they run;
    without those that no call reaches.
    """
    found: list[tuple[Tensor, list[str]]] = []

    def watch(fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = Call(args, kwargs, None).input
        if not any(fqn in names for _, names in found):
            home = next((names for given, names in found if given is x), None)
            if home is None:
                found.append((x, [fqn]))
            else:
                home.append(fqn)

    with _hooked((layer, partial(watch, fqn)) for fqn, layer in visit.block.layers.items()):
        for call in visit.calls:
            call.run(visit.block.module)
            if sum(len(names) for _, names in found) == len(visit.block.layers):
                break
            found = [(x.new_empty(0), names) for x, names in found]  # the next call's tensors are others
    return [names for _, names in found]


def call_of(block: nn.Module, module: nn.Module, call: Call) -> Call | None:
    """Return the first call of a module inside of a call of its block, whose forward ends there; None without one."""
    seen: list[Any] = []

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(Call(args, kwargs, call.mask))
        raise _Enough

    with _hooked([(module, hook)]), suppress(_Enough):
        call.run(block)
    return seen[0] if seen else None


def _hooked(hooks: Iterable[tuple[nn.Module, Any]]) -> AbstractContextManager[None]:
    """Forward pre-hooks with keyword arguments, inside."""
    return hooked(module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks)


def without_cache(model: nn.Module) -> AbstractContextManager[None]:
    """Let transformers' models keep no keys and values, which a block that runs twice would add twice."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return having((c for c in configs.values() if isinstance(getattr(c, "use_cache", None), bool)), "use_cache", False)


def tokens_that_count(batch: Any) -> Tensor | None:
    """Return (B, T) bool, which tokens of a batch are no padding; None where it does not say."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
