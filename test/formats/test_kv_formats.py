"""KV-cache formats against oracles that are not ours: numpy float32, ml_dtypes' casts, gguf's blocks, a dense Hadamard
matrix and torch's own generator for vLLM's signs.
"""

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch

from aoquant.formats import get_kv_format
from aoquant.formats.kv import KV_NAMES, SIGNS

STATIC = ("fp8", "fp8-e5m2", "nvfp4")
f32 = np.float32


def rows(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(2, 3, 7, head_dim) with zeros, ties, outliers, tiny and huge rows."""
    g = torch.Generator().manual_seed(head_dim)
    x = torch.randn(2, 3, 7, head_dim, generator=g)
    x[0, 0, 0] = 0.0
    x[0, 0, 1] = torch.arange(head_dim) / 2.0
    x[0, 0, 2] *= 1e-9
    x[0, 0, 3] *= 3e3
    x[0, 0, 4, ::5] = -100.0
    x[0, 1, 0] = 1.0
    return x.to(dtype)


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy()


def half_away(y: np.ndarray) -> np.ndarray:
    return np.trunc(np.where(y >= 0, y + f32(0.5), y - f32(0.5)).astype(f32))


def hadamard(size: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0437, 0.3])
@pytest.mark.parametrize("name", ["fp8", "fp8-e5m2"])
def test_static_float8(name: str, scale: float) -> None:
    x, s = rows(64), torch.tensor(scale)
    kind, top = (ml_dtypes.float8_e4m3fn, 448) if name == "fp8" else (ml_dtypes.float8_e5m2, 57344)
    wanted = np.clip(numbers(x) / f32(scale), -top, top).astype(kind)
    found, own = get_kv_format(name).write(x, s)
    assert own is None and found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), wanted.view(np.uint8))
    values = torch.from_numpy(wanted.astype(f32) * f32(scale)).bfloat16()
    assert torch.equal(get_kv_format(name).read(found, s, torch.bfloat16), values)


def test_scales_of_each_head() -> None:
    x, s = rows(32), torch.tensor([1.0, 0.5, 4.0]).view(3, 1, 1)
    format = get_kv_format("fp8")
    found, _ = format.write(x, s)
    for head in range(3):
        assert torch.equal(found[:, head], format.write(x[:, head], s[head])[0])
    assert torch.equal(format.read(found, s, torch.float32)[:, 2], format.read(found[:, 2], s[2], torch.float32))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", ["int8-token-head", "fp8-token-head"])
def test_token_head(name: str, head_dim: int) -> None:
    x = rows(head_dim)
    v = numbers(x)
    s = np.maximum(np.abs(v).max(-1) / f32(127 if name[0] == "i" else 448), f32(1e-6))
    y = v * (f32(1) / s)[..., None]
    if name[0] == "i":
        codes = np.clip(half_away(y), -128, 127).astype(np.int8)
    else:
        codes = np.clip(y, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    found, own = get_kv_format(name).write(x)
    assert np.array_equal(own.numpy(), s)
    assert np.array_equal(found.numpy(), codes.view(np.uint8))
    values = torch.from_numpy(codes.astype(f32) * s[..., None]).bfloat16()
    assert torch.equal(get_kv_format(name).read(found, own, torch.bfloat16), values)


def test_signs_of_int4_are_those_of_vllm() -> None:
    for block in (32, 64, 128, 256):
        g = torch.Generator("cpu").manual_seed(0x9E3779B9)
        drawn = torch.bernoulli(torch.full((block,), 0.5), generator=g)
        assert all((SIGNS >> i & 1) == (1 - int(bit)) for i, bit in enumerate(drawn))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_int4(head_dim: int) -> None:
    # small multiples of a power of two: the rotation is exact in float32, whatever the order of its additions
    x = (torch.randint(-40, 40, (4, 2, head_dim), generator=torch.Generator().manual_seed(0)) / 32).bfloat16()
    x[0, 0] = 0
    block = head_dim & -head_dim
    signs = np.array([-1.0 if SIGNS >> i & 1 else 1.0 for i in range(block)])
    turned = (numbers(x).reshape(-1, block) * signs @ hadamard(block)).reshape(x.shape)
    v = turned.astype(ml_dtypes.bfloat16).astype(f32)
    s = np.maximum((v.max(-1) - v.min(-1)) / f32(15), f32(1e-6))
    z = np.clip(half_away(-v.min(-1) / s), 0, 15)
    q = np.clip(half_away(v * (f32(1) / s)[..., None] + z[..., None]), 0, 15).astype(np.uint8)
    found, own = get_kv_format("int4-token-head").write(x)
    assert np.array_equal(found.numpy(), q[..., ::2] | q[..., 1::2] << 4)
    bits = own.numpy().view(np.int32)
    assert np.array_equal(bits & 15, z.astype(np.int32))
    assert np.array_equal(bits & -16, s.view(np.int32) & -16)
    stored = (bits & -16).view(f32)
    back = ((q - z[..., None]) * stored[..., None].astype(float)).reshape(-1, block) @ hadamard(block) * signs / block
    values = get_kv_format("int4-token-head").read(found, own, torch.float32).numpy()
    assert np.abs(values - back.reshape(values.shape)).max() < 1e-5
    assert np.abs(values - numbers(x)).max() <= 20 * stored.max() / block**0.5


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_ggml(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    x = rows(96, torch.float32)  # 64 does not divide it: llama.cpp leaves it as it is
    format = get_kv_format(name)
    found, own = format.write(x)
    wanted = gguf.quants.quantize(x.numpy().reshape(-1, 96), kind)
    assert own is None and np.array_equal(found.numpy().reshape(wanted.shape), wanted)
    values = gguf.quants.dequantize(wanted, kind).reshape(x.shape)
    assert np.array_equal(format.read(found, None, torch.float32).numpy(), values)


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_ggml_rotates(head_dim: int, role: str) -> None:
    size = head_dim & -head_dim if role == "k" else 64
    x = torch.randint(-8, 8, (5, head_dim), generator=torch.Generator().manual_seed(1)).float()
    turned = (x.numpy().reshape(-1, size) @ hadamard(size) * f32(size**-0.5)).astype(f32).reshape(x.shape)
    format = get_kv_format("q8_0", role)
    wanted = gguf.quants.quantize(turned, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(format.write(x)[0].numpy(), wanted)
    assert (format.read(format.write(x)[0], None, torch.float32) - x).abs().max() < 0.5


@pytest.mark.parametrize("scale", [1.0, 2.0**-6, 0.0437])
def test_nvfp4(scale: float) -> None:
    x = rows(64)
    v = numbers(x).reshape(2, 3, 7, 4, 16)
    g = f32(1) / f32(scale)
    sf = np.clip(g * (np.abs(v).max(-1) * f32(1 / 6)), 0, 448).astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide="ignore"):
        factor = np.where(sf == 0, f32(0), f32(1) / (sf.astype(f32) * (f32(1) / g))).astype(f32)
    codes = (v * factor[..., None]).astype(ml_dtypes.float4_e2m1fn)
    nibbles = codes.view(np.uint8).reshape(2, 3, 7, 64)
    found, own = get_kv_format("nvfp4").write(x, torch.tensor(scale))
    assert own is None and found.shape[-1] == 36
    assert np.array_equal(found[..., :32].numpy(), nibbles[..., ::2] | nibbles[..., 1::2] << 4)
    assert np.array_equal(found[..., 32:].numpy(), sf.view(np.uint8))
    values = (codes.astype(f32) * sf.astype(f32)[..., None] * f32(scale)).reshape(x.shape)
    read = get_kv_format("nvfp4").read(found, torch.tensor(scale), torch.bfloat16)
    assert torch.equal(read, torch.from_numpy(values).bfloat16())


@pytest.mark.parametrize("name", KV_NAMES)
def test_promises_of_every_format(name: str) -> None:
    for role in ("k", "v"):
        format = get_kv_format(name, role)
        for head_dim in (64, 128):
            x = rows(head_dim)
            scale = format.static_scale(x.abs().amax()) if format.static else None
            packed = format.pack(x, scale)
            assert packed.shape == (*x.shape[:-1], format.row_bytes(head_dim) + format.scale_bytes)
            read = format.unpack(packed, scale, torch.bfloat16)
            codes, own = format.write(x, scale)
            assert torch.equal(read, format.read(codes, scale if own is None else own, torch.bfloat16))
            alone = format.unpack(format.pack(x[1, 1, 3], scale), scale, torch.bfloat16)
            assert torch.equal(read[1, 1, 3], alone), "a token's bytes depend on its neighbours"
            assert torch.equal(read[0, 0, 0], torch.zeros(head_dim, dtype=torch.bfloat16))
            typical, back = x[1].float(), read[1].float()
            limit = {"fp8-e5m2": 15, "nvfp4": 10, "int4-token-head": 14, "q4_0": 15}.get(name, 25)
            if not format.static:
                assert 10 * torch.log10(typical.square().mean() / (typical - back).square().mean()) > limit


def test_static_scales_are_powers_of_two() -> None:
    format = get_kv_format("fp8")
    assert format.static_scale(torch.tensor([448.0, 449.0, 3.5])).tolist() == [1.0, 2.0, 2.0**-7]
    assert format.static_scale(torch.tensor(448 * 3.0), power_of_two=False).item() == 3.0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="int9"):
        get_kv_format("int9")
    for name, head_dim in (("q8_0", 48), ("nvfp4", 24), ("int4-token-head", 7)):
        with pytest.raises(ValueError, match=str(head_dim)):
            get_kv_format(name).write(torch.ones(1, head_dim))
    with pytest.raises(ValueError, match="takes none"):
        get_kv_format("int8-token-head").write(torch.ones(1, 64), torch.tensor(1.0))
