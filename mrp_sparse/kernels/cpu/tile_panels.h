// Many tokens in tiles (AMX): a panel of rows is decoded, a span of its columns at a time, and multiplied with
// all tokens.
//
// Two tiles of rows and two of tokens take four tiles for their sums, and four loads for four products; the
// last tile of an odd number of tokens is multiplied with four of rows. A sum has one order, that of the
// columns' steps, whatever the number of tokens. It is not that of `few_tokens.h` and `panels.h`, whose
// results may differ in their last bits.
#pragma once

#include "rows.h"
#include "tiles.h"
#include "tokens.h"

namespace mrp {

#ifdef MRP_AVX512
constexpr int64_t PANEL_SQUARES = 4;
constexpr int64_t PANEL_PAIR = 2 * SIDE;  // rows
// Weights of a panel, whose packed bytes should stay in the second cache, beside those of the next.
constexpr int64_t TILE_PANEL = 1 << 18;
// Steps that are decoded at once: of two tiles of rows they take 32 KiB of the first cache.
constexpr int64_t SPAN_STEPS = 16;

inline int64_t tile_panel_rows(int64_t columns) {
  const int64_t rows = TILE_PANEL / std::max<int64_t>(columns, 1) / PANEL_PAIR * PANEL_PAIR;
  return std::clamp(rows, PANEL_PAIR, PANEL_SQUARES * SIDE);
}

// 32 columns of 16 rows; or of 16 tokens, turned: of each two columns those of all tokens.
struct StepSquare {
  Step steps[SIDE];
};

// The sums of 16 rows with 16 tokens.
struct alignas(64) StepSums {
  float of[SIDE][SIDE];
};

// Tokens in squares of 16, turned, with zeros up to whole steps and squares.
class TurnedTokens {
 public:
  TurnedTokens(int64_t tokens, int64_t columns)
      : columns_(columns), steps_(steps_of(columns)), tokens_(tokens),
        memory_(std::make_unique_for_overwrite<StepSquare[]>(squares_of(tokens) * steps_)) {}

  int64_t tiles() const { return squares_of(tokens_); }
  int64_t size(int64_t square) const { return std::min(SIDE, tokens_ - square * SIDE); }
  int64_t steps() const { return steps_; }
  const StepSquare* square(int64_t index) const { return memory_.get() + index * steps_; }

  // Copies the squares from `begin` to `end` of x (tokens, columns), in the order in which rows are decoded.
  template <typename Rows>
  MRP_TILES void fill(const BFloat16* x, int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; index++) {
      StepSquare* to = memory_.get() + index * steps_;
      for (int64_t column = 0; column < columns_; column += WORD, to += 2) {
        __m512i lower[SIDE] = {}, upper[SIDE] = {};
        for (int64_t t = 0; t < size(index); t++) {
          __m512i halves[2];
          load_word<Rows>(x + (index * SIDE + t) * columns_, column, columns_, halves);
          lower[t] = halves[0];
          upper[t] = halves[1];
        }
        turn(lower);
        turn(upper);
        for (int64_t i = 0; i < SIDE; i++) {
          _mm512_store_si512(to[0].steps + i, lower[i]);
          _mm512_store_si512(to[1].steps + i, upper[i]);
        }
      }
    }
  }

 private:
  int64_t columns_, steps_, tokens_;
  std::unique_ptr<StepSquare[]> memory_;
};

// Where the rows of a panel are decoded next.
template <typename Rows>
struct PanelCursor {
  typename Rows::Cursor rows[PANEL_SQUARES * SIDE];
  int64_t whole[PANEL_SQUARES * SIDE];  // words that can be read without a look at where the row ends

  PanelCursor(const Rows& weight, int64_t r, int64_t taken) {
    for (int64_t i = 0; i < taken; i++) {
      rows[i] = weight.cursor(r + i);
      whole[i] = weight.whole(r + i);
    }
  }
};

// Decodes the steps from `step` on, of `count`, of the `taken` rows of a panel, to squares of `SPAN_STEPS` each.
template <typename Rows>
MRP_TILES void decode_span(
    PanelCursor<Rows>& panel, int64_t taken, int64_t columns, int64_t step, int64_t count,
    Ahead& values, Ahead& places, StepSquare* squares) {
  Ahead next_values = values, next_places = places;  // in registers
  for (int64_t i = 0; i < taken; i++) {
    auto cursor = panel.rows[i];
    Step* to = squares[i / SIDE * SPAN_STEPS].steps + i % SIDE;
    for (int64_t word = step / 2; word < (step + count) / 2; word++, to += 2 * SIDE) {
      __m512i halves[2];
      next_values.fetch();
      if (word % 4 == 0) {
        next_places.fetch();
      }
      if (word < panel.whole[i]) {
        cursor.template next<false>(WORD, halves);
      } else {
        cursor.template next<true>(std::min(WORD, columns - WORD * word), halves);
      }
      _mm512_store_si512(to, halves[0]);
      _mm512_store_si512(to + SIDE, halves[1]);
    }
    panel.rows[i] = cursor;
  }
  values = next_values;
  places = next_places;
}

// Calls use<i>() for each i below `count`.
template <int count, typename Use>
MRP_INLINE void for_each(const Use& use) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (use.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, count>());
}

