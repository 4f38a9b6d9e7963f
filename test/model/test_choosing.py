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
    experts, w4a16 = "vllm-w4a16-g32-experts", ("vllm-w4a16-g32", "vllm-w4a16-g128")
    assert recipes("vllm h100") == [*w4a16, "vllm-fp8", "vllm-int8", "vllm-nvfp4-weight", experts]
    assert recipes("B200, vLLM") == [*w4a16, "vllm-fp8", "vllm-nvfp4", "vllm-mxfp4", experts]
    assert recipes("ollama") == ["gguf-q4_0", "gguf-q8_0"]
    assert "nvfp4" not in recipes("pytorch h100") and "nvfp4" in recipes("pytorch b200")
    assert recipes("vLLM on an H100") == recipes("vllm and h100") == recipes("vllm h100")
    assert set(recipes("cpu ptq")) < set(recipes("cpu"))
    assert recipes("vllm rtx 4090") == recipes("vllm NVIDIA GeForce RTX4090") == recipes("vllm ada") != recipes("vllm")


def test_ptq_leaves_out_what_loses_more_than_a_twentieth_without_training() -> None:
    found, numbers = set(recipes("ptq")), choosing.measured()
    kept = {name for name, m in numbers.items() if m.ptq <= 1.05 * m.float_model}
    trained = {"fp8-hybrid"}  # for its backward
    assert found & {*numbers} == (kept & {choice.recipe for choice in choosing.CHOICES}) - trained
    assert found - {*numbers} == {"fp8-scaled-mm", "int8", "torchao-fp8", "torchao-int8"}  # 8 bits, not measured


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
    assert set(recipes("vllm gpu")) == set(recipes("vllm")) and recipes("gpu h100") == recipes("h100")
    assert set(recipes("gpu cpu")) == {*recipes("gpu"), *recipes("cpu")}


REFUSED = {
    "vllmm h100": "'vllmm' .*vllm",
    "hoper": "'hoper' .*hopper",
    "": "--for",
    "for a": "'for a'",
    "vllm training": "'training'",
    "vllm MI300X": "'mi300x'",
    "TensorRT-LLM b200": "'tensorrt-llm'",
    "nvidia tesla t4": "'t4'",
    "llama.cpp h100": "llama.cpp and hopper",
    "gguf on a gpu": "llama.cpp and a GPU",
    "gguf b200 ada ptq": "llama.cpp and ada or blackwell",
}


@pytest.mark.parametrize("asked", REFUSED)
def test_words_that_choose_nothing_are_refused_by_name(asked: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[asked]):
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


def test_measurements_are_read_and_shown_as_ratios(tmp_path: Path) -> None:
    lines = (
        "# a model",
        "# on a GPU",
        "recipe,bits,float,ptq,qat,seeds",
        "int8,8.125,10,10.5,10.25,3",
        "nvfp4,4.5,10,1e8,,0",
    )
    path = tmp_path / "measured.csv"
    path.write_text("\n".join(lines))
    assert choosing.source(path) == "a model on a GPU"
    numbers = choosing.measured(path)
    assert numbers["nvfp4"] == choosing.Measured(4.5, 10.0, 1e8, None, 0)
    shown = {row[2]: row[4:] for row in choosing.rows(code=False, numbers=numbers)}
    assert shown["int8"] == ("8.12", "1.050", "1.025", "3") and shown["nvfp4"] == ("4.50", "1.0e+07", "", "")
    assert {cells for name, cells in shown.items() if name not in numbers} == {("not measured", "", "", "")}


def test_the_command_prints_measurements_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipes", "--for", "transformers h100"])
    printed, m = capsys.readouterr().out, choosing.measured()["int4-g128"]
    assert "| int4-g128" in printed and choosing.source() in " ".join(printed.split())
    assert m.qat is not None and f"{m.qat / m.float_model:.3f}" in printed
