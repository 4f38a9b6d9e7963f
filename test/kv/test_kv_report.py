"""KV caches in report, verify, coverage and explain: rows, refusals, and figures that other code finds too."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kv_models import IDS, SOME_SLOW, model, of, prepared
from torchao.quantization import FqnToConfig
from transformers import DynamicCache

import aoquant
from aoquant import KVCacheConfig, QATConfig, quantize_
from aoquant.formats.kv import KV_NAMES
from aoquant.kv import hook
from aoquant.ops import kv
from aoquant.report.cache_rows import caches_of
from aoquant.report.measure import sqnr

LAYER = "model.layers.1.self_attn"


def pair(family: str = "llama", **config: Any) -> tuple[Any, Any]:
    made = prepared(family, **config)
    served = copy.deepcopy(made)
    quantize_(served, QATConfig(step="convert"))
    return made, served


@pytest.mark.parametrize("family", SOME_SLOW)
@pytest.mark.parametrize("name", KV_NAMES)
def test_prepared_equals_converted(family: str, name: str) -> None:
    made, served = pair(family, **of(name))
    found = aoquant.verify(made, served, IDS)
    rows = {row.fqn: row for row in found.caches}
    assert list(rows) == [c.fqn for c in found.coverage.caches] and all(row.exact for row in rows.values())
    assert all(
        (row.bytes_equal, row.key_sqnr_db, row.value_sqnr_db) == (True, math.inf, math.inf) for row in rows.values()
    )
    # what the report counts is what a cache holds
    cache = served(IDS, use_cache=True).past_key_values
    held = [t.nbytes // t.shape[0] // t.shape[-2] for t in (cache.layers[1].keys, cache.layers[1].values)]
    assert rows[LAYER].bytes_per_token == sum(held)
    assert {c.bytes_per_token for c in found.coverage.caches if c.fqn == LAYER} == {sum(held)}
    assert sum(held) < (rows[LAYER].bytes_before or 0)
    assert f"| {LAYER}" in found.to_markdown()


def test_a_report_against_the_float_model(tmp_path: Path) -> None:
    """Keys are compared alone: layers before them do not add to the noise."""
    made = model()
    other = {
        "model.layers.0.self_attn": KVCacheConfig("q4_0"),
        "_default": KVCacheConfig("int8-token-head", value="fp8"),
    }
    quantize_(made, QATConfig(FqnToConfig(other), step="prepare"))
    found = aoquant.report(model(), made, IDS, progress=False)
    by = {row.fqn: row for row in found.caches}
    assert (by[LAYER].format, by[LAYER].scales) == (
        "high precision → int8-token-head keys, fp8 values",
        {"v_scale": [1.0]},
    )
    assert by["model.layers.0.self_attn"].key_sqnr_db < 25 < 40 < (by[LAYER].key_sqnr_db or 0)
    assert by[LAYER].bytes_equal is None and not by[LAYER].exact
    found.save(tmp_path)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert (
        [c["fqn"] for c in saved["caches"]] == list(by) == [c["fqn"] for c in saved["totals"]["coverage"]["kv_caches"]]
    )
    backwards = aoquant.report(made, model(), IDS, progress=False).caches[1]
    assert backwards.format == "int8-token-head keys, fp8 values → high precision"
    assert backwards.bytes_per_token == backwards.bytes_before == by[LAYER].bytes_before
    assert backwards.scales == {"v_scale": [1.0]}


@pytest.mark.parametrize("mistake", ["scale", "values", "off", "format"])
def test_verify_notices(mistake: str) -> None:
    made, served = pair(scale=2.0**-6)
    module = served.get_submodule(LAYER)
    if mistake == "scale":  # another power of two: other bytes, and equal values but for the smallest
        module.k_scale.mul_(2)
    elif mistake == "values":
        module.v_scale.mul_(1.1)
    elif mistake == "off":
        made.get_submodule(LAYER).kv_quant.fake_quant = False
    else:
        module.kv_quant.config = KVCacheConfig("fp8-e5m2", scale=2.0**-6)
    with pytest.raises(ValueError, match=f"{LAYER}: (keys|fake quantisation is off)"):
        aoquant.verify(made, served, IDS)
    found = aoquant.report(made, served, IDS, progress=False)
    row = found.caches[1]
    assert row.bytes_equal is (None if mistake == "off" else False)
    cells = [line.split("|") for line in found.to_markdown().splitlines() if "| 256 → 128" in line.replace("  ", "")]
    equal = [cell[7].strip() for cell in cells]
    assert equal == ["yes", "" if mistake == "off" else "no", "yes"], cells
    assert (min(row.key_sqnr_db or 0, row.value_sqnr_db or 0) > 100) == (mistake == "scale")


def test_a_cache_that_is_not_reached() -> None:
    made, served = pair()
    for one in (made, served):
        one.model.layers = one.model.layers[:1].append(one.model.layers[2])
        one.config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn: this batch does not reach"):
        aoquant.verify(made, served, IDS)


class Unnumbered(torch.nn.Module):
    """An attention module that does not tell its cache the number of its layer."""

    def forward(self, x: Any, past_key_values: Any) -> Any:
        k = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return past_key_values.update(k, 2 * k)[1]


class OfTwoLayers(torch.nn.Module):
    """Give an `Unnumbered` module a cache whose two layers hold a token each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Unnumbered()

    def forward(self, x: Any) -> Any:
        self.cache, converted = DynamicCache(), self.attention.kv_quant.converted
        first = torch.zeros(1, 2, 1, 34, dtype=torch.uint8) if converted else torch.zeros(1, 2, 1, 32)
        for layer in range(2):
            self.cache.update(first, first, layer)
        return self.attention(x, past_key_values=self.cache)


