"""quantized_model_init: packed weights, float32 masters, and a training run that does not notice."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import forked
from support.moe_models import model_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchao.quantization import FqnToConfig

from aoquant import (
    Cast,
    HybridConfig,
    IntxWeightConfig,
    QATConfig,
    quantize_,
    quantized_model_init,
    report,
    set_fake_quant,
    unprepare,
)
from aoquant.distributed.gathered import GatheredWeight
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


def test_tied_weights_have_one_master() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    plain = copy.deepcopy(model)
    quantize_(plain, CONFIGS["fp8-hybrid"]())
    masters = quantized_model_init(model, CONFIGS["fp8-hybrid"]())
    assert model[0].weight is model[1].weight and len(list(masters.masters())) == 1
    for got, want in zip(train(model, masters, adamw(masters), 2), train(plain, plain, adamw(plain), 2), strict=True):
        assert torch.equal(got, want)


def test_a_restored_model_is_the_prepared_one() -> None:
    """Nothing of the masters is left: a change of a weight is no change behind codes; and it converts."""
    model, plain, other = network(), network(), network()
    masters = quantized_model_init(model, CONFIGS["fp8-hybrid"]())
    quantize_(plain, CONFIGS["fp8-hybrid"]())
    x = torch.randn(4, WIDTH)
    needs_weights = (
        lambda: quantize_(model, QATConfig(step="convert")),
        lambda: quantize_(model, HybridConfig.bwd("mxfp8")),
        lambda: quantized_model_init(model, CONFIGS["fp8-hybrid"]()),
        lambda: report(other, model, x, progress=False),
        lambda: unprepare(model),
    )
    for step in needs_weights:
        with pytest.raises(ValueError, match=r"\b0\b.*masters.restore\(\)"):
            step()
    for _ in range(2):
        masters.restore()
        assert [type(m) for m in model] == [type(m) for m in plain] and not list(masters.masters())
    report(other, copy.deepcopy(model), x, progress=False)
    for m in (model, plain):
        with torch.no_grad():
            m[0].weight.mul_(2)
    for got, want in zip(train(model, model, adamw(model), 2), train(plain, plain, adamw(plain), 2), strict=True):
        assert torch.equal(got, want)
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


def test_codes_are_no_parameters_of_an_optimizer_and_freeze_with_their_master() -> None:
    model = network()
    masters = quantized_model_init(model, CONFIGS["fp8-hybrid"]())
    assert all(p is q for p, q in zip(model.parameters(), masters.parameters(), strict=True))
    optimizer, bias = torch.optim.SGD([model[0].bias, model[0].weight], 1.0), model[0].bias.detach().clone()
    x = torch.randn(4, WIDTH)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"^0: .*masters.parameters\(\)"):
        optimizer.step()
    assert torch.equal(model[0].bias, bias), "nothing has moved"
    model[0].weight.requires_grad_(False)
    model.zero_grad()
    model(x).sum().backward()
    assert not model[0].weight.requires_grad and model[0].weight.grad is None and model[2].weight.grad is not None


@pytest.mark.parametrize("write", ["in place", "data", "load", "closure", "no_grad", "inference_mode"])
def test_a_master_that_was_written_is_packed_before_the_next_forward(write: str) -> None:
    """By whatever writes it: no optimizer's step, and none of a hook."""
    model, plain = network(), network()
    masters = quantized_model_init(model, CONFIGS["nvfp4-training"]())
    quantize_(plain, CONFIGS["nvfp4-training"]())
    x = torch.randn(4, WIDTH)
    if write == "closure":
        for m in (model, plain):
            optimizer = torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4)

            def closure(m: nn.Module = m, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = m(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    else:
        for m in (model, plain):
            with torch.no_grad():
                for p in m.parameters():
                    if write == "data":
                        p.data = p.data + 0.25
                    elif write == "load":
                        p.copy_(torch.ones_like(p) / 3)
                    else:
                        p.mul_(1.5)
    with torch.inference_mode() if write == "inference_mode" else torch.no_grad():
        assert torch.equal(model(x), plain(x))
    for key, value in masters.state_dict().items():
        assert torch.equal(value, plain.state_dict()[key])


def test_a_compiled_backward_through_old_codes_is_refused() -> None:
    model = network()
    masters = quantized_model_init(model, CONFIGS["fp8-hybrid"]())
    run, x = torch.compile(model, backend="aot_eager"), torch.randn(4, WIDTH)
    run(x).sum().backward()
    with torch.no_grad():
        model[0]._parameters["weight"].mul_(2)
    with pytest.raises(ValueError, match=r"^0: .*masters.refresh\(\)"):
        run(x).sum().backward()
    masters.refresh()
    run(x).sum().backward()


class Kinds(nn.Module):
    """Each kind of tensor that a module has: trained, tied, shared by name, saved, not saved; a child without any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.tied, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.tied.weight, self.again, self.nothing = self.linear.weight, self.linear, None
        self.at_root = nn.Parameter(torch.ones(WIDTH))
        self.register_module("none", None)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("unsaved", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.again(self.tied(self.linear(x.to(self.at_root.dtype))))) * self.unsaved
        self.mean = self.mean + y.detach().mean(0).to(self.mean.dtype)
        return y * self.at_root


CHANGES: dict[str, Any] = {
    "none": lambda model: model,
    "bfloat16": lambda model: model.bfloat16(),
    "there and back": lambda model: model.double().float(),
    "overwriting": lambda model: model.norm.load_state_dict(nn.BatchNorm1d(WIDTH).state_dict(), assign=True),
    "another buffer": lambda model: model.register_buffer("later", torch.ones(3)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["nvfp4-training", "fp8-hybrid"])
def test_masters_are_those_that_the_model_has_now(name: str, change: str) -> None:
    """Whatever took the place of its buffers and parameters: a forward, a cast, a move, a load."""
    model = Kinds()
    masters = quantized_model_init(model, CONFIGS[name]())
    CHANGES[change](model)
    for _ in range(2):
        model(torch.randn(16, WIDTH)).float().square().mean().backward()

    def check() -> None:
        want, found = model.state_dict(), masters.state_dict()
        assert list(found) == list(want)
        assert all(torch.equal(found[key], want[key]) and found[key].dtype == want[key].dtype for key in want)
        assert [*masters.named_parameters()] == [*model.named_parameters()]
        assert [id(b) for b in masters.buffers()] == [id(b) for b in model.buffers()]
        assert all(m.dtype == torch.float32 for m in masters.masters())

    check()
    moved = {key: t + 1 for key, t in model.state_dict().items()}
    masters.load_state_dict(moved)
    check()
    assert all(torch.equal(t, moved[key]) for key, t in model.state_dict().items())


def test_a_master_is_not_replaced_or_copied() -> None:
    state, model = network().state_dict(), network()
    masters = quantized_model_init(model, CONFIGS["fp8-hybrid"]())
    for change in (
        lambda: model.load_state_dict(state, assign=True),
        lambda: masters.load_state_dict(state, assign=True),
        lambda: setattr(model[0], "weight", nn.Parameter(torch.ones(96, WIDTH))),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.func.functional_call(model, {"0.weight": torch.ones(96, WIDTH)}, torch.randn(2, WIDTH)),
    ):
        with pytest.raises(ValueError, match=r"^0: "):
            change()
        assert torch.equal(masters.state_dict()["0.weight"], state["0.weight"])


def tied_to_an_embedding() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False))
    model[1].weight = model[0].weight
    return model


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "experts": (
        lambda: model_of("mixtral"),
        FqnToConfig({"re:.*experts": HybridConfig.fwd_bwd("mxfp8", None).replaced(dgrad_weight=Cast(None))}),
        r"experts.gate_up_proj: .*dgrad",
    ),
    "embedding": (tied_to_an_embedding, QATConfig(IntxWeightConfig(8, None)), r"^0: .*Embedding"),
    "dgrad": (network, HybridConfig.fwd_bwd("mxfp8", None).replaced(dgrad_weight=Cast(None)), "0: .*dgrad"),
    "ptq": (network, "int4-g32", "needs a config that prepares"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_packed_is_refused_by_name(case: str) -> None:
    """Embeddings, recipes that read the weight itself; and layers of an earlier call."""
    make, config, name = REFUSED[case]
    with pytest.raises(ValueError, match=name):
        quantized_model_init(make(), config, (lambda m, _: True) if case == "embedding" else None)


def test_codes_are_no_values_and_their_zeros_are_a_plain_tensor() -> None:
    model = network()
    quantized_model_init(model, CONFIGS["nvfp4-training"]())
    codes = model[0].weight
    for read in (lambda w: w.t(), lambda w: w + 1, lambda w: w.float().sum()):
        with pytest.raises(NotImplementedError, match=r"^0: "):
            read(codes)
    zeros = torch.zeros_like(codes)
    assert type(zeros) is Tensor and torch.equal(zeros, torch.zeros(96, WIDTH))


def test_a_second_call_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    quantized_model_init(model, QATConfig("int8"), lambda _, name: name == "0")
    with pytest.raises(ValueError, match=r"^0: .*earlier call"):
        quantized_model_init(model, QATConfig("int8"), lambda _, name: name == "1")


def test_a_layer_that_stores_its_weight_transposed() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    pytest.importorskip("aoquant.integrations.conv1d")
    torch.manual_seed(0)
    model = nn.Sequential(conv1d(96, WIDTH), nn.GELU(), conv1d(WIDTH, 96))
    plain = copy.deepcopy(model)
    quantize_(plain, CONFIGS["nvfp4-training"](), lambda m, _: isinstance(m, conv1d))
    masters = quantized_model_init(model, CONFIGS["nvfp4-training"](), lambda m, _: isinstance(m, conv1d))
    for got, want in zip(train(model, masters, adamw(masters), 3), train(plain, plain, adamw(plain), 3), strict=True):
        assert torch.equal(got, want)
    set_fake_quant(model, False)
    set_fake_quant(plain, False)
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(model(x), plain(x))


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
