"""The text, window and limit that a checkpoint is scored with: by default those of the run that wrote it.

Perplexities compare only where all three are equal. So `aoquant eval` scores what the run scored unless it is told
otherwise, and says first where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aoquant.integrations.job.files import read_as
from aoquant.integrations.job.fingerprint import RESULTS

_EMBEDDED = "the embedded held-out documents"
_GIVE = "give --wikitext hub, a folder with test.jsonl, or --documents"


@dataclass(frozen=True)
class Evaluation:
    """The arguments of `lm_eval.evaluate`, and a sentence; empty where a text is given and no run recorded."""

    wikitext: str | None
    documents: Path | None
    window: int | None
    limit: int | None
    about: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """For `lm_eval.evaluate`."""
        return {name: getattr(self, name) for name in ("wikitext", "documents", "window", "limit")}


def evaluation(
    checkpoint: Path, wikitext: str | None, documents: Path | None, window: int | None, limit: int | None
) -> Evaluation:
    """How to score `checkpoint`: as it is asked for, and where nothing is asked for as its run did."""
    path = checkpoint / RESULTS
    if not path.is_file():
        own = "" if wikitext or documents else f"scored on {_EMBEDDED}, which say little about another model: {_GIVE}"
        return Evaluation(wikitext, documents, window, limit, own)
    text, run_limit, run_window = read_as(
        path, lambda n: (n["options"]["wikitext"], n["options"]["limit"], n["stages"][0]["perplexity"]["window"])
    )
    asked = wikitext is not None or documents is not None
    gone = not asked and text not in (None, "hub") and not (Path(text) / "test.jsonl").is_file()
    mine = Evaluation(
        wikitext if asked or gone else text,
        documents,
        run_window if window is None else window,
        run_limit if limit is None else limit,
    )
    same = mine.documents is None and mine.wikitext == text and (mine.window, mine.limit) == (run_window, run_limit)
    run = _words(text, None, run_window, run_limit)
    if same:
        return Evaluation(**mine.arguments, about=f"scored as the run that wrote it did: {run}")
    here = _words(mine.wikitext, mine.documents, mine.window, mine.limit)
    why = f", because there is no {text} here" if gone else ""
    about = f"scored on {here}{why}; the run that wrote it scored {run}: the perplexities do not compare"
    return Evaluation(**mine.arguments, about=about)


def _words(wikitext: str | None, documents: Path | None, window: int | None, limit: int | None) -> str:
    text = documents or ("WikiText-2 from the hub" if wikitext == "hub" else wikitext) or _EMBEDDED
    return f"{text}, window {window}, {'all documents' if limit is None else f'the first {limit} documents'}"
