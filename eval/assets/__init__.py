"""The evaluation's assets: data files, no code. This folder installs as the package `aoquant.assets` (see setup.py)."""
