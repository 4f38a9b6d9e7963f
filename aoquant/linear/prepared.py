"""The modules that prepare swaps in. Fake quantisation can be switched off and on, and the plain modules swapped back.

Prepare changes a layer's class and nothing else: it wraps nothing and copies nothing. Optimizers, FSDP, adapters,
checkpoints and tied layers hold the same module, parameters and hooks under the same names as before. A layer gains
only its static and learned scales (held.py), and the state of a random backward.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant._messages import warn
from aoquant.distributed import ranks
from aoquant.distributed.fsdp import swap_class
from aoquant.formats import Encoded, Scales
from aoquant.formats.delayed import Delayed, fresh, resized
from aoquant.formats.operand import SCALES
from aoquant.formats.random import fresh_state
from aoquant.linear import held
from aoquant.linear.cache import FixedWeight
from aoquant.linear.checks import NOT_CALIBRATED
from aoquant.linear.function import quantized_linear
from aoquant.linear.recipe import LinearRecipe
from aoquant.ops import flops

DELAYED_STATE = ("amax_history", "amax_factor")  # buffers of a layer whose scales are delayed: the fields of `Delayed`
NO_HISTORY = (
    "the state_dict has no amax_history for layers with delayed scaling: theirs begins anew, with factors of 1, so the first gradients "
    "may be zero (docs/hybrid.md, Delayed scaling)"
)
RANDOM = "backward_random"  # buffer of a layer whose backward draws: seed, module, step


@dataclass(frozen=True)
class Prepared:
    """Prepare's note on a module: its recipe, the config that convert must be given, its name for errors."""

    recipe: LinearRecipe
    config: Any
    fqn: str


class PreparedModule(nn.Module):
    """A module that prepare swaps in: a layer with one weight (`QATLayer`), or stacked experts (experts/prepared.py).

    `fake_quant = False` switches it back to the plain module for as long as you like.
    """

    fake_quant: bool

    def unprepare(self) -> nn.Module:
        """Swap back to the plain module in place."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in self._parameters:
            if hasattr(state_dict.get(prefix + name), "qdata"):  # of PackedTensor and of torchao's tensors
                raise ValueError(
                    f"{prefix}{name}: the state dict has the codes of a converted model, and this layer is prepared: load it into a converted "
                    "model, whose training goes on after aoquant.unpack_(model)"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)


class QATLayer(PreparedModule):
    """A layer that computes what its converted form will compute.

    Made by swapping the class of an existing `plain` layer in place, so parameters, state_dict keys, hooks, attributes,
    mode and tying stay as they were. `fake_quant = False` switches it back to a plain layer for as long as you like.
    """

    plain: ClassVar[type[nn.Module]]
    prepared: Prepared
    weight: Tensor
    master: Tensor | None = None  # takes the weight's gradient, (N, K), where the weight is codes alone

    @classmethod
    def prepare(cls, layer: nn.Module, prepared: Prepared) -> Self:
        """Swap `layer`'s class in place."""
        swap_class(layer, cls)
        assert isinstance(layer, cls)
        layer.prepared, layer.fake_quant = prepared, True
        rebind(layer)
        flops.register()
        return layer

    def unprepare(self) -> nn.Module:
        """Swap back to the plain layer in place."""
        del self.prepared, self.fake_quant
        swap_class(self, self.plain)
        rebind(self)
        return self

    def matrix(self) -> Tensor:
        """The weight as (N, K), which is what is encoded."""
        weight = self._parameters.get("weight")  # nn.Module takes half a microsecond to find it
        return self.weight if weight is None else weight

    def held_scales(self, side: str) -> Scales | None:
        """Static or learned scales (2-D) and the fitted transform of side "input" or "weight"; None without either."""
        return None

    @torch.no_grad()
    def encode_weight(self) -> Encoded:
        """The weight's codes and scales as forward multiplies them and convert stores them."""
        return self.prepared.recipe.fprop_weight.encode(self.matrix().detach(), self.held_scales("weight"))

    @torch.no_grad()
    def quantised_weight(self) -> Tensor:
        """Return the (N, K) values that the layer multiplies its input by, in the weight's dtype; W' T behind a
        transform.
        """
        matrix = getattr(self, "input_transform", None)
        return self.prepared.recipe.weight_values(self.encode_weight(), self.weight.dtype, matrix)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.prepared.recipe}{'' if self.fake_quant else ', fake_quant=False'}"


