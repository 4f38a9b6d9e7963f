"""Stacked experts, to the bit: prepared equals transformers over quantised weights, converted equals prepared."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any
from unittest import mock

import pytest
import torch
from support.moe_models import model_of
from torch import Tensor, nn
from torchao.quantization import FqnToConfig, Int8DynamicActivationInt8WeightConfig
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import aoquant
from aoquant import (
    HybridConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    get_format,
    quantize_,
    set_fake_quant,
    unprepare,
)
from aoquant.layers.experts import QATExperts
from aoquant.layers.packed_experts import PackedExperts, packed_experts
from aoquant.layers.qat import Prepared, QATLinear
from aoquant.ops import grouped as grouped_ops

H, WIDTH, E = 64, 96, 4
SIZES = {"hidden_size": H, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralExperts, MixtralConfig(hidden_size=H, intermediate_size=WIDTH, num_local_experts=E)),
    "qwen3-moe": (Qwen3MoeExperts, Qwen3MoeConfig(**SIZES, num_experts=E)),
    "deepseek-v3": (DeepseekV3Experts, DeepseekV3Config(**SIZES, n_routed_experts=E)),
    "gpt-oss": (GptOssExperts, GptOssConfig(hidden_size=H, intermediate_size=WIDTH, num_local_experts=E)),
    "gemma-4": (Gemma4TextExperts, Gemma4TextConfig(hidden_size=H, moe_intermediate_size=WIDTH, num_experts=E)),
    "glm4-moe": (Glm4MoeExperts, Glm4MoeConfig(**SIZES, n_routed_experts=E)),
}
IMPLEMENTATIONS = ("eager", "grouped_mm")


class Holder(nn.Module):
    """A module around experts, so that they have a name."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Tensor) -> Tensor:
        y: Tensor = self.experts(*args)
        return y


