// Rows of a packed weight of four bits: decoded, and multiplied with tokens. See `rows.h`.
//
// A kept weight is a code from −8 to −1 or from 1 to 8, a nibble, times the scale of its row and its
// group of 64 columns. The nibbles of a group begin at a byte, the first in the low half of it.
#pragma once

#include "coded_tokens.h"
#include "rows.h"

namespace mrp {

// The weight as it is stored: rows of bytes of places, rows of scales, and all nibbles.
template <typename T>
struct Coded {
  const uint8_t* nibbles;
  const uint8_t* end;  // of the nibbles
  const uint8_t* places;
  int64_t row_bytes;  // of places
  int64_t columns;
  const T* scales;
  const int64_t* offsets;  // where the nibbles of each row begin

  int64_t groups() const { return (columns + GROUP - 1) / GROUP; }

  const uint8_t* row(int64_t r) const {
    const Packed<uint8_t> bytes{nibbles, end, places, row_bytes, columns, offsets};
    return bytes.row(r);
  }
};

// ---- On any processor ----

template <typename T>
void decode_row(const Coded<T>& weight, int64_t r, T* dense) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const uint8_t* places = weight.places + r * weight.row_bytes;
  const T* scale = weight.scales + r * weight.groups();
  const uint8_t* v = weight.row(r);
  std::fill(dense, dense + weight.columns, T(0));
  for (int64_t column = 0; column < weight.columns; column += GROUP) {
    uint64_t kept = kept_columns<Bits>(places + column / 8, weight.columns - column);
    const int64_t count = std::popcount(kept);
    if (weight.end - v < (count + 1) / 2) {
      throw_missing_values();
    }
    const Wide s = static_cast<Wide>(scale[column / GROUP]);
    for (int64_t i = 0; i < count; i++, kept &= kept - 1) {
      const int nibble = v[i / 2] >> i % 2 * 4 & 15;
      dense[column + std::countr_zero(kept)] = static_cast<T>(CODES[nibble] * s);
    }
    v += (count + 1) / 2;
  }
}

#ifdef MRP_AVX512
// ---- With AVX-512 ----

// Bytes of nibbles and of places, by measurement: half as many cost a twentieth, none a half.
constexpr int64_t CODES_AHEAD = 2048;

// 64 places. They go through a register, or else each count of them would wait for a mask.
inline uint64_t load_places(const uint8_t* places) {
  uint64_t word;
  std::memcpy(&word, places, 8);
  asm("" : "+r"(word));
  return word;
}

// 64 nibbles from v on, a byte each; of those beyond `count` nothing is read.
template <bool careful>
MRP_AVX512 inline __m512i load_nibbles(const uint8_t* v, int64_t count) {
  const __m256i bytes = careful
      ? _mm256_maskz_loadu_epi8(low_bits((count + 1) / 2), v)
      : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v));
  const __m512i words = _mm512_cvtepu8_epi16(bytes);
  constexpr int of_either = 0xa8;  // (a | b) & c
  return _mm512_ternarylogic_epi32(
      words, _mm512_slli_epi16(words, 4), _mm512_set1_epi8(15), of_either);
}

// The scales of a row in float32, in whole lines.
MRP_AVX512_VNNI inline void widen_scales(const BFloat16* scales, int64_t groups, float* wide) {
  for (int64_t group = 0; group < groups; group += 16) {
    const __m256i some = _mm256_maskz_loadu_epi16(
        low_bits(std::min<int64_t>(16, groups - group)), scales + group);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16);
    _mm512_store_si512(wide + group, bits);
  }
}

