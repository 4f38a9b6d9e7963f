"""Operations: one schema each, opaque to compilers, with the backend chosen inside.

    define.py     the boundary between typed Python and PyTorch's dispatcher
    boundary.py   a call's arguments, taken apart and made again
    encoding.py   `encode`: codes of values, and back
    product.py    `matmul`: the GEMM of a linear layer   backward.py  `gradients`: both of backward
    quantized.py  a quantised matrix and its two sides
    grouped.py    the GEMMs of stacked experts  stacks.py   all experts as one matrix
    grouped_bias.py  their biases
    lookup.py     an embedding
    codec/        how one matrix is encoded and decoded, by which kernels
    call.py       a GEMM with its data          gemm/       the kernels that run it
    router.py     which backend runs a request, and why the others do not
    program.py    the kernels of a function, recorded    repeat.py    and repeated, in calls that are alike
    native_program.py  in words for csrc's step library (native_step.py)
    native.py     csrc's CUDA library           native_cpu.py  its CPU library    sources.py  which loads them
    linear_plan.py     a packed layer in one number    expert_rows.py  packed experts of few rows
    columns.py    columns rounded one by one, as GPTQ does
    kv.py         caches of keys and values     delayed_scales.py  scales of earlier steps
    flops.py      what PyTorch's FlopCounterMode counts
    contracts.py  down to which rounding a GEMM is defined

Everything that rounds runs inside an op, and `router` says on which backend.
"""

from . import codec, router
from .backward import BackwardGemm, Gradients, Kept, contraction, gradients
from .call import Call, gemm_request
from .codec import finds_outer, masked
from .contracts import input_error, reads
from .define import schemas
from .delayed_scales import absmax, advance
from .encoding import codes, decode, encode, pull_back, saturated, scale_grad
from .gemm import BACKENDS, reference
from .grouped import gathered_sum, grouped_dgrad, grouped_mm, grouped_wgrad
from .grouped_bias import grouped_bgrad, grouped_bias
from .lookup import embedding, embedding_grad
from .product import bgrad, matmul
from .quantized import Quantized, Side
from .router import Backend, CodecRequest, Request, backend, backend_names, code_readers, explain, register

__all__ = [
    "CONTRACTS",
    "Backend",
    "BackwardGemm",
    "Call",
    "CodecRequest",
    "Gradients",
    "Kept",
    "Quantized",
    "Request",
    "Side",
    "absmax",
    "advance",
    "backend",
    "backend_names",
    "bgrad",
    "code_readers",
    "codec",
    "codes",
    "contraction",
    "decode",
    "embedding",
    "embedding_grad",
    "encode",
    "explain",
    "finds_outer",
    "gathered_sum",
    "gemm_request",
    "gradients",
    "grouped_bgrad",
    "grouped_bias",
    "grouped_dgrad",
    "grouped_mm",
    "grouped_wgrad",
    "input_error",
    "masked",
    "matmul",
    "pull_back",
    "reads",
    "register",
    "router",
    "saturated",
    "scale_grad",
    "schemas",
]

CONTRACTS = tuple(reference.CONTRACTS)
register(*BACKENDS)
