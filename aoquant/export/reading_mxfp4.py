"""gpt-oss's own MXFP4 folders as packed experts: the published codes, without a rounding.

Each stacked parameter is stored as "..._blocks", uint8 (E, N, K / 32, 16), two e2m1 codes a byte with even k in the low
nibble, and "..._scales", uint8 (E, N, K / 32), e8m0 exponents with bias 127. These are the bytes of the format mxfp4,
row by row, although the float parameter is (E, K, N). transformers multiplies them on a GPU by kernels of its own, and
elsewhere decodes them to bfloat16, which is exact. Source: transformers 5.17 `integrations/mxfp4.py`; OCP MX 1.0.
"""

import torch
from torch import Tensor

from aoquant.experts.families import is_transposed
from aoquant.experts.packed_experts import PackedExperts
from aoquant.export.filling import Filling

_NAN = 0xFF  # of e8m0


def fill(filling: Filling) -> None:
    """Pack the experts of an MXFP4 folder as mxfp4, weight-only.

    Raises:
        ValueError: files that do not fit the model, or a scale that is NaN.
    """
    for name in filling.stacks:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if blocks in filling.stored and scales in filling.stored:
            tensors = filling.take([blocks, scales])
            transposed = is_transposed(filling.model.get_submodule(name.rpartition(".")[0]))
            packed = _packed(f"{filling.folder}: {name}", tensors[blocks], tensors[scales], filling.dtype, transposed)
            filling.put(name, packed)


def _packed(label: str, blocks: Tensor, scales: Tensor, dtype: torch.dtype, transposed: bool) -> PackedExperts:
    if blocks.dim() != 4 or blocks.shape != (*scales.shape, 16) or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise ValueError(
            f"{label}: blocks are uint8 (E, N, K / 32, 16) and scales uint8 (E, N, K / 32), got {tuple(blocks.shape)} "
            f"and {tuple(scales.shape)}: copy the checkpoint again"
        )
    if bool((scales == _NAN).any()):
        raise ValueError(f"{label}: a block's scale is NaN: copy the checkpoint again")
    k = 32 * scales.shape[-1]
    exponents = scales.view(torch.float8_e8m0fnu)
    return PackedExperts(blocks.flatten(2), "mxfp4", "", "aoquant", k, dtype, transposed, scale=exponents)
