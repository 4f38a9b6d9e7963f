"""Our bytes are torchao's own: codes, scales, zero points and outer scales of every format. Tolerance 0.

torchao's CPU and CUDA conversions differ where it divides by a constant in float32 (and, for float8, in float16's
subnormals). Ours follow CUDA everywhere, because weights are converted there; so the oracle is torchao's own code under
`cuda_division`. "-native" formats divide as the device does and are compared with torchao as it is.
"""

import re

import pytest
import torch
from support.golden_inputs import DATA, data_set
from support.torchao_oracle import cuda_division, differing, ours, same, torchao_encode, torchao_tensor

from aoquant.formats import MX, NVFP4, Affine, Float8, get_format, list_formats
from aoquant.formats.scales import reciprocal

VARIANTS = [
    "intx4-g64",
    "intx4-g128",
    "intx3-g128",
    "intx8-g64",
    "intx4-g64-asym",
    "intx4-row-asym",
    "int8-tensor-asym",
    "intx1-g32-asym",
    *(f"intx{bits}-g32-noclip" for bits in range(2, 9)),
    "intx4-row-noclip",
    *(
        f"intx4-g32{sides}-s{dtype}"
        for sides in ("", "-asym", "-noclip")
        for dtype in ("float32", "bfloat16", "float16")
    ),
    "intx8-row-asym-sfloat32",
    "int7-row",
    "int7-tensor-asym",
    "fp8-1x32",
    "fp8-e5m2-1x64",
    "fp8-2x128",
    "fp8-row:lb0.5",
    "fp8-tensor:ub1.25",
    "fp8-1x32:lb0.01:ub10.0",
]
# int4 and MSLK's rows need other oracles: test_integer.py, test_int4_layouts.py; torchao has none of the other FP4
# formats
NAMES = [
    n
    for n in [*list_formats(), *VARIANTS]
    if type(get_format(n)) in (MX, NVFP4, Affine, Float8) and n != "nvfp4-row"  # torchao has no outer scale a row
]
NATIVE = [n for n in NAMES if isinstance(get_format(n), Affine | Float8)]
FINITE = [d for d in DATA if d != "nonfinite"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rows(name: str) -> int:
    """torchao takes whole tiles alone."""
    return 128 if "128x128" in name else 24


def taken(name: str, dtype: torch.dtype) -> bool:
    """torchao converts float16 to integers and float8 alone."""
    return dtype != torch.float16 or not isinstance(get_format(name), MX | NVFP4)


CASES = [(n, d) for n in NAMES for d in DTYPES if taken(n, d)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_bytes_are_torchaos_on_cuda(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    for data in FINITE:
        x = data_set(data, rows(name), 256, dtype)
        with cuda_division():
            theirs = torchao_encode(fmt, x)
        assert differing(fmt, ours(fmt, fmt.encode(x)), theirs) == {}, data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_native_bytes_are_torchaos_here(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(re.sub("(:.*)?$", r"-native\1", name, count=1))
    for data in ("normal", "special", "bits_in_rows"):
        x = data_set(data, rows(name), 256, dtype)
        assert differing(fmt, ours(fmt, fmt.encode(x)), torchao_encode(fmt, x)) == {}, data


@pytest.mark.parametrize("name", ["intx4-g32", "int8-row", "fp8-row", "nvfp4"])
def test_the_two_rules_differ_in_float32_and_not_in_bfloat16(name: str) -> None:
    fmt = get_format(name)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        found[dtype] = {"scale": 0, "outer": 0}
        for seed in range(12):
            x = DATA["normal"](16, 256, dtype, 100 + seed)
            difference = differing(fmt, ours(fmt, fmt.encode(x)), torchao_encode(fmt, x))
            for field in found[dtype]:
                found[dtype][field] += difference.get(field, 0)
    # NVFP4's outer scale is made in float32 from either dtype
    assert found[torch.float32]["outer" if name == "nvfp4" else "scale"] > 0
    assert found[torch.bfloat16]["scale"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nvfp4_outer_scale_is_a_multiplication(dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    for seed in range(30):
        x = DATA["weights"](8, 64, dtype, 200 + seed)
        e = NVFP4().encode(x)
        assert e.outer is not None
        assert torch.equal(e.outer, (x.abs().max().float() * reciprocal(2688.0)).reshape(1, 1))
        # given our outer scale and bfloat16 values, torchao's CPU conversion is ours without any help
        scale, codes = nvfp4_quantize(x, 16, e.outer.reshape(()))
        if dtype == torch.bfloat16:
            assert torch.equal(codes, e.codes)
            assert same(scale, e.scale).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_torchaos_per_token_activation(dtype: torch.dtype) -> None:
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        _apply_int8_act_asym_per_token_quant_dequant,
    )

    fmt = get_format("intx8-row-asym-native")
    for data in FINITE:
        x = data_set(data, 24, 256, dtype)
        assert same(fmt.fake_quantize(x), _apply_int8_act_asym_per_token_quant_dequant(x)).all(), data


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_values_are_torchaos(name: str, dtype: torch.dtype) -> None:
    """`decode` is torchao's `dequantize`, from the same bytes."""
    fmt = get_format(name)
    for data in ("normal", "heavy"):
        x = data_set(data, rows(name), 256, dtype)
        with cuda_division():
            expected = torchao_tensor(fmt, x).dequantize()
        assert same(fmt.fake_quantize(x), expected).all(), data


def test_rceil_is_the_hardwares_where_torchaos_log2_is_not() -> None:
    """torchao's fallback takes ceil(log2 x) in float32, which misses what lies just above a large power of two."""
    fmt = get_format("mxfp4")
    x = torch.zeros(200, 32)
    powers = torch.arange(-100.0, 100.0)
    x[:, 0] = torch.exp2(powers) * 6 * (1 + 2.0**-22)
    with cuda_division():
        theirs = torchao_encode(fmt, x)
    mine = ours(fmt, fmt.encode(x))
    assert mine.scale.view(torch.uint8).flatten().tolist() == [int(p) + 128 for p in powers]
    missed = ~same(mine.scale, theirs.scale).flatten()
    assert missed.sum() > 100
    assert (powers[missed].abs() > 1).all()
