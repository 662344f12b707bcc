// The calls of torch by the operators, through its stable interface alone: one library runs with every
// torch from 2.11 on, whatever C++ library torch was built with.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <exception>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace mrp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Bias = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

// Raises a RuntimeError in Python, with the parts as its message.
template <typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::runtime_error(message.str());
  }
}

inline Shape shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return Shape(sizes.begin(), sizes.end());
}

inline std::string as_text(const Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  for (const char* between = ""; int64_t size : tensor.sizes()) {
    text << between << size;
    between = ", ";
  }
  text << "]";
  return text.str();
}

// torch's operator of a name and overload, which returns one tensor.
template <typename... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor linear(const Tensor& x, const Tensor& weight, const Bias& bias) {
  return call("aten::linear", "", x, weight, bias);
}

inline Tensor contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline Tensor narrow(Tensor tensor, int64_t dim, int64_t begin, int64_t size) {
  return torch::stable::narrow(tensor, dim, begin, size);
}

// A tensor on the CPU whose content is still to be written.
inline Tensor empty(const Shape& shape, ScalarType dtype) {
  Shape strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
  }
  AtenTensorHandle created = nullptr;
  const int32_t number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      shape.size(), shape.data(), strides.data(), number, aoti_torch_device_type_cpu(), 0, &created));
  return Tensor(created);
}

// Runs `part(begin, end)` on torch's threads, for ranges of at least `grain`. Errors must not pass
// through torch's frames, which would print them and keep but a number.
template <typename Part>
void in_parallel(int64_t count, int64_t grain, const Part& part) {
  std::exception_ptr error;
  std::mutex mutex;
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    try {
      part(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> guard(mutex);
      error = std::current_exception();
    }
  });
  if (error) {
    std::rethrow_exception(error);
  }
}

// Returns `run(value)` with a value of the type that a tensor of floating-point numbers has.
template <typename Run>
Tensor for_type(ScalarType dtype, const Run& run) {
  switch (dtype) {
    case ScalarType::BFloat16: return run(c10::BFloat16());
    case ScalarType::Half: return run(c10::Half());
    case ScalarType::Float: return run(float());
    case ScalarType::Double: return run(double());
    default: throw std::runtime_error("A packed weight must have floating-point numbers.");
  }
}

}  // namespace mrp
