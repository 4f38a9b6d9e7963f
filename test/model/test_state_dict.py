"""state_dict, copies and casts of converted layers: codes and scales are moved and copied, never made again."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)

from aoquant import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    quantize_,
)

OURS = {
    "nvfp4": NVFP4WeightConfig(),
    "nvfp4-none": NVFP4WeightConfig(outer="none", activation=None),
    "fouroversix-tiles": NVFP4WeightConfig(rule="four_over_six", activation="fouroversix", tile=16),
    "gridflip": GridFlipFP4WeightConfig("sided", c=0.2),
    "int4-g32": Int4WeightConfig(32),
    "intx3-g32": IntxWeightConfig(3),
    "intx5-row-asym": PackedWeightConfig("intx5-row-asym"),
    "int8": Int8WeightConfig(activation="int8-row"),
    "fp8": FP8WeightConfig(),
    "mxfp4": MXFP4WeightConfig(),
    "mxfp8": MXFP8WeightConfig(),
    "fp8-tiles": PackedWeightConfig("fp8-8x32", "fp8-1x32"),
    "stretched3-g32": PackedWeightConfig("stretched3-g32"),
    "high-precision": PackedWeightConfig("high-precision", "mxfp4"),
}
TORCHAO = {
    "torchao-intx": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "torchao-int8": Int8DynamicActivationInt8WeightConfig(),
    "torchao-fp8": Float8WeightOnlyConfig(),
    "torchao-nvfp4": NVFP4WeightOnlyConfig(),
}
ALL = pytest.mark.parametrize("config", (OURS | TORCHAO).values(), ids=OURS | TORCHAO)
PACKED = pytest.mark.parametrize("config", OURS.values(), ids=OURS)
X = torch.linspace(-2, 2, 3 * 64).view(3, 64)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, dtype=dtype)
        self.down = nn.Linear(128, 64, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x.to(self.up.bias.dtype))))


def converted(config: Any, dtype: torch.dtype = torch.bfloat16) -> Model:
    model = Model(dtype)
    quantize_(model, QATConfig(config, step="prepare"))
    quantize_(model, QATConfig(step="convert"))
    return model


def parts(weight: Any) -> list[tuple[torch.dtype, torch.Size, list[int]]]:
    """Bytes of every tensor that a tensor subclass holds."""
    tensors = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    return [(t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).tolist()) for t in tensors]


def assert_equal(a: Model, b: Model) -> None:
    assert type(a.up.weight) is type(b.up.weight)
    assert parts(a.up.weight) == parts(b.up.weight)
    with torch.no_grad():
        assert torch.equal(a(X), b(X))


def saved(model: nn.Module) -> dict[str, Tensor]:
    """state_dict through a file, loaded as safely as torch can."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


