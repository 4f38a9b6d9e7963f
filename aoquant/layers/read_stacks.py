"""Stacked experts whose class multiplies by them in a forward of its own, without transformers' protocol.

`READINGS` lists those classes by name. Prepared, such a class runs its own forward, and in place of each prepared
parameter it reads a `Stack`. That is no tensor. It has the shape of the parameter and answers the few operations that
these classes use, each with quantised products:

    F.linear(x, w[e])                               JetMoE, LongCat-Flash, Step 3.7
    x @ w[e]                                        Aria
    torch.bmm(x, w)                                 Llama 4
    torch._grouped_mm(x, w.transpose(-2, -1), offs) torchtitan

Any other operation on it is an error, so nothing is multiplied by the float weight by accident. Converted, the same
forward finds `PackedExperts`, which answer the same operations with the same products.

A cast, such as torchtitan's `w.bfloat16()`, says in which dtype the product is computed, and the weight is encoded from
the dtype that it is stored in: convert packed those codes. That is what autocast means to a quantised layer, so the
product runs under autocast of that dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant.formats import Scales
from aoquant.layers.checks import autocasts, check_dtype, compute_dtype
from aoquant.layers.function import quantized_linear
from aoquant.layers.grouped import Rows, grouped_at_once, grouped_linear, why_not_at_once
from aoquant.layers.recipe import LinearRecipe


class Reading(NamedTuple):
    """How a class reads its experts. parameters: the stacked ones; transposed: (E, K, N), not (E, N, K)."""

    parameters: tuple[str, ...]
    transposed: bool


READINGS = {
    "Llama4TextExperts": Reading(("gate_up_proj", "down_proj"), True),
    "AriaGroupedExpertsGemm": Reading(("weight",), True),
    "JetMoeParallelExperts": Reading(("weight",), False),
    "LongcatFlashExperts": Reading(("gate_up_proj", "down_proj"), False),
    "Step3p7Experts": Reading(("gate_up_proj", "down_proj"), False),
    "GroupedExperts": Reading(("w1", "w2", "w3"), False),  # torchtitan's
}


def reading_of(cls: type[nn.Module]) -> Reading | None:
    """How a class, or a class that it derives from, reads its experts."""
    return next((READINGS[c.__name__] for c in cls.__mro__ if c.__name__ in READINGS), None)


def why_not_read(module: nn.Module) -> str | None:
    """Why a class's forward, as it is set on this module, cannot run over packed experts; None when it can."""
    if reading_of(type(module)) is not None and getattr(module, "use_grouped_mm", True) is False:
        return "use_grouped_mm=False multiplies by w[e].transpose(-2, -1), which packed experts do not answer: set use_grouped_mm=True"
    return None


class Product(NamedTuple):
    """What a stack's products need beside rows and weights.

    fqn: the parameter's name, for errors. scales_of: the scales that it holds for an expert; None where they are made
    from the weight.
    """

    fqn: str
    recipe: LinearRecipe
    random: Tensor | None
    rank: int
    scales_of: Callable[[int], Scales | None] | None = None


