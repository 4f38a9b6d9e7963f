"""Rows of experts against packed experts in one launch: operands to the bit, a row's bits whatever its company, and for
many rows the bits of a product of W's values.

The large shapes are Qwen3-30B-A3B's, gpt-oss-20b's and Mixtral's, with fewer experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.gpu import BF16, CUDA, captured, check_experts, ends_of, launched, no_waiting, rows_of_experts, warmed
from torch import Tensor

from aoquant import ops
from aoquant.formats import Encoded, Operand, get_operand
from aoquant.ops import expert_rows, native, stacks

pytestmark = pytest.mark.gpu

FORMATS = ("int4-g128", "int4-g32", "nvfp4", "mxfp4", "fouroversix", "gridflip", "gridflip-16x16", "te-nvfp4-16x16")
SHAPES = ((1536, 2048), (2048, 768), (272, 512), (48, 128), (4096, 14336), (9216, 4096))  # N, K
RAGGED = ((5760, 2880), (2880, 2880), (208, 160), (12048, 4128))  # steps of 128 do not divide K
ROUTINGS = {
    "one row": (0, 0, 0, 1, 0, 0),
    "one each": (1, 1, 1, 1, 1, 1),
    "a few": (0, 3, 1, 0, 7, 2),
    "full slots": (8, 0, 16, 17, 9, 1),
    "all to one": (0, 0, 90, 0, 0, 0),
    "none": (0, 0, 0, 0, 0, 0),
    "the most": (32, 1, 60, 0, 66, 33),
}


@pytest.fixture(params=["csrc", "triton"])
def kernel(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel multiplies."""
    if request.param == "triton":
        monkeypatch.setattr(expert_rows, "_takes", lambda *args: False)
    else:
        needs_csrc()
    return str(request.param)


def needs_csrc() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("csrc multiplies experts on Hopper")
    if reason := native.why_not():
        pytest.skip(reason)


def stack(name: str, experts: int, n: int, k: int) -> tuple[Operand, Encoded]:
    """Each expert larger than the one before."""
    torch.manual_seed(n + k)
    w = torch.randn(experts, n, k, device=CUDA) * torch.arange(1, experts + 1, device=CUDA).view(-1, 1, 1) * 0.02
    operand = get_operand(name)
    return operand, stacks.encode(operand, w.to(BF16), False)


def product(operand: Operand, w: Encoded, x: Tensor, ends: Tensor, alpha_x: Tensor | None = None) -> Tensor:
    return expert_rows.multiply(operand.format, w, x, ends, alpha_x)


def check(operand: Operand, w: Encoded, sizes: tuple[int, ...], behind: int) -> None:
    experts = [stacks.expert(operand, w, e, len(sizes)) for e in range(len(sizes))]
    check_experts(lambda x: product(operand, w, x, ends_of(sizes)), operand.format, experts, sizes, behind)


def check_alone(operand: Operand, w: Encoded, x: Tensor, sizes: tuple[int, ...], every: int = 1) -> None:
    """Compare rows (each `every`-th of an expert) with the product of the row alone with its expert alone."""
    y = product(operand, w, x, ends_of(sizes))
    for e, rows in rows_of_experts(sizes):
        for i in range(rows.start, rows.stop, every):
            part = stacks.expert(operand, w, e, len(sizes))
            assert torch.equal(product(operand, part, x[i : i + 1], ends_of((1,))), y[i : i + 1])
    assert torch.count_nonzero(y[sum(sizes) :]) == 0


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("name", FORMATS)
def test_operands_and_sums(name: str, sizes: tuple[int, ...], kernel: str) -> None:
    operand, w = stack(name, len(sizes), 272, 512)
    check(operand, w, sizes, behind=3)


@pytest.mark.parametrize("shape", SHAPES + RAGGED, ids=str)
@pytest.mark.parametrize("name", ["int4-g32", "mxfp4", "nvfp4"])
def test_shapes(name: str, shape: tuple[int, int], kernel: str) -> None:
    operand, w = stack(name, 3, *shape)
    for sizes in ((0, 1, 0), (5, 0, 4), (2, 21, 17), (96, 0, 0)):
        check(operand, w, sizes, behind=0)


