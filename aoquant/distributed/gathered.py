"""What an all-gather of quantised weights carries, and the weight that comes of it. `aoquant.masters` has the same
weight without a gather. Stacked experts (E, N, K) are one weight, with E in front of every part; a rank has whole ones.

A rank encodes its rows of W (N, K) and sends bytes: the codes and scales that fprop reads, and, where dgrad reads a
column side of its own (W^T along N, from the original), those too. Both always go together, in one buffer of one
length: FSDP2 keeps the buffer of its first call, and a backward that recomputes activations wants both. Ranks with
fewer rows pad with zeros, so the buffers of all are alike, and what they hold lies at known places (`Layout`).

`GatheredWeight` holds the sides. FSDP2 frees and fills their memory around every use, so their tensors stay the same
ones, and are written in place. They are all there is: a weight in high precision is on no rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._guards import TracingContext

from aoquant.formats import Encoded, Operand

PACKED = "its weight is packed by quantized_model_init: call masters.restore() first"
aten = torch.ops.aten
_GRAD: Any = Tensor.grad  # descriptors, which this class overrides
_REQUIRES_GRAD: Any = Tensor.requires_grad


class _Field(NamedTuple):
    """One tensor of an encoded matrix within a rank's buffer.

    begin, end: bytes. shape: of a rank's part, padded; whole: of all. grows: the dimension in which the ranks' parts
    follow each other; None for what all have alike.
    """

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    grows: int | None

    def in_bytes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape of it, as bytes."""
        return (*shape[:-1], shape[-1] * self.dtype.itemsize)


@dataclass(frozen=True)
class Layout:
    """How one encoding of a weight lies in a rank's buffer: of W (N, K), or of W^T (K, N), whose columns the ranks
    share out.

    width: values of a row. fields: for codes, scale, zero and outer scale, None for what the format has not.
    """

    width: int
    fields: tuple[_Field | None, ...]

    @classmethod
    def of(
        cls,
        operand: Operand,
        part: tuple[int, int],
        whole: tuple[int, int],
        grows: int,
        dtype: torch.dtype,
        begin: int,
    ) -> "Layout":
        """Of a matrix of shape `whole` and `dtype`, of which a rank has a `part`, cut along dimension `grows`; from
        byte `begin` of its buffer.
        """
        twice = tuple(2 * s if d == grows else s for d, s in enumerate(part))
        planned = (operand.planned(torch.empty(s, dtype=dtype, device="meta")).tensors for s in (part, whole, twice))
        fields: list[_Field | None] = []
        for p, w, t in zip(*planned, strict=True):
            if p is None or w is None or t is None:
                fields.append(None)
                continue
            begin += -begin % p.element_size()
            end = begin + p.numel() * p.element_size()
            follows = grows if p.shape[grows] != t.shape[grows] else None
            fields.append(_Field(begin, end, p.dtype, tuple(p.shape), tuple(w.shape), follows))
            begin = end
        return cls(whole[1], tuple(fields))

    @classmethod
    def of_stack(cls, one: Encoded, part: int, experts: int, begin: int) -> "Layout":
        """Lay out `experts` matrices that are encoded as `one` is, of which a rank has `part`."""
        fields: list[_Field | None] = []
        for t in one.tensors:
            if t is None:
                fields.append(None)
                continue
            begin += -begin % t.element_size()
            end = begin + part * t.numel() * t.element_size()
            fields.append(_Field(begin, end, t.dtype, (part, *t.shape), (experts, *t.shape), 0))
            begin = end
        return cls(one.k, tuple(fields))

    @property
    def end(self) -> int:
        """Bytes of the buffer up to its last one."""
        return max(f.end for f in self.fields if f is not None)

    def write(self, encoded: Encoded, buffer: Tensor) -> None:
        """Put one rank's encoding into its buffer."""
        for field, t in zip(self.fields, encoded.tensors, strict=True):
            if field is not None and t is not None and t.numel():
                place, raw = buffer[field.begin : field.end], t.contiguous().view(torch.uint8)
                place.view(field.in_bytes(field.shape))[tuple(slice(s) for s in raw.shape)] = raw

    def read(self, buffers_RL: Tensor) -> list[Tensor]:
        """The whole's tensors, those that the format has, from the buffers of all ranks."""
        return [_joined(buffers_RL, field) for field in self.fields if field is not None]

    def encoded(self, tensors: Sequence[Tensor]) -> Encoded:
        """Return what `read` gave, as one."""
        given = iter(tensors)
        return Encoded.of((None if field is None else next(given) for field in self.fields), self.width)


def _joined(buffers_RL: Tensor, field: _Field) -> Tensor:
    parts = buffers_RL[:, field.begin : field.end].unflatten(1, field.in_bytes(field.shape))
    if field.grows is None:
        whole = parts[0]
    else:
        whole = parts.flatten(0, 1) if field.grows == 0 else parts.transpose(0, 1).flatten(1, 2)
    kept = whole[tuple(slice(s) for s in field.in_bytes(field.whole))]
    return kept.clone(memory_format=torch.contiguous_format).view(field.dtype)


