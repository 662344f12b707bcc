// Rows of 8-bit numbers with a scale each, as `few_tokens.h` and `panels.h` multiply rows. See `rows.h`.
//
// A number is exact in bfloat16, and its scale comes after the sums.
#pragma once

#include "rows.h"

namespace mrp {

#ifdef MRP_AVX512
// 16 numbers as float32; those that `here` leaves out are not read.
template <bool careful>
MRP_AVX512 inline __m512 load_numbers(const int8_t* from, uint32_t here) {
  const __m128i bytes = careful ? _mm_maskz_loadu_epi8(here, from)
                                : _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// The rows of a weight of 8 bits, one after the other: see `PackedRows`.
struct ByteRows {
  const int8_t* numbers;
  const BFloat16* scales;
  int64_t row_bytes;

  struct Cursor {
    const int8_t* v;

    template <bool careful>
    MRP_AVX512 void next(int64_t width, __m512i (&halves)[2]) {
      const uint64_t columns = width >= WORD ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++, v += WORD / 2) {
        const auto here = static_cast<uint32_t>(columns >> 32 * half);
        const __m512 lower = load_numbers<careful>(v, here & 0xffff);
        const __m512 upper = load_numbers<careful>(v + 16, here >> 16);
        halves[half] = (__m512i)_mm512_cvtne2ps_pbh(upper, lower);
      }
    }
  };

  int64_t columns() const { return row_bytes; }
  Cursor cursor(int64_t r) const { return {numbers + r * row_bytes}; }
  int64_t whole(int64_t) const { return row_bytes / WORD; }

  MRP_AVX512 static void arrange(__m512i (&)[2]) {}

  // The sums of rows from r on times their scales.
  MRP_AVX512 __m512 scaled(__m512 sums, int64_t r, uint32_t here) const {
    return _mm512_mul_ps(sums, widen(_mm256_maskz_loadu_epi16(here, scales + r)));
  }

  Ahead ahead(int64_t begin, int64_t end, int64_t strides) const {
    return Ahead(numbers + begin * row_bytes, numbers + end * row_bytes, strides);
  }

  Ahead places_ahead(int64_t, int64_t, int64_t) const { return Ahead(); }
};
#endif

}  // namespace mrp
