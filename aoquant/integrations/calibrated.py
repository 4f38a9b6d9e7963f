"""Calibrated PTQ from a model folder and a file of text to a converted folder, as `aoquant convert --ptq gptq` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aoquant.files.atomic import check_free
from aoquant.integrations.hf import save_pretrained
from aoquant.integrations.job.models import load_float
from aoquant.integrations.lm_eval import positions
from aoquant.integrations.text import load_documents, token_blocks
from aoquant.ptq.calibrate_config import CalibrateConfig
from aoquant.ptq.ptq_report import PTQReport
from aoquant.ptq.sequential import calibrate_ptq

BATCH = 8  # sequences in one forward


def convert_calibrated(
    model: str | Path,
    config: CalibrateConfig,
    out: str | Path,
    text: Path,
    *,
    samples: int = 128,
    length: int = 2048,
    device: str = "cpu",
    dtype: str = "auto",
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> PTQReport:
    """Load a model folder, calibrate it on a file of text, and write a converted folder.

    samples, length: sequences of tokens that it sees; no longer than the model's positions. options: further arguments
        of `calibrate_ptq`.

    Raises:
        ValueError: a folder or file cannot be read, `out` holds something, the text fills no sequence, or as
            `calibrate_ptq`. Nothing is written then.
    """
    check_free(Path(out))
    loaded, tokenizer, batches = calibration(model, text, samples, length, device, dtype)
    report = calibrate_ptq(loaded, batches, config, **options)
    save_pretrained(loaded, out, tokenizer, max_shard_size=max_shard_size)
    return report


def calibration(
    model: str | Path, text: Path, samples: int, length: int, device: str, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[dict[str, Tensor]]]:
    """Return a float model, its tokenizer, and batches of a file of text.

    Raises:
        ValueError: the folder or the file cannot be read, or the text fills no sequence.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    documents = load_documents(text)
    tokenizer, loaded = load_float(str(model), dtype, device)
    blocks_BT = token_blocks(documents, tokenizer, min(length, positions(loaded) or length))[:samples].to(device)
    return loaded, tokenizer, [{"input_ids": ids_BT} for ids_BT in blocks_BT.split(BATCH)]