def made(family: str, implementation: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    cls, config = FAMILIES[family]
    config = copy.deepcopy(config)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    experts = cls(config).to(dtype)
    for p in experts.parameters():
        p.data.normal_(0, 0.2)
    return Holder(experts)


def routed(tokens: int, how: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights. Expert 3 has no tokens."""
    torch.manual_seed(1)
    x, weights = torch.randn(tokens, H).to(dtype), torch.rand(tokens, 2).to(dtype)
    if how == "one expert":
        return x, torch.ones(tokens, 1, dtype=torch.int64), weights[:, :1]
    if how == "ties":  # what top-k of equal scores gives: the same two for every token
        return x, torch.topk(torch.zeros(tokens, 3), 2).indices, weights
    return x, torch.stack([torch.randperm(3)[:2] for _ in range(tokens)]), weights


def fake_quantised(model: Any, name: str) -> Any:
    """The model with its experts' weights replaced by their quantised values."""
    other, operand = copy.deepcopy(model), get_format(name)
    e = other.experts
    for parameter in ("gate_up_proj", "down_proj"):
        w = getattr(e, parameter).data
        for i in range(E):
            w[i] = operand.fake_quantize(w[i].t()).t() if e.is_transposed else operand.fake_quantize(w[i])
    return other


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_only_is_transformers_over_quantised_weights(
    family: str, dtype: torch.dtype, implementation: str
) -> None:
    model = made(family, implementation, dtype)
    reference = fake_quantised(model, "mxfp4")
    keys = {name: t.shape for name, t in model.state_dict().items()}
    quantize_(model, QATConfig(MXFP4WeightConfig(activation=None), step="prepare"))
    assert isinstance(model.experts, QATExperts)
    assert {name: t.shape for name, t in model.state_dict().items()} == keys
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    assert type(converted.experts) is FAMILIES[family][0]
    for tokens, how in ((16, "random"), (1, "random"), (16, "one expert"), (16, "ties")):
        batch = routed(tokens, how, dtype)
        y, wanted = model(*batch), reference(*batch)
        # a float32 GEMV sums in another order over a transposed copy, which transposed experts are multiplied as
        exact = not (family == "gpt-oss" and dtype == torch.float32)
        torch.testing.assert_close(y, wanted, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-5)
        assert torch.equal(y, converted(*batch)), (tokens, how)
    reference.experts.gate_up_proj.data += 1
    assert not torch.equal(y, reference(*batch))


CONFIGS = {
    "int4": Int4WeightConfig(32),
    "nvfp4": NVFP4WeightConfig(),
    "mxfp4": MXFP4WeightConfig(),
    "int8": Int8WeightConfig(activation="int8-row"),
    "int8-tensor": aoquant.PackedWeightConfig("int8-row", "int8-tensor"),
    "intx": IntxWeightConfig(3, 32),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prepared_is_converted(config: Any, family: str, implementation: str) -> None:
    model, batch = made(family, implementation), routed(16, "random")
    quantize_(model, QATConfig(config, step="prepare"))
    y = model(*batch)
    w = {name: model.experts.quantised_weight(name) for name in ("gate_up_proj", "down_proj")}
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(*batch), y)
    with torch.inference_mode():
        assert torch.equal(model(*batch), y)
    for name, values in w.items():
        packed = getattr(model.experts, name)
        assert isinstance(packed.data, PackedExperts)
        assert packed.shape == values.shape
        assert torch.equal(packed.dequantize(), values)
        outer = packed.per_tensor_scale
        n = values.shape[-1] if packed.transposed else values.shape[1]
        assert outer is None or outer.shape == (E, n, 1)


LOOPS = [*((family, None) for family in FAMILIES), ("mixtral", "quartet2"), ("gpt-oss", "quartet2")]


@pytest.mark.parametrize(("family", "backward"), LOOPS)
def test_23_prepared_is_a_loop_of_prepared_linear_layers(family: str, backward: str | None) -> None:
    """Outputs and gradients; an expert without tokens has a zero gradient."""
    model, (x, index, weights) = made(family, "grouped_mm", torch.float32), routed(24, "random", torch.float32)
    plain = copy.deepcopy(model.experts)
    config = QATConfig(NVFP4WeightConfig(), step="prepare", backward=backward)
    quantize_(model, config)
    x.requires_grad_()
    model(x, index, weights).square().sum().backward()
    got = {name: p.grad for name, p in model.experts.named_parameters()} | {"x": x.grad}
    assert got["gate_up_proj"] is not None
    assert torch.count_nonzero(got["gate_up_proj"][3]) == torch.count_nonzero(got["down_proj"][3]) == 0
    assert all(torch.count_nonzero(got["gate_up_proj"][e]) for e in range(3))
    if backward is not None:  # random numbers go by the order of the calls
        again = made(family, "grouped_mm", torch.float32)
        quantize_(again, config)
        again(x.detach(), index, weights).square().sum().backward()
        assert torch.equal(again.experts.gate_up_proj.grad, got["gate_up_proj"])
        return
    recipe = model.experts.stacks["gate_up_proj"].recipe

    def linear(w: Tensor, rows: Tensor) -> Tensor:
        layer = nn.Linear(*(w.shape if plain.is_transposed else w.shape[::-1]), bias=False)
        layer.weight = nn.Parameter((w.t() if plain.is_transposed else w).detach().contiguous())
        QATLinear.prepare(layer, Prepared(recipe, config, ""))
        layers.append(layer)
        y: Tensor = layer(rows)
        return y

    layers: list[nn.Linear] = []
    leaf = x.detach().requires_grad_()
    out = torch.zeros_like(leaf)
    for e in range(3):
        token, position = torch.where(index == e)
        y = linear(plain.gate_up_proj[e], leaf[token])
        y = plain._apply_gate(y + plain.gate_up_proj_bias[e] if plain.has_bias else y)
        y = linear(plain.down_proj[e], y)
        y = y + plain.down_proj_bias[e] if plain.has_bias else y
        out = out.index_add(0, token, y * weights[token, position, None])
    torch.testing.assert_close(out, model(x, index, weights), rtol=1e-6, atol=1e-6)  # two addends a token
    out.square().sum().backward()
    torch.testing.assert_close(leaf.grad, x.grad, rtol=1e-5, atol=1e-5)
    for e, name in [(e, name) for e in range(3) for name in ("gate_up_proj", "down_proj")]:
        grad = layers[2 * e + (name == "down_proj")].weight.grad
        assert grad is not None
        wanted = grad.t() if plain.is_transposed else grad
        torch.testing.assert_close(got[name][e], wanted, rtol=1e-5, atol=1e-5)


def test_activations_are_quantised_by_token_unless_the_format_has_one_scale() -> None:
    x, index, weights = routed(16, "one expert")
    for name, config in (("row", CONFIGS["int8"]), ("tensor", CONFIGS["int8-tensor"])):
        model = made("mixtral", "grouped_mm")
        quantize_(model, QATConfig(config, step="prepare"))
        louder = x.clone()
        louder[1:] *= 8
        same = torch.equal(model(x, index, weights)[0], model(louder, index, weights)[0])
        assert same == (name == "row")
        assert model.experts.stacks["down_proj"].recipe.batch_invariant == (name == "row")


def test_tokens_of_other_ranks_add_nothing() -> None:
    model, (x, index, weights) = made("mixtral", "grouped_mm"), routed(16, "random")
    quantize_(model, QATConfig(CONFIGS["int4"], step="prepare"))
    index[::2, 0] = E
    here = weights.clone()
    here[::2, 0] = 0
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    assert torch.equal(model(x, index, weights), converted(x, index, weights))
    assert torch.equal(model(x, index, weights), model(x, index, here))


def test_names_choose_a_module_or_one_parameter() -> None:
    int4 = Int4WeightConfig(32)
    for keys, wanted in (
        ({"experts": int4}, {"gate_up_proj", "down_proj"}),
        ({"experts.down_proj": int4}, {"down_proj"}),
        ({"experts.down_proj": None, "experts": int4}, {"gate_up_proj"}),
        ({"re:.*up_proj": int4}, {"gate_up_proj"}),
    ):
        for implementation in IMPLEMENTATIONS:
            model, batch = made("mixtral", implementation), routed(16, "random")
            quantize_(model, QATConfig(FqnToConfig(keys), step="prepare"))
            assert set(model.experts.stacks) == wanted
            y = model(*batch)
            states = {w.names[0].split(".")[1]: w.state for w in aoquant.coverage(model).weights}
            assert {n for n, state in states.items() if state == "prepared"} == wanted
            quantize_(model, QATConfig(step="convert"))
            assert torch.equal(model(*batch), y)
            assert {n for n, p in model.experts.named_parameters() if isinstance(p.data, PackedExperts)} == wanted
    model = made("mixtral", "eager")
    quantize_(model, QATConfig(FqnToConfig({"experts.up": None, "_default": int4}), step="prepare"))
    assert set(model.experts.stacks) == {"gate_up_proj", "down_proj"}


REFUSED = {
    "static": (Int8WeightConfig(activation="int8-tensor-static"), "no calibrated activation scale"),
    "learned": (QATConfig(IntxWeightConfig(4, 32), step="prepare", scales="learned"), "static or learned scales"),
    "fitted": (NVFP4WeightConfig(transform=aoquant.WUSH(16)), "fitted transform"),
    "torchao": (Int8DynamicActivationInt8WeightConfig(), "use a config of aoquant's"),
    "group": (Int4WeightConfig(128), "multiple of 128"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_experts_cannot_take_is_refused_by_name(config: Any, message: str) -> None:
    model = made("mixtral", "eager")
    config = config if isinstance(config, QATConfig) else QATConfig(config, step="prepare")
    with pytest.raises(ValueError, match=rf"(?s)experts.gate_up_proj \(4, 192, 64\).*{message}"):
        quantize_(model, config)
    assert type(model.experts) is MixtralExperts


class OwnExperts(nn.Module):
    """Stacked, and not known."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * WIDTH, H))
        self.down_proj = nn.Parameter(torch.zeros(E, H, WIDTH))


def test_classes_without_the_protocol_are_refused_by_name() -> None:
    model = Holder(OwnExperts())
    found = aoquant.coverage(model).unexpected
    assert {w.names[0] for w in found} == {"experts.gate_up_proj", "experts.down_proj"}
    assert all("of OwnExperts, whose class lacks" in w.about and "has_gate" in w.about for w in found)
    with pytest.raises(ValueError, match=r"experts.down_proj.*cannot quantise: .* of OwnExperts, whose class lacks"):
        quantize_(model, FqnToConfig({"experts.down_proj": Int4WeightConfig(32)}))


def test_experts_without_a_gate() -> None:
    config = NemotronHConfig(hidden_size=H, moe_intermediate_size=WIDTH, n_routed_experts=E)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model = Holder(NemotronHExperts(config))
    for p in model.parameters():
        p.data.normal_(0, 0.2)
    width = model.experts.up_proj.shape[-1]
    x, index, weights = torch.randn(8, width), torch.randint(0, E, (8, 1)), torch.rand(8, 1)
    quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))
    assert set(model.experts.stacks) == {"up_proj", "down_proj"}
    y = model(x, index, weights)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x, index, weights), y)


def test_fake_quantisation_is_switched_off_and_undone() -> None:
    model, batch = made("gpt-oss", "grouped_mm"), routed(16, "random")
    y = model(*batch)
    quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))
    assert not torch.equal(model(*batch), y)
    assert set_fake_quant(model, False) == 1
    assert torch.equal(model(*batch), y)
    set_fake_quant(model, True)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(*batch), model(*batch))
    assert type(again.experts) is type(model.experts)
    assert unprepare(model) == 1
    assert type(model.experts) is GptOssExperts
    assert torch.equal(model(*batch), y)
    assert torch.equal(again(*batch), copy.deepcopy(again)(*batch))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(f, d, marks=[pytest.mark.slow] if d == torch.float32 and f not in ("mixtral", "gpt-oss") else [])
        for f in FAMILIES
        for d in (torch.bfloat16, torch.float32)
    ],
    ids=str,
)
def test_a_traced_model_is_the_eager_one(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared, with gradients, and converted; traced alone, without a code generator. In bfloat16 as on a GPU, where
    experts are multiplied at once: prepared and converted are one graph.
    """
    model, batch = made(family, "grouped_mm", dtype), routed(16, "random", dtype)
    one_graph = dtype == torch.bfloat16
    if one_graph:
        monkeypatch.setattr(grouped_ops, "why_not", lambda *args: None)
    quantize_(model, QATConfig(CONFIGS["mxfp4"], step="prepare"))
    torch.compiler.reset()
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=one_graph)):
        model.zero_grad()
        y = run(*batch)
        y.float().square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))
    if one_graph:
        quantize_(model, QATConfig(step="convert"))
        with torch.no_grad():
            assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*batch), y)


