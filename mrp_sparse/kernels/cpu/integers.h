// Tokens that are rounded to 8 bits, multiplied with the codes of a weight of four bits as integers.
//
// y[t, r] = Σ_g s_w[r, g] · s_x[t, g] · Σ_c code[r, c] · number[t, c], with the inner sum over the 64
// columns of a group exact. Rows are decoded in panels of 16, which lie in steps of four columns: a step
// has these columns of all rows, so that a register's lanes are rows, and no sum crosses lanes. Codes are
// 8 too large, and so without a sign, as `vpmaddubsw` and `vpdpbusd` need. Each kernel adds the groups
// one after the other by a fused multiply-add: all of them return the same bits.
#pragma once

#include "coded_rows.h"
#include "tokens.h"

#include <cmath>
#include <limits>

#ifdef MRP_AVX512
#define MRP_AVX2 __attribute__((target("avx2,fma,popcnt")))
#ifndef MRP_VNNI  // a test emulates these instructions
#define MRP_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,avx512vnni,popcnt")))
#endif
#endif

namespace mrp {

constexpr int64_t PANEL_ROWS = 16;
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
  float scale;
};

// Rounds `width` columns; those up to 64 are zeros. Written so that compilers vectorise its loops.
template <typename T>
void round_group(const T* x, int64_t width, RoundedGroup& to) {
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
  int sums[2] = {};
  for (int64_t c = 0; c < GROUP; c++) {
    const float sum = values[c] / to.scale + rounder;
    const int number = std::bit_cast<int32_t>(sum) - std::bit_cast<int32_t>(rounder);
    to.numbers[c] = static_cast<int8_t>(number);
    sums[c / 2 % 2] += number;
  }
  for (int half = 0; half < 2; half++) {
    to.corrections[half] = static_cast<int16_t>(-CODE_SHIFT * sums[half]);
  }
}

template <typename T>
void round_token(const T* x, int64_t columns, RoundedGroup* to) {
  for (int64_t column = 0; column < columns; column += GROUP) {
    round_group(x + column, std::min(GROUP, columns - column), *to++);
  }
}

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

// A panel is the rows from `first` on; where they end before 16, the last one is repeated.
struct PanelRows {
  const Packed<uint8_t> weight;
  int64_t first;
  int64_t end;

  int64_t groups() const { return (weight.columns + GROUP - 1) / GROUP; }
  int64_t row(int64_t i) const { return std::min(first + i, end - 1); }

  CodeCursor cursor(int64_t i) const {
    const int64_t r = row(i);
    return {weight.places + r * weight.row_bytes, weight.row(r), weight.end, weight.columns};
  }

  template <typename T>
  void copy_scales(const T* scales, CodedGroup* panel) const {
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
      for (int64_t group = 0; group < groups(); group++) {
        panel[group].scales[i] = static_cast<float>(scales[row(i) * groups() + group]);
      }
    }
  }
};

// ---- On any processor ----

inline void decode_panel(const PanelRows& rows, CodedGroup* panel) {
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    CodeCursor cursor = rows.cursor(i);
    for (int64_t group = 0; group < rows.groups(); group++) {
      uint8_t buffer[GROUP / 2], spread[GROUP];
      const uint8_t* nibbles;
      uint64_t kept = cursor.next(nibbles, buffer);
      std::fill(spread, spread + GROUP, uint8_t(CODE_SHIFT));
      for (int64_t n = 0; kept; n++, kept &= kept - 1) {
        const int nibble = nibbles[n / 2] >> n % 2 * 4 & 15;
        spread[std::countr_zero(kept)] = static_cast<uint8_t>(CODES[nibble] + CODE_SHIFT);
      }
      for (int64_t step = 0; step < STEPS; step++) {
        std::memcpy(panel[group].codes[step][i], spread + STEP_COLUMNS * step, STEP_COLUMNS);
      }
    }
  }
}

