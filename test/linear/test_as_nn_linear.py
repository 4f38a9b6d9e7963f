"""A prepared layer is called, differentiated and pruned as nn.Linear is, or says why not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from aoquant import Int4WeightConfig, NVFP4WeightConfig, QATConfig, quantize_, set_fake_quant
from aoquant.formats import Operand, get_format, get_operand
from aoquant.linear.recipe import RECIPES, LinearRecipe

K, N = 64, 32


def prepared(config: object = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N)).bfloat16()
    quantize_(model, QATConfig(config or NVFP4WeightConfig(activation="nvfp4")))  # type: ignore[arg-type]
    return model


def data() -> Tensor:
    return torch.randn(4, K, generator=torch.Generator().manual_seed(1)).bfloat16()


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda i: model(i).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
}


def forward_mode(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("how", [*TRANSFORMS.values(), forward_mode], ids=[*TRANSFORMS, "forward-mode"])
@pytest.mark.parametrize("convert", [False, True], ids=["prepared", "converted"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no-grad", "grad"])
def test_transforms_of_functions_are_refused(how: Any, convert: bool, gradients: bool) -> None:
    model, x = prepared(), data()
    if convert:
        quantize_(model, QATConfig(step="convert"))
    y = model(x)
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises(ValueError, match=r"torch.func's transforms .*do not go through"),
    ):
        how(model, x)
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)


def test_the_input_goes_by_name() -> None:
    model, x = prepared(), data()
    assert torch.equal(model[0](input=x), model(x))
    table = nn.Sequential(nn.Embedding(16, K)).bfloat16()
    quantize_(table, QATConfig(Int4WeightConfig(32)), filter_fn=lambda m, _: isinstance(m, nn.Embedding))
    ids = torch.tensor([3, 1])
    assert torch.equal(table[0](input=ids), table(ids))


@pytest.mark.parametrize("config", [NVFP4WeightConfig(activation="nvfp4"), Int4WeightConfig(32)], ids=["W+A", "W"])
def test_a_second_derivative_is_refused_at_once(config: object) -> None:
    """It would be silently wrong: the ops have no derivative of their own."""
    model, x = prepared(config), data().requires_grad_()
    with pytest.raises(ValueError, match=r"cannot be differentiated twice.*set_fake_quant"):
        torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    set_fake_quant(model, False)  # what the message says
    (dx,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    dx.float().square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_a_pruned_prepared_layer_converts_once_pruning_is_permanent() -> None:
    model, x = prepared(), data()
    prune.l1_unstructured(model[0], "weight", 0.5)
    y = model(x)
    with pytest.raises(ValueError, match=r"make the pruning permanent first.*prune\.remove"):
        quantize_(model, QATConfig(step="convert"))
    prune.remove(model[0], "weight")
    quantize_(model, QATConfig(step="convert"))
    with torch.no_grad():
        assert torch.equal(model(x), y)


def test_a_recipe_is_found_by_its_key_after_a_pickle() -> None:
    recipe = LinearRecipe(get_format("int8-tensor"), get_operand("int4-g32"), input_scales="static")
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe and again.key == recipe.key and RECIPES[recipe.key] == recipe
    assert again.fprop_input.scales == again.input_scales == "static"
    assert recipe.deployed.fprop_weight == Operand(get_format("int4-g32"))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", [NVFP4WeightConfig(activation="nvfp4"), Int4WeightConfig(32)], ids=["W+A", "W"])
def test_the_inputs_dtype_is_the_weights_as_in_nn_linear(config: object, stored: torch.dtype) -> None:
    """Prepared and converted raise where nn.Linear raises, and have its output's dtype where it has one; also under
    autocast.
    """
    float_model = nn.Sequential(nn.Linear(K, N)).to(stored)
    model = copy.deepcopy(float_model)
    quantize_(model, QATConfig(config))  # type: ignore[arg-type]
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    for autocast in (False, True):
        for given in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            x = torch.randn(4, K, dtype=given)
            for grad in (True, False):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
                    try:
                        want = float_model(x).dtype
                    except RuntimeError:
                        for layer in (model[0], converted[0]):
                            with pytest.raises(
                                ValueError,
                                match=r"cast one of them, or use autocast|float16, got torch.float64: cast it$",
                            ):
                                layer(x)
                    else:
                        y, z = model(x), converted(x)
                        assert y.dtype == want
                        assert torch.equal(y, z)
