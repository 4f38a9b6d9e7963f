"""Decide which attention module gets which KV-cache config, and what of a config is for layers.

A KV config stands beside a base (`QATConfig(base, kv_cache=...)`), alone, or as a value of `FqnToConfig`, whose keys
name attention modules then. A name with None leaves a module out. Convert takes what was prepared.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchao.quantization import FqnToConfig

from aoquant._messages import listed, some, warn
from aoquant.config import QATConfig, by_layer
from aoquant.kv import KVCacheConfig, hook
from aoquant.kv.cache_config import ALL_CACHES
from aoquant.linear.kinds import is_layer
from aoquant.linear.prepared import PreparedModule
from aoquant.planning.choose import Filter, key_of
from aoquant.planning.plan import ours


@dataclass
class CachePlan:
    """Hold what `quantize_` does to KV caches. layers: the config of layers; None where there is none.

    prepared, quantised: configs of modules by name. converted: names of prepared modules.
    """

    layers: Any
    prepared: dict[str, KVCacheConfig] = field(default_factory=dict)
    quantised: dict[str, KVCacheConfig] = field(default_factory=dict)
    converted: list[str] = field(default_factory=list)

    def apply(self, model: nn.Module) -> None:
        """Attach and convert."""
        for converted, configs in ((False, self.prepared), (True, self.quantised)):
            for fqn, config in configs.items():
                hook.attach(model.get_submodule(fqn), fqn, config, converted=converted)
        done = {fqn: model.get_submodule(fqn) for fqn in (*self.converted, *self.quantised)}
        for module in done.values():
            module.kv_quant.converted = True  # type: ignore[union-attr]
        warn_of_scales(hook.uncalibrated(done.values()))

    def prepare(self, model: nn.Module) -> list[hook.KVQuant]:
        """Prepare the caches of `prepared` and of `quantised`, whose scales are found before they convert."""
        found = []
        for fqn, config in (self.prepared | self.quantised).items():
            module: Any = model.get_submodule(fqn)
            hook.attach(module, fqn, config)
            found.append(module.kv_quant)
        return found


def warn_of_scales(names: Sequence[str]) -> None:
    """Warn of attention modules whose static scales came from nowhere."""
    if names:
        warn(
            f"the KV-cache scales of {len(names)} attention module(s), such as {names[0]}, are 1.0, as engines take them "
            "where a checkpoint has none: prepare, call aoquant.calibrate(model, batches), and convert; or give scale=1.0"
        )


def plan(model: nn.Module, config: Any, filter_fn: Filter | None, *, skip_incompatible: bool = False) -> CachePlan:
    """Split `config` into what layers get and what KV caches get, and check the latter.

    filter_fn: chooses attention modules where the config is for caches alone; beside a base it chooses layers.

    Raises:
        ValueError: naming each attention module whose cache cannot have its config.
    """
    found = CachePlan(config)
    config = ours(config)
    parts = _parts(config)
    converts = any(getattr(c, "step", "") == "convert" for c in parts) and bool(hook.quantised(model))
    if not (converts or any(map(_asks, parts))):
        return found
    modules = {fqn: m for fqn, m in hook.attentions(model).items() if not hook.shares(m)}
    found.layers = _of_layers(model, modules, config)
    _check_names(model, modules, config, alone=found.layers is None)
    if found.layers is not None:
        filter_fn = None
    others = list[str]()
    for fqn, module in modules.items():
        own = _of_cache(config, fqn)
        if own is None or (filter_fn is not None and not filter_fn(module, fqn)):
            continue
        quant = getattr(module, "kv_quant", None)
        if isinstance(own, QATConfig) and own.step == "convert":
            if quant is not None and not quant.converted:
                found.converted.append(fqn)
                if own.kv_cache not in (None, quant.config):
                    others.append(f"{fqn}: prepared with {quant.config}, and convert is given {own.kv_cache}")
        elif isinstance(own, QATConfig):
            found.prepared[fqn] = own.kv_cache
        else:
            found.quantised[fqn] = own
    if others:
        raise ValueError(
            f"{len(others)} KV cache(s) were prepared otherwise: give convert the same, or none; the model is unchanged:{listed(others)}"
        )
    asked = found.layers is None or any(map(_asks, parts))
    if asked and not (found.prepared or found.quantised or found.converted):
        raise ValueError(
            f"no KV cache to quantise: the {type(model).__name__} has no attention module, with a cache among the arguments of its "
            f"forward, that the config names; there are: {some([*modules], 4) or 'none'}"
        )
    _check(model, found, skip_incompatible)
    return found


def _check_names(model: nn.Module, modules: dict[str, nn.Module], config: Any, *, alone: bool) -> None:
    """Warn of each name or pattern with a KV config, or of any where no layers are chosen, that matches no module."""
    for key, value in _by_name(config).items():
        if key in ("_default", ALL_CACHES) or any(key_of({key: None}, fqn, default=False) for fqn in modules):
            continue
        asks = _asks(ours(value))
        named = ((fqn, m) for fqn, m in model.named_modules() if fqn and key_of({key: None}, fqn, default=False))
        if asks and (other := next(named, None)):
            raise ValueError(
                f"{key!r} gives a KV cache to {other[0]}, a {type(other[1]).__name__}, which writes none: name attention "
                f"modules; there are: {some([*modules], 4) or 'none'}"
            )
        if alone or asks:
            warn(
                f"the name or pattern {key!r} matches no attention module with a KV cache; there are: {some([*modules], 4) or 'none'}"
            )


def _asks(config: Any) -> bool:
    return isinstance(config, KVCacheConfig) or getattr(config, "kv_cache", None) is not None


def _by_name(config: Any) -> dict[str, Any]:
    base = getattr(config, "base_config", None)
    return next((dict(c.fqn_to_config) for c in (config, base) if isinstance(c, FqnToConfig)), {})


def _parts(config: Any) -> list[Any]:
    return [config, *(ours(c) for c in _by_name(config).values())]


def _of_cache(config: Any, fqn: str) -> Any:
    """Return the config of one attention module: a KVCacheConfig, a QATConfig with one or of convert, or None."""
    config = ours(config)
    if isinstance(config, QATConfig) and isinstance(base := config.base_config, FqnToConfig):
        caches = {k: c for k, c in base.fqn_to_config.items() if isinstance(c, KVCacheConfig)}
        by_name = {k: c for k, c in base.fqn_to_config.items() if c is None or k in caches}
        key = key_of(by_name, fqn, default="_default" in caches)
        own = by_name[key] if key else config.kv_cache
        return own and dataclasses.replace(config, base_config=None, kv_cache=own)
    if isinstance(config, FqnToConfig):  # a config of layers says nothing of caches, whose next key counts
        converts = [k for k, c in config.fqn_to_config.items() if getattr(ours(c), "step", "") == "convert"]
        by_name = {k: c for k, c in config.fqn_to_config.items() if c is None or k in converts or _asks(ours(c))}
        key = key_of(by_name, fqn, default=True)
        return _of_cache(by_name[key], fqn) if key else None
    if isinstance(config, QATConfig):
        return config if config.kv_cache is not None or config.step == "convert" else None
    return config if isinstance(config, KVCacheConfig) else None


def _of_layers(model: nn.Module, modules: dict[str, nn.Module], config: Any) -> Any:
    """Return `config` without what it says of caches; None if it says nothing else."""
    if isinstance(config, KVCacheConfig):
        return None
    if isinstance(config, QATConfig):
        base = config.base_config
        if isinstance(base, FqnToConfig):
            base = _of_layers(model, modules, base)
        parts = config.activation_config is not None or config.weight_config is not None
        if config.step == "convert":
            prepared = any(isinstance(m, PreparedModule) for m in model.modules())
            return dataclasses.replace(config, base_config=base, kv_cache=None) if prepared else None
        return dataclasses.replace(config, base_config=base, kv_cache=None) if base is not None or parts else None
    if not isinstance(config, FqnToConfig):
        return config
    layers = {fqn for fqn, m in model.named_modules() if is_layer(m)}
    kept = {}
    for key, value in config.fqn_to_config.items():
        alone = {key: None}
        names_cache = any(key_of(alone, fqn, default=False) for fqn in modules)
        if value is None and names_cache and not any(key_of(alone, fqn, default=False) for fqn in layers):
            continue
        own = _of_layers(model, modules, ours(value))
        if own is not None or value is None:
            kept[key] = own
    if kept.keys() == {"_default"}:  # a filter may choose of these
        return kept["_default"]
    return by_layer(kept) if any(v is not None for v in kept.values()) else None


def _check(model: nn.Module, found: CachePlan, skip_incompatible: bool) -> None:
    """Raise ValueError for caches that cannot have their config, or leave them out with a warning."""
    problems = {}
    for fqn, config in (*found.prepared.items(), *found.quantised.items()):
        module = model.get_submodule(fqn)
        reason = hook.why_not(module, config)
        if reason is None and getattr(module, "kv_quant", None) is not None:
            reason = "its KV cache is quantised already: convert it, or call aoquant.unprepare"
        if reason is not None:
            problems[fqn] = f"{fqn}: {reason}"
    if problems and not skip_incompatible:
        raise ValueError(
            f"{len(problems)} KV cache(s) cannot be quantised; the model is unchanged:{listed(problems.values())}\nLeave a "
            "module out with None for its name in FqnToConfig, or all of these with skip_incompatible=True"
        )
    for fqn in problems:
        found.prepared.pop(fqn, None)
        found.quantised.pop(fqn, None)
    if problems:
        warn(f"{len(problems)} KV cache(s) stay unquantised:{listed(problems.values())}")