def test_compiled_is_eager() -> None:
    for config in (CONFIGS["int4"], CONFIGS["nvfp4"]):
        model, batch = made("mixtral", "grouped_mm"), routed(16, "random")
        quantize_(model, QATConfig(config, step="prepare"))
        torch.compiler.reset()
        assert torch.equal(torch.compile(model)(*batch), model(*batch))


def test_packed_experts_are_selected_cut_turned_and_copied() -> None:
    torch.manual_seed(0)
    w = torch.randn(E, 32, 64, dtype=torch.bfloat16)
    for name in ("int4-g32", "nvfp4", "mxfp4", "int8-row"):
        linears = [linear_of(e, f"{name}/") for e in w]
        packed = packed_experts([layer.weight.data for layer in linears])
        values = packed.dequantize()
        assert packed.shape == w.shape
        turned = packed.transpose(-2, -1)
        assert turned.shape == (E, 64, 32)
        assert torch.equal(turned.dequantize(), values.transpose(-2, -1))
        assert torch.equal(packed[1:3].dequantize(), values[1:3])
        assert torch.equal(packed[1].unsqueeze(0).dequantize(), values[1:2])
        assert torch.equal(packed[:, 16:].dequantize(), values[:, 16:])
        assert torch.equal(packed[:, :, 32:].dequantize(), values[:, :, 32:])
        assert torch.equal(turned[:, 32:].dequantize(), values.transpose(-2, -1)[:, 32:])
        x = torch.randn(5, 64, dtype=torch.bfloat16)
        wanted = linears[2](x)
        assert type(packed[2]) is PackedTensor
        assert torch.equal(nn.functional.linear(x, packed[torch.tensor(2)]), wanted)
        assert torch.equal(x @ turned[2], wanted)
        assert torch.equal(nn.functional.linear(x, turned[2].t()), wanted)
        copied = copy.deepcopy(nn.Parameter(packed, requires_grad=False)).to(torch.float32)
        assert copied.dtype == torch.float32
        assert torch.equal(copied.data.qdata, packed.qdata)
        offsets = torch.tensor([0, 2, 5, 5], dtype=torch.int32)
        grouped = nn.functional.grouped_mm(x, turned, offs=offsets)
        assert torch.equal(grouped, torch.cat([linears[1](x[:2]), linears[2](x[2:])]))
        with pytest.raises(ValueError, match="batched_mm"):
            packed[torch.tensor([0, 1])]
    mixed = [linear_of(w[0], name).weight.data for name in ("nvfp4/", "mxfp4/")]
    with pytest.raises(ValueError, match=r"expert 1 is .*mxfp4.* and expert 0 .*nvfp4"):
        packed_experts(mixed)


