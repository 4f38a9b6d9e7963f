"""quantized_model_init: packed weights, float32 masters, and a training run that does not notice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import forked
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from aoquant import Cast, HybridConfig, QATConfig, quantize_, quantized_model_init, report, unprepare
from aoquant.parallel.gathered import GatheredWeight
from aoquant.recipes import get_recipe

CONFIGS: dict[str, Any] = {
    "nvfp4-training": lambda: get_recipe("nvfp4-training").prepare(seed=3),
    "fp8-hybrid": lambda: get_recipe("fp8-hybrid").prepare(),
    "nvfp4-original": lambda: HybridConfig.fwd_bwd("te-nvfp4", "te-nvfp4").replaced(dgrad_weight=Cast("te-nvfp4")),
    "int4-g32": lambda: QATConfig("int4-g32"),
}
WIDTH = 64


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH, bias=False))


def train(model: nn.Module, parameters: nn.Module, optimizer: Any, steps: int, first: int = 0) -> list[Tensor]:
    """Two micro-batches a step, gradients clipped; returns outputs."""
    outputs = []
    for step in range(first, first + steps):
        for i in range(2):
            x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(10 * step + i)).requires_grad_()
            y = model(x)
            (y - x.flip(1)).square().mean().backward()
            outputs.append(y.detach())
        nn.utils.clip_grad_norm_(parameters.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_five_steps_equal_the_float32_models(name: str) -> None:
    plain, packed = network(), network()
    quantize_(plain, CONFIGS[name]())
    masters = quantized_model_init(packed, CONFIGS[name]())
    assert all(type(m.weight) is GatheredWeight for m in (packed[0], packed[2]))
    outputs = train(packed, masters, adamw(masters), 5)
    for got, want in zip(outputs, train(plain, plain, adamw(plain), 5), strict=True):
        assert torch.equal(got, want)
    state = plain.state_dict()
    assert list(masters.state_dict()) == list(state)
    for key, value in masters.state_dict().items():
        assert value.dtype == state[key].dtype and torch.equal(value, state[key]), key


def test_what_the_model_holds() -> None:
    """Codes and a scale for each tile of 16 x 16, and no weight."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    masters = quantized_model_init(model, CONFIGS["nvfp4-training"]())
    held = sum(t.numel() * t.element_size() for t in model[0].weight.parts)
    assert held <= 0.51 * 512 * 512
    assert [p.dtype for p in masters.masters()] == [torch.float32]
    assert all(p is q for p, q in zip(masters.parameters(), masters.masters(), strict=True))


