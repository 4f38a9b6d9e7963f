"""Recipes: names for configs that are deployed often, wherever a config goes: in Python and on the command line.

    quantize_(model, "nvfp4")
    quantize_(model, QATConfig("int4-g128", step="prepare"))

A recipe is a PTQ config and one line about the layer that it leaves. Everything else (QAT, evaluation, saving) follows
from the config, so a new recipe is a new row here.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchao.core.config import AOBaseConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    PerBlock,
    PerGroup,
    PerRow,
)
from torchao.quantization.quantize_.common import KernelPreference

from aoquant.config import (
    ALL_EXPERTS,
    ATTENTION,
    FIND,
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    Packed4WeightConfig,
    PackedWeightConfig,
    QATConfig,
    by_layer,
)
from aoquant.formats import get_format
from aoquant.hybrid import HybridConfig
from aoquant.kv import KVCacheConfig
from aoquant.kv.cache_config import ALL_CACHES, layers_and_cache
from aoquant.transforms import WUSH, Hadamard


@dataclass(frozen=True)
class Recipe:
    """name: for the command line. make: builds the PTQ config. about: what the converted layer is.

    training: how a model is trained towards it, as arguments of `QATConfig`. experts: it takes experts alone, and a
    model without any has nothing to quantise. kv_cache: it quantises KV caches, too.
    """

    name: str
    make: Callable[[], AOBaseConfig]
    about: str
    training: Mapping[str, Any] = field(default_factory=dict)
    experts: bool = False
    kv_cache: bool = False

    def prepare(self, **options: Any) -> QATConfig:
        """Return the config of prepare; options are further arguments of `QATConfig`, and win."""
        return QATConfig(self.make(), step="prepare", **{**self.training, **options})


def _int4_cpu() -> AOBaseConfig:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig()


# TransformerEngine's recipes Float8CurrentScaling and NVFP4BlockScaling
FP8_HYBRID = HybridConfig(
    dgrad_grad_output="te-fp8-e5m2-tensor",
    dgrad_weight="te-fp8-tensor",
    wgrad_grad_output="te-fp8-e5m2-tensor",
    wgrad_input="te-fp8-tensor",
)
NVFP4_TRAINING = HybridConfig(
    dgrad_grad_output="nvfp4-sr",
    dgrad_weight="te-nvfp4-16x16",
    wgrad_grad_output="te-hadamard16-sd7e8+nvfp4-sr",
    wgrad_input="te-hadamard16-sd7e8+te-nvfp4",
)
TE_NVFP4_SR = NVFP4_TRAINING.replaced(
    dgrad_grad_output="te-nvfp4-sr", wgrad_grad_output="te-hadamard16-sd7e8+te-nvfp4-sr"
)


def _experts_only(config: AOBaseConfig) -> AOBaseConfig:
    """`config` for experts, stacked or a list of layers, and nothing else; shared experts are no experts here, nor is a
    router that lies among experts (JetMoE's attention).
    """
    return FqnToConfig({ALL_EXPERTS: config})


def _without_attention(config: AOBaseConfig) -> AOBaseConfig:
    """`config` for all that is quantised by default but attention: experts, shared experts, MLPs; routers are float."""
    return by_layer({ATTENTION: None, "_default": config})


def _with_cache(base: str, cache: KVCacheConfig) -> AOBaseConfig:
    """The config of recipe `base` for layers, and `cache` for all KV caches."""
    return by_layer({"_default": _RECIPES[base].make(), ALL_CACHES: cache})


_RECIPES = {recipe.name: recipe for recipe in (
    Recipe("nvfp4", NVFP4WeightConfig, "NVFP4 weights and activations, an outer scale for each token"),
    Recipe("nvfp4-weight", lambda: NVFP4WeightConfig(activation=None), "NVFP4 weights, high-precision activations"),
    Recipe("nvfp4-4over6", lambda: NVFP4WeightConfig(rule="four_over_six", activation="fouroversix-row"),
           "NVFP4 weights and activations whose blocks choose between a top of 4 and of 6"),
    Recipe("gridflip", GridFlipFP4WeightConfig, "GridFlip weights (two grids a block), NVFP4 activations"),
    Recipe("gridflip-4over6", lambda: GridFlipFP4WeightConfig(activation="fouroversix-row"),
           "GridFlip weights, four-over-six activations"),
    Recipe("gridflip-search", lambda: GridFlipFP4WeightConfig("search"),
           "GridFlip weights with all scales tried, for quantising without training; NVFP4 activations"),
    Recipe("nvfp4-search", lambda: NVFP4WeightConfig(rule="search"),
           "NVFP4 weights with searched block scales, NVFP4 activations"),
    Recipe("nvfp4-h16", lambda: NVFP4WeightConfig(transform=Hadamard(16)),
           "NVFP4 weights and activations behind a Hadamard transform of 16 values"),
    Recipe("nvfp4-wush", lambda: NVFP4WeightConfig(transform=WUSH(16)),
           "NVFP4 weights and activations behind a transform that calibration fits to each block of 16 values"),
    Recipe("mxfp4-h32", lambda: MXFP4WeightConfig(transform=Hadamard(32)),
           "MXFP4 weights and activations behind a Hadamard transform of 32 values"),
    Recipe("mxfp4-wush", lambda: MXFP4WeightConfig(transform=WUSH(32)),
           "MXFP4 weights and activations behind a transform that calibration fits to each block of 32 values"),
    Recipe("mxfp4", MXFP4WeightConfig, "MXFP4 weights and activations, scales rounded up"),
    Recipe("mxfp4-weight", lambda: MXFP4WeightConfig(activation=None), "MXFP4 weights, high-precision activations"),
    Recipe("mxfp4-quest", lambda: MXFP4WeightConfig(rule="quest", transform=Hadamard(32)),
           "MXFP4 weights and activations behind a Hadamard transform of 32, QuEST's scales and trust mask",
           {"straight_through": "clipped"}),
    Recipe("quartet", lambda: MXFP4WeightConfig(rule="quest", transform=Hadamard(32)),
           "mxfp4-quest, trained with an MXFP4 backward", {"backward": "quartet"}),
    Recipe("quartet2", lambda: NVFP4WeightConfig(rule="four_over_six", activation="fouroversix-row"),
           "nvfp4-4over6; trained with an NVFP4 backward", {"backward": "quartet2"}),
    Recipe("quartet2-gridflip", GridFlipFP4WeightConfig,
           "gridflip, trained with quartet2's NVFP4 backward", {"backward": "quartet2"}),
    Recipe("mxfp8", MXFP8WeightConfig, "MXFP8 (e4m3) weights and activations"),
    Recipe("mxfp8-weight", lambda: MXFP8WeightConfig(activation=None), "MXFP8 weights, high-precision activations"),
    Recipe("fp8", FP8WeightConfig, "e4m3 weights and activations, a scale per row"),
    Recipe("fp8-scaled-mm", lambda: PackedWeightConfig("fp8-row", "fp8-row", "fp8_scaled_mm"),
           "fp8 multiplied on FP8 tensor cores, which keep fewer bits of a sum: faster where rows are many"),
    Recipe("fp8-block", lambda: FP8WeightConfig(granularity="block"),
           "e4m3, a scale per 128 x 128 of the weights and per 128 values of the activations"),
    Recipe("int4-g128", lambda: Int4WeightConfig(128), "int4 weights in groups of 128, asymmetric"),
    Recipe("int4-g64", lambda: Int4WeightConfig(64), "int4 weights in groups of 64, asymmetric"),
    Recipe("int4-g32", lambda: Int4WeightConfig(32), "int4 weights in groups of 32, asymmetric"),
    Recipe("int3-g32", lambda: IntxWeightConfig(3, 32), "int3 weights in groups of 32, symmetric"),
    Recipe("int2-g32", lambda: IntxWeightConfig(2, 32), "int2 weights in groups of 32, symmetric"),
    Recipe("int8-int4", lambda: IntxWeightConfig(4, 32, activation="int8-row-asym"),
           "int4 weights in groups of 32, int8 activations per token"),
    Recipe("int4-g32-experts", lambda: _experts_only(Int4WeightConfig(32)),
           "experts alone: int4 weights in groups of 32, asymmetric; all else in high precision", experts=True),
    Recipe("mxfp4-experts", lambda: _experts_only(MXFP4WeightConfig(activation=None)),
           "experts alone: MXFP4 weights, high-precision activations; all else in high precision", experts=True),
    Recipe("int4-g32-no-attention", lambda: _without_attention(Int4WeightConfig(32)),
           "int4-g32 but for attention, which stays in high precision as routers do: experts, shared experts, MLPs"),
    Recipe("mxfp4-no-attention", lambda: _without_attention(MXFP4WeightConfig(activation=None)),
           "mxfp4-weight but for attention, which stays in high precision as routers do"),
    Recipe("int8", lambda: Int8WeightConfig(activation="int8-row"), "int8 weights per row, int8 activations per token"),
    Recipe("int8-static", lambda: Int8WeightConfig(activation="int8-tensor-static"),
           "int8 weights per row, int8 activations with one calibrated scale a layer"),
    Recipe("int8-weight", Int8WeightConfig, "int8 weights per row, high-precision activations"),
    Recipe("vllm-w4a16-g128", lambda: Packed4WeightConfig("intx4-g128", contract="dequantize"),
           "for vLLM, SGLang, transformers: int4 weights in groups of 128, multiplied as Marlin and Machete do"),
    Recipe("vllm-w4a16-g32", lambda: Packed4WeightConfig("intx4-g32", contract="dequantize"),
           "the same in groups of 32"),
    Recipe("vllm-w4a16-g32-experts", lambda: _experts_only(Packed4WeightConfig("intx4-g32", contract="dequantize")),
           "experts alone: vllm-w4a16-g32, which an exported folder holds, as Kimi K2's; all else in high precision",
           experts=True),
    Recipe("vllm-w4a16-g32-no-attention",
           lambda: _without_attention(Packed4WeightConfig("intx4-g32", contract="dequantize")),
           "vllm-w4a16-g32 but for attention, which stays in high precision as routers do"),
    Recipe("vllm-fp8", lambda: PackedWeightConfig("fp8-row", "fp8-row-vllm"),
           "for vLLM: e4m3 weights per row, activations per token as its CUDA kernel quantises them"),
    Recipe("vllm-int8", lambda: PackedWeightConfig("int8-row", "int8-row-vllm"),
           "for vLLM: int8 weights per row, activations per token as it quantises them"),
    Recipe("vllm-nvfp4", lambda: Packed4WeightConfig("nvfp4-pow2", "nvfp4-pow2-static"),
           "for vLLM: NVFP4 whose outer scales are powers of two that fused layers share; activations calibrated",
           {"scales": "static"}),
    Recipe("vllm-nvfp4-weight", lambda: Packed4WeightConfig("nvfp4-pow2", contract="dequantize"),
           "for vLLM on Hopper, which leaves activations in bfloat16: the same weights, high-precision activations",
           {"scales": "static"}),
    Recipe("vllm-mxfp4", lambda: Packed4WeightConfig("mxfp4-even", "mxfp4-even"),
           "for vLLM: MXFP4 weights and activations by the rule of its kernels"),
    Recipe("vllm-w4a16-g128-kv-fp8", lambda: _with_cache("vllm-w4a16-g128", KVCacheConfig("fp8", query="fp8")),
           "vllm-w4a16-g128; keys, values and queries in e4m3 under calibrated scales, as vLLM's fp8 KV cache",
           kv_cache=True),
    Recipe("vllm-w4a16-g128-kv-int8", lambda: _with_cache("vllm-w4a16-g128", KVCacheConfig("int8-token-head")),
           "vllm-w4a16-g128; an int8 KV cache, a scale per token and head: --kv-cache-dtype int8_per_token_head",
           kv_cache=True),
    Recipe("vllm-fp8-kv-fp8", lambda: _with_cache("vllm-fp8", KVCacheConfig("fp8", query="fp8")),
           "vllm-fp8; keys, values and queries in e4m3 under calibrated scales, as vLLM's fp8 KV cache", kv_cache=True),
    Recipe("vllm-nvfp4-kv-fp8", lambda: _with_cache("vllm-nvfp4", KVCacheConfig("fp8", query="fp8")),
           "vllm-nvfp4; keys, values and queries in e4m3 under calibrated scales, as vLLM's fp8 KV cache",
           {"scales": "static"}, kv_cache=True),
    Recipe("mxfp8-nvfp4", lambda: PackedWeightConfig("mxfp8", "mxfp8"),
           "MXFP8 weights and activations; trains with an NVFP4 backward", {"backward": HybridConfig.bwd("te-nvfp4")}),
    Recipe("nvfp4-mxfp8", NVFP4WeightConfig,
           "NVFP4 weights and activations; trains with an MXFP8 backward", {"backward": HybridConfig.bwd("mxfp8")}),
    Recipe("mxfp8-hp", lambda: PackedWeightConfig("mxfp8", "mxfp8"),
           "MXFP8 weights and activations; trains with a high-precision backward of the original input",
           {"backward": HybridConfig.bwd(None)}),
    Recipe("nvfp4-hp", NVFP4WeightConfig,
           "NVFP4 weights and activations; trains with a high-precision backward of the original input",
           {"backward": HybridConfig.bwd(None)}),
    Recipe("fp8-hybrid", lambda: PackedWeightConfig("te-fp8-tensor", "te-fp8-tensor", "fp8_scaled_mm"),
           "TransformerEngine's FP8, one scale for all tokens of a call, on FP8 tensor cores; trains with e5m2 gradients",
           {"backward": FP8_HYBRID}),
    Recipe("nvfp4-training", lambda: Packed4WeightConfig("te-nvfp4-16x16", "te-nvfp4"),
           "TransformerEngine's NVFP4, one outer scale for all tokens of a call; trains with stochastic gradients, Hadamard in wgrad",
           {"backward": NVFP4_TRAINING}),
    Recipe("te-nvfp4-sr", lambda: Packed4WeightConfig("te-nvfp4-16x16", "te-nvfp4"),
           "nvfp4-training whose gradients have TransformerEngine's scales, under which the largest values clip",
           {"backward": TE_NVFP4_SR}),
    Recipe("gguf-q4_0", lambda: Packed4WeightConfig("q4_0", "q8_0-x86", "ggml"),
           "for llama.cpp: Q4_0 weights, Q8_0 activations, its integer products"),
    Recipe("gguf-q8_0", lambda: PackedWeightConfig("q8_0", "q8_0-x86", "ggml"),
           "for llama.cpp: Q8_0 weights and activations, its integer products"),
    Recipe("gguf-q4_0-kv-q8_0", lambda: _with_cache("gguf-q4_0", KVCacheConfig("q8_0")),
           "gguf-q4_0; a Q8_0 KV cache, rotated as llama.cpp does: -ctk q8_0 -ctv q8_0", kv_cache=True),
    Recipe("gguf-q8_0-kv-q8_0", lambda: _with_cache("gguf-q8_0", KVCacheConfig("q8_0")),
           "gguf-q8_0; a Q8_0 KV cache, rotated as llama.cpp does: -ctk q8_0 -ctv q8_0", kv_cache=True),
    Recipe("torchao-int8-int4", lambda: Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),  # type: ignore[attr-defined]
           "torchao's IntxUnpackedToInt8Tensor, int8 activations per token"),
    Recipe("torchao-int8", Int8DynamicActivationInt8WeightConfig, "torchao's Int8Tensor, int8 activations per token"),
    Recipe("torchao-fp8", lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
           "torchao's Float8Tensor, e4m3 weights and activations per row, torch._scaled_mm"),
    Recipe("torchao-fp8-block",
           lambda: Float8DynamicActivationFloat8WeightConfig(granularity=[PerBlock([1, 128]), PerBlock([128, 128])]),
           "torchao's Float8Tensor in blocks, its Triton kernel (a GPU to run, none to train)"),
    Recipe("torchao-int4-g128", Int4WeightOnlyConfig,
           "torchao's Int4Tensor for the MSLK kernel (a GPU to run, none to train)"),
    Recipe("torchao-int4-preshuffled", lambda: Int4WeightOnlyConfig(int4_packing_format="preshuffled"),
           "torchao's Int4PreshuffledTensor for the MSLK kernel (a GPU to convert and run)"),
    Recipe("torchao-int4-tile-packed", lambda: Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"),
           "torchao's Int4TilePackedTo4dTensor for PyTorch's CUDA kernel (a GPU to convert and run)"),
    Recipe("torchao-int4-cpu", _int4_cpu,
           "torchao's Int4OpaqueTensor for PyTorch's CPU kernel (a CPU to convert and run)"),
    Recipe("torchao-fp8-int4", lambda: Float8DynamicActivationInt4WeightConfig(int4_packing_format="preshuffled"),
           "torchao's Int4PreshuffledTensor, fp8 activations, MSLK kernel (a GPU to convert and run)"),
    Recipe("torchao-fp8-int4-plain", lambda: Float8DynamicActivationInt4WeightConfig(int4_packing_format="plain"),
           "torchao's Int4Tensor, fp8 activations, MSLK kernel (a GPU to run, none to train)"),
    Recipe("torchao-fp8-mslk",
           lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), kernel_preference=KernelPreference.MSLK),
           "torchao's Float8Tensor, e4m3 per row, MSLK's quantiser and kernel (a GPU to run, none to train)"),
)}  # fmt: skip


def get_recipe(name: str) -> Recipe:
    """Return the recipe called `name`, or one of two formats: "WEIGHT/ACTIVATION"; "WEIGHT/" keeps activations in high
    precision.

    Example: `get_recipe("nvfp4").make()` is the PTQ config, `get_recipe("quartet").prepare()` the config to train with.

    Raises:
        ValueError: there is none; the message lists the nearest.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"a recipe is named by a string, such as 'nvfp4', got {type(name).__name__}: a config is given to quantize_ as it is"
        )
    weight, slash, activation = name.partition("/")
    if slash:
        return _of_formats(name, weight, activation)
    if name not in _RECIPES:
        near = difflib.get_close_matches(name, _RECIPES, 4, 0.3)
        format = f", but a format is: {name}/ quantises weights with it" if _is_format(name) else ""
        raise ValueError(
            f"no recipe is called {name!r}{format}; near it: {', '.join(near) or 'none'}. `aoquant recipes` lists them all; "
            "a recipe of two formats is WEIGHT/ACTIVATION, such as gridflip-sided/nvfp4"
        )
    return _RECIPES[name]