@pytest.mark.parametrize("runs", ["prepared", "converted", "reported"])
def test_a_layer_without_a_number_is_the_first_of_its_cache(runs: str) -> None:
    made, x = OfTwoLayers(), torch.randn(1, 3, 64)
    quantize_(made, QATConfig(KVCacheConfig("q8_0"), step="prepare"))
    if runs == "converted":
        quantize_(made, QATConfig(step="convert"))
    if runs == "reported":
        caches_of(made, copy.deepcopy(made), x)
    else:
        made(x)
    assert [layer.keys.shape[2] for layer in made.cache.layers] == [4, 1]


class Often(torch.nn.Module):
    """Call an `Unnumbered` module for each part of a batch, unless the model is broken."""

    def __init__(self, config: KVCacheConfig | None = None, broken: str = "") -> None:
        super().__init__()
        self.attention, self.broken = Unnumbered(), broken
        if config is not None:
            quantize_(self, QATConfig(config, step="prepare"))

    def forward(self, parts: Any) -> Any:
        if self.broken:
            raise RuntimeError(self.broken)
        for x in parts:
            made = self.attention(x, past_key_values=Given())
        return made


class Given:
    """A cache that hands back what it is given."""

    layers = ()

    def update(self, k: Any, v: Any, *args: Any) -> Any:
        return k, v


def test_a_module_that_runs_often_has_one_row_of_all_its_calls() -> None:
    """Bytes are equal if they are in every call; energies add up."""
    a, b = Often(KVCacheConfig("fp8", scale=1.0)), Often(KVCacheConfig("fp8", scale=2.0))
    x, zero = torch.randn(2, 3, 64).round(), torch.zeros(2, 3, 64)
    for parts, equal in (([zero, zero], True), ([x, zero], False), ([zero, x], False)):
        (row,) = caches_of(a, b, {"parts": parts})
        assert (row.bytes_equal, row.key_sqnr_db, row.value_sqnr_db) == (equal, math.inf, math.inf)
        assert row.exact is equal and row.bytes_per_token == row.bytes_before // 4
    parts = [torch.randn(2, 3, 64), 30 * torch.randn(2, 5, 64)]
    (row,) = caches_of(Often(), a, {"parts": parts})
    key = torch.cat(parts, 1).unflatten(-1, (2, 32))
    for given, found in ((key, row.key_sqnr_db), (2 * key, row.value_sqnr_db)):
        read = given.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert found == pytest.approx(sqnr(given, read))
    small = torch.randn(2, 3, 64) / 64
    (row,) = caches_of(Often(), a, {"parts": [small]})
    key = small.unflatten(-1, (2, 32))
    assert row.key_sqnr_db == pytest.approx(sqnr(key, key.to(torch.float8_e4m3fn).float()))
    assert row.bytes_before == 2 * 2 * 32 * 4


def test_a_model_that_does_not_run_leaves_it_to_the_other() -> None:
    config, x = KVCacheConfig("q8_0"), {"parts": [torch.randn(1, 3, 64)]}
    runs, broken, other = Often(config), Often(config, "no kernel"), Often(KVCacheConfig("q4_0"), "nothing")
    for a, b in ((runs, broken), (broken, runs)):
        (row,) = caches_of(a, b, x)
        assert (row.exact, row.bytes_equal, row.warning) == (True, True, "")
    for a, b, formats, said in ((broken, other, "q8_0 → q4_0", "no kernel"), (other, broken, "q4_0 → q8_0", "nothing")):
        (row,) = caches_of(a, b, x)
        assert (row.fqn, row.format, row.warning) == ("attention", formats, f"not run: RuntimeError: {said}")
        assert (
            row.bytes_per_token is row.bytes_before is row.key_sqnr_db is row.value_sqnr_db is row.bytes_equal is None
        )


def test_keys_that_a_format_does_not_take_are_not_compared() -> None:
    (row,) = caches_of(Often(), Often(KVCacheConfig("nvfp4", scale=1.0)), {"parts": [torch.randn(1, 3, 24)]})
    assert row.warning.startswith("not compared: ValueError: ") and "that 16 divides, got 12" in row.warning
    assert row.key_sqnr_db is row.value_sqnr_db is row.bytes_equal is row.bytes_per_token is None


