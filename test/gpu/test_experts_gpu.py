"""Stacked experts on a GPU: exact where they can be, prepared equals converted, and nothing waits for the routing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.bits import differing, same
from support.gpu import BF16, CUDA, captured, check_experts, ends_of, no_waiting, rows_of_experts, warmed
from torch import Tensor, nn
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import aoquant
from aoquant import Int4WeightConfig, MXFP4WeightConfig, NVFP4WeightConfig, QATConfig, ops, quantize_
from aoquant.experts import prepared as experts_module
from aoquant.formats import get_operand
from aoquant.ops import stacks
from aoquant.ops.quantized import Ask

pytestmark = pytest.mark.gpu

WEIGHTS = ("int4-g128", "int4-g32", "mxfp4", "nvfp4", "gridflip", "fp8-row", "int8-row", "mxfp8", "fouroversix")
E, N, K = 6, 272, 512
ROUTINGS = {
    "a few": (0, 3, 1, 0, 7, 2),
    "one token": (0, 0, 0, 1, 0, 0),
    "all to one": (0, 0, 90, 0, 0, 0),
    "many": (700, 0, 129, 1, 0, 511),
}
CONFIGS = {
    "int4-g128": Int4WeightConfig(128),
    "int4-g32": Int4WeightConfig(32),
    "mxfp4-weight": MXFP4WeightConfig(activation=None),
    "mxfp4": MXFP4WeightConfig(),
    "nvfp4": NVFP4WeightConfig(),
    "fp8": aoquant.FP8WeightConfig(),
}


def grouped(x: Tensor, sizes: tuple[int, ...], w: Any, name: str) -> Tensor:
    return ops.grouped_mm(x, None, None, ends_of(sizes), w, None, get_operand(name), False, BF16)


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_one_hot_rows_give_the_operand_and_codes_the_bits_of_their_weight(name: str, sizes: tuple[int, ...]) -> None:
    operand = get_operand(name)
    w = torch.randn(E, N, K, device=CUDA) * torch.arange(1, E + 1, device=CUDA).view(-1, 1, 1) * 0.02
    w = w.to(BF16)
    packed, alone = stacks.encode(operand, w, False), [operand.encode(w[e]) for e in range(E)]
    for x in check_experts(lambda x: grouped(x, sizes, w, name), operand.format, alone, sizes, behind=2):
        assert torch.equal(grouped(x, sizes, packed, name), grouped(x, sizes, w, name))


@pytest.mark.parametrize("sizes", [ROUTINGS["a few"], ROUTINGS["many"]], ids=["few", "many"])
@pytest.mark.parametrize("name", ["int4-g128", "nvfp4"])
def test_a_row_is_its_own(name: str, sizes: tuple[int, ...]) -> None:
    """The same number of rows, other neighbours, another place: the same bits."""
    w = (torch.randn(E, N, K, device=CUDA) * 0.02).to(BF16)
    x = torch.randn(sum(sizes), K, device=CUDA).to(BF16)
    y = grouped(x, sizes, w, name)
    turned = tuple(reversed(sizes))
    moved = grouped(x.flip(0), turned, w.flip(0), name).flip(0)
    assert torch.equal(moved, y)
    other = torch.randn_like(x)
    other[-1] = x[-1]
    assert torch.equal(grouped(other, sizes, w, name)[-1], y[-1])


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (E, N, K)) for name in ("nvfp4", "mxfp4", "int4-g128", "fouroversix")), ("nvfp4", (4, 1024, 2048))],
    ids=str,
)
def test_stacks_are_encoded_as_their_experts(
    name: str, shape: tuple[int, int, int], transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFP4's outer scales are found in one launch, also where csrc's kernel, which takes one, would take an expert."""

    def one(*args: Any) -> Any:
        raise AssertionError("an expert was encoded by itself")

    operand, (experts, n, _) = get_operand(name), shape
    w = (torch.randn(shape, device=CUDA) * torch.arange(experts, device=CUDA).view(-1, 1, 1)).to(BF16)  # a first of 0
    given = w.transpose(1, 2).contiguous() if transposed else w
    if n == 1024 and not transposed:
        monkeypatch.setattr(stacks, "_one", one)
    whole = stacks.encode(operand, given, transposed)
    made = {apart: stacks.values(operand, given, transposed, Ask(False, BF16, apart)) for apart in (True, False)}
    for e in range(experts):
        want, got = operand.encode(w[e]), stacks.expert(operand, whole, e, experts)
        assert torch.equal(got.codes, want.codes) and same(got.scale, want.scale) and same(got.zero, want.zero)
        assert torch.equal(made[True].values.view(shape)[e], operand.format.operand(want, BF16))
        assert torch.equal(made[False].values.view(shape)[e], operand.format.decode(want, BF16))
        if want.outer is not None:
            assert got.outer is not None and torch.equal(got.outer, want.outer.expand(n, 1))
            if name == "nvfp4":
                assert torch.equal(made[True].alpha.view(experts, n, 1)[e], got.outer)


