"""Registrations with torchao and others, made once, when aoquant is imported.

torchao rebuilds configs and safetensors tensors from allow-lists: of modules (searched by bare class name), and of
tensor classes. `_config_guard` checks first what a file asks torchao to build. The second list lives in a prototype
module that is imported when a checkpoint is saved or loaded; it is extended at that moment. In the same way peft's LoRA
is told of our layers, and transformers of our quantizer and of Conv1D with quantised weights. Every private name is
probed here, and before aoquant imports anything else of itself, so that another torchao fails with one sentence instead
of halfway.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from aoquant import _moved as _moved  # old import paths

TORCHAO = ">=0.18"
_HF_QUANTIZERS = "transformers.quantizers.auto"
_HF_MODELS = "transformers.modeling_utils"
_TRAINER = "transformers.trainer"
_LORA = "peft.tuners.lora.model"
_CONV1D = "transformers.pytorch_utils"
_SAFETENSORS = "torchao.prototype.safetensors.safetensors_utils"


def register() -> None:
    """Register configs, handlers and the packed tensor.

    Raises:
        ImportError: this torchao lacks a name that aoquant builds on.
    """
    try:
        from torchao.core.config import ALLOWED_AO_MODULES

        from aoquant import _config_guard
        from aoquant.planning import handlers
        from aoquant.targets import no_rows
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"aoquant builds on torchao {TORCHAO}, and torchao {version('torchao')} with torch {version('torch')} lacks "
            f"what it needs: {error}"
        ) from error
    ALLOWED_AO_MODULES.add("aoquant._config_types")
    _config_guard.guard_configs()
    handlers.register()
    no_rows.install()
    _when_imported(_SAFETENSORS, _allow_packed_tensor)
    _when_imported(_LORA, _teach_adapters)
    _when_imported(_CONV1D, _teach_conv1d)
    _when_imported(_HF_QUANTIZERS, _extend_quantizer)
    _when_imported(_TRAINER, _spare_scales)
    _when_imported(_HF_MODELS, _wrap_methods)


def version(package: str) -> str:
    """Of an installed distribution, for error messages."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _allow_packed_tensor(module: ModuleType) -> None:
    from torchao.quantization import PerBlock

    from aoquant import _config_guard
    from aoquant.layers.packed_experts import PackedExperts
    from aoquant.tensor import PackedTensor

    try:
        # torchao writes PerBlock for its own Float8Tensors, and its reader knows PerRow and PerTensor alone
        module.ALLOWED_CLASSES.update(
            {"PackedTensor": PackedTensor, "PackedExperts": PackedExperts, "PerBlock": PerBlock}
        )
        for name in ("PackedTensor", "PackedExperts"):
            if name not in module.ALLOWED_TENSORS_SUBCLASSES:
                module.ALLOWED_TENSORS_SUBCLASSES.append(name)
        _config_guard.guard_tensors(module)
    except AttributeError as error:
        raise ImportError(
            f"aoquant cannot save to safetensors with torchao {version('torchao')} ({error}); it supports {TORCHAO}"
        ) from error


def _teach_adapters(module: ModuleType) -> None:
    try:
        from aoquant.integrations import peft

        peft.install(module)
    except (AttributeError, ImportError) as error:
        raise ImportError(
            f"aoquant cannot put adapters on its layers with peft {version('peft')} ({error}); it supports peft >=0.21"
        ) from error


def _teach_conv1d(module: ModuleType) -> None:
    from aoquant.integrations import conv1d as conv1d


def _spare_scales(module: ModuleType) -> None:
    # a transformers whose Trainer has other names trains as it did
    with contextlib.suppress(ImportError, AttributeError):
        from aoquant.integrations import trainer

        trainer.install(module)


def _extend_quantizer(module: ModuleType) -> None:
    # a transformers that aoquant cannot build on works as it did; aoquant.load_pretrained and save_pretrained say why
    with contextlib.suppress(ImportError, AttributeError, AssertionError, KeyError):
        from aoquant.integrations import hf_quantizer

        hf_quantizer.install(module)


def _wrap_methods(module: ModuleType) -> None:
    from aoquant.integrations import pretrained_model

    pretrained_model.install(module)


def _when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call callback(module) once module `name` has been imported, now or later."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Hook(name, callback))


class _Hook(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the next finder find `name` and runs the callback after its body."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name, self.callback = name, callback

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute, callback = spec.loader.exec_module, self.callback

        def exec_module(module: ModuleType) -> None:
            execute(module)
            callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


register()
