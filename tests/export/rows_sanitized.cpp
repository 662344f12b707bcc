// `make sanitize` runs the kernels of packed rows under the address and undefined sanitizers, with
// every buffer as large as its content and not a byte more, and compares with a plain loop. With a number
// it runs them on damaged rows, too, for so many seconds. Where there are no tiles, they are emulated.
#include "byte_rows.h"
#include "coded_rows.h"
#include "few_tokens.h"
#include "integers.h"
#include "panels.h"
#include "rows.h"
#include "tile_integers.h"
#include "tile_panels.h"

#ifdef MRP_AVX512
#include "emulated_tiles.h"
#endif

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>

namespace {

using mrp::BFloat16;
template <typename T>
using Buffer = std::unique_ptr<T[]>;  // a red zone follows each

int failures = 0;

void expect(bool holds, const char* what, int64_t rows, int64_t columns, int64_t tokens) {
  if (!holds) {
    failures++;
    std::printf("%s: rows %ld, columns %ld, tokens %ld\n", what, long(rows), long(columns), long(tokens));
  }
}

template <typename T>
Buffer<T> exactly(const std::vector<T>& content) {
  Buffer<T> buffer(new T[content.size()]);
  std::copy(content.begin(), content.end(), buffer.get());
  return buffer;
}

enum class Way { portable, few, panels, tiles };

// Run a kernel on damaged rows: it may refuse them, and nothing else.
template <typename Kernel>
void survive(const Kernel& kernel, int64_t& refused) {
  try {
    kernel();
  } catch (const std::runtime_error&) {
    refused++;
  }
}

// The vector kernels that some tokens may take.
std::vector<Way> vector_ways(int64_t tokens) {
#ifdef MRP_AVX512
  if (mrp::has_avx512()) {
    const std::vector any{Way::panels, Way::tiles}, few{Way::few, Way::panels, Way::tiles};
    return tokens <= mrp::FEW_TOKENS ? few : any;
  }
#endif
  return {};
}

// All tokens with all rows, by a vector kernel.
template <typename Rows>
void multiply_by_vectors(
    Way way, const Rows& weight, const BFloat16* x, int64_t tokens, const BFloat16* bias, BFloat16* y,
    int64_t rows) {
#ifdef MRP_AVX512
  if (way == Way::tiles) {
    mrp::TurnedTokens turned(tokens, weight.columns());
    turned.template fill<Rows>(x, 0, turned.tiles());
    return mrp::multiply_tiles(weight, turned, bias, y, rows, 0, rows);
  }
  const bool few = way == Way::few;
  mrp::TokenTiles tiles(tokens, weight.columns(), few ? mrp::FEW_TOKENS : mrp::TILE_TOKENS);
  tiles.template fill<Rows>(x, 0, tiles.tiles());
  const auto multiply = few ? mrp::multiply_few<Rows> : mrp::multiply_panels<Rows>;
  multiply(weight, tiles, bias, y, rows, 0, rows);
#endif
}

using MultiplyCodes = std::function<void(const mrp::Coded<BFloat16>&, const BFloat16* bias)>;

// The kernels for a weight of four bits, and whether each rounds the tokens, which it writes to y.
std::vector<std::pair<MultiplyCodes, bool>> kernels_of_codes(
    const BFloat16* x, int64_t tokens, BFloat16* y, int64_t rows) {
  std::vector<std::pair<MultiplyCodes, bool>> kernels;
  const auto portable = [=](const mrp::Coded<BFloat16>& weight, const BFloat16* bias) {
    const auto decode = [&](int64_t r, BFloat16* dense) { mrp::decode_row(weight, r, dense); };
    mrp::multiply_decoded(decode, weight.columns, x, tokens, bias, y, rows, 0, rows);
  };
  kernels.emplace_back(portable, false);
#ifdef MRP_AVX512
  for (Way way : vector_ways(tokens)) {
    const auto multiply = [=](const mrp::Coded<BFloat16>& weight, const BFloat16* bias) {
      multiply_by_vectors(way, mrp::CodedRows{weight}, x, tokens, bias, y, rows);
    };
    kernels.emplace_back(multiply, false);
  }
#endif
  for (int way = 0; way <= int(mrp::best_integers()); way++) {
    const auto multiply = [=](const mrp::Coded<BFloat16>& weight, const BFloat16* bias) {
      const auto rounded = exactly(std::vector<mrp::RoundedGroup>(tokens * weight.groups()));
      for (int64_t t = 0; t < tokens; t++) {
        mrp::round_token(
            mrp::Integers(way), x + t * weight.columns, weight.columns,
            rounded.get() + t * weight.groups());
      }
      mrp::multiply_rounded(mrp::Integers(way), weight, rounded.get(), tokens, bias, y, rows, 0, rows);
    };
    kernels.emplace_back(multiply, true);
  }
#ifdef MRP_AVX512
  if (mrp::best_integers() == mrp::Integers::vnni) {
    const auto multiply = [=](const mrp::Coded<BFloat16>& weight, const BFloat16* bias) {
      mrp::RoundedTiles rounded(tokens, weight.groups());
      rounded.fill(x, weight.columns, 0, rounded.tiles());
      mrp::multiply_rounded_tiles(weight, rounded, bias, y, rows, 0, rows);
    };
    kernels.emplace_back(multiply, true);
  }
#endif
  return kernels;
}

// A weight with its two forms of places; nibbles ask for two of every four columns.
struct Problem {
  std::vector<float> dense;
  std::vector<BFloat16> values;
  std::vector<uint8_t> places;
  std::vector<int64_t> offsets;
  int64_t row_bytes;
};

Problem draw(int64_t rows, int64_t columns, double kept, bool nibbles, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform;
  std::normal_distribution<float> normal;
  Problem problem{std::vector<float>(rows * columns), {}, {}, {}, nibbles ? columns / 8 : (columns + 7) / 8};
  problem.places.assign(rows * problem.row_bytes, 0);
  for (int64_t r = 0; r < rows; r++) {
    problem.offsets.push_back(problem.values.size());
    int first = 0, second = 1;
    for (int64_t c = 0; c < columns; c++) {
      uint8_t* row = problem.places.data() + r * problem.row_bytes;
      bool is_kept = uniform(random) < kept;
      if (nibbles) {
        if (c % 4 == 0) {
          first = random() % 3;
          second = first + 1 + random() % (3 - first);
          row[c / 8] |= (first | second << 2) << (c % 8 ? 4 : 0);
        }
        is_kept = c % 4 == first || c % 4 == second;
      } else if (is_kept) {
        row[c / 8] |= 1 << c % 8;
      }
      if (is_kept) {
        problem.values.push_back(normal(random));
        problem.dense[r * columns + c] = problem.values.back();
      }
    }
  }
  return problem;
}

template <typename Decode>
void run(const Problem& problem, int64_t rows, int64_t columns, int64_t tokens, std::mt19937& random) {
  constexpr bool nibbles = std::is_same_v<Decode, mrp::Nibbles>;
  std::normal_distribution<float> normal;
  std::vector<BFloat16> input(tokens * columns), shift(rows);
  for (auto* drawn : {&input, &shift}) {
    for (auto& value : *drawn) {
      value = normal(random);
    }
  }
  const auto values = exactly(problem.values);
  const auto places = exactly(problem.places);
  const auto offsets = exactly(problem.offsets);
  const auto x = exactly(input), bias = exactly(shift);
  mrp::Packed<BFloat16> weight{
      values.get(), values.get() + problem.values.size(), places.get(), problem.row_bytes, columns,
      nibbles ? nullptr : offsets.get()};
  Buffer<BFloat16> y(new BFloat16[tokens * rows]), dense(new BFloat16[rows * columns]);
  const auto decode = [&](const mrp::Packed<BFloat16>& rows_of) {
    for (int64_t r = 0; r < rows; r++) {
      mrp::decode_row<Decode>(rows_of, r, dense.get() + r * columns);
    }
  };
  decode(weight);
  for (int64_t i = 0; i < rows * columns; i++) {
    expect(float(dense[i]) == problem.dense[i], "decoded", rows, columns, tokens);
  }
  std::vector<Way> ways = vector_ways(tokens);
  ways.push_back(Way::portable);
  for (Way way : ways) {
    const auto multiply = [&](const mrp::Packed<BFloat16>& rows_of, const BFloat16* added) {
      if (way == Way::portable) {
        mrp::multiply_decoded(
            [&](int64_t r, BFloat16* row) { mrp::decode_row<Decode>(rows_of, r, row); }, columns,
            x.get(), tokens, added, y.get(), rows, 0, rows);
      } else {
        const mrp::PackedRows<Decode> weight_rows{rows_of};
        multiply_by_vectors(way, weight_rows, x.get(), tokens, added, y.get(), rows);
      }
    };
    multiply(weight, bias.get());
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t r = 0; r < rows; r++) {
        double exact = float(shift[r]), size = 1;
        for (int64_t c = 0; c < columns; c++) {
          const double product = double(float(input[t * columns + c])) * problem.dense[r * columns + c];
          exact += product;
          size += std::abs(product);
        }
        const double error = std::abs(float(y[t * rows + r]) - exact);
        expect(error <= std::abs(exact) / 128 + size * 1e-6, "multiplied", rows, columns, tokens);
      }
    }
    if (!problem.values.empty()) {  // one value less than the bits say
      const std::vector<BFloat16> fewer(problem.values.begin(), problem.values.end() - 1);
      const auto shortened = exactly(fewer);
      mrp::Packed<BFloat16> damaged = weight;
      damaged.values = shortened.get();
      damaged.end = shortened.get() + fewer.size();
      int64_t thrown = 0;
      survive([&] { multiply(damaged, nullptr); }, thrown);
      survive([&] { decode(damaged); }, thrown);
      expect(thrown == 2, "refused", rows, columns, tokens);
    }
  }
}