@pytest.mark.parametrize("shape", [*SHAPES, RAGGED[0], RAGGED[3]], ids=str)
@pytest.mark.parametrize("name", ["int4-g32", "mxfp4", "nvfp4", "gridflip"])
def test_a_row_is_what_it_is_alone(name: str, shape: tuple[int, int]) -> None:
    """Whatever other rows there are and how many: no bit differs from a stack of its expert, multiplied by it alone."""
    needs_csrc()
    operand, w = stack(name, 3, *shape)
    for sizes in ((3, 0, 1), (4, 9, 20), (40, 2, 50)):
        check_alone(operand, w, torch.randn(sum(sizes), shape[1], device=CUDA).to(BF16), sizes, every=3)


@pytest.mark.parametrize("experts", [1, 31, 128, 129, 300])
def test_slots_of_many_experts(experts: int) -> None:
    """Slots are found wherever they are: each row is its expert's."""
    needs_csrc()
    operand, w = stack("mxfp4", experts, 48, 128)
    for most in (1, 3, 40):
        sizes = torch.randint(0, most + 1, (experts,)) * (torch.rand(experts) < 0.4)
        x = torch.randn(int(sizes.sum()) + 2, 128, device=CUDA).to(BF16)
        check_alone(operand, w, x, tuple(sizes.tolist()))


@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (1104, 160), (1104, 544)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_many_blocks_of_small_experts(name: str, shape: tuple[int, int]) -> None:
    """Blocks of 64 rows of W, which many experts have: operands, and the bits of a row alone, in a block of 32."""
    needs_csrc()
    if shape[1] % (get_operand(name).format.block or 1):
        pytest.skip("K has no whole blocks")
    experts = 128
    operand, w = stack(name, experts, *shape)
    sizes = [(0, 2, 1, 0, 3, 1, 0, 1)[e % 8] for e in range(experts)]
    sizes[5], sizes[9] = 9, 20  # several slots
    check(operand, w, tuple(sizes), behind=2)
    check_alone(operand, w, torch.randn(sum(sizes), shape[1], device=CUDA).to(BF16), tuple(sizes))


def test_scales_of_rows_multiply_sums(kernel: str) -> None:
    """By powers of two, so that the rounding is the same."""
    for name in ("int4-g32", "nvfp4"):
        operand, w = stack(name, 6, 272, 512)
        x = torch.randn(20, 512, device=CUDA).to(BF16)
        sizes = (0, 11, 1, 0, 7, 1)
        alpha_x = torch.exp2(torch.randint(-3, 4, (20, 1), device=CUDA).float())
        y = product(operand, w, x, ends_of(sizes), alpha_x)
        assert torch.equal(y, (product(operand, w, x, ends_of(sizes)).float() * alpha_x).to(BF16))


@pytest.mark.parametrize(("name", "s"), [("int4-g32", 6), ("int4-g32", 40), ("int4-g32", 100), ("mxfp4", 1000)])
def test_a_graph_takes_any_routing(name: str, s: int, kernel: str) -> None:
    """Captured with one routing, replayed with others, without a wait; a thousand rows by the kernel for many."""
    if s == 1000 and kernel == "triton":
        pytest.skip("csrc alone multiplies many rows")
    operand, w = stack(name, 6, 1536, 2048)
    x, ends = torch.randn(s, 2048, device=CUDA).to(BF16), ends_of((s, 0, 0, 0, 0, 0))

    def run(ends: Tensor = ends) -> Tensor:
        if s == 1000:
            return expert_rows.by_csrc(operand.format, w, x, ends, None, many=True)
        return product(operand, w, x, ends)

    warmed(run)
    with no_waiting():
        run()
    graph, y = captured(run, 0)
    for sizes in ((0, 0, 0, 0, 0, s), (0, 0, 0, 0, 0, s - 2), (1, s - 3, 0, 1, 1, 0), (0, 0, 0, 0, 0, 0)):
        ends.copy_(ends_of(sizes))
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, run(ends_of(sizes)))
        assert torch.count_nonzero(y[sum(sizes) :]) == 0


MANY = (  # rows of six experts; csrc has slots of 64, of 128, and, of more than 128 rows on average, of 256
    (700, 0, 129, 1, 0, 511),
    (64, 65, 33, 40, 20, 60),
    (0, 0, 0, 0, 0, 300),
    (256, 320, 0, 1, 200, 90),
    (0, 0, 0, 0, 0, 1500),
    (191, 192, 193, 128, 129, 63),
    (257, 320, 321, 576, 290, 64),  # the last two slots share their rows: 160 + 97, 160 + 160, 160 + 130
)


