"""WUSH: fitted transforms, from the Grams to checkpoints."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import narrow_llama
from support.two_ranks import on_two_ranks
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from aoquant import (
    WUSH,
    Hadamard,
    Int8WeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    calibrate,
    convert_checkpoint,
    get_format,
    quantize_,
    report,
    verify,
)
from aoquant.calibrate import uncalibrated
from aoquant.linear.checks import NOT_CALIBRATED
from aoquant.report.measure import sqnr
from aoquant.transforms import wush

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CONFIGS: dict[str, Any] = {
    "nvfp4": NVFP4WeightConfig(transform=WUSH(16)),
    "mxfp4": MXFP4WeightConfig(transform=WUSH(32)),
    "nvfp4-64": NVFP4WeightConfig(transform=WUSH(64)),
    "nvfp4-weight": NVFP4WeightConfig(activation=None, transform=WUSH(16)),
    "gridless": MXFP4WeightConfig(activation="int8-row", transform=WUSH(16)),
}
each = pytest.mark.parametrize("name", CONFIGS)
K = 128


def mixing(seed: int, k: int = K) -> Tensor:
    """A matrix that gives values correlations and very different sizes."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(k, k, generator=g) * torch.exp(torch.randn(k, generator=g)) / k**0.5


def inputs(rows: int, seed: int = 3, dtype: torch.dtype = BF16, k: int = K) -> Tensor:
    return (torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) @ mixing(1, k)).to(dtype)


def model(dtype: torch.dtype = BF16, k: int = K) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(k, 48, dtype=dtype))
    with torch.no_grad():
        net[0].weight.copy_(torch.randn(48, k) @ mixing(2, k) / 8)
    return net


def prepared(name: str, dtype: torch.dtype = BF16, **options: Any) -> nn.Sequential:
    net = model(dtype)
    quantize_(net, QATConfig(CONFIGS[name], **options))
    calibrate(net, [inputs(96, 5, dtype), inputs(64, 6, dtype).view(2, 32, K)])
    return net


def damped(gram: Tensor) -> Tensor:
    mean = gram.diagonal(dim1=1, dim2=2).mean(1)
    return gram + 0.01 * mean.view(-1, 1, 1) * torch.eye(gram.shape[1], dtype=F64)


# What is fitted


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_both_sides_have_the_same_covariance(size: int) -> None:
    """T G_X T^T == T^-T G_W T^-1 of the damped Grams, up to the rounding of T; with equal variances in a block."""
    x, w = inputs(512).double(), model()[0].weight.detach().double()
    g_x, g_w = wush.gram(x, size) / len(x), wush.gram(w, size) / len(w)
    t, p = (m.double() for m in wush.fit(g_x, g_w))
    assert torch.equal(t, t.to(BF16).double())
    assert (t @ p.mT - torch.eye(size)).abs().max() < 1e-4
    left, right = t @ damped(g_x) @ t.mT, p @ damped(g_w) @ p.mT
    assert ((left - right).flatten(1).norm(dim=1) / left.flatten(1).norm(dim=1)).max() < 0.03
    spread = left.diagonal(dim1=1, dim2=2)
    assert ((spread - spread.mean(1, keepdim=True)).abs() / spread.mean(1, keepdim=True)).max() < 0.05
    before = damped(g_x).diagonal(dim1=1, dim2=2)
    assert (before.amax(1) / before.amin(1)).max() > 10  # which they had not


def test_grams_are_the_products_of_blocks_in_any_pieces() -> None:
    x = inputs(50, dtype=F32)
    want = torch.stack([x[:, i : i + 32].double().t() @ x[:, i : i + 32].double() for i in range(0, K, 32)])
    assert torch.allclose(wush.gram(x, 32), want, rtol=1e-12)
    with mock.patch.object(wush, "CHUNK", 7 * K):
        assert torch.allclose(wush.gram(x, 32), want, rtol=1e-12)


def test_the_weight_side_inverts_the_rounded_matrix() -> None:
    net = prepared("nvfp4")
    t, p = net[0].input_transform.double(), net[0].weight_transform.double()
    assert torch.equal(t, t.to(BF16).double()) and torch.equal(p, torch.linalg.inv(t).mT.float().double())
    f = get_format("wush16+high-precision")
    x, w = torch.randn(4, K), torch.randn(5, K)
    y = f.transformed(x, net[0].input_transform).double() @ f.transformed(w, net[0].weight_transform).double().t()
    assert sqnr(x.double() @ w.double().t(), y) > 100


