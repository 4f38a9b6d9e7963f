"""Names and private symbols: what torchao and Hugging Face look up by name has to be there, unique and probed."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import forked
from torchao.core.config import ALLOWED_AO_MODULES, config_from_dict, config_to_dict
from transformers import TorchAoConfig
from transformers.quantizers.quantizer_torchao import _fuzzy_match_size

import aoquant
from aoquant import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    Packed4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
)
from aoquant import config as configs
from aoquant.integrations import hf

SAMPLES = [
    NVFP4WeightConfig(),
    NVFP4WeightConfig("static", 0.001, activation=None),
    NVFP4WeightConfig(rule="four_over_six", metric="mae", tile=16, activation="fouroversix"),
    GridFlipFP4WeightConfig(),
    GridFlipFP4WeightConfig("search", 0.2, True, None),
    MXFP4WeightConfig("floor"),
    MXFP8WeightConfig("e5m2"),
    FP8WeightConfig(granularity="tensor"),
    Int4WeightConfig(32),
    Int8WeightConfig(activation="int8-row"),
    IntxWeightConfig(3, None),
    IntxWeightConfig(1, 32, mapping="asymmetric"),
    FP8WeightConfig(granularity="block"),
    FP8WeightConfig(activation=None),
    PackedWeightConfig("high-precision", "mxfp4"),
    PackedWeightConfig("intx5-row", None, "dequantize"),
    Packed4WeightConfig("nvfp4", "nvfp4", "aoquant"),
]


OWN = [c for c in vars(configs).values() if isinstance(c, type) and issubclass(c, configs.WeightConfig)]
OWN.remove(configs.WeightConfig)


def test_every_config_is_exported_and_shares_its_name_with_nothing_that_torchao_searches() -> None:
    searched = "aoquant._config_types"
    assert searched in ALLOWED_AO_MODULES and "aoquant" not in ALLOWED_AO_MODULES
    theirs = [importlib.import_module(name) for name in ALLOWED_AO_MODULES - {searched}]
    for config in OWN:
        assert (
            getattr(aoquant, config.__name__) is getattr(importlib.import_module(searched), config.__name__) is config
        )
        assert config.__name__ in aoquant.__all__
        assert not [m.__name__ for m in theirs if hasattr(m, config.__name__)]


@pytest.mark.parametrize("config", SAMPLES, ids=repr)
def test_config_survives_torchaos_json(config: Any) -> None:
    written = json.loads(json.dumps(config_to_dict(config)))
    assert written["_version"] == configs.SCHEMA
    assert config_from_dict(written) == config


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (Int4WeightConfig, "4"),
        (MXFP4WeightConfig, "4"),
        (NVFP4WeightConfig, "4"),
        (GridFlipFP4WeightConfig, "4"),
        (Packed4WeightConfig, "4"),
        (Int8WeightConfig, "8"),
        (FP8WeightConfig, "8"),
        (MXFP8WeightConfig, "8"),
        (IntxWeightConfig, None),
        (PackedWeightConfig, None),
    ],
)
def test_class_name_tells_hf_the_width(config: type, size: str | None) -> None:
    assert _fuzzy_match_size(config.__name__) == size


def test_packed_tensor_has_the_field_names_that_hf_reads() -> None:
    parts = {f"_weight_{n}" for n in PackedTensor.tensor_data_names + PackedTensor.optional_tensor_data_names}
    assert parts <= set(
        hf.TorchAoHfQuantizer(TorchAoConfig(NVFP4WeightConfig())).get_weight_conversions()[0].source_patterns
    )


OLD_TORCHAO = r"builds on torchao >=0.18, and torchao [\d.]+\S* with torch"
OLD_HF = r"need transformers >=5.16, torchao >=0.18 .*found transformers 5"


# symbol to remove, module to import without it, message
REMOVED = [
    ("torchao.core.config:ALLOWED_AO_MODULES", "aoquant", OLD_TORCHAO),
    ("torchao.utils:TorchAOBaseTensor", "aoquant", OLD_TORCHAO),
    ("transformers.quantizers.quantizer_torchao:TorchAoHfQuantizer", "aoquant.integrations.hf", OLD_HF),
]
# One process imports the libraries, and forks for each symbol; the message is on its standard output.
_WITHOUT = """
import importlib, os, sys
cases = [(*removed.split(":"), imported) for removed, imported in zip(sys.argv[1::2], sys.argv[2::2])]
modules = [importlib.import_module(module) for module, _, _ in cases]
for module, (_, name, imported) in zip(modules, cases):
    if (child := os.fork()) == 0:
        delattr(module, name)
        try:
            importlib.import_module(imported)
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_missing_private_symbol_is_one_clear_message() -> None:
    arguments = [argument for removed, imported, _ in REMOVED for argument in (removed, imported)]
    done = forked.python(_WITHOUT, *arguments)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(REMOVED)
    for line, (_, _, message) in zip(said, REMOVED, strict=True):
        assert re.search(message, line)


def test_every_warning_can_be_filtered_by_its_category() -> None:
    calls = [
        (file.name, node)
        for file in Path(aoquant.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
    ]
    assert calls and issubclass(aoquant.AoquantWarning, UserWarning)
    others = [(n, c.lineno) for n, c in calls if [ast.unparse(a) for a in c.args[1:]] != ["AoquantWarning"]]
    assert not others
