"""The workers of a table: a process for each row and loss, spread over the GPUs of this machine.

Several processes share a GPU by turns: while one imports, compiles or scores, others train.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from typing import TextIO

import torch

from experiments.rows import Row


class Processes:
    """Workers that run, each on the visible GPU that has fewest of them.

    Of the machine's cores each may take its part: PyTorch's and Inductor's defaults are all of them for each process.
    """

    def __init__(self, o: argparse.Namespace, lock: TextIO) -> None:
        """lock: a file that each holds open, so that what it locks is free when the last has ended."""
        self.o, self.lock = o, lock
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        cuda = torch.device(o.device).type == "cuda"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        self.gpus = visible.split(",") if cuda else [""]
        self.gpu_of: dict[str, str] = {}
        cores = str(max(1, (os.cpu_count() or 1) // max(1, o.jobs)))
        limits = {"OMP_NUM_THREADS": cores, "TORCHINDUCTOR_COMPILE_THREADS": cores}
        self.environment = {**limits, "HF_HUB_OFFLINE": "1", **os.environ}

    def begin(self, row: Row, loss: str, until: float) -> None:
        name, o = f"{row.name}, {loss}", self.o
        taken = [self.gpu_of[other] for other in self.running]
        self.gpu_of[name] = gpu = min(self.gpus, key=taken.count)
        command = [sys.executable, *sys.argv, "--worker", row.name, loss, "--until", str(until)]
        environment = self.environment | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        with (o.out / "logs" / f"{row.name}-{loss}.log").open("a") as log:
            how = {"env": environment, "pass_fds": (self.lock.fileno(),), "process_group": 0}
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, **how)  # type: ignore[call-overload]

    def ended(self) -> dict[str, int]:
        """Exit status of every process that has ended since the last call."""
        return {name: self.running.pop(name).returncode for name, p in [*self.running.items()] if p.poll() is not None}

    def kill(self) -> None:
        """With the processes that they have started, such as lm-eval's."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