// The products of one token with a panel.
inline void multiply_panel(
    const CodedGroup* panel, int64_t groups, const RoundedGroup* x, float* sums) {
  std::fill(sums, sums + PANEL_ROWS, 0.0f);
  for (int64_t group = 0; group < groups; group++, panel++, x++) {
    int32_t products[PANEL_ROWS];
    std::fill(products, products + PANEL_ROWS, x->corrections[0] + x->corrections[1]);
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

#ifdef MRP_AVX512
// A step of a token, for all rows.
inline int32_t four_numbers(const RoundedGroup& x, int64_t step) {
  int32_t numbers;
  std::memcpy(&numbers, x.numbers + STEP_COLUMNS * step, sizeof numbers);
  return numbers;
}

// Both corrections, as a register of 16-bit numbers has them.
inline int32_t two_corrections(const RoundedGroup& x) {
  int32_t corrections;
  std::memcpy(&corrections, x.corrections, sizeof corrections);
  return corrections;
}

// What a nibble stands for, without a sign.
alignas(16) constexpr uint8_t SHIFTED_CODES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16};

// ---- With AVX2 ----

constexpr int64_t AVX2_TOKENS = 4;

// For each byte of places: which of the next eight codes a column has. `vpshufb` makes others zeros.
struct Spreads {
  uint8_t of[256][8];

  constexpr Spreads() : of() {
    for (int places = 0; places < 256; places++) {
      for (int column = 0, code = 0; column < 8; column++) {
        of[places][column] = places >> column & 1 ? code++ : 0x80;
      }
    }
  }
};
constexpr Spreads SPREADS;

MRP_AVX2 inline void decode_panel_avx2(const PanelRows& rows, CodedGroup* panel) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m128i shift = _mm_set1_epi8(CODE_SHIFT);
  // In memory a removed column is a zero until it is shifted, too.
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_sub_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(SHIFTED_CODES)), shift));
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    CodeCursor cursor = rows.cursor(i);
    for (int64_t group = 0; group < rows.groups(); group++) {
      uint8_t buffer[GROUP / 2], codes[GROUP + 8];
      const uint8_t* nibbles;
      const uint64_t kept = cursor.next(nibbles, buffer);
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(nibbles));
      const __m256i even = _mm256_and_si256(bytes, low);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
      const __m256i first = _mm256_shuffle_epi8(table, _mm256_unpacklo_epi8(even, odd));
      const __m256i second = _mm256_shuffle_epi8(table, _mm256_unpackhi_epi8(even, odd));
      // `vpunpcklbw` keeps halves of 128 bits apart: these bring them together.
      auto* to = reinterpret_cast<__m256i*>(codes);
      _mm256_storeu_si256(to, _mm256_permute2x128_si256(first, second, 0x20));
      _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(first, second, 0x31));
      const uint8_t* next = codes;
      for (int64_t step = 0; step < STEPS; step += 2) {
        const uint8_t places = kept >> STEP_COLUMNS * step & 255;
        const auto* spread = reinterpret_cast<const __m128i*>(SPREADS.of[places]);
        const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(next));
        const uint64_t eight = _mm_cvtsi128_si64(
            _mm_add_epi8(_mm_shuffle_epi8(some, _mm_loadl_epi64(spread)), shift));
        const uint32_t halves[2] = {uint32_t(eight), uint32_t(eight >> 32)};
        std::memcpy(panel[group].codes[step][i], halves, STEP_COLUMNS);
        std::memcpy(panel[group].codes[step + 1][i], halves + 1, STEP_COLUMNS);
        next += std::popcount(places);
      }
    }
  }
}

