"""What forward keeps for backward: never more than nn.Linear's for weights alone, packed codes and scales for
activations, one side for each gradient that will be asked for. And what a step encodes: only what a GEMM reads, once.

Two meters (support/meters.py): `saved` sees what a compiled graph keeps, `alive` what checkpointing hides.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.linear_cases import AOQUANT_CASES, BF16, BY_NAME, TORCHAO_CASES, counting, data, layer, prepared
from support.meters import Run, alive, encodings, keeping, nbytes, saved
from support.training_cases import assert_same, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aoquant import Cast, HybridConfig, PackedWeightConfig, QATConfig, calibrate, quantize_
from aoquant.formats import get_operand
from aoquant.linear import function, law
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PARTITIONED = "aot_eager_decomp_partition"  # Inductor's decompositions and partitioner, without its kernels
ROWS, K, N = 96, 192, 64  # divisible by every block, and by torch._scaled_mm's 16


def _input(dtype: torch.dtype = BF16, k: int = K) -> Tensor:
    # not a leaf, as in a model: nobody else holds it
    return data("normal", ROWS, k, dtype, 1).requires_grad_() * 1


def linear(n: int = N, k: int = K, dtype: torch.dtype = BF16) -> nn.Linear:
    return nn.Linear(k, n, dtype=dtype)


def qat(name: str, n: int = N, k: int = K, **options: Any) -> nn.Linear:
    case = replace(BY_NAME[name], n=n, k=k)
    return prepared(case, layer(case, BF16), **options)


WEIGHT_ONLY = [
    c.name for c in (*AOQUANT_CASES, *TORCHAO_CASES) if not c.variant and not re.search(r"act|ao\.mx|-h\d", c.name)
]
# bytes for each element of the input: codes, and scales of 1 / 16 or 1 / 32 byte, or 4 or 2 bytes a row
ACTIVATIONS = {
    "nvfp4-act": 0.5 + 1 / 16 + 4 / K,
    "nvfp4-static-act": 0.5 + 1 / 16,
    "mxfp4-act": 0.5 + 1 / 32,
    "mxfp8-act": 1 + 1 / 32,
    "fp8-row-act": 1 + 4 / K,
    "fp8-tensor-act": 1.0,
    "int8-row-act": 1 + 4 / K,
    "int8-row-asymact": 1 + 5 / K,
    "int4-int8act": 1 + 4 / K,
    "ao.int8act-intx4-g32": 1 + 3 / K,
    "ao.int8act-int8-row": 1 + 4 / K,
    "ao.fp8act-fp8-row": 1 + 4 / K,
    "ao.mxfp4-rceil": 0.5 + 1 / 32,
    "nvfp4-h16": 0.5 + 1 / 16 + 4 / K,
    "nvfp4-h64-signs": 0.5 + 1 / 16 + 4 / K,
    "nvfp4-h16-weight": 2.0,  # the transformed input instead of the input
    "mxfp4-h32": 0.5 + 1 / 32,
}
PER_TENSOR = 8  # bytes of scales that are one a tensor: NVFP4's outer scale


def budget(name: str) -> float:
    return ACTIVATIONS.get(name, 2) * ROWS * K + PER_TENSOR


def test_meters_read_what_nn_linear_keeps() -> None:
    """Its input, both ways; and a layer that keeps a second copy is seen."""
    plain, x_bytes = linear(), ROWS * K * 2
    assert saved(plain, plain, _input()) == x_bytes
    assert saved(plain, torch.compile(plain, fullgraph=True, backend=PARTITIONED), _input()) == x_bytes
    assert alive(plain, plain, _input()) == x_bytes
    double = nn.Sequential(linear(), nn.Sigmoid())
    assert saved(double, double, _input()) == alive(double, double, _input()) + ROWS * N * 2  # Sigmoid keeps its output


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *ACTIVATIONS])
def test_eager_forward_keeps_the_input_or_its_codes(name: str) -> None:
    module = qat(name)
    for bytes_ in (saved(module, module, _input()), alive(module, module, _input())):
        if module.prepared.recipe.fprop_input is None:
            assert bytes_ == ROWS * K * 2
        else:
            assert 0.5 * ROWS * K <= bytes_ <= budget(name), f"{bytes_ / (ROWS * K):.3f} bytes an element"


def often(always: tuple[str, ...], slow: tuple[str, ...]) -> Any:
    marked = (pytest.param(n, marks=pytest.mark.slow) for n in slow)
    return pytest.mark.parametrize("name", [*always, *marked])


@often(("int4-g32", "nvfp4-act", "fp8-row-act"), ("nvfp4-dynamic", "mxfp8-act", "int8-row-act", "ao.int8act-intx4-g32"))
def test_compiled_keeps_no_more(name: str) -> None:
    """The partitioner could keep the weight's codes, or a decoded operand: there are none to keep outside the ops."""
    module = qat(name)
    backend = "inductor" if name == "fp8-row-act" else PARTITIONED
    assert 0 < saved(module, torch.compile(module, fullgraph=True, backend=backend), _input()) <= budget(name)


