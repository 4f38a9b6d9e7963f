"""The main job: float, PTQ and QAT of one model under one recipe, measured, verified and saved.

    float -> float fine-tuned on the same tokens -> PTQ -> QAT prepared -> QAT converted

Every stage is scored by lm-eval with the same window and pages. `recovered` is the share of PTQ's loss that QAT wins back, in log
perplexity, (PTQ - QAT) / (PTQ - float); it is n/a when PTQ's loss is within two standard errors of zero, paired over documents.
The prepared and the converted model are compared layer by layer before anything is called done, and the saved checkpoint is loaded
again and must give the same logits, bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from aoquant import QATConfig, calibrate, quantize_
from aoquant.calibrate import uncalibrated
from aoquant.config import WeightConfig
from aoquant.export import export
from aoquant.integrations.finetune import LOSSES, finetune
from aoquant.integrations.hf import check_storable, load_pretrained, save_pretrained
from aoquant.integrations.lm_eval import Perplexity, evaluate
from aoquant.integrations.text import assets, find_pages, load_documents, token_blocks
from aoquant.planning.plan import Filter, Layer
from aoquant.recipes import get_recipe
from aoquant.report import Report, report, verify
from aoquant.report.measure import stored_bytes
from aoquant.targets import resolve
from aoquant.tools.doctor import MISSING_KERNEL, check_device

RESULTS = "aoquant_run.json"
CALIBRATION_BATCHES = 8  # training batches that static activation scales are found on


@dataclass
class Options:
    """What `aoquant run` takes.

    model: a folder or hub id of a causal language model; the embedded demo model by default.
    recipe: a name from `aoquant recipes`, or two from `aoquant formats` as WEIGHT/ACTIVATION.
    embeddings: quantise embeddings and the output head too; a tied pair keeps one weight.
    steps, batch_size, block, learning_rate, loss, seed: the fine-tune; block is tokens in a sequence, loss "kl" or "ce".
    train_text: files of text (.txt, .jsonl, .xz); by default text that the embedded model generated.
    wikitext: "hub", or a folder with WikiText-2 as test.jsonl; held-out generated documents by default.
    window: tokens that a prediction sees at most; the model's positions by default. limit: score the first documents only.
    dtype: what is deployed; AdamW keeps float32 copies either way.
    out: where the report, the numbers and the converted checkpoint go.
    export: a folder for the engine that the recipe is for: GGUF for gguf-..., compressed-tensors for the others.
    """

    model: str | None = None
    recipe: str = "nvfp4"
    embeddings: bool = False
    steps: int = 80
    batch_size: int = 8
    block: int = 256
    learning_rate: float = 3e-4
    loss: str = "kl"
    seed: int = 0
    train_text: list[Path] = field(default_factory=list)
    wikitext: str | None = None
    window: int | None = None
    limit: int | None = None
    dtype: str = "bfloat16"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    out: Path = Path("aoquant-run")
    export: Path | None = None

    def check(self) -> None:
        """Raise ValueError for anything that would only fail after minutes of work."""
        check_storable(resolve(get_recipe(self.recipe).make()).tensor, f"recipe {self.recipe}")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype!r}")
        if self.steps < 1 or self.batch_size < 1 or self.block < 2:
            raise ValueError(
                f"steps, batch_size and block must be positive, got {self.steps}, {self.batch_size}, {self.block}"
            )
        find_pages(self.wikitext, None)
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.model is not None and self.model.startswith((".", "/", "~")) and not Path(self.model).is_dir():
            raise ValueError(f"model must be a folder that exists, or a hub id, got {self.model!r}")
        check_device(self.device)
        if (self.limit is not None and self.limit < 1) or (self.window is not None and self.window < 1):
            raise ValueError(f"limit and window must be at least 1, got {self.limit} and {self.window}")
        if missing := [str(p) for p in self.train_text if not p.is_file()]:
            raise ValueError(f"train_text must be existing files, missing: {', '.join(missing)}")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"{self.out} exists and is not an empty folder: remove it or choose another --out")
        if self.export is not None and self.export.exists():
            raise ValueError(f"{self.export} exists: remove it or choose another --export")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {self.out} cannot be made: {error}") from None


@dataclass
class Stage:
    """One row of the table. note: how it was run, when not as it is deployed."""

    name: str
    perplexity: Perplexity
    bytes: int
    note: str = ""


@dataclass
class Result:
    """What a run found."""

    options: Options
    stages: list[Stage]
    recovered: str
    min_sqnr_db: float
    reload: str
    layers: Report

    def sqnr(self) -> str:
        """The verdict over all rows, for people."""
        if math.isnan(self.min_sqnr_db):
            return "not run here, the kernel is missing"
        return f"minimum SQNR {self.min_sqnr_db} dB over {len(self.layers.rows)} rows"

    def table(self) -> str:
        """The stages as a markdown table, then the verdicts."""
        from tabulate import tabulate

        rows = [
            (
                s.name,
                s.perplexity.word_perplexity,
                s.perplexity.byte_perplexity,
                s.perplexity.bits_per_byte,
                s.bytes / 1e6,
                s.note,
            )
            for s in self.stages
        ]
        heads = ("model", "word perplexity", "byte perplexity", "bits/byte", "size MB", "note")
        first = self.stages[0].perplexity
        return "\n".join(
            (
                tabulate(rows, heads, tablefmt="github", floatfmt=("", ".3f", ".4f", ".4f", ".2f", "")),
                "",
                f"recipe {self.options.recipe}; window {first.window} tokens; {first.documents} documents of {first.source}",
                f"recovered by QAT: {self.recovered}",
                f"prepared against converted: {self.sqnr()}",
                f"checkpoint reloaded: {self.reload}",
            )
        )


def run(o: Options) -> Result:
    """Run the whole job and write o.out/{report.md,.csv,.json,.png, float_against_quantized/, aoquant_run.json, checkpoint/}.

    Raises:
        ValueError: bad options, or prepared and converted differ.
    """
    o.check()
    recipe = get_recipe(o.recipe)
    get = recipe.make
    chosen = _every_layer if o.embeddings else None
    tokenizer, float_model = load_float(o.model, o.dtype, o.device)
    documents = [d for path in o.train_text or [assets() / "train.jsonl"] for d in load_documents(path)]
    blocks = token_blocks(documents, tokenizer, o.block)
    tuning: Any = {"steps": o.steps, "batch_size": o.batch_size, "learning_rate": o.learning_rate, "seed": o.seed}

    def score(model: PreTrainedModel) -> Perplexity:
        return evaluate(
            model, tokenizer, wikitext=o.wikitext, window=o.window, limit=o.limit, progress=sys.stderr.isatty()
        )

    stages = [Stage("float", score(float_model), model_bytes(float_model))]

    tuned = copy.deepcopy(float_model)
    finetune(tuned, blocks, loss="ce", teacher=None, label="float fine-tune", **tuning)
    stages.append(Stage("float, fine-tuned", score(tuned), model_bytes(tuned)))
    del tuned

    ptq = copy.deepcopy(float_model)
    _prepare(ptq, recipe.prepare(), chosen, blocks, o.batch_size)
    quantize_(ptq, QATConfig(get(), step="convert"))
    stages.append(_score_deployed("PTQ", ptq, float_model, get(), chosen, score))
    del ptq

    prepared = copy.deepcopy(float_model)
    _prepare(prepared, recipe.prepare(seed=o.seed), chosen, blocks, o.batch_size)
    finetune(prepared, blocks, loss=o.loss, teacher=float_model, label=f"QAT {o.recipe}", **tuning)
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(get(), step="convert"))
    stages.append(Stage("QAT, prepared", score(prepared), model_bytes(prepared)))
    runs_here = not stages[2].note
    if runs_here:
        stages.append(Stage("QAT, converted", score(converted), model_bytes(converted)))
    else:
        stages.append(Stage("QAT, converted", stages[-1].perplexity, model_bytes(converted), stages[2].note))

    batch = {"input_ids": blocks[: o.batch_size].to(float_model.device)}
    layers = verify(prepared, converted, batch, allow_not_run=not runs_here)
    save_pretrained(converted, o.out / "checkpoint", tokenizer)
    fingerprint = logits_fingerprint(converted, batch["input_ids"]) if runs_here else None
    reload = _reload(o.out / "checkpoint", batch["input_ids"], fingerprint)
    if o.export is not None:
        export(o.out / "checkpoint", o.export, "gguf" if o.recipe.startswith("gguf-") else "compressed-tensors")
    result = Result(
        o,
        stages,
        recovered(*(s.perplexity for s in (stages[0], stages[2], stages[4]))),
        layers.min_sqnr,
        reload,
        layers,
    )
    _write(result, batch["input_ids"], fingerprint, report(float_model, converted if runs_here else prepared, batch))
    return result


def _prepare(
    model: PreTrainedModel, config: QATConfig, chosen: Filter | None, blocks_BT: Tensor, batch_size: int
) -> None:
    """Prepare; where activation scales are static, calibrate them on the first training batches."""
    quantize_(model, config, chosen)
    if uncalibrated(model):
        calibrate(
            model, [{"input_ids": ids.to(model.device)} for ids in blocks_BT.split(batch_size)[:CALIBRATION_BATCHES]]
        )


def load_float(model: str | None, dtype: str, device: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model of a folder or hub id, by default the embedded ones, in `dtype` ("auto": as stored), in eval mode."""
    where = model or str(assets())
    tokenizer = AutoTokenizer.from_pretrained(where)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype, dtype))
    return tokenizer, loaded.to(device).eval()


