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

from aoquant.config import named
from aoquant.files import checkpoint
from aoquant.files.atomic import check_free
from aoquant.integrations.hf import check_storable, save_pretrained
from aoquant.integrations.job.models import load_float
from aoquant.integrations.lm_eval import check_within, positions
from aoquant.integrations.text import load_documents, token_blocks
from aoquant.planning.choose import each
from aoquant.ptq.calibrate_config import CalibrateConfig
from aoquant.ptq.ptq_report import PTQReport
from aoquant.ptq.sequential import calibrate_ptq
from aoquant.targets import resolve
from aoquant.tools.doctor import check_device

BATCH = 8  # sequences in one forward
LENGTH = 2048  # tokens of a sequence, where none are asked for


def convert_calibrated(
    model: str | Path,
    config: CalibrateConfig,
    out: str | Path,
    text: Path,
    *,
    samples: int = 128,
    length: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> PTQReport:
    """Calibrate a model folder on a file of text, one block in memory at a time, and write a converted folder.

    The codes of finished blocks are in `out` + ".calibration" until `out` is there; the same call goes on from them.

    samples, length: sequences of tokens that it sees; by default as long as the model's positions, at most 2048.
    device: where a block is calibrated. dtype: another one than the files' is made in host memory, of the whole model.
    options: further arguments of `calibrate_ptq`.

    Raises:
        ValueError: a folder or file cannot be read, `out` holds something, the text fills no sequence, or as
            `calibrate_ptq`. Nothing is written then.
    """
    check_free(Path(out))
    checkpoint.check_shard_size(max_shard_size)
    for base in each(named(config.recipe)):
        check_storable(resolve(base).tensor, "convert")
    check_device(device)
    loaded, tokenizer, batches = calibration(model, text, samples, length, "cpu", dtype)
    there, finished = None if torch.device(device).type == "cpu" else device, Path(f"{out}.calibration")
    report = calibrate_ptq(loaded, batches, config, checkpoint=finished, device=there, **options)
    save_pretrained(loaded, out, tokenizer, max_shard_size=max_shard_size)
    del loaded  # it reads the finished blocks' files
    if finished.exists():  # embeddings alone have no block
        shutil.rmtree(finished)
    return report


def calibration(
    model: str | Path, text: Path, samples: int, length: int | None, device: str, dtype: str, *, longest: int = LENGTH
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[dict[str, Tensor]]]:
    """Return a float model, its tokenizer, and batches of a file of text.

    length: tokens of a sequence. None: the model's positions, at most `longest`.

    Raises:
        ValueError: the folder or the file cannot be read, length is more than the model's positions, or the text fills
            no sequence.
    """
    for name, value in (("samples", samples), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    check_device(device)
    documents = load_documents(text)
    tokenizer, loaded = load_float(str(model), dtype, device)
    most = positions(loaded)
    check_within("length", length, most)
    length = length or min(longest, most or longest)
    blocks_BT = token_blocks(documents, tokenizer, length)[:samples].to(device)
    if len(blocks_BT) < samples:
        print(f"calibrated on {len(blocks_BT)} sequences, the whole text: --samples {samples}", file=sys.stderr)
    return loaded, tokenizer, [{"input_ids": ids_BT} for ids_BT in blocks_BT.split(BATCH)]
