// Tokens of 8 bits and rows of four, as integers in panels; see `integers.h`.
//
// Rows are decoded in panels of 16, which lie in steps of four columns: a step has these columns of all
// rows, so that a register's lanes are rows, and no sum crosses lanes. Codes are 8 too large, and so
// without a sign, as `vpmaddubsw` and `vpdpbusd` need.
#pragma once

#include "coded_rows.h"
#include "tokens.h"

#include <cmath>
#include <limits>

#ifdef MRP_AVX512
#define MRP_AVX2 __attribute__((target("avx2,fma,popcnt")))
#ifndef MRP_VNNI  // a test emulates these instructions
#define MRP_VNNI \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,popcnt")))
#endif
#endif

// Compiled for the instructions of each caller.
#define MRP_INLINE [[gnu::always_inline]] inline

namespace mrp {

constexpr int64_t PANEL_ROWS = 16;
constexpr int64_t BLOCK_PANELS = 2;  // that are multiplied with a token at once
constexpr int64_t BLOCK_ROWS = BLOCK_PANELS * PANEL_ROWS;
// Groups that are decoded at once: a block of them should stay in the second cache.
constexpr int64_t SPAN_GROUPS = 32;
constexpr int64_t STEP_COLUMNS = 4;
constexpr int64_t STEPS = GROUP / STEP_COLUMNS;
constexpr int CODE_SHIFT = 8;

enum class Integers { portable, avx2, vnni };

// ---- Tokens ----

// 64 columns of a token: x ≈ number · scale.
struct RoundedGroup {
  int8_t numbers[GROUP];
  // −8 times the sum of the numbers in the first two columns of all steps, and in the last two: the
  // correction of a product with codes that are 8 too large. At most 8 · 32 · 127, which fits.
  int16_t corrections[2];
  int32_t correction;  // their sum
  float scale;
};

// Rounds `width` columns; those up to 64 are zeros. Written so that compilers vectorise its loops.
template <typename T>
MRP_INLINE void round_group(const T* x, int64_t width, RoundedGroup& to) {
  float values[GROUP] = {};
  for (int64_t c = 0; c < width; c++) {
    values[c] = static_cast<float>(x[c]);
  }
  uint32_t bits = 0;  // magnitudes and their bits have the same order, with NaN as the largest
  for (float value : values) {
    bits = std::max(bits, std::bit_cast<uint32_t>(value) & 0x7fffffff);
  }
  const float largest = std::bit_cast<float>(bits);
  to = {};
  if (!std::isfinite(largest)) {
    to.scale = std::numeric_limits<float>::quiet_NaN();  // as a dense product would give
    return;
  }
  to.scale = std::max(largest / 127, std::numeric_limits<float>::min());
  // The sum with 1.5 · 2²³ has the nearest integer, ties to even, in its lowest bits.
  constexpr float rounder = 12582912;
  int32_t numbers[GROUP];
  for (int64_t c = 0; c < GROUP; c++) {
    const float sum = values[c] / to.scale + rounder;
    numbers[c] = std::bit_cast<int32_t>(sum) - std::bit_cast<int32_t>(rounder);
    to.numbers[c] = static_cast<int8_t>(numbers[c]);
  }
  int32_t sums[2] = {};
  for (int64_t c = 0; c < GROUP; c += STEP_COLUMNS) {
    sums[0] += numbers[c] + numbers[c + 1];
    sums[1] += numbers[c + 2] + numbers[c + 3];
  }
  for (int half = 0; half < 2; half++) {
    to.corrections[half] = static_cast<int16_t>(-CODE_SHIFT * sums[half]);
  }
  to.correction = -CODE_SHIFT * (sums[0] + sums[1]);
}

template <typename T>
MRP_INLINE void round_groups(const T* x, int64_t columns, RoundedGroup* to) {
  const int64_t whole = columns / GROUP * GROUP;
  for (int64_t column = 0; column < whole; column += GROUP) {
    round_group(x + column, GROUP, *to++);
  }
  if (whole < columns) {
    round_group(x + whole, columns - whole, *to);
  }
}

#ifdef MRP_AVX512
template <typename T>
MRP_VNNI void round_groups_vnni(const T* x, int64_t columns, RoundedGroup* to) {
  round_groups(x, columns, to);
}
#endif

// Rounds the columns of a token.
template <typename T>
void round_token(Integers way, const T* x, int64_t columns, RoundedGroup* to) {
#ifdef MRP_AVX512
  if (way == Integers::vnni) {
    return round_groups_vnni(x, columns, to);
  }
#endif
  round_groups(x, columns, to);
}

// A span of the groups of all tokens, which are `stride` groups apart.
struct RoundedTokens {
  const RoundedGroup* first;
  int64_t stride;
  int64_t count;
  int64_t groups;

