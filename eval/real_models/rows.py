"""The rows: recipes of aoquant's, torchao's own QAT, and the float model trained on the same tokens.

`float-ce` is the float model fine-tuned by cross entropy. `float-kl` is the float model distilled from itself, whose
gradient is zero: it shows that the loop adds nothing. `torchao-NAME` is trained by torchao's own `QATConfig` and served
in torchao's converted layers, and again with its trained weights quantised by each recipe of `SERVED`, the kernel or
file that aoquant's row of that recipe was trained for. The grid is the same, but that of `gguf-q4_0` for `intx4-g32`
has the same width and groups alone. `kv-FORMAT` quantises KV caches alone, `kv-fp8-query` queries too, and
`NAME-kv-FORMAT` the layers of a recipe as well. `NAME+METHOD`, such as `nvfp4+gptq` or `int4-g128+r1+r2+gptq`, is a
recipe whose PTQ is calibrated on training blocks, and whose QAT starts from these codes under held scales. Neither kind
is run unless it is named. `NAME@RECIPE` has embedding and head under another recipe: the PTQ of `gguf-q4_0@gguf-q8_0`
is what llama.cpp's own quantiser writes as Q4_0 of a model whose width is no multiple of 256, block for block; others
get Q6_K there. `PEERS` are llm-compressor's PTQ, in the format of `vllm-w4a16-g128`; they run where its package is
installed, if they are named.
"""

from __future__ import annotations

from experiments.rows import Row

from aoquant import CalibrateConfig
from aoquant.formats.kv import KV_NAMES
from aoquant.recipes import get_recipe, list_recipes

MXFP4 = {"mxfp4-floor": "mxfp4-floor/mxfp4-floor", "mxfp4-ceil": "mxfp4-ceil/mxfp4-ceil"}  # rules without a name
# recipes with another one for some layers, as `aoquant run --layers` takes them
MIXED = {
    "nvfp4-w4a16-gate-up": ("nvfp4", ("re:.*(gate|up)_proj=nvfp4-weight",)),
    "nvfp4-fp8-gate-up": ("nvfp4", ("re:.*(gate|up)_proj=fp8",)),
    "nvfp4-4over6-w4a16-gate-up": ("nvfp4-4over6", ("re:.*(gate|up)_proj=nvfp4-weight",)),
}
RECIPES = (
    "int4-g128", "nvfp4", "vllm-w4a16-g128", "mxfp4", "int4-g32", "gguf-q4_0", "int8-int4", "vllm-w4a16-g32",
    "vllm-nvfp4", "vllm-mxfp4", "nvfp4-4over6", "mxfp4-h32", "fp8", "mxfp8", "vllm-fp8", "vllm-int8",
    "nvfp4-weight", "mxfp4-weight", "gridflip", "gridflip-search", "nvfp4-h16", "mxfp4-wush", "nvfp4-wush",
    "int3-g32", "int2-g32", "quartet2", "fp8-hybrid", "nvfp4-training", "mxfp4-quest", "gguf-q8_0",
    "gguf-q4_0@gguf-q8_0", *MXFP4, *MIXED,
)  # fmt: skip
SERVED = {
    "int4-g128": ("int4-g128",), "int4-g32": ("int4-g32",), "intx4-g32": ("vllm-w4a16-g32", "gguf-q4_0"),
    "int8-int4": ("int8-int4",), "fp8": ("fp8",), "mxfp4": ("mxfp4",),
}  # fmt: skip
FLOATS = ("float-ce", "float-kl")
PEERS = {"llm-compressor-nearest": "QuantizationModifier", "llm-compressor-gptq": "GPTQModifier"}  # its classes
KV = tuple(f"kv-{name}" for name in (*KV_NAMES, "fp8-query"))
EMBEDDING = (
    "fp8", "int8", "mxfp8", "vllm-fp8", "vllm-int8", "gguf-q8_0", "int4-g32", "int4-g128", "vllm-w4a16-g32",
    "vllm-w4a16-g128", "gguf-q4_0", "int8-int4", "nvfp4", "nvfp4-4over6", "nvfp4-weight", "gridflip-search", "mxfp4",
    "mxfp4-h32", "mxfp4-weight",
)  # fmt: skip


def row(name: str) -> Row:
    """Return the row of a name. Raises ValueError for a name that is none."""
    if name in ("float", *FLOATS):
        return Row(name, "", "float")
    if name in PEERS:
        return Row(name, "", "peer", PEERS[name])
    layers, kv, cache = name.rpartition("kv-")
    if kv + cache in KV and name not in {recipe.name for recipe in list_recipes()}:
        if layers:
            get_recipe(layers.removesuffix("-"))
        return Row(name, "", "aoquant", name)
    recipe, _, method = name.partition("+")
    recipe = MIXED[recipe][0] if recipe in MIXED else recipe
    if method:
        CalibrateConfig(recipe, method)  # which says what is wrong
    if method or name in MIXED:
        return Row(name, "", "aoquant", get_recipe(recipe).name)
    recipe, _, embeddings = name.partition("@")
    if embeddings:
        get_recipe(embeddings)
        return Row(name, "", "aoquant", get_recipe(recipe).name)
    kind, _, recipe = name.partition("-")
    if kind == "torchao" and recipe in SERVED:
        return Row(name, "", "torchao", recipe)
    return Row(name, "", "aoquant", get_recipe(MXFP4.get(name, name)).name)


def every(embedding: bool) -> tuple[str, ...]:
    """Return the names of all rows for a kind of model, those that matter most first."""
    if embedding:
        return EMBEDDING
    torchao = [f"torchao-{name}" for name in SERVED]
    return (*RECIPES[:4], *torchao[:1], FLOATS[0], *RECIPES[4:8], *torchao[1:], *RECIPES[8:], FLOATS[1])