IN_PLACE = (
    "mxfp4",
    "mxfp8",
    "mxfp8-e5m2",
    "nvfp4",
    "int4-g32",
    "int4-g128",
    "int4-bf16-g64",
    "fp8-row",
    "fp8-e5m2-row",
)


def unusual(dtype: torch.dtype) -> Tensor:
    """(E, N, K) with NaN, Inf, zeros of both signs, subnormal and huge blocks; N is no multiple of a tile's columns."""
    w = torch.randn(E, N, K, device=CUDA) * torch.tensor([1e-4, 0.02, 1, 30, 1e4, 1], device=CUDA).view(-1, 1, 1)
    w[1, 0, 3], w[1, 70, 511], w[2, 5, 100], w[2, 271, 0] = torch.nan, -torch.nan, torch.inf, -torch.inf
    w[0, 3], w[0, 4, :64], w[0, 5], w[3, 9, 32:96] = 0.0, -0.0, w[0, 5] * 1e-36, w[3, 9, 32:96] * 1e30
    w[5] = 0.0
    return w.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_transposed_stack_is_encoded_where_it_lies(name: str, dtype: torch.dtype) -> None:
    """The bytes of each expert's own encoding, the operand and the decoded values; nothing is turned."""
    operand, w = get_operand(name), unusual(dtype)
    given = w.transpose(1, 2).contiguous()
    alone = [operand.encode(w[e]) for e in range(E)]
    for alpha_apart in (True, False):
        made = stacks.values(operand, given, True, Ask(False, BF16, alpha_apart))
        form = operand.format.operand if alpha_apart else operand.format.decode
        assert made.values.transpose(1, 2).is_contiguous()
        assert same(made.values, torch.stack([form(e, BF16) for e in alone]))
        alphas = [operand.format.alpha(e) for e in alone]
        if alphas[0] is None:
            assert made.alpha is None
        elif alpha_apart:
            assert differing(made.alpha, torch.cat([a.expand(N, 1) for a in alphas if a is not None])) == 0


