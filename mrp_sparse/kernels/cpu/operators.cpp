// The CPU kernels of torch.ops.mrp_lightning.linear_bitmask, linear_bitmask4, linear24 and linear8.
// Tokens of 8 bits are multiplied as integers, in panels of rows. Of others: with AVX-512, tokens of
// bfloat16 are multiplied as rows are decoded, or, if they are many, in panels; without it, one or two of
// them row by row. Many tokens of either kind are multiplied in tiles where the processor has them (AMX).
// All else is decoded for a dense product of some rows, or, of 8 bits, multiplied by torch.
#include "byte_rows.h"
#include "coded_rows.h"
#include "few_tokens.h"
#include "integers.h"
#include "panels.h"
#include "rows.h"
#include "tile_integers.h"
#include "tile_panels.h"
#include "torch_calls.h"

namespace {

using c10::BFloat16;
using mrp::Bias;
using mrp::ScalarType;
using mrp::Shape;
using mrp::Tensor;

// Up to here a row is multiplied as it is decoded without AVX-512; beyond, it is decoded for all tokens.
constexpr int64_t FEW_TOKENS = 2;
// From here on tokens are multiplied in tiles, where the processor has them. Not measured, but an estimate
// from counts of instructions, by which tiles are ahead from about four tokens on.
constexpr int64_t TOKENS_FOR_TILES = 8;
// Weights that a thread should have for its own.
constexpr int64_t GRAIN = 32768;
// Bytes of dense rows for torch's product: much more would be mapped and cleared anew by each call.
constexpr int64_t DENSE_BYTES = 1 << 22;

// How a product is computed: in the best way here or, for tests and benchmarks, in one of all, of which
// `avx2` is for integers alone. `tiles` needs a processor that has them, or a test that emulates them.
enum class Way : int64_t { best, vectors, portable, tiles, avx2 };

template <typename T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

// A product of tokens of `columns` with the rows of a packed weight.
class Product {
 public:
  Product(const Tensor& x, ScalarType dtype, const Bias& bias, int64_t rows, int64_t columns)
      : x(mrp::contiguous(x)), columns(columns), shape_(mrp::shape_of(x)), rows_(rows) {
    mrp::check(
        !shape_.empty() && shape_.back() == columns, "The input has shape ", mrp::as_text(x),
        ", and the packed weight ", columns, " columns.");
    mrp::check(
        x.scalar_type() == dtype, "The input is ", x.scalar_type(), " and the packed weight ",
        dtype, "; cast one of them.");
    mrp::check(
        !bias || (bias->numel() == rows && bias->scalar_type() == dtype),
        "The bias must have a value for each of ", rows, " rows, in the dtype of the input.");
    if (bias) {
      bias_ = mrp::contiguous(*bias);
    }
    shape_.back() = rows;
    for (size_t i = 0; i + 1 < shape_.size(); i++) {
      count *= shape_[i];
    }
  }

  // The product whose rows `multiply(bias, y, rows, begin, end)` writes into y.
  template <typename Multiply>
  Tensor by_rows(const Multiply& multiply) const {
    return filled<BFloat16>([&](const BFloat16* bias, BFloat16* y) {
      mrp::in_parallel(rows_, grain(), [&](int64_t begin, int64_t end) {
        multiply(bias, y, rows_, begin, end);
      });
    });
  }

  // The product with tokens that are rounded to 8 bits before.
  template <typename T>
  Tensor by_integers(const mrp::Coded<T>& weight, mrp::Integers way) const {
    const int64_t groups = weight.groups();
    const auto tokens = std::make_unique_for_overwrite<mrp::RoundedGroup[]>(count * groups);
    const T* input = data_of<T>(x);
    mrp::in_parallel(count, grain(), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        mrp::round_token(way, input + t * columns, columns, tokens.get() + t * groups);
      }
    });
    return filled<T>([&](const T* bias, T* y) {
      in_panels(mrp::BLOCK_ROWS, [&](int64_t begin, int64_t end) {
        mrp::multiply_rounded(way, weight, tokens.get(), count, bias, y, rows_, begin, end);
      });
    });
  }

