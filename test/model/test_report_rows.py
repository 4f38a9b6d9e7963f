"""Rows of a report: the fields of a layer and of stacked experts, what a row warns of, and what verify makes of it."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchao.quantization as ao
from support.expert_cases import FAMILIES
from support.models import TiedLM
from support.training_cases import batch, student
from torch import Tensor, nn

import aoquant
from aoquant import Int4WeightConfig, QATConfig, quantize_, report, verify
from aoquant import set_fake_quant as switch
from aoquant.planning.sizes import stored_bytes
from aoquant.report import measure
from aoquant.report.compare import why
from aoquant.report.measure import sqnr
from aoquant.report.rows import Row


def forms(config: Any, **changes: Any) -> tuple[nn.Sequential, nn.Sequential, nn.Sequential]:
    """(float, prepared, converted) with equal weights."""
    plain = student(None)
    prepared = copy.deepcopy(plain)
    quantize_(prepared, QATConfig(config, step="prepare", **changes))
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    return plain, prepared, converted


def rows(a: nn.Module, b: nn.Module) -> list[Any]:
    return list(report(a, b, batch()[0], progress=False).layers)


def test_a_row_names_formats_activations_and_backends_of_both_sides() -> None:
    plain, prepared, converted = forms("nvfp4")
    other = copy.deepcopy(plain)
    quantize_(other, "mxfp8")
    found = {
        "plain": rows(plain, converted)[0],
        "same": rows(prepared, converted)[0],
        "other": rows(converted, other)[0],
        "back": rows(other, plain)[0],
    }
    assert {n: (r.format, r.activation) for n, r in found.items()} == {
        "plain": ("nvfp4", "nvfp4-row"),
        "same": ("nvfp4", "nvfp4-row"),
        "other": ("nvfp4 → mxfp8", "nvfp4-row → mxfp8"),
        "back": ("mxfp8", "mxfp8"),
    }
    assert found["plain"].backend.startswith("torch → ") and found["back"].backend.endswith(" → torch")
    assert {n: r.batch_invariant for n, r in found.items()} == dict.fromkeys(found, True)
    assert found["plain"].bytes == found["same"].bytes == stored_bytes(converted[0].weight)
    assert found["other"].bytes == found["back"].bytes == stored_bytes(other[0].weight)
    assert {r.calls for r in found.values()} == {(1, 1)} and {r.warning for r in found.values()} == {""}
    for name, row in found.items():
        assert (row.quantisation_db is None) == (name != "same") and row.weight_gradient_sqnr_db is None


def test_torchaos_tensors_have_their_classes_names() -> None:
    plain, other = student(None), student(None)
    ao.quantize_(other, ao.Int8WeightOnlyConfig())
    for a, b, backend in ((plain, other, "torch → torchao"), (other, plain, "torchao → torch")):
        row = rows(a, b)[0]
        assert (row.format, row.activation, row.backend) == (type(other[0].weight).__name__, "", backend)
        assert row.batch_invariant is row.saturated_share is row.floored_share is row.quantisation_db is None
        assert row.bytes == stored_bytes(other[0].weight) and 20 < row.weight_sqnr_db < 60


def test_scales_of_all_rows_are_no_rows_own() -> None:
    plain, own, other = student(None), student(QATConfig("fp8-hybrid", step="prepare")), student(QATConfig("nvfp4"))
    assert {r.batch_invariant for r in rows(plain, own)} == {r.batch_invariant for r in rows(own, other)} == {False}


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4-h32", "int4-g32", "int8-weight", "gridflip", "nvfp4-wush"])
def test_bytes_that_are_planned_are_stored(name: str) -> None:
    plain, prepared = student(None), student(QATConfig(name))
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    for one, layer in zip(rows(plain, prepared), (converted[0], converted[2]), strict=True):
        assert one.bytes == stored_bytes(layer.weight) and one.bits_per_weight == 8 * one.bytes / layer.weight.numel()


@pytest.mark.parametrize("side", ["a", "b"])
def test_fake_quantisation_that_is_off_is_said_of_its_side(side: str) -> None:
    _, one, _ = forms("nvfp4")
    models = one, copy.deepcopy(one)
    switch(models["ab".index(side)], False)
    for row in rows(*models):
        assert f"off in model_{side}" in row.warning and row.warning.count("off in") == 1
        assert 10 < row.weight_sqnr_db < 40 and "torch" in row.backend.split(" → ")["ab".index(side)]
    (off, *_) = rows(*models[::-1])
    assert off.calls == (1, 1)


@pytest.mark.parametrize("side", [0, 1])
def test_a_nan_of_either_side_is_said(side: int) -> None:
    plain, _, converted = forms("nvfp4")
    models = plain, converted
    with torch.no_grad():
        plain[0].weight[3, 3] = math.nan
    first, second = rows(*models) if side == 0 else rows(*models[::-1])
    assert math.isnan(first.weight_sqnr_db) and "NaN" in first.warning
    assert not math.isnan(second.weight_sqnr_db)
    assert math.isnan(second.output_sqnr_db) == ("NaN" in second.warning) == (side == 0), "the first model drives"


def test_weights_that_cannot_be_told_are_compared_by_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, prepared, converted = forms("nvfp4")
    monkeypatch.setattr(measure, "has_value", lambda w: False)
    for a, b in ((plain, converted), (converted, plain), (prepared, converted)):
        row = rows(a, b)[0]
        assert row.weight_sqnr_db is None and row.quantisation_db is None and row.output_sqnr_db is not None
        assert row.warning.startswith("weights not compared: ValueError: PackedTensor")
    converted[0].weight.qdata[0, 0] ^= 1
    with pytest.raises(ValueError, match=r"0 \(96, 64\): output .* weight not measured"):
        verify(prepared, converted, batch()[0])


@pytest.mark.filterwarnings("ignore:.*smallest scale that nvfp4 stores")
@pytest.mark.parametrize(("blocks", "warns"), [(1, False), (2, True)])
def test_a_hundredth_of_the_blocks_may_be_on_the_floor(blocks: int, warns: bool) -> None:
    plain = nn.Sequential(nn.Linear(16, 100, bias=False))
    with torch.no_grad():
        plain[0].weight.fill_(1.0)[:blocks] = 1e-6
        plain[0].weight[-1, 0] = 1000.0
    packed = copy.deepcopy(plain)
    quantize_(packed, "nvfp4")
    (row,) = report(plain, packed, torch.ones(1, 16), progress=False).layers
    assert row.floored_share == blocks / 100
    assert (f"{row.floored_share:.1%} of the blocks" in row.warning) == warns


@pytest.mark.parametrize(("values", "warns"), [(116, False), (117, True)])
@pytest.mark.parametrize("side", ["prepared", "packed"])
def test_one_value_a_block_and_a_hundredth_may_saturate(side: str, values: int, warns: bool) -> None:
    """116 of 1600 values, in blocks of 16, are 1/16 + 1/100."""
    plain = nn.Sequential(nn.Linear(16, 100, bias=False))
    with torch.no_grad():
        plain[0].weight.fill_(1.0).view(-1)[:values] = 100.0
    other, config = copy.deepcopy(plain), aoquant.NVFP4WeightConfig(outer="static", pts=1e-3)  # reaches 2.688
    quantize_(other, config if side == "packed" else QATConfig(config, step="prepare"))
    (row,) = report(plain, other, torch.ones(1, 16), progress=False).layers
    assert row.saturated_share == values / 1600 and row.floored_share == 0.0
    assert (f"{row.saturated_share:.1%} of the values" in row.warning) == warns


def test_an_embedding_has_no_activation_and_no_gemm() -> None:
    plain = TiedLM(tied=False)
    prepared = copy.deepcopy(plain)
    quantize_(prepared, QATConfig("mxfp8/", step="prepare"), lambda m, fqn: isinstance(m, nn.Embedding))
    (row,) = report(plain, prepared, torch.arange(6).view(2, 3), progress=False).layers
    assert (row.format, row.activation, row.backend) == ("mxfp8", "", "torch → lookup")


class Routed(nn.Module):
    """Experts alone, whose tokens go to two of them each."""

    def __init__(self, family: str) -> None:
        super().__init__()
        kind, config = FAMILIES[family]
        config._experts_implementation = "eager"
        self.experts = kind(config)
        with torch.no_grad():
            for p in self.experts.parameters():
                p.normal_(0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(2 * len(x)).view(-1, 2) % self.experts.num_experts
        return self.experts(x, chosen, torch.full(chosen.shape, 0.5))


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_stacked_experts_have_a_row_for_each_parameter(family: str) -> None:
    plain, x = Routed(family), torch.randn(6, 64)
    prepared = copy.deepcopy(plain)
    quantize_(prepared, QATConfig(Int4WeightConfig(32), step="prepare"))
    converted, off = copy.deepcopy(prepared), copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    switch(off, False)
    for a, b in ((plain, prepared), (plain, converted), (prepared, converted), (converted, off)):
        found = report(a, b, x, progress=False)
        assert [r.fqn for r in found.layers] == ["experts.gate_up_proj", "experts.down_proj"]
        for row in found.layers:
            name = row.fqn.partition(".")[2]
            weight, packed = getattr(plain.experts, name), getattr(converted.experts, name)
            cost = sqnr(weight, packed.dequantize())
            assert row.shape == tuple(weight.shape) and row.format == "int4-g32" and row.backend == "grouped"
            assert row.bytes == stored_bytes(packed) and row.bits_per_weight == 8 * row.bytes / weight.numel()
            assert row.weight_sqnr_db == (math.inf if a is prepared else pytest.approx(cost, abs=0.2))
            wanted = {(plain, prepared): cost, (prepared, converted): cost, (converted, off): math.inf}.get((a, b))
            assert row.quantisation_db == wanted
            assert row.output_sqnr_db == found.layers[0].output_sqnr_db
        assert found.bytes_before == sum(4 * p.numel() for p in plain.parameters() if p.dim() == 3)
        assert found.bytes_after == sum(r.bytes for r in found.layers)


def test_verify_reads_all_weights_and_outputs_at_its_limit() -> None:
    plain, _, converted = forms("nvfp4")
    found, x = report(plain, converted, batch()[0], progress=False), batch()[0]
    lowest = min(v for r in found.layers for v in (r.weight_sqnr_db, r.output_sqnr_db))
    assert verify(plain, converted, x, min_db=lowest).layers == found.layers
    with pytest.raises(ValueError, match="1 of 3 row"):
        verify(plain, converted, x, min_db=math.nextafter(lowest, math.inf))
    with pytest.raises(ValueError, match=r"2 of 3 row\(s\)") as said:
        verify(plain, converted, x, min_db=99)
    assert [line.split()[0] for line in str(said.value).splitlines()[1:]] == sorted(
        "02", key={r.fqn: r.output_sqnr_db for r in found.layers}.__getitem__
    )


def test_long_reasons_are_one_line_of_two_hundred_characters() -> None:
    assert why(KeyError("a\n  b")) == "KeyError: 'a\\n b'"
    assert why(ValueError("a\n  b")) == "ValueError: a b"
    assert why(ValueError("x" * 300)) == f"ValueError: {'x' * 200}"


@pytest.mark.parametrize("quantised", ["a", "b"])
def test_layers_and_experts_that_are_no_forms_of_one_another_are_refused_by_name(quantised: str) -> None:
    def said(one: nn.Module, other: nn.Module, x: Tensor) -> str:
        quantize_(one, Int4WeightConfig(32))
        with pytest.raises(ValueError, match="two forms of one model") as error:
            report(*((one, other) if quantised == "a" else (other, one)), x, progress=False)
        return str(error.value)

    bare = student(None)
    bare[0] = nn.Identity()
    assert said(student(None), bare, batch()[0]).startswith("0: is quantised in one model")
    few = Routed("mixtral")
    few.experts.down_proj = nn.Parameter(few.experts.down_proj[:3].detach())
    assert said(Routed("mixtral"), few, torch.randn(6, 64)).startswith("experts: the weights have shapes")


class Adapter(nn.Module):
    """An adapter on a layer, as peft's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.merged = layer, False

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


