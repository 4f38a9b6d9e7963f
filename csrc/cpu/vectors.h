// Sixteen float32 lanes, and the few things that the kernels do with them: by AVX-512, by AVX2, or as loops where a CPU
// has neither. Each operation rounds once and alike in all three, so the levels agree to the last bit; sums are fused
// multiply-adds everywhere. What the functions do is said in vectors_avx512.h.
//
// A level may keep 32 values of 4-bit codes in an order of its own (`Pair`), if `arrange` brings x into it (`k_of`) and
// `folded` takes the sums out of it: a lane's chain of additions is the same wherever the lane lies.
#pragma once

#if defined(__AVX512F__)
#include "vectors_avx512.h"

#include "sums_x86.h"
#elif defined(__AVX2__)
#include "vectors_avx2.h"

#include "sums_x86.h"
#else
#include "vectors_plain.h"
#endif
