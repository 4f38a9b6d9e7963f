"""A model that was cast as a whole differs from the one that its files give, and a warning says so: exactly then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.export_families import FAMILIES, float_model, outputs, quantize
from support.models import llama
from transformers import PreTrainedModel

from aoquant import AoquantWarning, export, load_pretrained, quantize_, save_pretrained
from aoquant.integrations.hf import attach

SAID = "in this model and torch.float32 in the one that is loaded"
# one for each way in which transformers makes such tensors, and those without any
SOME = ["gpt-j", "falcon", "gpt-oss", "gemma3", "qwen2-vl", "opt", "t5", "clip"]


def dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


def said(act: Callable[[], Any]) -> bool:
    """Return whether it warned."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return any(issubclass(w.category, AoquantWarning) and SAID in str(w.message) for w in found)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in SOME else pytest.mark.slow) for f in FAMILIES])
def test_a_warning_tells_whether_loading_changes_a_dtype(family: str, cast: bool, tmp_path: Path) -> None:
    model = float_model(family, tmp_path / "float")
    if cast:
        whole = type(model).from_pretrained(tmp_path / "float", dtype=torch.float32, disable_mmap=True)
        model = whole.eval().bfloat16()
    quantize(family, model, "intx4-g32")
    warned = said(lambda: save_pretrained(model, tmp_path / "saved"))
    loaded = load_pretrained(tmp_path / "saved", type(model)).eval()
    assert warned == (dtypes(loaded) != dtypes(model))
    assert warned or torch.equal(outputs(family, loaded), outputs(family, model))


@pytest.mark.parametrize("made", [torch.bfloat16, torch.float32])
def test_every_way_to_write_the_model_warns(made: torch.dtype, tmp_path: Path) -> None:
    model = llama(dtype=made)
    if made != torch.bfloat16:
        model.bfloat16()
    quantize_(model, "vllm-w4a16-g32")
    cast = made != torch.bfloat16
    assert said(lambda: save_pretrained(model, tmp_path / "a")) == cast
    assert said(lambda: export(model, tmp_path / "b")) == cast
    attach(model)
    assert said(lambda: model.save_pretrained(tmp_path / "c")) == cast


def test_a_layer_that_stayed_wide_is_named(tmp_path: Path) -> None:
    """It would be rounded by loading."""
    model = llama()
    quantize_(model, "int4-g32")
    model.model.norm.float()
    with pytest.warns(AoquantWarning, match="such as model.norm.weight, are torch.float32 in this model and torch.bf"):
        save_pretrained(model, tmp_path / "saved")
    assert load_pretrained(tmp_path / "saved").model.norm.weight.dtype == torch.bfloat16
