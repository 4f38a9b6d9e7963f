"""Registrations with torchao and others, made once, when aoquant is imported.

torchao rebuilds configs and safetensors tensors from allow-lists: of modules (searched by bare class name), and of
tensor classes. `_config_guard` checks first what a file asks torchao to build. The second list lives in a prototype
module that is imported when a checkpoint is saved or loaded; it is extended at that moment. In the same way peft's LoRA
is told of our layers, and transformers of our quantizer and of Conv1D with quantised weights. Every private name is
probed here, and before aoquant imports anything else of itself, so that another torchao fails with one sentence instead
of halfway.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TORCHAO = ">=0.18"
_SAFETENSORS = "torchao.prototype.safetensors.safetensors_utils"
_LORA = "peft.tuners.lora.model"

# module of another library -> (module of aoquant.integrations that is installed in it, errors that leave it as it was:
# a transformers that aoquant cannot build on works as it did; aoquant.load_pretrained and save_pretrained say why)
_INSTALLED: tuple[tuple[str, str, tuple[type[Exception], ...]], ...] = (
    ("transformers.pytorch_utils", "conv1d", ()),
    ("transformers.quantizers.auto", "hf_quantizer", (ImportError, AttributeError, AssertionError, KeyError)),
    ("transformers.trainer", "trainer", (ImportError, AttributeError)),
    ("transformers.modeling_utils", "pretrained_model", ()),
)

# old module -> where its classes are now, or "" where nothing reads their objects any more. Pickles name a class by its
# module, and load through this table alone.
MOVED = {
    "aoquant.embedding": "aoquant.linear.embedding",
    "aoquant.integrations.peft_layers": "aoquant.integrations.peft.layers",
    "aoquant.integrations.peft_parameters": "aoquant.integrations.peft.layers",
    "aoquant.layers.direct_reads": "aoquant.linear.direct_reads",
    "aoquant.layers.embedding": "aoquant.linear.embedding",
    "aoquant.layers.experts": "aoquant.experts.prepared",
    "aoquant.layers.packed": "aoquant.linear.packed",
    "aoquant.layers.packed_experts": "aoquant.experts.packed_experts",
    "aoquant.layers.qat": "aoquant.linear.prepared",
    "aoquant.layers.recipe": "aoquant.linear.recipe",
    "aoquant.layers.shared_operands": "",
    "aoquant.layers.sides": "",
    "aoquant.parallel.experts": "aoquant.experts.sharded",
    "aoquant.parallel.packed": "aoquant.linear.sharded_packed",
    "aoquant.plan": "aoquant.planning.plan",
    "aoquant.qat": "aoquant.linear.prepared",
    "aoquant.sharded": "aoquant.linear.sharded_packed",
    "aoquant.tensor": "aoquant.linear.tensor",
}

# what torchao logs for each of its libraries that was built for another Python or GPU, and torch for each Enum of
# torchao's that is registered in an old way
_LOGGED = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported"}


def register() -> None:
    """Register configs, handlers and the packed tensor.

    Raises:
        ImportError: this torchao lacks a name that aoquant builds on.
    """
    _quiet_the_command()  # before torch is imported
    sys.modules.update({old: _Moved(old) for old in MOVED})
    try:
        from torchao.core.config import ALLOWED_AO_MODULES

        from aoquant import _config_guard, _handlers
        from aoquant.targets import no_rows
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"aoquant builds on torchao {TORCHAO}, and torchao {version('torchao')} with torch {version('torch')} lacks "
            f"what it needs: {error}"
        ) from error
    ALLOWED_AO_MODULES.add(_config_module(_handlers.OWN_CONFIGS).__name__)
    _config_guard.guard_configs()
    _handlers.register()
    no_rows.install()
    _when_imported(_SAFETENSORS, _allow_packed_tensor)
    _when_imported(_LORA, _teach_adapters)
    for name, own, tolerated in _INSTALLED:
        _when_imported(name, _installer(own, tolerated))


def version(package: str) -> str:
    """Return the version of an installed distribution, for error messages."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


class _Moved(ModuleType):
    """A module whose attributes are those of the module that replaced it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspect asks every module for its __file__
            raise AttributeError(name)
        target = MOVED[self.__name__]
        return getattr(importlib.import_module(target), name) if target else _Forgotten


class _Forgotten:
    """An object of a pickle that nothing reads any more."""

    def __setstate__(self, state: Any) -> None:
        """Keep nothing of it."""


def _quiet_the_command() -> None:
    """Keep the lines of `_LOGGED` off the terminal in a process of `aoquant` or `python -m aoquant`.

    A program in Python may use torchao itself. The command never calls those libraries unsaid (`aoquant doctor`).
    """
    script = Path(sys.argv[0]).name if sys.argv else ""
    if script == "-m":  # what stands there until the module is found
        script = _python_m(sys.orig_argv)
    if script in ("aoquant", "aoquant.exe"):
        for logger, line in _LOGGED.items():
            logging.getLogger(logger).addFilter(_without(line))


def _without(line: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not str(record.msg).startswith(line)


def _python_m(arguments: list[str]) -> str:
    """Return the module of `python -m`: behind -m, behind flags and an m as in -um, or joined to it as in -mNAME."""
    for argument, following in zip(arguments[1:], [*arguments[2:], ""], strict=False):
        if found := re.fullmatch("-[bBdEiIOPqRsSuvVx]*m(.*)", argument):  # flags without a value of their own
            return found[1] or following
    return ""


def _config_module(own: Sequence[type]) -> ModuleType:
    """Return the module that torchao searches for classes that a checkpoint's config names.

    torchao calls what it finds there, so the module holds configs and what they hold, and nothing else.
    """
    from aoquant.hybrid import Cast, HybridConfig
    from aoquant.kv import KVCacheConfig
    from aoquant.transforms import WUSH, Hadamard

    module = ModuleType("aoquant._config_types")
    vars(module).update({cls.__name__: cls for cls in (*own, Cast, HybridConfig, KVCacheConfig, Hadamard, WUSH)})
    sys.modules[module.__name__] = module
    return module


def _allow_packed_tensor(module: ModuleType) -> None:
    from torchao.quantization import PerBlock

    from aoquant import _config_guard
    from aoquant.experts.packed_experts import PackedExperts
    from aoquant.linear.tensor import PackedTensor

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
        importlib.import_module("aoquant.integrations.peft.dispatch").install(module)
    except (AttributeError, ImportError) as error:
        raise ImportError(
            f"aoquant cannot put adapters on its layers with peft {version('peft')} ({error}); it supports peft >=0.21"
        ) from error


def _installer(name: str, tolerated: tuple[type[Exception], ...]) -> Callable[[ModuleType], None]:
    def install(module: ModuleType) -> None:
        with contextlib.suppress(*tolerated):
            own = importlib.import_module(f"aoquant.integrations.{name}")
            if hasattr(own, "install"):  # some teach by their import
                own.install(module)

    return install


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
