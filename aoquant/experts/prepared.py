"""Prepared experts: a module of stacked experts under another class, as a prepared linear layer is one.

Parameters, their shapes and the state_dict stay. A module with transformers' protocol (`families.PROTOCOL`) gets a
forward of ours, which does what transformers' own does, in its order, so that results are equal bit for bit once
weights are. "eager" and the other implementations of transformers add up in a different order, and the prepared forward
follows the model's config in that. A bias is added apart, to the rounded product. A token whose expert is E (expert
parallelism marks tokens of other ranks so) adds nothing.

Weight scales are made from the weights in every forward, or held: experts that `unpack_` made from packed ones keep the
packed scales in buffers, one expert after another, and multiply the packed codes.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aoquant import ops
from aoquant.distributed import ranks
from aoquant.distributed.fsdp import layer_class, swap_class
from aoquant.distributed.gathered import GatheredWeight
from aoquant.experts import sharded
from aoquant.experts.families import reading_of
from aoquant.experts.grouped_linear import Rows, grouped_bias, why_not_at_once
from aoquant.experts.stack import Stack
from aoquant.formats import Encoded, Scales
from aoquant.formats.random import fresh_state
from aoquant.linear import held
from aoquant.linear.prepared import Prepared, PreparedModule


class QATExperts(PreparedModule):
    """Experts whose forward computes what the converted module will compute.

    stacks: prepare's note on each prepared parameter, by its name; the others are float, or packed already.
    show: what makes the products of a parameter while it is calibrated, by the parameter's name, as `Stack` has it.
    """

    plain: ClassVar[type[nn.Module]]
    stacks: dict[str, Prepared]
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    show: Mapping[str, Callable[[int, Tensor], Tensor | None]] = MappingProxyType({})
    _data_rank: int | None = None

    @classmethod
    def prepare_stack(cls, module: nn.Module, name: str, prepared: Prepared, scales: Scales | None = None) -> Self:
        """Prepare the parameter called `name`, in place, or give it another recipe: a state of random numbers that is
        there stays. scales: to hold, with experts in front (E, ...).
        """
        if not isinstance(module, QATExperts):
            swap_class(module, prepared_class(layer_class(module)))  # type: ignore[arg-type]
            vars(module).update(stacks={}, fake_quant=True)
        assert isinstance(module, cls)
        module.stacks[name] = prepared
        if prepared.recipe.draws and _random(name) not in module._buffers:
            device = module._parameters[name].device  # type: ignore[union-attr]
            module.register_buffer(_random(name), fresh_state(prepared.config.seed, prepared.fqn, device))
            ranks.expect(module)
        if scales is not None:
            held.register(module, _side(name), scales, learned=False)
        return module

    def unprepare_stack(self, name: str) -> None:
        """Make the parameter called `name` a plain one; with the last of them the module is a plain one."""
        for state in self.states(name):
            del self._buffers[state]
        del self.stacks[name]
        if not self.stacks:
            del self.stacks, self.fake_quant
            vars(self).pop(ranks.RANK, None)
            swap_class(self, self.plain)

    def unprepare(self) -> nn.Module:
        for name in list(self.stacks):
            self.unprepare_stack(name)
        return self

    def matrix(self, name: str, expert: int) -> Tensor:
        """The weight (N, K) of one expert."""
        w: Tensor = getattr(self, name)[expert]
        return w.t().contiguous() if self.is_transposed else w

    def values(self, name: str) -> Tensor:
        """Return the parameter that is encoded, in the module's own layout."""
        return getattr(self, name)

    def states(self, *stacks: str) -> list[str]:
        """Names of the buffers that belong to the training of `stacks`, by default of all: states of random numbers and
        held scales.
        """
        possible = ((_random(n), *(f"{_side(n)}_{part}" for part in Scales._fields)) for n in stacks or self.stacks)
        return [name for names in possible for name in names if name in self._buffers]

    def held_scales(self, name: str, expert: int) -> Scales | None:
        """The scales that a parameter holds for one expert; None where they are made from the weight."""
        if self.stacks[name].recipe.weight_scales == "dynamic":
            return None
        return Scales(*(None if t is None else t[expert] for t in held.read(self, _side(name))))

    @torch.no_grad()
    def encode_expert(self, name: str, expert: int, dtype: torch.dtype) -> Encoded:
        """Return one expert's codes and scales, as forward multiplies them and convert stores them.

        dtype: in which forward sees the weight.
        """
        operand, scales = self.stacks[name].recipe.fprop_weight, self.held_scales(name, expert)
        w_NK = self.matrix(name, expert).to(dtype)
        return ops.codec.encode(operand, w_NK) if scales is None and operand.portable else operand.encode(w_NK, scales)

    @torch.no_grad()
    def quantised_weight(self, name: str) -> Tensor:
        """The values that the parameter's experts multiply by, in its shape and dtype; one expert at a time."""
        operand, w = self.stacks[name].recipe.fprop_weight, getattr(self, name).detach()
        values = torch.empty_like(w)
        for expert in range(len(w)):
            made = operand.decode(self.encode_expert(name, expert, w.dtype), w.dtype)
            values[expert] = made.t() if self.is_transposed else made
        return values

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H) of hidden_states (T, H), and the experts and their weights (T, top k) of each token."""
        if any(isinstance(p, DTensor) for p in self._parameters.values()):
            return self._forward_on_shards(hidden_states, top_k_index, top_k_weights)
        return self._forward_whole(hidden_states, top_k_index, top_k_weights)

    @torch.compiler.disable
    def _forward_on_shards(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        skips = self.fake_quant or not self._eager
        forward = type(self)._forward_whole
        return sharded.run(self, forward, hidden_states, top_k_index, top_k_weights, skips=skips)

    def _forward_whole(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The forward over parameters that are no DTensors."""
        if torch.compiler.is_compiling() and any(isinstance(getattr(self, n), GatheredWeight) for n in self.stacks):
            return self._forward_outside(hidden_states, top_k_index, top_k_weights)
        stacks = ((p.recipe, getattr(self, name), self.is_transposed) for name, p in self.stacks.items())
        if self.fake_quant and not self._eager and all(why_not_at_once(*stack) is None for stack in stacks):
            return self._forward_routed(hidden_states, top_k_index, top_k_weights, True)
        return self._forward_in_a_loop(hidden_states, top_k_index, top_k_weights)

    @torch.compiler.disable
    def _forward_outside(self, *routed: Tensor) -> Tensor:
        """The forward over codes, outside a compiler's graph."""
        return self._forward_whole(*routed)

    @torch.compiler.disable
    def _forward_in_a_loop(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The forward that asks how many tokens each expert has, and multiplies expert by expert."""
        if not self.fake_quant:
            return self.plain.forward(self, hidden_states, top_k_index, top_k_weights)
        return self._forward_routed(hidden_states, top_k_index, top_k_weights, False)

    @property
    def _eager(self) -> bool:
        """Return whether transformers would run the class's own forward."""
        return sharded.runs_eagerly(self)

    def made_stacks(self) -> dict[str, Stack]:
        """Return the prepared parameters with what their products need."""
        made = {}
        for name, p in self.stacks.items():
            random = self._buffers.get(_random(name))
            rank = 0 if random is None else ranks.of(self)  # among the ranks with other tokens
            held_of = None if p.recipe.weight_scales == "dynamic" else partial(self.held_scales, name)
            w, show = getattr(self, name), self.show.get(name)
            made[name] = Stack(p.fqn, w, self.is_transposed, p.recipe, random, rank, held_of, show=show)
        return made

    def _forward_routed(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, at_once: bool
    ) -> Tensor:
        """Sort, multiply, gate, multiply again and add up.

        at_once: without a look at the routing: shapes do not depend on it, and nothing waits for it.
        """
        eager, stacks, module = self._eager, self.made_stacks(), cast(Any, self)
        tokens, top_k = top_k_index.shape
        # rows of one expert: eager takes them by top-k position, then token; the others by token
        index, weights = (t.t() if eager else t for t in (top_k_index, top_k_weights))
        ids, perm = torch.sort(index.reshape(-1), stable=eager)
        token, weights = perm % tokens if eager else perm // top_k, weights.reshape(-1)[perm]
        experts = torch.arange(self.num_experts, device=ids.device, dtype=ids.dtype)
        rows, ends = Rows(torch.searchsorted(ids, experts, right=True).to(torch.int32)), None
        first = rows
        if at_once:
            weights = weights.masked_fill(ids >= self.num_experts, 0)  # tokens of other ranks
            ids = ids.clamp(max=self.num_experts - 1)
            place = torch.empty_like(perm).scatter_(0, perm, torch.arange(len(perm), device=perm.device))
            first = Rows(rows.ends, token, place.view(tokens, top_k))
            y = hidden_states
        else:
            ends = rows.ends.tolist()
            ids, token, perm, weights = (t[: ends[-1]] for t in (ids, token, perm, weights))
            y = hidden_states[token]

        y = self._product(y, "gate_up_proj" if self.has_gate else "up_proj", stacks, ids, first, ends)
        y = module._apply_gate(y) if self.has_gate else module.act_fn(y)
        y = self._product(y, "down_proj", stacks, ids, rows, ends)
        # a norm behind every expert, where the class has one (transformers 5.24's MuseSpark)
        y = module.post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y
        y = y * weights.unsqueeze(-1)
        if eager:
            assert ends is not None
            out = torch.zeros_like(hidden_states)
            for start, end in pairwise([0, *ends]):
                out = out.index_add(0, token[start:end], y[start:end].to(out.dtype))
            return out
        shape = tokens * top_k, y.shape[-1]
        by_token = y.new_empty(shape) if at_once else y.new_zeros(shape)  # at once, every row is written
        return by_token.index_copy_(0, perm, y).view(tokens, top_k, y.shape[-1]).sum(1).to(hidden_states.dtype)

    def _product(
        self, x: Tensor, name: str, stacks: dict[str, Stack], ids: Tensor, rows: Rows, ends: list[int] | None
    ) -> Tensor:
        """(S, N): rows sorted by expert, times the experts of one parameter, plus their biases. ends: the rows' ends,
        where the host knows them.
        """
        eager, stack = self._eager, stacks.get(name)
        w: Tensor = getattr(self, name) if stack is None else stack.w
        x = x if eager else x.to(w.dtype)  # as transformers casts, which matters under autocast
        if stack is None:
            y = self._unprepared(x, w, rows, ends if eager else None)
        else:
            try:
                y = stack.times_rows(x, rows, ends)
            except ValueError as error:
                raise ValueError(f"{stack.fqn}: {error}") from None
        bias: Tensor | None = getattr(self, f"{name}_bias") if self.has_bias else None
        if bias is None:
            return y
        if ends is None:
            return grouped_bias(y, bias, ids, rows.ends)
        # transformers' grouped_mm adds in place: under autocast the sum has the product's dtype, not a wider bias's
        return y + bias[ids] if eager else (y + bias[ids]).to(y.dtype)

    def _unprepared(self, x: Tensor, w: Any, rows: Rows, ends: list[int] | None) -> Tensor:
        """The product with a parameter that is float, or packed already, as the plain class makes it. ends: eager's."""
        if ends is None:
            x = x if rows.token is None else x[rows.token]
            y: Tensor = nn.functional.grouped_mm(x, w if self.is_transposed else w.transpose(-2, -1), offs=rows.ends)
            behind = torch.arange(len(y), device=y.device) >= rows.ends[-1]  # these it does not write
            return y.masked_fill(behind.unsqueeze(-1), 0.0)
        hit = [(e, x[a:b]) for e, (a, b) in enumerate(pairwise([0, *ends])) if b > a]
        if self.is_transposed:
            products = [part @ w[e] for e, part in hit]
        else:
            products = [nn.functional.linear(part, w[e]) for e, part in hit]
        return torch.cat(products) if products else x.new_empty(0, w.shape[-1 if self.is_transposed else 1])

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """A cast leaves held scales as they are: a scale that rounds afterwards is another scale."""
        before = {name: self._buffers[name].data for name in self.states()}  # type: ignore[union-attr]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        held.keep_dtype(self, before)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, prepared in self.stacks.items():
            if _random(name) in self._buffers:  # a checkpoint from before this training knows no state: at step 0
                fresh = fresh_state(prepared.config.seed, prepared.fqn)
                state_dict.setdefault(prefix + _random(name), fresh)
            else:  # of an earlier recipe, which drew
                state_dict.pop(prefix + _random(name), None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        prepared = ", ".join(f"{name}=({p.recipe})" for name, p in self.stacks.items())
        return f"{super().extra_repr()}{prepared}{'' if self.fake_quant else ', fake_quant=False'}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time, so that copies and pickles name the plain one."""
        return _empty, (self.plain,), self.__dict__


class QATReadExperts(QATExperts):
    """Experts of a class in `READINGS`: its own forward, which reads a `Stack` in place of each prepared parameter."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain class's."""
        if not self.fake_quant:
            return self.plain.forward(self, *args, **kwargs)
        try:
            for name, stack in self.made_stacks().items():
                if isinstance(stack.w, DTensor):
                    raise ValueError(
                        f"{stack.fqn} is sharded (DTensor), and its class is not quantised so: use fully_shard"
                    )
                vars(self)[name] = stack  # found before the parameter is
                if getattr(self, name) is not stack:
                    raise ValueError(
                        f"{stack.fqn} is parametrised (an adapter, say), which its class cannot be trained with"
                    )
            return self.plain.forward(self, *args, **kwargs)
        finally:
            for name in self.stacks:
                vars(self).pop(name, None)


@cache
def prepared_class(plain: type[nn.Module]) -> type[QATExperts]:
    """The prepared class of a class of experts: one for each."""
    reading, facts = reading_of(plain), {"plain": plain, "__module__": __name__}
    if reading is not None:
        facts["is_transposed"] = reading.transposed
    return type(f"QAT{plain.__name__}", (QATExperts if reading is None else QATReadExperts, plain), facts)


def _empty(plain: type[nn.Module]) -> QATExperts:
    cls = prepared_class(plain)  # type: ignore[arg-type]  # mypy: a class is hashable
    return cls.__new__(cls)


def _side(name: str) -> str:
    """The side of a parameter's held scales, which their buffers are called by."""
    return f"{name}_weight"


def _random(name: str) -> str:
    """The buffer with the state of a parameter's random numbers."""
    return f"{name}_backward_random"
