"""Operations: one schema each, opaque to compilers, with the backend chosen inside.

Everything that rounds runs inside a `torch.library` custom op. `torch.compile` keeps float32 between fused operations where eager
rounds to bf16, which moves scales by an ulp and codes by one; an opaque op runs the same code either way, so eager equals
compiled by construction. It also decides what autograd saves: `dgrad` encodes the weight again inside, so a compiled backward
has nothing to keep but its inputs.

Encoded matrices cross the op boundary as four tensors (codes, scale, zero, outer); a missing one is an empty 1-D tensor. Where an
op encodes, it takes the fields of `formats.Scales` too: static or learned scales, all None for dynamic ones, and the matrices of a
fitted transform. Codes behind a transform are codes of the format behind it, and so is what is done with them.

The dispatcher's Python layers cost as much as the launches themselves, and a training step of a small layer waits for them. So where
nobody watches the dispatcher, a layer calls the ops' bodies (`direct`, `run`), and a missing part is None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from aoquant.formats import NVFP4, Affine, Encoded, Format, Scales, Transformed, get_format, layout
from aoquant.formats.random import DGRAD_GRAD_OUTPUT, WGRAD_GRAD_OUTPUT

from . import backward, codec
from .call import Call
from .codec import CodecRequest, masked
from .contracts import CONTRACTS, input_error, reads
from .define import fake, op
from .gemm import reference
from .gemm.blackwell import BLACKWELL
from .gemm.few_rows import FEW_ROWS
from .gemm.mslk import MSLK
from .gemm.packed_fp4 import PACKED
from .gemm.qutlass import QUTLASS
from .gemm.tensor_cores import TENSOR_CORES
from .gemm.tinygemm import TINYGEMM
from .gemm.torch_kernels import TORCH
from .lookup import embedding, embedding_grad
from .parts import Part, filled, from_parts, to_parts
from .router import Backend, Request, backend, backend_names, code_readers, explain, register

__all__ = [
    "CONTRACTS",
    "CodecRequest",
    "Request",
    "backend",
    "backend_names",
    "bgrad",
    "code_readers",
    "decode",
    "dgrad",
    "direct",
    "embedding",
    "embedding_grad",
    "encode",
    "explain",
    "filled",
    "finds_outer",
    "from_parts",
    "input_error",
    "masked",
    "pull_back",
    "quantize",
    "reads",
    "run",
    "saturated",
    "scale_grad",
    "scaled_mm",
    "scaled_mm_measuring",
    "to_parts",
    "wgrad",
]

_Encode = Callable[[Format, Tensor], Encoded]

register(
    Backend("reference", 0, lambda request: None, reference.scaled_mm),
    TENSOR_CORES,
    PACKED,
    *FEW_ROWS,
    BLACKWELL,
    *QUTLASS,
    *TORCH,
    *TINYGEMM,
    *MSLK,
)


def finds_outer(format: Format) -> bool:
    """Whether encoding starts with a pass that finds one outer scale, and can be spared it (`dgrad`'s `measured`)."""
    return type(format.base) is NVFP4 and format.base.outer == "dynamic"


def direct(*tensors: Tensor | None) -> bool:
    """Whether nobody watches the dispatcher: plain CUDA tensors, no gradients, compiler or mode."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _len_torch_dispatch_stack():
        return False
    return all(t is None or (t.is_cuda and type(t) in _PLAIN) for t in tensors)


def run(direct: bool, op: Any, *args: Any) -> Any:
    """`op(*args)`; or its body, where a missing part of an encoded matrix is None."""
    return op.body(*args) if direct else op(*args)


_PLAIN = (Tensor, torch.nn.Parameter)


_NOTHING = contextlib.nullcontext()


def _as_it_is(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """No autocast in here: codes are not its business, and what a caller cast is not to be cast again."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _NOTHING


def _encoded(
    parts: Sequence[Part], format: str, k: int, *held: Tensor | None, encode: _Encode = codec.encode
) -> Encoded:
    """[X] encoded, under held scales if there are any; or the four parts of an encoded X."""
    if len(parts) == 4:
        return from_parts(parts, k)
    (x,) = parts
    assert x is not None
    with _as_it_is(x.device):
        named, scales = get_format(format), Scales(*held)
        f = named
        if isinstance(named, Transformed) and (scales.transform is not None or not scales.dynamic):
            mix = codec.transform if encode is codec.encode else Transformed.transformed  # fakes have no kernels
            f, x = named.base, mix(named, x, scales.transform)
        if scales.dynamic:
            return encode(f, x)
        # in memory of its own: an op's outputs must not alias its inputs
        return f.encode(x, Scales(*(t if t is None else t.clone() for t in scales[:3])))


def _whole(format: Format, x_RK: Tensor) -> Encoded:
    """For fakes, which have shapes and no values: no tiles, whose number would be a guard on x's rows."""
    return format.encode(x_RK)


def _encode(x: Tensor, format: str, *held: Tensor | None) -> tuple[Part, ...]:
    return _encoded([x], format, x.shape[1], *held)[:4]


@op
def encode(
    x: Tensor,
    format: str,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    outer: Tensor | None = None,
    transform: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise a 2-D tensor: (codes, scale, zero, outer) of `get_format(format)`."""
    return filled(_encode(x, format, scale, zero, outer, transform))


@fake(encode)
def _(
    x: Tensor,
    format: str,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    outer: Tensor | None = None,
    transform: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return to_parts(_encoded([x], format, x.shape[1], scale, zero, outer, transform, encode=_whole))


def _quantize(x: Tensor, format: str, operand: bool) -> tuple[Part, ...]:
    with _as_it_is(x.device):
        e, values, _ = codec.quantize(get_format(format), x, x.dtype, operand=operand, keep=True)
    assert e is not None
    return *e[:4], values


@op
def quantize(x: Tensor, format: str, operand: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`encode`, and in the same pass what the codes stand for, in x's dtype: the GEMM's operand, or decoded values."""
    *parts, values = _quantize(x, format, operand)
    assert values is not None
    # codes in high precision are their own values, and an op's outputs must not alias each other
    return (*filled(parts), values.clone() if values is parts[0] else values)


@fake(quantize)
def _(x: Tensor, format: str, operand: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (*to_parts(_whole(get_format(format), x)), x.new_empty(x.shape))


def _scaled_mm(
    x: Sequence[Part],
    w: Sequence[Part],
    bias: Tensor | None,
    x_format: str,
    w_format: str,
    contract: str,
    lead: Sequence[int],
    k: int,
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`scaled_mm_measuring`; without a W that was encoded in passing, (y, None)."""
    x_hp, w_hp = x[0], w[0]
    assert x_hp is not None and w_hp is not None
    call = Call(
        contract,
        x_hp,
        from_parts(x[:4], k) if x_format else None,
        get_format(x_format or w_format).base,
        w_hp if len(w) == 1 else from_parts(w, k),
        get_format(w_format),
        bias,
        lead,
        k,
        dtype,
        strides,
        x[4] if len(x) > 4 else None,
    )
    if 0 in lead:
        return x_hp.new_empty(*lead, w_hp.shape[0], dtype=dtype), None
    with _as_it_is(x_hp.device):
        y = call.run()
    # no view, for autograd: `relu_` of a Function's view is an error
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y, call.alpha_w_in_passing


@op
def scaled_mm(
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Tensor | None,
    x_format: str,
    w_format: str,
    contract: str,
    lead: Sequence[int],
    k: int,
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """y (*lead, N) in `dtype` under `contract`.

    x: [x (*lead, K)] with x_format "", or what `encode` or `quantize` made of x flattened to (M, K): four parts and perhaps the
    values that the contract reads. w: the four parts of W (N, K), or [W], encoded here.
    strides: of the decoded (*lead, K) input, for "dequantize" with an encoded x that was not contiguous.
    """
    return _scaled_mm(x, w, bias, x_format, w_format, contract, lead, k, dtype, strides)[0]


@fake(scaled_mm)
def _like_y(
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Tensor | None,
    x_format: str,
    w_format: str,
    contract: str,
    lead: Sequence[int],
    k: int,
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> Tensor:
    return x[0].new_empty(*lead, w[0].shape[0], dtype=dtype)


@op
def scaled_mm_measuring(
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Tensor | None,
    x_format: str,
    w_format: str,
    contract: str,
    lead: Sequence[int],
    k: int,
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`scaled_mm` of [W], and W's outer scale (1, 1), which `dgrad` need not find again: for formats that `finds_outer` names."""
    y, measured = _scaled_mm(x, w, bias, x_format, w_format, contract, lead, k, dtype, strides)
    if measured is None:  # nobody had to ask: x has no rows, or the GEMM multiplies codes
        measured = _encoded(w, w_format, k).outer
        assert measured is not None
    return y, measured


@fake(scaled_mm_measuring)
def _(x: Sequence[Tensor], w: Sequence[Tensor], *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return _like_y(x, w, *rest, **named), w[0].new_empty(1, 1, dtype=torch.float32)


@op
def decode(x: Sequence[Tensor], format: str, k: int, dtype: torch.dtype) -> Tensor:
    """(R, K) values in `dtype` of the four parts that `encode` gave."""
    values = codec.decode(get_format(format), from_parts(x, k), dtype)
    return values.clone() if values is x[0] else values  # high precision, in the dtype that it has


@fake(decode)
def _(x: Sequence[Tensor], format: str, k: int, dtype: torch.dtype) -> Tensor:
    return x[0].new_empty(x[0].shape[0], k, dtype=dtype)


@op
def dgrad(
    grad_MN: Tensor,
    w: Sequence[Tensor],
    w_format: str,
    k: int,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    outer: Tensor | None = None,
    transform: Tensor | None = None,
    slots: str = "",
    random: Tensor | None = None,
    measured: Tensor | None = None,
) -> Tensor:
    """dx (M, K) = dy W^ in dy's dtype; w is [W], encoded here, or the four parts of a packed one.

    slots: format that both operands are quantised in, along N, "" for none; random: state of its random numbers, if it draws.
    measured: what forward measured of W.
    """
    format, dtype, held = get_format(w_format), grad_MN.dtype, (scale, zero, outer, transform)
    with _as_it_is(grad_MN.device):
        if len(w) == 1 and scale is zero is outer is transform is None:
            w_NK = codec.quantize(format, w[0], dtype, measured=measured).values
        else:
            w_NK = codec.decode(format, _encoded(w, w_format, k, *held), dtype)
        if not slots:
            return grad_MN @ w_NK
        return backward.product(grad_MN, w_NK.t(), get_format(slots), random, DGRAD_GRAD_OUTPUT)


@fake(dgrad)
def _(
    grad_MN: Tensor,
    w: Sequence[Tensor],
    w_format: str,
    k: int,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    outer: Tensor | None = None,
    transform: Tensor | None = None,
    slots: str = "",
    random: Tensor | None = None,
    measured: Tensor | None = None,
) -> Tensor:
    return grad_MN.new_empty(grad_MN.shape[0], k)


@op
def wgrad(
    grad_MN: Tensor,
    x: Sequence[Tensor],
    x_format: str,
    k: int,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    outer: Tensor | None = None,
    transform: Tensor | None = None,
    slots: str = "",
    random: Tensor | None = None,
) -> Tensor:
    """dW (N, K) = dy^T x^ in dy's dtype; x is the four parts of an encoded one, or [X (M, K)], encoded here, or as it is with x_format "".

    slots, random: as in `dgrad`, along M.
    """
    encoded = _encoded(x, x_format, k, scale, zero, outer, transform) if x_format else None
    with _as_it_is(grad_MN.device):
        x_MK = x[0].to(grad_MN.dtype) if encoded is None else codec.decode(get_format(x_format), encoded, grad_MN.dtype)
        if not slots:
            return grad_MN.t() @ x_MK
        return backward.product(grad_MN.t(), x_MK.t(), get_format(slots), random, WGRAD_GRAD_OUTPUT)


@fake(wgrad)
def _(
    grad_MN: Tensor,
    x: Sequence[Tensor],
    x_format: str,
    k: int,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    outer: Tensor | None = None,
    transform: Tensor | None = None,
    slots: str = "",
    random: Tensor | None = None,
) -> Tensor:
    return grad_MN.new_empty(grad_MN.shape[1], k)


@op
def pull_back(grad_RK: Tensor, format: str, transform: Tensor | None = None, clipped: Tensor | None = None) -> Tensor:
    """The gradient of a transformed format's input from that of its values, in grad's dtype: an op because compilers round elsewhere.

    clipped: what `saturated` gave, of values that get no gradient.
    """
    with _as_it_is(grad_RK.device):
        f = get_format(format)
        if isinstance(f, Transformed):
            return codec.transform(f, grad_RK, transform, back=True, clipped=clipped)
        return grad_RK.clone() if clipped is None else codec.masked(grad_RK, clipped)


@fake(pull_back)
def _(grad_RK: Tensor, format: str, transform: Tensor | None = None, clipped: Tensor | None = None) -> Tensor:
    return torch.empty_like(grad_RK, memory_format=torch.contiguous_format)


@op
def bgrad(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """db (N,) in `dtype`, summed in float32. An op because compiled sums add in another order."""
    return grad_MN.sum(0, dtype=torch.float32).to(dtype)


@fake(bgrad)
def _(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    return grad_MN.new_empty(grad_MN.shape[1], dtype=dtype)


@op
def saturated(
    x: Tensor,
    format: str,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    outer: Tensor | None = None,
    transform: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Bit-packed mask (R, K/8) of the values that the format clips, or of rows `ids`; unpack with `formats.layout.unpack(mask, 1, K)`."""
    f = get_format(format)
    if ids is not None and f.by_rows:
        x, ids = x.index_select(0, ids), None
    with _as_it_is(x.device):
        if scale is None and zero is None and outer is None:
            bits = codec.saturated(f, x, transform)
        else:
            y = codec.transform(f, x, transform) if isinstance(f, Transformed) else x
            clipped = f.base.saturated(y, _encoded([y], f.base.name, x.shape[1], scale, zero, outer))
            bits = layout.pack(clipped.to(torch.uint8), 1)
    return bits if ids is None else bits.index_select(0, ids)


@fake(saturated)
def _(
    x: Tensor,
    format: str,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    outer: Tensor | None = None,
    transform: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    rows = x.shape[0] if ids is None else ids.shape[0]
    return x.new_empty(rows, -(-x.shape[1] // 8), dtype=torch.uint8)


@op
def scale_grad(grad_RK: Tensor, x: Tensor, format: str, count: int, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Gradient of a learned scale, float32 and of its shape, from the gradient of x's quantised values (LSQ).

    count: values that share a scale; the gradient is divided by sqrt(count * largest code), which keeps a scale's relative step
    comparable to a weight's. Source: Esser et al., "Learned Step Size Quantization", ICLR 2020, section 2.2.
    """
    f = get_format(format)
    assert isinstance(f, Affine)
    return f.scale_gradient(x, Scales(scale, zero), grad_RK) / (count * f.limits[1]) ** 0.5


@fake(scale_grad)
def _(grad_RK: Tensor, x: Tensor, format: str, count: int, scale: Tensor, zero: Tensor | None) -> Tensor:
    return torch.empty_like(scale, dtype=torch.float32)


# where a missing part is None
encode.body, quantize.body, scaled_mm_measuring.body = _encode, _quantize, _scaled_mm
