"""The parts of GPTQ: factors, Gram matrices, the loop over columns, and the calls of blocks that are not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.meters import peak_bytes
from support.models import llama
from torch import Tensor, nn

from aoquant import CalibrateConfig, calibrate_ptq, quantize_
from aoquant.formats import get_format
from aoquant.formats.levels import Levels
from aoquant.formats.operand import as_operand
from aoquant.ops import columns
from aoquant.ptq import blocks, clip, gptq, gram
from aoquant.recipes import get_recipe


def gram_of(k: int, rows: int = 400) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(rows, k, generator=generator) @ torch.randn(k, k, generator=generator)
    return x, x.mT @ x / rows


@pytest.mark.parametrize("k", [1, 24, 100])
@pytest.mark.parametrize("act_order", [False, True])
def test_a_factor_by_halves_is_that_of_the_inverse(k: int, act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """U^T U is the inverse of the damped matrix in the order of rounding, and `solve` multiplies by it."""
    monkeypatch.setattr(gptq, "LEAF", 8)
    monkeypatch.setattr(gptq, "STRIP", 7)
    _, h = gram_of(k)
    f = gptq.factor(h, 0.01, act_order)
    damped = h.double()
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    inverse = torch.linalg.inv(damped)
    both = h.clone()
    assert torch.equal(f.write_upper(both), h.diagonal()) and torch.equal(both.tril(-1), h.tril(-1))
    upper = both.triu()
    assert torch.allclose((upper.mT @ upper).double(), inverse[f.order_K][:, f.order_K], rtol=1e-4, atol=1e-7)
    m = torch.randn(5, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(f.solve_(m.clone()), m @ inverse, rtol=1e-9, atol=1e-9)
    assert (f.order_K.diff() == 1).all() if not act_order else (h.diagonal()[f.order_K].diff() <= 0).all()


def test_a_matrix_without_a_factor_takes_more_damping_or_is_refused() -> None:
    """A column that was always zero is no obstacle; a negative eigenvalue takes more damping, or is an error."""
    h = torch.eye(40)
    h[3, 3] = 0.0
    assert gptq.factor(h, 0.01, True).damping == 0.01
    h[5, 5] = -0.5
    assert gptq.factor(h, 0.01, True).damping == 1.0
    h[5, 5] = -2.0
    with pytest.raises(ValueError, match="not positive definite"):
        gptq.factor(h, 0.01, True)


def test_strips_add_up_to_the_gram_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "STRIP", 24)
    x, _ = gram_of(100)
    ahead = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    total = gram.InputGram(100, x.device, cross=True)
    for some, others in zip(x.split(150), ahead.split(150), strict=True):
        total.add(some, others)
    h, d = total.mean()
    wanted, cross = x.double().mT @ x.double() / len(x), ahead.double().mT @ x.double() / len(x)
    assert d is not None and torch.equal(h, h.mT)
    for got, right in ((h, wanted), (d, cross - wanted)):
        assert float((got - right).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("rounds", [None, "nvfp4-row"])
def test_the_target_is_part_of_the_way_to_the_regression_on_the_input(rounds: str | None) -> None:
    torch.manual_seed(0)
    float_MK, w_NK = torch.randn(400, 32), torch.randn(5, 32)
    x_MK = float_MK + 0.3 * torch.randn(400, 32)
    h_KK, ahead_KK = x_MK.T @ x_MK / 400, (float_MK - x_MK).T @ x_MK / 400
    f = gptq.factor(h_KK.clone(), 1e-6, True)
    operand = None if rounds is None else as_operand(get_format(rounds))
    found_NK = gptq.towards_float(w_NK, gptq.ahead(w_NK, ahead_KK), f, operand)
    whole_NK = torch.linalg.lstsq(x_MK.double(), (float_MK @ w_NK.T).double()).solution.T
    share = 0.75 if rounds is None else 0.5
    torch.testing.assert_close(found_NK, (w_NK + share * (whole_NK - w_NK)).float(), rtol=1e-4, atol=1e-4)


def test_clips_are_those_of_the_weight_that_codes_are_chosen_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the asymmetric target that is the original weight."""
    given, encode = list[Tensor](), clip.encode
    monkeypatch.setattr(clip, "encode", lambda format, w, *more: encode(format, given.append(w) or w, *more))
    model = llama()
    first, last = (model.model.layers[i].mlp.down_proj.weight.detach().clone() for i in (0, -1))
    ids = torch.randint(0, model.config.vocab_size, (4, 64))
    calibrate_ptq(model, [ids], CalibrateConfig("int4-g32", "clip+gptq", asymmetric=False))
    assert any(torch.equal(w, last) for w in given if w.shape == last.shape)
    given.clear()
    model = llama()
    calibrate_ptq(model, [ids], CalibrateConfig("int4-g32", "clip+gptq"))
    assert not any(torch.equal(w, last) for w in given if w.shape == last.shape)
    assert {w.dtype for w in given} == {first.dtype}


