"""A packed model as a prepared one: QAT that goes on from published codes.

The float weights are the packed ones' values, and the layers hold the packed scales (static, or learned), so the first
forward multiplies the very codes that were packed. A value whose code would be another one is moved to a float that
has its code; layers where none has are an error. Experts hold scales unless these are the same made anew (MXFP4);
embeddings and layers that share a weight hold none, and an embedding whose scales would be others stays packed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

from aoquant._messages import check_model, naming, warn
from aoquant.config import QATConfig
from aoquant.experts.prepared import QATExperts
from aoquant.formats import Encoded, Scales
from aoquant.formats.base import joined
from aoquant.linear import held, replaced
from aoquant.linear.kinds import kind_of
from aoquant.linear.prepared import Prepared
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.planning.changes import restoring
from aoquant.planning.plan import prepare_target
from aoquant.quantize import config_of, packed_stacks, quantize_

_STEPS = 4  # floats that a weight may move


@torch.no_grad()
def unpack_(model: nn.Module, *, scales: str = "static", **options: Any) -> None:
    """Prepare a converted model for training again, in place, from its packed codes.

    scales: "static" keeps the packed scales, "learned" trains them (integers; not of stacked experts). options: further
        arguments of `QATConfig`.

    Raises:
        ValueError: no layer and no expert is packed; a format cannot hold its scales; or values do not give their codes
            again. The model is unchanged then.
    """
    if scales not in ("static", "learned"):
        raise ValueError(
            f"unpack_: scales is static or learned, got {scales!r}: scales made anew would give other codes"
        )
    check_model(model)
    layers, stacks = _chosen(model), packed_stacks(model)
    if not layers and not stacks:
        raise ValueError(
            "nothing to unpack: no linear layer holds a PackedTensor, and no experts are packed. It takes a converted model; prepared layers "
            "train as they are"
        )
    if stacks and scales == "learned":
        raise ValueError(f"{stacks[0].fqn}: stacked experts hold no learned scales: use scales='static'")
    packed: dict[str, Any] = {name: m.weight for name, m in layers.items()}
    experts: dict[str, Any] = {s.fqn: s.weight for s in stacks}
    counts = Counter(map(id, packed.values()))
    configs = {}
    for name, module in layers.items():
        own = scales if counts[id(packed[name])] == 1 and not isinstance(module, nn.Embedding) else "dynamic"
        if own != "dynamic":
            _check_held(name, packed[name])
        configs[name] = QATConfig(config_of(module), step="prepare", scales=own, **options)
    floats: dict[int, nn.Parameter] = {}
    with restoring([*layers.values(), *{id(s.module): s.module for s in stacks}.values()]):
        for module in layers.values():
            weight, kind = module.weight, kind_of(module)
            if id(weight) not in floats:
                values = weight.dequantize()
                floats[id(weight)] = nn.Parameter(values.t().contiguous() if kind and kind.transposed else values)
            module.weight = floats[id(weight)]
        if configs:
            quantize_(model, FqnToConfig(configs))
        problems = [name for name in layers if not with_codes(model.get_submodule(name), packed[name])]
        for s in stacks:
            config = QATConfig(s.config, step="prepare", **options)
            problems += [] if stack_with_codes(s.fqn, s.module, s.parameter, experts[s.fqn], config) else [s.fqn]
        if problems:
            format = (packed | experts)[problems[0]].format
            raise ValueError(
                f"{len(problems)} layer(s), such as {problems[0]} ({format}), have values whose codes are others when "
                "they are encoded again: load the model in float32, or train it from its float weights"
            )
    replaced.record(model)


def _chosen(model: nn.Module) -> dict[str, Any]:
    """Every layer with a packed weight, by its name, but embeddings whose scales cannot be made from their rows again:
    these stay packed, and a warning names them.
    """
    modules: Iterator[tuple[str, Any]] = model.named_modules()
    found: dict[str, Any] = {n: m for n, m in modules if kind_of(m) and isinstance(m.weight, PackedTensor)}
    weights: dict[str, Any] = {n: m.weight for n, m in found.items() if isinstance(m, nn.Embedding)}
    left = {n: w for n, w in weights.items() if not _same_anew(w)}
    for name, weight in left.items():
        if sharers := [n for n, m in found.items() if m.weight is weight and n not in left]:
            raise ValueError(
                f"{name}: it shares its weight with {sharers[0]}, so both make its scales from its rows, and those of {weight.format} made "
                "anew are others than the packed ones: train the model from its float weights"
            )
    if left:
        some, many = next(iter(left.items())), f" and {len(left) - 1} more" if len(left) > 1 else ""
        warn(
            f"{some[0]}{many}: an embedding makes its scales from its rows, and those of {some[1].format} made anew are others than the packed "
            "ones: it stays packed, and is not trained"
        )
    return {n: m for n, m in found.items() if n not in left}


def _check_held(name: str, p: PackedTensor) -> None:
    """Raise ValueError, naming the layer, for a format under whose packed scales nothing can be encoded."""
    if (reason := why_not_held(p.recipe)) is not None:
        raise ValueError(f"{name}: {reason}")


@cache
def why_not_held(recipe: LinearRecipe) -> str | None:
    """Return why no layer can hold packed scales and train on from codes; None when a layer can."""
    name = recipe.fprop_weight.name
    if recipe.fitted:
        return f"its transform was fitted to float weights ({name}), and cannot be fitted to codes: train it from its float weights"
    format = recipe.fprop_weight.format
    like = torch.empty(2, format.period * 8, dtype=torch.float32, device="meta")
    try:
        format.hold(like, format.held(format.encode(like)))
    except ValueError:
        return (
            f"no layer can hold the scales of {name}, which makes codes and scales together, so its codes cannot be trained on: train it "
            "from its float weights"
        )
    return None


def stack_with_codes(fqn: str, module: Any, name: str, packed: Any, config: QATConfig) -> bool:
    """Prepare a parameter of experts so that it has packed codes; whether it does.

    packed: PackedExperts. config: with scales made anew where these are the same, or else the packed ones.

    Raises:
        ValueError: naming it: no experts can hold its scales.
    """
    each = [packed.expert(e) for e in range(len(packed))]
    anew = all(_same_anew(p) for p in each)
    choices: list[Scales | None] = [None]
    if not anew:
        _check_held(fqn, each[0])
    with naming(fqn):
        config = replace(config, scales="dynamic" if anew else "static")
        recipe = prepare_target(config).recipe
        if not anew:
            firsts = zip(*map(_held, each), strict=True)
            choices = [
                Scales(*(p[0] if p[0] is None else joined(p, torch.stack) for p in zip(*s, strict=True)))
                for s in firsts
            ]
    for scales in choices:
        if isinstance(module, QATExperts) and name in module.stacks:
            module.unprepare_stack(name)
        setattr(module, name, nn.Parameter(packed.dequantize().contiguous()))
        experts = QATExperts.prepare_stack(module, name, Prepared(recipe, config, fqn), scales)
        weight = getattr(experts, name)
        matrices = [one.t() if experts.is_transposed else one for one in weight.data]
        encodes = [partial(experts.encode_expert, name, e, weight.dtype) for e in range(len(each))]
        if all(_moved(w_NK, p, encode) for w_NK, p, encode in zip(matrices, each, encodes, strict=True)):
            return True
    return False


def _same_anew(p: PackedTensor) -> bool:
    """Return whether scales made from a packed weight's values give its codes and scales again."""
    operand = p.recipe.fprop_weight
    return _same(operand.encode(_values(p)), p.encoded)


