"""The recipe of a linear layer: how each of the six operands of its three GEMMs is made.

    fprop  y  = x  W^T     input, weight          along K
    dgrad  dx = dy W       grad_output, weight    along N
    wgrad  dW = dy^T x     grad_output, input     along the rows of the batch

None is high precision. Backward starts from the values that fprop used ("forward"), so it differentiates the function
that forward computed, and rounding itself passes the gradient straight through; or from the high-precision tensors
("original"), so that nothing is rounded twice. A backward GEMM without operands multiplies these values as they are;
`law.py` says which two operands it may have, and what forward keeps for it.

Scales are dynamic (found on what is encoded, each time), static (held by the layer, see held.py) or learned (held, and
trained: LSQ). A transform stands before the rounding of both operands of fprop.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from aoquant import ops
from aoquant.formats import Encoded, Format, HighPrecision, Operand, TEFloat8, as_operand, delayed
from aoquant.formats.operand import DELAYED, SCALES
from aoquant.linear import law
from aoquant.transforms import RoundedHadamard, Transform

STRAIGHT_THROUGH = ("identity", "clipped")
BACKWARD = ("dgrad_grad_output", "dgrad_weight", "wgrad_grad_output", "wgrad_input")
RECIPES: "dict[str, LinearRecipe]" = {}  # by key


@dataclass(frozen=True)
class LinearRecipe:
    """Operands of a linear layer, and the kernel contract of its forward. A `Format` stands for an operand without a
    transform.

    fprop_input, fprop_weight: along K. dgrad_*, wgrad_*: of a backward GEMM, along the axis that it contracts. None:
        high precision.
    contract: one of `ops.CONTRACTS`: which deployed kernel the forward equals.
    straight_through: "identity", or "clipped": no gradient for values that the format's largest code clips.
    input_scales, weight_scales: "dynamic", "static" or "learned"; "" is what the operand itself says.
    transform: of both operands of fprop before they are rounded; None: the one that either of them has.
    weight_source, input_source: the source of dgrad's weight and of wgrad's input, "forward" or "original".
    history: steps whose absolute maxima delayed scaling remembers; 0: scales follow from what is encoded. select: which
        of them counts, "max" or "most_recent". margin: bits that delayed factors leave above the largest value.
    save: what forward keeps: "row" (codes of the input, as fprop made them, and the weight itself), "col" (of both, the
        codes that backward reads, where forward makes them) or "hp" (no codes). `law.py` has the table.

    Raises:
        ValueError: the operands, or the scales, cannot go together.
    """

    fprop_input: Operand | None
    fprop_weight: Operand
    contract: str = "aoquant"
    straight_through: str = "identity"
    input_scales: str = ""
    weight_scales: str = ""
    dgrad_grad_output: Operand | None = None
    dgrad_weight: Operand | None = None
    wgrad_grad_output: Operand | None = None
    wgrad_input: Operand | None = None
    transform: Transform | None = None
    weight_source: str = "forward"
    input_source: str = "forward"
    save: str = "row"
    history: int = 0
    select: str = "max"
    margin: int = 0
    # Attributes, since a forward reads them: Dynamo guards on whatever it reads, and a property reads more.
    key: str = field(init=False, repr=False, compare=False)
    holds: bool = field(init=False, repr=False, compare=False)
    reads: str = field(init=False, repr=False, compare=False)
    dgrad: ops.BackwardGemm = field(init=False, repr=False, compare=False)
    wgrad: ops.BackwardGemm = field(init=False, repr=False, compare=False)
    shared: tuple[Any, Any] = field(init=False, repr=False, compare=False)  # how layers encode one input, by side

    def __init__(
        self,
        fprop_input: Operand | Format | None,
        fprop_weight: Operand | Format,
        contract: str = "aoquant",
        straight_through: str = "identity",
        input_scales: str = "",
        weight_scales: str = "",
        dgrad_grad_output: Operand | Format | None = None,
        dgrad_weight: Operand | Format | None = None,
        wgrad_grad_output: Operand | Format | None = None,
        wgrad_input: Operand | Format | None = None,
        transform: Transform | None = None,
        weight_source: str = "forward",
        input_source: str = "forward",
        save: str = "row",
        history: int = 0,
        select: str = "max",
        margin: int = 0,
    ) -> None:
        values = dict(locals())  # the arguments by name
        del values["self"]
        x, w = None if fprop_input is None else as_operand(fprop_input), as_operand(fprop_weight)
        if history and {input_scales or "dynamic", weight_scales or "dynamic"} <= {"dynamic", DELAYED}:
            input_scales = weight_scales = DELAYED
        input_scales = input_scales or (x.scales if x else "dynamic")
        weight_scales = weight_scales or w.scales
        transform = _one_transform(x, w, transform, contract)
        if transform is not None:
            x = Operand((x or Operand(HighPrecision())).format, transform)
            w = Operand(w.format, transform, inverse=True)
            if transform.fitted and (input_scales, weight_scales) != ("dynamic", "dynamic"):
                raise ValueError(
                    f"{transform} with static or learned scales would be calibrated twice, scales after the transform: use dynamic scales, "
                    "or a Hadamard transform"
                )
        values |= {
            "fprop_input": x and dataclasses.replace(x, scales=input_scales),
            "fprop_weight": dataclasses.replace(w, scales=weight_scales),
            "input_scales": input_scales,
            "weight_scales": weight_scales,
            "transform": transform,
            **{slot: values[slot] and as_operand(values[slot]) for slot in BACKWARD},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if reason := self._why_not():
            raise ValueError(reason)
        object.__setattr__(self, "holds", self.fitted or (input_scales, weight_scales) != ("dynamic", "dynamic"))
        object.__setattr__(self, "reads", ops.reads(contract))
        gemm = law.dgrad(
            save, weight_source, self.fprop_weight, self.dgrad_grad_output, self.dgrad_weight, self.weight_clips
        )
        object.__setattr__(self, "dgrad", gemm)
        gemm = law.wgrad(save, input_source, self.fprop_input, self.wgrad_grad_output, self.wgrad_input)
        object.__setattr__(self, "wgrad", gemm)
        object.__setattr__(self, "shared", (self.fprop_input, gemm if gemm.keeps == "columns" else None))
        object.__setattr__(self, "key", f"{self}, {straight_through}, ops {ops.schemas()}")
        RECIPES[self.key] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled, or copied: made anew, so that its key leads back to it in this process."""
        self.__init__(**{f.name: state[f.name] for f in dataclasses.fields(self) if f.init and f.name in state})  # type: ignore[misc]

    def _why_not(self) -> str | None:
        if self.contract not in ops.CONTRACTS:
            return f"no GEMM contract is called {self.contract!r}; choose one of {', '.join(ops.CONTRACTS)}"
        if self.straight_through not in STRAIGHT_THROUGH:
            return f"straight_through is one of {', '.join(STRAIGHT_THROUGH)}, got {self.straight_through!r}"
        return (
            law.why_not("dgrad", self.dgrad_grad_output, self.dgrad_weight)
            or law.why_not("wgrad", self.wgrad_grad_output, self.wgrad_input)
            or self._why_not_sources()
            or self._why_not_delayed()
            or _why_not_side("input", self.fprop_input, self.input_scales, self.straight_through)
            or _why_not_side("weight", self.fprop_weight, self.weight_scales, self.straight_through)
        )

    def _why_not_sources(self) -> str | None:
        sources = self.weight_source, self.input_source
        if self.save not in law.SAVES or not set(sources) <= set(law.SOURCES):
            return f"sources are {' or '.join(law.SOURCES)} and save is one of {', '.join(law.SAVES)}, got {sources} and {self.save!r}"
        if self.save == "row":
            return None if "original" not in sources else 'backward from the original needs save="col" or "hp"'
        if self.transform is not None or "learned" in (self.input_scales, self.weight_scales):
            return (
                "a backward whose casts have sources needs a forward without a transform and without learned scales: its values are "
                f"in another domain than the originals, got {self.transform or 'learned scales'}"
            )
        return None

    def _why_not_delayed(self) -> str | None:
        if DELAYED not in (self.input_scales, self.weight_scales) and not self.history:
            return None
        if self.history < 1 or self.select not in delayed.SELECTS:
            return f"delayed scaling has a history of 1 or more steps and one of {', '.join(delayed.SELECTS)}, got {self.history} and {self.select!r}"
        operands = {slot: getattr(self, slot) for slot in ("fprop_input", "fprop_weight", *BACKWARD)}
        plain = all(
            isinstance(o, Operand)
            and o.transform is None
            and isinstance(o.format, TEFloat8)
            and o.format.per == "tensor"
            for o in operands.values()
        )
        names = {slot: o.name if o else "high precision" for slot, o in operands.items()}
        one = self.dgrad_grad_output == self.wgrad_grad_output
        shared = names["fprop_input"] == names["wgrad_input"] and names["fprop_weight"] == names["dgrad_weight"]
        if (
            not plain
            or not one
            or not shared
            or self.save != "col"
            or {self.input_scales, self.weight_scales} != {DELAYED}
        ):
            return (
                "delayed scaling is for te-fp8-tensor and te-fp8-e5m2-tensor, one for each of input, weight and gradient in all three "
                f'GEMMs, with save="col" and dynamic scales of the base, got {", ".join(names.values())}, save={self.save!r}'
            )
        return None

    @property
    def deployed(self) -> "LinearRecipe":
        """Return the recipe after convert, without the parts that concern training."""
        return dataclasses.replace(
            self,
            **dict.fromkeys(BACKWARD),  # type: ignore[arg-type]
            straight_through="identity",
            weight_source="forward",
            input_source="forward",
            save="row",
            history=0,
            select="max",
            margin=0,
            weight_scales="dynamic",
            input_scales="dynamic" if self.input_scales in ("dynamic", DELAYED) else "static",
        )

    def holding(self, scales: str) -> "LinearRecipe":
        """Return the recipe with `QATConfig`'s scales: of weights, and learned ones of static activations too."""
        if scales == "dynamic":
            return self
        learned = scales == "learned" and self.input_scales == "static"
        return dataclasses.replace(self, weight_scales=scales, input_scales="learned" if learned else self.input_scales)

    @property
    def fitted(self) -> bool:
        """Return whether the layer holds the matrices of a fitted transform."""
        return self.transform is not None and self.transform.fitted

    @cached_property
    def input_clips(self) -> bool:
        """Return whether values of the input that its codes clip get no gradient."""
        return self.straight_through == "clipped" or self.input_scales == "learned"

    @cached_property
    def weight_clips(self) -> bool:
        """Return whether values of the weight that its codes clip get no gradient."""
        return self.straight_through == "clipped" or self.weight_scales == "learned"

    @property
    def batch_invariant(self) -> bool:
        """Return whether a token's codes and scales are the same alone and in any batch: quantised by themselves, under
        held scales, or not at all.
        """
        held = self.input_scales not in ("dynamic", DELAYED)
        return self.fprop_input is None or self.fprop_input.batch_invariant or held

    @property
    def backward_operands(self) -> tuple[Operand, ...]:
        """Return the operands of both backward GEMMs that are quantised."""
        return tuple(f for slot in BACKWARD if (f := getattr(self, slot)) is not None)

    @property
    def draws(self) -> bool:
        """Return whether backward draws random numbers."""
        return any(f.draws for f in self.backward_operands)

    @cached_property
    def reads_input_once(self) -> bool:
        """Return whether forward can encode both sides of the input together: both of the original, the first as a GEMM
        of operands reads it.
        """
        original = self.wgrad.keeps == "columns" and self.wgrad.forward is None
        return self.fprop_input is not None and original and self.reads == "operand"

    def advance(self, state: delayed.Delayed, amax: torch.Tensor, rows: slice) -> None:
        """Take a step of delayed scaling, in place: a checkpoint that recomputes forward encodes by what it had.

        state: of input, weight and gradient. amax: (3,), the largest values of the step, read at `rows` alone.
        """
        x, grad = self.fprop_input, self.dgrad_grad_output
        assert x is not None and grad is not None
        made = ops.advance(amax, *state, x, self.fprop_weight, grad, self.select, self.margin)
        for mine, new in zip(state, made, strict=True):
            mine[rows].copy_(new[rows])

    def weight_values(self, e: Encoded, dtype: torch.dtype, matrix: torch.Tensor | None) -> torch.Tensor:
        """Return the (N, K) values that a layer with these codes multiplies its input by; W' T behind a transform.

        matrix: T of a fitted one.
        """
        if self.transform is None:
            return self.fprop_weight.decode(e, dtype)
        assert self.fprop_input is not None
        return self.fprop_input.pull_back(self.fprop_weight.decode(e, torch.float32), matrix).to(dtype)

    @property
    def input_name(self) -> str:
        """Return the name of the input's operand, "" for high precision."""
        return self.fprop_input.name if self.fprop_input else ""

    def __str__(self) -> str:
        weight, x = (f"-{s}" if s != "dynamic" else "" for s in (self.weight_scales, self.input_scales))
        backward = ""
        if self.backward_operands:
            dgrad = _names(self.dgrad_grad_output, self.dgrad_weight)
            backward = f", dgrad={dgrad}, wgrad={_names(self.wgrad_grad_output, self.wgrad_input)}"
            contracts = {law.contract(self.dgrad_grad_output, self.dgrad_weight)}
            contracts.add(law.contract(self.wgrad_grad_output, self.wgrad_input))
            if contracts != {"aoquant"}:
                backward += f", backward gemm={' and '.join(sorted(contracts))}"
        if self.save != "row":
            backward += f", weight from {self.weight_source}, input from {self.input_source}, saves {self.save}"
        if self.history:
            backward += f", history of {self.history}, {self.select}{f', margin {self.margin}' if self.margin else ''}"
        return f"weight={self.fprop_weight.name}{weight}, input={self.input_name or 'high precision'}{x}, gemm={self.contract}{backward}"


