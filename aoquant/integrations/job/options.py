"""Options of `aoquant run`: from the command line, from a YAML file, or in Python.

The options stand in groups, which are the groups of `aoquant run --help`; `Options` is all of them together. A YAML
file has the same names, with - or _; an option on the command line wins over the file.
"""

import dataclasses
import difflib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from aoquant._messages import one_line
from aoquant.files.atomic import check_writable
from aoquant.integrations.finetune import LOSSES, check_switch
from aoquant.integrations.hf import check_storable
from aoquant.integrations.job.training import PRESETS
from aoquant.integrations.text import find_pages, standard_text
from aoquant.planning.choose import each
from aoquant.ptq.calibrate_config import CalibrateConfig
from aoquant.recipes import mixed, of_recipe_or_format
from aoquant.targets import resolve
from aoquant.tools.doctor import check_device, default_device, slow_in_bfloat16

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
    embeddings_recipe: str | None = None
    """The same under another recipe, such as gguf-q8_0."""
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

    ptq: str = "nearest"
    """nearest: round each weight. gptq, clip: choose codes on calibration data; training goes on from them under their
    scales. awq, smoothquant, r1, r2: change the float weights first; training goes on from those. Several joined by +:
    as `aoquant convert` has them."""
    calibrate: Path | None = None
    """A file of text (.txt, .jsonl, .xz) for --ptq; the first one of --train-text by default."""
    samples: int = 128
    """Sequences of --block tokens that it sees."""


