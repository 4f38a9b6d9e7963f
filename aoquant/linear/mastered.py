"""Prepared layers whose codes follow a float32 master: the layers of `quantized_model_init`. Stacked experts have a
subclass in experts/mastered_experts.py.

The layer's parameter is the master, and `layer.weight` is the codes. So whatever averages, broadcasts, clips, freezes,
moves or saves parameters (DDP, accelerate, transformers' Trainer, an optimizer) meets an ordinary float32 parameter.

A forward that runs eagerly encodes the master anew when it was written since. Compiled code reads the codes that are
there: optimizers and loads renew them, and a backward through stale codes raises.

Under delayed scaling codes keep the scale that they were written with. The next write, after a backward, first enters
the largest value of the old codes' master into the history, and takes the scale that follows. So a scale never moves
under a pending backward, and one backward a step gives the numbers of the prepared layer. (Prepare refuses tied
weights with delayed scales.) Source: NVIDIA/TransformerEngine, `fp8_model_init` with `DelayedScaling`.
"""

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
from aoquant.linear.prepared import DELAYED_STATE, PreparedModule, QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.weight_codes import Sides, encoded_experts, encoded_sides

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
    """The codes of one master, a matrix or stacked experts. weight: what the layers multiply. turned: the layers store
    W^T (K, N).
    """

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
        """Return the master as (N, K), or (E, N, K)."""
        return self.master.transpose(-2, -1) if self._turned else self.master

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
        return Delayed(*(self._buffers[name] for name in DELAYED_STATE))  # type: ignore[arg-type]

    @torch.no_grad()
    def _advance(self) -> None:
        """Enter the master that the codes were made of into the history of its largest values."""
        with torch.inference_mode(False):
            self._recipe.advance(self._delayed(), self._amax.expand(3), slice(1, 2))

    def _sides(self) -> Sides:
        with torch.inference_mode(False), torch.no_grad():
            if self.master.dim() == 3:
                sides = encoded_experts(self._recipe, self.values)
            else:
                values, held = self.values.contiguous(), None
                if self._recipe.history:
                    held = Scales(self._delayed().factor[1:2].view(1, 1).to(values.device))
                    self._amax = ops.absmax(values)
                sides = encoded_sides(self._recipe, values, held=held)
        assert sides is not None
        self._seen = Seen(self.master)
        return sides

    def _made(self, dtype: torch.dtype) -> GatheredWeight:
        sides, stack = self._sides(), self.master.dim() == 3
        shape = self.master.shape if stack else self.values.shape
        with torch.inference_mode(False):
            made = GatheredWeight(shape, dtype, self._recipe.key, sides.rows, sides.columns)
        made.master, made.fqn, made.transposed = self.master, self.fqn, stack and self._turned
        return made


def codes_of(master: Tensor) -> MasterCodes | None:
    """Return the codes that follow a parameter, if it is a master."""
    return getattr(master, _CODES, None)


class Mastered(PreparedModule):
    """Prepared module with packed weights. codes: of each packed parameter, by its name. reads: makes what a class has
    under a parameter's name; None: it has that itself.
    """

    codes: dict[str, MasterCodes]
    reads: Any = None

    def current_codes(self, name: str) -> MasterCodes:
        """Return the codes of a parameter, brought up to date; compiled code reads those that are there.

        Raises:
            ValueError: the module's parameter is another one.
        """
        codes = self.codes[name]
        if not torch.compiler.is_compiling():
            if self._parameters.get(name) is not codes.master:
                raise ValueError(_REPLACED)
            if not codes.current:
                codes.refresh()
        return codes

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.codes:
            raise ValueError(f"{self.codes[name].fqn or 'linear'}: {_REPLACED}")
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(f"{self._named()}: {PACKED}")

    def _named(self) -> str:
        return next(iter(self.codes.values())).fqn or "linear"

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast the module; masters stay float32."""
        before = []
        for codes in self.codes.values():
            like = fn(torch.empty(0, dtype=codes.weight.dtype, device=codes.weight.device))
            before.append((codes, like, codes.master.data, codes.master.grad))
            codes.master.grad = None  # has the master's dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for codes, like, data, grad in before:
            if codes.master.dtype != data.dtype:
                codes.master.data = data.to(like.device)
            if grad is not None:
                codes.master.grad = grad.to(like.device)
            codes.cast(like.dtype)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("assign_to_params_buffers") and any(prefix + name in state_dict for name in self.codes):
            raise ValueError(f"{self._named()}: {_REPLACED}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        for codes in self.codes.values():
            codes.refresh(loaded=True)


class MasteredLinear(Mastered, QATLinear):
    """Prepared layer with packed weights. Its class is made by `hold_codes` from the layer's own."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the codes, and not the parameter of this name."""
        return self.codes["weight"].weight

    def matrix(self) -> Tensor:
        return self.weight if self.fake_quant else self.codes["weight"].values.to(self.weight.dtype)

    @property
    def master(self) -> Tensor:  # type: ignore[override]
        """Return the master as (N, K), and its codes brought up to date.

        Raises:
            ValueError: the layer's parameter is another one.
        """
        return self.current_codes("weight").values

    @torch.no_grad()
    def encode_weight(self) -> Encoded:
        return self.current_codes("weight").weight.rows

    def held_scales(self, side: str) -> Scales | None:
        return None if side == "weight" else super().held_scales(side)  # codes have theirs


@functools.cache
def _class(base: Any, cls: Any, *names: str) -> Any:
    return type(f"Mastered{cls.__name__}", (base, cls), {name: base.reads(name) for name in names if base.reads})


def hold_codes(module: PreparedModule, codes: dict[str, MasterCodes], base: Any = MasteredLinear) -> None:
    """Make the masters of `codes` the module's parameters. base: the `Mastered` of such modules."""
    for name, made in codes.items():
        module._parameters[name] = made.master
    vars(module)["codes"] = codes
    old: Any = type(module)  # hashable, which mypy doubts
    swap_class(module, _class(base, old, *codes))


def release_codes(module: nn.Module) -> None:
    """Make `module` an ordinary prepared one again, with its masters as its weights; one that is so stays."""
    if isinstance(module, Mastered):
        swap_class(module, type(module).__bases__[-1])
        del vars(module)["codes"]
