// Tokens in tiles, as `few_tokens.h` and `panels.h` multiply them. These are no tiles of AMX: see `tiles.h`.
#pragma once

#include "rows.h"

namespace mrp {

#ifdef MRP_AVX512
constexpr int64_t STEP = 32;  // columns of a register
// Columns whose products have one sum: a tile's tokens should stay in the first cache. Every sum of vectors
// has this order, whatever the number of tokens: a token's results do not depend on the others. Those of
// `tile_panels.h` have another.
constexpr int64_t SPAN = 2048;

struct alignas(64) Step {
  BFloat16 values[STEP];
};

// Steps of so many columns: two for each 64 of them.
inline int64_t steps_of(int64_t columns) { return (columns + WORD - 1) / WORD * (WORD / STEP); }

// 64 columns of a token from `column` on, with zeros beyond the last, in the order in which rows are decoded.
template <typename Rows>
MRP_AVX512 inline void load_word(
    const BFloat16* token, int64_t column, int64_t columns, __m512i (&halves)[2]) {
  for (int64_t half = 0; half < 2; half++) {
    const int64_t begins = column + half * STEP;
    const int64_t width = std::clamp<int64_t>(columns - begins, 0, STEP);
    halves[half] = _mm512_maskz_loadu_epi16(low_bits(width), token + begins);
  }
  Rows::arrange(halves);
}

// Tokens in tiles of nearly the same size, with zeros up to whole steps: of each step all tokens of the
// tile, one after the other.
class TokenTiles {
 public:
  TokenTiles(int64_t tokens, int64_t columns, int64_t largest)
      : columns_(columns), steps_(steps_of(columns)), tokens_(tokens),
        tiles_((tokens + largest - 1) / largest),
        memory_(std::make_unique_for_overwrite<Step[]>(tokens * steps_)) {}

  int64_t tiles() const { return tiles_; }
  int64_t tokens() const { return tokens_; }
  int64_t steps() const { return steps_; }
  int64_t first(int64_t tile) const { return tile * tokens_ / tiles_; }
  int64_t size(int64_t tile) const { return first(tile + 1) - first(tile); }
  const Step* tile(int64_t tile) const { return memory_.get() + first(tile) * steps_; }

  // Copies the tiles from `begin` to `end` of x (tokens, columns), in the order in which rows are decoded.
  template <typename Rows>
  MRP_AVX512 void fill(const BFloat16* x, int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; tile++) {
      const int64_t count = size(tile);
      for (int64_t i = 0; i < count; i++) {
        const BFloat16* token = x + (first(tile) + i) * columns_;
        Step* to = memory_.get() + first(tile) * steps_ + i;
        for (int64_t column = 0; column < columns_; column += WORD, to += 2 * count) {
          __m512i halves[2];
          load_word<Rows>(token, column, columns_, halves);
          _mm512_store_si512(to, halves[0]);
          _mm512_store_si512(to + count, halves[1]);
        }
      }
    }
  }

 private:
  int64_t columns_, steps_, tokens_, tiles_;
  std::unique_ptr<Step[]> memory_;
};

// Calls `run` with a number of tokens from 1 to 8 as a constant, for which its loops are unrolled.
template <typename Run>
void with_constant(int64_t tokens, const Run& run) {
  switch (tokens) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    case 6: return run(std::integral_constant<int, 6>());
    case 7: return run(std::integral_constant<int, 7>());
    default: return run(std::integral_constant<int, 8>());
  }
}

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
#endif

}  // namespace mrp
