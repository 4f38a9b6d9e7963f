"""The packed tensor of stacked experts: `PackedTensor` with one dimension more.

Codes are (E, N, bytes) and scales (E, N, G) or (E, n, g), one expert's with E in front; the outer scale is
(E, N, 1). The tensor stands for (E, N, K), or for (E, K, N) where a module stores its experts transposed: only
`transposed` tells them apart, the bytes are the same. So transposing it moves no byte, and a plain module of
transformers multiplies by it as it stands:

    grouped_mm   F.grouped_mm(x, w.transpose(-2, -1), offs)   -> the grouped product that prepared experts run
    eager        F.linear(x, w[e]), or x @ w[e]               -> the same product of one expert
    Llama 4      torch.bmm(x, w)                              -> the same, for each expert
    batched_mm   w[ids]                                       -> refused: it would copy packed weights for every token
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from aoquant.experts.grouped_linear import Rows, grouped_at_once, grouped_in_a_loop, why_not_at_once
from aoquant.formats import Encoded
from aoquant.linear.checks import compute_dtype
from aoquant.linear.function import quantized_linear
from aoquant.linear.packed_moves import cut_columns, cut_rows
from aoquant.linear.tensor import PackedTensor, parts_of

aten = torch.ops.aten


class PackedExperts(PackedTensor):
    """Quantised experts (E, N, K), or (E, K, N) when `transposed`; one expert (K, N), selected from those, too.

    Fields are `PackedTensor`'s with E in front; act_pre_scale is None.
    """

    tensor_attribute_names = ["format", "activation", "contract", "k", "dtype", "transposed"]
    transposed: bool

    def __new__(
        cls,
        qdata: Tensor,
        format: str,
        activation: str,
        contract: str,
        k: int,
        dtype: torch.dtype,
        transposed: bool = False,
        **named: Any,
    ) -> "PackedExperts":
        *lead, n, _ = qdata.shape
        shape = (*lead, k, n) if transposed else (*lead, n, k)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device, requires_grad=False)

    def __init__(
        self,
        qdata: Tensor,
        format: str,
        activation: str,
        contract: str,
        k: int,
        dtype: torch.dtype,
        transposed: bool = False,
        *,
        checked: bool = False,
        **tensors: Tensor | None,
    ) -> None:
        parts = [tensors.get(name) for name in PackedTensor.optional_tensor_data_names]
        super().__init__(qdata, format, activation, contract, k, dtype, *parts, checked=checked)
        self.transposed = transposed

    def expert(self, index: int) -> PackedTensor:
        """Return one expert (N, K): views of its codes and scales."""
        return self._like(PackedTensor, _each(self, lambda t: t[index]), None, None)

    @property
    def matrix(self) -> PackedTensor:
        """The (N, K) of one selected expert."""
        return self._like(PackedTensor, parts_of(self), None, None)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values in this tensor's shape, in `dtype`, by default the weights' own."""
        if self.dim() == 2:
            return self.matrix.dequantize(dtype).t()
        values = torch.stack([self.expert(e).dequantize(dtype) for e in range(self.shape[0])])
        return values.transpose(-2, -1) if self.transposed else values

    def _quantization_type(self) -> str:
        return f"{super()._quantization_type()}{', transposed' if self.transposed else ''}"

    def __repr__(self) -> str:
        return f"PackedExperts({self._quantization_type()}, device={self.device})"

    def _stable_hash_for_caching(self) -> str:
        return f"{super()._stable_hash_for_caching()}, {self.transposed}"

    def _with(
        self,
        tensors: list[Tensor | None],
        k: int | None = None,
        dtype: torch.dtype | None = None,
        transposed: bool | None = None,
    ) -> "PackedExperts":
        turned = self.transposed if transposed is None else transposed
        return self._like(PackedExperts, tensors, k, dtype, transposed=turned)


