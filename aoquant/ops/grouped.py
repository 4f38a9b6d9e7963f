"""Ops of stacked experts: grouped GEMMs, whose rows of x are sorted by expert.

    y[s] = rn(sum over k of x[s, k] w[e, n, k] * alpha_x[s] * alpha_w[e, n])      e: the expert of row s

That is the contract "aoquant" without a bias. Each row is the product with its own expert, and does not depend on other
rows. `ends` (E,) int32 holds for each expert the row behind its last; it stays on the device, so nothing here waits for
it. Rows behind the last expert's are zero. x may instead have a row for each token; `token` (S,) then says which row of
x each s reads. So a token is encoded once, however many experts it goes to.

On a GPU three kernels run, chosen by shapes alone. Few rows are multiplied by 4-bit codes as they lie in memory, and on
Hopper many rows are too (expert_rows.py). Other rows meet the operand in bf16: all of it at once if the weight is whole
already, else 64 MB at a time, decoded from the codes. One kernel does both (triton/grouped_kernels.py), and its bits
are those of multiplying the codes. The GEMMs of a backward in high precision have no outer scales and round once, so
`F.grouped_mm` computes them. On other devices each expert is an ordinary product.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from aoquant.formats import Encoded, Operand, tiles
from aoquant.formats.base import take_rows

from . import codec, expert_rows, stacks
from .call import Call
from .codec.triton_kernels import imported
from .define import op
from .gemm import few_rows
from .quantized import Ask

KERNELS = "grouped_kernels"
FEW = 32  # rows for each expert, on average, up to which codes are multiplied as they lie
BLOCK = 1 << 26  # bytes of W's values that are there at once
_UNIT = 256  # An expert larger than BLOCK is decoded in parts of a multiple of 256 rows, so no part cuts a tile.


def _empty_product(
    x: Tensor | Encoded, token: Tensor | None, ends: Tensor, w: Tensor | Encoded, transposed: bool, dtype: torch.dtype
) -> Tensor:
    """y (S, N) of `grouped_mm`, without values."""
    rows = x.codes if isinstance(x, Encoded) else x
    s = (rows if token is None else token).shape[0]
    n = w.codes.shape[0] // ends.shape[0] if isinstance(w, Encoded) else w.shape[2 if transposed else 1]
    return rows.new_empty(s, n, dtype=dtype)


@op(lambda a: _empty_product(a.x, a.token, a.ends, a.w, a.transposed, a.dtype))
def grouped_mm(
    x: Tensor | Encoded,
    x_values: Tensor | None,
    token: Tensor | None,
    ends: Tensor,
    w: Tensor | Encoded,
    x_operand: Operand | None,
    w_operand: Operand,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """y (S, N) in `dtype`.

    x: (S, K), or (T, K) with `token`; encoded where it has an operand. x_values: its GEMM's operand, where encoding
    made it in passing. w: (E, N, K), or (E, K, N) when `transposed`, encoded here; or codes (E * N, K).
    """
    rows_of = token if token is not None else x.codes if isinstance(x, Encoded) else x
    if ends.is_cuda and rows_of.shape[0]:
        values, alpha = _operand(x, x_values, token, x_operand, dtype)
        return _multiplied(values, alpha, ends, w, w_operand, transposed)
    y_SN = _empty_product(x, token, ends, w, transposed, dtype).zero_()
    # each expert that has rows is one product, on the fastest backend of its request
    for e, rows in _hit(ends) if len(y_SN) else ():
        part = stacks.expert(w_operand, w, e, len(ends)) if isinstance(w, Encoded) else _matrix(w, e, transposed)
        made = None if x_values is None else cast(Tensor, _rows_of(x_values, token, rows))
        taken, count = _rows_of(x, token, rows), rows.stop - rows.start
        y_SN[rows] = Call("aoquant", taken, x_operand, part, w_operand, None, [count], dtype, None, made).run()
    return y_SN


def _empty_dgrad(grad_SN: Tensor, w: Tensor | Encoded, transposed: bool) -> Tensor:
    return grad_SN.new_empty(grad_SN.shape[0], w.k if isinstance(w, Encoded) else w.shape[1 if transposed else 2])


@op(lambda a: _empty_dgrad(a.grad_SN, a.w, a.transposed))
def grouped_dgrad(grad_SN: Tensor, ends: Tensor, w: Tensor | Encoded, w_operand: Operand, transposed: bool) -> Tensor:
    """dx (S, K) = dy W^ in dy's dtype; w as in `grouped_mm`."""
    if not grad_SN.shape[0]:
        return _empty_dgrad(grad_SN, w, transposed)
    ask = Ask(False, grad_SN.dtype, operand=False)
    values = None
    if isinstance(w, Encoded):
        values = codec.decode(w_operand.format, w, grad_SN.dtype).view(len(ends), -1, w.k)
    if grad_SN.is_cuda:
        values = stacks.values(w_operand, cast(Tensor, w), transposed, ask).matrix if values is None else values
        dx_SK = F.grouped_mm(grad_SN.contiguous(), values, offs=ends)
        imported(KERNELS).zero_behind(dx_SK, ends)
        return dx_SK
    dx_SK = _empty_dgrad(grad_SN, w, transposed).zero_()
    for e, rows in _hit(ends):
        w_NK = _matrix(cast(Tensor, w), e, transposed) if values is None else values[e]
        dx_SK[rows] = grad_SN[rows] @ (codec.quantize(w_operand, w_NK, ask).matrix if values is None else w_NK)
    return dx_SK


