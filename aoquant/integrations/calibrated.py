"""Calibrated PTQ from a model folder and a file of text to a converted folder, as `aoquant convert --ptq gptq` does.

The model is read a block at a time: on a CPU transformers maps the weights from their files, so that they take no
memory of a process, and each block is on the device while it is calibrated. A finished block is in a file of its own,
and its packed weights are mapped from there. So one block is in memory, and its inputs.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
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
    """Calibrate a model folder on a file of text, one block in memory at a time, and write a converted folder.

    The codes of finished blocks are in `out` + ".calibration" until `out` is there; the same call goes on from them.

    samples, length: sequences of tokens that it sees; no longer than the model's positions. device: where a block is
        calibrated. dtype: another one than the files' is made in host memory, of the whole model. options: further
        arguments of `calibrate_ptq`.

    Raises:
        ValueError: a folder or file cannot be read, `out` holds something, the text fills no sequence, or as
            `calibrate_ptq`. Nothing is written then.
    """
    check_free(Path(out))
    loaded, tokenizer, batches = calibration(model, text, samples, length, "cpu", dtype)
    there, finished = None if torch.device(device).type == "cpu" else device, Path(f"{out}.calibration")
    report = calibrate_ptq(loaded, batches, config, checkpoint=finished, device=there, **options)
    save_pretrained(loaded, out, tokenizer, max_shard_size=max_shard_size)
    del loaded  # it reads the finished blocks' files
    shutil.rmtree(finished)
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
    if len(blocks_BT) < samples:
        print(f"calibrated on {len(blocks_BT)} sequences, the whole text: --samples {samples}", file=sys.stderr)
    return loaded, tokenizer, [{"input_ids": ids_BT} for ids_BT in blocks_BT.split(BATCH)]
