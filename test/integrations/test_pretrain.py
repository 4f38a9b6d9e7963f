"""The two scripts that make the demo: pretraining resumes bit for bit, generation repeats bit for bit.

Text here is a sentence drawn at random a few thousand times: enough to train a tokenizer and to see a loss fall.
"""

import importlib
import json
import random
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

EVAL = Path(__file__).parents[2] / "eval"
SMALL: dict[str, Any] = {
    "vocab": 320, "hidden": 128, "intermediate": 128, "layers": 1, "heads": 2, "kv_heads": 1, "window": 32, "batch": 4,
    "steps": 12, "warmup": 2, "lr": 1e-2, "log_every": 5, "anneal_share": 0.5, "anneal_fraction": 0.5, "device": "cpu",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of eval/, as a script there sees them."""
    monkeypatch.syspath_prepend(str(EVAL))
    return {name: importlib.import_module(name) for name in ("pretrain", "generate", "corpus")}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "é"]
    documents = [" ".join(draw.choices(words, k=draw.randint(5, 60))) + ".\n" for _ in range(100)]
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture
def model(scripts: dict[str, ModuleType], text: Path, tmp_path: Path) -> Path:
    """A model trained straight through."""
    pretrain = scripts["pretrain"]
    pretrain.main(pretrain.Config(text=(text,), anneal=(text,), validation=(text,), out=tmp_path / "straight", **SMALL))
    return tmp_path / "straight" / "model"


def test_stopping_and_resuming_changes_no_bit(
    scripts: dict[str, ModuleType], text: Path, model: Path, tmp_path: Path
) -> None:
    pretrain, out = scripts["pretrain"], tmp_path / "halves"
    settings = {"text": (text,), "anneal": (text,), "validation": (text,), "out": out} | SMALL
    # 7 is neither a multiple of log_every nor in the anneal phase's half: both must survive the stop.
    pretrain.main(pretrain.Config(**settings, stop_at=7))
    pretrain.main(pretrain.Config(**settings, resume=True))
    straight, halves = load_file(model / "model.safetensors"), load_file(out / "model" / "model.safetensors")
    assert straight.keys() == halves.keys()
    assert all(torch.equal(straight[name], halves[name]) for name in straight)
    logs = [json.loads((folder / "train_log.json").read_text()) for folder in (model.parent, out)]
    assert logs[0]["losses"] == logs[1]["losses"]
    assert logs[0]["validation_bits_per_byte"] == logs[1]["validation_bits_per_byte"]
    assert logs[0]["losses"][-1] < logs[0]["losses"][0]
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (model.parent, out)]
    for key in states[0]["optimizer"]["state"]:
        for name, value in states[0]["optimizer"]["state"][key].items():
            assert torch.equal(value, states[1]["optimizer"]["state"][key][name])


@pytest.mark.parametrize(
    ("recipe", "backward"),
    [
        pytest.param(*v, marks=pytest.mark.slow)
        for v in (("quartet2", None), ("quartet", None), ("gridflip", "nvfp4-sr"))
    ],
)
def test_a_recipe_from_scratch_resumes_bit_for_bit(
    scripts: dict[str, ModuleType], text: Path, tmp_path: Path, recipe: str, backward: str | None
) -> None:
    """In two micro-batches a step; what is saved as a model is plain, and what is saved as a checkpoint draws on where
    it stopped.
    """
    pretrain = scripts["pretrain"]
    settings = {"text": (text,), "validation": (text,)} | SMALL
    settings |= {"recipe": recipe, "backward": backward, "accumulate": 2, "steps": 5}
    for name, halves in (("straight", [{}]), ("halves", [{"stop_at": 3}, {"resume": True}])):
        for options in halves:
            pretrain.main(pretrain.Config(**settings, out=tmp_path / name, **options))
    straight, halves = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("straight", "halves")
    )
    assert straight["step"] == 5 and straight["model"].keys() == halves["model"].keys()
    assert all(torch.equal(straight["model"][key], halves["model"][key]) for key in straight["model"])
    states = [value for key, value in straight["model"].items() if key.endswith("backward_random")]
    assert len(states) == 7 and all(value.tolist()[::2] == [0, 10] for value in states)
    assert torch.equal(straight["losses"], halves["losses"])
    saved = load_file(tmp_path / "halves" / "model" / "model.safetensors")
    assert not any("random" in key for key in saved)
    for key, value in saved.items():
        assert torch.equal(value, straight["model"][key].bfloat16())


def test_micro_batches_are_the_batch(scripts: dict[str, ModuleType], text: Path, tmp_path: Path) -> None:
    """The mean over two halves is the mean over the whole, up to the order of sums."""
    pretrain, found = scripts["pretrain"], []
    for accumulate in (1, 2):
        settings = {"text": (text,)} | SMALL | {"steps": 3, "accumulate": accumulate}
        pretrain.main(pretrain.Config(**settings, out=tmp_path / str(accumulate)))
        found.append(torch.load(tmp_path / str(accumulate) / "checkpoint.pt", weights_only=True)["losses"])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_resume_refuses_other_settings(
    scripts: dict[str, ModuleType], text: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain = scripts["pretrain"]
    settings = {"text": (text,), "anneal": (text,), "validation": (text,), "out": model.parent} | SMALL | {"lr": 2e-2}
    with pytest.raises(
        ValueError, match=r"changed: lr from 0\.01 to 0\.02, recipe from 'bf16' to 'quartet'\. Give them"
    ):
        pretrain.main(pretrain.Config(**settings, resume=True, recipe="quartet"))
    arguments = {"text": text, "anneal": text, "validation": text, "out": model.parent} | SMALL | {"lr": 2e-2}
    typed = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *typed, "--resume"])
    with pytest.raises(SystemExit, match=r"^pretrain\.py: resume needs .*changed: lr from"):
        runpy.run_path(str(EVAL / "pretrain.py"), run_name="__main__")
    with pytest.raises(ValueError, match="out has the checkpoint of a run"):
        pretrain.Config(**settings)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": 192}, "hidden must be a positive multiple of 128"),
        ({"intermediate": 320}, "intermediate must be a positive multiple of 128"),
        ({"heads": 3}, "heads must be a divisor"),
        ({"kv_heads": 4}, "kv_heads must be a divisor"),
        ({"vocab": 256}, "vocab must be in 257"),
        ({"warmup": 13}, "warmup must be in 0"),
        ({"stop_at": 13}, "stop_at must be in 1"),
        ({"resume": True}, "resume needs a run that stopped"),
        ({"graph": True}, "graph must be False on device cpu"),
        ({"validate_every": 0}, "validate_every must be positive"),
        ({"accumulate": 3}, "accumulate must be a divisor of batch = 4"),
        ({"recipe": "quartet3"}, "no recipe is called 'quartet3'"),
        ({"recipe": "quartet", "backward": "mxfp5"}, "no format is called 'mxfp5'"),
        ({"backward": "quartet"}, "backward must be None with recipe bf16"),
        ({"text": (Path("no-such-file"),)}, "text must be paths"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_config_refuses(scripts: dict[str, ModuleType], text: Path, tmp_path: Path, change: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scripts["pretrain"].Config(**({"text": (text,), "out": tmp_path / "out"} | SMALL | change))


def test_documents_survive_encoding(scripts: dict[str, ModuleType], text: Path) -> None:
    corpus = scripts["corpus"]
    documents = corpus.read_documents((text,))
    tokenizer = corpus.train_tokenizer(documents, 320, 10**6)
    ids = corpus.encode(tokenizer, documents, "text").tolist()
    assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False).split(corpus.END)[1:] == documents


def test_learning_rate_schedules(scripts: dict[str, ModuleType], text: Path, tmp_path: Path) -> None:
    pretrain, base = scripts["pretrain"], {"text": (text,), "out": tmp_path / "out"} | SMALL
    base |= {"steps": 10, "warmup": 2, "lr": 1.0}
    flat = pretrain.Config(**base, schedule="wsd", decay_fraction=0.5)
    assert [pretrain.lr_at(flat, step) for step in range(10)] == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    cosine = pretrain.Config(**base, schedule="cosine")
    assert pretrain.lr_at(cosine, 2) == 1
    assert pretrain.lr_at(cosine, 6) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"first": "vocabulary", "greedy": 3, "top_k": 50, "top_p": 0.9}, marks=pytest.mark.slow)],
)
def test_generation_repeats_and_its_two_sets_are_disjoint(
    scripts: dict[str, ModuleType], model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    generate = scripts["generate"]
    settings = {"train_bytes": 2000, "held_out_bytes": 500, "batch": 16, "min_tokens": 4, "device": "cpu"} | options
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        generate.main(generate.Config(model=model, out=tmp_path / name, seed=seed, **settings))
    written = {name: (tmp_path / name / "train.jsonl").read_bytes() for name in "abc"}
    assert written["a"] == written["b"] != written["c"]
    pages = {
        part: [json.loads(line)["page"] for line in (tmp_path / "a" / f"{part}.jsonl").read_text("utf-8").splitlines()]
        for part in ("train", "heldout")
    }
    assert sum(len(page.encode()) for page in pages["train"]) >= 2000
    assert not {run for page in pages["train"] for run in generate.runs(page)} & {
        run for page in pages["heldout"] for run in generate.runs(page)
    }
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["train"]["documents"] == len(pages["train"])
    assert manifest["train"]["seed"] != manifest["heldout"]["seed"]


def test_truncation_keeps_the_likeliest(scripts: dict[str, ModuleType]) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()[:, [2, 0, 3, 1]]
    truncate = scripts["generate"].truncate
    assert torch.isfinite(truncate(logits, 2, 1.0)).tolist() == [[False, True, False, True]]
    assert torch.isfinite(truncate(logits, 0, 0.6)).tolist() == [[False, True, False, True]]
    assert torch.isfinite(truncate(logits, 0, 0.01)).tolist() == [[False, True, False, False]]