@op(lambda a: _wgrad_shape(a.grad_SN, a.ends, a.x, a.transposed))
def grouped_wgrad(
    grad_SN: Tensor,
    ends: Tensor,
    x: Tensor | Encoded,
    token: Tensor | None,
    x_operand: Operand | None,
    transposed: bool,
) -> Tensor:
    """dW (E, N, K), or (E, K, N) when `transposed`, in dy's dtype: dy^T x^ of each expert's rows, zero without any."""
    if not grad_SN.shape[0]:
        return _wgrad_shape(grad_SN, ends, x, transposed).zero_()
    dtype = grad_SN.dtype
    x_TK = codec.decode(x_operand.format, x, dtype) if x_operand is not None and isinstance(x, Encoded) else x
    x_SK = cast(Tensor, x_TK)
    x_SK = (x_SK if token is None else x_SK.index_select(0, token)).to(dtype).contiguous()
    grad_SN = grad_SN.contiguous()
    a, b = (x_SK, grad_SN) if transposed else (grad_SN, x_SK)
    if grad_SN.is_cuda:
        return F.grouped_mm(a.t(), b, offs=ends)
    dw = _wgrad_shape(grad_SN, ends, x, transposed).zero_()
    for e, rows in _hit(ends):
        made = grad_SN[rows].t() @ x_SK[rows]
        dw[e] = made.t() if transposed else made
    return dw


@op(lambda a: a.rows_SK.new_empty(a.place_TJ.shape[0], a.rows_SK.shape[1]))
def gathered_sum(rows_SK: Tensor, place_TJ: Tensor) -> Tensor:
    """(T, K): for each token the sum of its J rows, which `place_TJ` names, rounded once: the gradient of a gather."""
    if rows_SK.is_cuda and rows_SK.numel():
        return imported(KERNELS).gathered_sum(rows_SK.contiguous(), place_TJ.contiguous())
    return rows_SK[place_TJ].sum(1)


def why_not(x: torch.dtype, k: int, n: int, device: torch.device) -> str | None:
    """Return why the kernels for a GPU cannot multiply such a stack there; None when they can."""
    if device.type != "cuda":
        return "its kernels are for CUDA devices"
    if x is not torch.bfloat16:
        return f"multiplies bfloat16, got {x}"
    if k % 16 or n % 16:
        return f"K and N have to be multiples of 16, got {k} and {n}"
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return "needs compute capability 9.0 or 10.0, where F.grouped_mm does not wait for the offsets"
    return codec.lacks_triton(device)


