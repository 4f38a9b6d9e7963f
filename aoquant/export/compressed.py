"""Packed layers as compressed-tensors stores them: vLLM, SGLang and transformers read these.

| weight format               | stored as            | value that a reader makes                      |
|-----------------------------|----------------------|------------------------------------------------|
| intx1..8, group or row      | pack-quantized       | (q - zp) * s in the scale's dtype, one rounding |
| int8 with int8 activations  | int-quantized        | q * s                                          |
| fp8 row, tensor, block      | float-, naive-quantized | code * s                                    |
| mxfp4, mxfp8                | mxfp4-, mxfp8-...    | code * 2^e                                     |
| nvfp4                       | nvfp4-pack-quantized | code * (s / g), g = 1 / outer                  |

Codes and scales are repacked and never rounded. NVFP4's outer scales are stored as reciprocals. A weight's is applied
by a division, so only powers of two survive; an activation's must be the reciprocal of what is stored. The names of the
schemes are compressed-tensors' own inference from the arguments; the arguments and the packing are its code. Source:
compressed-tensors 0.20 `compressors/`, `quantization/`; vLLM 0.32 `compressed_tensors.py`.

A folder has one config group for each scheme of the model, and an ignore list of the linear layers left out. Experts
are named by a pattern for all of a layer's, because vLLM asks for "experts.0.gate_proj" whatever its file calls it, and
wants one scheme for gate, up and down. Routers are linear layers in vLLM, so they are ignored by name. Source: vLLM
`compressed_tensors_moe.py`, `get_moe_method`.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from torch import Tensor, nn
from transformers import PreTrainedModel

from aoquant._messages import warn
from aoquant.export.contents import Contents
from aoquant.export.embedding_rows import targets
from aoquant.export.fused_checks import check_fused
from aoquant.export.source import Source
from aoquant.export.targets import EXPERT, Description, Stored, Unfit, one_outer, power_of_two, recipe_name, symmetric
from aoquant.formats import MX, Affine, Float8, Format, Operand, get_format
from aoquant.formats.ggml import KINDS
from aoquant.linear.tensor import PackedTensor
from aoquant.serving import differences

_E8M0 = {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
_E4M3 = {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}

# transformers 5.17 asks for experts' weight_packed, weight_scale and weight_shape, or for fp8's weight and weight_scale
_IN_TRANSFORMERS = {
    "int-quantized": "cannot load",
    "mxfp8-quantized": "cannot load",
    "nvfp4-pack-quantized": "leaves out the outer scales of",
}


def store(p: PackedTensor) -> Stored:
    """The layer's tensors and scheme (targets are filled in later). Codes on meta give codes on meta.

    Raises:
        Unfit: no scheme holds the layer's numbers.
    """
    format: Any = p.weight_format
    own = p.recipe.fprop_weight.format
    if p.recipe.transform is not None:
        raise Unfit(
            f"{format.name} stands behind a transform, which the folder cannot carry",
            f"{f'train the recipe {_recipe_name(own.name, p)}' if own.standard == 'int' else _instead(own, p)}, without it",
        )
    if (scheme_of := _SCHEMES.get(format.standard)) is None:
        group = format.block if format.element == "int4" else None
        raise Unfit(f"no scheme holds {format.name}", _instead(format, p), symmetric(group) if group else None)
    tensors, weights = scheme_of(format, p)
    input_args, input_tensors = _activation(p.activation)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=input_args)
    scheme.format = infer_module_format(nn.Linear, scheme)
    if scheme.format == "int-quantized" and "weight_packed" in tensors:
        tensors = {"weight": _integers(p), "weight_scale": tensors["weight_scale"]}
        if p.zero_point is not None:
            tensors["weight_zero_point"] = p.zero_point
    return Stored({**tensors, **input_tensors}, scheme, tuple(differences(p.recipe, "vllm")))


def _float8(format: Float8, p: PackedTensor) -> tuple[dict[str, Tensor], QuantizationArgs]:
    strategy = {"row": "channel", "tensor": "tensor", "block": "block"}[format.per]
    block = [format.rows, format.cols] if format.per == "block" else None
    scale = p.encoded.scales.reshape(1) if format.per == "tensor" else p.encoded.scales
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=block)
    return {"weight": p.qdata, "weight_scale": scale}, args


def _mx(format: MX, p: PackedTensor) -> tuple[dict[str, Tensor], QuantizationArgs]:
    name = "weight_packed" if format.bits == 4 else "weight"
    args = QuantizationArgs(num_bits=format.bits, type="float", strategy="group", group_size=32, **_E8M0)
    return {name: p.qdata, "weight_scale": p.encoded.scales.view(torch.uint8)}, args


def _affine(format: Affine, p: PackedTensor) -> tuple[dict[str, Tensor], QuantizationArgs]:
    scale = stored = p.encoded.scales
    if not (format.width == 8 and p.activation):  # int-quantized scales stay float32 in every engine
        scale = stored.to(p.dtype)
        if not torch.equal(scale.float(), stored.float()):
            raise Unfit(
                f"{format.name} has {_short(stored.dtype)} scales, and readers hold them in the model's {_short(p.dtype)}",
                f"train the recipe {_recipe_name(_intx(format), p)}, whose scales are the model's dtype",
            )
    strategy = {"group": "group", "row": "channel", "tensor": "tensor"}[format.per]
    if strategy == "tensor":
        raise Unfit(
            f"{format.name} has one scale for the tensor", f"train the recipe {_recipe_name(_intx(format, 'row'), p)}"
        )
    args = QuantizationArgs(
        num_bits=format.width,
        type="int",
        strategy=strategy,
        group_size=format.group or None,
        symmetric=p.zero_point is None,
    )
    rows, k = p.shape
    tensors = {
        "weight_packed": _packed(p, format.width),
        "weight_shape": torch.tensor([rows, k], device="cpu"),
        "weight_scale": scale,
    }
    if p.zero_point is not None:
        tensors["weight_zero_point"] = pack_to_int32(p.zero_point, format.width, packed_dim=0)
    return tensors, args


def _nvfp4(format: Format | Operand, p: PackedTensor) -> tuple[dict[str, Tensor], QuantizationArgs]:
    outer = one_outer(p, "readers hold one", _nvfp4_recipe(p))
    if not power_of_two(outer):
        raise Unfit(
            "its outer scale is no power of two, and readers divide by a rounded reciprocal",
            f"{_nvfp4_recipe(p)}, whose outer scales are powers of two",
        )
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, **_E4M3)
    return {"weight_packed": p.qdata, "weight_scale": p.encoded.scales, "weight_global_scale": 1.0 / outer}, args


# by `Format.standard`
_SCHEMES: dict[str, Callable[[Any, PackedTensor], tuple[dict[str, Tensor], QuantizationArgs]]] = {
    "int": _affine,
    "fp8": _float8,
    "mxfp8": _mx,
    "mxfp4": _mx,
    "nvfp4": _nvfp4,
}


def _activation(name: str) -> tuple[QuantizationArgs | None, dict[str, Tensor]]:
    """Return the arguments of a layer's input in the format called `name`, "" for none, and the tensors they need."""
    if not name:
        return None, {}
    format: Any = get_format(name)
    kind = format.standard
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "dynamic": True, "observer": None}
    tensors: dict[str, Tensor] = {}
    if kind == "int" and (format.width, format.per) == (8, "row"):
        args |= {"type": "int", "strategy": "token", "symmetric": format.mapping == "symmetric"}
    elif kind == "fp8" and format.per == "row":
        args |= {"strategy": "token"}
    elif kind == "fp8" and (format.rows, format.cols) == (1, 128):
        args |= {"strategy": "group", "group_size": 128}
    elif kind in ("int", "fp8") and format.bits == 8 and len(format.fixed) == 1:
        args |= {"type": "int" if kind == "int" else "float", "strategy": "tensor", "dynamic": False}
        tensors = {"input_scale": static_scale(format)}
    elif kind in ("mxfp4", "mxfp8"):
        args |= {"num_bits": format.bits, "strategy": "group", "group_size": 32, **_E8M0}
    elif format.name.startswith("nvfp4-static:"):  # and no format of other codes in the same layout
        outer = torch.tensor(format.fixed, device="cpu")
        divisor = outer.reciprocal()
        if not torch.equal(divisor.reciprocal(), outer):
            raise Unfit(
                f"its activations' outer scale {format.fixed[0]:.6g} is stored as a reciprocal, whose reciprocal is another number",
                "train the recipe vllm-nvfp4, which calibrates powers of two",
            )
        args |= {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, **_E4M3, "dynamic": "local"}
        tensors = {"input_global_scale": divisor}
    elif format.name in ("nvfp4", "nvfp4-row", "nvfp4-none"):
        raise Unfit(
            f"its activations ({name}) make an outer scale in every call, and readers hold a calibrated one",
            "train the recipe vllm-nvfp4, whose are calibrated, or vllm-nvfp4-weight without quantised activations",
        )
    else:
        raise Unfit(f"no scheme holds {name} activations", "train with int8-row-vllm, fp8-row-vllm, mxfp4-even or none")
    return QuantizationArgs(**args), tensors


