// The CPU kernels of torch.ops.mrp_lightning.linear_bitmask and linear24: bfloat16 is multiplied as it
// is decoded where there are few tokens; all else is decoded for a dense product.
#include "rows.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/DimVector.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

// Up to here rows are decoded for every four tokens; beyond, once, for a dense product.
constexpr int64_t FEW_TOKENS = 8;
constexpr int64_t FEW_TOKENS_PORTABLE = 2;
// Weights that a thread should have for its own.
constexpr int64_t GRAIN = 32768;

template <typename Decode>
Tensor linear(
    const Tensor& x, const Tensor& values, const Tensor& places, const int64_t* offsets,
    const Bias& bias, int64_t columns, bool portable) {
  const int64_t rows = places.size(0);
  TORCH_CHECK(
      x.dim() > 0 && x.size(-1) == columns, "The input has shape ", x.sizes(),
      ", and the packed weight ", columns, " columns.");
  TORCH_CHECK(
      x.scalar_type() == values.scalar_type(), "The input is ", x.scalar_type(),
      " and the packed weight ", values.scalar_type(), "; cast one of them.");
  TORCH_CHECK(places.scalar_type() == at::kByte, "The places of a packed weight must be uint8.");
  TORCH_CHECK(
      !bias || (bias->numel() == rows && bias->scalar_type() == x.scalar_type()),
      "The bias must have a value for each of ", rows, " rows, in the dtype of the input.");
  c10::DimVector shape(x.sizes());
  shape.back() = rows;
  int64_t count = 1;  // of tokens
  for (int64_t size : x.sizes().slice(0, x.dim() - 1)) {
    count *= size;
  }
  const Tensor tokens = x.contiguous();
  const Tensor stored = values.contiguous(), where = places.contiguous();
  const Tensor added = bias ? bias->contiguous() : Tensor();
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(columns, 1));
  Tensor result;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "packed_linear", [&] {
    const scalar_t* first = stored.const_data_ptr<scalar_t>();
    const mrp::Packed<scalar_t> weight{
        first, first + stored.numel(), where.const_data_ptr<uint8_t>(), where.size(1), columns,
        offsets};
    if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
      const bool vector = mrp::has_avx512() && !portable;
      if (count <= (vector ? FEW_TOKENS : FEW_TOKENS_PORTABLE)) {
        result = at::empty(shape, x.options());
        scalar_t* y = result.mutable_data_ptr<scalar_t>();
        const scalar_t* input = tokens.const_data_ptr<scalar_t>();
        const scalar_t* shift = bias ? added.const_data_ptr<scalar_t>() : nullptr;
        at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
          mrp::multiply<Decode>(weight, input, count, shift, y, rows, begin, end, portable);
        });
        return;
      }
    }
    Tensor dense = at::empty({rows, columns}, stored.options());
    scalar_t* data = dense.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      mrp::decode<Decode>(weight, data, begin, end, portable);
    });
    result = at::linear(tokens, dense, bias);
  });
  return result;
}

Tensor bitmask(
    const Tensor& x, const Tensor& values, const Tensor& bits, const Tensor& offsets,
    const Bias& bias, bool portable) {
  const int64_t columns = x.dim() ? x.size(-1) : 0;
  TORCH_CHECK(
      values.dim() == 1 && bits.dim() == 2 && bits.size(1) == (columns + 7) / 8,
      "Bits of shape ", bits.sizes(), " are not those of a weight with the ", columns,
      " columns of the input.");
  TORCH_CHECK(
      offsets.scalar_type() == at::kLong && offsets.numel() >= bits.size(0),
      "The offsets must be an int64 for each of ", bits.size(0), " rows.");
  const Tensor starts = offsets.contiguous();
  return linear<mrp::Bits>(
      x, values, bits, starts.const_data_ptr<int64_t>(), bias, columns, portable);
}

Tensor of_four(
    const Tensor& x, const Tensor& values, const Tensor& meta, const Bias& bias, bool portable) {
  TORCH_CHECK(
      values.dim() == 2 && meta.dim() == 2 && values.size(0) == meta.size(0) &&
          values.size(1) == 4 * meta.size(1),
      "Values of shape ", values.sizes(), " and meta of shape ", meta.sizes(),
      " are not those of one 2:4 weight.");
  return linear<mrp::Nibbles>(x, values, meta, nullptr, bias, 2 * values.size(1), portable);
}

Tensor linear_bitmask(
    const Tensor& x, const Tensor& values, const Tensor& bits, const Tensor& offsets,
    const Bias& bias) {
  return bitmask(x, values, bits, offsets, bias, false);
}

Tensor linear24(
    const Tensor& x, const Tensor& values, const Tensor& meta, const Bias& bias, const Bias&) {
  return of_four(x, values, meta, bias, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(mrp_lightning, CPU, library) {
  library.impl("linear_bitmask", linear_bitmask);
  library.impl("linear24", linear24);
}

// For tests: the same, with the choice of the instructions.
TORCH_LIBRARY(mrp_lightning_cpu, library) {
  library.def(
      "linear_bitmask(Tensor x, Tensor values, Tensor bits, Tensor offsets, Tensor? bias, bool portable)"
      " -> Tensor",
      bitmask);
  library.def(
      "linear24(Tensor x, Tensor values, Tensor meta, Tensor? bias, bool portable) -> Tensor",
      of_four);
}
