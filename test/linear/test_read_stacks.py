"""Stacked experts whose class multiplies by them itself: to the bit what the class computes over quantised weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.expert_cases import Holder, at_once, fake_quantised
from support.moe_models import model_of
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import FqnToConfig
from transformers.models.aria.configuration_aria import AriaTextConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.configuration_longcat_flash import LongcatFlashConfig
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

import aoquant
from aoquant import (
    Int4WeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    explain,
    load_pretrained,
    quantize_,
    save_pretrained,
    unprepare,
    verify,
)
from aoquant.experts.families import stacks_of
from aoquant.experts.packed_experts import PackedExperts
from aoquant.experts.prepared import QATReadExperts

H, WIDTH, E = 64, 96, 4
BF16 = torch.bfloat16


class GroupedExperts(nn.Module):
    """Experts as torchtitan has them, and as its forward reads them."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool = True) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = num_experts, use_grouped_mm
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        if self.use_grouped_mm:
            offsets = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
            h = F.silu(torch._grouped_mm(x.bfloat16(), self.w1.bfloat16().transpose(-2, -1), offs=offsets))
            h = h * torch._grouped_mm(x.bfloat16(), self.w3.bfloat16().transpose(-2, -1), offs=offsets)
            return torch._grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)
        done = []
        for e, rows in enumerate(torch.split(x, num_tokens_per_expert.tolist())):
            h = F.silu(torch.matmul(rows, self.w1[e].transpose(-2, -1)))
            h = h * torch.matmul(rows, self.w3[e].transpose(-2, -1))
            done.append(torch.matmul(h, self.w2[e].transpose(-2, -1)))
        return torch.cat(done)


def routed(top_k: int = 2) -> tuple[Tensor, Tensor]:
    """Experts and weights of 8 tokens. Expert 3 has none."""
    index = torch.stack([torch.randperm(3)[:top_k] for _ in range(8)])
    return index, torch.rand(8, top_k).to(BF16)


SORTED = torch.tensor([3, 0, 4, 1])  # rows of each expert
LONGCAT = {"hidden_size": H, "expert_ffn_hidden_size": WIDTH, "n_routed_experts": E, "zero_expert_num": 1}
STEP = SimpleNamespace(hidden_size=H, moe_intermediate_size=WIDTH, num_local_experts=E, hidden_act="silu")
MADE: dict[str, tuple[Any, Any]] = {
    "llama-4": (
        lambda: Llama4TextExperts(Llama4TextConfig(hidden_size=H, intermediate_size=WIDTH, num_local_experts=E)),
        lambda: (torch.randn(4 * 8, H).to(BF16),),
    ),
    "aria": (
        lambda: AriaExperts(AriaTextConfig(hidden_size=H, intermediate_size=WIDTH, moe_num_experts=E, moe_topk=2)),
        lambda: (torch.randn(8, H).to(BF16), torch.randn(8, E).to(BF16)),
    ),
    "jetmoe": (lambda: JetMoeParallelExperts(E, H, WIDTH), lambda: (torch.randn(8, H).to(BF16), SORTED.tolist())),
    "longcat-flash": (
        lambda: LongcatFlashExperts(LongcatFlashConfig(**LONGCAT)),
        lambda: (torch.randn(8, H).to(BF16), *routed()),
    ),
    "step-3.7": (
        lambda: Step3p7Experts(STEP, swiglu_limit=0.5),
        lambda: (torch.randn(8, H).to(BF16), *routed()),
    ),
    "torchtitan": (lambda: GroupedExperts(H, WIDTH, E), lambda: (torch.randn(8, H).to(BF16), SORTED)),
}


if hasattr(AriaExperts, "_apply_gate"):  # from transformers 5.24 on it has the protocol: see support/expert_cases.py
    del MADE["aria"]


def made(family: str) -> tuple[Holder, tuple[Any, ...]]:
    torch.manual_seed(0)
    make, batch = MADE[family]
    model = Holder(make().to(BF16))
    for p in model.parameters():
        p.data.normal_(0, 0.2)
    return model, batch()


@pytest.mark.parametrize("family", MADE)
def test_weight_only_is_the_class_over_quantised_weights(family: str) -> None:
    """The output and all gradients; converted is prepared; names stay."""
    model, batch = made(family)
    plain, keys = copy.deepcopy(model), list(model.state_dict())
    reference = fake_quantised(model, "mxfp4")
    quantize_(model, QATConfig(MXFP4WeightConfig(activation=None)), strict=True)
    prepared = [m for m in model.modules() if isinstance(m, QATReadExperts)]
    assert prepared and list(model.state_dict()) == keys
    found = []
    for m in (model, reference):
        x = batch[0].clone().requires_grad_()
        y = m(x, *batch[1:])
        y.float().square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in m.parameters())])
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)
    assert not torch.equal(found[0][0], plain(*batch))
    again = copy.deepcopy(model)
    assert unprepare(again) == len(prepared)
    assert torch.equal(again(*batch), plain(*batch))
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(*batch), found[0][0])
    assert all(isinstance(p.data, PackedExperts) for p in model.parameters())