// The products of `Tokens` tokens, which are `groups` apart.
//
// Sums of 16 bits wrap, but the corrected ones are at most 8 · 32 · 127, and so exact.
template <int Tokens>
MRP_AVX2 void multiply_panel_avx2(
    const CodedGroup* panel, int64_t groups, const RoundedGroup* x, float (*sums)[PANEL_ROWS]) {
  __m256 totals[Tokens][2];
  for (int t = 0; t < Tokens; t++) {
    totals[t][0] = totals[t][1] = _mm256_setzero_ps();
  }
  for (int64_t group = 0; group < groups; group++, panel++, x++) {
    __m256i products[Tokens][2];
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; t++) {
      products[t][0] = products[t][1] = _mm256_set1_epi32(two_corrections(x[t * groups]));
    }
    for (int64_t step = 0; step < STEPS; step++) {
      const auto* codes = reinterpret_cast<const __m256i*>(panel->codes[step]);
      const __m256i rows[2] = {_mm256_load_si256(codes), _mm256_load_si256(codes + 1)};
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; t++) {
        const __m256i numbers = _mm256_set1_epi32(four_numbers(x[t * groups], step));
        for (int half = 0; half < 2; half++) {
          products[t][half] =
              _mm256_add_epi16(products[t][half], _mm256_maddubs_epi16(rows[half], numbers));
        }
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; t++) {
      const __m256 scale = _mm256_set1_ps(x[t * groups].scale);
      for (int half = 0; half < 2; half++) {
        const __m256i sum = _mm256_madd_epi16(products[t][half], _mm256_set1_epi16(1));
        const __m256 factor = _mm256_mul_ps(_mm256_load_ps(panel->scales + 8 * half), scale);
        totals[t][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, totals[t][half]);
      }
    }
  }
  for (int t = 0; t < Tokens; t++) {
    _mm256_storeu_ps(sums[t], totals[t][0]);
    _mm256_storeu_ps(sums[t] + 8, totals[t][1]);
  }
}

// ---- With VNNI and VBMI2 of AVX-512 ----

constexpr int64_t VNNI_TOKENS = 8;
// Up to here the sums of a token are turned, instead of the rows of a panel.
constexpr int64_t VNNI_FEW_TOKENS = 2;

// Lanes of two registers that are i and i + d of 16, for d = 1, 2, 4 and 8: LOWER takes the lanes without
// the bit d from the first and, moved by d, from the second; UPPER those with it. In four stages these
// turn 16 registers, or add the lanes of each.
struct Lanes {
  alignas(64) int32_t of[4][16];

  constexpr explicit Lanes(bool upper) : of() {
    for (int stage = 0; stage < 4; stage++) {
      for (int lane = 0, d = 1 << stage; lane < 16; lane++) {
        of[stage][lane] = lane & d ? 16 + lane - (upper ? 0 : d) : lane + (upper ? d : 0);
      }
    }
  }
};
constexpr Lanes LOWER(false), UPPER(true);

MRP_VNNI inline __m512i pick(const Lanes& lanes, int stage, __m512i first, __m512i second) {
  return _mm512_permutex2var_epi32(first, _mm512_loadu_si512(lanes.of[stage]), second);
}

// Lane c of row i becomes lane i of row c.
MRP_VNNI inline void turn(__m512i (&rows)[16]) {
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; stage++) {
    const int d = 1 << stage;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (!(i & d)) {
        const __m512i first = rows[i], second = rows[i + d];
        rows[i] = pick(LOWER, stage, first, second);
        rows[i + d] = pick(UPPER, stage, first, second);
      }
    }
  }
}

// Lane i is the sum of the lanes of row i.
MRP_VNNI inline __m512i add_lanes(__m512i (&rows)[16]) {
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; stage++) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      if (i < 8 >> stage) {
        const __m512i first = rows[2 * i], second = rows[2 * i + 1];
        rows[i] = _mm512_add_epi32(
            pick(LOWER, stage, first, second), pick(UPPER, stage, first, second));
      }
    }
  }
  return rows[0];
}

MRP_VNNI inline __m512i spread_codes(CodeCursor& cursor) {
  uint8_t buffer[GROUP / 2];
  const uint8_t* nibbles;
  const uint64_t kept = cursor.next(nibbles, buffer);
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_load_si128(reinterpret_cast<const __m128i*>(SHIFTED_CODES)));
  const __m512i words = _mm512_cvtepu8_epi16(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(nibbles)));
  const __m512i bytes = _mm512_and_si512(
      _mm512_or_si512(words, _mm512_slli_epi16(words, 4)), _mm512_set1_epi8(15));
  return _mm512_mask_expand_epi8(
      _mm512_set1_epi8(CODE_SHIFT), kept, _mm512_shuffle_epi8(table, bytes));
}