// Adds the products of `steps` steps of `Rows` tiles with `Tokens` tiles to their sums, at most four. Tiles of
// rows are `SPAN_STEPS` apart, those of tokens `apart`, and their sums `PANEL_SQUARES`.
template <int Rows, int Tokens>
void multiply_span(
    const StepSquare* rows, const StepSquare* tokens, int64_t apart, int64_t steps, bool first,
    StepSums* sums, Ahead& ahead) {
  static_assert(Rows * Tokens <= 4 && Tokens <= 2);
  for_each<Rows * Tokens>([&]<int i>() __attribute__((always_inline)) {
    if (first) {
      clear_tile<i>();
    } else {
      load_tile<i>(sums[i % Tokens * PANEL_SQUARES + i / Tokens]);
    }
  });
  Ahead fetched = ahead;  // in registers
  for (int64_t step = 0; step < steps; step++, rows++, tokens++) {
    fetched.fetch();
    for_each<Tokens>([&]<int t>() __attribute__((always_inline)) {
      load_tile<6 + t>(tokens[t * apart]);
    });
    for_each<Rows>([&]<int r>() __attribute__((always_inline)) {
      constexpr int row = 4 + r % 2;
      load_tile<row>(rows[r * SPAN_STEPS]);
      for_each<Tokens>([&]<int t>() __attribute__((always_inline)) {
        add_bfloat16<r * Tokens + t, row, 6 + t>();
      });
    });
  }
  ahead = fetched;
  for_each<Rows * Tokens>([&]<int i>() __attribute__((always_inline)) {
    store_tile<i>(sums[i % Tokens * PANEL_SQUARES + i / Tokens]);
  });
}

// The same for all tiles of a panel and of tokens, `tiles` and two at a time where there are so many.
inline void multiply_span(
    const StepSquare* panel, int64_t tiles, const TurnedTokens& x, int64_t step, int64_t steps,
    StepSums* sums, Ahead& ahead) {
  Ahead none;
  const auto multiply = [&]<int Tokens>(std::integral_constant<int, Tokens>, int64_t tile, int64_t t) {
    constexpr int most = 4 / Tokens;
    const StepSquare* rows = panel + tile * SPAN_STEPS;
    with_constant(std::min<int64_t>(most, tiles - tile), [&]<int count>(std::integral_constant<int, count>) {
      multiply_span<std::min(count, most), Tokens>(
          rows, x.square(t) + step, x.steps(), steps, step == 0, sums + t * PANEL_SQUARES + tile,
          t == 0 ? ahead : none);
    });
  };
  const int64_t pairs = x.tiles() / 2 * 2;
  for (int64_t tile = 0; tile < tiles; tile += 2) {
    for (int64_t t = 0; t < pairs; t += 2) {
      multiply(std::integral_constant<int, 2>(), tile, t);
    }
  }
  if (pairs < x.tiles()) {
    multiply(std::integral_constant<int, 1>(), 0, pairs);
  }
}

// y[t · rows + r] = x[t] · row r + bias[r] for 16 rows from r on, of which there are `height`, and `tokens`
// tokens t, from their sums.
template <typename Rows>
MRP_TILES void write_square(
    const Rows& weight, const StepSums& sums, const BFloat16* bias, BFloat16* y, int64_t rows,
    int64_t r, int64_t height, int64_t tokens) {
  __m512i lanes[SIDE];
  for (int64_t i = 0; i < SIDE; i++) {
    lanes[i] = _mm512_load_si512(sums.of[i]);
  }
  turn(lanes);
  const uint32_t here = low_bits(std::min(height, SIDE));
  const __m512 added =
      bias ? widen(_mm256_maskz_loadu_epi16(here, bias + r)) : _mm512_setzero_ps();
  for (int64_t t = 0; t < tokens; t++) {
    const __m512 product = weight.scaled(_mm512_castsi512_ps(lanes[t]), r, here);
    const __m512 total = _mm512_add_ps(product, added);
    _mm256_mask_storeu_epi16(y + t * rows + r, here, (__m256i)_mm512_cvtneps_pbh(total));
  }
}

// y[t · rows + r] = x[t] · row r + bias[r] for all tokens t, and rows r from `begin` to `end`.
template <typename Rows>
void multiply_tiles(
    const Rows& weight, const TurnedTokens& x, const BFloat16* bias, BFloat16* y, int64_t rows,
    int64_t begin, int64_t end) {
  // Kept by each thread, and whole from the beginning: products of missing rows read old ones.
  thread_local std::vector<StepSquare> panel(PANEL_SQUARES * SPAN_STEPS);
  thread_local std::vector<StepSums> sums;
  sums.resize(x.tiles() * PANEL_SQUARES);
  const Tiles tiles;
  const int64_t columns = weight.columns(), height = tile_panel_rows(columns), steps = x.steps();
  for (int64_t r = begin; r < end; r += height) {
    const int64_t taken = std::min(height, end - r), squares = squares_of(taken);
    const int64_t next = r + taken, after = std::min(next + height, end), middle = (next + after) / 2;
    Ahead values, places, others;
    if (next < middle) {  // decoding fetches one half of the next panel's values, products the other
      places = weight.places_ahead(next, after, taken * ((steps / 2 + 3) / 4));
      values = weight.ahead(next, middle, taken * steps / 2);
      others = weight.ahead(middle, after, (x.tiles() > 1 ? (squares + 1) / 2 : 1) * steps);
    }
    PanelCursor<Rows> cursor(weight, r, taken);
    for (int64_t step = 0; step < steps; step += SPAN_STEPS) {
      const int64_t count = std::min(SPAN_STEPS, steps - step);
      decode_span(cursor, taken, columns, step, count, values, places, panel.data());
      multiply_span(panel.data(), squares, x, step, count, sums.data(), others);
    }
    for (int64_t square = 0; square < x.tiles(); square++) {
      for (int64_t i = 0; i < squares; i++) {
        write_square(
            weight, sums[square * PANEL_SQUARES + i], bias, y + square * SIDE * rows, rows,
            r + i * SIDE, taken - i * SIDE, x.size(square));
      }
    }
  }
}
#endif

}  // namespace mrp
