// The kernels of `integers.h` for AVX2, and for VNNI and VBMI2 of AVX-512.
#pragma once

#include "integer_panels.h"

#ifdef MRP_AVX512
namespace mrp {

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

// The codes of nibbles, 8 too large and so without a sign.
alignas(16) constexpr uint8_t SHIFTED_CODES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16};

// ---- With AVX2 ----

constexpr int AVX2_TOKENS = 4;

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

MRP_AVX2 inline void decode_panel_avx2(Panel& panel, int64_t groups, CodedGroup* to) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m128i shift = _mm_set1_epi8(CODE_SHIFT);
  // In memory a removed column is a zero until it is shifted, too.
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_sub_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(SHIFTED_CODES)), shift));
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    for (int64_t group = 0; group < groups; group++) {
      uint8_t buffer[GROUP / 2], codes[GROUP + 8];
      const uint8_t* nibbles;
      const uint64_t kept = panel.cursors[i].next(nibbles, buffer);
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(nibbles));
      const __m256i even = _mm256_and_si256(bytes, low);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
      const __m256i first = _mm256_shuffle_epi8(table, _mm256_unpacklo_epi8(even, odd));
      const __m256i second = _mm256_shuffle_epi8(table, _mm256_unpackhi_epi8(even, odd));
      // `vpunpcklbw` keeps halves of 128 bits apart: these bring them together.
      auto* lines = reinterpret_cast<__m256i*>(codes);
      _mm256_storeu_si256(lines, _mm256_permute2x128_si256(first, second, 0x20));
      _mm256_storeu_si256(lines + 1, _mm256_permute2x128_si256(first, second, 0x31));
      const uint8_t* next = codes;
      for (int64_t step = 0; step < STEPS; step += 2) {
        const uint8_t places = kept >> STEP_COLUMNS * step & 255;
        const auto* spread = reinterpret_cast<const __m128i*>(SPREADS.of[places]);
        const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(next));
        const uint64_t eight = _mm_cvtsi128_si64(
            _mm_add_epi8(_mm_shuffle_epi8(some, _mm_loadl_epi64(spread)), shift));
        const uint32_t halves[2] = {uint32_t(eight), uint32_t(eight >> 32)};
        std::memcpy(to[group].codes[step][i], halves, STEP_COLUMNS);
        std::memcpy(to[group].codes[step + 1][i], halves + 1, STEP_COLUMNS);
        next += std::popcount(places);
      }
    }
  }
}

// Adds the products of `Tokens` tokens to their sums.
//
// Sums of 16 bits wrap, but the corrected ones are at most 8 · 32 · 127, and so exact.
template <int Tokens>
MRP_AVX2 void multiply_panel_avx2(
    const CodedGroup* panel, const RoundedTokens& x, int64_t first, int64_t row, Sums* sums) {
  __m256 totals[Tokens][2];
  const RoundedGroup* tokens = x.token(first);
  for (int t = 0; t < Tokens; t++) {
    totals[t][0] = _mm256_loadu_ps(sums[first + t] + row);
    totals[t][1] = _mm256_loadu_ps(sums[first + t] + row + 8);
  }
  for (int64_t group = 0; group < x.groups; group++, panel++, tokens++) {
    __m256i products[Tokens][2];
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; t++) {
      products[t][0] = products[t][1] = _mm256_set1_epi32(two_corrections(tokens[t * x.stride]));
    }
    for (int64_t step = 0; step < STEPS; step++) {
      const auto* codes = reinterpret_cast<const __m256i*>(panel->codes[step]);
      const __m256i rows[2] = {_mm256_load_si256(codes), _mm256_load_si256(codes + 1)};
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; t++) {
        const __m256i numbers = _mm256_set1_epi32(four_numbers(tokens[t * x.stride], step));
        for (int half = 0; half < 2; half++) {
          products[t][half] =
              _mm256_add_epi16(products[t][half], _mm256_maddubs_epi16(rows[half], numbers));
        }
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; t++) {
      const __m256 scale = _mm256_set1_ps(tokens[t * x.stride].scale);
      for (int half = 0; half < 2; half++) {
        const __m256i sum = _mm256_madd_epi16(products[t][half], _mm256_set1_epi16(1));
        const __m256 factor = _mm256_mul_ps(_mm256_load_ps(panel->scales + 8 * half), scale);
        totals[t][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, totals[t][half]);
      }
    }
  }
  for (int t = 0; t < Tokens; t++) {
    _mm256_storeu_ps(sums[first + t] + row, totals[t][0]);
    _mm256_storeu_ps(sums[first + t] + row + 8, totals[t][1]);
  }
}

// ---- With VNNI and VBMI2 of AVX-512 ----

constexpr int VNNI_TOKENS = 6;
// Up to here the sums of a token are turned, instead of the rows of a panel.
constexpr int VNNI_FEW_TOKENS = 2;

