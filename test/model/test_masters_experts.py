"""quantized_model_init of stacked experts: the masters' run is the prepared float32 model's, bit for bit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.moe_models import model_of
from support.trainers import trainer
from torch import nn
from torchao.quantization import FqnToConfig

from aoquant import (
    Cast,
    HybridConfig,
    QATConfig,
    coverage,
    explain,
    quantize_,
    quantized_model_init,
    report,
    set_fake_quant,
    unprepare,
)
from aoquant.distributed.gathered import Experts, GatheredWeight, with_gradient
from aoquant.experts.grouped_linear import Rows, grouped_at_once
from aoquant.integrations.trainer import QATCallback
from aoquant.recipes import get_recipe

IDS = torch.arange(12).view(2, 6) * 5
CONFIGS: dict[str, Any] = {
    "mxfp4": lambda: QATConfig("mxfp4"),
    "nvfp4": lambda: QATConfig("nvfp4"),
    "int4-g32-experts": lambda: QATConfig("int4-g32-experts"),
    "nvfp4-training": lambda: get_recipe("nvfp4-training").prepare(seed=3),
    "nvfp4-original": lambda: HybridConfig.fwd_bwd("te-nvfp4", "te-nvfp4").replaced(dgrad_weight=Cast("te-nvfp4")),
}


def small(family: str) -> Any:
    """A float32 model of one layer."""
    model = model_of(family).float()
    del model.model.layers[1:]
    return model


def pair(family: str, name: str, implementation: str = "grouped_mm") -> tuple[Any, Any, Any]:
    """A prepared float32 model, one with packed weights, and its masters."""
    plain = small(family)
    if implementation != "eager":
        plain.set_experts_implementation(implementation)
    packed = copy.deepcopy(plain)
    quantize_(plain, CONFIGS[name]())
    return plain, packed, quantized_model_init(packed, CONFIGS[name]())


def steps(model: Any, parameters: Any, count: int = 2) -> list[float]:
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    for _ in range(count):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def same_state(a: nn.Module, b: nn.Module) -> None:
    want = a.state_dict()
    assert list(b.state_dict()) == list(want)
    for key, value in b.state_dict().items():
        assert torch.equal(value, want[key]), key


CASES = [
    ("mixtral", "nvfp4-training", "grouped_mm"),
    ("gpt-oss", "nvfp4-original", "eager"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("mixtral", "mxfp4", "grouped_mm"),
            ("mixtral", "int4-g32-experts", "eager"),
            ("gpt-oss", "nvfp4", "grouped_mm"),
            ("llama-4", "mxfp4", "eager"),
            ("jetmoe", "nvfp4", "eager"),
        )
    ),
]


@pytest.mark.parametrize(("family", "name", "implementation"), CASES)
def test_steps_equal_the_float32_models(family: str, name: str, implementation: str) -> None:
    plain, packed, masters = pair(family, name, implementation)
    assert steps(packed, masters.parameters()) == steps(plain, plain.parameters())
    same_state(plain, masters)
    masters.restore()
    for model in (plain, packed):
        quantize_(model.eval(), QATConfig(step="convert"))
    with torch.no_grad():
        assert torch.equal(packed(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_what_experts_hold() -> None:
    """Codes and scales of four bits a value; the parameters are the masters, under the same names."""
    _, packed, masters = pair("gpt-oss", "int4-g32-experts")
    experts = packed.model.layers[0].mlp.experts
    w = experts.gate_up_proj
    assert type(w) is GatheredWeight and w.shape == (8, 64, 128) and w.transposed
    held = sum(t.numel() * t.element_size() for t in w.parts)
    assert held <= 0.75 * w.numel()
    assert [*masters.named_parameters()] == [*packed.named_parameters()]
    packed(input_ids=IDS, labels=IDS).loss.backward()
    assert w.grad is experts._parameters["gate_up_proj"].grad is not None


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_packed_experts_have_the_values_of_the_float32_model(family: str) -> None:
    """Read a stack and an expert, before they are encoded and after."""
    plain, packed, _ = pair(family, "mxfp4")
    of, made = (m.model.layers[0].mlp.experts for m in (plain, packed))
    assert isinstance(made.down_proj, GatheredWeight)
    for name in of.stacks:
        assert torch.equal(made.values(name), of.values(name)) and made.values(name).dtype == torch.float32
        assert torch.equal(made.matrix(name, 2), of.matrix(name, 2))
        assert torch.equal(made.quantised_weight(name), of.quantised_weight(name))
        a, b = (m.encode_expert(name, 2, torch.float32) for m in (made, of))
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8))


def test_a_parameter_that_is_prepared_afterwards_is_encoded_as_in_the_float32_model() -> None:
    """Its parameter is no master, beside one that is."""
    plain = small("mixtral")
    packed = copy.deepcopy(plain)
    first = FqnToConfig({"re:.*gate_up_proj": QATConfig("mxfp4")})
    then = FqnToConfig({"re:.*down_proj": QATConfig("nvfp4")})
    quantize_(plain, first)
    quantized_model_init(packed, first)
    for model in (plain, packed):
        quantize_(model, then)
    of, made = (m.model.layers[0].mlp.experts for m in (plain, packed))
    assert isinstance(made.gate_up_proj, GatheredWeight) and isinstance(made.down_proj, nn.Parameter)
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(made.quantised_weight(name), of.quantised_weight(name))
        a, b = (m.encode_expert(name, 2, torch.float32) for m in (made, of))
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8))
    assert torch.equal(plain(input_ids=IDS).logits, packed(input_ids=IDS).logits)


def test_a_bf16_model_trains_on_float32_masters() -> None:
    model = small("mixtral").bfloat16()
    masters = quantized_model_init(model, QATConfig("mxfp4"))
    before = [m.detach().clone() for m in masters.masters()]
    assert all(m.dtype == torch.float32 for m in before)
    steps(model, masters.parameters())
    assert not any(torch.equal(m, b) for m, b in zip(masters.masters(), before, strict=True))
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        masters.restore()
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model.to(torch.bfloat16)(input_ids=IDS).logits, wanted)


def test_frozen_experts_and_other_precisions() -> None:
    """A frozen master gets no gradient; without fake quantisation the masters' values are multiplied."""
    plain, packed, _ = pair("mixtral", "mxfp4")
    for model in (plain, packed):
        model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
        model(input_ids=IDS, labels=IDS).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), packed.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for model in (plain, packed):
        set_fake_quant(model, False)
    assert torch.equal(plain(input_ids=IDS).logits, packed(input_ids=IDS).logits)


