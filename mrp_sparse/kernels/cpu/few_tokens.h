// Few tokens: three rows at a time are decoded into registers, and multiplied with all tokens there.
//
// So no dense weight is ever written. A weight of 50% zeros takes 1.125 bytes a column and each token one
// `vdpbf16ps` for 32 of them: memory and arithmetic take about as long for eight tokens, and overlap.
// Three rows and eight tokens take 24 registers for their sums, and eleven loads for 24 products.
#pragma once

#include "tokens.h"

namespace mrp {

#ifdef MRP_AVX512
constexpr int64_t FEW_TOKENS = 8;

// The products of `Tokens` tokens with `height` rows from r on: sums[t] has that of row r + i at i.
//
// Storing: the decoded rows are also written to `panel`, in steps that are `height` apart.
template <int Tokens, int height, bool storing, typename Rows>
MRP_AVX512 inline void multiply_as_decoded(
    const Rows& weight, int64_t r, int64_t end, const Step* tokens, Ahead& values, Ahead& places,
    Step* panel, __m128 (&sums)[Tokens]) {
  const int64_t columns = weight.columns(), words = steps_of(columns) / 2;
  const int64_t spans = (columns + SPAN - 1) / SPAN;
  typename Rows::Cursor cursors[height];
  int64_t whole = words;
  for (int i = 0; i < height; i++) {
    const int64_t row = std::min(r + i, end - 1);  // the last one again, where there are fewer
    cursors[i] = weight.cursor(row);
    whole = std::min(whole, weight.whole(row));
  }
  Ahead next_values = values, next_places = places;  // in registers
  int64_t word = 0;
  for (int64_t span = 0; span < spans; span++) {
    __m512 parts[Tokens][height];
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; t++) {
#pragma GCC unroll 4
      for (int i = 0; i < height; i++) {
        parts[t][i] = _mm512_setzero_ps();
      }
    }
    const auto add = [&]<bool careful>(std::bool_constant<careful>) MRP_AVX512 {
      __m512i halves[height][2];
#pragma GCC unroll 4
      for (int i = 0; i < height; i++) {
        cursors[i].template next<careful>(std::min(WORD, columns - WORD * word), halves[i]);
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        if constexpr (storing) {
#pragma GCC unroll 4
          for (int i = 0; i < height; i++, panel++) {
            _mm512_store_si512(panel, halves[i][half]);
          }
        }
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; t++, tokens++) {
          const __m512i token = _mm512_load_si512(tokens);
#pragma GCC unroll 4
          for (int i = 0; i < height; i++) {
            parts[t][i] =
                _mm512_dpbf16_ps(parts[t][i], (__m512bh)halves[i][half], (__m512bh)token);
          }
        }
      }
    };
    const int64_t until = (span + 1) * words / spans;
    for (const int64_t last = std::min(whole, until); word < last; word++) {
      next_values.fetch();
      if (word % 4 == 0) {
        next_places.fetch();
      }
      add(std::false_type());
    }
    for (; word < until; word++) {
      add(std::true_type());
    }
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; t++) {
      const __m512 fourth = height == 4 ? parts[t][height - 1] : _mm512_setzero_ps();
      const __m128 total = add_lanes(parts[t][0], parts[t][1], parts[t][2], fourth);
      sums[t] = span == 0 ? total : _mm_add_ps(sums[t], total);
    }
  }
  values = next_values;
  places = next_places;
}

// y[t · rows + r] = x[t] · row r + bias[r] for all `Tokens` tokens t, and rows r from `begin` to `end`.
template <int Tokens, typename Rows>
MRP_AVX512 void multiply_few(
    const Rows& weight, const Step* x, const BFloat16* bias, BFloat16* y, int64_t rows,
    int64_t begin, int64_t end) {
  constexpr int height = 3;
  const int64_t words = steps_of(weight.columns()) / 2;
  for (int64_t r = begin; r < end; r += height) {
    const int64_t next = r + height, after = std::min(next + height, end);
    Ahead values, places;
    if (next < end) {
      values = weight.ahead(next, after, words);
      places = weight.places_ahead(next, after, (words + 3) / 4);
    }
    __m128 sums[Tokens];
    multiply_as_decoded<Tokens, height, false>(
        weight, r, end, x, values, places, nullptr, sums);
    const uint32_t here = low_bits(std::min<int64_t>(height, end - r));
    const __m512 added =
        bias ? widen(_mm256_maskz_loadu_epi16(here, bias + r)) : _mm512_setzero_ps();
    for (int t = 0; t < Tokens; t++) {
      const __m512 product = weight.scaled(_mm512_zextps128_ps512(sums[t]), r, here);
      const __m128 total = _mm512_castps512_ps128(_mm512_add_ps(product, added));
      _mm_mask_storeu_epi16(y + t * rows + r, here, (__m128i)_mm_cvtneps_pbh(total));
    }
  }
}

// The same for the tokens of one tile, of which there are at most `FEW_TOKENS`.
template <typename Rows>
void multiply_few(
    const Rows& weight, const TokenTiles& x, const BFloat16* bias, BFloat16* y, int64_t rows,
    int64_t begin, int64_t end) {
  with_constant(x.tokens(), [&]<int Tokens>(std::integral_constant<int, Tokens>) {
    multiply_few<Tokens>(weight, x.tile(0), bias, y, rows, begin, end);
  });
}
#endif

}  // namespace mrp
