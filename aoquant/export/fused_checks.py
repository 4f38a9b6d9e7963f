"""The checks at export of layers that engines fuse: they share what the engine has one of (`planning/fused.py` says
why), and one scheme, because the engine makes one layer of them.

vLLM keeps the largest of the siblings' stored numbers. Codes under another outer scale then mean other values; fp8
codes under another scale of the tensor are rounded anew; activations are quantised under a scale that was not trained.
Source: vLLM 0.32, `compressed_tensors_w4a4_nvfp4.py`, `compressed_tensors_w8a8_fp8.py`, `modelopt.py`,
`requantize_with_max_scale`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from aoquant._messages import some, warn
from aoquant.export.targets import Stored
from aoquant.planning.fused import siblings

_OUTER = "outer scale"
_WEIGHT = "weight scale"
_ACTIVATION = "activation scale"
_ONE = {  # what a fused layer has one of, by the names of tensors
    "weight_global_scale": _OUTER,
    "weight_scale_2": _OUTER,
    "weight_scale": _WEIGHT,  # of fp8-tensor; others have more of them
    "input_global_scale": _ACTIVATION,
    "input_scale": _ACTIVATION,
}
INSTEAD = {  # what to train, as advice
    _OUTER: "aoquant.quantize_ shares outer scales of nvfp4-pow2: train QATConfig('vllm-nvfp4'), or 'vllm-nvfp4-weight' without "
    "activations, under their own scales='static', not 'dynamic'; or quantise with 'vllm-nvfp4-weight' without training",
    _WEIGHT: "train weights with a scale for each row, such as fp8-row in the recipe vllm-fp8, or leave these layers out (skip)",
    _ACTIVATION: "calibrate activation scales and leave them static, which is one scale for one input, or train activations with a "
    "scale for each token, as the recipes vllm-fp8 and vllm-int8 do, or leave these layers out (skip)",
}


def unequal(numbers: Mapping[str, Tensor], modules: Mapping[str, nn.Module] | None = None) -> list[list[str]]:
    """The groups of siblings whose numbers, given by module, differ. numbers: one each, for every row or once. modules:
    of the model, which remember groups that were given by name.
    """
    first = {name: number.flatten()[:1] for name, number in numbers.items()}
    return [g for g in siblings(first, modules) if not all(torch.equal(first[g[0]], first[name]) for name in g)]


def apart(layers: Mapping[str, Stored], modules: Mapping[str, nn.Module]) -> list[tuple[str, dict[str, float]]]:
    """Every group of siblings whose fused layer would have one number for their several: its kind, and by module."""
    found = []
    for part, kind in _ONE.items():
        stored = ((name, s.tensors[part]) for name, s in layers.items() if part in s.tensors)
        numbers = {name: t for name, t in stored if t.dim() < 2 and t.numel() == 1}  # those of blocks are 2-D
        found += [(kind, {n: numbers[n].item() for n in group}) for group in unequal(numbers, modules)]
    return found


def check_fused(layers: Mapping[str, Stored], modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError that lists the siblings whose fused layer would have one number where they have several."""
    lines = []
    for kind, numbers in (found := apart(layers, modules)):
        scales = ", ".join(f"{name.rpartition('.')[2]} {number:.6g}" for name, number in numbers.items())
        parent = next(iter(numbers)).rpartition(".")[0]
        lines.append(f"{parent}: an engine fuses these layers under one {kind}, and theirs differ ({scales})")
    if lines:
        rest = "\n".join([*lines, *dict.fromkeys(INSTEAD[kind] for kind, _ in found)])
        raise ValueError(f"nothing was written, because vLLM would compute with other numbers:\n{rest}")


def warn_mixed(linears: Iterable[str], schemes: Mapping[str, Any]) -> None:
    """Warn of siblings with different schemes. linears: every one, by name. schemes: of the quantised ones."""
    mixed = []
    for group in siblings(dict.fromkeys((*linears, *schemes))):
        if len({str(schemes.get(name)) for name in group}) > 1:
            parent = group[0].rpartition(".")[0]
            mixed.append(f"{parent}.{{{', '.join(name.rpartition('.')[2] for name in group)}}}")
    if mixed:
        warn(
            f"vLLM fuses q, k, v and gate, up into one layer each, and refuses different schemes in one, as in {some(mixed)}: quantise "
            "them alike, or skip all of them; transformers reads the folder"
        )