// A weight of four bits, with its exact values.
struct CodedProblem {
  std::vector<double> dense;
  std::vector<uint8_t> nibbles, places;
  std::vector<BFloat16> scales;
  std::vector<int64_t> offsets;
};

CodedProblem draw_codes(int64_t rows, int64_t columns, double kept, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform;
  const int64_t row_bytes = (columns + 7) / 8;
  CodedProblem problem{std::vector<double>(rows * columns), {}, std::vector<uint8_t>(rows * row_bytes), {}, {}};
  for (int64_t r = 0; r < rows; r++) {
    problem.offsets.push_back(problem.nibbles.size());
    int64_t taken = 0;
    for (int64_t c = 0; c < columns; c++) {
      if (c % mrp::GROUP == 0) {
        problem.scales.push_back(std::ldexp(float(16 + random() % 16), -int(random() % 12)));
        taken = 0;
      }
      if (uniform(random) < kept) {
        const int nibble = random() % 16;
        if (taken++ % 2) {
          problem.nibbles.back() |= nibble << 4;
        } else {
          problem.nibbles.push_back(nibble);
        }
        problem.places[r * row_bytes + c / 8] |= 1 << c % 8;
        problem.dense[r * columns + c] = mrp::CODES[nibble] * double(float(problem.scales.back()));
      }
    }
  }
  return problem;
}

