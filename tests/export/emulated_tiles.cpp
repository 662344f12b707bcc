// The emulation of `emulated_tiles.h` for tests, and products by the compiler's own names of its instructions.
#include "emulated_tiles.h"

#define TILES __attribute__((target("amx-tile,amx-int8,amx-bf16")))

extern "C" {

void install() { emulated_tiles::install(); }
void remove_again() { emulated_tiles::remove(); }
int64_t instructions() { return emulated_tiles::instructions; }
int64_t configurations() { return emulated_tiles::configurations; }

// c (rows, columns of 32 bits) += a (rows, depth of 32 bits) times b (depth, columns), by a number of an
// instruction.
TILES void multiply(
    int64_t which, int64_t rows, int64_t depth, int64_t columns, const void* a, const void* b, void* c) {
  struct alignas(64) {
    uint8_t palette = 1, rest[15] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } of;
  of.rows[0] = of.rows[1] = rows;
  of.rows[2] = depth;
  of.row_bytes[0] = of.row_bytes[2] = 4 * columns;
  of.row_bytes[1] = 4 * depth;
  asm volatile("" ::: "memory");  // GCC's intrinsics do not say that they read memory
  _tile_loadconfig(&of);
  _tile_loadd(0, c, 4 * columns);
  _tile_loadd(1, a, 4 * depth);
  _tile_loadd(2, b, 4 * columns);
  switch (which) {
    case 0: _tile_dpbf16ps(0, 1, 2); break;
    case 1: _tile_dpbssd(0, 1, 2); break;
    case 2: _tile_dpbsud(0, 1, 2); break;
    case 3: _tile_dpbusd(0, 1, 2); break;
    case 4: _tile_dpbuud(0, 1, 2); break;
  }
  _tile_stored(0, c, 4 * columns);
  _tile_zero(1);
  _tile_release();
}

}
