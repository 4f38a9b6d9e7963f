"""`python eval/experiments`: see command.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # eval/: this folder is a package there

from experiments.command import start  # noqa: E402

start()
