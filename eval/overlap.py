"""How much of a held-out text stands in a training text, as runs of words.

A run is `RUN` words in a row, 12 as where the training text was chosen; GPT-3 counted 13 (Brown et al.,
arXiv:2005.14165, appendix C). Words are letters, digits and underscores in lower case, so that spaces and punctuation
do not matter, which WikiText's test pages write otherwise than its training pages are read.

Every run of the training text is looked up, at 64 bits a run. Runs with a word that the held-out text does not have
are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

RUN = 12
_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word of a run is lost
_CHUNK = 256  # documents


@dataclass(frozen=True)
class Overlap:
    """runs: distinct ones of the held-out text; found: those that the training text has too; share: of all runs.

    pages, pages_touched: held-out documents, and those with at least one run that was found.
    """

    words_a_run: int
    runs: int
    found: int
    share: float
    pages: int
    pages_touched: int


def overlap(training: Sequence[str], held_out: Sequence[str]) -> Overlap:
    """Runs of `held_out` documents that stand in a `training` document."""
    number: dict[str, int] = {}
    pages = [_hashes([number.setdefault(word, len(number) + 1) for word in _words(page)]) for page in held_out]
    runs = np.unique(np.concatenate([*pages, np.zeros(0, np.uint64)]))
    hit = np.zeros(len(runs), dtype=bool)
    for start in tqdm(range(0, len(training), _CHUNK), desc="overlap", unit=f"x{_CHUNK} documents"):
        ids: list[int] = []
        for document in training[start : start + _CHUNK]:
            ids += (number.get(word, 0) for word in _words(document))
            ids.append(0)  # no run reaches into the next document
        found = _hashes(ids)
        at = np.searchsorted(runs, found)
        at = at[at < len(runs)] if not len(runs) else np.minimum(at, len(runs) - 1)
        hit[at[runs[at] == found]] = True
    touched = sum(bool(hit[np.searchsorted(runs, page)].any()) for page in pages)
    return Overlap(
        RUN, len(runs), int(hit.sum()), round(float(hit.mean()), 6) if len(runs) else 0.0, len(pages), touched
    )


def _words(text: str) -> Iterable[str]:
    return _WORD.findall(text.lower())


def _hashes(ids: Sequence[int]) -> np.ndarray:
    """A number for each run of known words; 0 is an unknown word."""
    ids_S = np.array(ids, dtype=np.uint64)
    if len(ids_S) < RUN:
        return np.zeros(0, np.uint64)
    windows_NR = np.lib.stride_tricks.sliding_window_view(ids_S, RUN)
    unknown = np.concatenate([[0], np.cumsum(ids_S == 0)])
    windows_NR = windows_NR[unknown[RUN:] == unknown[:-RUN]]
    hashes = np.zeros(len(windows_NR), np.uint64)
    for column in windows_NR.T:
        hashes = hashes * _FACTOR + column
    return hashes
