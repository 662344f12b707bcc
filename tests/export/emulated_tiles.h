// Instructions of tiles (AMX) for processors without them, which raise a signal at each: its handler computes
// what Intel's manual (Software Developer's Manual, volume 2) says that the instruction does, and goes on
// behind it. So compiled kernels run as they are. A processor that has tiles never calls it.
//
// An instruction that the manual forbids is left to the handler that was there before: the process dies.
#pragma once

#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>

#define TILES_AVX2 __attribute__((target("avx2,fma")))

namespace emulated_tiles {

struct Tile {
  int rows, row_bytes;  // none of either: the tile is not configured
  alignas(64) uint8_t bytes[16][64];
};

thread_local bool configured = false;
thread_local Tile tiles[8];
std::atomic<int64_t> instructions = 0;  // that were emulated
std::atomic<int64_t> configurations = 0;  // of threads that have not released their tiles
struct sigaction before;

// ---- What the instructions do; each returns whether it may ----

void release() {
  configurations -= configured;
  configured = false;
  std::memset(tiles, 0, sizeof tiles);
}

bool configure(const uint8_t* from) {
  uint16_t row_bytes[8];
  uint8_t rows[8];
  std::memcpy(row_bytes, from + 16, sizeof row_bytes);
  std::memcpy(rows, from + 48, sizeof rows);
  for (int i = 0; i < 64; i++) {
    const bool reserved = (i >= 2 && i < 16) || (i >= 32 && i < 48) || i >= 56;
    if ((reserved && from[i]) || (i < 8 && (rows[i] > 16 || row_bytes[i] > 64 || !rows[i] != !row_bytes[i]))) {
      return false;
    }
  }
  if (from[0] > 1 || from[1]) {  // another palette, or an interrupted load
    return false;
  }
  release();
  configured = from[0] == 1;
  configurations += configured;
  for (int i = 0; i < 8; i++) {
    tiles[i].rows = rows[i];
    tiles[i].row_bytes = row_bytes[i];
  }
  return true;
}

bool load(Tile& tile, const uint8_t* from, int64_t stride) {
  std::memset(tile.bytes, 0, sizeof tile.bytes);
  for (int i = 0; i < tile.rows; i++) {
    std::memcpy(tile.bytes[i], from + i * stride, tile.row_bytes);
  }
  return configured && tile.rows;
}

bool store(const Tile& tile, uint8_t* to, int64_t stride) {
  for (int i = 0; i < tile.rows; i++) {
    std::memcpy(to + i * stride, tile.bytes[i], tile.row_bytes);
  }
  return configured && tile.rows;
}

template <typename First, typename Second>
TILES_AVX2 void add_integers(Tile& sums, const Tile& a, const Tile& b) {
  const auto* of_a = reinterpret_cast<const First(*)[16][4]>(a.bytes);
  const auto* of_b = reinterpret_cast<const Second(*)[16][4]>(b.bytes);
  int32_t c[16][16];
  std::memcpy(c, sums.bytes, sizeof c);
  for (int i = 0; i < 4; i++) {
    for (int k = 0; k < a.row_bytes / 4; k++) {
      int32_t row[16];
      for (int n = 0; n < 16; n++) {
        row[n] = of_b[k][n][i];
      }
      for (int m = 0; m < sums.rows; m++) {
        for (int n = 0; n < 16; n++) {  // beyond the columns there are zeros
          c[m][n] += of_a[m][k][i] * row[n];
        }
      }
    }
  }
  std::memcpy(sums.bytes, c, sizeof c);
}

float widened(uint16_t bfloat16) { return std::bit_cast<float>(uint32_t{bfloat16} << 16); }

// Apart, so that no compiler computes any of it before MXCSR is set.
TILES_AVX2 __attribute__((noinline)) void add_bfloat16_flushing(Tile& sums, const Tile& a, const Tile& b) {
  const auto* of_a = reinterpret_cast<const uint16_t(*)[16][2]>(a.bytes);
  const auto* of_b = reinterpret_cast<const uint16_t(*)[16][2]>(b.bytes);
  auto* c = reinterpret_cast<float(*)[16]>(sums.bytes);
  float even[16][16] = {}, odd[16][16] = {};
  for (int k = 0; k < a.row_bytes / 4; k++) {
    float row[2][16];
    for (int n = 0; n < 16; n++) {
      row[0][n] = widened(of_b[k][n][0]);
      row[1][n] = widened(of_b[k][n][1]);
    }
    for (int m = 0; m < sums.rows; m++) {
      for (int n = 0; n < 16; n++) {
        even[m][n] = __builtin_fmaf(widened(of_a[m][k][0]), row[0][n], even[m][n]);
        odd[m][n] = __builtin_fmaf(widened(of_a[m][k][1]), row[1][n], odd[m][n]);
      }
    }
  }
  for (int m = 0; m < sums.rows; m++) {
    for (int n = 0; n < sums.row_bytes / 4; n++) {
      c[m][n] += even[m][n] + odd[m][n];
    }
  }
}

// Denormal numbers are zeros, before and after; rounding is to nearest even, and no exception is raised.
void add_bfloat16(Tile& sums, const Tile& a, const Tile& b) {
  const unsigned saved = _mm_getcsr();
  constexpr unsigned masked = 0x1f80, flush = 0x8000, denormals_are_zeros = 0x40;
  _mm_setcsr(masked | flush | denormals_are_zeros);
  add_bfloat16_flushing(sums, a, b);
  _mm_setcsr(saved);
}

bool fits(const Tile& sums, const Tile& a, const Tile& b) {
  const bool apart = &sums != &a && &sums != &b && &a != &b;
  const bool dwords = sums.row_bytes % 4 == 0 && a.row_bytes % 4 == 0 && sums.row_bytes == b.row_bytes;
  return configured && apart && sums.rows && a.rows && b.rows && dwords && sums.rows == a.rows &&
      a.row_bytes / 4 == b.rows;
}

// ---- How they are encoded ----

// An instruction, as far as all of these have it: VEX, opcode, ModRM and a place in memory.
struct Instruction {
  int opcode, prefix, reg, rm, vvvv;
  bool in_memory;
  uint8_t* base;
  int64_t index;  // of memory: the stride
  int64_t length;
};

int64_t general_register(const gregset_t& saved, int number) {
  static constexpr int ORDER[16] = {
      REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
      REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return saved[ORDER[number]];
}

// Returns false for any other instruction.
bool decode(const gregset_t& saved, Instruction& found) {
  const auto* at = reinterpret_cast<const uint8_t*>(saved[REG_RIP]);
  constexpr int three_bytes = 0xc4, map = 2;  // of opcodes that begin with 0f 38
  if (at[0] != three_bytes || (at[1] & 31) != map || at[2] & 0x84) {  // W and L are 0
    return false;
  }
  const int r = ~at[1] >> 7 & 1, x = ~at[1] >> 6 & 1, b = ~at[1] >> 5 & 1;
  const int mod = at[4] >> 6, rm = at[4] & 7;
  found = {at[3], at[2] & 3, (at[4] >> 3 & 7) | r << 3, rm | b << 3, ~at[2] >> 3 & 15, mod != 3, nullptr, 0, 5};
  if (!found.in_memory) {
    return true;
  }
  int64_t address = 0;
  int base = found.rm;
  if (rm == 4) {
    const int sib = at[found.length++], index = (sib >> 3 & 7) | x << 3;
    base = (sib & 7) | b << 3;
    found.index = index == 4 ? 0 : general_register(saved, index) << (sib >> 6);
  }
  int32_t offset = 0;
  const bool relative = mod == 0 && rm == 5, absolute = mod == 0 && rm == 4 && (base & 7) == 5;
  if (mod == 1) {
    offset = static_cast<int8_t>(at[found.length++]);
  } else if (mod == 2 || relative || absolute) {
    std::memcpy(&offset, at + found.length, 4);
    found.length += 4;
  }
  if (relative) {
    address = saved[REG_RIP] + found.length;
  } else if (!absolute) {
    address = general_register(saved, base);
  }
  found.base = reinterpret_cast<uint8_t*>(address + offset);
  return true;
}

// Executes an instruction; returns whether it is one of these, and may be executed.
bool execute(const Instruction& the) {
  enum { none, p66, f3, f2 };  // prefixes
  const int operation = the.opcode << 8 | the.prefix << 4 | the.in_memory;
  if (operation == (0x49 << 8 | none << 4 | 1)) {
    return configure(the.base + the.index);
  }
  if (operation == (0x49 << 8 | none << 4) && the.reg == 0 && the.rm == 0) {
    release();
    return true;
  }
  if (the.reg > 7 || (!the.in_memory && the.rm > 7) || (the.in_memory && (the.rm & 7) != 4)) {
    return false;
  }
  Tile& tile = tiles[the.reg];
  switch (operation) {
    case 0x49 << 8 | f2 << 4:
      std::memset(tile.bytes, 0, sizeof tile.bytes);
      return configured && tile.rows && the.rm == 0;
    case 0x4b << 8 | f2 << 4 | 1: return load(tile, the.base, the.index);
    case 0x4b << 8 | f3 << 4 | 1: return store(tile, the.base, the.index);
  }
  if (the.vvvv > 7 || the.in_memory) {
    return false;
  }
  const Tile &a = tiles[the.rm], &b = tiles[the.vvvv];
  if (!fits(tile, a, b)) {
    return false;
  }
  switch (operation) {
    case 0x5c << 8 | f3 << 4: add_bfloat16(tile, a, b); return true;
    case 0x5e << 8 | f2 << 4: add_integers<int8_t, int8_t>(tile, a, b); return true;
    case 0x5e << 8 | f3 << 4: add_integers<int8_t, uint8_t>(tile, a, b); return true;
    case 0x5e << 8 | p66 << 4: add_integers<uint8_t, int8_t>(tile, a, b); return true;
    case 0x5e << 8 | none << 4: add_integers<uint8_t, uint8_t>(tile, a, b); return true;
  }
  return false;
}

void handle(int, siginfo_t*, void* context) {
  auto& saved = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Instruction found;
  if (decode(saved, found) && execute(found)) {
    saved[REG_RIP] += found.length;
    instructions++;
  } else {
    sigaction(SIGILL, &before, nullptr);  // which gets the same instruction again
  }
}

void install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &before);
}

void remove() { sigaction(SIGILL, &before, nullptr); }

}  // namespace emulated_tiles