class Stack:
    """A prepared parameter (E, N, K), or (E, K, N), as its class's forward reads it.

    w: as it is stored; transposed: whether that is (E, K, N); turned: whether this is read with its last two dimensions
    exchanged; dtype: that products are computed in, by default w's.
    """

    def __init__(
        self,
        w: Tensor,
        transposed: bool,
        product: Product,
        turned: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.w, self.transposed, self.product, self.turned = w, transposed, product, turned
        self.dtype = dtype or w.dtype
        self.matrices = w.unbind(0)  # one gradient for the whole stack, zero where an expert had no tokens

    @property
    def shape(self) -> torch.Size:
        e, rows, columns = self.w.shape
        return torch.Size((e, columns, rows) if self.turned else (e, rows, columns))

    @property
    def device(self) -> torch.device:
        return self.w.device

    @property
    def columns_in(self) -> bool:
        """Whether this reads as (E, K, N), to be multiplied from the left."""
        return self.transposed != self.turned

    def __len__(self) -> int:
        return len(self.w)

    def __getitem__(self, expert: int | Tensor) -> Matrix:
        return Matrix(self, int(expert), self.columns_in)

    def transpose(self, a: int, b: int) -> Stack:
        if {a % 3, b % 3} != {1, 2}:
            raise ValueError(f"{self.product.fqn}: prepared experts are transposed in their last two dimensions")
        return Stack(self.w, self.transposed, self.product, not self.turned, self.dtype)

    def to(self, dtype: torch.dtype) -> Stack:
        if dtype not in (self.w.dtype, torch.bfloat16, torch.float16):  # the dtypes of autocast
            raise ValueError(
                f"{self.product.fqn} is {self.w.dtype} and its class casts it to {dtype}: prepared experts are multiplied in their own dtype, "
                "bfloat16 or float16: leave them out by name"
            )
        return Stack(self.w, self.transposed, self.product, self.turned, dtype)

    def bfloat16(self) -> Stack:
        return self.to(torch.bfloat16)

    def times(self, x: Tensor, expert: int) -> Tensor:
        """x (..., K) times one expert, (..., N)."""
        p = self.product
        held = None if p.scales_of is None else p.scales_of(expert)
        try:
            with self._computing(x):
                w = self._matrix(expert)
                return quantized_linear(x, w, None, p.recipe, w_held=held, random=p.random, rank=p.rank)
        except ValueError as error:
            raise ValueError(f"{self.product.fqn}: {error}") from None

    def grouped(self, x_SK: Tensor, offsets: Tensor) -> Tensor:
        """Rows sorted by expert, times their experts; zero behind the last offset, as packed experts do it."""
        try:
            with self._computing(x_SK):
                return self._grouped(x_SK, offsets)
        except ValueError as error:
            raise ValueError(f"{self.product.fqn}: {error}") from None

    def _grouped(self, x_SK: Tensor, offsets: Tensor) -> Tensor:
        recipe, scales_of = self.product.recipe, self.product.scales_of
        if compute_dtype(x_SK) == torch.bfloat16 and why_not_at_once(recipe, self.w, self.transposed) is None:
            return grouped_at_once(x_SK, self.w, Rows(offsets.to(torch.int32)), recipe, self.transposed)
        ends: list[int] = offsets.tolist()
        rest = ends, self.w.shape[2 if self.transposed else 1], recipe, self.product.random, self.product.rank
        x_SK, behind = x_SK[: ends[-1]], len(x_SK) - ends[-1]
        return F.pad(grouped_linear(x_SK, self._matrix, *rest, scales_of=scales_of), (0, 0, 0, behind))

    def _computing(self, x: Tensor) -> AbstractContextManager[object]:
        """Under which a product with x is computed in this dtype, though the weight is stored in another."""
        if self.dtype == self.w.dtype or autocasts(x.device.type):
            return nullcontext()
        check_dtype(x, self.dtype, self.product.recipe.contract)
        return torch.autocast(x.device.type, self.dtype)

    def _matrix(self, expert: int) -> Tensor:
        """One expert as (N, K): a transposed one is copied, because encoders read rows."""
        w = self.matrices[expert]
        return w.t().contiguous() if self.transposed else w

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


class Matrix:
    """One expert of a `Stack`: (N, K), or (K, N) when `columns_in`."""

    def __init__(self, stack: Stack, expert: int, columns_in: bool) -> None:
        self.stack, self.expert, self.columns_in = stack, expert, columns_in

    @property
    def shape(self) -> torch.Size:
        rows, columns = self.stack.shape[1:]
        return torch.Size((rows, columns) if self.columns_in == self.stack.columns_in else (columns, rows))

    def transpose(self, a: int, b: int) -> Matrix:
        return self if a % 2 == b % 2 else Matrix(self.stack, self.expert, not self.columns_in)

    def t(self) -> Matrix:
        return self.transpose(0, 1)

    @property
    def T(self) -> Matrix:
        return self.t()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function of which one argument is a `Stack` or a `Matrix`."""
    answer = _ANSWERS.get(func)
    y = None if answer is None or not isinstance(args[0], Tensor) else answer(*args, **kwargs)
    if y is None:
        read = next(a for a in (*args, *kwargs.values()) if isinstance(a, Stack | Matrix))
        fqn = (read.stack if isinstance(read, Matrix) else read).product.fqn
        name = getattr(func, "__name__", func)
        raise ValueError(
            f"{fqn}: its class reads it by {name}, and prepared experts are multiplied by F.linear, matmul, bmm and grouped_mm alone: "
            "leave them out by name"
        )
    return y


def _linear(x: Tensor, w: Any, bias: Tensor | None = None) -> Tensor | None:
    return w.stack.times(x, w.expert) if isinstance(w, Matrix) and not w.columns_in and bias is None else None


def _matmul(x: Tensor, w: Any) -> Tensor | None:
    return w.stack.times(x, w.expert) if isinstance(w, Matrix) and w.columns_in else None


def _bmm(x_ETK: Tensor, w: Any) -> Tensor | None:
    if not isinstance(w, Stack) or not w.columns_in:
        return None
    return torch.stack([w.times(x, expert) for expert, x in enumerate(x_ETK)])


def _grouped_mm(x: Tensor, w: Any, offs: Tensor | None = None, **rest: Any) -> Tensor | None:
    plain = isinstance(w, Stack) and w.columns_in and offs is not None and not any(v is not None for v in rest.values())
    return w.grouped(x, offs) if plain else None


_ANSWERS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    **dict.fromkeys((torch._grouped_mm, F.grouped_mm), _grouped_mm),
}
