"""Where a result comes from: the lines that every log and manifest of this folder states."""

import hashlib
import platform
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from checkout import commit


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def provenance(device: str) -> dict[str, Any]:
    """Date (UTC), the commit of this code, the versions that decide the numbers, and the device's name."""
    versions = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit() or "unknown",
        "versions": {"python": platform.python_version()} | versions,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else f"cpu ({platform.machine()})",
    }


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON can hold them: paths as strings."""
    as_text = {k: [str(v) for v in value] if isinstance(value, tuple) else value for k, value in settings.items()}
    return {k: str(value) if isinstance(value, Path) else value for k, value in as_text.items()}
