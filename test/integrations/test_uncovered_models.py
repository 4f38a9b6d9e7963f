"""Models of transformers of which linear layers are a part: what is not quantised is named, and weights read directly
are noticed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.moe_models import IDS, MODELS
from torchao.quantization import FqnToConfig
from transformers import MambaConfig, MambaForCausalLM

import aoquant
from aoquant import Int8WeightConfig, QATConfig, quantize_, verify
from aoquant.integrations.job.models import chosen_layers
from aoquant.integrations.job.options import Options


@pytest.mark.parametrize(("model_class", "config"), MODELS.values(), ids=MODELS)
def test_stacked_experts_left_out_are_named_and_others_are_quantised(model_class: Any, config: Any) -> None:
    model = model_class(config).eval()
    by_name = FqnToConfig({"re:.*experts": None, "_default": Int8WeightConfig()})
    quantize_(model, by_name)
    experts = [
        w for w in aoquant.coverage(model).weights if "experts.gate_up_proj" in w.names[0] and "bias" not in w.names[0]
    ]
    assert {w.state for w in experts} == {"left out"}
    model = model_class(config).eval()
    quantize_(model, QATConfig(Int8WeightConfig(), step="prepare"), strict=True)
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    found = verify(model, converted, {"input_ids": IDS})
    assert found.min_sqnr == float("inf")
    assert found.coverage.share > 0.8
    rows = {r.fqn: r for r in found.layers}
    row = rows["model.layers.1.mlp.experts.down_proj"]
    assert (len(row.shape), row.format, row.warning) == (3, "int8-row", "")
    assert row.weight_sqnr_db == row.output_sqnr_db == float("inf")


@pytest.mark.filterwarnings("ignore:.*stay float.*")
def test_mambas_dt_proj_is_noticed_and_can_be_left_out() -> None:
    config = MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=64, state_size=16, time_step_rank=32)
    model = MambaForCausalLM(config).eval()
    quantize_(model, QATConfig(Int8WeightConfig(), step="prepare"))
    expected = r"the weight of backbone.layers.0.mixer.dt_proj \(by matmul\), backbone.layers.1.mixer.dt_proj .* is read directly"
    with pytest.warns(UserWarning, match=expected):
        model(input_ids=IDS)
    quantize_(model, QATConfig(step="convert"))
    with pytest.raises(
        NotImplementedError,
        match=r"the weight of backbone.layers.0.mixer.dt_proj is read directly.*\(128, 32\) \(int8-row\)",
    ):
        model(input_ids=IDS)

    model = MambaForCausalLM(config).eval()

    def chosen(module: torch.nn.Module, fqn: str) -> bool:
        return isinstance(module, torch.nn.Linear) and not fqn.endswith(("dt_proj", "lm_head"))

    quantize_(model, QATConfig(Int8WeightConfig(), step="prepare"), filter_fn=chosen)
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    verify(model, converted, {"input_ids": IDS})
    assert {w.state for w in aoquant.coverage(converted).weights if "dt_proj" in w.names[0]} == {"left out"}


@pytest.mark.parametrize("recipe", ["int4-g32", "torchao-int8"])
def test_run_finds_mambas_dt_proj_before_the_first_stage(recipe: str) -> None:
    config = MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=64, state_size=16, time_step_rank=32)
    model = MambaForCausalLM(config).eval()
    with pytest.raises(
        ValueError, match=r"layers.0.mixer.dt_proj \(by matmul\), .*--skip 're:.\*dt_proj', or"
    ) as error:
        chosen_layers(model, Options(recipe=recipe))
    assert "\n" not in str(error.value)
    assert chosen_layers(model, Options(recipe=recipe, skip=["re:.*dt_proj"]))[1] == {}
    by_name, skipped = chosen_layers(model, Options(recipe=recipe, skip_incompatible=True))
    assert list(skipped) == [f"backbone.layers.{i}.mixer.dt_proj" for i in range(2)]
    assert [by_name.fqn_to_config[name] for name in skipped] == [None, None]


def test_run_takes_recipes_of_experts_and_says_where_there_are_none() -> None:
    options = Options(recipe="int4-g32-experts", device="cpu")
    options.check()
    model_class, config = MODELS["mixtral"]
    assert chosen_layers(model_class(config).eval(), options)[1] == {}
    but_attention = Options(recipe="int4-g32-no-attention", device="cpu")
    but_attention.check()
    assert chosen_layers(model_class(config).eval(), but_attention)[1] == {}
    mamba = MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=64)).eval()
    with pytest.raises(ValueError, match=r"for experts alone .*MambaForCausalLM has no experts: choose"):
        chosen_layers(mamba, options)