def _operand(
    x: Tensor | Encoded, x_values: Tensor | None, token: Tensor | None, operand: Operand | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The GEMM's (S, K), contiguous, and alpha (S, 1) or None."""
    values, alpha = x_values, None
    if isinstance(x, Encoded):
        assert operand is not None
        alpha = operand.format.alpha(x)
        values = codec.decode(operand.format, x, dtype, operand=True) if values is None else values
    else:
        values = x
    if alpha is not None and alpha.shape[0] != values.shape[0]:
        alpha = alpha.expand(values.shape[0], 1)
    if token is not None:
        values, alpha = values.index_select(0, token), None if alpha is None else alpha.index_select(0, token)
    return values.contiguous(), None if alpha is None else alpha.contiguous()


def _multiplied(
    x_SK: Tensor, alpha_x: Tensor | None, ends: Tensor, w: Tensor | Encoded, operand: Operand, transposed: bool
) -> Tensor:
    """y (S, N), on a GPU. A weight and its codes meet the same kernel."""
    experts, (s, k) = ends.shape[0], x_SK.shape
    format, how = operand.format, few_rows.kind(operand.format)
    if how not in (None, "fp8") and _reads(w, operand, k, x_SK.dtype):
        if s <= FEW * experts:
            e = w if isinstance(w, Encoded) else stacks.encode(operand, w, transposed)
            return expert_rows.multiply(format, e, x_SK, ends, alpha_x)
        if isinstance(w, Encoded) and expert_rows.takes(format, w, x_SK, ends):
            return expert_rows.by_csrc(format, w, x_SK, ends, alpha_x, many=True)
    n = w.codes.shape[0] // experts if isinstance(w, Encoded) else w.shape[2 if transposed else 1]
    y_SN, kernels = x_SK.new_empty(s, n), imported(KERNELS)
    if isinstance(w, Tensor):
        made = stacks.values(operand, w, transposed, Ask(False, x_SK.dtype))
        at, alpha = kernels.slots(ends, s, 0, experts), None if made.alpha is None else made.alpha.contiguous()
        kernels.matmul(x_SK, made.matrix, alpha_x, alpha, at, y_SN)
    else:
        alpha_w = format.alpha(w)
        for block in _blocks(experts, n, k * x_SK.element_size()):
            rows = block.rows(n)
            values = codec.decode(format, tiles.rows_of(format, w, rows), x_SK.dtype, operand=True)
            alpha = None if alpha_w is None else alpha_w[rows].contiguous()
            at = kernels.slots(ends, s, block.first, block.experts)
            values_ENK = values.view(block.experts, -1, k)
            kernels.matmul(x_SK, values_ENK, alpha_x, alpha, at, y_SN[:, block.columns])
            del values, values_ENK
    kernels.zero_behind(y_SN, ends)
    return y_SN


def _reads(w: Tensor | Encoded, operand: Operand, k: int, dtype: torch.dtype) -> bool:
    """Return whether codes are multiplied as they lie: as `few_rows` says, and in one type with int4's scales."""
    block = operand.format.block or 0
    if k % 32 or k % block or block < 16 or block & (block - 1):
        return False
    return operand.scale_dtype(w) in (None, dtype)


class _Block(NamedTuple):
    """A part of a stack that is decoded at once: some experts whole, or some rows of W, columns of y, of one."""

    first: int
    experts: int
    columns: slice

    def rows(self, n: int) -> slice:
        """Its rows of the stack, whose experts have n rows each."""
        last = self.first + self.experts - 1
        return slice(self.first * n + self.columns.start, last * n + self.columns.stop)


def _blocks(experts: int, n: int, row: int) -> Iterator[_Block]:
    """Blocks with at most 64 MB of W's values each; `row` bytes for a row of W."""
    some = BLOCK // (n * row)
    if some:
        for first in range(0, experts, some):
            yield _Block(first, min(some, experts - first), slice(0, n))
        return
    rows = max(1, BLOCK // row // _UNIT) * _UNIT
    for first in range(experts):
        for start in range(0, n, rows):
            yield _Block(first, 1, slice(start, min(start + rows, n)))


def _hit(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and which."""
    for e, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if end > start:
            yield e, slice(start, end)


def _matrix(w: Tensor, e: int, transposed: bool) -> Tensor:
    """Return one expert as (N, K): a transposed one is copied, because encoders read rows."""
    return w[e].t().contiguous() if transposed else w[e]


def _rows_of(x: Tensor | Encoded, token: Tensor | None, rows: slice) -> Tensor | Encoded:
    """The rows of x that are sorted to `rows`."""

    def take(t: Tensor) -> Tensor:
        return t[rows] if token is None else take_rows(t, token[rows])

    if isinstance(x, Tensor):
        return take(x)
    total = x.codes.shape[0]
    return x.map(lambda t: t if t.shape[0] != total else take(t))


def _wgrad_shape(grad_SN: Tensor, ends: Tensor, x: Tensor | Encoded, transposed: bool) -> Tensor:
    n, k = grad_SN.shape[1], x.k if isinstance(x, Encoded) else x.shape[1]
    return grad_SN.new_empty(ends.shape[0], *((k, n) if transposed else (n, k)))
