"""What pyproject.toml cannot say: packages under `aoquant` are found by search, and one more lies elsewhere.

The evaluation's assets live in `eval/assets` and install as `aoquant.assets`, so that `aoquant run` finds them from a
wheel as well as from a checkout: `importlib.resources.files("aoquant.assets")`. Nothing here imports torch: an isolated
build needs setuptools alone.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["aoquant", "aoquant.*"]), "aoquant.assets"],
    package_dir={"aoquant.assets": "eval/assets"},
)