def test_adapters_of_one_model_have_to_be_merged_and_those_of_both_do_not() -> None:
    plain, _, converted = forms("nvfp4")
    floats, adapted = copy.deepcopy(plain), copy.deepcopy(converted)
    floats[2], adapted[2] = Adapter(floats[2]), Adapter(adapted[2])
    for a, b, side in ((adapted, plain, "a"), (plain, adapted, "b")):
        with pytest.raises(ValueError, match=rf"model_{side} has adapters that are not merged \(2\)"):
            report(a, b, batch()[0], progress=False)
    wanted = [(r.weight_sqnr_db, r.output_sqnr_db) for r in rows(plain, converted)]
    assert [(r.weight_sqnr_db, r.output_sqnr_db) for r in rows(floats, adapted)] == wanted
    assert [r.fqn for r in rows(floats, adapted)] == ["0", "2.base_layer"]


def test_layers_behind_two_failures_keep_the_reason_of_the_model_that_ran_last() -> None:
    _, prepared, converted = forms("nvfp4")

    def failing(said: str) -> Any:
        def forward(x: Tensor) -> Tensor:
            raise RuntimeError(said)

        return forward

    prepared[0].forward, converted[0].forward = failing("first"), failing("second")  # type: ignore[method-assign]
    found = report(prepared, converted, batch()[0], progress=False)
    assert [("first" in r.warning, "second" in r.warning) for r in found.rows] == [(False, True)] * 2 + [(True, False)]