def test_calibration_sees_every_batch_once_and_divides_by_the_rows() -> None:
    net = prepared("nvfp4")
    both = torch.cat((inputs(96, 5), inputs(64, 6)))
    weight = net[0].weight.detach()
    t, p = wush.fit(wush.gram(both, 16) / 160, wush.gram(weight, 16) / 48)
    assert torch.equal(net[0].input_transform, t) and torch.equal(net[0].weight_transform, p)
    before = net[0].input_transform.clone()
    calibrate(net, [inputs(96, 5) * 3])
    assert not torch.equal(net[0].input_transform, before)


@pytest.mark.parametrize("what", ["nvfp4", "mxfp4"])
def test_it_is_better_than_none_and_than_hadamard_on_correlated_data(what: str) -> None:
    net, x = model(), inputs(256, 9)
    y = net(x)
    kind = {"nvfp4": NVFP4WeightConfig, "mxfp4": MXFP4WeightConfig}[what]
    found = {}
    for name, transform in (("none", None), ("hadamard", Hadamard(32)), ("wush", WUSH(32))):
        qat = copy.deepcopy(net)
        quantize_(qat, QATConfig(kind(transform=transform)))
        if uncalibrated(qat):
            calibrate(qat, [inputs(512, 5)])
        found[name] = sqnr(y, qat(x))
    assert found["wush"] > max(found["none"], found["hadamard"]) + 1, found


# The layer


@each
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_prepared_equals_converted(name: str, dtype: torch.dtype) -> None:
    net = prepared(name, dtype)
    packed = copy.deepcopy(net)
    quantize_(packed, QATConfig(step="convert"))
    weight = packed[0].weight
    assert isinstance(weight, PackedTensor) and weight.act_pre_scale.dtype == BF16
    assert torch.equal(weight.act_pre_scale.float(), net[0].input_transform)
    for rows in (1, 3, 64):
        x = inputs(rows, rows, dtype)
        assert torch.equal(net(x), packed(x))
    assert torch.equal(weight.dequantize(), net[0].quantised_weight())
    assert sqnr(net[0].weight, weight.dequantize()) > 10
    assert str(verify(net, packed, inputs(8, dtype=dtype)))
    assert "inf" in str(report(net, packed, inputs(8, dtype=dtype)))


@each
@pytest.mark.parametrize("straight_through", ["identity", "clipped"])
def test_gradients_by_hand(name: str, straight_through: str) -> None:
    net = prepared(name, F32, straight_through=straight_through)
    layer, recipe = net[0], net[0].prepared.recipe
    size = recipe.transform.size
    x, g = inputs(16, 7, F32).requires_grad_(), torch.randn(16, 48)
    net(x).backward(g)
    t = torch.block_diag(*layer.input_transform.double())
    p = torch.block_diag(*layer.weight_transform.double())
    assert t.shape == (K, K) and len(layer.input_transform) == K // size
    x_t, w_t = (x.detach().double() @ t.t()).float(), (layer.weight.detach().double() @ p.t()).float()
    f_x, f_w = recipe.fprop_input.format, recipe.fprop_weight.format
    e_x, e_w = f_x.encode(x_t), f_w.encode(w_t)
    dx = g.double() @ f_w.decode(e_w, F32).double()
    dw = g.double().t() @ f_x.decode(e_x, F32).double()
    if straight_through == "clipped":
        dx, dw = dx.masked_fill(f_x.saturated(x_t, e_x), 0), dw.masked_fill(f_w.saturated(w_t, e_w), 0)
    for got, want in ((x.grad, dx @ t), (layer.weight.grad, dw @ p), (layer.bias.grad, g.double().sum(0))):
        assert (got.double() - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-weight"])
def test_compiled_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    net, x, g = prepared(name), inputs(16, 7), torch.randn(16, 48).to(BF16)
    results = []
    for run in (net, torch.compile(net, fullgraph=True, backend="aot_eager")):
        net.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(g)
        results.append((y, leaf.grad, net[0].weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch._dynamo.reset()


def test_before_calibration_forward_and_convert_say_what_to_do() -> None:
    net = model()
    quantize_(net, QATConfig(CONFIGS["nvfp4"]))
    assert uncalibrated(net) == ["0"]
    with pytest.raises(ValueError, match=f"0: {NOT_CALIBRATED[:40]}"):
        net(inputs(2))
    with pytest.raises(ValueError, match="fitted transform, have no values yet"):
        quantize_(net, QATConfig(step="convert"))
    with pytest.raises(ValueError, match="static activation scales or a fitted transform, which calibration finds"):
        quantize_(model(), CONFIGS["nvfp4"])


@pytest.mark.parametrize("options", [{"scales": "static"}, {"scales": "learned"}])
def test_held_scales_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=r"WUSH\(size=16\) with static or learned scales|learned scales are for integers"
    ):
        quantize_(model(), QATConfig(CONFIGS["nvfp4"], **options))
    with pytest.raises(ValueError, match="would be calibrated twice"):
        NVFP4WeightConfig(activation="nvfp4-static", transform=WUSH(16))


def test_moves_and_casts_never_round_the_matrices() -> None:
    net = prepared("nvfp4", F32)
    before = {n: b.clone() for n, b in net.named_buffers()}
    net.to(BF16).half().float()
    assert all(b.dtype == F32 and torch.equal(b, before[n]) for n, b in net.named_buffers())
    quantize_(net, QATConfig(step="convert"))
    matrix, codes = net[0].weight.act_pre_scale.clone(), net[0].weight.qdata.clone()
    net.to(BF16).half().float()
    assert net[0].weight.act_pre_scale.dtype == BF16
    assert torch.equal(net[0].weight.act_pre_scale, matrix) and torch.equal(net[0].weight.qdata, codes)
    x = inputs(4, dtype=F32)
    assert torch.isfinite(net(x)).all()


def test_unprepare_leaves_a_plain_layer() -> None:
    from aoquant import unprepare

    net = prepared("nvfp4")
    unprepare(net)
    assert type(net[0]) is nn.Linear and not dict(net.named_buffers())


# Data that has no transform


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, w: x[:, 32:48].zero_(), r"0: its input is zero throughout values 32 to 47 of K"),
        (lambda x, w: w[:, :16].zero_(), r"0: its weight is zero throughout values 0 to 15 of K"),
        (lambda x, w: x.zero_(), r"0: its input is zero throughout values 0 to 15 of K"),
        (lambda x, w: x[0, 3].fill_(torch.nan), r"0: its input holds NaN or Inf"),
        (lambda x, w: x[0, 3].fill_(torch.inf), r"0: its input holds NaN or Inf"),
    ],
)
def test_what_cannot_be_fitted_names_the_layer(spoil: Any, message: str) -> None:
    net, x = model(F32), inputs(64, dtype=F32)
    quantize_(net, QATConfig(CONFIGS["nvfp4"]))
    with torch.no_grad():
        spoil(x, net[0].weight)
    with pytest.raises(ValueError, match=message):
        calibrate(net, [x])
    assert uncalibrated(net) == ["0"] and net[0].input_transform.isnan().all()


