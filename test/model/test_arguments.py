"""What is no model and no path: each public function refuses it by the argument's name, before any work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aoquant
from aoquant import LinearRecipe, QATConfig, get_format, quantize_
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
        if p.annotation == "nn.Module"
    }
    assert taken == set(MODELS)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("place", MODELS, ids="-".join)
def test_what_is_no_model_is_refused(place: tuple[str, str], kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^{place[1]} must be an nn.Module, got {kind}: give the model itself"):
        MODELS[place](WRONG[kind])


@pytest.mark.parametrize("function", [full_state_dict, quantized_all_gather])
def test_what_is_no_model_is_refused_on_several_devices(function: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=r"^model must be an nn.Module, got list: "):
        function([prepared()])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda at: aoquant.load_pretrained(prepared()), "directory must be a checkpoint folder, got Sequential"),
        (lambda at: aoquant.save_pretrained(prepared(), None), "directory must be the folder to write, got NoneType"),
        (lambda at: aoquant.export([1], at), "model must be a converted model or the folder of one, got list"),
        (lambda at: aoquant.export(prepared(), None), "directory must be the folder to write, got NoneType"),
        (lambda at: aoquant.convert_checkpoint(prepared(), "int8", at), "model must be a model folder, got Sequential"),
        (lambda at: aoquant.convert_checkpoint(at, "int8", None), "out must be the folder to write, got NoneType"),
    ],
)
def test_what_is_no_path_is_refused(call: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}: give a path, a str or os.PathLike$"):
        call(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: aoquant.get_recipe(QATConfig("nvfp4")), "a recipe is named by a string, such as 'nvfp4', got QATConfig"),
        (lambda: get_format(["nvfp4"]), "a format is named by a string, such as 'nvfp4', got list"),
        (lambda: LinearRecipe(None, "nvfp4"), "an operand is made of a format, such as .*, got 'nvfp4'"),
        (lambda: LinearRecipe("nvfp4", get_format("nvfp4")), "an operand is made of a format, such as .*, got 'nvfp4'"),
        (lambda: aoquant.packed_experts(prepared()[0]), r"packed_experts takes a list of PackedTensors \(N, K\), got QATL"),
        (lambda: aoquant.packed_experts(IDS), r"packed_experts takes a list of PackedTensors \(N, K\), got Tensor"),
        (lambda: aoquant.packed_linear([1], IDS, format="nvfp4"), "packed_linear: codes must be a tensor, got list"),
        (lambda: aoquant.packed_linear(IDS, None, format="nvfp4"), "packed_linear: scale must be a tensor, got NoneType"),
        (lambda: aoquant.packed_linear(IDS, IDS, bias=[0], format="nvfp4"), "packed_linear: bias must be a tensor, got l"),
    ],
)  # fmt: skip
def test_other_arguments_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_converted_model_is_not_converted_again() -> None:
    model = prepared()
    quantize_(model, QATConfig(step="convert"))
    with pytest.raises(
        ValueError, match=r"no layer is prepared, and 1 weight\(s\), such as 0.weight, are packed already"
    ):
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
