"""The command line, on the embedded model with a budget of two steps: every stage, every file, and errors of one
line.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import aoquant
from aoquant import _register, cli, load_pretrained, save_pretrained
from aoquant._messages import folded
from aoquant.cli import ADVICE, for_the_command_line
from aoquant.formats import COMPOSED
from aoquant.integrations import job
from aoquant.integrations.job import models
from aoquant.integrations.lm_eval import Perplexity
from aoquant.layers import direct_reads

SMALL = ["--steps", "2", "--batch-size", "2", "--block", "64", "--limit", "1", "--window", "256", "--device", "cpu"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that one small run wrote."""
    folder = tmp_path_factory.mktemp("run") / "out"
    cli.main(["run", "--recipe", "int4-g32", "--out", str(folder), *SMALL])
    return folder


def test_run_writes_everything_and_verifies(out: Path) -> None:
    numbers = json.loads((out / job.RESULTS).read_text())
    assert [s["name"] for s in numbers["stages"]] == [
        "float",
        "float, fine-tuned",
        "PTQ",
        "QAT, prepared",
        "QAT, converted",
    ]
    words = [s["perplexity"]["word_perplexity"] for s in numbers["stages"]]
    assert len(set(words[:4])) == 4  # each stage is another model
    assert words[3] == words[4]  # but for conversion, which changes nothing
    assert words[2] > words[0]
    assert numbers["min_sqnr_db"] == "inf"
    assert numbers["stages"][4]["bytes"] < 0.7 * numbers["stages"][0]["bytes"]
    text = (out / "report.md").read_text()
    assert "int4-g32" in text
    assert f"trained on 2 steps of 2 x 64 tokens of {job.assets()}/train.jsonl\n" in text
    assert f"scored on 1 documents of {job.assets()}/heldout.jsonl; window 256 tokens\n" in text
    assert "recovered by QAT: n/a" in text  # a single document
    assert "logits bit-equal" in text
    rows = list(csv.DictReader((out / "report.csv").open()))
    assert len(rows) == 4 * 7 + 1  # seven linears in each of four blocks, and the model's output
    for folder in (out, out / "float_against_quantized"):
        assert json.loads((folder / "report.json").read_text())
        assert (folder / "report.png").stat().st_size > 10_000