// totals + the products of one group with its scales, of one token.
MRP_VNNI inline __m512 add_group(
    __m512i products, const CodedGroup& rows, const RoundedGroup& x, __m512 totals) {
  const __m512 factor = _mm512_mul_ps(_mm512_loadu_ps(rows.scales), _mm512_set1_ps(x.scale));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), factor, totals);
}

// Each group of a panel, row by row: `use(group, rows)` with a register for each of the 16. Meanwhile
// the next panel is fetched.
template <typename Use>
MRP_VNNI void for_each_group(const PanelRows& rows, const Use& use) {
  const int64_t groups = rows.groups(), next = rows.first + PANEL_ROWS;
  CodeCursor cursors[PANEL_ROWS];
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    cursors[i] = rows.cursor(i);
  }
  Ahead values, places;
  if (next < rows.end) {
    const int64_t after = std::min(next + PANEL_ROWS, rows.end);
    values = values_ahead(rows.weight, next, after, rows.weight.columns / 4, groups);
    places = places_ahead(rows.weight, next, after, groups);
  }
  for (int64_t group = 0; group < groups; group++) {
    values.fetch();
    places.fetch();
    __m512i spread[PANEL_ROWS];
#pragma GCC unroll 16
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
      spread[i] = spread_codes(cursors[i]);
    }
    use(group, spread);
  }
}

MRP_VNNI inline void decode_panel_vnni(const PanelRows& rows, CodedGroup* panel) {
  for_each_group(rows, [&](int64_t group, __m512i (&spread)[PANEL_ROWS]) MRP_VNNI {
    turn(spread);
#pragma GCC unroll 16
    for (int64_t step = 0; step < STEPS; step++) {
      _mm512_storeu_si512(panel[group].codes[step], spread[step]);
    }
  });
}

template <int Tokens>
MRP_VNNI void multiply_panel_vnni(
    const CodedGroup* panel, int64_t groups, const RoundedGroup* x, float (*sums)[PANEL_ROWS]) {
  __m512 totals[Tokens];
#pragma GCC unroll 8
  for (int t = 0; t < Tokens; t++) {
    totals[t] = _mm512_setzero_ps();
  }
  for (int64_t group = 0; group < groups; group++, panel++, x++) {
    __m512i products[Tokens];
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; t++) {
      const int16_t* corrections = x[t * groups].corrections;
      products[t] = _mm512_set1_epi32(corrections[0] + corrections[1]);
    }
    // A loop of one step would copy all sums, twice.
#pragma GCC unroll 16
    for (int64_t step = 0; step < STEPS; step++) {
      const __m512i rows = _mm512_loadu_si512(panel->codes[step]);
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; t++) {
        const __m512i numbers = _mm512_set1_epi32(four_numbers(x[t * groups], step));
        products[t] = _mm512_dpbusd_epi32(products[t], rows, numbers);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; t++) {
      totals[t] = add_group(products[t], *panel, x[t * groups], totals[t]);
    }
  }
  for (int t = 0; t < Tokens; t++) {
    _mm512_storeu_ps(sums[t], totals[t]);
  }
}

