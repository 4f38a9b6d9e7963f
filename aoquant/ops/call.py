"""A GEMM with its data, and what a backend may ask of its two matrices.

A backend that multiplies codes asks for `x` and `w`; one that multiplies bf16 asks for an operand, or for decoded
values. The codec makes a missing form when a backend asks for it, so that a weight which was never encoded becomes
an operand in one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand

from . import codec
from .quantized import Ask
from .router import Backend, Multiply, Request, routed


def gemm_request(
    contract: str, x: Operand | None, w: Operand, weight: Tensor | Encoded, dtype: torch.dtype, m: int
) -> Request:
    """The router's request for the GEMM of a layer, at m rows of an input in `dtype`.

    x, w: how both operands are made. weight: (N, K), or encoded already.
    """
    rows, k = (weight.codes, weight.k) if isinstance(weight, Encoded) else (weight, weight.shape[1])
    x_format = None if x is None else x.format
    scales = w.scale_dtype(weight)
    return Request(contract, x_format, w.format, rows.device, dtype, m, rows.shape[0], k, scales)


@dataclass(eq=False)
class Call:
    """y (*lead, N) in `dtype` = x W^T + bias under `contract`.

    given_x: (*lead, K), or encoded (M, K). given_w: W (N, K), or W encoded. x_operand, w_operand: how they are encoded;
        no x_operand where x stays in high precision.
    strides: of the (*lead, K) input before it was encoded, None when it was contiguous.
    x_values, w_values: the form of x and W that the contract reads (`contracts.reads`), when encoding made it too.
    x_alpha, w_alpha: what `alpha_x` and `alpha_w` are, where encoding made them too.
    decode: from codes to values, with the signature of `codec.decode`; the reference backend brings its own.

    Raises:
        ValueError: the bias has another number of values than N, or more than one dimension.
    """

    contract: str
    given_x: Tensor | Encoded
    x_operand: Operand | None
    given_w: Tensor | Encoded
    w_operand: Operand
    bias: Tensor | None
    lead: Sequence[int]
    dtype: torch.dtype
    strides: Sequence[int] | None = None
    x_values: Tensor | None = None
    w_values: Tensor | None = None
    x_alpha: Tensor | None = None
    w_alpha: Tensor | None = None
    decode: Callable[..., Tensor] = codec.decode

    def __post_init__(self) -> None:
        """Read off what backends ask for: x_format and w_format, of the codes, x_format None where x stays in high
        precision; K; and w_rows, a tensor with W's N rows on its device.
        """
        x, w = self.given_x, self.given_w
        if isinstance(x, Encoded):
            self.__dict__["x"] = x
        if isinstance(w, Encoded):
            self.__dict__["w"], self.w_rows, self.k = w, w.codes, w.k
        else:
            self.w_rows, self.k = w, w.shape[1]
        # Any: a backend knows by its contract whether there are codes, and their class
        self.x_format: Any = None if self.x_operand is None else self.x_operand.format
        self.w_format: Any = self.w_operand.format
        bias, n = self.bias, self.w_rows.shape[0]
        if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
            if bias.dim() > 1 or bias.numel() not in (1, n):
                raise ValueError(
                    f"the layer's bias needs {n} values, one for each output, got shape {tuple(bias.shape)}"
                )
            self.bias = bias.expand(n).contiguous()  # F.linear takes a single one for all

    @property
    def x_hp(self) -> Tensor:
        """Return x (*lead, K) in high precision."""
        assert isinstance(self.given_x, Tensor)
        return self.given_x

    @cached_property
    def x(self) -> Any:
        """Codes and scales of x, or None where it stays in high precision."""
        return None if self.x_operand is None else codec.encode(self.x_operand, self.x_hp.reshape(-1, self.k))

    @cached_property
    def w(self) -> Encoded:
        """Codes and scales of W."""
        assert isinstance(self.given_w, Tensor)
        return codec.encode(self.w_operand, self.given_w)

    @cached_property
    def alpha_x(self) -> Tensor | None:
        """(M, 1) or (1, 1) float32 that multiplies the accumulator, or None for 1."""
        if self.x_alpha is not None:
            return self.x_alpha
        return None if self.x is None else self.x_format.alpha(self.x)

    @cached_property
    def alpha_w(self) -> Tensor | None:
        """(N, 1) or (1, 1) float32 that multiplies the accumulator, or None for 1."""
        return self.w_format.alpha(self.w) if self.w_alpha is None else self.w_alpha

    def x_matrix(self, out: torch.dtype | None = None, *, operand: bool = True) -> Tensor:
        """Return (M, K) that the matrix unit multiplies, made in `dtype`, then cast to `out`; or decoded values."""
        if self.x_operand is None:
            x_MK = self.x_hp.reshape(-1, self.k)
            return x_MK if out is None else x_MK.to(out)
        if self.x_values is not None:
            return self.x_values.to(out or self.dtype)
        # on a CPU nothing is gained by making codes and values at once, and `out` is for its float32 GEMM
        if "x" in self.__dict__ or not self.w_rows.is_cuda:
            return self.decode(self.x_format, self.x, self.dtype, operand=operand, out=out)
        made = codec.quantize(self.x_operand, self.x_hp.reshape(-1, self.k), Ask(False, self.dtype, operand))
        self.__dict__["alpha_x"] = made.alpha
        return made.matrix.to(out or self.dtype)

    def w_matrix(self, out: torch.dtype | None = None, *, operand: bool = True) -> Tensor:
        """Return (N, K) that the matrix unit multiplies, made in `dtype`, then cast to `out`; or decoded values."""
        if self.w_values is not None:
            return self.w_values.to(out or self.dtype)
        if "w" in self.__dict__ or not self.w_rows.is_cuda:
            return self.decode(self.w_format, self.w, self.dtype, operand=operand, out=out)
        made = codec.quantize(self.w_operand, self.w_rows, Ask(False, self.dtype, operand))
        self.__dict__["alpha_w"] = made.alpha
        return made.matrix.to(out or self.dtype)

    def integers(self) -> tuple[Tensor, Tensor]:
        """Return x (M, K) and w (N, K) int8 codes."""
        return self.x_format.integers(self.x), self.w_format.integers(self.w)

    def shaped(self, y_MN: Tensor) -> Tensor:
        """Reshape (M, N) to (*lead, N)."""
        return y_MN if len(self.lead) == 1 else y_MN.reshape(*self.lead, y_MN.shape[-1])

    def plus_bias(self, y_MN: Tensor) -> Tensor:
        """(M, N) product, rounded to its dtype already -> (*lead, N) in `dtype`, the bias added with a rounding of its
        own.
        """
        return self.shaped((y_MN if self.bias is None else (y_MN + self.bias).to(y_MN.dtype)).to(self.dtype))

    def run(self) -> Tensor:
        """Return y (*lead, N), on the fastest backend.

        Raises:
            TypeError, ValueError: the backend's y is no tensor, or has another dtype or shape.
        """
        w, x = self.w_rows, self.given_x
        m = x.codes.shape[0] if isinstance(x, Encoded) else x.numel() // self.k
        sizes = m, w.shape[0], self.k, self.w_operand.scale_dtype(self.given_w)
        found = routed(Request, self.contract, self.x_format, self.w_format, w.device, self.dtype, *sizes)
        try:
            y: Tensor = found.run(self)
        except Exception as error:
            error.add_note(f"in the backend {found.name!r}, M = {m}, N = {w.shape[0]}, K = {self.k}")
            raise
        if not isinstance(y, Tensor):
            raise TypeError(f"the backend {found.name!r} returned {type(y).__name__} in place of y")
        if y.dtype is not self.dtype or y.shape != (*self.lead, w.shape[0]):
            raise ValueError(
                f"the backend {found.name!r} returned y {tuple(y.shape)} of {y.dtype}, and has to return "
                f"{(*self.lead, w.shape[0])} of {self.dtype}"
            )
        return y


def of_product(
    name: str,
    priority: int,
    why_not: Callable[[Request], str | None],
    product: Callable[[Format, Encoded, torch.dtype], Multiply],
    *,
    of_codes: bool = False,
    reads: Callable[[Tensor], bool] = Tensor.is_contiguous,
) -> Backend:
    """Return the backend of a product with a packed W, which decodes it inside.

    product: of W's format, W and the dtype of x. of_codes: of x's codes, else of x's values. reads: whether a kernel
        reads a tensor of W as it lies. It must not be bound to a copy, which would miss later writes in place.
    """

    def run(c: Call) -> Tensor:
        x_MK = c.x.codes if of_codes and c.x_format is not None else c.x_matrix()
        return c.shaped(product(c.w_format, c.w, c.dtype)(x_MK, c.alpha_x, c.bias))

    def bind(r: Request, w: Encoded) -> Multiply | None:
        return product(r.w_format, w, r.dtype) if all(t is None or reads(t) for t in w.tensors[:3]) else None

    return Backend(name, priority, why_not, run, reads_codes=True, bind=bind)
