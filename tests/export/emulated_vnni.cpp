// The kernels of `integers.h` and `tile_integers.h`, with their instructions of AVX-512 emulated: each as
// Intel's guide defines it, lane by lane. So a processor without them compares their kernels with the others.
// Those of tiles are emulated as they are executed, by `emulated_tiles.h`.
#include "coded_rows.h"
#include "tokens.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>

namespace emulated {

template <typename T>
using Lanes = std::array<T, 64 / sizeof(T)>;

template <typename T, typename Register>
Lanes<T> lanes(const Register& of) {
  return std::bit_cast<Lanes<T>>(of);
}

// A register whose lane i is `value(i)`.
template <typename Register, typename T, typename Value>
Register each(const Value& value) {
  Lanes<T> result;
  for (size_t i = 0; i < result.size(); i++) {
    result[i] = static_cast<T>(value(i));
  }
  return std::bit_cast<Register>(result);
}

template <typename Register, typename T>
Register load(const void* from) {
  Lanes<T> result;
  std::memcpy(&result, from, sizeof result);
  return std::bit_cast<Register>(result);
}

template <typename Register>
void store(void* to, Register from) {
  std::memcpy(to, &from, sizeof from);
}

template <typename T, typename Operation>
__m512i both(__m512i a, __m512i b, const Operation& operation) {
  const auto first = lanes<T>(a), second = lanes<T>(b);
  return each<__m512i, T>([&](size_t i) { return operation(first[i], second[i]); });
}

__m512i widen_words(__m256i a) {
  const auto words = std::bit_cast<std::array<uint32_t, 8>>(a);
  return each<__m512i, uint64_t>([&](size_t i) { return words[i]; });
}

// Eight bits of each 64 from a bit on, for each byte of `bits`.
__m512i multishift(__m512i bits, __m512i a) {
  const auto first = lanes<uint8_t>(bits);
  const auto words = lanes<uint64_t>(a);
  return each<__m512i, uint8_t>(
      [&](size_t i) { return std::rotr(words[i / 8], first[i] & 63); });
}

__m512i look_up(__m512i index, __m512i a) {
  const auto indices = lanes<uint8_t>(index), bytes = lanes<uint8_t>(a);
  return each<__m512i, uint8_t>([&](size_t i) { return bytes[indices[i] & 63]; });
}

// The lower or upper ones of each 16 bytes of a and b, in turn.
template <typename T>
__m512i unpack(__m512i a, __m512i b, size_t upper) {
  constexpr size_t part = 16 / sizeof(T);
  const auto first = lanes<T>(a), second = lanes<T>(b);
  return each<__m512i, T>([&](size_t i) {
    const size_t from = i / part * part + upper * part / 2 + i % part / 2;
    return (i % 2 ? second : first)[from];
  });
}

// Quarters that `order` names by two bits each: two of a, and two of b.
__m512i shuffle_quarters(__m512i a, __m512i b, int order) {
  const auto first = lanes<uint32_t>(a), second = lanes<uint32_t>(b);
  return each<__m512i, uint32_t>([&](size_t i) {
    return (i < 8 ? first : second)[4 * (order >> i / 4 * 2 & 3) + i % 4];
  });
}

// The next bytes of a where the mask has a one, those of `source` elsewhere.
__m512i expand(__m512i source, uint64_t mask, __m512i a) {
  const auto kept = lanes<uint8_t>(source), bytes = lanes<uint8_t>(a);
  size_t next = 0;
  return each<__m512i, uint8_t>(
      [&](size_t i) { return mask >> i & 1 ? bytes[next++] : kept[i]; });
}

// sum + the products of four bytes without a sign and four with one, in each lane.
__m512i dot(__m512i sum, __m512i a, __m512i b) {
  const auto sums = lanes<int32_t>(sum);
  const auto first = lanes<uint8_t>(a);
  const auto second = lanes<int8_t>(b);
  return each<__m512i, int32_t>([&](size_t i) {
    int32_t total = sums[i];
    for (size_t j = 4 * i; j < 4 * i + 4; j++) {
      total += first[j] * second[j];
    }
    return total;
  });
}

// Of each 16 bytes the lanes of a, then those of b, as the nearest numbers of 16 bits.
__m512i pack(__m512i a, __m512i b) {
  const auto first = lanes<int32_t>(a), second = lanes<int32_t>(b);
  return each<__m512i, int16_t>([&](size_t i) {
    const int32_t wide = (i % 8 < 4 ? first : second)[i / 8 * 4 + i % 4];
    return std::clamp(wide, -32768, 32767);
  });
}

// The sums of two products of neighbours, in each lane.
__m512i multiply_pairs(__m512i a, __m512i b) {
  const auto first = lanes<int16_t>(a), second = lanes<int16_t>(b);
  return each<__m512i, int32_t>([&](size_t i) {
    return first[2 * i] * second[2 * i] + first[2 * i + 1] * second[2 * i + 1];
  });
}

// The numbers of 16 bits that the mask names, of which alone memory is read.
__m512i load_some(uint32_t mask, const void* from) {
  return each<__m512i, int16_t>([&](size_t i) {
    int16_t number = 0;
    if (mask >> i & 1) {
      std::memcpy(&number, static_cast<const char*>(from) + 2 * i, sizeof number);
    }
    return number;
  });
}

__m512 multiply_add(__m512 a, __m512 b, __m512 c) {
  const auto first = lanes<float>(a), second = lanes<float>(b), third = lanes<float>(c);
  return each<__m512, float>([&](size_t i) { return std::fma(first[i], second[i], third[i]); });
}

__m512 multiply(__m512 a, __m512 b) {
  const auto first = lanes<float>(a), second = lanes<float>(b);
  return each<__m512, float>([&](size_t i) { return first[i] * second[i]; });
}

}  // namespace emulated