def of_recipe_or_format(name: str) -> Recipe:
    """Return the recipe called `name`, or the recipe NAME/ of the weight format called `name`.

    Raises:
        ValueError: neither has that name.
    """
    return get_recipe(f"{name}/" if name not in _RECIPES and "/" not in name and _is_format(name) else name)


def _is_format(name: str) -> bool:
    try:
        return bool(get_format(name))
    except ValueError:
        return False


def _of_formats(name: str, weight: str, activation: str) -> Recipe:
    kind = Packed4WeightConfig if get_format(weight).bits <= 4 else PackedWeightConfig
    if activation:
        get_format(activation.removesuffix("-static"))
    about = f"{weight} weights, {activation or 'high-precision'} activations"
    return Recipe(name, lambda: kind(weight=weight, activation=activation or None), about)


def trained(config: Any) -> list[str]:
    """The recipes that `config` names, alone or in an FqnToConfig, whose backward is a part of them."""
    given = config.fqn_to_config.values() if isinstance(config, FqnToConfig) else (config,)
    return sorted({c for c in given if isinstance(c, str) and "backward" in get_recipe(c).training})


def mixed(
    recipe: str,
    layers: Sequence[str] = (),
    skip: Sequence[str] = (),
    *,
    make: Callable[[Recipe], AOBaseConfig] = lambda recipe: recipe.make(),
) -> AOBaseConfig:
    """Return the config of a recipe, for some layers, with other recipes for others, and some layers left out.

    layers: "NAME" quantises this layer and leaves out all that are not named; "NAME=RECIPE" gives it another recipe.
    skip: names of layers to leave out. A name is a layer's, or "re:" and a pattern for the whole of it. Exact names
    come first, then patterns: `skip`, then `layers`, each in order. make: the config of a recipe, by default for PTQ;
    `Recipe.prepare` is that of training.

    Without layers and skip it is the recipe's own config, otherwise torchao's `FqnToConfig`.

    Raises:
        ValueError: no such recipe, an empty name, or a name given twice.
    """
    default = make(get_recipe(recipe))
    if not layers and not skip:
        return default
    default, cache = _split(default)
    if isinstance(default, FqnToConfig) or isinstance(getattr(default, "base_config", None), FqnToConfig):
        raise ValueError(
            f"{recipe} chooses its layers itself: leave out layers and skip, or give a recipe that takes all layers"
        )
    by_name: dict[str, AOBaseConfig | None] = dict.fromkeys(skip)
    for entry in layers:
        name, equals, other = entry.rpartition("=") if "=" in entry else (entry, "", recipe)
        if not name or (equals and not other):
            raise ValueError(f"layers are given as NAME or NAME=RECIPE, got {entry!r}")
        if name in by_name:
            raise ValueError(f"{name!r} is given twice: once is enough, in layers or in skip")
        by_name[name] = _split(make(get_recipe(other)))[0] if equals else default
    if all("=" in entry for entry in layers):
        by_name["_default"] = default
    return by_layer(by_name if cache is None else by_name | {ALL_CACHES: cache})


def _split(config: Any) -> tuple[Any, Any]:
    """Return the configs of layers and of KV caches, each of training where `config` is."""
    if not isinstance(config, QATConfig) or config.kv_cache is None or config.base_config is None:
        return layers_and_cache(config)
    layers = dataclasses.replace(config, kv_cache=None)
    return layers, dataclasses.replace(config, base_config=None)


def list_recipes() -> list[Recipe]:
    """Return all recipes, in the order of the documentation."""
    return list(_RECIPES.values())


FIND.append(get_recipe)
