"""Refuse folders whose model cannot be what its user means, before anything is trained, scored or calibrated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from aoquant import cli
from aoquant.integrations.job import assets, check_for_engine, load_float


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def _an_empty_tokenizer(folder: Path) -> None:
    """Leave what transformers makes an empty one of."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}')


def _tokenizer_of_another_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"<more {i}>": len(tokenizer) + i for i in range(len(tokenizer))}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _a_layer_more(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))


def _a_weight_less(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})


def _truncated(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


UNFIT: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (_no_tokenizer, "holds no tokenizer"),
    "an empty tokenizer": (_an_empty_tokenizer, "holds no tokenizer"),
    "another model's tokenizer": (_tokenizer_of_another_model, "rows"),
    "a layer more": (_a_layer_more, r"model\.layers\.\d+\..*"),
    "a weight less": (_a_weight_less, r"model\.layers\.0\.mlp\.up_proj\.weight"),
    "truncated": (_truncated, "cannot load"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(assets(), tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "*.jsonl", "*.txt*", "*.xz"))
    return tmp_path / "model"


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_is_not_whole_is_refused_with_its_folder(case: str, folder: Path) -> None:
    spoil, says = UNFIT[case]
    load_float(str(folder), "float32", "cpu")
    spoil(folder)
    with pytest.raises(ValueError, match=says) as refused:
        load_float(str(folder), "float32", "cpu")
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("command", ["run", "eval", "convert"])
def test_commands_refuse_it_in_one_line(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _no_tokenizer(folder)
    text = folder.parent / "text.txt"
    text.write_text("words and more words\n" * 999)
    (folder.parent / "test.jsonl").write_text('{"page": "words"}\n')
    out = folder.parent / "out"
    given = {
        "run": ["--model", folder, "--train-text", text, "--wikitext", text.parent, "--out", out, "--device", "cpu"],
        "eval": [folder, "--wikitext", text.parent, "--device", "cpu"],
        "convert": ["--model", folder, "--recipe", "int8", "--ptq", "gptq", "--calibrate", text, "--out", out],
    }
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, *map(str, given[command])])
    assert stopped.value.code == 2 and "holds no tokenizer" in capsys.readouterr().err
    assert not (out / "config.json").exists()


def test_a_file_in_place_of_its_folder_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"give {folder}$"):
        load_float(str(folder / "config.json"), "float32", "cpu")


def test_an_engines_tokenizer_is_missed_before_a_folder_is_converted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_for_engine(folder, "gguf")
    check_for_engine(folder, "compressed-tensors")
    assert not capsys.readouterr().err
    _no_tokenizer(folder)
    with pytest.raises(ValueError, match=rf"{folder} has no tokenizer\.json"):
        check_for_engine(folder, "gguf")
    check_for_engine(folder, "compressed-tensors")
    assert f"{folder} holds no tokenizer" in capsys.readouterr().err
