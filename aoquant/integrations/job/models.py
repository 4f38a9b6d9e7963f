"""Models of a run: from a folder or the hub, float or quantised, and which of their layers a run quantises."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from aoquant import CalibrateConfig, QATConfig, calibrate, calibrate_ptq, quantize_
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


_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_float(model: str | None, dtype: str, device: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model of a folder or hub id, by default the embedded ones, in eval mode.

    dtype: of torch by name, or "auto" for what is stored.

    Raises:
        ValueError: transformers finds no model there, or cannot read it.
    """
    where = model or str(assets())
    if not Path(where).is_dir():
        if not _HUB_ID.fullmatch(where):
            raise ValueError(f"model must be a folder that exists, or a hub id, got {where!r}")
        print(
            f"there is no folder {where!r} here: looking for a model of that name on the hub",
            file=sys.stderr,
            flush=True,
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            where, dtype=getattr(torch, dtype, dtype), trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{where!r} brings Python code of its own, and aoquant runs no code of a checkpoint: if you trust it, load "
                "it in Python with trust_remote_code=True, and use aoquant.quantize_"
            ) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            "model must be a folder of a causal language model, or its id on the hub; transformers cannot load "
            f"{where!r}: {reason}"
        ) from error
    return tokenizer, loaded.to(device).eval()


def load_checkpoint(checkpoint: Path, device: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model of a folder, on `device`, in eval mode: quantised (then checked), or float.

    A float model has the dtype that is stored, and float32 on a CPU that is slow in bfloat16.
    """
    config = checkpoint / "config.json"
    if config.exists() and "quantization_config" not in read_json(config):
        return load_float(str(checkpoint), "float32" if slow_in_bfloat16(device) else "auto", device)
    model: PreTrainedModel = load_pretrained(checkpoint)
    return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False), model.to(device).eval()


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
