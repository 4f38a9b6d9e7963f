"""Whole models of every family of experts: saved here and loaded in another process, and trained by the Trainer."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.moe_models import IDS, MODELS, model_of
from support.trainers import trainer

from aoquant import QATConfig, quantize_, save_pretrained, verify
from aoquant.experts.packed_experts import PackedExperts
from aoquant.integrations.trainer import MIN, OUTPUT, QATCallback

FAMILIES = (*MODELS, "gemma-4", "glm4-moe")
PROGRAM = """
import sys, torch, aoquant
from pathlib import Path
from transformers import AutoModelForCausalLM
folder = Path(sys.argv[1])
ids = torch.load(folder / "ids.pt")
with torch.no_grad():
    loaded = {name: AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in sys.argv[2:]}
    torch.save({name: model(input_ids=ids).logits for name, model in loaded.items()}, folder / "logits.pt")
"""


@pytest.mark.slow
def test_another_process_loads_what_was_saved(tmp_path: Path) -> None:
    """transformers' own loader gives the prepared model's logits, bit for bit, in each family."""
    wanted = {}
    for family in FAMILIES:
        model = model_of(family).eval()
        quantize_(model, QATConfig("mxfp4-experts", step="prepare"))
        with torch.no_grad():
            wanted[family] = model(input_ids=IDS).logits
        quantize_(model, QATConfig(step="convert"))
        packed = [p for p in model.parameters() if isinstance(p.data, PackedExperts)]
        assert len(packed) == (2 if family in ("deepseek-v3", "glm4-moe") else 4)  # two of a layer
        save_pretrained(model, tmp_path / family)
    torch.save(IDS, tmp_path / "ids.pt")
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), *FAMILIES], check=True, env=dict(os.environ))
    got = torch.load(tmp_path / "logits.pt")
    assert all(torch.equal(got[family], wanted[family]) for family in FAMILIES)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_the_trainer_trains_experts(family: str, tmp_path: Path) -> None:
    """Experts learn, the callback compares them with float ones, and convert changes nothing."""
    model = model_of(family).eval().float()
    quantize_(model, QATConfig("int4-g32-experts", step="prepare"))
    before = [p.detach().clone() for name, p in model.named_parameters() if "experts" in name]
    run = trainer(model, tmp_path, IDS)
    run.add_callback(QATCallback(log_every=3, batch={"input_ids": IDS}))
    run.train()
    after = [p for name, p in model.named_parameters() if "experts" in name]
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    logged = [entry for entry in run.state.log_history if MIN in entry]
    assert len(logged) == 1 and all(10 < logged[0][key] < 40 for key in (MIN, OUTPUT))
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    assert verify(model.eval(), converted.eval(), {"input_ids": IDS}).min_sqnr == float("inf")
