"""The command line, on the embedded model with a budget of two steps: every stage, every file, and errors of one
line.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.export_cases import converted
from transformers.utils import logging as transformers_logging

import aoquant
from aoquant import cli, load_pretrained, ops, save_pretrained
from aoquant._messages import folded
from aoquant.formats import COMPOSED
from aoquant.integrations import job
from aoquant.integrations.launched import no_bars_in_logs
from aoquant.integrations.lm_eval import Perplexity
from aoquant.tools import doctor

SMALL = ["--steps", "2", "--batch-size", "2", "--block", "64", "--limit", "1", "--window", "256", "--device", "cpu"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that one small run wrote."""
    folder = tmp_path_factory.mktemp("run") / "out"
    cli.main(["run", "--recipe", "int4-g32", "--out", str(folder), *SMALL])
    return folder


def test_run_writes_everything_and_verifies(out: Path) -> None:
    numbers = json.loads((out / job.RESULTS).read_text())
    assert [s["name"] for s in numbers["stages"]] == ["float", "PTQ", "QAT, prepared", "QAT, converted"]
    words = [s["perplexity"]["word_perplexity"] for s in numbers["stages"]]
    assert len(set(words[:3])) == 3  # each stage is another model
    assert words[2] == words[3]  # but for conversion, which changes nothing
    assert words[1] > words[0]
    assert numbers["min_sqnr_db"] == "inf"
    assert numbers["stages"][3]["bytes"] < 0.7 * numbers["stages"][0]["bytes"]
    text = (out / "report.md").read_text()
    assert "int4-g32" in text
    assert "trained on 2 steps of 2 x 64 tokens of docstrings of Python" in text
    assert "scored on 1 documents of docstrings of Python" in text
    assert "recovered by QAT: n/a" in text  # a single document
    assert "logits bit-equal" in text
    rows = list(csv.DictReader((out / "report.csv").open()))
    assert len(rows) == 4 * 7 + 1  # seven linears in each of four blocks, and the model's output
    for folder in (out, out / "float_against_quantized"):
        assert json.loads((folder / "report.json").read_text())
        assert (folder / "report.png").stat().st_size > 10_000
    assert (out / "perplexity.png").stat().st_size > 5_000


@pytest.mark.slow
def test_a_run_by_cross_entropy_fine_tunes_the_float_model_too(tmp_path: Path) -> None:
    cli.main(["run", "--recipe", "int4-g32", "--loss", "ce", "--out", str(tmp_path / "out"), *SMALL])
    stages = json.loads((tmp_path / "out" / job.RESULTS).read_text())["stages"]
    assert [s["name"] for s in stages] == ["float", "float, fine-tuned", "PTQ", "QAT, prepared", "QAT, converted"]
    assert stages[0]["perplexity"] != stages[1]["perplexity"]