@pytest.mark.parametrize("once", [False, True], ids=["loop", "at once"])
@pytest.mark.parametrize("config", ["int4-g32", "nvfp4", "mxfp4", "fp8", "int8-weight"])
def test_float32_experts_that_their_class_casts_are_converted(
    config: str, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan's forward casts parameters to bfloat16, and their codes are those of the float32 values."""
    if once:
        at_once(monkeypatch)
    model, (x, rows) = made("torchtitan")
    model.float()
    for p in model.parameters():
        p.data.normal_(0, 0.2)  # values that bfloat16 does not have
    rounded = copy.deepcopy(model).bfloat16()
    x = x.float().requires_grad_()
    for m in (model, rounded):
        quantize_(m, QATConfig(config))
    y = model(x, rows)
    y.square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and torch.count_nonzero(p.grad) for p in (x, *model.parameters()))
    assert not torch.equal(y, rounded(x.bfloat16(), rows).float())
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x.detach(), rows), y)


def test_a_cast_that_no_product_is_computed_in_is_refused() -> None:
    class GroupedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(2, 32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w1.to(torch.float64)[0]

    model = Holder(GroupedExperts())
    quantize_(model, QATConfig(Int4WeightConfig(32)))
    with pytest.raises(ValueError, match=r"experts.w1 is torch.float32 and its class casts it to torch.float64"):
        model(torch.randn(3, 32, dtype=torch.float64))


def test_an_input_of_another_dtype_than_the_cast_is_refused() -> None:
    """As the class's own product would; and not multiplied in the cast's dtype."""

    class GroupedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(2, 32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.w1.to(torch.bfloat16)[0])

    model, x = Holder(GroupedExperts()), torch.randn(3, 32)
    quantize_(model, QATConfig(Int4WeightConfig(32)))
    with pytest.raises(ValueError, match=r"input is torch.float32 and its weight torch.bfloat16"):
        model(x)
    assert model(x.bfloat16()).dtype == torch.bfloat16


def test_torchtitans_experts_are_multiplied_at_once_as_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU takes all experts at once: prepared, converted, and rows behind the last expert's."""
    model, (x, rows) = made("torchtitan")
    x = torch.cat([x, x[:2]])
    quantize_(model, QATConfig(NVFP4WeightConfig()))
    wanted = model(x, rows)
    assert torch.count_nonzero(wanted[8:]) == 0
    at_once(monkeypatch)
    assert torch.equal(model(x, rows), wanted)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x, rows), wanted)


@pytest.mark.parametrize("step", ["prepare", "quantize"])
def test_torchtitans_loop_which_packed_experts_cannot_run_is_refused(step: str) -> None:
    model, _ = made("torchtitan")
    model.experts.use_grouped_mm = False
    config = MXFP4WeightConfig(activation=None)
    with pytest.raises(
        ValueError, match=r"(?s)3 layer.*experts\.w1 .*: use_grouped_mm=False .*: set use_grouped_mm=True"
    ):
        quantize_(model, QATConfig(config) if step == "prepare" else config)
    assert type(model.experts) is GroupedExperts


def test_torchtitans_loop_is_not_converted_and_a_quantised_backward_draws() -> None:
    """A loop that is asked for after prepare multiplies quantised weights, too."""
    model, batch = made("torchtitan")
    quantize_(model, QATConfig(MXFP4WeightConfig(activation=None)))
    model.experts.use_grouped_mm = False
    wanted = fake_quantised(model, "mxfp4")(*batch)
    assert not torch.equal(wanted, fake_quantised(model, "int8-row")(*batch))
    assert torch.equal(model(*batch), wanted)
    with pytest.raises(ValueError, match="set use_grouped_mm=True"):
        quantize_(model, QATConfig(step="convert"))
    model.experts.use_grouped_mm = True
    unprepare(model)
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare", backward="quartet2"))
    model.experts.use_grouped_mm = False
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(*batch).float().square().sum().backward()
        grads.append(model.experts.w2.grad)
    assert not torch.equal(grads[0], grads[1])  # other random numbers at the next step
    assert torch.count_nonzero(grads[0][1]) == 0  # an expert without rows


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("einsum", lambda x, w: torch.einsum("tk,enk->ten", x, w)),
        # as if (E, N, K) were (E, K, N), which shapes do not show here
        ("bmm", lambda x, w: torch.bmm(x.expand(2, 3, 32), w)),
        ("matmul", lambda x, w: torch.matmul(x, w[0])),
        ("linear", lambda x, w: F.linear(x, w[0].t())),
        ("_grouped_mm", lambda x, w: torch._grouped_mm(x, w, offs=torch.tensor([1, 3], dtype=torch.int32))),
    ],
)
def test_what_a_stack_cannot_answer_is_an_error_that_names_it(name: str, read: Callable[..., Tensor]) -> None:
    class GroupedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("w1", "w2", "w3"):
                self.register_parameter(name, nn.Parameter(torch.randn(2, 32, 32)))

        def forward(self, x: Tensor) -> Tensor:
            return read(x, self.w1)

    model = Holder(GroupedExperts())
    quantize_(model, QATConfig(Int4WeightConfig(32)))
    with pytest.raises(ValueError, match=rf"experts.w1: its class reads it by {name}, and prepared experts"):
        model(torch.randn(3, 32))
    assert "w1" not in vars(model.experts)  # the parameter is back