def test_what_packed_experts_cannot_do_is_refused() -> None:
    w = torch.randn(E, 32, 64, dtype=torch.bfloat16)
    packed = packed_experts([linear_of(e, "int4-g32/").weight.data for e in w])
    turned, x = packed.transpose(-2, -1), torch.randn(5, 64, dtype=torch.bfloat16)
    assert torch.equal(packed.select(-3, 1).dequantize(), packed[1].dequantize())
    for dim in (1, 2, -1):
        with pytest.raises(ValueError, match="are selected by expert"):
            packed.select(dim, 0)
    with pytest.raises(ValueError, match=r"step 1, got step 2"):
        packed[::2]
    with pytest.raises(ValueError, match="sliced in three dimensions"):
        turned[2][:32]
    with pytest.raises(ValueError, match="last two dimensions"):
        packed.transpose(0, 1)
    with pytest.raises(ValueError, match=r"becomes a stack of one expert, unsqueeze\(0\)"):
        packed[1].unsqueeze(1)
    for a, b in ((x, turned), (turned[2], x), (packed[1], turned[2])):
        with pytest.raises(ValueError, match=r"one transposed expert on the right|packed|codes"):
            torch.matmul(a, b)
    with pytest.raises(ValueError, match="multiplied as x @"):
        x @ turned


