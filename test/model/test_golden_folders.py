"""Load what earlier commits wrote, bit-equal, for ever: folders, exports, states, runs stopped half-way, pickles.

Every archive of test/golden was made by `test/golden/make.py` at the commit that its name gives, with what was expected
then. No archive is ever made again: a later commit adds its own. Names of modules come from the archives alone, so that
these tests hold wherever code moves to.
"""

from __future__ import annotations

import importlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import golden_cases as cases
from support.golden_cases import IDS
from torch import Tensor, nn
from torchao.core.config import config_from_dict
from transformers import AutoModelForCausalLM

import aoquant
from aoquant import QATConfig, quantize_

GOLDEN = Path(__file__).parents[1] / "golden"
ARCHIVES = sorted(GOLDEN.glob("folders-*.tar.xz"))


class Golden:
    """Return the folder of one unpacked archive."""

    def __init__(self, archive: Path, root: Path) -> None:
        self.root = root
        with tarfile.open(archive) as packed:
            packed.extractall(root, filter="data")
        self.expected: dict[str, Any] = json.loads((root / "expected.json").read_text())
        self.logits: dict[str, Tensor] = load_file(root / "logits.safetensors")


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda archive: archive.name.removesuffix(".tar.xz"))
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden(request.param, tmp_path_factory.mktemp("golden"))


# what these say of recipes that run on a GPU alone is meant
pytestmark = pytest.mark.filterwarnings("ignore::aoquant.AoquantWarning")


@pytest.fixture(autouse=True)
def same_arithmetic(one_thread: None) -> None:
    """Run on one thread, as the archives were made: models are too small for more."""


def assert_same(got: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert got.keys() == expected.keys(), what
    differing = [name for name, value in expected.items() if got[name] != value]
    assert not differing, f"{what}: {differing}"


def without_outputs_of_the_cpu(name: str, *digests: dict[str, str]) -> list[dict[str, str]]:
    """Return the digests; without those of outputs where these depend on the CPU."""
    return [{k: v for k, v in d.items() if name not in cases.OF_THE_CPU or not k.startswith("output")} for d in digests]


def read(file: Path, *, weights_only: bool = True) -> Any:
    return torch.load(file, weights_only=weights_only)


def test_an_archive_holds_every_recipe_and_is_small(golden: Golden) -> None:
    """Every recipe of its commit has its keys there, and its folder unless it can be packed on a GPU alone."""
    assert {*golden.expected["keys"]} - {*golden.expected["recipes"]} == {*cases.NOT_PACKED_ON_CPU, *cases.NOT_STORED}
    assert {*golden.expected["keys"]} <= {*cases.RECIPES}
    assert all(archive.stat().st_size < 600_000 for archive in ARCHIVES)


def test_checkpoints_load_with_equal_codes_and_logits(golden: Golden) -> None:
    """Every recipe that a CPU can pack; those that run on a GPU alone are compared by their codes."""
    failed = {}
    for recipe, expected in golden.expected["recipes"].items():
        model = aoquant.load_pretrained(golden.root / "recipes" / recipe)
        try:
            assert_same(cases.state(model), expected["state"], recipe)
            if "outputs" in expected:
                assert_outputs(golden, recipe, model, expected["outputs"])
        except AssertionError as error:  # one recipe hides no other
            failed[recipe] = str(error)
    assert not failed


def test_transformers_loads_them_too(golden: Golden) -> None:
    for recipe in ("int4-g32", "nvfp4", "mxfp4-experts", "nvfp4-wush", "torchao-fp8"):
        model = AutoModelForCausalLM.from_pretrained(golden.root / "recipes" / recipe, dtype=torch.bfloat16)
        assert_same(cases.state(model), golden.expected["recipes"][recipe]["state"], recipe)


def assert_outputs(golden: Golden, name: str, model: Any, expected: dict[str, str]) -> None:
    if name in cases.RAISE_IN_TORCH_2_11 and torch.__version__ < "2.12":
        with pytest.raises(RuntimeError, match="per-tensor scaling for CPU"):
            cases.outputs(model, IDS)
        return
    seen = cases.outputs(model, IDS)
    if name in cases.OF_THE_CPU:
        return torch.testing.assert_close(seen["model"], golden.logits[name], rtol=2.0**-6, atol=2.0**-6)
    assert torch.equal(seen["model"], golden.logits[name]), name
    assert_same({layer: cases.digest(y) for layer, y in seen.items()}, expected, name)


def test_state_dicts_have_the_same_keys(golden: Golden) -> None:
    """Names, dtypes and shapes of prepared and of converted models, of every recipe."""
    for recipe, expected in golden.expected["keys"].items():
        if "prepared" in expected:
            model = cases.prepared(recipe)
            assert_same(cases.keys(model), expected["prepared"], f"{recipe}, prepared")
            quantize_(model, QATConfig(step="convert"))
            assert_same(cases.keys(model), expected["converted"], f"{recipe}, converted")
        elif "converted" in expected:
            assert_same(cases.keys(cases.converted(recipe)), expected["converted"], f"{recipe}, converted")


def test_training_goes_on_with_equal_losses(golden: Golden) -> None:
    """From prepared state_dicts: scales of every origin, histories of delayed scaling, random states."""
    for name, expected in golden.expected["trained"].items():
        model = cases.Student()
        quantize_(model, cases.TRAINED[name]())
        model.load_state_dict(read(golden.root / "trained" / f"{name}.pt"))
        assert_same(cases.state(model), expected["state"], name)
        assert cases.train(model, model, 2, 2) == pytest.approx(
            expected["after"], rel=1e-3 if name in cases.OF_THE_CPU else 0, abs=0
        )
        end = cases.state(model)
        assert end.keys() == expected["end"].keys()
        if name not in cases.OF_THE_CPU:
            # the gradient of a learned scale is a sum over a matrix, in the order of the CPU
            kept = [key for key in end if "learned" not in name or "_scale" not in key]
            assert_same({k: end[k] for k in kept}, {k: expected["end"][k] for k in kept}, name)


def test_converted_state_dicts_load_into_plain_models(golden: Golden) -> None:
    for name, expected in golden.expected["trained"].items():
        model = cases.Student()
        model.load_state_dict(read(golden.root / "converted" / f"{name}.pt"), assign=True)
        assert_same(*without_outputs_of_the_cpu(name, cases.seen_of(model), expected["converted"]), name)


def test_masters_go_on_with_equal_losses(golden: Golden) -> None:
    for name, expected in golden.expected["masters"].items():
        model, masters = cases.masters_of(name)
        masters.load_state_dict(read(golden.root / "masters" / f"{name}.pt"))
        assert_same(cases.state(masters), expected["state"], name)
        assert cases.train(model, masters, 2, 2) == expected["after"], name
        assert_same(cases.state(masters), expected["end"], name)


def test_exports_are_read_back(golden: Golden) -> None:
    """compressed-tensors by `load_pretrained`, GGUF by transformers; ModelOpt's, for engines, by safetensors."""
    for name, expected in golden.expected["exports"].items():
        format, _, recipe = name.partition("/")
        folder = golden.root / "exports" / format / recipe
        if format == "compressed-tensors":
            model = aoquant.load_pretrained(folder)
            assert_same(cases.state(model), expected["state"], name)
            assert_outputs(golden, name, model, expected["outputs"])
        elif format == "gguf":
            file = next(folder.glob("*.gguf"))
            model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name)
            assert_same(cases.state(model), expected["state"], name)
        else:
            tensors = load_file(folder / "model.safetensors")
            assert_same({n: cases.digest(t) for n, t in tensors.items()}, expected["state"], name)


