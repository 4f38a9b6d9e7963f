"""Where an engine on a GPU computes something else than a layer trains, as far as it was read in the engine's source.

vLLM chooses its kernel by the GPU: on Hopper, NVFP4 and MXFP4 layers are Marlin's, which leaves activations in
bfloat16; on Blackwell MXFP4 layers quantise activations even in weight-only checkpoints. Machete, Hopper's kernel for
groups of 64 and 128, rounds scale * zero point before it adds, so asymmetric integers differ there. A QAT run should
know before it starts. Sources: vLLM 0.32, read and not run on these GPUs.
"""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from aoquant.linear.recipe import LinearRecipe

ENGINES = {"vllm": ("h100", "h200", "b200"), "llama.cpp": ("cpu", "cuda")}
VLLM_FP8 = ("fp8-row-mslk", "fp8-row-vllm-reciprocal")  # what its CUDA kernel and its compiled path compute
_GGML = ("q4_0", "q4_1", "q8_0", "mxfp4", "mxfp4-even")

# engine -> (recipe, whether advice is for experts) -> why its layouts cannot hold what the recipe trains, or None.
# export, a tier above this one, adds itself.
REFUSALS: dict[str, Callable[[LinearRecipe, bool], str | None]] = {}


class _Case(NamedTuple):
    """What differences depend on: names of the weight's and the input's format ("" for none), GPU, contract, bits."""

    weight: str
    x: str
    gpu: str | None
    contract: str
    bits: float

    @property
    def hopper(self) -> bool:
        return self.gpu in ("h100", "h200")

    @property
    def packed_integers(self) -> bool:
        return self.weight.startswith("intx") and not self.x


# engine -> (whether a case differs, what is said of it)
_DIFFERENCES: dict[str, list[tuple[Callable[[_Case], bool], str]]] = {
    "vllm": [
        (lambda c: c.weight.startswith("nvfp4") and c.x != "" and c.hopper,
         "vLLM on {gpu} leaves NVFP4 layers' activations in bfloat16 (Marlin), trained as {x}: train the recipe vllm-nvfp4-weight"),
        (lambda c: c.weight.startswith("mxfp4") and c.x != "" and c.hopper,
         "vLLM on {gpu} leaves MXFP4 layers' activations in bfloat16 (Marlin), trained as {x}: train the recipe mxfp4-weight"),
        (lambda c: c.weight.startswith("mxfp4") and not c.x and c.gpu == "b200",
         "vLLM on b200 quantises MXFP4 layers' activations even where the checkpoint says weights only: train with mxfp4-even"),
        (lambda c: c.x.startswith("mxfp4") and c.x != "mxfp4-even" and not c.hopper,
         "vLLM rounds MXFP4 activations by the rule 'even', trained as {x}: train with mxfp4-even"),
        (lambda c: c.x.startswith("fp8-row") and c.x not in VLLM_FP8,
         "vLLM's CUDA kernel quantises fp8 activations as fp8-row-vllm, trained as {x}"),
        (lambda c: c.x in ("int8-row", "int8-row-native", "int8-row-asym"),
         "vLLM quantises int8 activations as int8-row-vllm, trained as {x}"),
        (lambda c: c.x.startswith("int8") and c.gpu == "b200",
         "vLLM has no int8 kernel for b200: train the recipe vllm-fp8"),
        (lambda c: c.packed_integers and c.bits not in (4, 8),
         "vLLM multiplies packed integers of 4 and 8 bits, of {bits} bits in its newest versions alone, where at all: try an exported "
         "layer there first, or serve it with aoquant's plugin or transformers"),
        (lambda c: c.x == "fp8-1x128",
         "vLLM's CUDA kernel scales 128 activations by another formula (on an H200 13.8 % of scales and 98.4 % of codes are equal), "
         "trained as {x}"),
        (lambda c: c.packed_integers and c.weight.endswith("-asym") and c.hopper,
         "vLLM on {gpu} multiplies groups of 64 and 128 by Machete, which rounds scale * zero point: train a symmetric format"),
        (lambda c: c.packed_integers and c.contract != "dequantize",
         "vLLM multiplies (q - zp) * s, rounded once, as the contract 'dequantize' does, trained as {contract!r}"),
    ],
    "llama.cpp": [
        (lambda c: c.weight not in _GGML and not c.weight.startswith("nvfp4"),
         "llama.cpp has no type for {weight}, or multiplies its scales unrounded: train q4_0, q4_1 or q8_0"),
        (lambda c: c.x != "q8_0-x86",
         "llama.cpp quantises activations to Q8_0 (q8_0-x86), trained as {x_or_float}"),
        (lambda c: c.x == "q8_0-x86" and c.gpu == "cuda",
         "llama.cpp's CUDA kernels round Q8_1 activations half away from zero, and q8_0-x86 half to even: some codes differ by one"),
    ],
}  # fmt: skip


