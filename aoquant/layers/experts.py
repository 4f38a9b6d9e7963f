"""Experts that are stacked into 3-D parameters: their prepared class.

transformers keeps the experts of a layer in one module with the parameters `gate_up_proj` (or `up_proj`) and
`down_proj`, (E, N, K), or (E, K, N) where it says `is_transposed`. A module has this protocol when it has the
attributes of `PROTOCOL`; its class is not asked, so no transformers is imported here. Prepared, it is the same module
under another class, as a prepared linear layer is: parameters, their shapes and the state_dict stay.

The forward does what transformers' own does, in its order, so that results are equal bit for bit once weights are: rows
are sorted by expert, multiplied, gated, multiplied again, weighted, and added up for each token. "eager" and the other
implementations of transformers add up in a different order, and the prepared forward follows the model's config in
that. Products run in `grouped.py`: on a GPU all experts at once, elsewhere, and as "eager", in a loop. A bias is added
apart, to the rounded product. A token whose expert is E (expert parallelism marks tokens of other ranks so) adds
nothing.

Activations are quantised token by token where their format has scales for each row. A format with one scale for the
tensor finds it for each expert's tokens, so a token's codes then depend on its batch.

Weight scales are made from the weights in every forward, or held: experts that `unpack_` made from packed ones keep the
packed scales in buffers, one expert after another, and multiply the packed codes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aoquant import ops
from aoquant.formats import Encoded, Scales
from aoquant.formats.random import fresh_state
from aoquant.layers import held
from aoquant.layers.grouped import Rows, grouped_at_once, grouped_bias, grouped_linear, why_not_at_once
from aoquant.layers.qat import Prepared, PreparedModule
from aoquant.layers.read_stacks import Product, Stack, reading_of
from aoquant.parallel import experts as sharded
from aoquant.parallel import ranks
from aoquant.parallel.fsdp import layer_class, swap_class

PROTOCOL = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")
STACKS = ("gate_up_proj", "up_proj", "down_proj")


def stacks_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the stacked parameters of a module with the experts protocol, or of a class in `READINGS`; none for any
    other module.
    """
    return tuple(n for n in stacked_names(module) if (p := module._parameters.get(n)) is not None and p.dim() == 3)


def stacked_names(module: nn.Module) -> tuple[str, ...]:
    """Names that stacked parameters of the module's class have, whatever this module holds under them."""
    reading = reading_of(type(module))
    if reading is None and not all(hasattr(module, name) for name in PROTOCOL):
        return ()
    return STACKS if reading is None else reading.parameters


def is_transposed(module: nn.Module) -> bool:
    """Whether the experts of a module are stored (E, K, N)."""
    reading = reading_of(type(module))
    return bool(module.is_transposed) if reading is None else reading.transposed


def lacks(module: nn.Module) -> list[str]:
    """Attributes of the protocol that a module lacks."""
    missing = [name for name in PROTOCOL if not hasattr(module, name)]
    return missing + ([] if any(n in module._parameters for n in STACKS) else ["gate_up_proj or up_proj"])


