"""packed_linear: the layer that convert makes, from tensors that somebody holds; and what a packed FP4 layer
promises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aoquant import (
    Hadamard,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    backend,
    get_format,
    packed_linear,
    quantize_,
)
from aoquant.formats import Encoded, layout
from aoquant.recipes import get_recipe

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("nvfp4", "nvfp4-none", "nvfp4-search", "fouroversix", "xx-nvfp4", "xx-nvfp4-static:0.1", "qutlass-nvfp4",
         "te-nvfp4", "te-nvfp4-16x16", "mxfp4", "mxfp4-quest", "xx-mxfp4", "qutlass-mxfp4", "gridflip")  # fmt: skip


def encoded(name: str, n: int = 24, k: int = 96, dtype: torch.dtype = BF16) -> tuple[Tensor, Encoded]:
    w = torch.randn(n, k).to(dtype) * 0.02
    return w, get_format(name).encode(w)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("config", [
    NVFP4WeightConfig(), NVFP4WeightConfig("none", activation="nvfp4-none"), NVFP4WeightConfig(rule="search"),
    NVFP4WeightConfig("static", numerics="xx"), NVFP4WeightConfig(numerics="qutlass"), NVFP4WeightConfig(numerics="te", tile=16),
    MXFP4WeightConfig(), MXFP4WeightConfig("quest", transform=Hadamard(32)), MXFP4WeightConfig(numerics="xx"),
    NVFP4WeightConfig(activation=None), NVFP4WeightConfig(transform=Hadamard(16, 5)),
], ids=lambda c: c.recipe().fprop_weight.name + ("" if c.activation else "-weight"))  # fmt: skip
def test_it_is_the_layer_that_convert_makes(config: Any, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(96, 32)).to(dtype)
    quantize_(model, config)
    theirs = model[0]
    assert isinstance(theirs.weight, PackedTensor)
    w = theirs.weight
    outer = w.per_tensor_scale
    fmt = w.recipe.fprop_weight.format
    mine = packed_linear(
        w.qdata, w.scale, None if outer is None else outer[0, 0] if fmt.reach == "tensor" else outer, theirs.bias,
        format=fmt.name, activation=config.activation, transform=config.transform, dtype=dtype,
    )  # fmt: skip
    assert mine.weight.format == w.format and mine.weight.activation == w.activation
    for shape in ((96,), (1, 96), (5, 96), (2, 3, 96), (0, 96)):
        x = torch.randn(*shape).to(dtype)
        assert torch.equal(mine(x), theirs(x))


def test_outer_scales_of_both_operands() -> None:
    """One number, or one a row for the weight; a constant in its format's name for the input."""
    _, e = encoded("xx-nvfp4-static:0.25")
    x = torch.randn(3, 96).to(BF16)

    def make(outer: Tensor | float) -> nn.Linear:
        return packed_linear(e.codes, e.scale, outer, format="xx-nvfp4", activation="xx-nvfp4-static:0.05")

    y = make(0.25)(x)
    for outer in (torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([[0.25]]), torch.full((24,), 0.25).double()):
        assert torch.equal(make(outer)(x), y)
    rows = torch.full((24, 1), 0.25)
    rows[12:] = 0.5
    assert torch.equal(make(rows)(x)[:, :12], y[:, :12])
    torch.testing.assert_close(make(rows)(x)[:, 12:], 2 * y[:, 12:], rtol=0, atol=0)