void run_codes(const CodedProblem& problem, int64_t rows, int64_t columns, int64_t tokens, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<BFloat16> input(tokens * columns), shift(rows);
  for (auto* drawn : {&input, &shift}) {
    for (auto& value : *drawn) {
      value = normal(random);
    }
  }
  const auto nibbles = exactly(problem.nibbles), places = exactly(problem.places);
  const auto scales = exactly(problem.scales), x = exactly(input), bias = exactly(shift);
  const auto offsets = exactly(problem.offsets);
  const int64_t count = problem.nibbles.size();
  const mrp::Coded<BFloat16> weight{
      nibbles.get(), nibbles.get() + count, places.get(), (columns + 7) / 8, columns, scales.get(),
      offsets.get()};
  Buffer<BFloat16> y(new BFloat16[tokens * rows]), dense(new BFloat16[rows * columns]);
  const auto decode = [&](const mrp::Coded<BFloat16>& rows_of) {
    for (int64_t r = 0; r < rows; r++) {
      mrp::decode_row(rows_of, r, dense.get() + r * columns);
    }
  };
  decode(weight);
  for (int64_t i = 0; i < rows * columns; i++) {
    expect(float(dense[i]) == problem.dense[i], "codes decoded", rows, columns, tokens);
  }
  for (const auto& [multiply, rounds] : kernels_of_codes(x.get(), tokens, y.get(), rows)) {
    multiply(weight, bias.get());
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t r = 0; r < rows; r++) {
        double exact = float(shift[r]), size = 1, rounding = 0;
        for (int64_t c = 0; c < columns; c++) {
          const int64_t first = c / mrp::GROUP * mrp::GROUP;
          double step = 0;
          for (int64_t i = first; i < std::min(columns, first + mrp::GROUP); i++) {
            step = std::max(step, std::abs(double(float(input[t * columns + i]))) / 254);
          }
          const double w = problem.dense[r * columns + c];
          exact += double(float(input[t * columns + c])) * w;
          size += std::abs(double(float(input[t * columns + c])) * w);
          rounding += rounds ? 1.001 * step * std::abs(w) : 0;
        }
        const double error = std::abs(float(y[t * rows + r]) - exact);
        expect(error <= std::abs(exact) / 128 + size * 1e-6 + rounding, "codes multiplied", rows, columns, tokens);
      }
    }
    if (count) {  // one byte less than the places say
      const std::vector<uint8_t> fewer(problem.nibbles.begin(), problem.nibbles.end() - 1);
      const auto shortened = exactly(fewer);
      mrp::Coded<BFloat16> damaged = weight;
      damaged.nibbles = shortened.get();
      damaged.end = shortened.get() + fewer.size();
      int64_t thrown = 0;
      survive([&] { multiply(damaged, nullptr); }, thrown);
      survive([&] { decode(damaged); }, thrown);
      expect(thrown == 2, "codes refused", rows, columns, tokens);
    }
  }
}

