"""Inside `fixed_weights` a weight is encoded once for all micro-batches and rollouts, results have the bits that they
have outside, and a weight or a scale that changes is refused by name.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from support.cpu_library import with_library
from support.held_cases import CONFIGS, Model
from support.linear_cases import BF16, BY_NAME, F32, Case, assert_equal, inputs, layer, prepared
from support.meters import Made, encodings
from support.models import IDS, narrow_llama
from support.training_cases import KINDS, batch, student
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune
from transformers.pytorch_utils import Conv1D

import aoquant
from aoquant import Cast, HybridConfig, QATConfig, calibrate, fixed_weights, quantize_
from aoquant.recipes import get_recipe

cpu_library = pytest.fixture(with_library)
SAID = "its weight, or a scale of it, changed inside"


def linear(config: Any = "int4-g32", dtype: torch.dtype = BF16, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, dtype=dtype))
    quantize_(model, config if isinstance(config, HybridConfig | QATConfig) else QATConfig(config, **options))
    return model


def x_of(dtype: torch.dtype = BF16, rows: int = 3) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


# The bits outside


def steps(model: nn.Module, run: Callable[[], Tensor], fixed: bool) -> list[Tensor]:
    """Results and gradients of two micro-batches, and results of two rollouts behind each."""
    found = []
    with fixed_weights(model) if fixed else contextlib.nullcontext():
        for _ in range(2):
            y = run()
            y.float().square().sum().backward()
            found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    found.append(run().clone())
    return found


def same(made: Callable[[], nn.Module], run: Callable[[nn.Module], Tensor]) -> None:
    inside, outside = made(), made()
    got, want = steps(inside, lambda: run(inside), True), steps(outside, lambda: run(outside), False)
    assert len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_and_rollouts(kind: str) -> None:
    same(lambda: student(KINDS[kind]), lambda m: m(batch()[0]))


cases = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c.variant else []) for c in BY_NAME.values()], ids=repr
)


@cases
@torch.no_grad()
def test_inputs_of_every_shape(case: Case) -> None:
    dtype = case.dtypes[0]
    qat = prepared(case, layer(case, dtype, kind="mixed"))
    given = inputs("mixed", case.k, dtype)
    want = {shape: qat(x) for shape, x in given.items()}
    with fixed_weights(qat):
        for _ in range(2):
            for shape, x in given.items():
                assert_equal(qat(x), want[shape], shape)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_static_scales_of_the_input_are_read_in_each_call(name: str) -> None:
    config, options = CONFIGS[name]
    model, x = Model(), x_of(rows=6)
    quantize_(model, QATConfig(config, **options))
    aoquant.calibrate(model, lambda m: m(x))
    with fixed_weights(model):
        for _ in range(2):
            assert torch.equal(model(x), copy.deepcopy(model)(x))
            for scale in (p for n, p in model.named_buffers() if n.endswith("input_scale")):
                scale.mul_(1.5)


class Half(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


def parametrised() -> nn.Module:
    parametrize.register_parametrization((model := linear())[0], "weight", Half())
    return model


def pruned(part: str) -> nn.Module:
    prune.l1_unstructured((model := linear())[0], part, 0.3)
    return model


def turned() -> nn.Module:
    """Conv1D's weight is transposed for each call."""
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(24, 64)).bfloat16()
    quantize_(model, QATConfig("int4-g32"))
    return model


@pytest.mark.parametrize(
    "made",
    [parametrised, lambda: pruned("weight"), lambda: pruned("bias"), turned],
    ids=["parametrised", "pruned weight", "pruned bias", "Conv1D"],
)
def test_weights_that_are_computed(made: Callable[[], nn.Module]) -> None:
    same(made, lambda m: m(x_of()))


def test_weights_of_a_functional_call() -> None:
    other = {name: p.detach() * 2 for name, p in linear().named_parameters()}
    same(linear, lambda m: m(x_of()) + functional_call(m, other, (x_of(),)))


def test_lora_merges_for_each_call() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = narrow_llama()
        quantize_(model, QATConfig("int4-g32"))
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(model, config).train()

    same(made, lambda m: m(input_ids=IDS).logits)
    model = made()
    with fixed_weights(model):
        tokens = model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        with model.disable_adapter():
            model(input_ids=IDS)
        assert torch.equal(tokens, model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))


