"""The documentation is true: its Python runs, its tables and links fit the source, and it is easy to read.

Blocks of one page share a namespace and run in order in an empty folder; the README's have a model and what else they
name. A block that cannot run in this suite has the line "<!-- not run: REASON -->" above it; how many there are is
written down here, so that none is switched off unnoticed.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import tyro
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import aoquant
from aoquant import cli
from aoquant.integrations.text import assets
from aoquant.ops import backend_names
from aoquant.recipes import list_recipes
from aoquant.targets import REASONS, supported

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ = [
    *(path for path in sorted(ROOT.glob("*.md")) if path.name != "CHANGELOG.md"),
    *ROOT.glob("upstream/**/README.md"),
    *PAGES,
]
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n+)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
TO_HEADING = re.compile(r"\]\(((?!https?:)[^)#]*\.md)?#([^)]+)\)")
NAMED = re.compile(r"\bdocs/[\w/-]+\.md\b")
NOT_RUN = 3
WIDTH, ROW, README, GLOSSARY, GUIDE, TROUBLES = 120, 400, 100, 35, 20, 30
FIGURES = runpy.run_path(str(DOCS / "figures" / "draw.py"))["FIGURES"]


def blocks(page: Path) -> Iterator[tuple[int, str, str | None]]:
    """(line, code, why it is not run) of every Python block."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start("code")) + 1, match["code"], match["why"]


def run(page: Path, namespace: dict[str, object]) -> None:
    """Run the blocks of a page in `namespace`."""
    for line, code, why in blocks(page):
        if why is None:
            # the line numbers of the page, in tracebacks
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
        else:
            compile(code, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, {"__name__": "docs"})


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.models import llama

    monkeypatch.chdir(tmp_path)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = llama(attention_bias=False, num_key_value_heads=2, vocab_size=96, **size)
    ids, trained = torch.arange(12).view(2, 6), []
    namespace = {"model": model, "tokenizer": None, "train": lambda m: trained.append(m(ids).logits)}
    run(ROOT / "README.md", namespace)
    loaded = namespace["model"]
    assert loaded is not model and torch.equal(loaded(ids).logits, trained[0])


def shell_commands(page: Path) -> Iterator[list[str]]:
    """Return the words of each command in the shell blocks of a page, without lines that only show a command's form."""
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            for parted, words in itertools.groupby(lexer, lambda word: set(word) <= set(";&|")):
                command = list(words)
                if not parted and not any(word.startswith("[") or "..." in word for word in command):
                    yield command


@pytest.mark.parametrize("page", READ, ids=lambda p: p.stem)
def test_shell_commands_are_taken(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands of aoquant parse, with recipes and formats that there are; targets of make are in the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    monkeypatch.chdir(tmp_path)  # a command that ran would find nothing
    for words in shell_commands(page):
        if words[0] == "make":
            assert {w for w in words[1:] if "=" not in w} <= targets, words
        if "aoquant" not in words or "install" in words or words[-1] == "aoquant":
            continue
        name, *rest = words[words.index("aoquant") + 1 :]
        if name not in cli.COMMANDS:
            assert name in ("--help", "--version"), words
            continue
        command = cli._command(name, rest)
        tyro.cli(functools.wraps(command)(lambda *_, **__: None), args=rest, config=(tyro.conf.OmitArgPrefixes,))
        for at, word in enumerate(rest):
            if word in ("--recipe", "--embeddings-recipe") and not rest[at + 1].isupper():
                assert aoquant.get_recipe(rest[at + 1])


@pytest.mark.slow
def test_the_moe_page_goes_from_text_to_the_table(tmp_path: Path) -> None:
    """Its commands for a CPU run as they stand, one after another."""
    section = (ROOT / "docs/moe.md").read_text(encoding="utf-8").partition("## From text to the table")[2]
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    assert "QAT, converted" in typed(section.partition("```sh\n")[2].partition("```")[0], tmp_path)


@pytest.mark.slow
def test_ones_own_model_goes_from_a_folder_to_a_served_one(tmp_path: Path) -> None:
    """The page's commands for a CPU run as they stand, with a small model and little text under its names."""
    size = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=8192, max_position_embeddings=512, **size)).save_pretrained(
        tmp_path / "gemma"
    )
    AutoTokenizer.from_pretrained(assets()).save_pretrained(tmp_path / "gemma")
    (tmp_path / "corpus.txt").write_text("all that glitters is not gold, often have you heard that told. " * 200)
    (tmp_path / "held-out").mkdir()
    pages = ('{"page": "many a man his life hath sold but my outside to behold"}\n',) * 2
    (tmp_path / "held-out" / "test.jsonl").write_text("".join(pages))
    text = (ROOT / "docs/your-model.md").read_text(encoding="utf-8").partition("## 3. Read the result")[2]
    run, write = (block.partition("```")[0] for block in text.split("```sh\n")[1:3])
    printed = typed(run + write, tmp_path)
    assert "prepared against converted: minimum SQNR inf dB" in printed and "logits bit-equal to the run" in printed
    assert "vllm serve served" in printed and "are what was written" in printed
    served, trained = (tmp_path / folder for folder in ("served", "run/checkpoint"))
    with torch.no_grad():
        found = (aoquant.load_pretrained(f)(input_ids=torch.arange(16)[None]).logits for f in (served, trained))
        assert torch.equal(*found)


