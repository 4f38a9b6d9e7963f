"""Exporting as an act: from a model or a checkpoint folder, in shards, interrupted, refused, skipped, from the command
line.
"""

from __future__ import annotations

import importlib
import shutil
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.export_cases import byte_level, converted, llama, packed
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig

from aoquant import Int4WeightConfig, PackedWeightConfig, QATConfig, cli, export, quantize_, save_pretrained
from aoquant.export import filled_folder, hf_folder
from aoquant.export.contents import values
from aoquant.export.source import of_checkpoint
from aoquant.export.targets import Stored
from aoquant.export.weights import Weight
from aoquant.integrations.hf import load_pretrained
from aoquant.linear.tensor import PackedTensor


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_pretrained(converted("intx4-g128", tied=True), path, max_shard_size="60KB")
    return path


def test_a_folder_and_its_model_give_the_same_tensors(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--format", "compressed-tensors", "--out", str(tmp_path / "a"), "--max-shard-size", "80KB"]
    cli.main(["export", str(saved), *options])
    assert "written" in capsys.readouterr().out
    export(load_pretrained(saved), tmp_path / "b", max_shard_size="80KB")
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert a.keys() == b.keys() and len([n for n in a if n.endswith(".safetensors")]) > 2
    assert {n for n in a if a[n] != b[n]} <= {"config.json", "generation_config.json"}
    assert "lm_head.weight" not in load_all(tmp_path / "a")


def load_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


def test_an_interrupted_export_continues(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(saved, tmp_path / "whole")
    made: list[str] = []

    def counted(weight: Weight) -> torch.Tensor:
        made.append(weight.name)
        if len(made) == 4:
            raise KeyboardInterrupt
        return values(weight)

    monkeypatch.setattr(filled_folder, "FLUSHED", 1)
    monkeypatch.setattr(hf_folder, "values", counted)
    with pytest.raises(KeyboardInterrupt):
        export(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").is_dir()
    assert not (tmp_path / ".out.partial" / "config.json").exists()
    with (tmp_path / ".out.partial" / "journal").open("a") as journal:
        journal.write('{"half of a li')  # as a kill leaves it
    export(saved, tmp_path / "out")
    assert made[:3] == list(dict.fromkeys(made))[:3] and made.count(made[0]) == 1 and made.count(made[3]) == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()


def test_another_export_starts_anew(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(filled_folder, "FLUSHED", 1)
        patched.setattr(hf_folder, "values", stop)
        with pytest.raises(KeyboardInterrupt):
            export(saved, tmp_path / "out")
    skip = ["model.layers.0.mlp.down_proj"]
    export(saved, tmp_path / "out", skip=skip)
    export(saved, tmp_path / "fresh", skip=skip)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_an_interrupted_export_is_continued_by_the_same_alone(saved: Path, tmp_path: Path) -> None:
    source = of_checkpoint(saved)
    copied = of_checkpoint(Path(shutil.copytree(saved, tmp_path / "copied")))
    other = replace(source, config={**source.config, "rope_theta": 5.0})
    same = hf_folder._identity(source, "compressed-tensors", ["a"], "5GB")
    assert same == hf_folder._identity(of_checkpoint(saved), "compressed-tensors", ("a",), "5GB")
    others = [
        hf_folder._identity(copied, "compressed-tensors", ["a"], "5GB"),
        hf_folder._identity(other, "compressed-tensors", ["a"], "5GB"),
        hf_folder._identity(source, "modelopt", ["a"], "5GB"),
        hf_folder._identity(source, "compressed-tensors", ["b"], "5GB"),
        hf_folder._identity(source, "compressed-tensors", ["a"], "4GB"),
    ]
    assert same not in others
    assert hf_folder._identity(replace(source, folder=None), "modelopt", [], "5GB") is None  # values have no name


@pytest.mark.parametrize("format", ["compressed-tensors", "gguf"])
def test_one_layer_is_in_memory(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """When a layer of a folder is repacked, the codes of the one before are gone."""
    where = "aoquant.export.gguf_file" if format == "gguf" else "aoquant.export.compressed"
    module = importlib.import_module(where)
    real = module.store
    alive: list[weakref.ref[torch.Tensor]] = []
    most = []

    def watched(p: PackedTensor) -> Stored:
        if not p.qdata.is_meta:
            alive.append(weakref.ref(p.qdata))
            most.append(sum(ref() is not None for ref in alive))
        return real(p)

    monkeypatch.setattr(module, "store", watched)
    source = saved
    if format == "gguf":
        source = tmp_path / "saved"
        save_pretrained(converted("q4_0"), source, byte_level())
    export(source, tmp_path / "out", format)
    assert len(most) == 14 and max(most) <= 2  # a local name may outlive its use until it is bound again


def test_skipped_layers_are_floats(tmp_path: Path) -> None:
    model = converted("intx4-g128")
    out = export(model, tmp_path / "out", skip=["*.down_proj", "re:.*layers\\.0\\.self_attn\\.q_proj"])
    tensors = load_file(out / "model.safetensors")
    for name in ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"):
        assert torch.equal(tensors[f"{name}.weight"], packed(model)[name].dequantize())
        assert name in (out / "config.json").read_text()
    with pytest.raises(ValueError, match="'q_porj' is no quantised layer's name"):
        export(model, tmp_path / "other", skip=["q_porj"])


def of(config: Any) -> Any:
    model = llama()
    quantize_(model, config)
    return model


INT4, FP8 = PackedWeightConfig("intx4-g32"), PackedWeightConfig("fp8-row", "fp8-row-vllm")
MIXED = FqnToConfig({r"re:.*down_proj": Int4WeightConfig(128), "_default": INT4})
HIDDEN = PackedWeightConfig("hadamard32-inverse+mxfp4", "hadamard32+mxfp4")
REFUSED: dict[str, tuple[Any, str, str]] = {
    "two layers": (lambda: of(MIXED), "compressed-tensors", r"(?s)layers\.\*\.mlp\.down_proj: .*intx4-g128-asym/ .*\(2 layers\)"),
    "outer scale": (lambda: converted("nvfp4-static:0.0009"), "compressed-tensors", "its outer scale"),
    "no scheme": (lambda: converted("gridflip"), "compressed-tensors", "gridflip"),
    "transform": (lambda: converted(HIDDEN), "compressed-tensors", "behind a transform"),
    "dynamic": (lambda: converted(PackedWeightConfig("nvfp4-static:0.0009765625", "nvfp4")), "compressed-tensors", "outer scale in"),
    "torchao's": (lambda: of(Int8WeightOnlyConfig()), "compressed-tensors", "Int8Tensor"),
    "embedding": (lambda: of(FqnToConfig({"model.embed_tokens": INT4, "_default": None})), "modelopt", "embed_tokens: it is an embedding"),
    "float": (llama, "compressed-tensors", "quantised"),
    "prepared": (lambda: of(QATConfig(INT4, step="prepare")), "compressed-tensors", "prepared and not converted"),
    "a layer": (lambda: torch.nn.Linear(2, 2), "compressed-tensors", "Linear"),
    "a format": (lambda: converted("intx4-g128"), "ggml", "'ggml'"),
    "no tokenizer": (lambda: converted("q4_0"), "gguf", r"tokenizer\.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    make, format, name = REFUSED[case]
    with pytest.raises(ValueError, match=name):
        export(make(), tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["compressed-tensors", "gguf"])
def test_a_full_folder_and_a_tokenizers_name_are_refused(saved: Path, format: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer .*'gpt2'"):
        export(converted("q8_0" if format == "gguf" else "intx4-g128"), tmp_path / "out", format, tokenizer="gpt2")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="not an empty folder"):
        export(saved, tmp_path, format)


def test_fused_layers_of_several_schemes_are_named(tmp_path: Path) -> None:
    model = llama()
    int4 = PackedWeightConfig("intx4-g32", contract="dequantize")
    quantize_(model, FqnToConfig({"re:.*q_proj": FP8, "_default": int4}))
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn\.\{q_proj, k_proj, v_proj\}.*layers\.1"):
        export(model, tmp_path / "mixed")
    with pytest.warns(UserWarning, match=r"vLLM fuses.*up_proj"):
        export(converted("intx4-g128"), tmp_path / "skipped", skip=["*.up_proj"])
    with warnings.catch_warnings(action="error"):
        export(converted("intx4-g128"), tmp_path / "alike", skip=["*.down_proj"])


def test_the_folder_of_a_run_is_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run" / "checkpoint")
    with pytest.raises(ValueError, match="run/checkpoint"):
        load_pretrained(tmp_path / "run")
    a, b = export(saved, tmp_path / "a"), export(tmp_path / "run", tmp_path / "b")
    for file in ("model.safetensors", "config.json"):
        assert (a / file).read_bytes() == (b / file).read_bytes()
    with pytest.raises(ValueError, match=r"a: .*load_pretrained"):
        export(a, tmp_path / "again")
    modelopt = export(converted(FP8), tmp_path / "modelopt", "modelopt")
    with pytest.raises(ValueError, match="ModelOpt"):
        load_pretrained(modelopt)


def test_another_contract_than_the_engines_is_said_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"'aoquant' .14 layers"):
        export(converted(PackedWeightConfig("intx4-g128")), tmp_path / "aoquant")
    with warnings.catch_warnings(action="error"):
        export(converted("intx4-g128"), tmp_path / "dequantize")