@torch.no_grad()
def test_autocast_another_backend_and_wrong_inputs_are_as_usual() -> None:
    model, x = linear(dtype=F32), x_of(F32)
    with fixed_weights(model):
        for block in (torch.autocast("cpu", BF16), aoquant.backend("reference")):
            with block:
                assert torch.equal(model(x), copy.deepcopy(model)(x))
        with pytest.raises(ValueError, match="cast one of them"):
            model(x.bfloat16())
        with pytest.raises(ValueError, match="K = 64"):
            model(x[:, 1:])


# Encoded once


# encodings of the weight, whatever the number of micro-batches
SIDES = {
    "mxfp8-nvfp4": 2, "nvfp4-mxfp8": 2, "fp8-hybrid": 1, "nvfp4-training": 1, "mxfp8-hp": 1, "nvfp4-hp": 1,
    "original": 2, "hp saved": 2, "preset": 2, "straight through": 1,
}  # fmt: skip
CONFIG = {
    "original": HybridConfig.fwd_bwd("te-nvfp4", "mxfp8").replaced(dgrad_weight=Cast("mxfp8", "original")),
    "hp saved": HybridConfig.fwd_bwd("mxfp8", "te-nvfp4", save="hp"),
    "preset": QATConfig("mxfp8", backward="mxfp8"),
    "straight through": QATConfig("mxfp8"),
}


@pytest.mark.parametrize("name", SIDES)
def test_each_side_of_a_weight_is_encoded_once(name: str) -> None:
    model = nn.Sequential(nn.Linear(128, 256))
    quantize_(model, CONFIG[name] if name in CONFIG else get_recipe(name).prepare())

    def micro_batches(rows: tuple[int, ...]) -> int:
        with encodings() as count:
            for n in rows:
                y = model(torch.ones(n, 128, requires_grad=True))
                y.sum().backward()
                with torch.no_grad():
                    model(torch.ones(n, 128))
        return count[128, 256]

    with fixed_weights(model):
        assert micro_batches((64, 32, 64)) == SIDES[name]
    assert micro_batches((64,)) > SIDES[name], "outside the block every step encodes"


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4", "mxfp4-h32", "fp8", "int8", "gridflip"])
@torch.no_grad()
def test_a_rollout_encodes_a_weight_once(name: str) -> None:
    model = linear(name)
    with encodings() as count, fixed_weights(model):
        for rows in (1, 3, 1, 7):
            model(x_of(rows=rows))
    assert count[32, 64] == 1


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
@torch.no_grad()
def test_the_block_frees_the_codes(name: str, cpu_library: None) -> None:
    """At once, without a collection of cycles."""
    model, x = linear(name), x_of()
    model(x)  # the first forward is watched for direct reads
    gc.disable()
    try:
        with fixed_weights(model):
            with Made() as made:
                model(x)
            assert made.alive() >= 32 * 64 / 2
        assert made.alive() == 0
    finally:
        gc.enable()


# A weight that changes


def _in_place(m: nn.Linear) -> None:
    with torch.no_grad():
        m.weight.mul_(2)


def _other_data(m: nn.Linear) -> None:
    m.weight.data = m.weight.data * 2


def _other_parameter(m: nn.Linear) -> None:
    m.weight = nn.Parameter(m.weight.detach().clone())


def _fused_step(m: nn.Linear) -> None:
    """Moves no version of the weight."""
    m.weight.grad = torch.ones_like(m.weight)
    torch.optim.SGD([m.weight], lr=1.0, fused=True).step()


def _other_view(m: nn.Linear) -> None:
    m.weight.data = m.weight.data.view(64, 32).t()


def _learned_scale(m: nn.Linear) -> None:
    scale = m.get_parameter("weight_scale")
    scale.grad = torch.ones_like(scale)
    torch.optim.SGD([scale], lr=0.1, fused=True).step()


def _written_scale(m: nn.Linear) -> None:
    with torch.no_grad():
        m.get_parameter("weight_scale").mul_(1.3)


