"""FSDP2, DDP and tensor parallelism over NCCL: the checks of `distributed_checks`, on two GPUs.

Several pairs of processes share the two GPUs, because most of the time goes into compiling kernels. Shards that
CPUOffloadPolicy keeps on the CPU are gathered over gloo.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import distributed_checks

PAIRS = 8
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("distributed"),  # one process starts them all
    pytest.mark.skipif(torch.cuda.device_count() < distributed_checks.WORLD, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    names = list(distributed_checks.CHECKS)
    folders = [tmp_path_factory.mktemp("pair") for _ in range(PAIRS)]

    def pair(i: int) -> dict[str, str]:
        return distributed_checks.run("cpu:gloo,cuda:nccl", "cuda", folders[i], names[i::PAIRS])

    with ThreadPoolExecutor(PAIRS) as pairs:
        return {name: error for found in pairs.map(pair, range(PAIRS)) for name, error in found.items()}


@pytest.mark.parametrize("name", distributed_checks.CHECKS)
def test_two_gpus(results: dict[str, str], name: str) -> None:
    assert not (error := results.get(name, "was not reached")), error
