"""FP-Quant's options, against transformers' own FPQuantConfig: every combination that it takes, and what becomes of the
weights.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import FPQuantConfig

from aoquant import Hadamard, MXFP4WeightConfig, NVFP4WeightConfig, PackedTensor, QATConfig, quantize_
from aoquant.integrations.fp_quant import OPTIONS, from_fp_quant
from aoquant.linear.prepared import QATLinear
from aoquant.report.measure import stored_bytes

BF16 = torch.bfloat16


class Model(nn.Module):
    def __init__(self, k: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.ModuleDict(
            {"up": nn.Linear(k, 256, dtype=BF16), "down": nn.Linear(256, k, bias=False, dtype=BF16)}
        )
        self.lm_head = nn.Linear(k, 64, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.block["down"](torch.relu(self.block["up"](x))))


def combinations() -> list[dict[str, Any]]:
    """All that transformers' class accepts."""
    choices = {
        "forward_dtype": ("mxfp4", "nvfp4"),
        "forward_method": ("abs_max", "quest"),
        "backward_dtype": ("bf16", "mxfp8", "mxfp4"),
        "store_master_weights": (False, True),
        "hadamard_group_size": (None, 16, 32, 64, 128),
        "transform_init": ("hadamard", "identity", "gsr"),
    }
    found = []
    for values in itertools.product(*choices.values()):
        options = dict(zip(choices, values, strict=True))
        try:
            FPQuantConfig(**options)
        except ValueError:
            continue
        found.append(options)
    return found


def test_options_and_defaults_are_those_of_transformers() -> None:
    theirs = {k: v for k, v in vars(FPQuantConfig()).items() if k != "quant_method"}
    assert theirs.keys() == OPTIONS.keys()
    mine = OPTIONS | {"hadamard_group_size": 16, "modules_to_not_convert": ["lm_head"]}
    assert theirs == mine


def test_every_combination_is_taken_or_refused_with_a_reason() -> None:
    """And what transformers refuses is refused here too."""
    taken = refused = 0
    for options in combinations():
        lonely = not options["store_master_weights"] and options["backward_dtype"] != "bf16"
        group = {"nvfp4": 16, "mxfp4": 32}[options["forward_dtype"]]
        odd = options["transform_init"] == "gsr" and options["hadamard_group_size"] not in (None, group)
        if lonely or odd:
            with pytest.raises(ValueError, match="gsr" if odd else "store_master_weights=True"):
                from_fp_quant(FPQuantConfig(**options))
            refused += 1
            continue
        config, _ = from_fp_quant(FPQuantConfig(**options))
        taken += 1
        assert isinstance(config, QATConfig) == options["store_master_weights"]
        base = config.base_config if isinstance(config, QATConfig) else config
        kind = MXFP4WeightConfig if options["forward_dtype"] == "mxfp4" else NVFP4WeightConfig
        assert isinstance(base, kind) and base.numerics == "qutlass"
        size = options["hadamard_group_size"] or group
        assert base.transform == (None if options["transform_init"] == "identity" else Hadamard(size))
        assert ("quest" in base.recipe().fprop_weight.name) == (options["forward_method"] == "quest")
    assert taken > 40 and refused > 40


def test_objects_dictionaries_and_names_mean_the_same() -> None:
    options = {
        "forward_dtype": "mxfp4",
        "forward_method": "quest",
        "store_master_weights": True,
        "backward_dtype": "mxfp4",
    }
    config = FPQuantConfig(**options)
    for given in (from_fp_quant(config), from_fp_quant(config.to_dict()), from_fp_quant(**options)):
        assert given[0] == from_fp_quant(config)[0]
    assert from_fp_quant(config, backward_dtype="bf16")[0].backward is None


@pytest.mark.parametrize(("method", "mask"), [("quest", "clipped"), ("abs_max", "identity")])
def test_only_quest_gives_clipped_values_no_gradient(method: str, mask: str) -> None:
    """QuEST's trust mask: its scale clips on purpose, and a clipped weight's gradient is no guide. abs_max clips
    nothing.
    """
    config, _ = from_fp_quant(
        forward_dtype="mxfp4", forward_method=method, store_master_weights=True, transform_init="identity"
    )
    assert config.straight_through == mask
    layer = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=BF16))
    with torch.no_grad():
        layer[0].weight[3, 40] = 1e3
    quantize_(layer, config)
    layer(torch.randn(16, 64, dtype=BF16)).float().sum().backward()
    grad = layer[0].weight.grad
    assert (grad[3, 40] == 0) == (method == "quest") and grad[4, 40] != 0


