// Tokens of 8 bits and rows of four, as integers in tiles: the sums of `integers.h`, with the same bits.
//
// A tile holds the 64 columns of a group of 16 rows, and its products are whole sums of a group. They go
// through the first cache into vectors, 16 tokens of a row in each, which add them times their scales.
// Tiles work on one group while vectors add the one before.
#pragma once

#include "integers.h"
#include "tiles.h"

#ifdef MRP_AVX512
namespace mrp {

// Groups that are decoded at once: those of two panels and of 16 tokens about fill the first cache.
constexpr int64_t TILE_GROUPS = PANEL_ROWS;

// 64 columns of 16 tokens, turned.
struct alignas(64) RoundedSquare {
  int8_t numbers[STEPS][SIDE][STEP_COLUMNS];
  float scales[SIDE];
};

// `TILE_GROUPS` groups of a panel.
struct alignas(64) CodedSquares {
  int8_t codes[TILE_GROUPS][PANEL_ROWS][GROUP];
  Scales scales;  // (rows, groups)
};

// The sums of a panel's rows with 16 tokens.
struct alignas(64) SquareSums {
  float of[PANEL_ROWS][SIDE];
};

// All tokens, rounded, in squares of 16, the last of which ends with zeros.
class RoundedTiles {
 public:
  RoundedTiles(int64_t tokens, int64_t groups)
      : tokens_(tokens), groups_(groups),
        memory_(std::make_unique_for_overwrite<RoundedSquare[]>(squares_of(tokens) * groups)) {}

  int64_t tiles() const { return squares_of(tokens_); }
  int64_t size(int64_t square) const { return std::min(SIDE, tokens_ - square * SIDE); }
  const RoundedSquare* groups(int64_t square) const { return memory_.get() + square * groups_; }

  // Rounds the tokens of the squares from `begin` to `end` of x (tokens, columns).
  template <typename T>
  void fill(const T* x, int64_t columns, int64_t begin, int64_t end) {
    std::vector<RoundedGroup> rounded(SIDE * groups_);
    for (int64_t square = begin; square < end; square++) {
      const int64_t taken = size(square);
      for (int64_t t = 0; t < taken; t++) {
        const T* token = x + (square * SIDE + t) * columns;
        round_token(Integers::vnni, token, columns, rounded.data() + t * groups_);
      }
      std::fill(rounded.begin() + taken * groups_, rounded.end(), RoundedGroup{});
      for (int64_t group = 0; group < groups_; group++) {
        turn_group(rounded.data() + group, memory_[square * groups_ + group]);
      }
    }
  }

 private:
  MRP_VNNI void turn_group(const RoundedGroup* tokens, RoundedSquare& to) const {
    __m512i numbers[SIDE];
    for (int64_t t = 0; t < SIDE; t++, tokens += groups_) {
      numbers[t] = _mm512_loadu_si512(tokens->numbers);
      to.scales[t] = tokens->scale;
    }
    turn(numbers);
    for (int64_t step = 0; step < STEPS; step++) {
      _mm512_store_si512(to.numbers[step], numbers[step]);
    }
  }

  int64_t tokens_, groups_;
  std::unique_ptr<RoundedSquare[]> memory_;
};

// Codes as they are, row by row: tiles have signs for both factors.
struct SquaresOfCodes {
  CodedSquares* to;

  MRP_VNNI MRP_INLINE void operator()(int64_t group, __m512i (&spread)[PANEL_ROWS]) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
      const __m512i codes = _mm512_sub_epi8(spread[i], _mm512_set1_epi8(CODE_SHIFT));
      _mm512_store_si512(to->codes[group][i], codes);
    }
  }
};

MRP_VNNI inline void decode_squares(Panel& panel, int64_t groups, Fetching& next, CodedSquares& to) {
  SquaresOfCodes squares{&to};
  for_each_group(panel, groups, next, squares);
}

template <typename T>
MRP_VNNI void copy_row_scales(
    const Coded<T>& weight, int64_t r, int64_t end, int64_t group, int64_t width, CodedSquares& to) {
  widen_scales(weight, r, end, group, width, to.scales);
}

