"""The arithmetic of csrc's encoders, on a CPU: `csrc/contest.cuh` compiled by the host's compiler, against the formats.

What a GPU adds to it, threads, loads and stores, is test/gpu/test_grids.py's. Needs g++ and CUDA's headers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import same, same_bytes
from support.grid_inputs import inputs, name_arguments
from support.host_csrc import host_library
from torch import Tensor

from aoquant import get_format
from aoquant.formats import Encoded

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "csrc"))
import builder  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {BF16: 1, F16: 2, F32: 3}
NAMES = (
    "fouroversix", "fouroversix-mae", "fouroversix-absmax", "fouroversix-16x16", "fouroversix-mae-16x16",
    "gridflip", "gridflip-sided", "gridflip-search", "gridflip-alternating", "gridflip-sided-alternating",
    "gridflip-16x16", "gridflip-c0.2", "gridflip-search-c0.5-alternating",
)  # fmt: skip
NVCC = builder.find_nvcc()
HEADERS = Path(NVCC).resolve().parent.parent / "include" if NVCC else Path()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    headers = next((h for h in (HEADERS, Path("/usr/local/cuda/include")) if (h / "cuda_fp8.h").exists()), None)
    if headers is None:
        pytest.skip("needs CUDA's headers")
    flags = "-std=c++17", "-ffp-contract=off", "-mfma", f"-I{headers}"
    return host_library(tmp_path_factory.mktemp("csrc"), "grids", *flags)


@pytest.fixture
def encode(library: ctypes.CDLL) -> Callable[..., Any]:
    library.encode_grids.restype = None
    return library.encode_grids


def run(
    encode: Callable[..., Any], name: str, x: Tensor, amax: float, out: torch.dtype | None = None, operand: bool = False
) -> tuple[Encoded, Tensor | None]:
    effort, metric, tile, c, alternating = name_arguments(name)
    (rows, k), x = x.shape, x.contiguous()
    codes = torch.empty(rows, k // 2, dtype=torch.uint8)
    scale = torch.empty(-(-rows // tile), k // 16, dtype=torch.uint8)
    outer, values = torch.empty(1, 1), None if out is None else torch.empty(rows, k, dtype=out)
    encode(
        ctypes.c_void_p(x.data_ptr()), DTYPES[x.dtype], ctypes.c_int64(rows), k // 16, ctypes.c_float(amax), effort, metric, tile,
        ctypes.c_double(c), int(alternating), 0 if out is None else DTYPES[out], int(operand),
        *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in (codes, scale, outer, values)),
    )  # fmt: skip
    return Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, k), values


CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=[] if i % 6 == 2 * j else [pytest.mark.slow])
    for i, name in enumerate(NAMES)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_bytes_are_the_formats(encode: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    for kind, x in inputs(dtype, 8).items():
        measured = fmt.measure(x)
        assert measured.outer is not None
        want = fmt.quantize(x, measured)
        got, _ = run(encode, name, x, measured.outer.item())
        assert same_bytes(got.scale, want.scale) and same_bytes(got.codes, want.codes), kind
        assert same(got.outer, want.outer), kind


@pytest.mark.parametrize(
    "name", ["fouroversix", "gridflip", "gridflip-alternating", "gridflip-sided-c0.2", "gridflip-16x16"]
)
def test_values_of_the_same_pass(encode: Callable[..., Any], name: str) -> None:
    fmt = get_format(name)
    for kind, x in inputs(BF16, 4).items():
        want = fmt.encode(x)
        amax = fmt.measure(x).outer
        assert amax is not None
        for out in DTYPES:
            for operand in (True, False):
                _, values = run(encode, name, x, amax.item(), out, operand)
                expected = fmt.operand(want, out) if operand else fmt.decode(want, out)
                assert values is not None and same(values, expected), f"{name} {kind} {out} operand={operand}"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_rows_of_four_over_six(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """The operand or the decoded values, and the scale of each row; a row does not notice the NaN or Inf of another."""
    fmt = get_format("fouroversix-row")
    for kind, x in inputs(dtype, 8).items():
        want, (rows, k) = fmt.encode(x), x.shape
        for decoded in (False, True):
            values, scale = torch.empty_like(x), torch.empty(rows, 1)
            library.encode_four_over_six_rows(
                ctypes.c_void_p(x.data_ptr()), DTYPES[dtype], ctypes.c_int64(rows), k, int(decoded),
                ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(scale.data_ptr()),
            )  # fmt: skip
            expected = fmt.decode(want, dtype) if decoded else fmt.operand(want, dtype)
            assert want.outer is not None and same(scale, want.outer), kind
            assert same(values, expected), f"{kind} decoded={decoded}"


SEARCHES = [
    pytest.param(
        name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=[] if (i, dtype) == (0, BF16) else [pytest.mark.slow]
    )
    for i, name in enumerate(("nvfp4-search", "nvfp4-search-none", "nvfp4-search-static:0.001"))
    for dtype in DTYPES
]


@pytest.mark.parametrize(("name", "dtype"), SEARCHES)
def test_searched_scales(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    """Bytes, and the values of the same pass, operand and decoded."""
    fmt = get_format(name)
    for kind, x in inputs(dtype, 2).items():
        want, (rows, k) = fmt.encode(x), x.shape
        for out, operand in ((None, False), (BF16, True), (F16, False), (F32, False)):
            codes, scale = torch.empty(rows, k // 2, dtype=torch.uint8), torch.empty(rows, k // 16, dtype=torch.uint8)
            values = None if out is None else torch.empty(rows, k, dtype=out)
            pointers = [ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in (want.outer, codes, scale, values)]
            library.encode_search(
                ctypes.c_void_p(x.data_ptr()), DTYPES[dtype], rows * k // 16, pointers[0], 0 if out is None else DTYPES[out],
                int(operand), *pointers[1:],
            )  # fmt: skip
            assert want.scale is not None
            # a NaN made by arithmetic is negative on x86
            assert same(scale.view(torch.float8_e4m3fn).float(), want.scale.float()), f"{name} {kind} scale"
            assert same(codes, want.codes), f"{name} {kind} codes"
            if out is not None:
                expected = fmt.operand(want, out) if operand else fmt.decode(want, out)
                assert values is not None and same(values, expected), f"{name} {kind} {out} operand={operand}"


def test_nearest_magnitudes(library: ctypes.CDLL) -> None:
    """Without looking for an octave: around every tie and every power of two, and one float32 of each 101 (all of them
    were compared once).
    """
    wrong = library.wrong_magnitude
    wrong.restype = ctypes.c_int64
    spots = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0])
    ranges = [(at - 70000, at + 70000, 1) for at in spots.view(torch.int32).tolist()]
    for first, last, step in (*ranges, (0, 0x70000000, 101)):
        assert wrong(ctypes.c_int64(first), ctypes.c_int64(last), ctypes.c_int64(step)) == -1


@pytest.mark.parametrize("factor", [0.01, 0.5, 3.0, 1000.0])
def test_an_amax_that_is_not_the_tensors(encode: Callable[..., Any], factor: float) -> None:
    x = torch.randn(64, 256)
    for name in ("fouroversix", "gridflip", "gridflip-sided", "gridflip-search"):
        amax = x.abs().amax() * factor
        want = get_format(name).quantize(x, get_format(name).measure(x)._replace(outer=amax.view(1, 1)))
        got, _ = run(encode, name, x, amax.item())
        assert same_bytes(got.codes, want.codes) and same_bytes(got.scale, want.scale), name


@pytest.mark.parametrize("c", [0.1, 0.25, 0.29])
def test_the_rough_error_is_within_its_margin(library: ctypes.CDLL, c: float) -> None:
    """At the scales where it decides: normal ones, under which no value is more than about 10."""
    library.worst_margin.restype = ctypes.c_float
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for amax in (1.0, 0.0371, 1.9999999, 2.0**-40, 2.0**50):
        blocks = 4000
        codes = torch.randint(8, 126, (blocks,), generator=generator)
        step = codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * (amax / 1536)
        x = torch.rand(blocks, 16, generator=generator) * 20 - 10  # in steps
        x[::2] = (
            (x[::2] * 4).round() / 4 * (1 + (torch.rand(blocks // 2, 16, generator=generator) - 0.5) * 1e-6)
        )  # near ties, and near codes
        x = (x * step[:, None]).contiguous()
        flags = (torch.arange(blocks) % 3 == 0) * 0x80
        signed = (codes + flags).to(torch.uint8)
        margin = library.worst_margin(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(signed.data_ptr()), ctypes.c_int64(blocks), ctypes.c_float(amax), ctypes.c_double(c)
        )  # fmt: skip
        worst = max(worst, margin)
    assert 0.001 < worst < 0.5, worst  # a proven bound, so far from what happens
