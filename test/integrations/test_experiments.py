"""The experiments' command from end to end on a random Llama: runs, resumption, the choice of a rate, the table."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from aoquant.formats import get_format
from aoquant.integrations.schedule import order_of_blocks
from aoquant.tools import choosing

ROOT = Path(__file__).parents[2]
ROWS = {
    "bf16": 'about = "float"\nkind = "float"\nlosses = ["ce"]\nlearning_rates = [1e-3]\nseeds = 1',
    "int4": 'about = "ours"\nkind = "aoquant"\nrecipe = "intx4-g32/"\nheadline = true\nseeds = 2\nlosses = ["kl"]\n'
    'learning_rates = [1e-3, 3e-3]\nagainst = "theirs"',
    "exported": 'about = "ours"\nkind = "aoquant"\nrecipe = "vllm-w4a16-g32"\nseeds = 2\nlosses = ["kl"]\n'
    "learning_rates = [1e-3]\nexport = true",
    "theirs": 'about = "torchao"\nkind = "torchao"\nrecipe = "intx4-g32"\nseeds = 1\nlosses = ["kl"]\nlearning_rates = [1e-3]',
    "lora": 'about = "LoRA"\nkind = "lora"\nrecipe = "int4-g32"\nseeds = 1\nlosses = ["kl"]\nlearning_rates = [1e-2]',
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "eval"))
    return importlib.import_module("experiments")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, wikitext/, text.txt and configs/."""
    folder = tmp_path_factory.mktemp("experiments")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=8192, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2, **size
    )
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(ROOT / "eval" / "assets").save_pretrained(folder / "model")
    draw, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs"]
    pages = [" ".join(draw.choices(words, k=60)) for _ in range(40)]
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(pages))
    (folder / "wikitext").mkdir()
    for name in ("test", "validation"):
        lines = [json.dumps({"page": page}) for page in draw.sample(pages, 3)]
        (folder / "wikitext" / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "configs").mkdir()
    for name, text in ROWS.items():
        (folder / "configs" / f"{name}.toml").write_text(text)
    return folder


def arguments(inputs: Path, out: Path, *more: str) -> list[str]:
    paths = [
        "--model",
        inputs / "model",
        "--wikitext",
        inputs / "wikitext",
        "--configs",
        inputs / "configs",
        "--out",
        out,
    ]
    budget = ["--tokens", "512", "--batch", "2", "--block", "32", "--device", "cpu", "--score-batch", "4"]
    return [*map(str, paths), "--text", str(inputs / "text.txt"), *budget, *more]


def call(modules: ModuleType, inputs: Path, out: Path, *more: str) -> None:
    main = importlib.import_module("experiments.command")
    main.main(main.options(arguments(inputs, out, "--jobs", "0", "--commit", "abc", *more)))


