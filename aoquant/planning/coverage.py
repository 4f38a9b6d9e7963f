"""Coverage: what quantisation reaches in a model, and what stays float, parameter by parameter.

A model's parameters are counted once each, by the memory that they are stored in, so tied weights count once under
all of their names. A parameter is the weight of a quantised or a prepared layer, or it is float for one of these
reasons:

    default       embeddings and output heads, which are left out unless they are named, and routers of experts
    left out      a layer that no config was given to
    incompatible  a layer that cannot take its config, and was left out by skip_incompatible=True
    subclass      the weight of a subclass of a supported layer, whose forward may differ
    adapter       LoRA's matrices
    unsupported   a matrix of a module that aoquant cannot quantise: stacked experts, a convolution, nn.LSTM
    small         biases, norms, scales: at most one dimension longer than 1, or biases of experts. They are added up
                  and not listed.

The first two are documented or asked for. A user expects the unsupported ones to be quantised, and they can be most
of a model: the experts of a Mixtral are 3-D parameters, and its linear layers a sixth of it. So `quantize_` warns
when they are more than `WORTH_A_WARNING` of the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from aoquant._messages import check_model
from aoquant.layers.experts import QATExperts, stacks_of
from aoquant.layers.kinds import is_layer, is_packed, kind_of
from aoquant.layers.qat import QATLayer
from aoquant.layers.routers import router_modules
from aoquant.planning.experts import why_unsupported
from aoquant.planning.heads import heads
from aoquant.planning.sizes import stored_bytes
from aoquant.planning.tied import identity, modules
from aoquant.tensor import PackedTensor

if TYPE_CHECKING:
    from aoquant.planning.plan import Plan

WORTH_A_WARNING = 0.05  # share of a model's elements in unsupported matrices
SKIPPED = "aoquant_skipped"  # attribute of a layer that skip_incompatible left out: why
REACHED = ("quantised", "prepared")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Owner(NamedTuple):
    """A module that holds a parameter: its name in the model, the parameter's in it."""

    fqn: str
    name: str
    module: nn.Module

    @property
    def label(self) -> str:
        """The parameter's name in the model."""
        return f"{self.fqn}.{self.name}" if self.fqn else self.name


class _Alike(NamedTuple):
    """Parameters whose names differ in numbers only, as layers.*.mlp.up_proj.weight."""

    names: str
    shape: str
    weights: list[Weight]