#ifdef MRP_AVX512
  // The same in tiles.
  template <typename T>
  Tensor by_integer_tiles(const mrp::Coded<T>& weight) const {
    mrp::RoundedTiles tokens(count, weight.groups());
    mrp::in_parallel(tokens.tiles(), grain() / mrp::SIDE + 1, [&](int64_t begin, int64_t end) {
      tokens.fill(data_of<T>(x), columns, begin, end);
    });
    return filled<T>([&](const T* bias, T* y) {
      in_panels(mrp::BLOCK_ROWS, [&](int64_t begin, int64_t end) {
        mrp::multiply_rounded_tiles(weight, tokens, bias, y, rows_, begin, end);
      });
    });
  }

  // Whether these tokens are multiplied in tiles, by a processor with AVX-512.
  bool takes_tiles(Way way) const {
    const bool has = mrp::has_amx();  // before any tile: Linux wants to be asked
    return way == Way::tiles || (way == Way::best && has && count >= TOKENS_FOR_TILES);
  }

  // The product with rows that are decoded for tiles, or into registers, for few tokens or in panels.
  template <typename Rows>
  Tensor by_avx512(const Rows& weight, Way way) const {
    if (takes_tiles(way)) {
      return by_tokens(
          weight, mrp::tile_panel_rows(columns), mrp::multiply_tiles<Rows>,
          [&](int64_t some) { return mrp::TurnedTokens(some, columns); });
    }
    const bool few = count <= mrp::FEW_TOKENS;
    const int64_t most = few ? mrp::FEW_TOKENS : mrp::TILE_TOKENS;
    return by_tokens(
        weight, mrp::panel_rows(columns), few ? mrp::multiply_few<Rows> : mrp::multiply_panels<Rows>,
        [&](int64_t some) { return mrp::TokenTiles(some, columns, most); });
  }
#endif

  // The product with rows that `decode(r, dense)` writes, as many at once as fit into `DENSE_BYTES`.
  template <typename scalar_t, typename Decode>
  Tensor by_dense(const Decode& decode) const {
    const int64_t row_bytes = std::max<int64_t>(columns, 1) * sizeof(scalar_t);
    const int64_t height = std::clamp<int64_t>(DENSE_BYTES / row_bytes, 1, std::max<int64_t>(rows_, 1));
    const Tensor dense = mrp::empty({height, columns}, x.scalar_type());
    auto* data = static_cast<scalar_t*>(dense.mutable_data_ptr());
    std::optional<Tensor> result;
    for (int64_t first = 0; first < std::max<int64_t>(rows_, 1); first += height) {
      const int64_t taken = std::min(height, rows_ - first);
      mrp::in_parallel(taken, grain(), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
          decode(first + r, data + r * columns);
        }
      });
      const Bias added = bias_ ? Bias(mrp::narrow(*bias_, 0, first, taken)) : std::nullopt;
      const Tensor some = mrp::linear(x, mrp::narrow(dense, 0, 0, taken), added);
      if (taken == rows_) {
        return some;
      }
      if (!result) {
        result = mrp::empty(shape_, x.scalar_type());
      }
      Tensor part = mrp::narrow(*result, shape_.size() - 1, first, taken);
      torch::stable::copy_(part, some);
    }
    return *result;
  }

  const Tensor x;
  const int64_t columns;
  int64_t count = 1;  // of tokens

 private:
  template <typename T, typename Fill>
  Tensor filled(const Fill& fill) const {
    const Tensor result = mrp::empty(shape_, x.scalar_type());
    fill(bias_ ? data_of<T>(*bias_) : nullptr, static_cast<T*>(result.mutable_data_ptr()));
    return result;
  }

