"""The tables of `aoquant doctor`: this machine's kernels, each of which is tried.

Each recipe prepares a small bf16 layer, trains it for one step, converts it and runs it. Where the kernel of a
converted layer is missing, the table has the kernel's own reason. The prepared layer trains without it.
"""

import copy
import importlib
import importlib.metadata
import importlib.util
import platform
import warnings
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn

from aoquant import ops
from aoquant._messages import AoquantWarning
from aoquant.calibrate import calibrate, uncalibrated
from aoquant.config import QATConfig
from aoquant.linear.prepared import QATLinear
from aoquant.ops import native, native_cpu, native_step
from aoquant.ops.gemm import mslk
from aoquant.quantize import quantize_
from aoquant.recipes import Recipe, list_recipes
from aoquant.targets import PROVED, kernels, resolve

# what torchao raises when the package or the device of a kernel is not there
MISSING_KERNEL = (AssertionError, AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError)


class _Known(NamedTuple):
    """A package that aoquant uses. module: what is imported of it. distributions: names on the package index. Both are
    its own name by default.
    """

    serves: str
    get: str
    module: str = ""
    distributions: tuple[str, ...] = ()


_PACKAGES = {
    "torch": _Known("everything; fp8 and int8 GEMMs", "pip install torch"),
    "torchao": _Known(
        f"its configs and tensors, exact with torchao {', '.join(PROVED)}; checkpoints",
        f"pip install torchao=={PROVED[-1]}.*",
    ),
    "triton": _Known(
        "aoquant's GPU kernels; torchao's fp8 blocks",
        "with torch's CUDA build for Linux, or pip install 'aoquant[triton]'",
    ),
    "mslk": _Known(
        "torchao's int4 and MSLK fp8 layers, on Hopper",
        "pip install 'aoquant[mslk]', that is mslk-cuda (mslk is an empty package)",
        "mslk.gemm",
        ("mslk-cuda", "mslk"),
    ),
    "fbgemm-gpu": _Known(
        "the same operators as mslk, under their earlier name",
        "pip install 'aoquant[fbgemm]', that is fbgemm-gpu-genai",
        "fbgemm_gpu.experimental.gen_ai",
        ("fbgemm-gpu-genai",),
    ),
    "qutlass": _Known(
        "MXFP4 and NVFP4 layers with quantised activations, on Blackwell",
        "CUDA 12.8 or later and pip install --no-build-isolation git+https://github.com/IST-DASLab/qutlass "
        "(the package index has an empty 0.0.0)",
    ),
    "transformers": _Known("models and checkpoints", "pip install 'aoquant[hf]'"),
    "lm-eval": _Known("aoquant eval", "pip install 'aoquant[eval]'", "lm_eval", ("lm_eval",)),
}
# What a kernel package exports where it is more than a name on the package index.
_KERNELS = {"qutlass": "matmul_nvf4_bf16_tn"}
# The packages of which a backend needs one.
_NEEDS = {
    "mslk": ("mslk", "fbgemm-gpu"),
    "qutlass": ("qutlass",),
    **dict.fromkeys(("torchao.blockwise", "triton", "triton-decode", "triton-ggml"), ("triton",)),
}


class Package(NamedTuple):
    """A row about a package: whether it can be used here, its version, what it serves and how to get it."""

    package: str
    found: str
    version: str
    serves: str
    get: str


def packages() -> list[Package]:
    """Return a row for each package that aoquant uses, installed or not."""
    return [Package(name, *_found(name, known), known.serves, known.get) for name, known in _PACKAGES.items()]


def _found(name: str, known: _Known) -> tuple[str, str]:
    """Return whether a package can be used, or why not, and its version."""
    version = next(filter(None, map(_version, known.distributions or (name,))), "-")
    path = known.module or name
    try:
        module = importlib.import_module(path) if name in _KERNELS else importlib.util.find_spec(path)
    except Exception as error:  # a package of binaries fails to import in any way it likes
        absent = version == "-" and isinstance(error, ModuleNotFoundError)
        return ("no" if absent else f"no: {path} cannot be imported ({type(error).__name__})"), version
    if module is None or (name in _KERNELS and not hasattr(module, _KERNELS[name])):
        return ("no" if version == "-" else "no: what is installed has no kernels"), version
    return "yes", version


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    """(what, version or description) of Python, aoquant's own kernels and devices."""
    rows = [("python", platform.python_version())]
    rows.append(("CUDA kernels", native.why_not() or "built"))
    rows.append(("step library", native_step.why_not() or "built"))
    rows.append(("CPU kernels", native_cpu.why_not() or f"built; run by {native_cpu.level()}"))
    if not torch.cuda.is_available():
        return [*rows, ("GPU", "none that torch can use; everything runs on the CPU")]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"))
    return rows


def backends(device: str | None = None) -> list[tuple[str, str]]:
    """(backend, the contracts that it runs here, or why it runs none)."""
    where = torch.device(device or default_device())
    absent = {p.package: p.found for p in packages() if p.found != "yes"}
    known, rows = [], []
    for recipe in list_recipes():
        with suppress(ValueError, ImportError):  # `recipes` says why
            known.append(resolve(recipe.make()).recipe)
    for name in ops.backend_names():
        runs: list[str] = []
        reasons: list[str] = []
        for r in known:
            said = kernels.refusal(name, r, where, torch.bfloat16, 128, 256)
            if said is None:
                runs.append(r.contract)
            elif not said.endswith(f"not {r.contract}"):  # which is another backend's, and says nothing about this one
                reasons.append(said)
        reason = next(iter(reasons), "no recipe asks for it")
        # the first recipe's reason may be its format or the device, and the package is absent all the same
        needs = _NEEDS.get(name, ())
        if needs and absent.keys() >= set(needs):
            reason = f"{needs[0]} is not installed; {reason}"
        rows.append((name, "runs " + ", ".join(sorted(set(runs))) if runs else reason))
    return rows


class Tried(NamedTuple):
    """Say whether a recipe's layer trains, runs converted, and computes the same in both: "yes", or why not."""

    recipe: str
    trains: str
    runs: str
    equal: str


def recipes(device: str | None = None) -> list[Tried]:
    """Return every recipe for linear layers."""
    return [_try(r, device or default_device()) for r in list_recipes() if not (r.experts or r.kv_cache)]


def default_device() -> str:
    """Return "cuda" where torch can use a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def slow_in_bfloat16(device: str) -> bool:
    """Return whether `device` is a CPU that multiplies bfloat16 slower than float32: 30 times without AVX-512."""
    return device.partition(":")[0] == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")


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
        missing = contract in mslk.OPERATORS and not isinstance(error, ValueError)
        reason = mslk.why_not_operator(mslk.OPERATORS[contract]) if missing else None
        return Tried(recipe.name, "yes", reason or _line(error), "not run")
    return Tried(recipe.name, "yes", "yes", "bit-equal" if same else "DIFFERENT")


def _line(error: BaseException) -> str:
    """Return the last line of a message: the problem of the only layer, without its name and shape."""
    return str(error).strip().splitlines()[-1].strip().removeprefix("linear (128, 256): ")
