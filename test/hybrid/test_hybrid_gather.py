"""FSDP2 that gathers codes, on two processes: the numbered checks of `support/checks_gather.py`.

The first test starts the processes, which make all of these checks.
"""

from __future__ import annotations

import pytest
from support import distributed_checks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return distributed_checks.run("gloo", "cpu", tmp_path_factory.mktemp("ranks"), distributed_checks.NUMBERED)


def of(point: int) -> pytest.MarkDecorator:
    """The checks of a point."""
    names = [name for name in distributed_checks.NUMBERED if name.startswith(f"test_{point}_")]
    return pytest.mark.parametrize("check", names, ids=[name.removeprefix(f"test_{point}_") for name in names])


@of(19)
def test_19_a_gather_on_two_ranks_is_the_whole_weights_encoding(results: dict[str, str], check: str) -> None:
    assert not (error := results.get(check, "was not reached")), error


@of(20)
def test_20_rows_may_be_uneven_and_tiles_not_split(results: dict[str, str], check: str) -> None:
    assert not (error := results.get(check, "was not reached")), error


@of(21)
def test_21_resharding_changes_nothing_and_fewer_bytes_are_sent(results: dict[str, str], check: str) -> None:
    assert not (error := results.get(check, "was not reached")), error
