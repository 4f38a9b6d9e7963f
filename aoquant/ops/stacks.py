"""Stacked experts as one matrix of E * N rows: the rows of all experts, one expert under the other.

In most formats a row's codes depend on that row alone, so a stack is encoded in one launch. A format with one scale for
the tensor has one scale for each expert here. NVFP4's kernel takes all experts' outer scales at once; other formats
encode expert by expert. A stack that is stored transposed, (E, K, N), becomes a GEMM's operand in place
(triton/stacked.py), because GEMMs take either order. Encoders read rows. So for codes, and in formats without such a
kernel, the stack is transposed some experts at a time.
"""

from collections.abc import Iterator
from math import gcd

import torch
from torch import Tensor

from aoquant.formats import NVFP4, Encoded, Operand, tiles
from aoquant.formats.blockscaled import PTS_FLOOR
from aoquant.formats.scales import divide

from . import codec
from .codec.triton_kernels import takes_stacks
from .quantized import CODES, Ask, Side
from .router import CodecRequest, routed

TURNED = 1 << 25  # bytes of a transposed stack that are turned at a time: what an L2 cache holds
_LONGEST = 256  # values of a block that is encoded where it lies
_PARTS = 256  # of an expert, at most, whose largest magnitudes are found side by side


def why_not(operand: Operand, n: int) -> str | None:
    """Return why experts of n rows in this format are no stack; None when they are."""
    format = operand.format
    if operand.draws or operand.fitted:
        return f"stacks no {operand.name}, which draws or is fitted"
    if operand.by_rows:
        return None
    if format.block is None or format.reach == "row" or n % format.tile_rows:
        return f"stacks formats with scales for rows or blocks, and whole tiles of rows, not {n} rows of {format.name}"
    return None


def encode(operand: Operand, w: Tensor, transposed: bool) -> Encoded:
    """Codes of a stack (E, N, K), or (E, K, N) when `transposed`; outer is (E * N, 1), or None."""
    return _join([_made(operand, part, CODES).codes for part in _parts(w, transposed)])


def values(operand: Operand, w: Tensor, transposed: bool, ask: Ask) -> Side:
    """Return what a GEMM reads of a stack (E, N, K), or (E, K, N) when `transposed`, without codes: values (E, N, K),
    in the order of the stack's memory or row by row, and alpha (E * N, 1), or None for 1.
    """
    if transposed and _where_it_lies(operand, w):
        from .triton import stacked

        outer = _outer(w) if operand.per_tensor else None
        assert ask.values is not None
        made_EKN, alpha = stacked.values(operand.format, w, outer, ask.values, ask.operand)
        return Side(None, made_EKN.transpose(1, 2), alpha)
    parts = list(_parts(w, transposed))
    experts, n, k = len(w), parts[0].shape[1], parts[0].shape[2]
    if len(parts) == 1:
        made = _made(operand, parts[0], ask)
        return Side(None, made.matrix.view(experts, n, k), made.alpha)
    whole, alphas, start = w.new_empty(experts * n, k, dtype=ask.values), list[Tensor](), 0
    for part in parts:  # `parts` are views; what is made of one is gone before the next
        made = _made(operand, part, ask)
        whole[start : start + len(made.matrix)] = made.matrix
        start += len(made.matrix)
        alphas += [] if made.alpha is None else [made.alpha]
    return Side(None, whole.view(experts, n, k), torch.cat(alphas) if alphas else None)


def why_turned(operand: Operand, k: int) -> str | None:
    """Return why values of a transposed stack are made of a turned copy; None when the stack is encoded where
    it lies.
    """
    format = operand.format
    if operand.transform is not None:
        return f"transforms rows: {operand.name}"
    if not takes_stacks(format):
        return f"has no kernel for {format.name}"
    block = format.block
    if block and (block & (block - 1) or not 16 <= block <= _LONGEST or k % block):
        return f"takes blocks of a power of two from 16 to {_LONGEST} that divide K = {k}, not {format.name}"
    return None


