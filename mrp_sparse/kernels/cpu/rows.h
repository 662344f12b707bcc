// Rows of a packed weight: decoded, and multiplied with tokens. Nothing here knows tensors.
//
// One bit a column says whether it is kept, the first column in the lowest bit; the kept values of a
// row follow one another. 2:4 nibbles are read as such bits while they pass. No load goes past the
// last value, the last bit or the last column, whatever the bits say.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include <torch/headeronly/util/BFloat16.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MRP_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,avx512bf16,popcnt")))
#include <immintrin.h>
#endif

namespace mrp {

using c10::BFloat16;

// The weight as it is stored: rows of bytes of places, and all kept values.
template <typename T>
struct Packed {
  const T* values;
  const T* end;  // of the values
  const uint8_t* places;
  int64_t row_bytes;  // of places
  int64_t columns;
  const int64_t* offsets;  // where the values of each row begin; null: `columns / 2` a row

  const T* row(int64_t r) const {
    const int64_t offset = offsets ? offsets[r] : r * (columns / 2);
    if (offset < 0 || offset > end - values) {
      throw std::runtime_error("The offsets of a packed weight do not fit its values.");
    }
    if (columns % 8 && places[(r + 1) * row_bytes - 1] >> columns % 8) {
      throw std::runtime_error("A packed weight marks more columns than the input has.");
    }
    return values + offset;
  }
};

[[noreturn]] inline void throw_missing_values() {
  throw std::runtime_error("A packed weight marks more values as kept than it has.");
}

// How places are read: as bits, or as nibbles that name two of four columns.
struct Bits {
  static constexpr uint64_t decode(uint64_t places) { return places; }
};

struct Nibbles {
  // first | second << 2 becomes 1 << first | 1 << second, for 16 nibbles at a time; first < second.
  static constexpr uint64_t decode(uint64_t places) {
    constexpr uint64_t ones = 0x1111111111111111;
    const uint64_t first_low = places, first_high = places >> 1;
    const uint64_t second_low = places >> 2, second_high = places >> 3;
    return (~(first_low | first_high) & ones) |
        ((first_low | (second_low & ~second_high)) & ones) << 1 |
        ((first_high | (second_high & ~second_low)) & ones) << 2 |
        (second_low & second_high & ones) << 3;
  }
};

// What eight nibbles from `first` on become, a byte each.
constexpr int64_t decoded(int first) {
  uint64_t bytes = 0;
  for (int i = 0; i < 8; i++) {
    bytes |= (Nibbles::decode(first + i) & 15) << 8 * i;
  }
  return static_cast<int64_t>(bytes);
}

// The kept ones of the next columns of a row, of which up to 64 are looked at.
template <typename Decode>
inline uint64_t kept_columns(const uint8_t* places, int64_t columns) {
  if (columns >= 64) {
    uint64_t word;
    std::memcpy(&word, places, 8);
    return Decode::decode(word);
  }
  uint64_t word = 0;
  std::memcpy(&word, places, (columns + 7) / 8);
  return Decode::decode(word) & ((uint64_t{1} << columns) - 1);
}

// ---- On any processor ----

template <typename Decode, typename T>
void decode_row(const Packed<T>& weight, int64_t r, T* dense) {
  const uint8_t* places = weight.places + r * weight.row_bytes;
  const T* v = weight.row(r);
  std::fill(dense, dense + weight.columns, T(0));
  for (int64_t column = 0; column < weight.columns; column += 64) {
    uint64_t kept = kept_columns<Decode>(places + column / 8, weight.columns - column);
    if (weight.end - v < std::popcount(kept)) {
      throw_missing_values();
    }
    for (; kept; kept &= kept - 1) {
      dense[column + std::countr_zero(kept)] = *v++;
    }
  }
}

template <typename Input>
float dot(const Input* a, const BFloat16* b, int64_t columns) {
  constexpr int64_t lanes = 16;
  float sums[lanes] = {};
  int64_t column = 0;
  for (; column + lanes <= columns; column += lanes) {
    for (int64_t lane = 0; lane < lanes; lane++) {
      sums[lane] += static_cast<float>(a[column + lane]) * static_cast<float>(b[column + lane]);
    }
  }
  for (; column < columns; column++) {
    sums[column % lanes] += static_cast<float>(a[column]) * static_cast<float>(b[column]);
  }
  return std::accumulate(sums, sums + lanes, 0.0f);
}

// y[t · rows + r] = x[t] · row r + bias[r] for all tokens t, and rows r from `begin` to `end`, each
// of which `decode_one(r, dense)` decodes.
template <typename DecodeOne, typename Input>
void multiply_decoded(
    const DecodeOne& decode_one, int64_t columns, const Input* x, int64_t tokens,
    const BFloat16* bias, BFloat16* y, int64_t rows, int64_t begin, int64_t end) {
  std::vector<BFloat16> dense(columns);
  for (int64_t r = begin; r < end; r++) {
    decode_one(r, dense.data());
    const float added = bias ? static_cast<float>(bias[r]) : 0.0f;
    for (int64_t t = 0; t < tokens; t++) {
      const float product = dot(x + t * columns, dense.data(), columns);
      y[t * rows + r] = static_cast<BFloat16>(product + added);
    }
  }
}

#ifdef MRP_AVX512
// ---- With AVX-512: `vpexpandw` spreads 32 columns, `vdpbf16ps` multiplies and adds them ----

// Bytes of values, by measurement: half as many cost a tenth at 70%, four times as many at 50%.
constexpr int64_t AHEAD = 2048;

MRP_AVX512 inline uint32_t low_bits(int64_t count) {
  return static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

// The kept ones of the next 128 columns, 32 at a time.
template <typename Decode>
MRP_AVX512 inline void kept_columns_128(const uint8_t* places, uint32_t (&kept)[4]) {
  if constexpr (std::is_same_v<Decode, Nibbles>) {
    // `decode` of each of the nibbles, looked up for all 32 at once.
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(places));
    const __m128i table = _mm_set_epi64x(decoded(8), decoded(0));
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(words, nibble));
    const __m128i high =
        _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(words, 4), nibble));
    const __m128i bits = _mm_or_si128(low, _mm_slli_epi16(high, 4));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(kept), bits);
  } else {
    std::memcpy(kept, places, sizeof kept);
  }
}

