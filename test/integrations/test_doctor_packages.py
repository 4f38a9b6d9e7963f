"""The rows of `aoquant doctor` about packages, there, in name alone or absent, and about devices."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from aoquant import Int4WeightConfig, LinearRecipe, QATConfig, cli, ops
from aoquant.recipes import Recipe, get_recipe
from aoquant.tools import doctor

# row: the module that is imported, and its distribution
ROWS = {
    "torch": ("torch", "torch"),
    "torchao": ("torchao", "torchao"),
    "triton": ("triton", "triton"),
    "mslk": ("mslk.gemm", "mslk-cuda"),
    "fbgemm-gpu": ("fbgemm_gpu.experimental.gen_ai", "fbgemm-gpu-genai"),
    "qutlass": ("qutlass", "qutlass"),
    "transformers": ("transformers", "transformers"),
    "lm-eval": ("lm_eval", "lm_eval"),
}


def row(name: str) -> doctor.Package:
    return next(p for p in doctor.packages() if p.package == name)


def give(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, version: str | None) -> None:
    """Make `import qutlass` give the module, or fail, and its distribution have the version, or none."""
    real = importlib.metadata.version

    def told(name: str) -> str:
        if name != "qutlass":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", told)
    monkeypatch.setitem(sys.modules, "qutlass", module)


def test_every_package_has_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "recipes", lambda: [doctor.Tried("one", "yes", "yes", "bit-equal")])
    monkeypatch.setattr(ops, "backend_names", lambda: ["reference"])
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert [p.package for p in doctor.packages()] == list(ROWS)
    for p in doctor.packages():
        assert p.serves and p.get and p.package in printed and p.get in printed
    for name in ("torch", "torchao", "transformers"):
        assert row(name)[1:3] == ("yes", importlib.metadata.version(name))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_says_what_is_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package, its module and version; without it, neither; and with a version alone, that it is broken."""
    path, distribution = ROWS[name]
    versions: dict[str, str] = {}

    def told(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    present = ModuleType(path)
    present.__spec__ = ModuleSpec(path, None)
    present.matmul_nvf4_bf16_tn = None  # what qutlass is known by
    with monkeypatch.context() as m:
        m.setattr(importlib.metadata, "version", told)
        m.setitem(sys.modules, path.partition(".")[0], None)
        assert row(name)[1:3] == ("no", "-")
        versions[distribution] = "9.8.7"
        found, version = row(name)[1:3]
        assert found.startswith("no: ") and version == "9.8.7"
        m.setitem(sys.modules, path, present)
        assert row(name)[1:3] == ("yes", "9.8.7")


def test_what_doctor_says_to_install_exists() -> None:
    """Each `aoquant[extra]` is one of pyproject's and brings the row's distribution."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for p in doctor.packages():
        brought = project["dependencies"]
        for extra in re.findall(r"aoquant\[(\w+)\]", p.get):
            brought = project["optional-dependencies"][extra]
        distribution = ROWS[p.package][1].replace("_", "-")
        names = [re.match(r"[\w-]+", requirement).group() for requirement in brought]
        assert distribution in names or p.package == "qutlass", p


@pytest.mark.parametrize(
    ("symbols", "version", "found"),
    [
        (None, None, "no"),
        (None, "0.1.0", "no: qutlass cannot be imported (ModuleNotFoundError)"),
        ((), "0.0.0", "no: what is installed has no kernels"),
        (("matmul_nvf4_bf16_tn",), "0.2.0", "yes"),
        (("matmul_nvf4_bf16_tn",), None, "yes"),
    ],
    ids=["absent", "broken", "placeholder", "there", "there without metadata"],
)
def test_a_name_is_no_package(symbols: Any, version: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = None if symbols is None else ModuleType("qutlass")
    for symbol in symbols or ():
        setattr(module, symbol, None)
    give(monkeypatch, module, version)
    monkeypatch.setattr(ops, "backend_names", lambda: ["qutlass"])  # each backend is tried with every recipe
    assert row("qutlass")[1:3] == (found, version or "-")
    reason = dict(doctor.backends("cpu"))["qutlass"]
    assert reason.startswith("qutlass is not installed; ") == (found != "yes")


def test_a_backend_runs_contracts_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(name: str, recipe: LinearRecipe, *_: object) -> str | None:
        if name == "ggml":
            return None if recipe.contract == "ggml" else f"computes ggml, not {recipe.contract}"
        return {"all": None, "none": f"computes x, not {recipe.contract}"}.get(name, "needs a GPU")

    names = ["all", "ggml", "none", "plain", "mslk", "qutlass"]
    monkeypatch.setattr(doctor.kernels, "refusal", refusal)
    monkeypatch.setattr(ops, "backend_names", lambda: names)
    every = doctor.packages()
    for absent, prefixes in (
        ((), ("", "")),
        (("mslk", "qutlass"), ("", "qutlass")),
        (("fbgemm-gpu", "qutlass"), ("", "qutlass")),
        (("mslk", "fbgemm-gpu"), ("mslk", "")),
    ):
        found = [p._replace(found="no" if p.package in absent else "yes") for p in every]
        monkeypatch.setattr(doctor, "packages", lambda found=found: found)
        said = dict(doctor.backends("cpu"))
        assert list(said) == names
        contracts = said["all"].removeprefix("runs ").split(", ")
        assert contracts == sorted({*contracts}) and {"aoquant", "dequantize", "ggml"} <= {*contracts}
        assert (said["ggml"], said["plain"]) == ("runs ggml", "needs a GPU") and "computes" not in said["none"]
        for name, prefix in zip(("mslk", "qutlass"), prefixes, strict=True):
            assert said[name] == (f"{prefix} is not installed; needs a GPU" if prefix else "needs a GPU")


def test_each_recipe_for_linear_layers_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try", lambda recipe, device: (recipe.name, device))
    tried = dict(doctor.recipes("cpu"))
    assert {*tried.values()} == {"cpu"} and {"nvfp4", "int8-static", "int4-g32-no-attention"} <= tried.keys()
    assert not {"int4-g32-experts", "gguf-q8_0-kv-q8_0"} & tried.keys()
    monkeypatch.setattr(doctor, "default_device", lambda: "found")
    assert {device for _, device in doctor.recipes()} == {"found"}


@pytest.mark.parametrize(
    ("name", "trains", "runs", "equal"),
    [
        ("int8-static", True, True, "bit-equal"),
        ("mxfp4-no-attention", True, True, "bit-equal"),
        ("torchao-int4-preshuffled", True, False, "not run"),
    ],
)
def test_what_a_recipe_does_here(name: str, trains: bool, runs: bool, equal: str) -> None:
    tried = doctor._try(get_recipe(name), "cpu")
    assert (tried.recipe, tried.trains == "yes", tried.runs == "yes", tried.equal) == (name, trains, runs, equal)


def raised(message: str) -> None:
    raise RuntimeError(message)


def test_a_recipe_that_does_not_train_or_converts_to_another_layer_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Recipe("group", lambda: Int4WeightConfig(48), "a group that does not divide K")
    tried = doctor._try(group, "cpu")
    assert "48" in tried.trains and tried[2:] == ("-", "-")
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "backward", lambda *args: raised("no backward here"))
        tried = doctor._try(get_recipe("int8-weight"), "cpu")
        assert "no backward here" in tried.trains and tried[2:] == ("-", "-")
    real = doctor.quantize_

    def changed(model: Any, config: QATConfig) -> None:
        real(model, config)
        if config.step == "convert":
            model.linear.bias.data += 1

    monkeypatch.setattr(doctor, "quantize_", changed)
    assert doctor._try(get_recipe("int8-weight"), "cpu") == ("int8-weight", "yes", "yes", "DIFFERENT")


def test_every_device_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {
        "GPU 0": ("One", 9, 0, 80 << 30, "compute capability 9.0, 80 GiB"),
        "GPU 1": ("Two", 12, 1, 11.6 * 2**30, "compute capability 12.1, 12 GiB"),
    }
    names = ("name", "major", "minor", "total_memory")
    found = [SimpleNamespace(**dict(zip(names, gpu, strict=False))) for gpu in gpus.values()]
    for native, said in ((doctor.native, "no nvcc"), (doctor.native_cpu, "no compiler")):
        monkeypatch.setattr(native, "why_not", lambda said=said: said)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    without = dict(doctor.versions())
    assert (without["CUDA kernels"], without["CPU kernels"]) == ("no nvcc", "no compiler") and "GPU" in without
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: found[i])
    rows = dict(doctor.versions())
    assert rows == {k: v for k, v in without.items() if k != "GPU"} | {
        row: f"{name}, {about}" for row, (name, *_, about) in gpus.items()
    }


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert doctor.default_device() == device


def test_bfloat16_is_slow_on_any_cpu_without_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, slow in (("AVX2", True), ("DEFAULT", True), ("AVX512", False), ("AVX512_BF16", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert [doctor.slow_in_bfloat16(device) for device in ("cpu", "cpu:0", "cuda:0")] == [slow, slow, False]
