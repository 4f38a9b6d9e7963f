"""LoRA through plain get_peft_model: on a prepared base it trains the merged weight, on a packed base it stands beside
the codes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from support.adapters import layer, lora, prepared
from support.models import IDS, llama, logits
from support.trainers import trainer
from torch import nn
from torchao.quantization import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)
from torchao.utils import TorchAOBaseTensor
from transformers import LlamaForCausalLM

from aoquant import (
    WUSH,
    Hadamard,
    Int4WeightConfig,
    Int8WeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    load_pretrained,
    quantize_,
    save_pretrained,
    set_fake_quant,
    unprepare,
    verify,
)
from aoquant.integrations.peft import PackedLoraLinear, QATLoraLinear
from aoquant.linear.tensor import same_bits

CONFIGS: dict[str, Any] = {
    "int4": Int4WeightConfig(32),
    "nvfp4": NVFP4WeightConfig(),
    "ao.intx": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "ao.int8": Int8DynamicActivationInt8WeightConfig(),
}
SLOW = ("nvfp4", "ao.int8")
every_config = pytest.mark.parametrize(
    "config", [pytest.param(c, id=n, marks=[pytest.mark.slow] * (n in SLOW)) for n, c in CONFIGS.items()]
)


def packed(config: Any) -> LlamaForCausalLM:
    model = llama()
    quantize_(model, config)
    return model


def adapters(model: nn.Module, kind: type) -> list[Any]:
    return [m for m in model.modules() if type(m) is kind]


def train(model: Any, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@every_config
def test_training_on_a_prepared_base_computes_the_merged_and_converted_model(config: Any) -> None:
    model = get_peft_model(prepared(config), lora())
    assert len(adapters(model, QATLoraLinear)) == 14
    before = logits(model)
    train(model)
    y = logits(model)
    assert not torch.equal(y, before)
    with pytest.raises(ValueError, match=r"q_proj\.base_layer"):
        quantize_(model, QATConfig(step="convert"))
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), y)
    converted = copy.deepcopy(merged)
    quantize_(converted, QATConfig(config, step="convert"))
    assert sum(isinstance(p, TorchAOBaseTensor) for p in converted.parameters()) == 14
    assert torch.equal(logits(converted), y)
    verify(merged, converted, {"input_ids": IDS})


@pytest.mark.parametrize(
    "config",
    [
        Int4WeightConfig(32),
        NVFP4WeightConfig(),
        Int8WeightConfig(activation="int8-row"),
        Int8WeightConfig(activation="int8-tensor-static"),
        NVFP4WeightConfig(transform=Hadamard(32, 5)),
        NVFP4WeightConfig(activation=None, transform=Hadamard(16)),
        MXFP4WeightConfig(transform=WUSH(32)),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_merged_weight(config: Any) -> None:
    adapted, x, g = layer(config)
    y = adapted(x)
    y.backward(g)
    a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    assert adapted.base_layer.weight.grad is None
    twin = copy.deepcopy(adapted.base_layer)
    twin.weight.requires_grad_(True)
    with torch.no_grad():
        twin.weight += (b @ a) * adapted.scaling["default"]
    z = x.detach().requires_grad_()
    want = twin(z)
    want.backward(g)
    assert torch.equal(y, want)
    assert torch.equal(x.grad, z.grad)
    dw = twin.weight.grad * adapted.scaling["default"]
    torch.testing.assert_close(a.grad, b.t() @ dw, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(b.grad, dw @ a.t(), rtol=1e-4, atol=1e-5)


def test_a_clipped_gradient_and_an_unfrozen_base_form_the_whole_weight_gradient() -> None:
    for clipped in (True, False):
        adapted, x, g = layer(Int4WeightConfig(32) if not clipped else IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
                              straight_through="clipped" if clipped else "identity")  # fmt: skip
        adapted.base_layer.weight.requires_grad_(not clipped)
        adapted(x).backward(g)
        a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
        dw = g.reshape(-1, 32).t() @ x.detach().reshape(-1, 64)
        if clipped:
            format, w = (
                adapted.base_layer.prepared.recipe.fprop_weight,
                adapted.merged_weight(adapted.adapted().detach(), ["default"]),
            )
            mask = format.saturated(w.detach(), format.encode(w.detach()))
            assert mask.any()
            dw = dw.masked_fill(mask, 0)
        else:
            torch.testing.assert_close(adapted.base_layer.weight.grad, dw)
        torch.testing.assert_close(b.grad, dw @ a.t() * adapted.scaling["default"], rtol=1e-4, atol=1e-5)


def test_a_frozen_base_costs_no_weight_gradient() -> None:
    """No GEMM has N x K outputs in the backward, and none of the dense gradient's size is made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Shapes(TorchDispatchMode):
        seen: set[tuple[int, ...]] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aoquant.gradients.default):
                made = out if isinstance(out, tuple | list) else (out,)
                self.seen.update(tuple(t.shape) for t in made if t is not None)
            return out

    adapted, x, g = layer(Int4WeightConfig(32))
    y = adapted(x)
    with Shapes() as shapes:
        y.backward(g)
    assert (4, 64) in shapes.seen
    assert (32, 64) not in shapes.seen


