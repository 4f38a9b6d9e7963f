"""Recipes by name wherever a config goes, and a public table of them."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from support import forked
from torch import nn
from torchao.quantization import FqnToConfig

import aoquant
from aoquant import Int4WeightConfig, NVFP4WeightConfig, PackedTensor, QATConfig, quantize_
from aoquant.config import named
from aoquant.linear.prepared import QATLinear
from aoquant.recipes import get_recipe, mixed


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32))


def test_a_name_is_its_config_in_every_step() -> None:
    assert aoquant.get_recipe("nvfp4").make() == NVFP4WeightConfig()
    assert {r.name for r in aoquant.list_recipes()} >= {"nvfp4", "int4-g128", "quartet"}
    by_name = model()
    by_config, trained = copy.deepcopy(by_name), copy.deepcopy(by_name)
    quantize_(by_name, "int4-g64")
    quantize_(by_config, Int4WeightConfig(64))
    quantize_(trained, QATConfig("int4-g64", step="prepare"))
    assert trained[0].prepared.recipe.fprop_weight.name == "int4-g64"
    quantize_(trained, QATConfig("int4-g64", step="convert"))
    x = torch.randn(3, 128)
    assert torch.equal(by_name(x), by_config(x)) and torch.equal(by_name(x), trained(x))


@pytest.mark.parametrize("config", ["nvfp4-training", FqnToConfig({"0": "nvfp4-training"})])
def test_a_recipe_for_training_warns_where_it_does_not_train(config: object) -> None:
    """Its formats are packed all the same."""
    with pytest.warns(UserWarning, match="'nvfp4-training'"):
        quantize_(m := model(), config)
    assert isinstance(m[0].weight, PackedTensor)
    with warnings.catch_warnings(action="error"):
        quantize_(model(), aoquant.get_recipe("nvfp4-training").make())
        quantize_(m := model(), QATConfig("nvfp4-training"))
        quantize_(m, QATConfig("nvfp4-training", step="convert"))


def test_a_recipe_brings_its_training_options_and_those_given_win() -> None:
    assert QATConfig("quartet") == QATConfig(aoquant.get_recipe("quartet").make(), backward="quartet")
    assert QATConfig("mxfp4-quest").straight_through == "clipped"
    assert QATConfig("mxfp4-quest", straight_through="identity").straight_through == "identity"
    assert QATConfig("quartet", backward="quartet2").backward == "quartet2"
    assert QATConfig("quartet", step="convert").backward is None
    assert aoquant.get_recipe("quartet2").prepare(seed=3) == QATConfig("quartet2", seed=3)
    other = aoquant.get_recipe("quartet").prepare(backward=None, straight_through="identity")
    assert (other.backward, other.straight_through) == (None, "identity")


def test_names_as_values_of_fqn_to_config() -> None:
    m = model()
    with warnings.catch_warnings(action="ignore"):
        quantize_(m, FqnToConfig({"0": "nvfp4", "1": QATConfig("int8")}))
    assert m[0].weight.format == "nvfp4"
    assert isinstance(m[1], QATLinear)
    assert named(FqnToConfig({"a": "nvfp4", "b": None})).fqn_to_config == {"a": NVFP4WeightConfig(), "b": None}
    assert QATConfig(FqnToConfig({"a": "nvfp4"})).base_config.fqn_to_config == {"a": NVFP4WeightConfig()}


@pytest.mark.parametrize(
    "use", [lambda m: quantize_(m, "nvpf4"), lambda m: QATConfig("nvpf4"), lambda m: mixed("nvpf4")]
)
def test_a_wrong_name_lists_the_nearest(use) -> None:
    with pytest.raises(ValueError, match=r"'nvpf4'.*nvfp4"):
        use(model())


def test_bare_names_choose_layers_and_names_with_recipes_change_them() -> None:
    only, changed = model(), model()
    quantize_(only, mixed("nvfp4", ["1"]))
    assert type(only[0].weight) is nn.Parameter and only[1].weight.format == "nvfp4"
    quantize_(changed, mixed("nvfp4", ["1=int8-weight"]))
    assert [m.weight.format for m in changed] == ["nvfp4", changed[1].weight.format] and "8" in changed[1].weight.format
    with pytest.raises(ValueError, match="'=nvfp4'"):
        mixed("nvfp4", ["=nvfp4"])


@pytest.mark.parametrize(
    ("layers", "skip", "wanted"),
    [
        ([], ["0"], {"0": None, "_default": "nvfp4"}),
        (["0"], [], {"0": "nvfp4"}),
        (["0=int8"], [], {"0": "int8", "_default": "nvfp4"}),
        (["0=int8", "1"], ["2"], {"2": None, "0": "int8", "1": "nvfp4"}),
        (["re:a=b=int8"], [], {"re:a=b": "int8", "_default": "nvfp4"}),
    ],
)
def test_layers_and_skip_are_entries_of_one_config(
    layers: list[str], skip: list[str], wanted: dict[str, str | None]
) -> None:
    for step in ("make", "prepare"):
        made = {name: None if r is None else getattr(get_recipe(r), step)() for name, r in wanted.items()}
        found = mixed("nvfp4", layers, skip, make=lambda recipe, step=step: getattr(recipe, step)())
        assert list(found.fqn_to_config.items()) == list(made.items())
    assert mixed("nvfp4") == NVFP4WeightConfig()


@pytest.mark.parametrize(
    ("recipe", "layers", "skip", "name"),
    [
        ("nvfp4", ["0", "0"], [], "'0'"),
        ("nvfp4", ["0", "0=int8"], [], "'0'"),
        ("nvfp4", ["0"], ["0"], "'0'"),
        ("nvfp4", ["0="], [], "'0='"),
        ("nvfp4", ["1", ""], [], "''"),
        ("int4-g32-experts", ["0"], [], "int4-g32-experts"),
        ("int4-g32-experts", [], ["0"], "int4-g32-experts"),
    ],
)
def test_layers_that_are_named_twice_or_not_at_all_are_refused(
    recipe: str, layers: list[str], skip: list[str], name: str
) -> None:
    for step in ("make", "prepare"):
        with pytest.raises(ValueError, match=name):
            mixed(recipe, layers, skip, make=lambda r, step=step: getattr(r, step)())


def test_star_import_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from aoquant import *\n"
        "assert quantize_ and QATConfig and 'load_pretrained' not in globals()\n"
        "import aoquant\n"
        "try: aoquant.load_pretrained\n"
        "except ImportError as e: print(e)\n"
    )
    done = forked.python(code)
    assert done.returncode == 0, done.stderr
    assert re.search("checkpoints need transformers", done.stdout)
