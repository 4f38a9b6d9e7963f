"""`explain`: which backend runs a layer, for which M, and why the others do not.

The router decides call by call from a request that holds no data, so `explain` asks for every M that a threshold is
likely at, and bisects between two that differ. Two opposite thresholds between neighbours of `_PROBES` would be missed.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from aoquant import ops, serving
from aoquant.distributed.gathered import GatheredWeight
from aoquant.experts.families import stacks_of
from aoquant.experts.packed_experts import PackedExperts
from aoquant.experts.prepared import QATExperts
from aoquant.formats import Encoded, Operand
from aoquant.kv import hook
from aoquant.linear.prepared import QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.ops import CodecRequest, gemm_request, kv, router
from aoquant.ops.gemm import one_call, tensor_cores

Rows = list[tuple[str, str]]
HELD = ("static", "learned")  # scales that a prepared layer holds
_PROBES = (*range(1, 65), *(m + d for e in range(7, 21) for m in (1 << e,) for d in (-1, 0, 1)))


@dataclass(frozen=True)
class Route:
    """One step of a layer's forward for first <= M <= last (None: without end). rows: (backend, what the router
    says), by falling priority.
    """

    step: str
    first: int
    last: int | None
    rows: Rows

    @property
    def backend(self) -> str | None:
        """Return the backend that runs it; None when the one that is forced cannot."""
        return next((name for name, said in self.rows if said == "runs"), None)


@dataclass(frozen=True)
class Routes:
    """The findings of `explain` for a layer; print it, or read `routes`. served: differences of the serving engine."""

    layer: str
    routes: tuple[Route, ...]
    served: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.layer]
        for r in self.routes:
            until = "" if r.last == r.first else " and above" if r.last is None else f" to {r.last}"
            lines.append(f"  {r.step}, M = {r.first}{until}: {r.backend or 'an error'}")
            lines += [f"    not {name}: {said}" for name, said in r.rows if said != "runs"]
        lines += [f"  served: {difference}" for difference in self.served]
        return "\n".join(lines)


def explain(what: Any, dtype: torch.dtype | None = None, *, engine: str | None = None, gpu: str | None = None) -> Any:
    """Return which backend runs, and why the others do not.

    what: a prepared layer, or a converted one: `Routes`, for every M. Inside `fixed_weights` a prepared layer's weight
        is codes already. Stacked experts: the same, M the tokens of one expert. An attention module whose KV cache is
        quantised: the same, M the query tokens of a sequence. Or a request (`ops.Request`, `ops.CodecRequest`): a list
        of (backend, "runs" | "willing, lower priority" | reason why not).
    dtype: of the activations, by default the weight's.
    engine, gpu: as in `QATConfig`: say too what that engine will compute otherwise than the layer, or cannot hold.

    Raises:
        ValueError: anything else, such as a whole model or a layer with a torchao tensor, which calls its own kernel.
    """
    if isinstance(what, (ops.Request, ops.CodecRequest)):
        return ops.explain(what)
    weight, known = getattr(what, "weight", None), _Known()
    if isinstance(what, torch.nn.Module) and stacks_of(what):
        return _experts(what, dtype, engine, gpu)
    if getattr(what, "kv_quant", None) is not None:
        return _cache(what, dtype)
    if isinstance(what, QATLinear):
        recipe, state, weight = what.prepared.recipe, "prepared", what.matrix()
        known = _known(what)
    elif isinstance(weight, PackedTensor):
        recipe, state = weight.recipe, "converted"
    else:
        held = f" with a weight of {type(weight.data).__name__}" if isinstance(weight, torch.Tensor) else ""
        raise ValueError(
            "explain takes a request, a prepared linear layer or one with a PackedTensor, or an attention module with a quantised KV "
            f"cache, got {type(what).__name__}{held}: "
            "for a model, choose a layer with model.get_submodule(name); torchao's tensors call their own kernels, without this router"
        )
    n, k = weight.shape
    rows = "a token's codes are its own" if recipe.batch_invariant else "a token's codes depend on its batch"
    served = _served(recipe, engine, gpu)
    if engine is not None and state == "prepared":
        served += tuple(serving.refused(recipe, engine))
    title = f"{n} x {k} {state} layer, {recipe}; {rows}{known.said}"
    return Routes(title, _routes(recipe, weight, dtype or weight.dtype, state, known), served)


class _Known(NamedTuple):
    """The codes of a weight that are there before a forward. bound: calls without gradients go through a `BoundWeight`.
    said: of a prepared layer, the end of its title.
    """

    codes: Encoded | None = None
    bound: bool = False
    said: str = ""


def _known(layer: QATLinear) -> _Known:
    """Return the codes of a prepared layer: of `quantized_model_init`, or inside `fixed_weights`."""
    if isinstance(layer.weight, GatheredWeight):
        return _Known(layer.weight.rows, False, "; its weight is codes already, which are multiplied without encoding")
    if layer.fixed is None or isinstance(layer.weight, DTensor):  # a shard's codes are made when it is gathered
        return _Known()
    if layer.fixed.of_this_call is None:
        why = "as its weight is computed or of inference mode, or its scales are delayed"
        return _Known(said=f"; it encodes as usual inside fixed_weights, {why}")
    codes = layer.encode_weight().by_row
    return _Known(codes, True, "; its weight is fixed: codes made once are multiplied without encoding")


def _served(recipe: LinearRecipe, engine: str | None, gpu: str | None, *, experts: bool = False) -> tuple[str, ...]:
    """Return what the engine computes otherwise, or cannot hold; without an engine, what a GPU changes."""
    if engine is not None or gpu is not None:
        return tuple(serving.foreseen([recipe], engine, gpu, experts=experts))
    note = serving.note(recipe)
    return (note,) if note else ()


def _cache(module: torch.nn.Module, dtype: torch.dtype | None) -> Routes:
    """Return what writes a KV cache and what attends to it: without gradients, by `sdpa`, outside of compiled code."""
    quant: Any = module.kv_quant
    k, v, state = quant.config.k_format, quant.config.v_format, "converted" if quant.converted else "prepared"
    like = next(t for t in module.parameters() if t.is_floating_point())
    dtype, dim, size = dtype or like.dtype, hook.head_dims(module)[0], hook.bytes_per_token(module, quant.config)
    about = "; ".join(filter(None, (quant.config.about, hook.said(hook.static_scales(module)))))
    shown = torch.empty((1, 1, 1, max(dim, 1)), dtype=dtype, device=like.device)
    lacks = next((f.name for f in (k, v) if not kv.writes(f, shown, None)), None)
    triton = "runs" if lacks is None else f"does not write {lacks} of {dtype} on {like.device.type}"
    latent = "latent attention is decoded first" if hook.is_latent(module) else None
    reason = latent or kv.why_not_attend(k, v, dim, dtype, like.device)
    own, willing = "the model's attention function, on decoded values", "willing, lower priority"
    write = [("triton", triton), ("torch", "runs" if lacks else willing)]
    one = [("triton, to the bytes themselves", reason or "runs"), (own, "runs" if reason else willing)]
    routes = (
        Route("write the cache", 1, None, write),
        Route("attend", 1, 1, one),
        Route("attend", 2, None, [(own, "runs")]),
    )
    return Routes(f"{quant.fqn}: {state} KV cache, {about}; {size or 'unknown'} bytes a token", routes)


def _experts(module: torch.nn.Module, dtype: torch.dtype | None, engine: str | None, gpu: str | None) -> Routes:
    """The routes of one expert in each prepared or packed parameter of stacked experts. Raises ValueError: none is."""
    titles, routes, served = list[str](), list[Route](), list[str]()
    for name in stacks_of(module):
        stack = getattr(module, name)
        if isinstance(module, QATExperts) and name in module.stacks:
            recipe, state, weight = module.stacks[name].recipe, "prepared", module.matrix(name, 0)
        elif isinstance(stack.data, PackedExperts):
            recipe, state, weight = stack.recipe, "converted", stack.data.expert(0)
        else:
            continue
        n, k = weight.shape
        titles.append(f"{name}: {len(stack)} experts of {n} x {k}, {state}, {recipe}")
        routes += [
            dataclasses.replace(r, step=f"{name}: {r.step}")
            for r in _routes(recipe, weight, dtype or weight.dtype, state, _Known())
        ]
        served += _served(recipe, engine, gpu, experts=True)
    if not titles:
        raise ValueError("explain takes prepared or converted experts, got float ones: quantize_ them first")
    return Routes("\n".join(titles), tuple(routes), tuple(served))


def _routes(
    recipe: LinearRecipe, weight: torch.Tensor, dtype: torch.dtype, state: str, known: _Known
) -> tuple[Route, ...]:
    if isinstance(weight, PackedTensor):
        known = _Known(weight.encoded, bound=True)
    codes = known.codes
    (n, k), device, found = weight.shape, weight.device, list[Route]()
    if (x := recipe.fprop_input) is not None:
        role = "encode" if ops.reads(recipe.contract) == "codes" or device.type != "cuda" else "quantize"
        kept = role == "encode" or state == "prepared"  # for backward
        if recipe.input_scales in HELD:
            role, x = "hold", Operand(x.format)
        found += _ranges(f"{role} the input", lambda m: ops.explain(_request(role, x, device, dtype, m, k, kept)))
    w, held = recipe.fprop_weight, weight if codes is None else codes
    gemms = _ranges(
        "multiply", lambda m: ops.explain(gemm_request(recipe.contract, recipe.fprop_input, w, held, dtype, m))
    )
    readers = ops.code_readers()
    whole = ops.reads(recipe.contract) == "codes" or device.type != "cuda"

    def made_of_weight(gemm: Route) -> str:
        if codes is not None:
            return "" if gemm.backend in readers else "decode"
        if recipe.weight_scales in HELD:
            return "hold"
        # codes, or in one pass what the GEMM reads of them
        return "encode" if whole or gemm.backend in readers else "quantize"

    for role, same in groupby(gemms, made_of_weight):
        first, *rest = same
        if role:
            of = Operand(w.format) if role == "hold" else w
            rows = ops.explain(_request(role, of, device, dtype, n, k, role != "quantize"))
            found.append(Route(f"{role} the weight", first.first, (rest or [first])[-1].last, rows))
    if codes is None or not known.bound:
        return (*found, *gemms)
    found = [
        dataclasses.replace(r, rows=_decoded(r.rows, recipe, codes, dtype)) if r.step == "decode the weight" else r
        for r in found
    ]
    return (*found, *_one_call(recipe, codes, dtype), *gemms)


def _request(
    step: str, operand: Operand, device: torch.device, dtype: torch.dtype, rows: int, k: int, codes: bool
) -> CodecRequest:
    """Return a step's request: "encode", under scales from elsewhere "hold"; "quantize" for values too; "decode"."""
    role = "decode" if step == "decode" else "quantize"
    return CodecRequest(role, operand, device, dtype, rows, k, codes, step == "quantize", step == "hold")