@every_config
def test_gradient_checkpointing_and_bf16_change_nothing(config: Any) -> None:
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(prepared(config), lora(), autocast_adapter_dtype=False)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        model(IDS, labels=IDS).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert {p.dtype for p in grads[0].values()} == {torch.bfloat16}
    assert len(grads[0]) == 28
    assert all(torch.equal(grads[1][n], g) for n, g in grads[0].items())


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    torch._dynamo.reset()
    adapted, x, g = layer(NVFP4WeightConfig(), torch.bfloat16)
    y = adapted(x)
    y.backward(g)
    eager = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
    adapted.zero_grad()
    compiled = torch.compile(adapted, fullgraph=True)(x)
    compiled.backward(g)
    assert torch.equal(compiled, y)
    assert len(eager) == 2
    assert all(torch.equal(adapted.get_parameter(n).grad, grad) for n, grad in eager.items())


def test_autocast_does_not_round_the_merge() -> None:
    adapted, x, _ = layer(Int4WeightConfig(32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = adapted(x)
        adapted.merge()
        assert torch.equal(adapted(x), y)
        y.sum().backward()
    assert adapted.lora_B["default"].weight.grad is not None


def test_fake_quant_off_is_plain_lora() -> None:
    adapted, x, _ = layer(Int4WeightConfig(32))
    set_fake_quant(adapted, False)
    a, b, s = adapted.lora_A["default"], adapted.lora_B["default"], adapted.scaling["default"]
    assert torch.equal(adapted(x), adapted.base_layer(x) + b(a(x)) * s)


@pytest.mark.parametrize("make", [prepared, packed])
def test_merge_is_undone_exactly_and_adapters_are_added_once(make: Any) -> None:
    base = make(Int4WeightConfig(32))
    base_logits = logits(base)
    model = get_peft_model(base, lora())
    model.add_adapter("other", lora())
    adapted = model.base_model.model.model.layers[0].mlp.up_proj
    weight, y = adapted.base_layer.weight.detach().clone(), logits(model)
    model.merge_adapter(["default"])
    model.merge_adapter(["default", "other"])
    assert adapted.merged_adapters == ["default", "other"]
    both = logits(model)
    model.unmerge_adapter()
    assert torch.equal(adapted.base_layer.weight, weight)
    assert torch.equal(logits(model), y)
    model.merge_adapter(["default", "other"], safe_merge=True)
    assert torch.equal(logits(model), both)
    with model.disable_adapter():
        assert torch.equal(logits(model), base_logits)
        assert not adapted.merged
        assert torch.equal(adapted.base_layer.weight, weight)


@every_config
def test_an_adapter_beside_packed_codes(config: Any, tmp_path: Path) -> None:
    base = packed(config)
    base_logits, x = logits(base), torch.randn(3, 128, dtype=torch.bfloat16)
    model = get_peft_model(base, lora())
    assert len(adapters(model, PackedLoraLinear)) == 14
    train(model)
    adapted = model.base_model.model.model.layers[0].mlp.up_proj
    a, b, s = adapted.lora_A["default"], adapted.lora_B["default"], adapted.scaling["default"]
    assert torch.equal(adapted(x), (adapted.base_layer(x) + b(a(x.float())) * s).to(torch.bfloat16))
    with model.disable_adapter():
        assert torch.equal(logits(model), base_logits)
    y = logits(model)

    model.save_pretrained(tmp_path / "adapter")  # the adapter alone, onto the same codes
    again = PeftModel.from_pretrained(copy.deepcopy(model).unload(), tmp_path / "adapter")
    assert torch.equal(logits(again), y)

    codes, delta = adapted.base_layer.weight, adapted.get_delta_weight("default")
    merged = model.merge_and_unload()
    up = merged.model.layers[0].mlp.up_proj
    assert type(up.weight) is type(codes)
    want = nn.Linear(128, 256, dtype=torch.bfloat16)
    want.weight = nn.Parameter((codes.dequantize() + delta).to(torch.bfloat16))
    quantize_(want, config)
    assert same_bits(up.weight, want.weight)
    save_pretrained(merged, tmp_path / "merged")
    assert torch.equal(logits(load_pretrained(tmp_path / "merged")), logits(merged))


def test_the_adapter_of_a_prepared_base_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = prepared(Int4WeightConfig(32))
    state = copy.deepcopy(base.state_dict())
    model = get_peft_model(base, lora())
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    fresh = prepared(Int4WeightConfig(32))
    fresh.load_state_dict(state)
    again = PeftModel.from_pretrained(fresh, tmp_path / "adapter", is_trainable=True)
    assert len(adapters(again, QATLoraLinear)) == 14
    assert torch.equal(logits(again), logits(model))
    train(model)
    train(again)
    assert torch.equal(logits(again), logits(model))
    converted = again.merge_and_unload()
    quantize_(converted, QATConfig(step="convert"))
    save_pretrained(converted, tmp_path / "merged")
    assert torch.equal(logits(load_pretrained(tmp_path / "merged")), logits(model))


def test_a_loaded_4_bit_checkpoint_trains_adapters_in_trainer(tmp_path: Path) -> None:
    save_pretrained(packed(Int4WeightConfig(32)), tmp_path / "base")
    model = get_peft_model(load_pretrained(tmp_path / "base"), lora())
    before = logits(model)
    trainer(model, tmp_path, IDS, 2).train()
    assert not torch.equal(logits(model), before)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }


def test_dropout_and_mixed_batches_on_a_prepared_base_and_svd_inits_on_codes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"q_proj: .*lora_dropout"):
        get_peft_model(prepared(Int4WeightConfig(32)), lora(lora_dropout=0.1))
    with pytest.raises(ValueError, match="pissa"):
        get_peft_model(packed(Int4WeightConfig(32)), lora(init_lora_weights="pissa"))
    model = get_peft_model(prepared(Int4WeightConfig(32)), lora())
    with pytest.raises(ValueError, match="adapter_names"):
        model.eval()(IDS, adapter_names=["default", "__base__"])


