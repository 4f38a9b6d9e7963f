"""Converted experts as a tensor: selected, cut, turned, copied and multiplied; the rest is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.expert_cases import CONFIGS, E, made, routed
from torch import Tensor, nn

from aoquant import (
    PackedTensor,
    QATConfig,
    quantize_,
)
from aoquant.experts.packed_experts import packed_experts


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


@pytest.mark.parametrize("dim", range(-3, 3))
def test_packed_experts_are_cut_along_any_dimension(dim: int) -> None:
    """Counted from either end, of W (E, N, K) and of its transpose."""
    w = torch.randn(E, 32, 64, dtype=torch.bfloat16)
    packed = packed_experts([linear_of(e, "int4-g32/").weight.data for e in w])
    for stack in (packed, packed.transpose(-2, -1)):
        end = stack.shape[dim] // 2
        cut, whole = (torch.ops.aten.slice.Tensor(t, dim, 0, end) for t in (stack, stack.dequantize()))
        assert cut.shape == whole.shape and torch.equal(cut.dequantize(), whole)


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


# operands are rows x of one expert, x for each, packed (E, N, K) and (E, K, N)
REFUSED: dict[str, Callable[..., Tensor]] = {
    "bmm, not turned": lambda x, each, w, t: torch.bmm(each, w),
    "bmm, on the left": lambda x, each, w, t: torch.bmm(w, t),
    "bmm, two packed": lambda x, each, w, t: torch.bmm(t.transpose(1, 2), t),
    "bmm, one expert": lambda x, each, w, t: torch.bmm(each, t[1]),
    "matmul, stacked": lambda x, each, w, t: x @ t,
    "matmul, on the left": lambda x, each, w, t: t[1] @ x,
    "matmul, two packed": lambda x, each, w, t: w[1] @ t[1],
    "linear, stacked": lambda x, each, w, t: nn.functional.linear(x, w),
    "linear, turned": lambda x, each, w, t: nn.functional.linear(x, t[1]),
    "grouped_mm, not turned": lambda x, each, w, t: nn.functional.grouped_mm(x, w, offs=ENDS),
    "grouped_mm, one expert": lambda x, each, w, t: nn.functional.grouped_mm(x, t[1], offs=ENDS),
    "grouped_mm, rows of each": lambda x, each, w, t: nn.functional.grouped_mm(each, t, offs=ENDS),
    "grouped_mm, no offsets": lambda x, each, w, t: nn.functional.grouped_mm(x, t),
    "grouped_mm, a bias": lambda x, each, w, t: nn.functional.grouped_mm(x, t, offs=ENDS, bias=x[0, :32]),
    "grouped_mm, a dtype": lambda x, each, w, t: nn.functional.grouped_mm(x, t, offs=ENDS, out_dtype=torch.float32),
    "grouped_mm, two packed": lambda x, each, w, t: nn.functional.grouped_mm(w[1], t, offs=ENDS),
}
ENDS = torch.tensor([0, 2, 5, 5], dtype=torch.int32)


@pytest.mark.parametrize("how", REFUSED)
def test_a_product_of_other_operands_is_refused(how: str) -> None:
    w = torch.randn(E, 32, 64, dtype=torch.bfloat16)
    packed = packed_experts([linear_of(e, "int4-g32/").weight.data for e in w])
    x = torch.randn(E, 5, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expert"):
        REFUSED[how](x[0], x, packed, packed.transpose(1, 2))


def test_each_expert_multiplies_rows_of_its_own() -> None:
    linears = [linear_of(w, "int4-g32/") for w in torch.randn(E, 32, 64, dtype=torch.bfloat16)]
    turned = packed_experts([layer.weight.data for layer in linears], transposed=True)
    x = torch.randn(E, 5, 64, dtype=torch.bfloat16)
    assert turned.shape == (E, 64, 32)
    assert torch.equal(torch.bmm(x, turned), torch.stack([layer(rows) for layer, rows in zip(linears, x, strict=True)]))


def test_experts_that_differ_are_not_stacked() -> None:
    """The one that does is named by its number."""
    w = torch.randn(32, 64, dtype=torch.bfloat16)
    one = linear_of(w, "int4-g32/").weight.data
    others = {
        "format": linear_of(w, "nvfp4/").weight.data,
        "activation": linear_of(w, "int4-g32/int8-row").weight.data,
        "shape": linear_of(w[:16], "int4-g32/").weight.data,
        "dtype": linear_of(w.float(), "int4-g32/").weight.data,
        "float": w,
        "stack": packed_experts([one]),
    }
    for other in others.values():
        with pytest.raises(ValueError, match="expert 2"):
            packed_experts([one, one, other])
    with pytest.raises(ValueError, match="none"):
        packed_experts([])


def linear_of(w: Tensor, recipe: str) -> nn.Linear:
    """A converted linear layer."""
    model = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype))
    model[0].weight.data.copy_(w)
    quantize_(model, recipe)
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    return layer


@pytest.mark.slow
def test_the_loop_of_packed_experts_in_a_compiled_model() -> None:
    """Under "eager" it runs outside the graph; under "grouped_mm" the error says what is not compiled: activations with
    one scale for the tensor, say.
    """
    model, batch = made("mixtral", "eager"), routed(16, "random")
    quantize_(model, QATConfig(CONFIGS["int4"], step="prepare"))
    with torch.no_grad():
        y = model(*batch)
        quantize_(model, QATConfig(step="convert"))
        torch.compiler.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager")(*batch), y)
        grouped = made("mixtral", "grouped_mm")
        quantize_(grouped, CONFIGS["int8-tensor"])
        torch.compiler.reset()
        with pytest.raises(
            NotImplementedError, match=r"packed experts \(.*their loop, which is not compiled: run the model eagerly"
        ):
            torch.compile(grouped, backend="aot_eager")(*batch)


@pytest.mark.parametrize(
    ("family", "config"),
    [("mixtral", "int4"), pytest.param("mixtral", "nvfp4", marks=pytest.mark.slow), ("gpt-oss", "mxfp4")],
)
def test_packed_experts_are_one_op_of_a_compiled_model_on_a_cpu(family: str, config: str) -> None:
    """As one graph, to the bit what runs eagerly; the gradient of the tokens, too."""
    model, (x, index, weights) = made(family, "grouped_mm"), routed(16, "random")
    quantize_(model, CONFIGS[config])
    torch.compiler.reset()
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        given = x.clone().requires_grad_()
        y = run(given, index, weights)
        y.float().square().sum().backward()
        found.append((y, given.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
