"""The build beyond pyproject.toml: packages found by search, the evaluation's assets, CUDA kernels and the step library
where nvcc is there, CPU kernels where a C++ compiler is.

The evaluation's assets live in `eval/assets` and install as `aoquant.assets`, so that `aoquant run` finds them from a
wheel as well as from a checkout: `importlib.resources.files("aoquant.assets")`.

The kernels of `csrc/` are built when torch, with CUDA, can be imported while building and nvcc is there, those of
`csrc/cpu/` when torch and a C++ compiler are; `csrc/*builder.py` say when and how. A build
that has setuptools alone makes the same wheel as ever: pure Python.

    pip install --no-build-isolation .           # with kernels
    python setup.py build_ext --inplace          # kernels into this checkout
"""

import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))
import builder as csrc
import cpu_builder
import step_builder


class BuildPython(build_py):
    """Before the rest: what an earlier build left in build/ goes into no wheel."""

    def run(self) -> None:
        for library in Path(self.build_lib, "aoquant", "ops").glob("*.so"):
            library.unlink()
        super().run()


class BuildNative(build_ext):
    """One library for each kind of device, under a name without a Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Any) -> None:
        target, scratch = Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp)
        if ext.name == csrc.MODULE:
            csrc.build(target, scratch)
        else:
            builder = cpu_builder if ext.name == cpu_builder.MODULE else step_builder
            builder.build(csrc.import_torch(), target, scratch)


class Wheel(bdist_wheel):
    """With kernels: bound to the platform, to no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


torch, kernels = csrc.import_torch(), []
if csrc.wanted():
    kernels.append(Extension(csrc.MODULE, [f"csrc/{s.name}" for s in csrc.sources()]))
    if cpu_builder.why_not(torch, cpu_builder.find_compiler()) is None:
        kernels.append(Extension(step_builder.MODULE, ["csrc/step/step.cpp"], optional=True))
if cpu_builder.wanted(torch):
    kernels.append(Extension(cpu_builder.MODULE, [f"csrc/cpu/{s.name}" for s in cpu_builder.FOLDER.glob("*.cpp")]))
setup(
    packages=[*find_packages(include=["aoquant", "aoquant.*"]), "aoquant.assets"],
    package_dir={"aoquant.assets": "eval/assets"},
    ext_modules=kernels,
    cmdclass={"build_py": BuildPython, **({"build_ext": BuildNative, "bdist_wheel": Wheel} if kernels else {})},
)
