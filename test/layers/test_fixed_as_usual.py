"""Inside `fixed_weights`: weights that are computed for each call, made in inference mode, or under delayed scaling are
encoded as usual, so results are those outside; and a scale that is written is a changed weight.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from support.models import IDS, narrow_llama
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

import aoquant
from aoquant import HybridConfig, QATConfig, fixed_weights, quantize_


def linear(config: Any = "int4-g32", **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    quantize_(model, QATConfig(config, step="prepare", **options))
    return model


def x_of() -> Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def steps(model: nn.Module, run: Callable[[], Tensor], fixed: bool) -> list[Tensor]:
    """Results and gradients of two micro-batches, and results of two rollouts behind each."""
    found = []
    with fixed_weights(model) if fixed else contextlib.nullcontext():
        for _ in range(2):
            y = run()
            y.float().square().sum().backward()
            found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            with torch.no_grad():
                found += [run(), run()]
    return found


def same(made: Callable[[], nn.Module], run: Callable[[nn.Module], Tensor]) -> None:
    inside, outside = made(), made()
    got, want = steps(inside, lambda: run(inside), True), steps(outside, lambda: run(outside), False)
    assert len(got) == len(want) and all(map(torch.equal, got, want))


class Half(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


def parametrised() -> nn.Module:
    model = linear()
    parametrize.register_parametrization(model[0], "weight", Half())
    return model


def pruned() -> nn.Module:
    model = linear()
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


def delayed() -> nn.Module:
    e4m3 = "te-fp8-tensor"
    return linear("fp8-hybrid", backward=HybridConfig.fwd_bwd(e4m3, e4m3, amax_history=4)).train()


@pytest.mark.parametrize("made", [parametrised, pruned, delayed])
def test_results_are_those_outside(made: Callable[[], nn.Module]) -> None:
    same(made, lambda m: m(x_of()))


def test_weights_of_a_functional_call() -> None:
    other = {name: p.detach() * 2 for name, p in linear().named_parameters()}
    same(linear, lambda m: m(x_of()) + functional_call(m, other, (x_of(),)))


def test_lora_merges_for_each_call() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = narrow_llama()
        quantize_(model, QATConfig("int4-g32", step="prepare"))
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(model, config).train()

    same(made, lambda m: m(input_ids=IDS).logits)
    model = made()
    with fixed_weights(model):
        tokens = model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        with model.disable_adapter():
            model(input_ids=IDS)
        assert torch.equal(tokens, model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))


@torch.no_grad()
def test_a_weight_of_inference_mode_is_seen_when_written() -> None:
    with torch.inference_mode():
        model = linear()
        with fixed_weights(model):
            before = model(x_of())
            model[0].weight.mul_(2)
            assert torch.equal(model(x_of()), copy.deepcopy(model)(x_of()))
            assert not torch.equal(model(x_of()), before)


@pytest.mark.parametrize("config", ["int8", "int8-weight"])
@torch.no_grad()
def test_a_written_scale_is_refused_by_name(config: str) -> None:
    model = linear(config, scales="learned")
    aoquant.calibrate(model, lambda m: m(x_of()))
    with fixed_weights(model):
        model(x_of())
        model[0].weight_scale.mul_(1.3)
        with pytest.raises(ValueError, match=r"^0: its weight, or a scale of it, changed inside"):
            model(x_of())