def block(first: nn.Linear, second: nn.Linear, reentrant: bool) -> tuple[nn.Module, Run]:
    both = nn.Sequential(first, nn.ReLU(), second)
    return both, lambda x: checkpoint(both, x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act", "fp8-row-act", "int8-row-act"])
def test_checkpointed_keeps_the_blocks_input_alone(name: str, reentrant: bool) -> None:
    assert alive(*block(linear(), linear(K, N), reentrant), _input()) == ROWS * K * 2
    assert alive(*block(qat(name), qat(name, K, N), reentrant), _input()) == ROWS * K * 2


@often(("nvfp4-act",), ("int4-g32", "fp8-row-act"))
def test_compiled_and_checkpointed_keeps_the_blocks_input_alone(name: str) -> None:
    both, run = block(qat(name), qat(name, K, N), False)
    assert saved(both, torch.compile(run, fullgraph=True, backend=PARTITIONED), _input()) <= ROWS * K * 2


def test_clipped_straight_through_adds_one_bit_an_element() -> None:
    module = qat("nvfp4-act", straight_through="clipped")
    assert saved(module, module, _input()) <= budget("nvfp4-act") + ROWS * K / 8


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act"])
def test_a_frozen_weight_and_no_gradients_keep_nothing(name: str) -> None:
    """dx needs the weight alone, which is a parameter."""
    module = qat(name)
    with keeping(module) as kept, torch.no_grad():
        module(data("normal", ROWS, K, BF16))
    module.weight.requires_grad_(False)
    assert not kept and saved(module, module, _input()) == 0


# One cast for each operand

M, WIDE = 256, 512  # tokens, outputs; 256 inputs


def hybrid(config: Any) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer of 256 inputs, x and dy."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"layer": nn.Linear(256, WIDE, dtype=BF16)})
    quantize_(model, get_recipe(config).prepare() if isinstance(config, str) else config)
    return model["layer"], data("normal", M, 256, BF16, 1), data("normal", M, WIDE, BF16, 2)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"), 0.57),
        ("nvfp4-training", 0.57),
        (HybridConfig.fwd_bwd(None, "te-nvfp4"), 0.57),
        (HybridConfig.fwd_bwd("te-nvfp4", "mxfp8"), 1.04),
        (HybridConfig.fwd_bwd("mxfp8", "te-fp8-1x128"), 1.04),
        ("fp8-hybrid", 1.01),
        # from "forward", the smaller of rows and columns
        (HybridConfig.fwd_bwd("te-nvfp4", "mxfp8", save="col").replaced(wgrad_input=Cast("mxfp8", "forward")), 0.57),
        (HybridConfig.fwd_bwd("mxfp8", "te-nvfp4").replaced(wgrad_input=Cast("te-nvfp4", "forward")), 0.57),
        (HybridConfig.fwd_bwd("te-nvfp4", None).replaced(wgrad_input=Cast(None, "forward")), 0.57),
    ],
)
def test_bytes_for_each_value_of_the_input(config: Any, most: float) -> None:
    """x needs no gradient, so that nothing of the weight is kept."""
    module, x, _ = hybrid(config)
    with keeping(module) as kept:
        module(x)
    assert nbytes(kept) <= most * x.numel()