def typed(commands: str, folder: Path) -> str:
    """Return what commands of a page print in a folder; none may fail."""
    paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        ["bash", "-ec", 'aoquant() { python -m aoquant "$@"; }\n' + commands],
        cwd=folder, env=os.environ | paths, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_many_commands_are_looked_at() -> None:
    assert sum("aoquant" in words for page in READ for words in shell_commands(page)) > 20


def test_few_blocks_are_not_run() -> None:
    reasons = [why for page in READ for _, _, why in blocks(page) if why]
    fences = sum(page.read_text(encoding="utf-8").count("```python") for page in READ)
    assert len(reasons) == NOT_RUN, reasons
    assert fences == sum(1 for page in READ for _ in blocks(page)) > 12


@pytest.mark.parametrize("page", READ, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@functools.cache
def written_tests() -> frozenset[str]:
    """Return the names of the test files and of the tests."""
    paths = [*(ROOT / "test").rglob("*.py")]
    functions = [name for path in paths for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))]
    return frozenset([path.name for path in paths] + functions)


@pytest.mark.parametrize("page", READ, ids=lambda p: p.stem)
def test_links_to_headings_find_them(page: Path) -> None:
    links = TO_HEADING.findall(page.read_text(encoding="utf-8"))
    assert [(to, name) for to, name in links if name not in anchors(page.parent / to if to else page)] == []


@pytest.mark.parametrize("page", READ, ids=lambda p: p.stem)
def test_cited_files_and_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = set(
        re.findall(r"(?<![\w/.-])(?:aoquant|test|benchmarks|eval|docs|csrc|examples|tools|upstream)/[\w./-]*\w", text)
    )
    assert [name for name in sorted(files) if not (ROOT / name).exists() and "COMMIT" not in name] == []
    assert set(re.findall(r"\btest_\w+(?:\.py)?(?![\w/*])", text)) - written_tests() == set()


def test_the_source_names_pages_that_exist() -> None:
    named = {name for path in (ROOT / "aoquant").rglob("*.py") for name in NAMED.findall(path.read_text("utf-8"))}
    # docs/features/ is a folder of vLLM's repository
    missing = {name for name in named if not (ROOT / name).exists() and not name.startswith("docs/features/")}
    assert named and missing == set()


def test_the_source_names_files_that_exist() -> None:
    """A path in a comment or docstring of a file of these folders: it moves with the file."""
    there = ["/" + str(path.relative_to(ROOT)) for path in ROOT.glob("[a-z]*/**/*.py")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in (
            "ops",
            "linear",
            "experts",
            "distributed",
            "transforms",
            "kv",
            "files",
            "planning",
            "ptq",
        )
        for path in (ROOT / "aoquant" / folder).glob("**/*.py")
        for name in re.findall(r"[a-z0-9_/]+\.py\b", path.read_text(encoding="utf-8"))
        if not any(other.endswith("/" + name) for other in there)
    ]
    assert not missing


