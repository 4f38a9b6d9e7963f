"""Calibrated PTQ: the deployed result, exact in every form, better than rounding to nearest; and what it refuses."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.models import SMALL, Unreached, llama, tied
from torch import Tensor, nn
from torchao.prototype.gptq import GPTQConfig
from torchao.quantization import FqnToConfig, Int4WeightOnlyConfig

import aoquant
from aoquant import (
    WUSH,
    CalibrateConfig,
    Hadamard,
    HybridConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    calibrate_ptq,
    quantize_,
)
from aoquant.linear.packed import PackedLinear
from aoquant.linear.prepared import QATLinear
from aoquant.linear.tensor import same_bits
from aoquant.ptq import gptq

CONFIGS: dict[str, Any] = {
    "int4": Int4WeightConfig(32),
    "intx3": PackedWeightConfig("intx3-g32"),
    "intx4-asym": PackedWeightConfig("intx4-g32-asym"),
    "stretched": PackedWeightConfig("stretched2-g32"),
    "int8-activations": PackedWeightConfig("intx4-g32", "int8-row"),
    "fp8": PackedWeightConfig("fp8-128x128"),
    "nvfp4-w4a4": NVFP4WeightConfig(),
    "nvfp4-search": NVFP4WeightConfig(rule="search", activation=None),
    "four-over-six": NVFP4WeightConfig(rule="four_over_six", tile=16),
    "gridflip": PackedWeightConfig("gridflip-search-row"),
    "gridflip-alternating": PackedWeightConfig("gridflip-alternating"),
    "nvfp4-pow2": PackedWeightConfig("nvfp4-pow2"),
    "mxfp4": MXFP4WeightConfig(activation=None),
    "mxfp4-hadamard": MXFP4WeightConfig(transform=Hadamard(32)),
    "q4_0": PackedWeightConfig("q4_0"),
    "q4_1": PackedWeightConfig("q4_1"),
}
PACKED_ONLY: dict[str, Any] = {
    "hqq": PackedWeightConfig("intx4-g32-hqq"),
    "wush": NVFP4WeightConfig(transform=WUSH(16)),
    "static": Int8WeightConfig(activation="int8-tensor-static"),
}


FAST = ("int4", "nvfp4-w4a4", "wush")
EACH = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
EACH_PACKED = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in (*CONFIGS, *PACKED_ONLY)]


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return llama(dtype=dtype, attention_bias=False, num_hidden_layers=1)


def batches(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, SMALL["vocab_size"], (4, 40), generator=generator) for _ in range(count)]


def weights(module: nn.Module) -> dict[str, PackedTensor]:
    return {n: m.weight for n, m in module.named_modules() if isinstance(m, PackedLinear)}


@torch.no_grad()
def outputs(module: Any) -> Tensor:
    return module(batches()[0]).logits


@pytest.mark.parametrize("name", EACH_PACKED)
def test_it_packs_codes_that_lose_less(name: str) -> None:
    """Every layer is packed as `quantize_` packs it, under the same scales, and errs less on what it was shown."""
    got = model()
    report = calibrate_ptq(got, batches(), CalibrateConfig((CONFIGS | PACKED_ONLY)[name], asymmetric=False))
    assert len(report.rows) == len(weights(got)) == 7
    errors, nearest = (sum(getattr(r, f) for r in report.rows) for f in ("error", "nearest"))
    assert 0 < errors < (0.9 if name not in ("fp8", "static") else 1.0) * nearest
    assert all(r.tokens == 320 for r in report.rows)
    assert str(report).count("|") > 20
    if name not in PACKED_ONLY:
        rounded = model()
        quantize_(rounded, CONFIGS[name])
        for fqn, packed in weights(rounded).items():
            mine = weights(got)[fqn]
            assert mine.format == packed.format and not same_bits(mine, packed)
            for part in ("scale", "zero_point", "per_tensor_scale"):
                a, b = getattr(mine, part), getattr(packed, part)
                assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", EACH)
def test_prepared_layers_have_the_same_codes_and_convert_gives_them_back(name: str) -> None:
    """Prepared == packed == converted, after an optimizer step of zero, too."""
    packed, prepared = model(), model()
    calibrate_ptq(packed, batches(), CalibrateConfig(CONFIGS[name]))
    calibrate_ptq(prepared, batches(), CalibrateConfig(CONFIGS[name]), step="prepare")
    wanted = outputs(packed)
    assert sum(isinstance(m, QATLinear) and m.fake_quant for m in prepared.modules()) == 7
    assert torch.equal(outputs(prepared), wanted)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.0)
    prepared(batches()[0]).logits.float().square().mean().backward()
    optimizer.step()
    quantize_(prepared, QATConfig(step="convert"))
    assert torch.equal(outputs(prepared), wanted)
    pairs = weights(prepared)
    assert all(same_bits(pairs[fqn], w) for fqn, w in weights(packed).items())


def test_the_asymmetric_target_makes_up_for_earlier_errors() -> None:
    """The last layer's output is nearer to the float model's than that of layers calibrated for themselves."""
    wanted, lost = outputs(model(torch.float32)), {}
    for asymmetric in (False, True):
        got = model(torch.float32)
        calibrate_ptq(got, batches(), CalibrateConfig(PackedWeightConfig("intx3-g32"), asymmetric=asymmetric))
        lost[asymmetric] = float((outputs(got) - wanted).square().sum())
    assert lost[True] < 0.9 * lost[False]


@pytest.mark.filterwarnings("ignore:.*tokens for K")
def test_padding_does_not_count() -> None:
    """Masked tokens change nothing, whatever they are."""
    ids = batches(1)[0]
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    codes = []
    for filler in (0, 5):
        got = model()
        batch = {"input_ids": ids.masked_fill(mask == 0, filler), "attention_mask": mask}
        report = calibrate_ptq(got, [batch], CalibrateConfig("int4-g32"))
        assert all(r.tokens == 120 for r in report.rows)
        codes.append(weights(got))
    assert all(same_bits(codes[0][n], codes[1][n]) for n in codes[0])


def test_torchao_gptq_config_is_taken() -> None:
    mine, theirs = model(), model()
    calibrate_ptq(
        mine, batches(), CalibrateConfig(Int4WeightConfig(32), asymmetric=False, act_order=False, damping=0.02)
    )
    calibrate_ptq(theirs, batches(), GPTQConfig(step="observe", base_config=Int4WeightConfig(32), percdamp=0.02))
    assert all(same_bits(weights(mine)[n], w) for n, w in weights(theirs).items())


def test_layers_outside_of_lists_are_blocks_of_their_own() -> None:
    """A plain module with a branch: each layer's inputs are those behind the quantised ones before it."""

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x) * torch.sigmoid(self.gate(x)))

    torch.manual_seed(0)
    net, x = Branched(), torch.randn(256, 64)
    report = calibrate_ptq(net, [x], CalibrateConfig("int4-g32", asymmetric=False))
    assert [r.layer for r in report.rows] == ["up", "gate", "down"]
    assert all(r.error < r.nearest for r in report.rows)


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no batches": (lambda: nn.Sequential(nn.Linear(32, 32)), [], {}, "no batches"),
    "no layer": (lambda: nn.Sequential(nn.ReLU()), [X], {}, "no layer is chosen"),
    "lists of tokens": (lambda: nn.Sequential(nn.Linear(32, 32)), [[1, 2, 3]], {}, "batch 0 holds no tensor, got list"),
    "zeros": (
        lambda: nn.Sequential(nn.Linear(32, 32)),
        [X * 0],
        {"config": CalibrateConfig("int4-g32", strict=True)},
        "0: its input was zero in all batches, and strict is set",
    ),
    "one batch": (lambda: nn.Sequential(nn.Linear(32, 32)), X, {}, r"\[batch\]"),
    "unreached": (Unreached, [X], {}, r"layers.1: no batch reaches it"),
    "nan": (lambda: nn.Sequential(nn.Linear(32, 32)), [X / 0 * 0], {}, "0: its input holds NaN or Inf"),
    "tied": (tied, [X], {}, "1: its weight is tied to that of 0"),
    "meta": (lambda: nn.Sequential(nn.Linear(32, 32, device="meta")), [X], {}, "0: its weight is on the meta device"),
    "hqq held": (
        lambda: nn.Sequential(nn.Linear(32, 32)),
        [X],
        {"config": CalibrateConfig(PackedWeightConfig("intx4-g32-hqq")), "step": "prepare"},
        "0: no layer can hold the scales",
    ),
    "second layer": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 30), nn.Linear(30, 32)),
        [X],
        {},
        r"2 \(32, 30\)",
    ),
    "step": (lambda: nn.Sequential(nn.Linear(32, 32)), [X], {"step": "convert"}, "step is None or 'prepare'"),
    "config": (lambda: nn.Sequential(nn.Linear(32, 32)), [X], {"config": "int4-g32"}, "must be a CalibrateConfig"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_that_changes_nothing(case: str) -> None:
    make, given, how, message = BAD[case]
    net = make()
    before = {n: (type(m), dict(m._parameters), set(vars(m))) for n, m in net.named_modules()}
    values = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=message):
        calibrate_ptq(
            net, given, how.get("config", CalibrateConfig("int4-g32")), **{k: v for k, v in how.items() if k == "step"}
        )
    for name, module in net.named_modules():
        cls, parameters, attributes = before[name]
        assert type(module) is cls and set(vars(module)) == attributes
        assert all(module._parameters[n] is p for n, p in parameters.items())
    assert all(v.is_meta or torch.equal(v, values[n]) for n, v in net.state_dict().items())


