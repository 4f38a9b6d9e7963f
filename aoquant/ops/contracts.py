"""GEMM contracts: what a kernel computes from the same operands, down to where it rounds.

Two kernels that read the same codes still differ in their epilogue: whether the outer scale multiplies the float32
accumulator or an already rounded result, and whether the bias is added before or after that rounding. A QAT forward
that is to equal a deployed layer has to name the kernel it imitates, so the epilogue has a name, travels with the
recipe and with the packed tensor, and every backend states which contracts it keeps.

| contract        | deployed layer                        | y =                                                        |
|-----------------|---------------------------------------|------------------------------------------------------------|
| aoquant         | aoquant's packed tensor               | rn(acc * alpha_x * alpha_w + bias), one rounding           |
| bias_after      | MSLK / FBGEMM int4                    | rn(rn(acc) + bias), bf16 activations only                  |
| fp8_bias_after  | the same with fp8 activations         | rn(rn(acc * alpha_x [* alpha_w]) + bias), bf16 output only |
| tinygemm_cuda   | torchao int4, tile_packed_to_4d       | rn_bf16(rn_bf16(acc) + rn_bf16(bias)), x rounded to bf16   |
| tinygemm_cpu    | torchao int4, opaque (CPU)            | rn(rn(acc) + bias), acc in k's order by fused multiply-add |
| dequantize      | torchao Intx, NVFP4 weight only       | F.linear(decode(x), decode(w), bias)                       |
| dequantize_flat | torchao MXTensor, emulated            | the same over x flattened to 2-D                           |
| matmul_bias     | torchao Float8Tensor, weight only     | matmul(x, decode(w)^T) + bias                              |
| int8_rescale    | torchao Int8Tensor, weight only       | rn(acc) * rn(alpha_w) + bias                               |
| int8_dynamic    | torchao Int8Tensor, int8 activations  | rn(int32 acc * alpha_x) [- zero point term], * alpha_w     |
| fp8_scaled_mm   | torchao Float8Tensor, fp8 activations | torch._scaled_mm(codes, codes^T, alphas, bias)             |
| fp8_mslk        | the same with KernelPreference.MSLK   | rn(rn(acc * alpha_x * alpha_w) + bias); float32 bias fused |
| .._precise      | both, mm_config.use_fast_accum=False  | the same with full float32 accumulation                    |
| fp8_blocks      | torchao Float8Tensor, blocks of 128   | rn(rn(acc) + bias), bf16 activations only                  |
| nvfp4_rescale   | torchao NVFP4Tensor on Blackwell      | rn(rn(acc) * rn(alpha_x * alpha_w)) + bias                 |
| ggml            | llama.cpp's quantised rows            | rn(float32 sum of blocks' integer sums * scales + bias)    |

acc is the float32 sum of products of operands; rn rounds to the output's dtype. An operand is `Format.operand` in the
compute dtype: codes times the scales of blocks, rounded to it. Where both operands are float8 in
blocks along K, acc is the sum over blocks, in K's order, of (the block's products summed) * x's scale * w's scale, as
DeepSeek-V3's kernel has it.
"""

import torch

_BFLOAT16 = {
    "bias_after": "the MSLK int4 kernel takes bfloat16 activations",
    "fp8_bias_after": "the MSLK int4 kernel for fp8 activations returns bfloat16",
    "fp8_mslk": "the MSLK fp8 kernel returns bfloat16",
    "fp8_mslk_precise": "the MSLK fp8 kernel returns bfloat16",
    "fp8_blocks": "torchao's blockwise fp8 kernel takes bfloat16 activations",
}


def input_error(contract: str, dtype: torch.dtype, weight: torch.dtype) -> str | None:
    """Return why the kernel of `contract` cannot take activations of `dtype` with a weight whose scales are in dtype
    `weight`; or None.
    """
    if contract == "aoquant":  # takes everything, and a compiled layer need not watch the table
        return None
    if contract in _BFLOAT16 and dtype != torch.bfloat16:
        return (
            f"{_BFLOAT16[contract]}, got {dtype} activations: run the model in bfloat16, or under "
            "torch.autocast(dtype=torch.bfloat16), or use aoquant.Int4WeightConfig or aoquant.FP8WeightConfig, which take any dtype"
        )
    if contract == "nvfp4_rescale" and dtype == torch.float16:
        return (
            "torchao's NVFP4 layer rounds sums of unscaled codes to the output's dtype, and float16 overflows there: run the model in "
            "bfloat16, or under torch.autocast(dtype=torch.bfloat16), or use aoquant.NVFP4WeightConfig, which takes any dtype"
        )
    if contract == "tinygemm_cpu" and dtype != weight:
        return (
            f"PyTorch's CPU int4 kernel takes activations in the weight's dtype, {weight}, got {dtype}: cast the model or the input, "
            "and leave autocast off"
        )
    return None


_READS = {
    **dict.fromkeys(("aoquant", "bias_after", "nvfp4_rescale"), "operand"),
    **dict.fromkeys(("dequantize", "dequantize_flat", "matmul_bias"), "decoded"),
}


def reads(contract: str) -> str:
    """The form in which a GEMM under `contract` reads an encoded x: "operand", "decoded", or "codes"."""
    return _READS.get(contract, "codes")
