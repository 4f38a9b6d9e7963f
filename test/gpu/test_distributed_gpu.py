"""FSDP2, DDP and tensor parallelism over NCCL: the checks of `distributed_checks`, on two GPUs."""

import pytest
import torch
from support import distributed_checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),  # the fixture makes every check, and both processes compile every kernel
    pytest.mark.xdist_group("distributed"),  # one process runs them all, on both GPUs
    pytest.mark.skipif(torch.cuda.device_count() < distributed_checks.WORLD, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("distributed")
    return {
        name: error
        for slow in (False, True)
        for name, error in distributed_checks.run("nccl", "cuda", directory, slow=slow).items()
    }


@pytest.mark.parametrize("name", distributed_checks.CHECKS)
def test_two_gpus(results: dict[str, str], name: str) -> None:
    assert results.get(name, "was not reached") == "", results[name]
