"""Stacked experts under calibrated PTQ: codes chosen on each expert's tokens, the same in every form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.moe_models import MODELS, OTHERS, model_of
from torch import Tensor
from torchao.quantization import FqnToConfig

import aoquant
from aoquant import CalibrateConfig, PackedWeightConfig, QATConfig, calibrate_ptq, quantize_
from aoquant.experts.packed_experts import PackedExperts
from aoquant.experts.prepared import QATExperts, QATReadExperts
from aoquant.linear.tensor import same_bits
from aoquant.ptq import experts, gptq
from aoquant.ptq.ptq_report import PTQReport

FORMATS = ["int4-g32", "nvfp4", "mxfp4", "gridflip-row", "fp8-row"]
FAMILIES = [n if n == "qwen3-moe" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS | OTHERS]
pytestmark = pytest.mark.filterwarnings("ignore:.*tokens for K", "ignore:.*too few tokens")


def batches(count: int = 2, tokens: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (16, tokens), generator=generator) for _ in range(count)]


def stacks(model: Any) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, PackedExperts)}


def of_stacks(report: PTQReport, model: Any) -> list[Any]:
    return [row for row in report.rows if row.layer in stacks(model)]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(batches()[0]).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_of_every_family_are_the_same_in_every_form(family: str) -> None:
    """Packed == prepared == converted; and chosen codes lose less than rounded ones."""
    packed, prepared, rounded = (model_of(family) for _ in range(3))
    config = CalibrateConfig(PackedWeightConfig("int4-g32"), asymmetric=False)
    report = calibrate_ptq(packed, batches(), config)
    calibrate_ptq(prepared, batches(), config, step="prepare")
    quantize_(rounded, PackedWeightConfig("int4-g32"))
    mine = of_stacks(report, packed)
    assert len(mine) == len(stacks(rounded)) > 0
    assert sum(r.error for r in mine) < 0.9 * sum(r.nearest for r in mine)
    assert all(not same_bits(p, stacks(rounded)[n]) for n, p in stacks(packed).items())
    wanted = logits(packed)
    assert any(isinstance(m, QATExperts) and m.fake_quant for m in prepared.modules())
    assert torch.equal(logits(prepared), wanted)
    quantize_(prepared, QATConfig(step="convert"))
    assert torch.equal(logits(prepared), wanted)
    assert all(same_bits(p, stacks(prepared)[n]) for n, p in stacks(packed).items())


@pytest.mark.parametrize("format", [n if n == "nvfp4" else pytest.param(n, marks=pytest.mark.slow) for n in FORMATS])
@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_codes_of_every_format_are_saved_and_trained_on(family: str, format: str, tmp_path: Path) -> None:
    packed, prepared = model_of(family), model_of(family)
    config = CalibrateConfig(PackedWeightConfig(format))
    report = calibrate_ptq(packed, batches(), config)
    assert all(0 < r.error < r.nearest for r in of_stacks(report, packed))
    calibrate_ptq(prepared, batches(), config, step="prepare")
    wanted = logits(packed)
    assert torch.equal(logits(prepared), wanted)
    prepared(batches()[0]).logits.float().square().mean().backward()
    torch.optim.SGD(prepared.parameters(), lr=0.0).step()
    quantize_(prepared, QATConfig(step="convert"))
    assert all(same_bits(p, stacks(prepared)[n]) for n, p in stacks(packed).items())
    aoquant.save_pretrained(packed, tmp_path / "saved")
    assert torch.equal(logits(aoquant.load_pretrained(tmp_path / "saved")), wanted)


def test_clip_alone_moves_scales_and_gptq_alone_moves_none() -> None:
    rounded = model_of("qwen3-moe")
    quantize_(rounded, PackedWeightConfig("int4-g32"))
    kept = {n: p.scale.clone() for n, p in stacks(rounded).items()}
    for method in ("gptq", "clip", "clip+gptq"):
        model = model_of("qwen3-moe")
        config = CalibrateConfig(PackedWeightConfig("int4-g32"), method, asymmetric=False)
        calibrate_ptq(model, batches(), config)
        for name, p in stacks(model).items():
            assert torch.equal(p.scale, kept[name]) == (method == "gptq")
            assert not same_bits(p, stacks(rounded)[name])


def test_the_gram_of_an_expert_is_that_of_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare gate and up: x^T x over the tokens that the router gives the expert, padding left out."""
    model, seen = model_of("mixtral").float(), dict[str, Any]()
    routed: list[tuple[Tensor, Tensor]] = []
    grams = experts._grams

    def watch(visit: Any, fqn: str, module: Any, name: str, config: Any) -> Any:
        made = grams(visit, fqn, module, name, config)
        seen[f"{fqn}.{name}"] = [(g.rows, g.total_KK.clone()) for g in made[0]], made[1]
        return made

    monkeypatch.setattr(experts, "_grams", watch)
    ids = batches(1)[0]
    mask = torch.ones_like(ids)
    mask[:, 20:] = 0
    home = "model.layers.0.mlp.experts"

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if args:  # the model's own calls
            routed.append((args[0], args[1]))

    config = CalibrateConfig(PackedWeightConfig("int4-g32"), asymmetric=False)
    handle = model.get_submodule(home).register_forward_pre_hook(note, with_kwargs=True)
    calibrate_ptq(model, [{"input_ids": ids, "attention_mask": mask}], config)
    handle.remove()
    made, tokens = seen[f"{home}.gate_up_proj"]
    x, index = routed[-1][0], routed[-1][1]
    assert tokens == int(mask.sum()) == 320
    assert sum(rows for rows, _ in made) == sum(rows for rows, _ in seen[f"{home}.down_proj"][0]) == 640
    for expert, (rows, gram) in enumerate(made):
        own = x[(index == expert).any(-1) & mask.flatten().bool()]
        assert rows == len(own)
        torch.testing.assert_close(gram.tril(), (own.t() @ own).tril())