@pytest.mark.parametrize("sizes", [ROUTINGS["all to one"], ROUTINGS["many"]], ids=["few", "many"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_order_of_a_weight_in_memory_does_not_change_a_product(name: str, sizes: tuple[int, ...]) -> None:
    """Stored (E, N, K) or (E, K, N): the same bits forward; backward the same values are multiplied."""
    operand, ends = get_operand(name), ends_of(sizes)
    w = (torch.randn(E, N, K, device=CUDA) * 0.02).to(BF16)
    x = torch.randn(sum(sizes), K, device=CUDA).to(BF16)
    turned = w.transpose(1, 2).contiguous()
    y = ops.grouped_mm(x, None, None, ends, w, None, operand, False, BF16)
    assert torch.equal(ops.grouped_mm(x, None, None, ends, turned, None, operand, True, BF16), y)
    dx = ops.grouped_dgrad(y, ends, w, operand, False)
    torch.testing.assert_close(ops.grouped_dgrad(y, ends, turned, operand, True), dx, rtol=2.0**-7, atol=1e-3)
    dw = ops.grouped_wgrad(y, ends, x, None, None, False)
    torch.testing.assert_close(
        ops.grouped_wgrad(y, ends, x, None, None, True).transpose(1, 2), dw, rtol=2.0**-7, atol=1e-3
    )


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
def test_biases_are_added_and_their_gradients_are_sums_rounded_once(sizes: tuple[int, ...]) -> None:
    ends, behind = ends_of(sizes), 2
    expert = torch.repeat_interleave(
        torch.arange(E, device=CUDA), torch.tensor([*sizes[:-1], sizes[-1] + behind], device=CUDA)
    )
    x, bias = torch.randn(len(expert), N, device=CUDA).to(BF16), torch.randn(E, N, device=CUDA).to(BF16)
    assert torch.equal(ops.grouped_bias(x, bias, expert), x + bias[expert])
    made = ops.grouped_bgrad(x, ends)
    assert torch.equal(ops.grouped_bgrad(x, ends), made)
    for e, rows in rows_of_experts(sizes):
        exact, magnitude = x[rows].double().sum(0), x[rows].double().abs().sum(0)
        assert ((made[e].double() - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-20).all()


def made(family: str, experts: int = 8) -> Any:
    torch.manual_seed(0)
    if family == "mixtral":
        config: Any = MixtralConfig(hidden_size=512, intermediate_size=384, num_local_experts=experts)
    else:
        config = GptOssConfig(hidden_size=512, intermediate_size=384, num_local_experts=experts)
    config._experts_implementation = "grouped_mm"
    with torch.device(CUDA):
        layer = (MixtralExperts if family == "mixtral" else GptOssExperts)(config).to(BF16)
    for p in layer.parameters():
        p.data.normal_(0, 0.05)
    return nn.ModuleDict({"experts": layer})


def routed(tokens: int, experts: int = 8, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """The last expert has no tokens."""
    scores = torch.rand(tokens, experts - 1, device=CUDA)
    weights, index = scores.topk(top_k)
    return torch.randn(tokens, 512, device=CUDA).to(BF16), index, weights.to(BF16)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prepared_is_converted(config: Any, family: str, autocast: bool) -> None:
    """Under autocast float32 parameters are multiplied at once in both forms, though transformers casts x to them."""
    model = made(family)
    if autocast:
        model.float()
        for p in model.parameters():
            p.data += 1e-4 * torch.randn_like(p)  # values that bfloat16 does not have
    quantize_(model, QATConfig(config, step="prepare"))
    packed = copy.deepcopy(model)
    quantize_(packed, QATConfig(step="convert"))
    batches = [routed(tokens) for tokens in (1, 4, 16, 64, 1000, 4096)]
    x, _, weights = batches[-1]
    batches.append((x[:50], torch.full((50, 1), 3, device=CUDA), weights[:50, :1]))  # all to one expert
    with torch.no_grad(), torch.autocast("cuda", BF16, enabled=autocast):
        for batch in batches:
            assert torch.equal(model["experts"](*batch), packed["experts"](*batch)), len(batch[0])


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def loops_bias_error(rows_SN: Tensor, ends: Tensor, made_EN: Tensor) -> float:
    """How far the gradient of `bias[expert]`, which rounds after each row, is from the sums of these rows in float64.

    The gradient made at once, `made_EN`, is those sums rounded once, and no farther from them.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    expert = torch.repeat_interleave(torch.arange(len(ends), device=CUDA), counts)
    exact, magnitude = (
        torch.zeros(made_EN.shape, dtype=torch.float64, device=CUDA).index_add_(0, expert, t)
        for t in (rows_SN.double(), rows_SN.double().abs())
    )
    assert ((made_EN.double() - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-20).all()
    with torch.enable_grad():  # a backward calls this
        bias = torch.zeros_like(made_EN).requires_grad_()
        bias[expert].backward(rows_SN)
    assert bias.grad is not None
    error = off(bias.grad, exact)
    assert off(made_EN, exact) <= error
    return error


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_and_gradients_are_the_loops(config: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the order of additions, and of a bias's gradient up to what the loop's many roundings lose; an expert
    without tokens has a zero gradient.
    """
    sums: dict[int, float] = {}
    once = ops.grouped_bgrad

    def watched(grad_SN: Tensor, ends: Tensor) -> Tensor:
        made: Tensor = once(grad_SN, ends)
        sums[made.shape[1]] = loops_bias_error(grad_SN, ends, made)
        return made

    monkeypatch.setattr(ops, "grouped_bgrad", watched)
    model = made(family)
    quantize_(model, QATConfig(config, step="prepare"))
    for tokens in (16, 1500):
        x, index, weights = routed(tokens)
        grad, found = torch.randn(tokens, 512, device=CUDA).to(BF16), []
        for loop in (False, True):
            model.zero_grad()
            given = x.clone().requires_grad_()
            with monkeypatch.context() as m:
                if loop:
                    m.setattr(experts_module, "why_not_at_once", lambda *args: "a test asks for the loop")
                y = model["experts"](given, index, weights)
            y.backward(grad)
            found.append({"y": y, "x": given.grad} | {n: p.grad for n, p in model.named_parameters()})
        assert len(sums) == (2 if family == "gpt-oss" else 0)
        for name, got in found[0].items():
            bound = 2e-2 + (sums[got.shape[1]] if name.endswith("_bias") else 0)
            error = off(got, found[1][name])
            assert error < bound, f"{name}: {error}"
            if name.endswith("proj"):
                assert torch.count_nonzero(got[-1]) == 0


def test_nothing_waits_and_a_graph_takes_another_routing() -> None:
    """A training step, and packed experts: captured with one routing, replayed with another."""
    for config in (CONFIGS["int4-g32"], CONFIGS["nvfp4"], CONFIGS["fp8"]):
        model = made("mixtral")
        quantize_(model, QATConfig(config, step="prepare"))
        packed = copy.deepcopy(model)
        quantize_(packed, QATConfig(step="convert"))
        for tokens in (16, 1024):
            first, second = routed(tokens), routed(tokens)
            held = tuple(t.clone() for t in first)
            held[0].requires_grad_()

            def step(model: Any = model, held: Any = held) -> Tensor:
                y: Tensor = model["experts"](*held)
                y.sum().backward()
                return y

            def run(packed: Any = packed, held: Any = held) -> Tensor:
                with torch.no_grad():
                    y: Tensor = packed["experts"](*held)
                return y

            for call in (step, run):
                warmed(call, 2)
                with no_waiting():
                    call()
                model.zero_grad(set_to_none=True)
                held[0].grad = None
                graph, y = captured(call, 0)
                with torch.no_grad():
                    for t, new in zip(held, second, strict=True):
                        t.copy_(new)
                graph.replay()
                torch.cuda.synchronize()
                with torch.no_grad():
                    assert torch.equal(y, model["experts"](*second))


def test_one_graph_for_a_compiler() -> None:
    """The ops' own bits through a compiler that fuses nothing; Inductor, which rounds less between ops, is close: where
    the second product's input is quantised, a last bit of it can move an e2m1 code.
    """
    for config, bound in ((CONFIGS["int4-g32"], 2e-2), (CONFIGS["nvfp4"], 6e-2)):
        model, (x, index, weights) = made("mixtral"), routed(64)
        quantize_(model, QATConfig(config, step="prepare"))
        found = []
        for backend in (None, "aot_eager", "inductor"):
            torch.compiler.reset()
            run = model["experts"]
            run = run if backend is None else torch.compile(run, fullgraph=True, backend=backend)
            model.zero_grad()
            given = x.clone().requires_grad_()
            y = run(given, index, weights)
            y.sum().backward()
            found.append([y, given.grad, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
        for a, b in zip(found[0], found[2], strict=True):
            assert ((a.double() - b.double()).norm() / a.double().norm()) < bound


@pytest.mark.parametrize("name", ["int4-g128", "nvfp4", "fp8-row"])
def test_packed_experts_are_never_whole_in_bf16(name: str) -> None:
    """Of a stack of 512 MB in bf16, at most 64 MB of values are there at once."""
    operand, (experts, n, k, s) = get_operand(name), (16, 4096, 4096, 4096)
    w = torch.randn(experts, n, k, device=CUDA).to(BF16) * 0.02
    packed = stacks.encode(operand, w, False)
    del w
    sizes, x = (s // experts,) * experts, torch.randn(s, k, device=CUDA).to(BF16)
    y = grouped(x, sizes, packed, name)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = grouped(x, sizes, packed, name)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= y.numel() * 2 + (64 << 20) + (4 << 20), peak / 2**20


def test_a_training_step_takes_no_more_memory_than_bf16() -> None:
    """Within 5 %: a stack's values are gone before its gradient is made."""
    found = {}
    for name in ("bf16", "mxfp4", "int4-g32", "nvfp4", "fp8"):
        torch.manual_seed(0)
        config = MixtralConfig(hidden_size=1024, intermediate_size=2048, num_local_experts=16)
        config._experts_implementation = "grouped_mm"
        with torch.device(CUDA):
            model = nn.ModuleDict({"experts": MixtralExperts(config).to(BF16)})
        for p in model.parameters():
            p.data.normal_(0, 0.05)
        if name != "bf16":
            quantize_(model, QATConfig(CONFIGS[name], step="prepare"))
        x = torch.randn(4096, 1024, device=CUDA).to(BF16).requires_grad_()
        weights, index = torch.rand(4096, 16, device=CUDA).topk(2)
        for _ in range(2):
            model.zero_grad()
            x.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model["experts"](x, index, weights.to(BF16)).sum().backward()
            torch.cuda.synchronize()
            found[name] = torch.cuda.max_memory_allocated() - before
        del model
    assert max(found.values()) <= 1.05 * found["bf16"], found
