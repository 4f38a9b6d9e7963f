"""Every check that two processes make together, see `distributed_setup`."""

from support import checks_backward, checks_data_parallel, checks_gather, checks_tensor_parallel  # noqa: F401
from support.checks_checkpoints import RESUMED, one_process_resumes
from support.distributed_setup import CHECKS, SLOW, WORLD, run

NUMBERED = [
    name for name in CHECKS if name.startswith("test_")
]  # points of the list in docs/evidence/backward-formats.md
__all__ = ["CHECKS", "NUMBERED", "RESUMED", "SLOW", "WORLD", "one_process_resumes", "run"]