@pytest.mark.slow
def test_run_with_embeddings_quantises_the_tied_pair(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    cli.main(["run", "--recipe", "int4-g32", "--embeddings", "--out", str(folder), *SMALL])
    with_them, without = (json.loads((f / job.RESULTS).read_text())["stages"] for f in (folder, out))
    assert with_them[3]["perplexity"]["word_perplexity"] == with_them[4]["perplexity"]["word_perplexity"]
    assert with_them[4]["bytes"] < 0.6 * without[4]["bytes"]
    rows = list(csv.DictReader((folder / "report.csv").open()))
    assert len(rows) == 4 * 7 + 2 + 1
    assert {r["output_sqnr_db"] for r in rows} == {"inf"}
    assert "logits bit-equal" in (folder / "report.md").read_text()


def test_eval_loads_the_checkpoint_bit_equal(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(out / "checkpoint"), "--limit", "1", "--window", "256", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "logits bit-equal to the run that wrote it" in printed
    stored = json.loads((out / job.RESULTS).read_text())["stages"][4]["perplexity"]["word_perplexity"]
    assert f"word perplexity {stored:.4f}" in printed


@pytest.fixture
def changed(out: Path, tmp_path: Path) -> Path:
    """The checkpoint with another norm weight, saved as it should be: only its logits say that it is another one."""
    folder = Path(shutil.copytree(out / "checkpoint", tmp_path / "changed"))
    model = load_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    save_pretrained(model, folder)
    return folder


def test_eval_fails_on_other_logits_where_torch_and_device_are_those_of_the_record(
    changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["eval", str(changed), "--limit", "1", "--window", "256", "--device", "cpu"])
    assert exit.value.code == 2
    assert "logits differ from those of the run that wrote it, with the same torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "there"), [("torch", "2.0.0"), ("device", "cuda"), ("device_name", "another CPU"), ("threads", 77)]
)
def test_eval_informs_of_other_logits_elsewhere(name: str, there: Any, changed: Path) -> None:
    path = changed / job.RESULTS
    record = json.loads(path.read_text())
    assert name in record
    path.write_text(json.dumps({**record, name: there}))
    said = job.check_fingerprint(load_pretrained(changed), changed)
    assert "logits differ" in said and f"{name.replace('_', ' ')} is " in said and f"and was {there}" in said


def test_the_record_has_every_option(out: Path) -> None:
    options = json.loads((out / job.RESULTS).read_text())["options"]
    assert options.keys() == vars(job.Options()).keys()
    assert options["train_text"] == []


def test_the_demo_is_float32_where_a_cpu_has_no_instructions_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the embedded model alone, and only as long as nobody says otherwise."""
    for capability, dtype in (("AVX2", "float32"), ("AVX512", "bfloat16")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert job.Options(device="cpu").dtype == dtype
        assert job.Options(device="cuda").dtype == "bfloat16"
        assert job.Options(device="cpu", model="folder").dtype == "bfloat16"
        assert job.Options(device="cpu", dtype="float16").dtype == "float16"


def test_float_checkpoints_are_scored_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(job.assets()), "--limit", "1", "--window", "256", "--device", "cpu"])
    said = capsys.readouterr().out
    assert "no fingerprint" in said and "no logits were compared" in said
    assert "the embedded held-out documents, which say little about another model: give --wikitext hub" in said
    assert job.evaluation(job.assets(), "hub", None, None, None).about == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--recipe", "int4-q32"], r"no recipe is called 'int4-q32'; near it: int4-g"),
        (["run", "--dtype", "int8"], "dtype must be"),
        (["run", "--loss", "mse"], "loss must be one of kl, ce"),
        (["run", "--steps", "0"], "steps"),
        *(
            (["run", "--learning-rate", rate], "learning_rate must be a finite number above 0, got")
            for rate in ("-1", "0", "nan", "inf")
        ),
        (["run", "--out", "{full}"], "is not an empty folder"),
        (["run", "--wikitext", "{full}"], "test.jsonl"),
        (["run", "--model", "/nowhere"], "model must be a folder that exists"),
        (
            ["run", "--model", "owner/model"],
            "--model owner/model needs --train-text FILE ... to train on and --wikitext",
        ),
        (["run", "--model", "owner/model", "--train-text", "a.txt"], "to be scored on, got no --wikitext: "),
        (["run", "--model", "owner/model", "--wikitext", "hub"], "to be scored on, got no --train-text: "),
        (["run", "--device", "tpu"], "device must be one that torch finds"),
        (["run", "--limit", "0"], "limit and window must be at least 1"),
        (["run", "--train-text", "nowhere.txt"], "missing: nowhere.txt"),
        (["eval", "{full}"], "config.json"),
        (["run", "--skip", "a", "--layers", "a=int8"], "'a' is given twice"),
        (["run", "--config"], "--config must be a YAML file that exists, got nothing"),
        (["run", "nowhere.yaml"], "--config must be a YAML file that exists, got 'nowhere.yaml'"),
        (["run", "--config", "{full}/file"], "must hold options as NAME: VALUE lines, got str"),
        (["formates"], "no command is called 'formates'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("here")
    with pytest.raises(SystemExit) as exit:
        cli.main([a.format(full=full) for a in arguments])
    assert exit.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("aoquant: ")
    assert message in error


def test_formats_recipes_doctor(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    for command in ("formats", "recipes", "doctor"):
        cli.main([command])
    printed = capsys.readouterr().out
    assert [w for w in recwarn if "matches no linear layer" in str(w.message)] == []  # doctor's layer is no attention
    for word in ("nvfp4-none", "int8-int4", "torch._scaled_mm", "bit-equal", *COMPOSED):
        assert word in printed
    assert "DIFFERENT" not in printed
    assert "0 (128, 256)" not in printed
    table = printed.split("names that are put together")[0]
    invariant = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in table.splitlines() if "|" in line}
    names = ("nvfp4", "nvfp4-row", "nvfp4-static:0.001", "fp8-tensor")
    assert [invariant[name] for name in names] == ["no", "yes", "yes", "no"]


def perplexity(*nats: float) -> Perplexity:
    rest: Any = dict.fromkeys(("window", "documents", "limit", "batch_size"), 1)
    texts: Any = dict.fromkeys(("source", "task", "task_version"), "")
    value = math.exp(-sum(nats) / (10 * len(nats)))
    words = (10,) * len(nats)
    return Perplexity(
        word_perplexity=value, byte_perplexity=1, bits_per_byte=1, loglikelihoods=nats, words=words, **rest, **texts
    )


def test_recovered_share() -> None:
    base, ptq = perplexity(-40.0, -41.0, -42.0), perplexity(-44.0, -45.1, -46.0)
    half = perplexity(-42.0, -43.05, -44.0)
    assert job.recovered(base, ptq, half).startswith("50 % of PTQ's loss (0.4033 +-")
    assert job.recovered(perplexity(-40.0), perplexity(-44.0), perplexity(-42.0)).startswith("n/a (one document")
    noise = perplexity(-40.5, -40.6, -42.4)
    assert job.recovered(base, noise, half).startswith("n/a (PTQ loses 0.0167")
    assert job.recovered(base, noise, half).endswith("which is within noise)")


def test_the_words_follow_sign_and_significance() -> None:
    base = perplexity(-40.0, -41.0, -42.0)
    better, barely = perplexity(-38.0, -39.01, -40.0), perplexity(-39.5, -41.4, -41.6)
    assert job.recovered(base, better, base) == (
        "n/a (PTQ gains 0.1997 +- 0.0003 nats a word: it scores better than float, so there is no loss to win back)"
    )
    assert re.fullmatch(r"n/a \(PTQ gains 0\.0167 .* which is within noise\)", job.recovered(base, barely, base))
    ptq = perplexity(-44.0, -45.1, -46.0)
    worse = perplexity(-45.0, -46.0, -47.1)
    assert re.match(r"nothing \(PTQ loses 0\.4033 .*, and QAT loses another 0\.1000", job.recovered(base, ptq, worse))
    same = perplexity(-43.5, -45.5, -46.1)
    assert re.match(r"nothing beyond noise \(PTQ loses 0\.4033 .*; QAT ", job.recovered(base, ptq, same))
    assert job.recovered(base, base, base).startswith(
        "n/a (PTQ gains 0.0000 +- 0.0000 nats a word, which is within noise"
    )


@pytest.mark.parametrize("flags", [["-m", "aoquant"], ["-X", "utf8", "-umaoquant"]], ids=" ".join)
def test_python_m_is_the_command_and_says_nothing_else(flags: list[str]) -> None:
    """torchao's and torch's own lines are kept off the terminal."""
    done = subprocess.run([sys.executable, *flags, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"aoquant {aoquant.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        ("python -m aoquant run", "aoquant"),
        ("python -um aoquant run", "aoquant"),
        ("python -X importtime -W module -maoquant run", "aoquant"),
        ("python -m pytest -m aoquant", "pytest"),
        ("python -m", ""),
        ("python", ""),
    ],
)
def test_the_module_of_python_m_is_found_behind_flags(arguments: str, module: str) -> None:
    assert _register._python_m(arguments.split()) == module


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["quantise"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert len(said.splitlines()) == 1 and "no command is called 'quantise'" in said


def test_help_stands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    shown = capsys.readouterr().out
    groups = ["model options", "layers options", "training options", "evaluation options", "output options"]
    assert [g for g in groups if g not in shown] == []
    assert shown.index("training options") < shown.index("--steps") < shown.index("evaluation options")


def test_the_plot_to_look_at_is_named_last(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["run", "--recipe", "int4-g32", "--out", str(out), *SMALL])  # done before: printed again
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-2] == f"what quantisation costs each layer: {out}/float_against_quantized/report.png"
    assert "its title says whether they are equal" in lines[-1]


def test_advice_is_of_the_command_line() -> None:
    assert for_the_command_line("x: K = 4: choose a group that divides K or leave the layer out") == (
        "x: K = 4: choose a recipe whose group divides K (`aoquant recipes`) or leave the layer out with --skip NAME or "
        "--skip-incompatible"
    )
    assert "filter_fn" not in for_the_command_line(
        "nothing to quantise. output heads, embeddings and routers are skipped unless filter_fn or FqnToConfig names them; "
        "check filter_fn and the patterns"
    )
    every = "".join(p.read_text() for p in Path(aoquant.__file__).parent.rglob("*.py") if p.name != "cli.py")
    joined = re.sub(r'"\s*\n\s*f?"', "", every)
    assert [phrase for phrase in ADVICE if phrase not in joined] == []  # each stands in a message


def test_eval_scores_what_the_run_scored(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(out / "checkpoint"), "--device", "cpu"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        "scored as the run that wrote it did: the embedded held-out documents, window 256, the first 1 documents"
    )
    recorded = json.loads((out / job.RESULTS).read_text())["stages"][4]["perplexity"]
    assert printed[-1] == str(Perplexity(**recorded))
    cases = [
        ({"window": 128}, "window 128, the first 1 documents; the run that wrote it scored the embedded"),
        ({"limit": 2}, "window 256, the first 2 documents; the run"),
        ({"wikitext": "hub"}, "scored on WikiText-2 from the hub, window 256"),
    ]
    for options, said in cases:
        given = dict.fromkeys(("wikitext", "documents", "window", "limit")) | options
        about = job.evaluation(out / "checkpoint", **given).about
        assert said in about
        assert about.endswith("the perplexities do not compare")
    assert job.evaluation(tmp_path, None, None, None, 3).arguments["limit"] == 3


def test_eval_says_that_the_runs_text_is_gone(tmp_path: Path) -> None:
    numbers = {"options": {"wikitext": "/gone", "limit": None}, "stages": [{"perplexity": {"window": 64}}]}
    (tmp_path / job.RESULTS).write_text(json.dumps(numbers))
    chosen = job.evaluation(tmp_path, None, None, None, None)
    assert chosen.wikitext is None
    assert (
        "because there is no /gone here; the run that wrote it scored /gone, window 64, all documents" in chosen.about
    )


def test_warnings_are_their_text_with_options_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        text = "x. aoquant.coverage(model) lists every parameter; strict=True raises instead"
        sys.stderr.write(warnings.formatwarning(UserWarning(text), UserWarning, "/lib/place.py", 7))

    monkeypatch.setattr(cli, "doctor", command)
    before = warnings.formatwarning
    cli.main(["doctor"])
    assert warnings.formatwarning is before
    assert capfd.readouterr().err == "aoquant: warning: x. the report lists them; --strict stops instead\n"
    advised = for_the_command_line(f"{direct_reads.ADVICE}; {direct_reads.PACKED_ADVICE}")
    assert advised.count("--skip NAME") == 2 and "filter_fn" not in advised


def test_a_model_that_is_no_folder_is_said_before_the_hub_is_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []

    def asked(where: str, **options: Any) -> Any:
        said.append(capfd.readouterr().err)
        raise OSError("no connection")

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", asked)
    for name in ("nosuchdir", "owner/nosuchmodel"):
        with pytest.raises(ValueError, match="transformers cannot load"):
            job.load_float(name, "float32", "cpu")
        assert said.pop() == f"there is no folder '{name}' here: looking for a model of that name on the hub\n"
    with pytest.raises(ValueError, match="must be a folder that exists, or a hub id"):
        job.load_float("no such/folder/here", "float32", "cpu")
    assert said == []


def test_lines_of_layers_that_differ_in_their_number_are_one() -> None:
    lines = [f"model.layers.{i}.mlp.up_proj (64, 64): K = 64" for i in range(3)] + ["lm_head (9, 64): K = 64"]
    assert folded(lines) == ["model.layers.*.mlp.up_proj (64, 64): K = 64 (3 layers)", "lm_head (9, 64): K = 64"]


@pytest.mark.parametrize("length", ["window", "block"])
def test_lengths_are_checked_before_the_first_stage(
    length: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: Any = {length: 1025}
    with pytest.raises(ValueError, match=f"{length} must be at most the model's max_position_embeddings = 1024"):
        job.run(job.Options(recipe="int4-g32", out=tmp_path / "out", device="cpu", **given))
    assert "begins" not in capsys.readouterr().err
    assert not (tmp_path / "out" / "stages").exists()


@pytest.mark.parametrize(("recipe", "refused"), [("int4-g128", True), ("nvfp4", True), ("gguf-q4_0", False)])
def test_an_export_that_does_not_fit_is_found_before_the_first_stage(
    recipe: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(*_: object, **__: object) -> None:
        raise AssertionError("a model was scored")

    monkeypatch.setattr(job, "evaluate", evaluated)
    o = job.Options(recipe=recipe, out=tmp_path / "run", export=tmp_path / "served", device="cpu")
    if refused:
        with pytest.raises(
            ValueError, match=r"do not fit compressed-tensors without rounding, and nothing was written"
        ):
            job.run(o)
    else:
        with pytest.raises(AssertionError, match="a model was scored"):
            job.run(o)
    assert not (tmp_path / "served").exists()
    assert not list((tmp_path / "run").rglob("*.json")) or not refused


def test_the_summary_names_the_exported_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = job.Result("gguf-q4_0", tmp_path / "run", [], "", 0.0, 0, "", "", "", "")
    asked: list[object] = []

    def exported(*arguments: object) -> Path:
        asked.extend(arguments)
        return tmp_path / "served" / "model.gguf"

    monkeypatch.setattr(job.Folder, "finished", lambda self: done)
    monkeypatch.setattr(job, "export", exported)
    o = job.Options(recipe="gguf-q4_0", out=tmp_path / "run", export=tmp_path / "served", device="cpu")
    assert f"written for the engine: {tmp_path}/served/model.gguf" in job.run(o).where_to_look()
    assert asked == [tmp_path / "run" / "checkpoint", tmp_path / "served", "gguf"]
    assert "engine" not in done.where_to_look()


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("q4_0/", "gguf"),
        ("q8_0/q8_0-x86", "gguf"),
        ("vllm-int8", "compressed-tensors"),
        ("nvfp4", "compressed-tensors"),
    ],
)
def test_a_recipe_is_exported_for_its_engine(recipe: str, layout: str) -> None:
    assert job._engine_format(job.Options(recipe=recipe, device="cpu")) == layout


def test_a_run_that_is_done_can_be_exported_elsewhere(tmp_path: Path) -> None:
    """Where results go is no part of the command that stages belong to."""
    options: dict[str, Any] = {"recipe": "gguf-q4_0", "out": tmp_path / "run", "device": "cpu"}
    with job.Folder(job.Options(**options, export=tmp_path / "first")) as folder:
        folder.begin()
        (folder.stages / "float.json").write_text("{}")
    for export in (tmp_path / "second", None):
        with job.Folder(job.Options(**options, export=export)):
            pass
    with pytest.raises(ValueError, match=r"another command \(steps was"), job.Folder(job.Options(**options, steps=7)):
        pass