@pytest.mark.parametrize("sizes", MANY, ids=str)
@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (5760, 2880), (272, 160), (208, 544), (144, 96)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_have_the_bits_of_a_product_of_values(
    name: str, shape: tuple[int, int], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of 64, 128 and 256 rows; last steps of a quarter, a half and three quarters of 128 values; outer scales of
    rows; rows of no expert.
    """
    needs_csrc()
    if shape[1] % (get_operand(name).format.block or 1):
        pytest.skip("K has no whole blocks")
    operand, w = stack(name, len(sizes), *shape)
    s = sum(sizes) + 5
    column = torch.randint(0, shape[1], (s,), device=CUDA)
    eye = torch.nn.functional.one_hot(column, shape[1]).to(BF16)
    for x in (eye, torch.randn(s, shape[1], device=CUDA).to(BF16)):
        y = ops.grouped_mm(x, None, None, ends_of(sizes), w, None, operand, False, BF16)
        with monkeypatch.context() as m:
            m.setattr(expert_rows, "_takes", lambda *args: False)
            want = ops.grouped_mm(x, None, None, ends_of(sizes), w, None, operand, False, BF16)
        assert torch.equal(y, want)
    alpha_x = torch.rand(s, 1, device=CUDA) + 0.5
    scaled = expert_rows.by_csrc(operand.format, w, eye, ends_of(sizes), alpha_x, many=True)
    unscaled = expert_rows.by_csrc(operand.format, w, eye, ends_of(sizes), None, many=True)
    if operand.format.alpha(w) is None:
        assert torch.equal(scaled, (unscaled.float() * alpha_x).to(BF16))


@pytest.mark.parametrize(
    ("rows", "kernel"), [(48, "expert_tiles"), (128, "expert_tiles"), (129, "expert_wide")], ids=str
)
def test_the_kernel_is_chosen_by_rows_of_an_expert(rows: int, kernel: str) -> None:
    needs_csrc()
    operand, w = stack("int4-g32", 6, 272, 512)
    x = torch.randn(6 * rows, 512, device=CUDA).to(BF16)
    run = partial(expert_rows.by_csrc, operand.format, w, x, ends_of((rows,) * 6), None, many=True)
    run()
    names = launched(run)
    assert sum(kernel in name for name in names) == 1, names


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4"])
def test_hundreds_of_rows_with_scales_of_rows_have_the_bits_of_a_product_of_values(name: str) -> None:
    """Scales of rows of x that are no powers of two, times those of rows of W: multiplied in one order."""
    needs_csrc()
    from aoquant.ops.triton import grouped_kernels

    operand, w = stack(name, 6, 1104, 544)
    sizes = (0, 300, 5, 700, 256, 0)
    s, format = sum(sizes) + 3, operand.format
    x, alpha_x = torch.randn(s, 544, device=CUDA).to(BF16), torch.rand(s, 1, device=CUDA) + 0.5
    y = expert_rows.by_csrc(format, w, x, ends_of(sizes), alpha_x, many=True)
    values, alpha_w, want = format.operand(w, BF16).view(6, -1, 544), format.alpha(w), torch.empty_like(y)
    alpha_w = None if alpha_w is None else alpha_w.expand(6 * 1104, 1).contiguous()
    at = grouped_kernels.slots(ends_of(sizes), s, 0, 6)
    grouped_kernels.matmul(x, values, alpha_x, alpha_w, at, want, programs=16)
    grouped_kernels.zero_behind(want, ends_of(sizes))
    assert torch.equal(y, want)


def test_products_of_hundreds_of_rows_may_run_at_once() -> None:
    """Each launch draws its tiles from a counter of its own: two streams, and the same bits every time."""
    needs_csrc()
    operand, w = stack("mxfp4", 6, 1536, 2048)
    x, ends = torch.randn(1400, 2048, device=CUDA).to(BF16), ends_of((700, 0, 129, 1, 0, 511))
    want = expert_rows.by_csrc(operand.format, w, x, ends, None, many=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    made = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(expert_rows.by_csrc(operand.format, w, x, ends, None, many=True))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in made)
