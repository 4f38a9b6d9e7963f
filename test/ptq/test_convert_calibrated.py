"""A model folder is calibrated on a file of text as the model in memory is, after a kill too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.export_cases import byte_level
from support.killed import interrupted
from support.meters import is_mapped
from support.models import llama
from tokenizers.processors import TemplateProcessing

from aoquant import CalibrateConfig, calibrate_ptq, cli
from aoquant.export import check
from aoquant.files import atomic
from aoquant.integrations import calibrated, stream
from aoquant.integrations.calibrated import calibration, convert_calibrated
from aoquant.integrations.hf import load_pretrained, save_pretrained
from aoquant.integrations.job import engine_format
from aoquant.linear.tensor import same_bits
from aoquant.ptq import gptq
from aoquant.recipes import list_recipes, mixed

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens for K")
HOW: dict[str, Any] = {"samples": 6, "length": 48, "dtype": "auto"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = byte_level()
    torch.manual_seed(0)
    llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = (json.dumps({"text": " ".join(f"{i * j} sheep" for j in range(40))}) for i in range(9))
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_folder_is_that_of_the_model_in_memory_and_a_kill_loses_no_block(folder: Path, monkeypatch: Any) -> None:
    model, text, config = folder / "model", folder / "text.jsonl", CalibrateConfig("int4-g32")
    whole, tokenizer, batches = calibration(model, text, 6, 48, "cpu", "auto")
    wanted = calibrate_ptq(whole, batches, config)
    save_pretrained(whole, folder / "wanted", tokenizer)

    calls = interrupted(monkeypatch, gptq, "factor", 6)  # in the second block
    out = folder / "out"
    with pytest.raises(KeyboardInterrupt):
        convert_calibrated(model, config, out, text, **HOW)
    assert not out.exists() and len(list((folder / "out.calibration").iterdir())) == 1
    assert convert_calibrated(model, config, out, text, **HOW) == wanted
    assert len(calls) == 6 + 4
    assert files(out) == files(folder / "wanted")
    assert {p.name for p in folder.iterdir()} == {"model", "text.jsonl", "wanted", "out"}
    loaded = dict(load_pretrained(out).named_parameters())
    packed = [(n, p) for n, p in whole.named_parameters() if hasattr(p, "__tensor_flatten__")]
    assert len(packed) == 14 and all(same_bits(p, loaded[n]) for n, p in packed)


def test_what_is_refused_leaves_nothing(folder: Path) -> None:
    given = folder / "model", CalibrateConfig("int4-g32"), folder / "out", folder / "text.jsonl"
    with pytest.raises(ValueError, match="samples must be at least 1"):
        convert_calibrated(*given, **HOW | {"samples": 0})
    assert {p.name for p in folder.iterdir()} == {"model", "text.jsonl"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--length 4000", "length must be at most the model's max_position_embeddings = 64, got 4000"),
        ("--length 65", "= 64, got 65"),
        ("--length 0", "length must be at least 1, got 0"),
        ("--length -3", "length must be at least 1, got -3"),
        ("--samples 0", "samples must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "choose"])
def test_a_length_beyond_the_positions_is_refused(
    command: str, options: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(folder / "model"), "--calibrate", str(folder / "text.jsonl"), *options.split()]
    if command == "convert":
        given += ["--recipe", "int4-g32", "--ptq", "gptq", "--out", str(folder / "out")]
    else:
        given += ["--candidates", "int4-g32", "int8-weight", "--bits", "6"]
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, *given])
    assert stopped.value.code == 2 and said in capsys.readouterr().err
    assert {p.name for p in folder.iterdir()} == {"model", "text.jsonl"}


def test_by_default_sequences_are_as_long_as_the_positions(folder: Path) -> None:
    for longest, length in ((2048, 64), (32, 32)):
        given = folder / "model", folder / "text.jsonl", 6, None, "cpu", "auto"
        assert calibration(*given, longest=longest)[2][0]["input_ids"].shape == (6, length)


def test_weights_stay_in_their_files(folder: Path) -> None:
    """On Linux, weights that transformers loads as they are stored are mapped: no memory of the process holds them."""
    model, _, _ = calibration(folder / "model", folder / "text.jsonl", 6, 48, "cpu", "auto")
    assert all(is_mapped(p, folder) for p in model.parameters())


@pytest.mark.parametrize("recipe", ["vllm-w4a16-g32", "vllm-nvfp4", "gguf-q4_0"])
def test_a_folder_for_the_engine_and_its_command(recipe: str, folder: Path, capsys: Any) -> None:
    """Also of NVFP4 whose siblings share an outer scale that calibration finds."""
    out, served, text = folder / "out", folder / "served", folder / "text.jsonl"
    given: dict[str, Any] = {"ptq": "gptq", "calibrate": text, "samples": 6, "length": 48}
    cli.convert(folder / "model", recipe, out, **given, export=served)
    said = capsys.readouterr().out
    assert ("llama-server" if recipe.startswith("gguf") else f"vllm serve {served}") in said and any(served.iterdir())
    with pytest.raises(ValueError, match="served exists"):
        cli.convert(folder / "model", recipe, folder / "again", **given, export=served)
    assert not (folder / "again").exists()


def test_convert_says_what_export_of_its_folder_would(folder: Path, capsys: Any) -> None:
    for recipe, fits in (("vllm-nvfp4", True), ("int4-g32", False)):
        cli.convert(folder / "model", recipe, folder / recipe, ptq="gptq", calibrate=folder / "text.jsonl", samples=6)
        said = capsys.readouterr().out.partition("written: ")[2]
        assert ("aoquant export" in said) is fits and ("self_attn.q_proj" in said) is not fits


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a layer is encoded or a block is calibrated."""

    def works(*_: object, **__: object) -> None:
        raise AssertionError("a weight was converted")

    monkeypatch.setattr(stream, "_fill", works)
    monkeypatch.setattr(calibrated, "calibrate_ptq", works)