def _decoded(rows: Rows, recipe: LinearRecipe, w: Encoded, dtype: torch.dtype) -> Rows:
    """With csrc's operator in front, where calls without gradients decode the weight by it."""
    request = gemm_request(recipe.contract, recipe.fprop_input, recipe.fprop_weight, w, dtype, 1 << 12)
    if router.forcing() or recipe.deployed.holds or not tensor_cores.by_csrc(request, w):
        return rows
    return [
        ("aoquant_native::decode_values", "runs"),
        *((name, said.replace("runs", "runs under autograd")) for name, said in rows),
    ]


def _one_call(recipe: LinearRecipe, w: Encoded, dtype: torch.dtype) -> list[Route]:
    """Return where a call without gradients makes the launches of the routes at once, by one operator."""
    if router.forcing() or recipe.deployed.holds:
        return []

    def ask(m: int) -> Rows:
        number = one_call.number(recipe.contract, recipe.fprop_input, recipe.fprop_weight, w, dtype, m)
        return [] if number is None else [(one_call.NAME, "runs")]

    return [route for route in _ranges("in one call", ask) if route.rows]


def _ranges(step: str, ask: Callable[[int], Rows]) -> list[Route]:
    """Return one route for each range of M's that get the same answer, but for numbers in it: a reason may say M."""
    found = [Route(step, 1, None, ask(1))]

    def differs(rows: Rows) -> bool:
        pairs = zip(rows, found[-1].rows, strict=False)
        return len(rows) != len(found[-1].rows) or any(_worded(a) != _worded(b) for a, b in pairs)

    for low, high in pairwise(_PROBES):
        rows = ask(high)
        while differs(rows):  # the first M whose answer is another; then again, for what lies behind it
            before, after = max(low, found[-1].first), high
            while after - before > 1:
                middle = (before + after) // 2
                before, after = (before, middle) if differs(ask(middle)) else (middle, after)
            found[-1] = dataclasses.replace(found[-1], last=after - 1)
            found.append(Route(step, after, None, ask(after)))
    return found


def _worded(row: tuple[str, str]) -> tuple[str, str]:
    """Return a backend and its answer without numbers."""
    return row[0], re.sub(r"\d+", "", row[1])
