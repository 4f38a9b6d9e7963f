"""The experiments' table: how a rate and a loss are chosen, what a check that fails says, the pages made of it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.experiments import ROOT, experiments_modules

from aoquant.tools import choosing

modules = pytest.fixture(experiments_modules)
SEARCH = {3e-4: 2.6, 1e-3: 2.0, 3e-3: 3.0}  # loss on validation pages
GOOD = {"min_sqnr_db": "inf", "cpu_codes_equal": True, "cpu_nats_a_word": 0.0106, "transformers_word_perplexity": 20.1}


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


def copied(root: Path, *names: str) -> None:
    """Files of the repository in a root that tests may write to."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)


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
    assert str(table.difference({0: 11.0, 1: 22.0, 2: 5.51}, {0: 10.0, 1: 20.0, 2: 5.0})).endswith("3 seeds: worse")
    assert str(table.difference({0: 11.0, 1: 18.0}, {0: 10.0, 1: 20.0})).endswith("2 seeds: not told apart")
    assert str(table.difference({0: 10.0, 1: 9.0}, {0: 10.0})) == "+0.0000 (one seed)"
    assert table.difference({0: 10.0}, {1: 10.0}) is None


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


def line(row: str, stage: str, **result: float) -> str:
    """Of runs.jsonl."""
    run = {"row": row, "stage": stage, "loss": "", "rate": 0.0, "seed": 0}
    return json.dumps({"run": run, "result": result})