def test_dbrx_is_named_with_its_share() -> None:
    """Its experts are stacked into two dimensions, rows of all experts one after another."""
    model = Holder(DbrxExperts(DbrxFFNConfig(hidden_size=H, ffn_hidden_size=WIDTH, moe_num_experts=E)))
    with pytest.raises(ValueError, match=r"experts\.mlp\.w1 \(384, 64\), .*w2 .*100\.0% of the model.*DbrxExpertGLU"):
        quantize_(model, QATConfig("int4-g32-experts"))
    model.head = nn.Linear(H, H)
    found = aoquant.coverage(model)
    assert found.share == 0
    assert {w.names[0] for w in found.unexpected} == {f"experts.mlp.{name}" for name in ("w1", "v1", "w2")}
    with pytest.raises(ValueError, match=r"experts.mlp.w1"):
        quantize_(model, QATConfig(Int4WeightConfig(32)), strict=True)


def test_experts_that_the_recipe_for_experts_does_not_find_are_named() -> None:
    said = r"mlp\.input_linear\.weight .*mlp\.output_linear\.weight .*: the recipe for experts finds none by this name"
    with pytest.raises(ValueError, match=f"strict: 2 matrix.*{said}"):
        quantize_(model_of("jetmoe"), QATConfig("int4-g32-experts"), strict=True)
    with pytest.warns(UserWarning, match=rf"and \d+\.\d% are matrices without support.*{said}"):
        quantize_(model_of("jetmoe"), QATConfig("int4-g32-experts"))


@pytest.mark.parametrize("family", ["llama-4", "jetmoe"])
def test_a_model_is_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model = model_of(family).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    ids = {"input_ids": torch.arange(16).view(2, 8)}
    keys = {"re:.*(experts|(in|out)put_linear)": Int4WeightConfig(32)}  # JetMoE's MLP does not call its experts so
    quantize_(model, QATConfig(FqnToConfig(keys)))
    stacks = [name for m in model.modules() if isinstance(m, QATReadExperts) for name in m.stacks]
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    report = verify(model, converted, ids)
    assert [row.fqn.rpartition(".")[2] for row in report.layers] == stacks
    assert report.min_sqnr == float("inf")
    one = next(m for m in converted.modules() if stacks_of(m))
    assert f"{stacks[0]}: 4 experts of " in str(explain(one))
    save_pretrained(converted, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(load_pretrained(tmp_path / "saved").eval()(**ids).logits, model(**ids).logits)


def test_a_router_among_experts_is_no_expert() -> None:
    model = model_of("jetmoe")
    quantize_(model, "int4-g32-experts")
    states = {
        w.names[0].removeprefix("model.layers.0.self_attention."): w.state for w in aoquant.coverage(model).weights
    }
    assert states["experts.router.layer.weight"] == "default"
    assert states["experts.input_linear.weight"] == "quantised"


def test_an_adapter_on_a_stack_is_refused() -> None:
    model, batch = made("torchtitan")
    quantize_(model, QATConfig(Int4WeightConfig(32)))
    nn.utils.parametrize.register_parametrization(model.experts, "w2", nn.Identity())
    with pytest.raises(ValueError, match=r"experts.w2 is parametrised"):
        model(*batch)


@pytest.mark.parametrize("config", ["int4-g32", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", MADE)
def test_converted_is_prepared_and_unpacked_experts_hold_their_scales(family: str, config: str) -> None:
    """Training goes on from the packed codes, and a converted copy follows it."""
    model, batch = made(family)
    quantize_(model, QATConfig(config))
    y = model(*batch)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(*batch), y)
    converted = copy.deepcopy(model)
    aoquant.unpack_(model)
    assert torch.equal(model(*batch), y)
    with torch.no_grad():
        for p in model.parameters():
            p *= 1.2
    wanted = model(*batch)
    assert not torch.equal(wanted, y)
    aoquant.refresh_(converted, model)
    assert torch.equal(converted(*batch), wanted)
