"""`explain` of a layer: the ranges of M, the reasons, and what forcing changes."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import pytest
import torch
from support.gemm import scaled_mm
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig

import aoquant
from aoquant import NVFP4WeightConfig, QATConfig, backend, explain, ops, quantize_
from aoquant.formats import tiles
from aoquant.ops import Request, codec, router
from aoquant.ops.router import Backend
from aoquant.tools.explain import Routes


def layer(config: Any = None) -> nn.Linear:
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    quantize_(model, QATConfig(config or NVFP4WeightConfig()))
    return model[0]


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more GEMMs: one for M in 3..100, one for M in 90..5000."""

    def within(low: int, high: int) -> Any:
        return lambda r: None if low <= r.m <= high else f"for M from {low} to {high}, got M = {r.m}"[:24]

    monkeypatch.setattr(router, "_backends", list(router._backends))
    router.register(
        Backend("narrow", 40, within(3, 100), lambda c: c), Backend("wide", 30, within(90, 5000), lambda c: c)
    )


def multiplied(found: Routes) -> list[tuple[int, int | None, str | None]]:
    return [(r.first, r.last, r.backend) for r in found.routes if r.step == "multiply"]


@pytest.mark.usefixtures("decoders")
def test_ranges_are_exact() -> None:
    found = explain(layer())
    assert multiplied(found) == [
        (1, 2, "reference"), (3, 89, "narrow"), (90, 100, "narrow"), (101, 5000, "wide"), (5001, None, "reference"),
    ]  # fmt: skip
    printed = [line.strip() for line in str(found).splitlines() if line.startswith("  multiply")]
    for line, (first, last, name) in zip(printed, multiplied(found), strict=True):
        assert line == f"multiply, M = {first}{' and above' if last is None else f' to {last}'}: {name}"
    said = {r.first: dict(r.rows) for r in found.routes if r.step == "multiply"}
    assert said[90]["wide"] == "willing, lower priority" and said[3]["wide"].startswith("for M from 90")
    assert "needs a CUDA device" in said[1]["tensor-cores"]


