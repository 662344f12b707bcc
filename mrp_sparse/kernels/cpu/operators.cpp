// The CPU kernels of torch.ops.mrp_lightning.linear_bitmask, linear_bitmask4, linear24 and linear8.
// One or two tokens of bfloat16 are multiplied as rows are decoded, and with AVX-512 more of them in
// panels. All else is decoded for a dense product of some rows, or, of 8 bits, multiplied by torch.
#include "byte_rows.h"
#include "coded_rows.h"
#include "rows.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/DimVector.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

// Up to here a row is multiplied as it is decoded; beyond, it is decoded once for all tokens.
constexpr int64_t FEW_TOKENS = 2;
// Of 8 bits, which `byte_rows.h` widens anew for each token.
constexpr int64_t FEW_TOKENS_OF_BYTES = 8;
// Weights that a thread should have for its own.
constexpr int64_t GRAIN = 32768;
// Bytes of dense rows for torch's product: much more would be mapped and cleared anew by each call.
constexpr int64_t DENSE_BYTES = 1 << 22;

// What all products have in common: tokens of `columns` with the rows of a packed weight.
class Product {
 public:
  Product(
      const Tensor& x, const Tensor& floating, const Tensor& places, const Bias& bias,
      int64_t columns, bool portable)
      : x(x.contiguous()), places(places.contiguous()), columns(columns), portable(portable),
        rows_(places.size(0)), bias_(bias ? bias->contiguous() : Tensor()) {
    TORCH_CHECK(
        x.dim() > 0 && x.size(-1) == columns, "The input has shape ", x.sizes(),
        ", and the packed weight ", columns, " columns.");
    TORCH_CHECK(
        x.scalar_type() == floating.scalar_type(), "The input is ", x.scalar_type(),
        " and the packed weight ", floating.scalar_type(), "; cast one of them.");
    TORCH_CHECK(places.scalar_type() == at::kByte, "The places of a packed weight must be uint8.");
    TORCH_CHECK(
        !bias || (bias->numel() == rows_ && bias->scalar_type() == x.scalar_type()),
        "The bias must have a value for each of ", rows_, " rows, in the dtype of the input.");
    for (int64_t size : x.sizes().slice(0, x.dim() - 1)) {
      count *= size;
    }
  }

  // What `multiply(bias, y, rows, begin, end)` writes into y.
  template <typename Multiply>
  Tensor by_rows(const Multiply& multiply) const {
    return filled([&](const c10::BFloat16* bias, c10::BFloat16* y) {
      at::parallel_for(0, rows_, grain(), [&](int64_t begin, int64_t end) {
        multiply(bias, y, rows_, begin, end);
      });
    });
  }

#ifdef MRP_AVX512
  // The product with rows that are decoded in panels.
  template <typename Rows>
  Tensor by_panels(const Rows& weight) const {
    const auto* input = x.const_data_ptr<c10::BFloat16>();
    const int64_t height = mrp::panel_rows(columns);
    return filled([&](const c10::BFloat16* bias, c10::BFloat16* y) {
      for (int64_t first = 0; first < count; first += mrp::MOST_TOKENS) {
        mrp::TokenTiles tokens(std::min(mrp::MOST_TOKENS, count - first), columns);
        at::parallel_for(0, tokens.tiles(), grain(), [&](int64_t begin, int64_t end) {
          tokens.fill(input + first * columns, begin, end);
        });
        const int64_t panels = (rows_ + height - 1) / height;
        at::parallel_for(0, panels, grain() / height + 1, [&](int64_t begin, int64_t end) {
          mrp::multiply_panels(
              weight, tokens, bias, y + first * rows_, rows_, begin * height,
              std::min(end * height, rows_));
        });
      }
    });
  }
#endif

  // The product with rows that `decode(r, dense)` writes, as many at once as fit into `DENSE_BYTES`.
  template <typename scalar_t, typename Decode>
  Tensor by_dense(const Decode& decode) const {
    const int64_t row_bytes = std::max<int64_t>(columns, 1) * sizeof(scalar_t);
    const int64_t height = std::clamp<int64_t>(DENSE_BYTES / row_bytes, 1, std::max<int64_t>(rows_, 1));
    Tensor dense = at::empty({height, columns}, x.options()), result;
    auto* data = dense.mutable_data_ptr<scalar_t>();
    for (int64_t first = 0; first < std::max<int64_t>(rows_, 1); first += height) {
      const int64_t taken = std::min(height, rows_ - first);
      at::parallel_for(0, taken, grain(), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
          decode(first + r, data + r * columns);
        }
      });
      const Tensor some = at::linear(
          x, dense.narrow(0, 0, taken),
          bias_.defined() ? Bias(bias_.narrow(0, first, taken)) : std::nullopt);
      if (taken == rows_) {
        return some;
      }
      if (!result.defined()) {
        c10::DimVector shape(x.sizes());
        shape.back() = rows_;
        result = at::empty(shape, x.options());
      }
      result.narrow(-1, first, taken).copy_(some);
    }
    return result;
  }

  const Tensor x, places;
  const int64_t columns;
  const bool portable;
  int64_t count = 1;  // of tokens

 private:
  template <typename Fill>
  Tensor filled(const Fill& fill) const {
    c10::DimVector shape(x.sizes());
    shape.back() = rows_;
    Tensor result = at::empty(shape, x.options());
    const auto* bias = bias_.defined() ? bias_.const_data_ptr<c10::BFloat16>() : nullptr;
    fill(bias, result.mutable_data_ptr<c10::BFloat16>());
    return result;
  }

  int64_t grain() const {
    return std::max<int64_t>(1, GRAIN / std::max<int64_t>(columns, 1));
  }

  const int64_t rows_;
  const Tensor bias_;
};

