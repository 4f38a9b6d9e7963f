"""The number that tells csrc's operator of a whole layer what to do, when there is one, and W in blocks, on a CPU."""

from __future__ import annotations

import ctypes
import re
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.host_csrc import host_library
from torch import nn

from aoquant import PackedWeightConfig, backend, get_format, quantize_
from aoquant.formats import as_operand, tiles
from aoquant.linear.packed import PackedLinear
from aoquant.ops import gemm_request, linear_plan, native
from aoquant.ops.call import Call
from aoquant.ops.gemm import one_call, tensor_cores

BF16 = torch.bfloat16
CSRC = Path(__file__).parents[2] / "csrc"


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the router would choose there, by role."""
    chosen = {"gemm": "cuda-decode", "quantize": "cuda"}
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.setattr(one_call, "runner", lambda request: SimpleNamespace(name=chosen[request.role]))
    return chosen


def number(weight: str, activation: str | None = None, m: int = 1, dtype: torch.dtype = BF16) -> int | None:
    w_as, x_as = as_operand(get_format(weight)), None if activation is None else as_operand(get_format(activation))
    e = w_as.encode(torch.randn(32, 256, dtype=BF16))
    return one_call.number("aoquant", x_as, w_as, e, dtype, m)


@pytest.fixture(scope="module")
def csrc(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_library(tmp_path_factory.mktemp("csrc"), "plan", "-std=c++17")


def taken_apart(csrc: ctypes.CDLL, plan: int) -> list[float]:
    """By csrc: format, encodes, group, tile, half, the shifts of even and of odd blocks."""
    found = (ctypes.c_double * 7)()
    csrc.unpack(ctypes.c_int64(plan), found)
    return list(found)


@pytest.mark.parametrize(
    ("weight", "activation", "format", "encodes", "group", "tile", "shifts"),
    [
        ("int4-g128", None, 0, 0, 128, 1, (0.0, 0.0)),
        ("int4-g32", None, 0, 0, 32, 1, (0.0, 0.0)),
        ("nvfp4", "nvfp4-row", 1, 1, 16, 1, (0.0, 0.0)),
        ("mxfp4", None, 2, 0, 32, 1, (0.0, 0.0)),
        ("mxfp4", "mxfp4", 2, 3, 32, 1, (0.0, 0.0)),
        ("fouroversix", "fouroversix-row", 1, 4, 16, 1, (0.0, 0.0)),
        ("gridflip", "fouroversix-row", 3, 4, 16, 1, (0.25, 0.25)),
        ("gridflip-alternating", None, 3, 0, 16, 1, (0.25, -0.25)),
        ("gridflip-c0.375-16x16", None, 3, 0, 16, 16, (0.375, 0.375)),
        ("fp8-row", "fp8-row", 4, 2, 1, 1, (0.0, 0.0)),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_layers_plan(
    weight: str,
    activation: str | None,
    format: int,
    encodes: int,
    group: int,
    tile: int,
    shifts: tuple[float, float],
    dtype: torch.dtype,
    on_hopper: Any,
    csrc: ctypes.CDLL,
) -> None:
    """As csrc and as compiled code read it."""
    plan = number(weight, activation, dtype=dtype)
    assert plan is not None and 0 <= plan < 1 << 63
    assert taken_apart(csrc, plan) == [format, encodes, group, tile, dtype == torch.float16, *shifts]
    assert linear_plan.has_zero(plan) == weight.startswith("int4") and linear_plan.dtype_of(plan) == dtype
    assert linear_plan.has_alpha(plan) == (not weight.startswith(("int4", "mxfp4")))
    assert linear_plan.is_fp8(plan) == (weight == "fp8-row") and linear_plan.encodes(plan) == encodes


def test_every_field_has_bits_of_its_own(csrc: ctypes.CDLL) -> None:
    """The largest and smallest value of each field, beside those of its neighbours."""
    codes, rows, bools = ("int4", "fp8"), (None, "fp8-row"), (False, True)
    for c, r, group, tile, shift, alternating, zero, alpha, dtype in product(
        codes, rows, (1, 1 << 30), (1, 128), (0.0, -0.375), bools, bools, bools, (BF16, torch.float16)
    ):
        plan = linear_plan.packed(c, r, group, tile, shift, alternating, zero, alpha, dtype)
        half, odd = dtype == torch.float16, -shift if alternating else shift
        numbers = [linear_plan.CUDA_FORMATS[c], linear_plan.ROW_FORMATS.get(r or "", 0)]
        assert taken_apart(csrc, plan) == [*numbers, group, tile, half, shift, odd]
        assert (linear_plan.has_zero(plan), linear_plan.has_alpha(plan)) == (zero, alpha)


def test_formats_are_numbered_as_in_the_sources() -> None:
    text = (CSRC / "decode_call.cuh").read_text() + (CSRC / "row_blocks.cuh").read_text()
    found = {name.replace("_", ""): int(v) for name, v in re.findall(r"([A-Z0-9_]+) = (\d+)[,\s}]", text)}
    for how, name in {"int4": "INT4", "e4m3": "NVFP4", "e8m0": "MXFP4", "gridflip": "GRIDFLIP", "fp8": "FP8"}.items():
        assert linear_plan.CUDA_FORMATS[how] == found[name]
    for format, value in linear_plan.ROW_FORMATS.items():
        assert value == found[f"{format.removesuffix('-row').upper()}ROW"]


def test_only_what_the_router_would_choose(on_hopper: dict[str, str]) -> None:
    assert number("int4-g128") is not None and number("nvfp4", "nvfp4-row") is not None
    assert number("te-nvfp4") is None  # whose factor is made of the outer scale
    assert number("mxfp8") is None and number("int4-g128", dtype=torch.float32) is None
    assert number("nvfp4", "nvfp4") is None and number("nvfp4", "mxfp4-even") is None
    assert number("fouroversix", "fouroversix") is None and number("gridflip", "gridflip-row") is None
    on_hopper["quantize"] = "triton"
    assert number("nvfp4", "nvfp4-row") is None and number("nvfp4") is not None
    on_hopper["gemm"] = "triton-decode"
    assert number("nvfp4") is None and number("int4-g128") is None


def test_a_layer_gives_it_ordinary_calls_of_few_rows_alone(
    on_hopper: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another dtype, device, width or number of rows, autocast and a forced backend go the general way."""
    model = nn.Sequential(nn.Linear(256, 32, dtype=BF16))
    quantize_(model, PackedWeightConfig("mxfp4", contract="dequantize"))
    layer, plan, x = model[0], number("mxfp4"), torch.randn(2, 256, dtype=BF16)
    assert isinstance(layer, PackedLinear) and plan is not None
    taken: list[Any] = []
    operator = SimpleNamespace(default=lambda *arguments: taken.append(arguments) or x)
    monkeypatch.setattr(torch.ops, "aoquant_native", SimpleNamespace(linear=operator), raising=False)
    with torch.no_grad():
        layer(x)  # remembers its parts
        taken.clear()
        assert layer._in_one_call(x, plan) is x and len(taken) == 1
        many = x[:1].expand(one_call.MOST_ROWS + 1, 256)
        for other in (x.float(), x.to("meta"), x[:, :128], x[:0], many, x[0, 0]):
            assert layer._in_one_call(other, plan) is None
        with torch.autocast("cpu", BF16):
            assert layer._in_one_call(x, plan) is None
        with backend("reference"):
            assert layer._in_one_call(x, plan) is None
    assert len(taken) == 1