def test_a_late_failure_restores_layers_that_were_packed() -> None:
    """The second block fails; the first one is float again."""
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    weight = net[0].weight
    net[1].register_forward_hook(lambda m, a, y: y * torch.nan)
    with pytest.raises(ValueError, match="2: its input holds NaN or Inf"):
        calibrate_ptq(net, [X], CalibrateConfig("int4-g32"))
    assert type(net[0]) is nn.Linear and net[0].weight is weight


def test_padding_alone_is_refused_and_few_tokens_are_told() -> None:
    ids = batches(1)[0]
    with pytest.raises(ValueError, match=r"layers.0.*padding"):
        calibrate_ptq(
            model(), [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}], CalibrateConfig("int4-g32")
        )
    with pytest.warns(aoquant.AoquantWarning, match="40 tokens for K = 128"):
        report = calibrate_ptq(model(), [ids[:1]], CalibrateConfig("int4-g32"))
    assert "saw 40 tokens" in report.notes[0]


@pytest.mark.parametrize("arguments", [{"method": "awk"}, {"damping": 0.0}])
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="CalibrateConfig"):
        CalibrateConfig("int4-g32", **arguments)


def test_progress_is_said_in_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line names the block, the layer and its error; without a terminal none redraws itself."""
    monkeypatch.setattr("aoquant._messages.SECONDS", 0.0)
    report = calibrate_ptq(model(), batches(), CalibrateConfig("int4-g32"))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gptq: ")]
    assert lines[0].startswith("gptq: 0 of 7 layers, 0 %, block=1 of 1, ")
    for row, line in zip(report.rows, lines[1:], strict=True):
        assert f"block=1 of 1, layer={row.layer}, error={row.error / row.nearest:.2f} of rounding's" in line
    assert lines[1].endswith("s left") and lines[-1].startswith("gptq: 7 of 7 layers, 100 %")


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4", "int8-weight"])
def test_float16_is_warned_of_for_its_scales_alone(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """Codes of GPTQ err more than the nearest, row by row, and that is no fault of float16."""
    for method in ("gptq", "clip"):
        calibrate_ptq(model(torch.float16), batches(), CalibrateConfig(name, method))
    assert not [w for w in recwarn if "float16" in str(w.message)]
    tiny = model(torch.float16)
    with torch.no_grad():
        tiny.model.layers[0].mlp.up_proj.weight.mul_(2e-4)
    with pytest.warns(aoquant.AoquantWarning, match="up_proj.*float16"):
        calibrate_ptq(tiny, batches(), CalibrateConfig("stretched2-g32/"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="MSLK's kernel may run")
def test_a_tensor_whose_kernel_is_missing_is_packed_with_a_warning() -> None:
    """Blocks behind it see what it would compute, so its codes are those of `step="prepare"`."""
    made, prepared = model(), model()
    with pytest.warns(aoquant.AoquantWarning, match=r"7 converted layer\(s\).* are torchao's Int4Tensor, and raise"):
        report = calibrate_ptq(made, batches(), CalibrateConfig(Int4WeightOnlyConfig(group_size=128)))
    assert sum(r.error for r in report.rows) < 0.9 * sum(r.nearest for r in report.rows)
    calibrate_ptq(prepared, batches(), CalibrateConfig(Int4WeightOnlyConfig(group_size=128)), step="prepare")
    with pytest.warns(aoquant.AoquantWarning, match="raise in forward here"):
        quantize_(prepared, QATConfig(step="convert"))
    for a, b in zip(made.model.layers[0].modules(), prepared.model.layers[0].modules(), strict=True):
        assert type(a) is type(b)
        if isinstance(a, nn.Linear):
            assert type(a.weight.data).__name__ == "Int4Tensor" and repr(a) == repr(b)
            assert torch.equal(a.weight.qdata, b.weight.qdata) and torch.equal(a.weight.scale, b.weight.scale)
            assert a.aoquant_config == b.aoquant_config


def test_embeddings_are_rounded_and_in_the_report() -> None:
    """Alone and beside linear layers; a packed embedding is the one of `quantize_`."""
    wanted = model()
    quantize_(wanted, "int8-weight", filter_fn=lambda m, fqn: isinstance(m, nn.Embedding))
    for kinds in (nn.Embedding, nn.Embedding | nn.Linear):
        got = model()
        report = calibrate_ptq(
            got,
            batches(),
            CalibrateConfig("int8-weight"),
            filter_fn=lambda m, fqn, kinds=kinds: isinstance(m, kinds) and fqn != "lm_head",
        )
        row, *others = report.rows
        assert row.layer == "model.embed_tokens" and len(others) == (0 if kinds is nn.Embedding else 7)
        assert 0 < row.error == row.nearest < 1e-3 and "model.embed_tokens: an embedding" in str(report)
        assert same_bits(got.model.embed_tokens.weight, wanted.model.embed_tokens.weight)


TE_FP8 = "te-fp8-tensor"
UNCHOSEN: dict[str, tuple[Any, str, str | None]] = {
    "float": (PackedWeightConfig("high-precision", "int8-row"), "gptq", None),
    "float-prepared": (PackedWeightConfig("high-precision", "int8-row"), "gptq", "prepare"),
    "delayed": (
        QATConfig(
            PackedWeightConfig(TE_FP8, TE_FP8, contract="fp8_scaled_mm"),
            backward=HybridConfig.bwd(TE_FP8, amax_history=16),
        ),
        "nearest",
        "prepare",
    ),
}


@pytest.mark.parametrize("case", UNCHOSEN)
def test_a_weight_whose_codes_are_not_chosen_is_that_of_quantize_(case: str) -> None:
    """The report says so, counts no tokens and states no error."""
    config, method, step = UNCHOSEN[case]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).bfloat16()
    wanted, given = copy.deepcopy(net), X.bfloat16()
    quantize_(wanted, QATConfig(config) if step and not isinstance(config, QATConfig) else config)
    report = calibrate_ptq(net, [given], CalibrateConfig(config, method), step=step)
    note = "its weight is not rounded to codes here"
    assert [(r.layer, r.tokens, r.error, r.nearest, r.note) for r in report.rows] == [(n, 0, 0, 0, note) for n in "02"]
    assert type(net[0]) is type(wanted[0]) and torch.equal(net(given), wanted(given))


def test_a_layer_whose_input_is_zero_is_said_to_be_rounded(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    nn.init.constant_(net[0].bias, -100.0)
    rounded = copy.deepcopy(net)
    quantize_(rounded, "int4-g32")
    report = calibrate_ptq(net, [X], CalibrateConfig("int4-g32"))
    note = "its input was zero in all batches, and it is rounded to the nearest"
    assert report.notes == [f"2: {note}"] and "| 2 | 1 | int4-g32 | - |" in str(report)
    assert [str(w.message) for w in recwarn if note in str(w.message)] == [
        f"1 layer(s), such as 2: {note}: give batches that use it"
    ]
    assert same_bits(net[2].weight, rounded[2].weight) and not same_bits(net[0].weight, rounded[0].weight)


@pytest.mark.filterwarnings("ignore:.*tokens for K")
@pytest.mark.parametrize("method", ["nearest", "gptq", "clip", "gptq+clip"])
@torch.no_grad()
def test_errors_of_the_report_are_those_of_outputs(method: str) -> None:
    """An embedding has no input, and the error of its weight."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 48, bias=False))
    plain, rounded = copy.deepcopy(net), copy.deepcopy(net)
    by_name = FqnToConfig({name: PackedWeightConfig("intx3-g32") for name in "01"})
    quantize_(rounded, by_name)
    ids = torch.randint(0, 16, (4, 16))
    embedding, linear = calibrate_ptq(net, [ids], CalibrateConfig(by_name, method)).rows
    x_MK = net[0](ids).flatten(0, 1)

    def error(made: Tensor, wanted: Tensor) -> Any:
        return pytest.approx(float((made - wanted).square().sum() / wanted.square().sum()), rel=1e-3)

    every = torch.arange(16)
    assert embedding.error == embedding.nearest == error(net[0](every), plain[0](every))
    assert linear.nearest == error(rounded[1](x_MK), plain[1](x_MK))
    assert linear.error == error(net[1](x_MK), plain[1](x_MK))
    assert (embedding.tokens, linear.tokens) == (0, 64)


