"""The compressed-tensors folder: one config group for each scheme of the model, and an ignore list of the linear layers
left out.

Experts are named by a pattern for all of a layer's, because vLLM asks for "experts.0.gate_proj" whatever its file calls
it, and wants one scheme for gate, up and down. Routers are linear layers in vLLM, so they are ignored by name. Source:
vLLM `compressed_tensors_moe.py`, `get_moe_method`.
"""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import compressed_tensors
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from transformers import PreTrainedModel

from aoquant._messages import AoquantWarning
from aoquant.export.contents import Contents
from aoquant.export.embedding_rows import targets
from aoquant.export.fused_checks import check_fused
from aoquant.export.source import Source
from aoquant.export.targets import EXPERT, Description, symmetric

# transformers 5.17 asks for experts' weight_packed, weight_scale and weight_shape, or for fp8's weight and weight_scale
_IN_TRANSFORMERS = {
    "int-quantized": "cannot load",
    "mxfp8-quantized": "cannot load",
    "nvfp4-pack-quantized": "leaves out the outer scales of",
}


def describe(source: Source, contents: Contents) -> Description:
    """config.json's quantization_config.

    A model of one scheme targets "Linear" and ignores what is left out; a model of several targets layers by name, and
    so are embeddings and a head in either.
    """
    check_fused(contents.layers, source.modules)
    groups: dict[str, tuple[QuantizationScheme, list[str]]] = {}
    for module, stored in contents.layers.items():
        scheme: QuantizationScheme = stored.scheme
        groups.setdefault(scheme.model_dump_json(), (scheme, []))[1].append(module)
    one = len(groups) == 1
    looked_up = source.embeddings().intersection(contents.layers)
    said = [s for group in groups.values() for s in _unreadable(*group, alone=one)]
    decoded = one and (bool(looked_up) or any(_packs_zeros(scheme) for scheme, _ in groups.values()))
    known = looked_up if decoded else ()  # transformers makes their weights before it initialises
    packed = [name for name, stored in contents.layers.items() if "weight" not in stored.tensors and name not in known]
    if layers := initialised(source.stock, packed):
        said.append(
            f"transformers cannot load the folder: {type(source.stock).__name__} initialises the weight of {len(layers)} layer(s), such as "
            f"{layers[0]}, by name, and packed codes have another one: read it with aoquant.load_pretrained, or leave them out (skip)"
        )
    for message in said:
        warnings.warn(message, AoquantWarning, stacklevel=4)
    left = [weight.module for name, weight in contents.floats.items() if name.endswith(".weight")]
    _check_experts([*(modules for _, modules in groups.values()), left])
    schemes = {
        f"group_{i}": scheme.model_copy(update={"targets": _targets(source, modules, one)})
        for i, (scheme, modules) in enumerate(groups.values())
    }
    formats = {scheme.format for scheme in schemes.values()} or {CompressionFormat.dense.value}  # a KV cache alone
    config = QuantizationConfig(
        config_groups=schemes,
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[*source.left_out(contents.layers), *_patterns(filter(EXPERT.match, left))],
    )
    content: dict[str, Any] = json.loads(config.model_dump_json())
    content["version"] = compressed_tensors.__version__
    if decoded:
        # transformers 5.24 else compares the zero points' shape with compressed-tensors' empty module, which does not
        # pack them, and looks for the weight of an embedding. Engines do not read the key. With several schemes
        # transformers would decode all by the first one.
        content["dequantize"] = True
    return Description(content)


def _targets(source: Source, modules: list[str], one: bool) -> list[str]:
    """Return what names the modules of one scheme. one: the model has no other."""
    named = ["Linear"] if one else _patterns(source.names_of(modules))
    return list(dict.fromkeys([*named, *targets(source, modules)]))


def _packs_zeros(scheme: QuantizationScheme) -> bool:
    packed = CompressionFormat(scheme.format) is CompressionFormat.pack_quantized
    return packed and scheme.weights is not None and not scheme.weights.symmetric


def _patterns(modules: Iterable[str]) -> list[str]:
    """The modules by name, the experts of a layer by one pattern."""
    found = (EXPERT.match(module) or module for module in modules)
    return list(dict.fromkeys(f if isinstance(f, str) else rf"re:{re.escape(f[1])}\..*" for f in found))


def _unreadable(scheme: QuantizationScheme, modules: list[str], *, alone: bool) -> Iterator[str]:
    """Return what transformers' own reader cannot load, or loads as other values. alone: the model has one scheme."""
    expert = next(filter(EXPERT.match, modules), None)
    weights, layout = scheme.weights, CompressionFormat(scheme.format).value
    if expert and weights is not None and weights.type == "int" and not weights.symmetric:
        advice = symmetric(weights.group_size or 0) if weights.num_bits == 4 else "train a symmetric format"
        raise ValueError(
            f"{expert}: vLLM runs experts of symmetric integers alone, and these have zero points: {advice}; nothing was written"
        )
    if expert and (fact := _IN_TRANSFORMERS.get(layout)):
        yield (
            f"transformers {fact} {layout} experts, such as {expert}: serve the folder with vLLM, or read it with "
            "aoquant.load_pretrained; transformers reads experts of intx, fp8 and mxfp4"
        )
    if _packs_zeros(scheme) and not alone:  # transformers 5.24 refuses them
        yield (
            f"{modules[0]}: transformers 5.24 cannot load packed zero points (intx asym) in a model of several formats: serve the "
            "folder with vLLM, read it with aoquant.load_pretrained, or train one format or a symmetric one"
        )


def initialised(stock: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Return the linear layers without which transformers cannot initialise a model: it does so after loading, and
    some classes read weights there that compressed-tensors has replaced. stock: on meta.
    """
    modules = dict(stock.named_modules())
    found = []
    for name in filter(modules.__contains__, layers):
        weight = modules[name]._parameters.pop("weight")
        parents = ["", *itertools.accumulate(name.split("."), "{}.{}".format)]
        initialise = stock._init_weights
        try:
            for module in map(modules.__getitem__, parents):
                initialise = module._init_weights if isinstance(module, PreTrainedModel) else initialise
                initialise(module)
        except AttributeError:
            found.append(name)
        modules[name]._parameters["weight"] = weight
    return found


def _check_experts(groups: Iterable[Iterable[str]]) -> None:
    """Raise ValueError where experts of a layer differ in scheme. groups: modules of each scheme, and of none."""
    seen: dict[str, int] = {}
    for number, modules in enumerate(groups):
        for module in modules:
            if (match := EXPERT.match(module)) and seen.setdefault(match[1], number) != number:
                raise ValueError(
                    f"{match[1]}: vLLM runs the experts of a layer under one scheme, and {module} has another one: quantise "
                    "gate_up_proj and down_proj alike; nothing was written"
                )
