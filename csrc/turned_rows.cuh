// Which row of W is which row of a wgmma's left operand, for sums that are turned in registers on their way to memory
// (turned_sums.cuh). These are maps of indices alone, so a test on the host can check them.
//
// A warp has 16 rows of W. Lane 4 g + t has rows g and g + 8 of a wgmma's operand and sums, here called row g of half 0
// and of half 1. After the turn the lane has the rows 2 t and 2 t + 1 of both halves, for one token. These four are to
// be neighbours in memory, so that a token's 16 rows are 32 bytes in one piece. Also, 8 lanes read the 8 rows of a half
// at once, and these are to lie in different banks. Rows of 64 bytes in the copy engine's order repeat after 8, so no
// two rows of a half differ by 8.
#pragma once

namespace aoquant::decode {

#ifdef __CUDACC__
#define AOQUANT_INDEX __host__ __device__ __forceinline__ constexpr
#else
#define AOQUANT_INDEX constexpr
#endif

// Row of W, of the warp's 16, that is row g of a half of the operand.
AOQUANT_INDEX int turned_row(int g, int half) { return g / 2 * 4 + (half ^ g / 4) * 2 + g % 2; }

// Whether lane t has, after the turn, its lower two of the rows 4 t to 4 t + 3 in half 1.
AOQUANT_INDEX bool turned_swaps(int t) { return t >= 2; }

// Which piece of 16 bytes of a row of 64 bytes is at place j of the row in shared memory, and the inverse: the copy
// engine's order CU_TENSOR_MAP_SWIZZLE_64B.
AOQUANT_INDEX int piece_of_64(int row, int j) { return j ^ row / 2 % 4; }

}  // namespace aoquant::decode