def test_the_pages_are_written_from_a_table(modules: ModuleType, tmp_path: Path) -> None:
    records, table, rows, publish = (
        importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows", "publish")
    )
    out, root, every = tmp_path / "out", tmp_path / "root", rows.load_all()
    facts = {"device": "a GPU", "date": "2026-01-02", "dense parameters": 2e7, "dense tokens a run": 1e7}
    names = (
        "README.md",
        "docs/choosing.md",
        "docs/evidence/experiments.md",
        "docs/figures/draw.py",
        "aoquant/tools/measured.csv",
    )
    figures = (f"benchmarks/results/{name}.csv" for name in ("recover_h200", "gradients", "pretrain_mixes_h200"))
    copied(root, *names, *figures)
    found = {records.Run("bf16", "float"): {"word_perplexity": 50.0}}
    kept = {name: every[name] for name in ("bf16", "nvfp4", "nvfp4-average", "int4-g128", "torchao-int4-g128")}
    for row in list(kept.values())[1:]:
        note = {"as_prepared": "Requires a kernel"} if row.kind == "torchao" else {}
        found[records.Run(row.name, "ptq")] = {"word_perplexity": 70.0, **note}
        qat = {"int4-g128": 53.0, "torchao-int4-g128": 57.0, "nvfp4-average": 52.0}.get(row.name, 55.0)
        for rate, loss in ((3e-5, 3.0), (1e-4, 2.0), (3e-4, 1.0), (1e-3, 3.0)):
            found[records.Run(row.name, "search", "kl", rate)] = {"validation_loss": loss}
        for seed in range(2):
            result = {"validation_loss": 1.0, "word_perplexity": qat + seed, "prepared_word_perplexity": qat + seed}
            found[records.Run(row.name, "qat", "kl", 3e-4, seed)] = {**result, "weight_bits": 4.25, **note}
    out.mkdir()
    cost = [
        line("bf16", "cost", train_tokens_s=200.0, peak_bytes=1000), line("bf16", "generate", tokens_s=9, bf16_tokens_s=9),
        line("int4-g128", "cost", train_tokens_s=190.0, peak_bytes=1010),
        line("int4-g128", "generate", tokens_s=12.0, bf16_tokens_s=10.0, model_bytes=17_000_000),
        line("int4-g128", "cost", train_tokens_s=1.0, peak_bytes=1),  # the first line counts
    ]  # fmt: skip
    (out / "runs.jsonl").write_text("\n".join(cost))
    before = (root / "README.md").read_text(encoding="utf-8")
    table.write(out, {"bf16": every["bf16"]}, found, facts)
    with pytest.raises(ValueError, match="no headline row"):
        publish.publish(out, root=root)
    assert (root / "README.md").read_text(encoding="utf-8") == before
    table.write(out, kept, found, facts)
    publish.publish(out, root=root)
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert "| `int4-g128` | 4.25 | 70.00 | 53.50 ± 0.71 | 57.50 ± 0.71 † |" in readme
    assert "mean over 2 seeds, 2 of torchao's." in (said := readme.replace("\n", " ")) and "Float: 50.00." in said
    assert "† PTQ and QAT are scores of torchao's prepared model" in said
    assert '("Requires a kernel")' in said and "converted by its own" not in said
    assert "20.0 M parameters" in readme and "a GPU, 2026-01-02" in readme and "experiments.md" in readme
    assert "nvfp4-average" not in readme and readme.count("docs/figures/bits.svg") == 1
    assert len(readme.splitlines()) <= 100 and max(map(len, readme.splitlines())) < 400
    numbers = choosing.measured(root / "aoquant" / "tools" / "measured.csv")
    # no trick's, no torchao's
    assert {name: m.qat for name, m in numbers.items()} == {"nvfp4": 55.5, "int4-g128": 53.5}
    page = (root / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert choosing.markdown(numbers) in page and "| 4.25 | 1.400 | 1.070 | 2 |" in page
    figure = (root / "docs" / "figures" / "bits.svg").read_text(encoding="utf-8")
    assert 'class="hollow"' in figure and "scored as prepared" in figure
    assert ">int4-g128<" in figure and ">53.5<" in figure and ">4.25<" in figure
    page = (root / "docs" / "evidence" / "experiments.md").read_text(encoding="utf-8")
    assert "| `int4-g128` | 4.25 | 70.00 | 53.50 ± 0.71 | 79.9 ± 3.9 | 2 | 57.50 ± 0.71 † | 58.5 ± 3.7 † | 2 |" in page
    assert "| `int4-g128` | 0.95 | 1.01 | 17.0 | 1.20 |" in page and page.count("## Stopping and going on") == 1
    assert "`bf16` |" not in page.partition("<!-- costs -->")[2].partition("<!-- end of costs -->")[0]
    publish.publish(out, root=root)
    assert (root / "README.md").read_text(encoding="utf-8") == readme  # a second time changes nothing


def test_an_earlier_model_changes_no_page_but_for_its_runs(modules: ModuleType, tmp_path: Path) -> None:
    records, table, rows, publish = (
        importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows", "publish")
    )
    out, root, every = tmp_path / "out", tmp_path / "root", rows.load_all()
    model, results, page = (
        tmp_path / "run" / "model",
        root / "benchmarks" / "results",
        root / "docs" / "evidence" / "experiments.md",
    )
    for folder in (out, model, results):
        folder.mkdir(parents=True)
    kept = ("README.md", "docs/choosing.md", "aoquant/tools/measured.csv")
    copied(root, "docs/evidence/experiments.md", *kept)
    found = {records.Run("bf16", "float"): {"word_perplexity": 50.0}}
    shown = {name: every[name] for name in ("bf16", "mxfp4")}
    found[records.Run("mxfp4", "ptq")] = {"word_perplexity": 70.0}
    result = {"validation_loss": 1.0, "word_perplexity": 53.0, "prepared_word_perplexity": 53.0, "weight_bits": 4.25}
    found[records.Run("mxfp4", "qat", "kl", 3e-4)] = result
    facts = {"device": "a GPU", "date": "2026", "dense parameters": 2e7, "dense tokens a run": 1e7}
    table.write(out, shown, found, facts)
    (out / "runs.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"--model must be .* train_log\.json beside it"):
        publish.publish(out, "earlier", model, root)
    assert not [*results.iterdir()]
    (model.parent / "train_log.json").write_text('{"date": "2026", "losses": [1.0]}')
    (model.parent / "loss.csv").write_text("step\n")
    publish.publish(out, "earlier", model, root)
    runs = {f"experiments_earlier{end}" for end in (".csv", ".md", "_runs.jsonl")}
    logs = {"pretrain_llama_earlier.json", "pretrain_llama_earlier_loss.csv"}
    assert {path.name for path in results.iterdir()} == runs | logs
    assert "losses" not in (results / "pretrain_llama_earlier.json").read_text()
    assert all((root / name).read_bytes() == (ROOT / name).read_bytes() for name in kept)
    said, before = (path.read_text(encoding="utf-8") for path in (page, ROOT / "docs" / "evidence" / "experiments.md"))
    for mark in ("all rows", "costs", "losses", "experts"):
        ends = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        assert len({text.partition(ends[0])[2].partition(ends[1])[0] for text in (said, before)}) == 1, mark
    assert ", given |" in (out / "results.md").read_text(encoding="utf-8")


def test_a_model_of_experts_alone_has_a_table(modules: ModuleType, tmp_path: Path) -> None:
    records, table, rows, publish = (
        importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows", "publish")
    )
    out, root, model, every = tmp_path / "out", tmp_path / "root", tmp_path / "run" / "model", rows.load_all()
    results, page = root / "benchmarks" / "results", root / "docs" / "evidence" / "experiments.md"
    for folder in (out, model, results):
        folder.mkdir(parents=True)
    copied(root, "docs/evidence/experiments.md", "docs/choosing.md", "aoquant/tools/measured.csv")
    (out / "runs.jsonl").write_text("")
    (model.parent / "train_log.json").write_text('{"date": "2026", "losses": [1.0]}')
    (model.parent / "loss.csv").write_text("step\n")
    kept, run = {name: every[name] for name in ("bf16-moe", "moe-int4-g32-experts")}, records.Run
    qat = {"validation_loss": 1.0, "word_perplexity": 53.0, "prepared_word_perplexity": 53.0, "weight_bits": 5.25}
    found = {
        run("bf16-moe", "float"): {"word_perplexity": 50.0},
        run("moe-int4-g32-experts", "ptq"): {"word_perplexity": 70.0},
    }
    found |= {run("moe-int4-g32-experts", "qat", "kl", 3e-4): qat, run("bf16-moe", "qat", "ce", 1e-5): qat}
    facts = {"device": "a GPU", "date": "2026", "moe parameters": 2e7, "moe tokens a run": 1e7}
    table.write(out, kept, found, facts)
    publish.publish(out, "moe", model, root)
    assert {path.name for path in results.glob("experiments*")} == {
        f"experiments_moe{e}" for e in (".csv", ".md", "_runs.jsonl")
    }
    said = page.read_text(encoding="utf-8")
    assert "| `moe-int4-g32-experts` | 5.25 | 70.00 | 53.00 | 82.7 | 1 |\n\n" in said  # no column of torchao's
    file = "aoquant/tools/measured.csv"
    assert (root / file).read_bytes() == (ROOT / file).read_bytes()  # no choice of experts
    assert "a Mixtral with 20.0 M parameters" in (words := said.replace("\n", " ")) and "same tokens 53.00." in words


def test_the_rates_of_a_table_are_taken_without_a_search(modules: ModuleType, tmp_path: Path) -> None:
    records, table, rows = (importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows"))
    row, other = (rows.Row(name, "", "aoquant", "mxfp4", learning_rates=(*SEARCH,)) for name in "ab")
    found = results(records, {"kl": SEARCH, "ce": {rate: loss - 0.5 for rate, loss in SEARCH.items()}})
    facts = {"device": "a GPU", "date": "2026", "dense parameters": 2e7, "dense tokens a run": 1e7}
    table.write(tmp_path, {"a": row}, found, facts)
    taken = rows.at_rates_of(tmp_path / "results.csv", {"a": row, "b": other})
    assert taken["b"] == other and (taken["a"].losses, taken["a"].learning_rates) == (("kl",), (1e-3,))
    assert records.next_rate({}, taken["a"].rates("kl")) is None  # no search
    # runs without a search are a line, also where the table is made without --rates
    kept = {run: result for run, result in found.items() if run.stage != "search"}
    assert [(x.loss, x.rate, x.given, x.at_end) for x in table.lines({"a": row}, kept)] == [
        ("kl", 1e-3, True, False),
        ("ce", 1e-3, True, False),
    ]
    assert not any(line.given for line in table.lines({"a": row}, found))
    with pytest.raises(ValueError, match=r"--rates must be a results\.csv"):
        rows.at_rates_of(tmp_path / "none.csv", {})


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        ("checks", {}, None),
        ("checks", {"min_sqnr_db": "21.0"}, "least SQNR of a layer, dB 21.0"),
        ("checks", {"cpu_codes_equal": False}, "codes on a CPU differ"),
        ("checks", {"cpu_nats_a_word": 0.05}, "nats a word on a CPU 0.0500"),
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


def test_pages_show_a_row_under_its_first_loss(modules: ModuleType, tmp_path: Path) -> None:
    """Whatever validation pages say of the other, and however many seeds it has."""
    records, table, rows = (importlib.import_module(f"experiments.{n}") for n in ("records", "table", "rows"))
    row = rows.Row("a", "", "aoquant", "mxfp4", learning_rates=(*SEARCH,))
    better = {rate: loss - 0.5 for rate, loss in SEARCH.items()}
    facts = {"device": "a GPU", "date": "2026", "dense tokens a run": 1e7}
    for losses, loss, words in (
        ({"kl": SEARCH}, "kl", "QAT by distillation, 10.0 M"),
        ({"kl": SEARCH, "ce": better}, "kl", "QAT by distillation, 10.0 M"),
        ({"ce": SEARCH}, "ce", "QAT by cross entropy, 10.0 M"),
    ):
        found = results(records, losses)
        found[records.Run("a", "ptq")] = {"word_perplexity": 70.0}
        made = table.lines({"a": row}, found)
        assert table.shown_losses(made) == {"a": loss}
        for run in found:
            found[run].setdefault("weight_bits", 4.25)
        table.write_measured(tmp_path / "measured.csv", made, facts)
        assert words in (tmp_path / "measured.csv").read_text(encoding="utf-8")


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


def test_a_table_says_how_many_lines_name_no_commit(modules: ModuleType, tmp_path: Path) -> None:
    records = importlib.import_module("experiments.records")
    for commit, seeds in (("abc", (0, 1)), ("", (2, 3, 4)), ("def", (5,))):
        kept = records.Records(tmp_path / "runs.jsonl", {}, "cpu", commit)
        for seed in seeds:
            kept.add(records.Run("a", "qat", "kl", 1.0, seed), {})
    made = kept.made()
    assert made["commit"] == "abc, def, none (3 lines)"
    assert "none" not in made["torch"] and len(made["date"]) == len("2026-01-02")
    earlier = (tmp_path / "runs.jsonl").read_text().splitlines()[0].replace(made["date"], "2026-01-02")
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write(earlier + "\n")
    assert kept.made()["date"] == f"2026-01-02 to {made['date']}"
