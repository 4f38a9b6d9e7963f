"""Every field of every torchao config that is accepted changes the layer, or is refused: none is silently ignored.

One field at a time gets every other value of its type. The change is set on the instance, past the checks of torchao's
constructors, as a config read from a file or of another version of torchao may be.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib
from typing import Any

import pytest
import torch
from support.torchao_oracle import HANDLED
from torch import Tensor, nn
from torchao.float8.inference import Float8MMConfig
from torchao.prototype.qat import MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig
from torchao.quantization import (
    FqnToConfig,
    Int4WeightOnlyConfig,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
)
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig, Int4WeightFakeQuantizeConfig
from torchao.quantization.quant_primitives import MappingType
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import IntxWeightConfig, QATConfig, quantize_
from aoquant.targets import Target, fake_target, resolve, supported

ONE = torch.tensor([[0.5]])
# what a config needs besides its defaults to be accepted, for each of its layouts
BASES: dict[str, list[dict[str, Any]]] = {
    "IntxWeightOnlyConfig": [{"weight_dtype": torch.int4, "granularity": PerGroup(32)}],
    "Int8StaticActivationInt8WeightConfig": [
        {"granularity": PerTensor()},
        {"granularity": PerTensor(), "act_quant_scale": ONE},
        {
            "granularity": PerTensor(),
            "act_mapping_type": MappingType.ASYMMETRIC,
            "act_quant_scale": ONE,
            "act_quant_zero_point": torch.tensor([[3]], dtype=torch.int8),
        },
    ],
    "StretchedIntxWeightConfig": [{"b": 2, "quant_min": -1.5, "quant_max": 1.5}],
    "Int4WeightOnlyConfig": [{"int4_packing_format": p} for p in ("plain", "preshuffled", "tile_packed_to_4d")],
    "Float8DynamicActivationFloat8WeightConfig": [{}, {"granularity": [PerBlock([1, 128]), PerBlock([128, 128])]},
                                                  {"granularity": PerRow(), "kernel_preference": KernelPreference.MSLK}],
    "Float8StaticActivationFloat8WeightConfig": [{}, {"act_quant_scale": ONE}],
    "MXDynamicActivationMXWeightConfig": [{}, {"kernel_preference": KernelPreference.EMULATED}],
    "NVFP4DynamicActivationNVFP4WeightConfig": [{}, {"step": "prepare"}],
}  # fmt: skip
FAKE: dict[str, tuple[str, Any]] = {
    "intx weight": ("weight_config", IntxFakeQuantizeConfig(torch.int4, PerGroup(32))),
    "intx learned": ("weight_config", IntxFakeQuantizeConfig(torch.int4, PerGroup(32), is_dynamic=False, range_learning=True)),
    "intx activation": ("activation_config", IntxFakeQuantizeConfig(torch.int8, PerToken(), MappingType.ASYMMETRIC)),
    "int4 weight": ("weight_config", Int4WeightFakeQuantizeConfig(64, torch.bfloat16)),
    "fp8 weight": ("weight_config", Float8FakeQuantizeConfig()),
    "fp8 activation": ("activation_config", Float8FakeQuantizeConfig()),
    "mx weight": ("weight_config", MXFakeQuantizeConfig()),
    "mx activation": ("activation_config", MXFakeQuantizeConfig()),
    "nvfp4 weight": ("weight_config", NVFP4FakeQuantizeConfig()),
    "nvfp4 activation": ("activation_config", NVFP4FakeQuantizeConfig()),
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "dtype": [torch.bfloat16, torch.float16, torch.float32, torch.int3, torch.int4, torch.int8, torch.uint4, torch.int32,
              torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2],
    "bool": [True, False],
    "int": [0, 1, 2, 3, 8, 16, 32, 64, 128, 256],
    "float": [0.25, 3.0],
    "str": ["int8_sym_per_token"],
    "Granularity": [PerRow(), PerRow(0), PerTensor(), PerGroup(32), PerGroup(64), PerAxis(0), PerAxis(1), PerToken(),
                    PerBlock([128, 128]), [PerTensor(), PerRow()], [PerRow(), PerTensor()]],
    "Tensor": [torch.tensor([[0.25]])],
    "MMConfig": [Float8MMConfig(*(i == at for i in range(3))) for at in range(3)],
    "OrderedDict": [{"0": IntxWeightConfig(8, 32)}],
}  # fmt: skip
# fields without an effect on the layer, each with the reason
SAID = {
    "set_inductor_config": "sets torch.compile's options in the whole process, which aoquant leaves alone",
    "step": "read by quantize_, not by the target",
    "int4_tile_packed_ntile": "the order of tile_packed_to_4d's codes in memory, which a CUDA kernel packs",
}
# values that are written into the deployed tensor as another, as docs/migrating.md says
SAME: dict[str, list[set[Any]]] = {
    "kernel_preference": [{KernelPreference.AUTO, KernelPreference.TORCH}],
    "use_triton_kernel": [{True, False}],
    "mm_config": [{Float8MMConfig(pad_inner_dim=True), Float8MMConfig()}],  # K is a multiple of 16
    "reduce_range": [{None, False}],
    "granularity": [{None, PerTensor()}, {None, PerRow()}],  # None is the default of the class
}


def others(field: dataclasses.Field[Any], now: Any) -> list[Any]:
    """Values of a field's type that are not `now`."""
    said = str(field.type)
    found = [
        v
        for kind, values in VALUES.items()
        if kind in said or (kind == "Granularity" and "Per" in said)
        for v in values
    ]
    kinds = {type(now), field.type} if isinstance(field.type, type) else {type(now)}
    for kind in kinds:
        if issubclass(kind, enum.Enum):
            found += list(kind)
    if "Optional" in said or "None" in said:
        found.append(None)
    return [v for v in found if not (v is now if isinstance(v, Tensor) or isinstance(now, Tensor) else v == now)]