#ifdef MRP_AVX512
  // The product that `multiply` computes in panels of `height` rows, of tokens in the tiles of `tiles_of(count)`.
  template <typename Rows, typename Multiply, typename TilesOf>
  Tensor by_tokens(
      const Rows& weight, int64_t height, const Multiply& multiply, const TilesOf& tiles_of) const {
    const auto* input = data_of<BFloat16>(x);
    return filled<BFloat16>([&](const BFloat16* bias, BFloat16* y) {
      for (int64_t first = 0; first < count; first += mrp::MOST_TOKENS) {
        auto tokens = tiles_of(std::min(mrp::MOST_TOKENS, count - first));
        mrp::in_parallel(tokens.tiles(), grain(), [&](int64_t begin, int64_t end) {
          tokens.template fill<Rows>(input + first * columns, begin, end);
        });
        in_panels(height, [&](int64_t begin, int64_t end) {
          multiply(weight, tokens, bias, y + first * rows_, rows_, begin, end);
        });
      }
    });
  }
#endif

  // Runs `part(begin, end)` for all rows, in panels of `height`.
  template <typename Part>
  void in_panels(int64_t height, const Part& part) const {
    const int64_t panels = (rows_ + height - 1) / height;
    mrp::in_parallel(panels, grain() / height + 1, [&](int64_t begin, int64_t end) {
      part(begin * height, std::min(end * height, rows_));
    });
  }

  int64_t grain() const {
    return std::max<int64_t>(1, GRAIN / std::max<int64_t>(columns, 1));
  }

  Shape shape_;  // of the result
  const int64_t rows_;
  Bias bias_;
};

template <typename Decode>
Tensor packed_linear(
    const Product& product, const Tensor& values, const Tensor& places, const int64_t* offsets,
    Way way) {
  const Tensor stored = mrp::contiguous(values), where = mrp::contiguous(places);
  mrp::check(
      places.scalar_type() == ScalarType::Byte, "The places of a packed weight must be uint8.");
  return mrp::for_type(values.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* first = data_of<T>(stored);
    const mrp::Packed<T> weight{
        first, first + stored.numel(), data_of<uint8_t>(where), where.size(1), product.columns,
        offsets};
    const auto decode = [&](int64_t r, T* dense) { mrp::decode_row<Decode>(weight, r, dense); };
    if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef MRP_AVX512
      if (way != Way::portable && mrp::has_avx512()) {
        return product.by_avx512(mrp::PackedRows<Decode>{weight}, way);
      }
#endif
      if (product.count <= FEW_TOKENS) {
        return product.by_rows([&, x = data_of<T>(product.x)](auto... range) {
          mrp::multiply_decoded(decode, product.columns, x, product.count, range...);
        });
      }
    }
    return product.template by_dense<T>(decode);
  });
}

// The offsets of the rows of bits that an input of some columns fits.
Tensor check_bits(const Tensor& bits, const Tensor& offsets, int64_t columns) {
  mrp::check(
      bits.dim() == 2 && bits.size(1) == (columns + 7) / 8, "Bits of shape ", mrp::as_text(bits),
      " are not those of a weight with the ", columns, " columns of the input.");
  mrp::check(
      offsets.scalar_type() == ScalarType::Long && offsets.numel() >= bits.size(0),
      "The offsets must be an int64 for each of ", bits.size(0), " rows.");
  return mrp::contiguous(offsets);
}

int64_t columns_of(const Tensor& x) {
  return x.dim() ? x.size(x.dim() - 1) : 0;
}

Tensor bitmask(
    const Tensor& x, const Tensor& values, const Tensor& bits, const Tensor& offsets,
    const Bias& bias, Way way) {
  const Tensor starts = check_bits(bits, offsets, columns_of(x));
  mrp::check(values.dim() == 1, "The values must have one dimension, not ", values.dim(), ".");
  const Product product(x, values.scalar_type(), bias, bits.size(0), columns_of(x));
  return packed_linear<mrp::Bits>(product, values, bits, data_of<int64_t>(starts), way);
}

mrp::Integers integers_of(Way way) {
  const mrp::Integers best = mrp::best_integers();
  switch (way) {
    case Way::portable: return mrp::Integers::portable;
    case Way::avx2: return std::min(best, mrp::Integers::avx2);
    default: return best;
  }
}

