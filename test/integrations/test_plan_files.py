"""Plan files of `aoquant choose`: `run` and `convert` read back the config that `choose_formats` returned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.moe_models import IDS, model_of
from torch import nn
from torchao.core.config import AOBaseConfig
from transformers import AutoModelForCausalLM

from aoquant import AoquantWarning, PackedTensor, choose_formats, cli, load_pretrained, quantize_
from aoquant.config import QATConfig
from aoquant.formats import list_formats
from aoquant.integrations import job
from aoquant.integrations.text import assets
from aoquant.planning.plan import Plan, plan
from aoquant.ptq.choose_formats import _configs
from aoquant.recipes import list_recipes, mixed

BY_HAND = [
    "intx3-g32",
    "intx3-g64-asym",
    "intx4-g32/",
    "gridflip-sided/nvfp4",
    "hadamard16+nvfp4",
    "fp8-row/fp8-row-vllm",
]


def taken(name: str) -> Any:
    """Return the config of a candidate; None for a name that `choose_formats` does not take."""
    try:
        return _configs([name])[name]
    except ValueError:
        return None


def read(path: Path) -> tuple[str, list[str]]:
    options = job.read_yaml(path)
    assert options.keys() == {"recipe", "layers"}
    return options["recipe"], options["layers"]


def test_every_candidate_is_read_back_as_it_was_chosen(tmp_path: Path) -> None:
    names = [*BY_HAND, *(r.name for r in list_recipes()), *list_formats()]
    configs = {name: config for name in names if (config := taken(name)) is not None}
    assert {*BY_HAND, "int4-g32", "int8-weight", "torchao-int8"} <= configs.keys()
    assert not {"int4-g32-experts", "mxfp4-no-attention", "vllm-fp8-kv-fp8"} & configs.keys()
    for name, config in configs.items():
        layers = {"a": name, "b": "int8-weight", "c": name, "d": "intx3-g32"}
        job.write_plan(layers, tmp_path / "plan.yaml")
        back: Any = mixed(*read(tmp_path / "plan.yaml"))
        got: dict[str, AOBaseConfig] = back.fqn_to_config
        for layer, of in (("a", config), ("c", config), ("b", configs["int8-weight"]), ("d", configs["intx3-g32"])):
            assert got.get(layer, got["_default"]) == of, name
        job.write_plan({"a": name, "b": name}, tmp_path / "plan.yaml")
        assert mixed(*read(tmp_path / "plan.yaml")) == config


@pytest.fixture(scope="module")
def moe() -> tuple[Any, Any]:
    model = model_of("mixtral").eval()
    return model, choose_formats(model, ["intx3-g32", "int4-g32", "int8-weight"], batches=[IDS], bits=5.5)


def configs_of(found: Plan) -> dict[str, Any]:
    return {c.fqn: c.config for c in (*found.layers, *found.experts)}


def test_a_plan_of_experts_means_the_same_in_python_and_in_a_file(moe: tuple[Any, Any], tmp_path: Path) -> None:
    model, choice = moe
    job.write_plan(choice.layers, tmp_path / "plan.yaml")
    recipe, layers = read(tmp_path / "plan.yaml")
    wanted = configs_of(plan(model, choice, None))
    assert len(wanted) == 12 and len({repr(c) for c in wanted.values()}) > 1
    assert configs_of(plan(model, mixed(recipe, layers), None)) == wanted
    trained = configs_of(plan(model, mixed(recipe, layers, make=lambda r: r.prepare()), None))
    assert {fqn: c.base_config for fqn, c in trained.items() if isinstance(c, QATConfig)} == wanted


def test_convert_reads_a_plan(moe: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, choice = moe
    model.save_pretrained(tmp_path / "float")
    job.write_plan(choice.layers, tmp_path / "plan.yaml")
    places = ["--model", str(tmp_path / "float"), "--out"]
    cli.main(["convert", str(tmp_path / "plan.yaml"), *places, str(tmp_path / "out")])
    assert "12 layers quantised" in capsys.readouterr().out
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype="auto").eval()
    quantize_(whole, choice)
    with torch.no_grad():
        assert torch.equal(load_pretrained(tmp_path / "out").eval()(IDS).logits, whole(IDS).logits)
    # an option typed beside the file wins over it
    cli.main(["convert", "--config", str(tmp_path / "plan.yaml"), *places, str(tmp_path / "one"), "--recipe", "int8"])
    formats = {w.format for _, w in load_pretrained(tmp_path / "one").named_parameters() if hasattr(w, "format")}
    assert "int8-row" in formats


def test_layers_that_are_skipped_stay_float_in_python_and_by_the_file(moe: tuple[Any, Any], tmp_path: Path) -> None:
    (model, everything), skip = moe, ["re:.*o_proj"]
    choice = choose_formats(model, ["intx3-g32", "int8-weight"], batches=[IDS], bits=5.5, skip=skip)
    assert everything.layers.keys() - choice.layers.keys() == {n for n in everything.layers if "o_proj" in n}
    job.write_plan(choice.layers, tmp_path / "plan.yaml", skip)
    model.save_pretrained(tmp_path / "float")
    places = ["--model", str(tmp_path / "float"), "--out", str(tmp_path / "out")]
    cli.main(["convert", str(tmp_path / "plan.yaml"), *places])
    converted = load_pretrained(tmp_path / "out")
    left = {n: w for n, w in converted.named_parameters() if "o_proj" in n}
    assert len(left) == 2 and all(type(w) is nn.Parameter for w in left.values())
    quantised = {n for n, w in converted.named_parameters() if isinstance(w, PackedTensor)}
    quantize_(whole := copy.deepcopy(model), choice)
    assert quantised == {n for n, w in whole.named_parameters() if isinstance(w, PackedTensor)} != set()
    with pytest.warns(AoquantWarning, match="nowhere"):
        choose_formats(model, ["int4-g32"], batches=[IDS], bits=5.5, skip=["nowhere"])


@pytest.mark.slow
def test_choose_writes_what_convert_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{word} " }}\n' for word in ("return a list " * 200,)))
    text, plan_file = ["--calibrate", str(tmp_path / "text.jsonl")], tmp_path / "plan.yaml"
    some = [*text, "--samples", "2", "--length", "32"]
    names = ["--candidates", "intx3-g32", "int8-weight", "--bits", "4.6"]
    cli.main(["choose", "--model", str(assets()), *names, *some, "--out", str(plan_file)])
    assert {"intx3-g32/", "int8-weight"} == {read(plan_file)[0], *(e.rpartition("=")[2] for e in read(plan_file)[1])}
    cli.main(
        ["convert", str(plan_file), "--model", str(assets()), "--out", str(tmp_path / "o"), "--ptq", "clip", *some]
    )
    assert "written" in capsys.readouterr().out
    formats = [w.format for _, w in load_pretrained(tmp_path / "o").named_parameters() if hasattr(w, "format")]
    assert len(formats) == 28 and {*formats} == {"intx3-g32", "int8-row"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("recipe: int4-g32\nsteps: 4\nbatch-size: 2\n", r"plan.yaml: convert has no option batch_size, steps; "),
        ("recipe: int4-g32\nlayer: [a=int8]\n", "plan.yaml: run has no option layer"),
        (None, "must be a YAML file that exists"),
    ],
)
def test_a_file_that_convert_cannot_use(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "plan.yaml").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["convert", str(tmp_path / "plan.yaml"), "--model", "nowhere", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_not_there_is_refused_before_anything_is_scored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is no folder"):
        cli.choose(assets(), ("int4-g32",), 5.0, tmp_path / "text.txt", out=tmp_path / "nowhere" / "plan.yaml")


@pytest.mark.parametrize(
    ("arguments", "path", "rest"),
    [
        ("a.yaml --steps 2", "a.yaml", "--steps 2"),
        ("--config a.yaml", "a.yaml", ""),
        ("--steps 2 --config a.yaml --out o", "a.yaml", "--steps 2 --out o"),
        ("--steps 2 --config=a=b.yaml --out o", "a=b.yaml", "--steps 2 --out o"),
        ("--out a.yaml", None, "--out a.yaml"),
        ("", None, ""),
    ],
)
def test_a_file_of_options_is_taken_from_among_the_others(arguments: str, path: str | None, rest: str) -> None:
    given = arguments.split()
    taken = cli._take_config(given)
    assert (taken, given) == (None if path is None else Path(path), rest.split())
    if path is not None:
        with pytest.raises(ValueError, match="--config"):
            cli._take_config(["--steps", "2", "--config"])
