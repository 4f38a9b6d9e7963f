"""Prepared layers whose codes follow a float32 master: the layers of `quantized_model_init`.

The layer's parameter is the master, and `layer.weight` is the codes. So whatever averages, broadcasts, clips, freezes,
moves or saves parameters (DDP, accelerate, transformers' Trainer, an optimizer) meets an ordinary float32 parameter.

A forward that runs eagerly encodes the master anew when it was written since. Compiled code reads the codes that are
there: optimizers and loads renew them, and a backward through stale codes raises.

Under delayed scaling codes keep the scale that they were written with. The next write, after a backward, first enters
the largest value of the old codes' master into the history, and takes the scale that follows. So a scale never moves
under a pending backward, and one backward a step gives the numbers of the prepared layer. (Prepare refuses tied
weights with delayed scales.) Source: NVIDIA/TransformerEngine, `fp8_model_init` with `DelayedScaling`.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Self

import torch
from torch import Tensor, nn

from aoquant import ops
from aoquant.distributed.fsdp import swap_class
from aoquant.distributed.gathered import PACKED, GatheredWeight
from aoquant.formats import Encoded, Scales
from aoquant.formats.delayed import Delayed
from aoquant.linear.cache import Seen
from aoquant.linear.prepared import DELAYED_STATE, QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.weight_codes import Sides, encoded_sides

_CODES = "_aoquant_codes"  # attribute of a master
_STALE = (
    "its float32 master changed, and a compiled forward multiplied the codes of before: call masters.refresh() after a change that no optimizer "
    "made, such as DDP's first broadcast"
)
_REPLACED = (
    "its weight is packed by quantized_model_init, and another tensor would take the place of its float32 master (fully_shard, parallelize_module, "
    "load_state_dict(assign=True)): load without assign; or call masters.restore() first, and under FSDP2 use quantized_all_gather"
)


class MasterCodes:
    """The codes of one master. weight: what the layers multiply. turned: the layers store W^T (K, N)."""

    def __init__(
        self,
        master: nn.Parameter,
        recipe: LinearRecipe,
        fqn: str,
        turned: bool,
        dtype: torch.dtype,
        buffers: dict[str, Tensor | None],
    ) -> None:
        self.master, self._recipe, self.fqn, self._turned = master, recipe, fqn, turned
        self._buffers = buffers  # of the layer: row 1 of its delayed scales is the weight's
        self.weight = self._made(dtype)
        setattr(master, _CODES, self)
        found, needs = weakref.ref(self), master.requires_grad
        self._trained = False  # whether a backward went through the codes

        def note_backward(_: Tensor) -> None:
            codes = found()
            if codes is not None and not codes.current:
                raise ValueError(f"{codes.fqn or 'linear'}: {_STALE}")
            if codes is not None:
                codes._trained = True

        self._watch = master.requires_grad_().register_hook(note_backward) if master.is_leaf else None
        master.requires_grad_(needs)

    @property
    def values(self) -> Tensor:
        """The master as (N, K)."""
        return self.master.t() if self._turned else self.master

    @property
    def current(self) -> bool:
        """Return whether the codes were made of the master as it is now."""
        return self._seen.is_still(self.master)

    def refresh(self, loaded: bool = False) -> None:
        """Make the codes anew, in the same memory unless the master has moved to another device. loaded: the master and
        its delayed scale were.
        """
        if self._trained and not loaded and self._recipe.history:
            self._advance()
        self._trained = False
        sides = self._sides()
        if self.weight.device != self.master.device:
            self.weight = self._made(self.weight.dtype)
            return
        with torch.inference_mode(False):
            self.weight.take_parts([t for e in sides if e is not None for t in e.tensors if t is not None])

    def cast(self, dtype: torch.dtype) -> None:
        """Let the layers compute in `dtype`."""
        if dtype != self.weight.dtype:
            self.weight = self._made(dtype)

    def end(self) -> None:
        """Let go of the master."""
        if self._watch is not None:
            self._watch.remove()
        delattr(self.master, _CODES)

    def _delayed(self) -> Delayed:
        """Return the layer's delayed scales of input, weight and gradient."""
        return Delayed(*(self._buffers[name] for name in DELAYED_STATE))  # type: ignore[arg-type]

    @torch.no_grad()
    def _advance(self) -> None:
        """Enter the master that the codes were made of into the history of its largest values."""
        r, state = self._recipe, self._delayed()
        assert r.fprop_input is not None and r.dgrad_grad_output is not None
        with torch.inference_mode(False):
            operands = r.fprop_input, r.fprop_weight, r.dgrad_grad_output
            made = ops.advance(self._amax.expand(3), *state, *operands, r.select, r.margin)
            for mine, new in zip(state, made, strict=True):
                mine[1].copy_(new[1])

    def _sides(self) -> Sides:
        with torch.inference_mode(False), torch.no_grad():
            values, held = self.values.contiguous(), None
            if self._recipe.history:
                held = Scales(self._delayed().factor[1:2].view(1, 1).to(values.device))
                self._amax = ops.absmax(values)
            sides = encoded_sides(self._recipe, values, held=held)
        assert sides is not None
        self._seen = Seen(self.master)
        return sides

    def _made(self, dtype: torch.dtype) -> GatheredWeight:
        sides = self._sides()
        with torch.inference_mode(False):
            made = GatheredWeight(self.values.shape, dtype, self._recipe.key, sides.rows, sides.columns)
        made.master, made.fqn = self.master, self.fqn
        return made


