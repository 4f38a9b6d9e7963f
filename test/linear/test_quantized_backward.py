"""A backward whose operands are quantised: equal to a reference by hand, right on average, and a function of the
layer's state alone.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hybrid_cases import product
from support.linear_cases import BF16, F32, assert_equal, dtype_name
from support.training_cases import step
from torch import Tensor, nn

from aoquant import (
    Hadamard,
    Int8WeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    get_format,
    quantize_,
    unprepare,
)
from aoquant.distributed import ranks
from aoquant.formats import Random
from aoquant.formats.random import DGRAD_GRAD_OUTPUT, WGRAD_GRAD_OUTPUT
from aoquant.linear.prepared import RANDOM
from aoquant.linear.recipe import LinearRecipe

M, N, K = 50, 80, 96  # neither M nor N is a multiple of a block
STOCHASTIC = ("mxfp4-sr", "nvfp4-sr", "rht32+mxfp4-sr", "rht128+ms-eden")


def prepared(backward: str | None, base: Any = None, dtype: torch.dtype = F32, **options: Any) -> nn.Linear:
    torch.manual_seed(3)
    model = nn.ModuleDict({"layer": nn.Linear(K, N, dtype=dtype)})
    quantize_(model, QATConfig(base or NVFP4WeightConfig(), backward=backward, **options))
    return model["layer"]


def data(dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(M, K, generator=generator).to(dtype), torch.randn(M, N, generator=generator).to(dtype)


def by_hand(a: Tensor, b: Tensor, name: str, state: Tensor | None, side: int) -> Tensor:
    """a b^T with float32 sums, both operands in one format."""
    return product(a, b, name, name, state, side, F32)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4-floor", "rht32+mxfp4", "te-nvfp4-sr", *STOCHASTIC])
def test_gradients_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    layer, (x, g), draws = prepared(name, dtype=dtype), data(dtype), get_format(name).draws
    recipe = layer.prepared.recipe
    w_hat, x_hat = (
        t.decode(t.encode(v), dtype) for t, v in ((recipe.fprop_weight, layer.weight.detach()), (recipe.fprop_input, x))
    )
    for draw in range(2):
        state = None
        if draws:
            state = getattr(layer, RANDOM).clone()
            assert int(state[2]) == draw
        got = step(layer, x, g)
        assert_equal(got["x"], by_hand(g, w_hat.t(), name, state, DGRAD_GRAD_OUTPUT), "dx")
        assert_equal(got["weight"], by_hand(g.t(), x_hat.t(), name, state, WGRAD_GRAD_OUTPUT), "dW")
        assert_equal(got["bias"], g.float().sum(0).to(dtype), "db")


def test_gridflip_with_the_backward_of_quartet2() -> None:
    """Gradients start from the GridFlip values that forward multiplied; the deployed layer is gridflip's."""
    layer, (x, g) = prepared(None, "quartet2-gridflip", seed=3), data()
    assert layer.prepared.recipe.deployed == prepared(None, "gridflip").prepared.recipe.deployed
    w_hat, x_hat = get_format("gridflip").fake_quantize(layer.weight.detach()), get_format("nvfp4-row").fake_quantize(x)
    state = getattr(layer, RANDOM).clone()
    got = step(layer, x, g)
    assert_equal(got["x"], by_hand(g, w_hat.t(), "rht128+ms-eden", state, DGRAD_GRAD_OUTPUT))
    assert_equal(got["weight"], by_hand(g.t(), x_hat.t(), "rht128+ms-eden", state, WGRAD_GRAD_OUTPUT))


@pytest.mark.parametrize("base", [Int8WeightConfig(), MXFP8WeightConfig()], ids=["weight-only", "mxfp8"])
def test_any_forward_goes_with_it(base: Any) -> None:
    """Also one whose input stays as it is."""
    layer, (x, g) = prepared("mxfp4-floor", base), data()
    recipe = layer.prepared.recipe
    x_hat = x if recipe.fprop_input is None else recipe.fprop_input.fake_quantize(x)
    assert_equal(step(layer, x, g)["weight"], by_hand(g.t(), x_hat.t(), "mxfp4-floor", None, 0))


# Right on average


def averaged(backward: str, draws: int, dtype: torch.dtype = F32) -> dict[str, tuple[float, float]]:
    """part -> (slope, relative squared error) of the mean gradient against the exact gradient of what forward
    computed.
    """
    layer, exact, (x, g) = prepared(backward, dtype=dtype), prepared(None, dtype=dtype), data(dtype)
    want = step(exact, x, g)
    total = {part: torch.zeros_like(t, dtype=torch.float64) for part, t in want.items()}
    for _ in range(draws):
        for part, t in step(layer, x, g).items():
            total[part] += t.double() / draws
    found = {}
    for part in ("x", "weight"):
        mean, true = total[part], want[part].double()
        norm = (true * true).sum()
        found[part] = float((mean * true).sum() / norm), float(((mean - true) ** 2).sum() / norm)
    return found