def test_experts_that_are_not_whole_or_run_elsewhere_are_refused() -> None:
    config = QATConfig(Int4WeightConfig(32), step="prepare")
    model = made("mixtral", "eager")
    with torch.no_grad():
        model.experts.down_proj[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"experts.down_proj .*: it holds NaN or Inf"):
        quantize_(model, config)
    model = made("mixtral", "eager")
    model.experts.forward = model.experts.forward
    with pytest.raises(ValueError, match="replaced on the instance"):
        quantize_(model, config)
    del model.experts.forward
    quantize_(model, config)
    with torch.device("meta"):
        skeleton = Holder(MixtralExperts(FAMILIES["mixtral"][1]))
    quantize_(skeleton, config)
    assert set(skeleton.experts.stacks) == {"gate_up_proj", "down_proj"}


def test_a_checkpoint_from_before_a_backward_that_draws_begins_at_step_zero() -> None:
    model = made("mixtral", "eager")
    plain = model.state_dict()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare", backward="quartet2"))
    states = {name: b.clone() for name, b in model.named_buffers()}
    assert len(states) == 2
    for _, buffer in model.named_buffers():
        buffer[2:].add_(5)
    model.load_state_dict(plain)
    assert all(torch.equal(b, states[name]) for name, b in model.named_buffers())


