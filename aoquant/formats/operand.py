"""An operand of a GEMM: a format, the transform in front of it, and where its scales come from.

    name              format    transform     what is encoded
    nvfp4             nvfp4     none          x
    hadamard16+nvfp4  nvfp4     Hadamard(16)  x T^T, an activation; of a weight W T^-1 ("hadamard32-inverse+...")
    rht32+mxfp4-sr    mxfp4-sr  Rotation(32)  x rotated by signs that are drawn for each GEMM of backward

A transform is no format. It maps values to values before they are rounded; codes, scales and what a GEMM decodes of
them are the format's, in the transformed domain. So an operand answers for its format wherever the transform changes
nothing (`bits`, `reach`, `decode`, ...), and has methods of its own where it does.

`encode` quantises the float32 result of the transform, never rounded to x's dtype in between, and finds scales on that
result. Formats that store scales in their input's dtype store float32 then. Values in high precision are the exception,
they ARE the layer's dtype: "hadamard16+high-precision" is the activation of a weight-only layer, rounded once. The way
back is `pull_back`, for gradients of this side; and for the other side's values, because W = (W T^-1) T.

The name crosses the boundaries of ops and stands in checkpoints; `get_operand` takes it back.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from aoquant._messages import advice
from aoquant.transforms import Transform

from .base import Encoded, Format, Scales
from .high import HighPrecision
from .random import Random
from .stochastic import Randomized

SCALES = ("dynamic", "static", "learned")
DELAYED = "delayed"  # of earlier steps: see delayed.py


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is made.

    format: of codes and scales. transform: applied before them, or None. inverse: the weight's side of it; always False
    where both sides are alike. scales: "dynamic" (found on what is encoded), "static", "learned" or "delayed" (held by
    the layer). How it rounds, to nearest or at random, is the format's.
    """

    format: Format
    transform: Transform | None = None
    inverse: bool = False
    scales: str = "dynamic"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inverse", bool(self.inverse and self.transform and self.transform.sided))

    def __hash__(self) -> int:
        return hash(self.name)  # computed once; the fields' own would be hashed again at every look-up

    if TYPE_CHECKING:  # the package itself reads what is not listed here off `format`, which mypy checks
        bits: ClassVar[int]
        tile_rows: ClassVar[int]
        reach: ClassVar[str]
        per_tensor: ClassVar[bool]
        from_extremes: ClassVar[bool]
        finite_only: ClassVar[bool]
        learnable: ClassVar[bool]
        clips_when_held: ClassVar[bool]
    else:

        def __getattr__(self, name: str) -> Any:
            """Ask the format for attributes that a transform does not change."""
            if name.startswith("__") or name == "format":  # while unpickling there is no format yet
                raise AttributeError(name)
            return getattr(self.format, name)

    @cached_property
    def name(self) -> str:
        """The name that `get_operand` takes back; it does not tell where scales come from."""
        if self.transform is None:
            return self.format.name
        return f"{self.transform.name}{'-inverse' if self.inverse else ''}+{self.format.name}"

    @cached_property
    def narrow(self) -> "Operand":
        """The operand that decodes these codes, however they are made: a packed tensor stores its name."""
        format = self.format.narrow
        return self if format is self.format else replace(self, format=format)

    @property
    def standard(self) -> str:
        """The published layout of what is stored, which has no transform."""
        return "" if self.transform else self.format.standard

    @property
    def fitted(self) -> bool:
        """Return whether encoding needs the matrices of a fitted transform, which `Scales` holds."""
        return self.transform is not None and self.transform.fitted

    @property
    def draws(self) -> bool:
        """Return whether encoding draws random numbers."""
        return self.format.draws or (self.transform is not None and self.transform.drawn)

    @property
    def portable(self) -> bool:
        """Return whether every device makes the same codes."""
        return self.format.portable and not self.fitted

    @property
    def by_rows(self) -> bool:
        """Return whether a row's codes and scales are made of that row alone."""
        return not self.draws and self.format.by_rows

    @property
    def batch_invariant(self) -> bool:
        """Return whether a row's codes and scales are the same alone and in any batch: see `Format.batch_invariant`."""
        return not self.draws and self.format.batch_invariant

    @property
    def block(self) -> int | None:
        """Values along K that cannot be encoded apart: of a scale's block or of a transform's, whichever is longer."""
        if self.transform is None or self.transform.drawn:
            return self.format.block
        return max(self.format.block or 1, self.transform.size)

    @property
    def period(self) -> int:
        """Return after how many values along K codes, scales and the transform start anew: a matrix may be cut."""
        return self.format.period if self.transform is None else lcm(self.format.period, self.transform.size)

    def transformed(self, x_RK: Tensor, matrix: Tensor | None = None) -> Tensor:
        """The values that are quantised when x_RK is encoded. matrix: of a fitted transform."""
        if self.transform is None:
            return x_RK
        y_RK = self.transform.apply(x_RK, self.inverse, matrix)
        return y_RK.to(x_RK.dtype) if isinstance(self.format, HighPrecision) else y_RK

    def pull_back(self, grad_RK: Tensor, matrix: Tensor | None = None) -> Tensor:
        """The gradient of x_RK, from the gradient of what is quantised."""
        if self.transform is None:
            return grad_RK
        return self.transform.pull_back(grad_RK, self.inverse, matrix).to(grad_RK.dtype)

    def rotated(self, x_RK: Tensor, random: Random | None) -> Tensor:
        """`transformed` for an operand of backward, whose transform may be drawn."""
        drawn = self.transform is not None and self.transform.drawn and random is not None
        return self.transformed(x_RK, random.signs(self.transform.size) if drawn else None)  # type: ignore[union-attr]

    def scale_dtype(self, weight: Tensor | Encoded) -> torch.dtype | None:
        """dtype of a weight's scales, where it follows the dtype of the weight (int4); None for other formats.

        weight: as it is stored, or what this will encode; behind a transform that is float32.
        """
        if isinstance(weight, Encoded):
            return None if weight.scale is None else self.format.scale_dtype(weight.scale.dtype)
        return self.format.scale_dtype(weight.dtype if self.transform is None else torch.float32)

    def shares_codes(self, other: "Operand") -> bool:
        """Return whether the codes of x^T, as `other`, are the codes of x, transposed."""
        return self.name == other.name and self.transform is None and self.format.square and not self.draws

    def encode(self, x_RK: Tensor, held: Scales | None = None, random: Random | None = None) -> Encoded:
        """`Format.encode` of the transformed x_RK. random: where the numbers come from, for an operand that draws.

        Raises:
            ValueError: the operand draws, and random is None.
        """
        if self.draws:
            if random is None:
                raise ValueError(
                    f"{self.name} rounds at random: it is for the gradients of a training step, which brings its numbers"
                )
            x_RK = self.rotated(x_RK, random)
            if isinstance(self.format, Randomized):
                return self.format.encode(x_RK, held, random)
            return self.format.encode(x_RK, held)
        if self.transform is None:
            return self.format.encode(x_RK, held)
        y_RK = self.transformed(x_RK, None if held is None else held.transform)
        return self.format.encode(y_RK, None if held is None or held.dynamic else held._replace(transform=None))

    def measure(self, x_RK: Tensor) -> Scales:
        """The scales that the transformed x_RK asks for."""
        return self.format.measure(self.transformed(x_RK))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        """Codes of the transformed x_RK under scales that were measured on it."""
        return self.format.quantize(self.transformed(x_RK, s.transform), s)

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        """Codes of the transformed x_RK under scales from elsewhere."""
        return self.format.hold(self.transformed(x_RK, s.transform), s)

    def fix(self, *numbers: float) -> "Operand":
        """This operand with constant scales, which become part of its name."""
        return replace(self, format=self.format.fix(*numbers), scales="dynamic")

    def decode(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        """(R, K) in `dtype`, in the transformed domain."""
        return self.format.decode(e, dtype)

    def floored(self, e: Encoded) -> Tensor:
        """As `Format.floored`."""
        return self.format.floored(e)

    def fake_quantize(self, x_RK: Tensor) -> Tensor:
        """Return the value that x_RK has after a round trip, in x_RK's dtype."""
        if self.transform is None:
            return self.format.fake_quantize(x_RK)
        values = self.format.decode(self.encode(x_RK), torch.float32)
        return self.transform.pull_back(values, self.transform.sided and not self.inverse, None).to(x_RK.dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        """(R, K) bool: transformed values that the format's largest code had to clip."""
        return self.format.saturated(self.transformed(x_RK), e)

    def planned(self, w_RK: Tensor) -> Encoded:
        """Return the shapes and dtypes of encode(w_RK), for a weight on the meta device."""
        if self.transform is None:
            return self.format.planned(w_RK)
        return self.format.encode(w_RK if isinstance(self.format, HighPrecision) else w_RK.float())

    def matrix_bytes(self, k: int) -> int:
        """Bytes of a fitted transform's matrices for rows of k values, stored in bf16."""
        return 2 * self.transform.size * k if self.transform is not None and self.fitted else 0

    def bits_per_weight(self, rows: int, k: int) -> float:
        """Return the stored bits for each of rows * k values: codes, scales, zeros, outer scale and matrices, for a
        bfloat16 source.
        """
        e = self.planned(torch.empty(rows, k, dtype=torch.bfloat16, device="meta"))
        stored = sum(t.numel() * t.element_size() for t in e.tensors if t is not None)
        return 8 * (stored + self.matrix_bytes(k)) / (rows * k)

    def why_not(self, k: int, dtype: torch.dtype) -> str | None:
        """Return why this operand cannot hold rows of k values of `dtype`, and what to do; None when it can."""
        if self.transform is not None:
            group, size = self.format.block or 1, self.transform.size
            if max(group, size) % min(group, size):
                return f"{self.name}: blocks of {group} and a transform of {size} do not fit: one must divide the other"
            if k % size:
                choose = advice(
                    "a transform whose size divides K", "a recipe whose transform divides K (`aoquant recipes`)"
                )
                return f"{self.transform.name} needs K to be a multiple of {size}, got K = {k}: choose {choose}, or leave the layer out"
        return self.format.why_not(k, dtype)


def as_operand(x: Format | Operand) -> Operand:
    """x itself, or an operand of format x without a transform."""
    if isinstance(x, Operand):
        return x
    if not isinstance(x, Format):
        raise ValueError(f"an operand is made of a format, such as aoquant.get_format('nvfp4'), got {x!r}")
    return Operand(x)


def is_composed(name: str) -> bool:
    """Return whether a name has a transform in front of its format; a static scale may hold a plus too."""
    return "+" in name.partition("-static:")[0]