@pytest.mark.parametrize(("name", "rows"), [("int4-g32", 7), ("int4-g32", 90), ("int4-g32", 0), ("fp8-32x32", 7)])
def test_weights_that_are_rounded_together_have_the_codes_of_each_alone(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack of weights with Gram matrices of their own, some rows, or two weights, at a time."""
    f = get_format(name)
    weights = []
    for seed in range(3):
        w = torch.randn(40, 160, generator=torch.Generator().manual_seed(seed))
        h = gram_of(160 + seed)[1][:160, :160].contiguous()
        factor = gptq.factor(h, 0.01, True)
        weights.append(gptq.Weight(w, f.encode(w), h, factor.write_upper(h), factor.order_K))
    alone = [gptq.choose_codes([w], f, torch.float32)[0] for w in weights]
    monkeypatch.setattr(gptq, "TABLE_BYTES", rows * (5 * 160 // (f.block or 160) << f.bits))
    together = gptq.choose_codes(weights, f, torch.float32)
    for weight, (codes, error), (others, other) in zip(weights, alone, together, strict=True):
        nearest = gptq.decoded(f, weight.encoded, torch.float32)
        assert error < 0.9 * gptq.missed(weight.target_NK, weight.gram_KK, weight.diagonal_K, nearest)
        assert torch.equal(codes.codes, others.codes) and error == pytest.approx(other)


def test_the_loop_moves_errors_as_its_formula_says() -> None:
    f = get_format("intx3-g32")
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    levels = Levels.of(f, f.encode(w), torch.float32)
    upper = torch.triu(torch.rand(64, 64, generator=torch.Generator().manual_seed(1))) / 8 + torch.eye(64)
    order = torch.arange(64).flip(0)
    left = w.t()[order].contiguous()
    values, _, errors = columns.round_block(left.clone()[None], upper[None], order[None], levels)
    moved = left.double()
    for i in range(64):
        assert torch.allclose(values[0, i], levels.nearest(moved[i].float(), 63 - i)[0])
        error = (moved[i] - values[0, i].double()) / upper[i, i].double()
        assert torch.allclose(errors[0, i].double(), error, atol=1e-5)
        moved[i + 1 :] -= upper[i, i + 1 :, None].double() * error


def test_calls_of_blocks_are_found_without_running_them() -> None:
    """The arguments are those of a whole forward, and nothing but the first block's input is kept."""
    torch.manual_seed(0)
    model: Any = llama(num_hidden_layers=3)
    batches = [{"input_ids": torch.randint(64, (2, 8)), "attention_mask": torch.tensor([[1] * 8, [0] * 3 + [1] * 5])}]
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n}
    found = blocks.find(layers, model)
    body = blocks.below_head(model, found, batches)
    assert body is model.model and blocks.below_head(model, found, [{"labels": 0}]) is model
    with torch.no_grad():
        chain = blocks.ordered(body, found, batches)
        assert [b.chained for b in chain] == [False, True, True]
        wanted = blocks._calls(body, chain, batches, None)
        ran = []
        handle = model.model.layers[0].mlp.register_forward_hook(lambda *a: ran.append(1))
        got = blocks._captured(body, chain, batches, None)
        handle.remove()
    assert not ran and "forward" not in vars(model.model.layers[0])
    for fqn, calls in wanted.items():
        assert blocks._alike(calls[0], got[fqn][0])


def test_blocks_whose_arguments_follow_from_outputs_are_run() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.linear(x) * scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, x.norm())
            return x

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    with torch.no_grad():
        chain = blocks.ordered(model, blocks.find(layers, model), [x])
        got = blocks._captured(model, chain, [x], None)
        wanted = model.layers[0](x, x.norm()).norm()
    assert torch.equal(got["layers.1"][0].args[1], wanted)


@pytest.mark.filterwarnings("ignore:.*tokens for K")
@pytest.mark.parametrize("asymmetric", [True, False])
def test_a_wide_layer_takes_three_gram_matrices(asymmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """H in float32 and its factor in float64: U takes the place of what H says twice, and C is gone by then."""
    for owner, name in ((gptq, "STRIP"), (gptq, "LEAF"), (gram, "STRIP")):
        monkeypatch.setattr(owner, name, 16)
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 8)), [torch.randn(16, 8)]
    config = CalibrateConfig("int4-g32", asymmetric=asymmetric)
    peak = peak_bytes(lambda: calibrate_ptq(model, batches, config, filter_fn=lambda m, fqn: fqn == "1"))
    assert 3 < peak / (4 * 256 * 256) < 3.5


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4"])
def test_a_weight_is_decoded_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "DECODED", 4096)
    f, w = get_format(name), torch.randn(1024, 512, generator=torch.Generator().manual_seed(0))
    e, found = f.encode(w), list[Tensor]()
    peak = peak_bytes(lambda: found.append(gptq.decoded(f, e, torch.bfloat16)))
    assert torch.equal(found[0], f.decode(e, torch.bfloat16).float())
    assert w.nbytes <= peak < 1.3 * w.nbytes


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "hadamard16+nvfp4/hadamard16+nvfp4", "int4-g128"])
def test_gram_matrices_are_of_what_the_layer_multiplies(recipe: str) -> None:
    """Round inputs, unless the search is told to leave that out; transform them either way."""
    layer, x = nn.Linear(128, 16, dtype=torch.bfloat16), torch.randn(3, 5, 128, dtype=torch.bfloat16)
    quantize_(model := nn.Sequential(layer), get_recipe(recipe).prepare())
    operand = model[0].prepared.recipe.fprop_input
    rows = x.view(15, 128)
    exact = rows if operand is None else operand.transformed(rows, None)
    rounded = rows if operand is None else operand.decode(operand.encode(rows), torch.float32)
    assert torch.equal(gram.multiplied(model[0], x, None), rounded)
    assert torch.equal(gram.multiplied(model[0], x, None, rounded=False), exact)
    assert (recipe == "int4-g128") == torch.equal(rounded.float(), exact.float())
