"""`aoquant export`: the command line's way to `aoquant.export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from aoquant.export import export


def command(
    checkpoint: Path,
    /,
    format: Literal["compressed-tensors", "modelopt", "gguf"],
    out: Path,
    skip: tuple[str, ...] = (),
    max_shard_size: str = "5GB",
) -> None:
    """Write a converted checkpoint for a serving engine, one layer in memory at a time. Nothing is rounded.

    A layer whose numbers the format cannot hold is an error that names it and the nearest format that fits; nothing is
    written then. An export that was interrupted continues when the same command is given again, but of gguf
    starts anew.

    Args:
        checkpoint: folder that `aoquant run`, `aoquant convert` or `aoquant.save_pretrained` wrote; of a run, its
            converted model.
        format: compressed-tensors (vLLM, SGLang, transformers), modelopt (vLLM, SGLang, TensorRT-LLM) or gguf
            (llama.cpp).
        out: folder to write; must not exist, or be empty.
        skip: quantised layers to write as floats: names, globs or re: patterns.
        max_shard_size: of the safetensors files, such as 5GB.
    """
    print(f"written: {export(checkpoint, out, format, skip=skip, max_shard_size=max_shard_size)}")