template <typename Decode>
Tensor linear(const Product& product, const Tensor& values, const int64_t* offsets) {
  const Tensor stored = values.contiguous();
  Tensor result;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, stored.scalar_type(), "packed_linear", [&] {
    const scalar_t* first = stored.const_data_ptr<scalar_t>();
    const mrp::Packed<scalar_t> weight{
        first, first + stored.numel(), product.places.const_data_ptr<uint8_t>(),
        product.places.size(1), product.columns, offsets};
    if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
      if (product.count <= FEW_TOKENS) {
        const scalar_t* input = product.x.template const_data_ptr<scalar_t>();
        result = product.by_rows([&](auto... where) {
          mrp::multiply<Decode>(weight, input, product.count, where..., product.portable);
        });
        return;
      }
#ifdef MRP_AVX512
      if (!product.portable && mrp::has_avx512()) {
        result = product.by_panels(mrp::PackedRows<Decode>{weight});
        return;
      }
#endif
    }
    result = product.by_dense<scalar_t>(
        [&](int64_t r, scalar_t* dense) { mrp::decode_row<Decode>(weight, r, dense); });
  });
  return result;
}

// The offsets of the rows of bits that an input of some columns fits.
Tensor check_bits(const Tensor& bits, const Tensor& offsets, int64_t columns) {
  TORCH_CHECK(
      bits.dim() == 2 && bits.size(1) == (columns + 7) / 8, "Bits of shape ", bits.sizes(),
      " are not those of a weight with the ", columns, " columns of the input.");
  TORCH_CHECK(
      offsets.scalar_type() == at::kLong && offsets.numel() >= bits.size(0),
      "The offsets must be an int64 for each of ", bits.size(0), " rows.");
  return offsets.contiguous();
}

Tensor bitmask(
    const Tensor& x, const Tensor& values, const Tensor& bits, const Tensor& offsets,
    const Bias& bias, bool portable) {
  const int64_t columns = x.dim() ? x.size(-1) : 0;
  const Tensor starts = check_bits(bits, offsets, columns);
  TORCH_CHECK(values.dim() == 1, "The values must have one dimension, not ", values.dim(), ".");
  const Product product(x, values, bits, bias, columns, portable);
  return linear<mrp::Bits>(product, values, starts.const_data_ptr<int64_t>());
}

template <typename T>
Tensor coded_linear(const Product& product, const mrp::Coded<T>& weight, bool eight_bits) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    if (product.count <= FEW_TOKENS) {
      const mrp::CodedProduct few(
          product.x.const_data_ptr<T>(), product.count, product.columns, eight_bits,
          product.portable);
      return product.by_rows([&](auto... where) { few.multiply(weight, where...); });
    }
#ifdef MRP_AVX512
    if (!product.portable && mrp::has_avx512_codes()) {
      return product.by_panels(mrp::CodedRows{weight});
    }
#endif
  }
  return product.by_dense<T>([&](int64_t r, T* dense) { mrp::decode_row(weight, r, dense); });
}

Tensor bitmask4(
    const Tensor& x, const Tensor& nibbles, const Tensor& bits, const Tensor& scales,
    const Tensor& offsets, const Bias& bias, bool eight_bits, bool portable) {
  const int64_t columns = x.dim() ? x.size(-1) : 0;
  const Tensor starts = check_bits(bits, offsets, columns);
  TORCH_CHECK(
      nibbles.dim() == 1 && nibbles.scalar_type() == at::kByte,
      "The codes of a packed weight must be uint8 with one dimension.");
  TORCH_CHECK(
      scales.dim() == 2 && scales.size(0) == bits.size(0) &&
          scales.size(1) == (columns + mrp::GROUP - 1) / mrp::GROUP,
      "Scales of shape ", scales.sizes(), " are not those of a weight with ", bits.size(0),
      " rows and the ", columns, " columns of the input.");
  const Product product(x, scales, bits, bias, columns, portable);
  const Tensor stored = nibbles.contiguous(), factors = scales.contiguous();
  Tensor result;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, factors.scalar_type(), "coded_linear", [&] {
    const uint8_t* first = stored.const_data_ptr<uint8_t>();
    const mrp::Coded<scalar_t> weight{
        first, first + stored.numel(), product.places.const_data_ptr<uint8_t>(),
        product.places.size(1), columns, factors.const_data_ptr<scalar_t>(),
        starts.const_data_ptr<int64_t>()};
    result = coded_linear(product, weight, eight_bits);
  });
  return result;
}

