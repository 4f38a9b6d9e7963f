"""Stacks of experts and their grouped GEMMs against one expert after another, to the bit, on the CPU."""

from __future__ import annotations

import pytest
import torch
from support.bits import same_bytes, unequal_parts
from support.gemm import coded, dgrad, kept, wgrad
from torch import Tensor

from aoquant import ops
from aoquant.formats import Encoded, get_operand
from aoquant.ops import grouped, stacks
from aoquant.ops.grouped import BLOCK, _blocks
from aoquant.ops.quantized import Ask

E, N, K = 5, 48, 64
SIZES = (0, 7, 1, 0, 9)  # rows of each expert
STACKED = ("int4-g32", "mxfp4", "mxfp8", "nvfp4", "nvfp4-row", "gridflip", "fp8-row", "int8-row", "hadamard32+mxfp4")


def stack(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(E, N, K), each expert larger than the one before."""
    w = torch.randn(E, N, K) * torch.arange(1, E + 1).view(-1, 1, 1)
    return w.to(dtype)


def rows_of_experts() -> tuple[Tensor, list[tuple[int, slice]]]:
    """(ends, experts that have rows and which rows)."""
    ends = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    starts = [0, *ends.tolist()[:-1]]
    return ends, [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True)) if b > a]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("name", STACKED)
def test_a_stack_is_its_experts(name: str, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes, scales, an outer scale for each row, operands and values, whatever is turned at a time."""
    operand, w = get_operand(name), stack()
    assert stacks.why_not(operand, N) is None
    given = w.transpose(1, 2).contiguous() if transposed else w
    alone = [operand.encode(w[e]) for e in range(E)]
    for turned in (1 << 25, N * K * 4):  # all experts, two of them
        monkeypatch.setattr(stacks, "TURNED", turned)
        whole = stacks.encode(operand, given, transposed)
        for e, want in enumerate(alone):
            got = stacks.expert(operand, whole, e, E)
            outer = None if want.outer is None else want.outer.expand(N, 1)
            assert not unequal_parts(got, want._replace(outer=outer))
        for alpha_apart in (True, False):
            made = stacks.values(operand, given, transposed, Ask(False, torch.bfloat16, alpha_apart))
            form = operand.format.operand if alpha_apart else operand.format.decode
            assert made.values is not None
            assert torch.equal(made.values.view(E, N, K), torch.stack([form(e, torch.bfloat16) for e in alone]))
            alphas = [operand.format.alpha(e) for e in alone]
            wanted = None if alphas[0] is None else torch.cat([a.expand(N, 1) for a in alphas if a is not None])
            assert same_bytes(made.alpha, wanted)


def test_the_kernels_for_a_gpu_name_what_they_cannot_take() -> None:
    cuda = torch.device("cuda")
    for given, wanted in (
        ((torch.float16, K, N, cuda), "bfloat16, got torch.float16"),
        ((torch.bfloat16, K + 8, N, cuda), f"got {K + 8} and {N}"),
        ((torch.bfloat16, K, N, torch.device("cpu")), "CUDA"),
    ):
        assert wanted in str(grouped.why_not(*given))


def test_what_is_no_stack_is_named() -> None:
    assert "fp8-tensor" in str(stacks.why_not(get_operand("fp8-tensor"), N))
    assert "50 rows of gridflip-16x16" in str(stacks.why_not(get_operand("gridflip-16x16"), 50))
    for name in ("wush16+nvfp4", "wush16+int8-row", "mxfp4-sr", "rht32+mxfp4"):
        assert name in str(stacks.why_not(get_operand(name), N))


@pytest.mark.parametrize("activation", ["", "nvfp4-row", "int8-row"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_grouped_gemms_are_those_of_each_expert(activation: str, transposed: bool) -> None:
    operand = get_operand("int8-row" if activation == "int8-row" else "nvfp4")
    x_operand = get_operand(activation) if activation else None
    ends, hit = rows_of_experts()
    s, w = sum(SIZES) + 2, stack()
    tokens = torch.randn(6, K).bfloat16()
    token = torch.randint(0, 6, (s,))
    rows = tokens[token]
    given = w.transpose(1, 2).contiguous() if transposed else w
    x = tokens if x_operand is None else coded(tokens, x_operand)
    y = ops.grouped_mm(x, None, token, ends, given, x_operand, operand, transposed, torch.bfloat16)
    sorted_x = rows if x_operand is None else coded(rows, x_operand)
    again = ops.grouped_mm(
        sorted_x, None, None, ends, stacks.encode(operand, w, False), x_operand, operand, False, torch.bfloat16
    )
    assert torch.equal(y, again)
    grad = torch.randn(s, N).bfloat16()
    dx = ops.grouped_dgrad(grad, ends, given, operand, transposed)
    assert torch.equal(ops.grouped_dgrad(grad, ends, stacks.encode(operand, w, False), operand, False), dx)
    dw = ops.grouped_wgrad(grad, ends, x, token, x_operand, transposed)
    dw = dw.transpose(1, 2) if transposed else dw
    for e, r in hit:
        x_q = rows[r] if x_operand is None else coded(rows[r], x_operand)
        want = ops.matmul(x_q, w[e], None, x_operand, operand, "aoquant", [len(rows[r])], torch.bfloat16).y
        assert torch.equal(y[r], want)
        assert torch.equal(dx[r], dgrad(grad[r], kept(w[e], operand)))
        assert torch.equal(dw[e], wgrad(grad[r], kept(x_q, x_operand)))
    for t in (y[sum(SIZES) :], dx[sum(SIZES) :], dw[0], dw[3]):
        assert torch.count_nonzero(t) == 0


def test_rows_of_no_expert_at_all() -> None:
    ends, w, operand = torch.zeros(E, dtype=torch.int32), stack(), get_operand("mxfp4")
    x, none = torch.randn(3, K).bfloat16(), torch.randn(0, K).bfloat16()
    y = ops.grouped_mm(x, None, None, ends, w, None, operand, False, torch.bfloat16)
    assert y.shape == (3, N)
    assert torch.count_nonzero(y) == 0
    assert ops.grouped_mm(none, None, None, ends, w, None, operand, False, torch.bfloat16).shape == (0, N)
    dw = ops.grouped_wgrad(torch.randn(0, N).bfloat16(), ends, none, None, None, False)
    assert dw.shape == (E, N, K)
    assert torch.count_nonzero(dw) == 0
    assert ops.grouped_dgrad(torch.randn(0, N).bfloat16(), ends, w, operand, False).shape == (0, K)


def test_ops_say_what_they_return() -> None:
    ends, _ = rows_of_experts()
    operand, row, w = get_operand("int4-g32"), get_operand("int8-row"), stack()  # opcheck multiplies all it is given
    x, token = torch.randn(6, K).bfloat16(), torch.randint(0, 6, (17,))
    x_q, grad = coded(x, row), torch.randn(17, N).bfloat16()
    packed = stacks.encode(operand, w, False)
    for op, args in (
        (ops.grouped_mm, (x_q, None, token, ends, w, row, operand, False, torch.bfloat16)),
        (ops.grouped_mm, (x_q, None, token, ends, packed, row, operand, False, torch.bfloat16)),
        (ops.grouped_mm, (x, None, token, ends, w.transpose(1, 2).contiguous(), None, operand, True, torch.bfloat16)),
        (ops.grouped_dgrad, (grad, ends, w, operand, False)),
        (ops.grouped_dgrad, (grad, ends, packed, operand, False)),
        (ops.grouped_wgrad, (grad, ends, x_q, token, row, True)),
        (ops.gathered_sum, (grad[:12], torch.arange(12).view(6, 2))),
        (ops.grouped_bias, (grad, torch.randn(E, N).bfloat16(), torch.arange(17) % E)),
        (ops.grouped_bgrad, (grad, ends)),
    ):
        torch.library.opcheck(op.overload, tuple(op.flat(*args)))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("experts", "n", "k"), [(128, 1536, 2048), (8, 28672, 4096), (32, 5760, 2880), (3, 8, 64)])
def test_blocks_of_decoded_values_cover_a_stack_and_are_small(experts: int, n: int, k: int) -> None:
    seen = torch.zeros(experts, n, dtype=torch.int32)
    for block in _blocks(experts, n, 2 * k):
        part = seen[block.first : block.first + block.experts, block.columns]
        assert part.numel() * 2 * k <= BLOCK
        assert block.experts == 1 or block.columns == slice(0, n)
        assert block.columns.start % 256 == 0
        rows = torch.arange(experts * n).view(experts, n)[block.first : block.first + block.experts, block.columns]
        assert torch.equal(rows.flatten(), torch.arange(experts * n)[block.rows(n)])
        part += 1
    assert (seen == 1).all()


def test_gathered_sum_is_the_gradient_of_a_gather() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    token = torch.tensor([0, 1, 1, 3, 2, 0, 3, 2])
    grad = torch.randn(8, 8)
    x[token].backward(grad)
    place = token.argsort(stable=True).view(4, 2)
    torch.testing.assert_close(ops.gathered_sum(grad, place), x.grad, rtol=0, atol=1e-6)


def test_gradients_of_biases_are_sums_of_an_experts_rows_rounded_once() -> None:
    ends, hit = rows_of_experts()
    grad = torch.randn(sum(SIZES) + 2, N).bfloat16()  # two rows of no expert
    made = ops.grouped_bgrad(grad, ends)
    wanted = torch.zeros(E, N, dtype=torch.bfloat16)
    for e, rows in hit:
        wanted[e] = grad[rows].double().sum(0)
    torch.testing.assert_close(made, wanted, rtol=2.0**-8, atol=0)
    assert torch.count_nonzero(made[0]) == 0
    bias, expert = torch.randn(E, N).bfloat16(), torch.arange(len(grad)) % E
    assert torch.equal(ops.grouped_bias(grad, bias, expert), grad + bias[expert])


TURNED = {  # for K = 2880
    "mxfp4": None,
    "mxfp8": None,
    "nvfp4": None,
    "int4-g32": None,
    "int4-g64": None,
    "fp8-row": None,
    "int4-g128": "divide K = 2880",
    "nvfp4-row": "no kernel",
    "gridflip": "no kernel",
    "fp8-1x128": "no kernel",
    "hadamard32+mxfp4": "transforms rows",
}


@pytest.mark.parametrize(("name", "reason"), TURNED.items(), ids=TURNED)
def test_transposed_stacks_that_are_turned_say_why(name: str, reason: str | None) -> None:
    said = stacks.why_turned(get_operand(name), 2880)
    assert said is None if reason is None else reason in str(said)


def test_encoded_is_still_a_matrix_of_experts_rows() -> None:
    e = stacks.encode(get_operand("nvfp4"), stack(), False)
    assert isinstance(e, Encoded)
    assert e.codes.shape == (E * N, K // 2)
    assert e.outer is not None
    assert e.outer.shape == (E * N, 1)