def test_double_quantisation_keeps_no_row() -> None:
    config = HybridConfig.fwd_bwd("mxfp8", "te-nvfp4").replaced(wgrad_input=Cast("te-nvfp4", "forward"))
    module, x, _ = hybrid(config)
    with keeping(module) as kept:
        module(x)
    assert {tuple(t.shape) for t in kept.values()} == {(256, M // 2), (256, M // 16), (1, 1)}


@pytest.mark.parametrize("name", ["mxfp8-nvfp4", "fp8-hybrid", "nvfp4-training", "mxfp8-hp", "nvfp4-hp"])
def test_each_gradient_keeps_its_own_side(name: str) -> None:
    """Nothing of x for a frozen weight, nothing of the weight for an x without gradient."""

    def kept(frozen: str) -> int:
        module, x, _ = hybrid(name)
        module.weight.requires_grad_(frozen != "weight")
        with keeping(nn.Module()) as found:
            module(x.requires_grad_(frozen != "x"))
        return nbytes(found)

    both, of_weight, of_x = kept(""), kept("weight"), kept("x")
    assert min(of_weight, of_x) > 0 and of_weight + of_x == both


@pytest.mark.parametrize(("save", "keeps"), [("row", "rows"), ("col", "columns"), ("hp", "values")])
def test_save_chooses_what_forward_keeps_of_a_quantised_input(save: str, keeps: str) -> None:
    """Backward's input has fewer bits than forward's here, so its columns are the cheaper side."""
    forward, grad, x = (get_operand(name) for name in ("mxfp8", "te-nvfp4", "nvfp4"))
    gemm = law.wgrad(save, "forward", forward, grad, x)
    assert (gemm.keeps, gemm.forward) == (keeps, forward)
    assert law.wgrad(save, "forward", x, grad, forward).keeps == ("values" if save == "hp" else "rows")


@pytest.mark.parametrize("source", ["original", "forward"])
@pytest.mark.parametrize("forward", ["mxfp8", "te-nvfp4", "te-fp8-tensor", None])
@pytest.mark.parametrize("backward", ["te-nvfp4", "mxfp8", "te-fp8-tensor", None])
def test_what_is_saved_changes_no_gradient(forward: str | None, backward: str | None, source: str) -> None:
    if forward is backward is None:
        return
    casts = {"dgrad_weight": Cast(backward, source), "wgrad_input": Cast(backward, source)}
    config = HybridConfig.fwd_bwd(forward, backward).replaced(**casts)
    (one, x, g), (other, _, _) = hybrid(config), hybrid(config.replaced(save="hp"))
    assert_same(step(one, x, g), step(other, x, g))


@pytest.mark.parametrize("activation", ["int8-tensor-static", "fp8-tensor-static"])
def test_what_is_saved_is_read_under_the_scales_of_forward(activation: str) -> None:
    """Calibrate on a quarter of the range, so that other scales would not clip."""
    casts = {"dgrad_weight": Cast("te-nvfp4", "forward"), "wgrad_input": Cast("te-nvfp4", "forward")}
    found = []
    for save in ("col", "hp"):
        backward = HybridConfig.bwd("te-nvfp4").replaced(**casts, save=save)
        layer, x, g = hybrid(QATConfig(PackedWeightConfig("fp8-row", activation), backward=backward))
        calibrate(layer, [x / 4])
        found.append(step(layer, x, g))
    assert_same(*found)


# Encodings


@pytest.mark.parametrize(
    ("config", "weight", "x", "grad"),
    [
        (HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"), 2, 2, 2),
        (HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor"), 1, 1, 1),
        (
            HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor").replaced(dgrad_grad_output="te-fp8-e5m2-tensor"),
            1,
            1,
            2,
        ),
        ("fp8-hybrid", 1, 1, 1),
        ("nvfp4-training", 1, 2, 2),
        (HybridConfig.fwd_bwd("mxfp8-32x32", "mxfp8-32x32"), 1, 1, 1),
        (HybridConfig.fwd_bwd("mxfp8", None), 1, 1, 0),
        (HybridConfig.fwd_bwd(None, "mxfp8"), 1, 1, 2),
    ],
)
def test_a_step_encodes_each_side_once(config: Any, weight: int, x: int, grad: int) -> None:
    module, inputs, g = hybrid(config)
    hp = module.prepared.recipe.fprop_weight.name == "high-precision"  # encoding copies: no cast
    with encodings() as count:
        step(module, inputs[:128], g[:128])
    assert count[256, WIDE] - hp == weight and count[128, 256] == x and count[128, WIDE] == grad


def test_a_side_that_no_gemm_reads_is_not_encoded() -> None:
    module, x, g = hybrid(HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"))
    x, g = x[:128], g[:128]

    def encoded(x: Tensor) -> dict[tuple[int, ...], int]:
        with encodings() as count:
            y = module(x)
            if y.requires_grad:
                y.backward(g)
        return dict(count)

    once = {(256, WIDE): 1, (128, 256): 1}
    with torch.no_grad():
        assert encoded(x) == once
    module.requires_grad_(False)
    assert encoded(x) == once, "nothing needs a gradient"
    assert encoded(x.clone().requires_grad_()) == {(256, WIDE): 2, (128, 256): 1, (128, WIDE): 1}, "no wgrad"
    module.weight.requires_grad_(True)
    assert encoded(x) == {(256, WIDE): 1, (128, 256): 2, (128, WIDE): 1}, "no dgrad"
    quantize_(nn.ModuleDict({"layer": module}), HybridConfig.fwd_bwd("mxfp8", None))
    assert encoded(x.clone().requires_grad_()) == once, "a backward in high precision"


@pytest.mark.parametrize("frozen", ["", "x", "weight", "bias", "x weight", "x weight bias"])
@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act", "fp8-row-act", "int8-row-act", "mxfp8-act"])
def test_frozen_operands_cost_nothing(name: str, frozen: str) -> None:
    """No op for a gradient that nobody wants, and no encode beyond that of an input whose codes are kept: the GEMM
    encodes the weight, and an input that nothing else reads.
    """
    module, x, g = qat(name), data("normal", ROWS, K, BF16, 1), data("normal", ROWS, N, BF16, 2)
    module.weight.requires_grad_("weight" not in frozen)
    module.bias.requires_grad_("bias" not in frozen)
    x.requires_grad_("x" not in frozen.split())
    with counting("encode", "gradients", "bgrad", "matmul", "saturated") as calls:
        y = module(x)
        if y.requires_grad:
            y.backward(g)
        else:
            assert frozen == "x weight bias" and y.grad_fn is None
    quantised = module.prepared.recipe.fprop_input is not None
    assert len(calls["encode"]) == (quantised and y.requires_grad)
    assert len(calls["matmul"]) == 1 and not calls["saturated"]
    of_x, of_w = x.requires_grad, quantised and module.weight.requires_grad
    asked = [(c["w"] is not None, c["x"] is not None) for c in calls["gradients"]]
    assert asked == [(of_x, of_w)] * (of_x or of_w)
    assert len(calls["bgrad"]) == module.bias.requires_grad
    for t in (x, module.weight, module.bias):
        assert (t.grad is not None) == t.requires_grad


@pytest.mark.parametrize("name", ["mxfp8-nvfp4", "nvfp4-training"])
def test_a_gpu_makes_both_sides_of_an_input_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one op, with the results of two."""
    (plain, x, g), (module, _, _) = hybrid(name), hybrid(name)
    want = step(plain, x, g)
    monkeypatch.setattr(function, "ONE_PASS", ("cpu",))
    with counting("encode") as calls:
        got = step(module, x, g)
    sides = [(c["row"], c["col"]) for c in calls["encode"] if c["x_RK"].shape == x.shape]
    assert len(sides) == 1 and None not in sides[0], "both in one op"
    assert_same(got, want)
    module.weight.requires_grad_(False)
    with counting("encode") as calls:
        y = module(x.clone().requires_grad_())
    assert all(c["col"] is None for c in calls["encode"]), "a column side that no GEMM reads"
    assert torch.equal(y.detach(), want["y"])
