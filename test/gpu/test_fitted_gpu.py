"""Fitted transforms on float64 tensor cores: the reference's bytes, on a CPU and on CUDA, and its gradients."""

from __future__ import annotations

import pytest
import torch
from support.bits import compare, differing
from support.gemm import coded
from support.gpu import captured
from support.kernel_inputs import BF16, CUDA, F16, F32, inputs

from aoquant import backend, ops
from aoquant.formats import Scales, get_operand
from aoquant.ops import CodecRequest, codec
from aoquant.transforms.wush import fit, gram

pytestmark = pytest.mark.gpu

FORMATS = ("nvfp4", "nvfp4-static:0.001", "nvfp4-none", "mxfp4", "nvfp4-row", "int8-row", "high-precision")
SIZES = (16, 32, 64, 128)


@pytest.fixture(autouse=True)
def kernel() -> None:
    request = CodecRequest("quantize", get_operand("wush16+nvfp4"), CUDA, BF16, 64, 768)
    if (reason := dict(ops.explain(request))["cuda"]) != "runs":
        pytest.skip(reason)


def matrices(size: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides of a transform fitted to random data, (k / size, size, size) float32 on the CPU."""
    generator = torch.Generator().manual_seed(size + k)
    x = torch.randn(512, k, generator=generator) * torch.randn(k, generator=generator).exp()
    w = torch.randn(512, k, generator=generator)
    return fit(gram(x, size) / 512, gram(w, size) / 512)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_the_references(size: int, dtype: torch.dtype) -> None:
    """Activations' side and weights' side; magnitudes far apart, NaN, Inf, rows that 16 does not divide."""
    sides = [m.to(CUDA) for m in matrices(size, 768)]
    made = inputs(dtype)
    for kind in ("large", "every", "minus-zeros", "zeros"):
        for rows in (1, 17, len(made[kind])):
            x = made[kind][:rows].contiguous().to(CUDA)
            for matrix in sides:
                held = Scales(transform=matrix)
                for name in FORMATS:
                    operand = get_operand(f"wush{size}+{name}")
                    got = coded(x, operand, held)
                    with backend("reference"):
                        want = coded(x, operand, held)
                    compare(got, want, f"{name} {kind} {rows} rows")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [128, 384, 4224])
def test_every_width(size: int, k: int) -> None:
    """Strips of 64 columns that are not full, and grids that are not."""
    matrix = matrices(size, k)[0].to(CUDA)
    x = torch.randn(333, k, device=CUDA, dtype=BF16)
    for name in ("nvfp4", "mxfp4"):
        operand, held = get_operand(f"wush{size}+{name}"), Scales(transform=matrix)
        with backend("reference"):
            want = coded(x.cpu(), operand, Scales(transform=matrix.cpu()))
        compare(coded(x, operand, held), want, f"{name} K = {k}, against the CPU")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size: int, dtype: torch.dtype) -> None:
    operand = get_operand(f"wush{size}+nvfp4")
    matrix = matrices(size, 768)[1].to(CUDA)
    x = torch.randn(77, 768, device=CUDA).to(dtype)
    clipped = torch.randint(0, 256, (77, 96), dtype=torch.uint8, device=CUDA)
    runs = (
        lambda: codec.transform(operand, x, matrix),
        lambda: ops.pull_back(x, operand, matrix),
        lambda: ops.pull_back(x, operand, matrix, clipped),
        lambda: ops.pull_back(x[:, 128:640], operand, matrix[128 // size : 640 // size]),
    )
    for i, run in enumerate(runs):
        got = run()
        with backend("reference"):
            want = run()
        assert differing(got, want) == 0, i


def test_a_matrix_is_needed() -> None:
    x = torch.randn(16, 64, device=CUDA, dtype=BF16)
    with pytest.raises(ValueError, match="found by calibration"):
        coded(x, get_operand("wush16+nvfp4"), Scales())


def test_graphs_capture_it() -> None:
    operand, matrix = get_operand("wush32+nvfp4"), matrices(32, 768)[0].to(CUDA)
    x = torch.randn(256, 768, device=CUDA, dtype=BF16)
    held = Scales(transform=matrix)
    graph, made = captured(lambda: coded(x, operand, held))
    for seed in range(3):
        x.copy_(torch.randn(256, 768, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        compare(made, coded(x, operand, held), str(seed))