// The products of a group, by three tiles from `first` on.
template <int first>
MRP_INLINE void multiply_group(
    const int8_t (&codes)[PANEL_ROWS][GROUP], const RoundedSquare& x,
    int32_t (&products)[PANEL_ROWS][SIDE]) {
  clear_tile<first>();
  load_tile<first + 1>(codes);
  load_tile<first + 2>(x.numbers);
  add_integers<first, first + 1, first + 2>();
  store_tile<first>(products);
}

// Adds the products of a panel with 16 tokens to their sums.
MRP_VNNI inline void multiply_square(
    const CodedSquares& panel, const RoundedSquare* x, int64_t groups, SquareSums& sums) {
  alignas(64) int32_t products[2][PANEL_ROWS][SIDE];
  __m512 totals[PANEL_ROWS];
#pragma GCC unroll 16
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    totals[i] = _mm512_load_ps(sums.of[i]);
  }
  multiply_group<0>(panel.codes[0], x[0], products[0]);
  for (int64_t group = 0; group < groups; group++) {
    const int64_t next = group + 1;
    if (next < groups && next % 2 == 0) {
      multiply_group<0>(panel.codes[next], x[next], products[0]);
    } else if (next < groups) {
      multiply_group<3>(panel.codes[next], x[next], products[1]);
    }
    const __m512 scales = _mm512_load_ps(x[group].scales);
#pragma GCC unroll 16
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
      const __m512i product = _mm512_load_si512(products[group % 2][i]);
      const __m512 factor = _mm512_mul_ps(_mm512_set1_ps(panel.scales[i][group]), scales);
      totals[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), factor, totals[i]);
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    _mm512_store_ps(sums.of[i], totals[i]);
  }
}

// Turns the sums of a panel's rows into those of tokens.
MRP_VNNI inline void turn_sums(const SquareSums& sums, int64_t row, Sums* tokens) {
  __m512i lanes[PANEL_ROWS];
  for (int64_t i = 0; i < PANEL_ROWS; i++) {
    lanes[i] = _mm512_load_si512(sums.of[i]);
  }
  turn(lanes);
  for (int64_t t = 0; t < SIDE; t++) {
    _mm512_store_si512(tokens[t] + row, lanes[t]);
  }
}

// y[t · rows + r] = x[t] · row r + bias[r] for all tokens t, and rows r from `begin` to `end`.
template <typename T>
void multiply_rounded_tiles(
    const Coded<T>& weight, const RoundedTiles& x, const T* bias, T* y, int64_t rows, int64_t begin,
    int64_t end) {
  // Kept by each thread: to map and clear them anew would take longer than a product.
  thread_local std::vector<CodedSquares> decoded(BLOCK_PANELS);
  thread_local std::vector<SquareSums> sums;
  sums.resize(x.tiles() * BLOCK_PANELS);
  const Tiles tiles;
  const int64_t groups = weight.groups();
  for_each_block(weight, begin, end, [&](int64_t r, int64_t height, std::vector<Panel>& panels, Fetching& fetching) {
    std::fill(sums.begin(), sums.end(), SquareSums{});
    for (int64_t first = 0; first < groups; first += TILE_GROUPS) {
      const int64_t span = std::min(TILE_GROUPS, groups - first);
      for (size_t p = 0; p < panels.size(); p++) {
        copy_row_scales(weight, r + p * PANEL_ROWS, end, first, span, decoded[p]);
        decode_squares(panels[p], span, fetching, decoded[p]);
      }
      for (int64_t square = 0; square < x.tiles(); square++) {
        for (size_t p = 0; p < panels.size(); p++) {
          multiply_square(
              decoded[p], x.groups(square) + first, span, sums[square * BLOCK_PANELS + p]);
        }
      }
    }
    for (int64_t square = 0; square < x.tiles(); square++) {
      alignas(64) Sums tokens[SIDE];
      for (size_t p = 0; p < panels.size(); p++) {
        turn_sums(sums[square * BLOCK_PANELS + p], p * PANEL_ROWS, tokens);
      }
      write_sums(
          Integers::vnni, tokens, x.size(square), bias ? bias + r : nullptr,
          y + square * SIDE * rows + r, rows, height);
    }
  });
}

}  // namespace mrp
#endif
