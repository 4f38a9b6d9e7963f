"""Formats for each layer under a budget: the solver is exact, siblings agree, and the plan is no worse than uniform."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Unreached, llama, tied
from support.moe_models import MODELS, OTHERS, model_of
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import FqnToConfig

from aoquant import (
    CalibrateConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    calibrate_ptq,
    choose_formats,
    quantize_,
)
from aoquant.experts.packed_experts import PackedExperts
from aoquant.planning.sizes import stored_bytes
from aoquant.ptq.choose_formats import _changes, _configs, _groups, _scores, solve

CANDIDATES = ["intx3-g32", "int4-g32", "int8-weight"]


def model() -> Any:
    torch.manual_seed(0)
    return llama(dtype=torch.float32, attention_bias=False, num_hidden_layers=1, vocab_size=64)


def batches() -> list[torch.Tensor]:
    return [torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(3))]


def test_the_solver_is_exact() -> None:
    """Against every combination."""
    draw = random.Random(0)
    for _ in range(20):
        cost = [{n: draw.randint(1, 30) for n in "abc"} for _ in range(5)]
        lost = [{n: draw.random() for n in "abc"} for _ in range(5)]
        budget = sum(min(c.values()) for c in cost) + draw.randint(0, 40)

        def total(of: Any, plan: Any) -> Any:
            return sum(each[n] for each, n in zip(of, plan, strict=True))

        plans = [p for p in itertools.product("abc", repeat=5) if total(cost, p) <= budget]
        found = solve(cost, lost, budget)
        assert total(cost, found) <= budget
        assert total(lost, found) == pytest.approx(min(total(lost, p) for p in plans))


@pytest.mark.filterwarnings("ignore:.*tokens for K")
def test_a_plan_fits_loses_no_more_than_uniform_ones_and_is_a_config(tmp_path: Path) -> None:
    net = model()
    before = dict(net.named_parameters())
    found = choose_formats(net, CANDIDATES, batches=batches(), bits=5.5)
    assert isinstance(found, FqnToConfig) and all(before[n] is p and p.requires_grad for n, p in net.named_parameters())
    fits = {p.name: p for p in found.plans if p.bits <= 5.5}
    assert fits[found.chosen].kl == min(p.kl for p in fits.values())
    quantised = model()
    quantize_(quantised, "int4-g32")
    with torch.no_grad():
        p, q = (m(batches()[0]).logits.double().softmax(-1) for m in (net, quantised))
    by_hand = (p * (p / q).log()).sum(-1).mean().item()
    assert next(p.kl for p in found.plans if p.name == "int4-g32") == pytest.approx(1000 * by_hand, rel=1e-3)
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        assert len({found.layers[n] for n in found.layers if n.endswith(group)}) == 1
    quantize_(net, found)
    packed = [m.weight for m in net.modules() if isinstance(getattr(m, "weight", None), PackedTensor)]
    bits = 8 * stored_bytes(*packed) / sum(w.shape[0] * w.shape[1] for w in packed)
    assert len(packed) == 7 and bits == pytest.approx(fits[found.chosen].bits)
    assert "chosen" in str(found)
    found.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    assert len(calibrate_ptq(model(), batches(), CalibrateConfig(found)).rows) == 7


FAMILIES = [
    n if n in ("mixtral", "llama-4", "jetmoe") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS | OTHERS
]


def bits_of(net: nn.Module) -> tuple[float, int, int]:
    """Return bits a weight, the number of packed weights, and that of packed stacks."""
    packed = [p.data for p in net.parameters() if isinstance(p.data, PackedTensor)]
    stacks = sum(isinstance(p, PackedExperts) for p in packed)
    return 8 * stored_bytes(*packed) / sum(p.numel() for p in packed), len(packed), stacks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*tokens for K", "ignore:.*too few tokens")
def test_stacked_experts_are_chosen_one_format_a_module(family: str) -> None:
    net = model_of(family).eval()
    classes, before = {n: type(m) for n, m in net.named_modules()}, dict(net.named_parameters())
    found = choose_formats(net, CANDIDATES, batches=batches(), bits=5.2)
    assert classes == {n: type(m) for n, m in net.named_modules()}
    assert all(before[n] is p and p.requires_grad for n, p in net.named_parameters())
    experts = {n.rpartition(".")[0]: name for n, name in found.layers.items() if ".experts." in n}
    assert all(experts[n.rpartition(".")[0]] == name for n, name in found.layers.items() if ".experts." in n)
    uniform = model_of(family).eval()
    quantize_(uniform, "int4-g32")
    quantize_(net, found)
    bits, count, stacks = bits_of(net)
    assert (count, stacks) == bits_of(uniform)[1:] and stacks > 0  # as many as the recipe covers by itself
    assert bits == next(p.bits for p in found.plans if p.name == found.chosen) <= 5.2
    report = calibrate_ptq(model_of(family), batches(), CalibrateConfig(found, asymmetric=False))
    assert {row.layer for row in report.rows} == found.layers.keys()


class Dense(nn.Module):
    """Compute what Mixtral's experts do where all of them are alike and their weights add up to one."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        up, down = experts.gate_up_proj[0], experts.down_proj[0]
        self.gate_up_proj = nn.Linear(up.shape[1], up.shape[0], bias=False)
        self.down_proj = nn.Linear(down.shape[1], down.shape[0], bias=False)
        self.gate_up_proj.weight, self.down_proj.weight = nn.Parameter(up.detach()), nn.Parameter(down.detach())

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_stack_of_equal_experts_scores_as_a_linear_layer_does(implementation: str) -> None:
    """Send each token to one expert: the sum over the stack's rows is the sum over the layer's."""
    net = model_of("mixtral").float().eval()
    net.set_experts_implementation(implementation)
    for layer in net.model.layers:
        layer.mlp.gate.top_k = 1
        for p in layer.mlp.experts.parameters():
            p.data.copy_(p.data[:1].expand_as(p).clone())
    configs = _configs(["int4-g32", "nvfp4"])
    of_stacks = _scores(net, {n: _changes(net, c, None) for n, c in configs.items()}, batches())
    for layer in net.model.layers:
        layer.mlp = Dense(layer.mlp.experts)
    of_layers = _scores(net, {n: _changes(net, c, None) for n, c in configs.items()}, batches())
    assert len(of_layers) == len(of_stacks) == 2 * 12
    for (fqn, name), score in of_layers.items():
        stack = fqn if "self_attn" in fqn else fqn.replace("mlp.", "mlp.experts.")
        assert of_stacks[stack, name] == pytest.approx(score, rel=1e-3) and score > 0


