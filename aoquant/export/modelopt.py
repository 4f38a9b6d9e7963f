"""NVIDIA ModelOpt's layout: NVFP4 with the outer scale itself, and fp8. vLLM, SGLang and TensorRT-LLM read it.

| quant_algo                | weight           | weight_scale     | weight_scale_2 | input_scale     |
|---------------------------|------------------|------------------|----------------|-----------------|
| NVFP4                     | uint8 (N, K / 2) | e4m3 (N, K / 16) | f32, outer     | f32, calibrated |
| W4A16_NVFP4               | the same         | the same         | the same       | none            |
| FP8                       | e4m3 (N, K)      | f32, one         |                | f32, calibrated |
| FP8_PER_CHANNEL_PER_TOKEN | e4m3 (N, K)      | f32 (N)          |                | made per token  |

NVFP4's bytes hold two codes, even k in the low nibble.

The outer scale multiplies, so any value is stored exactly; compressed-tensors stores a divisor instead. One algorithm
for the whole model. vLLM fuses q, k, v and gate, up under one outer scale: siblings with different ones are refused
here (train the recipe vllm-nvfp4 or vllm-nvfp4-weight). Source: docs/features/quantization/modelopt.md of vLLM;
modelopt's export of a unified Hugging Face checkpoint.
"""

from typing import Any

import torch

from aoquant.export.advice import other_formats
from aoquant.export.compressed import static_scale
from aoquant.export.contents import Contents
from aoquant.export.fused_checks import check_fused
from aoquant.export.source import Source
from aoquant.export.targets import Description, Stored, Unfit, one_outer
from aoquant.formats import get_format
from aoquant.linear.tensor import PackedTensor
from aoquant.serving import differences


def store(p: PackedTensor) -> Stored:
    """The layer's tensors and the algorithm's name.

    Raises:
        Unfit: no algorithm of this layout holds the layer's numbers.
    """
    format, x = p.weight_format, get_format(p.activation) if p.activation else None
    if format.standard == "nvfp4":
        return _nvfp4(p, x)
    if format.standard == "fp8" and format.block is None:
        return _float8(p, x)
    raise Unfit(
        f"this layout holds nvfp4 and fp8, not {format.name}",
        "train the recipe vllm-nvfp4 or vllm-fp8" if p.activation else "train the recipe vllm-nvfp4-weight",
    )


def _nvfp4(p: PackedTensor, x: Any) -> Stored:
    outer = one_outer(p, "the layout one for the layer", "train nvfp4")
    tensors = {"weight": p.qdata, "weight_scale": p.encoded.scales, "weight_scale_2": outer[0].clone()}
    if x is None:
        return Stored(tensors, "W4A16_NVFP4")
    if not x.name.startswith("nvfp4-static:"):
        raise Unfit(
            f"its activations ({p.activation}) have no calibrated outer scale",
            "train the recipe vllm-nvfp4, whose are calibrated, or vllm-nvfp4-weight without quantised activations",
        )
    return Stored({**tensors, "input_scale": torch.tensor(x.fixed[0], device="cpu")}, "NVFP4")


def _float8(p: PackedTensor, x: Any) -> Stored:
    formats: tuple[Any, ...] = p.weight_format, x
    pair = [f.per if f is not None and f.standard == "fp8" else "" for f in formats]
    if pair == ["row", "row"]:
        tensors = {"weight": p.qdata, "weight_scale": p.encoded.scales.flatten()}
        return Stored(tensors, "FP8_PER_CHANNEL_PER_TOKEN", tuple(differences(p.recipe, "vllm")))
    if pair == ["tensor", "tensor"] and x.fixed:
        scales = {"weight_scale": p.encoded.scales.reshape(()), "input_scale": static_scale(x).reshape(())}
        return Stored({"weight": p.qdata, **scales}, "FP8")
    raise Unfit(
        f"the layout holds fp8-row with fp8-row activations, or fp8-tensor with fp8-tensor-static ones, not {p.recipe}",
        "train the recipe vllm-fp8",
    )


def describe(source: Source, contents: Contents) -> Description:
    """config.json's quantization_config and hf_quant_config.json.

    Raises:
        ValueError: layers need several algorithms, or siblings that an engine fuses have different outer scales.
    """
    algorithms: dict[str, str] = {}
    for module, stored in contents.layers.items():
        algorithms.setdefault(stored.scheme, module)
    if len(algorithms) > 1:
        found = ", ".join(f"{algorithm} ({module})" for algorithm, module in algorithms.items())
        others = other_formats(source, "modelopt")(w for w in source.weights.values() if w.module in contents.layers)
        raise ValueError(f"modelopt: one algorithm for the whole model, got {found}: skip some layers{others}")
    algorithm = next(iter(algorithms))
    check_fused(contents.layers, source.modules)
    left = source.left_out(contents.layers)
    quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": left}
    if "NVFP4" in algorithm:
        quantization["group_size"] = 16
    producer = {"name": "modelopt", "version": "0.39.0"}
    config = {"quant_method": "modelopt", **quantization, "ignore": left, "producer": producer}
    return Description(config, {"hf_quant_config.json": {"producer": producer, "quantization": quantization}})
