"""Serving on a GPU: a CUDA graph of a converted copy follows training. Engines' formats: test_triton_exact.py."""

from __future__ import annotations

import copy

import pytest
import torch
from support.export_cases import llama
from support.gpu import captured
from support.models import IDS

from aoquant import PackedWeightConfig, QATConfig, quantize_, refresh_

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weight", ["intx4-g128", "nvfp4", "fp8-row"])
def test_a_cuda_graph_follows_a_refresh(weight: str) -> None:
    contract = "dequantize" if weight.startswith("intx") else "aoquant"
    prepared = llama().cuda()
    quantize_(prepared, QATConfig(PackedWeightConfig(weight, contract=contract), step="prepare"))
    served = copy.deepcopy(prepared)
    quantize_(served, QATConfig(step="convert"))
    ids = IDS.cuda()
    with torch.no_grad():
        graph, logits = captured(lambda: served(ids, use_cache=False).logits, 2)
        for p in prepared.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.abs().mean())
        refresh_(served, prepared)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(logits, served(ids, use_cache=False).logits)
        assert torch.equal(logits, prepared(ids, use_cache=False).logits)