def test_fake_quantisation_that_was_off_before_convert() -> None:
    """A converted module stores its bytes all the same."""
    made, served = prepared(), prepared()
    for module in hook.quantised(served).values():
        module.kv_quant.fake_quant = False
    quantize_(served, QATConfig(step="convert"))
    rows = aoquant.verify(made, served, IDS).caches
    assert [(row.bytes_equal, row.warning) for row in rows] == [(True, "")] * 3


@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
def test_one_of_keys_and_values_is_enough_to_fail(side: str) -> None:
    made, served = pair()
    getattr(served.get_submodule(LAYER), side).mul_(1.1)
    found = aoquant.report(made, served, IDS, progress=False).caches[1]
    assert found.scales == {"k_scale": [0.0625], "v_scale": [0.0625]} | {side: [pytest.approx(0.06875)]}
    low, high = sorted((found.key_sqnr_db, found.value_sqnr_db))
    assert low < 60 and high == math.inf
    with pytest.raises(ValueError, match=r"1 of 3 KV cache\(s\) are below 60 dB:\n.*layers\.1\.self_attn: keys"):
        aoquant.verify(made, served, IDS, min_db=60)
    assert aoquant.verify(made, served, IDS, min_db=low).caches[1] == found


def test_caches_that_one_model_keeps_in_high_precision_are_compared_where_it_is_allowed() -> None:
    floats, made = model(), prepared()
    found = aoquant.report(floats, made, IDS, progress=False).caches
    low = min(v for row in found for v in (row.key_sqnr_db, row.value_sqnr_db) if v is not None)
    with pytest.raises(ValueError, match=r"3 of 4 row\(s\) were not run"):
        aoquant.verify(floats, made, IDS, min_db=low)
    assert aoquant.verify(floats, made, IDS, min_db=low, allow_not_run=True).caches == found
    with pytest.raises(ValueError, match=r"1 of 3 KV cache\(s\) are below"):
        aoquant.verify(floats, made, IDS, min_db=math.nextafter(low, math.inf), allow_not_run=True)


def test_models_that_do_not_match() -> None:
    made = prepared()
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: its KV cache is quantised in one model"):
        aoquant.report(made, torch.nn.Sequential(torch.nn.Embedding(97, 8)), IDS, progress=False)


def test_coverage() -> None:
    made = model("gemma3")
    assert aoquant.coverage(made).caches == () and "KV" not in aoquant.coverage(made).to_markdown()
    quantize_(made, QATConfig(FqnToConfig({LAYER: None, "_default": KVCacheConfig()}), step="prepare"))
    found = aoquant.coverage(made)
    assert [c.state for c in found.caches] == ["prepared", "float", "prepared"]
    assert [c.bytes_per_token for c in found.caches] == [128, 256, 128]
    assert "2 of 3 attention modules quantise their KV cache" in str(found)
    assert "| model.layers.*.self_attn | 2 x 128 | prepared | fp8 |" in found.to_markdown()


def test_explain() -> None:
    made, served = pair(per="head")
    for one, state in ((made, "prepared"), (served, "converted")):
        said = aoquant.explain(one.get_submodule(LAYER))
        assert f"{LAYER}: {state} KV cache, fp8; k_scale 0.0625, v_scale 0.0625; 128 bytes a token" in str(said)
        assert [r.backend for r in said.routes] == ["torch", *["the model's attention function, on decoded values"] * 2]
        assert [(r.first, r.last) for r in said.routes] == [(1, None), (1, 1), (2, None)]
    with pytest.raises(ValueError, match="attention module with a quantised KV cache"):
        aoquant.explain(model().get_submodule(LAYER))


def test_explain_asks_for_the_device_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set[tuple[str, torch.dtype]]()
    monkeypatch.setattr(kv, "writes", lambda format, x, scale: asked.add((x.device.type, x.dtype)) or True)
    made = prepared()
    for one, device in ((made, "cpu"), (copy.deepcopy(made).to("meta"), "meta")):
        found = aoquant.explain(one.get_submodule(LAYER), torch.float16).routes[0]
        assert dict(found.rows) == {"triton": "runs", "torch": "willing, lower priority"}
        assert asked == {(device, torch.float16)}
        asked.clear()


def test_a_batch_that_holds_a_cache_stays_as_it_was() -> None:
    made = model()
    quantize_(made, QATConfig("int4-g32"))
    served = copy.deepcopy(made)
    quantize_(served, QATConfig(step="convert"))
    cache = DynamicCache(config=made.config)
    with torch.no_grad():
        made(IDS[:, :3], past_key_values=cache, use_cache=True)
    for batch in ({"input_ids": IDS[:, 3:], "past_key_values": cache}, (IDS[:, 3:], None, None, cache)):
        found = [aoquant.verify(made, served, batch).to_markdown() for _ in range(2)]
        assert found[0] == found[1] and cache.get_seq_length() == 3