def packed_experts(experts: Sequence[PackedTensor], *, transposed: bool = False) -> PackedExperts:
    """Stack packed weights (N, K) into experts (E, N, K), or (E, K, N) when `transposed`; codes and scales are copied.

    Example::

        stacked = packed_experts([layer.weight.data for layer in linears])

    Raises:
        ValueError: there is none; or one differs from the first in format, shape or dtype, or has a fitted transform:
            the message says which.
    """
    if isinstance(experts, Tensor) or not isinstance(experts, Iterable):
        raise ValueError(f"packed_experts takes a list of PackedTensors (N, K), got {type(experts).__name__}")
    experts = list(experts)
    if not experts:
        raise ValueError("packed_experts needs at least one PackedTensor, got none")
    for index, e in enumerate(experts):
        if type(e) is not PackedTensor:
            raise ValueError(f"expert {index}: packed_experts takes PackedTensors (N, K), got {type(e).__name__}")
        if e.act_pre_scale is not None:
            raise ValueError(
                f"expert {index}: has a fitted transform ({e.format}), and stacked experts cannot hold one"
            )
        if (wanted := experts[0]._quantization_type()) != (got := e._quantization_type()):
            raise ValueError(
                f"expert {index} is ({got}) and expert 0 ({wanted}): stacked experts have one format, shape and dtype"
            )
    parts = Encoded.joined([e.encoded for e in experts], torch.stack).tensors
    return experts[0]._like(PackedExperts, [*parts, None], None, None, transposed=transposed)