@pytest.mark.usefixtures("decoders")
@pytest.mark.parametrize("how", ["context", "environment"])
def test_what_is_forced_runs_alone(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "context":
        with backend("wide"):
            found = explain(layer())
    else:
        monkeypatch.setenv("AOQUANT_BACKEND", "wide")
        found = explain(layer())
    starts = [(first, name) for first, _, name in multiplied(found)]
    assert starts == [(1, None), (3, None), (90, "wide"), (101, "wide"), (5001, None)]
    said = {r.first: dict(r.rows) for r in found.routes if r.step == "multiply"}
    assert said[90]["reference"] == "willing, but wide is forced"
    assert "an error" in str(found)


def test_prepared_and_converted_layers_say_the_same_of_their_gemm() -> None:
    m = layer()
    packed = copy.deepcopy(m)
    quantize_(nn.Sequential(packed), QATConfig(step="convert"))
    assert multiplied(explain(m)) == multiplied(explain(packed)) == [(1, None, "reference")]
    steps = [[r.step for r in explain(one).routes] for one in (m, packed)]
    assert steps == [["encode the input", f"{verb} the weight", "multiply"] for verb in ("encode", "decode")]
    text = str(explain(m))
    assert all(
        name in text for name in ("32 x 64", "weight=nvfp4", "encode the input", "reference", "triton", "qutlass")
    )
    weights_alone = explain(layer(NVFP4WeightConfig(activation=None)))
    assert [r.step for r in weights_alone.routes] == ["encode the weight", "multiply"]


@pytest.mark.parametrize("scales", ["dynamic", "static", "learned"])
def test_what_is_under_held_scales_is_said(scales: str) -> None:
    """In the prepared layer: the names of a converted one have the scales in them."""
    config = QATConfig(aoquant.IntxWeightConfig(4, 32, activation="int8-tensor-static"), scales=scales)
    m = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    quantize_(m, config)
    aoquant.calibrate(m, [torch.randn(4, 64).bfloat16()])
    weight = "encode the weight" if scales == "dynamic" else "hold the weight"
    assert [r.step for r in explain(m[0]).routes] == ["hold the input", weight, "multiply"]
    quantize_(m, QATConfig(step="convert"))
    assert [r.step for r in explain(m[0]).routes] == ["encode the input", "decode the weight", "multiply"]


def test_what_decodes_a_packed_weight_without_gradients_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else of the routes changes; what is forced runs alone."""
    m = layer()
    prepared = explain(m)
    quantize_(nn.Sequential(m), QATConfig(step="convert"))
    before = {r.step: r.rows for r in explain(m).routes}
    with backend("reference"):
        forced = explain(m)
    monkeypatch.setattr(aoquant.tools.explain.tensor_cores, "by_csrc", lambda request, w: True)
    after = {r.step: r.rows for r in explain(m).routes}
    assert [step for step in after if after[step] != before[step]] == ["decode the weight"]
    first, *rest = after["decode the weight"]
    assert first == ("aoquant_native::decode_values", "runs") and [name for name, _ in rest] == [
        name for name, _ in before["decode the weight"]
    ]
    assert ("reference", "runs") not in rest and "under autograd" in dict(rest)["reference"]
    with backend("reference"):
        assert explain(m) == forced
    assert explain(layer()) == prepared


def test_a_fixed_weight_is_said_and_is_not_encoded() -> None:
    m = layer()
    outside = explain(m)
    with aoquant.fixed_weights(m):
        inside = explain(m)
        m(torch.randn(2, 64, dtype=torch.bfloat16))
        assert explain(m) == inside  # before the codes are made and after
        assert explain(copy.deepcopy(m)) == outside  # a copy is outside of the block
    assert explain(m) == outside and "fixed" not in str(outside)
    assert inside.layer.startswith(f"{outside.layer}; its weight is fixed")
    assert [r.step for r in inside.routes] == ["encode the input", "decode the weight", "multiply"]
    quantize_(nn.Sequential(m), QATConfig(step="convert"))
    assert inside.routes == explain(m).routes


def test_a_weight_of_codes_alone_is_said_and_is_not_encoded() -> None:
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    masters = aoquant.quantized_model_init(model, aoquant.HybridConfig.fwd_bwd("mxfp8", "mxfp8"))
    found = explain(model[0])
    with aoquant.fixed_weights(model):
        assert explain(model[0]) == found
    masters.restore()
    assert "its weight is codes already" in found.layer
    steps = [[r.step for r in one.routes] for one in (found, explain(model[0]))]
    assert steps == [["encode the input", f"{verb} the weight", "multiply"] for verb in ("decode", "encode")]


def test_nothing_is_made_of_a_packed_weight_whose_codes_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that says so for M up to 16; and the GEMMs of this machine that say so do not call the codec."""
    few = Backend("few", 40, lambda r: None if r.m <= 16 else "for up to 16 rows", lambda c: c, reads_codes=True)
    with monkeypatch.context() as m:
        m.setattr(router, "_backends", list(router._backends))
        router.register(few)
        packed = layer(NVFP4WeightConfig(activation=None))
        prepared = explain(packed)
        quantize_(nn.Sequential(packed), QATConfig(step="convert"))
        converted = explain(packed)
    steps = [[(r.step, r.first, r.last) for r in found.routes] for found in (prepared, converted)]
    gemms = [("multiply", 1, 16), ("multiply", 17, None)]
    assert steps == [[("encode the weight", 1, None), *gemms], [("decode the weight", 17, None), *gemms]]


@pytest.mark.parametrize("name", ["nvfp4", "int8-row", "fp8-tensor"])
def test_backends_that_read_codes_make_no_values_of_the_weight(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    contract = {"nvfp4": "aoquant", "int8-row": "int8_dynamic", "fp8-tensor": "fp8_scaled_mm"}[name]
    fmt = aoquant.get_format(name)
    x, w = (fmt.encode(torch.randn(n, 64).bfloat16()) for n in (3, 32))
    decoded = []
    for module in (codec, tiles):
        real = module.decode
        monkeypatch.setattr(module, "decode", lambda *a, real=real, **k: decoded.append(a) or real(*a, **k))
    request = Request(contract, fmt, fmt, torch.device("cpu"), torch.bfloat16, 3, 32, 64)
    runs = next(b for b, said in explain(request) if said == "runs")
    scaled_mm(x, w, None, name, name, contract, [3], torch.bfloat16)
    assert (runs in ops.code_readers()) == (not decoded) == (name != "nvfp4")


@pytest.mark.parametrize("converted", [False, True])
def test_a_layer_that_has_run_takes_a_backend_that_is_registered_later(
    monkeypatch: pytest.MonkeyPatch, converted: bool
) -> None:
    monkeypatch.setattr(router, "_backends", list(router._backends))
    monkeypatch.setattr(router, "_routes", {})
    made, x, calls = layer(NVFP4WeightConfig(activation=None)), torch.randn(4, 64).bfloat16(), []
    if converted:
        quantize_(nn.Sequential(made), QATConfig(step="convert"))
    reference = next(b for b in router._backends if (b.role, b.name) == ("gemm", "reference"))
    with torch.no_grad():
        before = made(x)
        router.register(Backend("later", 99, lambda r: None, lambda call: calls.append(call) or reference.run(call)))
        assert torch.equal(made(x), before) and len(calls) == 1


def test_what_has_no_router_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    converted = copy.deepcopy(model)
    quantize_(converted, Int8DynamicActivationInt8WeightConfig())
    for what, name in ((model, "Sequential"), (model[0], "Linear"), (converted[0], "Int8Tensor"), ("nvfp4", "str")):
        with pytest.raises(ValueError, match=name):
            explain(what)


@pytest.mark.parametrize(("engine", "gpu"), [("tgi", None), ("vllm", "a100"), ("llama.cpp", "h100"), (None, "h100")])
def test_engines_and_gpus_that_nothing_is_known_of_are_refused(engine: str | None, gpu: str | None) -> None:
    with pytest.raises(ValueError, match=str(gpu or engine)):
        explain(layer(), engine=engine, gpu=gpu)


def test_int4_behind_a_transform_asks_what_the_layer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scales are float32, made from what the transform made; kernels choose by that."""
    asked = []
    monkeypatch.setattr(
        aoquant.tools.explain.ops, "explain", lambda request: asked.append(request) or [("reference", "runs")]
    )
    for recipe, scales in (("int4-g32", torch.bfloat16), ("hadamard16+int4-g32", torch.float32)):
        m = nn.Linear(64, 32).bfloat16()
        quantize_(nn.Sequential(m), QATConfig(aoquant.PackedWeightConfig(recipe), step="prepare"))
        for step in ("prepared", "converted"):
            asked.clear()
            explain(m)
            gemms = [r for r in asked if isinstance(r, Request)]
            assert gemms and all((r.scale_dtype, r.w_format.name) == (scales, "int4-g32") for r in gemms), step
            quantize_(nn.Sequential(m), QATConfig(step="convert")) if step == "prepared" else None


def test_loggers_say_which_kernel_runs_once_for_each_shape() -> None:
    """And what became of each layer."""
    names: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("aoquant")
    handler.emit = lambda record: names.append(record.name)  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        router._routes.clear()
        module, x = layer(), torch.randn(3, 64, dtype=torch.bfloat16)
        module(x)
        first = list(names)
        module(x)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert {"aoquant.quantize", "aoquant.router"} <= set(first) and names == first


@pytest.mark.usefixtures("decoders")
def test_a_reason_may_say_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranges are those of the backend, and no range for each number."""
    router.register(Backend("told", 50, lambda r: None if r.m == 37 else f"takes 37 rows, got {r.m}", lambda c: c))
    ranges = multiplied(explain(layer()))
    assert (37, 37, "told") in ranges and len(ranges) == 7


def test_what_is_no_backend_is_refused_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_backends", list(router._backends))
    before, known = list(router._backends), len(router._backends)
    own = Backend("own", 20, lambda r: None, lambda c: c)
    for wrong, error in [
        (lambda r: None, TypeError),
        (dataclasses.replace(own, priority="20"), TypeError),  # type: ignore[arg-type]
        (dataclasses.replace(own, name=""), TypeError),
        (dataclasses.replace(own, run=None), TypeError),  # type: ignore[arg-type]
        (dataclasses.replace(own, role="gmm"), ValueError),
        (dataclasses.replace(own, name="reference"), ValueError),  # the oracle's
        (own, ValueError),  # twice
    ]:
        with pytest.raises(error):
            router.register(own, wrong)  # type: ignore[arg-type]
        assert router._backends == before
    router.register(own, dataclasses.replace(own, role="decode"))
    assert len(router._backends) == known + 2


@pytest.mark.parametrize("answer", ["", True, False, 0])
def test_an_answer_that_is_no_reason_is_refused(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `explain` says and what runs agree: both ask in one way."""
    monkeypatch.setattr(router, "_backends", list(router._backends))
    monkeypatch.setattr(router, "_routes", {})
    router.register(Backend("own", 20, lambda r: answer, lambda c: c))
    model = layer()
    for ask in (lambda: explain(model), lambda: model(torch.randn(2, 64).bfloat16())):
        with pytest.raises(TypeError, match="'own'"):
            ask()


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (lambda c: None, TypeError),
        (lambda c: torch.zeros(*c.lead, 32), ValueError),  # float32
        (lambda c: torch.zeros(32, 6, dtype=c.dtype), ValueError),
        (lambda c: torch.zeros(6, 32, dtype=c.dtype), ValueError),  # not shaped
        (lambda c: 1 // 0, ZeroDivisionError),
    ],
)
def test_a_kernel_that_returns_something_else_is_named(
    run: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "_backends", list(router._backends))
    monkeypatch.setattr(router, "_routes", {})
    model = nn.Sequential(layer(), nn.Linear(32, 8).bfloat16())
    router.register(Backend("own", 20, lambda r: None, run))
    with pytest.raises(error) as said:
        model(torch.randn(2, 3, 64).bfloat16())
    assert "'own'" in "\n".join((str(said.value), *getattr(said.value, "__notes__", ())))
