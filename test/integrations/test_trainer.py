"""The Trainer's callback: which steps are fake-quantised, what is logged, and that a resumed run is where it was."""

import copy
import math
from pathlib import Path

import pytest
import torch
from support import trainers
from support.models import llama_config
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from aoquant import NVFP4WeightConfig, QATConfig, quantize_, quantized_model_init
from aoquant.integrations.trainer import MEAN, MIN, OUTPUT, QATCallback
from aoquant.linear.prepared import QATLinear
from aoquant.report import verify
from aoquant.report.measure import sqnr

IDS = torch.arange(12 * 8).reshape(12, 8) % 31
LAYERS = 7  # of one Llama block


class Seen(TrainerCallback):
    """Whether fake quantisation was on in each forward of training, and in each evaluation."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.train: list[bool] = []
        self.eval: list[bool] = []
        layers = [m for m in model.modules() if isinstance(m, QATLinear)]
        assert len(layers) == LAYERS
        model.register_forward_pre_hook(
            lambda m, _: (self.train if m.training else self.eval).append(layers[0].fake_quant)
        )
        self.layers = layers


def llama(*, prepare: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(1)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(llama_config(vocab_size=32, max_position_embeddings=16, **size))
    if prepare:
        quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    return model


def trainer(model: LlamaForCausalLM, folder: Path, steps: int = 3, **arguments: object) -> Trainer:
    return trainers.trainer(model, folder, IDS, steps, **arguments)


def logged(trainer: Trainer, key: str) -> dict[int, float]:
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


def test_fake_quant_starts_after_n_steps_and_the_converted_model_is_what_was_trained(tmp_path: Path) -> None:
    model = llama()
    seen, run = Seen(model), trainer(model, tmp_path, 3, eval_strategy="steps", eval_steps=1)
    QATCallback(fake_quant_after_n_steps=2).attach(run)
    before = copy.deepcopy(model.state_dict())
    run.train()
    assert seen.train == [False, False, True]
    assert seen.eval == [False, True, True]  # the evaluation after step 2 is what step 3 trains
    assert all(layer.fake_quant for layer in seen.layers)
    assert any(not torch.equal(v, before[k]) for k, v in model.state_dict().items())
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    assert len(verify(model, converted, {"input_ids": IDS[:2]}).layers) == LAYERS


def test_steps_are_optimizer_steps_when_gradients_accumulate(tmp_path: Path) -> None:
    model = llama()
    seen, run = Seen(model), trainer(model, tmp_path, 2, gradient_accumulation_steps=2)
    QATCallback(fake_quant_after_n_steps=1).attach(run)
    run.train()
    assert seen.train == [False, False, True, True]


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_is_where_it_was(step: int, tmp_path: Path) -> None:
    def make(folder: str) -> tuple[Seen, Trainer]:
        model = llama()
        run = trainer(model, tmp_path / folder, 4, save_strategy="steps", save_steps=1, seed=3)
        QATCallback(fake_quant_after_n_steps=2).attach(run)
        return Seen(model), run

    seen, whole = make("whole")
    whole.train()
    assert seen.train == [False, False, True, True]
    seen_again, resumed = make("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert seen_again.train == seen.train[step:]
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[key]), key


def test_logged_numbers_are_those_of_the_weights(tmp_path: Path) -> None:
    model = llama()
    seen, run = Seen(model), trainer(model, tmp_path, 3)
    run.add_callback(QATCallback(batch=(IDS[:2],), fake_quant_after_n_steps=2))
    run.train()
    assert seen.train == [False, False, True]  # measuring leaves the switch alone
    layers = [m for m in model.modules() if isinstance(m, QATLinear)]
    found = [sqnr(m.weight, m.prepared.recipe.fprop_weight.fake_quantize(m.weight)) for m in layers]
    assert sorted(logged(run, MIN)) == [1, 2, 3]  # whenever the loss is logged
    assert logged(run, MIN)[3] == min(found)
    assert logged(run, MEAN)[3] == pytest.approx(sum(found) / LAYERS)
    plain = copy.deepcopy(model).eval()
    for m in plain.modules():
        if isinstance(m, QATLinear):
            m.fake_quant = False
    model.eval()
    with torch.no_grad():
        assert logged(run, OUTPUT)[3] == sqnr(plain(IDS[:2]).logits, model(IDS[:2]).logits) < math.inf


def test_errors_and_warnings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fake_quant_after_n_steps must be 0 or more, got -1"):
        QATCallback(-1)
    with pytest.raises(ValueError, match="log_every must be 1 or more, or None, got 0"):
        QATCallback(log_every=0)
    run = trainer(llama(prepare=False), tmp_path)
    QATCallback().attach(run)
    with pytest.raises(ValueError, match="no prepared layer"):
        run.train()
    run = trainer(llama(), tmp_path, 2)
    QATCallback(2).attach(run)
    with pytest.warns(UserWarning, match="no step is fake-quantised"):
        run.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_trained_saved_and_resumed(tmp_path: Path, dtype: torch.dtype) -> None:
    """The Trainer makes its own optimizer, logs SQNR, saves and resumes, as it does for the prepared float32 model."""
    states = []
    for how in ("prepared", "packed", "resumed"):
        model = llama(prepare=False).to(dtype)
        if how == "prepared":
            quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
        else:
            quantized_model_init(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
        folder = tmp_path / ("packed" if how == "resumed" else how)
        run = trainer(model, folder, 4, save_strategy="steps", save_steps=2)
        QATCallback(fake_quant_after_n_steps=1).attach(run)
        run.train(resume_from_checkpoint=str(folder / "checkpoint-2") if how == "resumed" else None)
        assert all(db > 10 for db in logged(run, MIN).values())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        whole = LlamaForCausalLM.from_pretrained(folder / "checkpoint-4", dtype="auto")
        if dtype == torch.float32:
            assert all(torch.equal(value, states[-1][name]) for name, value in whole.state_dict().items())
    for name, value in states[2].items():
        assert torch.equal(value, states[1][name]), name
        assert dtype == torch.bfloat16 or torch.equal(value, states[0][name]), name
