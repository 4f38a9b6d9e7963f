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
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor, nn

from aoquant.export.recipe_names import recipe_name
from aoquant.export.targets import Stored, Unfit, power_of_two, symmetric
from aoquant.formats import (
    MX,
    NVFP4,
    Affine,
    Float8,
    Format,
    FourOverSix,
    Ggml,
    GridFlip,
    Int4,
    Operand,
    TinyGemm,
    get_format,
)
from aoquant.serving import FP8_BLOCKS
from aoquant.tensor import PackedTensor

VLLM_INT8 = ("int8-row-vllm", "int8-row-vllm-reciprocal")  # on a GPU, on a CPU
VLLM_FP8 = ("fp8-row-mslk", "fp8-row-vllm-reciprocal")  # what its CUDA kernel and its compiled path compute
_E8M0 = {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
_E4M3 = {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}


def store(p: PackedTensor) -> Stored:
    """The layer's tensors and scheme (targets are filled in later). Codes on meta give codes on meta.

    Raises:
        Unfit: no scheme holds the layer's numbers.
    """
    format = p.weight_format
    if p.recipe.transform is not None:
        raise Unfit(
            f"{format.name} stands behind a transform, which the folder cannot carry",
            f"{_behind(p.recipe.fprop_weight.format, p)}, without it",
        )
    tensors, weights = _weight(format, p)
    inputs = _activation(p.activation)
    notes = inputs.notes
    if isinstance(format, Affine) and not p.activation and p.contract != "dequantize":
        notes += (
            f"vLLM and transformers multiply (q - zp) * s, rounded once, as the contract 'dequantize' does, trained as {p.contract!r}",
        )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs.args)
    scheme.format = infer_module_format(nn.Linear, scheme)
    if scheme.format == "int-quantized" and "weight_packed" in tensors:
        tensors = {"weight": _integers(p), "weight_scale": tensors["weight_scale"]}
        if p.zero_point is not None:
            tensors["weight_zero_point"] = p.zero_point
    return Stored({**tensors, **inputs.tensors}, scheme, notes)


def _weight(format: Format | Operand, p: PackedTensor) -> tuple[dict[str, Tensor], QuantizationArgs]:
    e = p.encoded
    if isinstance(format, Affine):
        return _affine(format, p)
    if isinstance(format, Float8) and format.element == "e4m3":
        assert e.scale is not None
        strategy = {"row": "channel", "tensor": "tensor", "block": "block"}[format.per]
        block = [format.rows, format.cols] if format.per == "block" else None
        scale = e.scale.reshape(1) if format.per == "tensor" else e.scale
        args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=block)
        return {"weight": e.codes, "weight_scale": scale}, args
    if isinstance(format, MX) and format.tile_rows == 1 and format.element in ("e2m1", "e4m3"):
        assert e.scale is not None
        bits, name = (4, "weight_packed") if format.element == "e2m1" else (8, "weight")
        args = QuantizationArgs(num_bits=bits, type="float", strategy="group", group_size=32, **_E8M0)
        return {name: e.codes, "weight_scale": e.scale.view(torch.uint8)}, args
    if (isinstance(format, NVFP4 | FourOverSix) and not isinstance(format, GridFlip)) and format.tile_rows == 1:
        return _nvfp4(format, p)
    integers = isinstance(format, Int4 | TinyGemm) and format.block
    raise Unfit(f"no scheme holds {format.name}", _instead(format, p), symmetric(integers) if integers else None)


def _affine(format: Affine, p: PackedTensor) -> tuple[dict[str, Tensor], QuantizationArgs]:
    assert p.scale is not None
    scale = p.scale
    if not (format.width == 8 and p.activation):  # int-quantized scales stay float32 in every engine
        scale = p.scale.to(p.dtype)
        if not torch.equal(scale.float(), p.scale.float()):
            raise Unfit(
                f"{format.name} has {_short(p.scale.dtype)} scales, and readers hold them in the model's {_short(p.dtype)}",
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
        "weight_packed": _packed(p, format.width) if not p.qdata.is_meta else _empty(rows, k, format.width),
        "weight_shape": torch.tensor([rows, k], device="cpu"),
        "weight_scale": scale,
    }
    if p.zero_point is not None:
        tensors["weight_zero_point"] = pack_to_int32(p.zero_point, format.width, packed_dim=0)
    return tensors, args


def _nvfp4(format: Format | Operand, p: PackedTensor) -> tuple[dict[str, Tensor], QuantizationArgs]:
    assert p.scale is not None
    outer = torch.ones(1, device="cpu") if p.per_tensor_scale is None else p.per_tensor_scale.flatten()
    if not torch.equal(outer, outer[:1].expand_as(outer)):
        raise Unfit(f"{format.name} has an outer scale for each row, and readers hold one", _nvfp4_recipe(p))
    if not power_of_two(outer[:1]):
        raise Unfit(
            "its outer scale is no power of two, and readers divide by a rounded reciprocal",
            f"{_nvfp4_recipe(p)}, whose outer scales are powers of two",
        )
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, **_E4M3)
    return {"weight_packed": p.qdata, "weight_scale": p.scale, "weight_global_scale": 1.0 / outer[:1]}, args


class _Inputs(NamedTuple):
    """Arguments of a layer's input, tensors that they need, and how engines differ from training."""

    args: QuantizationArgs | None
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


