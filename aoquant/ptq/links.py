"""Find where a change of a layer's input channels can be folded: the norm or the linear layer that makes them.

One forward of the float model shows whose output each layer is given (norm -> q/k/v, norm -> gate/up). What is between
two linear layers (v -> attention -> o, up -> gate * up -> down) cannot be seen that way, so linear layers of one module
are candidates for each other. Every link is then proved: its channels are multiplied by powers of two behind the source
and divided by them before the layers. Powers of two are exact, so the model's outputs stay bit for bit where the link
holds. A channel that is read elsewhere, or goes through a norm or an activation, changes them. Below 2^-14 they are not
exact in float16, so a float16 model is looked at in bfloat16.
"""

import copy
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from aoquant._messages import refuse
from aoquant.linear.kinds import is_linear, kind_of, matrix_of
from aoquant.report.measure import hooked, logits_of, run

SHOWN_ROWS = 256  # of a model's output that are compared
CLOSE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # relative error of outputs behind a fold


@dataclass(frozen=True)
class Link:
    """A module, and the linear layers whose input channels are its output channels.

    source: name of a norm or of a linear layer. layers: names. channels_K: the source's channel of each input channel;
    heads that share keys and values name a channel several times. head: channels of an attention head, or 0.
    """

    source: str
    layers: tuple[str, ...]
    channels_K: Tensor
    head: int = 0


@dataclass(frozen=True)
class Structure:
    """Links that hold. read: whose output a linear layer or a norm is given, where that is another of them. reached:
    the linear layers and norms that ran; of others a forward proves nothing.
    """

    links: list[Link]
    read: dict[str, str]
    reached: set[str]

    def of(self, layer: str) -> Link | None:
        """Return the link whose layers hold `layer`."""
        return next((link for link in self.links if layer in link.layers), None)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module has a gain for each channel and no parts."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1 and not list(module.children())


