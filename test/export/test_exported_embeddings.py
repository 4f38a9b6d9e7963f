"""Quantised embeddings and heads in compressed-tensors' folders: stock transformers and aoquant read them back equal,
vLLM's own arithmetic gives the trained rows, and what no reader looks up is refused with its cause.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.export_cases import llama, load_elsewhere, told, write_expected
from support.models import IDS

from aoquant import export, load_pretrained, quantize_
from aoquant.integrations.plans import with_embeddings
from aoquant.linear.kinds import is_packed
from aoquant.recipes import mixed

EMBEDDING = "model.embed_tokens"


def model_of(embeddings: str, *, tied: bool = False) -> Any:
    model = llama(tied=tied).eval()
    quantize_(model, mixed("vllm-w4a16-g32", with_embeddings(model, embeddings)))
    return model


def rows_of_vllm(tensors: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """Look up IDS as vLLM 0.32's kernel does, a code at a time: its place in a word, its offset, and one rounding."""
    words, scale = (tensors[f"{EMBEDDING}.{part}"] for part in ("weight_packed", "weight_scale"))
    columns = torch.arange(words.shape[1] * (32 // bits))
    at = words[IDS][..., columns // (32 // bits)].long() >> (columns % (32 // bits) * bits)
    codes = (at & (2**bits - 1)) - 2 ** (bits - 1)
    groups = columns // (len(columns) // scale.shape[1])
    return (codes.float() * scale[IDS][..., groups].float()).to(scale.dtype)


@pytest.mark.parametrize(("embeddings", "bits"), [("vllm-w4a16-g32", 4), ("intx8-row/", 8), ("intx2-g32/", 2)])
def test_readers_look_up_the_trained_rows(embeddings: str, bits: int, tmp_path: Path) -> None:
    model = model_of(embeddings)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = export(model, tmp_path / "out")
    one = embeddings == "vllm-w4a16-g32"
    assert one is not any("transformers cannot load the folder" in str(w.message) for w in said)
    with torch.no_grad():
        rows, logits = model.model.embed_tokens(IDS), model(IDS).logits
        assert torch.equal(rows_of_vllm(load_file(out / "model.safetensors"), bits), rows)
        served = load_pretrained(out)
        assert is_packed(served.model.embed_tokens.weight) and torch.equal(served.model.embed_tokens(IDS), rows)
        assert torch.equal(served.lm_head.weight.dequantize(), model.lm_head.weight.dequantize())
        assert not one or torch.equal(served(IDS).logits, logits)  # others have another contract than readers
    groups = [set(group["targets"]) for group in told(out)["config_groups"].values()]
    (own,) = (names for names in groups if EMBEDDING in names)
    assert "Embedding" in own and any("lm_head" in names for names in groups)  # vLLM takes neither for a "Linear"
    assert len(groups) == 2 - one and ("Linear" in own) is one
    if one:
        write_expected(model, tmp_path / "out.pt")
        (found,) = load_elsewhere([out]).values()
        assert found["logits"] and not found["different"]


@pytest.mark.parametrize(
    ("embeddings", "tied", "said"),
    [
        ("vllm-w4a16-g32", True, "it is an embedding that is tied to another layer"),
        ("intx4-g32-asym/", False, "rows of symmetric integers of 2, 4 or 8 bits alone"),
        ("intx3-g32/", False, "rows of symmetric integers of 2, 4 or 8 bits alone"),
        ("fp8-row/", False, "rows of symmetric integers of 2, 4 or 8 bits alone"),
        ("q8_0/", False, "no scheme holds q8_0"),
    ],
)
def test_rows_that_no_reader_looks_up_are_refused(embeddings: str, tied: bool, said: str, tmp_path: Path) -> None:
    model = model_of(embeddings, tied=tied)
    with pytest.raises(ValueError, match=re.escape(f"{EMBEDDING}: ") + f".*{said}"):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_embedding_that_stays_float_is_no_target(tmp_path: Path) -> None:
    model = llama()
    quantize_(model, mixed("vllm-w4a16-g32"))
    (group,) = told(export(model, tmp_path / "out"))["config_groups"].values()
    assert group["targets"] == ["Linear"] and "dequantize" not in told(tmp_path / "out")
