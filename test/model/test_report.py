"""Reports: figures against the formula written out here, rows against what was done to the layer, errors by name."""

import copy
import csv
import io
import json
import math
import sys
from collections import UserDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchao.quantization as ao
from torch import Tensor, nn

from aoquant import NVFP4WeightConfig, QATConfig, quantize_
from aoquant import set_fake_quant as switch
from aoquant.ops import native_cpu, router
from aoquant.report import measure, render, report, verify


class Net(nn.Module):
    """Two hidden layers with dropout between them and a head that stays in high precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.5)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.drop(self.down(torch.relu(self.up(x * scale)))))


def hidden(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear) and not fqn.endswith("head")


def batch() -> Tensor:
    return torch.randn(2, 5, 64, dtype=torch.bfloat16)


def forms(config: object, filter_fn=hidden) -> tuple[nn.Module, nn.Module, nn.Module]:
    """(float, prepared, converted) with equal weights."""
    model = Net()
    prepared = copy.deepcopy(model)
    quantize_(prepared, QATConfig(config, step="prepare"), filter_fn)
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(config, step="convert"), filter_fn)
    return model, prepared, converted


def by_hand(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float(10 * torch.log10(a.pow(2).sum() / (a - b).pow(2).sum()))


def test_sqnr_is_the_formula_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure.sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(10 * math.log10(25))
    # squares of 1e30 overflow float32, and 1 + 2^-20 squared needs more than 24 bits
    big, near = torch.tensor([1e30, 1e30]), torch.tensor([1e30, 1.001e30])
    assert measure.sqnr(big, near) == pytest.approx(10 * math.log10(2e60 / 1e54), abs=0.01)
    a, b = torch.randn(7, 9), torch.randn(9, 7).t()
    monkeypatch.setattr(measure, "CHUNK", 10)
    assert measure.sqnr(a, b) == pytest.approx(by_hand(a, b), abs=1e-9)


def test_sqnr_of_equal_different_and_nan() -> None:
    x, nan, zero = torch.ones(4), torch.tensor([1.0, math.nan, 1.0, 1.0]), torch.zeros(4)
    assert measure.sqnr(x, x) == math.inf
    assert measure.sqnr(zero, zero) == math.inf
    assert measure.sqnr(zero, x) == -math.inf
    for a, b in ((x, nan), (nan, x), (nan, nan)):
        assert math.isnan(measure.sqnr(a, b))


def test_float_against_quantised_is_the_quantisation_error_of_each_layer_alone() -> None:
    model, prepared, converted = forms("nvfp4")
    x = batch()
    found = report(model, converted, x)
    assert [r.fqn for r in found.rows] == ["up", "down", "(model output)"]
    model.eval(), converted.eval()
    with torch.no_grad():
        middle = torch.relu(model.up(x))  # the float model's activations feed both layers
        for row, layer, inputs in zip(found.layers, ("up", "down"), (x, middle), strict=True):
            mine, theirs = getattr(model, layer), getattr(converted, layer)
            assert row.weight_sqnr_db == pytest.approx(by_hand(mine.weight, theirs.weight.dequantize()))
            assert row.output_sqnr_db == pytest.approx(by_hand(mine(inputs), theirs(inputs)))
            assert 15 < row.output_sqnr_db < 25
        assert found.output.output_sqnr_db == pytest.approx(by_hand(model(x), converted(x)))
    assert found.min_sqnr == min(r.output_sqnr_db for r in found.layers)
    exact = report(prepared, converted, x)  # of which a picture shows what quantisation costs
    assert [r.quantisation_db for r in exact.layers] == [r.weight_sqnr_db for r in found.layers]


@pytest.mark.parametrize(
    ("config", "format", "backend"),
    [
        ("nvfp4", "nvfp4", "reference"),
        ("mxfp8", "mxfp8", "reference"),
        ("int4-g32", "int4-g32", "reference"),
        ("intx3-g32/", "intx3-g32", "reference"),
        (ao.Int8WeightOnlyConfig(), "int8-row", "reference → torchao"),
        (ao.Int8DynamicActivationInt8WeightConfig(), "int8-row", "torch._int_mm → torchao"),
        (ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)), "intx4-g32", "reference → torchao"),
        (
            ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
            "fp8-row",
            "torch._scaled_mm → torchao",
        ),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, str) else "",
)
def test_prepared_against_converted_is_bit_equal(
    config: object, format: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_cpu, "LIBRARY", Path("absent.so"))  # a checkout may have CPU kernels, and may not
    router._routes.clear()
    _, prepared, converted = forms(config)
    found = verify(prepared, converted, batch())
    assert [(r.weight_sqnr_db, r.output_sqnr_db) for r in found.layers] == [(math.inf, math.inf)] * 2
    assert found.output.output_sqnr_db == math.inf
    assert {r.format for r in found.layers} == {format}
    assert {r.backend for r in found.layers} == {backend}
    assert (found.min_sqnr, found.mean_sqnr, found.not_run) == (math.inf, math.inf, [])


def test_a_kernel_that_cannot_run_is_a_reason_and_not_a_pass() -> None:
    if hasattr(torch.ops.mslk, "bf16i4bf16_rowwise"):
        pytest.skip("mslk is installed")

    def only_up(module: nn.Module, fqn: str) -> bool:
        return fqn == "up"

    model, prepared, converted = forms(ao.Int4WeightOnlyConfig(group_size=64), only_up)
    for m in (prepared, converted):
        quantize_(m, "mxfp8", lambda module, fqn: fqn == "down")
    x = batch()
    for a, b in ((prepared, converted), (converted, prepared), (model, converted), (converted, model)):
        up, down, output = report(a, b, x).rows
        assert up.output_sqnr_db is output.output_sqnr_db is None
        assert "mslk" in up.warning and "up" in output.warning
        assert None not in (up.weight_sqnr_db, down.output_sqnr_db)
        if model not in (a, b):
            assert up.weight_sqnr_db == down.output_sqnr_db == math.inf

    down = report(converted, model, x).layers[1]  # b drives, and a is still what b is measured against
    with torch.no_grad():
        middle = torch.relu(model.up(x))
        assert down.output_sqnr_db == pytest.approx(by_hand(converted.down(middle), model.down(middle)), abs=1e-9)

    with pytest.raises(ValueError, match=r"\n  up: .*mslk"):
        verify(prepared, converted, x)
    assert verify(prepared, converted, x, allow_not_run=True).not_run == ["up"]

    both = report(converted, copy.deepcopy(converted), x)  # neither can drive past up
    assert both.not_run == ["up", "down"]
    assert math.isnan(both.min_sqnr)
    assert all("mslk" in r.warning for r in both.rows)


def test_verify_names_the_layer_that_differs_and_no_other() -> None:
    _, prepared, converted = forms("nvfp4")
    converted.down.weight.qdata[3, 3] ^= 1
    x = batch()
    with pytest.raises(ValueError, match=r"down \(64, 128\)") as error:
        verify(prepared, converted, x)
    assert "up (" not in str(error.value)
    low = report(prepared, converted, x)
    floor = min(low.min_sqnr, *(r.weight_sqnr_db for r in low.layers))
    assert 20 < floor < math.inf
    verify(prepared, converted, x, min_db=floor)
    with pytest.raises(ValueError, match="1 of 3"):
        verify(prepared, converted, x, min_db=math.nextafter(floor, math.inf))
    converted.up.weight.scale.view(torch.uint8)[0, 0] = 127  # NaN
    with pytest.raises(ValueError, match=r"up .*nan dB"):
        verify(prepared, converted, x, min_db=0)


def test_verify_reads_the_output_where_every_layer_is_equal_alone() -> None:
    """Errors that add up in it are not held against it; a difference outside the layers is."""
    model, prepared, converted = forms("nvfp4")
    x = batch()
    found = verify(model, converted, x, min_db=16.5)
    assert found.output.output_sqnr_db < 16.5 < found.min_sqnr
    converted.head.bias.data += 1
    with pytest.raises(ValueError, match=r"1 of 3 .*\n  \(model output\)"):
        verify(prepared, converted, x)


def test_models_are_left_as_they_were() -> None:
    _, prepared, converted = forms("nvfp4")
    prepared(batch()), converted(batch())  # the first forward after prepare, and after convert, is watched
    prepared.train(), converted.train()
    prepared.down.eval()
    before = [
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in n.modules()]
        for n in (prepared, converted)
    ]
    x, state = batch(), torch.get_rng_state()
    verify(prepared, converted, x)  # inf although both are in train mode: dropout is off inside
    with pytest.raises(ValueError, match="does not run this batch"):
        report(prepared, converted, {"x": x, "scale": "two"})
    assert torch.equal(torch.get_rng_state(), state)
    after = [
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in n.modules()]
        for n in (prepared, converted)
    ]
    assert after == before
    assert all(p.grad is None for p in prepared.parameters())


def test_both_models_draw_the_same_random_numbers() -> None:
    _, prepared, converted = forms("nvfp4")
    for model in (prepared, converted):
        model.drop.register_forward_hook(lambda module, args, y: y + torch.randn_like(y))
    state = torch.get_rng_state()
    verify(prepared, converted, batch := torch.ones(2, 64, dtype=torch.bfloat16))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(prepared(batch), prepared(batch))


def test_compiled_models_are_compared_in_eager_mode() -> None:
    _, prepared, converted = forms("nvfp4")
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph

    converted.compile(backend=record)
    found = verify(torch.compile(prepared, backend=record), converted, batch())
    assert [r.fqn for r in found.layers] == ["up", "down"]
    assert not graphs


class Twice(nn.Module):
    """One layer called twice, under two names, and one more that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b = self.a
        self.c = nn.Linear(64, 64)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(x))))