def _names(first: Operand | None, second: Operand | None) -> str:
    """Names of a GEMM's two operands, once where they are equal."""
    return " x ".join(dict.fromkeys(f.name if f else "high precision" for f in (first, second)))


def _one_transform(x: Operand | None, w: Operand, given: Transform | None, contract: str) -> Transform | None:
    """Return the transform of recipe and operands. Random ones are refused later, by the operand's name."""
    if given is not None and given.drawn:
        raise ValueError(f"{given.name} rotates at random, and a deployed layer does not: it is for backward")
    own = None if x is None else x.transform
    found = {t for t in (own, w.transform, given) if t is not None and not t.drawn}
    if any(isinstance(t, RoundedHadamard) for t in found):
        raise ValueError(
            "te-hadamard stands before both operands of wgrad, not of forward: use aoquant.Hadamard(16) there"
        )
    if len(found) > 1 or (found and contract != "aoquant"):
        raise ValueError(
            f"one transform stands before both operands of the aoquant GEMM, got {' and '.join(sorted(str(t) for t in found))} "
            f"with the contract {contract}: give one transform, and a config of aoquant's"
        )
    return found.pop() if found else None


def _why_not_side(side: str, operand: Operand | None, scales: str, straight_through: str) -> str | None:
    """Return why a side of fprop cannot have its operand, or its scales cannot be held; None when they can."""
    if operand is not None and operand.draws:
        return f"{operand.name} rounds at random, and a deployed layer does not: it is for backward, not for the {side} of forward"
    if scales == DELAYED:
        return None  # `_why_not_delayed` says it
    if scales not in SCALES:
        return f"{side}_scales is one of {', '.join(SCALES)}, got {scales!r}"
    if scales == "dynamic":
        return None
    name = operand.name if operand else "high precision"
    if side == "input" and (operand is None or not operand.per_tensor):
        return (
            f"{scales} activation scales need a format with one scale for the whole tensor, such as int8-tensor, "
            f"int8-tensor-asym, fp8-tensor or nvfp4 (its outer scale), got {name}"
        )
    if scales == "learned" and not (operand is not None and operand.learnable):
        return (
            f"learned scales are for integers (int8, intx) and formats that define `learnable`, got {name} for the {side}, "
            "which has no gradient for its scale (a float's rounding hardly depends on it, and int4 stores a rounded minimum): use scales='static'"
        )
    assert operand is not None
    try:
        operand.measure(torch.empty(1, operand.block or 1, dtype=torch.float32, device="meta"))
    except ValueError as error:  # scales and codes that are fitted to each other
        return str(error)
    if straight_through == "clipped" and not operand.clips_when_held:
        return f"{name} with held scales has no clipped straight-through: use straight_through='identity'"
    return None
