"""A prepared stack of experts, as a class reads it whose forward multiplies by itself, without transformers' protocol.

Such a class (`families.READINGS`) runs its own forward, and in place of each prepared parameter it reads a `Stack`. It
has the shape of the parameter and answers the few operations that these classes use, with quantised products:

    F.linear(x, w[e])                               JetMoE, LongCat-Flash, Step 3.7
    x @ w[e]                                        Aria
    torch.bmm(x, w)                                 Llama 4
    torch._grouped_mm(x, w.transpose(-2, -1), offs) torchtitan

Any other operation on it is an error, so nothing is multiplied by the float weight by accident. A cast, such as
torchtitan's `w.bfloat16()`, says in which dtype the product is computed; the weight is encoded from the dtype that it
is stored in, as convert does. That is what autocast means to a quantised layer, so the product runs under autocast.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aoquant.distributed.gathered import Experts, GatheredWeight, with_gradient
from aoquant.experts.grouped_linear import Rows, grouped_at_once, grouped_in_a_loop, why_not_at_once
from aoquant.formats import Scales
from aoquant.linear.checks import autocasts, check_dtype, compute_dtype
from aoquant.linear.function import quantized_linear
from aoquant.linear.recipe import LinearRecipe


@dataclass(eq=False)
class Stack:
    """A prepared parameter w (E, N, K), or (E, K, N) when `transposed`, and the products with its experts.

    fqn: the parameter's name, for errors. recipe, random, rank: as `quantized_linear` has them.
    scales_of: the scales that it holds for an expert; None where they are made from the weight.
    turned: whether it is read with its last two dimensions exchanged.
    dtype: that products are computed in, by default w's.
    show: called with each expert and its rows, and returns their products, or None for zeros: for calibration.
    """

    fqn: str
    w: Tensor
    transposed: bool
    recipe: LinearRecipe
    random: Tensor | None = None
    rank: int = 0
    scales_of: Callable[[int], Scales | None] | None = None
    turned: bool = False
    dtype: torch.dtype | None = None
    show: Callable[[int, Tensor], Tensor | None] | None = None

    @property
    def shape(self) -> torch.Size:
        e, rows, columns = self.w.shape
        return torch.Size((e, columns, rows) if self.turned else (e, rows, columns))

    @property
    def device(self) -> torch.device:
        return self.w.device

    @property
    def columns_in(self) -> bool:
        """Return whether this reads as (E, K, N), to be multiplied from the left."""
        return self.transposed != self.turned

    def __len__(self) -> int:
        return len(self.w)

    def __getitem__(self, expert: int | Tensor) -> "Matrix":
        return Matrix(self, int(expert), self.columns_in)

    def transpose(self, a: int, b: int) -> "Stack":
        if {a % 3, b % 3} != {1, 2}:
            raise ValueError(f"{self.fqn}: prepared experts are transposed in their last two dimensions")
        return replace(self, turned=not self.turned)

    def to(self, dtype: torch.dtype) -> "Stack":
        if dtype not in (self.w.dtype, torch.bfloat16, torch.float16):  # the dtypes of autocast
            raise ValueError(
                f"{self.fqn} is {self.w.dtype} and its class casts it to {dtype}: prepared experts are multiplied in their own dtype, "
                "bfloat16 or float16: leave them out by name"
            )
        return replace(self, dtype=dtype)

    def bfloat16(self) -> "Stack":
        return self.to(torch.bfloat16)

    def times(self, x: Tensor, expert: int) -> Tensor:
        """Return x (..., K) times one expert, (..., N)."""
        if self.show is not None:
            return self._shown(x, expert)
        held = None if self.scales_of is None else self.scales_of(expert)
        with self._computing(x):
            w = self._matrix(expert)
            return quantized_linear(x, w, None, self.recipe, w_held=held, random=self.random, rank=self.rank)

    def times_rows(self, x: Tensor, rows: Rows, ends: list[int] | None) -> Tensor:
        """Return rows sorted by expert, times their experts: (S, N), zero behind the last expert's rows.

        ends: `rows.ends`, where the host knows them: then experts are multiplied in a loop.
        """
        if self.show is not None:
            x = x if rows.token is None else x[rows.token]
            stops = rows.ends.tolist()
            parts = [self._shown(x[a:b], expert) for expert, (a, b) in enumerate(pairwise([0, *stops]))]
            return torch.cat([*parts, x.new_zeros(len(x) - stops[-1], self._width)])
        if ends is None:
            return grouped_at_once(x, self.w, rows, self.recipe, self.transposed)
        rest = self._width, self.recipe, self.random, self.rank, self.scales_of
        return grouped_in_a_loop(x, self._matrix, ends, *rest)

    def _shown(self, x: Tensor, expert: int) -> Tensor:
        """Return what `show` makes of an expert's rows."""
        assert self.show is not None
        y = self.show(expert, x)
        return x.new_zeros(*x.shape[:-1], self._width) if y is None else y

    @property
    def _width(self) -> int:
        """N."""
        return self.w.shape[2 if self.transposed else 1]

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return `times_rows`, in the way that x allows."""
        with self._computing(x):
            at_once = (
                compute_dtype(x) == torch.bfloat16 and why_not_at_once(self.recipe, self.w, self.transposed) is None
            )
            return self.times_rows(x, Rows(offsets.to(torch.int32)), None if at_once else offsets.tolist())

    def _computing(self, x: Tensor) -> AbstractContextManager[object]:
        """Under which a product with x is computed in this dtype, though the weight is stored in another."""
        if self.dtype in (None, self.w.dtype) or autocasts(x.device.type):
            return nullcontext()
        assert self.dtype is not None
        check_dtype(x, self.dtype, self.recipe.contract)
        return torch.autocast(x.device.type, self.dtype)

    @cached_property
    def _matrices(self) -> tuple[Tensor, ...]:
        """Return the experts, with one gradient for the whole stack, zero where an expert had no tokens."""
        if not isinstance(self.w, GatheredWeight):
            return self.w.unbind(0)
        if self.w.key != self.recipe.key:
            raise ValueError(f"{self.fqn} is gathered as codes of another recipe: call quantized_all_gather again")
        return Experts.apply(with_gradient(self.w))  # type: ignore[no-untyped-call]

    def _matrix(self, expert: int) -> Tensor:
        """Return one expert as (N, K): a transposed one is copied, because encoders read rows."""
        w = self._matrices[expert]
        return w.t().contiguous() if self.transposed and not isinstance(w, GatheredWeight) else w

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

    def transpose(self, a: int, b: int) -> "Matrix":
        return self if a % 2 == b % 2 else Matrix(self.stack, self.expert, not self.columns_in)

    def t(self) -> "Matrix":
        return self.transpose(0, 1)

    @property
    def T(self) -> "Matrix":
        return self.t()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a torch function of which one argument is a `Stack` or a `Matrix`."""
    read = next(a for a in (*args, *kwargs.values()) if isinstance(a, Stack | Matrix))
    fqn, answer = (read.stack if isinstance(read, Matrix) else read).fqn, _ANSWERS.get(func)
    try:
        y = None if answer is None or not isinstance(args[0], Tensor) else answer(*args, **kwargs)
    except ValueError as error:
        raise ValueError(f"{fqn}: {error}") from None
    if y is None:
        raise ValueError(
            f"{fqn}: its class reads it by {getattr(func, '__name__', func)}, and prepared experts are multiplied by F.linear, matmul, bmm "
            "and grouped_mm alone: leave them out by name"
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
