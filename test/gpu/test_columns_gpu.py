"""GPTQ's loop over columns: the Triton kernel's values, codes and errors are those of the loop on a CPU."""

from __future__ import annotations

import pytest
import torch
from support.kernel_inputs import CUDA

from aoquant import CalibrateConfig, calibrate_ptq
from aoquant.formats import get_format
from aoquant.formats.levels import Levels
from aoquant.ops import columns
from aoquant.ops.codec.triton import lacks_triton
from aoquant.ptq import gptq

pytestmark = pytest.mark.gpu

CASES = [
    ("int4-g128", 300, 256, 1, 128),
    ("nvfp4-row", 48, 256, 3, 128),
    ("gridflip-search-row", 96, 128, 2, 100),
    ("intx3-g32", 1, 64, 1, 40),
    ("int8-row", 40, 128, 2, 128),
    ("fp8-row", 33, 128, 1, 128),
]


@pytest.fixture(autouse=True)
def kernel() -> None:
    if (reason := lacks_triton(CUDA)) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(("name", "n", "k", "experts", "width"), CASES)
def test_a_block_of_columns_has_the_loops_bits(name: str, n: int, k: int, experts: int, width: int) -> None:
    generator = torch.Generator().manual_seed(n)
    f = get_format(name)
    w = torch.randn(experts, n, k, generator=generator)
    parts = [Levels.of(f, f.encode(one), torch.bfloat16) for one in w]
    order = torch.stack([torch.randperm(k, generator=generator)[:width] for _ in range(experts)])
    upper = torch.rand(experts, width, width, generator=generator).triu() / 8 + torch.eye(width)
    left = torch.stack([one.t()[o] for one, o in zip(w, order, strict=True)])
    wanted = columns.round_block(left.clone(), upper, order, Levels.cat(parts))
    there = [Levels(p.values_GRL.cuda(), p.codes_GRL.cuda(), p.block) for p in parts]
    got = columns.round_block(left.cuda(), upper.cuda(), order.cuda(), Levels.cat(there))
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b.cpu())


def test_codes_of_a_gpu_lose_as_little_as_those_of_a_cpu() -> None:
    """GEMMs add in another order, so that some codes differ; the error does not."""
    f = get_format("int4-g128")
    torch.manual_seed(0)
    x, w = torch.randn(4096, 512) @ torch.randn(512, 512), torch.randn(256, 512)
    errors = []
    for device in ("cpu", "cuda"):
        h, there = (x.mT @ x / len(x)).to(device), w.to(device)
        factor = gptq.factor(h, 0.01, True)
        weight = gptq.Weight(there, f.encode(there), h, factor.write_upper(h), factor.order_K)
        errors.append(gptq.choose_codes([weight], f, torch.float32)[0][1])
    assert errors[1] == pytest.approx(errors[0], rel=0.01)


def test_a_model_is_calibrated_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).cuda().bfloat16()
    batches = [torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    report = calibrate_ptq(model, batches, CalibrateConfig("int4-g128"))
    assert all(row.error < 0.95 * row.nearest for row in report.rows)