def test_states_of_masters_and_of_the_model_load_into_each_other() -> None:
    """A model with a buffer that is in no checkpoint, and that a forward reads."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.arange(WIDTH) + 1.0, persistent=False)
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.inv_freq

    models = [nn.Sequential(Rotary(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    plain, packed = models
    quantize_(plain, CONFIGS["fp8-hybrid"]())
    masters = quantized_model_init(packed, CONFIGS["fp8-hybrid"]())
    masters.load_state_dict(plain.state_dict())
    assert "0.inv_freq" in dict(masters.named_buffers()) and "0.steps" in masters.state_dict()
    x = torch.randn(4, WIDTH)
    assert torch.equal(packed(x), plain(x))
    plain.load_state_dict(masters.state_dict())


def test_tied_weights_have_one_master() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    plain = copy.deepcopy(model)
    quantize_(plain, CONFIGS["fp8-hybrid"]())
    masters = quantized_model_init(model, CONFIGS["fp8-hybrid"]())
    assert model[0].weight is model[1].weight and len(list(masters.masters())) == 1
    for got, want in zip(train(model, masters, adamw(masters), 2), train(plain, plain, adamw(plain), 2), strict=True):
        assert torch.equal(got, want)


def test_restored_weights_are_converted() -> None:
    model, plain = network(), network()
    masters = quantized_model_init(model, CONFIGS["nvfp4-training"]())
    quantize_(plain, CONFIGS["nvfp4-training"]())
    masters.restore()
    x = torch.randn(4, WIDTH)
    for m in (model, plain):
        quantize_(m, QATConfig(step="convert"))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_a_bf16_model_trains_without_autocast() -> None:
    """On float32 masters, whose codes are deployed."""
    model = network().to(torch.bfloat16)
    masters = quantized_model_init(model, CONFIGS["nvfp4-training"]())
    optimizer, before = adamw(masters), [m.detach().clone() for m in masters.masters()]
    for i in range(2):
        x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16()
        y = model(x)
        y.float().square().mean().backward()
        assert y.dtype == torch.bfloat16
        assert all(m.dtype == torch.float32 and m.grad is not None for m in masters.masters())
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(m, b) for m, b in zip(masters.masters(), before, strict=True))
    with torch.no_grad():
        wanted = model(x)
        masters.restore()
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model.to(torch.bfloat16)(x), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_and_cleared_through_the_model(dtype: torch.dtype) -> None:
    """Compiled too, with a gradient there when it is traced."""
    states = []
    for own, compiled in ((False, False), (True, False), (True, True)):
        model = network().to(dtype)
        masters = quantized_model_init(model, CONFIGS["fp8-hybrid"]())
        seen: nn.Module = model if own else masters
        optimizer, run = adamw(masters), torch.compile(model, backend="aot_eager") if compiled else model
        for i in range(4):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))
            run(x.to(dtype)).float().square().sum().backward()
            assert model[0].weight.grad is next(masters.masters()).grad
            if i == 0:
                torch._dynamo.reset()
            if i % 2:
                assert float(nn.utils.clip_grad_norm_(seen.parameters(), 0.5)) > 1
                optimizer.step()
                seen.zero_grad(set_to_none=i == 3)
                assert not any(p.grad is not None and bool(p.grad.any()) for p in masters.parameters())
        model[0].weight.grad = torch.ones(96, WIDTH)
        assert next(masters.masters()).grad is model[0].weight.grad
        states.append(masters.state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[key], value) for key, value in states[0].items())


def test_an_optimizer_of_the_models_own_parameters_is_refused() -> None:
    model = network()
    quantized_model_init(model, CONFIGS["fp8-hybrid"]())
    optimizer, bias = adamw(model), model[0].bias.detach().clone()
    model(torch.randn(4, WIDTH)).sum().backward()
    with pytest.raises(ValueError, match=r"^0: its weight is packed.*give the optimizer masters.parameters\(\)"):
        optimizer.step()
    assert torch.equal(model[0].bias, bias), "nothing has moved"
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="its weight is packed"):
        adamw(model).step()  # it would add the gradient that is there
    model.zero_grad()
    adamw(model).step()  # frozen ones need not move


def test_what_needs_the_weights_says_to_restore_them() -> None:
    model, plain = network(), network()
    masters = quantized_model_init(model, CONFIGS["fp8-hybrid"]())
    x = torch.randn(4, WIDTH)
    for step in (
        lambda: quantize_(model, QATConfig(step="convert")),
        lambda: quantize_(model, HybridConfig.bwd("mxfp8")),
        lambda: quantized_model_init(model, CONFIGS["fp8-hybrid"]()),
        lambda: report(plain, model, x, progress=False),
        lambda: unprepare(model),
    ):
        with pytest.raises(ValueError, match=r"0.*: its weight is packed.*masters.restore\(\)"):
            step()
    with pytest.raises(NotImplementedError, match=r"masters.restore\(\)"):
        copy.deepcopy(model)
    masters.restore()
    report(plain, copy.deepcopy(model), x, progress=False)


def test_what_reads_the_weight_itself_is_refused() -> None:
    config = HybridConfig.fwd_bwd("mxfp8", None).replaced(dgrad_weight=Cast(None))
    with pytest.raises(ValueError, match="0: quantized_model_init: dgrad starts from the weight itself"):
        quantized_model_init(network(), config)
    delayed = HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=16)
    with pytest.raises(ValueError, match=r"0: quantized_model_init: its scales are delayed.*amax_history=0"):
        quantized_model_init(network(), delayed)
    with pytest.raises(ValueError, match="needs a config that prepares"):
        quantized_model_init(network(), "int4-g32")


def resume(directory: Path, ways: tuple[str, ...]) -> None:
    """In a new process: load what two steps left, each way, and take three more."""
    for how in ways:
        torch.save(resumed(directory / how, how), directory / f"{how}.pt")


def resumed(directory: Path, how: str) -> dict[str, Any]:
    model = network()
    masters = quantized_model_init(model, CONFIGS["nvfp4-training"]())
    optimizer = adamw(masters)
    if how == "dcp":
        states = dict(zip(("model", "optimizer"), get_state_dict(masters, optimizer), strict=True))
        dcp.load(states, checkpoint_id=directory, no_dist=True)
        set_state_dict(masters, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    else:
        states = torch.load(directory / "state.pt", weights_only=True)
        masters.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    train(model, masters, optimizer, 3, 2)
    return masters.state_dict()


def test_a_new_process_resumes(tmp_path: Path) -> None:
    model = network()
    masters = quantized_model_init(model, CONFIGS["nvfp4-training"]())
    optimizer = adamw(masters)
    train(model, masters, optimizer, 2)
    states = dict(zip(("model", "optimizer"), get_state_dict(masters, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "torch.save").mkdir()
    state = {"model": masters.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "torch.save" / "state.pt")
    train(model, masters, optimizer, 3, 2)
    ways = ("dcp", "torch.save")
    forked.call(resume, tmp_path, ways)
    for how in ways:
        for key, value in torch.load(tmp_path / f"{how}.pt", weights_only=True).items():
            torch.testing.assert_close(
                value, masters.state_dict()[key], rtol=0, atol=0, msg=lambda m, at=f"{how} {key}": f"{at}: {m}"
            )
