"""`quantize_`: plan the whole model, check it, apply, and put everything back if anything fails.

Prepare swaps a layer's class in place; convert replaces its weight and swaps the class back, or to `PackedLinear`. The
module object, its name, hooks, attributes, mode and bias stay what they were. A model and its packed copy may not fit
on one GPU, so a float weight there goes as soon as it is packed, and what could fail is tried first: one layer of every
kind is packed and forgotten before anything is touched.
"""

import dataclasses
import functools
import importlib
import inspect
import logging
import warnings
from collections.abc import Collection, Hashable, Iterable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.utils import TorchAOBaseTensor

from aoquant import ops
from aoquant._messages import advice, check_model, naming, track, warn
from aoquant.config import PackedWeightConfig, QATConfig, named, packed_config
from aoquant.distributed import fsdp
from aoquant.experts.families import stacks_of
from aoquant.experts.packed_experts import PackedExperts
from aoquant.formats import Encoded, MXFP4Dialect, Operand, Scales, tiles
from aoquant.linear import direct_reads, fast_path, replaced
from aoquant.linear import sharded_packed as sharded
from aoquant.linear.learned_scales import not_positive
from aoquant.linear.packed import PackedLinear, adopt, described
from aoquant.linear.prepared import Prepared, QATLayer, QATLinear
from aoquant.linear.tensor import PackedTensor
from aoquant.planning import adapters, caches, coverage, fused, half
from aoquant.planning.changes import Change, Chosen, restoring
from aoquant.planning.choose import Filter, each, is_asked
from aoquant.planning.plan import Plan, ours, plan
from aoquant.planning.stack_changes import apply as apply_stack
from aoquant.planning.tied import identity
from aoquant.recipes import trained
from aoquant.targets import CALIBRATED
from aoquant.targets.kernels import why_not_run

_log = logging.getLogger("aoquant.quantize")
RECORDER = "aoquant_calibration"  # attribute of a model between torchao's two steps: what keeps its calls