// The products of row r with `Tokens` tokens from t on.
template <int Tokens>
MRP_AVX512_VNNI void multiply_coded_row(
    const Coded<BFloat16>& weight, int64_t r, const uint8_t* v, const Rounded& x, int64_t t,
    const float* factors, float* results) {
  const uint8_t* places = weight.places + r * weight.row_bytes;
  __m512 sums[Tokens];
  for (int i = 0; i < Tokens; i++) {
    sums[i] = _mm512_setzero_ps();
  }
  int64_t group = 0;
  // 32 bytes may be read for each group, and no group takes more.
  const int64_t whole = weight.end - v >= 32 * x.groups ? weight.columns / GROUP : 0;
  const auto add_whole = [&](int64_t next) MRP_AVX512_VNNI {
    const uint64_t kept = load_places(places + 8 * next);
    x.template add<Tokens>(t, next, load_nibbles<false>(v, 64), kept, factors, sums);
    v += (_mm_popcnt_u64(kept) + 1) / 2;
  };
  for (; group + 8 <= whole; group += 8) {
    _mm_prefetch(reinterpret_cast<const char*>(places) + 8 * group + CODES_AHEAD, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int64_t next = 0; next < 8; next++) {
      if (next % 2 == 0) {
        _mm_prefetch(reinterpret_cast<const char*>(v) + CODES_AHEAD, _MM_HINT_T0);
      }
      add_whole(group + next);
    }
  }
  for (; group < whole; group++) {
    add_whole(group);
  }
  for (; group < x.groups; group++) {
    const uint64_t kept =
        kept_columns<Bits>(places + 8 * group, weight.columns - GROUP * group);
    const int64_t count = _mm_popcnt_u64(kept);
    if (weight.end - v < (count + 1) / 2) {
      throw_missing_values();
    }
    x.template add<Tokens>(t, group, load_nibbles<true>(v, count), kept, factors, sums);
    v += (count + 1) / 2;
  }
  for (int i = 0; i < Tokens; i++) {
    results[i] = _mm512_reduce_add_ps(sums[i]);
  }
}

MRP_AVX512_VNNI inline void multiply_coded_rows(
    const Coded<BFloat16>& weight, const Rounded& x, int64_t tokens, const BFloat16* bias,
    BFloat16* y, int64_t rows, int64_t begin, int64_t end) {
  std::vector<Line> wide((x.groups + 15) / 16), place;
  float* scales = reinterpret_cast<float*>(wide.data());
  for (int64_t r = begin; r < end; r++) {
    const uint8_t* v = weight.row(r);
    const float added = bias ? static_cast<float>(bias[r]) : 0.0f;
    widen_scales(weight.scales + r * x.groups, x.groups, scales);
    for (int64_t t = 0; t < tokens;) {
      float results[2];
      const auto multiply = [&](auto count) {
        constexpr int Tokens = decltype(count)::value;
        const float* factors = x.template factors<Tokens>(t, scales, place);
        multiply_coded_row<Tokens>(weight, r, v, x, t, factors, results);
        return int64_t{Tokens};
      };
      const int64_t taken = tokens - t >= 2 ? multiply(std::integral_constant<int, 2>())
                                            : multiply(std::integral_constant<int, 1>());
      for (int64_t i = 0; i < taken; i++) {
        y[(t + i) * rows + r] = static_cast<BFloat16>(results[i] + added);
      }
      t += taken;
    }
  }
}

// The rows of a weight of four bits: see `PackedRows`. Of 64 columns the even ones come first: they are
// looked up in words whose upper bytes, the odd ones, are not looked at.
struct CodedRows {
  const Coded<BFloat16>& weight;

  struct Cursor {
    const uint8_t* places;
    const uint8_t* v;
    const uint8_t* end;
    const BFloat16* scale;

    template <bool careful>
    MRP_AVX512 void next(int64_t width, __m512i (&halves)[2]) {
      const uint64_t kept = careful ? kept_columns<Bits>(places, width) : load_places(places);
      const int64_t count = _mm_popcnt_u64(kept);
      if (careful && end - v < (count + 1) / 2) {
        throw_missing_values();
      }
      const __m512i nibbles = load_nibbles<careful>(v, count);
      // A removed column is a 16, which looks up a zero.
      const __m512i spread = _mm512_mask_expand_epi8(_mm512_set1_epi8(16), kept, nibbles);
      const __m512i twice = _mm512_set1_epi16(static_cast<int16_t>(scale->x));
      const __m512 factor =
          _mm512_castsi512_ps(_mm512_and_si512(twice, _mm512_set1_epi32(-65536)));
      const __m512 codes = _mm512_cvtepi32_ps(_mm512_loadu_si512(CODES));
      const __m512i values =
          _mm512_zextsi256_si512((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(codes, factor)));
      halves[0] = _mm512_permutexvar_epi16(spread, values);
      halves[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(spread, 8), values);
      places += 8;
      v += (count + 1) / 2;
      scale++;
    }
  };

