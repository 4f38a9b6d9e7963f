"""GEMM backends: one file per kernel family, each with what it computes, when it can, and how it is called.

To add one: a file that ends in a tuple BACKENDS, and its name here.
"""

from __future__ import annotations

from . import blackwell, cpu, few_rows, mslk, packed_fp4, qutlass, reference, tensor_cores, tinygemm, torch_kernels

_FILES = (reference, tensor_cores, packed_fp4, few_rows, blackwell, qutlass, torch_kernels, tinygemm, mslk, cpu)
BACKENDS = tuple(backend for file in _FILES for backend in file.BACKENDS)
