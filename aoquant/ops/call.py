"""A GEMM with its data, and what a backend may ask of its two matrices.

A backend that multiplies codes asks for `x` and `w`; one that multiplies bf16 asks for an operand, or for decoded values. What is
not there yet is made by the codec when somebody asks, so that a weight which was never encoded becomes an operand in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import Affine, Encoded, Format, Int4

from . import codec
from .router import Request, routed


@dataclass(eq=False)
class Call:
    """A GEMM with its data: x_hp (*lead, K) when activations stay in high precision, else x with x_format.

    x_values, w_values: what the contract reads of x and W (see `contracts.reads`), when encoding made it in passing.
    x_format: of x's codes. w_parts: the encoded W, or W itself (N, K). encoder: what encodes it, perhaps behind
    a transform. strides: of the (*lead, K) input before it was encoded, None when it was contiguous.
    """

    contract: str
    x_hp: Tensor
    x: Encoded | None
    x_format: Format
    w_parts: Encoded | Tensor
    encoder: Format
    bias: Tensor | None
    lead: Sequence[int]
    k: int
    dtype: torch.dtype
    strides: Sequence[int] | None = None
    x_values: Tensor | None = None
    w_values: Tensor | None = None

    @property
    def w_format(self) -> Format:
        """Of W's codes."""
        return self.encoder.base

    @cached_property
    def w(self) -> Encoded:
        """Codes and scales of W."""
        return codec.encode(self.encoder, self.w_parts) if isinstance(self.w_parts, Tensor) else self.w_parts

    @property
    def alpha_x(self) -> Tensor | None:
        return None if self.x is None else self.x_format.alpha(self.x)

    @cached_property
    def alpha_w(self) -> Tensor | None:
        return self.w_format.alpha(self.w)

    @property
    def alpha_w_in_passing(self) -> Tensor | None:
        """alpha_w, if somebody asked for it and W had to be encoded for that."""
        return self.__dict__.get("alpha_w") if isinstance(self.w_parts, Tensor) else None

    def x_operand(self, out: torch.dtype | None = None) -> Tensor:
        """(M, K) in `dtype`: what the matrix unit multiplies; then cast to `out`."""
        if self.x is None:
            return self.x_hp.reshape(-1, self.k).to(out or self.x_hp.dtype)
        return self._x_values(operand=True, out=out)

    def x_decoded(self) -> Tensor:
        """x's values in `dtype`: (*lead, K) as it came, or (M, K) if it was encoded."""
        return self.x_hp if self.x is None else self._x_values(operand=False)

    def w_operand(self, out: torch.dtype | None = None) -> Tensor:
        """(N, K) in `dtype`, then cast to `out`."""
        return self._w_values(operand=True, out=out)

    def w_decoded(self) -> Tensor:
        """(N, K) in `dtype`."""
        return self._w_values(operand=False)

    def integers(self) -> tuple[Tensor, Tensor]:
        """x (M, K) and w (N, K) int8 codes."""
        assert self.x is not None and isinstance(self.x_format, Affine) and isinstance(self.w_format, Affine)
        return self.x_format.integers(self.x), self.w_format.integers(self.w)

    def shaped(self, y_MN: Tensor) -> Tensor:
        """(M, N) -> (*lead, N)."""
        return y_MN if len(self.lead) == 1 else y_MN.reshape(*self.lead, y_MN.shape[-1])

    def plus_bias(self, y_MN: Tensor) -> Tensor:
        """(M, N) product, rounded to its dtype already -> (*lead, N) in `dtype`, the bias added with a rounding of its own."""
        return self.shaped((y_MN if self.bias is None else (y_MN + self.bias).to(y_MN.dtype)).to(self.dtype))

    def run(self) -> Tensor:
        """y (*lead, N), on the fastest backend."""
        y: Tensor = routed(Request, *self.asks()).run(self)
        return y

    def asks(self) -> tuple[Any, ...]:
        """The fields of the `Request`."""
        x_format = None if self.x is None else self.x_format
        w = self.w_parts if isinstance(self.w_parts, Tensor) else self.w_parts.codes
        rows = self.x_hp.numel() // self.k if self.x is None else self.x.codes.shape[0]
        scale_dtype = None
        if type(self.w_format) is Int4 and self.w_format.scales == "input":
            if isinstance(self.w_parts, Encoded):
                assert self.w_parts.scale is not None
                scale_dtype = self.w_parts.scale.dtype
            else:  # what a transform makes is float32
                scale_dtype = w.dtype if self.encoder is self.w_format else torch.float32
        return self.contract, x_format, self.w_format, w.device, self.dtype, rows, w.shape[0], self.k, scale_dtype

    def _x_values(self, *, operand: bool, out: torch.dtype | None = None) -> Tensor:
        assert self.x is not None
        if self.x_values is not None:
            return self.x_values.to(out or self.dtype)
        return codec.decode(self.x_format, self.x, self.dtype, operand=operand, out=out)

    def _w_values(self, *, operand: bool, out: torch.dtype | None = None) -> Tensor:
        if self.w_values is not None:
            return self.w_values.to(out or self.dtype)
        # on a CPU nothing is gained by making codes and values at once, and `out` is for its float32 GEMM
        if "w" in self.__dict__ or isinstance(self.w_parts, Encoded) or not self.w_parts.is_cuda:
            return codec.decode(self.w_format, self.w, self.dtype, operand=operand, out=out)
        quantized = codec.quantize(self.encoder, self.w_parts, self.dtype, operand=operand)
        self.__dict__["alpha_w"] = quantized.alpha
        return quantized.values.to(out or self.dtype)