def probe(model: PreTrainedModel) -> None:
    """Run eight tokens; raises ValueError when a deployed layer's kernel is missing on this machine."""
    try:
        model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=model.device))
    except MISSING_KERNEL as error:
        raise ValueError(f"a layer's kernel does not run on this machine (see `aoquant doctor`): {error}") from None


def load_checkpoint(checkpoint: Path, device: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model of a folder, quantised (then checked) or float (as it is stored), on `device`, in eval mode."""
    config = checkpoint / "config.json"
    if config.exists() and "quantization_config" not in json.loads(config.read_text()):
        return load_float(str(checkpoint), "auto", device)
    model: PreTrainedModel = load_pretrained(checkpoint)
    return AutoTokenizer.from_pretrained(checkpoint), model.to(device).eval()


def _every_layer(module: torch.nn.Module, fqn: str) -> bool:
    return isinstance(module, Layer)


def _score_deployed(
    name: str, deployed: PreTrainedModel, source: PreTrainedModel, config: Any, chosen: Filter | None, score: Any
) -> Stage:
    """Score a converted model; where its kernel does not run on this machine, score the prepared one, and say so."""
    size = model_bytes(deployed)
    try:
        deployed(input_ids=torch.zeros(1, 8, dtype=torch.long, device=source.device))
    except MISSING_KERNEL as error:
        if isinstance(config, WeightConfig):
            raise  # our own tensor runs everywhere
        simulated = copy.deepcopy(source)
        quantize_(simulated, QATConfig(config, step="prepare"), chosen)
        reason = str(error).splitlines()[0]
        return Stage(name, score(simulated), size, f"its kernel does not run here ({reason}); scored as prepared")
    return Stage(name, score(deployed), size)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once."""
    return stored_bytes(*model.parameters(), *model.buffers())


def recovered(base: Perplexity, ptq: Perplexity, qat: Perplexity) -> str:
    """The share of PTQ's loss that QAT recovered, as text; n/a when that loss is within noise."""
    if len(base.words) < 2:
        return "n/a (one document shows no noise to compare with)"
    words = sum(base.words)
    loss = (sum(base.loglikelihoods) - sum(ptq.loglikelihoods)) / words
    pairs = [a - b for a, b in zip(base.loglikelihoods, ptq.loglikelihoods, strict=True)]
    mean = sum(pairs) / len(pairs)
    error = math.sqrt(len(pairs) * sum((p - mean) ** 2 for p in pairs) / max(1, len(pairs) - 1)) / words
    if loss <= 2 * error:
        return f"n/a (PTQ loses {loss:.4f} +- {error:.4f} nats a word, which is within noise)"
    return f"{100 * recovered_share(base, ptq, qat):.0f} % of PTQ's loss ({loss:.4f} +- {error:.4f} nats a word)"


def recovered_share(base: Perplexity, ptq: Perplexity, qat: Perplexity) -> float:
    """(PTQ - QAT) / (PTQ - float) in log perplexity: 1 when QAT equals float, above 1 when it is better."""
    lost, gained = sum(base.loglikelihoods), sum(qat.loglikelihoods)
    floor = sum(ptq.loglikelihoods)
    return (gained - floor) / (lost - floor)


@torch.no_grad()
def logits_fingerprint(model: PreTrainedModel, ids_BT: Tensor) -> str:
    """sha256 of the logits' bytes for fixed tokens: equal exactly when the logits are."""
    logits: Tensor = model.eval()(input_ids=ids_BT).logits.contiguous().cpu()
    return hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest()


def _reload(checkpoint: Path, ids_BT: Tensor, fingerprint: str | None) -> str:
    if fingerprint is None:
        return "written; not run, its kernel does not run here"
    if logits_fingerprint(load_checkpoint(checkpoint, str(ids_BT.device))[1], ids_BT) != fingerprint:
        raise ValueError(f"{checkpoint}: the reloaded checkpoint gives other logits than the model that was saved")
    return "logits bit-equal"


def _write(result: Result, ids_BT: Tensor, fingerprint: str | None, error: Report) -> None:
    out = result.options.out
    result.layers.save(out)
    error.save(out / "float_against_quantized")
    text = f"# aoquant run: {result.options.recipe}\n\n{result.table()}\n\n## Prepared against converted\n\n"
    text += f"{result.layers.to_markdown()}\n\n## Float against quantised\n\n{error.to_markdown()}\n"
    (out / "report.md").write_text(text)
    numbers = {
        "options": {
            k: str(v) if isinstance(v, Path) else v for k, v in asdict(result.options).items() if k != "train_text"
        },
        "stages": [asdict(s) for s in result.stages],
        "recovered": result.recovered,
        "min_sqnr_db": str(result.min_sqnr_db),
        "probe_ids": ids_BT.tolist(),
        "logits_sha256": fingerprint,
        "torch": torch.__version__,
        "device": result.options.device,
    }
    for folder in (out, out / "checkpoint"):
        (folder / RESULTS).write_text(json.dumps(numbers, indent=1))


def check_fingerprint(model: PreTrainedModel, checkpoint: Path) -> str:
    """Whether a loaded checkpoint gives the logits that the run which wrote it saw: a sentence for people."""
    path = checkpoint / RESULTS
    if not path.exists():
        return "no fingerprint beside this checkpoint"
    numbers = json.loads(path.read_text())
    if numbers["logits_sha256"] is None:
        return "the run that wrote it could not run its kernel"
    same = (
        logits_fingerprint(model, torch.tensor(numbers["probe_ids"], device=model.device)) == numbers["logits_sha256"]
    )
    where = f"torch {numbers['torch']} on {numbers['device']}"
    return (
        f"logits bit-equal to the run that wrote it ({where})"
        if same
        else f"logits differ from the run that wrote it ({where})"
    )
