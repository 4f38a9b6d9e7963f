"""The tables of `aoquant doctor`: this machine's kernels, each of which is tried.

Each recipe prepares a small bf16 layer, trains it for one step, converts it and runs it. Where the kernel of a
converted layer is missing, the table has the kernel's own reason. The prepared layer trains without it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import warnings
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import nn

from aoquant import ops
from aoquant._warning import AoquantWarning
from aoquant.calibrate import calibrate, uncalibrated
from aoquant.config import QATConfig
from aoquant.layers.qat import QATLinear
from aoquant.ops import native, native_cpu
from aoquant.ops.gemm import mslk
from aoquant.quantize import quantize_
from aoquant.recipes import Recipe, list_recipes
from aoquant.targets import resolve

# what torchao raises when the package or the device of a kernel is not there
MISSING_KERNEL = (AssertionError, AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError)
_PACKAGES = ("torch", "torchao", "triton", "transformers", "lm-eval", "mslk-cuda", "fbgemm-gpu-genai")


def check_device(device: torch.device | str) -> None:
    """Raise ValueError unless torch can use `device` here."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = _line(error)
        raise ValueError(
            f"device must be one that torch finds here (`aoquant doctor`), got {str(device)!r}: {reason}"
        ) from None


def versions() -> list[tuple[str, str]]:
    """(what, version or description) of Python, packages, aoquant's own kernels and devices."""
    rows = [("python", platform.python_version())]
    for package in _PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "not installed"))
    rows.append(("CUDA kernels", native.why_not() or "built"))
    rows.append(("CPU kernels", native_cpu.why_not() or f"built; run by {native_cpu.level()}"))
    if not torch.cuda.is_available():
        return [*rows, ("GPU", "none that torch can use; everything runs on the CPU by the reference backend")]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"))
    return rows


def backends(device: str | None = None) -> list[tuple[str, str]]:
    """(backend, the contracts that it runs here, or why it runs none)."""
    where = torch.device(device or _device())
    rows = []
    for name in ops.backend_names():
        runs: list[str] = []
        reasons: list[str] = []
        for recipe in list_recipes():
            try:
                r = resolve(recipe.make()).recipe
            except (ValueError, ImportError):  # `recipes` says why
                continue
            x_format = None if r.fprop_input is None else r.fprop_input.format
            request = ops.Request(r.contract, x_format, r.fprop_weight.format, where, torch.bfloat16, 64, 128, 256)
            said = dict(ops.explain(request))[name]
            if said == "runs" or said.startswith("willing"):
                runs.append(r.contract)
            elif not said.endswith(
                f"not {r.contract}"
            ):  # a contract that is another backend's says nothing about this one
                reasons.append(said)
        rows.append(
            (name, "runs " + ", ".join(sorted(set(runs))) if runs else next(iter(reasons), "no recipe asks for it"))
        )
    return rows


class Tried(NamedTuple):
    """Whether a recipe's layer trains, whether it runs once it is converted, and whether both compute the same: "yes"
    or the reason why not.
    """

    recipe: str
    trains: str
    runs: str
    equal: str


def recipes(device: str | None = None) -> list[Tried]:
    """Every recipe for linear layers."""
    return [_try(r, device or _device()) for r in list_recipes() if not r.experts]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _try(recipe: Recipe, device: str) -> Tried:
    torch.manual_seed(0)
    layer = nn.Sequential(OrderedDict(linear=nn.Linear(256, 128, dtype=torch.bfloat16, device=device)))
    x = torch.randn(64, 256, dtype=torch.bfloat16, device=device)
    try:
        with warnings.catch_warnings():  # a recipe may name layers that a model has and this one lacks
            warnings.filterwarnings("ignore", "the name or pattern .* matches no linear layer", AoquantWarning)
            quantize_(layer, QATConfig(recipe.make(), step="prepare"))
        if uncalibrated(layer):
            calibrate(layer, [x])
        y = layer(x)
        y.float().square().mean().backward()
    except (ValueError, RuntimeError, ImportError) as error:  # an older torchao lacks some configs
        return Tried(recipe.name, _line(error), "-", "-")
    converted = copy.deepcopy(layer)
    try:
        quantize_(converted, QATConfig(step="convert"))
        with torch.no_grad():
            same = torch.equal(y, converted(x))
    except (ValueError, *MISSING_KERNEL) as error:  # a layout that cannot be packed here is a ValueError
        qat = layer.linear
        assert isinstance(qat, QATLinear)
        contract = qat.prepared.recipe.contract
        reason = mslk.why_not_operator(mslk.OPERATORS[contract]) if contract in mslk.OPERATORS else None
        return Tried(
            recipe.name,
            "yes",
            _line(error) if isinstance(error, ValueError) else reason or _line(error),
            "not run",
        )
    return Tried(recipe.name, "yes", "yes", "bit-equal" if same else "DIFFERENT")


def _line(error: BaseException) -> str:
    """The last line of a message: the problem of the only layer, without its name and shape."""
    return str(error).strip().splitlines()[-1].strip().removeprefix("0 (128, 256): ")
