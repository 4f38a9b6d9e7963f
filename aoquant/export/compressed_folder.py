"""The compressed-tensors folder: one config group for each scheme of the model, and an ignore list of the linear layers
left out.
"""

from __future__ import annotations

import json
from typing import Any

import compressed_tensors
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus

from aoquant.export.fused import check_fused
from aoquant.export.plan import Plan
from aoquant.export.source import Source
from aoquant.export.targets import Description


def describe(source: Source, plan: Plan) -> Description:
    """config.json's quantization_config.

    A model of one scheme targets "Linear" and ignores what is left out; a model of several targets layers by name.
    """
    check_fused(
        {m: s.tensors["weight_global_scale"] for m, s in plan.layers.items() if "weight_global_scale" in s.tensors}
    )
    groups: dict[str, tuple[QuantizationScheme, list[str]]] = {}
    for module, stored in plan.layers.items():
        scheme: QuantizationScheme = stored.scheme
        groups.setdefault(scheme.model_dump_json(), (scheme, []))[1].append(module)
    one = len(groups) == 1
    schemes = {
        f"group_{i}": scheme.model_copy(update={"targets": ["Linear"] if one else modules})
        for i, (scheme, modules) in enumerate(groups.values())
    }
    formats = {scheme.format for scheme in schemes.values()}
    config = QuantizationConfig(
        config_groups=schemes,
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[module for module in source.linears() if module not in plan.layers],
    )
    content: dict[str, Any] = json.loads(config.model_dump_json())
    return Description({**content, "version": compressed_tensors.__version__})