WRITES = (_in_place, _other_data, _other_parameter, _fused_step, _other_view)


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize(
    ("config", "write"),
    [(c, w) for c in ("int4-g32", "mxfp8") for w in WRITES]
    + [(c, w) for c in ("int8-weight", "int3-g32") for w in (_learned_scale, _written_scale)],
)
def test_a_weight_or_scale_that_changes_is_refused_by_name(
    config: str, write: Callable[[nn.Linear], None], gradients: bool
) -> None:
    """Behind the block it is a weight as any other. A pending backward: the next test."""
    model = linear(config, F32, **({} if write in WRITES else {"scales": "learned"}))
    x = x_of(F32).requires_grad_(gradients)
    with fixed_weights(model), torch.set_grad_enabled(gradients):
        model(x)
        write(model[0])
        with pytest.raises(ValueError, match=f"^0: {SAID}"):
            model(x)
    with fixed_weights(model), torch.no_grad():
        assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_a_fitted_transform_that_changes_is_refused_by_name() -> None:
    model, x = linear(get_recipe("nvfp4-wush").prepare(), F32), x_of(F32)
    calibrate(model, [x])
    with fixed_weights(model), torch.no_grad():
        model(x)
        model[0].get_buffer("weight_transform").mul_(1.5)
        with pytest.raises(ValueError, match=f"^0: {SAID}"):
            model(x)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_of_an_optimizer_changes_the_weights_with_gradients(fused: bool) -> None:
    model = nn.ModuleDict({n: linear(get_recipe("mxfp8-nvfp4").prepare(), F32)[0] for n in ("layer", "frozen")})
    model["frozen"].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    x = x_of(F32).requires_grad_()
    with fixed_weights(model):
        optimizer.step()  # without gradients, and before a weight is read
        for m in model.values():
            m(x).sum().backward()
        pending = model["layer"](x)
        optimizer.step()
        for again in (lambda: model["layer"](x), lambda: pending.sum().backward()):
            with pytest.raises(ValueError, match=SAID):
                again()
        model["frozen"](x)
    with fixed_weights(model):
        model["layer"](x).sum().backward()
        others = linear(get_recipe("mxfp8-nvfp4").prepare(), F32)
        others(x).sum().backward()
        torch.optim.AdamW(others.parameters(), fused=fused).step()
        model["layer"](x).sum().backward()


def test_a_weight_of_inference_mode_is_seen_when_written() -> None:
    with torch.inference_mode():
        model = linear()
        with fixed_weights(model):
            before = model(x_of())
            model[0].weight.mul_(2)
            assert torch.equal(model(x_of()), copy.deepcopy(model)(x_of()))
            assert not torch.equal(model(x_of()), before)


@torch.no_grad()
def test_copies_are_outside_of_the_block() -> None:
    model, x = linear(), x_of()
    want = model(x)
    with fixed_weights(model):
        model(x)
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(copied(x), want)
            copied[0].weight.mul_(2)
            assert not torch.equal(copied(x), want)
        assert torch.equal(model(x), want)


@torch.no_grad()
def test_blocks_nest_and_end_with_an_error() -> None:
    model, x = linear(), x_of()
    with fixed_weights(model):
        with fixed_weights(model):
            model(x)
        model[0].weight.mul_(2)
        with pytest.raises(ValueError, match=SAID):
            model(x)
    with pytest.raises(ValueError, match="K = 64"), fixed_weights(model):
        model(x[:, 1:])
    model[0].weight.mul_(2)
    assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_another_config_inside_the_block() -> None:
    """The columns of the old recipe are not those of the new one; a pending backward is the old one's."""
    start = HybridConfig.fwd_bwd("te-nvfp4", "te-nvfp4")
    x = x_of(F32, 32).requires_grad_()

    def gradients(model: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), (x, model[0].weight)))

    for new in (start.replaced(dgrad_weight=Cast("te-nvfp4")), HybridConfig.fwd_bwd("te-nvfp4", "mxfp8")):
        model = linear(start, F32)
        with fixed_weights(model):
            gradients(model)
            pending = model(x)
            quantize_(model, new)
            assert all(map(torch.equal, gradients(model), gradients(linear(new, F32))))
            pending.sum().backward()
