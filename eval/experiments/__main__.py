"""`python eval/experiments`: see command.py."""

import sys
import time
from pathlib import Path

BEGAN = time.time()  # before PyTorch is imported

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # eval/: this folder is a package there

from experiments.command import start  # noqa: E402

start(BEGAN)