  int64_t columns() const { return weight.columns; }

  Cursor cursor(int64_t r) const {
    return {
        weight.places + r * weight.row_bytes, weight.row(r), weight.end,
        weight.scales + r * weight.groups()};
  }

  int64_t whole(int64_t r) const {
    return std::min<int64_t>(weight.columns / GROUP, (weight.end - weight.row(r)) / (GROUP / 2));
  }

  MRP_AVX512 static void arrange(__m512i (&halves)[2]) {
    const __m512i even = _mm512_set1_epi32(0x0000ffff);
    const __m512i lower = halves[0], upper = halves[1];
    // `vpackusdw` keeps the lower halves of 128 bits apart; the permutation brings them together.
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    halves[0] = _mm512_permutexvar_epi64(
        order,
        _mm512_packus_epi32(_mm512_and_si512(lower, even), _mm512_and_si512(upper, even)));
    halves[1] = _mm512_permutexvar_epi64(
        order, _mm512_packus_epi32(_mm512_srli_epi32(lower, 16), _mm512_srli_epi32(upper, 16)));
  }

  // The inverse of `arrange`.
  MRP_AVX512 static void restore(__m512i (&halves)[2]) {
    const __m512i lower = _mm512_unpacklo_epi16(halves[0], halves[1]);
    const __m512i upper = _mm512_unpackhi_epi16(halves[0], halves[1]);
    // Each 128 bits of `lower` are followed by those of `upper`.
    halves[0] = _mm512_permutex2var_epi64(lower, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), upper);
    halves[1] =
        _mm512_permutex2var_epi64(lower, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), upper);
  }

  // The nibbles of the rows from `begin` to `end`, of which half are thought to be kept.
  Ahead ahead(int64_t begin, int64_t end, int64_t strides) const {
    const uint8_t* last = weight.row(end - 1);
    return Ahead(
        weight.row(begin), last + std::min(weight.columns / 4, weight.end - last), strides);
  }

  Ahead places_ahead(int64_t begin, int64_t end, int64_t strides) const {
    return Ahead(
        weight.places + begin * weight.row_bytes, weight.places + end * weight.row_bytes, strides);
  }
};
#endif

// ---- What the processor has ----

inline bool has_avx512_codes() {
#ifdef MRP_AVX512
  static const bool has = has_avx512() && __builtin_cpu_supports("avx512vnni");
  return has;
#else
  return false;
#endif
}

// Some tokens, prepared once for all rows: y[t · rows + r] = x[t] · row r + bias[r]. Those of `eight_bits`
// are rounded before, on any processor; others are for those without AVX-512.
class CodedProduct {
 public:
  CodedProduct(
      const BFloat16* x, int64_t tokens, int64_t columns, bool eight_bits, bool portable)
      : tokens_(tokens) {
#ifdef MRP_AVX512
    if (eight_bits && !portable && has_avx512_codes()) {
      rounded_.reset(new Rounded(x, tokens, columns));
      return;
    }
#endif
    plain_ = plain_tokens(x, tokens, columns, eight_bits);
  }

  // The rows from `begin` to `end` of all `rows`.
  void multiply(
      const Coded<BFloat16>& weight, const BFloat16* bias, BFloat16* y, int64_t rows,
      int64_t begin, int64_t end) const {
#ifdef MRP_AVX512
    if (rounded_) {
      return multiply_coded_rows(weight, *rounded_, tokens_, bias, y, rows, begin, end);
    }
#endif
    multiply_decoded(
        [&](int64_t r, BFloat16* dense) { decode_row(weight, r, dense); }, weight.columns,
        plain_.data(), tokens_, bias, y, rows, begin, end);
  }

 private:
  int64_t tokens_;
  std::vector<float> plain_;
#ifdef MRP_AVX512
  std::unique_ptr<Rounded> rounded_;
#endif
};

}  // namespace mrp
