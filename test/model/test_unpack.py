"""`unpack_` and convert after it give back the codes and the scales that were packed, of every format; tolerance 0."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.expert_cases import FAMILIES, made
from support.models import everything
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from aoquant import AoquantWarning, PackedTensor, QATConfig, quantize_, unpack_
from aoquant.config import Packed4WeightConfig, PackedWeightConfig
from aoquant.formats import COMPOSED, get_operand, list_formats
from aoquant.linear.embedding import QATEmbedding
from aoquant.linear.tensor import same_bits

EXTRA = (
    "intx4-g32-noclip", "intx3-row-asym", "int8-tensor-asym", "nvfp4-search-row", "gridflip-search-row", "gridflip-search-16x16",
    "fouroversix-mae", "fouroversix-static:3.5", "stretched4-row", "hadamard16+int4-g128", "hadamard16+gridflip-search",
    "hadamard32+fouroversix", "fp8-8x64", "fp8-e5m2-1x64", "te-nvfp4-static:4.5", "intx4-g32-asym-sfloat16",
)  # fmt: skip
NOT_FORWARD = {n for n in COMPOSED if get_operand(n).draws or n.startswith(("te-hadamard", "wush", "high"))}
NAMES = sorted({*list_formats(), *COMPOSED, *EXTRA} - NOT_FORWARD)
REFUSED = ("int8-row-vllm", "intx8-row-hqq", "int4-tinygemm-hqq-g32")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
WITHOUT = {"stretched2-g32", "stretched4-row"}  # a zero: groups of zeros have values


def config(name: str, activation: str | None = None) -> Any:
    return (Packed4WeightConfig if get_operand(name).bits <= 4 else PackedWeightConfig)(name, activation)


def has_zeros(name: str, dtype: torch.dtype) -> bool:
    """float16 has no number for the sign of a zero behind a transform, under a scale of 2^-127."""
    return name not in WITHOUT and not (dtype == torch.float16 and "+mxfp4" in name)


def needs_float32(name: str, dtype: torch.dtype) -> bool:
    """float16 has no number between zero and half a step of e5m2, for the sign of a zero's code."""
    return dtype == torch.float16 and "e5m2" in name


