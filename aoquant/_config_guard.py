"""Check what a checkpoint says of configs and tensors before torchao builds them: a file is data and calls nothing.

torchao's `config_from_dict` looks `_type` up in the modules of an allow-list and calls what it finds with the file's
arguments, functions too, and gives any attribute of torch as a "torch.dtype". `object_from_dict`, which rebuilds
tensors from a safetensors header, does the latter. Importing aoquant puts the checks of this file in front of both, so
that they hold for every loader that calls torchao: transformers' and vLLM's as well as aoquant's.

`_type` may name a config (a subclass of AOBaseConfig), an enum, or a dataclass or named tuple of the package that the
listed module belongs to. `_data` names a member of an enum, or gives the fields of the others, in the types that they
are annotated with. SECURITY.md says what that means for a module that a program adds to the list.
"""

import dataclasses
import enum
import functools
import importlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torchao.core import config as ao

DEPTH = 32  # levels of nesting; a config of configs with granularities has about ten
_DTYPE = "torch.dtype"
_COMMON = {object, tuple, int, str, *enum.Enum.__mro__, *enum.IntFlag.__mro__}  # bases that say nothing of a class
_unchecked: dict[str, Callable[[Any], Any]] = {}


def guard_configs() -> None:
    """Put `check_config` in front of torchao's `config_from_dict`."""
    _install(ao.config_from_dict, _checked_config)


def guard_tensors(module: Any) -> None:
    """Put `check_tensor` in front of `object_from_dict` of torchao's safetensors_utils."""
    _install(module.object_from_dict, _checked_tensor)


def _install(function: Any, checked: Any) -> None:
    # The function keeps its identity and gets another body: a program that imported it before aoquant is guarded too.
    if function.__name__ not in _unchecked:
        code = function.__code__
        _unchecked[function.__name__] = types.FunctionType(code, function.__globals__, function.__name__)
        function.__code__ = checked.__code__


def _checked_config(data):  # type: ignore[no-untyped-def]  # runs with the globals of torchao's module
    from aoquant import _config_guard

    _config_guard.check_config(data)
    return _config_guard._unchecked["config_from_dict"](data)


def _checked_tensor(data):  # type: ignore[no-untyped-def]  # the same
    from aoquant import _config_guard

    _config_guard.check_tensor(data)
    return _config_guard.fitting(_config_guard._unchecked["object_from_dict"](data))


def check_config(data: Any) -> None:
    """Raise ValueError unless `data`, of a config.json, describes configs, enums, granularities and dtypes alone."""
    if not isinstance(data, dict):
        raise ValueError(f"a quantisation config must be a JSON object, got {data!r:.80}")
    _given(data, "quant_type", _listed, 0)


