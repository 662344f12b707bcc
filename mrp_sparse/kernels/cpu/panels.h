// Many tokens: a panel of rows is decoded into memory that is kept, and multiplied with all tokens there.
//
// So the packed weight is read once, and the dense one never leaves the second cache. Both sides lie in
// tiles, in steps of 32 columns: of each step all rows of the tile, or all of its tokens, one after the
// other. A tile of four rows and six tokens takes 24 registers for its sums, and ten loads for 24 products.
//
// Every sum has one order, whatever the number of tokens: a token's results do not depend on the others.
#pragma once

#include "rows.h"

namespace mrp {

#ifdef MRP_AVX512
constexpr int64_t STEP = 32;        // columns of a register
constexpr int64_t TILE_ROWS = 4;
constexpr int64_t TILE_TOKENS = 6;
// A tile's tokens stay in the first cache for all rows of a panel, for so many columns.
constexpr int64_t SPAN = 2048;
constexpr int64_t MOST_ROWS = 16;
// Dense weights of a panel: of bfloat16 a quarter of a MiB, a quarter of the second cache.
constexpr int64_t PANEL = 1 << 17;
// Tokens for which a panel is decoded once.
constexpr int64_t MOST_TOKENS = 512;

struct alignas(64) Step {
  BFloat16 values[STEP];
};

inline int64_t steps_of(int64_t columns) { return (columns + STEP - 1) / STEP; }

inline int64_t panel_rows(int64_t columns) {
  const int64_t rows = PANEL / std::max<int64_t>(steps_of(columns) * STEP, 1);
  return std::clamp(rows / TILE_ROWS * TILE_ROWS, TILE_ROWS, MOST_ROWS);
}

// Tokens in tiles of nearly the same size, with zeros up to whole steps.
class TokenTiles {
 public:
  TokenTiles(int64_t tokens, int64_t columns)
      : columns_(columns), steps_(steps_of(columns)), tokens_(tokens),
        tiles_((tokens + TILE_TOKENS - 1) / TILE_TOKENS), memory_(tokens * steps_) {}

  int64_t tiles() const { return tiles_; }
  int64_t tokens() const { return tokens_; }
  int64_t steps() const { return steps_; }
  int64_t first(int64_t tile) const { return tile * tokens_ / tiles_; }
  int64_t size(int64_t tile) const { return first(tile + 1) - first(tile); }
  const Step* tile(int64_t tile) const { return memory_.data() + first(tile) * steps_; }

  // Copies the tiles from `begin` to `end` of x (tokens, columns).
  MRP_AVX512 void fill(const BFloat16* x, int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; tile++) {
      const int64_t count = size(tile);
      Step* to = memory_.data() + first(tile) * steps_;
      for (int64_t i = 0; i < count; i++) {
        const BFloat16* token = x + (first(tile) + i) * columns_;
        for (int64_t step = 0; step < steps_; step++) {
          const int64_t width = std::min(STEP, columns_ - step * STEP);
          const __m512i some = _mm512_maskz_loadu_epi16(low_bits(width), token + step * STEP);
          _mm512_store_si512(to + step * count + i, some);
        }
      }
    }
  }

 private:
  int64_t columns_, steps_, tokens_, tiles_;
  std::vector<Step> memory_;
};

// A range of memory that is fetched little by little, while something else is computed.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const void* begin, const void* end, int64_t strides)
      : at_(static_cast<const char*>(begin)),
        stride_(std::max<int64_t>(static_cast<const char*>(end) - at_, 0) / strides) {}

  MRP_AVX512 void fetch() {
    for (int64_t byte = 0; byte < stride_; byte += LINE) {
      _mm_prefetch(at_ + byte, _MM_HINT_T1);
    }
    at_ += stride_;
  }

 private:
  static constexpr int64_t LINE = 64;
  const char* at_ = nullptr;
  int64_t stride_ = 0;
};

// The sums of four registers' lanes.
MRP_AVX512 inline __m128 add_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 four = _mm512_add_ps(
      _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0)),
      _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2)));
  const __m256 two = _mm256_add_ps(
      _mm512_castps512_ps256(four),
      _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(four), 1)));
  return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

MRP_AVX512 inline __m512 widen(__m256i numbers) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
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

template <bool fetching>
MRP_AVX512 inline void multiply_tile(
    int64_t count, const Step* rows, const Step* tokens, int64_t steps, bool first, float* sums,
    Ahead& ahead) {
  switch (count) {
    case 1: return multiply_tile<1, fetching>(rows, tokens, steps, first, sums, ahead);
    case 2: return multiply_tile<2, fetching>(rows, tokens, steps, first, sums, ahead);
    case 3: return multiply_tile<3, fetching>(rows, tokens, steps, first, sums, ahead);
    case 4: return multiply_tile<4, fetching>(rows, tokens, steps, first, sums, ahead);
    case 5: return multiply_tile<5, fetching>(rows, tokens, steps, first, sums, ahead);
    default: return multiply_tile<6, fetching>(rows, tokens, steps, first, sums, ahead);
  }
}