// Of two registers, what pairs of rows are made of in four stages: lanes of 32 bits, pairs of them, and
// twice quarters of a register.
template <int stage>
MRP_VNNI inline __m512i lower_half(__m512i a, __m512i b) {
  return stage == 0 ? _mm512_unpacklo_epi32(a, b)
      : stage == 1 ? _mm512_unpacklo_epi64(a, b) : _mm512_shuffle_i32x4(a, b, 0x88);
}

template <int stage>
MRP_VNNI inline __m512i upper_half(__m512i a, __m512i b) {
  return stage == 0 ? _mm512_unpackhi_epi32(a, b)
      : stage == 1 ? _mm512_unpackhi_epi64(a, b) : _mm512_shuffle_i32x4(a, b, 0xdd);
}

template <int stage>
MRP_VNNI inline void turn_stage(__m512i (&rows)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    constexpr int d = 1 << stage;
    if (!(i & d)) {
      const __m512i first = rows[i], second = rows[i + d];
      rows[i] = lower_half<stage>(first, second);
      rows[i + d] = upper_half<stage>(first, second);
    }
  }
}

// Lane c of row i becomes lane i of row c.
MRP_VNNI inline void turn(__m512i (&rows)[16]) {
  turn_stage<0>(rows);
  turn_stage<1>(rows);
  turn_stage<2>(rows);
  turn_stage<3>(rows);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    std::swap(rows[i + 1], rows[i + 2]);
  }
}

// Lanes of 32 bits whose values fit into 16, added in pairs: of each 128 bits two of `a`, then two of `b`.
MRP_VNNI inline __m512i add_pairs(__m512i a, __m512i b) {
  return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1));
}

MRP_VNNI inline __m512i add_quarters(__m512i a, __m512i b) {
  return _mm512_add_epi32(lower_half<2>(a, b), upper_half<2>(a, b));
}

// Lane i is the sum of the lanes of row i, which have products of four codes and numbers: at most
// 4 · 16 · 127, so that the sums of four lanes fit into 16 bits.
MRP_VNNI inline __m512i add_lanes(const __m512i (&rows)[16]) {
  __m512i fours[4];  // in each 128 bits the sums of four rows
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i* row = rows + 4 * i;
    fours[i] = add_pairs(add_pairs(row[0], row[1]), add_pairs(row[2], row[3]));
  }
  return add_quarters(add_quarters(fours[0], fours[1]), add_quarters(fours[2], fours[3]));
}

// The codes of 64 columns from the nibbles of those that are kept.
MRP_VNNI inline __m512i spread_codes(uint64_t kept, const uint8_t* nibbles) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_load_si128(reinterpret_cast<const __m128i*>(SHIFTED_CODES)));
  // Eight nibbles of 64 bits become bytes, with others in their upper halves, which are not looked at.
  const __m512i shifts = _mm512_set1_epi64(0x1c1814100c080400);
  const __m512i eights = _mm512_cvtepu32_epi64(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(nibbles)));
  const __m512i codes =
      _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(shifts, eights), table);
  return _mm512_mask_expand_epi8(_mm512_set1_epi8(CODE_SHIFT), kept, codes);
}

// The first groups of a panel, which can be read without a look at where it ends.
//
// A function of its own, on a copy of `state`: beside other code the compiler would keep the pointers, two
// for each row, in registers of vectors, and the state in memory.
template <typename Use>
[[gnu::noinline]] MRP_VNNI void for_whole_groups(
    Panel& panel, int64_t groups, Fetching& next, Use& state) {
  Use use = state;
  const uint8_t *places[PANEL_ROWS], *nibbles[PANEL_ROWS];
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    places[i] = panel.cursors[i].places;
    nibbles[i] = panel.cursors[i].v;
  }
  Fetching fetching = next;  // in registers
  for (int64_t group = 0; group < groups; group++) {
    fetching.fetch();
    __m512i spread[PANEL_ROWS];
#pragma GCC unroll 16
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
      const uint64_t kept = load_places(places[i] + 8 * group);
      spread[i] = spread_codes(kept, nibbles[i]);
      nibbles[i] += (_mm_popcnt_u64(kept) + 1) / 2;
    }
    use(group, spread);
  }
  state = use;
  next = fetching;
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    panel.cursors[i].skip(groups, nibbles[i]);
  }
}

// Each group of a panel, row by row: `use(group, rows)` with a register for each of the 16.
template <typename Use>
MRP_VNNI void for_each_group(Panel& panel, int64_t groups, Fetching& next, Use& use) {
  int64_t group = groups;
  for (const CodeCursor& cursor : panel.cursors) {
    group = std::min(group, cursor.whole());
  }
  for_whole_groups(panel, group, next, use);
  for (; group < groups; group++) {
    __m512i spread[PANEL_ROWS];
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
      uint8_t buffer[GROUP / 2];
      const uint8_t* some;
      const uint64_t kept = panel.cursors[i].next(some, buffer);
      spread[i] = spread_codes(kept, some);
    }
    use(group, spread);
  }
}