FLOAT = {"model", "text.jsonl"}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("ptq", [False, True])
@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("int4-g32", {}, "self_attn.q_proj: no scheme holds int4-g32"),
        ("nvfp4", {}, "self_attn.q_proj: its outer scale is no power of two"),
        ("vllm-w4a16-g32", {"embeddings": True}, "embed_tokens: it is an embedding that is tied to another layer"),
        ("vllm-nvfp4", {"embeddings_recipe": "vllm-w4a16-g32"}, "an embedding that is tied to another layer"),
        ("gguf-q4_0", {"layers": ("re:.*q_proj=fp8-row/",)}, "q_proj: no ggml type holds fp8-row"),
    ],
)
def test_an_export_that_does_not_fit_is_refused_before_the_work(
    recipe: str, options: dict[str, Any], said: str, ptq: bool, folder: Path
) -> None:
    llama(vocab_size=len(byte_level()), tie_word_embeddings=True).save_pretrained(folder / "model")
    how: dict[str, Any] = {"ptq": "gptq", "calibrate": folder / "text.jsonl"} if ptq else {}
    if recipe == "vllm-nvfp4" and not ptq:
        said = "its config has static activation scales"
    with pytest.raises(ValueError, match=re.escape(said)):
        cli.convert(folder / "model", recipe, folder / "out", **options, **how, export=folder / "served")
    assert {p.name for p in folder.iterdir()} == FLOAT


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("ptq", [False, True])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"out": "text.jsonl/out"}, "text.jsonl is no folder"),
        ({"out": "locked/out"}, "nothing can be made in "),
        ({"export": "text.jsonl/served"}, "text.jsonl is no folder"),
        ({"export": "locked/a/served"}, "nothing can be made in "),
        ({"export": "out"}, "out will hold --out "),
        ({"export": "a", "out": "a/b"}, "a will hold --out "),
        ({"max_shard_size": "0"}, "max_shard_size is a size above 0"),
        ({"device": "cuda:77"}, "device must be one that torch finds here"),
        ({"recipe": "torchao-fp8-int4"}, "Int4PreshuffledTensor"),
    ],
)
def test_what_would_end_a_conversion_late_is_refused_before_the_work(
    options: dict[str, str], said: str, ptq: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(vocab_size=len(byte_level()), hidden_size=128, intermediate_size=128).save_pretrained(folder / "model")
    (folder / "locked").mkdir()
    access = atomic.os.access  # root may write anywhere
    monkeypatch.setattr(atomic.os, "access", lambda path, mode: Path(path).name != "locked" and access(path, mode))
    how: dict[str, Any] = {"ptq": "gptq", "calibrate": folder / "text.jsonl"} if ptq else {}
    given: dict[str, Any] = {"recipe": "vllm-w4a16-g32", "out": "out", **options}
    for name in {"out", "export"} & given.keys():
        given[name] = folder / given[name]
    with pytest.raises(ValueError, match=re.escape(said)):
        cli.convert(folder / "model", **given, **how)
    assert {p.name for p in folder.iterdir()} == FLOAT | {"locked"}


@pytest.mark.parametrize("recipe", [r.name for r in list_recipes() if not r.experts])
def test_a_plan_is_refused_where_its_export_is(recipe: str, folder: Path) -> None:
    """Round to the nearest by every recipe: the check before refuses no conversion that export takes."""
    config = mixed(recipe)
    layout, size = engine_format(config), {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128}
    llama(vocab_size=len(byte_level()), **size).save_pretrained(folder / "model")

    def refused(check: Any, *given: Any, **how: Any) -> bool:
        try:
            check(*given, **how)
        except ValueError:
            return True
        return False

    how: dict[str, Any] = {"dtype": "auto", "skip_incompatible": False}
    foreseen = refused(stream.check_export, folder / "model", config, layout, calibrated=False, **how)
    late = refused(stream.convert_checkpoint, folder / "model", config, folder / "out") or refused(
        check, folder / "out", layout
    )
    assert foreseen == late
    refused(stream.check_export, folder / "model", config, layout, calibrated=True, **how)  # raises nothing else


def test_a_refused_export_says_that_the_converted_folder_is_there(folder: Path) -> None:
    """Siblings' scales of the whole weight differ, which only the values say."""
    with pytest.raises(ValueError, match=r"(?s)out is written, and whole; .*served is not: .*self_attn"):
        cli.convert(folder / "model", "fp8-tensor/", folder / "out", export=folder / "served")
    assert load_pretrained(folder / "out") is not None and not (folder / "served").exists()


def test_embeddings_alone_are_converted(folder: Path) -> None:
    given = folder / "model", CalibrateConfig(mixed("int8-weight", ["model.embed_tokens"])), folder / "out"
    report = convert_calibrated(*given, folder / "text.jsonl", **HOW)
    assert [row.layer for row in report.rows] == ["model.embed_tokens"] and (folder / "out").is_dir()


def test_calibration_begins_as_the_tokenizer_begins_documents(folder: Path) -> None:
    """<bos> stands before each document and each sequence, where the tokenizer adds one."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"bos_token": "th"})
    bos = tokenizer.bos_token_id
    assert bos != tokenizer.eos_token_id
    template = TemplateProcessing("th $A", special_tokens=[("th", bos)])
    for adds in (False, True):
        if adds:
            tokenizer.backend_tokenizer.post_processor = template
        tokenizer.save_pretrained(folder / "model")
        batches = calibration(folder / "model", folder / "text.jsonl", 40, 48, "cpu", "auto")[2]
        ids = torch.cat([batch["input_ids"] for batch in batches])
        assert bool((ids[:, 0] == bos).all()) is adds
        at = ids.flatten().eq(tokenizer.eos_token_id).nonzero().flatten()
        assert len(at) and all((int(ids.flatten()[i + 1]) == bos) is adds for i in at if i + 1 < ids.numel())