def weights(name: str, dtype: torch.dtype, rows: int = 33, k: int = 512) -> Tensor:
    """Normal numbers of the size of a linear layer's, with zeros of both signs, zero blocks and rows, constants and an
    outlier; and numbers that lie on several grids at once.
    """
    w = torch.randn(rows, k, generator=torch.Generator().manual_seed(3)) * 0.02
    if has_zeros(name, dtype):
        w[1], w[2, 32:64], w[3, ::2], w[3, 1] = 0.0, 0.0, 0.0, -0.0
    w[4, 7], w[5] = 0.7, 0.01
    w[6] = torch.tensor([6.0, 3.0, -3.0, 1.5, -1.5, 0.0, 0.5, -6.0]).repeat(k // 8) * 2.0**-7
    return w.to(dtype)


def model_of(name: str, dtype: torch.dtype) -> nn.Sequential:
    layer = nn.Linear(512, 33, dtype=dtype)
    layer.weight.data = weights(name, dtype)
    return nn.Sequential(layer)


def step_by_nothing(model: nn.Module) -> None:
    """Take optimizer steps with a learning rate of 0. They change no number, but make negative zeros positive."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert parameters
    for kind in (partial(torch.optim.SGD, lr=0.0), partial(torch.optim.AdamW, lr=0.0, eps=1e-4)):
        optimizer = kind(parameters)
        for sign in (1, -1):
            for p in parameters:
                p.grad = torch.full_like(p, sign * 0.5)
            optimizer.step()
    for p in parameters:
        p.grad = None


def packed_of(model: nn.Module) -> dict[str, Any]:
    found = {n: m.weight for n, m in model.named_modules() if isinstance(getattr(m, "weight", None), PackedTensor)}
    return found | {n: p for n, p in model.named_parameters() if isinstance(p, PackedTensor)}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", [n for n in NAMES if n not in REFUSED])
def test_every_format(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    with warnings.catch_warnings(action="ignore"):
        quantize_(model, config(name))
        before, x = model[0].weight, torch.randn(3, 512).to(dtype)
        want = model(x).detach()
        unpack_(model)
        assert torch.equal(model(x), want)
        step_by_nothing(model)
        assert torch.equal(model(x), want)
        quantize_(model, QATConfig(step="convert"))
    assert same_bits(model[0].weight, before) or (
        needs_float32(name, dtype) and torch.equal(model[0].weight.dequantize(), before.dequantize())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4-none", "fp8-row", "fouroversix"])
def test_negative_zeros_alone_leave_the_packed_values(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    quantize_(model, config(name))
    values = model[0].weight.dequantize()
    unpack_(model)
    weight, negative = model[0].weight.detach(), (values == 0) & values.signbit()
    assert negative.any() and torch.equal(weight[~negative], values[~negative])
    assert bool((weight[negative] < 0).all()) and weight[negative].abs().max() < 2.0**-20 * values.abs().max()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(name: str) -> None:
    model = model_of("int8-row", torch.float32)
    quantize_(model, config(name))
    packed = model[0].weight
    with pytest.raises(ValueError, match=rf"^0: .*{name}"):
        unpack_(model)
    assert model[0].weight is packed


def test_codes_that_no_float_has_are_refused_by_name() -> None:
    """Far from zero int4 steps by less than bfloat16 does."""
    model = nn.Sequential(nn.Linear(512, 16, dtype=torch.bfloat16))
    model[0].weight.data = (50 + torch.rand(16, 512) * 2).bfloat16()
    quantize_(model, config("int4-g128"))
    packed = model[0].weight
    with pytest.raises(ValueError, match=r"0 \(int4-g128\)"):
        unpack_(model)
    assert model[0].weight is packed and type(model[0]).__name__ == "PackedLinear"


def comes_back(model: nn.Module, name: str, change: Callable[[Tensor], None] | None = None) -> None:
    """Pack, change codes, unpack, take steps of nothing, and convert: every bit is what was packed."""
    quantize_(model, config(name))
    for packed in {id(p): p for p in packed_of(model).values()}.values():
        if change is not None:
            change(packed)
    before = {n: copy.deepcopy(p) for n, p in packed_of(model).items()}
    unpack_(model)
    assert before and not packed_of(model)
    step_by_nothing(model)
    quantize_(model, QATConfig(step="convert"))
    after = packed_of(model)
    assert after.keys() == before.keys() and all(same_bits(after[n], before[n]) for n in before)


EXPERTS = ("int4-g32", "gridflip-search", "fouroversix", "nvfp4-search", "nvfp4-row", "int8-row", "int8-tensor", "mxfp4", "fp8-row",
           "intx3-g32", "te-fp8-tensor", "gridflip-16x16")  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_stacked_experts(family: str, name: str) -> None:
    assert family in FAMILIES
    comes_back(made(family, "eager"), name)


def test_scales_that_no_encoder_makes_are_kept() -> None:
    """Zeros under a large scale, and a block whose largest code is 1, as another library may write them."""

    def change(packed: Any) -> None:
        packed.qdata[0, 0, :16] = 0x00
        packed.qdata[1, 0, :16] = 0x12
        packed.scale.view(torch.uint8)[:2, 0, 0] = 122

    comes_back(made("qwen3-moe", "eager"), "mxfp4", change)


FP4 = ("nvfp4", "nvfp4-row", "nvfp4-none", "nvfp4-pow2", "nvfp4-search", "te-nvfp4", "te-nvfp4-16x16", "xx-nvfp4",
       "qutlass-nvfp4", "fouroversix", "hadamard16+nvfp4", "mxfp4", "qutlass-mxfp4")  # fmt: skip


def lower_the_largest(packed: Any) -> None:
    """Leave every third row of e2m1 codes without its largest ones, as GPTQ and rounding by hand may."""
    codes, before = packed.qdata.view(torch.uint8)[..., ::3, :], packed.qdata.clone()
    for shift in (0, 4):
        codes -= ((codes >> shift & 7) == 7) * torch.tensor(2 << shift, dtype=torch.uint8)
    assert not torch.equal(packed.qdata, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FP4)
def test_codes_that_ask_for_another_block_scale(name: str, dtype: torch.dtype) -> None:
    """And the state_dict holds what was packed, for a model that was prepared from floats too."""
    model = nn.Sequential(nn.Linear(512, 48, dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(48, 512, generator=torch.Generator().manual_seed(3)) + 3.0)
    fresh = copy.deepcopy(model)
    comes_back(model, name, lower_the_largest)
    before = copy.deepcopy(model[0].weight)
    unpack_(model)
    quantize_(fresh, QATConfig(config(name), scales="static"))
    fresh.load_state_dict(model.state_dict())
    quantize_(fresh, QATConfig(step="convert"))
    assert same_bits(fresh[0].weight, before)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-row", "nvfp4-none"])
def test_codes_of_experts_that_ask_for_another_block_scale(name: str) -> None:
    comes_back(made("qwen3-moe", "eager"), name, lower_the_largest)


class Tied(nn.Module):
    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 256, dtype=dtype), nn.Linear(256, 64, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(ids))
        return y


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "int4-g32", "gridflip-search", "int8-row"])
def test_embeddings(name: str, tied: bool) -> None:
    """They hold no scales: those of which none are needed train on, the others stay packed and are named."""
    model = Tied(tied, torch.bfloat16)
    quantize_(model, config(name), filter_fn=everything)
    before, ids = packed_of(model), torch.arange(9)
    want = model(ids).detach()
    again = name in ("nvfp4", "mxfp4", "mxfp8")
    if tied and not again:
        with pytest.raises(ValueError, match=rf"^embed: .*head.* {name}"):
            unpack_(model)
        assert packed_of(model).keys() == before.keys()
        return
    with warnings.catch_warnings(record=True, action="always") as said:
        unpack_(model)
    named = [w for w in said if issubclass(w.category, AoquantWarning) and str(w.message).startswith("embed: ")]
    assert len(named) == (0 if again else 1)
    assert isinstance(model.embed, QATEmbedding) == again
    assert (model.head.weight is model.embed.weight) == tied and torch.equal(model(ids), want)
    step_by_nothing(model)
    quantize_(model, QATConfig(step="convert"), filter_fn=everything)
    after = packed_of(model)
    assert after.keys() == before.keys() and all(same_bits(after[n], before[n]) for n in before)
    assert (model.head.weight is model.embed.weight) == tied


@pytest.mark.parametrize("name", ["int4-g32", "gridflip-search", "mxfp4"])
def test_conv1d(name: str) -> None:
    model, x = nn.Sequential(Conv1D(64, 256)).bfloat16(), torch.randn(3, 256).bfloat16()
    comes_back(model, name)
    want = model(x).detach()
    unpack_(model)
    assert model[0].weight.shape == (256, 64) and torch.equal(model(x), want)


@pytest.mark.parametrize("name", ["gridflip-search", "nvfp4-search", "fouroversix", "int4-g64"])
def test_training_on_saves_and_loads(name: str) -> None:
    """Load what training changed from the state_dict, into a model that was prepared from floats too."""
    model = model_of(name, torch.float32)
    quantize_(model, config(name))
    unpack_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 512)
    model(x).square().mean().backward()
    optimizer.step()
    fresh = model_of(name, torch.float32)
    quantize_(fresh, QATConfig(config(name), scales="static"))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x)) and not torch.equal(fresh[0].weight, model_of(name, torch.float32)[0].weight)
    other = copy.deepcopy(model)
    quantize_(other, QATConfig(step="convert"))
    assert torch.equal(other(x), model(x))