def check(engine: str, gpu: str | None) -> None:
    """Raise ValueError for an engine or a GPU that nothing is known about."""
    if engine not in ENGINES:
        raise ValueError(f"engine is one of {', '.join(ENGINES)}, got {engine!r}")
    if gpu is not None and gpu.lower() not in ENGINES[engine]:
        raise ValueError(f"gpu is one of {', '.join(ENGINES[engine])} with engine={engine!r}, got {gpu!r}")


def differences(recipe: LinearRecipe, engine: str, gpu: str | None = None) -> list[str]:
    """Known differences between `engine` on `gpu` (None: any) and what `recipe` trains, empty for none.

    Raises:
        ValueError: an engine or a GPU that nothing is known about.
    """
    check(engine, gpu)
    weight = recipe.fprop_weight
    case = _Case(weight.name, recipe.input_name, gpu and gpu.lower(), recipe.contract, weight.format.bits)
    words = {**case._asdict(), "x_or_float": case.x or "high precision"}
    return [said.format(**words) for differs, said in _DIFFERENCES[engine] if differs(case)]


def foreseen(recipes: Sequence[LinearRecipe], engine: str | None, gpu: str | None, *, experts: bool) -> list[str]:
    """Return what an engine will compute otherwise than these recipes train, or cannot hold; empty without an engine.

    Raises:
        ValueError: an engine or a GPU that nothing is known about, or a GPU without an engine.
    """
    if engine is None:
        if gpu is not None:
            raise ValueError(f"gpu={gpu!r} says where an engine runs: give engine too, such as 'vllm'")
        return []
    check(engine, gpu)
    return [s for r in recipes for s in (*differences(r, engine, gpu), *refused(r, engine, experts=experts))]


def refused(recipe: LinearRecipe, engine: str, *, experts: bool = False) -> list[str]:
    """Return why layers that train `recipe` could not be exported to `engine`, by export's own checks; empty where they
    can, or where the libraries of export are missing. experts: advice is for experts.
    """
    if engine not in REFUSALS:  # llama.cpp's types are among the differences
        return []
    try:
        reason = REFUSALS[engine](recipe, experts)
    except ImportError:
        return []
    held = f"vLLM's formats cannot hold {recipe.fprop_weight.name}{f' with {x} activations' if (x := recipe.input_name) else ''}"
    return [f"{held}: {reason}; or serve it with aoquant's plugin"] if reason else []


def command(exported: Path) -> str:
    """Return the command that serves what `export` wrote: llama.cpp's for a GGUF file, vLLM's for a folder."""
    file = shlex.quote(str(exported))
    return f"llama-server -m {file}" if exported.suffix == ".gguf" else f"vllm serve {file}"


def note(recipe: LinearRecipe) -> str:
    """Return what the GPU changes when vLLM serves the recipe's format; "" for nothing that is known."""
    weight = recipe.fprop_weight.name
    if weight.startswith("nvfp4"):
        return "vLLM: on Hopper activations stay in bfloat16; on Blackwell they are quantised where the recipe does"
    if weight.startswith("mxfp4"):
        return (
            "vLLM: on Hopper activations stay in bfloat16; on Blackwell they are quantised, even of weight-only MXFP4"
        )
    return ""
