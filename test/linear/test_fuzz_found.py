"""What fuzzing found, by name: each test failed once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.bits import same_bytes
from support.gemm import coded, parts, scaled_mm
from support.linear_cases import BY_NAME, autocast, layer, prepared

from aoquant import get_format
from aoquant.formats import get_operand, tiles


def test_int8_layers_of_one_input_are_refused() -> None:
    """torch._int_mm returns uninitialised memory on a CPU when K = 1."""
    case = BY_NAME["ao.int8act-int8-row"]
    with pytest.raises(ValueError, match=r"linear \(3, 1\): torch\._int_mm.*K = 1: leave the layer out"):
        prepared(case, layer(case, torch.bfloat16, n=3, k=1))


def test_the_int8_contract_holds_for_one_input() -> None:
    """The reference serves it, and gives the product."""
    x, w = (get_format("int8-row").encode(torch.randn(rows, 1)) for rows in (4, 3))
    y = scaled_mm(x, w, None, "int8-row", "int8-row", "int8_dynamic", [4], torch.float32)
    assert torch.equal(y, (x.codes.float() @ w.codes.float().t()) * x.scale * w.scale.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["fp8-row", "mxfp8", "nvfp4", "intx3-g32"])
def test_tiles_encode_under_autocast(name: str, dtype: torch.dtype) -> None:
    """Autocast promotes what `torch.cat` joins, and knows no float8."""
    x = torch.randn(32, 128)
    with autocast(dtype), mock.patch.object(tiles, "TILE", 1024):
        made = coded(x, get_operand(name))
        assert same_bytes(tiles.encode(get_format(name), x).codes, made.codes)  # as convert calls it
    for got, want in zip(parts(made), parts(get_format(name).encode(x)), strict=True):
        assert same_bytes(got, want)


@pytest.mark.parametrize("name", ["intx4-g32-hqq", "int4-tinygemm-hqq-g64", "int4-tinygemm-cpu-hqq-g64"])
def test_rows_of_hqq_depend_on_their_neighbours(name: str) -> None:
    """It stops for the whole matrix at once, so neither tiles nor an embedding's rows may be encoded apart."""
    fmt = get_format(name)
    assert not fmt.by_rows
    x = torch.randn(80, 128) * torch.logspace(-3, 3, 80).unsqueeze(1)
    whole = fmt.encode(x)
    with mock.patch.object(tiles, "TILE", 1024):
        tiled = tiles.encode(fmt, x)
    for got, want in zip(tiled[:4], whole[:4], strict=True):
        assert (got is None) == (want is None) and (got is None or same_bytes(got, want))
    some = torch.tensor([3, 70, 3])
    assert torch.equal(fmt.fake_quantize_rows(x, some), fmt.decode(whole, x.dtype)[some])