def test_without_master_weights_the_weights_are_gone() -> None:
    """Measured: no float weight is alive after packing, and what is stored is 4.25 bits a weight, and the head."""
    model = Model(512)
    weights = [weakref.ref(m.weight) for m in model.block.values()]
    before = sum(stored_bytes(m.weight) for m in model.block.values())
    quantize_(model, *from_fp_quant(forward_dtype="mxfp4"))
    gc.collect()
    assert [w() for w in weights] == [None, None]
    after = sum(stored_bytes(m.weight.data) for m in model.block.values())
    assert after == before * 4.25 / 16
    assert isinstance(model.block["up"].weight.data, PackedTensor) and type(model.lm_head.weight.data) is torch.Tensor
    assert not any(p.requires_grad for p in model.block["up"].parameters() if isinstance(p.data, PackedTensor))


@pytest.mark.parametrize(
    "options",
    [
        {"forward_dtype": "mxfp4", "forward_method": "quest", "backward_dtype": "mxfp4"},
        {"forward_dtype": "mxfp4", "backward_dtype": "mxfp8", "hadamard_group_size": 128},
        {"forward_dtype": "nvfp4", "hadamard_group_size": 64},
        {"forward_dtype": "nvfp4", "transform_init": "identity", "pseudoquantization": True},
    ],
    ids=["quartet", "mxfp8-backward", "nvfp4-h64", "nvfp4-plain"],
)
def test_with_master_weights_it_trains_and_converts(options: dict[str, Any]) -> None:
    model = Model()
    quantize_(model, *from_fp_quant(store_master_weights=True, **options))
    up = model.block["up"]
    assert isinstance(up, QATLinear) and up.weight.dtype == BF16 and type(model.lm_head) is nn.Linear
    x = torch.randn(32, 128, dtype=BF16)
    model(x).float().square().mean().backward()
    assert up.weight.grad.isfinite().all() and up.weight.grad.any()
    assert up.bias.grad.any()  # the bias trains, in high precision
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y)


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (None, {"lm_head"}),
        ([], set()),
        (["down"], {"block.down"}),
        (["block"], {"block.up", "block.down"}),
        (["block.up", "lm_head"], {"block.up", "lm_head"}),
    ],
)
def test_modules_to_not_convert(names: list[str] | None, left: set[str]) -> None:
    model = Model()
    with warnings.catch_warnings(action="error"):
        quantize_(model, *from_fp_quant(modules_to_not_convert=names))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {n for n, m in linears.items() if not isinstance(m.weight.data, PackedTensor)} == left


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("forward_dtype", {"forward_dtype": "fp8"}),
        ("forward_method", {"forward_method": "mse"}),
        ("forward_method", {"forward_method": "quest"}),
        ("backward_dtype", {"backward_dtype": "mxfp8"}),
        ("hadamard_group_size", {"hadamard_group_size": 8}),
        ("mxfp4", {"forward_dtype": "mxfp4", "hadamard_group_size": 16}),
        ("gsr", {"transform_init": "gsr", "hadamard_group_size": 64}),
        ("store_master_weights", {"forward_dtype": "mxfp4", "backward_dtype": "mxfp4"}),
        ("forward_type", {"forward_type": "mxfp4"}),
        ("store_master_weights", {"store_master_weights": "false"}),
        ("pseudoquantization", {"pseudoquantization": 1}),
        ("gptq", {"quant_method": "gptq"}),
        ("modules_to_not_convert", {"modules_to_not_convert": "q_proj"}),
        ("modules_to_not_convert", {"modules_to_not_convert": ["a", 1]}),
        ("from_fp_quant", 4),
    ],
)
def test_a_wrong_option_is_refused_by_name(name: str, options: Any) -> None:
    with pytest.raises(ValueError, match=name):
        from_fp_quant(options)


def test_a_name_that_no_layer_has_warns() -> None:
    with pytest.warns(UserWarning, match="'dwon'"):
        quantize_(Model(), *from_fp_quant(modules_to_not_convert=["lm_head", "dwon"]))
