"""Old import paths: a module that has moved can still be imported, and unpickled from, by the name that it had.

`from aoquant.qat import QATLinear` and a pickle that names `aoquant.qat.QATLinear` find the class of
`aoquant.layers.qat`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MOVED = {
    "aoquant.checks": "aoquant.tools.doctor",
    "aoquant.embedding": "aoquant.layers.embedding",
    "aoquant.fsdp": "aoquant.parallel.fsdp",
    "aoquant.handlers": "aoquant.planning.handlers",
    "aoquant.held": "aoquant.layers.held",
    "aoquant.integrations.peft_parameters": "aoquant.integrations.peft_layers",
    "aoquant.linear": "aoquant.layers.linear",
    "aoquant.packed": "aoquant.tools.packed_linear",
    "aoquant.plan": "aoquant.planning.plan",
    "aoquant.progress": "aoquant.planning.progress",
    "aoquant.qat": "aoquant.layers.qat",
    "aoquant.routes": "aoquant.tools.explain",
    "aoquant.sharded": "aoquant.parallel.packed",
    "aoquant.sharding": "aoquant.parallel.linear",
    "aoquant.sharing": "aoquant.planning.tied",
    "aoquant.siblings": "aoquant.layers.shared_inputs",
}


class _Alias(ModuleType):
    """A module whose attributes are those of the module that replaced it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(MOVED[self.__name__]), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the old names, and makes an alias of each."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