def test_a_product_encodes_an_input_in_the_operator_where_it_alone_reads_it(
    on_hopper: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        native, "operator", lambda name: lambda *given: called.append((name, given)) or torch.ones(2, 3, 32)
    )
    x, w, bias = torch.randn(2, 3, 256, dtype=BF16), torch.randn(32, 256, dtype=BF16), torch.ones(32)
    x_as, w_as = (as_operand(get_format(name)) for name in ("nvfp4-row", "nvfp4"))
    e, of_x = w_as.encode(w), x_as.encode(x.view(6, 256))
    run = one_call.BACKENDS[0].run

    def product(given: Any, bias: Any = None) -> tuple[str, Any]:
        called.clear()
        run(Call("aoquant", given, x_as, e, w_as, bias, [2, 3], BF16))
        ((name, arguments),) = called
        return name, arguments

    name, (of, codes, scale, zero, alpha, added, plan) = product(x, bias)
    assert name == "linear" and of is x and (codes, scale, zero, alpha) == (e.codes, e.scale, None, e.outer)
    assert added is bias and plan == number("nvfp4", "nvfp4-row", 6)
    assert product(of_x)[0] == product(x, bias.double())[0] == "decode_mm"
    run(Call("aoquant", x, None, e, w_as, None, [2, 3], BF16))
    assert called[1][0] == "linear" and called[1][1][0] is x and called[1][1][-1] == number("nvfp4", None, 6)
    on_hopper["quantize"] = "triton"
    assert product(x)[0] == "decode_mm"