def static_scale(format: Any) -> Tensor:
    """Return the scale (1,) float32 of a static format: TransformerEngine's hold its reciprocal as their constant."""
    scale: Tensor = format.alpha(format.encode(torch.zeros(1, 1, device="cpu")))
    return scale.reshape(1)


def _integers(p: PackedTensor) -> Tensor:
    format: Any = p.weight_format
    return torch.empty(p.shape, dtype=torch.int8, device="meta") if p.qdata.is_meta else format.integers(p.encoded)


def _packed(p: PackedTensor, bits: int) -> Tensor:
    if p.qdata.is_meta:
        return torch.empty(len(p), math.ceil(p.k * bits / 32), dtype=torch.int32, device="meta")
    return pack_to_int32(_integers(p), bits)


def _nvfp4_recipe(p: PackedTensor) -> str:
    return f"train the recipe vllm-nvfp4{'' if _rounded(p) else '-weight'}"


def _rounded(p: PackedTensor) -> bool:
    """Return whether activations are quantised: behind a transform their format may be high-precision."""
    return not p.activation.endswith("high-precision") and p.activation != ""


def _recipe_name(weight: str, p: PackedTensor) -> str:
    """The recipe of this weight format, with the layer's activations where a folder holds them."""
    try:
        _activation(p.activation)
    except Unfit:
        return recipe_name(weight)
    return recipe_name(weight, p.activation.partition(":")[0])