// 32 columns of a row, of which the last may be fewer or the values may end.
MRP_AVX512 inline __m512i expand_carefully(
    const BFloat16*& v, const BFloat16* end, uint32_t kept) {
  const int64_t count = _mm_popcnt_u32(kept);
  if (end - v < count) {
    throw_missing_values();
  }
  const __m512i spread =
      _mm512_maskz_expand_epi16(kept, _mm512_maskz_loadu_epi16(low_bits(count), v));
  v += count;
  return spread;
}

// 32 columns of a row, with 32 values to be read from v on.
MRP_AVX512 inline __m512i expand(const BFloat16*& v, uint32_t kept) {
  const __m512i spread = _mm512_maskz_expand_epi16(kept, _mm512_loadu_si512(v));
  v += _mm_popcnt_u32(kept);
  return spread;
}

// The products of one row with `Tokens` tokens that are `columns` apart.
template <typename Decode, int Tokens>
MRP_AVX512 void multiply_row_avx512(
    const Packed<BFloat16>& weight, const uint8_t* places, const BFloat16* v, const BFloat16* x,
    float* sums) {
  constexpr int chains = Tokens == 1 ? 4 : 2;  // of sums, so that none waits for the one before
  __m512 parts[Tokens][chains];
  for (int t = 0; t < Tokens; t++) {
    for (int chain = 0; chain < chains; chain++) {
      parts[t][chain] = _mm512_setzero_ps();
    }
  }
  int64_t column = 0;
  for (; column + 128 <= weight.columns && weight.end - v >= 128; column += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(v) + AHEAD, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(v) + AHEAD + 64, _MM_HINT_T0);
    if (column % 512 == 0) {
      _mm_prefetch(reinterpret_cast<const char*>(places) + column / 8 + AHEAD / 8, _MM_HINT_T0);
    }
    uint32_t kept[4];
    kept_columns_128<Decode>(places + column / 8, kept);
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
      const __m512i spread = expand(v, kept[part]);
      for (int t = 0; t < Tokens; t++) {
        const __m512i token = _mm512_loadu_si512(x + t * weight.columns + column + 32 * part);
        parts[t][part % chains] =
            _mm512_dpbf16_ps(parts[t][part % chains], (__m512bh)spread, (__m512bh)token);
      }
    }
  }
  for (; column < weight.columns; column += 32) {
    const int64_t width = std::min<int64_t>(32, weight.columns - column);
    const uint64_t kept = kept_columns<Decode>(places + column / 8, width);
    const __m512i spread = expand_carefully(v, weight.end, static_cast<uint32_t>(kept));
    for (int t = 0; t < Tokens; t++) {
      const __m512i token =
          _mm512_maskz_loadu_epi16(low_bits(width), x + t * weight.columns + column);
      parts[t][0] = _mm512_dpbf16_ps(parts[t][0], (__m512bh)spread, (__m512bh)token);
    }
  }
  for (int t = 0; t < Tokens; t++) {
    __m512 total = _mm512_add_ps(parts[t][0], parts[t][1]);
    if (chains == 4) {
      total = _mm512_add_ps(total, _mm512_add_ps(parts[t][chains - 2], parts[t][chains - 1]));
    }
    sums[t] = _mm512_reduce_add_ps(total);
  }
}

template <typename Decode>
void multiply_rows_avx512(
    const Packed<BFloat16>& weight, const BFloat16* x, int64_t tokens, const BFloat16* bias,
    BFloat16* y, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    const uint8_t* places = weight.places + r * weight.row_bytes;
    const BFloat16* v = weight.row(r);
    const float added = bias ? static_cast<float>(bias[r]) : 0.0f;
    for (int64_t t = 0; t < tokens;) {
      const BFloat16* token = x + t * weight.columns;
      float sums[2];
      int64_t taken = 1;
      if (tokens - t >= 2) {
        multiply_row_avx512<Decode, 2>(weight, places, v, token, sums);
        taken = 2;
      } else {
        multiply_row_avx512<Decode, 1>(weight, places, v, token, sums);
      }
      for (int64_t i = 0; i < taken; i++) {
        y[(t + i) * rows + r] = static_cast<BFloat16>(sums[i] + added);
      }
      t += taken;
    }
  }
}
#endif

// ---- What the processor has ----

inline bool has_avx512() {
#ifdef MRP_AVX512
  static const bool has = __builtin_cpu_supports("avx512vbmi2") &&
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl");
  return has;
#else
  return false;
#endif
}

template <typename Decode>
void multiply(
    const Packed<BFloat16>& weight, const BFloat16* x, int64_t tokens, const BFloat16* bias,
    BFloat16* y, int64_t rows, int64_t begin, int64_t end, bool portable) {
#ifdef MRP_AVX512
  if (!portable && has_avx512()) {
    multiply_rows_avx512<Decode>(weight, x, tokens, bias, y, rows, begin, end);
    return;
  }
#endif
  multiply_decoded(
      [&](int64_t r, BFloat16* dense) { decode_row<Decode>(weight, r, dense); }, weight.columns, x,
      tokens, bias, y, rows, begin, end);
}

}  // namespace mrp
