"""Two methods of transformers' PreTrainedModel, which importing aoquant wraps (see `_register.py`).

`save_pretrained` of a model with prepared layers, or with aoquant's quantizer, is written into a staging folder and
takes its place as a whole (`atomic.py`): the Trainer and users call it, and a kill must not mix two models.
`resize_token_embeddings` refuses packed embeddings, whose codes cannot be cut or lengthened, before anything is
changed; transformers finds out in the middle of a copy.
"""

import functools
import inspect
import os
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from aoquant.files.atomic import Staged, is_main
from aoquant.linear.kinds import is_packed
from aoquant.linear.prepared import PreparedModule
from aoquant.planning.heads import input_embeddings, output_embeddings
from aoquant.planning.sizes import stored_bytes

_staged: ContextVar[bool] = ContextVar("staged", default=False)


def install(modeling: ModuleType) -> None:
    """Wrap both methods in `transformers.modeling_utils`."""
    _stage_saves(modeling.PreTrainedModel)
    _refuse_resizing(modeling.PreTrainedModel)


def _stage_saves(model_class: Any) -> None:
    stock = model_class.save_pretrained
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

    model_class.save_pretrained = save_pretrained


def save(model: Any, directory: str | os.PathLike[str], write: Any) -> None:
    """Call write(folder) with a staging folder, and give what it wrote its place in `directory`.

    Raises:
        ValueError: `directory` is a file, or cannot be written; a checkpoint in it is as it was.
    """
    if _is_converted(model):
        from aoquant.files.stored_names import warn_of_dtypes

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


def _refuse_resizing(model_class: Any) -> None:
    stock = model_class.resize_token_embeddings
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        _check_size(self, given.get("new_num_tokens"), given.get("pad_to_multiple_of"))
        return stock(self, *args, **kwargs)

    model_class.resize_token_embeddings = resize_token_embeddings


def _check_size(model: Any, tokens: Any, multiple: Any) -> None:
    """Raise ValueError, naming the layer, where codes would have to be resized."""
    for layer in (input_embeddings(model), output_embeddings(model)):
        weight: Any = getattr(layer, "weight", None)
        if not is_packed(weight):
            continue
        rows = weight.shape[0] if tokens is None else tokens
        if isinstance(multiple, int) and multiple > 0:
            rows = -(-rows // multiple) * multiple
        if rows != weight.shape[0]:
            name = next((n for n, m in model.named_modules() if m is layer), type(layer).__name__)
            raise ValueError(
                f"{name}: resize_token_embeddings would resize its weight from {weight.shape[0]} to {rows} rows, but the weight is packed: "
                "resize the embeddings of the float model first, then prepare or convert it with quantize_"
            )
