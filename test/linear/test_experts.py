"""Stacked experts, to the bit: prepared equals transformers over quantised weights, converted equals prepared, and all
experts at once equal experts one by one.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from support.expert_cases import (
    CONFIGS,
    FAMILIES,
    IMPLEMENTATIONS,
    WIDTH,
    E,
    H,
    Holder,
    at_once,
    fake_quantised,
    made,
    routed,
)
from torch import Tensor, nn
from torchao.quantization import FqnToConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from aoquant import (
    HybridConfig,
    Int4WeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    quantize_,
    set_fake_quant,
    unprepare,
)
from aoquant.experts import grouped_linear, stack
from aoquant.experts.packed_experts import PackedExperts
from aoquant.experts.prepared import QATExperts
from aoquant.linear.function import quantized_linear


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
        exact = not (model.experts.is_transposed and dtype == torch.float32)
        torch.testing.assert_close(y, wanted, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-5)
        assert torch.equal(y, converted(*batch)), (tokens, how)
    reference.experts.gate_up_proj.data += 1
    assert not torch.equal(y, reference(*batch))


@pytest.fixture(params=(*IMPLEMENTATIONS, "at once"))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An implementation of transformers; "at once" is grouped_mm as on a GPU, which takes all experts together."""
    if request.param in IMPLEMENTATIONS:
        return str(request.param)
    at_once(monkeypatch)
    return "grouped_mm"


families = pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])