def test_a_master_that_was_written_or_loaded_is_packed_before_the_next_forward() -> None:
    plain, packed, masters = pair("gpt-oss", "nvfp4")
    with torch.no_grad():
        for model in (plain, packed):
            for p in model.parameters():
                p.mul_(1.5)
        assert torch.equal(plain(input_ids=IDS).logits, packed(input_ids=IDS).logits)
        moved = {name: value * 0.5 for name, value in plain.state_dict().items()}
        plain.load_state_dict(moved)
        masters.load_state_dict(moved)
        assert torch.equal(plain(input_ids=IDS).logits, packed(input_ids=IDS).logits)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_a_master_that_was_written_is_packed_under_autocast(family: str) -> None:
    """Each expert's codes are encoded by themselves, and torch stacks no float8 tensors under autocast."""
    plain, packed, _ = pair(family, "nvfp4")
    for model in (plain, packed):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain(input_ids=IDS).logits, packed(input_ids=IDS).logits)


def test_what_needs_the_weight_is_refused_by_name() -> None:
    plain, packed, masters = pair("mixtral", "int4-g32-experts")
    experts = packed.model.layers[0].mlp.experts
    before = masters.state_dict()["model.layers.0.mlp.experts.down_proj"].clone()
    for change in (
        lambda: quantize_(packed, QATConfig(step="convert")),
        lambda: quantize_(packed, HybridConfig.bwd("mxfp8")),
        lambda: quantized_model_init(packed, QATConfig("mxfp4")),
        lambda: report(plain, packed, {"input_ids": IDS}, progress=False),
        lambda: unprepare(packed),
        lambda: copy.deepcopy(packed),
        lambda: pickle.dumps(packed),
        lambda: setattr(experts, "down_proj", nn.Parameter(before)),
        lambda: packed.load_state_dict(plain.state_dict(), assign=True),
    ):
        with pytest.raises(ValueError, match=r"experts.*(masters\.restore|earlier call)"):
            change()
    assert torch.equal(experts._parameters["down_proj"], before)
    assert coverage(packed).share == coverage(plain).share
    assert str(explain(packed.model.layers[0].mlp.experts))


