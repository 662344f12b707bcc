// Tokens that are rounded to 8 bits to be multiplied with a weight of four bits. See `coded_rows.h`.
#pragma once

#include "rows.h"

#include <cmath>
#include <limits>

#ifdef MRP_AVX512
#define MRP_AVX512_VNNI \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,avx512bf16,avx512vnni,popcnt")))
#endif

namespace mrp {

constexpr int64_t GROUP = WORD;  // columns that share a scale
constexpr int CODES[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8};

// ---- On any processor ----

// Rounds a group of a token to 8 bits: x ≈ rounded · the scale that is returned.
inline float round_group(const BFloat16* x, int64_t width, int8_t (&rounded)[GROUP]) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < width; i++) {
    const float value = static_cast<float>(x[i]);
    finite = finite && std::isfinite(value);
    largest = std::max(largest, std::abs(value));
  }
  std::fill(rounded, rounded + GROUP, int8_t(0));
  if (!finite) {
    return std::numeric_limits<float>::quiet_NaN();  // as a dense product would give
  }
  for (int64_t i = 0; i < width && largest > 0; i++) {
    rounded[i] = static_cast<int8_t>(std::nearbyint(static_cast<float>(x[i]) / largest * 127));
  }
  return largest / 127;
}

// The tokens as they are multiplied on any processor: in float32, maybe rounded to 8 bits before.
inline std::vector<float> plain_tokens(
    const BFloat16* x, int64_t tokens, int64_t columns, bool eight_bits) {
  std::vector<float> plain(x, x + tokens * columns);
  for (int64_t t = 0; t < tokens && eight_bits; t++) {
    for (int64_t column = 0; column < columns; column += GROUP) {
      const int64_t at = t * columns + column, width = std::min(GROUP, columns - column);
      int8_t rounded[GROUP];
      const float scale = round_group(x + at, width, rounded);
      std::transform(rounded, rounded + width, plain.begin() + at, [&](int8_t value) {
        return value * scale;
      });
    }
  }
  return plain;
}

#ifdef MRP_AVX512
// ---- With AVX-512: 64 columns at a time, which `vpexpandb` spreads ----

struct alignas(64) Line {
  uint8_t bytes[64];
};

// The next 64 columns of a token, of which the last may be fewer: 0 stands for those beyond.
MRP_AVX512_VNNI inline void load_group(
    const BFloat16* x, int64_t columns, __m512i (&halves)[2]) {
  for (int64_t half = 0; half < 2; half++) {
    const int64_t here = std::clamp<int64_t>(columns - 32 * half, 0, 32);
    halves[half] = _mm512_maskz_loadu_epi16(low_bits(here), x + 32 * half);
  }
}

// What `round_group` of any processor does, bit by bit.
MRP_AVX512_VNNI inline float round_group(const __m512i (&halves)[2], Line& rounded) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const __m512i larger = _mm512_max_epu16(
      _mm512_and_si512(halves[0], magnitude), _mm512_and_si512(halves[1], magnitude));
  const __m256i of_16 = _mm256_max_epu16(
      _mm512_castsi512_si256(larger), _mm512_extracti64x4_epi64(larger, 1));
  const __m128i of_8 =
      _mm_max_epu16(_mm256_castsi256_si128(of_16), _mm256_extracti128_si256(of_16, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(of_8, _mm_set1_epi16(-1)));
  const BFloat16 largest(~_mm_extract_epi16(least, 0) & 0xffff, BFloat16::from_bits());
  const __m512 divisor = _mm512_set1_ps(largest);
  if (!std::isfinite(static_cast<float>(largest)) || largest == 0) {
    _mm512_store_si512(&rounded, _mm512_setzero_si512());
    return largest == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  for (int part = 0; part < 4; part++) {
    const __m256i half = part % 2 ? _mm512_extracti64x4_epi64(halves[part / 2], 1)
                                  : _mm512_castsi512_si256(halves[part / 2]);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    const __m512 ratio = _mm512_div_ps(_mm512_castsi512_ps(bits), divisor);
    const __m512i nearest = _mm512_cvtps_epi32(_mm512_mul_ps(ratio, _mm512_set1_ps(127)));
    _mm_store_si128(
        reinterpret_cast<__m128i*>(rounded.bytes + 16 * part), _mm512_cvtepi32_epi8(nearest));
  }
  return static_cast<float>(largest) / 127;
}

// Tokens rounded to 8 bits, with a scale for each group. `vpdpbusd` takes codes without a sign, so
// that they are 8 too large: what that adds is in the second line of each group, with a minus.
struct Rounded {
  int64_t groups;
  int64_t padded;  // groups, up to whole lines of scales
  std::vector<Line> lines;
  std::vector<float> scales;
  __m512i codes;

  MRP_AVX512_VNNI Rounded(const BFloat16* x, int64_t tokens, int64_t columns)
      : groups((columns + GROUP - 1) / GROUP), padded((groups + 15) / 16 * 16),
        lines(2 * tokens * groups), scales(tokens * padded) {
    alignas(16) uint8_t table[16];
    std::transform(CODES, CODES + 16, table, [](int code) { return uint8_t(code + 8); });
    codes = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t group = 0; group < groups; group++) {
        __m512i halves[2];
        load_group(x + t * columns + group * GROUP, columns - group * GROUP, halves);
        Line* line = lines.data() + 2 * (t * groups + group);
        scales[t * padded + group] = round_group(halves, line[0]);
        const __m512i extra = _mm512_dpbusd_epi32(
            _mm512_setzero_si512(), _mm512_set1_epi8(8), _mm512_load_si512(line));
        _mm512_store_si512(line + 1, _mm512_sub_epi32(_mm512_setzero_si512(), extra));
      }
    }
  }

  // What the products of each token with each group of a row are multiplied by: both scales.
  template <int Tokens>
  MRP_AVX512_VNNI const float* factors(
      int64_t t, const float* of_row, std::vector<Line>& place) const {
    place.resize(4 * padded / 16);  // up to four tokens
    float* products = reinterpret_cast<float*>(place.data());
    for (int i = 0; i < Tokens; i++) {
      for (int64_t group = 0; group < padded; group += 16) {
        const __m512 of_token = _mm512_loadu_ps(scales.data() + (t + i) * padded + group);
        _mm512_store_ps(
            products + i * padded + group,
            _mm512_mul_ps(_mm512_load_ps(of_row + group), of_token));
      }
    }
    return products;
  }

  template <int Tokens>
  MRP_AVX512_VNNI void add(
      int64_t t, int64_t group, __m512i nibbles, uint64_t kept, const float* factors,
      __m512 (&sums)[Tokens]) const {
    const __m512i spread = _mm512_mask_expand_epi8(
        _mm512_set1_epi8(8), kept, _mm512_shuffle_epi8(codes, nibbles));
    for (int i = 0; i < Tokens; i++) {
      const Line* x = lines.data() + 2 * ((t + i) * groups + group);
      const __m512i sum = _mm512_dpbusd_epi32(
          _mm512_load_si512((x + 1)->bytes), spread, _mm512_load_si512(x->bytes));
      const __m512 factor = _mm512_set1_ps(factors[i * padded + group]);
      sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, sums[i]);
    }
  }
};
#endif

}  // namespace mrp