def quantize_(
    model: nn.Module,
    config: Any,
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    undo: bool | None = None,
    strict: bool = False,
    skip_incompatible: bool = False,
) -> None:
    """Prepare, convert or quantise the linear layers, and embeddings where asked for, of `model` in place.

    config: a `QATConfig`, or a PTQ config of torchao's or ours (quantises at once), or torchao's `FqnToConfig` of
        either, whose keys are layer names, names of their weights, "re:" patterns and "_default". The name of a recipe
        (`list_recipes`) is a PTQ config. torchao's GPTQConfig, AWQConfig and SmoothQuantConfig take two steps, and the
        model is run on calibration data between them. A `KVCacheConfig` is for attention modules and goes by their
        names.
    filter_fn: (module, fully qualified name) -> bool; by default every linear layer but those in output heads and in
        routers of experts, and no nn.Embedding.
    device: where weights are quantised, moved there one at a time, and where the model is afterwards.
    undo: keep the float weights until the last one is packed, so that any error or interrupt leaves the model as it
        was. False lets each go as soon as it is packed: extra memory for one layer, and after an interrupt some
        layers are packed and some are not. By default only weights on a GPU go.
    strict: raise when a matrix stays float that neither the defaults nor filter_fn nor a name leaves out, such as
        stacked experts or a convolution, or when a module that was prepared is not there any more at convert.
        Otherwise warnings name the former, when they are more than 5 % of the model, and the latter.
        `aoquant.coverage(model)` lists everything.
    skip_incompatible: leave out layers that cannot take their config, such as one with K = 64 for groups of 128, with
        a warning that lists them and why, instead of raising.

    Raises:
        ValueError: naming every layer that cannot take its config, or, with strict, every matrix that would stay
            float and every prepared module that is gone. The model is unchanged then, whatever `undo` is.

    On a model on the meta device, prepare waits for the weights (`load_state_dict(assign=True)`, or `to_empty` and a
    load), and convert and quantise make a skeleton of empty packed weights, into which a converted state_dict is
    loaded in the same way.

    Example:

            quantize_(model, QATConfig("int4-g32", step="prepare"))   # then train, then step="convert"
            quantize_(model, "int4-g32")                              # or at once, without training
    """
    check_model(model)
    if filter_fn is not None and not callable(filter_fn):
        raise ValueError(f"filter_fn must be a function (module, name) -> bool, got {type(filter_fn).__name__}")
    if filter_fn is not None:
        _check_filter(filter_fn)
    if type(config).__name__ in CALIBRATED and type(config).__module__.startswith("torchao."):
        torchaos = importlib.import_module("aoquant.ptq.torchao_steps")  # which imports this file
        torchaos.take_step(model, config, filter_fn, device, skip_incompatible)
        return
    refuse_recorded(model)
    fsdp.reshard(model)
    cached = caches.plan(model, named(config), filter_fn, skip_incompatible=skip_incompatible)
    if cached.layers is None and config is not None:
        cached.apply(model)
        if device is not None:
            model.to(device)
        return
    asked = cached.layers
    prepares = {getattr(ours(c), "step", None) for c in each(asked)} == {"prepare"}
    with adapters.taken_off(model, prepares=prepares) as taken:
        planned = plan(model, asked, filter_fn, skip_incompatible=skip_incompatible, taken=taken)
        _warn(
            f"{recipe!r} alone packs the weights now, without training, and its backward is not used: to train, give "
            f"QATConfig({recipe!r}, step='prepare'); to pack them, get_recipe({recipe!r}).make(), which does not warn"
            for recipe in trained(config)
        )
        problem = _what_stays_float(model, planned, strict)
        steps = {c.step for c in (*planned.layers, *planned.experts)}
        lost = _what_is_missing(model, asked, filter_fn) if "convert" in steps else None
        if strict and lost is not None:
            raise ValueError(f"strict: {lost}. The model is unchanged")
        scales = not_positive(model) if any(c.step == "convert" for c in planned.layers) else None
        new = [c.module for c in planned.layers if c.step == "prepare" and not isinstance(c.module, QATLayer)]
        planned = _as_before_adapters(model, planned, taken)
        _carry_out(model, planned, device, undo)
        cached.apply(model)
        for change in planned.layers:
            _log.debug("%s: %s %s", change.fqn or "the model itself", change.step, change.target.recipe)
        for chosen in planned.choice.layers:
            vars(chosen.module).pop(coverage.SKIPPED, None)
            if chosen.fqn in planned.skipped:
                vars(chosen.module)[coverage.SKIPPED] = planned.skipped[chosen.fqn]
        said = missing_kernels([c for c in planned.layers if c.step != "prepare"], device)
        fast_path.sync(model)
        if "convert" in steps:
            replaced.forget(model)
        replaced.record(model)
        direct_reads.watch(model, new)
    if device is not None:
        model.to(device)
    adapters.adopt(model, (*planned.layers, *planned.experts), taken)
    if steps != {"convert"} and problem is not None:
        lists = "aoquant.coverage(model) lists every parameter; strict=True raises instead"
        said.append(f"{problem}. {advice(lists, 'the report lists them; --strict stops instead')}")
    if lost is not None:
        said.append(f"{lost}. strict=True raises instead")
    if scales is not None:
        said.append(scales)
    if planned.skipped:
        reasons = "\n  ".join(planned.skipped.values())
        said.append(f"{len(planned.skipped)} layer(s) cannot take their config and stay float:\n  {reasons}")
    _warn(said)


def refuse_recorded(model: nn.Module) -> None:
    """Raise ValueError for a model that torchao's first step has prepared, and whose calls are kept for the second."""
    if RECORDER in vars(model):
        name = vars(model)[RECORDER].config
        raise ValueError(
            f"{type(model).__name__}: {name}'s first step keeps what it is called with, and has not been converted: take the second step, "
            f"quantize_(model, {name}(..., step='convert')), or load the model again. The model is unchanged"
        )


def _as_before_adapters(model: nn.Module, planned: Plan, taken: Collection[int]) -> Plan:
    """The plan with the names that layers had before adapters were added."""
    if not taken:
        return planned
    layers, experts = (
        [dataclasses.replace(c, fqn=adapters.plain_names(model, c.fqn)) for c in changes]
        for changes in (planned.layers, planned.experts)
    )
    return dataclasses.replace(planned, layers=layers, experts=experts)