def _instead(format: Any, p: PackedTensor) -> str:
    if format.element == "int4":
        near = _recipe_name(f"intx4-g{format.block}", p)
        return f"train the recipe {_recipe_name(f'intx4-g{format.block}-asym', p)} (integer zero points) or {near} (symmetric)"
    if format.standard in KINDS:
        asym = "-asym" if format.standard == "q4_1" else ""
        return f"train the recipe {_recipe_name(f'intx{format.bits}-g{format.block}{asym}', p)}"
    if format.bits == 4 and format.block == 16:
        return _nvfp4_recipe(p)
    if format.bits == 4 and format.block == 32:
        return f"train the recipe {recipe_name('mxfp4-even', 'mxfp4-even' if _rounded(p) else '')}"
    if format.element in ("e4m3", "e5m2"):
        plain = format.name.replace("-e5m2", "").removesuffix("-32x32")
        return f"train its e4m3 form, the recipe {_recipe_name(plain, p)}"
    return f"train the recipe {_recipe_name(f'intx{min(max(format.bits, 2), 8)}-g{format.block or 128}', p)}"


def _intx(format: Affine, per: str = "") -> str:
    where = per or (f"g{format.group}" if format.per == "group" else format.per)
    return f"intx{format.width}-{where}" + ("-asym" if format.mapping == "asymmetric" else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        warn(message)
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