def test_layers_that_the_loop_does_not_reach() -> None:
    net = nn.ModuleDict({"used": nn.Linear(64, 8), "other": nn.Linear(64, 8)})
    quantize_(net, QATConfig(CONFIGS["nvfp4"]))
    with pytest.raises(ValueError, match="other: the forward loop did not reach it"):
        calibrate(net, lambda m: m["used"](torch.randn(8, 64)))


@pytest.mark.parametrize("rows", [1, 5])
def test_fewer_rows_than_a_block_has_values(rows: int) -> None:
    """The Gram is singular; its damping is what makes it a definition."""
    net = model(F32)
    quantize_(net, QATConfig(CONFIGS["nvfp4"]))
    x = inputs(rows, dtype=F32)
    calibrate(net, [x])
    assert torch.isfinite(net(x)).all()


def test_data_far_apart_is_refused_or_exact() -> None:
    g = torch.eye(16, dtype=F64).unsqueeze(0)
    t, p = wush.fit(g * 1e-30, g * 1e30)
    assert torch.isfinite(t).all() and torch.isfinite(p).all()
    with pytest.raises(ValueError, match="too far apart"):
        wush.fit(g * 1e-300, g * 1e300)


def test_grams_of_any_dtype_are_fitted_in_float64() -> None:
    grams = [(m.mT @ m) for m in torch.randn(2, 3, 64, 16)]
    for got, want in zip(wush.fit(*grams), wush.fit(*(g.double() for g in grams)), strict=True):
        assert torch.equal(got, want)


def test_one_block_without_numbers_is_enough_to_refuse() -> None:
    """The second block's T is bf16's smallest number throughout, and its inverse is beyond float32."""
    eye = torch.eye(16, dtype=F64)
    with pytest.raises(ValueError, match="too far apart"):
        wush.fit(torch.stack((eye, eye * 1e79)), torch.stack((eye, eye * 1e-79)))


def test_a_matrix_is_needed() -> None:
    with pytest.raises(ValueError, match="wush16: its matrices are found by calibration"):
        get_format("wush16+nvfp4").encode(torch.ones(1, 16))


# Loading and cutting


def test_state_dicts_carry_the_matrices() -> None:
    net, x = prepared("nvfp4"), inputs(4)
    y = net(x)
    assert {"0.input_transform", "0.weight_transform"} < net.state_dict().keys()
    again = model()
    quantize_(again, QATConfig(CONFIGS["nvfp4"]))
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(x), y)
    quantize_(net, QATConfig(step="convert"))
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    empty = model()
    empty.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(empty(x), y)