template <typename T>
Tensor coded_linear(
    const Product& product, const mrp::Coded<T>& weight, bool eight_bits, Way way) {
  if (eight_bits) {
    const mrp::Integers integers = integers_of(way);
#ifdef MRP_AVX512
    if (integers == mrp::Integers::vnni && product.takes_tiles(way)) {
      return product.by_integer_tiles(weight);
    }
#endif
    return product.by_integers(weight, integers);
  }
  const auto decode = [&](int64_t r, T* dense) { mrp::decode_row(weight, r, dense); };
  if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef MRP_AVX512
    if (way != Way::portable && mrp::has_avx512()) {
      return product.by_avx512(mrp::CodedRows{weight}, way);
    }
#endif
    if (product.count <= FEW_TOKENS) {
      return product.by_rows([&, x = data_of<T>(product.x)](auto... range) {
        mrp::multiply_decoded(decode, product.columns, x, product.count, range...);
      });
    }
  }
  return product.template by_dense<T>(decode);
}

Tensor bitmask4(
    const Tensor& x, const Tensor& nibbles, const Tensor& bits, const Tensor& scales,
    const Tensor& offsets, const Bias& bias, bool eight_bits, Way way) {
  const int64_t columns = columns_of(x);
  const Tensor starts = check_bits(bits, offsets, columns);
  mrp::check(
      nibbles.dim() == 1 && nibbles.scalar_type() == ScalarType::Byte &&
          bits.scalar_type() == ScalarType::Byte,
      "The codes of a packed weight must be uint8 with one dimension, and its places uint8.");
  mrp::check(
      scales.dim() == 2 && scales.size(0) == bits.size(0) &&
          scales.size(1) == (columns + mrp::GROUP - 1) / mrp::GROUP,
      "Scales of shape ", mrp::as_text(scales), " are not those of a weight with ", bits.size(0),
      " rows and the ", columns, " columns of the input.");
  const Product product(x, scales.scalar_type(), bias, bits.size(0), columns);
  const Tensor stored = mrp::contiguous(nibbles), factors = mrp::contiguous(scales);
  const Tensor where = mrp::contiguous(bits);
  return mrp::for_type(scales.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const uint8_t* first = data_of<uint8_t>(stored);
    const mrp::Coded<T> weight{
        first, first + stored.numel(), data_of<uint8_t>(where), where.size(1), columns,
        data_of<T>(factors), data_of<int64_t>(starts)};
    return coded_linear(product, weight, eight_bits, way);
  });
}

Tensor of_four(
    const Tensor& x, const Tensor& values, const Tensor& meta, const Bias& bias, Way way) {
  mrp::check(
      values.dim() == 2 && meta.dim() == 2 && values.size(0) == meta.size(0) &&
          values.size(1) == 4 * meta.size(1),
      "Values of shape ", mrp::as_text(values), " and meta of shape ", mrp::as_text(meta),
      " are not those of one 2:4 weight.");
  const Product product(x, values.scalar_type(), bias, meta.size(0), 2 * values.size(1));
  return packed_linear<mrp::Nibbles>(product, values, meta, nullptr, way);
}

// At an address that torch's product can read from: that of a tensor of a file may be none.
Tensor aligned(const Tensor& tensor) {
  const Tensor stored = mrp::contiguous(tensor);
  const auto address = reinterpret_cast<uintptr_t>(stored.const_data_ptr());
  return address % 16 ? torch::stable::clone(stored) : stored;
}

Tensor of_eight(
    const Tensor& x, const Tensor& numbers, const Tensor& scales, const Bias& bias, Way way) {
  mrp::check(
      numbers.dim() == 2 && numbers.scalar_type() == ScalarType::Char && scales.dim() == 1 &&
          scales.size(0) == numbers.size(0),
      "Numbers of 8 bits must be int8, with a scale for each row.");
  const int64_t rows = numbers.size(0), columns = numbers.size(1);
  const Product product(x, scales.scalar_type(), bias, rows, columns);
#ifdef MRP_AVX512
  if (x.scalar_type() == ScalarType::BFloat16 && way != Way::portable && mrp::has_avx512()) {
    const Tensor stored = mrp::contiguous(numbers), factors = mrp::contiguous(scales);
    return product.by_avx512(
        mrp::ByteRows{data_of<int8_t>(stored), data_of<BFloat16>(factors), columns}, way);
  }
#endif
  if (x.scalar_type() == ScalarType::Double || columns % 16) {
    const Tensor widened = torch::stable::to(numbers, scales.scalar_type());
    const Tensor column = torch::stable::unsqueeze(scales, 1);
    return mrp::linear(x, mrp::call("aten::mul", "Tensor", widened, column), bias);
  }
  const Tensor flat = aligned(torch::stable::view(product.x, {product.count, columns}));
  const Tensor products = mrp::call(
      "aten::_weight_int8pack_mm", "", flat, aligned(numbers), mrp::contiguous(scales));
  Shape shape = mrp::shape_of(x);
  shape.back() = rows;
  const Tensor y = torch::stable::view(products, shape);
  // There is no call for a sum, and minus −1 times is exact.
  return bias ? torch::stable::subtract(y, *bias, -1.0) : y;
}