void run_bytes(int64_t rows, int64_t columns, int64_t tokens, std::mt19937& random) {
#ifdef MRP_AVX512
  if (!mrp::has_avx512()) {
    return;
  }
  std::normal_distribution<float> normal;
  std::vector<int8_t> drawn(rows * columns);
  std::vector<BFloat16> factors(rows), shift(rows);
  std::vector<BFloat16> input(tokens * columns);
  for (auto& number : drawn) {
    number = random() % 255 - 127;
  }
  for (int64_t r = 0; r < rows; r++) {
    factors[r] = normal(random), shift[r] = normal(random);
  }
  for (auto& value : input) {
    value = normal(random);
  }
  const auto numbers = exactly(drawn);
  const auto scales = exactly(factors), bias = exactly(shift);
  const auto x = exactly(input);
  Buffer<BFloat16> y(new BFloat16[tokens * rows]);
  const mrp::ByteRows weight{numbers.get(), scales.get(), columns};
  for (Way way : vector_ways(tokens)) {
    multiply_by_vectors(way, weight, x.get(), tokens, bias.get(), y.get(), rows);
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t r = 0; r < rows; r++) {
        double exact = float(shift[r]), size = 1;
        for (int64_t c = 0; c < columns; c++) {
          const double product =
              double(input[t * columns + c]) * drawn[r * columns + c] * float(factors[r]);
          exact += product;
          size += std::abs(product);
        }
        const double error = std::abs(float(y[t * rows + r]) - exact);
        expect(error <= std::abs(exact) / 128 + size * 1e-6, "bytes", rows, columns, tokens);
      }
    }
  }
#endif
}

// Flip bits of some bytes, or of some bytes of numbers.
template <typename T>
void damage(std::vector<T>& content, std::mt19937& random) {
  auto* bytes = reinterpret_cast<uint8_t*>(content.data());
  const size_t size = content.size() * sizeof(T);
  for (unsigned flips = size ? random() % 4 : 0; flips > 0; flips--) {
    bytes[random() % size] ^= 1 << random() % 8;
  }
}

template <typename Decode>
void run_damaged(Problem problem, int64_t rows, int64_t columns, int64_t tokens, std::mt19937& random, int64_t& refused) {
  damage(problem.values, random);
  damage(problem.places, random);
  if (random() % 4 == 0) {
    damage(problem.offsets, random);
  }
  problem.values.resize(problem.values.size() - (problem.values.empty() ? 0 : random() % 2));
  const auto values = exactly(problem.values);
  const auto places = exactly(problem.places);
  const auto offsets = exactly(problem.offsets);
  const auto x = exactly(std::vector<BFloat16>(tokens * columns, BFloat16(1)));
  const mrp::Packed<BFloat16> weight{
      values.get(), values.get() + problem.values.size(), places.get(), problem.row_bytes, columns,
      std::is_same_v<Decode, mrp::Nibbles> ? nullptr : offsets.get()};
  Buffer<BFloat16> y(new BFloat16[tokens * rows]), dense(new BFloat16[columns]);
  const auto decode = [&](int64_t r, BFloat16* row) { mrp::decode_row<Decode>(weight, r, row); };
  survive([&] { mrp::multiply_decoded(decode, columns, x.get(), tokens, nullptr, y.get(), rows, 0, rows); }, refused);
  for (int64_t r = 0; r < rows; r++) {
    survive([&] { mrp::decode_row<Decode>(weight, r, dense.get()); }, refused);
  }
  for (Way way : vector_ways(tokens)) {
    const mrp::PackedRows<Decode> weight_rows{weight};
    survive([&] { multiply_by_vectors(way, weight_rows, x.get(), tokens, nullptr, y.get(), rows); }, refused);
  }
}

