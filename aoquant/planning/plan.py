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
from torch.distributed.tensor import DTensor
from torchao.core.config import AOBaseConfig
from torchao.quantization import FqnToConfig
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.utils import TorchAOBaseTensor

from aoquant.config import QATConfig, backward_slots
from aoquant.layers import held
from aoquant.layers.embedding import QATEmbedding
from aoquant.layers.linear import NOT_CALIBRATED
from aoquant.layers.qat import Prepared, QATLayer, QATLinear
from aoquant.parallel import packed as sharded
from aoquant.parallel.fsdp import compute_dtypes, layer_class
from aoquant.parallel.linear import all_finite
from aoquant.planning import tied as sharing
from aoquant.targets import Target, fake_target, resolve, supported

Filter = Callable[[nn.Module, str], bool]  # one that is made of names has those that no layer bore as `unmet`
Layer = nn.Linear | nn.Embedding
LAYERS = (nn.Linear, QATLinear, nn.Embedding, QATEmbedding)  # exactly: the forward of a subclass may differ


@dataclass(frozen=True)
class Step:
    """One layer's change: "prepare" swaps the class in, "convert" and "quantize" replace the weight. fqn: all its names.

    dtype: that forward sees the weight in, which is what is encoded.
    """

    fqn: str
    module: Layer
    kind: str
    config: Any
    target: Target
    dtype: torch.dtype