def test_nothing_without_the_library() -> None:
    if native.why_not() is None:
        pytest.skip("the library is here")
    assert number("int4-g128") is None


@pytest.mark.parametrize("name", ["int4-g128", "nvfp4", "gridflip-16x16", "nvfp4-row"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_blocks_of_rows_give_the_product(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as with W whole: each block is multiplied by itself, and gets its own scales and bias."""
    f, n, k, m = get_format(name), 1000, 128, 5
    torch.manual_seed(0)
    e, x = f.encode(torch.randn(n, k, dtype=BF16)), torch.randint(-3, 4, (m, k)).to(BF16)
    b, alpha_x = torch.randn(n) if bias else None, torch.rand(m, 1) if name == "nvfp4" else None
    monkeypatch.setattr(tensor_cores, "accumulate", lambda x, w, rounded: (x.double() @ w.double().t()).float())

    def multiplied() -> torch.Tensor:
        multiply = tensor_cores._bind(gemm_request("aoquant", None, as_operand(f), e, BF16, m), e)
        assert multiply is not None
        return multiply(x, alpha_x, b)

    want = multiplied()
    sizes: list[int] = []
    decode = tensor_cores.codec.decode
    monkeypatch.setattr(
        tensor_cores.codec, "decode", lambda *a, **o: sizes.append(a[1].codes.shape[0]) or decode(*a, **o)
    )
    monkeypatch.setattr(tiles, "BLOCK", 300 * k * 2)
    assert torch.equal(multiplied(), want)
    assert sizes == [256, 256, 256, 232]


@pytest.mark.parametrize("name", ["nvfp4", "gridflip-16x16", "mxfp8", "fp8-row"])
def test_the_reference_decodes_a_large_weight_by_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared and packed, with the product of the whole; no more of W's values at once than a block."""
    f, n, k = as_operand(get_format(name)), 1000, 128
    torch.manual_seed(0)
    w, x = torch.randn(n, k, dtype=BF16), torch.randint(-3, 4, (5, k)).to(BF16)
    calls = [
        lambda given=given: Call("aoquant", x, None, given, f, None, [5], BF16).run() for given in (w, f.encode(w))
    ]
    want = calls[1]()
    sizes: list[int] = []
    decode = tiles.decode
    monkeypatch.setattr(tiles, "decode", lambda *a, **o: sizes.append(a[1].codes.shape[0]) or decode(*a, **o))
    monkeypatch.setattr(tiles, "BLOCK", 300 * k * 4)
    assert all(torch.allclose(call(), want, rtol=2**-7, atol=2**-7) for call in calls)
    assert torch.equal(calls[0](), calls[1]())
    assert sizes == [256, 256, 256, 232] * 4


def test_blocks_are_few_and_alike() -> None:
    rows = tiles.blocks(14336, 4096 * 2)
    assert [r.stop - r.start for r in rows] == [7168, 7168]
    assert tiles.blocks(8192, 4096 * 2) == [slice(0, 8192)]
    assert tiles.blocks(0, 4096 * 2) == [slice(0, 0)]  # a weight without rows is one block
    for n, row in ((14337, 8192), (128256, 8192), (100, 1 << 20), (7, 1 << 27)):
        rows = tiles.blocks(n, row)
        assert rows[0].start == 0 and rows[-1].stop == n
        assert all(a.stop == b.start and a.stop % 256 == 0 for a, b in pairwise(rows))
        assert all((r.stop - r.start) * row <= max(1 << 26, 256 * row) for r in rows)


@pytest.mark.parametrize("k", [128, 16])
def test_rows_of_a_tiled_weight(k: int) -> None:
    """Also where a row is one tile wide."""
    f = get_format("gridflip-16x16")
    e = f.encode(torch.randn(1000, k, dtype=BF16))
    values = f.operand(e, BF16)
    for rows in (slice(0, 256), slice(768, 1000)):
        assert torch.equal(f.operand(tiles.rows_of(f, e, rows), BF16), values[rows])
