"""From the checks of a row to columns of the table, and to what makes the command fail.

The contract has no bound: scores before and after convert, layers, and codes are equal or the check fails. Where two
devices or two programs sum in another order there is one, in nats a word. Where activations are quantised, one of them
may fall on the other side of an edge: `FIRST_PAGE` for one page on a CPU, `EXPORTED` for all pages by another program.
`WEIGHTS_ALONE` is an export's whose activations are bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torchao.quantization import FqnToConfig

from aoquant.config import WeightConfig
from aoquant.recipes import get_recipe

# docs/evidence/experiments.md has the largest that were measured
FIRST_PAGE = 0.04
EXPORTED = 0.02
WEIGHTS_ALONE = 0.002


@dataclass(frozen=True)
class Verdict:
    """A cell of the table. holds: whether it is as it must be."""

    column: str
    said: str
    holds: bool = True


COLUMNS = (
    "before and after convert",
    "least SQNR of a layer, dB",
    "codes on a CPU",
    "nats a word on a CPU",
    "exported, by transformers",
)


def verdicts(kind: str, recipe: str, runs: Mapping[int, Mapping[str, Any]], checked: Mapping[int, Mapping[str, Any]],
             as_prepared: str = "") -> list[Verdict]:  # fmt: skip
    """Of a row under one loss: its results and its checks, by seed. Those that were not made are left out."""
    found = [_scores(list(runs.values()), as_prepared)] if runs and kind != "float" else []
    if as_prepared and not runs:
        found = [Verdict(COLUMNS[0], f"scored as prepared: {as_prepared}")]
    for seed, result in checked.items():
        found += _checks(recipe, result, runs[seed])
    return found


def _scores(runs: Sequence[Mapping[str, Any]], as_prepared: str) -> Verdict:
    """Whether the prepared and the converted model have the same perplexity, to every digit, and the same likelihood of
    every document, in all runs.
    """
    if as_prepared:
        return Verdict(COLUMNS[0], f"scored as prepared: {as_prepared}")
    pairs = [(r["prepared_word_perplexity"], r["word_perplexity"]) for r in runs]
    if any(a != b for a, b in pairs):
        return Verdict(COLUMNS[0], f"differ by {max(abs(math.log(a / b)) for a, b in pairs):.1e}", False)
    if not all(r.get("same_per_document", True) for r in runs):
        return Verdict(COLUMNS[0], "differ document by document", False)
    return Verdict(COLUMNS[0], "equal")


def _checks(recipe: str, result: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[Verdict]:
    """Of one model; `run` has its score."""
    sqnr = result["min_sqnr_db"]
    yield Verdict(COLUMNS[1], sqnr, sqnr == "inf")
    if "cpu_codes_equal" in result:
        equal, nats = result["cpu_codes_equal"], result["cpu_nats_a_word"]
        yield Verdict(COLUMNS[2], "equal" if equal else "differ", equal)
        yield Verdict(COLUMNS[3], f"{nats:.4f}", nats <= FIRST_PAGE)
    if "not_exported" in result:
        yield Verdict(COLUMNS[4], result["not_exported"])
    score = result.get("transformers_word_perplexity")
    if isinstance(score, str):
        yield Verdict(COLUMNS[4], score, False)
    elif score is not None:
        nats = math.log(score / run["word_perplexity"])
        said = "equal" if nats == 0 else f"{score:.3f}: {nats:+.5f} nats a word"
        yield Verdict(COLUMNS[4], said, abs(nats) <= bound(recipe))


@cache
def quantises_activations(recipe: str) -> bool:
    """Whether a recipe may quantise activations: all but aoquant's own of weights alone."""
    base = get_recipe(recipe).prepare().base_config
    of = [c for c in base.fqn_to_config.values() if c is not None] if isinstance(base, FqnToConfig) else [base]
    return any(not isinstance(c, WeightConfig) or c.recipe().fprop_input is not None for c in of)


def bound(recipe: str) -> float:
    """Nats a word of an exported model's score."""
    return EXPORTED if quantises_activations(recipe) else WEIGHTS_ALONE