def check_tensor(data: Any) -> None:
    """Raise ValueError unless `data`, of a safetensors header, describes a tensor subclass that torchao stores.

    Its parts may be tensors already: torchao puts them in before it builds the tensor.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a tensor's description must be a JSON object, got {data!r:.80}")
    _given(data, "tensor", _stored, 0)


def fitting(built: Any) -> Any:
    """Return a tensor whose parts fit together. Raises ValueError: they do not."""
    from aoquant.targets.stored_parts import check_stored  # here: this file is imported before torchao's tensors are

    check_stored(built)
    return built


def _given(data: Any, where: str, find: Callable[[str], Any], depth: int) -> Any:
    """Check a value of the file, and return what its type will be: the value itself if it is plain, or a class."""
    if depth > DEPTH:
        raise ValueError(f"{where}: nested more than {DEPTH} levels deep")
    if isinstance(data, list):
        return [_given(item, f"{where}[{i}]", find, depth + 1) for i, item in enumerate(data)]
    if not isinstance(data, dict):
        if data is None or isinstance(data, str | int | float | torch.Tensor):
            return data
        raise ValueError(f"{where} must hold JSON, got {type(data).__name__}")
    if strange := [key for key in data if not isinstance(key, str)]:
        raise ValueError(f"{where} must have strings for keys, got {strange[0]!r:.80}")
    if not data.keys() & {"_type", "_data"}:
        return {key: _given(value, f"{where}.{key}", find, depth + 1) for key, value in data.items()}
    return _described(data, where, find, depth)


def _described(data: dict[str, Any], where: str, find: Callable[[str], Any], depth: int) -> Any:
    """The class of an object that is described by its `_type` and `_data`."""
    name, content, version = data.get("_type"), data.get("_data"), data.get("_version", 1)
    if not isinstance(name, str) or not {"_type", "_data"} <= data.keys() or type(version) is not int:
        raise ValueError(f"{where} must hold a _type (a name), its _data and a whole _version, got {data!r:.80}")
    if name == _DTYPE:
        if not (isinstance(content, str) and isinstance(getattr(torch, content, None), torch.dtype)):
            raise ValueError(f"{where}: torch.{content!s:.80} is no dtype")
        return torch.dtype
    cls = find(name)
    if issubclass(cls, enum.Enum):
        if not (isinstance(content, str) and content in cls.__members__):
            raise ValueError(f"{where}: {name} has {', '.join(cls.__members__)}, got {content!r:.80}")
        return cls
    if not isinstance(content, dict):
        raise ValueError(f"{where}: the _data of a {name} must be a JSON object, got {content!r:.80}")
    hints = _hints(cls)
    for field, value in content.items():
        kind = _given(value, f"{where}.{field}", find, depth + 1)
        if field in hints and not _fits(kind, hints[field]):
            hint = hints[field]
            takes = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ValueError(f"{where}.{field} of a {name} takes {takes}, got {value!r:.80}")
    return cls


def _listed(name: str) -> type:
    """The class that torchao would take for a `_type`."""
    found: dict[int, tuple[Any, str]] = {}
    for module in sorted(ao.ALLOWED_AO_MODULES):
        try:
            value = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        found[id(value)] = (value, module)
    if not found:
        searched = ", ".join(sorted(ao.ALLOWED_AO_MODULES))  # torchao's words
        raise ValueError(f"Failed to find class {name:.80} in any of the allowed modules: {searched}")
    if refused := [module for value, module in found.values() if not _may_be_built(value, module)]:
        raise ValueError(
            f"{name!r:.80} in {refused[0]} is no config, enum or granularity: a checkpoint may name nothing else; "
            "do not use it if you do not know who wrote it"
        )
    if len(found) > 1:
        raise ValueError(
            f"{name} is in {' and in '.join(sorted(module for _, module in found.values()))}, and torchao takes one of "
            "them at random: give the class in your own module another name"
        )
    return next(iter(found.values()))[0]


def _may_be_built(value: Any, module: str) -> bool:
    if not isinstance(value, type):
        return False
    if issubclass(value, ao.AOBaseConfig | enum.Enum):
        return True
    record = dataclasses.is_dataclass(value) or (issubclass(value, tuple) and hasattr(value, "_fields"))
    return record and value.__module__.partition(".")[0] == module.partition(".")[0]


def _stored(name: str) -> type:
    """The class that torchao would take for a `_type` in a safetensors header."""
    from torchao.prototype.safetensors.safetensors_utils import ALLOWED_CLASSES

    if name not in ALLOWED_CLASSES:
        raise ValueError(f"torchao stores {', '.join(ALLOWED_CLASSES)}, and no {name!r:.80}")
    return ALLOWED_CLASSES[name]


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    """The annotations of a class's fields; none where they cannot be read."""
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError):
        return {}


def _fits(kind: Any, hint: Any) -> bool:
    """True if a value of the file can stand where `hint` is annotated. kind: of `_given`.

    torchao annotates loosely: numbers stand for integers, and one granularity for another, so a class is taken for
    another one with a base of its own.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or kind is None:  # torchao annotates fields with a default of None as if it were not there
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(kind, one) for one in inner)
    if origin is not None:
        if issubclass(origin, Mapping):
            return isinstance(kind, dict) and all(_fits(one, inner[-1]) for one in kind.values())
        return not issubclass(origin, Iterable) or (
            isinstance(kind, list) and all(any(_fits(one, h) for h in inner if h is not ...) for one in kind)
        )
    if not isinstance(hint, type):
        return True
    if isinstance(kind, type):  # of a described object
        return issubclass(kind, hint) or bool({*kind.__mro__} & {*hint.__mro__} - _COMMON)
    if isinstance(kind, bool):
        return hint is bool
    if isinstance(kind, int | float):
        return hint in (int, float)
    if isinstance(kind, str) and issubclass(hint, enum.Enum) and issubclass(hint, str):  # torchao takes the value too
        return kind in [member.value for member in hint]
    return isinstance(kind, hint)
