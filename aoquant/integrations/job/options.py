"""Options of `aoquant run`: from the command line, from a YAML file, or in Python.

The options stand in groups, which are the groups of `aoquant run --help`; `Options` is all of them together. A YAML
file has the same names, with - or _; an option on the command line wins over the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from aoquant.integrations.finetune import LOSSES
from aoquant.integrations.hf import check_storable
from aoquant.integrations.text import find_pages, standard_text
from aoquant.planning.choose import each
from aoquant.recipes import mixed
from aoquant.targets import resolve
from aoquant.tools.doctor import check_device, default_device, slow_in_bfloat16

PTQ_METHODS = ("nearest", "gptq")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class Model:
    """The float model."""

    model: str | None = None
    """A folder or hub id of a causal language model; the embedded demo model by default."""
    dtype: str | None = None
    """bfloat16, float16 or float32: the deployed model's dtype. bfloat16 by default; float32 on a CPU without AVX-512,
    which multiplies bfloat16 30 times slower. AdamW keeps float32 copies in any case."""
    device: str = field(default_factory=default_device)
    """Where everything runs."""
    bos: bool = True
    """Begin every document, training block and scored window with the tokenizer's BOS token, if it adds one. False: no
    BOS in training, and lm-eval's own windows."""


@dataclass
class Layers:
    """The layers that are quantised, and their recipes."""

    recipe: str = "nvfp4"
    """A name from `aoquant recipes`, or two from `aoquant formats` as WEIGHT/ACTIVATION."""
    embeddings: bool = False
    """Quantise embeddings and the output head too; a tied pair keeps one weight."""
    layers: list[str] = field(default_factory=list)
    """NAME ... quantises these layers alone; NAME=RECIPE ... gives some layers another recipe. NAME is a layer's name,
    or re: and a pattern for the whole of it, such as 're:.*down_proj'."""
    skip: list[str] = field(default_factory=list)
    """Layers to leave in high precision, by NAME."""
    skip_incompatible: bool = False
    """Leave out layers that cannot take their recipe, and list them, instead of stopping."""
    strict: bool = False
    """Stop when a layer stays in high precision that --skip does not name; the output head and embeddings may stay."""


@dataclass
class Calibration:
    """How codes are chosen before the fine-tune."""

    ptq: Literal["nearest", "gptq"] = "nearest"
    """nearest: round each weight. gptq: choose codes on calibration data; training goes on from them under their
    scales."""
    calibrate: Path | None = None
    """A file of text (.txt, .jsonl, .xz) for gptq; the first one of --train-text by default."""
    samples: int = 128
    """Sequences of --block tokens that gptq sees."""


@dataclass
class Training:
    """The fine-tune."""

    steps: int = 80
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences in a step."""
    micro_batch: int | None = None
    """Sequences in one forward of a rank; the others of a step follow, and their gradients are added up. By default
    all."""
    block: int = 256
    """Tokens in a sequence; at most the model's positions."""
    learning_rate: float = 3e-4
    """Of AdamW, at the top of its schedule."""
    loss: str = "kl"
    """kl: to the float model's distribution. ce: cross entropy."""
    seed: int = 0
    """Of the order of batches, and of a backward that rounds at random."""
    separate_documents: bool = False
    """No attention across documents in a training block: each sees itself alone, from position 0 on."""
    train_text: list[Path] = field(default_factory=list)
    """Files of text (.txt, .jsonl, .xz). The embedded model alone has a default: docstrings of
    Python's standard library."""


@dataclass
class Evaluation:
    """How every model is scored."""

    wikitext: str | None = None
    """hub, or a folder with WikiText-2, or other pages, as test.jsonl. The embedded model alone has a default:
    docstrings of Python's standard library, of other modules than it trains on."""
    window: int | None = None
    """Tokens that a prediction sees at most; by default the model's positions, at most 2048."""
    limit: int | None = None
    """Score the first documents only."""


@dataclass
class Output:
    """Where results go."""

    out: Path = Path("aoquant-run")
    """Folder of the report, the numbers and the converted checkpoint. The same command again goes on in it."""
    export: Path | None = None
    """A folder for the engine that the recipe is for: GGUF for gguf-... and ggml's formats, compressed-tensors for the
    others. A run that is done can be given it too."""


GROUPS = (Model, Layers, Calibration, Training, Evaluation, Output)


