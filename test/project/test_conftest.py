"""Check what test/conftest.py gives every test: poisoned memory, one seed, and the threads that the session chose."""

from pathlib import Path

import pytest
import torch

THREADS = torch.get_num_threads()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
def test_empty_floats_read_nan(dtype: torch.dtype, device: torch.device) -> None:
    assert torch.empty(3, 5, dtype=dtype, device=device).float().isnan().all()
    assert torch.empty_like(torch.zeros(3, 5, dtype=dtype, device=device)).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_empty_integers_read_their_maximum(dtype: torch.dtype, device: torch.device) -> None:
    assert (torch.empty(3, 5, dtype=dtype, device=device) == torch.iinfo(dtype).max).all()


@pytest.mark.no_poison
def test_no_poison_leaves_float4_storage_usable() -> None:
    packed = torch.arange(16, dtype=torch.uint8).view(4, 4).view(torch.float4_e2m1fn_x2)
    assert torch.equal(packed.clone().view(torch.uint8), packed.view(torch.uint8))


def test_seed_gives_each_test_the_same_numbers(seed: int) -> None:
    drawn = torch.randn(4)
    assert torch.equal(drawn, torch.randn(4, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("threads", [5, 6, 7])
def test_threads_of_an_earlier_test_are_taken_back(threads: int) -> None:
    assert torch.get_num_threads() == THREADS
    torch.set_num_threads(threads)


def test_what_torch_2_11_fails_is_listed_under_names_that_exist() -> None:
    root = Path(__file__).parents[2]
    listed = (root / "test/support/torch_2_11.txt").read_text(encoding="utf-8").splitlines()
    named = {tuple(line.partition("[")[0].split("::")) for line in listed if not line.startswith("#")}
    assert len(named) > 10
    assert [n for n in named if f"def {n[1]}(" not in (root / n[0]).read_text(encoding="utf-8")] == []
