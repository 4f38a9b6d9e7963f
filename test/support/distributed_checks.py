"""Every check that two processes make together, see `distributed_setup`."""

from support import (
    checks_backward,
    checks_checkpoints,
    checks_data_parallel,
    checks_delayed,
    checks_gather,
    checks_tensor_parallel,
)
from support.distributed_setup import CHECKS, SLOW, WORLD, run

NUMBERED = [name for name in CHECKS if name.startswith("test_")]  # points of docs/hybrid.md's list
one_process_resumes, RESUMED = checks_checkpoints.one_process_resumes, checks_checkpoints.RESUMED
__all__ = [
    "CHECKS",
    "NUMBERED",
    "RESUMED",
    "SLOW",
    "WORLD",
    "checks_backward",
    "checks_data_parallel",
    "checks_delayed",
    "checks_gather",
    "checks_tensor_parallel",
    "one_process_resumes",
    "run",
]
