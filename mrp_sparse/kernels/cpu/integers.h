// Tokens that are rounded to 8 bits, multiplied with the codes of a weight of four bits as integers.
//
// y[t, r] = Σ_g s_w[r, g] · s_x[t, g] · Σ_c code[r, c] · number[t, c], with the inner sum over the 64
// columns of a group exact. Each kernel adds the groups one after the other by a fused multiply-add: all
// of them return the same bits.
//
// A block of two panels is multiplied at once, a span of its columns at a time, which the second cache
// holds. Two panels and six tokens take 24 registers for their sums, and eight loads for 12 products.
#pragma once

#include "integer_vectors.h"

namespace mrp {

// ---- What the processor has ----

inline Integers best_integers() {
#ifdef MRP_AVX512
  static const Integers best = [] {
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512vbmi2") &&
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

// Adds the products of a span of all tokens with the panels of a block, whose scales `decoded` has.
inline void multiply_span(
    Integers way, std::vector<Panel>& panels, Fetching& next, CodedGroup* decoded,
    const RoundedTokens& x, Sums* sums) {
#ifdef MRP_AVX512
  if (way == Integers::vnni && x.count <= VNNI_FEW_TOKENS) {
    for (size_t p = 0; p < panels.size(); p++) {  // one tile: a panel is decoded once
      for_each_tile<VNNI_FEW_TOKENS>(x.count, [&]<int count>(int64_t) {
        multiply_decoded_vnni<count>(
            panels[p], next, decoded + p * SPAN_GROUPS, x, p * PANEL_ROWS, sums);
      });
    }
    return;
  }
  if (way == Integers::vnni) {
    for (size_t p = 0; p < panels.size(); p++) {
      decode_panel_vnni(panels[p], x.groups, next, decoded + p * SPAN_GROUPS);
    }
    for_each_tile<VNNI_TOKENS>(x.count, [&]<int count>(int64_t t) {
      const auto multiply = panels.size() == 1 ? multiply_panels_vnni<1, count>
                                               : multiply_panels_vnni<BLOCK_PANELS, count>;
      multiply(decoded, SPAN_GROUPS, x, t, sums);
    });
    return;
  }
#endif
  for (size_t p = 0; p < panels.size(); p++, decoded += SPAN_GROUPS) {
    const int64_t row = p * PANEL_ROWS;
#ifdef MRP_AVX512
    if (way == Integers::avx2) {
      decode_panel_avx2(panels[p], x.groups, decoded);
      for_each_tile<AVX2_TOKENS>(x.count, [&]<int count>(int64_t t) {
        multiply_panel_avx2<count>(decoded, x, t, row, sums);
      });
      continue;
    }
#endif
    decode_panel(panels[p], x.groups, decoded);
    for (int64_t t = 0; t < x.count; t++) {
      multiply_panel(decoded, x.token(t), x.groups, sums[t] + row);
    }
  }
}

// The scales of 16 groups of 16 rows from r on, of which `width` groups are there, as floats.
using Scales = float[PANEL_ROWS][PANEL_ROWS];

template <typename T>
MRP_INLINE void widen_scales(
    const Coded<T>& weight, int64_t r, int64_t end, int64_t group, int64_t width, Scales& rows) {
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    const T* scales = weight.scales + std::min(r + i, end - 1) * weight.groups() + group;
    if (width == PANEL_ROWS) {  // a constant, so that compilers make a vector of it
      for (int64_t g = 0; g < PANEL_ROWS; g++) {
        rows[i][g] = static_cast<float>(scales[g]);
      }
    } else {
      for (int64_t g = 0; g < width; g++) {
        rows[i][g] = static_cast<float>(scales[g]);
      }
    }
  }
}

#ifdef MRP_AVX512
constexpr int64_t PAIRS_OF_GROUPS = 2 * PANEL_ROWS;

// The scales of 32 groups in bfloat16, of which `width` are there: half as many registers have pairs of them.
MRP_VNNI inline void copy_pairs_of_scales(
    const Coded<BFloat16>& weight, int64_t r, int64_t end, int64_t group, int64_t width,
    CodedGroup* to) {
  const __mmask32 there = (uint64_t(1) << width) - 1;
  __m512i pairs[PANEL_ROWS];
#pragma GCC unroll 16
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    const BFloat16* row = weight.scales + std::min(r + i, end - 1) * weight.groups();
    pairs[i] = _mm512_maskz_loadu_epi16(there, row + group);
  }
  turn(pairs);
#pragma GCC unroll 16
  for (int64_t pair = 0; pair < PANEL_ROWS; pair++) {
    if (2 * pair < width) {  // there is room for an even number of groups
      const __m512i odd = _mm512_and_si512(pairs[pair], _mm512_set1_epi32(-65536));
      _mm512_store_si512(to[2 * pair].scales, _mm512_slli_epi32(pairs[pair], 16));
      _mm512_store_si512(to[2 * pair + 1].scales, odd);
    }
  }
}

template <typename T>
MRP_VNNI void copy_scales_vnni(
    const Coded<T>& weight, int64_t r, int64_t end, int64_t group, int64_t width, CodedGroup* to) {
  alignas(64) Scales rows;
  widen_scales(weight, r, end, group, width, rows);
  __m512i registers[PANEL_ROWS];
#pragma GCC unroll 16
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    registers[i] = _mm512_load_si512(rows[i]);
  }
  turn(registers);
#pragma GCC unroll 16
  for (int64_t g = 0; g < PANEL_ROWS; g++) {
    if (g < width) {
      _mm512_store_si512(to[g].scales, registers[g]);
    }
  }
}
#endif