def _activation(name: str) -> _Inputs:
    """Of the format called so; "" for none."""
    if not name:
        return _Inputs(None, {}, ())
    format = get_format(name)
    args: dict[str, Any] = {"dynamic": True, "observer": None}
    notes: tuple[str, ...] = ()
    if isinstance(format, Affine) and (format.width, format.per) == (8, "row"):
        args |= {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": format.mapping == "symmetric"}
        notes = () if name in VLLM_INT8 else (f"vLLM rounds int8 activations as int8-row-vllm, trained as {name}",)
    elif isinstance(format, Float8) and (format.element, format.per, format.fixed) == ("e4m3", "row", ()):
        args |= {"num_bits": 8, "type": "float", "strategy": "token"}
        notes = () if name in VLLM_FP8 else (f"vLLM rounds fp8 activations as fp8-row-vllm, trained as {name}",)
    elif isinstance(format, Float8) and (format.element, format.rows, format.cols) == ("e4m3", 1, 128):
        args |= {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128}
        notes = (f"{FP8_BLOCKS}, trained as {name}",)
    elif isinstance(format, Affine | Float8) and format.per == "tensor" and len(format.fixed) == 1 and format.bits == 8:
        kind = "int" if isinstance(format, Affine) else "float"
        args |= {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False}
        return _Inputs(
            QuantizationArgs(**args), {"input_scale": torch.tensor([float(format.fixed[0])], device="cpu")}, ()
        )
    elif isinstance(format, MX) and format.tile_rows == 1 and format.element in ("e2m1", "e4m3"):
        bits = 4 if format.element == "e2m1" else 8
        args |= {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, **_E8M0}
        if bits == 4 and format.rule != "even":
            notes = (f"vLLM rounds MXFP4 activations by the rule 'even' (mxfp4-even), trained as {name}",)
    elif type(format) is NVFP4 and format.outer == "static":
        assert format.pts is not None
        outer = torch.tensor([format.pts], device="cpu")
        divisor = outer.reciprocal()
        if not torch.equal(divisor.reciprocal(), outer):
            raise Unfit(
                f"its activations' outer scale {format.pts:.6g} is stored as a reciprocal, whose reciprocal is another number",
                "train the recipe vllm-nvfp4, which calibrates powers of two",
            )
        args |= {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            **_E4M3,
            "dynamic": "local",
        }
        return _Inputs(QuantizationArgs(**args), {"input_global_scale": divisor}, ())
    elif type(format) is NVFP4:
        raise Unfit(
            f"its activations ({name}) make an outer scale in every call, and readers hold a calibrated one",
            "train the recipe vllm-nvfp4, whose are calibrated, or vllm-nvfp4-weight without quantised activations",
        )
    else:
        raise Unfit(f"no scheme holds {name} activations", "train with int8-row-vllm, fp8-row-vllm, mxfp4-even or none")
    return _Inputs(QuantizationArgs(**args), {}, notes)


def _integers(p: PackedTensor) -> Tensor:
    """(N, K) int8."""
    format = p.weight_format
    assert isinstance(format, Affine)
    return torch.empty(p.shape, dtype=torch.int8, device="meta") if p.qdata.is_meta else format.integers(p.encoded)


def _packed(p: PackedTensor, bits: int) -> Tensor:
    return pack_to_int32(_integers(p), bits)


def _empty(rows: int, k: int, bits: int) -> Tensor:
    """The result of `_packed`, without values."""
    return torch.empty(rows, math.ceil(k * bits / 32), dtype=torch.int32, device="meta")


def _nvfp4_recipe(p: PackedTensor) -> str:
    return f"train the recipe vllm-nvfp4{'' if _rounded(p) else '-weight'}"


def _rounded(p: PackedTensor) -> bool:
    """Whether activations are quantised: behind a transform their format may be high-precision."""
    return not p.activation.endswith("high-precision") and p.activation != ""


def _recipe_name(weight: str, p: PackedTensor) -> str:
    """The recipe of this weight format, with the layer's activations where a folder holds them."""
    try:
        _activation(p.activation)
    except Unfit:
        return recipe_name(weight)
    return recipe_name(weight, p.activation.partition(":")[0])


def _instead(format: Format | Operand, p: PackedTensor) -> str:
    """The recipe of the nearest format that a folder can hold, as advice."""
    if isinstance(format, Int4 | TinyGemm) and format.block:
        near = _recipe_name(f"intx4-g{format.block}", p)
        return f"train the recipe {_recipe_name(f'intx4-g{format.block}-asym', p)} (integer zero points) or {near} (symmetric)"
    if isinstance(format, Ggml):
        asym = "-asym" if format.kind == "q4_1" else ""
        return f"train the recipe {_recipe_name(f'intx{format.bits}-g{format.block}{asym}', p)}"
    if format.bits == 4 and format.block == 16:
        return _nvfp4_recipe(p)
    if format.bits == 4 and format.block == 32:
        return f"train the recipe {recipe_name('mxfp4-even', 'mxfp4-even' if _rounded(p) else '')}"
    if isinstance(format, Float8 | MX):
        plain = format.name.replace("-e5m2", "").removesuffix("-32x32")
        return f"train its e4m3 form, the recipe {_recipe_name(plain, p)}"
    if isinstance(format, Operand):
        return f"train the recipe {_recipe_name(format.format.name, p)}"
    return f"train the recipe {_recipe_name(f'intx{min(max(format.bits, 2), 8)}-g{format.block or 128}', p)}"


def _behind(format: Format, p: PackedTensor) -> str:
    """Advice for a format that stands behind a transform."""
    return f"train the recipe {_recipe_name(format.name, p)}" if isinstance(format, Affine) else _instead(format, p)


def _intx(format: Affine, per: str = "") -> str:
    where = per or (f"g{format.group}" if format.per == "group" else format.per)
    return f"intx{format.width}-{where}" + ("-asym" if format.mapping == "asymmetric" else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