def plan(model: nn.Module, config: Any, filter_fn: Filter | None) -> list[Step]:
    """Every layer's step, checked.

    Raises:
        ValueError: naming each layer that cannot take its config, or saying that there is nothing to do.
    """
    if not isinstance(config, AOBaseConfig):
        got = f"the class {config.__name__}: call it" if isinstance(config, type) else repr(config)
        raise ValueError(f"config must be a QATConfig, a PTQ config or an FqnToConfig, got {got}")
    steps, problems = [], []
    assigned = list(_assign(model, config, filter_fn))
    dtypes = compute_dtypes(model)
    gemms = {id(module.weight) for _, module, _ in assigned if isinstance(module, nn.Linear)}
    for fqn, module, layer_config in assigned:
        try:
            step = plan_layer(
                module, layer_config, fqn, has_gemm=id(module.weight) in gemms, dtype=dtypes.get(id(module.weight))
            )
        except ValueError as error:
            problems.append(str(error))
            continue
        if step is not None:
            steps.append(step)
    problems += [p for s in steps if (p := sharing.adapter_problem(model, s.module, s.fqn, s.kind))]
    problems += sharing.problems(model, {id(s.module): s.target.recipe for s in steps})
    problems += _tied_scales(steps)
    if problems:
        shown = "\n  ".join(problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(f"{len(problems)} layer(s) cannot be quantised; the model is unchanged:\n  {shown}{more}")
    if not steps:
        raise ValueError(_nothing(model, config))
    return steps


def plan_layer(
    module: nn.Module, config: Any, fqn: str = "", *, has_gemm: bool = False, dtype: torch.dtype | None = None
) -> Step | None:
    """The step for one layer, checked; None when an unprepared layer meets convert.

    has_gemm: whether a linear layer shares an embedding's weight: an activation format is then for its inputs.
    dtype: that forward sees the weight in, where FSDP casts it.

    Raises:
        ValueError: with the layer's name and shape, what was required, what was got and what to do.
    """
    assert isinstance(module, Layer)
    config = ours(config)
    label = f"{fqn or f'nn.{_plain(module).__name__}'} {tuple(module.weight.shape)}"
    if isinstance(config, QATConfig) and isinstance(config.base_config, FqnToConfig):
        raise ValueError(
            f"{label}: QATConfig(FqnToConfig(...)) needs layer names: use aoquant.quantize_, or put a QATConfig into each value"
        )
    kind = config.step if isinstance(config, QATConfig) else "quantize"
    if kind == "convert":
        if not isinstance(module, QATLayer):
            return None
        target = _convert_target(module, config, label)
    else:
        if isinstance(module, QATLayer):
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
    if isinstance(module, nn.Linear):
        reason = target.why_not(module.out_features, module.in_features, dtype or module.weight.dtype)
    else:
        reason = target.why_not_embedding(module, has_gemm=has_gemm or kind == "convert")
        if reason is None and target.recipe.holds:
            reason = (
                "an embedding's scales are made from its rows, so there are none to hold: use scales='dynamic' for it"
            )
    if reason is None:
        reason = sharded.why_not(module, kind, target.recipe, dtype)
    if reason is None and kind != "prepare":
        reason = _not_calibrated(module, target)
    if reason is None:
        reason = _why_not_here(module, kind) or not_finite(module.weight)
    if reason is not None:
        raise ValueError(f"{label}: {reason}")
    return Step(fqn, module, kind, config, target, dtype or module.weight.dtype)


def not_finite(weight: torch.Tensor) -> str | None:
    """Why the values of `weight` cannot be quantised; None when they can, or when there are none (meta)."""
    if weight.is_meta or all_finite(weight):
        return None
    return "its weight holds NaN or Inf: restore a good checkpoint before quantising"


def _why_not_here(module: Layer, kind: str) -> str | None:
    """Why the step would have no effect on this very module: another library owns its forward or its weight."""
    if isinstance(vars(module).get("weight"), torch.Tensor):
        return (
            "its weight is no parameter: a hook of torch.nn.utils.prune or weight_norm computes it before each forward, and would put it back over "
            "codes: make it permanent with torch.nn.utils.prune.remove(layer, 'weight') or torch.nn.utils.remove_weight_norm(layer) first"
        )
    replaced = "forward" in vars(module) and "_old_forward" not in vars(module)  # accelerate's hooks are followed
    if replaced and isinstance(module.weight, DTensor):
        return (
            "its weight is sharded and its forward replaced on the instance, as transformers' tp_plan does, so another forward would never "
            "run: load the model without tp_plan, prepare it, and shard it with parallelize_module or fully_shard"
        )
    if kind == "prepare":
        if replaced:
            return "its forward is replaced on the instance, so a prepared forward would never run: remove the replacement first"
    elif module.weight.is_meta and hasattr(module, "_hf_hook"):
        return (
            "accelerate keeps its weight offloaded, so there is nothing here to quantise: load the model without offload "
            "(another device_map), or convert the checkpoint itself with `aoquant convert`"
        )
    return None


def ours(config: Any) -> Any:
    """torchao's QATConfig as ours, and so its PTQ configs with a step of their own; everything else as it is."""
    if isinstance(config, TorchaoQATConfig):
        return QATConfig(config.base_config, config.activation_config, config.weight_config, step=config.step)
    if type(config).__name__ in supported() and getattr(config, "step", None) is not None:
        return QATConfig(config, step=config.step)
    return config


def _not_calibrated(module: Layer, target: Target) -> str | None:
    """Why a layer has no scales to convert with; None when it has, or needs none."""
    if not isinstance(module, QATLayer):
        if target.recipe.input_scales == "dynamic" and not target.recipe.fitted:
            return None
        return (
            "its config has static activation scales or a fitted transform, which calibration finds: "
            "quantize_(model, QATConfig(config, step='prepare')), "
            "aoquant.calibrate(model, forward_loop), then quantize_(model, QATConfig(step='convert'))"
        )
    if isinstance(module, QATLinear) and not module.calibrated:
        return NOT_CALIBRATED
    if isinstance(module, QATLinear) and not held.present(module):
        return "a scale that it holds is NaN or Inf: restore a good checkpoint before converting"
    return None


def _prepare_target(config: QATConfig) -> Target:
    if config.base_config is None:
        target = fake_target(config.weight_config, config.activation_config)
    else:
        target = resolve(config.base_config)
    slots: dict[str, Any] = dict(backward_slots(config.backward))
    recipe = dataclasses.replace(target.recipe, straight_through=config.straight_through, **slots)
    if config.scales != "dynamic":
        recipe = dataclasses.replace(recipe, weight_scales=config.scales)
    if config.scales == "learned" and recipe.input_scales == "static":
        recipe = dataclasses.replace(recipe, input_scales="learned")
    return dataclasses.replace(target, recipe=recipe)


def _convert_target(module: QATLayer, config: QATConfig, label: str) -> Target:
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


def _assign(model: nn.Module, config: Any, filter_fn: Filter | None) -> Iterator[tuple[str, Layer, Any]]:
    """(names, layer, config) for every nn.Linear and nn.Embedding that a config applies to, once."""
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

    def choice(module: nn.Module, fqn: str) -> Any:
        """The config of a layer under one of its names, None to leave it as it is."""
        if by_name is not None:
            used.update(k for k in by_name if _matches(k, fqn))
            key = _key(by_name, fqn, default=_is_usual(model, module, fqn))
            return by_name[key] if key else None
        # a head or an embedding that was prepared by name is converted with the others
        usual = isinstance(module, QATLayer) or _is_usual(model, module, fqn)
        return config if (usual if filter_fn is None else filter_fn(module, fqn)) else None

    layers = [(names, m) for names, m in sharing.modules(model) if isinstance(m, Layer)]
    for names, module in layers:
        label = ", ".join(names)
        chosen, *others = [choice(module, fqn) for fqn in names]
        if any(other != chosen for other in others):
            raise ValueError(
                f"{label}: are one module, which has one config: choose it under all of its names or under none, with the same config"
            )
        if chosen is None:
            continue
        if layer_class(module) not in LAYERS:
            left_alone.append(f"{label} ({type(module).__name__})")
            continue
        yield label, module, chosen
    if left_alone:
        warnings.warn(
            f"subclasses of nn.Linear and nn.Embedding are left alone, their forward may differ: {', '.join(left_alone)}",
            stacklevel=4,
        )
    every = [fqn for names, _ in layers for fqn in names]
    unmet = [k for k in by_name or () if k not in used and k != "_default"]
    if filter_fn is not None:  # its names may be parts of names
        unmet = list(getattr(filter_fn, "unmet", ()))
        every = sorted({part for fqn in every for part in (fqn, *fqn.split("."))})
    for key in unmet:
        near = difflib.get_close_matches(key.removeprefix("re:"), every, 3, 0.3)
        warnings.warn(
            f"the name or pattern {key!r} matches no linear layer; near it: {', '.join(near) or 'none'}", stacklevel=4
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


def _is_usual(model: nn.Module, module: nn.Module, fqn: str) -> bool:
    """What is quantised unless somebody says otherwise: linear layers, but for the head, which costs quality and is often tied."""
    head = getattr(model, "get_output_embeddings", None)
    is_head = fqn.rpartition(".")[2] == "lm_head" or (callable(head) and head() is module)
    return isinstance(module, nn.Linear) and not is_head


def _plain(module: nn.Module) -> type[nn.Module]:
    return nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear


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
    plain = [fqn for fqn, m in model.named_modules() if layer_class(m) in (nn.Linear, QATLinear)]
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
        "lm_head and embeddings are skipped unless filter_fn or FqnToConfig names them; check filter_fn and the patterns"
    )
