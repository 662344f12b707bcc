// Rows of a packed weight of four bits: decoded, and multiplied with tokens. See `rows.h`.
//
// A kept weight is a code from −8 to −1 or from 1 to 8, a nibble, times the scale of its row and its
// group of 64 columns. The nibbles of a group begin at a byte, the first in the low half of it.
#pragma once

#include "rows.h"

namespace mrp {

constexpr int64_t GROUP = WORD;  // columns that share a scale
constexpr int CODES[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8};

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

  // The same without scales, with bytes of nibbles as its values.
  Packed<uint8_t> bytes() const { return {nibbles, end, places, row_bytes, columns, offsets}; }

  const uint8_t* row(int64_t r) const { return bytes().row(r); }
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

  MRP_AVX512 __m512 scaled(__m512 sums, int64_t, uint32_t) const { return sums; }

  // Half of the weights are thought to be kept.
  Ahead ahead(int64_t begin, int64_t end, int64_t strides) const {
    return values_ahead(weight.bytes(), begin, end, weight.columns / 4, strides);
  }

  Ahead places_ahead(int64_t begin, int64_t end, int64_t strides) const {
    return mrp::places_ahead(weight.bytes(), begin, end, strides);
  }
};
#endif

}  // namespace mrp
