"""The output heads of a model: what turns its hidden states into logits, scores, labels or boxes.

They stay float unless a name or a filter picks them. A head costs quality and is small, or tied to the embedding.
"""

from typing import Any

from torch import nn


def heads(model: nn.Module) -> set[int]:
    """Return the ids of the modules in the output heads of `model` and of Hugging Face models inside it.

    A head is a module that is called "lm_head", the one that `get_output_embeddings` gives, or any that stands behind
    the body of a Hugging Face model, such as `score`, `classifier`, `qa_outputs` or BERT's `cls`.
    """
    found = set[int]()
    for fqn, module in model.named_modules():
        if fqn.rpartition(".")[2] == "lm_head":
            found.add(id(module))
        if isinstance(getattr(type(module), "base_model_prefix", None), str):
            found |= {id(part) for head in _behind_body(module) for part in head.modules()}
    if (output := output_embeddings(model)) is not None:
        found.add(id(output))
    return found


def output_embeddings(model: Any) -> nn.Module | None:
    """Return the output layer that a Hugging Face model names, None where it names none."""
    return _named(model, "get_output_embeddings")


def input_embeddings(model: Any) -> nn.Module | None:
    """Return the input embeddings that a Hugging Face model names; None without: images, speech, two encoders."""
    return _named(model, "get_input_embeddings")


def _named(model: Any, method: str) -> nn.Module | None:
    get = getattr(model, method, None)
    try:
        found = get() if callable(get) else None
    except (NotImplementedError, AttributeError):  # transformers guesses by names
        return None
    return found if isinstance(found, nn.Module) else None


def _behind_body(model: Any) -> list[nn.Module]:
    """Return the children of a Hugging Face model behind its body.

    The body is `base_model`. A model for a task that is its own `base_model` (T5, CLIP and Whisper for classification)
    has Hugging Face models as children: what comes behind the last one is its head. What stands in front of a body or
    between two, such as a projection of images, is no head.
    """
    children = [child for _, child in model.named_children()]
    bodies = [getattr(model, "base_model", model)]
    if bodies[0] is model:
        if "For" not in type(model).__name__ or output_embeddings(model) is not None:
            return []
        bodies = [child for child in children if hasattr(type(child), "base_model_prefix")]
    last = max((i for i, child in enumerate(children) for body in bodies if child is body), default=len(children))
    return [child for child in children[last + 1 :] if not hasattr(type(child), "base_model_prefix")]