// Row r in steps that are `TILE_ROWS` apart, the last of them with zeros.
template <typename Decode>
struct PackedRows {
  const Packed<BFloat16>& weight;

  int64_t columns() const { return weight.columns; }

  MRP_AVX512 void decode(int64_t r, Step* to, Ahead& ahead) const {
    const uint8_t* places = weight.places + r * weight.row_bytes;
    const BFloat16* v = weight.row(r);
    // So many columns can be read without a look at where the values end.
    const int64_t whole = std::min(weight.columns, weight.end - v) / 64;
    Ahead fetched = ahead;  // in registers
    for (int64_t word = 0; word < whole; word++, places += 8, to += 2 * TILE_ROWS) {
      fetched.fetch();
      const uint64_t kept = kept_columns<Decode>(places, 64);
      // Both are loaded before either is stored: a load that has to wait for stores takes half as long again.
      const __m512i lower = expand(v, static_cast<uint32_t>(kept));
      const __m512i upper = expand(v, static_cast<uint32_t>(kept >> 32));
      _mm512_store_si512(to, lower);
      _mm512_store_si512(to + TILE_ROWS, upper);
    }
    ahead = fetched;
    for (int64_t left = weight.columns - 64 * whole; left > 0; left -= STEP, places += 4, to += TILE_ROWS) {
      const uint64_t kept = kept_columns<Decode>(places, std::min(STEP, left));
      _mm512_store_si512(to, expand_carefully(v, weight.end, static_cast<uint32_t>(kept)));
    }
  }

  // The values of the rows from `begin` to `end`, of which half are thought to be kept.
  Ahead ahead(int64_t begin, int64_t end, int64_t strides) const {
    const BFloat16* last = weight.row(end - 1);
    return Ahead(
        weight.row(begin), last + std::min(weight.columns / 2, weight.end - last), strides);
  }

  Ahead places_ahead(int64_t begin, int64_t end, int64_t strides) const {
    return Ahead(
        weight.places + begin * weight.row_bytes, weight.places + end * weight.row_bytes, strides);
  }
};

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
  const int64_t spans = (steps * STEP + SPAN - 1) / SPAN;
  // Memory is busy during most of the work, and so never waited for.
  const int64_t busy = std::min<int64_t>(x.tiles(), 2);
  for (int64_t r = begin; r < end; r += height) {
    const int64_t taken = std::min(height, end - r), tiles = (taken + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t next = r + taken, after = std::min(next + height, end);
    Ahead values, places;
    if (next < end) {
      values = weight.ahead(next, after, taken * steps / 2 + busy * tiles * steps);
      places = weight.places_ahead(next, after, taken);
    }
    for (int64_t i = 0; i < tiles * TILE_ROWS; i++) {
      Step* to = panel + i / TILE_ROWS * TILE_ROWS * steps + i % TILE_ROWS;
      if (i < taken) {
        places.fetch();
        weight.decode(r + i, to, values);
      } else {
        for (int64_t step = 0; step < steps; step++) {
          _mm512_store_si512(to + step * TILE_ROWS, _mm512_setzero_si512());
        }
      }
    }
    for (int64_t t = 0; t < x.tiles(); t++) {
      for (int64_t span = 0; span < spans; span++) {
        const int64_t step = span * steps / spans, count = (span + 1) * steps / spans - step;
        for (int64_t tile = 0; tile < tiles; tile++) {
          const auto multiply = t < busy ? multiply_tile<true> : multiply_tile<false>;
          multiply(
              x.size(t), panel + (tile * steps + step) * TILE_ROWS,
              x.tile(t) + step * x.size(t), count, span == 0,
              sums + x.first(t) * MOST_ROWS + tile * TILE_ROWS, values);
        }
      }
    }
    const uint32_t here = low_bits(taken);
    const __m512 added = bias ? widen(_mm256_maskz_loadu_epi16(here, bias + r)) : _mm512_setzero_ps();
    for (int64_t t = 0; t < x.tokens(); t++) {
      const __m512 total = _mm512_add_ps(_mm512_loadu_ps(sums + t * MOST_ROWS), added);
      _mm256_mask_storeu_epi16(y + t * rows + r, here, (__m256i)_mm512_cvtneps_pbh(total));
    }
  }
}
#endif

}  // namespace mrp