def _warn(said: Iterable[str]) -> None:
    for message in said:
        warn(message)


def _check_filter(filter_fn: Filter) -> None:
    try:
        signature = inspect.signature(filter_fn)
    except (TypeError, ValueError):  # a function of C's, which does not tell
        return
    try:
        signature.bind(None, "")
    except TypeError:
        name = getattr(filter_fn, "__name__", type(filter_fn).__name__)
        raise ValueError(f"filter_fn is called as filter_fn(module, name), got a function {name}{signature}") from None


def _what_stays_float(model: nn.Module, planned: Plan, strict: bool) -> str | None:
    """The warning about matrices that stay float, or None; raises ValueError in its place where `strict`."""
    found = coverage.after(model, planned)
    if strict and (unexpected := found.unexpected):
        raise ValueError(
            f"strict: {len(unexpected)} matrix parameter(s) would stay float, and the model is unchanged: "
            f"{coverage.listed(unexpected, len(unexpected))}. Leave them out by filter_fn, or by name with None in FqnToConfig"
        )
    return found.problem


def _what_is_missing(model: nn.Module, config: Any, filter_fn: Filter | None) -> str | None:
    """A sentence about what was prepared and is not there any more, but for what the filter or names leave out."""
    found = [
        f"{fqn} ({_what_it_is_now(module)})"
        for fqn, module in replaced.missing(model)
        if is_asked(config, filter_fn, fqn, module)
    ]
    if not found:
        return None
    return (
        f"{len(found)} module(s) that were prepared have been replaced or removed since, and are not converted: {', '.join(found)}. "
        "Prepare what took their place before convert, or leave it out (filter_fn, or None for its name in FqnToConfig)"
    )


def _what_it_is_now(module: nn.Module | None) -> str:
    if module is None:
        return "removed"
    is_empty = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and not len(module)
    return f"now {'an empty' if is_empty else 'a float'} {type(module).__name__}"


def missing_kernels(converted: Iterable[Change], device: torch.device | str | None) -> list[str]:
    """Say which converted layers call a kernel that this machine or device does not have."""
    found = dict[tuple[str, str], list[str]]()
    for change in converted:
        n, k = change.kind.matrix(change.weight).shape
        where = change.weight.device if device is None else torch.device(device)
        if (reason := why_not_run(change.target, where, change.dtype, n, k)) is not None:
            found.setdefault((change.target.tensor, reason), []).append(change.fqn)
    return [
        f"{len(names)} converted layer(s), such as {names[0] or 'the model itself'}, are torchao's {tensor}, and raise in forward here: "
        f"{reason}. A prepared model runs everywhere"
        for (tensor, reason), names in found.items()
    ]


def _carry_out(model: nn.Module, planned: Plan, device: torch.device | str | None, undo: bool | None) -> None:
    """Carry out every change, or none. device, undo: as `quantize_` has them."""
    _check_device(model, planned, device)
    stacks = planned.experts
    shared = fused.shared_at_once(planned.layers, Change.matrix)
    changes = [dataclasses.replace(c, scales=shared[c.fqn]) if c.fqn in shared else c for c in planned.layers]
    every = (*changes, *stacks)
    converted = {id(c.weight) for c in every if c.step != "prepare"}
    can_undo = [c for c in every if c.step == "prepare" or (not c.weight.is_cuda if undo is None else undo)]
    kept = {id(c.module): c.module for c in can_undo}
    _try(changes, {id(c) for c in can_undo}, device)
    packed: dict[Hashable, nn.Parameter] = {}  # tied weights are packed once and stay tied
    gone = False
    try:
        with restoring(kept.values()):
            for change in track(changes, changes[0].step if changes else ""):
                apply(change, packed, device)
                gone |= id(change.module) not in kept
            for stack in track(stacks, "experts", "parameter"):
                apply_stack(stack, device)
                gone |= id(stack.module) not in kept
            fsdp.release(model, converted)
            if changes and changes[0].step == "prepare":
                fused.share_outer_scales(model)
    except BaseException as error:
        if gone:
            error.add_note(
                "Some layers were packed already and their float weights are gone: load the model again, and use undo=True to keep them"
            )
        raise