class QATLinear(QATLayer, nn.Linear):
    """nn.Linear whose forward computes what the converted layer will compute.

    Static and learned scales are added to its buffers and parameters, and so is the state of the random numbers of a
    backward that draws. calibrated: whether the scales that it holds have values.
    """

    plain = nn.Linear
    calibrated: bool
    _data_rank: int | None = None
    fixed: FixedWeight | None = None  # inside `fixed_weights`

    @classmethod
    def prepare(cls, layer: nn.Module, prepared: Prepared) -> Self:
        """Swap `layer`'s class in place.

        Held weight scales are measured now; held input scales and fitted transforms wait for `calibrate`.
        """
        linear = super().prepare(layer, prepared)
        recipe = prepared.recipe
        if recipe.weight_scales in SCALES[1:]:
            measured = recipe.fprop_weight.measure(linear.matrix().detach())
            held.register(linear, "weight", measured, learned=recipe.weight_scales == "learned")
        if recipe.input_scales in SCALES[1:]:
            assert recipe.fprop_input is not None
            unknown = recipe.fprop_input.format.measure(linear.weight.detach().new_full((1, 1), torch.nan))
            held.register(linear, "input", unknown, learned=recipe.input_scales == "learned")
        if recipe.fitted:
            assert recipe.transform is not None
            size, device = recipe.transform.size, linear.weight.device
            shape = linear.in_features // size, size, size
            unknown = Scales(transform=torch.full(shape, torch.nan, dtype=torch.float32, device=device))
            for side in ("input", "weight"):
                held.register(linear, side, unknown, learned=False)
        linear.calibrated = held.present(linear)
        linear._register_random()
        linear._register_delayed()
        return linear

    def replace(self, prepared: Prepared) -> None:
        """Take another recipe with the same forward. A state of random numbers that is there stays, with its seed, and
        so do delayed scales, with what fits into the new history.
        """
        state, steps, self.prepared = self.delayed, self.prepared.recipe.history, prepared
        if RANDOM not in self._buffers:
            self._register_random()
        if steps != prepared.recipe.history:
            self._register_delayed(state)
        if self.fixed is not None:
            self.fixed = self.fixed.anew()

    def _register_random(self) -> None:
        prepared = self.prepared
        if prepared.recipe.draws:
            self.register_buffer(RANDOM, fresh_state(prepared.config.seed, prepared.fqn, self.weight.device))
            ranks.expect(self)

    def _register_delayed(self, earlier: Delayed | None = None) -> None:
        steps = self.prepared.recipe.history
        for name in DELAYED_STATE:
            self._buffers.pop(name, None)
        if steps:
            state = fresh(3, steps, self.weight.device) if earlier is None else resized(earlier, steps)
            for name, value in zip(DELAYED_STATE, state, strict=True):
                self.register_buffer(name, value)

    @property
    def delayed(self) -> Delayed | None:
        """The state of delayed scales of input, weight and gradient."""
        if not self.prepared.recipe.history:
            return None
        return Delayed(*(self._buffers[name] for name in DELAYED_STATE))  # type: ignore[arg-type]

    def unprepare(self) -> nn.Module:
        """Swap back to a plain nn.Linear in place."""
        held.forget(self)
        for name in (RANDOM, *DELAYED_STATE):
            self._buffers.pop(name, None)
        vars(self).pop(ranks.RANK, None)
        del self.calibrated
        return super().unprepare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if RANDOM in self._buffers:  # a copy may be on another rank
            ranks.expect(self)

    def held_scales(self, side: str) -> Scales | None:
        recipe = self.prepared.recipe
        scales = recipe.input_scales if side == "input" else recipe.weight_scales
        if (state := self.delayed) is not None:
            at = 0 if side == "input" else 1
            return Scales(state.factor[at : at + 1].view(1, 1))
        return None if scales == "dynamic" and not recipe.fitted else held.matrices(held.read(self, side))

    @torch.no_grad()
    def deployed_input_scales(self) -> Scales | None:
        """The held input scales as the kernel uses them (a learned one at least eps) and the fitted transform.

        None without either.
        """
        scales, format = self.held_scales("input"), self.prepared.recipe.fprop_input
        if scales is None or format is None or scales.dynamic or self.prepared.recipe.history:
            return scales
        e = format.encode(self.weight.new_zeros(1, format.block or 1, dtype=torch.float32), scales)
        # as many dimensions as the input had
        shapes = [None if t is None else t.shape for t in held.read(self, "input").tensors]
        used = (e.scale, e.zero, scales.outer)
        return Scales(*(t.view(s) if s and t is not None else None for t, s in zip(used, shapes, strict=True)))

    def forward(self, input: Tensor) -> Tensor:
        if not self.fake_quant:
            return F.linear(input, self.matrix(), self.bias)
        try:
            if not self.calibrated:
                raise ValueError(NOT_CALIBRATED)
            fixed = None if self.fixed is None or torch.compiler.is_compiling() else self.fixed.of_this_call
            if fixed is not None and not torch.is_grad_enabled() and (y := fixed.product(input)) is not None:
                return y
            recipe = self.prepared.recipe
            scales = (self.held_scales("input"), self.held_scales("weight")) if recipe.holds else (None, None)
            random = self._buffers.get(RANDOM)
            delayed, rank = self.delayed if recipe.history else None, 0 if random is None else ranks.of(self)
            parameters, master = self._parameters, self.master
            bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401, as `matrix`
            return quantized_linear(
                input, self.matrix(), bias, recipe, *scales, random, fixed, delayed, None, rank, master
            )
        except ValueError as error:
            raise ValueError(f"{self.prepared.fqn or 'linear'}: {error}") from None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        names = (*held.names(self), *(name for name in DELAYED_STATE if name in self._buffers))
        before = {name: getattr(self, name).data for name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        held.keep_dtype(self, before)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        held.take_shape(self, prefix, state_dict, self.prepared.recipe.weight_scales == "static")
        if RANDOM in self._buffers:  # a checkpoint from before this training knows no state: it begins at step 0
            state_dict.setdefault(prefix + RANDOM, fresh_state(self.prepared.config.seed, self.prepared.fqn))
        if (steps := self.prepared.recipe.history) and prefix + "weight" in state_dict:
            if any(prefix + name not in state_dict for name in DELAYED_STATE):
                warn(NO_HISTORY)
            for name, value in zip(DELAYED_STATE, fresh(3, steps), strict=True):
                state_dict.setdefault(prefix + name, value)
        for name in (RANDOM, *DELAYED_STATE):  # states that an earlier recipe left, and this one does not read
            if name not in self._buffers:
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "weight" in state_dict:  # held scales that did not come along are those of another weight
            self.calibrated = all(prefix + n in state_dict for n in held.names(self)) and held.present(self)


def rebind(module: nn.Module) -> None:
    """Let accelerate's hooks (device_map, offload) call the new class: they keep the old class's bound forward."""
    if "_old_forward" in vars(module):
        vars(module)["_old_forward"] = MethodType(type(module).forward, module)
