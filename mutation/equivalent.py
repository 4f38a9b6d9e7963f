"""Mutants that no test can notice, each with the argument why. They count neither as killed nor as survivors.

A mutant is named by its file and its line before and after, as the results state them, so the list outlives changes
elsewhere in a file. An entry whose line is gone is reported: remove it.
"""

from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    file: str
    before: str
    after: str
    why: str


_CARRY = (
    "A sum that carries beyond q s and z is a bit longer than the longer of the two. Without the 1 a sum is taken as exact whose last bit "
    "may then not fit into `wide`. At that distance of the two nothing carries with bf16 scales (|z| <= 2^e - 2^(e - 8), "
    "|q s| < 2^(e - 13)), nor with float32's (2^(e - 24), 2^(e - 26)). With float16's 1288 of 2^20 pairs of mantissas, over all q and signs, "
    "do lose a bit; it lies far from any midpoint, and each of them rounds to the same float16 and bfloat16."
)
_MORE = "More sums are rounded to odd than need be. One that is exact stays what it is, so only time is lost."
_ENGINE = "The autograd engine casts a gradient to the dtype of the input that it belongs to, as this cast does."

EQUIVALENT = [
    Equivalent(
        "formats/elements.py",
        "first, last = torch.maximum(e_s + 3, e_z) + 1, torch.minimum(e_s, e_z) - bits",
        "first, last = torch.maximum(e_s + 3, e_z) + 0, torch.minimum(e_s, e_z) - bits",
        _CARRY,
    ),
    Equivalent(
        "formats/elements.py",
        "first, last = torch.maximum(e_s + 3, e_z) + 1, torch.minimum(e_s, e_z) - bits",
        "first, last = torch.maximum(e_s + 3, e_z) + 2, torch.minimum(e_s, e_z) - bits",
        _MORE,
    ),
    Equivalent(
        "integrations/peft_gradients.py",
        "dx = (grad @ packed_value(w).to(grad.dtype)).to(x_dtype) if needs_x else None",
        "dx = (grad @ packed_value(w).to(grad.dtype)) if needs_x else None",
        _ENGINE,
    ),
    Equivalent(
        "integrations/peft_gradients.py",
        "db = grad.flatten(0, -2).sum(0).to(bias_dtype) if needs_bias else None",
        "db = (grad.flatten(0, -2).sum(0)) if needs_bias else None",
        _ENGINE,
    ),
]