def test_shared_modules_have_one_row_of_all_calls_and_tied_weights_count_once() -> None:
    model = Twice()
    converted = copy.deepcopy(model)
    quantize_(converted, "mxfp8")
    x = torch.randn(3, 64)
    found = report(model, converted, x)
    assert [r.fqn for r in found.layers] == ["a", "c"]
    with torch.no_grad():
        y = model.a(x)
        calls = [torch.cat([m.a(x), m.a(y)]) for m in (model, converted)]
    assert found.layers[0].output_sqnr_db == pytest.approx(by_hand(*calls))
    assert found.bytes_before == 64 * 64 * 4
    assert found.bytes_after == 64 * (64 + 2)
    assert found.model_bytes == (64 * 64 * 4 + 2 * 64 * 4, 64 * 66 + 2 * 64 * 4)


def test_bytes_and_bits_are_those_of_the_stored_tensors() -> None:
    model, prepared, converted = forms("nvfp4")
    planned, stored = report(model, prepared, batch()), report(model, converted, batch())
    for row, plan in zip(stored.layers, planned.layers, strict=True):
        weight = getattr(converted, row.fqn).weight
        held = sum(t.numel() * t.element_size() for t in weight.encoded[:4] if t is not None)
        assert row.bytes == plan.bytes == held
        assert row.bits_per_weight == 8 * held / weight.numel()
        assert row.shape == tuple(weight.shape)
    assert stored.bytes_before == 2 * 2 * 64 * 128
    assert stored.mean_bits == pytest.approx(8 * stored.bytes_after / (2 * 64 * 128))