def with_codes(layer: Any, p: PackedTensor) -> bool:
    """Give a prepared layer a packed weight's scales, and values with its codes, in place; whether they have them."""
    kind = kind_of(layer)
    assert kind is not None
    weight = kind.matrix(layer.weight.data)
    if layer.prepared.recipe.weight_scales == "dynamic":
        return _moved(weight, p, layer.encode_weight)
    values = weight.clone()
    for scales in _held(p):
        new = {part: t for part, t in scales._asdict().items() if not hasattr(layer, f"weight_{part}")}
        held.register(layer, "weight", Scales(**new), learned=False)
        held.write(layer, "weight", scales)
        weight.copy_(values)
        if _moved(weight, p, layer.encode_weight):
            return True
    return False


def _held(p: PackedTensor) -> list[Scales]:
    """Return scales to hold, the first choice first: the format's, then these with the packed scales of blocks.

    Codes of GPTQ need the second ones: their values may ask for another block scale when it is made anew.
    """
    scales = p.recipe.fprop_weight.format.held(p.encoded)
    return [scales] if scales.scale is not None else [scales, scales._replace(scale=p.encoded.scale)]


def _values(p: PackedTensor) -> Tensor:
    """(N, K) in p's dtype: values that have p's codes, as far as they are distinct in that dtype."""
    recipe = p.recipe
    values = recipe.fprop_weight.format.inside(p.encoded)
    if recipe.transform is not None:
        assert recipe.fprop_input is not None
        values = recipe.fprop_input.pull_back(values, p.act_pre_scale)
    return values.to(p.dtype)


def _moved(weight: Tensor, p: PackedTensor, encode: Callable[[], Encoded]) -> bool:
    """Move values of a weight (N, K), in place, until they have the packed codes; whether they do. encode: what the
    weight's codes are now.
    """
    if _same(encode(), p.encoded):
        _keep_signs(weight, p, encode)
        return True
    weight.copy_(_values(p))
    format, steps = p.recipe.fprop_weight.format, 0 if p.recipe.transform else _STEPS  # which mixes values
    wanted = format.decode(p.encoded, torch.float32)
    for _ in range(steps):
        if _same(encode(), p.encoded):
            return True
        got = format.decode(encode(), torch.float32)
        limits = torch.copysign(torch.full_like(wanted, torch.inf), wanted - got).to(weight.dtype)
        weight.copy_(torch.where(got == wanted, weight, torch.nextafter(weight, limits)))
    return _same(encode(), p.encoded)


def _keep_signs(weight: Tensor, p: PackedTensor, encode: Callable[[], Encoded]) -> None:
    """Move a weight's negative zeros below zero, in place, by a millionth of a step: an optimizer step of 0 makes them
    positive, and their codes too. Zeros whose codes have no sign become positive; those that no small number of the
    weight's dtype can replace stay.
    """
    exact = weight.clone()
    weight.add_(0.0)
    if _same(encode(), p.encoded):
        return
    if p.recipe.transform is not None:
        weight.copy_(_values(p))
    else:
        limits = torch.finfo(weight.dtype)
        small = _values(p).abs().float().mul(2.0**-20).clamp(min=limits.smallest_normal * limits.eps)
        negative = (exact == 0) & exact.signbit()
        weight.copy_(torch.where(negative, -small.to(weight.dtype), exact))
        format = p.recipe.fprop_weight.format
        got, wanted = (format.decode(e, torch.float32) for e in (encode(), p.encoded))
        weight.copy_(torch.where(negative & ((got != wanted) | (got.signbit() != wanted.signbit())), exact, weight))
    if not _same(encode(), p.encoded):
        weight.copy_(exact)


def _same(e: Encoded, wanted: Encoded) -> bool:
    pairs = zip(e.by_row.tensors, wanted.by_row.tensors, strict=True)
    return all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)) for a, b in pairs
    )


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)
