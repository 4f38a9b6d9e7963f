"""What is no model and no path: each public function refuses it by the argument's name, before any work."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.moe_models import model_of
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

import aoquant
from aoquant import HybridConfig, Int8WeightConfig, LinearRecipe, QATConfig, calibrate, get_format, quantize_
from aoquant.integrations.distributed import full_state_dict, quantized_all_gather

IDS = torch.arange(4)
LLM = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=1)))  # as vLLM's


def prepared() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, QATConfig("int4-g32"))
    return model


def entered(wrong: Any) -> None:
    with aoquant.fixed_weights(wrong):
        raise AssertionError("the block was entered")


# function and argument: the call with something in the argument's place
MODELS: dict[tuple[str, str], Callable[[Any], object]] = {
    ("calibrate", "model"): lambda wrong: aoquant.calibrate(wrong, [IDS]),
    ("calibrate_ptq", "model"): lambda wrong: aoquant.calibrate_ptq(wrong, [IDS], aoquant.CalibrateConfig("int4-g32")),
    ("choose_formats", "model"): lambda wrong: aoquant.choose_formats(wrong, ["int8"], batches=[IDS], bits=8.5),
    ("coverage", "model"): aoquant.coverage,
    ("fixed_weights", "model"): entered,
    ("freeze_routers", "model"): aoquant.freeze_routers,
    ("parameter_groups", "model"): lambda wrong: aoquant.parameter_groups(wrong, 0.1),
    ("quantize_", "model"): lambda wrong: quantize_(wrong, "int4-g32"),
    ("quantized_model_init", "model"): lambda wrong: aoquant.quantized_model_init(wrong, QATConfig("nvfp4")),
    ("refresh_", "packed"): lambda wrong: aoquant.refresh_(wrong, prepared()),
    ("refresh_", "prepared"): lambda wrong: aoquant.refresh_(prepared(), wrong),
    ("report", "model_a"): lambda wrong: aoquant.report(wrong, prepared(), IDS),
    ("report", "model_b"): lambda wrong: aoquant.report(prepared(), wrong, IDS),
    ("router_drift", "model_a"): lambda wrong: aoquant.router_drift(wrong, prepared(), IDS),
    ("router_drift", "model_b"): lambda wrong: aoquant.router_drift(prepared(), wrong, IDS),
    ("set_fake_quant", "model"): lambda wrong: aoquant.set_fake_quant(wrong, True),
    ("sync_vllm", "prepared"): lambda wrong: aoquant.sync_vllm(LLM, wrong),
    ("unpack_", "model"): aoquant.unpack_,
    ("unprepare", "model"): aoquant.unprepare,
    ("verify", "prepared"): lambda wrong: aoquant.verify(wrong, prepared(), IDS),
    ("verify", "converted"): lambda wrong: aoquant.verify(prepared(), wrong, IDS),
}
WRONG = {"list": [prepared()], "NoneType": None, "QATConfig": QATConfig("int4-g32"), "dict": {}}


def test_every_public_function_that_takes_a_model_is_here() -> None:
    taken = {
        (name, argument)
        for name in aoquant.__all__
        if inspect.isfunction(inspect.unwrap(function := getattr(aoquant, name)))
        for argument, p in inspect.signature(function).parameters.items()
        if p.annotation is nn.Module
    }
    assert taken == set(MODELS)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("place", MODELS, ids="-".join)
def test_what_is_no_model_is_refused(place: tuple[str, str], kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^{place[1]} .*{kind}"):
        MODELS[place](WRONG[kind])


OTHERS: dict[str, Callable[[Path], object]] = {
    "^model .*list: ": lambda at: full_state_dict([prepared()]),
    "^model .* list: ": lambda at: quantized_all_gather([prepared()]),
    "^directory .*Sequential": lambda at: aoquant.load_pretrained(prepared()),
    "^directory .*NoneType": lambda at: aoquant.save_pretrained(prepared(), None),
    "^model .*list": lambda at: aoquant.export([1], at),
    "^directory .* NoneType": lambda at: aoquant.export(prepared(), None),
    "^model .*Sequential": lambda at: aoquant.convert_checkpoint(prepared(), "int8", at),
    "^out .*NoneType": lambda at: aoquant.convert_checkpoint(at, "int8", None),
    "filter_fn .*str": lambda at: quantize_(prepared(), "nvfp4", filter_fn="0"),
    "recipe .*QATConfig": lambda at: aoquant.get_recipe(QATConfig("nvfp4")),
    "format .*list": lambda at: get_format(["nvfp4"]),
    "operand .*'nvfp4'": lambda at: LinearRecipe(None, "nvfp4"),
    "operand .* 'nvfp4'": lambda at: LinearRecipe("nvfp4", get_format("nvfp4")),
    "packed_experts .*QATL": lambda at: aoquant.packed_experts(prepared()[0]),
    "packed_experts .*Tensor": lambda at: aoquant.packed_experts(IDS),
    "packed_linear: codes .*list": lambda at: aoquant.packed_linear([1], IDS, format="nvfp4"),
    "packed_linear: scale .*NoneType": lambda at: aoquant.packed_linear(IDS, None, format="nvfp4"),
    "packed_linear: bias .*list": lambda at: aoquant.packed_linear(IDS, IDS, bias=[0], format="nvfp4"),
    "backward .*quartet": lambda at: QATConfig("nvfp4", backward="quartet3"),
    r"size .*16\.0": lambda at: aoquant.Hadamard(16.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        OTHERS[name](tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_converted_model_is_not_converted_again() -> None:
    model = prepared()
    quantize_(model, QATConfig(step="convert"))
    with pytest.raises(ValueError, match=r"0.weight"):
        quantize_(model, QATConfig(step="convert"))


@pytest.mark.parametrize("form", ["float", "converted"])
def test_fixed_weights_leaves_a_model_without_prepared_layers_alone(form: str) -> None:
    model = prepared() if form == "converted" else nn.Sequential(nn.Linear(64, 32))
    if form == "converted":
        quantize_(model, QATConfig(step="convert"))
    x = torch.randn(3, 64)
    want = model(x)
    with aoquant.fixed_weights(model):
        assert torch.equal(model(x), want)
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("name", ["int4-g32", "nvfp4", "torchao-int8", "torchao-fp8"])
def test_codes_are_not_loaded_into_a_prepared_layer(name: str, assign: bool) -> None:
    prepared = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    quantize_(prepared, aoquant.get_recipe(name).prepare())
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    with pytest.raises(ValueError, match=r"^0\.weight: "):
        prepared.load_state_dict(converted.state_dict(), assign=assign)
    assert type(prepared[0].weight) is nn.Parameter


class OneInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_a_batch_with_labels_is_told_of_its_parts() -> None:
    model = OneInput()
    quantize_(model, QATConfig(Int8WeightConfig(activation="int8-tensor-static"), step="prepare"))
    x, y = torch.randn(4, 32), torch.randn(4)
    with pytest.raises(ValueError, match=r"2 parts .*OneInput"):
        calibrate(model, [(x, y)])
    calibrate(model, [(x,), [x], {"x": x}, x])
    assert model.linear.calibrated  # type: ignore[union-attr]


def test_delayed_scaling_of_experts_is_refused_as_such() -> None:
    config = HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=4)
    experts = FqnToConfig({r"re:.*experts\.(gate_up_proj|down_proj)": config})
    with pytest.raises(ValueError, match="history"):
        quantize_(model_of("mixtral"), experts)