def codes_of(master: Tensor) -> MasterCodes | None:
    """The codes that follow a parameter, if it is a master."""
    found: MasterCodes | None = getattr(master, _CODES, None)
    return found


class MasteredLinear(QATLinear):
    """Prepared layer with packed weights. Its class is made by `mastered` from the layer's own."""

    codes: MasterCodes

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The codes, and not the parameter of this name."""
        return self.codes.weight

    def matrix(self) -> Tensor:
        return self.codes.weight if self.fake_quant else self.codes.values.to(self.codes.weight.dtype)

    @property
    def master(self) -> Tensor:  # type: ignore[override]
        """The master as (N, K), and its codes brought up to date.

        Raises:
            ValueError: the layer's parameter is another one.
        """
        if torch.compiler.is_compiling():
            return self.codes.values
        if self._parameters.get("weight") is not self.codes.master:
            raise ValueError(_REPLACED)
        if not self.codes.current:
            self.codes.refresh()
        return self.codes.values

    @torch.no_grad()
    def encode_weight(self) -> Encoded:
        _ = self.master
        return self.codes.weight.rows

    def held_scales(self, side: str) -> Scales | None:
        return None if side == "weight" else super().held_scales(side)  # codes have theirs

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise ValueError(f"{self.prepared.fqn or 'linear'}: {_REPLACED}")
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(f"{self.prepared.fqn or 'linear'}: {PACKED}")

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast the layer; the master stays float32."""
        master, like = self.codes.master, fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device))
        before, grad = master.data, master.grad
        master.grad = None  # has the master's dtype
        super()._apply(fn, recurse)
        if master.dtype != before.dtype:
            master.data = before.to(like.device)
        if grad is not None:
            master.grad = grad.to(like.device)
        self.codes.cast(like.dtype)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("assign_to_params_buffers") and prefix + "weight" in state_dict:
            raise ValueError(f"{self.prepared.fqn or 'linear'}: {_REPLACED}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        self.codes.refresh(loaded=True)


@functools.cache
def _mastered(cls: Any) -> Any:
    return type(f"Mastered{cls.__name__}", (MasteredLinear, cls), {})


def hold_codes(layer: QATLinear, codes: MasterCodes) -> None:
    """Make `layer` one whose parameter is the master of `codes`."""
    layer._parameters["weight"] = codes.master
    vars(layer)["codes"] = codes
    cls: Any = type(layer)  # hashable, which mypy doubts
    swap_class(layer, _mastered(cls))


def release_codes(layer: QATLinear) -> None:
    """Make `layer` an ordinary prepared one again, with its master as its weight; one that is so stays."""
    if isinstance(layer, MasteredLinear):
        swap_class(layer, type(layer).__bases__[-1])
        del vars(layer)["codes"]