@dataclass
class Training:
    """The fine-tune."""

    preset: str | None = None
    """Published hyper-parameters; the options below win. qad: NVIDIA's distillation (arXiv:2601.20088): KL, a cosine
    from 1e-5 to 1e-6, one pass over the text, at most their 16.8 billion tokens. sft: the same with cross entropy.
    demo: KL, 3e-4 to 0, 80 steps. By default demo for the embedded model, and qad for others."""
    steps: int | None = None
    """Optimizer steps; by default the preset's."""
    batch_size: int = 8
    """Sequences in a step."""
    micro_batch: int | None = None
    """Sequences in one forward of a rank; the others of a step follow, and their gradients are added up. By default
    all."""
    block: int = 256
    """Tokens in a sequence; at most the model's positions."""
    learning_rate: float | None = None
    """Step AdamW at this rate at the top of its schedule; by default the preset's."""
    learning_rates: list[float] = field(default_factory=list)
    """Rates to choose from: each is tried for a fifth of the steps, and the lowest loss on validation pages wins."""
    final_learning_rate: float | None = None
    """End the cosine at this rate; by default the preset's share of the other."""
    loss: str | None = None
    """kl: to the float model's distribution. ce: cross entropy. By default the preset's."""
    fake_quant_after_n_steps: int = 0
    """Steps in high precision before fake quantisation begins."""
    stop_at_gap: float | None = None
    """Stop QAT once its cross entropy on validation pages is at most so many nats a token above the float model's;
    looked at after each twentieth of the steps. Validation pages are the end of the training text, held out then."""
    freeze: list[str] = field(default_factory=list)
    """Modules to leave as they are, by NAME, such as model.embed_tokens: teacher and student share their weights."""
    teacher_cache: Path | None = None
    """A folder for the float model's top log-probabilities of the training text, written once and used by every run of
    the same model, text and block. QAT then trains without the float model beside it."""
    teacher_top_k: int = 64
    """Log-probabilities of a token in --teacher-cache; the rest is kept as one sum. 8 k + 4 bytes a token."""
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
        self.preset = self.preset or ("demo" if self.model is None else "qad")
        preset = PRESETS.get(self.preset, PRESETS["demo"])  # a wrong name is an error of `check`
        self.steps = preset.steps if self.steps is None else self.steps
        self.loss = preset.loss if self.loss is None else self.loss
        if self.learning_rate is None and not self.learning_rates:
            self.learning_rate = preset.learning_rate

    def check(self) -> None:
        """Raise ValueError for anything that would only fail after minutes of work and needs no model to be seen."""
        named = [e.rpartition("=")[2] for e in self.layers if "=" in e]
        for recipe in filter(None, (self.recipe, self.embeddings_recipe, *named)):
            config = mixed(recipe)
            for base in each(config):
                check_storable(resolve(base).tensor, f"recipe {recipe}")
        mixed(self.recipe, self.layers, self.skip)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype!r}")
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        for name in ("steps", "batch_size", "micro_batch", "samples", "teacher_top_k", "limit", "window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.block < 2:
            raise ValueError(f"block must be at least 2, got {self.block}")
        CalibrateConfig(self.recipe, self.ptq)  # refuses an unknown method
        if self.calibrate is not None and self.ptq == "nearest":
            raise ValueError("calibrate belongs to --ptq METHOD, such as --ptq gptq, which is missing")
        if self.calibrate is not None and not self.calibrate.is_file():
            raise ValueError(f"calibrate must be an existing file, got {str(self.calibrate)!r}")
        self._check_training()
        find_pages(self.wikitext, None)
        if self.model is not None and self.model.startswith((".", "/", "~")) and not Path(self.model).is_dir():
            raise ValueError(f"model must be a folder that exists, or a hub id, got {self.model!r}")
        self._check_texts()
        check_device(self.device)
        if missing := [str(p) for p in self.train_text if not p.is_file()]:
            raise ValueError(f"train_text must be existing files, missing: {', '.join(missing)}")

        if self.export is not None:
            check_target(self.export, self.out)
        if self.teacher_cache is not None:
            check_writable(self.teacher_cache)

    def _check_training(self) -> None:
        if self.learning_rate is not None and self.learning_rates:
            raise ValueError("give --learning-rate, or --learning-rates to choose from, not both")
        given = {"learning_rate": self.learning_rate, "final_learning_rate": self.final_learning_rate}
        for name, value in [*given.items(), *(("learning_rates", rate) for rate in self.learning_rates)]:
            least = 0.0 if name == "final_learning_rate" else math.ulp(0.0)
            if value is not None and not least <= value < math.inf:  # False for NaN too
                raise ValueError(f"{name} must be a finite number above 0, got {value}")
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.stop_at_gap is not None and not math.isfinite(self.stop_at_gap):
            raise ValueError(f"stop_at_gap must be a finite number of nats a token, got {self.stop_at_gap}")
        if self.steps is not None:
            check_switch(self.fake_quant_after_n_steps, self.steps)
        if self.teacher_cache is not None and self.loss != "kl":
            raise ValueError(f"teacher_cache is for loss kl, whose teacher is the float model, got loss {self.loss}")

    def final_rate(self, rate: float) -> float:
        """Return where the schedule of a rate ends."""
        preset = PRESETS[self.preset or "demo"]
        share = preset.final_rate / preset.learning_rate
        return rate * share if self.final_learning_rate is None else self.final_learning_rate

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
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def check_target(export: Path, out: Path) -> None:
    """Raise ValueError where --export cannot be written, or is taken, also by --out until then."""
    if export.exists():
        raise ValueError(f"{export} exists: remove it or choose another --export")
    if export.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"{export} will hold --out {out}: choose another --export")
    check_writable(export)


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a YAML file, by name, in the types of `Options`. Paths are relative to the working directory.

    Raises:
        ValueError: no such file, no YAML mapping, an unknown key, or a value of another type; names file and key.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"--config must be a YAML file that exists, got {str(path)!r}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no YAML file: {one_line(error)}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: must hold options as NAME: VALUE lines, got {type(content).__name__}")
    types = get_type_hints(Options)
    given = {str(key).replace("-", "_"): value for key, value in content.items()}
    if unknown := [key for key in given if key not in types]:
        near = [difflib.get_close_matches(key, types, 1, 0.5) for key in unknown]
        hints = ", ".join(f"{key} (near it: {n[0]})" if n else key for key, n in zip(unknown, near, strict=True))
        raise ValueError(f"{path}: run has no option {hints}; `aoquant run --help` lists them")
    return {key: _of_type(path, key, value, types[key]) for key, value in given.items()}


def write_plan(layers: Mapping[str, str], path: Path, skip: Sequence[str] = ()) -> None:
    """Write a YAML file for `read_yaml`. layers: names of recipes or formats, by layer. skip: layers without one."""
    import yaml

    recipes = {fqn: of_recipe_or_format(name).name for fqn, name in layers.items()}
    ((usual, _),) = Counter(recipes.values()).most_common(1)
    others = [f"{fqn}={recipe}" for fqn, recipe in recipes.items() if recipe != usual]
    plan = {"recipe": usual, "layers": others} | ({"skip": list(skip)} if skip else {})
    path.write_text(yaml.safe_dump(plan), encoding="utf-8")


def _of_type(path: Path, key: str, value: Any, type_: Any) -> Any:
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
