"""The formats that serving engines compute: ggml's bytes as `gguf.quants` makes them, vLLM's formulas in numpy's
float32.
"""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from aoquant.export.ggml_types import store
from aoquant.formats import get_format
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gaussian rows, tiny and large ones, ties of magnitude, zeros."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(64, 128), torch.randn(16, 128) * 1e-3, torch.randn(16, 128) * 300, torch.zeros(2, 128)])
    x[3, 5], x[3, 9] = -4.0, 4.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "type"), [("q4_0", Type.Q4_0), ("q4_1", Type.Q4_1), ("q8_0", Type.Q8_0)])
def test_bytes_and_values_are_ggmls(name: str, type: Type, dtype: torch.dtype) -> None:
    x, format = values(dtype), get_format(name)
    e = format.encode(x)
    wanted = gguf.quants.quantize(x.float().numpy(), type)
    packed = PackedTensor.from_encoded(e, LinearRecipe(None, format), dtype)
    assert np.array_equal(store(packed).tensors["weight"].numpy(), wanted)
    assert np.array_equal(format.decode(e, torch.float32).numpy(), gguf.quants.dequantize(wanted, type))


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_requantising_the_trained_values_gives_their_bytes(name: str) -> None:
    """llama-quantize of an exported F32 model therefore keeps what QAT trained."""
    format = get_format(name)
    e = format.encode(values())
    again = format.encode(format.decode(e, torch.float32))
    assert again.scale is not None and e.scale is not None
    assert torch.equal(again.codes, e.codes) and torch.equal(again.scale, e.scale)


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_the_minimum_of_a_q4_1_block_is_the_first_of_two_zeros(zeros: tuple[float, float]) -> None:
    """As ggml's loop has it, which keeps the first: reductions may keep either."""
    x = torch.ones(1, 32)
    x[0, 7], x[0, 19] = zeros
    zero = get_format("q4_1").encode(x).zero
    assert zero is not None and math.copysign(1.0, float(zero)) == math.copysign(1.0, zeros[0])


def test_activations_of_ggml_on_x86() -> None:
    x = values()
    e = get_format("q8_0-x86").encode(x)
    blocks = x.numpy().reshape(-1, 32)
    amax = np.abs(blocks).max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        q = np.rint(blocks * np.where(amax != 0, np.float32(127) / amax, np.float32(0)))
    assert np.array_equal(e.codes.numpy().reshape(-1, 32), q.astype(np.int8))
    assert e.scale is not None
    assert np.array_equal(e.scale.numpy().reshape(-1, 1), (amax / np.float32(127)).astype(np.float16))


def test_vllms_fp8_rows() -> None:
    """Both of its formulas; the floor of the scale serves rows of zeros."""
    x = torch.cat([values(torch.bfloat16), torch.full((1, 128), 1e-7)])
    amax = x.float().abs().amax(1, keepdim=True).numpy()
    s = torch.from_numpy(np.maximum(amax / np.float32(448), np.float32(1 / (448 * 512))))
    by_division, by_product = (get_format(n).encode(x) for n in ("fp8-row-vllm", "fp8-row-vllm-reciprocal"))
    for e in (by_division, by_product):
        assert e.scale is not None and torch.equal(e.scale, s)
    inverse = torch.from_numpy(np.float32(1) / s.numpy())
    for e, y in ((by_division, torch.from_numpy(x.float().numpy() / s.numpy())), (by_product, x.float() * inverse)):
        assert torch.equal(e.codes.float(), y.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert not torch.equal(by_division.codes.float(), by_product.codes.float())  # so both are needed


def test_vllms_int8_rows() -> None:
    """Both of its formulas."""
    x = values(torch.bfloat16)
    on_gpu, on_cpu = (get_format(n).encode(x) for n in ("int8-row-vllm", "int8-row-vllm-reciprocal"))
    amax = x.float().abs().amax(1, keepdim=True).numpy()
    scale = amax / np.float32(127)
    with np.errstate(divide="ignore"):
        inverses = np.float32(127) / amax, np.float32(1) / scale
    for e, inverse in zip((on_gpu, on_cpu), inverses, strict=True):
        codes = np.rint(x.float().numpy() * np.where(amax == 0, np.float32(0), inverse))
        assert np.array_equal(e.codes.numpy(), codes.astype(np.int8))
        assert e.scale is not None and np.array_equal(e.scale.numpy(), scale)
    assert not torch.equal(on_gpu.codes, on_cpu.codes)  # so both are needed


def test_power_of_two_outer_scales() -> None:
    x = values()
    e, dynamic = get_format("nvfp4-pow2").encode(x), get_format("nvfp4").encode(x)
    assert e.outer is not None and dynamic.outer is not None
    assert e.outer.frexp().mantissa == 0.5 and dynamic.outer <= e.outer < 2 * dynamic.outer
    exact = x.clone()
    exact[0, 0] = 2688.0 * 4  # absmax / 2688 is a power of two already
    assert get_format("nvfp4-pow2").encode(exact[:1]).outer == 4.0  # type: ignore[comparison-overlap]
    assert get_format("nvfp4-pow2").fix(0.125) == get_format("nvfp4-static:0.125")
