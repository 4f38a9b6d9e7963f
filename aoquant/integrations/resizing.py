"""transformers' `resize_token_embeddings`, of a model whose embedding or output head is packed.

Codes cannot be cut or lengthened, and transformers finds out half-way, in the middle of a copy. Importing aoquant
wraps the method (see `_register.py`): it refuses such a model before anything is changed.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from aoquant.layers.kinds import is_packed


def install(modeling: ModuleType) -> None:
    """Refuse to resize packed embeddings in `transformers.modeling_utils`."""
    stock = modeling.PreTrainedModel.resize_token_embeddings
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        _check(self, given.get("new_num_tokens"), given.get("pad_to_multiple_of"))
        return stock(self, *args, **kwargs)

    modeling.PreTrainedModel.resize_token_embeddings = resize_token_embeddings


def _check(model: Any, tokens: Any, multiple: Any) -> None:
    """Raise where codes would have to be resized.

    Raises:
        ValueError: naming the layer.
    """
    for find in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            layer = find()
        except (NotImplementedError, AttributeError):
            # transformers raises an error of its own for a model without embeddings
            continue
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