#define _mm512_loadu_si512(p) (emulated::load<__m512i, uint8_t>(p))
#define _mm512_loadu_ps(p) (emulated::load<__m512, float>(p))
#define _mm512_load_si512(p) (emulated::load<__m512i, uint8_t>(p))
#define _mm512_load_ps(p) (emulated::load<__m512, float>(p))
#define _mm512_store_si512(p, a) (emulated::store(p, a))
#define _mm512_storeu_ps(p, a) (emulated::store(p, a))
#define _mm512_store_ps(p, a) (emulated::store(p, a))
#define _mm512_setzero_si512() (emulated::each<__m512i, int32_t>([](size_t) { return 0; }))
#define _mm512_setzero_ps() (emulated::each<__m512, float>([](size_t) { return 0; }))
#define _mm512_set1_epi8(v) (emulated::each<__m512i, int8_t>([&](size_t) { return v; }))
#define _mm512_set1_epi16(v) (emulated::each<__m512i, int16_t>([&](size_t) { return v; }))
#define _mm512_set1_epi64(v) (emulated::each<__m512i, int64_t>([&](size_t) { return v; }))
#define _mm512_set1_epi32(v) (emulated::each<__m512i, int32_t>([&](size_t) { return v; }))
#define _mm512_set1_ps(v) (emulated::each<__m512, float>([&](size_t) { return v; }))
#define _mm512_broadcast_i32x4(a) \
  (emulated::each<__m512i, int32_t>([v = a](size_t i) { return ((__v4si)v)[i % 4]; }))
#define _mm512_add_epi32(a, b) (emulated::both<int32_t>(a, b, std::plus()))
#define _mm512_and_si512(a, b) (emulated::both<uint32_t>(a, b, std::bit_and()))
#define _mm512_slli_epi32(a, n) \
  (emulated::each<__m512i, uint32_t>([v = emulated::lanes<uint32_t>(a)](size_t i) { return v[i] << n; }))
#define _mm512_packs_epi32 emulated::pack
#define _mm512_madd_epi16 emulated::multiply_pairs
#define _mm512_maskz_loadu_epi16 emulated::load_some
#define _mm512_sub_epi8(a, b) (emulated::both<int8_t>(a, b, std::minus()))
#define _mm512_cvtepi32_ps(a) \
  (emulated::each<__m512, float>([v = emulated::lanes<int32_t>(a)](size_t i) { return v[i]; }))
#define _mm512_cvtepu32_epi64 emulated::widen_words
#define _mm512_multishift_epi64_epi8 emulated::multishift
#define _mm512_permutexvar_epi8 emulated::look_up
#define _mm512_unpacklo_epi32(a, b) (emulated::unpack<uint32_t>(a, b, 0))
#define _mm512_unpackhi_epi32(a, b) (emulated::unpack<uint32_t>(a, b, 1))
#define _mm512_unpacklo_epi64(a, b) (emulated::unpack<uint64_t>(a, b, 0))
#define _mm512_unpackhi_epi64(a, b) (emulated::unpack<uint64_t>(a, b, 1))
#define _mm512_shuffle_i32x4 emulated::shuffle_quarters
#define _mm512_mask_expand_epi8 emulated::expand
#define _mm512_dpbusd_epi32 emulated::dot
#define _mm512_fmadd_ps emulated::multiply_add
#define _mm512_mul_ps emulated::multiply
#define MRP_VNNI

#include "tile_integers.h"

// y (tokens, rows) for x (tokens, columns), by the kernel with the number `way` of `Integers`, or by that of
// tiles for the next number; false if the weight is damaged.
template <typename T>
bool multiply_by(
    int64_t way, const uint8_t* nibbles, int64_t bytes, const uint8_t* places, const T* scales,
    const int64_t* offsets, const T* x, T* y, int64_t tokens, int64_t rows, int64_t columns) {
  const mrp::Coded<T> weight{
      nibbles, nibbles + bytes, places, (columns + 7) / 8, columns, scales, offsets};
  const T* bias = nullptr;
  try {
    if (way > static_cast<int64_t>(mrp::Integers::vnni)) {
      mrp::RoundedTiles rounded(tokens, weight.groups());
      rounded.fill(x, columns, 0, rounded.tiles());
      mrp::multiply_rounded_tiles(weight, rounded, bias, y, rows, 0, rows);
      return true;
    }
    std::vector<mrp::RoundedGroup> rounded(tokens * weight.groups());
    const auto kernel = static_cast<mrp::Integers>(way);
    for (int64_t t = 0; t < tokens; t++) {
      mrp::round_token(kernel, x + t * columns, columns, rounded.data() + t * weight.groups());
    }
    mrp::multiply_rounded(kernel, weight, rounded.data(), tokens, bias, y, rows, 0, rows);
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

extern "C" bool multiply(
    bool is_bfloat16, int64_t way, const uint8_t* nibbles, int64_t bytes, const uint8_t* places,
    const void* scales, const int64_t* offsets, const void* x, void* y, int64_t tokens, int64_t rows,
    int64_t columns) {
  const auto by = [&]<typename T>(T) {
    return multiply_by<T>(
        way, nibbles, bytes, places, static_cast<const T*>(scales), offsets, static_cast<const T*>(x),
        static_cast<T*>(y), tokens, rows, columns);
  };
  return is_bfloat16 ? by(mrp::BFloat16()) : by(0.0f);
}
