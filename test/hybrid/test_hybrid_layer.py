"""One cast per operand in a layer: every operand's bytes, and the gradients that follow from them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.bits import unequal_parts
from support.gemm import coded, kept
from support.hybrid_cases import (
    BF16,
    FORMATS,
    M,
    data,
    differing,
    layer,
    named,
    reference,
    values,
)
from support.training_cases import assert_same, step
from torch import Tensor

from aoquant import Cast, HybridConfig, MXFP8WeightConfig, PackedWeightConfig, QATConfig, backend, ops
from aoquant.formats import Encoded
from aoquant.linear import law
from aoquant.ops import backward, encoding
from aoquant.recipes import NVFP4_TRAINING

PAIRS = list(itertools.permutations(FORMATS, 2))
SQUARE = ("te-nvfp4-16x16", "te-fp8-tensor", "te-fp8-e5m2-tensor", "te-fp8-128x128", "fp8-tensor", "fp8-128x128")


@pytest.fixture
def operands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Encoded]]:
    """Names and codes of the operands of every backward GEMM, grad_output and the other, in the order in which they are
    multiplied.
    """
    seen: list[tuple[str, Encoded]] = []
    real = backward.Call

    def call(contract: str, a: Encoded, a_as: Any, b: Encoded, b_as: Any, *rest: Any) -> Any:
        seen.extend(((a_as.name, a), (b_as.name, b)))
        return real(contract, a, a_as, b, b_as, *rest)

    monkeypatch.setattr(backward, "Call", call)
    return seen


def padded(t: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, -t.shape[1] % multiple))


def contracted(operand: Any) -> int:
    """The multiple to which a backward GEMM of two such operands pads its axis."""
    return ops.contraction(operand, operand, law.contract(operand, operand))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "te-nvfp4", "nvfp4", "te-fp8-1x128"])
def test_one_format_everywhere_is_the_single_format_layer(name: str) -> None:
    single = layer(QATConfig(PackedWeightConfig(name, name), backward=name))
    hybrid = layer(HybridConfig.fwd_bwd(name, name).replaced(wgrad_input=Cast(name, "forward")))
    assert_same(step(hybrid, *data()), step(single, *data()))


@pytest.mark.parametrize(("forward", "backward"), PAIRS, ids="-".join)
def test_every_ordered_pair(forward: str, backward: str, operands: list[tuple[str, Encoded]]) -> None:
    config = HybridConfig.fwd_bwd(forward, backward)
    linear, (x, g) = layer(config), data()
    with backend("reference", role="gemm"):
        got = step(linear, x, g)
    assert [name for name, _ in operands] == [backward] * 4
    w, operand = values(forward, linear.weight.detach()), named(backward)
    assert operand is not None
    for (_, codes), t in zip(operands, (g, w.t(), g.t(), x.t()), strict=True):
        assert not unequal_parts(codes, operand.encode(padded(t, contracted(operand))))
    wanted = reference(config, linear, x, g)
    assert differing(got["x"], wanted["x"]) <= 5e-4 and differing(got["weight"], wanted["weight"]) <= 5e-4
    plain = layer(QATConfig(PackedWeightConfig(forward, forward)))
    want = step(plain, x, g)
    assert_same({k: got[k] for k in ("y", "bias")}, {k: want[k] for k in ("y", "bias")})


@pytest.mark.parametrize(
    ("forward", "backward"), [("mxfp8", "te-nvfp4"), ("te-nvfp4", "mxfp8"), ("mxfp4", "te-fp8-1x128")]
)
def test_original_sources_are_the_plain_layers_operands(
    forward: str, backward: str, operands: list[tuple[str, Encoded]]
) -> None:
    x, g = data()
    linear = layer(HybridConfig.fwd_bwd(forward, backward).replaced(dgrad_weight=Cast(backward)))
    step(linear, x, g)
    operand = named(backward)
    assert operand is not None
    for (_, codes), t in zip(operands, (g, linear.weight.detach().t(), g.t(), x.t()), strict=True):
        assert not unequal_parts(codes, operand.encode(padded(t, contracted(operand))))


def test_three_formats_in_one_layer() -> None:
    config = HybridConfig(
        fprop_input="te-nvfp4", fprop_weight="te-nvfp4", dgrad_grad_output="mxfp8-e5m2", dgrad_weight="mxfp8",
        wgrad_grad_output="te-fp8-e5m2-1x128", wgrad_input="te-fp8-1x128",
    )  # fmt: skip
    linear, (x, g) = layer(config), data()
    got, wanted = step(linear, x, g), reference(config, linear, x, g)
    assert differing(got["x"], wanted["x"]) <= 5e-4 and differing(got["weight"], wanted["weight"]) <= 5e-4


@pytest.mark.parametrize("slot", ["dgrad", "wgrad"])
def test_one_hybrid_gemm_the_rest_plain(slot: str) -> None:
    other = {"dgrad": "dgrad_weight", "wgrad": "wgrad_input"}[slot]
    config = HybridConfig(fprop_input="mxfp8", fprop_weight="mxfp8", **{f"{slot}_grad_output": "mxfp4", other: "mxfp4"})
    plain = HybridConfig.fwd_bwd("mxfp8", None)
    x, g = data()
    got, wanted = step(layer(config), x, g), step(layer(plain), x, g)
    changed = {"dgrad": "x", "wgrad": "weight"}[slot]
    assert {k for k in got if not torch.equal(got[k], wanted[k])} == {changed}


@pytest.mark.parametrize("forward", ["mxfp8", "te-nvfp4", "te-fp8-tensor"])
def test_high_precision_sides(forward: str) -> None:
    x, g = data()
    original = HybridConfig.fwd_bwd(forward, None).replaced(dgrad_weight=Cast(None))
    linear = layer(original)
    got = step(linear, x, g)
    assert torch.equal(got["x"], g @ linear.weight.detach()) and torch.equal(got["weight"], g.t() @ x)
    linear = layer(original.replaced(dgrad_weight=Cast(None, "forward"), wgrad_input=Cast(None, "forward")))
    got = step(linear, x, g)
    assert torch.equal(got["x"], g @ values(forward, linear.weight.detach()))
    assert torch.equal(got["weight"], g.t() @ values(forward, x))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.parametrize("rows", [M, 128, 1])
def test_square_tiles_share_codes(name: str, rows: int, dtype: torch.dtype) -> None:
    operand, x = named(name), data(dtype, m=rows)[0]
    assert operand is not None and operand.format.square
    wanted = ops.codec.encode(operand, padded(x.t(), 128))
    turned = ops.codec.transposed(operand, ops.codec.encode(operand, x), encoding.padded(rows, 128))
    assert not unequal_parts(turned, wanted)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "te-nvfp4", "te-fp8-1x128"])
def test_others_do_not(name: str) -> None:
    """The values of x^T's codes are others than those of x's codes, transposed: nothing could be shared."""
    operand, x = named(name), data(torch.float32, m=128)[0]
    assert operand is not None and not operand.format.square
    x *= torch.logspace(-2, 2, 128).unsqueeze(1)
    rows, columns = (operand.decode(operand.encode(t), torch.float32) for t in (x, x.t().contiguous()))
    assert not torch.equal(rows.t(), columns)


def test_square_tiles_that_compare_sums_do_not() -> None:
    """Their codes may be equal, but the order of a sum would decide, so they are never shared."""
    operand = named("fouroversix-16x16")
    assert operand is not None and not operand.format.square


@pytest.mark.parametrize("save", ["col", "hp"])
def test_a_backward_by_hand(save: str) -> None:
    """Square weights, a Hadamard transform and stochastic gradients."""
    config = NVFP4_TRAINING.replaced(fprop_input="te-nvfp4", fprop_weight="te-nvfp4-16x16", save=save)
    linear, (x, g) = layer(config), data()
    state = linear.backward_random.clone()
    got, wanted = step(linear, x, g), reference(config, linear, x, g, state)
    assert differing(got["x"], wanted["x"]) <= 5e-4 and differing(got["weight"], wanted["weight"]) <= 5e-4


def test_a_base_of_its_own() -> None:
    x, g = data()
    one = layer(QATConfig(MXFP8WeightConfig(), backward=HybridConfig.bwd("te-nvfp4")))
    assert_same(step(one, x, g), step(layer(HybridConfig.fwd_bwd("mxfp8", "te-nvfp4")), x, g))


CHECKS = ("test_autograd_registration", "test_faketensor")
SYMBOLIC = "test_aot_dispatch_dynamic"  # ten times the others' time; without rows there is no symbol, so it is slow


@pytest.mark.parametrize(
    ("name", "rows", "checks"),
    [
        pytest.param(name, rows, checks, id=f"{name}-{what}", marks=[pytest.mark.slow] if slow else [])
        for name in ("mxfp8", "te-nvfp4", "te-fp8-tensor", "te-hadamard16-sd7e8+te-nvfp4")
        for what, rows, checks, slow in (
            ("rows", M, CHECKS, False),
            ("empty", 0, CHECKS, False),
            ("symbolic", M, (SYMBOLIC,), name in ("mxfp8", "te-nvfp4")),
            ("empty-symbolic", 0, (SYMBOLIC,), True),
        )
    ],
)
def test_the_ops_are_well_formed(name: str, rows: int, checks: tuple[str, ...]) -> None:
    operand, (x, g) = named(name), data(m=rows)
    assert operand is not None
    flat = tuple(ops.encode.flat(x, None, operand, multiple=operand.period))
    torch.library.opcheck(ops.encode.overload, flat, test_utils=checks)
    made = ops.encode(x, None, operand, multiple=operand.period).col
    assert made is not None and made.codes.k == max(operand.period, rows + -rows % operand.period)
    columns = made.codes
    gemm = operand, operand
    flat = tuple(ops.gradients.flat(g, None, kept(columns, keeps="columns", gemm=gemm)))
    torch.library.opcheck(ops.gradients.overload, flat, test_utils=checks)
    if operand.format.square and operand.transform is None:
        x_kept = kept(coded(x, operand), keeps="square", gemm=gemm)
        w_kept = kept(coded(x.new_ones(g.shape[1], x.shape[1]), operand), keeps="square", gemm=gemm)
        flat = tuple(ops.gradients.flat(g, None, x_kept))
        torch.library.opcheck(ops.gradients.overload, flat, test_utils=checks)
        flat = tuple(ops.gradients.flat(g, w_kept, x_kept))
        torch.library.opcheck(ops.gradients.overload, flat, test_utils=checks)
