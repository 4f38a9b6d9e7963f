"""Test that a checkpoint is data: torchao's loaders build configs, enums and tensors for aoquant, and call nothing."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchao.prototype.safetensors.safetensors_utils as stored
import transformers
from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig, config_from_dict, config_to_dict
from torchao.prototype.awq import AWQConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
    PerGroup,
    PerRow,
)
from transformers import AutoModelForCausalLM, LlamaConfig, TorchAoConfig

import aoquant
from aoquant import _config_guard, _config_types

FQN = FqnToConfig(
    {
        "a": aoquant.NVFP4WeightConfig(transform=aoquant.Hadamard(16)),
        "re:b.*": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
        "c": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        "d": None,
        "e": AWQConfig(Int4WeightOnlyConfig(group_size=32), step="prepare"),
        "f": aoquant.HybridConfig.bwd("nvfp4"),
    }
)


def typed(name: Any, data: Any) -> dict[str, Any]:
    return {"_type": name, "_data": data}


BOMB = typed("Int4WeightConfig", {})
for _ in range(200):
    BOMB = typed("FqnToConfig", {"fqn_to_config": {"a": BOMB}})

REFUSED = {
    "function": typed("load_pretrained", {"directory": "x", "trust_remote_code": True}),
    "torchao's function": typed("_replace_with_custom_fn_if_matches_filter", {"model": 1, "replacement_fn": 2}),
    "function of its own namespace": typed("quantize_", {}),
    "attribute of torch": typed("torch.dtype", "save"),
    "attribute in a field": typed("Int4WeightOnlyConfig", {"group_size": typed("torch.dtype", "save")}),
    "path of attributes": typed("torch.dtype", "float32.__class__"),
    "module": typed("torch", {}),
    "dunder": typed("__class__", {"name": "x"}),
    "path": typed("aoquant.load_pretrained", {}),
    "tensor class": typed("Int4Tensor", {}),
    "other class": typed("SmoothQuantObserver", {"weight": 1}),
    "method of an enum": typed("KernelPreference", "mro"),
    "new enum": typed("KernelPreference", {"value": "X", "names": ["a"]}),
    "argument by position": typed("Int4WeightOnlyConfig", 32),
    "unknown name": typed("NoSuchConfig", {}),
    "no name": typed(None, {}),
    "list for a name": typed([], {}),
    "text for a number": typed("Int4WeightOnlyConfig", {"group_size": "32"}),
    "enum of another field": typed("Int4WeightOnlyConfig", {"int4_packing_format": typed("KernelPreference", "AUTO")}),
    "config for a number": typed("Int4WeightConfig", {"group_size": typed("PerRow", {})}),
    "unknown field": typed("Int4WeightOnlyConfig", {"weights": 1}),
    "version": {"_type": "Int4WeightConfig", "_version": "1", "_data": {}},
    "half described": typed("FqnToConfig", {"fqn_to_config": {"a": {"_type": "Int4WeightConfig"}}}),
    "below a config": typed("FqnToConfig", {"fqn_to_config": {"a": typed("convert_checkpoint", {"model": "x"})}}),
    "below a list": typed("FqnToConfig", {"fqn_to_config": {"a": [[typed("quantize_", {})]]}}),
    "old name": typed("ModuleFqnToConfig", {"module_fqn_to_config": {"a": typed("explain", {})}}),
    "deep": BOMB,
    "list": [],
    "null": None,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of functions, and of classes that are no config, among what torchao can find by name."""
    seen: list[str] = []

    def spy(name: str) -> Any:
        return lambda *args, **kwargs: seen.append(name)

    # isinstance() and issubclass() need these classes to stay classes: their constructors are watched by the result
    for module in {*map(importlib.import_module, ALLOWED_AO_MODULES), aoquant}:
        for name, value in list(vars(module).items()):
            if callable(value) and not isinstance(value, type) and not name.startswith("__"):
                monkeypatch.setattr(module, name, spy(f"{module.__name__}.{name}"))
    monkeypatch.setattr(torch, "save", spy("torch.save"))
    monkeypatch.setattr(torch, "load", spy("torch.load"))
    return seen


