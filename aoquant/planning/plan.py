"""Plans: the change of every layer, decided and checked before anything is touched.

A model-wide promise ("on any error the model is as it was") cannot be kept by a handler that sees one module at a
time. So `aoquant.quantize_` first lists every layer by its fully qualified name with the config that applies to it
(choose.py), then checks them all, and reports every problem in one error. Only then does it apply.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.core.config import AOBaseConfig
from torchao.quantization import FqnToConfig
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.utils import TorchAOBaseTensor

from aoquant._messages import advice, listed, naming, warn
from aoquant.config import PackedWeightConfig, QATConfig, packed_config
from aoquant.distributed.fsdp import GATHER, compute_dtypes
from aoquant.distributed.gathered import PACKED, GatheredWeight
from aoquant.distributed.sharded_linear import all_finite
from aoquant.experts.prepared import QATExperts
from aoquant.formats import HighPrecision, Operand
from aoquant.hybrid import HybridConfig, backward_slots
from aoquant.linear import held
from aoquant.linear import sharded_packed as sharded
from aoquant.linear.checks import NOT_CALIBRATED
from aoquant.linear.kinds import kind_of
from aoquant.linear.prepared import Prepared, QATLayer, QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.planning import adapters, owners, stack_changes
from aoquant.planning import tied as sharing
from aoquant.planning.changes import Change, Chosen
from aoquant.planning.choose import Choice, Filter, choose, keys_of, nothing_chosen
from aoquant.targets import Target, fake_target, resolve, supported


@dataclass(frozen=True)
class Plan:
    """What `quantize_` does to a model: the changes of its layers and of stacked experts.

    skipped: names of layers that cannot take their config, and why, where they may be left out. choice: of all.
    """

    layers: list[Change]
    skipped: dict[str, str]
    choice: Choice
    experts: list[Change] = field(default_factory=list)


def plan(
    model: nn.Module,
    config: Any,
    filter_fn: Filter | None,
    *,
    skip_incompatible: bool = False,
    taken: Mapping[int, list[Any]] = MappingProxyType({}),
) -> Plan:
    """The change of every layer, checked.

    skip_incompatible: leave out layers that cannot take their config, instead of raising.
    taken: adapters that are taken off, by the ids of their layers.

    Raises:
        ValueError: naming each layer that cannot take its config, or saying that there is nothing to do.
    """
    if not isinstance(config, AOBaseConfig):
        got = f"the class {config.__name__}: call it" if isinstance(config, type) else repr(config)
        raise ValueError(f"config must be a QATConfig, a PTQ config or an FqnToConfig, got {got}")
    if (borrowed := owners.borrowed(model)) is not None:
        raise ValueError(borrowed)
    choice = choose(model, config, filter_fn)
    if choice.left_alone:
        warn(
            f"subclasses of nn.Linear and nn.Embedding are left alone, their forward may differ: {'; '.join(choice.left_alone)}"
        )
    _refuse_adapted(model, choice)
    changes, refused = _checked(model, choice.layers)
    stacks, refused_stacks = _checked(model, choice.stacks)
    skipped = _left_out(changes, refused, choice) | refused_stacks if skip_incompatible else {}
    changes = [c for c in changes if c.fqn not in skipped]
    problems = [] if skip_incompatible else [*refused.values(), *refused_stacks.values()]
    problems += adapters.problems(model, [*changes, *stacks], taken)
    problems += sharing.problems(model, {id(c.module): c.target.recipe for c in changes})
    problems += _tied_scales(changes)
    if problems:
        raise ValueError(f"{len(problems)} layer(s) cannot be quantised; the model is unchanged:{listed(problems)}")
    if not changes and not stacks:
        if skipped:
            why = listed(skipped.values())
            raise ValueError(
                f"nothing to quantise: none of the {len(skipped)} chosen layer(s) can take its config:{why}"
            )
        own = ours(config)
        converts = isinstance(own, QATConfig) and own.step == "convert"
        raise ValueError(nothing_chosen(model, converts=converts, keys=keys_of(config)))
    return Plan(changes, skipped, choice, stacks)


def _checked(model: nn.Module, chosen: list[Chosen]) -> tuple[list[Change], dict[str, str]]:
    """The changes of layers or stacked parameters that can take their config, and why the others cannot, by name."""
    dtypes, changes, refused = compute_dtypes(model), list[Change](), dict[str, str]()
    gemms = {sharing.identity(c.weight) for c in chosen if isinstance(c.module, nn.Linear)}
    for c in chosen:
        try:
            has_gemm = sharing.identity(c.weight) in gemms
            change = _change(c, has_gemm=has_gemm, dtype=dtypes.get(id(c.weight)))
        except ValueError as error:
            refused[c.fqn] = f"{_label(c)}: {error}"
            continue
        if change is not None:
            changes.append(change)
    return changes, refused


def _left_out(changes: list[Change], refused: dict[str, str], choice: Choice) -> dict[str, str]:
    """The layers to leave out, with the reasons: those that are refused, and those that share a weight with one."""
    weights = {sharing.identity(c.weight): c.fqn for c in choice.layers if c.fqn in refused}
    return refused | {
        c.fqn: f"{c.fqn}: shares its weight with {weights[w]}, which cannot take its config"
        for c in changes
        if (w := sharing.identity(c.module.weight)) in weights
    }


def _refuse_adapted(model: nn.Module, choice: Choice) -> None:
    """Raise one ValueError for all layers of adapters, before any of them is found to be too small for its config."""
    adapted = [
        c.fqn
        for c in choice.layers
        if getattr(ours(c.config), "step", None) != "convert"
        and adapters.adapter_problem(model, c.module, c.fqn, "prepare")
    ]
    if adapted:
        raise ValueError(
            f"{len(adapted)} layer(s) are parts of adapted layers, such as {adapted[0]}; the model is unchanged: quantise or "
            "prepare the model first, and add adapters to it then; or merge these adapters (merge_and_unload) and then prepare"
        )


def plan_layer(module: Any, config: Any, fqn: str = "", parameter: str = "weight") -> Change | None:
    """The change for one layer or stacked parameter, checked; None when an unprepared one meets convert.

    Raises:
        ValueError: with the layer's name and shape, what was required, what was got and what to do.
    """
    chosen = Chosen(fqn, module, config, parameter)
    with naming(_label(chosen)):
        return _change(chosen)


def _label(chosen: Chosen) -> str:
    """The name of a layer or a stacked parameter, and its shape, for messages."""
    kind = kind_of(chosen.module)
    shape = chosen.weight.shape if kind is None else kind.matrix(chosen.weight).shape
    return f"{chosen.fqn or (kind and f'nn.{kind.plain.__name__}')} {tuple(shape)}"


def _change(chosen: Chosen, *, has_gemm: bool = False, dtype: torch.dtype | None = None) -> Change | None:
    """The change of a layer or a stacked parameter, checked; None when an unprepared one meets convert.

    has_gemm: whether a linear layer shares an embedding's weight: an activation format is then for its inputs.
    dtype: that forward sees the weight in, where FSDP casts it.
    """
    module, layer = chosen.module, kind_of(chosen.module)
    if isinstance(chosen.weight, GatheredWeight):
        raise ValueError(PACKED)
    prepared = module.prepared if isinstance(module, QATLayer) else None
    if isinstance(module, QATExperts):
        prepared = module.stacks.get(chosen.parameter)
    config = ours(chosen.config, module, prepared)
    if isinstance(config, QATConfig) and isinstance(config.base_config, FqnToConfig):
        raise ValueError(
            "QATConfig(FqnToConfig(...)) needs layer names: use aoquant.quantize_, or put a QATConfig into each value"
        )
    step = config.step if isinstance(config, QATConfig) else "quantize"
    seen = dtype or chosen.weight.dtype
    if step != "convert":
        target = _new_target(chosen, config, prepared, seen)
    elif prepared is None:
        return None
    else:
        target = _deployed(prepared, config)
    change = Change(chosen.fqn, module, config, chosen.parameter, step=step, target=target, dtype=seen, layer=layer)
    if reason := _why_not(change, has_gemm, dtype) if layer else stack_changes.why_not(chosen, step, target):
        raise ValueError(reason)
    return change


def _new_target(chosen: Chosen, config: Any, prepared: Prepared | None, dtype: torch.dtype) -> Target:
    """The target of a weight that is prepared, or quantised at once."""
    layer = kind_of(chosen.module)
    leave = "leave it out with filter_fn" if layer else "leave it out by name"
    if prepared is not None and not (isinstance(config, QATConfig) and isinstance(config.backward, HybridConfig)):
        raise ValueError(
            f"is prepared already ({prepared.recipe}); convert it first, or {leave}; HybridConfig.bwd(...) changes its backward alone"
        )
    if isinstance(chosen.weight, TorchAOBaseTensor):
        unpack = (
            "aoquant.unpack_(model) trains on from its codes; or " if isinstance(chosen.weight, PackedTensor) else ""
        )
        raise ValueError(f"its weight is quantised already ({type(chosen.weight).__name__}); {unpack}{leave}")
    if not isinstance(config, QATConfig):
        return _widened(resolve(config), None, dtype)
    target = prepare_target(config)
    target = _widened(target if layer else stack_changes.with_own_scales(target), prepared, dtype)
    if prepared is not None:
        _check_same_forward(prepared.recipe, target, replaces=isinstance(chosen.module, QATLinear | QATExperts))
    return target


def _why_not(change: Change, has_gemm: bool, dtype: torch.dtype | None) -> str | None:
    module, step, kind = change.module, change.step, change.kind
    reason = _why_not_shape(change, has_gemm) or sharded.why_not(module, step, change.target.recipe, dtype)
    if reason is None and kind.transposed and step != "prepare" and isinstance(change.weight, DTensor):
        reason = f"a sharded {kind.plain.__name__} is not converted in place: {GATHER}, and convert that"
    if reason is None and step != "prepare":
        reason = _not_calibrated(module, change.target)
    return reason or owners.why_not(module, step) or not_finite(kind.matrix(change.weight))


def _why_not_shape(change: Change, has_gemm: bool) -> str | None:
    """Return why a layer's target does not take its shape and dtype, or its kind; None when it does."""
    module, layer, target = change.module, change.kind, change.target
    if layer.gemm:
        n, k = layer.matrix(module.weight).shape if layer.transposed else (module.out_features, module.in_features)
        return target.why_not(n, k, change.dtype)
    reason = target.why_not_embedding(module, has_gemm=has_gemm or change.step == "convert")
    if reason is None and target.recipe.holds:
        return "an embedding's scales are made from its rows, so there are none to hold: use scales='dynamic' for it"
    return reason