def bare(norm: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return what a norm makes of x under other parameters, without its hooks: `offload` moves it to a GPU by them."""
    own: Any = copy.copy(norm)
    vars(own)["_parameters"] = {**norm._parameters, **parameters}
    return own.forward(x)


def offset(norm: Any) -> float | None:
    """Return 0 for a norm that multiplies by its weight w, 1 for 1 + w (Gemma); None for any other."""
    weight: Tensor = norm._parameters["weight"]
    x = torch.linspace(-1, 1, len(weight), device=weight.device, dtype=weight.dtype)[None]
    bias = norm._parameters.get("bias")
    fixed = {} if bias is None else {"bias": torch.zeros_like(bias)}
    taken = inspect.signature(norm.forward).parameters.values()
    if sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in taken) > 1:
        return None
    none, one = (bare(norm, fixed | {"weight": torch.full_like(weight, c)}, x) for c in (0, 1))
    if not none.any():
        return 0.0
    return 1.0 if torch.allclose(2 * none, one, rtol=1e-2) else None


def find(model: nn.Module, batch: Any) -> Structure:
    """Return the links of a float model. batch: runs through every layer, a few times.

    Raises:
        ValueError: naming layers whose weights are sharded or have no values.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    weights: dict[str, Any] = {n: m.weight for n, m in modules.items() if is_linear(m)}
    problems = {
        n: "its weight is on the meta device and has no values: load it first" for n, w in weights.items() if w.is_meta
    }
    sharded = "its weight is sharded (DTensor): calibrate the whole model, and shard it then"
    refuse(problems | {n: sharded for n, w in weights.items() if isinstance(w, DTensor)})
    with _in_bfloat16(model):
        given = tree_map(lambda t: t.bfloat16() if isinstance(t, Tensor) and t.dtype == torch.float16 else t, batch)
        return _find(model, modules, given)


@contextmanager
def _in_bfloat16(model: nn.Module) -> Iterator[None]:
    """Have a model's float16 tensors in bfloat16 inside."""
    every: Iterator[dict[str, Any]] = chain.from_iterable((m._parameters, m._buffers) for m in model.modules())
    before = [(d, n, t) for d in every for n, t in d.items() if t is not None and t.dtype == torch.float16]
    copies = {id(t): t.detach().bfloat16() for _, _, t in before}  # tensors that modules share stay shared
    try:
        for tensors, name, t in before:
            tensors[name] = nn.Parameter(copies[id(t)], False) if isinstance(t, nn.Parameter) else copies[id(t)]
        yield
    finally:
        for tensors, name, t in before:
            tensors[name] = t


def _find(model: nn.Module, modules: dict[str, Any], batch: Any) -> Structure:
    """Return the links of a model whose numbers keep their digits when powers of two multiply them."""
    read, reached = _read(model, modules, batch)
    wanted = shown(model, batch)

    def proved(links: list[Link]) -> list[Link]:
        return links if links and _holds(model, modules, links, batch, wanted) else []

    direct: dict[str, list[str]] = {}
    for layer, source in read.items():
        if is_linear(modules[layer]):
            direct.setdefault(source, []).append(layer)
    alike: dict[str, list[Link]] = {}
    for source, layers in direct.items():
        channels = torch.arange(matrix_of(modules[layers[0]]).shape[1], device="cpu")
        alike.setdefault(source.rpartition(".")[2], []).append(Link(source, tuple(layers), channels))
    everything = [link for links in alike.values() for link in links]
    found = proved(everything) or [link for links in alike.values() for link in proved(links)]
    known = {layer for link in found for layer in link.layers}
    for links in _candidates(modules).values():
        ran = [link for link in links if {link.source, *link.layers} <= reached]
        new = [link for link in ran if link.layers[0] not in known and link.layers[0] not in read]
        found += (held := proved(new))
        known |= {layer for link in held for layer in link.layers}
    return Structure(found, read, reached)


def _read(model: nn.Module, modules: dict[str, Any], batch: Any) -> tuple[dict[str, str], set[str]]:
    """Return (whose output each linear layer and norm is given, without what is read from several; those that ran)."""
    made: dict[int, tuple[str, Any]] = {}  # by address, while the tensor lives
    found: dict[str, str | None] = {}

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        source, alive = made.get(x.data_ptr(), ("", lambda: None)) if x is not None else ("", lambda: None)
        y = alive()
        seen = source if y is not None and x is not None and y.shape[-1] == x.shape[-1] else None
        found[name] = seen if found.get(name, seen) == seen else None

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            made[output.data_ptr()] = name, weakref.ref(output)

    parts = {n: m for n, m in modules.items() if is_linear(m) or is_norm(m)}
    handles = [m.register_forward_pre_hook(partial(before, n), with_kwargs=True) for n, m in parts.items()]
    handles += [m.register_forward_hook(partial(after, n)) for n, m in parts.items()]
    with hooked(handles):
        run(model, batch)
    return {name: source for name, source in found.items() if source is not None}, set(found)


def _candidates(modules: dict[str, Any]) -> dict[Any, list[Link]]:
    """Return possible links between linear layers of one module, those of alike blocks together."""
    found: dict[Any, list[Link]] = {}
    for parent, module in modules.items():
        linears = {n: matrix_of(m).shape for n, m in module.named_children() if is_linear(m)}
        head, groups = (getattr(module, a, None) for a in ("head_dim", "num_key_value_groups"))
        for name, (_, k) in linears.items():
            per_head = head if isinstance(head, int) and k % head == 0 else 0
            for before, (n, _) in linears.items():
                for shared in {1, groups if isinstance(groups, int) and per_head else 1}:
                    skipped = n - k // shared  # what is fused in front of it, such as q and k
                    if before == name or skipped < 0:
                        continue
                    at = torch.arange(k, device="cpu")
                    if shared > 1:
                        at = at // per_head // shared * per_head + at % per_head
                    path = f"{parent}." if parent else ""
                    link = Link(path + before, (path + name,), skipped + at, per_head)
                    found.setdefault((before, name, shared), []).append(link)
    return found


def _holds(model: nn.Module, modules: dict[str, Any], links: list[Link], batch: Any, wanted: Tensor) -> bool:
    """Return whether outputs stay, bit for bit, when channels are multiplied by powers of two and divided again."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def multiply(s_C: Tensor) -> Any:
        return lambda module, args, y: y * s_C.to(y) if isinstance(y, Tensor) and y.shape[-1] == len(s_C) else y

    def divide(s_K: Tensor) -> Any:
        return lambda module, args: (args[0] / s_K.to(args[0]), *args[1:]) if args else None

    def changes() -> Iterator[Any]:
        for link in links:
            source = modules[link.source]
            s_C = torch.ones(len(matrix_of(source)), device="cpu")
            used = link.channels_K.unique()
            s_C[used] = 2.0 ** torch.randint(0, 2, used.shape, generator=generator, device="cpu")
            yield source.register_forward_hook(multiply(s_C))
            yield from (modules[n].register_forward_pre_hook(divide(s_C[link.channels_K])) for n in link.layers)

    with hooked(changes()):
        return torch.equal(shown(model, batch).nan_to_num(), wanted.nan_to_num())


def shown(model: nn.Module, batch: Any) -> Tensor:
    """Return rows of a model's output for one batch."""
    y = logits_of(run(model, batch))
    rows = y.reshape(-1, y.shape[-1])
    return rows[:: max(1, len(rows) // SHOWN_ROWS)].clone()


@contextmanager
def unchanged(model: nn.Module, batch: Any, what: str) -> Iterator[None]:
    """Raise ValueError unless the model's outputs are those from before the block, but for rounding. what: was done."""
    before = shown(model, batch).float()
    if not before.isfinite().all():
        raise ValueError(
            f"{type(model).__name__}: its outputs for the first batch hold NaN or Inf: look for them in the batches or in the weights"
        )
    dtypes = {p.dtype for p in model.parameters()}
    yield
    after = shown(model, batch).float()
    error = float((after - before).norm() / before.norm().clamp(min=1e-30))
    bound = max(CLOSE.get(dtype, 0.0) for dtype in dtypes)
    if not error <= bound:
        raise ValueError(
            f"{type(model).__name__}: {what} changed its outputs by {error:.1e} of their size, more than rounding does ({bound:g}): "
            "a part of it reads or writes what was changed. Use another method; the model is unchanged"
        )


def why_not_replaced(modules: dict[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return why weights of modules cannot be replaced: packed, sharded, without values, or tied."""
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        if (weight := module._parameters.get("weight")) is not None:
            users.setdefault(id(weight), []).append(name)
    found = {}
    for name in names:
        weight = modules[name]._parameters.get("weight")
        if weight is None or not isinstance(weight, nn.Parameter) or type(weight.data) is not Tensor or weight.is_meta:
            found[name] = "its weight is not a plain tensor with values here, so nothing can be folded into it"
        elif not weight.is_floating_point():
            found[name] = "its weight is not floating point, so nothing can be folded into it"
        elif len(sharers := users[id(weight)]) > 1:
            found[name] = f"its weight is tied ({', '.join(sharers)}), and a fold would change all of them: untie it"
    return found


def values_of(module: nn.Module, name: str) -> Tensor:
    """Return a parameter in float64, a linear layer's weight as (N, K)."""
    value: Any = matrix_of(module) if name == "weight" else module._parameters[name]
    return value.detach().double()


def replace(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module a new parameter with these values, in the old one's dtype. value: of a linear layer, (N, K)."""
    old: Any = module._parameters[name]
    kind = kind_of(module)
    if name == "weight" and kind is not None and kind.transposed:
        value = value.t()
    setattr(module, name, nn.Parameter(value.to(old.dtype).contiguous(), requires_grad=old.requires_grad))
