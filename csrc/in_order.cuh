// Makes a wgmma's left operand out of packed codes, with K in its order in memory.
//
// A product of 16 values of K takes k = 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of lane t: byte t of two words of codes. So
// of the 16 bytes of codes of 32 values, a lane needs byte t of each word. Three permutations gather them.
#pragma once

#include "decode.cuh"

namespace aoquant::decode {

// Scales of 32 values of a row, for pairs that have one value of the first 16 and one of the second.
struct Halves {
  uint32_t s, z;
};

#ifdef AOQUANT_HOPPER
// raw: as they lie in memory, int4's scale below its zero.
template <int F, typename T>
__device__ __forceinline__ Halves halves_of_raw(uint32_t raw, const DecodeArgs& a) {
  const Scale<T> scale = scale_pairs<F, T>(RawScale{raw, raw >> 16}, a);
  return {__byte_perm(scale.s[0], scale.s[1], 0x7610), __byte_perm(scale.z[0], scale.z[1], 0x7610)};
}

// The same in two parts: a word, which the warp that brings scales to shared memory makes once, and what each lane
// makes of that word.
template <int F, typename T>
__device__ __forceinline__ uint32_t word_of_raw(const RawScale& raw, const DecodeArgs& a) {
  if constexpr (F == INT4) return raw.s | raw.z << 16;
  if constexpr (F == GRIDFLIP) return raw.s;  // its shifts are as large again
  return halves_of_raw<F, T>(raw.s, a).s;
}
template <int F, typename T>
__device__ __forceinline__ Halves halves_of_word(uint32_t word, const DecodeArgs& a) {
  if constexpr (F == INT4) return {__byte_perm(word, 0, 0x1010), __byte_perm(word, 0, 0x3232)};
  if constexpr (F == GRIDFLIP) return halves_of_raw<F, T>(word, a);
  return {word, 0};
}

// Byte t of each of four words: the codes of lane t for two products of 16 values, as `operands` pairs nibbles.
__device__ __forceinline__ uint32_t codes_of_lane(const uint4& words, uint32_t select) {
  return __byte_perm(__byte_perm(words.x, words.y, select), __byte_perm(words.z, words.w, select), 0x5410);
}
// `select` of lane t.
__device__ __forceinline__ uint32_t select_of_lane(uint32_t t) { return t | (4 + t) << 4; }

// 32 values of a row, of which lane t has eight: operands of two products, [product][first or second eight of K].
template <int F, typename T>
__device__ __forceinline__ void operands_in_order(uint32_t (&out)[2][2], const uint4& words, uint32_t select, const Halves& scale) {
  uint32_t v[4];  // a pair has a value of the first product and one of the second
  operands<F, T>(v, codes_of_lane(words, select), scale.s, scale.z);
  out[0][0] = __byte_perm(v[0], v[1], 0x5410), out[0][1] = __byte_perm(v[2], v[3], 0x5410);
  out[1][0] = __byte_perm(v[0], v[1], 0x7632), out[1][1] = __byte_perm(v[2], v[3], 0x7632);
}
#endif

}  // namespace aoquant::decode
