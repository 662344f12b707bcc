// Many tokens: a panel of rows is decoded into memory that is kept, and multiplied with all tokens there.
//
// So the packed weight is read once, and the dense one never leaves the second cache. Both sides lie in
// tiles, in steps of 32 columns: of each step all rows of the tile, or all of its tokens, one after the
// other. A tile of four rows and six tokens takes 24 registers for its sums, and ten loads for 24 products.
#pragma once

#include "few_tokens.h"

namespace mrp {

#ifdef MRP_AVX512
constexpr int64_t TILE_ROWS = 4;
constexpr int64_t TILE_TOKENS = 6;
constexpr int64_t MOST_ROWS = 64;
constexpr int64_t LANES = 16;  // of float32
// Dense weights of a panel: of bfloat16 half of a MiB, half of the second cache. All tokens pass through
// the rest of it, once for each panel: they are read from the third cache, and so panels should be few.
constexpr int64_t PANEL = 1 << 18;
// Tokens for which a panel is decoded once.
constexpr int64_t MOST_TOKENS = 512;

inline int64_t panel_rows(int64_t columns) {
  const int64_t rows = PANEL / std::max<int64_t>(steps_of(columns) * STEP, 1);
  return std::clamp(rows / TILE_ROWS * TILE_ROWS, TILE_ROWS, MOST_ROWS);
}

// Adds the products of `steps` steps of four rows with `Tokens` tokens to sums (tokens, MOST_ROWS).
template <int Tokens, bool fetching>
MRP_AVX512 void multiply_tile(
    const Step* rows, const Step* tokens, int64_t steps, bool first, float* sums, Ahead& ahead) {
  __m512 parts[Tokens][TILE_ROWS];
#pragma GCC unroll 6
  for (int t = 0; t < Tokens; t++) {
#pragma GCC unroll 4
    for (int r = 0; r < TILE_ROWS; r++) {
      parts[t][r] = _mm512_setzero_ps();
    }
  }
  Ahead fetched = ahead;  // in registers
  for (int64_t step = 0; step < steps; step++, rows += TILE_ROWS, tokens += Tokens) {
    if constexpr (fetching) {
      fetched.fetch();
    }
    __m512i row[TILE_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < TILE_ROWS; r++) {
      row[r] = _mm512_load_si512(rows + r);
    }
#pragma GCC unroll 6
    for (int t = 0; t < Tokens; t++) {
      const __m512i token = _mm512_load_si512(tokens + t);
#pragma GCC unroll 4
      for (int r = 0; r < TILE_ROWS; r++) {
        parts[t][r] = _mm512_dpbf16_ps(parts[t][r], (__m512bh)row[r], (__m512bh)token);
      }
    }
  }
  ahead = fetched;
#pragma GCC unroll 6
  for (int t = 0; t < Tokens; t++) {
    float* to = sums + t * MOST_ROWS;
    const __m128 total = add_lanes(parts[t][0], parts[t][1], parts[t][2], parts[t][3]);
    _mm_storeu_ps(to, first ? total : _mm_add_ps(_mm_loadu_ps(to), total));
  }
}

// y[t · rows + r] = x[t] · row r + bias[r] for all tokens t, and rows r from `begin` to `end`.
template <typename Rows>
MRP_AVX512 void multiply_panels(
    const Rows& weight, const TokenTiles& x, const BFloat16* bias, BFloat16* y, int64_t rows,
    int64_t begin, int64_t end) {
  const int64_t steps = x.steps(), height = panel_rows(weight.columns());
  // Kept by each thread: at most 0.4 MiB for rows of up to 32,768 columns.
  thread_local std::vector<Step> kept_panel;
  thread_local std::vector<float> kept_sums;
  kept_panel.resize(height * steps);
  kept_sums.resize(x.tokens() * MOST_ROWS);
  Step* const panel = kept_panel.data();
  float* const sums = kept_sums.data();
  const int64_t spans = (weight.columns() + SPAN - 1) / SPAN;
  const int64_t words = steps / 2;
  for (int64_t r = begin; r < end; r += height) {
    const int64_t taken = std::min(height, end - r), tiles = (taken + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t next = r + taken, after = std::min(next + height, end);
    Ahead values, places;
    if (next < end) {
      // Memory is busy during two tiles of tokens, and so hardly waited for.
      values = weight.ahead(next, after, tiles * words * 3);
      places = weight.places_ahead(next, after, tiles * ((words + 3) / 4));
    }
    // The first tile of tokens is multiplied with the rows as they are decoded, all others with the panel.
    with_constant(x.size(0), [&]<int Tokens>(std::integral_constant<int, Tokens>) {
      for (int64_t tile = 0; tile < tiles; tile++) {
        __m128 of_tile[Tokens];
        multiply_as_decoded<Tokens, TILE_ROWS, true>(
            weight, r + tile * TILE_ROWS, end, x.tile(0), values, places,
            panel + tile * TILE_ROWS * steps, of_tile);
        for (int t = 0; t < Tokens; t++) {
          _mm_storeu_ps(sums + t * MOST_ROWS + tile * TILE_ROWS, of_tile[t]);
        }
      }
    });
    for (int64_t t = 1; t < x.tiles(); t++) {
      for (int64_t span = 0; span < spans; span++) {
        const int64_t step = span * words / spans * 2, count = (span + 1) * words / spans * 2 - step;
        for (int64_t tile = 0; tile < tiles; tile++) {
          const Step* of_panel = panel + (tile * steps + step) * TILE_ROWS;
          float* to = sums + x.first(t) * MOST_ROWS + tile * TILE_ROWS;
          with_constant(x.size(t), [&]<int Tokens>(std::integral_constant<int, Tokens>) {
            const auto multiply = t == 1 ? multiply_tile<Tokens, true> : multiply_tile<Tokens, false>;
            multiply(of_panel, x.tile(t) + step * x.size(t), count, span == 0, to, values);
          });
        }
      }
    }
    for (int64_t t = 0; t < x.tokens(); t++) {  // a token's results lie together
      for (int64_t i = 0; i < taken; i += LANES) {
        const uint32_t here = low_bits(std::min(taken - i, LANES));
        const __m512 added =
            bias ? widen(_mm256_maskz_loadu_epi16(here, bias + r + i)) : _mm512_setzero_ps();
        const __m512 product =
            weight.scaled(_mm512_loadu_ps(sums + t * MOST_ROWS + i), r + i, here);
        const __m512 total = _mm512_add_ps(product, added);
        _mm256_mask_storeu_epi16(y + t * rows + r + i, here, (__m256i)_mm512_cvtneps_pbh(total));
      }
    }
  }
}
#endif

}  // namespace mrp
