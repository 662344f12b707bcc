// Rows of a packed weight, and how they are decoded. Nothing here knows tensors.
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

constexpr int64_t WORD = 64;  // columns whose places are read at once

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

// The decoded values of eight nibbles from `first` on, a byte each.
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
  if (columns >= WORD) {
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
// ---- With AVX-512: `vpexpandw` spreads 32 columns ----

inline uint32_t low_bits(int64_t count) {
  return static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

// 16 numbers of bfloat16 as float32.
MRP_AVX512 inline __m512 widen(__m256i numbers) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
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
  __m512i values = _mm512_loadu_si512(v);
  // Of an operand in memory Zen 4's `vpexpandw` takes five cycles, of a register two.
  asm("" : "+v"(values));
  v += _mm_popcnt_u32(kept);
  return _mm512_maskz_expand_epi16(kept, values);
}

// A range of memory that is fetched little by little, while something else is computed.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const void* begin, const void* end, int64_t strides)
      : at_(static_cast<const char*>(begin)),
        until_(at_),
        stride_(std::max<int64_t>(static_cast<const char*>(end) - at_, 0) / strides) {}

  void fetch() {
    until_ += stride_;
    for (; at_ < until_; at_ += LINE) {
      _mm_prefetch(at_, _MM_HINT_T1);
    }
  }

 private:
  static constexpr int64_t LINE = 64;
  const char* at_ = nullptr;
  const char* until_ = nullptr;
  int64_t stride_ = 0;
};

// The values of the rows from `begin` to `end`, the last of which is thought to have `expected`.
template <typename T>
Ahead values_ahead(
    const Packed<T>& weight, int64_t begin, int64_t end, int64_t expected, int64_t strides) {
  const T* last = weight.row(end - 1);
  return Ahead(weight.row(begin), last + std::min(expected, weight.end - last), strides);
}

template <typename T>
Ahead places_ahead(const Packed<T>& weight, int64_t begin, int64_t end, int64_t strides) {
  return Ahead(
      weight.places + begin * weight.row_bytes, weight.places + end * weight.row_bytes, strides);
}

// The rows of a packed weight, for the kernels of `few_tokens.h`, `panels.h` and `tile_panels.h`, which decode
// them 64 columns at a time into two registers, and take the tokens as `arrange` orders them.
template <typename Decode>
struct PackedRows {
  const Packed<BFloat16>& weight;

  // Where in a row the next 64 columns are.
  struct Cursor {
    const uint8_t* places;
    const BFloat16* v;
    const BFloat16* end;

    // Carefully: of the columns there may be only `width`, and the values may end.
    template <bool careful>
    MRP_AVX512 void next(int64_t width, __m512i (&halves)[2]) {
      const uint64_t kept = kept_columns<Decode>(places, careful ? width : WORD);
      const auto lower = static_cast<uint32_t>(kept), upper = static_cast<uint32_t>(kept >> 32);
      halves[0] = careful ? expand_carefully(v, end, lower) : expand(v, lower);
      halves[1] = careful ? expand_carefully(v, end, upper) : expand(v, upper);
      places += 8;
    }
  };

  int64_t columns() const { return weight.columns; }

  Cursor cursor(int64_t r) const {
    return {weight.places + r * weight.row_bytes, weight.row(r), weight.end};
  }

  // So many times 64 columns of row r can be read without a look at where the values end.
  int64_t whole(int64_t r) const {
    return std::min<int64_t>(weight.columns, weight.end - weight.row(r)) / WORD;
  }

  MRP_AVX512 static void arrange(__m512i (&)[2]) {}

  // The sums of rows from r on times what their values share.
  MRP_AVX512 __m512 scaled(__m512 sums, int64_t, uint32_t) const { return sums; }

  // Half of the weights are thought to be kept.
  Ahead ahead(int64_t begin, int64_t end, int64_t strides) const {
    return values_ahead(weight, begin, end, weight.columns / 2, strides);
  }

  Ahead places_ahead(int64_t begin, int64_t end, int64_t strides) const {
    return mrp::places_ahead(weight, begin, end, strides);
  }
};
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

}  // namespace mrp
