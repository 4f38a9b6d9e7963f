"""Exports of models that compute or spell a part of themselves, and folders whose config or names make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models import llama
from transformers import Mamba2Config, Mamba2ForCausalLM, MarianConfig, MarianMTModel

from aoquant import PackedWeightConfig, export, load_pretrained, quantize_, save_pretrained
from aoquant.integrations import checksums
from aoquant.integrations.checkpoint import INDEX


def packed(model: Any) -> Any:
    quantize_(model.eval(), PackedWeightConfig("intx4-g32", contract="dequantize"))
    return model


def test_a_config_with_infinity_is_exported(tmp_path: Path) -> None:
    """Mamba 2 limits its time steps to (0, inf), which JSON spells as an object."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "state_size": 8,
        "head_dim": 16,
        "num_heads": 8,
    }
    model = packed(Mamba2ForCausalLM(Mamba2Config(**sizes, n_groups=1, chunk_size=4)))
    export(model, tmp_path / "out")
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(load_pretrained(tmp_path / "out")(ids).logits, model(ids).logits)


def test_parameters_that_are_computed_are_not_missed(tmp_path: Path) -> None:
    """Marian's positions are sines, and no file holds them."""
    config = MarianConfig(
        vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    model = packed(MarianMTModel(config))
    export(model, tmp_path / "out")
    loaded = load_pretrained(tmp_path / "out", MarianMTModel)
    ids = torch.arange(1, 9).view(1, 8)
    assert torch.equal(
        loaded(input_ids=ids, decoder_input_ids=ids).logits, model(input_ids=ids, decoder_input_ids=ids).logits
    )


def altered(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


@pytest.mark.parametrize(
    ("where", "value", "name"),
    [
        ("targets", ["re:("], r"config\.json"),
        ("ignore", ["re:("], r"config\.json"),
        ("output_activations", INT8, "output_activations"),
    ],
)
def test_patterns_that_are_none_and_quantised_outputs_are_refused(
    where: str, value: Any, name: str, tmp_path: Path
) -> None:
    export(packed(llama()), tmp_path / "out")

    def change(config: dict[str, Any]) -> None:
        (config if where == "ignore" else config["config_groups"]["group_0"])[where] = value

    altered(tmp_path / "out", change)
    with pytest.raises(ValueError, match=name):
        load_pretrained(tmp_path / "out", verify_checksums=False)


def test_a_name_too_long_for_a_file_is_refused(tmp_path: Path) -> None:
    save_pretrained(packed(llama()), tmp_path / "saved", max_shard_size="20KB")
    index = tmp_path / "saved" / INDEX
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = "x" * 300
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load_pretrained(tmp_path / "saved")


def test_checksums_without_an_end_of_depth_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"aoquant_crc32": "[" * 100_000})
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        checksums.verify([path])