@pytest.mark.slow
def test_a_compiled_model_runs_experts_outside_its_graph() -> None:
    plain, packed, masters = pair("mixtral", "mxfp4")
    run = torch.compile(packed, backend="aot_eager")
    assert steps(run, masters.parameters()) == steps(plain, plain.parameters())
    same_state(plain, masters)


@pytest.mark.parametrize("transposed", [False, True])
def test_all_experts_at_once_give_the_loops_bits(transposed: bool) -> None:
    """The function that a GPU runs, over codes: outputs and gradients of the float stack."""
    recipe = QATConfig("nvfp4-weight")
    torch.manual_seed(0)
    model = small("gpt-oss" if transposed else "mixtral").bfloat16()
    plain = copy.deepcopy(model)
    quantize_(plain, recipe)
    quantized_model_init(model, recipe)
    codes, stack = (m.model.layers[0].mlp.experts for m in (model, plain))
    prepared = stack.stacks["down_proj"].recipe
    x = torch.randn(24, 64, dtype=torch.bfloat16)
    rows = Rows(torch.tensor([3, 3, 9, 12, 15, 20, 21, 24], dtype=torch.int32))
    found = []
    for w in (codes.down_proj, stack.down_proj):
        given = x.clone().requires_grad_()
        y = grouped_at_once(given, w, rows, prepared, transposed)
        y.float().square().sum().backward()
        found.append((y, given.grad, w.grad.bfloat16()))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    one = Experts.apply(with_gradient(codes.down_proj))[2]
    assert one.shape == (64, 64) and type(one) is GatheredWeight
    assert one.master is None and with_gradient(one) is one  # as FSDP gathers it
    assert with_gradient(x) is x


def test_all_experts_at_once_refuse_what_the_loop_does() -> None:
    """Inputs of another width, and codes that are written before backward."""
    model = small("mixtral").bfloat16()
    quantized_model_init(model, QATConfig("nvfp4-weight"))
    stack = model.model.layers[0].mlp.experts
    recipe, w = stack.stacks["down_proj"].recipe, stack.down_proj
    rows = Rows(torch.arange(3, 25, 3, dtype=torch.int32))
    x = torch.randn(24, 64, dtype=torch.bfloat16, requires_grad=True)
    for wrong in (x[:, :48], torch.cat((x, x), 1)):
        with pytest.raises(ValueError, match="K = 64"):
            grouped_at_once(wrong, w, rows, recipe)
    y = grouped_at_once(x, w, rows, recipe)
    w.rows.codes.add_(0)
    with pytest.raises(ValueError, match="run every backward before the step"):
        y.sum().backward()


def test_a_step_between_forward_and_backward_is_refused() -> None:
    _, packed, masters = pair("mixtral", "mxfp4")
    loss = packed(input_ids=IDS, labels=IDS).loss
    masters.refresh()
    with pytest.raises(ValueError, match="run every backward before the step"):
        loss.backward()


@pytest.mark.slow
def test_trainer_saves_and_resumes(tmp_path: Path) -> None:
    states = []
    for how in ("packed", "resumed"):
        model = small("gpt-oss")
        quantized_model_init(model, QATConfig("mxfp4"))
        run = trainer(model, tmp_path, IDS.repeat(4, 1), 4, save_strategy="steps", save_steps=2)
        QATCallback().attach(run)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if how == "resumed" else None)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())
