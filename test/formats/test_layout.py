"""Packing and swizzling: exact inverses, and the layouts that torchao stores. Tolerance 0."""

import pytest
import torch

from aoquant.formats import layout


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("k", [1, 7, 8, 33, 64, 130])
def test_unpack_inverts_pack(bits: int, k: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, k), dtype=torch.uint8)
    packed = layout.pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert torch.equal(layout.unpack(packed, bits, k), codes)
    if k % 8 == 0:
        assert packed.numel() * 8 == codes.numel() * bits  # no width wastes a bit
    assert layout.unpack(layout.pack(codes[:0], bits), bits, k).shape == (0, k)


def test_low_nibble_is_even_k_as_in_torchao() -> None:
    from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4

    assert layout.pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist() == [[0x21, 0x03]]
    codes = torch.randint(0, 16, (6, 64), dtype=torch.uint8)
    assert torch.equal(layout.pack(codes, 4), pack_uint4(codes))
    assert torch.equal(layout.unpack(layout.pack(codes, 4), 4, 64), unpack_uint4(pack_uint4(codes)))


def test_bit_planes_by_hand() -> None:
    # 3-bit codes 0..7: plane 0 is the low bits 0,1,0,1,0,1,0,1 with the first value in the lowest bit
    packed = layout.pack(torch.arange(8, dtype=torch.uint8)[None], 3)
    assert packed.tolist() == [[0b10101010, 0b11001100, 0b11110000]]


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (256, 12), (3, 33)], ids=str)
def test_swizzle_is_torchaos_and_inverts(shape: tuple[int, int]) -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    rows, cols = shape
    raw = torch.randint(0, 255, shape, dtype=torch.uint8)
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        scales = raw.view(dtype)
        flat = layout.swizzle_128x4(scales)
        assert flat.dtype == dtype
        assert torch.equal(flat.view(torch.uint8), to_blocked(raw))
        assert torch.equal(layout.unswizzle_128x4(flat, rows, cols).view(torch.uint8), raw)


def test_swizzle_formula() -> None:
    raw = torch.randint(0, 255, (128, 4), dtype=torch.uint8)
    flat = layout.swizzle_128x4(raw)
    for r, c in ((0, 0), (31, 3), (32, 0), (127, 3), (65, 2)):
        assert flat[(r % 32) * 16 + (r // 32) * 4 + c] == raw[r, c]
    assert (layout.swizzle_128x4(raw[:5, :3])[3::4] == 0).all()  # padding is zero


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_codes_may_begin_at_any_byte(bits: int, offset: int) -> None:
    """They are read eight at a time, and a view of a file or of a shard begins where it does."""
    codes = torch.randint(0, 1 << bits, (6, 64), dtype=torch.uint8)
    view = torch.zeros(offset + codes.numel(), dtype=torch.uint8)[offset:].view(6, 64)
    view.copy_(codes)
    assert view.storage_offset() == offset
    assert torch.equal(layout.pack(view, bits), layout.pack(codes, bits))
