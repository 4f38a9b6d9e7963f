"""The record of a run, `aoquant_run.json`, which lies beside its checkpoint: written whole, and read as data that
somebody may have edited.

It holds the hash of the logits that the run saw. Sums of floats depend on their order, and with it on the version of
torch and on the device: where both are those of the record, other logits mean damage or a kernel that changed.
Elsewhere they mean nothing by themselves. It also says on which text, window and limit the run scored, because
perplexities compare only where all three are equal.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from aoquant.files.atomic import replace_text
from aoquant.files.safetensors_file import read_json

T = TypeVar("T")
RESULTS = "aoquant_run.json"
_EMBEDDED = "docstrings of Python's standard library"
_GIVE = "give --wikitext hub, a folder with test.jsonl, or --documents"


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that the file is there whole or not at all."""
    replace_text(path, json.dumps(content, indent=1))


def read_as(path: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """Return what `take` makes of the JSON object in a file of a run.

    Raises:
        ValueError: the file cannot be read, or does not hold what `take` looks for.
    """
    content = read_json(path)
    try:
        return take(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"{path}: is no record of this version of aoquant run, or damaged ({type(error).__name__}: {error}): remove the file, or "
            "its folder, and run again"
        ) from error


@torch.no_grad()
def logits_fingerprint(model: PreTrainedModel, ids_BT: Tensor) -> str:
    """sha256 of the logits' bytes for fixed tokens: equal exactly when the logits are."""
    logits: Tensor = model.eval()(input_ids=ids_BT).logits.contiguous().cpu()
    return hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest()


def environment(device: torch.device | str) -> dict[str, Any]:
    """Return what the order of sums depends on: torch, the kind of device, which one, and the threads of a CPU."""
    device = torch.device(device)
    found = {"torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        return {**found, "device_name": torch.cuda.get_device_name(device)}
    name = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
    return {**found, "device_name": name, "threads": torch.get_num_threads()}


def check_fingerprint(model: PreTrainedModel, checkpoint: Path) -> str:
    """Return whether a loaded checkpoint gives the logits that the run which wrote it saw: a sentence for people.

    Raises:
        ValueError: it gives others, with the torch and on the device of the record.
    """
    path = checkpoint / RESULTS
    if not path.exists():
        return f"no fingerprint beside this checkpoint: `aoquant run` writes {RESULTS}, and no logits were compared"
    needed = ("logits_sha256", "probe_ids", "torch", "device")
    numbers, ids = read_as(
        path, lambda n: ({**n, **{k: n[k] for k in needed}}, torch.tensor(n["probe_ids"], device="cpu").long())
    )
    if numbers["logits_sha256"] is None:
        return "the run that wrote it could not run its kernel"
    here = environment(model.device)
    # a record of an older version names the device by its kind alone
    there = {name: numbers[name] for name in here if name in numbers}
    where = f"torch {numbers['torch']} on {numbers.get('device_name', numbers['device'])}"
    if logits_fingerprint(model, ids.to(model.device)) == numbers["logits_sha256"]:
        return f"logits bit-equal to the run that wrote it ({where})"
    other = {name: value for name, value in there.items() if here[name] != value}
    if not other:
        raise ValueError(
            f"{checkpoint}: logits differ from those of the run that wrote it, with the same {where}: the checkpoint "
            "or a kernel is not what it was; copy the checkpoint again, or run again"
        )
    reasons = ", ".join(f"{name.replace('_', ' ')} is {here[name]} and was {value}" for name, value in other.items())
    return (
        f"logits differ from the run that wrote it ({where}); this says nothing about the checkpoint, because "
        f"{reasons}, and sums in another order give other bits"
    )


@dataclass(frozen=True)
class Evaluation:
    """The arguments of `lm_eval.evaluate`, and a sentence; empty where a text is given and no run recorded."""

    wikitext: str | None
    documents: Path | None
    window: int | None
    limit: int | None
    bos: bool
    about: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """For `lm_eval.evaluate`."""
        return {name: getattr(self, name) for name in ("wikitext", "documents", "window", "limit", "bos")}


def evaluation(
    checkpoint: Path,
    wikitext: str | None,
    documents: Path | None,
    window: int | None,
    limit: int | None,
    bos: bool | None = None,
) -> Evaluation:
    """Return how to score `checkpoint`: as it is asked for, and where nothing is asked for as its run did."""
    path = checkpoint / RESULTS
    if not path.is_file():
        own = "" if wikitext or documents else f"scored on {_EMBEDDED}, which say little about another model: {_GIVE}"
        return Evaluation(wikitext, documents, window, limit, bos is not False, own)

    def read(numbers: dict[str, Any]) -> tuple[Any, ...]:
        options = numbers["options"]
        bos = options.get("bos", False)  # which older versions did not have
        return options["wikitext"], options["limit"], numbers["stages"][0]["perplexity"]["window"], bos

    text, run_limit, run_window, run_bos = read_as(path, read)
    asked = wikitext is not None or documents is not None
    gone = not asked and text not in (None, "hub") and not (Path(text) / "test.jsonl").is_file()
    mine = Evaluation(
        wikitext if asked or gone else text,
        documents,
        run_window if window is None else window,
        run_limit if limit is None else limit,
        run_bos if bos is None else bos,
    )
    how, run_how = (mine.window, mine.limit, mine.bos), (run_window, run_limit, run_bos)
    same = mine.documents is None and mine.wikitext == text and how == run_how
    run = _words(text, None, *run_how)
    if same:
        return Evaluation(**mine.arguments, about=f"scored as the run that wrote it did: {run}")
    here = _words(mine.wikitext, mine.documents, *how)
    why = f", because there is no {text} here" if gone else ""
    about = f"scored on {here}{why}; the run that wrote it scored {run}: the perplexities do not compare"
    return Evaluation(**mine.arguments, about=about)


def _words(wikitext: str | None, documents: Path | None, window: int | None, limit: int | None, bos: bool) -> str:
    text = documents or ("WikiText-2 from the hub" if wikitext == "hub" else wikitext) or _EMBEDDED
    pages = "all documents" if limit is None else f"the first {limit} documents"
    return f"{text}, window {window}, {pages}{'' if bos else ', without BOS'}"
