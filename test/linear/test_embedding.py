"""Embeddings: the prepared layer, the converted layer and torchao's own converted layer read the same rows, and
gradients are nn.Embedding's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchao
from support.linear_cases import BF16, BY_NAME, F16, F32
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.quantization import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
    PerGroup,
)

from aoquant import (
    NVFP4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    get_format,
    list_formats,
    ops,
    quantize_,
    report,
    set_fake_quant,
    verify,
)
from aoquant.formats import get_operand
from aoquant.linear.embedding import QATEmbedding

OURS = {
    name: PackedWeightConfig(name)
    for name in ("int4-g32", "intx3-g32", "intx4-row", "int8-row", "int8-tensor", "fp8-row", "fp8-tensor", "mxfp4", "mxfp8", "nvfp4",
                 "nvfp4-none", "nvfp4-static:0.001")
}  # fmt: skip
TORCHAO = {
    name: BY_NAME[name].config
    for name in (
        "ao.intx4-g32",
        "ao.intx2-axis-asym",
        "ao.int8-row",
        "ao.int8-tensor",
        "ao.int8-g32",
        "ao.fp8-row",
        "ao.fp8-tensor",
    )
}


def anything(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Embedding)


def embedding(dtype: torch.dtype = BF16, rows: int = 40, k: int = 64, **options: Any) -> nn.Embedding:
    """Rows of very different sizes, an outlier and a row of zeros."""
    layer = nn.Embedding(rows, k, dtype=dtype, **options)
    with torch.no_grad():
        layer.weight *= torch.logspace(-3, 1, rows).unsqueeze(1).to(dtype)
        layer.weight[3, 5], layer.weight[7] = 127.5, 0.0
    return layer


def forms(config: Any, **options: Any) -> tuple[QATEmbedding, nn.Embedding]:
    """Prepared, converted."""
    layer = embedding(**options)
    quantize_(layer, QATConfig(config, step="prepare"), filter_fn=anything)
    packed = copy.deepcopy(layer)
    quantize_(packed, QATConfig(step="convert"))
    assert isinstance(layer, QATEmbedding)
    assert type(packed) is nn.Embedding
    return layer, packed


FEW, MANY = torch.tensor([[3, 7, 3], [39, 0, 7]]), torch.arange(120).remainder(40).view(4, 30)


@pytest.mark.parametrize("name", list_formats())
def test_encoding_some_rows_gives_their_part_of_the_whole(name: str) -> None:
    format = get_format(name)
    for dtype in (BF16, F32):
        w, ids = embedding(dtype, k=256).weight.detach(), FEW.flatten()
        encoded = format.encode(w)
        assert torch.equal(format.decode_rows(encoded, ids, dtype), format.decode(encoded, dtype)[ids])
        assert torch.equal(format.fake_quantize_rows(w, ids), format.fake_quantize(w)[ids])
        if format.by_rows:
            for some, whole in zip(format.encode(w[ids])[:4], encoded[:4], strict=True):
                assert whole is None or torch.equal(some.view(torch.uint8), whole[ids].view(torch.uint8))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("config", (OURS | TORCHAO).values(), ids=OURS | TORCHAO)
def test_prepared_equals_converted(config: Any, dtype: torch.dtype) -> None:
    prepared, packed = forms(config, dtype=dtype, padding_idx=3)
    for ids in (FEW, MANY, FEW.int(), torch.tensor(9), torch.empty(0, 2, dtype=torch.long)):
        y = prepared(ids)
        assert (y.shape, y.dtype) == ((*ids.shape, 64), dtype)
        assert torch.equal(packed(ids), y)
    assert not torch.equal(prepared(MANY), F.embedding(MANY, prepared.weight))


@pytest.mark.parametrize("config", TORCHAO.values(), ids=TORCHAO)
def test_torchao_converts_the_same_weight_to_the_same_rows(config: Any) -> None:
    prepared, packed = forms(config)
    theirs = nn.Embedding(40, 64, _weight=prepared.weight.detach().clone())
    torchao.quantize_(theirs, config, filter_fn=anything)
    assert type(theirs.weight) is type(packed.weight)
    ids = MANY[MANY != 7]  # of zeros, which torchao's fp8 makes NaN
    assert torch.equal(theirs(ids), prepared(ids))


def gradients(layer: nn.Embedding, ids: Tensor, g: Tensor) -> Tensor:
    layer.zero_grad()
    layer(ids).backward(g)
    assert layer.weight.grad is not None
    return layer.weight.grad


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": 7}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"sparse": True}, {"sparse": True, "padding_idx": 7}],
    ids=lambda options: "-".join(options) or "dense",
)  # fmt: skip
@pytest.mark.parametrize("name", ["int4-g32", "nvfp4"])
def test_gradients_are_those_of_the_plain_layer(name: str, options: dict[str, Any]) -> None:
    prepared, packed = forms(OURS[name], **options)
    plain = nn.Embedding(40, 64, _weight=prepared.weight.detach().clone(), **options)
    for ids in (FEW, MANY):
        g = torch.randn(*ids.shape, 64, dtype=BF16)
        got, want = gradients(prepared, ids, g), gradients(plain, ids, g)
        assert got.is_sparse == want.is_sparse
        if got.is_sparse:
            got, want = got.to_dense(), want.to_dense()
        assert torch.equal(got, want)
        assert torch.equal(packed(ids), prepared(ids))
        if "padding_idx" in options:
            assert not want[plain.padding_idx].any()


@pytest.mark.parametrize("name", ["intx3-g32", "int8-tensor"])
def test_clipped_values_get_no_gradient(name: str) -> None:
    layer = embedding()
    quantize_(layer, QATConfig(OURS[name], step="prepare", straight_through="clipped"), filter_fn=anything)
    format = layer.prepared.recipe.fprop_weight
    w = layer.weight.detach()
    clipped = format.saturated(w, format.encode(w))
    assert clipped.any()
    want = torch.zeros(40, 64).index_add_(0, FEW.flatten(), torch.ones(6, 64)).to(BF16)
    assert torch.equal(gradients(layer, FEW, torch.ones(2, 3, 64, dtype=BF16)), want.masked_fill(clipped, 0))


def test_only_indices_are_saved_and_a_frozen_weight_saves_nothing() -> None:
    prepared, _ = forms(OURS["int4-g32"])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        prepared(FEW)
        assert [t.data_ptr() for t in saved] == [FEW.data_ptr()]
        prepared.requires_grad_(False)
        assert not prepared(FEW).requires_grad
    assert len(saved) == 1


def test_prepare_keeps_the_layer_and_convert_its_class() -> None:
    model = nn.ModuleDict({"embed": embedding(padding_idx=2).eval(), "up": nn.Linear(64, 64)})
    calls: list[int] = []
    model["embed"].register_forward_hook(lambda *_: calls.append(1))
    keys, module, weight = list(model.state_dict()), model["embed"], model["embed"].weight
    quantize_(model, QATConfig(OURS["int4-g32"], step="prepare"))
    assert type(model["embed"]) is nn.Embedding  # left alone unless somebody names it
    quantize_(model, QATConfig(OURS["int8-row"], step="prepare"), filter_fn=anything)
    assert type(model["embed"]) is QATEmbedding
    assert model["embed"] is module
    assert module.weight is weight
    assert list(model.state_dict()) == keys
    assert not module.training
    assert "padding_idx=2, weight=int8-row" in repr(module)
    before = module(FEW)
    assert set_fake_quant(model, False) == 2
    assert torch.equal(module(FEW), F.embedding(FEW, weight))
    set_fake_quant(model, True)
    quantize_(model, QATConfig(step="convert"))
    assert type(model["embed"]) is nn.Embedding
    assert isinstance(module.weight, PackedTensor)
    assert "padding_idx=2, weight=PackedTensor(" in repr(module)
    assert torch.equal(module(FEW), before)
    assert len(calls) == 3


def test_unprepare_is_the_plain_layer_again() -> None:
    layer = embedding()
    before = dict(vars(layer))
    quantize_(layer, QATConfig(OURS["int4-g32"], step="prepare"), filter_fn=anything)
    assert layer.unprepare() is layer
    assert type(layer) is nn.Embedding
    assert vars(layer) == before


REFUSED = {
    "a GEMM's tensor": (Int4WeightOnlyConfig(64), {}, r"0 \(40, 64\): Int4Tensor is a weight of linear layers"),
    "NVFP4Tensor": (NVFP4WeightOnlyConfig(), {}, "NVFP4Tensor is a weight of linear layers"),
    "activations": (NVFP4WeightConfig(), {}, r"quantises activations \(nvfp4-row\), and an embedding has none"),
    "torchao activations": (Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)), {}, "quantises activations"),
    "max_norm": (OURS["int8-row"], {"max_norm": 1.0}, r"max_norm = 1.0 renormalises.*set max_norm to None"),
    "width": (OURS["int4-g32"], {"k": 40}, r"0 \(40, 40\): .*multiple of 32, got K = 40"),
}  # fmt: skip


@pytest.mark.parametrize("prepare", [True, False], ids=["prepare", "quantize"])
@pytest.mark.parametrize(("config", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_embedding_can_be_is_refused(config: Any, options: dict[str, Any], message: str, prepare: bool) -> None:
    model = nn.Sequential(embedding(**options))
    with pytest.raises(ValueError, match=message):
        quantize_(model, QATConfig(config, step="prepare") if prepare else config, filter_fn=anything)
    assert type(model[0]) is nn.Embedding
    assert type(model[0].weight) is nn.Parameter


def test_a_packed_weight_is_not_renormalised_and_not_an_index() -> None:
    _, packed = forms(OURS["int8-row"])
    with pytest.raises(ValueError, match="use max_norm=None"):
        F.embedding(FEW, packed.weight, max_norm=1.0)
    with pytest.raises(ValueError, match="looked up by integer indices"):
        F.embedding(packed.weight, torch.randn(3, 4))


@pytest.mark.parametrize("ids", [[40], [-1]], ids=["above", "negative"])
def test_an_index_out_of_range_raises_as_in_the_plain_layer(ids: list[int]) -> None:
    for layer in (embedding(), *forms(OURS["int8-row"]), *forms(OURS["int8-tensor"])):
        with pytest.raises(IndexError, match="index out of range"):
            layer(torch.tensor(ids))


def test_torchao_quantize_takes_embeddings_too() -> None:
    layer = nn.Sequential(embedding())
    torchao.quantize_(layer, QATConfig(OURS["int4-g32"], step="prepare"), filter_fn=anything)
    assert type(layer[0]) is QATEmbedding
    y = layer(FEW)
    torchao.quantize_(layer, QATConfig(OURS["int4-g32"], step="convert"), filter_fn=anything)
    assert isinstance(layer[0].weight, PackedTensor)
    assert torch.equal(layer(FEW), y)


def test_reports_know_embeddings() -> None:
    plain = nn.Sequential(embedding(), nn.Linear(64, 64, dtype=BF16))
    prepared = copy.deepcopy(plain)
    quantize_(prepared, QATConfig(OURS["int4-g32"], step="prepare"), filter_fn=lambda m, fqn: True)
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    found = verify(prepared, converted, FEW)
    assert [(r.fqn, r.shape, r.format, r.backend) for r in found.layers] == [
        ("0", (40, 64), "int4-g32", "lookup"),
        ("1", (64, 64), "int4-g32", "reference"),
    ]
    assert 20 < report(plain, converted, FEW).layers[0].output_sqnr_db < 40
    with torch.no_grad():
        converted[0].weight.scale[3] *= 2
    with pytest.raises(ValueError, match=r"0 \(40, 64\): output"):
        verify(prepared, converted, FEW)


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4"])
def test_compiled_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    prepared, packed = forms(OURS[name], padding_idx=7)
    g = torch.randn(4, 30, 64, dtype=BF16)
    y, dw = prepared(MANY), gradients(prepared, MANY, g)
    prepared.zero_grad()
    compiled = torch.compile(prepared, fullgraph=True)(MANY)
    compiled.backward(g)
    assert torch.equal(compiled, y)
    assert torch.equal(prepared.weight.grad, dw)
    assert torch.equal(torch.compile(packed, fullgraph=True)(MANY), y)


def test_ops_keep_what_they_promise() -> None:
    for name in ("int4-g32", "nvfp4"):
        w = embedding().weight.detach()
        operand = get_operand(name)
        torch.library.opcheck(ops.embedding.overload, tuple(ops.embedding.flat(FEW, w, operand, BF16)))
        torch.library.opcheck(ops.saturated.overload, tuple(ops.saturated.flat(w, operand, ids=FEW.flatten())))
    grad = ops.embedding_grad.flat(torch.randn(2, 3, 8), FEW, 40, 7, False)
    torch.library.opcheck(ops.embedding_grad.overload, tuple(grad))
