"""A converted copy that follows training: equal log-probabilities after every refresh, in the tensors that it had."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.export_cases import llama, packed
from support.models import IDS, SMALL
from torchao.quantization import FqnToConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

from aoquant import (
    Hadamard,
    Int8WeightConfig,
    MXFP4WeightConfig,
    PackedWeightConfig,
    QATConfig,
    calibrate,
    quantize_,
    refresh_,
)

CONFIGS: dict[str, Any] = {
    "intx4": PackedWeightConfig("intx4-g128", contract="dequantize"),
    "int4": PackedWeightConfig("int4-g128"),
    "nvfp4": PackedWeightConfig("nvfp4", "fouroversix"),
    "mxfp4-h32": MXFP4WeightConfig(transform=Hadamard(32)),
    "fp8": PackedWeightConfig("fp8-row", "fp8-row-vllm"),
    "q4_0": PackedWeightConfig("q4_0"),
    "embedding and tied head": FqnToConfig(
        {
            "model.embed_tokens": Int8WeightConfig(),
            "lm_head": Int8WeightConfig(),
            r"re:.*_proj": PackedWeightConfig("intx4-g32"),
        }
    ),
}


def pair(config: Any, *, tied: bool = False, **options: Any) -> tuple[Any, Any]:
    prepared = llama(tied=tied)
    wrapped = QATConfig(config, step="prepare", **options) if not isinstance(config, FqnToConfig) else config
    if isinstance(config, FqnToConfig):
        wrapped = FqnToConfig({name: QATConfig(c, step="prepare") for name, c in config.fqn_to_config.items()})
    quantize_(prepared, wrapped)
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"), (lambda module, name: True) if tied else None)
    return converted, prepared


@torch.no_grad()
def step(model: Any) -> None:
    torch.manual_seed(1)
    for p in model.parameters():
        p += torch.randn_like(p) * 0.05 * p.abs().mean()


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_equal_after_a_step(name: str) -> None:
    converted, prepared = pair(CONFIGS[name], tied="tied" in name)
    tensors = [t.data_ptr() for w in packed(converted).values() for t in (w.qdata, w.scale) if t is not None]
    step(prepared)
    with torch.no_grad():
        wanted = prepared(IDS).logits.log_softmax(-1)
        assert not torch.equal(converted(IDS).logits.log_softmax(-1), wanted)
        assert refresh_(converted, prepared) >= 14
        assert torch.equal(converted(IDS).logits.log_softmax(-1), wanted)
    assert tensors == [t.data_ptr() for w in packed(converted).values() for t in (w.qdata, w.scale) if t is not None]


def test_layers_of_the_copy_without_a_prepared_one_are_refused() -> None:
    converted, prepared = pair(CONFIGS["int4"])
    before = [w.qdata.clone() for w in packed(converted).values()]
    step(prepared)
    short = copy.deepcopy(prepared)
    del short.model.layers[1]
    with pytest.raises(ValueError, match=r"7 converted layer.*have no prepared one.*layers\.1\.self_attn\.q_proj"):
        refresh_(converted, short)
    part = llama()
    mlp = FqnToConfig({r"re:.*mlp\..*": QATConfig(CONFIGS["int4"], step="prepare")})
    quantize_(part, mlp)
    with pytest.raises(ValueError, match=r"8 converted layer.*have no prepared one.*layers\.0\.self_attn\.q_proj"):
        refresh_(converted, part)
    assert all(torch.equal(a, w.qdata) for a, w in zip(before, packed(converted).values(), strict=True))
    assert refresh_(converted, prepared) == 14


def test_tied_weights_are_counted_once() -> None:
    converted, prepared = pair(CONFIGS["embedding and tied head"], tied=True)
    assert refresh_(converted, prepared) == 15


def test_compiled_code_of_the_copy_stays_valid() -> None:
    converted, prepared = pair(CONFIGS["intx4"])
    layer, source = converted.model.layers[0].mlp.up_proj, prepared.model.layers[0].mlp.up_proj
    graph = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        graph(x)
        step(prepared)
        refresh_(converted, prepared)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(graph(x), source(x))


def test_held_weight_scales_and_static_inputs() -> None:
    config = PackedWeightConfig("intx8-row", "int8-tensor-static")
    prepared = llama()
    quantize_(prepared, QATConfig(config, step="prepare", scales="learned"))
    calibrate(prepared, [IDS])
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    for p in (m for n, m in prepared.named_parameters() if not n.endswith("input_scale")):
        p.data *= 1.01
    with torch.no_grad():
        refresh_(converted, prepared)
        assert torch.equal(converted(IDS).logits, prepared(IDS).logits)
    prepared.model.layers[0].mlp.up_proj.input_scale.data *= 2
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.up_proj quantises its input as int8-tensor-static:.*convert a copy anew"
    ):
        refresh_(converted, prepared)


def test_models_that_do_not_belong_together_are_refused() -> None:
    converted, prepared = pair(CONFIGS["intx4"])
    with pytest.raises(ValueError, match="the second model has no prepared layer"):
        refresh_(prepared, converted)
    with pytest.raises(ValueError, match="is prepared, and in the first model its weight is Parameter, no codes"):
        refresh_(llama(), prepared)
    other, _ = pair(CONFIGS["int4"])
    before = [w.qdata.clone() for w in packed(other).values()]
    step(prepared)
    with pytest.raises(ValueError, match=r"is prepared as \('intx4-g128', 'dequantize'.*has \('int4-g128', 'aoquant'"):
        refresh_(other, prepared)
    assert all(torch.equal(a, w.qdata) for a, w in zip(before, packed(other).values(), strict=True))


def test_floats_that_the_trained_model_lacks_are_refused() -> None:
    """A Llama's layers have names and shapes of Qwen3's, which has norms of q and k beside them."""
    shape = {**SMALL, "head_dim": 32}
    served = Qwen3ForCausalLM._from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
    quantize_(served, QATConfig(CONFIGS["int4"], step="prepare"))
    quantize_(served, QATConfig(step="convert"))
    _, trained = pair(CONFIGS["int4"])
    with pytest.raises(ValueError, match=r"has no model\.layers\.0\.self_attn\.q_norm\.weight, .*would keep its own"):
        refresh_(served, trained)


def test_another_dtype_is_refused() -> None:
    converted, prepared = pair(CONFIGS["int4"])
    before = packed(converted)["model.layers.0.mlp.up_proj"].qdata.clone()
    step(prepared)
    with pytest.raises(ValueError, match=r"q_proj is prepared as .*'float32'\), and .* has .*'bfloat16'\)"):
        refresh_(converted, copy.deepcopy(prepared).float())
    assert torch.equal(packed(converted)["model.layers.0.mlp.up_proj"].qdata, before)
    prepared.model.norm.float()
    with pytest.raises(ValueError, match=r"no model\.norm\.weight of shape \(128,\) and float32"):
        refresh_(converted, prepared)