def refused(data: Any) -> bool:
    """True if the loader refuses `data`; otherwise what it builds has to be data."""
    try:
        built = config_from_dict(data)
    except ValueError:
        return True
    assert is_data(built), data
    return False


def is_data(built: Any) -> bool:
    if isinstance(built, list | tuple):
        return all(map(is_data, built))
    if isinstance(built, dict):
        return all(map(is_data, built.values()))
    if isinstance(built, enum.Enum | str | int | float | torch.dtype | None):
        return True
    known = isinstance(built, AOBaseConfig) or dataclasses.is_dataclass(built)
    return known and not isinstance(built, type) and all(map(is_data, vars(built).values()))


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_a_config_that_is_no_config_is_refused_before_anything_is_called(data: Any, calls: list[str]) -> None:
    with pytest.raises(ValueError, match=r"."):
        config_from_dict(data)
    assert not calls


@pytest.mark.filterwarnings("ignore")
def test_whatever_name_a_file_gives_nothing_but_data_is_built(calls: list[str]) -> None:
    modules = [*map(importlib.import_module, ALLOWED_AO_MODULES), aoquant, torch]
    names = sorted({name for module in modules for name in dir(module)})
    built = 0
    for name in names:
        for data in ({}, {"model": "x"}, "AUTO", "float32", 1, None, [1]):
            built += not refused(typed(name, data))
            refused(typed("FqnToConfig", {"fqn_to_config": {"a": typed(name, data)}}))
            refused(typed("Int8WeightOnlyConfig", {"granularity": typed(name, data)}))
        refused(typed("torch.dtype", name))
    assert not calls
    assert 30 < built < 120  # configs, granularities and enums of both packages


def mutated(draw: random.Random, data: Any, names: list[str]) -> Any:
    """A copy of JSON data with one part replaced."""
    copy = json.loads(json.dumps(data))
    parts: list[tuple[Any, Any]] = []

    def collect(part: Any) -> None:
        for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
            parts.append((part, key))
            collect(part[key])

    collect(copy)
    owner, key = draw.choice(parts)
    owner[key] = draw.choice(
        [draw.choice(names), typed(draw.choice(names), draw.choice([{}, "a", "save"])), None, -1, 1e400, [], {}, copy]
    )
    return json.loads(json.dumps(copy)) if owner[key] is not copy else {"a": data}


@pytest.mark.filterwarnings("ignore:Stored version")
def test_mutated_configs_call_nothing(calls: list[str]) -> None:
    draw = random.Random(0)
    names = [*dir(aoquant), *dir(torch)[::7], "_type", "_data", "torch.dtype"]
    names += [name for module in map(importlib.import_module, sorted(ALLOWED_AO_MODULES)) for name in dir(module)]
    start = config_to_dict(FQN)
    outcomes = [refused(mutated(draw, start, names)) for _ in range(600)]
    assert not calls
    assert 300 < sum(outcomes) < 600  # some mutations leave a config


def test_configs_that_folders_hold_are_built_as_before() -> None:
    assert config_from_dict(json.loads(json.dumps(config_to_dict(FQN)))) == FQN
    for name in ("FqnToConfig", "ModuleFqnToConfig"):
        data = typed(name, {"module_fqn_to_config": {"a": config_to_dict(Int4WeightOnlyConfig(group_size=32))}})
        assert config_from_dict(data).module_fqn_to_config == {"a": Int4WeightOnlyConfig(group_size=32)}


