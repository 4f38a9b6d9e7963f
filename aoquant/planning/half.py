"""float16 weights whose scales do not fit float16: found by encoding the same weight in float32.

Formats that make their scales in the weight's dtype, or store them in it, round them there. Below 2^-14, float16 keeps
fewer bits of a scale, and below 2^-24 none, while bfloat16 and float32 keep them all. So a small float16 weight may
lose what the same weight in bfloat16 would not. Both encodings are compared and no format is named here, so a format
of another package is covered too.
"""

import torch
from torch import Tensor

from aoquant._messages import warn
from aoquant.formats import Encoded, Operand, Scales
from aoquant.formats.tiles import HEALTHY

_LOST = 10**0.1  # 1 dB: how much larger a row's squared error may be than in float32
_EXACT = 1e-6  # 60 dB: of a row's energy; a smaller error is none, whatever it is in float32
_VALUES = 1 << 24  # that are compared at once


def share_lost(operand: Operand, e: Encoded, weight: Tensor, held: Scales | None = None) -> float:
    """Share of the rows of `weight` (N, K) that lose more than 1 dB because it is float16; 0 for other dtypes.

    e: of `weight`, under the scales `held`, if any.
    """
    if weight.dtype != torch.float16 or weight.is_meta or not weight.numel():
        return 0.0
    if operand.transform is not None:  # its result is float32 in every model
        return 0.0
    if held is not None:
        held = Scales(*(t if t is None else t.to(weight.device) for t in held))
    rows, k = weight.shape
    step = max(1, _VALUES // k) if operand.by_rows and held is None else rows
    lost = 0
    for first in range(0, rows, step):
        ids = torch.arange(first, min(first + step, rows), device=weight.device)
        wide = weight[first : first + step].float()
        energy = wide.square().sum(1)
        half = operand.format.decode_rows(e, ids, torch.float32).sub_(wide).square_().sum(1)
        made = operand.narrow.encode(wide, held)
        full = operand.format.decode(made, torch.float32).sub_(wide).square_().sum(1)
        lost += int((half > _LOST * full + _EXACT * energy).sum())
    return lost / rows


def warn_of_loss(fqn: str, operand: Operand, share: float) -> None:
    """Warn where `share_lost` of a weight is more than a healthy one has."""
    if share > HEALTHY:
        warn(
            f"{fqn or 'nn.Linear'}: {share:.1%} of the weight's rows lose more than 1 dB, because {operand.narrow.name} rounds its scales to the "
            "weight's float16: cast the layer to bfloat16 or float32 before it is quantised, or leave it out"
        )