class GatheredWeight(Tensor):
    """A weight (N, K), of which this process has the codes and scales alone; or experts (E, N, K), or (E, K, N) when
    `transposed`. Only prepared layers take it.

    key: of the recipe that it was encoded for. rows: of W. columns: of W^T, where dgrad reads it. parts: their tensors,
    of experts with E in front.
    master: the parameter that it was encoded from; its gradient and its `requires_grad` are read and written here too.
    fqn: the layer's name, for errors.
    """

    key: str
    fqn: str = ""
    transposed: bool = False
    master: Tensor | None = None
    rows: Encoded
    columns: Encoded | None
    parts: list[Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, key: str, rows: Encoded, columns: Encoded | None
    ) -> "GatheredWeight":
        made: GatheredWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.codes.device)
        made.key, made.rows, made.columns = key, rows, columns
        made.parts = [t for e in (rows, columns) if e is not None for t in e.tensors if t is not None]
        return made

    def expert(self, index: int) -> "GatheredWeight":
        """Return one expert (N, K): views of its codes and scales."""
        rows, columns = (None if e is None else e.map(lambda t: t[index]) for e in (self.rows, self.columns))
        assert rows is not None
        n, k = self.shape[:0:-1] if self.transposed else self.shape[1:]
        made = GatheredWeight(torch.Size((n, k)), self.dtype, self.key, rows, columns)
        made.fqn = self.fqn
        return made

    def like(self) -> "GatheredWeight":
        """Return another tensor object with these codes, without a master."""
        made = GatheredWeight(self.shape, self.dtype, self.key, self.rows, self.columns)
        made.fqn, made.transposed = self.fqn, self.transposed
        return made

    @property
    def grad(self) -> Tensor | None:
        owner = self if self.master is None or TracingContext.try_get() is not None else self.master
        return _GRAD.__get__(owner)  # a compiler wants one of the weight's dtype

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self if self.master is None else self.master, value)

    @property
    def requires_grad(self) -> bool:
        return bool(_REQUIRES_GRAD.__get__(self if self.master is None else self.master))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        _REQUIRES_GRAD.__set__(self if self.master is None else self.master, value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.requires_grad = requires_grad
        return self

    @torch.no_grad()
    def take_parts(self, parts: Sequence[Tensor]) -> None:
        """Other codes, written into the same memory."""
        for mine, new in zip(self.parts, parts, strict=True):
            mine.copy_(new)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For compilers."""
        names = []
        for i, part in enumerate(self.parts):
            names.append(f"part{i}")
            setattr(self, names[-1], part)
        sides = [None if e is None else ([t is not None for t in e.tensors], e.k) for e in (self.rows, self.columns)]
        return names, (self.key, self.dtype, self.transposed, sides)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "GatheredWeight":
        key, dtype, transposed, sides = context
        parts, made = iter(inner.values()), list[Encoded | None]()
        for side in sides:
            if side is None:
                made.append(None)
                continue
            fields, width = side
            made.append(Encoded.of([next(parts) if there else None for there in fields], width))
        rows, columns = made
        assert rows is not None
        weight = GatheredWeight(size, dtype, key, rows, columns)
        weight.transposed = transposed
        return weight

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        w = args[0]
        same = func in (aten.detach.default, aten.alias.default) or (
            func in (aten.view.default, aten.as_strided.default) and tuple(args[1]) == tuple(w.shape)
        )
        if same:
            return w.like()
        if func is aten.copy_.default and isinstance(args[1], GatheredWeight):
            w.take_parts(args[1].parts)
            return w
        if func is aten.zeros_like.default:
            return torch.zeros(w.shape, dtype=w.dtype, device=w.device)
        raise NotImplementedError(
            f"{getattr(w, 'fqn', '') or 'linear'}: {func} of a weight that is there as codes alone: only its prepared layer takes it. "
            "Leave layers whose weights are read elsewhere, or whose fake quantisation is off, out of quantized_all_gather or "
            "quantized_model_init (filter_fn), or call masters.restore() first"
        )


class WithMaster(torch.autograd.Function):
    """The codes (N, K), as a function of the master that they were made of: the gradient goes to it."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, codes: GatheredWeight) -> Tensor:
        ctx.dtype = master.dtype
        return codes.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def with_gradient(w: Tensor) -> Tensor:
    """Return a weight through which a gradient reaches the master of its codes; a weight without one as it is."""
    if not isinstance(w, GatheredWeight) or w.master is None:
        return w
    return WithMaster.apply(w.master, w)  # type: ignore[no-untyped-call]


class Experts(torch.autograd.Function):
    """The experts (N, K) of a stack of codes. The stack's gradient is zero for an expert that has none."""

    @staticmethod
    def forward(ctx: Any, stack: GatheredWeight) -> tuple[GatheredWeight, ...]:
        ctx.set_materialize_grads(False)
        ctx.transposed = stack.transposed
        return tuple(stack.expert(e) for e in range(len(stack)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor:
        one = next(g for g in grads if g is not None)
        stacked = torch.stack([torch.zeros_like(one) if g is None else g for g in grads])
        return stacked.transpose(1, 2) if ctx.transposed else stacked