class QATExperts(PreparedModule):
    """Experts whose forward computes what the converted module will compute.

    stacks: prepare's note on each prepared parameter, by its name; the others are float, or packed already.
    """

    plain: ClassVar[type[nn.Module]]
    stacks: dict[str, Prepared]
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    _data_rank: int | None = None

    @classmethod
    def prepare_stack(cls, module: nn.Module, name: str, prepared: Prepared, scales: Scales | None = None) -> Self:
        """Prepare the parameter called `name`, in place, or give it another recipe: a state of random numbers that is
        there stays. scales: to hold, with experts in front (E, ...).
        """
        if not isinstance(module, QATExperts):
            swap_class(module, prepared_class(layer_class(module)))
            assert isinstance(module, cls)
            module.stacks, module.fake_quant = {}, True
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
        return self._matrix(getattr(self, name)[expert])

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
        """One expert's codes and scales, as forward multiplies them and convert stores them.

        dtype: in which forward sees the weight.
        """
        operand, scales = self.stacks[name].recipe.fprop_weight, self.held_scales(name, expert)
        w_NK = self.matrix(name, expert).detach().to(dtype)
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
        if self.fake_quant and self._at_once():
            return self._forward_at_once(hidden_states, top_k_index, top_k_weights)
        return self._forward_in_a_loop(hidden_states, top_k_index, top_k_weights)

    @property
    def _eager(self) -> bool:
        """Whether transformers would run the class's own forward."""
        return sharded.runs_eagerly(self)

    def _at_once(self) -> bool:
        """Whether every product is one of all experts: not where transformers multiplies expert by expert."""
        if self._eager:
            return False
        return all(
            why_not_at_once(prepared.recipe, getattr(self, name), self.is_transposed) is None
            for name, prepared in self.stacks.items()
        )

    def _forward_at_once(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The forward without a look at the routing: shapes do not depend on it, and nothing waits for it."""
        tokens, top_k = top_k_index.shape
        ids, perm = torch.sort(top_k_index.reshape(-1))
        experts = torch.arange(self.num_experts, device=ids.device, dtype=ids.dtype)
        ends = torch.searchsorted(ids, experts, right=True).to(torch.int32)
        weights = top_k_weights.reshape(-1)[perm].masked_fill(ids >= self.num_experts, 0)  # tokens of other ranks
        ids = ids.clamp(max=self.num_experts - 1)
        place = torch.empty_like(perm).scatter_(0, perm, torch.arange(len(perm), device=perm.device))
        rows = Rows(ends, perm // top_k, place.view(tokens, top_k))

        y = self._product_at_once(hidden_states, "gate_up_proj" if self.has_gate else "up_proj", ids, rows)
        y = cast(Any, self)._apply_gate(y) if self.has_gate else cast(Any, self).act_fn(y)
        y = self._normalised(self._product_at_once(y, "down_proj", ids, Rows(ends)))
        y = y * weights.unsqueeze(-1)
        by_token = y.new_empty(y.shape).index_copy_(0, perm, y)  # every row is written
        return by_token.view(tokens, top_k, by_token.shape[-1]).sum(1).to(hidden_states.dtype)

    def _normalised(self, y: Tensor) -> Tensor:
        """Apply the norm behind every expert, where the class has one (transformers 5.24's MuseSpark)."""
        return cast(Any, self).post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y

    def _product_at_once(self, x: Tensor, name: str, ids: Tensor, rows: Rows) -> Tensor:
        """(S, N): x, or its rows, times the experts of one parameter, plus their biases."""
        w: Tensor = getattr(self, name)
        x = x.to(w.dtype)  # as transformers casts, which matters under autocast
        prepared = self.stacks.get(name)
        if prepared is None:
            x = x if rows.token is None else x[rows.token]
            y = nn.functional.grouped_mm(x, w if self.is_transposed else w.transpose(-2, -1), offs=rows.ends)
            behind = torch.arange(len(y), device=y.device) >= rows.ends[-1]  # these it does not write
            y = y.masked_fill(behind.unsqueeze(-1), 0.0)
        else:
            try:
                y = grouped_at_once(x, w, rows, prepared.recipe, self.is_transposed)
            except ValueError as error:
                raise ValueError(f"{prepared.fqn}: {error}") from None
        bias: Tensor | None = getattr(self, f"{name}_bias") if self.has_bias else None
        return y if bias is None else grouped_bias(y, bias, ids, rows.ends)

    @torch.compiler.disable
    def _forward_in_a_loop(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The forward that asks how many tokens each expert has, and multiplies expert by expert."""
        if not self.fake_quant:
            y: Tensor = self.plain.forward(self, hidden_states, top_k_index, top_k_weights)
            return y
        tokens, top_k = top_k_index.shape
        eager = self._eager
        # rows of one expert: eager takes them by top-k position, then token; the others by token
        ids, perm = torch.sort((top_k_index.t() if eager else top_k_index).reshape(-1), stable=eager)
        token, position = (perm % tokens, perm // tokens) if eager else (perm // top_k, perm % top_k)
        ends: list[int] = torch.bincount(ids, minlength=self.num_experts)[: self.num_experts].cumsum(0).tolist()
        ids, token, position = (t[: ends[-1]] for t in (ids, token, position))

        y = self._product(hidden_states[token], "gate_up_proj" if self.has_gate else "up_proj", ids, ends, eager)
        y = cast(Any, self)._apply_gate(y) if self.has_gate else cast(Any, self).act_fn(y)
        y = self._normalised(self._product(y, "down_proj", ids, ends, eager))
        y = y * top_k_weights[token, position].unsqueeze(-1)
        if eager:
            out, start = torch.zeros_like(hidden_states), 0
            for end in ends:
                out = out.index_add(0, token[start:end], y[start:end].to(out.dtype))
                start = end
            return out
        rows = y.new_zeros(tokens * top_k, y.shape[-1]).index_copy(0, perm[: ends[-1]], y)
        return rows.view(tokens, top_k, rows.shape[-1]).sum(1).to(hidden_states.dtype)

    def _product(self, x_SK: Tensor, name: str, ids: Tensor, ends: list[int], eager: bool) -> Tensor:
        """(S, N): rows sorted by expert, times the experts of one parameter, plus their biases."""
        w: Tensor = getattr(self, name)
        x_SK = x_SK if eager else x_SK.to(w.dtype)  # as transformers casts, which matters under autocast
        prepared = self.stacks.get(name)
        if prepared is None:
            y = self._unprepared(x_SK, w, ids, ends, eager)
        else:
            experts = w.unbind(0)  # one gradient for the whole stack, zero where an expert had no tokens
            n = w.shape[-1] if self.is_transposed else w.shape[1]
            rest = ends, n, prepared.recipe, *self._draws(name)
            try:
                held_of = None if prepared.recipe.weight_scales == "dynamic" else partial(self.held_scales, name)
                y = grouped_linear(x_SK, lambda e: self._matrix(experts[e]), *rest, scales_of=held_of)
            except ValueError as error:
                raise ValueError(f"{prepared.fqn}: {error}") from None
        bias: Tensor | None = getattr(self, f"{name}_bias") if self.has_bias else None
        if bias is None:
            return y
        # transformers' grouped_mm adds in place: under autocast the sum has the product's dtype, not a wider bias's
        return y + bias[ids] if eager else (y + bias[ids]).to(y.dtype)

    def _draws(self, name: str) -> tuple[Tensor | None, int]:
        """The state of a parameter's random numbers, and this rank among those with other tokens."""
        random = self._buffers.get(_random(name))
        return random, 0 if random is None else ranks.of(self)

    def _unprepared(self, x_SK: Tensor, w: Any, ids: Tensor, ends: list[int], eager: bool) -> Tensor:
        """The product with a parameter that is float, or packed already, as the plain class makes it."""
        if not eager:
            offsets = torch.tensor(ends, dtype=torch.int32, device=x_SK.device)
            y: Tensor = nn.functional.grouped_mm(x_SK, w if self.is_transposed else w.transpose(-2, -1), offs=offsets)
            return y
        starts = [0, *ends[:-1]]
        hit = [(e, a, b) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]
        if self.is_transposed:
            products = [x_SK[a:b] @ w[e] for e, a, b in hit]
        else:
            products = [nn.functional.linear(x_SK[a:b], w[e]) for e, a, b in hit]
        return torch.cat(products) if products else x_SK.new_empty(0, w.shape[-1 if self.is_transposed else 1])

    def _matrix(self, w: Tensor) -> Tensor:
        """One expert as (N, K): a transposed one is copied, because encoders read rows."""
        return w.t().contiguous() if self.is_transposed else w

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
            for name, prepared in self.stacks.items():
                w = getattr(self, name)
                if isinstance(w, DTensor):
                    raise ValueError(
                        f"{prepared.fqn} is sharded (DTensor), and its class is not quantised so: use fully_shard"
                    )
                holds = prepared.recipe.weight_scales != "dynamic"
                scales_of = partial(self.held_scales, name) if holds else None
                product = Product(prepared.fqn, prepared.recipe, *self._draws(name), scales_of)
                vars(self)[name] = stack = Stack(w, self.is_transposed, product)  # found before the parameter is
                if getattr(self, name) is not stack:
                    raise ValueError(
                        f"{prepared.fqn} is parametrised (an adapter, say), which its class cannot be trained with"
                    )
            return self.plain.forward(self, *args, **kwargs)
        finally:
            for name in self.stacks:
                vars(self).pop(name, None)


_classes: dict[type[nn.Module], type[QATExperts]] = {}


def prepared_class(plain: type[nn.Module]) -> type[QATExperts]:
    """The prepared class of a class of experts: one for each."""
    if plain not in _classes:
        reading, facts = reading_of(plain), {"plain": plain, "__module__": __name__}
        if reading is not None:
            facts["is_transposed"] = reading.transposed
        base = QATExperts if reading is None else QATReadExperts
        _classes[plain] = type(f"QAT{plain.__name__}", (base, plain), facts)
    return _classes[plain]


def _empty(plain: type[nn.Module]) -> QATExperts:
    cls = prepared_class(plain)
    return cls.__new__(cls)


def _side(name: str) -> str:
    """The side of a parameter's held scales, which their buffers are called by."""
    return f"{name}_weight"


def _random(name: str) -> str:
    """The buffer with the state of a parameter's random numbers."""
    return f"{name}_backward_random"