def test_a_layer_that_is_not_reached_is_not_a_pass() -> None:
    _, prepared, converted = forms("nvfp4")
    for model in (prepared, converted):
        model.spare = copy.deepcopy(model.up)
    row = report(prepared, converted, batch()).layers[-1]
    assert (row.fqn, row.output_sqnr_db) == ("spare", None)
    with pytest.raises(ValueError, match="spare: not run"):
        verify(prepared, converted, batch())
    converted.head.bias.data += 1
    with pytest.raises(ValueError, match=r"\n  \(model output\)"):
        verify(prepared, converted, batch(), allow_not_run=True)
    with pytest.raises(ValueError, match="4 of 4"):
        verify(prepared, converted, batch()[:0])  # no row, nothing compared


class Again(Net):
    """Run one layer twice, for the same output."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.up(x * scale)
        return super().forward(x, scale)


def test_a_layer_that_runs_more_often_in_one_model_is_named() -> None:
    _, prepared, converted = forms("nvfp4")
    converted.__class__ = Again
    for a, b, calls in ((prepared, converted, (1, 2)), (converted, prepared, (2, 1))):
        up, down = report(a, b, batch()).layers
        assert (up.calls, down.calls, down.warning) == (calls, (1, 1), "")
        assert up.warning == f"its forward ran {calls[0]} time(s) in model_a and {calls[1]} in model_b"
        with pytest.raises(
            ValueError, match=r"1 layer\(s\) do not run equally often in both models:\n  up: its forward"
        ):
            verify(a, b, batch())


def test_batches_of_every_kind_and_autocast() -> None:
    model, prepared, converted = forms("nvfp4")
    x = batch()
    doubled = report(model, converted, x * 2).output.output_sqnr_db
    for given in ((x, 2.0), [x, 2.0], {"x": x, "scale": 2.0}, UserDict(x=x, scale=2.0)):  # BatchEncoding is a UserDict
        assert report(model, converted, given).output.output_sqnr_db == doubled
    prepared.float(), converted.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert verify(prepared, converted, x.float()).min_sqnr == math.inf


def test_saturated_values_and_floored_blocks_are_counted_and_warned_about() -> None:
    model = Net()
    with torch.no_grad():
        model.up.weight.fill_(0.001)[:, 0] = 100.0  # 3 of 4 blocks of 16 fall below the smallest e4m3 scale
    fine, floored = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(floored, "nvfp4", hidden)
    up, down, _ = report(model, floored, batch()).rows
    assert (up.floored_share, up.saturated_share) == (0.75, 0.0)
    assert "75.0%" in up.warning and (down.floored_share, down.warning) == (0.0, "")

    quantize_(fine, NVFP4WeightConfig(outer="static", pts=1e-3), hidden)  # reaches 2688 * 1e-3
    up = report(model, fine, batch()).layers[0]
    assert up.saturated_share == 1 / 64
    assert up.warning == ""  # one value a block
    with torch.no_grad():
        model.up.weight[:, :16] = 100.0
    up = report(model, fine, batch()).layers[0]
    assert up.saturated_share == 0.25 and "25.0%" in up.warning

    packed = report(floored, copy.deepcopy(floored), batch()).layers[0]
    assert (packed.floored_share, packed.saturated_share) == (0.75, None)


def changed(**children: nn.Module) -> Net:
    net = Net()
    for name, child in children.items():
        setattr(net, name, child.bfloat16())
    return net


def test_models_and_batches_that_do_not_go_together_are_refused_by_name() -> None:
    model, _, converted = forms("nvfp4")
    x, fails = batch(), changed(head=nn.Linear(32, 16))  # fails behind layers that ran
    for a, b, given, name in (
        (model, copy.deepcopy(model), x, "prepared or quantised"),
        (converted, converted, x, r"up: .*deepcopy"),
        (nn.Sequential(converted), converted, x, "up: "),
        (changed(up=nn.Linear(64, 32)), converted, x, r"up: .*\(32, 64\) and \(128, 64\)"),
        (model, converted, "text", "batch .*str"),
        (fails, converted, x, "model_a .*RuntimeError"),
        (converted, fails, x, "model_b .*RuntimeError"),
        (model, converted, {"y": x}, "model_a .*'y'"),
    ):
        with pytest.raises(ValueError, match=name):
            report(a, b, given)


def test_every_form_of_a_report_holds_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inf, a finite number, and what was not measured; JSON is strict; a missing package is named with its extra."""
    _, prepared, converted = forms("nvfp4")
    converted.down.weight.qdata[3, 3] ^= 1
    for model in (prepared, converted):
        model.spare = copy.deepcopy(model.up)
    switch(prepared.up, False)
    assert "off in model_a" in report(prepared, converted, batch()).layers[0].warning
    switch(prepared.up, True)
    found = report(prepared, converted, batch())
    names, down = ["up", "down", "spare", "(model output)"], found.layers[1].output_sqnr_db
    found.save(tmp_path / "new" / "folder")
    files = {p.name: p.read_bytes() for p in (tmp_path / "new" / "folder").iterdir()}
    assert sorted(files) == ["report.csv", "report.json", "report.md", "report.png"]
    assert files["report.png"].startswith(b"\x89PNG")

    data = json.loads(files["report.json"], parse_constant=lambda constant: pytest.fail(constant))
    assert [r["output_sqnr_db"] for r in data["rows"]] == ["inf", down, None, found.output.output_sqnr_db]
    assert data["rows"][0]["shape"] == [128, 64] and data["totals"]["not_run"] == ["spare"]
    assert data["totals"]["min_sqnr_db"] == down == found.mean_sqnr
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [r["fqn"] for r in rows] == names and [r["output_sqnr_db"] for r in rows[:3]] == ["inf", str(down), ""]
    lines = found.to_markdown().splitlines()
    assert len({line.count("|") for line in lines[:6]}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:6]] == names
    assert f"{found.bytes_before:,} → {found.bytes_after:,} bytes" in lines[-1]

    for module, extra in (("tabulate", "cli"), ("matplotlib.figure", "plot")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=rf"aoquant\[{extra}\]"):
                found.save(tmp_path / extra)
        assert {"report.csv", "report.json"} <= {p.name for p in (tmp_path / extra).iterdir()}


def test_what_is_not_exact_or_did_not_run_is_not_called_exact() -> None:
    _, prepared, converted = forms("nvfp4")
    rows = list(report(prepared, converted, batch()).layers)
    assert "all 2 layer" in render.bit_equal(rows)
    assert "1 did not run" in render.bit_equal([replace(rows[0], output_sqnr_db=None), rows[1]])
    assert "all 2 layer" in render.bit_equal([replace(rows[0], quantisation_db=None), rows[1]])
    assert render.bit_equal([replace(r, quantisation_db=None) for r in rows]) == ""
    for wrong in ({"output_sqnr_db": 90.0}, {"weight_sqnr_db": math.nan}):
        assert render.bit_equal([replace(rows[0], **wrong), rows[1]]) == ""
    assert render.bit_equal([replace(r, output_sqnr_db=None) for r in rows]) == render.bit_equal([]) == ""
