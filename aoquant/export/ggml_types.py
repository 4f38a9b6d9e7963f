"""Packed layers as ggml's tensor types: the bytes of a GGUF file.

| weight format                       | type  | a block's bytes                                                     |
|-------------------------------------|-------|---------------------------------------------------------------------|
| q4_0, intx4 (symmetric, g % 32 = 0) | Q4_0  | f16 scale; 16 bytes: value j low, value j + 16 high                  |
| q4_1, intx4 asymmetric              | Q4_1  | f16 scale, f16 minimum; the same                                    |
| q8_0, intx8, int8 (symmetric)       | Q8_0  | f16 scale; 32 int8                                                  |
| mxfp4                               | MXFP4 | e8m0 byte; 16 bytes as Q4_0                                         |
| nvfp4                               | NVFP4 | four e4m3 scales of 16 values each; 8 bytes a scale: j low, j + 8 high |

Scales have to be float16 numbers already: they are stored, never rounded. NVFP4's outer scale goes into a tensor of its
own, `.scale`. ggml multiplies in float32, so a value is not rounded to the model's dtype as aoquant's bfloat16 formats
round it: said as a note. Source: `gguf.quants`, ggml `ggml-common.h`.
"""

from collections.abc import Callable
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from aoquant.export.targets import Stored, Unfit, one_outer, recipe_name
from aoquant.formats import Format, Operand, layout
from aoquant.linear.tensor import PackedTensor

_UNROUNDED = "llama.cpp multiplies by code * scale in float32, which training rounded to {}: train q4_0, q4_1 or q8_0 for equal values"


# ggml type -> (whether it holds a format, given whether that has zero points; bytes of a scale, None for float16;
# values whose first half is in the low nibbles, 0 for whole bytes)
_TYPES: dict[Type, tuple[Callable[[Any, bool], bool], int | None, int]] = {
    Type.Q4_0: (lambda f, zero: f.standard == "q4_0" or (_is_affine(f, 4) and not zero), None, 32),
    Type.Q4_1: (lambda f, zero: f.standard == "q4_1" or (_is_affine(f, 4) and zero), None, 32),
    Type.Q8_0: (lambda f, zero: f.standard == "q8_0" or (_is_affine(f, 8) and not zero), None, 0),
    Type.MXFP4: (lambda f, zero: f.standard == "mxfp4", 1, 32),
    Type.NVFP4: (lambda f, zero: f.standard == "nvfp4", 4, 16),
}


def _is_affine(format: Any, bits: int) -> bool:
    whole = format.standard == "int" and format.width == bits and format.group % 32 == 0
    return whole and format.per != "tensor"


def store(p: PackedTensor) -> Stored:
    """tensors["weight"]: uint8 (N, bytes of a row), and "scale" (1,) float32 where there is an outer scale. scheme: the
    ggml type.

    Raises:
        Unfit: no ggml type holds the layer's numbers.
    """
    format = p.weight_format
    if p.recipe.transform is not None:
        raise Unfit(f"{p.format} stands behind a transform, which the file cannot carry", "train without it")
    type = next((t for t, (holds, *_) in _TYPES.items() if holds(format, p.zero_point is not None)), None)
    if type is None:
        raise Unfit(f"no ggml type holds {format.name}", _instead(format))
    rows, k = p.shape
    size, width = GGML_QUANT_SIZES[type]
    if k % size:
        raise Unfit(
            f"{type.name} has blocks of {size} values, and the layer K = {k}",
            "leave the layer in high precision (--skip)",
        )
    heads = _heads(p, type)
    tensors = {"weight": torch.empty(rows, k // size * width, dtype=torch.uint8, device="meta")}
    if not p.qdata.is_meta:
        tensors["weight"] = torch.cat([*heads, _codes(p, type)], -1).reshape(rows, -1)
    if p.per_tensor_scale is not None:
        tensors["scale"] = one_outer(p, "the file one for the layer", "train nvfp4").clone()
    return Stored(tensors, type, _notes(p))


def _heads(p: PackedTensor, type: Type) -> list[Tensor]:
    """Return the scales and minima before a block's codes, each (N, blocks, bytes) uint8."""
    rows, k = p.shape
    if (width := _TYPES[type][1]) is not None:
        return [p.encoded.scales.view(torch.uint8).reshape(rows, -1, width)]
    scale = _by_block(p.encoded.scales, rows, k)
    found = [_half(scale, p.format, "scales")]
    if p.zero_point is not None and p.weight_format.standard == "q4_1":
        found.append(_half(p.zero_point, p.format, "minima"))
    elif p.zero_point is not None:  # (q - zp) s = (q + 8) s - (zp + 8) s: the codes of the file count from 0
        found.append(_half(-(_by_block(p.zero_point, rows, k).float() + 8) * scale.float(), p.format, "minima"))
    return found


def _by_block(scale: Tensor, rows: int, k: int) -> Tensor:
    """(N, K / 32) of (N, G) or (N, 1)."""
    return scale.repeat_interleave(k // 32 // scale.shape[1], 1).expand(rows, -1)


def _half(t: Tensor, name: str, what: str) -> Tensor:
    """Bytes of float16 numbers."""
    half = t.to(torch.float16)
    if not torch.equal(half.float(), t.float()):
        lost = (half.float() != t.float()).sum().item()
        raise Unfit(
            f"{lost} of {t.numel()} {what} of {name} are no float16 numbers", "train q4_0, q4_1 or q8_0, whose are"
        )
    return half.contiguous().view(torch.uint8).reshape(t.shape[0], -1, 2)


def _codes(p: PackedTensor, type: Type) -> Tensor:
    """Return (N, blocks, bytes) uint8. Nibbles of Affine's codes count from the smallest code, as ggml's do."""
    format: Any = p.weight_format
    rows, half = len(p), _TYPES[type][2]
    if not half:
        integers: Tensor = format.integers(p.encoded)
        return integers.view(torch.uint8).reshape(rows, -1, 32)
    # the first half of a block in the low nibbles, the second in the high ones
    low, high = layout.unpack(p.qdata, 4, p.k).reshape(rows, -1, 2, half // 2).unbind(2)
    codes = low | (high << 4)
    return codes.reshape(rows, -1, GGML_QUANT_SIZES[type][0] // 2)


def _notes(p: PackedTensor) -> tuple[str, ...]:
    notes, scale = list[str](), p.scale
    format: Any = p.weight_format
    if format.standard == "int" and not format.stored and scale is not None and scale.dtype != torch.float32:
        notes.append(_UNROUNDED.format(str(scale.dtype).removeprefix("torch.")))
    if p.activation != "q8_0-x86":
        trained = p.activation.partition(":")[0] or "high precision"  # without a calibrated scale: one note for all
        notes.append(f"llama.cpp quantises activations to Q8_0 (q8_0-x86), trained as {trained}")
    return tuple(notes)


def _instead(format: Format | Operand) -> str:
    if format.bits == 8:
        return f"train the recipe {recipe_name('q8_0', 'q8_0-x86')}"
    return f"train the recipe {recipe_name('q4_0', 'q8_0-x86')} or {recipe_name('q4_1')}"