def _where_it_lies(operand: Operand, w_EKN: Tensor) -> bool:
    experts, k, n = w_EKN.shape
    if why_turned(operand, k) is not None or not w_EKN.is_contiguous():
        return False
    return _kernels_run(operand, w_EKN.device, w_EKN.dtype, experts * n, k)


def _kernels_run(operand: Operand, device: torch.device, dtype: torch.dtype, rows: int, k: int) -> bool:
    """Return whether kernels make the values of such a matrix: one for the whole stack then has the same bits."""
    found = routed(CodecRequest, "quantize", operand, device, dtype, rows, k, False, True)
    return found.name != "reference" and codec.has_triton(device)


def _parts(w: Tensor, transposed: bool) -> Iterator[Tensor]:
    """(experts, N, K): the stack, or a view of some experts of a transposed one."""
    if not transposed:
        yield w
        return
    some = max(1, TURNED // (w[0].numel() * w.element_size()))
    yield from w.transpose(1, 2).split(some)


def _made(operand: Operand, w_ENK: Tensor, ask: Ask) -> Side:
    """Of a stack: rows are those of all experts, alpha is (E * N, 1)."""
    experts, n, k = w_ENK.shape
    w_RK = w_ENK.reshape(experts * n, k)  # a copy of what is transposed
    if not operand.per_tensor:
        return codec.quantize(operand, w_RK, ask)
    if _takes_outer(operand, w_RK):
        found = codec.triton.in_one_pass(operand, w_RK, ask._replace(measured=_outer(w_RK, experts)))
        assert found.alpha is not None
        alpha, e = found.alpha.expand(experts, n).reshape(-1, 1), found.encoded
        return Side(None if e is None else e._replace(outer=alpha), found.values, alpha)
    sides = [_one(operand, w_NK, ask) for w_NK in w_RK.view(experts, n, k)]
    codes = [s.encoded for s in sides if s.encoded is not None]
    values = [s.values for s in sides if s.values is not None]
    alphas = [s.alpha for s in sides if s.alpha is not None]
    joined = (torch.cat(parts) if parts else None for parts in (values, alphas))
    return Side(_join(codes) if codes else None, *joined)


def _one(operand: Operand, w_NK: Tensor, ask: Ask) -> Side:
    """Of one expert, whose outer scale is made one of each row."""
    made, n = codec.quantize(operand, w_NK, ask), len(w_NK)
    e = made.encoded
    if e is not None and e.outer is not None:
        e = e._replace(outer=e.outer.expand(n, 1))
    return Side(e, made.values, None if made.alpha is None else made.alpha.expand(n, 1))


def _takes_outer(operand: Operand, w_RK: Tensor) -> bool:
    """Return whether a kernel takes an outer scale for each expert; csrc's, the faster for one matrix, does not."""
    if operand.transform is not None or not takes_stacks(operand.format):
        return False
    return _kernels_run(operand, w_RK.device, w_RK.dtype, *w_RK.shape)


def _outer(w: Tensor, experts: int | None = None) -> Tensor:
    """(E, 1) NVFP4's outer scales of E experts that lie behind each other, in one pass over all of them."""
    from .triton.amax_kernels import row_absmax

    experts = experts or len(w)
    parts = gcd(w.numel() // experts, _PARTS)
    bits = row_absmax(w.contiguous().view(experts * parts, -1)).view(experts, parts).amax(1, keepdim=True)
    return divide(bits.view(torch.float32), NVFP4.top).clamp(min=PTS_FLOOR)


def _join(parts: list[Encoded]) -> Encoded:
    """Codes of parts, under each other."""
    return parts[0] if len(parts) == 1 else Encoded.joined(parts, torch.cat)


def expert(operand: Operand, e: Encoded, index: int, experts: int) -> Encoded:
    """Return one expert's codes (N, K), views."""
    n = e.codes.shape[0] // experts
    return tiles.rows_of(operand.format, e, slice(index * n, (index + 1) * n))
