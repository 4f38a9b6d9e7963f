"""Triton kernels. Imported when a CUDA device first asks for them; `ops/codec/triton_kernels.py` and the files of
`ops/gemm` say which there are.
"""
