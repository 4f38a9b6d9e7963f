"""Messages of the commands speak of their options, where Python's would name arguments."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import aoquant
from aoquant import cli
from aoquant._messages import advice
from aoquant.recipes import get_recipe


def test_messages_speak_of_options_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        text = f"x. {advice('aoquant.coverage(model)', '--strict')}: leave it out with filter_fn"
        sys.stderr.write(warnings.formatwarning(UserWarning(text), UserWarning, "/lib/place.py", 7))

    monkeypatch.setattr(cli, "doctor", command)
    before = warnings.formatwarning
    cli.main(["doctor"])
    assert warnings.formatwarning is before
    said = capfd.readouterr().err
    assert said == "aoquant: warning: x. --strict: leave it out with --skip NAME\n"
    assert advice("in Python", "typed") == "in Python"


@pytest.mark.parametrize(
    ("python", "typed"),
    [
        ("leave it out with filter_fn", "leave it out with --skip NAME"),
        ("leave it out by name; more", "leave it out with --skip NAME; more"),
        ("leave it out. The model", "leave it out with --skip NAME. The model"),
        ("or leave the layer out, or", "or leave the layer out with --skip NAME or --skip-incompatible, or"),
        ("leave it out of prepare (filter_fn, or None for its name in FqnToConfig)", "leave it out with --skip NAME"),
        ("leave it out of quantize_ (filter_fn, or None for its name in FqnToConfig)", "leave it out with --skip NAME"),
        (
            "leave that layer out of quantize_ (filter_fn, or None for its name in FqnToConfig); for",
            "leave that layer out with --skip NAME; for",
        ),
        ('use aoquant.FP8WeightConfig(granularity="block")', "use --recipe fp8-block"),
        ("or use aoquant.FP8WeightConfig, which", "or use --recipe fp8, which"),
        ("use aoquant.MXFP8WeightConfig", "use --recipe mxfp8"),
        ("use aoquant.NVFP4WeightConfig", "use --recipe nvfp4"),
    ],
)
def test_names_of_python_are_options_on_the_command_line(python: str, typed: str) -> None:
    assert cli.for_the_command_line(python) == typed
    for recipe in re.findall("--recipe ([a-z0-9-]+)", typed):
        get_recipe(recipe)


# what the commands do not reach: arguments that they do not pass, and adapters, FSDP and training loops of one's own
NOT_REACHED = (
    "filter_fn must be a function",
    "filter_fn is called as",
    "give filter_fn or FqnToConfig, not both",
    "Leave them out by filter_fn, or by name with None in FqnToConfig",
    "give filter_fn to that one",
    "give the same filter_fn, or an empty folder",
    "quantized_all_gather (filter_fn)",
    "quantized_model_init (filter_fn)",
)


def texts_of(path: Path) -> Iterator[str]:
    """The strings of a file but docstrings and what `advice` is given first, f-strings with {} for their values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left.add(id(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "advice":
            left.add(id(node.args[0]))
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
            left.update(map(id, node.values))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left:
            yield node.value


def test_no_message_leaves_filter_fn_to_the_command_line() -> None:
    """Advice that names Python's arguments has a form for the command line where it is given, or by a rule."""
    package = Path(aoquant.__file__).parent
    files = [p for p in package.rglob("*.py") if p.name != "cli.py"]
    texts = [text for path in files for text in texts_of(path) if " " in text]
    typed = [cli.for_the_command_line(text) for text in texts]
    assert any(a != b for a, b in zip(texts, typed, strict=True))
    wrong = [text for text in typed if "filter_fn" in text and not any(known in text for known in NOT_REACHED)]
    assert wrong == []
    assert [known for known in NOT_REACHED if not any(known in text for text in typed)] == []
