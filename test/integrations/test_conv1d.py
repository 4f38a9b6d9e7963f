"""GPT-2, whose linear layers are transformers' Conv1D: prepared, trained, converted, verified, saved, loaded and
converted on disk.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.bits import same_bytes
from torch import nn
from torchao.quantization import FqnToConfig, IntxWeightOnlyConfig, PerGroup
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import aoquant
from aoquant import (
    WUSH,
    FP8WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    calibrate,
    convert_checkpoint,
    load_pretrained,
    quantize_,
    save_pretrained,
    unprepare,
    verify,
)
from aoquant.integrations.conv1d import QATConv1D
from aoquant.linear.prepared import QATLinear

IDS = torch.arange(32).view(2, 16) % 64
CONFIGS = {
    "nvfp4": NVFP4WeightConfig(),
    "mxfp4": MXFP4WeightConfig(),
    "int4": Int4WeightConfig(32),
    "int8": Int8WeightConfig(),
    "fp8": FP8WeightConfig(),
    "torchao-intx": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
}


def gpt2(dtype: torch.dtype = torch.bfloat16) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)).to(dtype)


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in model.state_dict().items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_gpt2_trains_as_it_deploys_and_comes_back_from_disk(config: Any, tmp_path: Path) -> None:
    model = gpt2()
    before = shapes(model)
    quantize_(model, QATConfig(config, step="prepare"), strict=True)
    assert shapes(model) == before
    layers = [m for m in model.modules() if isinstance(m, QATConv1D)]
    assert len(layers) == 4
    assert all(isinstance(m, Conv1D) for m in layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(m.weight.grad.any() for m in layers)
    optimizer.step()

    converted = copy.deepcopy(model).eval()
    quantize_(converted, QATConfig(step="convert"))
    assert type(converted.transformer.h[0].mlp.c_fc) is Conv1D
    assert converted.transformer.h[0].mlp.c_fc.weight.shape == (256, 64)  # (N, K)
    found = verify(model, converted, {"input_ids": IDS})
    assert (found.min_sqnr, len(found.layers), found.layers[0].shape) == (float("inf"), 4, (192, 64))
    assert aoquant.coverage(converted).share > 0.8

    save_pretrained(converted, tmp_path / "saved")
    loaded = load_pretrained(tmp_path / "saved", GPT2LMHeadModel)
    assert torch.equal(loaded(input_ids=IDS).logits, converted(input_ids=IDS).logits)
    tokens = [m.generate(IDS[:, :4], max_new_tokens=4, do_sample=False) for m in (loaded, converted)]
    assert torch.equal(*tokens)
    save_pretrained(loaded, tmp_path / "again")


def test_a_prepared_conv1d_is_a_prepared_linear_with_a_transposed_weight() -> None:
    for config in (NVFP4WeightConfig(), Int4WeightConfig(32), Int8WeightConfig()):
        torch.manual_seed(0)
        conv, linear = nn.Sequential(Conv1D(96, 64)), nn.Sequential(nn.Linear(64, 96))
        linear[0].weight.data.copy_(conv[0].weight.t())
        linear[0].bias.data.copy_(conv[0].bias)
        x = torch.randn(3, 5, 64)
        results = []
        for model in (conv, linear):
            quantize_(
                model, QATConfig(config, step="prepare", backward="nvfp4" if config == NVFP4WeightConfig() else None)
            )
            given = x.clone().requires_grad_()
            y = model(given)
            y.square().sum().backward()
            results.append((y.detach(), given.grad, model[0].bias.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert torch.equal(conv[0].weight.grad.t(), linear[0].weight.grad)
        for model in (conv, linear):
            quantize_(model, QATConfig(step="convert"))
        assert torch.equal(conv[0].weight.qdata, linear[0].weight.qdata)
        assert torch.equal(conv(x), linear(x))


def test_calibrated_learned_and_fitted_layers() -> None:
    configs = (
        QATConfig(Int8WeightConfig(activation="int8-tensor-static"), step="prepare"),
        QATConfig(Int8WeightConfig(), step="prepare", scales="learned"),
        QATConfig(NVFP4WeightConfig(activation="nvfp4", transform=WUSH(16)), step="prepare"),
    )
    for config in configs:
        model = gpt2()
        quantize_(model, config)
        if any(isinstance(m, QATLinear) and m.prepared.recipe.holds and not m.calibrated for m in model.modules()):
            calibrate(model, [{"input_ids": IDS}])
        converted = copy.deepcopy(model)
        quantize_(converted, QATConfig(step="convert"))
        verify(model, converted, {"input_ids": IDS})


def test_unprepare_gives_conv1d_back() -> None:
    model, plain = gpt2(), gpt2()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    unprepare(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert torch.equal(model.eval()(input_ids=IDS).logits, plain.eval()(input_ids=IDS).logits)


def test_errors_name_the_layers_of_gpt2() -> None:
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn"):
        quantize_(gpt2(), Int4WeightConfig(128))  # c_proj of the MLP has K = 256
    model = gpt2()
    quantize_(model, FqnToConfig({"transformer.h.0.mlp.c_fc": NVFP4WeightConfig()}))
    assert [name for name, p in model.named_parameters() if isinstance(p, PackedTensor)] == [
        "transformer.h.0.mlp.c_fc.weight"
    ]


@pytest.mark.parametrize(
    "config", [NVFP4WeightConfig(), QATConfig(NVFP4WeightConfig(), step="prepare")], ids=["packed", "prepared"]
)
def test_adapters_are_refused_by_name(config: Any) -> None:
    model = gpt2()
    quantize_(model, config)
    with pytest.raises(ValueError, match="c_attn"):
        get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def test_a_checkpoint_on_disk_becomes_what_the_model_becomes(tmp_path: Path) -> None:
    model = gpt2().eval()
    model.save_pretrained(tmp_path / "float")
    done = convert_checkpoint(tmp_path / "float", NVFP4WeightConfig(), tmp_path / "disk", verify=8)
    assert (done.layers, done.verified) == (4, 4)
    assert done.coverage.share > 0.8
    quantize_(model, NVFP4WeightConfig())
    save_pretrained(model, tmp_path / "memory")
    disk, memory = (load_file(tmp_path / kind / "model.safetensors") for kind in ("disk", "memory"))
    assert disk.keys() == memory.keys()
    assert all(same_bytes(t, memory[n]) for n, t in disk.items())
    assert torch.equal(load_pretrained(tmp_path / "disk")(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_compiled_gpt2_block_computes_the_same() -> None:
    model = nn.Sequential(Conv1D(96, 64)).bfloat16()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    y = model(x)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)


def test_the_input_has_conv1ds_name() -> None:
    model, x = torch.nn.Sequential(Conv1D(64, 64)), torch.randn(2, 64)
    y = model[0](x=x)
    quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))
    prepared = model[0](x=x)
    assert torch.equal(prepared, model(x)) and not torch.equal(prepared, y)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model[0](x=x), prepared)
