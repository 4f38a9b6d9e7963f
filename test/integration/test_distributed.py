"""FSDP2, DDP and tensor parallelism on the CPU: two processes, gloo, every check of `distributed_checks`."""

from pathlib import Path

import distributed_checks
import pytest

FAST = [name for name in distributed_checks.CHECKS if name not in distributed_checks.SLOW]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, str]:
    return distributed_checks.run("gloo", "cpu", directory, slow=False)


# one group: with several workers, the two processes are started by one of them
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize("name", FAST)
def test_two_processes(results: dict[str, str], name: str) -> None:
    assert results.get(name, "was not reached") == "", results[name]


@pytest.mark.parametrize("how", ["fsdp", "tensor-parallel"])
def test_one_process_resumes_what_two_saved(results: dict[str, str], directory: Path, how: str) -> None:
    assert results[f"a_checkpoint_resumes_bitwise-{how}"] == ""
    distributed_checks.one_process_resumes(directory, how)


@pytest.mark.slow
def test_wide_sweep(tmp_path: Path) -> None:
    failed = {k: v for k, v in distributed_checks.run("gloo", "cpu", tmp_path, slow=True).items() if v}
    assert not failed, "\n\n".join(f"{k}\n{v}" for k, v in failed.items())