@dataclass
class Options(Model, Layers, Calibration, Training, Evaluation, Output):
    """All options of `aoquant run`."""

    def __post_init__(self) -> None:
        if self.dtype is None:
            self.dtype = "float32" if slow_in_bfloat16(self.device) else "bfloat16"

    def check(self) -> None:
        """Raise ValueError for anything that would only fail after minutes of work and needs no model to be seen."""
        for recipe in (self.recipe, *(e.rpartition("=")[2] for e in self.layers if "=" in e)):
            config = mixed(recipe)
            for base in each(config):
                check_storable(resolve(base).tensor, f"recipe {recipe}")
        mixed(self.recipe, self.layers, self.skip)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype!r}")
        if self.steps < 1 or self.batch_size < 1 or self.block < 2:
            raise ValueError(
                f"steps, batch_size and block must be positive, got {self.steps}, {self.batch_size}, {self.block}"
            )
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, got {self.micro_batch}")
        if self.ptq not in PTQ_METHODS or self.samples < 1:
            raise ValueError(
                f"ptq is {' or '.join(PTQ_METHODS)} and samples positive, got {self.ptq!r}, {self.samples}"
            )
        if self.calibrate is not None and (self.ptq == "nearest" or not self.calibrate.is_file()):
            raise ValueError(f"calibrate must be an existing file beside --ptq gptq, got {str(self.calibrate)!r}")
        if not 0 < self.learning_rate < math.inf:  # False for NaN too
            raise ValueError(f"learning_rate must be a finite number above 0, got {self.learning_rate}")
        find_pages(self.wikitext, None)
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.model is not None and self.model.startswith((".", "/", "~")) and not Path(self.model).is_dir():
            raise ValueError(f"model must be a folder that exists, or a hub id, got {self.model!r}")
        self._check_texts()
        check_device(self.device)
        if (self.limit is not None and self.limit < 1) or (self.window is not None and self.window < 1):
            raise ValueError(f"limit and window must be at least 1, got {self.limit} and {self.window}")
        if missing := [str(p) for p in self.train_text if not p.is_file()]:
            raise ValueError(f"train_text must be existing files, missing: {', '.join(missing)}")

        if self.export is not None and self.export.exists():
            raise ValueError(f"{self.export} exists: remove it or choose another --export")

    def _check_texts(self) -> None:
        lacks = [o for o, text in (("--train-text", self.train_text), ("--wikitext", self.wikitext)) if not text]
        if self.model is not None and lacks:
            raise ValueError(
                f"--model {self.model} needs --train-text FILE ... to train on and --wikitext hub, or a folder with "
                f"test.jsonl, to be scored on, got no {' and no '.join(lacks)}: the default texts, docstrings "
                "of Python's standard library, say little about another model"
            )

    @property
    def texts(self) -> list[Path]:
        """Return the files that are trained on."""
        return self.train_text or [standard_text()[0]]

    def as_json(self) -> dict[str, Any]:
        """Return the options in JSON's types."""
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return found


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a YAML file, by name, in the types of `Options`. Paths are relative to the working directory.

    Raises:
        ValueError: no such file, no YAML mapping, an unknown key, or a value of another type; names the file and the
            key.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"--config must be a YAML file that exists, got {str(path)!r}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: must hold options as NAME: VALUE lines, got {type(content).__name__}")
    types = get_type_hints(Options)
    given = {str(key).replace("-", "_"): value for key, value in content.items()}
    if unknown := [key for key in given if key not in types]:
        near = [difflib.get_close_matches(key, types, 1, 0.5) for key in unknown]
        hints = ", ".join(f"{key} (near it: {n[0]})" if n else key for key, n in zip(unknown, near, strict=True))
        raise ValueError(f"{path}: run has no option {hints}; `aoquant run --help` lists them")
    return {key: _of_type(path, key, value, types[key]) for key, value in given.items()}


def _of_type(path: Path, key: str, value: Any, type_: Any) -> Any:
    """Return a YAML value as an option's type."""
    if get_origin(type_) is list:
        (item,) = get_args(type_)
        return [_of_type(path, key, v, item) for v in (value if isinstance(value, list) else [value])]
    choices = get_args(type_) if isinstance(type_, UnionType) else (type_,)
    if value is None and type(None) in choices:
        return None
    (wanted,) = (c for c in choices if c is not type(None))
    if wanted is Path and isinstance(value, str):
        return Path(value)
    if wanted is float and not isinstance(value, bool) and isinstance(value, int | float | str):
        try:
            return float(value)  # YAML 1.1 reads 3e-4 as a string
        except ValueError:
            pass
    if type(value) is wanted:
        return value
    raise ValueError(f"{path}: {key} must be {_NAMES[wanted]}, got {value!r}")


_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