@pytest.mark.slow
def test_run_with_embeddings_quantises_the_tied_pair(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    cli.main(["run", "--recipe", "int4-g32", "--embeddings", "--out", str(folder), *SMALL])
    with_them, without = (json.loads((f / job.RESULTS).read_text())["stages"] for f in (folder, out))
    assert with_them[2]["perplexity"]["word_perplexity"] == with_them[3]["perplexity"]["word_perplexity"]
    assert with_them[3]["bytes"] < 0.6 * without[3]["bytes"]
    rows = list(csv.DictReader((folder / "report.csv").open()))
    assert len(rows) == 4 * 7 + 2 + 1
    assert {r["output_sqnr_db"] for r in rows} == {"inf"}
    assert "logits bit-equal" in (folder / "report.md").read_text()


def test_eval_loads_the_checkpoint_bit_equal(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(out / "checkpoint"), "--limit", "1", "--window", "256", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "logits bit-equal to the run that wrote it" in printed
    stored = json.loads((out / job.RESULTS).read_text())["stages"][3]["perplexity"]["word_perplexity"]
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


def test_a_run_is_float32_where_a_cpu_has_no_instructions_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any model, as long as nobody says otherwise."""
    for capability, dtype in (("AVX2", "float32"), ("AVX512", "bfloat16")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert job.Options(device="cpu").dtype == dtype
        assert job.Options(device="cuda").dtype == "bfloat16"
        assert job.Options(device="cpu", model="folder").dtype == dtype
        assert job.Options(device="cpu", dtype="float16").dtype == "float16"


def test_the_doctor_needs_no_extras(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "recipes", lambda: [("int4-g32", "yes", "yes", "yes")])
    monkeypatch.setattr(ops, "backend_names", lambda: ["reference"])  # each recipe asks every backend all the same
    for package in ("tyro", "tabulate", "yaml", "tqdm", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    cli.main(["doctor"])
    assert "| int4-g32 | yes |" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["formats"])
    assert stopped.value.code == 2 and "aoquant[all]" in capsys.readouterr().err


def test_formats_recipes_doctor(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    for command in ("formats", "recipes", "doctor"):
        cli.main([command])
    printed = capsys.readouterr().out
    assert [w for w in recwarn if "matches no linear layer" in str(w.message)] == []  # doctor's layer is no attention
    for word in ("nvfp4-none", "int8-int4", "torch._scaled_mm", "bit-equal", *COMPOSED):
        assert word in printed
    assert "DIFFERENT" not in printed
    assert "(128, 256)" not in printed
    table = printed.split("names that are put together")[0]
    invariant = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in table.splitlines() if "|" in line}
    names = ("nvfp4", "nvfp4-row", "nvfp4-static:0.001", "fp8-tensor")
    assert [invariant[name] for name in names] == ["no", "yes", "yes", "no"]


@pytest.mark.parametrize(("command", "tables"), [("formats", 2), ("doctor", 4)])
def test_tables_are_a_line_apart(
    command: str, tables: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "recipes", lambda: [("int4-g32", "yes", "yes", "yes")])
    monkeypatch.setattr(ops, "backend_names", lambda: ["reference"])
    cli.main([command])
    assert len(capsys.readouterr().out.strip().split("\n\n")) == tables


@pytest.mark.parametrize("flags", [["-m", "aoquant"], ["-X", "utf8", "-umaoquant"]], ids=" ".join)
def test_python_m_is_the_command_and_says_nothing_else(flags: list[str]) -> None:
    """torchao's and torch's own lines are kept off the terminal."""
    done = subprocess.run([sys.executable, *flags, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"aoquant {aoquant.__version__}\n", "")


@pytest.mark.parametrize(("recipe", "refused"), [("int4-g128", True), ("nvfp4", True), ("gguf-q4_0", False)])
def test_an_export_that_does_not_fit_is_found_before_the_first_stage(
    recipe: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(*_: object, **__: object) -> None:
        raise AssertionError("a model was scored")

    monkeypatch.setattr(job, "evaluate", evaluated)
    o = job.Options(recipe=recipe, out=tmp_path / "run", export=tmp_path / "served", device="cpu")
    if refused:
        with pytest.raises(ValueError, match="compressed-tensors"):
            job.run(o)
    else:
        with pytest.raises(AssertionError, match="a model was scored"):
            job.run(o)
    assert not (tmp_path / "served").exists()
    assert not list((tmp_path / "run").rglob("*.json")) or not refused


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


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=" ".join)
def test_without_a_command_each_is_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(arguments)
    printed = capsys.readouterr().out
    assert [name for name, (_, about) in cli.COMMANDS.items() if f"  {name:9}{about}\n" not in printed] == []


@pytest.mark.parametrize(
    ("stopped", "code", "said"),
    [
        (KeyboardInterrupt("parts are kept"), 130, "\naoquant: interrupted; parts are kept\n"),
        (KeyboardInterrupt(), 130, "\naoquant: interrupted\n"),
        (ImportError("no tyro"), 2, "aoquant: no tyro\n"),
        (BrokenPipeError(), 1, ""),
    ],
    ids=repr,
)
def test_what_is_no_mistake_of_ours_ends_without_a_traceback(
    stopped: BaseException, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command() -> None:
        raise stopped

    before = warnings.formatwarning
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        monkeypatch.setattr(cli, "doctor", command)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor"])
        print("later", flush=True)
    assert (ended.value.code, (tmp_path / "err").read_text()) == (code, said)
    assert (tmp_path / "out").read_text() == ("" if code == 1 else "later\n")  # nothing into a pipe that is closed
    assert warnings.formatwarning is before


CHOOSE = "choose --model full --candidates int8 --bits 8 --calibrate full/file"
MISTAKES = [
    ("run --recipe int4-q32", "int4-q32"),
    ("run --dtype int8", "dtype"),
    ("run --loss mse", "loss"),
    ("run --steps 0", "steps"),
    *((f"run --learning-rate {rate}", "learning_rate") for rate in ("-1", "nan", "inf")),
    ("run --out full", "full"),
    ("run --wikitext full", "test.jsonl"),
    ("run --model /nowhere", "model"),
    ("run --model owner/model", "--train-text"),
    ("run --model owner/model --train-text a.txt", "--wikitext"),
    ("run --device tpu", "device"),
    ("run --limit 0", "limit"),
    ("run --window 1025 --device cpu", "window"),
    ("run --block 1025 --device cpu", "block"),
    ("run --train-text nowhere.txt", "nowhere.txt"),
    ("eval full", "config.json"),
    ("run --skip a --layers a=int8", "'a'"),
    ("run --config", "--config"),
    ("run nowhere.yaml", "nowhere.yaml"),
    ("run --config full/file", "full/file"),
    ("run --export full", "full exists"),
    ("run --export full/file/served", "full/file is no folder"),
    ("run --export aoquant-run", "will hold --out"),
    ("run --teacher-cache full/file/cache", "full/file is no folder"),
    (f"{CHOOSE} --out nowhere/plan.yaml", "nowhere is no folder"),
    (f"{CHOOSE} --out full", "full is a folder"),
    (f"{CHOOSE} --plot full/plans.docx", "matplotlib writes no .docx"),
    (f"{CHOOSE} --device tpu", "device"),
    ("formates", "formates"),
]


@pytest.mark.parametrize(("arguments", "name"), MISTAKES)
def test_a_mistake_is_one_line_that_names_it(
    arguments: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("here")
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments.split())
    assert exit.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("aoquant: ") and name in said[-1] and "begins" not in "".join(said)
    assert not list(tmp_path.rglob("stages"))


def test_float_checkpoints_are_scored_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(job.assets()), "--limit", "1", "--window", "256", "--device", "cpu"])
    said = capsys.readouterr().out
    assert "word perplexity" in said and "no logits were compared" in said


def test_eval_scores_what_the_run_scored(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(out / "checkpoint"), "--device", "cpu"])
    recorded = json.loads((out / job.RESULTS).read_text())["stages"][3]["perplexity"]
    said = capsys.readouterr().out.splitlines()
    nothing = dict.fromkeys(("wikitext", "documents", "window", "limit"))
    assert job.evaluation(out / "checkpoint", **nothing).about in said
    assert said[-1] == str(Perplexity(**recorded))
    for options in ({"window": 128}, {"limit": 2}, {"wikitext": "hub"}):
        assert "do not compare" in job.evaluation(out / "checkpoint", **nothing | options).about


@pytest.mark.parametrize("bos", [True, False])
def test_a_checkpoint_is_scored_as_it_is_asked_for_and_else_as_its_run_was(bos: bool, tmp_path: Path) -> None:
    default = {"wikitext": None, "documents": None, "window": None, "limit": None, "bos": True}
    alone = job.evaluation(tmp_path, None, None, None, None)
    assert alone.arguments == default and alone.about.startswith("scored on")
    asked = {"wikitext": "hub", "documents": None, "window": 128, "limit": 2, "bos": bos}
    given = job.evaluation(tmp_path, **asked)
    assert given.arguments == asked and given.about == ""
    numbers = {"options": {"wikitext": "hub", "limit": 3, "bos": bos}, "stages": [{"perplexity": {"window": 64}}]}
    (tmp_path / job.RESULTS).write_text(json.dumps(numbers))
    recorded = default | {"wikitext": "hub", "window": 64, "limit": 3, "bos": bos}
    nothing = dict.fromkeys(default)
    same = job.evaluation(tmp_path, **nothing)
    run = f"WikiText-2 from the hub, window 64, the first 3 documents{'' if bos else ', without BOS'}"
    assert same.arguments == recorded and same.about == f"scored as the run that wrote it did: {run}"
    assert job.evaluation(tmp_path, **nothing | {"window": 64, "limit": 3, "bos": bos}) == same
    text = {"wikitext": None, "documents": Path("a.jsonl")}  # in place of the run's
    for option in ({"window": 128}, {"limit": 2}, {"bos": not bos}, {"wikitext": "folder"}, text):
        other = job.evaluation(tmp_path, **nothing | option)
        assert other.arguments == recorded | option and "do not compare" in other.about
        assert f"wrote it scored {run}" in other.about and "because" not in other.about
    assert other.about.startswith("scored on a.jsonl, window 64")


def test_a_text_that_is_gone_is_said_and_a_record_without_bos_means_none(tmp_path: Path) -> None:
    nothing, texts = dict.fromkeys(("wikitext", "documents", "window", "limit")), (tmp_path / "here", tmp_path / "gone")
    texts[0].mkdir()
    (texts[0] / "test.jsonl").touch()
    found = []
    for text in map(str, texts):
        numbers = {"options": {"wikitext": text, "limit": None}, "stages": [{"perplexity": {"window": 64}}]}
        (tmp_path / job.RESULTS).write_text(json.dumps(numbers))
        found.append(job.evaluation(tmp_path, **nothing))
        assert "because" not in job.evaluation(tmp_path, **nothing | {"wikitext": "hub"}).about
    here, gone = found
    assert not here.bos and not gone.bos and (here.wikitext, gone.wikitext) == (str(texts[0]), None)
    assert here.about.endswith(f"did: {texts[0]}, window 64, all documents, without BOS")
    assert f"because there is no {texts[1]} here" in gone.about and "do not compare" in gone.about


def test_the_recovered_share_follows_sign_and_significance() -> None:
    def score(*nats: float) -> Perplexity:
        rest: Any = dict.fromkeys(("window", "documents", "limit", "batch_size", "byte_perplexity", "bits_per_byte"), 1)
        texts: Any = dict.fromkeys(("source", "task", "task_version"), "")
        value = math.exp(-sum(nats) / (10 * len(nats)))
        return Perplexity(word_perplexity=value, loglikelihoods=nats, words=(10,) * len(nats), **rest, **texts)

    base, ptq, half = score(-40.0, -41.0, -42.0), score(-44.0, -45.1, -46.0), score(-42.0, -43.05, -44.0)
    for recovered, said in (
        (job.recovered(base, ptq, half), "50 % of PTQ's loss"),
        (job.recovered(score(-40.0), score(-44.0), score(-42.0)), "n/a"),  # one document
        (job.recovered(base, score(-40.5, -40.6, -42.4), half), "n/a"),  # a loss within noise
        (job.recovered(base, score(-40.2, -41.8, -44.0), half), "n/a"),  # 1.9 of its standard errors
        (job.recovered(base, score(-40.5, -41.8, -43.7), half), "nothing ("),  # 2.8
        (job.recovered(base, score(-38.0, -39.01, -40.0), base), "n/a"),  # PTQ gains
        (job.recovered(base, ptq, score(-45.0, -46.0, -47.1)), "nothing ("),  # QAT loses more
        (job.recovered(base, ptq, score(-43.5, -45.5, -46.1)), "nothing beyond noise"),
    ):
        assert recovered.startswith(said)


def test_lines_of_layers_that_differ_in_their_number_are_one() -> None:
    lines = [f"model.layers.{i}.mlp.up_proj (64, 64): K = 64" for i in range(3)] + ["lm_head (9, 64): K = 64"]
    assert folded(lines) == ["model.layers.*.mlp.up_proj (64, 64): K = 64 (3 layers)", "lm_head (9, 64): K = 64"]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("gguf-q4_0", "gguf"),
        ("q8_0/q8_0-x86", "gguf"),
        ("vllm-int8", "compressed-tensors"),
        ("nvfp4", "compressed-tensors"),
    ],
)
def test_a_run_exports_for_the_engine_of_its_recipe(
    recipe: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, asked = job.Result(recipe, tmp_path / "run", [], "", 0.0, 0, "", "", "", ""), list[object]()
    monkeypatch.setattr(job.Folder, "finished", lambda self: done)
    monkeypatch.setattr(job, "export", lambda *given: asked.extend(given) or tmp_path / "served" / "file")
    o = job.Options(recipe=recipe, out=tmp_path / "run", export=tmp_path / "served", device="cpu")
    assert f"{tmp_path}/served/file" in job.run(o).where_to_look(layout)
    assert asked == [tmp_path / "run" / "checkpoint", tmp_path / "served", layout]


@pytest.mark.parametrize(("weight", "ready"), [("intx4-g32", True), ("int4-g32", False)])
def test_a_run_says_how_its_checkpoint_is_served_or_why_it_is_not(
    weight: str, ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pretrained(converted(weight), tmp_path / "run" / "checkpoint")
    done = job.Result("int4-g32", tmp_path / "run", [], "", 0.0, 0, "", "", "", "")
    monkeypatch.setattr(job, "run", lambda options: done)
    monkeypatch.setattr(job.Result, "table", lambda self: "the table")
    cli.main(["run", "--model", "a-model", "--recipe", "int4-g32", "--out", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert (f"aoquant export {tmp_path}/run/checkpoint --format compressed-tensors" in printed) is ready
    assert ("not ready for an engine" in printed and "no scheme holds int4-g32" in printed) is not ready


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "file"), [("gguf-q4_0", "served/model.gguf"), ("vllm-w4a16-g32", "served")])
def test_a_calibrated_conversion_prints_commands_that_serve_it(
    recipe: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    how: dict[str, Any] = {"ptq": "gptq", "calibrate": tmp_path / "text.txt", "samples": 1, "length": 64}
    cli.convert(Path(job.__file__).parents[3] / "eval" / "assets", recipe, Path("made"), **how)
    printed = capsys.readouterr().out.split()
    folder, layout, out = (printed[printed.index(word) + 1] for word in ("export", "--format", "--out"))
    cli.export(Path(folder), layout, Path(out))  # type: ignore[arg-type]
    assert capsys.readouterr().out.split()[-1] == file and Path(file).exists()


def test_logs_have_no_bars_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # which is no terminal
    transformers_logging.enable_progress_bar()
    try:
        no_bars_in_logs()
        assert not transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.enable_progress_bar()
