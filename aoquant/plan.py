"""Plans: which layer gets which config, decided and checked before anything is touched.

A model-wide promise ("on any error the model is as it was") cannot be kept by a handler that sees one module at a time. So
`aoquant.quantize_` first lists every layer by its fully qualified name with the config that applies to it, then checks them all,
and reports every problem in one error. Only then does it apply.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import FqnToConfig
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.utils import TorchAOBaseTensor

from aoquant.config import QATConfig
from aoquant.linear import NOT_CALIBRATED, Prepared, QATLinear
from aoquant.targets import Target, fake_target, resolve

Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Step:
    """One layer's change: "prepare" swaps the class in, "convert" and "quantize" replace the weight."""

    fqn: str
    module: nn.Linear
    kind: str
    config: Any
    target: Target


def plan(model: nn.Module, config: Any, filter_fn: Filter | None) -> list[Step]:
    """Every layer's step, checked.

    Raises:
        ValueError: naming each layer that cannot take its config, or saying that there is nothing to do.
    """
    if not isinstance(config, AOBaseConfig):
        got = f"the class {config.__name__}: call it" if isinstance(config, type) else repr(config)
        raise ValueError(f"config must be a QATConfig, a PTQ config or an FqnToConfig, got {got}")
    steps, problems = [], []
    for fqn, module, layer_config in _assign(model, config, filter_fn):
        try:
            step = plan_layer(module, layer_config, fqn)
        except ValueError as error:
            problems.append(str(error))
            continue
        if step is not None:
            steps.append(step)
    problems += _tied(model, [s for s in steps if s.kind != "prepare"])
    problems += _tied_scales(steps)
    if problems:
        shown = "\n  ".join(problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(f"{len(problems)} layer(s) cannot be quantised; the model is unchanged:\n  {shown}{more}")
    if not steps:
        raise ValueError(_nothing(model, config))
    return steps


def plan_layer(module: nn.Module, config: Any, fqn: str = "") -> Step | None:
    """The step for one layer, checked; None when an unprepared layer meets convert.

    Raises:
        ValueError: with the layer's name and shape, what was required, what was got and what to do.
    """
    assert isinstance(module, nn.Linear)
    config = ours(config)
    label = f"{fqn or 'nn.Linear'} {tuple(module.weight.shape)}"
    if isinstance(config, QATConfig) and isinstance(config.base_config, FqnToConfig):
        raise ValueError(
            f"{label}: QATConfig(FqnToConfig(...)) needs layer names: use aoquant.quantize_, or put a QATConfig into each value"
        )
    kind = config.step if isinstance(config, QATConfig) else "quantize"
    if kind == "convert":
        if not isinstance(module, QATLinear):
            return None
        target = _convert_target(module, config, label)
    else:
        if isinstance(module, QATLinear):
            raise ValueError(
                f"{label}: is prepared already ({module.prepared.recipe}); convert it first, or leave it out with filter_fn"
            )
        if isinstance(module.weight, TorchAOBaseTensor):
            raise ValueError(
                f"{label}: its weight is quantised already ({type(module.weight).__name__}); leave it out with filter_fn"
            )
        try:
            if isinstance(config, QATConfig):
                target = _prepare_target(config)
            else:
                target = resolve(config)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
    reason = target.why_not(module.out_features, module.in_features, module.weight.dtype)
    if reason is None and kind != "prepare":
        reason = _not_calibrated(module, target)
    if reason is None and not module.weight.is_meta and not bool(torch.isfinite(module.weight.detach()).all()):
        reason = "its weight holds NaN or Inf: restore a good checkpoint before quantising"
    if reason is not None:
        raise ValueError(f"{label}: {reason}")
    return Step(fqn, module, kind, config, target)


def ours(config: Any) -> Any:
    """torchao's QATConfig as ours, and so its PTQ configs with a step of their own; everything else as it is."""
    if isinstance(config, TorchaoQATConfig):
        return QATConfig(config.base_config, config.activation_config, config.weight_config, step=config.step)
    if not isinstance(config, QATConfig) and getattr(config, "step", None) is not None:
        return QATConfig(config, step=config.step)
    return config


def _not_calibrated(module: nn.Linear, target: Target) -> str | None:
    """Why a layer has no scales to convert with; None when it has, or needs none."""
    if not isinstance(module, QATLinear):
        if target.recipe.input_scales == "dynamic":
            return None
        return (
            "its config has static activation scales, which calibration finds: quantize_(model, QATConfig(config, step='prepare')), "
            "aoquant.calibrate(model, forward_loop), then quantize_(model, QATConfig(step='convert'))"
        )
    return None if module.calibrated else NOT_CALIBRATED


def _prepare_target(config: QATConfig) -> Target:
    if config.base_config is None:
        target = fake_target(config.weight_config, config.activation_config)
    else:
        target = resolve(config.base_config)
    recipe = dataclasses.replace(target.recipe, straight_through=config.straight_through)
    if config.scales != "dynamic":
        recipe = dataclasses.replace(recipe, weight_scales=config.scales)
    if config.scales == "learned" and recipe.input_scales == "static":
        recipe = dataclasses.replace(recipe, input_scales="learned")
    return dataclasses.replace(target, recipe=recipe)


def _convert_target(module: QATLinear, config: QATConfig, label: str) -> Target:
    prepared: Prepared = module.prepared
    if config.base_config is None:
        return _prepare_target(prepared.config)
    try:
        target = resolve(config.base_config)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None
    if target.recipe.deployed != prepared.recipe.deployed:
        raise ValueError(
            f"{label}: was prepared for ({prepared.recipe}), and this config deploys ({target.recipe}); "
            "convert with the base that prepare was given, or with QATConfig(step='convert')"
        )
    return target


def _assign(model: nn.Module, config: Any, filter_fn: Filter | None) -> Iterator[tuple[str, nn.Module, Any]]:
    """(fqn, layer, config) for every nn.Linear that a config applies to."""
    if isinstance(config, QATConfig) and isinstance(config.base_config, FqnToConfig):
        wrapped = {
            k: c and dataclasses.replace(config, base_config=c) for k, c in config.base_config.fqn_to_config.items()
        }
        config = FqnToConfig(wrapped)
    by_name = config.fqn_to_config if isinstance(config, FqnToConfig) else None
    for key in by_name or ():
        if key.startswith("re:"):
            try:
                re.compile(key[3:])
            except re.error as error:
                raise ValueError(f"FqnToConfig pattern {key!r} is no regular expression: {error}") from None
    if by_name is not None and filter_fn is not None:
        raise ValueError("FqnToConfig chooses the layers itself: give filter_fn or FqnToConfig, not both")
    used: set[str] = set()
    left_alone: list[str] = []
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            if (filter_fn is not None and filter_fn(module, fqn)) or (
                by_name is not None and (key := _key(by_name, fqn, default=False)) and by_name[key]
            ):
                raise ValueError(
                    f"{fqn}: embeddings are not supported yet; the model is unchanged. Leave {fqn} out of filter_fn or the patterns"
                )
            continue
        if not isinstance(module, nn.Linear):
            continue
        if by_name is not None:
            key = _key(by_name, fqn, default=not _is_head(model, module, fqn))
            used.update(k for k in by_name if _matches(k, fqn))
            chosen = by_name[key] if key else None
        else:
            # a head that was prepared by name is converted with the others
            usual = isinstance(module, QATLinear) or not _is_head(model, module, fqn)
            wanted = usual if filter_fn is None else filter_fn(module, fqn)
            chosen = config if wanted else None
        if chosen is None:
            continue
        if type(module) not in (nn.Linear, QATLinear):
            left_alone.append(f"{fqn} ({type(module).__name__})")
            continue
        yield fqn, module, chosen
    if left_alone:
        warnings.warn(
            f"subclasses of nn.Linear are left alone, their forward may differ: {', '.join(left_alone)}", stacklevel=4
        )
    names = [fqn for fqn, m in model.named_modules() if isinstance(m, nn.Linear)]
    for key in [k for k in by_name or () if k not in used and k != "_default"]:
        near = difflib.get_close_matches(key.removeprefix("re:"), names, 3, 0.3)
        warnings.warn(
            f"FqnToConfig pattern {key!r} matches no linear layer; near it: {', '.join(near) or 'none'}", stacklevel=4
        )


def _key(by_name: dict[str, Any], fqn: str, *, default: bool) -> str | None:
    """The key that applies to layer `fqn`: exact names, then patterns in order, then "_default"; parameter before module."""
    for pattern in (False, True):
        for name in (_parameter(fqn), fqn):
            for key in by_name:
                if key.startswith("re:") == pattern and _matches(key, name, exactly=True):
                    return key
    return "_default" if default and "_default" in by_name else None


def _parameter(fqn: str) -> str:
    return f"{fqn}.weight" if fqn else "weight"


def _matches(key: str, name: str, *, exactly: bool = False) -> bool:
    """Whether a key means `name`, or, not exactly, the layer called so or its weight."""
    names = (name,) if exactly else (name, _parameter(name))
    return any(re.fullmatch(key[3:], n) is not None if key.startswith("re:") else key == n for n in names)


def _is_head(model: nn.Module, module: nn.Module, fqn: str) -> bool:
    """The output head: quantising it costs quality and it is often tied to the embedding."""
    head = getattr(model, "get_output_embeddings", None)
    return fqn.rpartition(".")[2] == "lm_head" or (callable(head) and head() is module)


def _tied(model: nn.Module, steps: list[Step]) -> list[str]:
    """Problems with weights that several modules hold: a conversion that would untie them, or two different ones."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    modules = {id(s.module): s for s in steps}
    problems = []
    for step in {id(s.module.weight): s for s in steps}.values():
        shared = [m for m in model.modules() if getattr(m, "weight", None) is step.module.weight]
        others = [m for m in shared if id(m) not in modules]
        names = ", ".join(holders.get(id(step.module.weight), []))
        if others:
            problems.append(
                f"{step.fqn}: its weight is tied ({names}) and converting would untie it; quantise all of them or none, or untie first"
            )
        elif len({modules[id(m)].target.recipe for m in shared}) > 1:
            problems.append(
                f"{step.fqn}: its weight is tied ({names}), but the layers have different configs; give them one"
            )
    return problems


def _tied_scales(steps: list[Step]) -> list[str]:
    """Problems with tied weights whose layers would hold scales, each its own."""
    counts = Counter(id(s.module.weight) for s in steps)
    return [
        f"{s.fqn}: its weight is tied, and layers that share a weight cannot hold scales of their own ({s.target.recipe}): untie it, "
        "or use dynamic scales"
        for s in steps
        if counts[id(s.module.weight)] > 1 and s.target.recipe.holds
    ]


def _nothing(model: nn.Module, config: Any) -> str:
    linears = [fqn for fqn, m in model.named_modules() if isinstance(m, nn.Linear)]
    plain = [fqn for fqn, m in model.named_modules() if type(m) in (nn.Linear, QATLinear)]
    if linears and not plain:
        return (
            f"nothing to quantise: all {len(linears)} linear layer(s) are subclasses of nn.Linear, which are left alone"
        )
    if isinstance(ours(config), QATConfig) and ours(config).step == "convert":
        return "nothing to convert: no layer is prepared. Call quantize_(model, QATConfig(base, step='prepare')) before training"
    if not linears:
        return f"nothing to quantise: {type(model).__name__} has no nn.Linear"
    return (
        f"nothing to quantise: {len(linears)} linear layer(s), such as {', '.join(linears[:3])}, and none was chosen. "
        "lm_head is skipped unless filter_fn or FqnToConfig names it; check filter_fn and the patterns"
    )
