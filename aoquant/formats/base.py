"""A number format: three functions and a count of bits.

A format turns a high-precision matrix into codes and scales (`encode`) and back (`decode`). Both QAT and PTQ call the
same two methods of the same frozen instance. So the codes that the prepared forward multiplies are those that convert
stores. Kernels that encode are tested bit for bit against them. GPTQ chooses other codes, under the same scales.

Encoding has two steps: `measure` finds the scales of x, `quantize` rounds x to codes under given scales. Dynamic
quantisation does both each time. Static and learned scales are held by a layer: `hold` rounds under
them, with the same second step.

A GEMM does not multiply decoded values, it multiplies operands and scales the accumulator. So decoding comes in two
parts: `operand` is what the matrix unit sees, exact in bf16 wherever the format allows it, and `alpha` is the outer
scale that multiplies the float32 accumulator. `decode` is their product, for gradients, for reports and for kernels
that dequantise.

Shapes: R rows, K values along the contraction axis, G = K / group scales in a row. Everything is 2-D; callers flatten.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from aoquant._messages import advice

from . import layout

TINY = 2.0**-121  # a weight of a block whose scale is 0
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Encoded(NamedTuple):
    """A quantised (R, K) matrix.

    codes: packed codes, (R, bytes of K codes), uint8, int8 or a float8 dtype.
    scale: (R, G), (R, 1), (1, 1) or (ceil(R / tile_rows), G), in the dtype that the format says: float32, the input's,
        float16, bfloat16, float8_e4m3fn or float8_e8m0fnu; or None.
    zero:  like scale: the integer zero point (int8) or the value of code 0 (int4, scale's dtype); or None.
    outer: (1, 1) or (R, 1) float32, multiplies the accumulator; or None.
    k:     K, the unpacked width.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    outer: Tensor | None
    k: int

    @classmethod
    def of(cls, tensors: Iterable[Tensor | None], k: int) -> "Encoded":
        """Return the matrix of codes, scale, zero and outer scale, in this order."""
        codes, scale, zero, outer = tensors
        assert codes is not None
        return cls(codes, scale, zero, outer, k)

    @classmethod
    def joined(cls, parts: "Sequence[Encoded]", join: Callable[..., Tensor]) -> "Encoded":
        """Return matrices of one format joined, tensor by tensor. join: torch.cat or torch.stack."""
        columns = zip(*(e.tensors for e in parts), strict=True)
        return cls.of((None if c[0] is None else joined(c, join) for c in columns), parts[0].k)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Encoded":
        """Return the matrix with `function` of each tensor that it has."""
        return Encoded.of((None if t is None else function(t) for t in self.tensors), self.k)

    @property
    def scales(self) -> Tensor:
        """Return the scale of a matrix that has one."""
        assert self.scale is not None
        return self.scale

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return all but K: codes, scale, zero, outer."""
        return self.codes, self.scale, self.zero, self.outer

    @property
    def by_row(self) -> "Encoded":
        """Return the same with an outer scale for each row, (R, 1), as a packed tensor stores it."""
        return self if self.outer is None else self._replace(outer=self.outer.expand(len(self.codes), 1).contiguous())


class Scales(NamedTuple):
    """Scales of `Format.measure`: all that `Format.quantize` needs to know of the tensor as a whole.

    scale: (R, G), (R, 1) or (1, 1), before it is rounded to what is stored; or None.
    zero:  like scale: the integer zero point (int8), or the smallest value (int4, float32); or None.
    outer: (1, 1) or (R, 1) float32; the scales of the blocks below it are made by `quantize`; or None.
    transform: (K / size, size, size), the matrices of a fitted transform, which is not measured but held; or None.
    """

    scale: Tensor | None = None
    zero: Tensor | None = None
    outer: Tensor | None = None
    transform: Tensor | None = None

    @property
    def scales(self) -> Tensor:
        """Return the scale, where there is one."""
        assert self.scale is not None
        return self.scale

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return all but the transform: scale, zero, outer."""
        return self.scale, self.zero, self.outer

    @property
    def copied(self) -> "Scales":
        """Return a copy with scales of its own."""
        scale, zero, outer = (None if t is None else t.clone() for t in self.tensors)
        return Scales(scale, zero, outer, self.transform)

    @property
    def dynamic(self) -> bool:
        """Return whether no scale is among them."""
        return self.scale is None and self.zero is None and self.outer is None


@dataclass(frozen=True)
class Format:
    """Base of all formats: a frozen, hashable value. Equal names mean equal numerics."""

    @property
    def name(self) -> str:
        """Return the name that `get_format` takes back."""
        raise NotImplementedError

    @property
    def bits(self) -> int:
        """Return the bits of one code."""
        raise NotImplementedError

    @property
    def element(self) -> str:
        """Return what a code stands for: "e2m1", "e4m3", "e5m2", "int4" where a group has a real offset, "int" for
        other integers; "" for values as they are.
        """
        return ""

    @property
    def lossless(self) -> bool:
        """Return whether values are stored as they are."""
        return False

    @property
    def block(self) -> int | None:
        """Return how many values along K share a scale; None when a whole row or more does."""
        return None

    @property
    def block_scale(self) -> torch.dtype | None:
        """Return the dtype of a block's scale of one byte, float8_e8m0fnu or float8_e4m3fn; None for others."""
        return None

    @property
    def sums_blocks(self) -> bool:
        """Return whether a GEMM with another such format sums the products of each block before its scales multiply
        them.
        """
        return False

    @property
    def shifts(self) -> tuple[float, float]:
        """Return what is added to the codes of a block with a negative scale, in its steps: of even and of odd blocks
        along K.
        """
        return 0.0, 0.0

    @property
    def power_of_two(self) -> bool:
        """Return whether the outer scale is always a power of two, so that its reciprocal is exact."""
        return False

    @property
    def fixed(self) -> tuple[float, ...]:
        """Return the constants in place of a scale of the tensor: part of the name."""
        return ()

    @property
    def family(self) -> str:
        """Return the family of numbers: two formats of one family can be the operands of one backward GEMM. The name,
        for a format that has no relatives.
        """
        return self.name

    @property
    def standard(self) -> str:
        """Return the published layout whose readers decode the codes and scales as they are: "int", "fp8", "mxfp8",
        "mxfp4", "nvfp4" or one of ggml's types; "" for none.
        """
        return ""

    @property
    def beside(self) -> "Format":
        """Return the format of an input beside a weight of this format, where a user names none."""
        return self

    @property
    def tile_rows(self) -> int:
        """Return how many rows share a scale, for scales (ceil(R / tile_rows), G)."""
        return 1

    @property
    def square(self) -> bool:
        """Return whether a transposed matrix has the transposed codes and scales: a square tile, or the whole tensor,
        shares a scale.
        """
        return False

    @property
    def per_tensor(self) -> bool:
        """Return whether `measure` gives (1, 1) for every shape of x, as calibrating an activation requires."""
        return False

    @property
    def reach(self) -> str:
        """Return how far a scale reaches: "block", "row" or "tensor". A shard within it needs the scales of the
        whole.
        """
        return "block" if self.block else "row"

    @property
    def batch_invariant(self) -> bool:
        """Return whether a row's codes and scales are the same alone, in any batch, and at any place in it.

        An activation's format should be: only then is a token's result its own. NaN and Inf stay in their row too.
        """
        return self.reach != "tensor" and self.tile_rows == 1

    @property
    def from_extremes(self) -> bool:
        """Return whether a scale that reaches beyond a block depends on the smallest and the largest value alone:
        `measure` finds it from them.
        """
        return True

    @property
    def finite_only(self) -> bool:
        """Return whether a scale that reaches beyond a block is made of the finite values alone: NaN and Inf stay in
        their block.
        """
        return False

    @property
    def period(self) -> int:
        """Return after how many values along K codes and scales mean the same again, so a matrix may be cut."""
        return self.block or 1

    @property
    def draws(self) -> bool:
        """Return whether encoding draws random numbers."""
        return False

    @property
    def learnable(self) -> bool:
        """Return whether a held scale can be trained: `scale_gradient` is there."""
        return False

    @property
    def limits(self) -> tuple[int, int]:
        """Return the smallest and the largest code, of a format of integers."""
        raise NotImplementedError

    @property
    def clips_when_held(self) -> bool:
        """Return whether `saturated` names the values that held scales clip."""
        return True

    def scale_dtype(self, source: torch.dtype) -> torch.dtype | None:
        """Return the dtype of the scales of a matrix of `source`, for a format that stores them in a 16-bit or wider
        type; None: as `Encoded` says.
        """
        return None

    def encode(self, x_RK: Tensor, held: Scales | None = None) -> Encoded:
        """Quantise x_RK, a 2-D float32, bfloat16 or float16 tensor with any strides. NaN and Inf stay visible after
        decode.

        held: scales that are not made from x_RK now: static or learned ones.
        """
        return self.quantize(x_RK, self.measure(x_RK)) if held is None else self.hold(x_RK, held)

    def measure(self, x_RK: Tensor) -> Scales:
        """Return the scales that x_RK asks for; NaN and Inf in x_RK make their scale NaN or Inf."""
        raise NotImplementedError

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        """Return the codes of x_RK under scales that were measured on x_RK."""
        raise NotImplementedError

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        """Return the codes of x_RK under scales from elsewhere. Values beyond their range saturate, Inf too; NaN stays
        visible.
        """
        return self.quantize(x_RK, s)

    @property
    def widened(self) -> "Format | None":
        """Return the format of float16 weights: this one, computed in float32, and only scales are rounded to what is
        stored. None where that is so anyway, or where there is none.
        """
        return None

    @property
    def narrow(self) -> "Format":
        """Return the format without `widened`, which says how codes are made and not what they stand for."""
        return self

    @property
    def narrow_of_float32(self) -> bool:
        """Return whether this format encodes x as its narrow one, which has kernels, encodes x in float32."""
        return False

    def held(self, e: Encoded) -> Scales:
        """Return scales under which `hold` makes the codes and scales of e again: what a layer holds that trains on
        from them.

        Raises:
            ValueError: the format's scales cannot be held.
        """
        measured = self.measure(torch.empty(len(e.codes), e.k, dtype=torch.float32, device="meta"))
        stored = e.scale, e.zero, e.outer if e.outer is None or self.reach == "row" else e.outer[:1]
        pairs = zip(measured.tensors, stored, strict=True)
        return Scales(*(None if m is None or t is None else t.to(m.dtype) for m, t in pairs))

    def inside(self, e: Encoded) -> Tensor:
        """Return (R, K) float32 values that have e's codes under e's scales: decoded ones, but no zeros where a zero
        has a signed code, which a sum or a shifted grid would lose. Such a zero, of float codes, is a quarter of the
        smallest step, on the side of its sign. In a block so small that its scale is 0 other codes have nothing but
        their sign.
        """
        if not self.element.startswith("e"):
            return self.decode(e, torch.float32)
        sign = 1 << (self.bits - 1)
        codes = layout.unpack(e.codes.view(torch.uint8), self.bits, e.k)
        negative, zero = codes >= sign, (codes & (sign - 1)) == 0
        same = [layout.pack(torch.full_like(codes, c), self.bits).view(e.codes.dtype) for c in (1, 0)]
        v, one, none = (self.decode(e._replace(codes=c), torch.float32) for c in (e.codes, *same))
        step = one - none
        step = torch.where(negative, -step, step)
        flushed = torch.where(zero, 0.0, torch.where(negative, -TINY, TINY))
        return torch.where(step == 0, flushed, torch.where(zero, v + step / 4, v))

    def rowwise(self, s: Scales, rows: int) -> Scales:
        """Return the held scales of an activation with `rows` rows: a scale of the whole tensor is repeated for every
        row where codes have no NaN, because a NaN then shows in the scale of its row.
        """
        return s

    def fix(self, *numbers: float) -> "Format":
        """Return this format with constant scales, which become part of its name: the numbers of `Scales`, in order.

        Raises:
            ValueError: the format makes a scale for every row or block of its input, or the numbers are no scales.
        """
        raise ValueError(
            f"{self.name} makes its scales for each row or block of the input, so they cannot be constants"
        )

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        """Return (R, K) in `dtype`: the matrix that the tensor core multiplies, without `alpha`."""
        raise NotImplementedError

    def integers(self, e: Encoded) -> Tensor:
        """Return (R, K) codes as the integers that the scale multiplies, unpacked, of a format that has such."""
        raise NotImplementedError

    def alpha(self, e: Encoded) -> Tensor | None:
        """Return (R, 1) or (1, 1) float32 that multiplies the accumulator, or None for 1: the outer scale."""
        return e.outer

    def decode(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        """Return (R, K) in `dtype`: operand times alpha in float32, rounded once."""
        alpha = self.alpha(e)
        if alpha is None:
            return self.operand(e, dtype)
        return (self.operand(e, torch.float32) * alpha).to(dtype)

    def fake_quantize(self, x_RK: Tensor) -> Tensor:
        """Return the value that x_RK has after a round trip, in x_RK's dtype. Defined once, for every format."""
        return self.decode(self.encode(x_RK), x_RK.dtype)

    @property
    def portable(self) -> bool:
        """Return whether every device makes the same codes."""
        return True

    @cached_property
    def by_rows(self) -> bool:
        """Return whether a row's codes and scales are made of that row alone: encoding some rows then gives their part
        of the whole.
        """
        if self.reach == "tensor":
            return False
        e = self.encode(torch.empty(2, self.block or 8, dtype=torch.float32, device="meta"))
        return all(t is None or t.shape[0] == 2 for t in e.tensors)

    def decode_rows(self, e: Encoded, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (len(ids), K): rows `ids`, 1-D integers, of decode(e, dtype), decoding these rows only."""
        rows = e.codes.shape[0]
        if any(t is not None and t.shape[0] not in (1, rows) for t in e.tensors):  # scales of blocks that span rows
            return self.decode(e, dtype).index_select(0, ids)
        return self.decode(e.map(lambda t: t if t.shape[0] != rows else take_rows(t, ids)), dtype)

    def fake_quantize_rows(self, x_RK: Tensor, ids: Tensor) -> Tensor:
        """Return (len(ids), K): rows `ids` of fake_quantize(x_RK), encoding them alone where that is exact and less
        work.
        """
        if self.by_rows and ids.numel() < x_RK.shape[0]:
            return self.fake_quantize(x_RK.index_select(0, ids))
        return self.decode_rows(self.encode(x_RK), ids, x_RK.dtype)

    def scale_gradient(self, x_RK: Tensor, s: Scales, grad_RK: Tensor) -> Tensor:
        """Return the (R, G) float32 gradient of each learned scale, from the gradient of the values, for a format that
        is `learnable`.
        """
        raise NotImplementedError

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        """Return (R, K) bool: values that the format's largest code had to clip."""
        raise NotImplementedError

    def floored(self, e: Encoded) -> Tensor:
        """Return, as bool and scale-shaped, the blocks whose scale is the smallest that the format stores, those of
        zeros among them.
        """
        raise NotImplementedError

    def planned(self, w_RK: Tensor) -> Encoded:
        """Return the shapes and dtypes of encode(w_RK), for a weight on the meta device."""
        return self.encode(w_RK)

    def bits_per_weight(self, rows: int, k: int) -> float:
        """Return the stored bits for each of rows * k values: codes, scales, zeros and outer scale, for a bfloat16
        source.
        """
        e = self.planned(torch.empty(rows, k, dtype=torch.bfloat16, device="meta"))
        return 8 * sum(t.numel() * t.element_size() for t in e.tensors if t is not None) / (rows * k)

    def why_not(self, k: int, dtype: torch.dtype) -> str | None:
        """Return why this format cannot hold rows of k values of `dtype`, and what to do; None when it can."""
        if dtype not in FLOAT_DTYPES:
            return f"{self.name} quantises float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}: cast the layer first"
        if k == 0:
            return f"{self.name} needs values to quantise, got K = 0: leave the layer out"
        if self.block is not None and k % self.block:
            choose = advice("a format whose groups divide K", "a recipe whose groups divide K (`aoquant recipes`)")
            return f"{self.name} needs K to be a multiple of {self.block}, got K = {k}: choose {choose}, or leave the layer out"
        return None

    def spread(self, v_TG: Tensor, rows: int) -> Tensor:
        """Return (rows, G): a tile's value for each of its rows; v_TG as it is where a tile is one row."""
        return v_TG if self.tile_rows == 1 else v_TG.repeat_interleave(self.tile_rows, 0)[:rows]

    def _tiles(self, v_RG: Tensor) -> Tensor:
        """(ceil(R / tile_rows), G): the largest of each tile's rows; NaN where one is NaN."""
        if self.tile_rows == 1:
            return v_RG
        padded = torch.nn.functional.pad(v_RG, (0, 0, 0, -v_RG.shape[0] % self.tile_rows))
        return padded.view(padded.shape[0] // self.tile_rows, self.tile_rows, v_RG.shape[1]).amax(1)

    def _blocks(self, x_RK: Tensor) -> Tensor:
        """(R, G, block) view or copy of x, contiguous as codes have to be; one block of K when the format has none."""
        block = self.block or x_RK.shape[1]
        return x_RK.contiguous().view(x_RK.shape[0], x_RK.shape[1] // block if block else 1, block)


def take_rows(t: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` of t, of any dtype: torch selects rows of few float8 dtypes."""
    storage = t.view(torch.uint8) if t.element_size() == 1 else t
    return storage.index_select(0, ids).view(t.dtype)


def joined(parts: Sequence[Tensor], join: Callable[..., Tensor]) -> Tensor:
    """Return torch.cat or torch.stack of tensors of any dtype; torch joins few float8 ones, and none under autocast."""
    if parts[0].element_size() > 1:
        return join(list(parts))
    return join([t.view(torch.uint8) for t in parts]).view(parts[0].dtype)