@pytest.mark.filterwarnings("ignore")  # deprecated ones
def test_every_default_config_of_torchao_comes_back() -> None:
    modules = map(importlib.import_module, ALLOWED_AO_MODULES)
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
    seen = 0
    for cls in classes:
        if issubclass(cls, AOBaseConfig) and dataclasses.is_dataclass(cls):
            try:
                config = cls()
            except (TypeError, ValueError):  # it has no default
                continue
            assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
            seen += 1
    assert seen >= 25


def test_the_module_that_torchao_searches_holds_configs_and_nothing_else() -> None:
    held = {name: value for name, value in vars(_config_types).items() if not name.startswith("__")}
    assert held and all(isinstance(c, type) and dataclasses.is_dataclass(c) for c in held.values())
    assert {name for name in aoquant.__all__ if name.endswith("WeightConfig")} <= held.keys()


def user_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("users_package")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(
        """
import dataclasses, enum, subprocess
from concurrent.futures import Future
from torchao.core.config import AOBaseConfig

class Mode(enum.Enum):
    FAST = 1

@dataclasses.dataclass
class Options:
    mode: Mode = Mode.FAST

@dataclasses.dataclass
class UsersConfig(AOBaseConfig):
    options: Options = dataclasses.field(default_factory=Options)

class Other:
    pass

def run(**given):
    raise AssertionError

from dataclasses import dataclass
from fractions import Fraction
from aoquant import Coverage
""",
        vars(module),
    )
    monkeypatch.setattr("torchao.core.config.ALLOWED_AO_MODULES", {*ALLOWED_AO_MODULES, module.__name__})
    return module


def test_a_users_module_brings_configs_and_not_what_else_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    module = user_module(monkeypatch)
    written = config_to_dict(module.UsersConfig())
    assert config_from_dict(written) == module.UsersConfig()
    for name in ("run", "Other", "subprocess", "Future", "Coverage", "dataclass", "Fraction"):
        with pytest.raises(ValueError, match="no config, enum or granularity"):
            config_from_dict(typed(name, {}))
    module.Int8WeightConfig = module.UsersConfig  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"aoquant\._config_types and in users_package"):
        config_from_dict(typed("Int8WeightConfig", {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    aoquant.quantize_(model, "mxfp4")
    out = tmp_path_factory.mktemp("saved") / "model"
    aoquant.save_pretrained(model, out)
    return out


@pytest.mark.parametrize("case", ["function", "torchao's function", "attribute in a field", "below a config", "deep"])
def test_no_road_into_a_folder_calls_what_its_config_names(
    folder: Path, tmp_path: Path, case: str, calls: list[str]
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_type"]["default"] = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    load = importlib.import_module("aoquant.integrations.hf").load_pretrained
    with pytest.raises(ValueError, match=r"config\.json"):
        load(tmp_path)
    for road in (AutoModelForCausalLM.from_pretrained, transformers.LlamaForCausalLM.from_pretrained):
        with pytest.raises((ValueError, RecursionError)):  # transformers itself walks a config without a limit
            road(tmp_path)
    with pytest.raises(ValueError, match=r"."):
        TorchAoConfig.from_dict(config["quantization_config"])
    assert not calls


@pytest.mark.parametrize(
    "data",
    [
        typed("torch.dtype", "save"),
        typed("KernelPreference", "mro"),
        typed("KernelPreference", {"value": "x"}),
        typed("PerRow", 1),
        typed("load_pretrained", {}),
        typed("PackedTensor", {"dtype": typed("torch.dtype", "load")}),
        typed("PackedTensor", {"k": typed("PerRow", {"dim": typed("os", {})})}),
    ],
    ids=str,
)
def test_a_safetensors_header_names_tensors_alone(data: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        stored.object_from_dict(data)


def test_the_checks_are_in_front_of_functions_imported_before() -> None:
    _config_guard.guard_configs()  # again: nothing happens
    assert config_from_dict.__module__ == "torchao.core.config"
    assert config_from_dict.__code__.co_filename == _config_guard.__file__
    assert stored.object_from_dict.__code__.co_filename == _config_guard.__file__
