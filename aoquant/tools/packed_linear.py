"""A linear layer from packed FP4 tensors that exist already: a checkpoint's, or those of another library's quantiser.

Its weight is the `PackedTensor` that convert makes. `format` says which dialect the codes are.
"""

import torch
from torch import Tensor, nn

from aoquant.config import activated
from aoquant.formats import Encoded, Format, Operand, get_format
from aoquant.linear.packed import adopt
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.transforms import WUSH, Transform


def packed_linear(
    codes: Tensor,
    scale: Tensor,
    outer: Tensor | float | None = None,
    bias: Tensor | None = None,
    *,
    format: str,
    activation: str | None = "default",
    transform: Transform | Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Linear:
    """Return an nn.Linear (K -> N) over packed codes.

    codes: (N, K / 2) uint8 or float4_e2m1fn_x2, the lower nibble is the even k. scale: block scales, row-major, e8m0 or
        e4m3 as the format has them, or their bytes. outer: what multiplies in decoding: one number, or one a row; of
        TransformerEngine its absmax; of qutlass the reciprocal of its global scale. bias: (N,), applied.
    format: of the codes, such as "xx-nvfp4" or "nvfp4".
    activation: of the input. "default" is the same format, or with an outer scale for each token ("nvfp4-row") where
        aoquant's own NVFP4 and four-over-six have one for the tensor; None is high precision; "xx-nvfp4-static:0.1"
        gives the input an outer scale of its own.
    transform: what the weight went through: `Hadamard(16)`, or the matrices T by which the input is multiplied, x_blk
        T^T: (G, G) for all blocks or (K / G, G, G), bf16 numbers.
    dtype: of the layer as others see it, and the one that its bias has.

    Raises:
        ValueError: shapes, dtypes or devices do not fit the format.
    """
    f = get_format(format)
    if isinstance(f, Operand) or f.element != "e2m1":
        raise ValueError(f"packed_linear: format must be an FP4 one, such as 'nvfp4' or 'xx-mxfp4', got {format!r}")
    for name, given in (("codes", codes), ("scale", scale), *(() if bias is None else (("bias", bias),))):
        if not isinstance(given, Tensor):
            raise ValueError(f"packed_linear: {name} must be a tensor, got {type(given).__name__}")
    codes = codes.view(torch.uint8) if codes.dtype == torch.float4_e2m1fn_x2 else codes
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ValueError(
            f"packed_linear: codes must be (N, K / 2) uint8, two to a byte, got {tuple(codes.shape)} of {codes.dtype}"
        )
    n, k = codes.shape[0], 2 * codes.shape[1]
    if reason := f.why_not(k, dtype):
        raise ValueError(f"packed_linear: {reason}")
    want = f.encode(torch.empty(n, k, dtype=dtype, device="meta"))
    scale, outer = _scale(scale, want, f), _outer(outer, want, f, n, codes.device)
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"packed_linear: bias must be ({n},), one for each row of codes, got {tuple(bias.shape)}")
    transform, matrix = _matrix(transform, k)
    devices = {str(t.device) for t in (codes, scale, outer, bias, matrix) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"packed_linear: all tensors must be on one device, got {', '.join(sorted(devices))}")
    if activation is not None and activation.endswith("-static"):
        raise ValueError(
            f"packed_linear: activation={activation!r} asks for a scale that calibration finds, and a packed layer is past that: "
            f"name the number, as in '{activation}:0.05'"
        )
    activation = f.beside.name if activation == "default" else activation
    recipe = activated(LinearRecipe(None, f, transform=transform), activation)
    weight = PackedTensor.from_encoded(Encoded(codes.contiguous(), scale, None, outer, k), recipe, dtype, matrix)
    layer = nn.Linear(k, n, bias=False, device="meta", dtype=dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    adopt(layer)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return layer


def _scale(scale: Tensor, want: Encoded, f: Format) -> Tensor:
    if scale.dtype == torch.uint8:
        scale = scale.view(want.scales.dtype)
    if scale.shape != want.scales.shape or scale.dtype != want.scales.dtype:
        raise ValueError(
            f"packed_linear: {f.name} needs scales {tuple(want.scales.shape)} of {want.scales.dtype}, row-major, for these codes, got "
            f"{tuple(scale.shape)} of {scale.dtype}; swizzled scales go through formats.layout.unswizzle_128x4 first"
        )
    return scale.contiguous()


def _outer(outer: Tensor | float | None, want: Encoded, f: Format, n: int, device: torch.device) -> Tensor | None:
    if (outer is None) != (want.outer is None):
        raise ValueError(
            f"packed_linear: {f.name} {'needs an' if outer is None else 'has no'} outer scale, got {'none' if outer is None else 'one'}"
        )
    if outer is None:
        return None
    given = outer if isinstance(outer, Tensor) else torch.tensor(outer, dtype=torch.float32, device=device)
    if given.numel() not in (1, n) or not given.is_floating_point():
        raise ValueError(f"packed_linear: outer must be 1 or {n} floats, got {tuple(given.shape)} of {given.dtype}")
    if not given.is_meta and not (given.isfinite() & (given > 0)).all():
        raise ValueError(
            "packed_linear: outer must be positive and finite: the codes would stand for other values, or for none"
        )
    return given.detach().float().reshape(-1, 1).contiguous()


def _matrix(transform: Transform | Tensor | None, k: int) -> tuple[Transform | None, Tensor | None]:
    """(the transform, its matrices (K / G, G, G) if they are data)."""
    if not isinstance(transform, Tensor):
        if transform is not None and (not isinstance(transform, Transform) or transform.fitted):
            raise ValueError(
                f"packed_linear: transform must be aoquant.Hadamard(size) or the matrices, got {transform!r}"
            )
        return transform, None
    size, shape = transform.shape[-1], tuple(transform.shape)
    if not transform.is_floating_point():
        raise ValueError(f"packed_linear: transform must be of floats, got {transform.dtype}")
    if k % size or shape not in ((size, size), (k // size, size, size)):
        raise ValueError(
            f"packed_linear: transform must be (G, G) or (K / G, G, G) with G dividing K = {k}, got {tuple(transform.shape)}"
        )
    rounded = transform.detach().to(torch.bfloat16)
    if not transform.is_meta and not torch.equal(rounded.to(transform.dtype), transform):
        raise ValueError(
            "packed_linear: transform must hold bf16 numbers: rounding it now would leave codes that belong to another matrix"
        )
    return WUSH(size), rounded.expand(k // size, size, size).contiguous()
