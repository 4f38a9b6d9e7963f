"""Options of a run: the limits of each, what does not go together, and the types that a YAML file gives them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from aoquant.integrations import job
from aoquant.integrations.job.options import read_yaml


def check(**options: Any) -> None:
    job.Options(**{"device": "cpu", "wikitext": "hub", **options}).check()


def test_a_command_says_what_it_said() -> None:
    """Numbers that a command leaves out: with others, a run in the same folder would be another one."""
    found = {f.name: f.default for f in dataclasses.fields(job.Options) if isinstance(f.default, int | float)}
    numbers = {"batch_size": 8, "block": 256, "teacher_top_k": 64, "samples": 128, "bos": True}
    off = ("fake_quant_after_n_steps", "seed", "separate_documents", "embeddings", "skip_incompatible", "strict")
    assert found == numbers | dict.fromkeys(off, 0)


LEAST = dict.fromkeys(("steps", "batch_size", "micro_batch", "samples", "teacher_top_k", "limit", "window"), 1)


@pytest.mark.parametrize(("name", "least"), [*LEAST.items(), ("block", 2)])
def test_the_least_of_a_number_is_taken_and_no_less(name: str, least: int) -> None:
    check(**{name: least})
    with pytest.raises(ValueError, match=f"{name} .* {least}, got {least - 1}"):
        check(**{name: least - 1})


@pytest.mark.parametrize("name", ["learning_rate", "final_learning_rate", "learning_rates"])
def test_rates_are_finite_and_positive(name: str) -> None:
    def given(rate: float) -> dict[str, Any]:
        return {name: [1e-5, rate] if name == "learning_rates" else rate}

    check(**given(5e-324))
    for rate in (-1e-9, math.nan, math.inf, *([0.0] if name != "final_learning_rate" else [])):
        with pytest.raises(ValueError, match=name):
            check(**given(rate))
    check(final_learning_rate=0.0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"learning_rate": 1e-5, "learning_rates": [1e-4]}, "--learning-rates"),
        ({"loss": "ce", "teacher_cache": Path("cache")}, "teacher_cache"),
        ({"calibrate": Path(__file__)}, "calibrate"),
        ({"ptq": "gptq", "calibrate": Path("gone.txt")}, "gone.txt"),
        ({"stop_at_gap": math.inf}, "stop_at_gap"),
        ({"steps": 5, "fake_quant_after_n_steps": 5}, "fake_quant_after_n_steps"),
        ({"train_text": [Path(__file__), Path("gone.txt")]}, "gone.txt"),
        ({"export": Path(__file__)}, "test_options.py exists"),
        ({"preset": "sgd"}, "sgd"),
        *(({"model": f"{start}gone", "train_text": [Path(__file__)]}, "gone") for start in ("./", "/", "~/")),
    ],
)
def test_what_would_fail_after_minutes_is_refused_at_once(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check(**options)


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("learning-rate: 3e-4", "learning_rate", 3e-4),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("learning_rates: 1e-5", "learning_rates", [1e-5]),
        ("learning_rates: [1e-5, 2]", "learning_rates", [1e-5, 2.0]),
        ("skip: lm_head", "skip", ["lm_head"]),
        ("skip: [a, b]", "skip", ["a", "b"]),
        ("train_text: a.txt", "train_text", [Path("a.txt")]),
        ("calibrate: a.txt", "calibrate", Path("a.txt")),
        ("window: null", "window", None),
        ("bos: false", "bos", False),
        ("steps: 3", "steps", 3),
    ],
)
def test_a_line_of_yaml_has_the_type_of_its_option(line: str, option: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(line)
    found = read_yaml(tmp_path / "run.yaml")
    assert found == {option: value} and type(found[option]) is type(value)


@pytest.mark.parametrize(
    "line",
    [
        "steps: 1.5",
        "steps: true",
        "steps: '3'",
        "batch_size: null",
        "bos: 1",
        "learning_rate: true",
        "learning_rate: fast",
        "model: 5",
        "calibrate: 3",
        "skip: [a, 1]",
        "train_text: [1]",
    ],
)
def test_another_type_is_refused_by_file_and_name(line: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(line)
    with pytest.raises(ValueError, match=rf"run\.yaml: {line.partition(':')[0]} "):
        read_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize(("content", "name"), [("- steps", "list"), ("3", "int"), ("stepz: 3", "near it: steps")])
def test_a_file_of_something_else_is_refused(content: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ValueError, match=rf"run\.yaml: .*{name}"):
        read_yaml(tmp_path / "run.yaml")