def test_what_did_not_run_is_no_pass_unless_it_is_allowed() -> None:
    """All of it is counted, and what ran is verified all the same."""
    _, prepared, converted = forms("nvfp4")
    for model in (prepared, converted):
        model.spare = copy.deepcopy(model[0])
        model.forward = lambda x, own=model: own[2](own[1](own[0](x)))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"1 of 4 row\(s\) were not run") as error:
        verify(prepared, converted, batch()[0])
    assert "spare: not run" in str(error.value)
    assert verify(prepared, converted, batch()[0], allow_not_run=True).not_run == ["spare"]
    converted[2].weight.qdata[0, 0] ^= 1
    with pytest.raises(ValueError, match=r"1 of 4 row\(s\) are below inf dB:\n  2 "):
        verify(prepared, converted, batch()[0], allow_not_run=True)


def test_the_worst_layer_is_named_first_whether_its_weight_or_its_outputs_are_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dbs = {"a": (5.0, 30.0), "b": (20.0, 20.0), "c": (40.0, 10.0), "d": (30.0, math.nan), "e": (50.0, None)}
    layers = tuple(Row(name, weight_sqnr_db=w, output_sqnr_db=y) for name, (w, y) in dbs.items())
    _, model, converted = forms("nvfp4")
    found = replace(report(model, converted, batch()[0], progress=False), layers=layers)
    monkeypatch.setattr(sys.modules["aoquant.report"], "report", lambda *args, **kwargs: found)
    with pytest.raises(ValueError, match=r"4 of 6 row\(s\) are below 25.0 dB") as error:
        verify(model, converted, batch()[0], min_db=25.0, allow_not_run=True)
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]] == ["d", "a", "c", "b"]
