"""A converted copy that follows training: equal log-probabilities after every refresh, in the tensors that it had."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.export_cases import llama, packed
from support.models import IDS, SMALL
from torch import nn
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
        assert refresh_(converted, prepared) == (15 if "tied" in name else 14)
        assert torch.equal(converted(IDS).logits.log_softmax(-1), wanted)
    assert tensors == [t.data_ptr() for w in packed(converted).values() for t in (w.qdata, w.scale) if t is not None]


@torch.no_grad()
def test_biases_and_buffers_follow() -> None:
    prepared = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)).eval()
    quantize_(prepared, QATConfig(CONFIGS["q4_0"], step="prepare"))
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    for t in (prepared[0].bias, prepared[2].bias, *prepared[1].parameters(), *prepared[1].buffers()):
        t.add_(1)
    assert refresh_(converted, prepared) == 2
    for name, t in (*prepared.named_buffers(), *prepared.named_parameters()):
        if not name.endswith(("0.weight", "2.weight")):
            assert torch.equal(converted.state_dict()[name], t), name
    x = torch.randn(3, 32)
    assert torch.equal(converted(x), prepared(x))


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
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj"):
        refresh_(converted, prepared)


def short(prepared: Any) -> Any:
    del prepared.model.layers[1]
    return prepared


def partly(prepared: Any) -> Any:
    model = llama()
    quantize_(model, FqnToConfig({r"re:.*mlp\..*": QATConfig(CONFIGS["int4"], step="prepare")}))
    return model


def another_norm(prepared: Any) -> Any:
    prepared.model.norm.float()
    return prepared


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a layer less": (short, r"layers\.1\.self_attn\.q_proj"),
    "a part": (partly, r"layers\.0\.self_attn\.q_proj"),
    "another format": (lambda _: pair(CONFIGS["intx4"])[1], r"q_proj .*intx4-g128.*int4-g128"),
    "another dtype": (lambda prepared: prepared.float(), r"q_proj .*float32.*bfloat16"),
    "another norm": (another_norm, r"model\.norm\.weight"),
    "nothing prepared": (lambda _: pair(CONFIGS["int4"])[0], "no prepared layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_do_not_belong_together_are_refused(case: str) -> None:
    """And the copy keeps its codes."""
    converted, prepared = pair(CONFIGS["int4"])
    before = [w.qdata.clone() for w in packed(converted).values()]
    step(prepared)
    change, name = REFUSED[case]
    with pytest.raises(ValueError, match=name):
        refresh_(converted, change(copy.deepcopy(prepared)))
    assert all(torch.equal(a, w.qdata) for a, w in zip(before, packed(converted).values(), strict=True))
    with pytest.raises(ValueError, match="Parameter"):
        refresh_(llama(), prepared)
    assert refresh_(converted, prepared) == 14


def test_floats_that_the_trained_model_lacks_are_refused() -> None:
    """A Llama's layers have names and shapes of Qwen3's, which has norms of q and k beside them."""
    shape = {**SMALL, "head_dim": 32}
    served = Qwen3ForCausalLM._from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
    quantize_(served, CONFIGS["int4"])
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_norm\.weight"):
        refresh_(served, pair(CONFIGS["int4"])[1])