// The same for few tokens, with rows as they are decoded: of the panel only the scales are read.
template <int Tokens>
MRP_VNNI void multiply_decoded_vnni(
    const PanelRows& rows, const CodedGroup* panel, const RoundedGroup* x,
    float (*sums)[PANEL_ROWS]) {
  const int64_t groups = rows.groups();
  __m512 totals[Tokens];
  for (int t = 0; t < Tokens; t++) {
    totals[t] = _mm512_setzero_ps();
  }
  for_each_group(rows, [&](int64_t group, __m512i (&spread)[PANEL_ROWS]) MRP_VNNI {
#pragma GCC unroll 2
    for (int t = 0; t < Tokens; t++) {
      const RoundedGroup& token = x[t * groups + group];
      const __m512i numbers = _mm512_loadu_si512(token.numbers);
      __m512i products[PANEL_ROWS];
#pragma GCC unroll 16
      for (int64_t i = 0; i < PANEL_ROWS; i++) {
        products[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), spread[i], numbers);
      }
      const __m512i correction =
          _mm512_set1_epi32(token.corrections[0] + token.corrections[1]);
      totals[t] = add_group(
          _mm512_add_epi32(add_lanes(products), correction), panel[group], token, totals[t]);
    }
  });
  for (int t = 0; t < Tokens; t++) {
    _mm512_storeu_ps(sums[t], totals[t]);
  }
}
#endif

// ---- What the processor has ----

inline Integers best_integers() {
#ifdef MRP_AVX512
  static const Integers best = [] {
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi2") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
      return Integers::vnni;
    }
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has_avx2 ? Integers::avx2 : Integers::portable;
  }();
  return best;
#else
  return Integers::portable;
#endif
}

// Writes the products of all tokens with a panel of rows, whose scales `panel` has, to `sums`.
inline void multiply_rounded_panel(
    Integers way, const PanelRows& rows, const RoundedGroup* x, int64_t tokens, CodedGroup* panel,
    float (*sums)[PANEL_ROWS]) {
  const int64_t groups = rows.groups();
#ifdef MRP_AVX512
  const auto in_tiles = [&](int64_t largest, const auto& multiply) {
    for (int64_t t = 0; t < tokens; t += largest) {
      with_constant(std::min(largest, tokens - t), [&](auto count) {
        multiply(count, x + t * groups, sums + t);
      });
    }
  };
  if (way == Integers::vnni && tokens <= VNNI_FEW_TOKENS) {
    return in_tiles(VNNI_FEW_TOKENS, [&](auto count, const auto* some, auto* to) {
      multiply_decoded_vnni<std::min<int>(count, VNNI_FEW_TOKENS)>(rows, panel, some, to);
    });
  }
  if (way == Integers::vnni) {
    decode_panel_vnni(rows, panel);
    return in_tiles(VNNI_TOKENS, [&](auto count, const auto* some, auto* to) {
      multiply_panel_vnni<count>(panel, groups, some, to);
    });
  }
  if (way == Integers::avx2) {
    decode_panel_avx2(rows, panel);
    return in_tiles(AVX2_TOKENS, [&](auto count, const auto* some, auto* to) {
      multiply_panel_avx2<std::min<int>(count, AVX2_TOKENS)>(panel, groups, some, to);
    });
  }
#endif
  decode_panel(rows, panel);
  for (int64_t t = 0; t < tokens; t++) {
    multiply_panel(panel, groups, x + t * groups, sums[t]);
  }
}

// y[t · rows + r] = x[t] · row r + bias[r] for all tokens t, and rows r from `begin` to `end`.
template <typename T>
void multiply_rounded(
    Integers way, const Coded<T>& weight, const RoundedGroup* x, int64_t tokens, const T* bias,
    T* y, int64_t rows, int64_t begin, int64_t end) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  std::vector<CodedGroup> panel(weight.groups());
  const auto sums = std::make_unique_for_overwrite<float[][PANEL_ROWS]>(tokens);
  for (int64_t r = begin; r < end; r += PANEL_ROWS) {
    const PanelRows panel_rows{weight.bytes(), r, end};
    panel_rows.copy_scales(weight.scales, panel.data());
    multiply_rounded_panel(way, panel_rows, x, tokens, panel.data(), sums.get());
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t i = 0; i < std::min(PANEL_ROWS, end - r); i++) {
        const Wide added = bias ? static_cast<Wide>(bias[r + i]) : Wide(0);
        y[t * rows + r + i] = static_cast<T>(static_cast<Wide>(sums[t][i]) + added);
      }
    }
  }
}

}  // namespace mrp
