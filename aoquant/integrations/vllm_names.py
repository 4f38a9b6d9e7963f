"""The weights of a model with experts as vLLM's loaders take them: each expert's matrices, under the names of the float
checkpoint.

vLLM reads a torchao checkpoint by the names in its metadata, which are transformers' own; where files have others, as
Mixtral's have, it would leave those weights unread without a word, and stacked experts have no name that its loader
splits. So the plugin reads such folders as `aoquant.export` does, and `sync_vllm` gives a model in training under the
same names.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from aoquant.export import source
from aoquant.integrations import checksums
from aoquant.integrations.safetensors_file import header


def patch_loader(loader: Any) -> None:
    """Patch vLLM's DefaultModelLoader for folders of aoquant: models with experts are read as `weights_in` does, and
    float layers keep their weights on a CPU, where vLLM would pack them away from `sync_vllm`.
    """
    stock = loader.get_all_weights

    @functools.wraps(stock)
    def all_weights(self: Any, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        if model_config.quantization == "torchao":
            folder, files, safetensors, _ = self._prepare_weights(
                model_name_or_path=model_config.model,
                subfolder=None,
                revision=model_config.revision,
                fall_back_to_pt=True,
                allow_patterns_overrides=None,
            )
            if safetensors and is_ours(files):
                for module in model.modules():
                    if hasattr(module, "quant_method"):
                        module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
                if any(hasattr(m, "moe_config") for m in model.modules()):
                    self.counter_before_loading_weights = time.perf_counter()  # vLLM logs how long it takes
                    return weights_in(Path(folder))
        every: Iterator[tuple[str, Tensor]] = stock(self, model_config, model)
        return every

    loader.get_all_weights = all_weights


def is_ours(files: Sequence[str]) -> bool:
    """Return whether the files are those of aoquant's own checkpoint, and not of an export or another library."""
    return all({checksums.KEY, "tensor_names"} <= header(Path(file)).metadata.keys() for file in files)


def weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a folder of `aoquant.save_pretrained` or `convert_checkpoint`, one in memory at a time.

    Raises:
        ValueError: as `aoquant.export` of the folder.
    """
    for weight in source.of_checkpoint(folder).weights.values():
        yield weight.name_in_files, weight.read(True)
