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

KV caches are listed beside parameters where one is quantised: attention modules, with the format of their cache.

The first two are documented or asked for. A user expects the unsupported ones to be quantised, and they can be most
of a model: the experts of a Mixtral are 3-D parameters, and its linear layers a sixth of it. So `quantize_` warns
when they are more than `WORTH_A_WARNING` of the model.
"""

import re
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from aoquant._messages import check_model, some
from aoquant.experts.families import stacks_of
from aoquant.experts.prepared import QATExperts
from aoquant.experts.routers import router_modules
from aoquant.kv import hook
from aoquant.linear.kinds import is_layer, is_packed, kind_of, why_no_kind
from aoquant.linear.prepared import QATLayer
from aoquant.linear.tensor import PackedTensor
from aoquant.planning.adapters import is_adapter
from aoquant.planning.choose import Choice
from aoquant.planning.heads import heads
from aoquant.planning.sizes import stored_bytes
from aoquant.planning.stack_changes import why_unsupported
from aoquant.planning.tied import identity, modules

if TYPE_CHECKING:
    from aoquant.planning.plan import Plan

WORTH_A_WARNING = 0.05  # share of a model's elements in unsupported matrices
SKIPPED = "aoquant_skipped"  # attribute of a layer that skip_incompatible left out: why
REACHED = ("quantised", "prepared")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Owner(NamedTuple):
    """A module that holds a parameter: its name in the model, the parameter's in it."""

    fqn: str
    name: str
    module: nn.Module


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
class Cache:
    """The KV cache of one attention module. state: "quantised", "prepared" or "float". about: its format, or why it is
    float. scales: static ones, by the names of their buffers. bytes_per_token: as stored, or as convert will store it;
    None where the module does not tell its head dimension.
    """

    fqn: str
    state: str
    about: str
    scales: dict[str, list[float]]
    bytes_per_token: int | None


@dataclass(frozen=True)
class Coverage:
    """List every parameter of a model. Print it for a table; `weights` are its rows, small parameters last.

    caches: the KV cache of each attention module; empty where none is quantised.
    """

    weights: tuple[Weight, ...]
    caches: tuple[Cache, ...] = ()

    @property
    def elements(self) -> int:
        return sum(w.elements for w in self.weights)

    @property
    def share(self) -> float:
        """Return the share of the model's parameters, by elements, in quantised or prepared layers."""
        return self._share(w.elements for w in self.weights if w.state in REACHED)

    @property
    def bytes_share(self) -> float:
        """Return the share of the model's bytes, as stored now, in quantised or prepared layers."""
        total = sum(w.bytes for w in self.weights)
        return sum(w.bytes for w in self.weights if w.state in REACHED) / total if total else 0.0

    @property
    def float_weights(self) -> tuple[Weight, ...]:
        """Return the matrices that are float, the largest first."""
        found = [w for w in self.weights if w.state not in (*REACHED, "small")]
        return tuple(sorted(found, key=lambda w: -w.elements))

    @property
    def unexpected(self) -> tuple[Weight, ...]:
        """Return the matrices that are float though nothing documented or asked for explains it, largest first."""
        return tuple(w for w in self.float_weights if w.state in ("unsupported", "subclass", "incompatible"))

    @property
    def problem(self) -> str | None:
        """Return a sentence about the unsupported matrices; None when nothing asked for them and they are at most
        `WORTH_A_WARNING` of the model.
        """
        found = [w for w in self.unexpected if w.state == "unsupported"]
        share = self._share(w.elements for w in found)
        if share <= WORTH_A_WARNING and not any(w.asked for w in found):
            return None
        return f"{self._reached}, and {share:.1%} are matrices without support, which stay float: {listed(found)}"

    def __str__(self) -> str:
        reached = sum(c.state in REACHED for c in self.caches)
        caches = f"; {reached} of {len(self.caches)} attention modules quantise their KV cache" if self.caches else ""
        return self._reached + caches

    @property
    def _reached(self) -> str:
        return f"{self.share:.1%} of {self.elements:,} parameters are in quantised layers"

    def to_dict(self) -> dict[str, Any]:
        """Return shares, and the float matrices, for JSON."""
        weights = [
            {"names": list(w.names), "shape": list(w.shape), "state": w.state, "why": w.about}
            for w in self.float_weights
        ]
        return {
            "share": self.share,
            "bytes_share": self.bytes_share,
            "parameters": self.elements,
            "float_weights": weights,
            **({"kv_caches": [asdict(c) for c in self.caches]} if self.caches else {}),
        }

    def to_markdown(self) -> str:
        """Return a table with a line for layers that differ in their number only, and a line of totals."""
        lines = ["| parameter | shape | elements | bytes | share | state | |", "|:--|:--|--:|--:|--:|:--|:--|"]
        for names, shape, weights in _grouped(self.weights):
            elements, size = sum(w.elements for w in weights), sum(w.bytes for w in weights)
            share, one = self._share([elements]), weights[0]
            lines.append(f"| {names} | {shape} | {elements:,} | {size:,} | {share:.2%} | {one.state} | {one.about} |")
        lines += ["", f"{self._reached}, which hold {self.bytes_share:.1%} of the bytes."]
        if self.caches:
            lines += ["", "| KV cache | bytes per token | state | |", "|:--|--:|:--|:--|"]
        for name, several, caches in _alike((c.fqn, (c.state, c.about, c.bytes_per_token), c) for c in self.caches):
            cache, count = caches[0], f"{len(caches)} x " * several
            lines.append(f"| {name} | {count}{cache.bytes_per_token or 'unknown'} | {cache.state} | {cache.about} |")
        return "\n".join(lines)

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
    return after(model, None)