def runs(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def test_a_table_from_end_to_end(
    modules: ModuleType, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    call(modules, inputs, out, "--rows", "bf16", "int4", "theirs", "--dry-run")
    planned = capsys.readouterr().out
    # 8 steps of 64 tokens, 2 in a search
    assert "| int4   | kl     |                  2 |      2 |" in planned and "0.0 M tokens at least" in planned
    assert not out.exists()
    call(modules, inputs, out, "--rows", "bf16", "int4", "theirs")
    found = runs(out)
    kinds = [(r["run"]["row"], r["run"]["stage"]) for r in found]
    assert {k: kinds.count(k) for k in set(kinds) if k[1] != "search"} == {
        ("bf16", "float"): 1, ("bf16", "qat"): 1, ("int4", "ptq"): 1, ("int4", "qat"): 2, ("int4", "checks"): 1,
        ("theirs", "ptq"): 1, ("theirs", "qat"): 1,
    }  # fmt: skip
    assert kinds.count(("int4", "search")) >= 2 and {row for row, stage in kinds if stage == "search"} == {"int4"}
    ours = [r["result"] for r in found if (r["run"]["row"], r["run"]["stage"]) == ("int4", "qat")]
    for result in ours:
        assert result["prepared_word_perplexity"] == result["word_perplexity"] and result["same_per_document"]
    (tuned,) = [r["result"] for r in found if (r["run"]["row"], r["run"]["stage"]) == ("bf16", "qat")]
    assert tuned["last_loss"] < tuned["first_loss"]
    (checked,) = [r for r in found if r["run"]["stage"] == "checks"]
    assert checked["result"]["min_sqnr_db"] == "inf"
    assert {**checked["run"], "stage": "qat"} in [r["run"] for r in found] and checked["run"]["loss"] == "kl"
    assert {r["made"]["commit"] for r in found} == {"abc"}
    with (out / "results.csv").open() as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert rows["int4"]["before and after convert"] == "equal" and rows["int4"]["bits"] == "4.5"
    assert float(rows["int4"]["QAT"]) > 0 and float(rows["int4"]["QAT sd"]) > 0
    assert rows["int4"]["log perplexity less the other's"].startswith("theirs: ")
    assert (
        rows["int4"]["validation, log less the other's"].endswith("(one seed)") and rows["int4"]["published"] == "True"
    )
    assert rows["int4"]["least SQNR of a layer, dB"] == "inf" and rows["bf16"]["rate at an end"] == "False"
    assert (out / "results.md").is_file() and (out / "perplexity.png").is_file()
    call(modules, inputs, out, "--rows", "bf16", "int4", "theirs")
    assert runs(out) == found  # nothing is done twice
    call(modules, inputs, out, "--rows", "bf16", "--cost", "--table")  # --table runs nothing
    assert runs(out) == found


@pytest.mark.slow
def test_processes_an_export_lora_and_costs(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    out, environment = tmp_path / "out", os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def process(*more: str) -> None:
        command = [sys.executable, "eval/experiments", *arguments(inputs, out, *more)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        logs = "".join(path.read_text()[-3000:] for path in (out / "logs").glob("*.log"))
        assert done.returncode == 0, done.stderr + logs

    process("--rows", "exported", "lora", "--jobs", "2")
    found = {r["run"]["row"]: r["result"] for r in reversed(runs(out)) if r["run"]["stage"] == "qat"}
    (checked,) = [r["result"] for r in runs(out) if r["run"]["stage"] == "checks"]
    assert found["lora"]["prepared_word_perplexity"] == found["lora"]["word_perplexity"]
    assert math.isclose(checked["transformers_word_perplexity"], found["exported"]["word_perplexity"], rel_tol=2e-3)
    process("--rows", "exported", "--cost")
    (cost,) = [r["result"] for r in runs(out) if r["run"]["stage"] == "cost"]
    assert cost["train_tokens_s"] > 0 and cost["model_bytes"] > 0 and cost["generate_tokens_s"] > 0


def test_a_run_that_met_its_deadline_goes_on_with_the_same_bits(
    modules: ModuleType, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tuning", "students", "rows"))
    monkeypatch.setattr(tuning, "LOOK", 2)
    blocks = torch.arange(12 * 16).view(12, 16) % 31
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    row = rows.Row("r", "", "aoquant", "quartet")  # its backward draws random numbers
    student = students.Student(row, float_model, blocks)
    budget = tuning.Budget(steps=5, batch=2, block=16)

    def fresh() -> Any:
        return tuning.FineTune(student.prepared(0), float_model, blocks, budget, compile=False, graph=False)

    weights, kept = student.prepared(7).state_dict(), tmp_path / "kept.pt"
    straight = fresh()
    losses = straight.run(weights, 7, 1e-2)
    stopped = fresh()
    assert stopped.run(weights, 7, 1e-2, kept=kept, until=0.0) is None and kept.is_file()
    assert fresh().run(weights, 7, 1e-2, kept=kept, until=0.0) is None  # in another process
    assert stopped.run(weights, 7, 1e-2, kept=kept) == losses and not kept.exists()
    assert stopped.run(weights, 7, 1e-2) == losses  # and once more, with the same optimizer
    for name, value in straight.student.state_dict().items():
        assert torch.equal(value, stopped.student.state_dict()[name]), name
    assert stopped.run(weights, 8, 1e-2) != losses  # another order of the text


@pytest.mark.parametrize("trick", ["average", "dampen", "features", "freeze", "soft", "scales"])
def test_a_trick_changes_the_weights_and_goes_on_after_a_stop(
    modules: ModuleType, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trick: str
) -> None:
    tuning, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tuning", "students", "rows"))
    monkeypatch.setattr(tuning, "LOOK", 2)
    blocks = torch.arange(12 * 8).view(12, 8) % 31
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    recipe = "intx4-g32/" if trick == "scales" else "mxfp4"
    student = students.Student(rows.Row("r", "", "aoquant", recipe, trick=trick), float_model, blocks)
    weights, kept = student.prepared(0).state_dict(), tmp_path / "kept.pt"

    def made(trick: str, until: float = math.inf) -> Any:
        budget = tuning.Budget(steps=4, batch=2, block=8)
        tune = tuning.FineTune(
            student.prepared(0), float_model, blocks, budget, compile=False, graph=False, trick=trick
        )
        while tune.run(weights, 0, 1e-2, kept=kept, until=until) is None:
            until = math.inf
        return tune.student.model.layers[0].mlp.up_proj.weight.detach()

    straight, stopped = made(trick), made(trick, until=0.0)
    assert torch.equal(straight, stopped)
    if trick in ("scales", "freeze"):  # below: on their own
        return
    plain = made("")
    assert not torch.equal(plain, straight)
    rounding = [(w - rounded(w)).float().norm() for w in (plain, straight)]
    assert trick != "dampen" or rounding[1] < rounding[0]


def test_a_weight_that_hops_to_and_fro_is_frozen_where_it_was_longer(modules: ModuleType) -> None:
    tricks = importlib.import_module("experiments.tricks")
    never, soon = torch.tensor(math.inf), torch.tensor(0.05)
    hops = tricks.Hops(torch.tensor([0.0, 0.0, 0.0], dtype=torch.bfloat16))
    for step in range(300):  # the first hops, mostly at 1; the second climbs; the third's scale alone goes to and fro
        hops.see(torch.tensor([float(step % 3 > 0), 2.0 ** (step // 8), 1 + step % 2 / 8], dtype=torch.bfloat16), never)
    assert not hops.frozen.any()
    hops.see(torch.tensor([0.0, 2.0**38, 1.0], dtype=torch.bfloat16), soon)
    assert hops.frozen.tolist() == [True, False, False] and hops.at[0] == 1.0
    hops.begin(torch.zeros(3, dtype=torch.bfloat16))
    assert not hops.frozen.any() and not hops.often.any()


def test_frozen_weights_stay(modules: ModuleType, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tricks, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tricks", "students", "rows"))
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    model = students.Student(rows.Row("r", "", "aoquant", "mxfp4"), float_model, torch.zeros(1, 8).long()).prepared(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters, progress = [p.detach().float().clone() for p in trained], torch.tensor(1.0)
    freeze = tricks.Freeze(model, trained, masters, progress)
    hops, (layer, master) = freeze.hops[0], freeze.pairs[0]
    hops.often[0, 0] = 1.0
    kept = hops.last[0, 0].item()
    freeze.step()
    assert hops.frozen.sum() == 1 and master[0, 0] == layer.weight[0, 0] == kept
    master += 0.5
    freeze.step()
    assert master[0, 0] == kept and master[0, 1] != kept  # the optimizer moves the others alone


def test_a_soft_layer_goes_over_from_float_to_quantised(modules: ModuleType, inputs: Path) -> None:
    tricks, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tricks", "students", "rows"))
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    student = students.Student(rows.Row("r", "", "aoquant", "mxfp4"), float_model, torch.zeros(1, 8).long())
    model, ids = student.prepared(0).eval(), torch.arange(8)[None]
    trained, progress = [p for p in model.parameters() if p.requires_grad], torch.tensor(0.0)
    quantised = model(ids).logits
    soft = tricks.Soft(model, trained, trained, progress)
    soft.begin()
    assert torch.equal(model(ids).logits, float_model.eval()(ids).logits)
    progress.fill_(tricks.SOFT / 2)
    soft.step()
    between = model(ids).logits
    assert not torch.equal(between, quantised) and not torch.equal(between, float_model(ids).logits)
    progress.fill_(tricks.SOFT)
    soft.step()
    assert torch.equal(model(ids).logits, quantised)


def test_learned_scales_move_relative_to_their_size(modules: ModuleType, inputs: Path) -> None:
    tricks, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tricks", "students", "rows"))
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    row = rows.Row("r", "", "aoquant", "intx4-g32/", trick="scales")
    model = students.Student(row, float_model, torch.zeros(1, 8).long()).prepared(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone() for p in trained]
    scales = tricks.Scales(model, trained, masters, torch.tensor(0.0))
    scales.begin()
    p, master = scales.pairs[0]
    before, size = master.clone(), master.abs().mean()
    master += 0.01  # AdamW's step at a rate of .01
    scales.step()
    assert torch.allclose(master, before + 0.01 * size) and torch.equal(p, master.to(p.dtype))
    with pytest.raises(ValueError, match="scales needs a row"):
        tricks.Scales(float_model, [], [], torch.tensor(0.0))


def rounded(w: torch.Tensor) -> torch.Tensor:
    format = get_format("mxfp4")
    return format.decode(format.encode(w), w.dtype)


def test_the_order_visits_every_block_before_any_twice() -> None:
    order = order_of_blocks(7, steps=5, batch=2, seed=1).flatten().tolist()
    assert sorted(order[:7]) == list(range(7)) and len(set(order[7:])) == 3


SEARCH = {3e-4: 2.6, 1e-3: 2.0, 3e-3: 3.0}  # loss on validation pages


def test_rates_are_chosen_on_validation_pages_and_shares_are_of_log_perplexity(modules: ModuleType) -> None:
    records, table, rows = (importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows"))
    run = records.Run

    def result(validation: float, test: float) -> dict[str, float]:
        return {"validation_loss": validation, "word_perplexity": test, "prepared_word_perplexity": test}

    found = {
        run("bf16", "float"): {"word_perplexity": 10.0},
        run("a", "ptq"): {"word_perplexity": 40.0},
        **{run("a", "search", "kl", rate): {"validation_loss": v} for rate, v in SEARCH.items()},
        run("a", "qat", "kl", 1e-3, 0): result(2.0, 20.0),
        run("a", "qat", "kl", 1e-3, 1): result(2.5, 10.0),
    }
    row = rows.Row("a", "", "aoquant", "nvfp4", losses=("kl",), learning_rates=(3e-4, 1e-3, 3e-3), seeds=2)
    (line,) = table.lines({"a": row}, found)
    assert line.rate == 1e-3 and line.perplexities == {0: 20.0, 1: 10.0}
    assert line.recovered() == pytest.approx([0.5, 1.0])
    assert [v.said for v in line.verdicts()] == ["equal"] and table.broken({"a": row}, found) == []
    found[run("a", "qat", "kl", 1e-3, 1)]["prepared_word_perplexity"] = 10.0001
    assert table.broken({"a": row}, found) == ["a, kl: before and after convert differ by 1.0e-05"]
    assert records.chosen_rate(found, "a", "ce", (1e-3, 3e-3)) is None
    assert records.chosen_rate({}, "a", "kl", (3e-4,)) == 3e-4  # a single one is not searched
    # pairs: the common factor of a seed drops out
    assert table.difference({0: 11.0, 1: 22.0, 2: 5.51}, {0: 10.0, 1: 20.0, 2: 5.0}).endswith("3 seeds: worse")
    assert table.difference({0: 11.0, 1: 18.0}, {0: 10.0, 1: 20.0}).endswith("2 seeds: within noise")


def test_the_search_for_a_rate_goes_on_while_the_best_lies_at_an_end(modules: ModuleType) -> None:
    records = importlib.import_module("experiments.records")
    next_rate, rates = records.next_rate, (1e-4, 3e-4, 1e-3)
    assert next_rate({}, rates) == 1e-4 and next_rate({1e-4: 2.0, 3e-4: 1.0}, rates) == 1e-3
    assert next_rate({1e-4: 2.0, 3e-4: 1.0, 1e-3: 3.0}, rates) is None
    assert next_rate({1e-4: 2.0, 3e-4: 1.5, 1e-3: 1.0}, rates) == 3e-3
    assert next_rate({1e-4: 2.0, 3e-4: 1.5, 1e-3: 1.0, 3e-3: 1.1}, rates) is None
    assert next_rate({1e-4: 1.0, 3e-4: 1.5, 1e-3: 2.0}, rates) == 3e-5
    assert next_rate(dict.fromkeys(records.LADDER, 1.0), rates) is None  # no rate is left
    run = records.Run("a", "search", "kl", 1e-3)
    assert records.searched({run: {"validation_loss": 2.0}}, "a", "kl") == {1e-3: 2.0}
    assert records.searched({run: {"validation_loss": 2.0}}, "a", "ce") == {}


def test_a_run_that_cannot_end_in_time_is_not_begun(modules: ModuleType) -> None:
    pace = importlib.import_module("experiments.worker").Pace()
    assert pace.expected(100) == 0.0  # the first run is always begun
    pace.took(10, training=5.0, after=2.0)
    assert pace.expected(100) == 52.0


def test_processes_take_the_gpus_in_turn(modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, processes, rows = (importlib.import_module(f"experiments.{n}") for n in ("command", "processes", "rows"))
    taken: list[str] = []

    class Fake:
        def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
            taken.append(env["CUDA_VISIBLE_DEVICES"])

        def poll(self) -> int | None:
            return 0 if len(taken) == 3 else None

        returncode = 0

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(processes.subprocess, "Popen", Fake)
    (tmp_path / "logs").mkdir()
    paths = ["--wikitext", str(tmp_path), "--out", str(tmp_path), "--device", "cuda", "--commit", "x"]
    with command.alone(tmp_path) as lock:
        workers = processes.Processes(command.options([*paths, "--jobs", "4"]), lock)
        for name in ("a", "b", "c"):
            workers.begin(rows.Row(name, "", "float"), "ce", 0.0)
    assert taken == ["4", "6", "4"]
    assert workers.ended() == {"a, ce": 0, "b, ce": 0, "c, ce": 0} and not workers.running


def test_the_pages_are_written_from_a_table(modules: ModuleType, tmp_path: Path) -> None:
    records, table, rows, publish = (
        importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows", "publish")
    )
    out, root, every = tmp_path / "out", tmp_path / "root", rows.load_all()
    facts = {"device": "a GPU", "date": "2026-01-02T03", "dense parameters": 2e7, "dense tokens a run": 1e7}
    names = ("README.md", "docs/choosing.md", "docs/figures/draw.py", "aoquant/tools/measured.csv")
    figures = (f"benchmarks/results/{name}.csv" for name in ("recover_h200", "gradients"))
    for name in (*names, *figures):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    found = {records.Run("bf16", "float"): {"word_perplexity": 50.0}}
    kept = {name: every[name] for name in ("bf16", "nvfp4", "nvfp4-average", "int4-g128", "torchao-int4-g128")}
    for row in list(kept.values())[1:]:
        found[records.Run(row.name, "ptq")] = {"word_perplexity": 70.0}
        qat = {"int4-g128": 53.0, "torchao-int4-g128": 57.0, "nvfp4-average": 52.0}.get(row.name, 55.0)
        for rate, loss in ((3e-5, 3.0), (1e-4, 2.0), (3e-4, 1.0), (1e-3, 3.0)):
            found[records.Run(row.name, "search", "kl", rate)] = {"validation_loss": loss}
        for seed in range(2):
            result = {"validation_loss": 1.0, "word_perplexity": qat + seed, "prepared_word_perplexity": qat + seed}
            note = {"as_prepared": "Requires a kernel"} if row.kind == "torchao" else {}
            found[records.Run(row.name, "qat", "kl", 3e-4, seed)] = {**result, "weight_bits": 4.25, **note}
    out.mkdir()
    (out / "runs.jsonl").write_text("")
    before = (root / "README.md").read_text(encoding="utf-8")
    table.write(out, {"bf16": every["bf16"]}, found, facts)
    with pytest.raises(ValueError, match="no headline row"):
        publish.publish(out, root)
    assert (root / "README.md").read_text(encoding="utf-8") == before
    table.write(out, kept, found, facts)
    publish.publish(out, root)
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert (
        "| `int4-g128` | 4.25 | 50.00 | 70.00 | 53.50 ± 0.71 | 79.9 ± 3.9 | 2 | 57.50 ± 0.71 † | 58.5 ± 3.7 † | 2 |"
        in readme
    )
    assert "† PTQ and QAT are scores of torchao's prepared model" in (said := readme.replace("\n", " "))
    assert '("Requires a kernel")' in said and "converted by its own" not in said
    assert "20.0 M parameters" in readme and "a GPU, 2026-01-02" in readme and "experiments.md" in readme
    assert "nvfp4-average" not in readme and readme.count("docs/figures/bits.svg") == 1
    assert len(readme.splitlines()) <= 130 and max(map(len, readme.splitlines())) < 400
    numbers = choosing.measured(root / "aoquant" / "tools" / "measured.csv")
    assert {name: m.qat for name, m in numbers.items()} == {
        "nvfp4": 55.5,
        "int4-g128": 53.5,
    }  # no trick's, no torchao's
    page = (root / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert choosing.markdown(numbers) in page and "| 4.25 | 1.400 | 1.070 | 2 |" in page
    figure = (root / "docs" / "figures" / "bits.svg").read_text(encoding="utf-8")
    assert 'class="hollow"' in figure and "scored as prepared" in figure
    assert ">int4-g128<" in figure and ">53.5<" in figure and ">4.25<" in figure
    publish.publish(out, root)
    assert (root / "README.md").read_text(encoding="utf-8") == readme  # a second time changes nothing


def results(records: ModuleType, losses: dict[str, dict[float, float]]) -> dict[Any, dict[str, Any]]:
    """Runs of a row "a" of two seeds at the best of these rates (rate -> loss on validation pages), by loss."""
    run = records.Run
    found = {run("bf16", "float"): {"word_perplexity": 10.0}, run("a", "ptq"): {"word_perplexity": 40.0}}
    for loss, tried in losses.items():
        best = min(tried, key=tried.__getitem__)
        found |= {run("a", "search", loss, rate): {"validation_loss": v} for rate, v in tried.items()}
        score = {"word_perplexity": 20.0, "prepared_word_perplexity": 20.0, "validation_loss": tried[best]}
        found |= {run("a", "qat", loss, best, seed): {**score, "weight_bits": 4.0} for seed in range(2)}
    return found


GOOD = {"min_sqnr_db": "inf", "cpu_codes_equal": True, "cpu_nats_a_word": 0.0106, "transformers_word_perplexity": 20.1}


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        ("checks", {}, None),
        ("checks", {"min_sqnr_db": "21.0"}, "least SQNR of a layer, dB 21.0"),
        ("checks", {"cpu_codes_equal": False}, "codes on a CPU differ"),
        ("checks", {"cpu_nats_a_word": 0.03}, "nats a word on a CPU 0.0300"),
        ("checks", {"transformers_word_perplexity": 1.0}, "exported, by transformers 1.000: -2.99573 nats a word"),
        ("checks", {"transformers_word_perplexity": "KeyError"}, "exported, by transformers KeyError"),
        ("checks", {"not_exported": "needs a package", "transformers_word_perplexity": None}, None),
        ("qat", {"same_per_document": False}, "before and after convert differ document by document"),
    ],
)
def test_a_check_that_fails_fails_the_command(
    modules: ModuleType, stage: str, change: dict[str, Any], said: str | None
) -> None:
    records, table, rows = (importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows"))
    found = results(records, {"kl": SEARCH})
    run = records.Run("a", stage, "kl", 1e-3, 1)
    found[records.Run("a", "checks", "kl", 1e-3, 1)] = GOOD
    found[run] = {**found[run], **change}
    row = rows.Row("a", "", "aoquant", "mxfp4", learning_rates=(*SEARCH,))
    assert table.broken({"a": row}, found) == ([] if said is None else [f"a, kl: {said}"])
    if said is None:  # the bound of an export without quantised activations is tighter
        weights_alone = dataclasses.replace(row, recipe="intx4-g32/")
        assert len(table.broken({"a": weights_alone}, found)) == ("not_exported" not in change)


def test_checks_stand_beside_the_run_that_they_are_of(modules: ModuleType) -> None:
    records, table, rows = (importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows"))
    found = results(records, {"kl": SEARCH, "ce": SEARCH})
    found[records.Run("a", "checks", "kl", 1e-3, 1)] = {**GOOD, "transformers_word_perplexity": 22.0}
    found[records.Run("a", "qat", "kl", 1e-3, 1)]["word_perplexity"] = 22.0
    found[records.Run("a", "qat", "kl", 1e-3, 1)]["prepared_word_perplexity"] = 22.0
    row = rows.Row("a", "", "aoquant", "mxfp4", learning_rates=(*SEARCH,))
    kl, ce = table.lines({"a": row}, found)
    said = {v.column: v.said for v in kl.verdicts()}
    assert said["exported, by transformers"] == "equal"  # to seed 1's score, not the mean's
    assert [v.column for v in ce.verdicts()] == ["before and after convert"]


def test_validation_pages_choose_the_loss_that_is_published(modules: ModuleType) -> None:
    records, table, rows = (importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows"))
    row = rows.Row("a", "", "aoquant", "mxfp4", learning_rates=(*SEARCH,))
    better = {rate: loss - 0.5 for rate, loss in SEARCH.items()}
    for losses, loss, words in (
        ({"kl": SEARCH}, "kl", "by distillation (cross entropy was not run)"),
        ({"kl": SEARCH, "ce": better}, "ce", "the latter for a)"),
        ({"kl": better, "ce": SEARCH}, "kl", "the latter for none)"),
    ):
        made = table.lines({"a": row}, results(records, losses))
        assert table.preferred(made) == {"a": loss}
        assert words in table.by(made, [line for line in made if line.loss == loss])


def test_a_rate_at_an_end_is_marked_and_its_runs_stay(modules: ModuleType) -> None:
    records, table, rows = (importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows"))
    tried = {1e-5: 1.0, 3e-5: 2.0}
    row = rows.Row("a", "", "aoquant", "mxfp4", learning_rates=(1e-5, 3e-5))
    found = results(records, {"kl": tried})
    (line,) = table.lines({"a": row}, found)
    assert records.next_rate(tried, (1e-5, 3e-5)) == 3e-6  # the search goes on below
    assert line.at_end and table.cells(line, [line], found)["rate"] == "1e-05, at an end" and len(line.runs) == 2
    (line,) = table.lines({"a": row}, results(records, {"kl": {3e-6: 3.0, **tried}}))
    assert not line.at_end


def test_results_are_of_their_texts(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    command, setting = (importlib.import_module(f"experiments.{n}") for n in ("command", "setting"))
    text, out, wikitext = tmp_path / "other.txt", tmp_path / "out", tmp_path / "wikitext"
    out.mkdir()
    shutil.copytree(inputs / "wikitext", wikitext)
    pages = (inputs / "text.txt").read_text()
    text.write_text(pages)

    def made(*more: str) -> Any:
        return setting.Setting(command.options([*arguments(inputs, out), "--wikitext", str(wikitext), *more]), "dense")

    first = made()
    first.tokenise()
    assert made("--text", str(text)).settings == first.settings  # the same text by another name
    assert made("--text").settings == first.settings  # what OUT holds
    text.write_text(pages.replace("cat", "mat"))
    other = made("--text", str(text))
    assert other.settings != first.settings
    assert not torch.equal(other.corpus["train"], first.corpus["train"])
    with pytest.raises(ValueError, match="holds tokens or runs of 2 texts"):
        made("--text")
    validation = wikitext / "validation.jsonl"
    validation.write_text(validation.read_text().replace("dogs", "cats"))
    changed = made()
    assert changed.settings != first.settings
    assert not torch.equal(changed.corpus["validation"], first.corpus["validation"])
    for path in out.glob("corpus-*"):
        path.unlink()
    with pytest.raises(ValueError, match="--text is needed"):
        made("--text")
    other.records.add(importlib.import_module("experiments.records").Run("a", "ptq"), {"word_perplexity": 1.0})
    validation.write_text((inputs / "wikitext" / "validation.jsonl").read_text())
    assert made("--text").settings == other.settings  # a table of the runs alone


def test_a_stopped_run_is_taken_up_by_the_same_alone(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    command, setting, worker, records, rows = (
        importlib.import_module(f"experiments.{n}") for n in ("command", "setting", "worker", "records", "rows")
    )
    text = inputs / "text.txt"
    row, run = rows.Row("a", "", "aoquant", "mxfp4"), records.Run("a", "qat", "kl", 1e-3, 0)

    def name(row: Any, *more: str) -> str:
        made = setting.Setting(command.options([*arguments(inputs, tmp_path), *more]), "dense")
        return str(worker.state_file(made, row, run))

    again = [name(row), name(row), name(dataclasses.replace(row, about="x", seeds=7))]
    others = [name(row, "--tokens", "1024"), name(row, "--text", str(text), str(text))]
    others += [name(dataclasses.replace(row, trick="soft")), name(dataclasses.replace(row, recipe="nvfp4"))]
    assert len({*again}) == 1 and len({*again, *others}) == 5


def test_a_state_of_another_length_is_refused(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    tuning, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tuning", "students", "rows"))
    blocks = torch.arange(12 * 8).view(12, 8) % 31
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    student = students.Student(rows.Row("r", "", "float"), float_model, blocks)
    weights, kept = student.prepared(0).state_dict(), tmp_path / "kept.pt"
    tune = tuning.FineTune(student.prepared(0), None, blocks, tuning.Budget(40, 2, 8), compile=False, graph=False)
    assert tune.run(weights, 0, 1e-3, kept=kept, until=0.0) is None
    with pytest.raises(ValueError, match="must be of a run of 10 steps, got 40"):
        tune.run(weights, 0, 1e-3, steps=10, kept=kept)


def test_an_end_by_signal_ends_the_workers_and_one_call_has_the_folder(
    modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, processes, rows = (importlib.import_module(f"experiments.{n}") for n in ("command", "processes", "rows"))
    began: list[subprocess.Popen[bytes]] = []
    Popen = subprocess.Popen

    def begin(_: list[str], **how: Any) -> Any:
        began.append(Popen(["sh", "-c", "sleep 60 & wait"], **how))  # a worker with a process of its own
        return began[0]

    def stop(*_: Any) -> None:
        with pytest.raises(ValueError, match="is in use by another call"), command.alone(tmp_path):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "chosen", lambda o: {})
    monkeypatch.setattr(command, "tasks", lambda o, rows_, settings: [(rows.Row("a", "", "float"), "ce")])
    monkeypatch.setattr(processes.subprocess, "Popen", begin)
    monkeypatch.setattr(command.time, "sleep", stop)
    paths = ["--wikitext", str(tmp_path), "--out", str(tmp_path), "--device", "cpu", "--commit", "x"]
    monkeypatch.setattr(sys, "argv", ["experiments", *paths])
    before = signal.signal(signal.SIGTERM, lambda *_: began[0].kill())  # without a handler of its own the test fails
    try:
        with pytest.raises(SystemExit) as ended:
            command.start(0.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM and began[0].returncode == -signal.SIGKILL
    for _ in range(1000):  # its sleep is killed too, and holds the lock until it has ended
        with suppress(ValueError), command.alone(tmp_path):
            break
        threading.Event().wait(0.01)
    else:
        pytest.fail("a process of the worker's is left and holds the folder")


def test_the_rows_of_the_table_can_be_made(modules: ModuleType) -> None:
    rows = importlib.import_module("experiments.rows")
    found = rows.load_all()
    assert sum(row.headline for row in found.values()) == 8
    assert {row.seeds for row in found.values() if row.headline} == {5}
    assert next(iter(found.values())).kind == "float"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('about = "x"\nkind = "aoquant"\nrecipe = "nvfp5"', "no recipe is called 'nvfp5'"),
        ('about = "x"\nkind = "other"', "kind must be one of float"),
        ('about = "x"\nkind = "float"\nrates = [1]', "no key rates"),
        ('about = "x"\nkind = "torchao"\nrecipe = "int5"', "recipe must be one of torchao's"),
        ('about = "x"\nkind = "float"\nagainst = "nothing"', "against names no row"),
    ],
)
def test_a_row_that_is_wrong_is_refused(modules: ModuleType, tmp_path: Path, text: str, said: str) -> None:
    rows = importlib.import_module("experiments.rows")
    (tmp_path / "row.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        rows.load_all(tmp_path)
