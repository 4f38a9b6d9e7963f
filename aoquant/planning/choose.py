"""Which layer gets which config: filter functions, names and patterns, and what applies when neither says.

By default every linear layer is chosen but those in output heads (heads.py) and in routers, and no embedding. A filter
function replaces that rule. torchao's `FqnToConfig` chooses by exact names, then "re:" patterns in their order, then
"_default". A choice that cannot be honoured is an error or a warning, never silence.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchao.quantization import FqnToConfig

from aoquant._messages import advice, naming, some, warn
from aoquant.config import ALL_EXPERTS, QATConfig, by_layer
from aoquant.experts.families import experts_of, stacks_of
from aoquant.experts.routers import router_modules
from aoquant.kv import KVCacheConfig
from aoquant.linear import replaced
from aoquant.linear.kinds import is_layer, is_linear, is_packed, kind_of, why_no_kind
from aoquant.linear.prepared import QATLayer
from aoquant.planning import owners, tied
from aoquant.planning.changes import Chosen
from aoquant.planning.heads import heads
from aoquant.planning.stack_changes import why_unsupported
from aoquant.targets.target import Fields

Filter = Callable[[nn.Module, str], bool]  # one that is made of names has those that no layer bore as `unmet`


@dataclass
class Choice:
    """The layers that a config and a filter choose in a model.

    left_alone: names of chosen layers that are subclasses of a layer that is supported, and why.
    left_out: ids of modules without support that the filter or the names do not pick.
    picked: ids of modules without support that they pick.
    stacks: stacked experts, parameter by parameter.
    missed: ids of stacked experts that a recipe for all experts does not find, because they go by another name.
    """

    layers: list[Chosen] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    picked: set[int] = field(default_factory=set)
    stacks: list[Chosen] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)


def choose(model: nn.Module, config: Any, filter_fn: Filter | None) -> Choice:
    """Every layer that `config` applies to, each once, with its config.

    Raises:
        ValueError: filter_fn beside FqnToConfig, a prepared layer that is parametrized since, a pattern that is no
            regular expression, a key that names a parameter which is no layer's weight, or a module with several names
            that were given different configs.
    """
    config = _pushed_into_names(config)
    by_name = config.fqn_to_config if isinstance(config, FqnToConfig) else None
    if by_name is not None and filter_fn is not None:
        raise ValueError("FqnToConfig chooses the layers itself: give filter_fn or FqnToConfig, not both")
    keys = by_name or {}
    if by_name is not None:
        _check_names(config)
    found, every = Choice(), list[str]()
    rule = _Rule(config, by_name, filter_fn, heads(model) | router_modules(model))
    for names, module in tied.modules(model):
        if is_layer(module):
            every += names
            chosen = rule.chosen(module, names)
            if chosen.config is not None and kind_of(module) is not None:
                found.layers.append(chosen)
            elif chosen.config is not None and isinstance(module, QATLayer):
                raise ValueError(f"{chosen.fqn}: {owners.changed_class(module)}")
            elif chosen.config is not None:
                found.left_alone.append(f"{chosen.fqn} ({why_no_kind(module)})")
        elif stacks := stacks_of(module):
            every += [_join(fqn, parameter) for fqn in names for parameter in stacks]
            chosen_stacks = [c for s in stacks if (c := rule.chosen(module, names, s)).config is not None]
            found.stacks += chosen_stacks
            if not chosen_stacks:
                (found.missed if set(keys) == {ALL_EXPERTS} else found.left_out).add(id(module))
        elif any(p is not None and p.dim() > 1 for p in module._parameters.values()):
            picked = _picks(module, names, by_name, filter_fn)
            if picked is not None:
                (found.picked if picked else found.left_out).add(id(module))
    unmet = [k for k in keys if k not in rule.used and k != "_default"]
    _refuse_within_experts(model, [k for k in unmet if keys[k] is not None])
    unmet = [k for k in unmet if not _is_float_parameter(model, k, keys[k])]
    if not _for_experts_alone(unmet) or set(unmet) != set(keys):  # `nothing_chosen` says it better
        _warn_of_unmet(unmet, every, filter_fn)
    return found


@dataclass
class _Rule:
    """What chooses one layer or stacked parameter under one of its names: `by_name`, else the filter, else the default.

    unusual: ids of the modules in the model's output heads and routers. used: keys of `by_name` that mean a layer or
        a stack.
    """

    config: Any
    by_name: Mapping[str, Any] | None
    filter_fn: Filter | None
    unusual: Collection[int]
    used: set[str] = field(default_factory=set)

    def chosen(self, module: nn.Module, names: list[str], stack: str = "") -> Chosen:
        """Return a layer, or a stacked parameter of experts, with its config: None leaves it as it is."""
        label = ", ".join(_join(fqn, stack) if stack else fqn for fqn in names)
        config, *others = [self._config(module, fqn, stack) for fqn in names]
        if any(other != config for other in others):
            raise ValueError(
                f"{label}: are one {'parameter' if stack else 'module'}, which has one config: choose it under all of its names or under "
                "none, with the same config"
            )
        return Chosen(label, module, config, stack or "weight")

    def _config(self, module: nn.Module, fqn: str, stack: str) -> Any:
        usual = bool(stack) or is_usual(module, self.unusual)
        if self.by_name is not None:
            parameter = stack or "weight"
            self.used.update(key for key in self.by_name if _means(key, fqn, parameter))
            key = key_of(self.by_name, fqn, default=usual, parameter=parameter)
            return self.by_name[key] if key else None
        if self.filter_fn is None:  # a head or an embedding that was prepared by name is converted with the others
            return self.config if usual or isinstance(module, QATLayer) else None
        try:
            return self.config if self.filter_fn(module, fqn) else None
        except AttributeError:  # a filter may read what only linear layers have
            if stack:
                return None
            raise


def is_asked(config: Any, filter_fn: Filter | None, fqn: str, module: nn.Module | None) -> bool:
    """Return whether a filter or the names of a config leave anything of a module to quantise."""
    by_name = _pushed_into_names(config)
    if isinstance(by_name, FqnToConfig):
        below = [fqn] if module is None else [_join(fqn, name) if name else fqn for name, _ in module.named_modules()]
        keys = (key_of(by_name.fqn_to_config, name, default=True) for name in below)
        return any(key is not None and by_name.fqn_to_config[key] is not None for key in keys)
    if filter_fn is None or module is None:
        return True
    return any(filter_fn(m, _join(fqn, name) if name else fqn) for name, m in module.named_modules())


def key_of(by_name: Mapping[str, Any], fqn: str, *, default: bool, parameter: str = "weight") -> str | None:
    """The key that applies to layer `fqn`, or to another of its parameters.

    Exact names come before patterns, patterns are in order, "_default" is last; a weight's name comes before its
    layer's.
    """
    for pattern in (False, True):
        for name in (_join(fqn, parameter), fqn):
            for key in by_name:
                if key.startswith("re:") == pattern and _means(key, name, exactly=True):
                    return key
    return "_default" if default and "_default" in by_name else None


def is_usual(module: nn.Module, unusual: Collection[int]) -> bool:
    """Return whether a layer is quantised by default: every linear layer is but those in output heads and routers.

    unusual: ids of the modules in the model's output heads and routers.
    """
    return is_linear(module) and id(module) not in unusual


def _pushed_into_names(config: Any) -> Any:
    """QATConfig(FqnToConfig({name: base})) as FqnToConfig({name: QATConfig(base)})."""
    if not (isinstance(config, QATConfig) and isinstance(config.base_config, FqnToConfig)):
        return config
    by_name = config.base_config.fqn_to_config
    return by_layer({key: base and dataclasses.replace(config, base_config=base) for key, base in by_name.items()})


def each(config: Any) -> list[Any]:
    """The configs of layers in an `FqnToConfig`, but None, which leaves layers out; of another config itself."""
    if isinstance(config, FqnToConfig):
        return [c for c in config.fqn_to_config.values() if not isinstance(c, KVCacheConfig | None)]
    return [config]


def _check_names(config: FqnToConfig) -> None:
    """Raise ValueError for a pattern that is no regular expression, and for an option that is not known here."""
    fields = Fields(config)
    if fields.module_fqn_to_config not in ({}, fields.fqn_to_config):
        raise ValueError("FqnToConfig: module_fqn_to_config is not fqn_to_config: give the latter alone")
    with naming("FqnToConfig"):
        fields.check()
    for key in config.fqn_to_config:
        if key.startswith("re:"):
            try:
                re.compile(key[3:])
            except re.error as error:
                raise ValueError(f"FqnToConfig pattern {key!r} is no regular expression: {error}") from None


def _picks(
    module: nn.Module, names: list[str], by_name: Mapping[str, Any] | None, filter_fn: Filter | None
) -> bool | None:
    """Return whether the names or the filter pick a module without support; None where the default decides."""
    if by_name is not None:
        parameters = [_join(fqn, p) for fqn in names for p in module._parameters]
        keys = [key for key in by_name for name in (*names, *parameters) if _means(key, name, exactly=True)]
        return None if not keys and "_default" in by_name else any(by_name[key] is not None for key in keys)
    if filter_fn is None:
        return None
    try:
        return any(bool(filter_fn(module, fqn)) for fqn in names)
    except Exception:  # a filter may take what it is shown for a linear layer, and read its in_features
        return False


def _refuse_within_experts(model: nn.Module, keys: Collection[str]) -> None:
    """Raise ValueError for a key that names what stacked experts do not have, such as one expert."""
    for key in keys:
        for fqn, module in experts_of(model).items():
            if key.startswith(_join(fqn, "")):
                names = [_join(fqn, parameter) for parameter in stacks_of(module)]
                near = difflib.get_close_matches(key, names, len(names), 0.0)
                raise ValueError(
                    f"{key!r} names nothing in {fqn or 'the model'} ({type(module).__name__}), whose experts are stacked in {', '.join(near)}: "
                    "name one of these, or the module. A single expert cannot be named"
                )


def _is_float_parameter(model: nn.Module, key: str, config: Any) -> bool:
    """Return whether `key` names parameters, or modules without support, that its config (None) leaves as they are."""
    for fqn, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not _means(key, _join(fqn, name), exactly=True):
                continue
            if config is not None:
                if "expert" in f"{fqn} {type(module).__name__}".lower() and parameter.dim() > 1:
                    raise ValueError(_unsupported_experts(model, key, module))
                raise ValueError(
                    f"{key!r} names the parameter {_join(fqn, name)} {tuple(parameter.shape)} of a {type(module).__name__}, which aoquant "
                    "cannot quantise: it takes the weights of nn.Linear, nn.Embedding, transformers' Conv1D, and of experts with transformers' "
                    "protocol (num_experts, has_gate, has_bias, is_transposed, _apply_gate). Leave the key out, or "
                    "give it None, which leaves the parameter in high precision"
                )
            return True
        if config is None and fqn and _means(key, fqn, exactly=True):
            return True
    return False


def _unsupported_experts(model: nn.Module, key: str, module: nn.Module) -> str:
    """Return why experts that `key` names are not quantised, with all of their class and its share of the model."""
    alike = [(fqn, m) for fqn, m in model.named_modules() if type(m) is type(module)]
    found = {_join(fqn, n): p for fqn, m in alike for n, p in m._parameters.items() if p is not None and p.dim() > 1}
    share = sum(p.numel() for p in found.values()) / sum(p.numel() for p in model.parameters())
    names = some([f"{name} {tuple(p.shape)}" for name, p in found.items()])
    return (
        f"{key!r} names the parameter {names}, {share:.1%} of the model, which aoquant cannot quantise: "
        f"{why_unsupported(module)}. Leave the key out, or give it None, which leaves them in high precision"
    )


def _warn_of_unmet(unmet: list[str], every: list[str], filter_fn: Filter | None) -> None:
    if filter_fn is not None:  # its names may be parts of names
        unmet = list(getattr(filter_fn, "unmet", ()))
        every = sorted({part for fqn in every for part in (fqn, *fqn.split("."))})
    for key in unmet:
        near = difflib.get_close_matches(key.removeprefix("re:"), every, 3, 0.3)
        warn(f"the name or pattern {key!r} matches no linear layer; near it: {', '.join(near) or 'none'}")


def _join(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name


def _means(key: str, name: str, parameter: str = "weight", *, exactly: bool = False) -> bool:
    """Return whether a key means `name`, or, not exactly, the layer called so or its parameter."""
    names = (name,) if exactly else (name, _join(name, parameter))
    return any(re.fullmatch(key[3:], n) is not None if key.startswith("re:") else key == n for n in names)


def keys_of(config: Any) -> tuple[str, ...]:
    """The names and patterns of an FqnToConfig, or of one in a QATConfig; none of any other config."""
    config = _pushed_into_names(config)
    return tuple(config.fqn_to_config) if isinstance(config, FqnToConfig) else ()


def _for_experts_alone(keys: Collection[str]) -> bool:
    return bool(keys) and all("experts" in key for key in keys)


def nothing_chosen(model: nn.Module, *, converts: bool, keys: Collection[str] = ()) -> str:
    """Return why no layer was chosen. converts: the step is "convert". keys: names and patterns that choose."""
    met = any(_means(k, fqn, p) for k in keys for fqn, m in model.named_modules() for p in m._parameters)
    if converts and _for_experts_alone(keys) and met:
        return _unprepared(model)
    if _for_experts_alone(keys) and (experts := experts_of(model)):
        names = [_join(fqn, parameter) for fqn, module in experts.items() for parameter in stacks_of(module)]
        return (
            f"nothing to quantise: no stacked experts of {type(model).__name__} have the name {', '.join(keys)}: they are "
            f"{some(names, 4)}. Name these or their modules; a single expert cannot be named"
        )
    if _for_experts_alone(keys):
        return (
            f"nothing to quantise: the recipe or config is for experts alone ({', '.join(keys)}), and {type(model).__name__} has no experts: "
            "choose one for linear layers, such as 'int4-g32'"
        )
    linears = [fqn for fqn, m in model.named_modules() if is_linear(m)]
    if subclasses := _only_subclasses(model):
        return subclasses
    if converts:
        return _unprepared(model)
    if not linears:
        return f"nothing to quantise: {type(model).__name__} has no nn.Linear{_instead(model)}"
    unless = advice("filter_fn or FqnToConfig names them", "--embeddings or --layers NAME=RECIPE names them")
    return (
        f"nothing to quantise: {len(linears)} linear layer(s), such as {', '.join(linears[:3])}, and none was chosen. "
        f"output heads, embeddings and routers are skipped unless {unless}; "
        f"check {advice('filter_fn and the patterns', '--layers and --skip')}{_instead(model)}"
    )


def _only_subclasses(model: nn.Module) -> str | None:
    """Return why nothing was chosen, where all linear layers but output heads and routers are subclasses; else None."""
    unusual = heads(model) | router_modules(model)
    usual = [(fqn, m) for fqn, m in model.named_modules() if is_usual(m, unusual)]
    if not usual or any(kind_of(m) is not None or isinstance(m, QATLayer) for _, m in usual):
        return None
    classes = sorted({type(m).__name__ for _, m in usual})
    rest = [fqn for fqn, m in model.named_modules() if is_linear(m) and id(m) in unusual]
    skipped = f", and {', '.join(rest[:3])} is skipped unless it is named" if rest else ""
    return (
        f"nothing to quantise: {len(usual)} linear layer(s) of {type(model).__name__}, such as {usual[0][0]}, are {' and '.join(classes)}, "
        f"subclasses of nn.Linear that are left alone because their forward may differ{skipped}. If it computes what nn.Linear does, make "
        f"them plain first: [setattr(m, '__class__', torch.nn.Linear) for m in model.modules() if type(m).__name__ == {classes[0]!r}]"
    )


def _unprepared(model: nn.Module) -> str:
    packed = [name for name, p in model.named_parameters() if is_packed(p)]
    if packed:
        return (
            f"nothing to convert: no layer is prepared, and {len(packed)} weight(s), such as {packed[0]}, are packed already: "
            "the model is converted"
        )
    if gone := [fqn for fqn, _ in replaced.missing(model)]:
        return (
            f"nothing to convert: {len(gone)} module(s) that were prepared have been replaced or removed since: "
            f"{', '.join(gone[:10])}. Prepare what took their place before training"
        )
    return "nothing to convert: no layer is prepared. Call quantize_(model, QATConfig(base, step='prepare')) before training"


def _instead(model: nn.Module) -> str:
    """The classes of the modules without support that hold matrices, as the end of a sentence."""
    others = {
        type(m).__name__
        for m in model.modules()
        if not is_layer(m) and not stacks_of(m) and any(p is not None and p.dim() > 1 for p in m._parameters.values())
    }
    return f". No support for the weights of {', '.join(sorted(others))}" if others else ""