def _each(packed: PackedTensor, moved: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    """The parts of a packed tensor, `moved`."""
    return [None if t is None else moved(t) for t in parts_of(packed)]


@PackedTensor.implements([aten.unsqueeze.default])
def _unsqueeze(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedExperts:
    """Return one weight (N, K) as a stack of one expert, views: vLLM's loader gives experts so."""
    packed, dim = args
    if dim != 0 or packed.act_pre_scale is not None:
        raise ValueError(f"{packed!r}: becomes a stack of one expert, unsqueeze(0), where it has no fitted transform")
    return packed._like(PackedExperts, _each(packed, lambda t: t.unsqueeze(0)), None, None)


@PackedExperts.implements([aten.select.int])
def _select(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    packed, dim, index = args
    if packed.dim() != 3 or dim % 3 != 0:
        raise ValueError(f"PackedExperts {tuple(packed.shape)} are selected by expert, w[e], got dimension {dim}")
    if packed.transposed:
        return packed._with(_each(packed, lambda t: t[index]))
    return packed.expert(index)


@PackedExperts.implements([aten.unbind.int])
def _unbind(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(args[0][e] for e in range(args[0].shape[0]))


@PackedExperts.implements([aten.transpose.int])
def _transpose(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    packed, *dims = args
    if {d % packed.dim() for d in dims} != {packed.dim() - 2, packed.dim() - 1}:
        raise ValueError(
            f"PackedExperts {tuple(packed.shape)} are transposed in their last two dimensions, got {tuple(dims)}"
        )
    if packed.dim() == 2:
        return packed.matrix
    turned = packed._with(parts_of(packed), transposed=not packed.transposed)
    return return_and_correct_aliasing(func, args, kwargs, turned)


@PackedExperts.implements([aten.t.default])
def _t(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].transpose(0, 1)


@PackedExperts.implements([aten.slice.Tensor])
def _slice(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedExperts:
    """Experts anywhere; rows and columns where `PackedTensor` can be cut. Views."""
    packed: PackedExperts = args[0]
    given: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    dim, start, end, step = given
    start, end, _ = slice(start, end).indices(packed.shape[dim])
    if step != 1 or packed.dim() != 3:
        raise ValueError(
            f"PackedExperts {tuple(packed.shape)} are sliced in three dimensions with step 1, got step {step}"
        )
    dim = dim % 3
    if dim == 0:
        cut = packed._with(_each(packed, lambda t: t[start:end]))
    else:
        # the axis to cut comes where PackedTensor has it: rows in front, columns second
        along_rows = (dim == 1) != packed.transposed
        a, b = (0, 1) if along_rows else (1, 2)
        flat = packed._like(PackedTensor, _each(packed, lambda t: t.transpose(a, b)), None, None)
        done = (cut_rows if along_rows else cut_columns)(flat, start, end)
        cut = packed._with(_each(done, lambda t: t.transpose(a, b)), k=done.k)
    return return_and_correct_aliasing(func, args, kwargs, cut)


@PackedExperts.implements([aten.index.Tensor])
def _index(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    raise ValueError(
        f"packed experts {tuple(args[0].shape)} are not gathered by token, as experts_implementation='batched_mm' does (generate() switches "
        "to it on a GPU): call model.set_experts_implementation('eager') before generate, or 'grouped_mm' elsewhere"
    )


@PackedExperts.implements([aten.linear.default])
@PackedExperts.implements_torch_function([F.linear])
def _linear(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    raise ValueError("F.linear takes one expert, w[e] of (N, K), not stacked or transposed experts")


@PackedExperts.implements_torch_function([torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm])
def _matmul(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    """x (..., K) times one transposed expert (K, N)."""
    x, w = args
    if not isinstance(w, PackedExperts) or isinstance(x, PackedTensor) or w.dim() != 2:
        raise ValueError("packed experts are multiplied as x @ w[e], one transposed expert on the right")
    return quantized_linear(x, w.matrix.encoded, None, w.recipe)


@PackedExperts.implements_torch_function([torch.bmm, Tensor.bmm])
def _bmm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    """x (E, T, K) times experts (E, K, N)."""
    x, w = args
    if not isinstance(w, PackedExperts) or isinstance(x, PackedTensor) or not w.transposed or w.dim() != 3:
        raise ValueError("packed experts take torch.bmm(x (E, T, K), w (E, K, N)): transpose (E, N, K) experts")
    return torch.stack([quantized_linear(rows, w.expert(e).encoded, None, w.recipe) for e, rows in enumerate(x)])


@PackedExperts.implements_torch_function([torch._grouped_mm, F.grouped_mm])
def _grouped_mm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    """x (S, K), rows sorted by expert, times experts (E, K, N). Rows behind the last offset are zero."""

    def bound(
        a: Tensor, b: Any, *, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
    ) -> tuple[Any, ...]:
        return a, b, offs, bias, out_dtype

    x, w, offs, bias, out_dtype = bound(*args, **(kwargs or {}))
    good = isinstance(w, PackedExperts) and w.transposed and w.dim() == 3 and x.dim() == 2 and offs is not None
    if not good or isinstance(x, PackedTensor) or bias is not None or out_dtype not in (None, x.dtype):
        raise ValueError(
            "packed experts take grouped_mm(x (S, K), w (E, K, N), offs=offsets) without bias, in the input's dtype: transpose "
            "(E, N, K) experts with w.transpose(-2, -1)"
        )
    return grouped(x, w, offs)


def grouped(x_SK: Tensor, w_EKN: PackedExperts, offsets: Tensor) -> Tensor:
    """(S, N). offsets: for each expert, the row after its last."""
    if compute_dtype(x_SK) == torch.bfloat16 == compute_dtype(w_EKN):
        stack = w_EKN.encoded
        if why_not_at_once(w_EKN.recipe, stack) is None:
            return grouped_at_once(x_SK, stack, Rows(offsets.to(torch.int32)), w_EKN.recipe)
    return _in_a_loop(x_SK, w_EKN, offsets)


@torch.compiler.disable
def _in_a_loop(x_SK: Tensor, w_EKN: PackedExperts, offsets: Tensor) -> Tensor:
    return grouped_in_a_loop(x_SK, lambda e: w_EKN.expert(e).encoded, offsets.tolist(), w_EKN.shape[-1], w_EKN.recipe)


# old files name it by the module that it was in
torch.serialization.add_safe_globals([PackedExperts, (PackedExperts, "aoquant.layers.packed_experts.PackedExperts")])