Tensor linear_bitmask(
    const Tensor& x, const Tensor& values, const Tensor& bits, const Tensor& offsets,
    const Bias& bias) {
  return bitmask(x, values, bits, offsets, bias, Way::best);
}

Tensor linear_bitmask4(
    const Tensor& x, const Tensor& nibbles, const Tensor& bits, const Tensor& scales,
    const Tensor& offsets, const Bias& bias, bool eight_bits) {
  return bitmask4(x, nibbles, bits, scales, offsets, bias, eight_bits, Way::best);
}

Tensor linear24(
    const Tensor& x, const Tensor& values, const Tensor& meta, const Bias& bias, const Bias&) {
  return of_four(x, values, meta, bias, Way::best);
}

Tensor linear8(const Tensor& x, const Tensor& numbers, const Tensor& scales, const Bias& bias) {
  return of_eight(x, numbers, scales, bias, Way::best);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mrp_lightning, CPU, library) {
  library.impl("linear_bitmask", TORCH_BOX(&linear_bitmask));
  library.impl("linear_bitmask4", TORCH_BOX(&linear_bitmask4));
  library.impl("linear24", TORCH_BOX(&linear24));
  library.impl("linear8", TORCH_BOX(&linear8));
}

// For tests and benchmarks: the same, with the choice of the way, by its number.
namespace {

Tensor test_bitmask(
    const Tensor& x, const Tensor& values, const Tensor& bits, const Tensor& offsets,
    const Bias& bias, int64_t way) {
  return bitmask(x, values, bits, offsets, bias, Way(way));
}

Tensor test_bitmask4(
    const Tensor& x, const Tensor& nibbles, const Tensor& bits, const Tensor& scales,
    const Tensor& offsets, const Bias& bias, bool eight_bits, int64_t way) {
  return bitmask4(x, nibbles, bits, scales, offsets, bias, eight_bits, Way(way));
}

Tensor test_24(
    const Tensor& x, const Tensor& values, const Tensor& meta, const Bias& bias, int64_t way) {
  return of_four(x, values, meta, bias, Way(way));
}

Tensor test_8(
    const Tensor& x, const Tensor& numbers, const Tensor& scales, const Bias& bias, int64_t way) {
  return of_eight(x, numbers, scales, bias, Way(way));
}

}  // namespace

STABLE_TORCH_LIBRARY(mrp_lightning_cpu, library) {
  library.def(
      "linear_bitmask(Tensor x, Tensor values, Tensor bits, Tensor offsets, Tensor? bias, int way)"
      " -> Tensor");
  library.def(
      "linear_bitmask4(Tensor x, Tensor nibbles, Tensor bits, Tensor scales, Tensor offsets,"
      " Tensor? bias, bool eight_bits, int way) -> Tensor");
  library.def("linear24(Tensor x, Tensor values, Tensor meta, Tensor? bias, int way) -> Tensor");
  library.def("linear8(Tensor x, Tensor numbers, Tensor scales, Tensor? bias, int way) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mrp_lightning_cpu, CPU, library) {
  library.impl("linear_bitmask", TORCH_BOX(&test_bitmask));
  library.impl("linear_bitmask4", TORCH_BOX(&test_bitmask4));
  library.impl("linear24", TORCH_BOX(&test_24));
  library.impl("linear8", TORCH_BOX(&test_8));
}
