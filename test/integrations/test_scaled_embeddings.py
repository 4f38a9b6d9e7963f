"""Models whose embedding class scales its rows, tied and untied: prepared, converted, reloaded and converted on disk
they compute the same, and a GGUF file holds their rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.export_cases import byte_level
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    TorchAoConfig,
    XGLMConfig,
    XGLMForCausalLM,
)

from aoquant import QATConfig, cli, coverage, export, load_pretrained, quantize_, save_pretrained
from aoquant.integrations.lm_eval import evaluate
from aoquant.integrations.plans import with_embeddings
from aoquant.integrations.stream import convert_checkpoint
from aoquant.linear.kinds import is_packed
from aoquant.recipes import mixed

TOKENS = len(byte_level())
IDS = torch.arange(3, 27).view(2, 12)
GEMMA: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 32, "query_pre_attn_scalar": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "scale_embedding": True,
}  # fmt: skip
XGLM: dict[str, Any] = {
    "vocab_size": 96, "d_model": 64, "ffn_dim": 64, "num_layers": 1, "attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
FAMILIES = {
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "gemma3-untied": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, tie_word_embeddings=False)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA)),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART)),
    "xglm": lambda: XGLMForCausalLM(XGLMConfig(**XGLM)),
}


def made(family: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' empty_like, which makes buffers that no file holds, return NaN."""
    stock = torch.empty_like

    def empty_like(like: torch.Tensor, **how: Any) -> torch.Tensor:
        made = stock(like, **how)
        return (
            made
            if type(made) is not torch.Tensor or made.is_meta or not made.dtype.is_floating_point
            else made.fill_(torch.nan)
        )

    monkeypatch.setattr(torch, "empty_like", empty_like)


def config(model: nn.Module, embeddings: str, **how: Any) -> Any:
    return mixed("int4-g32", with_embeddings(model, embeddings), **how)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f == "gemma2")) for f in FAMILIES])
def test_prepared_converted_reloaded_and_converted_on_disk_are_equal(family: str, tmp_path: Path) -> None:
    model = made(family)
    model.save_pretrained(tmp_path / "float")
    before = logits(model)
    quantize_(model, config(model, "int8-weight", make=lambda recipe: recipe.prepare()))
    assert not coverage(model).unexpected
    prepared = logits(model)
    assert not torch.equal(prepared, before)
    quantize_(model, QATConfig(step="convert"))
    embedding = model.get_input_embeddings()
    assert is_packed(embedding.weight) and type(embedding) is type(made(family).get_input_embeddings())
    assert torch.equal(logits(model), prepared)
    save_pretrained(model, tmp_path / "saved")
    convert_checkpoint(tmp_path / "float", config(made(family), "int8-weight"), tmp_path / "converted")
    auto = type(model) if family == "bart" else AutoModelForCausalLM
    for folder in (tmp_path / "saved", tmp_path / "converted"):
        assert torch.equal(logits(load_pretrained(folder, model_class=auto)), prepared)
    assert torch.equal(logits(auto.from_pretrained(tmp_path / "saved")), prepared)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_holds_a_quantised_embedding_beside_another_type(tied: bool, tmp_path: Path) -> None:
    model = made("gemma3" if tied else "gemma3-untied")
    quantize_(model, mixed("gguf-q4_0", with_embeddings(model, "gguf-q8_0")))
    file = export(model, tmp_path / "out", "gguf", byte_level())
    reader = gguf.GGUFReader(file)
    tensors = {t.name: t for t in reader.tensors}
    assert ("output.weight" in tensors) is not tied
    for name in ("token_embd.weight", *(["output.weight"] * (not tied))):
        found = tensors[name]
        assert found.tensor_type == Type.Q8_0
        layer: Any = model.lm_head if name == "output.weight" else model.model.embed_tokens
        values = torch.from_numpy(gguf.quants.dequantize(found.data, Type.Q8_0))
        assert torch.equal(values, layer.weight.dequantize())
    assert tensors["blk.0.ffn_down.weight"].tensor_type == Type.Q4_0
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0


@pytest.mark.parametrize("step", [None, "prepare"])
def test_transformers_quantises_or_prepares_as_it_loads(step: str | None, tmp_path: Path) -> None:
    model = made("gemma3")
    model.save_pretrained(tmp_path)
    asked = config(model, "int8-weight", **({"make": lambda recipe: recipe.prepare()} if step else {}))
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(asked, include_input_output_embeddings=True)
    )
    quantize_(model, asked)
    assert torch.equal(logits(loaded), logits(model))


def test_formats_without_quantised_embeddings_say_so(tmp_path: Path) -> None:
    model = made("gemma3")
    quantize_(model, mixed("vllm-w4a16-g32", with_embeddings(model, "q8_0/")))
    with pytest.raises(
        ValueError, match=r"embed_tokens: .*embedding that is tied .*readers of compressed-tensors.*format='gguf'"
    ):
        export(model, tmp_path / "out", "compressed-tensors", byte_level())
    assert not (tmp_path / "out").exists()
    export(model, tmp_path / "out", "compressed-tensors", byte_level(), skip=["model.embed_tokens"])
    served = load_pretrained(tmp_path / "out")
    assert torch.equal(logits(served), logits(model))


def test_outer_scales_of_an_embedding_do_not_fit_gguf(tmp_path: Path) -> None:
    model = made("gemma3")
    quantize_(model, mixed("gguf-q4_0", with_embeddings(model, "nvfp4-weight")))
    with pytest.raises(ValueError, match="gives embeddings no outer scale"):
        export(model, tmp_path / "out", "gguf", byte_level())


def test_the_command_line_converts_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made("gemma3-untied").save_pretrained(tmp_path / "float")
    command = ["convert", "--model", str(tmp_path / "float"), "--recipe", "fp8", "--verify", "99"]
    cli.main([*command, "--embeddings", "--out", str(tmp_path / "same")])
    cli.main([*command, "--embeddings-recipe", "gguf-q8_0", "--out", str(tmp_path / "other")])
    assert "stay float" not in capsys.readouterr().out
    same, other = (load_pretrained(tmp_path / name) for name in ("same", "other"))
    assert (same.lm_head.weight.activation, same.model.embed_tokens.weight.activation) == ("fp8-row", "")
    assert (other.lm_head.weight.format, other.model.embed_tokens.weight.format) == ("q8_0", "q8_0")
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path / "same"), "--format", "modelopt", "--out", str(tmp_path / "served")])
    said = capsys.readouterr().err
    assert "embed_tokens: it is an embedding" in said and "Instead: leave out --embeddings" in said


def test_the_command_line_scores_a_checkpoint_with_quantised_embeddings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Score embeddings of a class that scales its rows, whose scale no file holds."""
    model = made("gemma3")
    quantize_(model, config(model, "int8-weight"))
    save_pretrained(model, tmp_path / "saved", byte_level())
    (tmp_path / "test.jsonl").write_text('{"page": "all that glitters is not gold"}')
    how: Any = {"wikitext": str(tmp_path), "window": 16}
    cli.evaluate(tmp_path / "saved", device="cpu", **how)
    assert f"word perplexity {evaluate(model, byte_level(), **how).word_perplexity:.4f}" in capsys.readouterr().out