@pytest.mark.parametrize("folder", ["ops", "linear", "experts", "kv", "files"])
def test_a_folders_index_names_its_files(folder: str) -> None:
    where = ROOT / "aoquant" / folder
    said = (where / "__init__.py").read_text(encoding="utf-8").split('"""')[1]
    files = {path.name for path in where.glob("*.py")} - {"__init__.py"}
    assert files - set(re.findall(r"\b\w+\.py\b", said)) == set()


def test_the_table_of_tiers_names_what_the_import_rules_do() -> None:
    rules = re.findall(
        r"\((\w+)\)", (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("layers = [")[1].split("]")[0]
    )
    table = "".join(
        line
        for line in (DOCS / "architecture.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| [0-4] \|", line)
    )
    assert set(rules) - {"__main__"} == set(re.findall(r"`(\w+)/?`", table)) - {
        "function",
        "encode",
        "matmul",
        "quantize_",
    }


def test_troubleshooting_is_short() -> None:
    """Error messages say what to do; the page is for what users really meet, and pages link into it."""
    assert (DOCS / "troubleshooting.md").read_text(encoding="utf-8").count("\n### ") <= TROUBLES


def test_the_index_lists_every_page() -> None:
    listed = set(LINK.findall((DOCS / "README.md").read_text(encoding="utf-8")))
    assert {page.relative_to(DOCS).as_posix() for page in PAGES} - {"README.md"} <= listed


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    named = {line.removeprefix("::: ").rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert set(aoquant.__all__) - named == set()


def test_the_chosen_recipes_exist() -> None:
    lines = (DOCS / "choosing.md").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| you serve on |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    chosen = {name for row in rows for name in re.findall(r"`(.+?)`", row.split(" | ")[2])}
    assert len(chosen) > 5 and chosen <= {recipe.name for recipe in list_recipes()}


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of each line that is no code, no heading and no comment."""
    fence = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        mark = re.match(r"\s*(```|~~~)", line)
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
        elif not fence and not line.startswith(("#", "<!--")):
            yield number, line


@pytest.mark.parametrize("page", READ, ids=lambda p: p.stem)
def test_lines_are_short(page: Path) -> None:
    # a code span, a link's target and a line of a formula are not broken
    unbroken = [
        (n, re.sub(r"(`+).+?\1|\]\([^)]*\)", lambda m: m[0].replace(" ", "_"), line)) for n, line in prose(page)
    ]
    words = [(n, line) for n, line in unbroken if not line.startswith(("|", "    "))]
    assert [n for n, line in words if len(line) > WIDTH and " " in line.lstrip(" -")] == []
    assert [n for n, line in unbroken if line.startswith("|") and len(line) >= ROW] == []


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= README
    assert "make demo" in text and "make test" in text


def test_a_user_reads_few_pages() -> None:
    """Results, reproductions and the API reference have folders of their own; how it is built is for contributors."""
    guide = {page.stem for page in DOCS.glob("*.md")} - {"README", "glossary", "architecture"}
    assert len(guide) <= GUIDE, sorted(guide)


def test_the_glossary_is_short_and_has_each_term_once() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    cells = [row for row in re.findall(r"^\| (.+?) \|", text, re.MULTILINE) if row != "term"]
    terms = [term for cell in cells for term in cell.split(", ")]
    assert len(cells) <= GLOSSARY and len(set(terms)) == len(terms)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_its_script_draws(name: str) -> None:
    assert (DOCS / "figures" / name).read_text(encoding="utf-8") == FIGURES[name]()


def test_the_pages_name_every_torchao_config() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert [name for name in (*supported(), *REASONS) if f"`{name}`" not in page] == []


def test_the_table_of_backends_has_every_one() -> None:
    page = (ROOT / "docs" / "evidence" / "exactness.md").read_text(encoding="utf-8")
    table = "".join(line.partition(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in backend_names() if f"`{name.removesuffix('_for_cpu')}`" not in table] == []


def test_the_versions_are_those_that_ci_installs() -> None:
    page = (ROOT / "docs" / "evidence" / "compatibility.md").read_text(encoding="utf-8").splitlines()
    heads = next(i for i, line in enumerate(page) if line.startswith("| Python |"))
    named = dict(zip(page[heads].split(" | ")[1:-1], page[heads + 2].split(" | ")[1:-1], strict=True))
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: version.split()[0] for name, version in named.items()} == {name: pins[name] for name in named}