def _check_device(model: nn.Module, planned: Plan, device: torch.device | str | None) -> None:
    if device is None:
        return
    if any(isinstance(c.weight, DTensor) for c in (*planned.layers, *planned.experts)):
        raise ValueError(f"device={str(device)!r}: a sharded model stays where its mesh is; leave out device")
    empty = [n for n, t in chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
    if empty and torch.device(device).type != "meta":
        raise ValueError(
            f"device={str(device)!r}: {empty[0]} is on the meta device and holds no values to move; the model is unchanged. "
            "Load the weights first, or leave out device"
        )


def _try(changes: list[Change], kept: Collection[int], device: torch.device | str | None) -> None:
    """Pack one weight of every kind that cannot be put back, so that a packer refuses before anything changes."""
    seen: set[Any] = set()
    for change in changes:
        weight, target = change.weight, change.target
        kind = (change.layer, target.tensor, str(target.recipe), weight.shape, weight.device)
        if id(change) not in kept and kind not in seen:
            seen.add(kind)
            if len(seen) > 1:  # the first one is tried by applying it
                with warnings.catch_warnings(action="ignore"):  # they come when it is applied
                    pack(change, weight, device)


def apply(
    change: Change, packed: dict[Hashable, nn.Parameter] | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """Carry out one layer's change. packed: weights done so far, by the `identity` of the original.

    A converted layer remembers its PTQ config as `aoquant_config`: torchao's tensors lack parts, and files name it.
    """
    module: nn.Module = change.module
    if change.step == "prepare":
        prepared = Prepared(change.target.recipe, change.config, change.fqn)
        if isinstance(module, QATLinear):
            module.replace(prepared)
            return module
        layer = change.kind.prepared.prepare(module, prepared)
        recipe = prepared.recipe
        calibrated = not (recipe.fitted or recipe.history)  # others hold nothing yet that a weight could be encoded by
        if layer.weight.dtype == torch.float16 and calibrated and not isinstance(layer.weight, DTensor):
            _warn_of_half(change.fqn, layer)
        return layer
    packed = {} if packed is None else packed
    weight: Tensor = change.module.weight
    key = identity(weight)
    if key not in packed:
        packed[key] = nn.Parameter(pack(change, weight, device), requires_grad=False)
    config = change.config
    if isinstance(module, QATLayer):
        if isinstance(config, QATConfig) and config.base_config is None:
            config = module.prepared.config
        module.unprepare()
    give_weight(module, packed[key])
    if isinstance(weight, DTensor):
        fsdp.swap_class(module, sharded.ShardedLinear)
    vars(module)["aoquant_config"] = config.base_config if isinstance(config, QATConfig) else config
    return module


def give_weight(module: nn.Module, packed: nn.Parameter) -> None:
    """Give a plain layer a packed weight, aoquant's or torchao's, and the class or the repr that goes with it."""
    module.weight = packed
    adopt(module)
    if not isinstance(module, PackedLinear):  # of a plain class; a bound method could not be pickled
        module.extra_repr = functools.partial(_extra_repr, module)  # type: ignore[method-assign]


def config_of(module: nn.Module) -> Any:
    """The PTQ config that makes a layer's quantised weight; None for a float weight, or where it is not known.

    A `PackedTensor` knows its config. A torchao tensor does not hold all of it, so `apply` leaves it on the layer.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, PackedTensor):
        return _config_of(weight)
    return getattr(module, "aoquant_config", None) if isinstance(weight, TorchAOBaseTensor) else None


def _config_of(weight: PackedTensor) -> PackedWeightConfig:
    """Return the PTQ config that makes a packed weight, or packed experts."""
    return packed_config(weight.format, weight.activation or None, weight.contract)


def packed_stacks(model: nn.Module) -> list[Chosen]:
    """Every packed parameter of stacked experts, with the PTQ config that makes it."""
    return [
        Chosen(f"{fqn}.{name}" if fqn else name, module, _config_of(weight), name)
        for fqn, module in model.named_modules()
        for name in stacks_of(module)
        if isinstance(weight := getattr(module, name), PackedExperts)
    ]


@torch.no_grad()
def _warn_of_half(fqn: str, layer: QATLayer) -> None:
    """Warn of a prepared float16 weight that loses because of its dtype: its forward loses what convert will. Scales
    that it holds were measured in float16 too, so float32 is asked without them.
    """
    weight = layer.matrix().detach()
    if not weight.is_meta:
        operand = layer.prepared.recipe.fprop_weight
        half.warn_of_loss(fqn, operand, half.share_lost(operand, layer.encode_weight(), weight))


@torch.no_grad()
def pack(change: Change, weight: Tensor, device: torch.device | str | None) -> Tensor:
    """The deployed tensor (N, K) of a layer's float weight, under the scales that the layer holds or its change has.

    weight: as the layer stores it. device: where the tensor is made, by default where the weight is. Autocast changes
    nothing: the codes are those of the stored weight, as in the prepared layer.
    """
    places = {weight.device.type, torch.device(device or weight.device).type} - {"meta"}
    with ExitStack() as off:
        for place in places:
            off.enter_context(torch.autocast(place, enabled=False))
        return _packed(change, weight, device)


def _packed(change: Change, weight: Tensor, device: torch.device | str | None) -> Tensor:
    module, target, scales = change.module, change.target, change.scales
    trained = change.kind.matrix(weight.detach()).to(dtype=change.dtype).contiguous()
    weight = trained.to(device)
    if isinstance(weight, DTensor):
        return sharded.pack(weight, target.recipe)
    if isinstance(module, QATLinear):
        if (input_scales := module.deployed_input_scales()) is not None:
            assert target.fix is not None
            target = target.fix(input_scales)
        scales = module.held_scales("weight")
    operand = target.recipe.fprop_weight
    if scales is not None:
        where = weight.device if operand.portable else trained.device
        scales = Scales(*(t if t is None else t.to(where) for t in scales))
    if change.codes is not None:
        encoded = change.codes[0]
    elif not operand.portable:  # another device would make other codes than the layer trained with
        made = operand.encode(trained, scales)
        encoded = Encoded.of((t if t is None else t.to(weight.device) for t in made.tensors), made.k)
    else:
        encoded = ops.codec.encode(operand, weight) if scales is None else operand.encode(weight, scales)
    _warn_of_floors(change.fqn, operand, encoded, weight)
    if change.codes is None:  # others are no nearest ones, and prepare has looked at their scales
        half.warn_of_loss(change.fqn, operand, half.share_lost(operand, encoded, weight, scales))
    with naming(f"{change.fqn or 'nn.Linear'} {tuple(weight.shape)}"):  # a layout may need its own kernel package
        return target.build(encoded, weight)


def _warn_of_floors(fqn: str, operand: Operand, e: Encoded, weight: Tensor) -> None:
    """Warn where float8 block scales are too coarse or too high for a weight: blocks of zeros do not count."""
    if e.scale is None or e.scale.is_meta or e.scale.dtype not in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return
    format = operand.format
    share = tiles.floored(format, e).item()
    if share > tiles.HEALTHY and operand.transform is None and format.tile_rows == 1 and format.block:
        floored = format.floored(e) & (weight.unflatten(1, (-1, format.block)) != 0).any(-1)
        share = floored.float().mean().item()
    if share > tiles.HEALTHY:
        warn(
            f"{fqn or 'nn.Linear'}: {share:.1%} of the weight's blocks have the smallest scale that {operand.name} stores, and lose "
            f"precision or become zero: {_instead(operand)}leave it out"
        )


def _instead(operand: Operand) -> str:
    """Advice for a weight that is too small for the scales of `operand`, before leaving it out."""
    base = operand.format
    if isinstance(base, MXFP4Dialect) and base.tiny:
        return "use MXFP4WeightConfig() as it is, whose scales follow the largest value of a block down to 2^-127, or "
    # MX has no outer scale, and a dynamic one fits
    if base.block_scale == torch.float8_e8m0fnu or base.reach == "tensor":
        return ""
    return "give the weight an outer scale that fits it (outer='dynamic', or a smaller pts), or "


def _extra_repr(self: Any) -> str:
    return described(type(self).extra_repr(self), self.weight)
