"""The GEMMs of a backward whose operands are quantised, each along the axis that its GEMM contracts.

dgrad contracts N and wgrad contracts the rows of the batch, so an operand of backward is another encoding than
forward's, of another axis. Backward encodes the value that forward multiplied (the decoded weight, the decoded
input), so that backward differentiates the function that forward computed; Quartet and Quartet II do the same, and
nothing but forward's codes has to be kept. Both operands are padded with zeros, which are inert, to what their formats
take together. The product itself is the forward's: the contract "aoquant" on whatever backend runs it.
"""

from __future__ import annotations

from math import lcm

from torch import Tensor
from torch.nn.functional import pad

from aoquant.formats import Operand, Random

from . import codec
from .call import Call
from .router import Quantized


def product(a_RC: Tensor, b_SC: Tensor, a_as: Operand, b_as: Operand, state: Tensor | None, side: int) -> Tensor:
    """(R, S) = a b^T in a's dtype, both operands quantised along C, R and S rows of any number.

    state: of the random numbers, where an operand draws; side: of a, b's is the next.
    """
    rows, columns = a_RC.shape[0], b_SC.shape[0]
    if not a_RC.numel() or not b_SC.numel():
        return a_RC.new_zeros(rows, columns)
    multiple = lcm(a_as.period, b_as.period)
    a = _quantized(a_RC, a_as, multiple, state, side)
    b = _quantized(b_SC, b_as, multiple, state, side + 1)
    assert a.encoded is not None and b.encoded is not None
    call = Call("aoquant", a.encoded, a_as, b.encoded, b_as, None, [rows], a_RC.dtype, None, a.values, b.values)
    return call.run()


def _quantized(x_RC: Tensor, operand: Operand, multiple: int, state: Tensor | None, side: int) -> Quantized:
    """Codes of x_RC, padded along C, and the GEMM's operand."""
    if missing := -x_RC.shape[1] % multiple:
        x_RC = pad(x_RC, (0, missing))
    random = None
    if operand.draws:
        assert state is not None
        random = Random(state, side)
    return codec.quantize(operand, x_RC, x_RC.dtype, operand=True, keep=True, random=random)