def test_quartet_through_its_transform_and_mask() -> None:
    """By hand, dx = (Q(dy) Q(W^) * mask_x) H^T and dW likewise, W^ and x^ in the transformed domain; the mean is the
    exact gradient.
    """
    base = MXFP4WeightConfig(rule="quest", transform=Hadamard(32))
    layer, exact, (x, g) = (*(prepared(b, base, straight_through="clipped") for b in ("quartet", None)), data())
    for one in (layer, exact):
        one.weight.data.copy_(torch.randn(N, K, generator=torch.Generator().manual_seed(1)))
    recipe, state = layer.prepared.recipe, getattr(layer, RANDOM).clone()
    assert layer.prepared.config.straight_through == QATConfig(base, backward="quartet").straight_through
    hats, masks = {}, {}
    for part, fmt, value in (("x", recipe.fprop_input, x), ("weight", recipe.fprop_weight, layer.weight.detach())):
        e = fmt.encode(value)
        hats[part], masks[part] = fmt.decode(e, F32), fmt.saturated(value, e)
        assert masks[part].any()
    got = step(layer, x, g)
    dx = by_hand(g, hats["weight"].t(), "rht32+mxfp4-sr", state, DGRAD_GRAD_OUTPUT)
    dw = by_hand(g.t(), hats["x"].t(), "rht32+mxfp4-sr", state, WGRAD_GRAD_OUTPUT)
    assert_equal(got["x"], recipe.fprop_input.pull_back(dx.masked_fill(masks["x"], 0)))
    assert_equal(got["weight"], recipe.fprop_weight.pull_back(dw.masked_fill(masks["weight"], 0)))
    want = step(exact, x, g)
    draws = [step(layer, x, g) for _ in range(32)]
    for part in ("x", "weight"):
        m = torch.stack([d[part].double() for d in draws]).mean(0)
        assert float((m * want[part]).sum() / (want[part].double() ** 2).sum()) == pytest.approx(1, abs=0.006)


def test_bare_scales_make_the_product_16_ninths_too_small() -> None:
    """What a kernel that knows only the e8m0 scales would return."""
    a, b, f = torch.randn(8, 64), torch.randn(6, 64), get_format("mxfp4-sr")
    state = torch.tensor([0, 1, 2])
    bare = [f.operand(f.encode(t, random=Random(state, i)), F32) for i, t in enumerate((a, b))]
    torch.testing.assert_close(by_hand(a, b, "mxfp4-sr", state, 0), bare[0] @ bare[1].t() * 16 / 9)


# relative squared error of one draw of a gradient, about twice its format's: of the mean over n draws it is 1/n of that
# if and only if nothing is left that does not average out
ERROR = {"mxfp4-sr": 0.057, "nvfp4-sr": 0.049, "rht32+mxfp4-sr": 0.06, "rht128+ms-eden": 0.02}


@pytest.mark.parametrize(
    "name", [n if n.startswith("rht") else pytest.param(n, marks=pytest.mark.slow) for n in STOCHASTIC]
)
def test_the_mean_gradient_is_the_exact_one(name: str) -> None:
    draws = 64
    for part, (slope, error) in averaged(name, draws).items():
        assert slope == pytest.approx(1, abs=0.002), part
        assert error < 1.6 * ERROR[name] / draws, (part, error * draws)


@pytest.mark.parametrize("name", ["mxfp4", "rht32+xx-mxfp4"])
def test_rounding_to_nearest_is_biased(name: str) -> None:
    """The mean over 32 rotations keeps an error that stochastic rounding loses, and shrinks: .991 squared, for two
    operands.
    """
    for part, (slope, error) in averaged(name, 32).items():
        assert error > 3 * ERROR["rht32+mxfp4-sr"] / 256, part
        assert slope < (1 if name == "mxfp4" else 0.985), part


# A function of the state


def test_every_backward_draws_anew_and_forward_draws_nothing() -> None:
    layer, (x, g) = prepared("quartet2"), data()
    state = getattr(layer, RANDOM)
    before = state.clone()
    with torch.no_grad():
        layer(x)
    layer(x.requires_grad_())
    assert_equal(state, before)
    first, second = (step(layer, x, g)["weight"] for _ in range(2))
    assert not torch.equal(first, second)
    assert (state - before).tolist() == [0, 0, 2]
    state.copy_(before)
    assert_equal(step(layer, x, g)["weight"], first)


def test_one_call_after_another_in_one_graph() -> None:
    """A layer that is called twice before backward: autograd's order decides who draws first, and both draw."""
    layer, (x, _) = prepared("quartet2"), data()
    (layer(x).square().sum() + layer(2 * x).square().sum()).backward()
    assert int(getattr(layer, RANDOM)[2]) == 2