def test_experts_of_a_list_choose_together() -> None:
    net = nn.Module()
    net.experts = nn.ModuleList(nn.ModuleDict({n: nn.Linear(32, 32) for n in ("w1", "w2", "w3")}) for _ in range(2))
    net.shared_experts = nn.ModuleDict({n: nn.Linear(32, 32) for n in ("w1", "w2", "w3")})
    groups = _groups(_changes(net, _configs(["int4-g32"])["int4-g32"], None))
    assert [len(group) for group in groups] == [6, 2, 1]
    assert groups[1] == ["shared_experts.w1", "shared_experts.w3"]


def test_padding_changes_no_choice_and_may_hold_nan() -> None:
    """A batch with padding scores as the batch without it, whatever the padding is."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    net.forward = lambda input, attention_mask=None: nn.Sequential.forward(net, input)  # type: ignore[method-assign]
    x_BTK = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([x_BTK, torch.full((2, 3, 32), torch.nan)], 1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[:, 8:] = 0
    changes = {n: _changes(net, c, None) for n, c in _configs(["int4-g32", "int8-weight"]).items()}
    wanted = _scores(net, changes, [x_BTK])
    assert _scores(net, changes, [{"input": padded, "attention_mask": mask}]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 2.0}, "below the smallest candidate"),
        ({"batches": []}, "no batches"),
        ({"candidates": []}, "at least one"),
        ({"candidates": ["int8-static"]}, "calibration finds"),
        ({"candidates": ["gridflip"], "engine": "vllm", "bits": 16}, "vllm does not serve it"),
        ({"engine": "onnx"}, "engine is one of"),
        *(({"bits": bits}, "bits must be a finite number") for bits in (math.nan, math.inf, "5", True)),
        (
            {"candidates": ["int8-weight"], "filter_fn": lambda m, _: isinstance(m, nn.Embedding)},
            "embed_tokens: an embed",
        ),
        ({"filter_fn": lambda *_: False}, "none was chosen"),
        ({"candidates": "int4-g32"}, r"candidates is a list .* got 'int4-g32'"),
        ({"candidates": NVFP4WeightConfig()}, "candidates is a list"),
        ({"candidates": ["int4-g32", "intt8"]}, "no recipe is called 'intt8'"),
        *(
            ({"candidates": [c]}, "is for some layers, for training or for KV caches")
            for c in ("int4-g32-experts", "mxfp4-no-attention", "vllm-fp8-kv-fp8", QATConfig("int8"))
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"candidates": CANDIDATES, "batches": batches(), "bits": 5.0} | changes
    with pytest.raises(ValueError, match=message):
        choose_formats(model(), arguments.pop("candidates"), **arguments)


def with_nan(name: str, make: Callable[[], Any] = model) -> Callable[[], Any]:
    def made() -> Any:
        net = make()
        net.get_parameter(name).data[..., :2] = torch.nan
        return net

    return made


IDS = batches()[0]
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
BAD: dict[str, tuple[Any, Any, str]] = {
    "one batch": (model, IDS, r"\[batch\]"),
    "nan embedding": (with_nan("model.embed_tokens.weight"), [IDS], "layers.0.self_attn.q_proj: its input holds NaN"),
    "nan norm": (with_nan("model.layers.0.post_attention_layernorm.weight"), [IDS], "gate_proj: its input holds NaN"),
    "nan last norm": (with_nan("model.norm.weight"), [IDS], "logits hold NaN or Inf"),
    "nan batch": (lambda: nn.Sequential(nn.Linear(32, 32)), [X, X / 0 * 0], "0: its input holds NaN or Inf"),
    "padding": (
        model,
        [{"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}],
        "q_proj: all tokens that reached it are padding",
    ),
    "unreached": (Unreached, [X], r"layers.1: no batch reaches it"),
    "tied": (tied, [X], "1: its weight is tied to that of 0"),
    "meta": (lambda: nn.Sequential(nn.Linear(32, 32, device="meta")), [X], "0: its weight is on the meta device"),
    "nan experts": (
        with_nan("model.layers.1.post_attention_layernorm.weight", lambda: model_of("mixtral").eval()),
        [IDS],
        "layers.1.mlp.experts.gate_up_proj: its input holds NaN",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_models_and_batches_name_the_layer_and_change_nothing(case: str) -> None:
    make, given, message = BAD[case]
    net = make()
    before = {n: (type(m), dict(m._parameters), set(vars(m))) for n, m in net.named_modules()}
    with pytest.raises(ValueError, match=message):
        choose_formats(net, CANDIDATES, batches=given, bits=8.5)
    for name, module in net.named_modules():
        cls, parameters, attributes = before[name]
        assert type(module) is cls and set(vars(module)) == attributes and not module._forward_hooks
        assert all(module._parameters[n] is p and p.requires_grad for n, p in parameters.items() if p is not None)


def test_a_module_with_two_names_is_chosen_under_both() -> None:
    layer = nn.Linear(32, 32)
    net = nn.Sequential(layer, nn.Tanh(), layer)
    found = choose_formats(net, CANDIDATES, batches=[X], bits=8.5)
    assert found.layers.keys() == {"0", "2"}
    quantize_(net, found)
    assert net[0] is net[2] and isinstance(net[0].weight.data, PackedTensor)