def not_finite(weight: torch.Tensor) -> str | None:
    """Return why the values of `weight` cannot be quantised; None when they can, or when there are none (meta)."""
    if weight.is_meta or all_finite(weight):
        return None
    return "its weight holds NaN or Inf: restore a good checkpoint before quantising"


def ours(config: Any, module: Any = None, prepared: Prepared | None = None) -> Any:
    """torchao's QATConfig as ours, and so its PTQ configs with a step of their own, and a HybridConfig beside its base;
    everything else as it is.

    module: of the weight. prepared: as it is by now, if it is: a HybridConfig takes its base.
    """
    if isinstance(config, HybridConfig):
        return _hybrid(config, module, prepared)
    if isinstance(config, TorchaoQATConfig):
        return QATConfig(config.base_config, config.activation_config, config.weight_config, step=config.step)
    if type(config).__name__ in supported() and getattr(config, "step", None) is not None:
        return QATConfig(config, step=config.step)
    return config


def _hybrid(config: HybridConfig, module: Any, prepared: Prepared | None) -> QATConfig:
    if prepared is not None:
        earlier: QATConfig = prepared.config
        through = "identity" if earlier.backward == "quartet" else earlier.straight_through  # quartet's trust mask
        return dataclasses.replace(earlier, backward=config, seed=config.seed, straight_through=through)
    named = config.forward()
    if len(named) < 2:
        if module is None:  # asked for its step alone
            return QATConfig(PackedWeightConfig("high-precision"), backward=config)
        raise ValueError(
            "a HybridConfig that leaves fprop to a base needs one: QATConfig(base, backward=...), or "
            "HybridConfig.fwd_bwd(forward format, backward format)"
        )
    x, w = named["fprop_input"], named["fprop_weight"] or Operand(HighPrecision())
    return QATConfig(packed_config(w.name, x.name if x else None), backward=config)


