// Tiles (AMX), as `tile_integers.h` and `tile_panels.h` multiply them: whether they may be used, and their
// instructions.
//
// A tile is a register of 16 rows of 64 bytes. A product takes a square of 16 rows of a weight, each with 64
// bytes of its columns, and one of 16 tokens, turned: for each four bytes of columns, those of all tokens.
// To a tile of 32-bit sums it adds the products of all rows with all tokens, a token in each lane. Rows and
// tokens that are missing are zeros or old ones, and their sums are not read: one configuration does for all.
#pragma once

#include "integer_vectors.h"

#ifdef MRP_AVX512
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// The instructions of `rows.h` and `integer_panels.h`, so that functions for either are inlined. Each processor with
// AMX has them.
#define MRP_TILES                                                                              \
  __attribute__((target(                                                                       \
      "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,avx512bf16,popcnt")))
#endif

namespace mrp {

// Whether the processor has tiles of bfloat16 and of integers, and Linux lets this process use them, for which
// the first call asks. Of a processor with AVX-512 alone, which has `xgetbv`.
inline bool has_amx() {
#if defined(MRP_AVX512) && defined(__linux__)
  static const bool has = [] {
    constexpr unsigned tiles = 1 << 22 | 1 << 24 | 1 << 25, saved = 3 << 17;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & tiles) {
      return false;
    }
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr long request = 0x1023, data_of_tiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return (low & saved) == saved && syscall(SYS_arch_prctl, request, data_of_tiles) == 0;
  }();
  return has;
#else
  return false;
#endif
}

#ifdef MRP_AVX512
constexpr int64_t SIDE = 16;  // rows of a tile, and its lanes of 32 bits

inline int64_t squares_of(int64_t count) { return (count + SIDE - 1) / SIDE; }

// The tiles of a thread, while this lives.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) Configuration {
      uint8_t palette = 1, first_row = 0, unused[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    };
    static constexpr Configuration all_whole;
    asm volatile("ldtilecfg %0" : : "m"(all_whole));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// ---- The instructions; compilers' own names for them take no number that a template has ----

template <int tile>
MRP_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// A KiB of memory, of any type.
template <int tile, typename Square>
MRP_INLINE void load_tile(const Square& square) {
  static_assert(sizeof square == 64 * SIDE);
  asm volatile("tileloadd (%0,%1), %%tmm%c2" : : "r"(&square), "r"(int64_t{64}), "i"(tile), "m"(square));
}

template <int tile, typename Square>
MRP_INLINE void store_tile(Square& square) {
  static_assert(sizeof square == 64 * SIDE);
  asm volatile("tilestored %%tmm%c3, (%1,%2)" : "=m"(square) : "r"(&square), "r"(int64_t{64}), "i"(tile));
}

// Adds the products of 64 columns of int8, exactly.
template <int sums, int rows, int tokens>
MRP_INLINE void add_integers() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(tokens));
}

// Adds the products of 32 columns of bfloat16. Each sum in float32 has an order of its own: the even columns
// by fused multiply-adds, one after the other, plus so those of the odd ones, and this plus the sum before.
// It is rounded to the nearest, ties to even, and denormal numbers count as zeros, before and after.
template <int sums, int rows, int tokens>
MRP_INLINE void add_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(tokens));
}
#endif

}  // namespace mrp
