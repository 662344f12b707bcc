// Rows of 8-bit numbers with a scale each, multiplied with tokens. See `rows.h`.
//
// A number times a bfloat16 is exact in float32, in which products are summed before the scale comes.
#pragma once

#include "rows.h"

namespace mrp {

// Rows of `columns` numbers, one after the other.
struct Bytes {
  const int8_t* numbers;
  const BFloat16* scales;
  int64_t columns;
};

#ifdef MRP_AVX512
// Two rows are read at once, each as far ahead, by measurement: one at a time, memory waits.
constexpr int64_t BYTES_AHEAD = 2048;

template <int Rows>
MRP_AVX512 void multiply_byte_rows(
    const Bytes& weight, int64_t r, const float* x, float (&results)[2]) {
  const int8_t* first = weight.numbers + r * weight.columns;
  __m512 sums[Rows][4];
  for (auto& row : sums) {
    std::fill(row, row + 4, _mm512_setzero_ps());
  }
  int64_t column = 0;
  for (; column + 64 <= weight.columns; column += 64) {
    for (int row = 0; row < Rows; row++) {
      const int8_t* numbers = first + row * weight.columns + column;
      _mm_prefetch(reinterpret_cast<const char*>(numbers) + BYTES_AHEAD, _MM_HINT_T0);
      for (int part = 0; part < 4; part++) {
        const __m128i some =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + 16 * part));
        sums[row][part] = _mm512_fmadd_ps(
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some)),
            _mm512_loadu_ps(x + column + 16 * part), sums[row][part]);
      }
    }
  }
  for (; column < weight.columns; column += 16) {
    const uint32_t here = low_bits(std::min<int64_t>(16, weight.columns - column));
    const __m512 token = _mm512_maskz_loadu_ps(here, x + column);
    for (int row = 0; row < Rows; row++) {
      const __m128i some = _mm_maskz_loadu_epi8(here, first + row * weight.columns + column);
      sums[row][0] =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some)), token, sums[row][0]);
    }
  }
  for (int row = 0; row < Rows; row++) {
    const __m512 total = _mm512_add_ps(
        _mm512_add_ps(sums[row][0], sums[row][1]), _mm512_add_ps(sums[row][2], sums[row][3]));
    results[row] = _mm512_reduce_add_ps(total);
  }
}

// y[t · rows + r] = x[t] · row r + bias[r] for all tokens t, and rows r from `begin` to `end`.
inline void multiply(
    const Bytes& weight, const float* x, int64_t tokens, const BFloat16* bias, BFloat16* y,
    int64_t rows, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r += 2) {
    const int64_t taken = std::min<int64_t>(2, end - r);
    for (int64_t t = 0; t < tokens; t++) {
      float results[2];
      if (taken == 2) {
        multiply_byte_rows<2>(weight, r, x + t * weight.columns, results);
      } else {
        multiply_byte_rows<1>(weight, r, x + t * weight.columns, results);
      }
      for (int64_t i = 0; i < taken; i++) {
        const float added = bias ? static_cast<float>(bias[r + i]) : 0.0f;
        const float scale = static_cast<float>(weight.scales[r + i]);
        y[t * rows + r + i] = static_cast<BFloat16>(results[i] * scale + added);
      }
    }
  }
}
#endif

}  // namespace mrp