def test_25_experts_take_another_backward() -> None:
    """At the next step, with the state of the random numbers that is there."""
    batch = routed(24, "random")

    def step(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        model(*batch).float().square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    base, drawn = NVFP4WeightConfig(), HybridConfig.bwd("te-nvfp4", seed=3).replaced(wgrad_grad_output="nvfp4-sr")
    model, fresh = made("mixtral", "eager"), made("mixtral", "eager")
    quantize_(model, QATConfig(base, backward=drawn))
    quantize_(fresh, QATConfig(base, backward=HybridConfig.bwd("mxfp8")))
    step(model)
    states = {name: b.clone() for name, b in model.named_buffers()}
    quantize_(model, HybridConfig.bwd("mxfp8"))
    fresh.load_state_dict(model.state_dict())  # which has the states
    got, wanted = step(model), step(fresh)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    for name, b in model.named_buffers():
        b.copy_(states[name])
    quantize_(model, drawn)
    assert states and all(torch.equal(b, states[name]) for name, b in model.named_buffers())
    with pytest.raises(ValueError, match=r"experts.*is prepared for .* a HybridConfig replaces backward alone"):
        quantize_(model, QATConfig("mxfp8-nvfp4"))
    with pytest.raises(ValueError, match=r"experts.*leaves fprop to a base needs one"):
        quantize_(made("mixtral", "eager"), HybridConfig.bwd("mxfp8"))


@pytest.mark.parametrize(("backward", "asked"), [(None, False), ("quartet2", True)])
def test_experts_that_draw_look_for_their_rank(backward: str | None, asked: bool) -> None:
    model, batch = made("mixtral", "eager"), routed(16, "random")
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare", backward=backward))
    with mock.patch("aoquant.layers.experts.ranks.find") as find:
        model(*batch)
    assert find.called == asked


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_parameter_that_is_not_prepared_is_multiplied_as_the_plain_class_does(implementation: str) -> None:
    model, batch = made("mixtral", implementation), routed(16, "random")
    quantize_(model, QATConfig(FqnToConfig({"experts.down_proj": Int4WeightConfig(32)}), step="prepare"))
    with mock.patch.object(nn.functional, "grouped_mm", wraps=nn.functional.grouped_mm) as called:
        model(*batch)
    assert called.call_count == (implementation == "grouped_mm")


def linear_of(w: Tensor, recipe: str) -> nn.Linear:
    """A converted linear layer."""
    model = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype))
    model[0].weight.data.copy_(w)
    quantize_(model, recipe)
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    return layer


@pytest.mark.parametrize("end", ["up_proj", "0", "0.w1"])
def test_a_key_within_stacked_experts_is_told_what_there_is(end: str) -> None:
    key = f"model.layers.0.mlp.experts.{end}"
    for others in ({}, {"_default": Int4WeightConfig(32)}):
        said = rf"{re.escape(key)}' names nothing in model\.layers\.0\.mlp\.experts \(MixtralExperts\).*A single expert cannot be named"
        with pytest.raises(ValueError, match=said) as error:
            quantize_(model_of("mixtral"), FqnToConfig({key: Int4WeightConfig(32), **others}))
        assert all(f"experts.{name}" in str(error.value) for name in ("gate_up_proj", "down_proj"))
    with pytest.raises(ValueError, match=r"no stacked experts of MixtralForCausalLM have the name re:.*gate_up_proj"):
        quantize_(model_of("mixtral"), FqnToConfig({r"re:.*experts\.up_proj": Int4WeightConfig(32)}))


def test_the_loop_of_packed_experts_in_a_compiled_model() -> None:
    """Under "eager" it runs outside the graph; under "grouped_mm" the error says what is not compiled."""
    model, batch = made("mixtral", "eager"), routed(16, "random")
    quantize_(model, QATConfig(CONFIGS["int4"], step="prepare"))
    with torch.no_grad():
        y = model(*batch)
        quantize_(model, QATConfig(step="convert"))
        torch.compiler.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager")(*batch), y)
        grouped = made("mixtral", "grouped_mm")
        quantize_(grouped, CONFIGS["int4"])
        torch.compiler.reset()
        with pytest.raises(
            NotImplementedError, match=r"packed experts \(.*their loop, which is not compiled: run the model eagerly"
        ):
            torch.compile(grouped, backend="aot_eager")(*batch)