def effect(target: Target) -> Any:
    """Return what a target does to a bf16 layer: its recipe, the shapes that it takes, and every byte of its tensor."""
    torch.manual_seed(0)
    w = torch.randn(128, 256, dtype=torch.bfloat16)
    limits = [target.why_not(n, k, d) for n, k, d in ((128, 256, w.dtype), (5, 96, w.dtype), (128, 256, torch.float16))]
    recipe = (str(target.recipe), target.recipe.contract, target.recipe.input_scales, target.recipe.weight_scales)
    if limits[0] is not None or target.recipe.input_scales != "dynamic":
        return recipe, target.tensor, limits
    encoded = target.recipe.fprop_weight.encode(w)
    try:
        made = target.build(encoded, w)
    except ValueError:  # only the kernel's own package packs this layout
        return recipe, target.tensor, limits
    return recipe, target.tensor, limits, flat(made)


def flat(t: Tensor) -> Any:
    if not hasattr(t, "__tensor_flatten__"):
        return t.contiguous().view(torch.uint8).tolist() if t.dim() else t.item()
    names, rest = t.__tensor_flatten__()
    return [flat(getattr(t, name)) for name in names], str(rest)


def check(config: Any, make: Any) -> int:
    """Change each field of `config`; return how many changes were honoured."""
    before, honoured, ignored = effect(make(config)), 0, []
    for field in dataclasses.fields(config):
        if field.name in SAID:
            continue
        now = getattr(config, field.name)
        for value in others(field, now):
            changed = copy.deepcopy(config)
            object.__setattr__(changed, field.name, value)
            try:
                after = effect(make(changed))
            except ValueError:
                continue
            honoured += after != before
            alike = any({str(now), str(value)} <= {str(v) for v in values} for values in SAME.get(field.name, []))
            if after == before and not alike:
                ignored.append((field.name, now, value))
    assert not ignored
    return honoured


@pytest.mark.parametrize("name", supported())
def test_a_changed_field_changes_the_layer_or_is_refused(name: str) -> None:
    cls = getattr(importlib.import_module(HANDLED[name]), name)
    honoured = sum(check(cls(**options), resolve) for options in BASES.get(name, [{}]))
    assert honoured or name == "NVFP4WeightOnlyConfig" or len(dataclasses.fields(cls)) == 1


def test_the_tile_of_a_layout_is_refused_for_the_others() -> None:
    tiles = {"int4_tile_packed_ntile": 16}
    for layout in ("plain", "preshuffled"):
        with pytest.raises(ValueError, match="Int4WeightOnlyConfig: int4_tile_packed_ntile"):
            resolve(Int4WeightOnlyConfig(int4_packing_format=layout, **tiles))
    assert "multiple of 16" in str(
        resolve(
            Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d", int4_choose_qparams_algorithm="hqq", **tiles)
        ).why_not(8, 1024, torch.bfloat16)
    )


@pytest.mark.parametrize(("side", "config"), FAKE.values(), ids=FAKE)
def test_a_changed_field_of_a_fake_quantisation_config_too(side: str, config: Any) -> None:
    def make(changed: Any) -> Target:
        both: dict[str, Any] = {"weight_config": None, "activation_config": None} | {side: changed}
        return fake_target(**both)

    assert check(config, make) or len(dataclasses.fields(config)) == 1 or side == "activation_config"


def test_a_changed_field_of_the_pair_for_int4_and_fp8_too() -> None:
    weight, activation = Int4WeightFakeQuantizeConfig(), Float8FakeQuantizeConfig()
    assert check(weight, lambda changed: fake_target(changed, activation))
    check(activation, lambda changed: fake_target(weight, changed))


@pytest.mark.parametrize("version", [1, 3])
def test_a_version_that_is_not_known_is_refused_before_the_model_changes(version: int) -> None:
    for name in supported():
        cls = getattr(importlib.import_module(HANDLED[name]), name)
        config = cls(**BASES.get(name, [{}])[0])
        if "version" not in {f.name for f in dataclasses.fields(cls)} or config.version == version:
            continue
        config.version = version
        model = nn.Sequential(nn.Linear(256, 128, dtype=torch.bfloat16))
        for wrapped in (config, QATConfig(config), FqnToConfig({"0": config})):
            with pytest.raises(ValueError, match=rf"0 \(128, 256\): {name}: version"):
                quantize_(model, wrapped)
        assert type(model[0]) is nn.Linear and type(model[0].weight) is nn.Parameter


def test_fields_of_the_config_by_names_are_honoured_or_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    config = FqnToConfig({"0": IntxWeightConfig(4, 32)})
    for name, value in (("version", 2), ("module_fqn_to_config", {"0": IntxWeightConfig(8, 32)})):
        changed = copy.copy(config)
        setattr(changed, name, value)
        with pytest.raises(ValueError, match=name):
            quantize_(model, changed)
    quantize_(model, FqnToConfig(module_fqn_to_config={"0": IntxWeightConfig(8, 32)}))
    assert model[0].weight.format.startswith("intx8")
