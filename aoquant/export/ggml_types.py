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

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from aoquant.export.recipe_names import recipe_name
from aoquant.export.targets import Stored, Unfit
from aoquant.formats import MX, NVFP4, Affine, Encoded, Format, FourOverSix, Ggml, GridFlip, Operand, layout
from aoquant.tensor import PackedTensor

_UNROUNDED = "llama.cpp multiplies by code * scale in float32, which training rounded to {}: train q4_0, q4_1 or q8_0 for equal values"


def store(p: PackedTensor) -> Stored:
    """tensors["weight"]: uint8 (N, bytes of a row), and "scale" (1,) float32 where there is an outer scale. scheme: the
    ggml type.

    Raises:
        Unfit: no ggml type holds the layer's numbers.
    """
    type = _type(p)
    rows, k = p.shape
    if p.recipe.transform is not None:
        raise Unfit(f"{p.format} stands behind a transform, which the file cannot carry", "train without it")
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
    outer = p.per_tensor_scale
    if outer is not None:
        if not (outer == outer[:1]).all():
            raise Unfit(f"{p.format} has an outer scale for each row, and the file one for the layer", "train nvfp4")
        tensors["scale"] = outer.flatten()[:1].clone()
    return Stored(tensors, type, _notes(p, type))


def _type(p: PackedTensor) -> GGMLQuantizationType:
    format = p.weight_format
    if isinstance(format, Ggml):
        return GGMLQuantizationType[format.kind.upper().removesuffix("-X86")]
    if isinstance(format, Affine) and format.width in (4, 8) and (format.group % 32 == 0) and format.per != "tensor":
        if format.width == 4:
            return GGMLQuantizationType.Q4_0 if p.zero_point is None else GGMLQuantizationType.Q4_1
        if p.zero_point is None:
            return GGMLQuantizationType.Q8_0
    if isinstance(format, MX) and format.element == "e2m1":
        return GGMLQuantizationType.MXFP4
    if isinstance(format, NVFP4 | FourOverSix) and not isinstance(format, GridFlip) and format.tile_rows == 1:
        return GGMLQuantizationType.NVFP4
    raise Unfit(f"no ggml type holds {format.name}", _instead(format))


def _heads(p: PackedTensor, type: GGMLQuantizationType) -> list[Tensor]:
    """The scales and minima before a block's codes, each (N, blocks, bytes) uint8."""
    rows, k = p.shape
    assert p.scale is not None
    if type == GGMLQuantizationType.MXFP4:
        return [p.scale.view(torch.uint8).reshape(rows, -1, 1)]
    if type == GGMLQuantizationType.NVFP4:
        return [p.scale.view(torch.uint8).reshape(rows, -1, 4)]
    scale = _by_block(p.scale, rows, k)
    found = [_half(scale, p.format, "scales")]
    if isinstance(p.weight_format, Ggml):
        return found if p.zero_point is None else [*found, _half(p.zero_point, p.format, "minima")]
    if p.zero_point is not None:  # (q - zp) s = (q + 8) s - (zp + 8) s: the codes of the file count from 0
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


def _codes(p: PackedTensor, type: GGMLQuantizationType) -> Tensor:
    """(N, blocks, bytes) uint8."""
    format, e = p.weight_format, p.encoded
    rows = p.shape[0]
    if type == GGMLQuantizationType.Q8_0:
        return _int8(format, e).view(torch.uint8).reshape(rows, -1, 32)
    if type == GGMLQuantizationType.NVFP4:
        return _halves(layout.unpack(e.codes, 4, e.k), 16).reshape(rows, -1, 32)
    # nibbles of Affine's codes count from the smallest code, as ggml's do
    return _halves(layout.unpack(e.codes, 4, e.k), 32)


def _int8(format: Format | Operand, e: Encoded) -> Tensor:
    assert isinstance(format, Affine | Ggml)
    return format.integers(e)


def _halves(nibbles: Tensor, block: int) -> Tensor:
    """(N, K) codes 0..15 -> (N, K / block, block / 2): the first half of a block in the low nibbles, the second in the
    high ones.
    """
    low, high = nibbles.reshape(nibbles.shape[0], -1, 2, block // 2).unbind(2)
    return low | (high << 4)


def _notes(p: PackedTensor, type: GGMLQuantizationType) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    scale = p.scale
    if (
        isinstance(p.weight_format, Affine)
        and scale is not None
        and scale.dtype != torch.float32
        and not p.weight_format.stored
    ):
        notes += (_UNROUNDED.format(str(scale.dtype).removeprefix("torch.")),)
    if p.activation != "q8_0-x86":
        trained = p.activation.partition(":")[0] or "high precision"  # without a calibrated scale: one note for all
        notes += (f"llama.cpp quantises activations to Q8_0 (q8_0-x86), trained as {trained}",)
    return notes


def _instead(format: Format | Operand) -> str:
    if format.bits == 8:
        return f"train the recipe {recipe_name('q8_0', 'q8_0-x86')}"
    if isinstance(format, MX):
        return f"train the recipe {recipe_name('mxfp4')}"
    return f"train the recipe {recipe_name('q4_0', 'q8_0-x86')} or {recipe_name('q4_1')}"