void run_damaged_codes(CodedProblem problem, int64_t rows, int64_t columns, int64_t tokens, std::mt19937& random, int64_t& refused) {
  damage(problem.nibbles, random);
  damage(problem.places, random);
  damage(problem.scales, random);
  if (random() % 4 == 0) {
    damage(problem.offsets, random);
  }
  problem.nibbles.resize(problem.nibbles.size() - (problem.nibbles.empty() ? 0 : random() % 2));
  const auto nibbles = exactly(problem.nibbles), places = exactly(problem.places);
  const auto scales = exactly(problem.scales);
  const auto x = exactly(std::vector<BFloat16>(tokens * columns, BFloat16(1)));
  const auto offsets = exactly(problem.offsets);
  const mrp::Coded<BFloat16> weight{
      nibbles.get(), nibbles.get() + problem.nibbles.size(), places.get(), (columns + 7) / 8, columns,
      scales.get(), offsets.get()};
  Buffer<BFloat16> y(new BFloat16[tokens * rows]), dense(new BFloat16[columns]);
  for (const auto& [multiply, rounds] : kernels_of_codes(x.get(), tokens, y.get(), rows)) {
    survive([&] { multiply(weight, nullptr); }, refused);
  }
  for (int64_t r = 0; r < rows; r++) {
    survive([&] { mrp::decode_row(weight, r, dense.get()); }, refused);
  }
}

// Damaged weights of random shapes, for some seconds.
void fuzz(double seconds, std::mt19937& random) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t weights = 0, refused = 0;
  while (std::chrono::steady_clock::now() < limit) {
    const int64_t rows = 1 + random() % 40, columns = 1 + random() % 400, tokens = 1 + random() % 20;
    const double kept = random() % 11 / 10.0;
    run_damaged<mrp::Bits>(draw(rows, columns, kept, false, random), rows, columns, tokens, random, refused);
    run_damaged_codes(draw_codes(rows, columns, kept, random), rows, columns, tokens, random, refused);
    const int64_t whole = (columns + 7) / 8 * 8;
    run_damaged<mrp::Nibbles>(draw(rows, whole, 0.5, true, random), rows, whole, tokens, random, refused);
    weights += 3;
  }
  std::printf("%ld damaged weights, refused by %ld kernels\n", long(weights), long(refused));
}

}  // namespace

int main(int count, char** words) {
#ifdef MRP_AVX512
  if (!mrp::has_amx()) {
    emulated_tiles::install();
  }
#endif
  std::mt19937 random(0);
  int64_t runs = 0;
  const auto run_all = [&](int64_t rows, int64_t columns, int64_t tokens) {
    run_bytes(rows, columns, tokens, random);
    runs++;
    for (double kept : {0.0, 0.1, 0.5, 0.9, 1.0}) {
      run<mrp::Bits>(draw(rows, columns, kept, false, random), rows, columns, tokens, random);
      run_codes(draw_codes(rows, columns, kept, random), rows, columns, tokens, random);
      runs += 2;
    }
    if (columns % 8 == 0) {
      run<mrp::Nibbles>(draw(rows, columns, 0.5, true, random), rows, columns, tokens, random);
      runs++;
    }
  };
  for (int64_t columns : {1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 160, 192, 255, 264, 520, 1000}) {
    for (int64_t rows : {1, 2, 21}) {
      for (int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 13}) {
        run_all(rows, columns, tokens);
      }
    }
  }
  for (int64_t columns : {100, 600}) {
    run_all(70, columns, 40);
  }
  std::printf(
      "%ld weights, with%s AVX-512, and integers up to way %d: %d failures\n", long(runs),
      mrp::has_avx512() ? "" : "out", int(mrp::best_integers()), failures);
  if (count > 1) {
    fuzz(std::atof(words[1]), random);
  }
#ifdef MRP_AVX512
  const auto emulated = long(emulated_tiles::instructions);
  std::printf("Tiles: %ld instructions emulated\n", emulated);
  expect(emulated_tiles::configurations == 0, "released tiles", 0, 0, 0);
#endif
  return failures ? 1 : 0;
}
