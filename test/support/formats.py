"""Names of formats: one of each kind, for tests that are slow, and names beyond `list_formats`, which has no options
and few sizes.
"""

from __future__ import annotations

# every rule, element and granularity that an op treats differently
ONE_OF_EACH = (
    "int4-g32", "int4-bf16-g64", "int4-tinygemm-g64", "int4-tinygemm-cpu-g64", "int4-e4m3-row-g64",
    "intx2-g32", "intx3-row", "intx4-g32-asym", "intx8-row-asym-native", "int8-row", "int8-tensor",
    "int8-row-asym", "fp8-row", "fp8-tensor", "fp8-row-mslk", "fp8-e5m2-row", "fp8-1x64", "fp8-8x64",
    "stretched3-g32", "high-precision", "intx4-g32-asym-sfloat32", "mxfp4", "mxfp4-even", "mxfp8", "nvfp4",
    "nvfp4-none", "nvfp4-static:0.001",
)  # fmt: skip
# keep every promise of a format
EXTRA = [
    "int4-g512", "intx3-g128", "intx4-g64-asym", "intx4-row-asym", "int8-tensor-asym", "nvfp4-static:0.0001",
    "intx1-g32-asym", "intx3-g32-noclip", "intx4-g32-sfloat32", "intx4-row-asym-sfloat32", "int7-row",
    "fp8-1x32", "fp8-e5m2-2x128", "fouroversix-mae-16x16", "gridflip-c0.2",
    "gridflip-search-c0.125-alternating-16x16", "fouroversix-static:3.5", "gridflip-sided-static:5.0",
    "nvfp4-search-static:0.0001", "qutlass-nvfp4-static:0.001", "te-nvfp4-static:4.5",
]  # fmt: skip
# of serving engines
ENGINES = [
    *("q4_0", "q4_1", "q8_0", "q8_0-x86"),
    *("fp8-row-vllm-reciprocal", "int8-row-vllm", "int8-row-vllm-reciprocal"),
]
# divide as their device does
NATIVE = [
    "intx8-row-asym-native", "int8-row-native", "fp8-row-native", "intx4-g64-asym-native",
    "int8-tensor-asym-native", "intx8-row-asym-sfloat32-native", "fp8-1x128-native",
]  # fmt: skip
# bounds clip on purpose, float16 scales underflow, a stretched grid has no zero: their promises are tested by
# themselves
OTHERS = [
    "fp8-row:lb0.5", "fp8-row:ub10.0", "fp8-1x128-native:lb1e-05:ub10.0", "intx4-g32-noclip-sfloat16",
    "intx4-g32-sbfloat16-native", "stretched1-g32", "stretched3-row", "high-precision",
]  # fmt: skip
# with zero points that scales are held with
ASYMMETRIC = ["intx4-g64-asym", "intx4-row-asym", "int8-tensor-asym"]
# whose scales reach over a cut
SHARDED_TOO = ["fp8-row-native", "int8-row-asym-native", "intx4-row-asym", "fp8-row:ub50.0"]
