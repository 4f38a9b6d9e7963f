"""torchao's GPTQConfig, AWQConfig and SmoothQuantConfig in their own steps: the result is that of `calibrate_ptq`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.models import llama
from torch import Tensor, nn
from torchao.prototype.awq import AWQConfig
from torchao.prototype.gptq import GPTQConfig
from torchao.prototype.smoothquant import SmoothQuantConfig
from torchao.quantization import Int8DynamicActivationInt8WeightConfig

from aoquant import CalibrateConfig, Int4WeightConfig, PackedWeightConfig, QATConfig, calibrate_ptq, quantize_
from aoquant.quantize import RECORDER

pytestmark = pytest.mark.usefixtures("one_thread")
BATCHES = [torch.randint(0, 128, (4, 40), generator=torch.Generator().manual_seed(i)) for i in range(2)]
CONFIGS: dict[str, tuple[Any, str, Any]] = {
    "awq": (AWQConfig, "prepare", Int4WeightConfig(32)),
    "smoothquant": (SmoothQuantConfig, "prepare", Int8DynamicActivationInt8WeightConfig()),
    "gptq": (GPTQConfig, "observe", Int4WeightConfig(32)),
}


def model() -> Any:
    torch.manual_seed(0)
    return llama(attention_bias=False, num_hidden_layers=1, hidden_size=64, intermediate_size=96)


@torch.no_grad()
def outputs(net: Any) -> Tensor:
    return net(BATCHES[0], use_cache=False).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_two_steps_give_what_calibrate_ptq_gives(name: str) -> None:
    """A copy of a prepared model is another calibration; afterwards nothing is kept of the calls."""
    cls, first, base = CONFIGS[name]
    net, direct = model(), model()
    wanted = outputs(net)
    quantize_(net, cls(base_config=base, step=first))
    other = copy.deepcopy(net)
    assert torch.equal(outputs(net), wanted)
    net(input_ids=BATCHES[1], use_cache=False)
    quantize_(net, cls(base_config=base, step="convert"))
    calibrate_ptq(direct, BATCHES, cls(base_config=base, step="convert"))
    assert torch.equal(outputs(net), outputs(direct)) and not torch.equal(outputs(net), wanted)
    assert not net._forward_pre_hooks and "aoquant_calibration" not in vars(net)
    with pytest.raises(ValueError, match="no batches"):
        quantize_(other, cls(base_config=base, step="convert"))
    outputs(other)
    quantize_(other, cls(base_config=base, step="convert"))
    assert not torch.equal(outputs(other), wanted)


def test_the_filter_of_the_first_step_counts() -> None:
    net = model()
    config = AWQConfig(Int4WeightConfig(32), "prepare")
    quantize_(net, config, lambda m, fqn: fqn.endswith(("up_proj", "gate_proj")))
    outputs(net)
    convert = AWQConfig(Int4WeightConfig(32), "convert")
    with pytest.raises(ValueError, match="give filter_fn to that one"):
        quantize_(net, convert, lambda m, fqn: True)
    quantize_(net, convert)
    mlp = net.model.layers[0].mlp
    assert type(mlp.down_proj) is nn.Linear and type(mlp.up_proj) is not nn.Linear


def test_an_error_leaves_the_step_open() -> None:
    net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    weight = net[1].weight
    quantize_(net, AWQConfig(Int4WeightConfig(32), "prepare"))
    net(torch.full((4, 32), torch.nan))
    with pytest.raises(ValueError, match="hold NaN or Inf"):
        quantize_(net, AWQConfig(Int4WeightConfig(32), "convert"))
    assert net[1].weight is weight and type(net[1]) is nn.Linear
    quantize_(net, AWQConfig(Int4WeightConfig(32), "prepare"))  # begins again
    net(torch.randn(64, 32))
    quantize_(net, AWQConfig(Int4WeightConfig(32), "convert"))
    assert type(net[1]) is not nn.Linear


def test_what_is_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="nothing is prepared"):
        quantize_(net, AWQConfig(Int4WeightConfig(32), "convert"))
    with pytest.raises(ValueError, match="base_config"):
        quantize_(net, GPTQConfig(step="observe"))
    with pytest.raises(ValueError, match="down_proj"):
        quantize_(llama(intermediate_size=112), AWQConfig(Int4WeightConfig(32), "prepare"))
    quantize_(net, AWQConfig(Int4WeightConfig(32), "prepare"))
    for other in (
        lambda: quantize_(net, "int4-g32"),
        lambda: quantize_(net, QATConfig("int4-g32", step="prepare")),
        lambda: calibrate_ptq(net, BATCHES, CalibrateConfig("int4-g32")),
    ):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM: AWQConfig's first step.*step='convert'"):
            other()
    with pytest.raises(ValueError, match="called with a cache"):
        net.generate(BATCHES[0][:1], max_new_tokens=2, use_cache=True)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_generates_is_calibrated_on_what_it_wrote(name: str, beams: int) -> None:
    """generate has a cache before and afterwards; meanwhile each sequence counts once, at its full length."""
    cls, first, base = CONFIGS[name]
    net, direct = model(), model()
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    wanted, uses = net.generate(BATCHES[0], **how), net.generation_config.use_cache
    quantize_(net, cls(base_config=base, step=first))
    for prompt in (BATCHES[0], BATCHES[1]):
        made = net.generate(prompt, **how)
        if prompt is BATCHES[0]:
            assert torch.equal(made, wanted)
    batches = list(vars(net)[RECORDER].batches)
    seen = [batch["input_ids"] for batch in batches]
    if beams == 1:
        assert [ids.shape for ids in seen] == [(4, 43)] * 2 and torch.equal(seen[0], wanted[:, :-1])
    quantize_(net, cls(base_config=base, step="convert"))
    assert net.generation_config.use_cache is uses
    calibrate_ptq(direct, batches, cls(base_config=base, step="convert"))
    assert torch.equal(outputs(net), outputs(direct))
    assert net.generate(BATCHES[0], **how).shape == wanted.shape


def test_a_model_to_load_into_is_that_of_the_base_config() -> None:
    for chosen in (None, lambda m, fqn: fqn.endswith("up_proj")):
        net, base = model(), model()
        quantize_(net, AWQConfig(PackedWeightConfig("intx4-g32"), "prepare_for_loading"), chosen)
        quantize_(base, PackedWeightConfig("intx4-g32"), chosen)
        assert [type(m) for m in net.modules()] == [type(m) for m in base.modules()]
        assert torch.equal(outputs(net), outputs(base))


def test_a_first_step_that_is_taken_again_forgets_the_calls_before() -> None:
    net, config = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)), AWQConfig(Int4WeightConfig(32), "prepare")
    for batch in (torch.full((4, 32), torch.nan), torch.randn(64, 32)):
        quantize_(net, config)
        assert len(net._forward_pre_hooks) == 1
        net(batch)
    quantize_(net, AWQConfig(Int4WeightConfig(32), "convert"))
    assert type(net[1]) is not nn.Linear and not net._forward_pre_hooks


def test_a_step_moves_the_model_to_the_device_that_is_given() -> None:
    net = nn.Sequential(nn.Linear(32, 32))
    quantize_(net, GPTQConfig(base_config=Int4WeightConfig(32), step="observe"), device="meta")
    assert net[0].weight.is_meta


def test_calls_that_cannot_be_repeated_by_keywords_are_refused() -> None:
    class Several(nn.Sequential):
        def forward(self, *xs: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(sum(xs)) * scale

    net = Several(nn.LayerNorm(32), nn.Linear(32, 32))
    quantize_(net, AWQConfig(Int4WeightConfig(32), "prepare"))
    net(torch.randn(4, 32), torch.randn(4, 32))
    with pytest.raises(ValueError, match="Several: call it with keyword arguments alone while it is observed"):
        net(torch.randn(4, 32), torch.randn(4, 32), scale=2.0)
