"""Export: trained models in the layouts that serving engines read. Codes and scales are repacked and never rounded.

    aoquant.export(model, "out", format="compressed-tensors")  # vLLM, SGLang, transformers
    aoquant.export(model, "out", format="modelopt")            # NVFP4 and fp8 for vLLM, SGLang, TensorRT-LLM
    aoquant.export(model, "out", format="gguf")                # llama.cpp

The order is always the same: every layer is asked whether the target can hold its numbers (`contents.py`), then files
are filled one layer at a time. docs/serving.md says which engine computes exactly what training computed.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from aoquant import serving
from aoquant._messages import check_path
from aoquant.export.targets import FORMATS
from aoquant.linear.recipe import LinearRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from aoquant.export.source import Source


def _refused_by_vllm(recipe: LinearRecipe, experts: bool) -> str | None:
    from aoquant.export.foresee import refusal  # which needs compressed-tensors

    return refusal(recipe, experts=experts)


serving.REFUSALS["vllm"] = _refused_by_vllm


def export(
    model: nn.Module | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    format: str = "compressed-tensors",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    skip: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write a converted model for a serving engine; returns the folder, or GGUF's file in it.

    model: a converted Hugging Face model, or the folder of a converted checkpoint, which is read one layer at a time.
    directory: to write; must not exist, or be empty. It appears under its name when it is complete; an interrupted
        export of a folder continues where it stopped when it is started again, but for gguf, which starts anew.
    format: "compressed-tensors", "modelopt" or "gguf".
    tokenizer: to write beside a model in memory, a transformers tokenizer; a checkpoint's own tokenizer is copied.
    skip: quantised layers to write in the model's float dtype, as the values that they multiply by: names, globs or
        "re:" patterns.

    Raises:
        ValueError: listing every layer whose numbers the format cannot hold, with the nearest format that it can;
            nothing is written then. Or the model is not converted, `directory` is in use, or the disk is too small.
        ImportError: the format's library is missing.
    """
    _check(format, tokenizer)
    from aoquant.export import hf_folder, source

    check_path(directory, "directory", "the folder to write")
    if not isinstance(model, nn.Module):
        check_path(model, "model", "a converted model or the folder of one")
    found = source.of_model(model) if isinstance(model, nn.Module) else source.of_checkpoint(Path(model))
    asked: dict[str, Any] = {"tokenizer": tokenizer, "skip": tuple(skip)}
    if format == "gguf":
        from aoquant.export import gguf_file

        return gguf_file.write(found, Path(directory), **asked)
    return hf_folder.write(found, Path(directory), format, max_shard_size=max_shard_size, **asked)


def check(
    model: "nn.Module | str | os.PathLike[str] | Source",
    format: str,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> None:
    """Raise what `export` would raise for the numbers and the tokenizer of the same model; nothing is written.

    model: as `export` takes it, or a source, such as `foresee.planned` makes of a model that is not converted yet.
    """
    _check(format, tokenizer)
    from aoquant.export import hf_folder, source

    if isinstance(model, source.Source):
        found = model
    else:
        found = source.of_model(model) if isinstance(model, nn.Module) else source.of_checkpoint(Path(model))
    if format == "gguf":
        from aoquant.export import gguf_file

        gguf_file.check(found, tokenizer)
    else:
        hf_folder.decide(found, format, ())


def _check(format: str, tokenizer: object) -> None:
    """Raise for an unknown format, a format whose library is missing, and for what is no tokenizer."""
    if format not in FORMATS:
        raise ValueError(f"format is one of {', '.join(FORMATS)}, got {format!r}")
    try:
        import_module(FORMATS[format][0])
    except ImportError as error:
        raise ImportError(f"format={format!r} needs {error.name}: pip install 'aoquant[export]'") from None
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(
            f"tokenizer is a transformers tokenizer, as AutoTokenizer.from_pretrained gives, got {tokenizer!r}"
        )
