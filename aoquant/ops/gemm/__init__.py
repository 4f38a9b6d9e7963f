"""GEMM backends: one file for the kernels of one package or idea, with what they compute, when they can, and how they
are called.

To add one: a file that ends in a tuple BACKENDS, and its name here.
"""

from . import (
    blackwell,
    cpu,
    few_rows,
    ggml_gemm,
    mslk,
    one_call,
    packed_fp4,
    qutlass,
    reference,
    tensor_cores,
    torch_int4,
    torch_kernels,
)

_FILES = (
    reference,
    tensor_cores,
    packed_fp4,
    few_rows,
    one_call,
    blackwell,
    qutlass,
    torch_kernels,
    torch_int4,
    mslk,
    ggml_gemm,
    cpu,
)
BACKENDS = tuple(backend for file in _FILES for backend in file.BACKENDS)