@families
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prepared_is_converted(config: Any, family: str, way: str) -> None:
    model, batch = made(family, way), routed(16, "random")
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
        if config is not CONFIGS["hadamard"]:  # whose values are multiplied behind its transform
            assert torch.equal(packed.dequantize(), values)
        outer = packed.per_tensor_scale
        n = values.shape[-1] if packed.transposed else values.shape[1]
        assert outer is None or outer.shape == (E, n, 1)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in ("mixtral", "gpt-oss") else [pytest.mark.slow]) for f in FAMILIES]
)
def test_prepared_is_converted_under_autocast(family: str, way: str) -> None:
    """float32 parameters; tokens and weights of either dtype, as norms and routers leave them."""
    for config in (Int4WeightConfig(32), NVFP4WeightConfig()):
        model = made(family, way, torch.float32)
        quantize_(model, QATConfig(config, step="prepare"))
        converted = copy.deepcopy(model)
        quantize_(converted, QATConfig(step="convert"))
        for cast in (torch.bfloat16, torch.float16):
            for x_dtype, weights_dtype in ((torch.float32, torch.float32), (cast, torch.float32), (cast, cast)):
                x, index, weights = routed(16, "random", torch.float32)
                batch = x.to(x_dtype), index, weights.to(weights_dtype)
                with torch.autocast("cpu", cast):
                    y = model(*batch)
                    assert torch.equal(converted(*batch), y)
                assert y.dtype == x_dtype


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
        pytest.param(f, d, marks=[pytest.mark.slow] if (f, d) != ("gpt-oss", torch.bfloat16) else [])
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
        at_once(monkeypatch)
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
    with pytest.raises(ValueError, match="experts"):
        quantize_(model, QATConfig("mxfp8-nvfp4"))
    with pytest.raises(ValueError, match="experts"):
        quantize_(made("mixtral", "eager"), HybridConfig.bwd("mxfp8"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_parameter_that_is_not_prepared_is_multiplied_as_the_plain_class_does(implementation: str) -> None:
    model, batch = made("mixtral", implementation), routed(16, "random")
    quantize_(model, QATConfig(FqnToConfig({"experts.down_proj": Int4WeightConfig(32)}), step="prepare"))
    with mock.patch.object(nn.functional, "grouped_mm", wraps=nn.functional.grouped_mm) as called:
        model(*batch)
    assert called.call_count == (implementation == "grouped_mm")


# Which only a loop computes: one scale for all tokens, another contract, masks
LOOPS = {"int8-tensor": "identity", "intx": "identity", "clipped": "clipped"}


@families
@pytest.mark.parametrize("name", ["int4", "nvfp4", "mxfp4", "hadamard", *LOOPS])
def test_all_at_once_is_the_loop(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output and dW to the bit; dx within its sum over a token's experts, which are two; the gradients of biases,
    which the loop rounds in every addition, within that. Expert 3 has no tokens, and some tokens are another rank's.
    """
    loop, (x, index, weights) = made(family, "grouped_mm"), routed(16, "random")
    index[::5, 0] = E
    loop.experts._is_expert_parallel = True
    quantize_(loop, QATConfig(CONFIGS.get(name, CONFIGS["mxfp4"]), straight_through=LOOPS.get(name, "identity")))
    once, calls = copy.deepcopy(loop), []
    monkeypatch.setattr(stack, "grouped_at_once", lambda *a: calls.append(a) or grouped_linear.grouped_at_once(*a))
    results = []
    for model in (loop, once):
        if model is once:
            assert not calls
            at_once(monkeypatch)
        given = x.clone().requires_grad_()
        y = model(given, index, weights)
        y.float().square().sum().backward()
        results.append((y, given.grad, {n: p.grad for n, p in model.named_parameters()}))
    assert name in LOOPS or len(calls) == 2
    (y, dx, dw), (y_once, dx_once, dw_once) = results
    assert torch.equal(y, y_once)
    torch.testing.assert_close(dx, dx_once, rtol=2.0**-7, atol=2.0**-7 * dx.abs().max().item())
    for part, grad in dw.items():
        assert torch.count_nonzero(dw_once[part][3]) == 0
        if part.endswith("_bias"):
            torch.testing.assert_close(dw_once[part], grad, rtol=2.0**-6, atol=2.0**-7 * grad.abs().max().item())
        elif name == "hadamard":
            torch.testing.assert_close(dw_once[part], grad)
        else:
            assert torch.equal(dw_once[part], grad), part


def test_a_loop_multiplies_the_experts_that_have_rows_alone() -> None:
    """Experts without rows are not asked for and get no gradient; rows behind the last expert's are zero."""
    model = made("mixtral", "grouped_mm")
    quantize_(model, QATConfig(CONFIGS["int8"]))
    recipe, asked = model.experts.stacks["gate_up_proj"].recipe, list[int]()
    weights = [torch.randn(32, H, dtype=torch.bfloat16, requires_grad=True) for _ in range(5)]
    x = torch.randn(9, H).bfloat16()

    def loop(x_SK: Tensor, ends: list[int]) -> Tensor:
        return grouped_linear.grouped_in_a_loop(x_SK, lambda e: asked.append(e) or weights[e], ends, 32, recipe)

    y = loop(x, [0, 3, 3, 7, 7])
    assert asked == [1, 3]
    own = [quantized_linear(x[at], weights[e], None, recipe) for e, at in ((1, slice(3)), (3, slice(3, 7)))]
    assert torch.equal(y, torch.cat([*own, torch.zeros(2, 32).bfloat16()]))
    y.sum().backward()
    assert [w.grad is not None for w in weights] == [False, True, False, True, False]
    for rows in (0, 9):
        assert torch.equal(loop(x[:rows], [0] * 5), torch.zeros(rows, 32).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert loop(x.float(), [0] * 5).dtype == torch.bfloat16
    assert asked == [1, 3]


def test_a_frozen_stack_and_a_float_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient that was not asked for; a parameter that is not prepared is multiplied as it is."""
    at_once(monkeypatch)
    model, given = made("mixtral", "grouped_mm"), routed(16, "random")
    quantize_(model, QATConfig(CONFIGS["int4"]))
    e = model.experts
    e.gate_up_proj.requires_grad_(False)
    model(*given).float().sum().backward()
    assert e.gate_up_proj.grad is None and e.down_proj.grad is not None
    e.unprepare_stack("down_proj")
    y = model(*given)
    assert torch.isfinite(y).all() and torch.count_nonzero(y) > 0


@pytest.mark.parametrize("prepared", ["gate_up_proj", "down_proj"])
@families
def test_a_float_stack_beside_a_prepared_one_takes_tokens_of_other_ranks(family: str, prepared: str, way: str) -> None:
    """Choices of the number behind the last expert add nothing, down to the first of them."""
    model = made(family, way)
    quantize_(model, QATConfig(FqnToConfig({f"experts.{prepared}": Int4WeightConfig(32)})))
    x, index, weights = routed(16, "random")
    for elsewhere in (1, 5, index.numel()):
        others = index.clone()
        others.view(-1)[:elsewhere] = E
        own = others.clamp(max=E - 1), weights.masked_fill(others == E, 0)
        assert torch.equal(model(x, others, weights), model(x, *own))
