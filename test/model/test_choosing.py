"""`aoquant recipes --for`: words to recipes, the same table as docs/choosing.md."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch

from aoquant import cli
from aoquant.formats import get_format
from aoquant.ops import Request, explain
from aoquant.recipes import get_recipe
from aoquant.tools import choosing

ROOT = Path(__file__).parents[2]


def recipes(asked: str) -> list[str]:
    return [choice.recipe for choice in choosing.find(asked)]


def test_words_choose() -> None:
    assert recipes("vllm h100") == ["vllm-w4a16-g128", "vllm-fp8", "vllm-int8", "vllm-nvfp4-weight"]
    assert recipes("B200, vLLM") == ["vllm-w4a16-g128", "vllm-fp8", "vllm-nvfp4", "vllm-mxfp4"]
    assert recipes("ollama") == ["gguf-q4_0", "gguf-q8_0"]
    assert "nvfp4" not in recipes("pytorch h100") and "nvfp4" in recipes("pytorch b200")
    assert recipes("vLLM on an H100") == recipes("vllm and h100") == recipes("vllm h100")
    assert set(recipes("cpu ptq")) < set(recipes("cpu"))
    assert recipes("vllm rtx 4090") == recipes("vllm NVIDIA GeForce RTX4090") == recipes("vllm ada") != recipes("vllm")


CAPABILITIES = {"ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0)}


@pytest.mark.parametrize("device", CAPABILITIES)
def test_mslks_int4_is_for_the_gpu_that_its_backend_takes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: CAPABILITIES[device])
    weight = get_format("int4-g128")
    reasons = dict(explain(Request("bias_after", None, weight, torch.device("cuda"), torch.bfloat16, 64, 128, 128)))
    assert ("need a Hopper GPU" in reasons["mslk"]) == ("torchao-int4-g128" not in recipes(f"torchao {device}"))


def test_a_gpu_without_a_name_is_any_of_them() -> None:
    named = [recipes(device) for device in ("ampere", "ada", "hopper", "blackwell")]
    for asked in ("gpu", "nvidia GPU", "rtx"):
        assert set(recipes(asked)) == set().union(*named) and "torchao-int4-cpu" not in recipes(asked)
    assert recipes("vllm gpu") == recipes("vllm") and recipes("gpu h100") == recipes("h100")
    assert set(recipes("gpu cpu")) == {*recipes("gpu"), *recipes("cpu")}


def test_a_line_names_the_gpu_that_it_was_asked_for() -> None:
    """In its first cell, as one from A to B, or it says that it is for any."""
    in_order = ["ampere", "ada", "hopper", "blackwell"]
    for device in in_order:
        for choice in choosing.find(device):
            words = choice.where.lower()
            named = [d for d in in_order if d in words]
            if " to " in words:
                named = in_order[in_order.index(named[0]) : in_order.index(named[-1]) + 1]
            assert device in named or not named, (device, choice.where)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("vllmm h100", "got 'vllmm' \\(near it: vllm"),
        ("vllm g300", r"got 'g300' \(near it: gb300\); engines"),
        ("vlm", r"got 'vlm' \(near it: vllm\)"),
        ("hoper", r"got 'hoper' \(near it: hopper\)"),
        ("llama-cp", r"got 'llama-cp' \(near it: llama-cpp, llamacpp\)"),
        ("nvida", r"got 'nvida' \(near it: nvidia\)"),
        ("", "--for takes an engine, a GPU or CPU, and ptq for no training, got ''; engines"),
        ("for a", "--for takes an engine, a GPU or CPU, and ptq for no training, got 'for a'; engines"),
    ],
)
def test_words_that_choose_nothing_are_refused(asked: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choosing.find(asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("llama.cpp h100", "hopper together; for llama.cpp: cpu; for hopper: pytorch, transformers, vllm, sglang, torchao"),
        ("llama.cpp mac", "arm together; for llama.cpp: cpu; for arm: pytorch, transformers, torchao"),
        ("gguf on a gpu", "a GPU together; for llama.cpp: cpu; for a GPU: pytorch, transformers, vllm, sglang, torchao"),
        ("gguf b200 ada ptq", "ada or blackwell together, without training; for llama.cpp: cpu; for ada or blackwell: pytorch"),
    ],
)  # fmt: skip
def test_a_pair_without_a_recipe_says_what_each_has(asked: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^no recipe is for llama.cpp and {said}"):
        choosing.find(asked)


@pytest.mark.parametrize("engine", choosing._ENGINES)
@pytest.mark.parametrize("device", choosing._DEVICES)
def test_what_is_said_of_a_pair_is_found(engine: str, device: str) -> None:
    """Each pair has recipes, or its error names pairs that do."""
    try:
        assert choosing.find(f"{engine} {device}")
    except ValueError as error:
        of_engine, of_device = re.findall(r"; for \S+: ([^;]+)", str(error))
        for other in of_engine.split(", "):
            assert choosing.find(f"{engine} {other}")
        for other in of_device.split(", "):
            assert choosing.find(f"{other} {device}")


@pytest.mark.parametrize("word", ["training", "qat", "moe", "int4", "mi350"])
def test_a_word_like_none_has_no_hint(word: str) -> None:
    with pytest.raises(ValueError, match=f"got '{word}'; engines: pytorch, .*; devices: hopper, "):
        choosing.find(f"vllm {word}")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("vllm MI300X", "--for got 'mi300x': AMD GPUs have no recipe yet; engines: "),
        ("amd gpu", "--for got 'amd': AMD GPUs have no recipe yet"),
        ("TensorRT-LLM b200", "--for got 'tensorrt-llm': TensorRT-LLM has no recipe yet"),
        ("nvidia tesla t4", "--for got 't4': Turing and older have no recipe: Ampere is the oldest"),
    ],
)
def test_what_has_no_recipe_is_said(asked: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        choosing.find(asked)


def test_every_choice_and_every_measurement_is_a_recipe() -> None:
    for name in [*(choice.recipe for choice in choosing.CHOICES), *choosing.measured()]:
        assert get_recipe(name).name == name


SPEED = {"speed with many tokens": "model_prefill", "fast decoding, few tokens at a time": "model_generate"}


@pytest.mark.parametrize("want", SPEED)
def test_a_recipe_that_is_chosen_for_its_speed_is_faster_than_bf16(want: str) -> None:
    """In the newest run of each model in benchmarks/results; decoding with a static cache: eager waits for the host."""
    with (ROOT / "benchmarks" / "results" / f"{SPEED[want]}.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ms"] and (row["part"], row["how"]) != ("generate", "eager")]
    newest = {(row["variant"], row["hidden"]): float(row["speed"]) for row in rows}  # rows are in the order of time
    chosen = {choice.recipe for choice in choosing.CHOICES if choice.want == want}
    timed = {cell: speed for cell, speed in newest.items() if cell[0] in chosen}
    assert timed and {cell: speed for cell, speed in timed.items() if speed < 1} == {}


def test_the_page_has_the_table() -> None:
    assert choosing.markdown() in (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")


def test_the_numbers_are_those_of_the_committed_table() -> None:
    with (ROOT / "benchmarks" / "results" / "experiments.csv").open(encoding="utf-8", newline="") as file:
        rows = {r["recipe"]: r for r in csv.DictReader(file) if r["published"] == "True" and r["plain"] == "True"}
    assert {*choosing.measured()} == {*rows}
    for recipe, m in choosing.measured().items():
        found = tuple(float(rows[recipe][name]) for name in ("float", "PTQ", "QAT", "seeds"))
        assert (m.float_model, m.ptq, m.qat, m.seeds) == pytest.approx(found, abs=6e-4), recipe
    cells = {row[2]: row[-4:] for row in choosing.rows(code=False)}
    assert cells["vllm-fp8"] == ("8.05", "1.005", "1.002", "3")
    assert cells["vllm-nvfp4-weight"] == ("not measured", "", "", "")


def test_the_command_prints_measurements_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipes", "--for", "transformers h100"])
    printed = capsys.readouterr().out
    table, _, caption = printed.partition("\n\n")
    assert "| int4-g32" in table and choosing.source() in " ".join(caption.split())
    assert max(map(len, caption.splitlines())) <= 100 < len(choosing.source())
    m = choosing.measured()["int4-g32"]
    assert f"{m.qat / m.float_model:.3f}" in printed and "not measured" in choosing.markdown()
