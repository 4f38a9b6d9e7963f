"""The logits that a run saw, as a hash: whether a checkpoint computes on this machine what it computed there.

Sums of floats depend on their order, and with it on the version of torch and on the device. Where both are those of the
record, other logits mean another model: damage, or a kernel that changed. Elsewhere they mean nothing by themselves.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from aoquant.integrations.job.files import read_as

RESULTS = "aoquant_run.json"


@torch.no_grad()
def logits_fingerprint(model: PreTrainedModel, ids_BT: Tensor) -> str:
    """sha256 of the logits' bytes for fixed tokens: equal exactly when the logits are."""
    logits: Tensor = model.eval()(input_ids=ids_BT).logits.contiguous().cpu()
    return hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest()


def environment(device: torch.device | str) -> dict[str, Any]:
    """The environment that the order of sums depends on: torch, the kind of device, which one, and the threads of a
    CPU.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return {"torch": torch.__version__, "device": "cuda", "device_name": torch.cuda.get_device_name(device)}
    name = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
    return {
        "torch": torch.__version__,
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


def check_fingerprint(model: PreTrainedModel, checkpoint: Path) -> str:
    """Whether a loaded checkpoint gives the logits that the run which wrote it saw: a sentence for people.

    Raises:
        ValueError: it gives others, with the torch and on the device of the record.
    """
    path = checkpoint / RESULTS
    if not path.exists():
        return f"no fingerprint beside this checkpoint: `aoquant run` writes {RESULTS}, and no logits were compared"
    needed = ("logits_sha256", "probe_ids", "torch", "device")
    numbers, ids = read_as(
        path, lambda n: ({**n, **{k: n[k] for k in needed}}, torch.tensor(n["probe_ids"], device="cpu").long())
    )
    if numbers["logits_sha256"] is None:
        return "the run that wrote it could not run its kernel"
    here = environment(model.device)
    # a record of an older version names the device by its kind alone
    there = {name: numbers[name] for name in here if name in numbers}
    where = f"torch {numbers['torch']} on {numbers.get('device_name', numbers['device'])}"
    if logits_fingerprint(model, ids.to(model.device)) == numbers["logits_sha256"]:
        return f"logits bit-equal to the run that wrote it ({where})"
    other = {name: value for name, value in there.items() if here[name] != value}
    if not other:
        raise ValueError(
            f"{checkpoint}: logits differ from those of the run that wrote it, with the same {where}: the checkpoint "
            "or a kernel is not what it was; copy the checkpoint again, or run again"
        )
    reasons = ", ".join(f"{name.replace('_', ' ')} is {here[name]} and was {value}" for name, value in other.items())
    return (
        f"logits differ from the run that wrote it ({where}); this says nothing about the checkpoint, because "
        f"{reasons}, and sums in another order give other bits"
    )