def test_stacks_whose_scales_cannot_be_held_are_named() -> None:
    config = FqnToConfig({r"re:.*\.experts": PackedWeightConfig("intx4-g32-hqq")})
    with pytest.raises(ValueError, match=r"(?s)layers\.\*\.mlp\.experts\.gate_up_proj: .*experts\.down_proj: "):
        calibrate_ptq(model_of("qwen3-moe"), batches(1), CalibrateConfig(config), step="prepare")


def test_experts_with_few_tokens_are_counted_and_refused_where_asked() -> None:
    """They are rounded to the nearest; all_experts gives them all tokens."""
    few = batches(1, 8)  # 128 tokens, 32 for each expert, and K is 64
    got, rounded = model_of("qwen3-moe"), model_of("qwen3-moe")
    with pytest.warns(aoquant.AoquantWarning, match="saw too few tokens"):
        report = calibrate_ptq(got, few, CalibrateConfig(PackedWeightConfig("int4-g32")))
    quantize_(rounded, PackedWeightConfig("int4-g32"))
    counted = 0
    for row in of_stacks(report, got):
        for e in range(8):
            nearest = same_bits(got.get_parameter(row.layer).expert(e), rounded.get_parameter(row.layer).expert(e))
            assert nearest == (f" {e} (" in row.note)
            counted += nearest
    assert counted > 8
    model = model_of("qwen3-moe")
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.experts.gate_up_proj: experts .*tokens\).* fewer than 64 tokens.* strict"
    ):
        calibrate_ptq(model, few, CalibrateConfig(PackedWeightConfig("int4-g32"), strict=True))
    assert not any(isinstance(m, QATExperts) for m in model.modules())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    report = calibrate_ptq(model, few, CalibrateConfig(PackedWeightConfig("int4-g32"), strict=True, all_experts=True))
    assert all(row.tokens == 8 * 128 for row in of_stacks(report, model))