Tensor of_four(
    const Tensor& x, const Tensor& values, const Tensor& meta, const Bias& bias, bool portable) {
  TORCH_CHECK(
      values.dim() == 2 && meta.dim() == 2 && values.size(0) == meta.size(0) &&
          values.size(1) == 4 * meta.size(1),
      "Values of shape ", values.sizes(), " and meta of shape ", meta.sizes(),
      " are not those of one 2:4 weight.");
  const Product product(x, values, meta, bias, 2 * values.size(1), portable);
  return linear<mrp::Nibbles>(product, values, nullptr);
}

// At an address that torch's product can read from: that of a tensor of a file may be none.
Tensor aligned(const Tensor& tensor) {
  const Tensor stored = tensor.contiguous();
  return reinterpret_cast<uintptr_t>(stored.const_data_ptr()) % 16 ? stored.clone() : stored;
}

Tensor linear8(const Tensor& x, const Tensor& numbers, const Tensor& scales, const Bias& bias) {
  TORCH_CHECK(
      numbers.dim() == 2 && numbers.scalar_type() == at::kChar && scales.dim() == 1 &&
          scales.size(0) == numbers.size(0),
      "Numbers of 8 bits must be int8, with a scale for each row.");
  const Product product(x, scales, numbers.view(at::kByte), bias, numbers.size(1), false);
#ifdef MRP_AVX512
  if (x.scalar_type() == at::kBFloat16 && mrp::has_avx512() &&
      product.count <= FEW_TOKENS_OF_BYTES) {
    const Tensor stored = numbers.contiguous(), factors = scales.contiguous();
    const mrp::Bytes weight{
        stored.const_data_ptr<int8_t>(), factors.const_data_ptr<c10::BFloat16>(), product.columns};
    const Tensor tokens = product.x.to(at::kFloat);
    const float* input = tokens.const_data_ptr<float>();
    return product.by_rows(
        [&](auto... where) { mrp::multiply(weight, input, product.count, where...); });
  }
#endif
  if (x.scalar_type() == at::kDouble || numbers.size(1) % 16) {
    const Tensor dense = numbers.to(scales.scalar_type()) * scales.unsqueeze(1);
    return at::linear(x, dense, bias);
  }
  const Tensor flat = aligned(x.reshape({product.count, product.columns}));
  Tensor y = at::_weight_int8pack_mm(flat, aligned(numbers), scales.contiguous());
  c10::DimVector shape(x.sizes());
  shape.back() = numbers.size(0);
  y = y.view(shape);
  return bias ? y.add_(*bias) : y;
}

Tensor linear_bitmask(
    const Tensor& x, const Tensor& values, const Tensor& bits, const Tensor& offsets,
    const Bias& bias) {
  return bitmask(x, values, bits, offsets, bias, false);
}

Tensor linear_bitmask4(
    const Tensor& x, const Tensor& nibbles, const Tensor& bits, const Tensor& scales,
    const Tensor& offsets, const Bias& bias, bool eight_bits) {
  return bitmask4(x, nibbles, bits, scales, offsets, bias, eight_bits, false);
}

Tensor linear24(
    const Tensor& x, const Tensor& values, const Tensor& meta, const Bias& bias, const Bias&) {
  return of_four(x, values, meta, bias, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(mrp_lightning, CPU, library) {
  library.impl("linear_bitmask", linear_bitmask);
  library.impl("linear_bitmask4", linear_bitmask4);
  library.impl("linear24", linear24);
  library.impl("linear8", linear8);
}

// For tests: the same, with the choice of the instructions.
TORCH_LIBRARY(mrp_lightning_cpu, library) {
  library.def(
      "linear_bitmask(Tensor x, Tensor values, Tensor bits, Tensor offsets, Tensor? bias, bool portable)"
      " -> Tensor",
      bitmask);
  library.def(
      "linear_bitmask4(Tensor x, Tensor nibbles, Tensor bits, Tensor scales, Tensor offsets,"
      " Tensor? bias, bool eight_bits, bool portable) -> Tensor",
      bitmask4);
  library.def(
      "linear24(Tensor x, Tensor values, Tensor meta, Tensor? bias, bool portable) -> Tensor",
      of_four);
}
