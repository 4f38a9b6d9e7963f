"""Models of a run: from a folder or the hub, float or quantised, and which of their layers a run quantises."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from aoquant import CalibrateConfig, QATConfig, calibrate, calibrate_ptq, quantize_
from aoquant._messages import one_line
from aoquant.calibrate import uncalibrated
from aoquant.files.safetensors_file import read_json
from aoquant.integrations.hf import load_pretrained
from aoquant.integrations.job.options import Options
from aoquant.integrations.plans import checked_plan, with_embeddings
from aoquant.integrations.text import ONE_TEXT, Documents, assets
from aoquant.linear.direct_reads import Watch
from aoquant.planning import coverage
from aoquant.planning.plan import Plan
from aoquant.planning.sizes import stored_bytes
from aoquant.recipes import Recipe, mixed
from aoquant.tools.doctor import MISSING_KERNEL, slow_in_bfloat16

CALIBRATION_BATCHES = 8  # training batches that static activation scales are found on


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_float(model: str | None, dtype: str, device: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model of a folder or hub id, by default the embedded ones, in eval mode.

    dtype: of torch by name, or "auto" for what is stored.

    Raises:
        ValueError: transformers finds no model there or cannot read it, weights are missing, or the folder has no
            tokenizer, or one of another model.
    """
    where = model or str(assets())
    if Path(where).is_file():
        raise ValueError(f"model must be a folder, got a file in one: give {Path(where).parent}")
    if not Path(where).is_dir():
        if not _HUB_ID.fullmatch(where):
            raise ValueError(f"model must be a folder that exists, or a hub id, got {where!r}")
        print(
            f"there is no folder {where!r} here: looking for a model of that name on the hub",
            file=sys.stderr,
            flush=True,
        )
    elif not _tokenizer_in(Path(where), *TOKENIZER_FILES, "tokenizer_config.json"):
        raise ValueError(_no_tokenizer(where))
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        loaded: PreTrainedModel
        loaded, info = AutoModelForCausalLM.from_pretrained(
            where, dtype=getattr(torch, dtype, dtype), trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{where!r} brings Python code of its own, and aoquant runs no code of a checkpoint: if you trust it, load "
                "it in Python with trust_remote_code=True, and use aoquant.quantize_"
            ) from error
        raise ValueError(
            "model must be a folder of a causal language model, or its id on the hub; transformers cannot load "
            f"{where!r}: {one_line(error)}"
        ) from error
    if missing := sorted(map(str, info["missing_keys"])):
        raise ValueError(
            f"{where}: {len(missing)} weights of {type(loaded).__name__} are in none of its files, and would be random "
            f"numbers: {', '.join(missing[:5])}. Copy the missing files, or mend config.json"
        )
    check_tokenizer(where, tokenizer, loaded.get_input_embeddings().weight.shape[0])
    return tokenizer, loaded.to(device).eval()


