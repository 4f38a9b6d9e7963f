"""Router drift: how many tokens change experts between two forms of a model.

A router is float in every form, but what reaches it went through quantised layers, so a token near a tie may go to
other experts. Each model runs the batch by itself, and the experts that its routers chose are compared, layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aoquant._messages import check_model
from aoquant.experts.families import experts_of
from aoquant.experts.routers import routers_of
from aoquant.report.measure import hooked, run, undisturbed

_INDEX = ("top_k_index", "router_indices")  # the name of a forward's second argument


@dataclass(frozen=True)
class RouterDrift:
    """One layer of experts. tokens: that were compared. changed: those whose experts are not the same. choices: experts
    that tokens have, over all of them. moved: those of model a that a token of model b does not have.
    """

    fqn: str
    tokens: int
    changed: int
    choices: int
    moved: int

    @property
    def changed_share(self) -> float:
        """Return the share of tokens whose experts are not the same."""
        return self.changed / self.tokens if self.tokens else 0.0


def router_drift(model_a: nn.Module, model_b: nn.Module, batch: Any) -> tuple[RouterDrift, ...]:
    """Return the tokens of `batch` that go to other experts in model b than in model a, by layer of stacked experts.

    batch: a tensor, positional arguments (tuple or list), or keyword arguments (dict, BatchEncoding). The models stay
    as they are.

    Raises:
        ValueError: one is no module; the models have no stacked experts of the same names, or do not run them equally
            often; or their class is not called with each token's experts (Llama 4, Aria, JetMoE).

    Example:

            for layer in router_drift(float_model, prepared, {"input_ids": ids}):
                print(f"{layer.fqn}: {layer.changed_share:.2%} of {layer.tokens} tokens")
    """
    check_model(model_a, "model_a")
    check_model(model_b, "model_b")
    a, b = (routes(model, batch) for model in (model_a, model_b))
    return drift(a, b)


def routes(model: nn.Module, batch: Any) -> dict[str, list[Tensor]]:
    """Return the experts (T, top k) of each token in each call of a layer of stacked experts, by the layer's name.

    Raises:
        ValueError: the model has no stacked experts, or their class is not called with each token's experts.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    experts = experts_of(model)
    if not experts:
        raise ValueError(f"router_drift: {type(model).__name__} has no stacked experts, whose tokens could be compared")
    chosen: dict[str, list[Tensor]] = {name: [] for name in experts}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[1] if len(args) > 1 else next((kwargs[n] for n in _INDEX if n in kwargs), None)
        if not isinstance(given, Tensor) or given.dim() != 2 or given.is_floating_point():
            raise ValueError(_no_index(name, module, list(routers_of(model))))
        chosen[name].append(given.detach().clone())

    watched = hooked(m.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, m in experts.items())
    with watched, undisturbed(model), torch.random.fork_rng([]):
        run(model, batch)
    return chosen


def _no_index(name: str, module: nn.Module, routers: list[str]) -> str:
    """Return why the tokens of a class that sorts them elsewhere are not compared. routers: names in the model."""
    near = [r for r in routers if name.startswith(f"{r.rpartition('.')[0]}.")]
    return (
        f"router_drift: {name} ({type(module).__name__}) is not called with the experts of each token, an integer tensor "
        f"(tokens, top k), so its drift is not counted: compare the outputs of its router, {', '.join(near) or 'a module above it'}, "
        "by forward hooks of your own, and leave router_drift and report's routing off for this model"
    )


def drift(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> tuple[RouterDrift, ...]:
    """Return the drift between two models' `routes`. Raises ValueError: they do not match."""
    found = []
    for name in dict.fromkeys((*a, *b)):
        mine, theirs = a.get(name, []), b.get(name, [])
        if [t.shape for t in mine] != [t.shape for t in theirs]:
            raise ValueError(
                f"router_drift: {name or 'the experts'} ran {len(mine)} time(s) in model_a and {len(theirs)} in model_b, or "
                "with other tokens: compare two forms of one model on one batch"
            )
        moved = [~(x.unsqueeze(2) == y.to(x.device).unsqueeze(1)).any(2) for x, y in zip(mine, theirs, strict=True)]
        found.append(
            RouterDrift(
                name,
                tokens=sum(len(m) for m in moved),
                changed=sum(int(m.any(1).sum()) for m in moved),
                choices=sum(m.numel() for m in moved),
                moved=sum(int(m.sum()) for m in moved),
            )
        )
    return tuple(found)


def changed_share(layers: Sequence[RouterDrift]) -> float:
    """Share of tokens, over all layers, whose experts are not the same."""
    tokens = sum(layer.tokens for layer in layers)
    return sum(layer.changed for layer in layers) / tokens if tokens else 0.0
