"""Every int4 layout that needs a GPU, on a CPU: our codes, scales and operands are those in torchao's packed tensors.

The file is what `python benchmarks/int4_layouts.py` recorded: the fields of torchao's own converted tensors
("packed_..."), operand tiles read from the kernels with identity matrices, and small GEMM outputs. Nothing of it was
made by aoquant but the name.
"""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from support.gemm import scaled_mm
from support.golden_inputs import INT4_FILE, golden_input, normal, recorded_int4, weights
from torch import Tensor

from aoquant import backend
from aoquant.formats import Encoded, Int4, TinyGemm, get_format

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


GOLDEN = recorded_int4()
CASES = [c for c in GOLDEN if not c.startswith("gemm/")]


def encoded(case: str) -> tuple[str, Encoded]:
    name, label = case.split("/")
    return name, get_format(name).encode(golden_input("int4-", DTYPES[label]))


def nibbles(packed: Tensor) -> Tensor:
    """Every 4-bit code of a packed tensor, sorted."""
    bytes_ = packed.contiguous().view(torch.uint8).flatten()
    return torch.cat((bytes_ & 15, bytes_ >> 4)).sort().values


def _looked_up(codes: Tensor) -> Tensor:
    """The fp8 kernel looks products up in a table of -8 s .. -s; a positive code becomes its negative's index, with a
    clear top bit.
    """
    low, high = codes & 15, codes >> 4
    low, high = (torch.where(n < 8, (8 - n) & 7, n) for n in (low, high))
    return low | (high << 4)


def unpacked_tiles(packed: Tensor) -> Tensor:
    """(N, K) codes 0..15 out of tinygemm's (N/8, K/128, 32, 4) int32, where each lane of a warp holds what its mma
    instructions read.
    """
    n8, k128, lanes, pairs = packed.shape
    codes = torch.full((n8 * 8, k128 * 128), -1, dtype=torch.int32)
    for lane in range(lanes):
        for pair in range(pairs):
            word = packed[:, :, lane, pair].long() & 0xFFFFFFFF
            for position, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
                k = pair * 32 + (position // 4) * 16 + (lane % 4) * 2 + (position % 4 // 2) * 8 + position % 2
                codes[lane // 4 :: 8, k::128] = ((word >> (4 * nibble)) & 15).int()
    return codes


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_torchaos_tensor(case: str) -> None:
    name, e = encoded(case)
    theirs = GOLDEN[case]
    fmt = get_format(name)
    assert e.scale is not None
    if isinstance(fmt, TinyGemm):
        codes = unpacked_tiles(theirs["packed_qdata"])
        assert isinstance(fmt, Int4) and e.zero is not None
        assert torch.equal(codes[:32, :512], fmt.integers(e).int() + 8)
        assert (codes[:, 512:] == 0).all()  # padding, whose scales make it 0
        groups = 512 // fmt.group
        scale, zero = theirs["packed_scale_and_zero"].unbind(-1)
        assert torch.equal(scale[:groups].t(), e.scale) and torch.equal(zero[:groups].t(), e.zero)
        assert (-8 * scale[groups:] + zero[groups:] == 0).all()
    elif name == "fp8-row-mslk":
        assert torch.equal(theirs["packed_qdata"], e.codes.view(torch.uint8))
        assert torch.equal(theirs["packed_scale"], e.scale)
    elif name.startswith("int4-e4m3-g"):
        assert torch.equal(theirs["packed_qdata"].view(torch.uint8), e.codes)
        assert torch.equal(theirs["packed_scale"].t(), e.scale) and (theirs["packed_zero_point"] == 0).all()
    elif "packed_qdata" in theirs:  # preshuffled: the same codes and scales in another order
        fp8 = name.startswith("int4-e4m3-row")
        assert torch.equal(nibbles(theirs["packed_qdata"]), nibbles(_looked_up(e.codes) if fp8 else e.codes))
        if name.startswith("int4-bf16"):
            assert e.zero is not None and torch.equal(theirs["packed_group_zero"].t(), e.zero)
            assert torch.equal(theirs["packed_group_scale"].flatten().sort().values, e.scale.flatten().sort().values)
        else:
            assert e.outer is not None and torch.equal(theirs["packed_row_scale"], e.outer.flatten())
            # the table that the kernel looks products up in, (G, N, 8): e4m3 of -8 s .. -s
            multiples = torch.arange(-8.0, 0.0) * e.scale.float().t().unsqueeze(-1)
            table = theirs["packed_group_scale"].view(torch.float8_e4m3fn).float().view(multiples.shape)
            assert torch.equal(table, multiples.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    for field, got in zip(("codes", "scale", "zero", "outer"), e[:4], strict=True):
        assert (got is None) == (field not in theirs)
        if got is not None:
            assert torch.equal(got if got.element_size() > 1 else got.view(torch.uint8), theirs[field]), field


@pytest.mark.parametrize("case", [c for c in CASES if "operand" in GOLDEN[c]])
def test_operands_are_the_kernels(case: str) -> None:
    name, e = encoded(case)
    # == takes -0.0 for 0.0: the identity's zeros add +0.0 to every sum
    assert (get_format(name).operand(e, torch.bfloat16) == GOLDEN[case]["operand"]).all()


@pytest.mark.parametrize(("case", "contract"), [(c, f) for c in GOLDEN if c.startswith("gemm/") for f in GOLDEN[c]])
def test_small_products_differ_by_the_order_of_additions(case: str, contract: str) -> None:
    """torchao's layer on the GPU against the reference on this CPU: within 512 roundings of the accumulator, e4m3's
    being 13 bits wide.
    """
    fmt = get_format(case.removeprefix("gemm/"))
    w, x, bias = (
        weights(32, 512, torch.bfloat16, 61),
        normal(16, 512, torch.bfloat16, 62),
        normal(1, 32, torch.bfloat16, 63)[0],
    )
    fp8 = "fp8" in contract
    act = get_format("fp8-row-mslk")
    given = act.encode(x) if fp8 else x
    e = fmt.encode(w)
    with backend("reference"):
        args = (bias, act.name if fp8 else "", fmt.name, contract, [16], torch.bfloat16)
        mine = scaled_mm(given, e, *args)
    theirs = GOLDEN[case][contract]
    magnitude = (act.fake_quantize(x) if fp8 else x).double().abs() @ fmt.decode(e, torch.float32).double().abs().t()
    bits = 13 if fp8 and not contract.endswith("_precise") else 24
    slack = magnitude * 2.0**-bits * (512 / 32 if fp8 else 512) + (mine.double().abs() + bias.double().abs()) * 2.0**-7
    assert ((mine.double() - theirs.double()).abs() <= slack).all()
    differing = int((mine != theirs).sum())
    assert differing <= (0.5 if fp8 else 0.05) * mine.numel(), f"{differing} of {mine.numel()} outputs differ"


def test_the_file_says_where_it_comes_from() -> None:
    assert {c.split("/")[0] for c in CASES} >= {
        "int4-bf16-g128",
        "int4-tinygemm-g32",
        "int4-e4m3-g128",
        "int4-e4m3-row-g128",
        "fp8-row-mslk",
    }
    assert INT4_FILE.stat().st_size < 1_000_000
    with safe_open(INT4_FILE, "pt") as file:
        assert {"gpu", "torch", "torchao", "mslk", "triton", "cuda", "command", "date"} <= set(file.metadata())