def test_the_seed_decides_what_is_drawn() -> None:
    found = [step(prepared("quartet2", seed=seed), *data())["weight"] for seed in (0, 0, 1)]
    assert_equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_layers_of_one_shape_draw_differently() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Linear(K, N) for n in "ab"})
    model["b"].load_state_dict(model["a"].state_dict())
    quantize_(model, QATConfig(NVFP4WeightConfig(), backward="quartet2"))
    x, g = data()
    assert not torch.equal(step(model["a"], x, g)["weight"], step(model["b"], x, g)["weight"])


# What the layer keeps


def test_the_state_is_a_buffer_of_training_alone() -> None:
    """Casts leave it, deepcopy copies it, a float checkpoint loads beside it, convert and unprepare remove it."""
    plain = {"layer.weight", "layer.bias"}
    model = nn.ModuleDict({"layer": nn.Linear(K, N)})
    checkpoint_before = copy.deepcopy(model.state_dict())
    quantize_(model, QATConfig(NVFP4WeightConfig(), backward="quartet2", seed=4))
    assert set(model.state_dict()) == plain | {f"layer.{RANDOM}"}
    x, g = data()
    step(model["layer"], x, g)
    state = getattr(model["layer"], RANDOM)
    assert state.dtype == torch.int64 and state.tolist()[::2] == [4, 1]
    other = copy.deepcopy(model)
    step(other["layer"], x, g)
    assert int(state[2]) == 1
    assert getattr(copy.deepcopy(model).bfloat16()["layer"], RANDOM).dtype == torch.int64
    model.load_state_dict(checkpoint_before)
    assert getattr(model["layer"], RANDOM).tolist()[::2] == [4, 0]
    quantize_(model, QATConfig(step="convert"))
    assert all(RANDOM not in key for key in model.state_dict())
    unprepare(other)
    assert set(other.state_dict()) == plain


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_draws_on_and_looks_for_its_own_rank(
    again: Callable[[nn.Linear], nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state goes on where it was; the rank is that of the process that holds the copy, not the original's."""
    layer, (x, g) = prepared("quartet2"), data()
    step(layer, x, g)
    twin = again(layer)
    assert_equal(step(twin, x, g)["weight"], step(layer, x, g)["weight"])
    vars(layer)[ranks.RANK] = 1
    other, found = again(layer), []
    monkeypatch.setattr(ranks, "find", lambda: found.extend(m for m in ranks._waiting if m is other))
    step(other, x, g)
    assert found and ranks.of(other) == 0
    assert ranks.of(layer) == 1
    assert ranks.RANK not in vars(again(prepared(None)))


def test_prepared_on_the_meta_device_and_loaded_from_a_float_checkpoint() -> None:
    with torch.device("meta"):
        empty = prepared("quartet2")
    empty.load_state_dict(nn.Linear(K, N).state_dict(), assign=True)
    step(empty, *data())
    assert int(getattr(empty, RANDOM)[2]) == 1


def test_clipped_straight_through_masks_the_quantised_gradient() -> None:
    clipped, plain = (
        prepared("mxfp4-sr", MXFP4WeightConfig("floor", "mxfp4-floor"), straight_through=s)
        for s in ("clipped", "identity")
    )
    x, g = data()
    for layer in (clipped, plain):
        layer.weight.data.copy_(g.t() @ x / M)  # normal: some blocks clip
    got, want = step(clipped, x, g), step(plain, x, g)
    recipe = clipped.prepared.recipe
    for part, fmt, value in (("x", recipe.fprop_input, x), ("weight", recipe.fprop_weight, clipped.weight.detach())):
        mask = fmt.saturated(value, fmt.encode(value))
        assert mask.any()
        assert_equal(got[part], want[part].masked_fill(mask, 0), part)


# Refusals


def test_recipe_refuses() -> None:
    sr, nvfp4 = get_format("mxfp4-sr"), get_format("nvfp4")
    for options in ({"dgrad_weight": sr}, {"dgrad_grad_output": sr, "dgrad_weight": nvfp4}):
        with pytest.raises(
            ValueError, match="the two operands of dgrad have one format, or both stay in high precision"
        ):
            LinearRecipe(None, nvfp4, **options)
    with pytest.raises(ValueError, match=r"does not cancel in dgrad's product: use rht32\+nvfp4"):
        LinearRecipe(
            None, nvfp4, **dict.fromkeys(("dgrad_grad_output", "dgrad_weight"), get_format("hadamard32+nvfp4"))
        )
    with pytest.raises(ValueError, match="the two operands of wgrad"):
        LinearRecipe(None, nvfp4, wgrad_input=sr)
    for sides, side in (((sr, nvfp4), "input"), ((None, sr), "weight")):
        with pytest.raises(ValueError, match=f"mxfp4-sr rounds at random.*not for the {side} of forward"):
            LinearRecipe(*sides)
