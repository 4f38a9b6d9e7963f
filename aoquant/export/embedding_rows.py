"""Say what an export holds of an embedding, whose rows are looked up, and multiply nothing unless the head is tied.

vLLM looks up rows of compressed-tensors' packed symmetric integers: (code * scale), in the scale's dtype, in one
rounding. It asks for the scheme by the embedding's name, or by "Embedding" where a model gives it none, as Llama does;
it multiplies by no such weight, so a tied head cannot be one, and it takes a head for no "Linear". Source: vLLM 0.32,
`compressed_tensors_embedding.py`, `compressed_tensors.py`; read, not run. transformers decodes the folder as it loads.
"""

from collections.abc import Iterable
from dataclasses import replace

from aoquant._messages import advice
from aoquant.export.source import Source
from aoquant.export.targets import Stored, Unfit
from aoquant.planning.heads import output_embeddings

_WIDTHS = (2, 4, 8)  # of codes that vLLM finds in a word of 32 bits


def check_use(target: str, *, tied: bool) -> None:
    """Raise Unfit where a target holds no quantised embedding, or none that shares its weight. tied: it does."""
    leave_out = advice("leave it out of quantize_, or out of --embeddings", "leave out --embeddings")
    if target == "modelopt":
        raise Unfit(f"it is an embedding, and readers of {target} take embeddings as floats", leave_out)
    if target == "compressed-tensors" and tied:
        raise Unfit(
            "it is an embedding that is tied to another layer, and readers of compressed-tensors look up its rows alone",
            f"untie them before quantising (tie_word_embeddings=False), or {leave_out}",
        )


def rows_of(stored: Stored, target: str, *, tied: bool) -> Stored:
    """Return an embedding as a target stores it. Raises Unfit where readers do not look up such rows."""
    if target == "gguf" and "scale" in stored.tensors:
        raise Unfit("it is an embedding, and llama.cpp gives embeddings no outer scale", "train q8_0 or q4_0")
    if target == "compressed-tensors":
        weights = stored.scheme.weights
        packed = "weight_packed" in stored.tensors and weights.type == "int" and weights.symmetric
        if not packed or weights.num_bits not in _WIDTHS:
            raise Unfit(
                "it is an embedding, and vLLM looks up rows of symmetric integers of 2, 4 or 8 bits alone",
                "train it with vllm-w4a16-g32 (--embeddings-recipe)",
            )
    return stored if tied else replace(stored, notes=())  # its rows meet no activation


def targets(source: Source, modules: Iterable[str]) -> list[str]:
    """Return what names embeddings and the output head among the modules of one scheme, beside "Linear"."""
    chosen, every = set(modules), source.embeddings()
    head = output_embeddings(source.modules[""])
    named = [n for n in source.modules if n in chosen and (n in every or source.modules[n] is head)]
    alone = ["Embedding"] if every and every <= chosen else []
    return [*alone, *source.names_of(named)]