@ALL
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_into_a_fresh_skeleton(config: Any, device: str) -> None:
    model = converted(config)
    with torch.device(device):
        skeleton = Model()
    result = skeleton.load_state_dict(saved(model), assign=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_equal(skeleton, model)


def test_int4_tensor_into_a_fresh_skeleton() -> None:
    model, skeleton = converted(Int4WeightOnlyConfig(64)), Model()
    skeleton.load_state_dict(saved(model), assign=True)
    assert parts(skeleton.up.weight) == parts(model.up.weight)


@ALL
def test_into_a_quantised_skeleton(config: Any) -> None:
    model, skeleton = converted(config), Model()
    quantize_(skeleton, config)
    held = skeleton.up.weight
    assert parts(held) != parts(model.up.weight)
    skeleton.load_state_dict(saved(model))
    assert skeleton.up.weight is held
    assert_equal(skeleton, model)


@PACKED
def test_mismatches_say_what_to_do(config: Any) -> None:
    model = converted(config)
    with pytest.raises(RuntimeError, match=r"up.weight.*a float weight cannot take packed codes.* assign=True"):
        Model().load_state_dict(model.state_dict())
    before = parts(model.up.weight)
    with pytest.raises(RuntimeError, match=r"up.weight.*load float weights into the float model and quantise it then"):
        model.load_state_dict(Model().state_dict())
    with pytest.raises(RuntimeError, match=r"up.weight.*replaced by their like only.* got .*weight=intx7-row"):
        model.load_state_dict(converted(PackedWeightConfig("intx7-row")).state_dict())
    assert parts(model.up.weight) == before


def test_static_outer_scale_is_part_of_the_recipe() -> None:
    one, two = (converted(NVFP4WeightConfig(outer="static", pts=p)) for p in (0.001, 0.002))
    with pytest.raises(RuntimeError, match=r"replaced by their like only.*got .*static:0.002"):
        one.load_state_dict(two.state_dict())


def test_scales_of_another_dtype_are_not_rounded() -> None:
    """A cast layer keeps its scales as they were made; a skeleton of the new dtype has others."""
    skeleton, model = converted(Int4WeightConfig(32), torch.bfloat16), converted(Int4WeightConfig(32), torch.float32)
    with pytest.raises(RuntimeError, match="replaced by their like only"):
        skeleton.load_state_dict(model.to(torch.bfloat16).state_dict())


@PACKED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_cast_keeps_the_codes(config: Any, dtype: torch.dtype) -> None:
    model = converted(config)
    before = parts(model.up.weight)
    model.to(dtype)
    assert model.up.weight.dtype == model.up.bias.dtype == dtype
    assert isinstance(model.up.weight, PackedTensor)
    assert parts(model.up.weight) == before
    assert model(X).dtype == dtype
    model.to(torch.bfloat16)
    fresh = Model()
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert parts(fresh.up.weight) == before


@ALL
def test_meta_deepcopy_and_pickle(config: Any) -> None:
    model = converted(config)
    twin = copy.deepcopy(model)
    assert_equal(twin, model)
    assert twin.up.weight.qdata.data_ptr() != model.up.weight.qdata.data_ptr()
    assert twin.up.extra_repr() == model.up.extra_repr()
    twin.to("meta")
    assert type(twin.up.weight) is type(model.up.weight)
    assert all(getattr(twin.up.weight, n).is_meta for n in twin.up.weight.__tensor_flatten__()[0])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    whole = torch.load(file, weights_only=False)
    assert_equal(whole, model)
    assert whole.up.extra_repr() == model.up.extra_repr()


@pytest.mark.parametrize("config", [Int4WeightConfig(32), IntxWeightConfig(3), Int8WeightConfig()], ids=repr)
def test_plain_pickle(config: Any) -> None:
    """Not for float8 parts: torch 2.13 pickles a float8 tensor, of any kind, and cannot load it back without
    torch.load.
    """
    model = converted(config)
    assert_equal(pickle.loads(pickle.dumps(model)), model)


def test_tied_layers_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    quantize_(model, NVFP4WeightConfig())
    state = saved(model)
    skeleton = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    skeleton.load_state_dict(state, assign=True)
    assert parts(skeleton["b"].weight) == parts(model["a"].weight)
    twin = copy.deepcopy(model)
    assert twin["b"].weight is twin["a"].weight


def test_tiles_are_cut_between_rows_of_tiles() -> None:
    """128 rows of scale tiles of 8: rows go in eights, and keep their own scales."""
    weight = converted(OURS["fp8-tiles"]).up.weight.data
    assert torch.equal(weight[16:32].dequantize(), weight.dequantize()[16:32])
    assert weight[16:32].scale.shape == (2, 2)
    assert torch.equal(weight[120:].dequantize(), weight.dequantize()[120:])
    assert torch.equal(weight[:, 32:].dequantize(), weight.dequantize()[:, 32:])
    with pytest.raises(ValueError, match="cut along N at multiples of 8, got 4:12"):
        weight[4:12]