// Writes the codes of the rows that it is called with, in steps of columns.
struct TurnedCodes {
  CodedGroup* to;

  MRP_VNNI MRP_INLINE void operator()(int64_t group, __m512i (&spread)[PANEL_ROWS]) {
    turn(spread);
#pragma GCC unroll 16
    for (int64_t step = 0; step < STEPS; step++) {
      _mm512_store_si512(to[group].codes[step], spread[step]);
    }
  }
};

MRP_VNNI inline void decode_panel_vnni(
    Panel& panel, int64_t groups, Fetching& next, CodedGroup* to) {
  TurnedCodes codes{to};
  for_each_group(panel, groups, next, codes);
}

// totals + the products of one group with its scales, of one token.
MRP_VNNI inline __m512 add_group(
    __m512i products, __m512 scales, const RoundedGroup& x, __m512 totals) {
  const __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(x.scale));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), factor, totals);
}

// Adds the products of `Tokens` tokens with `Panels` panels to their sums.
template <int Panels, int Tokens>
MRP_VNNI void multiply_panels_vnni(
    const CodedGroup* panels, int64_t apart, const RoundedTokens& x, int64_t first, Sums* sums) {
  const RoundedGroup* tokens = x.token(first);
  __m512 totals[Tokens][Panels];
#pragma GCC unroll 8
  for (int t = 0; t < Tokens; t++) {
#pragma GCC unroll 2
    for (int p = 0; p < Panels; p++) {
      totals[t][p] = _mm512_loadu_ps(sums[first + t] + p * PANEL_ROWS);
    }
  }
  for (int64_t group = 0; group < x.groups; group++, panels++, tokens++) {
    __m512i products[Tokens][Panels];
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; t++) {
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++) {
        products[t][p] = _mm512_set1_epi32(tokens[t * x.stride].correction);
      }
    }
    // A loop of one step would copy all sums, twice.
#pragma GCC unroll 16
    for (int64_t step = 0; step < STEPS; step++) {
      __m512i rows[Panels];
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++) {
        rows[p] = _mm512_load_si512(panels[p * apart].codes[step]);
      }
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; t++) {
        const __m512i numbers = _mm512_set1_epi32(four_numbers(tokens[t * x.stride], step));
#pragma GCC unroll 2
        for (int p = 0; p < Panels; p++) {
          products[t][p] = _mm512_dpbusd_epi32(products[t][p], rows[p], numbers);
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; t++) {
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++) {
        totals[t][p] = add_group(
            products[t][p], _mm512_load_ps(panels[p * apart].scales), tokens[t * x.stride],
            totals[t][p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < Tokens; t++) {
#pragma GCC unroll 2
    for (int p = 0; p < Panels; p++) {
      _mm512_storeu_ps(sums[first + t] + p * PANEL_ROWS, totals[t][p]);
    }
  }
}

// Adds the products of few tokens with the rows that it is called with; of `scaled` the scales are read.
template <int Tokens>
struct FewTotals {
  const CodedGroup* scaled;
  RoundedTokens x;
  __m512 of_tokens[Tokens];

  MRP_VNNI MRP_INLINE void operator()(int64_t group, __m512i (&spread)[PANEL_ROWS]) {
    const __m512 scales = _mm512_load_ps(scaled[group].scales);
#pragma GCC unroll 2
    for (int t = 0; t < Tokens; t++) {
      const RoundedGroup& token = x.token(t)[group];
      const __m512i numbers = _mm512_loadu_si512(token.numbers);
      __m512i products[PANEL_ROWS];
#pragma GCC unroll 16
      for (int64_t i = 0; i < PANEL_ROWS; i++) {
        products[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), spread[i], numbers);
      }
      const __m512i sum = _mm512_add_epi32(add_lanes(products), _mm512_set1_epi32(token.correction));
      of_tokens[t] = add_group(sum, scales, token, of_tokens[t]);
    }
  }
};

// The same for few tokens and one panel, with rows as they are decoded.
template <int Tokens>
MRP_VNNI void multiply_decoded_vnni(
    Panel& panel, Fetching& next, const CodedGroup* scaled, const RoundedTokens& x, int64_t row,
    Sums* sums) {
  FewTotals<Tokens> totals{scaled, x, {}};
  for (int t = 0; t < Tokens; t++) {
    totals.of_tokens[t] = _mm512_loadu_ps(sums[t] + row);
  }
  for_each_group(panel, x.groups, next, totals);
  for (int t = 0; t < Tokens; t++) {
    _mm512_storeu_ps(sums[t] + row, totals.of_tokens[t]);
  }
}

}  // namespace mrp
#endif