def test_matrices_of_a_transform() -> None:
    """T shared (G, G), and per block (K / G, G, G): the input is multiplied by T^T, the weight was by T^-1."""
    for size in (16, 32):
        shared = torch.linalg.qr(torch.randn(size, size))[0].to(BF16)
        per_block = torch.stack([torch.linalg.qr(torch.randn(size, size))[0].to(BF16) for _ in range(96 // size)])
        for matrix in (shared, per_block):
            w = torch.randn(24, 96)
            inverse = torch.linalg.inv(matrix.double()).expand(96 // size, size, size)
            folded = torch.einsum("ngi,gio->ngo", w.double().unflatten(1, (-1, size)), inverse).flatten(1).float()
            e = get_format("nvfp4").encode(folded)
            layer = packed_linear(
                e.codes, e.scale, e.outer, format="nvfp4", transform=matrix, activation=None, dtype=F32
            )
            x = torch.randn(5, 96)
            want = x.double() @ w.double().t()
            assert ((layer(x).double() - want).norm() / want.norm()).item() < 0.12  # FP4 codes of w
            quantised = packed_linear(e.codes, e.scale, e.outer, format="nvfp4", transform=matrix, dtype=F32)
            assert ((quantised(x).double() - want).norm() / want.norm()).item() < 0.17
            assert torch.equal(layer.to(BF16).weight.act_pre_scale, matrix.expand(96 // size, size, size))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_dtypes_and_defaults(name: str) -> None:
    _, e = encoded(name)
    layer = packed_linear(e.codes, e.scale, e.outer, torch.ones(24), format=name, activation=None)
    x = torch.randn(3, 96).to(BF16)
    want = torch.nn.functional.linear(x.double(), get_format(name).decode(e, F32).double(), torch.ones(24).double())
    assert ((layer(x).double() - want).norm() / want.norm()).item() < 5e-3
    assert layer.weight.dtype == layer.bias.dtype == BF16 and (layer.in_features, layer.out_features) == (96, 24)
    if name != "gridflip":
        both = packed_linear(e.codes, e.scale.view(torch.uint8), e.outer, format=name)  # bytes of scales will do
        by_row = {"nvfp4": "nvfp4-row", "nvfp4-search": "nvfp4-row", "fouroversix": "fouroversix-row"}
        assert both.weight.activation == {**by_row, "te-nvfp4-16x16": "te-nvfp4"}.get(name, name)
    pairs = packed_linear(e.codes.view(torch.float4_e2m1fn_x2), e.scale, e.outer, format=name, activation=None)
    assert torch.equal(pairs.weight.qdata, e.codes)


NVFP4 = encoded("nvfp4")[1]
REFUSED: dict[str, list[dict[str, Any]]] = {
    "format": [{"format": "int4-g32"}, {"format": "hadamard16+nvfp4"}, {"format": "mxfp8"}],
    "codes": [{"codes": NVFP4.codes.float()}, {"codes": NVFP4.codes[0]}],
    "K to be a multiple of 16": [{"codes": NVFP4.codes[:, :44]}],
    "scales": [{"scale": NVFP4.scale[:, :5]}, {"scale": layout.swizzle_128x4(NVFP4.scale)}, {"scale": NVFP4.scale.float()}],
    "outer": [
        {"outer": None}, {"format": "nvfp4-none"}, {"outer": torch.ones(5)}, {"outer": torch.ones(1, dtype=torch.int64)},
        *({"outer": outer} for outer in (float("nan"), 0.0, -1.0, float("inf"))),
        {"outer": torch.ones(24).index_fill(0, torch.tensor(7), float("nan"))},
    ],
    "bias": [{"bias": torch.ones(5)}],
    "device": [{"bias": torch.ones(24, device="meta")}],
    "transform": [
        {"transform": t}
        for t in ("hadamard16", torch.eye(18), torch.eye(16).expand(5, 16, 16), torch.eye(16) * 0.1, torch.eye(16).int())
    ],
    "'nope'": [{"activation": "nope"}],
    "'nvfp4-static'": [{"activation": "nvfp4-static"}],
    "float64": [{"dtype": torch.float64}],
}  # fmt: skip


@pytest.mark.parametrize("argument", REFUSED)
def test_what_does_not_fit_is_refused_by_name(argument: str) -> None:
    for change in REFUSED[argument]:
        given = {"codes": NVFP4.codes, "scale": NVFP4.scale, "outer": NVFP4.outer, "format": "nvfp4"} | change
        with pytest.raises(ValueError, match=argument):
            packed_linear(**given)


@pytest.mark.parametrize("name", ["te-nvfp4-16x16", "fouroversix-16x16", "gridflip-16x16"])
def test_rows_are_cut_between_tiles_and_a_short_last_tile_comes_along(name: str) -> None:
    fmt = get_format(name)
    e = fmt.encode(torch.randn(40, 96).to(BF16))
    w = packed_linear(e.codes, e.scale, e.outer, format=name, activation=None).weight.data
    assert isinstance(w, PackedTensor)
    values = w.dequantize()
    for start, end in ((0, 16), (16, 40), (32, 40), (0, 40), (16, 32)):
        part = w[start:end]
        assert isinstance(part, PackedTensor) and part.shape == (end - start, 96)
        assert part.scale is not None and len(part.scale) == -(-(end - start) // 16)
        assert torch.equal(part.dequantize(), values[start:end])
    with pytest.raises(ValueError, match="multiples of 16"):
        w[16:36]


def test_a_compile_caches_key_is_everything_but_the_numbers() -> None:
    """Two layers that differ in the activation's format or the contract alone run other code."""
    _, e = encoded("nvfp4")

    def key(activation: str | None = "nvfp4", **change: Any) -> str:
        w = packed_linear(e.codes, e.scale, e.outer, format="nvfp4", activation=activation).weight.data
        assert isinstance(w, PackedTensor)
        for name, value in change.items():
            assert getattr(w, name) != value
            setattr(w, name, value)
        return w._stable_hash_for_caching()

    keys = [key(), key(None), key("mxfp4"), key(contract="nvfp4_rescale"), key(format="nvfp4-search"), key(k=95)]
    assert len(set(keys)) == len(keys)
    e = e._replace(codes=e.codes ^ 1)
    assert key() == keys[0]


def layer_and_input(name: str, dtype: torch.dtype = BF16) -> tuple[nn.Linear, Tensor]:
    _, e = encoded(name, dtype=dtype)
    bias = torch.randn(24)
    return packed_linear(e.codes, e.scale, e.outer, bias, format=name, dtype=dtype), torch.randn(5, 96).to(dtype)


@pytest.mark.parametrize("name", ["nvfp4", "xx-nvfp4", "te-nvfp4", "xx-mxfp4", "mxfp4-quest"])
def test_round_trip_into_an_empty_skeleton(name: str, tmp_path: Path) -> None:
    layer, x = layer_and_input(name)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    _, e = encoded(name)
    empty = Encoded(*(None if t is None else torch.empty_like(t, device="meta") for t in e[:4]), e.k)
    bias = torch.empty(24, device="meta")
    skeleton = packed_linear(empty.codes, empty.scale, empty.outer, bias, format=name)
    assert skeleton.weight.is_meta
    skeleton.load_state_dict(torch.load(tmp_path / "layer.pt"), assign=True)
    assert torch.equal(skeleton(x), layer(x))
    other, _ = layer_and_input(name)  # and into one of its like, in place
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "gridflip"])
def test_the_outer_scale_never_enters_the_operand(name: str) -> None:
    """bf16 operands are exact, so the layer equals float64 sums of FP4 products, scaled in float32 and rounded once."""
    layer, x = layer_and_input(name)
    w_format, x_format = layer.weight.weight_format, layer.weight.recipe.fprop_input
    assert x_format is not None
    e = x_format.encode(x)
    acc = x_format.operand(e, F32).double() @ w_format.operand(layer.weight.encoded, F32).double().t()
    y = acc.float()
    for alpha in (x_format.alpha(e), w_format.alpha(layer.weight.encoded)):
        if alpha is not None:
            y = y * (alpha if alpha.shape[0] in (1, 5) else alpha.t())
    want = (y + layer.bias.float()).to(BF16)
    assert (layer(x) == want).double().mean() > 0.97
    torch.testing.assert_close(layer(x), want, rtol=2.0**-7, atol=1e-6)


def test_a_backend_for_each_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a block, in the environment, nested; a name that a role does not have is an error."""
    layer, x = layer_and_input("nvfp4")
    monkeypatch.delenv("AOQUANT_BACKEND", raising=False)
    y = layer(x)
    with backend("reference", role="quantize"), backend("reference", role="gemm"):
        assert torch.equal(layer(x), y)
    for role, forced in (("gemm", "triton"), ("gemm", "qutlass"), ("quantize", "triton")):
        with backend(forced, role=role), pytest.raises(ValueError, match=f"'{forced}'"):
            layer(x)
        with backend(forced, role=role), backend("reference"):  # the inner one speaks of all roles
            assert torch.equal(layer(x), y)
        with backend("reference"), backend(forced, role=role), pytest.raises(ValueError, match=f"'{forced}'"):
            layer(x)
    for name, role in (("tensor-cores", "decode"), ("reference", "matmul")):
        with pytest.raises(ValueError, match=f"'{role}'"):
            backend(name, role=role).__enter__()
    for value in ("gemm=triton", "reference,gemm=triton", "quantize=triton", "quantize=tensor-cores", "gem=reference"):
        monkeypatch.setenv("AOQUANT_BACKEND", value)
        with pytest.raises(ValueError, match=r"'(triton|tensor-cores|gem)'"):
            layer(x)
        if value != "gem=reference":
            with backend("reference"):  # a block is nearer than the environment
                assert torch.equal(layer(x), y)
    for value in ("gemm=reference, quantize=reference", "triton,gemm=reference,quantize=reference,decode=reference"):
        monkeypatch.setenv("AOQUANT_BACKEND", value)
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize("name", ["te-nvfp5/nvfp4", "nvfp4/nix", "te-nvfp5", "te-nvfp4", "intx4-g32-asym"])
def test_what_is_no_recipe_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"'(te-nvfp5|nix|te-nvfp4|intx4-g32-asym)'"):
        get_recipe(name)


def test_views_and_casts_of_a_packed_weight() -> None:
    _, e = encoded("nvfp4")
    w = packed_linear(e.codes, e.scale, e.outer, format="nvfp4").weight.data
    assert torch.equal(w.view(w.shape).dequantize(), w.dequantize())
    with pytest.raises(ValueError, match="cannot be viewed as"):
        w.view(-1)
    cast = w.to(F32)
    assert cast.dtype == F32 and torch.equal(cast.qdata, w.qdata)
    assert cast.qdata.data_ptr() != w.qdata.data_ptr()  # as `to` promises of a tensor that it changes