def test_quantising_under_adapters_is_refused() -> None:
    model = get_peft_model(llama(), lora())
    with pytest.raises(ValueError, match=r"q_proj\.base_layer"):
        quantize_(
            model,
            Int8WeightConfig(),
            filter_fn=lambda m, fqn: "layers.0.self_attn.q_proj" in fqn and isinstance(m, nn.Linear),
        )
    assert all(type(m.weight) is nn.Parameter for m in model.modules() if isinstance(m, nn.Linear))


def test_unprepare_under_adapters_is_refused() -> None:
    model = get_peft_model(prepared(Int4WeightConfig(32)), lora())
    y = logits(model)
    with pytest.raises(ValueError, match=r"q_proj\.base_layer"):
        unprepare(model)
    assert torch.equal(logits(model), y)
    assert unprepare(model.merge_and_unload()) == 14


@pytest.mark.parametrize(
    "swap", [unprepare, lambda base: quantize_(base, QATConfig(step="convert"))], ids=["unprepare", "convert"]
)
def test_an_adapter_whose_base_was_swapped_says_so(swap: Any) -> None:
    adapted, x, _ = layer(Int4WeightConfig(32))
    swap(adapted.base_layer)
    for use in (lambda: adapted(x), adapted.merge):
        with pytest.raises(ValueError, match=r"^up: "):
            use()
    adapted, x, _ = layer(Int4WeightConfig(32))
    adapted.merge()
    y, kept = adapted(x), list(adapted.kept)
    quantize_(adapted.base_layer, QATConfig(step="convert"))
    assert torch.equal(adapted(x), y)
    with pytest.raises(ValueError, match=r"^up: "):
        adapted.unmerge()
    assert adapted.merged
    assert adapted.kept == kept


def test_an_int4_tensor_of_a_missing_kernel_is_merged() -> None:
    model = nn.ModuleDict({"up": nn.Linear(128, 64, dtype=torch.bfloat16)})
    quantize_(model, Int4WeightOnlyConfig(64))
    adapted = get_peft_model(model, lora(target_modules=["up"]))
    merged = adapted.merge_and_unload()
    assert type(merged["up"].weight).__name__ == "Int4Tensor"
    assert not isinstance(merged["up"].weight, PackedTensor)


def test_an_unmerged_model_against_its_merged_form_says_merge_first() -> None:
    adapters = get_peft_model(prepared(Int4WeightConfig(32)), lora()).eval()
    merged = copy.deepcopy(adapters).merge_and_unload()
    quantize_(merged, QATConfig(step="convert"))
    with pytest.raises(ValueError, match="model_a"):
        verify(adapters, merged, {"input_ids": IDS})