def test_slices() -> None:
    net = prepared("nvfp4")
    quantize_(net, QATConfig(step="convert"))
    packed, x = net[0].weight, inputs(4)
    whole = F.linear(x, packed)
    assert torch.equal(F.linear(x, packed[8:24]), whole[:, 8:24])
    half = packed[:, 32:96]
    assert torch.equal(half.act_pre_scale, packed.act_pre_scale[2:6])
    assert torch.equal(half.dequantize(), packed.dequantize()[:, 32:96])


def test_rows_of_another_transform_are_not_fused_in() -> None:
    """What a loader does that makes one weight of q, k and v: copies into row slices of it."""
    a, b = prepared("nvfp4"), prepared("nvfp4")
    calibrate(b, [inputs(64, 8) * 2])
    for net in (a, b):
        quantize_(net, QATConfig(step="convert"))
    fused = copy.deepcopy(a[0].weight.data)
    fused[:24].copy_(a[0].weight.data[:24])
    with pytest.raises(ValueError, match="not fused into one weight"):
        fused[24:].copy_(b[0].weight.data[24:])
    fused.copy_(b[0].weight.data)  # as a whole it can be replaced
    assert torch.equal(fused.act_pre_scale, b[0].weight.act_pre_scale)


def test_rows_of_the_same_transform_are_fused_in() -> None:
    a = prepared("nvfp4")
    quantize_(a, QATConfig(step="convert"))
    weight = a[0].weight.data
    fused = copy.deepcopy(weight)
    fused.qdata.zero_()
    for rows in (slice(0, 24), slice(24, None)):
        fused[rows].copy_(weight[rows])
    assert torch.equal(fused, weight)


def test_tied_weights_are_refused() -> None:
    net = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    net["b"].weight = net["a"].weight
    with pytest.raises(ValueError, match="its weight is tied"):
        quantize_(net, QATConfig(CONFIGS["nvfp4"]))


# Checkpoints and recipes


@pytest.mark.parametrize(
    "config", [CONFIGS["nvfp4"], NVFP4WeightConfig(transform=Hadamard(32, 0xBEEF))], ids=["wush", "hadamard"]
)
def test_hugging_face_round_trip(config: Any, tmp_path: Path) -> None:
    from aoquant import load_pretrained, save_pretrained

    net, ids = narrow_llama(), torch.arange(24).view(2, 12)
    quantize_(net, QATConfig(config))
    if uncalibrated(net):
        calibrate(net, [{"input_ids": ids}])
    with torch.no_grad():
        y = net(ids).logits
        quantize_(net, QATConfig(step="convert"))
        assert torch.equal(net(ids).logits, y)
        save_pretrained(net, tmp_path)
        again = load_pretrained(tmp_path)
        assert torch.equal(again(ids).logits, y)
    mine, theirs = net.model.layers[0].mlp.up_proj.weight, again.model.layers[0].mlp.up_proj.weight
    assert torch.equal(mine, theirs) and type(theirs.data) is PackedTensor


def test_a_checkpoint_on_disk_cannot_be_fitted(tmp_path: Path) -> None:
    narrow_llama().save_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match="fitted transform, which calibration finds"):
        convert_checkpoint(tmp_path / "float", CONFIGS["nvfp4"], tmp_path / "out")
    convert_checkpoint(tmp_path / "float", NVFP4WeightConfig(transform=Hadamard(16)), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def worker(rank: int, port: int, queue: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        net = nn.ModuleDict({"a": model(F32)[0], "rare": model(F32)[0]})
        quantize_(net, QATConfig(CONFIGS["nvfp4"]))
        x = inputs(32 * (rank + 1), 5 + rank, F32)
        calibrate(net, lambda m: [m["a"](x), m["rare"](x) if rank else None])  # a rank may miss a layer
        queue.put({n: b.tolist() for n, b in net.named_buffers()})
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_hold_the_transform_of_both() -> None:
    one, other = on_two_ranks(worker)
    assert one == other
    whole = nn.Sequential(model(F32)[0])
    quantize_(whole, QATConfig(CONFIGS["nvfp4"]))
    calibrate(whole, [inputs(32, 5, F32), inputs(64, 6, F32)])
    got = torch.tensor(one["a.input_transform"])
    assert (got - whole[0].input_transform).norm() < 0.01 * got.norm()


def test_static_scales_and_fitted_transforms_in_one_model() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    quantize_(net, QATConfig(NVFP4WeightConfig(transform=WUSH(16))), lambda m, n: n == "0")
    quantize_(net, QATConfig(Int8WeightConfig(activation="int8-tensor-static")), lambda m, n: n == "1")
    assert uncalibrated(net) == ["0", "1"]
    x = torch.randn(32, 64)
    calibrate(net, [x])
    y = net(x)
    quantize_(net, QATConfig(step="convert"))
    assert torch.equal(net(x), y)
