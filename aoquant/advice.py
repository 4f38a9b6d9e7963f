"""Errors on the command line: they advise its options instead of Python.

Most errors come from the library, whose users write Python: "leave it out with filter_fn". A user of `aoquant run` has
no filter_fn. The phrases that an error of the commands can hold are listed here with what does the same there.
"""

from __future__ import annotations

import re

ADVICE = {
    "leave it out with filter_fn": "leave it out with --skip NAME",
    "leave it out": "leave it out with --skip NAME",
    "leave the layer out": "leave the layer out with --skip NAME or --skip-incompatible",
    "choose layers with filter_fn": "choose layers with --layers NAME",
    "check filter_fn and the patterns": "check --layers and --skip",
    "unless filter_fn or FqnToConfig names them": "unless --embeddings or --layers NAME=RECIPE names them",
    "choose both, with one config, by filter_fn or FqnToConfig": "choose both, by --embeddings",
    "choose a group that divides K": "choose a recipe whose group divides K (`aoquant recipes`)",
    "choose a config that makes one of them, or use torch.save(model.state_dict()), for a machine with the same kernels": (
        "choose a recipe whose name does not begin with torchao (`aoquant recipes`)"
    ),
    "load the model whole and use aoquant.quantize_": "load the model whole, in Python, and use aoquant.quantize_",
    "quantize_(model, QATConfig(config, step='prepare')), aoquant.calibrate(model, forward_loop), then "
    "quantize_(model, QATConfig(step='convert'))": "`aoquant run` calibrates it",
    'aoquant.FP8WeightConfig(granularity="block")': "--recipe fp8-block",
    "aoquant.FP8WeightConfig": "--recipe fp8",
    "aoquant.MXFP8WeightConfig": "--recipe mxfp8",
    "aoquant.NVFP4WeightConfig": "--recipe nvfp4",
}
_PHRASE = re.compile("|".join(re.escape(phrase) for phrase in sorted(ADVICE, key=len, reverse=True)))


def for_the_command_line(message: str) -> str:
    """The message with options of the command line in place of Python calls."""
    return _PHRASE.sub(lambda match: ADVICE[match[0]], message)