// Writes the scales of 16 rows from r on, of `groups` groups from `first` on, to those of a panel.
template <typename T>
void copy_scales(
    Integers way, const Coded<T>& weight, int64_t r, int64_t end, int64_t first, int64_t groups,
    CodedGroup* to) {
#ifdef MRP_AVX512
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (way == Integers::vnni) {
      for (int64_t group = 0; group < groups; group += PAIRS_OF_GROUPS, to += PAIRS_OF_GROUPS) {
        const int64_t width = std::min(PAIRS_OF_GROUPS, groups - group);
        copy_pairs_of_scales(weight, r, end, first + group, width, to);
      }
      return;
    }
  }
#endif
  for (int64_t group = 0; group < groups; group += PANEL_ROWS, to += PANEL_ROWS) {
    const int64_t width = std::min(PANEL_ROWS, groups - group);
#ifdef MRP_AVX512
    if (way == Integers::vnni) {
      copy_scales_vnni(weight, r, end, first + group, width, to);
      continue;
    }
#endif
    Scales rows;
    widen_scales(weight, r, end, first + group, width, rows);
    for (int64_t g = 0; g < width; g++) {
      for (int64_t i = 0; i < PANEL_ROWS; i++) {
        to[g].scales[i] = rows[i][g];
      }
    }
  }
}

// A value in the type of a result. To bfloat16 it is rounded without a branch: loops become vectors.
template <typename T, typename Wide>
MRP_INLINE T narrowed(Wide value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return BFloat16(static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded), BFloat16::from_bits());
  } else {
    return static_cast<T>(value);
  }
}

// y[t · rows + i] = sums[t][i] + bias[i] for `height` rows i.
template <typename T>
MRP_INLINE void add_bias(
    const Sums* sums, int64_t tokens, const T* bias, T* y, int64_t rows, int64_t height) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  Wide added[BLOCK_ROWS] = {};
  for (int64_t i = 0; bias && i < height; i++) {
    added[i] = static_cast<Wide>(bias[i]);
  }
  for (int64_t t = 0; t < tokens; t++, y += rows) {
    if (height == BLOCK_ROWS) {  // a constant, so that compilers vectorise it
      for (int64_t i = 0; i < BLOCK_ROWS; i++) {
        y[i] = narrowed<T>(static_cast<Wide>(sums[t][i]) + added[i]);
      }
    } else {
      for (int64_t i = 0; i < height; i++) {
        y[i] = narrowed<T>(static_cast<Wide>(sums[t][i]) + added[i]);
      }
    }
  }
}

#ifdef MRP_AVX512
template <typename T>
MRP_VNNI void add_bias_vnni(
    const Sums* sums, int64_t tokens, const T* bias, T* y, int64_t rows, int64_t height) {
  add_bias(sums, tokens, bias, y, rows, height);
}
#endif

template <typename T>
void write_sums(
    Integers way, const Sums* sums, int64_t tokens, const T* bias, T* y, int64_t rows,
    int64_t height) {
#ifdef MRP_AVX512
  if (way == Integers::vnni) {
    return add_bias_vnni(sums, tokens, bias, y, rows, height);
  }
#endif
  add_bias(sums, tokens, bias, y, rows, height);
}

// Calls `use(r, height, panels, fetching)` for each block of the rows from `begin` to `end`: its first row, its
// number of rows, its panels, and the next block to fetch meanwhile.
template <typename T, typename Use>
void for_each_block(const Coded<T>& weight, int64_t begin, int64_t end, const Use& use) {
  const Packed<uint8_t> bytes = weight.bytes();
  std::vector<Panel> panels;
  for (int64_t r = begin; r < end; r += BLOCK_ROWS) {
    const int64_t next = std::min(r + BLOCK_ROWS, end), after = std::min(next + BLOCK_ROWS, end);
    panels.clear();
    for (int64_t first = r; first < next; first += PANEL_ROWS) {
      panels.emplace_back(bytes, first, end);
    }
    Fetching fetching;
    if (next < end) {
      fetching = {weight, next, after, weight.groups() * int64_t(panels.size())};
    }
    use(r, next - r, panels, fetching);
  }
}

// y[t · rows + r] = x[t] · row r + bias[r] for all tokens t, and rows r from `begin` to `end`.
template <typename T>
void multiply_rounded(
    Integers way, const Coded<T>& weight, const RoundedGroup* x, int64_t tokens, const T* bias,
    T* y, int64_t rows, int64_t begin, int64_t end) {
  // Kept by each thread: to map and clear them anew would take longer than a product.
  thread_local std::vector<CodedGroup> decoded(BLOCK_PANELS * SPAN_GROUPS);
  thread_local std::vector<float> kept_sums;
  kept_sums.resize(tokens * BLOCK_ROWS);
  auto* const sums = reinterpret_cast<Sums*>(kept_sums.data());
  const int64_t groups = weight.groups();
  for_each_block(weight, begin, end, [&](int64_t r, int64_t height, std::vector<Panel>& panels, Fetching& fetching) {
    std::fill_n(kept_sums.data(), tokens * BLOCK_ROWS, 0.0f);
    for (int64_t first = 0; first < groups; first += SPAN_GROUPS) {
      const int64_t span = std::min(SPAN_GROUPS, groups - first);
      for (size_t p = 0; p < panels.size(); p++) {
        copy_scales(way, weight, r + p * PANEL_ROWS, end, first, span, &decoded[p * SPAN_GROUPS]);
      }
      multiply_span(way, panels, fetching, decoded.data(), {x + first, groups, tokens, span}, sums);
    }
    write_sums(way, sums, tokens, bias ? bias + r : nullptr, y + r, rows, height);
  });
}

}  // namespace mrp
