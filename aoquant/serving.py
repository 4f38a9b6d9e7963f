"""Where an engine on a GPU computes something else than a layer trains, as far as it was read in the engine's source.

vLLM chooses its kernel by the GPU: on Hopper, NVFP4 and MXFP4 layers are Marlin's, which leaves activations in
bfloat16; on Blackwell MXFP4 layers quantise activations even in weight-only checkpoints. Machete, Hopper's kernel for
groups of 64 and 128, rounds scale * zero point before it adds, so asymmetric integers differ there. A QAT run should
know before it starts. Sources: vLLM 0.32, read and not run on these GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

from aoquant.layers.recipe import LinearRecipe

ENGINES = {"vllm": ("h100", "h200", "b200"), "llama.cpp": ("cpu", "cuda")}
_HOPPER = ("h100", "h200")
_FP8 = ("fp8-row-mslk",)
FP8_BLOCKS = "vLLM's CUDA kernel scales 128 activations by another formula (on an H200 13.8 % of scales and 98.4 % of codes are equal)"

# engine -> (recipe, whether advice is for experts) -> why its layouts cannot hold what the recipe trains, or None.
# export, a tier above this one, adds itself.
REFUSALS: dict[str, Callable[[LinearRecipe, bool], str | None]] = {}


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
    gpu = gpu and gpu.lower()
    return _vllm(recipe, gpu) if engine == "vllm" else _llama_cpp(recipe, gpu)


def refused(recipe: LinearRecipe, engine: str, *, experts: bool = False) -> list[str]:
    """Why layers that train `recipe` could not be exported to `engine`, by export's own checks; empty where they can,
    or where the libraries of export are missing. experts: advice is for experts.
    """
    if engine not in REFUSALS:  # `_llama_cpp` has the types of its file
        return []
    try:
        reason = REFUSALS[engine](recipe, experts)
    except ImportError:
        return []
    held = f"vLLM's formats cannot hold {recipe.fprop_weight.name}{f' with {x} activations' if (x := recipe.input_name) else ''}"
    return [f"{held}: {reason}; or serve it with aoquant's plugin"] if reason else []


def note(recipe: LinearRecipe) -> str:
    """What the GPU changes when vLLM serves the recipe's format; "" for nothing that is known."""
    weight = recipe.fprop_weight.name
    if weight.startswith("nvfp4"):
        return "vLLM: on Hopper activations stay in bfloat16; on Blackwell they are quantised where the recipe does"
    if weight.startswith("mxfp4"):
        return (
            "vLLM: on Hopper activations stay in bfloat16; on Blackwell they are quantised, even of weight-only MXFP4"
        )
    return ""


def _vllm(recipe: LinearRecipe, gpu: str | None) -> list[str]:
    weight, x = recipe.fprop_weight.name, recipe.input_name
    found = []
    if weight.startswith("nvfp4") and x and gpu in _HOPPER:
        found.append(
            f"vLLM on {gpu} leaves NVFP4 layers' activations in bfloat16 (Marlin), trained as {x}: train the recipe vllm-nvfp4-weight"
        )
    if weight.startswith("mxfp4") and x and gpu in _HOPPER:
        found.append(
            f"vLLM on {gpu} leaves MXFP4 layers' activations in bfloat16 (Marlin), trained as {x}: train the recipe mxfp4-weight"
        )
    if weight.startswith("mxfp4") and not x and gpu == "b200":
        found.append(
            "vLLM on b200 quantises MXFP4 layers' activations even where the checkpoint says weights only: train with mxfp4-even"
        )
    if x.startswith("mxfp4") and x != "mxfp4-even" and gpu not in _HOPPER:
        found.append(f"vLLM rounds MXFP4 activations by the rule 'even', trained as {x}: train with mxfp4-even")
    if x.startswith("fp8-row") and x not in _FP8:
        found.append(f"vLLM's CUDA kernel quantises fp8 activations as fp8-row-vllm, trained as {x}")
    if x in ("int8-row", "int8-row-native", "int8-row-asym"):
        found.append(f"vLLM quantises int8 activations as int8-row-vllm, trained as {x}")
    if x.startswith("int8") and gpu == "b200":
        found.append("vLLM has no int8 kernel for b200: train the recipe vllm-fp8")
    if weight.startswith("intx") and not x and recipe.fprop_weight.format.bits not in (4, 8):
        bits = recipe.fprop_weight.format.bits
        found.append(
            f"vLLM multiplies packed integers of 4 and 8 bits, of {bits} bits in its newest versions alone, where at all: try an exported "
            "layer there first, or serve it with aoquant's plugin or transformers"
        )
    if x == "fp8-1x128":
        found.append(f"{FP8_BLOCKS}, trained as {x}")
    if weight.startswith("intx") and weight.endswith("-asym") and gpu in _HOPPER and not x:
        found.append(
            f"vLLM on {gpu} multiplies groups of 64 and 128 by Machete, which rounds scale * zero point: train a symmetric format"
        )
    if weight.startswith("intx") and not x and recipe.contract != "dequantize":
        found.append(
            f"vLLM multiplies (q - zp) * s, rounded once, as the contract 'dequantize' does, trained as {recipe.contract!r}"
        )
    return found


def _llama_cpp(recipe: LinearRecipe, gpu: str | None) -> list[str]:
    weight, x = recipe.fprop_weight.name, recipe.input_name
    found = []
    if weight not in ("q4_0", "q4_1", "q8_0", "mxfp4", "mxfp4-even") and not weight.startswith("nvfp4"):
        found.append(
            f"llama.cpp has no type for {weight}, or multiplies its scales unrounded: train q4_0, q4_1 or q8_0"
        )
    if x != "q8_0-x86":
        found.append(f"llama.cpp quantises activations to Q8_0 (q8_0-x86), trained as {x or 'high precision'}")
    elif gpu == "cuda":
        found.append(
            "llama.cpp's CUDA kernels round Q8_1 activations half away from zero, and q8_0-x86 half to even: some codes differ by one"
        )
    return found