def _check_same_forward(old: LinearRecipe, target: Target, *, replaces: bool = True) -> None:
    """Raise ValueError unless a prepared layer's forward stays what it is: state and scales belong to it. Delayed
    scales are dynamic ones of earlier steps.
    """
    new = target.recipe
    held, holds = (r.holds and not r.history for r in (old, new))
    if not replaces or new.deployed != old.deployed or held != holds:
        raise ValueError(f"is prepared for ({old}), and a HybridConfig replaces backward alone, got ({new})")


def _not_calibrated(module: nn.Module, target: Target) -> str | None:
    """Return why a layer has no scales to convert with; None when it has, or needs none."""
    if not isinstance(module, QATLayer):
        if target.recipe.input_scales == "dynamic" and not target.recipe.fitted:
            return None
        how = advice(
            "quantize_(model, QATConfig(config, step='prepare')), "
            "aoquant.calibrate(model, forward_loop), then quantize_(model, QATConfig(step='convert'))",
            "calibrate it: `aoquant run`, or --ptq gptq --calibrate FILE",
        )
        return f"its config has static activation scales or a fitted transform, which calibration finds: {how}"
    if isinstance(module, QATLinear) and not module.calibrated:
        return NOT_CALIBRATED
    if isinstance(module, QATLinear) and not held.present(module):
        return "a scale that it holds is NaN or Inf: restore a good checkpoint before converting"
    return None