def after(model: nn.Module, plan: "Plan | None") -> Coverage:
    """The coverage that a model will have once `plan` is carried out; None: as it is."""
    reasons = _Reasons(model, plan)
    owners: dict[Hashable, list[_Owner]] = {}
    tensors: dict[Hashable, Tensor] = {}
    for names, module in modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                key = identity(parameter)
                tensors[key] = parameter
                owners.setdefault(key, []).extend(_Owner(fqn, name, module) for fqn in names)
    rows, small = list[Weight](), list[Weight]()
    for key, held_by in owners.items():
        tensor = tensors[key]
        state, about = reasons.state(tensor, held_by)
        labels = tuple(f"{o.fqn}.{o.name}" if o.fqn else o.name for o in held_by)
        asked = any(id(o.module) in reasons.choice.picked for o in held_by)
        row = Weight(labels, tuple(tensor.shape), tensor.numel(), stored_bytes(tensor), state, about, asked)
        (small if state == "small" else rows).append(row)
    if small:
        elements, size = sum(w.elements for w in small), sum(w.bytes for w in small)
        rows.append(Weight((f"{len(small)} biases, norms and scales",), (), elements, size, "small", "not quantised"))
    return Coverage(tuple(rows), _caches(model))


def _caches(model: nn.Module) -> tuple[Cache, ...]:
    quantised = hook.quantised(model)
    found = []
    for fqn, module in hook.attentions(model).items() if quantised else ():
        quant = quantised[fqn].kv_quant if fqn in quantised else None
        config = None if quant is None else quant.config
        state = "float" if quant is None else "quantised" if quant.converted else "prepared"
        reads = "reads keys and values of an earlier layer"
        about = (
            reads if hook.shares(module) else "no config was given to this cache" if config is None else config.about
        )
        found.append(Cache(fqn, state, about, hook.static_scales(module), hook.bytes_per_token(module, config)))
    return tuple(found)


def listed(weights: Collection[Weight], count: int = 5) -> str:
    """Names and shapes by reason, the first `count` of each, for messages."""
    said = []
    for about in dict.fromkeys(w.about for w in weights):
        names = [f"{names} {shape}" for names, shape, _ in _grouped(w for w in weights if w.about == about)]
        said.append(f"{some(names, count)}: {about}")
    return "; ".join(said)


def _grouped(weights: Iterable[Weight]) -> Iterator[tuple[str, str, list[Weight]]]:
    """Parameters whose names differ in numbers only: the names, as layers.*.mlp.up_proj.weight, and the shape."""
    for names, several, group in _alike((", ".join(w.names), (w.shape, w.state, w.about), w) for w in weights):
        sizes = "x".join(map(str, group[0].shape))
        yield names, f"{len(group)} x ({sizes})" if several else f"({sizes})" if group[0].shape else "", group