def test_all_experts_is_refused_where_no_router_is_seen() -> None:
    model = model_of("llama-4")
    with pytest.raises(ValueError, match=r"experts.*all_experts"):
        calibrate_ptq(model, batches(), CalibrateConfig(PackedWeightConfig("int4-g32"), all_experts=True))
    assert not any(isinstance(m, QATReadExperts) for m in model.modules())


def test_the_asymmetric_target_makes_up_for_earlier_errors() -> None:
    """Float rows are those of the same tokens: the model's output comes nearer."""
    wanted, lost = logits(model_of("mixtral").float()), {}
    for asymmetric in (False, True):
        model = model_of("mixtral").float()
        calibrate_ptq(model, batches(), CalibrateConfig(PackedWeightConfig("intx3-g32"), asymmetric=asymmetric))
        lost[asymmetric] = float((logits(model) - wanted).square().sum())
    assert lost[True] < 0.95 * lost[False]


@pytest.mark.parametrize("step", [pytest.param(None, marks=pytest.mark.slow), "prepare"])
def test_a_calibration_goes_on_with_the_same_experts(step: str | None, tmp_path: Path) -> None:
    """From the first block's file alone, and from all of them."""
    models = [model_of("qwen3-moe") for _ in range(3)]
    config = CalibrateConfig(PackedWeightConfig("int4-g32"))
    reports = [calibrate_ptq(models[0], batches(), config, step=step, checkpoint=tmp_path)]
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    files[1].unlink()
    reports += [calibrate_ptq(m, batches(), config, step=step, checkpoint=tmp_path) for m in models[1:]]
    wanted = logits(models[0])
    for model, report in zip(models, reports, strict=True):
        assert report == reports[0] and torch.equal(logits(model), wanted)
        quantize_(model, QATConfig(step="convert")) if step else None
        assert all(same_bits(p, stacks(models[0])[n]) for n, p in stacks(model).items())


def test_a_method_that_only_scales_inputs_is_refused_for_stacks() -> None:
    model, config = model_of("mixtral"), CalibrateConfig("int4-g32", "awq")
    with pytest.raises(ValueError, match=r"layers\.\*\.mlp\.experts\.gate_up_proj.*gptq or clip"):
        calibrate_ptq(model, batches(), config)
    assert stacks(model) == {}
    report = calibrate_ptq(model, batches(), config, skip_incompatible=True)
    assert of_stacks(report, model) and all("gptq or clip" in row.note for row in of_stacks(report, model))


def test_float16_stacks_are_not_warned_of_for_their_codes(recwarn: pytest.WarningsRecorder) -> None:
    calibrate_ptq(model_of("qwen3-moe").half(), batches(), CalibrateConfig(PackedWeightConfig("int4-g32")))
    assert not [w for w in recwarn if "float16" in str(w.message)]


def test_a_stack_says_which_damping_was_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = gptq.factor
    monkeypatch.setattr(gptq, "factor", lambda gram_KK, damping, order: factor(gram_KK, 10 * damping, order))
    model = model_of("qwen3-moe")
    report = calibrate_ptq(model, batches(), CalibrateConfig(PackedWeightConfig("int4-g32"), damping=0.01))
    rows = of_stacks(report, model)
    assert rows and all(row.damping == 0.1 and "needed damping 0.1" in row.note for row in rows)


def test_a_stack_that_is_not_rounded_has_a_row_without_errors() -> None:
    model = model_of("qwen3-moe")
    config = CalibrateConfig(PackedWeightConfig("high-precision", "int8-row"))
    rows = calibrate_ptq(model, batches(), config, step="prepare").rows
    (note,) = {(r.tokens, r.error, r.nearest, r.damping, r.note) for r in rows if "experts" in r.layer}
    assert note == (0, 0.0, 0.0, 0.0, "its weight is not rounded to codes here")