def check_tokenizer(where: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Raise ValueError for a folder without a tokenizer's files, of which transformers makes an empty tokenizer, and
    for a tokenizer with more tokens than an embedding has rows.
    """
    names = tokenizer.vocab_files_names.values()
    if Path(where).is_dir() and names and not _tokenizer_in(Path(where), *names, *TOKENIZER_FILES):
        raise ValueError(_no_tokenizer(where))
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"{where}: its tokenizer has {tokenizer.vocab_size} tokens, and the model's embedding {rows} rows: copy the model's own tokenizer"
        )


def _tokenizer_in(folder: Path, *names: str) -> bool:
    """Return whether a folder has one of these files."""
    return any((folder / name).exists() for name in names)


def _no_tokenizer(where: str) -> str:
    return f"{where} holds no tokenizer: copy the model's tokenizer files into it, tokenizer.json or what it has"


def check_for_engine(model: Path, layout: str) -> None:
    """Raise ValueError, or warn, of a folder without the tokenizer that an engine reads, before it is converted."""
    if layout == "gguf" and not (model / "tokenizer.json").exists():
        raise ValueError(f"{model} has no tokenizer.json, which a GGUF file holds: copy the model's into it")
    if not _tokenizer_in(model, *TOKENIZER_FILES):
        print(f"{model} holds no tokenizer: copy the model's into it, or give the engine one", file=sys.stderr)


def load_checkpoint(checkpoint: Path, device: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model of a folder, on `device`, in eval mode: quantised (then checked), or float.

    A float model has the dtype that is stored, and float32 on a CPU that is slow in bfloat16.
    """
    config = checkpoint / "config.json"
    if config.exists() and "quantization_config" not in read_json(config):
        return load_float(str(checkpoint), "float32" if slow_in_bfloat16(device) else "auto", device)
    model: PreTrainedModel = load_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    check_tokenizer(str(checkpoint), tokenizer, model.get_input_embeddings().weight.shape[0])
    return tokenizer, model.to(device).eval()


def probe(model: PreTrainedModel) -> None:
    """Run eight tokens. Raises ValueError: a deployed layer's kernel is missing on this machine."""
    if reason := why_not_run(model):
        raise ValueError(f"a layer's kernel does not run on this machine (see `aoquant doctor`): {reason}")


def why_not_run(model: PreTrainedModel) -> str:
    """Return why a kernel of a deployed layer does not run here, by running eight tokens; "" where all run."""
    try:
        model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=model.device))
    except MISSING_KERNEL as error:
        return str(error) or type(error).__name__
    return ""


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once."""
    return stored_bytes(*model.parameters(), *model.buffers())


def chosen_layers(model: nn.Module, o: Options) -> tuple[Any, Mapping[str, str]]:
    """The config to train with, checked on the whole model, and why layers are left out that cannot take their recipe.

    Raises:
        ValueError: a layer cannot take its recipe, a name matches no layer, or --strict is not met.
    """

    def make(recipe: Recipe) -> QATConfig:
        return recipe.prepare(seed=o.seed)

    layers = list(o.layers)
    if o.embeddings or o.embeddings_recipe:
        layers = with_embeddings(model, o.embeddings_recipe or o.recipe, layers, o.skip)
    config = mixed(o.recipe, layers, o.skip, make=make)
    found = checked_plan(model, config, skip_incompatible=o.skip_incompatible)
    skipped = {**found.skipped, **_read_directly(model, found, o)}
    if o.strict and (left := coverage.after(model, found).unexpected):
        raise ValueError(
            f"--strict: {len(left)} matrix parameter(s) would stay in high precision: {coverage.listed(left)}. Name the "
            "modules with --skip, or leave out --strict"
        )
    if skipped:
        names = [name for label in skipped for name in label.split(", ")]
        layers = [entry for entry in layers if (entry.rpartition("=")[0] or entry) not in names]
        config = mixed(o.recipe, layers, [*o.skip, *names], make=make)
    return config, skipped


def _read_directly(model: nn.Module, found: Plan, o: Options) -> dict[str, str]:
    """The layers to leave out because the model reads their weights directly, and why, from one short forward."""
    modules = {change.fqn: change.module for change in found.layers}
    ids = torch.zeros(2, 8, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad(), Watch(model, modules) as watch:
        model(input_ids=ids)
    reads = watch.found
    if reads and not o.skip_incompatible:
        raise ValueError(
            f"the model reads the weight of {watch.names()} directly and does not call the layer, so training would bypass quantisation there: "
            f"leave out what reads so with --skip {' '.join(_patterns(list(reads), list(modules)))}, or with --skip-incompatible"
        )
    return {
        fqn: f"{fqn}: the model reads its weight directly (by {how}) and does not call it" for fqn, how in reads.items()
    }


def _patterns(names: list[str], every: list[str]) -> list[str]:
    """Patterns for --skip that mean `names` and none of the others: the ends of the names, as short as they can be."""
    others = [name for name in every if name not in names]
    found = []
    for name in names:
        parts = name.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts) - 1, 0, -1)]
        pattern = next((f"'re:.*{end}'" for end in ends if not any(other.endswith(end) for other in others)), name)
        found.append(pattern)
    return list(dict.fromkeys(found))


def prepare_calibrated(model: nn.Module, config: Any, o: Options, blocks_BT: Tensor, documents: Documents) -> None:
    """Prepare with codes that are chosen, or weights that are folded, on blocks of calibration text."""
    device = next(model.parameters()).device
    if len(blocks_BT) < o.samples:
        print(f"calibrated on {len(blocks_BT)} blocks, the whole text: --samples {o.samples}", file=sys.stderr)
    batches = [documents.inputs(ids.to(device)) for ids in blocks_BT[: o.samples].split(o.batch_size)]
    report = calibrate_ptq(model, batches, CalibrateConfig(config, method=o.ptq), step="prepare")
    print(report, file=sys.stderr)


def prepare(model: nn.Module, config: Any, blocks_BT: Tensor, batch_size: int, documents: Documents = ONE_TEXT) -> None:
    """Prepare; where activation scales are static, calibrate them on the first training batches."""
    quantize_(model, config)
    if uncalibrated(model):
        device = next(model.parameters()).device
        batches = blocks_BT.split(batch_size)[:CALIBRATION_BATCHES]
        calibrate(model, [documents.inputs(ids.to(device)) for ids in batches])


def convert(model: nn.Module) -> None:
    """Convert every prepared layer to what it was prepared for."""
    quantize_(model, QATConfig(step="convert"))