def _alike(rows: Iterable[tuple[str, Hashable, Any]]) -> Iterator[tuple[str, bool, list[Any]]]:
    """Group rows of equal keys whose names differ in numbers only: the name, with * where there are several."""
    groups: dict[tuple[str, Hashable], list[tuple[str, Any]]] = {}
    for name, key, row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)|(?<![^ ])\d+(?=\.)", "*", name)
        groups.setdefault((pattern, key), []).append((name, row))
    for (pattern, _), group in groups.items():
        yield pattern if len(group) > 1 else group[0][0], len(group) > 1, [row for _, row in group]


class _Reasons:
    """Why each parameter of a model is quantised or float, once a plan is carried out."""

    def __init__(self, model: nn.Module, plan: "Plan | None") -> None:
        self.model, self.choice = model, Choice() if plan is None else plan.choice
        changes = () if plan is None else (*plan.layers, *plan.experts)
        self.planned = {identity(c.weight): c.target.recipe.fprop_weight.name for c in changes}
        skipped = {} if plan is None else plan.skipped
        self.skipped = {id(c.module): skipped[c.fqn] for c in self.choice.layers if c.fqn in skipped}
        self.outputs, self.routers = heads(model), router_modules(model)

    def state(self, tensor: Tensor, owners: list[_Owner]) -> tuple[str, str]:
        """(state, about) of one parameter, from the modules that hold it."""
        if is_packed(tensor):
            return "quantised", tensor.format if isinstance(tensor, PackedTensor) else type(tensor.data).__name__
        weights = [o.module for o in owners if o.name == "weight"]
        if (prepared := next((m for m in weights if isinstance(m, QATLayer)), None)) is not None:
            return "prepared", prepared.prepared.recipe.fprop_weight.name
        for o in owners:
            if isinstance(o.module, QATExperts) and o.name in o.module.stacks:
                return "prepared", o.module.stacks[o.name].recipe.fprop_weight.name
        if (format := self.planned.get(identity(tensor))) is not None:
            return "quantised", format
        biases = all(o.name.endswith("_bias") and stacks_of(o.module) for o in owners)  # (E, N)
        if sum(n > 1 for n in tensor.shape) < 2 or biases or all(isinstance(o.module, QATLayer) for o in owners):
            return "small", ""
        reason = next((r for m in weights if (r := self.skipped.get(id(m)) or vars(m).get(SKIPPED))), None)
        return ("incompatible", reason) if reason is not None else self._float(tensor, owners)

    def _float(self, tensor: Tensor, owners: list[_Owner]) -> tuple[str, str]:
        fqn, name, module = owners[0]
        router = "a router, which decides what experts a token meets: stays float"
        if _is_adapter(self.model, fqn):
            return "adapter", "trained beside the quantised weight"
        embeddings = [o.module for o in owners if isinstance(o.module, nn.Embedding)]
        if refused := next((m for m in embeddings if kind_of(m) is None), None):
            return "default", f"an embedding that cannot be quantised: {why_no_kind(refused)}"
        head = any(id(o.module) in self.outputs for o in owners)
        if head and embeddings:
            return "default", "an embedding and the output head, tied: left out unless both are named"
        if head and kind_of(module) is not None:
            return "default", "the output head: left out unless it is named"
        if embeddings:
            return "default", "an embedding: left out unless it is named"
        if all(id(o.module) in self.routers for o in owners):
            return "default", router
        if kind_of(module) is not None and name == "weight":
            return "left out", "no config was given to this layer"
        if any(id(o.module) in self.choice.missed for o in owners):
            return "unsupported", "the recipe for experts finds none by this name: name their module in FqnToConfig"
        if name in stacks_of(module):
            return "left out", "no config was given to these experts"
        if id(module) in self.choice.left_out:
            return "left out", f"a parameter of {type(module).__name__}, left out by name"
        if re.search("router", type(module).__name__, re.IGNORECASE) and tensor.dim() == 2:
            return "default", router
        if is_layer(module) and name == "weight":
            return "subclass", why_no_kind(module)
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
    """Return whether a module is part of an adapter: beneath a tuner layer of peft's, beside its base_layer."""
    parts = fqn.split(".")
    for i in range(len(parts)):
        if is_adapter(model.get_submodule(".".join(parts[:i]))):
            return parts[i] != "base_layer"
    return False
