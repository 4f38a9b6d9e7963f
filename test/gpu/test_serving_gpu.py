"""Serving on a GPU: engines' formats give the CPU's bytes; a CUDA graph of a converted copy follows training."""

from __future__ import annotations

import copy

import pytest
import torch
from support.export_cases import llama
from support.models import IDS

from aoquant import PackedWeightConfig, QATConfig, get_format, quantize_, refresh_

pytestmark = pytest.mark.gpu
FORMATS = [
    "q4_0",
    "q4_1",
    "q8_0",
    "q8_0-x86",
    "fp8-row-vllm",
    "fp8-row-vllm-reciprocal",
    "int8-row-vllm",
    "int8-row-vllm-reciprocal",
    "nvfp4-pow2",
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_the_cpus(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(512, 1024) * torch.rand(512, 1).exp()).to(dtype)
    here, there = (get_format(name).encode(t) for t in (x, x.cuda()))
    for a, b in zip(here[:4], there[:4], strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a.contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("weight", ["intx4-g128", "nvfp4", "fp8-row"])
def test_a_cuda_graph_follows_a_refresh(weight: str) -> None:
    contract = "dequantize" if weight.startswith("intx") else "aoquant"
    prepared = llama().cuda()
    quantize_(prepared, QATConfig(PackedWeightConfig(weight, contract=contract), step="prepare"))
    served = copy.deepcopy(prepared)
    quantize_(served, QATConfig(step="convert"))
    ids = IDS.cuda()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                served(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = served(ids, use_cache=False).logits
        for p in prepared.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.abs().mean())
        refresh_(served, prepared)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(logits, served(ids, use_cache=False).logits)
        assert torch.equal(logits, prepared(ids, use_cache=False).logits)