def test_a_trainer_that_was_stopped_half_way_ends_where_it_would_have(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(golden.root / "trainer", "run")
    run = cases.trainer(Path("run"))
    run.train(resume_from_checkpoint="run/checkpoint-2")
    expected = golden.expected["trainer"]
    assert [entry["loss"] for entry in run.state.log_history if "loss" in entry] == expected["losses"]
    assert_same(cases.state(run.model), expected["end"], "trainer")


def test_pickles_load_and_compute_the_same(golden: Golden) -> None:
    """Whole modules, prepared and packed, tensors, stacks of experts, configs, formats and reports."""
    for name, expected in golden.expected["pickles"].items():
        thing = read(golden.root / "pickles" / f"{name}.pt", weights_only=False)
        if name == "formats":  # of that time; others came since
            assert thing == {known: aoquant.get_format(known) for known in thing}
        elif name in cases.THINGS:
            assert thing == cases.THINGS[name](), name
        elif isinstance(thing, nn.Module | Tensor):
            assert_same(*without_outputs_of_the_cpu(name, cases.seen_of(thing), expected), name)
        else:
            assert str(thing), name


def test_tensors_load_as_safely_as_torch_can(golden: Golden) -> None:
    """weights_only: a packed tensor and a stack of experts."""
    for name in ("packed tensor", "stack mxfp4-experts", "stack int4-g32-experts"):
        thing = read(golden.root / "pickles" / f"{name}.pt")
        assert_same(cases.seen_of(thing), golden.expected["pickles"][name], name)


def test_unpickled_prepared_layers_convert_and_train(golden: Golden) -> None:
    for name in cases.TRAINED:
        if f"prepared {name}" not in golden.expected["pickles"]:
            continue
        model = read(golden.root / "pickles" / f"prepared {name}.pt", weights_only=False)
        cases.train(model, model, 0, 1)
        y = cases.outputs(model, cases.data(5))["model"]
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(cases.outputs(model, cases.data(5))["model"], y), name


def test_every_name_in_a_pickle_is_found(golden: Golden) -> None:
    """The list was made from the pickles' own opcodes; old names stay importable, whatever they are called now."""
    missing = [
        f"{module}.{name}"
        for module, name in golden.expected["globals"]
        if not hasattr(importlib.import_module(module), name)
    ]
    assert not missing
    found: set[tuple[str, str]] = set()
    for file in golden.root.rglob("*.pt"):
        found |= {entry for entry in cases.globals_of(file) if entry[0].split(".")[0] == "aoquant"}
    assert sorted(found) == [tuple(entry) for entry in golden.expected["globals"]]  # the list is whole


def test_every_type_in_a_config_is_read(golden: Golden) -> None:
    """`_type`s of all config.json, and the JSON of every config class."""
    types = set().union(*(cases.types_in(file) for file in golden.root.rglob("config.json")))
    assert sorted(types) == golden.expected["types"]
    for name, written in golden.expected["configs"].items():
        assert config_from_dict(written) == cases.CONFIGS[name], name
