"""One config of each kind whose packed model goes through a checkpoint: ours, and torchao's."""

from __future__ import annotations

from .linear_cases import BY_NAME

OURS = {
    name: BY_NAME[case].config
    for name, case in {
        "nvfp4": "nvfp4-act",
        "nvfp4-weight": "nvfp4-dynamic",
        "nvfp4-static": "nvfp4-static-act",
        "fouroversix-tiles": "fouroversix-tiles",
        "gridflip": "gridflip-options-act",
        "int4-g32": "int4-g32",
        "intx3-g32": "intx3-g32",
        "int8": "int8-row-act",
        "int8-tensor": "int8-tensor",
        "fp8": "fp8-row-act",
        "mxfp4": "mxfp4-act",
        "mxfp8": "mxfp8-rceil",
        "fp8-block": "fp8-block-act",
        "activations alone": "high-int8-row-asym-act",
    }.items()
}
TORCHAO = {
    name: BY_NAME[f"ao.{case}"].config
    for name, case in {
        "intx": "intx4-g32",
        "int8-intx": "int8act-intx4-g32",
        "int8-weight": "int8-row",
        "int8-int8": "int8act-int8-row",
        "fp8-weight": "fp8-row",
        "fp8-groups": "fp8-g32",
        "stretched": "int8act-stretched2-g32",
        "fp8-fp8": "fp8act-fp8-row",
        "nvfp4-weight-only": "nvfp4-weight-dynamic",
        "mxfp8-emulated": "mxfp8-rceil",
    }.items()
}
