"""KV-cache formats: the bytes of one token and head that engines store, and the values that attention reads of them.

    fp8, fp8-e5m2     code = e4m3(x / s), saturating; s is static, float32.  value = dtype(code * s)
    fp8-token-head    s = max(amax / 448, 1e-6);  code = e4m3(x * (1 / s)).  value = dtype(code * s)
    int8-token-head   s = max(amax / 127, 1e-6);  code = trunc(y +- .5), y = x * (1 / s).  value = dtype(code * s)
    int4-token-head   x' = dtype(H D x);  s = max((max - min) / 15, 1e-6), z = round(-min / s);
                      code = round(x' * (1 / s) + z).  value = dtype(D H ((code - z) * s) / b)
    q8_0, q4_0        ggml's blocks of 32 (ggml.py) of the row times an orthonormal H.  value = dtype(H (code * d))
    nvfp4             sf = e4m3(g * (amax16 * f32(1 / 6))), g = 1 / s;  code = e2m1(x * (1 / (sf * (1 / g)))).
                      value = dtype((code * sf) * s)

All arithmetic is float32 with IEEE roundings and without FMA, one rounding for each operation as written; reading
rounds to `dtype` once, at the end. H is Sylvester's matrix on blocks of b values, by butterflies; D is a diagonal of
signs. Under a static scale that is a power of two a CPU and a GPU write the same bytes. GPU writers of the token-head
formats divide by `div.full` and fuse multiply-adds, so some of their codes differ from those of a CPU.

Sources: vLLM 0.33 `cache_kernels.cu`, `triton_reshape_and_cache_flash.py`, `int4_per_token_head.py`,
`nvfp4_kv_cache_kernels.cu`; llama.cpp `cpy-utils.cuh` and its rotation of quantised caches (pull request 21038).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aoquant.transforms.hadamard import butterflies, signs

from . import layout
from .base import Encoded
from .elements import FLOAT8, from_e2m1, from_float8, to_e2m1, to_float8
from .ggml import Ggml
from .scales import quotient, reciprocal
from .vllm import at_or_above

KV_NAMES = ("fp8", "fp8-e5m2", "fp8-token-head", "int8-token-head", "int4-token-head", "q8_0", "q4_0", "nvfp4")
LEAST = 1e-6  # vLLM's smallest scale of a token and head
# bit i set: value i changes its sign. vLLM draws the signs by torch's CPU generator, seed 0x9E3779B9
SIGNS = 0x5DFBC5FCDF467B754503BBEB55B747E9480ABC759BBC2937F7FCA4E9A8CA6F2


@dataclass(frozen=True)
class KVFormat:
    """A format of cached keys and values. name: one of `KV_NAMES`. role: "k" or "v", which ggml's formats rotate by
    blocks of different sizes.
    """

    name: str
    role: str = "k"

    @property
    def static(self) -> bool:
        """Return whether the format takes a scale: the layer holds one, for a tensor or for each head."""
        return self.name in ("fp8", "fp8-e5m2", "nvfp4")

    @property
    def largest(self) -> float:
        """Return the absmax that a static scale of 1 reaches."""
        return {"fp8": 448.0, "fp8-e5m2": 57344.0, "nvfp4": 2688.0}[self.name]

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scale that `write` returns for each token and head; 0 where it returns none."""
        return 4 if self.name.endswith("token-head") else 0

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of the codes of one token and head."""
        if self.name == "nvfp4":
            return head_dim // 2 + head_dim // 16
        if self.name in ("q8_0", "q4_0"):
            return head_dim // 32 * (34 if self.name == "q8_0" else 18)
        return head_dim // 2 if self.name == "int4-token-head" else head_dim

    def why_not(self, head_dim: int) -> str | None:
        """Return why rows of `head_dim` values have no such format; None where they do."""
        multiple = {"q8_0": 32, "q4_0": 32, "nvfp4": 16, "int4-token-head": 2}.get(self.name, 1)
        if head_dim % multiple:
            return f"{self.name} needs a head dimension that {multiple} divides, got {head_dim}"
        if self.name == "int4-token-head" and not 8 <= head_dim & -head_dim <= 256:
            return f"int4-token-head rotates by the largest power of two that divides the head dimension, 8 to 256, got {head_dim}"
        return None

    def static_scale(self, amax: Tensor, power_of_two: bool = True) -> Tensor:
        """Return the float32 scale of a largest magnitude; a power of two at or above amax / `largest`, or that."""
        scale = quotient(amax.float(), self.largest)
        return at_or_above(scale) if power_of_two else scale

    def write(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the bytes, uint8 (..., `row_bytes`), and the scales (...) float32 that go with them, or None.

        x: (..., head_dim). scale: of static formats, float32, broadcast over x as (heads, 1, 1) over (batch, heads,
            tokens, head_dim); None is 1. The four low bits of int4's scale are its zero point.

        Raises:
            ValueError: the format has no rows of this length, or takes no scale.
        """
        self.check(x.shape[-1], scale)
        y = x.float()
        if self.name in ("fp8", "fp8-e5m2"):
            y = y if scale is None else y / scale.float()
            return to_float8(y, "e5m2" if self.name == "fp8-e5m2" else "e4m3").view(torch.uint8), None
        if self.name == "nvfp4":
            return _write_nvfp4(y, scale), None
        if self.name in ("q8_0", "q4_0"):
            return _write_ggml(self._turned(y), self.name), None
        if self.name == "int4-token-head":
            return _write_int4(_mixed(y, signs_first=True).to(x.dtype).float())
        top = 448.0 if self.name == "fp8-token-head" else 127.0
        s = quotient(y.abs().amax(-1), top).clamp(min=LEAST)
        y = y * s.reciprocal().unsqueeze(-1)
        if self.name == "fp8-token-head":
            return to_float8(y, "e4m3").view(torch.uint8), s
        codes = _half_away(y).clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
        return codes.view(torch.uint8), s

    def read(self, bytes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the values (..., head_dim) that attention reads, in `dtype`.

        bytes: of `write`. scale: of `write`, or the static scale; None is a static 1.
        """
        if self.name in ("fp8", "fp8-e5m2", "nvfp4"):
            if self.name == "nvfp4":
                values = _read_nvfp4(bytes)
            else:
                values = from_float8(bytes.view(FLOAT8["e5m2" if self.name == "fp8-e5m2" else "e4m3"]), torch.float32)
            return (values if scale is None else values * scale.float()).to(dtype)
        if self.name in ("q8_0", "q4_0"):
            return self._turned(_read_ggml(bytes, self.name)).to(dtype)
        if scale is None:
            raise ValueError(f"{self.name}: reading takes the scales that write returned, got None")
        if self.name == "int4-token-head":
            return _read_int4(bytes, scale).to(dtype)
        if self.name == "fp8-token-head":
            codes = from_float8(bytes.view(FLOAT8["e4m3"]), torch.float32)
        else:
            codes = bytes.view(torch.int8).float()
        return (codes * scale.unsqueeze(-1)).to(dtype)

    def pack(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return uint8 (..., `row_bytes` + `scale_bytes`): the codes with the bytes of their scale behind them."""
        codes, own = self.write(x, scale)
        return codes if own is None else torch.cat((codes, own.unsqueeze(-1).view(torch.uint8)), -1)

    def unpack(self, packed: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the values of what `pack` made."""
        if not self.scale_bytes:
            return self.read(packed, scale, dtype)
        own = packed[..., -4:].contiguous().view(torch.float32).squeeze(-1)
        return self.read(packed[..., :-4].contiguous(), own, dtype)

    def check(self, head_dim: int, scale: Tensor | None) -> None:
        if (reason := self.why_not(head_dim)) is not None:
            raise ValueError(f"{reason}: choose another KV format")
        if scale is not None and not self.static:
            raise ValueError(f"{self.name} makes a scale for each token and head, and takes none: leave scale out")

    def _turned(self, y: Tensor) -> Tensor:
        """Return float32 rows times llama.cpp's orthonormal matrix: its own inverse. Head dimensions that 64 does not
        divide are left as they are. K has the largest power of two for a block, V 64.
        """
        d = y.shape[-1]
        if d % 64:
            return y
        size = d & -d if self.role == "k" else 64
        return butterflies(y.reshape(-1, d), size).view(y.shape) * size**-0.5


def get_kv_format(name: str, role: str = "k") -> KVFormat:
    """Return the KV-cache format called `name`. role: "k" for keys, "v" for values.

    Raises:
        ValueError: no KV-cache format has that name, or the role is another one.
    """
    if name not in KV_NAMES:
        raise ValueError(f"no KV-cache format is called {name!r}; there are {', '.join(KV_NAMES)}")
    if role not in ("k", "v"):
        raise ValueError(f"role is 'k' or 'v', got {role!r}")
    return KVFormat(name, role)


def _half_away(y: Tensor) -> Tensor:
    """Return whole numbers as vLLM's kernels round: half away from zero by adding and cutting off."""
    return torch.where(y >= 0, y + 0.5, y - 0.5).trunc()


def _mixed(y: Tensor, *, signs_first: bool) -> Tensor:
    """Return float32 rows times H D (signs first) or D H: blocks of the largest power of two that divides the row."""
    d = y.shape[-1]
    b = d & -d
    sign = signs(SIGNS, b, y.device).float()
    rows = y.reshape(-1, b)
    rows = butterflies(rows * sign, b) if signs_first else butterflies(rows, b) * sign
    return rows.view(y.shape)


def _write_int4(y: Tensor) -> tuple[Tensor, Tensor]:
    low, high = y.amin(-1), y.amax(-1)
    s = quotient(high - low, 15.0).clamp(min=LEAST)
    z = _half_away(-low / s).clamp(0, 15)
    q = _half_away(y * s.reciprocal().unsqueeze(-1) + z.unsqueeze(-1)).clamp(0, 15).nan_to_num(0.0).to(torch.uint8)
    bits = (s.view(torch.int32) & -16) | z.nan_to_num(0.0).to(torch.int32)
    return q[..., 0::2] | (q[..., 1::2] << 4), bits.view(torch.float32)


def _read_int4(packed: Tensor, scale: Tensor) -> Tensor:
    bits = scale.contiguous().view(torch.int32)
    z, s = (bits & 15).float(), (bits & -16).view(torch.float32)
    q = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float()
    d = q.shape[-1]
    return _mixed((q - z.unsqueeze(-1)) * s.unsqueeze(-1), signs_first=False) * (1.0 / (d & -d))


def _write_ggml(y: Tensor, kind: str) -> Tensor:
    """Return blocks of a float16 d and 32 codes; q4_0 has values j and j + 16 of a block in the nibbles of one byte."""
    format, rows = Ggml(kind), y.reshape(-1, y.shape[-1])
    e = format.quantize(rows, format.measure(rows))
    blocks = y.shape[-1] // 32
    if kind == "q8_0":
        codes = e.codes.view(-1, blocks, 32).view(torch.uint8)
    else:
        q = layout.unpack(e.codes, 4, e.k).reshape(-1, blocks, 32)
        codes = q[..., :16] | (q[..., 16:] << 4)
    d = e.scales.reshape(-1, blocks, 1).view(torch.uint8)
    return torch.cat((d, codes), -1).flatten(1).view(*y.shape[:-1], -1)


def _read_ggml(packed: Tensor, kind: str) -> Tensor:
    width = 34 if kind == "q8_0" else 18
    blocks = packed.shape[-1] // width
    rows = packed.reshape(-1, blocks, width)
    d, codes = rows[..., :2].contiguous().view(torch.float16).flatten(1), rows[..., 2:]
    if kind == "q8_0":
        codes = codes.contiguous().view(torch.int8).flatten(1)
    else:
        codes = layout.pack(torch.cat((codes & 15, codes >> 4), -1).flatten(1), 4)
    values = Ggml(kind).operand(Encoded(codes, d, None, None, 32 * blocks), torch.float32)
    return values.view(*packed.shape[:-1], 32 * blocks)


def _write_nvfp4(y: Tensor, scale: Tensor | None) -> Tensor:
    """Codes, even value in the low nibble, and behind them the block scales."""
    blocks = y.unflatten(-1, (-1, 16))
    s = torch.ones((), device=y.device) if scale is None else scale.float()
    s = s.expand(*y.shape[:-1], 1)
    g = s.reciprocal()
    sf = to_float8(g * (blocks.abs().amax(-1) * reciprocal(6.0)), "e4m3")
    factor = (sf.float() * g.reciprocal()).reciprocal()
    codes = to_e2m1(blocks * torch.where(sf.float() == 0, 0.0, factor).unsqueeze(-1)).flatten(-2)
    return torch.cat((codes[..., 0::2] | (codes[..., 1::2] << 4), sf.view(torch.uint8)), -1)


def _read_nvfp4(packed: Tensor) -> Tensor:
    d = packed.shape[-1] * 16 // 9
    codes, sf = packed[..., : d // 2], packed[..., d // 2 :].contiguous().view(torch.float8_e4m3fn)
    values = from_e2m1(torch.stack((codes & 15, codes >> 4), -1).flatten(-2))
    return (values.unflatten(-1, (-1, 16)) * sf.float().unsqueeze(-1)).flatten(-2)