@dataclass(frozen=True)
class Weight:
    """One parameter, with all of its names.

    shape: as it is stored; (N, K) when quantised. elements: values that it stands for. bytes: that it occupies now.
    state: "quantised", "prepared", or one of the reasons above. about: the format, or why it is float. asked: a
    filter or a name picked it, without support.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    elements: int
    bytes: int
    state: str
    about: str
    asked: bool = False


@dataclass(frozen=True)
class Coverage:
    """Every parameter of a model. Print it for a table; `weights` are its rows, small parameters last."""

    weights: tuple[Weight, ...]

    @property
    def elements(self) -> int:
        return sum(w.elements for w in self.weights)

    @property
    def share(self) -> float:
        """Share of the model's parameters, by elements, in quantised or prepared layers."""
        return self._share(w.elements for w in self.weights if w.state in REACHED)

    @property
    def bytes_share(self) -> float:
        """Share of the model's bytes, as it is stored now, in quantised or prepared layers. Packed weights take few."""
        total = sum(w.bytes for w in self.weights)
        return sum(w.bytes for w in self.weights if w.state in REACHED) / total if total else 0.0

    @property
    def float_weights(self) -> tuple[Weight, ...]:
        """Matrices that are float, the largest first."""
        found = [w for w in self.weights if w.state not in (*REACHED, "small")]
        return tuple(sorted(found, key=lambda w: -w.elements))

    @property
    def unexpected(self) -> tuple[Weight, ...]:
        """Matrices that are float though nothing documented or asked for leaves them out, the largest first."""
        return tuple(w for w in self.float_weights if w.state in ("unsupported", "subclass", "incompatible"))

    @property
    def problem(self) -> str | None:
        """A sentence about the unsupported matrices; None when nothing asked for them and they are at most
        `WORTH_A_WARNING` of the model.
        """
        found = [w for w in self.unexpected if w.state == "unsupported"]
        share = self._share(w.elements for w in found)
        if share <= WORTH_A_WARNING and not any(w.asked for w in found):
            return None
        return f"{self}, and {share:.1%} are matrices without support, which stay float: {listed(found)}"

    def __str__(self) -> str:
        return f"{self.share:.1%} of {self.elements:,} parameters are in quantised layers"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: shares, and the float matrices."""
        weights = [
            {"names": list(w.names), "shape": list(w.shape), "state": w.state, "why": w.about}
            for w in self.float_weights
        ]
        return {
            "share": self.share,
            "bytes_share": self.bytes_share,
            "parameters": self.elements,
            "float_weights": weights,
        }

    def to_markdown(self) -> str:
        """A table with a line for layers that differ in their number only, and a line of totals."""
        lines = ["| parameter | shape | elements | bytes | share | state | |", "|:--|:--|--:|--:|--:|:--|:--|"]
        for alike in _grouped(self.weights):
            one, *_ = alike.weights
            elements, size = sum(w.elements for w in alike.weights), sum(w.bytes for w in alike.weights)
            share = elements / self.elements if self.elements else 0.0
            lines.append(
                f"| {alike.names} | {alike.shape} | {elements:,} | {size:,} | {share:.2%} | {one.state} | {one.about} |"
            )
        return "\n".join([*lines, "", f"{self}, which hold {self.bytes_share:.1%} of the bytes."])

    def _share(self, parts: Iterable[int]) -> float:
        return sum(parts) / self.elements if self.elements else 0.0


def coverage(model: nn.Module) -> Coverage:
    """List every parameter of `model` once: quantised, or float with the reason.

    A prepared layer counts as reached. Buffers are not counted. Example::

        print(aoquant.coverage(model).to_markdown())

    Raises:
        ValueError: `model` is no module.
    """
    check_model(model)
    return inventory(model)


def after(model: nn.Module, plan: Plan) -> Coverage:
    """The coverage that a model will have once `plan` is carried out."""
    formats = {identity(c.weight): c.target.recipe.fprop_weight.name for c in (*plan.layers, *plan.experts)}
    skipped = {id(c.module): plan.skipped[c.fqn] for c in plan.choice.layers if c.fqn in plan.skipped}
    return inventory(model, formats, plan.choice.left_out, plan.choice.picked, skipped, plan.choice.missed)


def inventory(
    model: nn.Module,
    planned: dict[Hashable, str] | None = None,
    left_out: Collection[int] = (),
    picked: Collection[int] = (),
    skipped: dict[int, str] | None = None,
    missed: Collection[int] = (),
) -> Coverage:
    """The coverage of a model, as it will be after a plan.

    planned: format by the identity of each weight that will be quantised.
    left_out, picked, missed: as `Choice` has them.
    skipped: by the id of each layer that cannot take its config, why.
    """
    planned, skipped = planned or {}, skipped or {}
    users: dict[Hashable, list[Owner]] = {}
    tensors: dict[Hashable, Tensor] = {}
    for names, module in modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                key = identity(parameter)
                tensors[key] = parameter
                users.setdefault(key, []).extend(Owner(fqn, name, module) for fqn in names)
    rows, small = list[Weight](), list[Weight]()
    outputs, routers = heads(model), router_modules(model)
    for key, owners in users.items():
        tensor = tensors[key]
        state, about = _state(model, tensor, owners, planned.get(key), left_out, skipped, outputs, routers)
        if state == "left out" and any(id(o.module) in missed for o in owners):
            state, about = (
                "unsupported",
                "the recipe for experts finds none by this name: name their module in FqnToConfig",
            )
        labels = tuple(o.label for o in owners)
        asked = any(id(o.module) in picked for o in owners)
        row = Weight(labels, tuple(tensor.shape), tensor.numel(), stored_bytes(tensor), state, about, asked)
        (small if state == "small" else rows).append(row)
    if small:
        elements, size = sum(w.elements for w in small), sum(w.bytes for w in small)
        rows.append(Weight((f"{len(small)} biases, norms and scales",), (), elements, size, "small", "not quantised"))
    return Coverage(tuple(rows))


def listed(weights: Collection[Weight], count: int = 5) -> str:
    """Names and shapes by reason, the first `count` of each, for messages."""
    said = []
    for about in dict.fromkeys(w.about for w in weights):
        names = [f"{alike.names} {alike.shape}" for alike in _grouped(w for w in weights if w.about == about)]
        more = f" and {len(names) - count} more" if len(names) > count else ""
        said.append(f"{', '.join(names[:count])}{more}: {about}")
    return "; ".join(said)


def _grouped(weights: Iterable[Weight]) -> list[_Alike]:
    groups: dict[tuple[Any, ...], list[Weight]] = {}
    for w in weights:
        pattern = tuple(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name) for name in w.names)
        groups.setdefault((pattern, w.shape, w.state, w.about), []).append(w)
    named: list[_Alike] = []
    for (pattern, shape, _, _), group in groups.items():
        names = ", ".join(pattern if len(group) > 1 else group[0].names)
        sizes = "x".join(map(str, shape))
        said = f"{len(group)} x ({sizes})" if len(group) > 1 else f"({sizes})" if shape else ""
        named.append(_Alike(names, said, group))
    return named


def _state(
    model: nn.Module,
    tensor: Tensor,
    owners: list[Owner],
    planned: str | None,
    left_out: Collection[int],
    skipped: dict[int, str],
    outputs: Collection[int],
    routers: Collection[int],
) -> tuple[str, str]:
    """(state, about) of one parameter, from the modules that hold it."""
    if is_packed(tensor):
        return "quantised", tensor.format if isinstance(tensor, PackedTensor) else type(tensor.data).__name__
    weights = [o.module for o in owners if o.name == "weight"]
    if (prepared := next((m for m in weights if isinstance(m, QATLayer)), None)) is not None:
        return "prepared", prepared.prepared.recipe.fprop_weight.name
    for o in owners:
        if isinstance(o.module, QATExperts) and o.name in o.module.stacks:
            return "prepared", o.module.stacks[o.name].recipe.fprop_weight.name
    if planned is not None:
        return "quantised", planned
    biases = all(o.name.endswith("_bias") and stacks_of(o.module) for o in owners)  # (E, N)
    if sum(n > 1 for n in tensor.shape) < 2 or biases or all(isinstance(o.module, QATLayer) for o in owners):
        return "small", ""
    reason = next((r for m in weights if (r := skipped.get(id(m)) or vars(m).get(SKIPPED))), None)
    if reason is not None:
        return "incompatible", reason
    fqn, name, module = owners[0]
    if _is_adapter(model, fqn):
        return "adapter", "trained beside the quantised weight"
    head = any(id(o.module) in outputs for o in owners)
    if head and any(isinstance(o.module, nn.Embedding) for o in owners):
        return "default", "an embedding and the output head, tied: left out unless both are named"
    if head and kind_of(module) is not None:
        return "default", "the output head: left out unless it is named"
    if isinstance(module, nn.Embedding):
        return "default", "an embedding: left out unless it is named"
    if all(id(o.module) in routers for o in owners):
        return "default", "a router, which decides what experts a token meets: stays float"
    if kind_of(module) is not None and name == "weight":
        return "left out", "no config was given to this layer"
    if name in stacks_of(module):
        return "left out", "no config was given to these experts"
    if id(module) in left_out:
        return "left out", f"a parameter of {type(module).__name__}, left out by name"
    if re.search("router", type(module).__name__, re.IGNORECASE) and tensor.dim() == 2:
        return "default", "a router, which decides what experts a token meets: stays float"
    if is_layer(module) and name == "weight":
        return "subclass", f"{type(module).__name__} is a subclass of a supported layer, whose forward may differ"
    return "unsupported", _why_unsupported(module, fqn, tensor)


def _why_unsupported(module: nn.Module, fqn: str, tensor: Tensor) -> str:
    cls = type(module).__name__
    if isinstance(module, _CONVOLUTIONS):
        return f"{cls} is a convolution"
    named = "expert" in cls.lower()  # DBRX's are stacked into two dimensions
    if named or (tensor.dim() > 2 and re.search("expert|moe", f"{fqn} {cls}", re.IGNORECASE)):
        return why_unsupported(module)
    return f"a parameter of {cls}, and only weights of nn.Linear, nn.Embedding and Conv1D are quantised"


def _is_adapter(model: nn.Module, fqn: str) -> bool:
    """Whether a module is part of an adapter: beneath a tuner layer of peft's, beside its base_layer."""
    parts = fqn.split(".")
    for i in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:i]))
        if hasattr(parent, "base_layer") and hasattr(parent, "merged"):
            return parts[i] != "base_layer"
    return False
