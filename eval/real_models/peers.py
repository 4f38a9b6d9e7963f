"""Other tools' PTQ beside aoquant's: llm-compressor's, on the tokens that `RECIPE+gptq` sees.

The model is what the tool writes into a folder, as transformers reads it. llm-compressor wants versions of its own, so
that these rows run where it is installed beside aoquant, and fail elsewhere.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from calibrated_ptq import llm_compressor


def quantised(float_model: Any, blocks_BT: Tensor, modifier: str) -> Any:
    """Return a model quantised by llm-compressor's class `modifier`. blocks_BT: token ids to calibrate on."""
    model = copy.deepcopy(float_model).cpu()  # it moves layers to the GPU itself
    llm_compressor(model, blocks_BT, modifier)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        read = AutoModelForCausalLM.from_pretrained(folder, dtype=float_model.dtype, trust_remote_code=False)
    return read.to(float_model.device).eval()