@pytest.mark.parametrize(
    ("method", "tokens", "few"),
    [("gptq", 31, 1), ("gptq", 32, 0), ("clip", 31, 1), ("clip", 32, 0), ("awq", 31, 0), ("nearest", 31, 0)],
)
def test_few_tokens_are_fewer_than_inputs_where_codes_are_chosen(
    method: str, tokens: int, few: int, recwarn: pytest.WarningsRecorder
) -> None:
    net = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32))
    (row,) = calibrate_ptq(net, [X[:tokens]], CalibrateConfig("int4-g32", method)).rows
    note = f"saw {tokens} tokens for K = 32"
    assert (row.tokens, row.few, row.note) == (tokens, few, note * few)
    assert sum(note in str(w.message) for w in recwarn) == few


def test_a_row_says_which_damping_was_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = gptq.factor
    monkeypatch.setattr(gptq, "factor", lambda gram_KK, damping, order: factor(gram_KK, 10 * damping, order))
    (row,) = calibrate_ptq(nn.Sequential(nn.Linear(32, 32)), [X], CalibrateConfig("int4-g32", damping=0.01)).rows
    assert (row.damping, row.note) == (0.1, "needed damping 0.1")


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        *(({"alpha": alpha}, 0 <= alpha <= 1) for alpha in (-0.1, 0, 1, 1.1)),
        *(({"damping": damping}, 0 < damping < 1) for damping in (0, 1e-9, 0.999, 1)),
        *(({"grid": grid}, taken) for grid, taken in ((0, False), (1, True), (True, False), (1.0, False))),
    ],
)
def test_arguments_at_the_ends_of_their_ranges(arguments: dict[str, Any], taken: bool) -> None:
    with nullcontext() if taken else pytest.raises(ValueError, match=f"CalibrateConfig: {next(iter(arguments))} is"):
        CalibrateConfig("int4-g32", **arguments)