  const RoundedGroup* token(int64_t t) const { return first + t * stride; }
};

// ---- Rows ----

// 64 columns of a panel of rows.
struct alignas(64) CodedGroup {
  uint8_t codes[STEPS][PANEL_ROWS][STEP_COLUMNS];
  float scales[PANEL_ROWS];
};

// Where in a row the next group is.
struct CodeCursor {
  const uint8_t* places;
  const uint8_t* v;
  const uint8_t* end;
  int64_t columns;  // that are left

  // So many groups can be read without a look at where the row and the nibbles end.
  int64_t whole() const { return std::min<int64_t>(columns / GROUP, (end - v) / (GROUP / 2)); }

  // Goes on behind `groups` groups, whose nibbles end at `behind`.
  void skip(int64_t groups, const uint8_t* behind) {
    places += 8 * groups;
    v = behind;
    columns -= GROUP * groups;
  }

  // The kept columns of the next group. Of `nibbles` 32 bytes may be read: they are in `buffer` if the
  // weight ends before.
  uint64_t next(const uint8_t*& nibbles, uint8_t (&buffer)[GROUP / 2]) {
    uint64_t kept = kept_columns<Bits>(places, columns);
    asm("" : "+r"(kept));  // in a register, or else each count of them would wait for a mask
    const int64_t bytes = (std::popcount(kept) + 1) / 2, left = end - v;
    nibbles = v;
    if (left < GROUP / 2) {
      if (left < bytes) {
        throw_missing_values();
      }
      std::memcpy(buffer, v, bytes);
      nibbles = buffer;
    }
    places += 8;
    v += bytes;
    columns -= GROUP;
    return kept;
  }
};

// The 16 rows from `first` on, which are decoded side by side; where they end before, the last one is
// repeated.
struct Panel {
  CodeCursor cursors[PANEL_ROWS];

  Panel(const Packed<uint8_t>& weight, int64_t first, int64_t end) {
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
      const int64_t r = std::min(first + i, end - 1);
      cursors[i] = {weight.places + r * weight.row_bytes, weight.row(r), weight.end, weight.columns};
    }
  }
};

// The rows of the next block, which are fetched while this one is decoded.
struct Fetching {
  Ahead values, places, scales;

  Fetching() = default;

  template <typename T>
  Fetching(const Coded<T>& weight, int64_t begin, int64_t end, int64_t strides)
      : values(values_ahead(weight.bytes(), begin, end, weight.columns / 4, strides)),
        places(places_ahead(weight.bytes(), begin, end, strides)),
        scales(
            weight.scales + begin * weight.groups(), weight.scales + end * weight.groups(),
            strides) {}

  void fetch() {
    values.fetch();
    places.fetch();
    scales.fetch();
  }
};

using Sums = float[BLOCK_ROWS];  // of a token

// ---- On any processor ----

inline void decode_panel(Panel& panel, int64_t groups, CodedGroup* to) {
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    for (int64_t group = 0; group < groups; group++) {
      uint8_t buffer[GROUP / 2], spread[GROUP];
      const uint8_t* nibbles;
      uint64_t kept = panel.cursors[i].next(nibbles, buffer);
      std::fill(spread, spread + GROUP, uint8_t(CODE_SHIFT));
      for (int64_t n = 0; kept; n++, kept &= kept - 1) {
        const int nibble = nibbles[n / 2] >> n % 2 * 4 & 15;
        spread[std::countr_zero(kept)] = static_cast<uint8_t>(CODES[nibble] + CODE_SHIFT);
      }
      for (int64_t step = 0; step < STEPS; step++) {
        std::memcpy(to[group].codes[step][i], spread + STEP_COLUMNS * step, STEP_COLUMNS);
      }
    }
  }
}

// Adds the products of the groups of one token with a panel to `sums`.
inline void multiply_panel(
    const CodedGroup* panel, const RoundedGroup* x, int64_t groups, float* sums) {
  for (int64_t group = 0; group < groups; group++, panel++, x++) {
    int32_t products[PANEL_ROWS];
    std::fill(products, products + PANEL_ROWS, x->correction);
    for (int64_t step = 0; step < STEPS; step++) {
      for (int64_t i = 0; i < PANEL_ROWS; i++) {
        for (int64_t c = 0; c < STEP_COLUMNS; c++) {
          products[i] += panel->codes[step][i][c] * x->numbers[STEP_COLUMNS * step + c];
        }
      }
    }
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
      sums[i] = std::fma(static_cast<float>(products[i]), panel->scales[i] * x->scale, sums[i]);
    }
  }
}

// Calls `use` for all tokens in runs of nearly the same length, up to `most`, with each as a constant.
template <int most, typename Use>
void for_each_tile(int64_t tokens, const Use& use) {
  const int64_t tiles = (tokens + most - 1) / most;
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t first = tile * tokens / tiles, taken = (tile + 1) * tokens / tiles - first;
    with_constant(taken, [&]<int count>(std::integral_constant<int, count>) {
      use.template operator()<std::min(count, most)>(first);
    });
  }
}

}  // namespace mrp
