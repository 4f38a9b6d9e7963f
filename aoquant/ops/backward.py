"""The GEMMs of a backward whose operands are quantised, each along the axis that its GEMM contracts.

dgrad contracts N and wgrad contracts the rows of the batch, so an operand of backward is another encoding than forward's, of another
axis. What is encoded is the value that forward multiplied (the decoded weight, the decoded input), so that backward differentiates the
function that forward computed; Quartet and Quartet II do the same, and nothing but forward's codes has to be kept. Both operands are
padded with zeros, which are inert, to what their formats take together. The product itself is the forward's: the contract "aoquant"
on whatever backend serves it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from aoquant.formats import Encoded, Format, Random, Randomized

from . import codec
from .call import Call


def product(a_RC: Tensor, b_SC: Tensor, format: Format, state: Tensor | None, side: int) -> Tensor:
    """(R, S) = a b^T in a's dtype, both operands quantised along C, R and S rows of any number.

    state: of the random numbers, where the format draws; side: of a, b's is the next.
    """
    rows, columns = a_RC.shape[0], b_SC.shape[0]
    if not a_RC.numel() or not b_SC.numel():
        return a_RC.new_zeros(rows, columns)
    a, a_values = _encoded(a_RC, format, state, side)
    b, b_values = _encoded(b_SC, format, state, side + 1)
    lead, dtype = [rows], a_RC.dtype
    return Call("aoquant", a.codes, a, format, b, format, None, lead, a.k, dtype, None, a_values, b_values).run()


def _encoded(x_RC: Tensor, format: Format, state: Tensor | None, side: int) -> tuple[Encoded, Tensor]:
    """x_RC padded and quantised, and the GEMM's operand."""
    if missing := -x_RC.shape[1] % format.period:
        x_RC = pad(x_RC, (0, missing))
    random = None
    if isinstance(format, Randomized):
        assert state is not None
        random = Random(state, side)
    quantized = codec.quantize(format, x_RC, x_RC.dtype, operand=True, keep=True, random=random)
    assert quantized.encoded is not None
    return quantized.encoded, quantized.values