def prepare_target(config: QATConfig) -> Target:
    """Return what a config prepares a weight for. Raises ValueError: no target has its formats."""
    if config.base_config is None:
        target = fake_target(config.weight_config, config.activation_config)
    else:
        target = resolve(config.base_config)
    if isinstance(config.backward, HybridConfig):
        _check_base(config.backward, target)
    slots: dict[str, Any] = dict(backward_slots(config.backward))
    recipe = dataclasses.replace(target.recipe, straight_through=config.straight_through, **slots)
    return dataclasses.replace(target, recipe=recipe.holding(config.scales))


def _check_base(hybrid: HybridConfig, target: Target) -> None:
    named = hybrid.forward()
    asked = {slot: named.get(slot, getattr(target.recipe, slot)) for slot in ("fprop_input", "fprop_weight")}
    deployed = {slot: getattr(target.recipe, slot) for slot in asked}
    names = [[o.name if o is not None else "high-precision" for o in both.values()] for both in (asked, deployed)]
    if names[0] != names[1]:
        (x, w), (base_x, base_w) = names
        raise ValueError(
            f"HybridConfig: fprop: input {x} and weight {w}, and the base deploys input {base_x} and weight {base_w}: give the base "
            "with HybridConfig.bwd(...), or quantize_ the HybridConfig alone"
        )


def _deployed(prepared: Prepared, config: QATConfig) -> Target:
    """Convert a prepared weight. Raises ValueError: the config deploys something else."""
    if config.base_config is None:
        return _widened(prepare_target(prepared.config), prepared)
    target = _widened(resolve(config.base_config), prepared)
    if target.recipe.deployed != prepared.recipe.deployed:
        raise ValueError(
            f"was prepared for ({prepared.recipe}), and this config deploys ({target.recipe}); "
            "convert with the base that prepare was given, or with QATConfig(step='convert')"
        )
    return target


def _widened(target: Target, prepared: Prepared | None, dtype: torch.dtype | None = None) -> Target:
    """`target` as a prepared layer computes it, or one of `dtype` that is not prepared yet: float16 is widened."""
    wide = target.widened()
    if prepared is None:
        return wide if dtype == torch.float16 else target
    return wide if prepared.recipe.fprop_weight.format == wide.recipe.fprop_weight.format else target


def _tied_scales(changes: list[Change]) -> list[str]:
    """Problems with tied weights whose layers would hold scales, each its own."""
    counts = Counter(sharing.identity(c.module.weight) for c in changes)
    return [
        f"{c.fqn}: its weight is tied, and layers that share a weight cannot hold scales of their own ({c.target.recipe}): untie it, "
        "or use dynamic scales"
        for c in changes
        if counts[sharing.identity(c.module.weight)] > 1 and c.target.recipe.holds
    ]
