"""state_dict, copies and casts of converted layers: codes and scales are moved and copied, never made again."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.checkpoint_configs import OURS as FORMATS
from support.checkpoint_configs import TORCHAO
from torch import Tensor, nn

from aoquant import (
    Int4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    quantize_,
)

OURS: dict[str, Any] = FORMATS | {
    "intx5-row-asym": PackedWeightConfig("intx5-row-asym"),
    "fp8-tiles": PackedWeightConfig("fp8-8x32", "fp8-1x32"),
    "stretched3-g32": PackedWeightConfig("stretched3-g32"),
    "high-precision": PackedWeightConfig("high-precision", "mxfp4"),
}
ALL = pytest.mark.parametrize("config", (OURS | TORCHAO).values(), ids=OURS | TORCHAO)
PACKED = pytest.mark.parametrize("config", OURS.values(), ids=OURS)
X = torch.linspace(-2, 2, 3 * 128).view(3, 128)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Linear(128, 128, dtype=dtype)
        self.down = nn.Linear(128, 128, bias=False, dtype=dtype)

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
    assert not result.missing_keys and not result.unexpected_keys
    assert_equal(skeleton, model)


@pytest.mark.parametrize("way", ["quantise", "prepare, convert"])
@pytest.mark.parametrize("how", ["in place", "assigned", "emptied"])
@ALL
def test_into_a_quantised_skeleton(config: Any, how: str, way: str) -> None:
    """Of other weights, or of none: on the meta device codes are assigned, or copied in place once it is emptied."""
    model = converted(config)
    with torch.device("cpu" if how == "in place" else "meta"):
        skeleton = converted(config) if way == "prepare, convert" else Model()
    if way == "quantise":
        quantize_(skeleton, config)
    held = skeleton.up.weight
    assert (type(held), held.shape, held.dtype) == (type(model.up.weight), (128, 128), torch.bfloat16)
    assert held.is_meta if how != "in place" else parts(held) != parts(model.up.weight)
    if how == "emptied":
        if not isinstance(held, PackedTensor):
            pytest.skip("torchao's tensors are not all emptied")
        skeleton.to_empty(device="cpu")
    held = skeleton.up.weight
    skeleton.load_state_dict(saved(model), assign=how == "assigned")
    assert how == "assigned" or skeleton.up.weight is held
    assert_equal(skeleton, model)


@PACKED
def test_mismatches_are_refused_by_name(config: Any) -> None:
    model = converted(config)
    before = parts(model.up.weight)
    for target, source in (
        (Model(), model),
        (model, Model()),
        (model, converted(PackedWeightConfig("intx7-row"))),
    ):
        with pytest.raises(RuntimeError, match=r"up\.weight"):
            target.load_state_dict(source.state_dict())
    assert parts(model.up.weight) == before


def test_codes_under_other_scales_are_not_their_like() -> None:
    """A static outer scale is part of the recipe; a cast layer keeps its scales, and another skeleton has others."""
    one, two = (converted(NVFP4WeightConfig(outer="static", pts=p)) for p in (0.001, 0.002))
    wide = converted(Int4WeightConfig(32), torch.float32).to(torch.bfloat16)
    for target, source in ((one, two), (converted(Int4WeightConfig(32)), wide)):
        with pytest.raises(RuntimeError, match=r"up\.weight"):
            target.load_state_dict(source.state_dict())


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


def test_tiles_are_cut_between_rows_of_tiles() -> None:
    """128 rows of scale tiles of 8: rows go in eights, and keep their own scales."""
    weight = converted(OURS["fp8-tiles"]).up.weight.data
    assert torch.equal(weight[16:32].dequantize(), weight.dequantize()[16:32])
    assert weight[16:32].scale.shape == (2, 4)
    assert torch.equal(weight[120:].dequantize(), weight.dequantize()[120:])
    assert torch.equal(weight[:, 32:].dequantize(), weight.dequantize()[:, 32:])
    with pytest.raises(ValueError, match="multiples of 8"):
        weight[4:12]
