"""transformers' `save_pretrained`, staged: the Trainer and users call the method, and a kill must not mix two models.

Importing aoquant wraps `PreTrainedModel.save_pretrained` (see `_register.py`). A model with prepared layers, or with
aoquant's quantizer, is written into a staging folder and takes its place as a whole (`atomic.py`). Other models are
saved as ever.
"""

from __future__ import annotations

import functools
import inspect
import os
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from aoquant.integrations.atomic import Staged, is_main
from aoquant.layers.qat import PreparedModule
from aoquant.planning.sizes import stored_bytes

_staged: ContextVar[bool] = ContextVar("staged", default=False)


def install(modeling: ModuleType) -> None:
    """Stage the saves of aoquant's models in `transformers.modeling_utils`."""
    stock = modeling.PreTrainedModel.save_pretrained
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, save_directory, *args, **kwargs).arguments
        main = is_main(self, given.get("is_main_process", True))
        if _staged.get() or not main or given.get("distributed_checkpoint") or not _is_ours(self):
            return stock(self, save_directory, *args, **kwargs)
        if given.get("push_to_hub"):  # transformers names the repository after the folder, and that is another one
            kwargs.setdefault("repo_id", Path(save_directory).absolute().name)
        save(self, save_directory, lambda folder: stock(self, folder, *args, **kwargs))

    modeling.PreTrainedModel.save_pretrained = save_pretrained


def save(model: Any, directory: str | os.PathLike[str], write: Any) -> None:
    """Call write(folder) with a staging folder, and give what it wrote its place in `directory`.

    Raises:
        ValueError: `directory` is a file, or cannot be written; a checkpoint in it is as it was.
    """
    if _is_converted(model):
        from aoquant.integrations.stored_names import warn_of_dtypes

        warn_of_dtypes(model)
    if Path(directory).is_file():
        raise ValueError(f"{directory}: is a file, and a checkpoint is a folder: choose another one")
    with Staged(Path(directory)) as staged:
        staged.begin(stored_bytes(*model.parameters()))
        token = _staged.set(True)
        try:
            write(staged.path)
        finally:
            _staged.reset(token)
        staged.publish()


def _is_converted(model: Any) -> bool:
    from aoquant.integrations.hf_quantizer import Quantizer

    return isinstance(getattr(model, "hf_quantizer", None), Quantizer)


def _is_ours(model: Any) -> bool:
    return _is_converted(model) or any(isinstance(m, PreparedModule) for m in model.modules())
