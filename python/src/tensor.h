// SPDX-License-Identifier: Apache-2.0
// A Python array as pointer, shape and strides, without a copy: DLPack, or NumPy's array interface for what NumPy does not hand out
// through DLPack (bfloat16 of ml_dtypes, read-only arrays of old versions).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "leanattn/problem.h"

namespace leanattn::python {

namespace nb = nanobind;

enum class Element : std::uint8_t { kFloat32, kFloat16, kBFloat16, kInt32, kInt64, kUInt64, kOther };

struct Device {
  bool cuda = false;
  int id = 0;
  bool operator==(const Device&) const = default;
};
std::string device_name(Device device);  // "cpu", "cuda:0"
Device parse_device(const std::string& name);

struct Tensor {
  static constexpr int kMostDims = 8;
  const char* name = "";  // of the argument
  void* data = nullptr;
  int ndim = 0;
  std::int64_t shape[kMostDims] = {};
  std::int64_t strides[kMostDims] = {};  // elements; of no meaning where the shape is 1
  Element element = Element::kOther;
  Device device;
  bool read_only = false;
  nb::object owner;  // keeps the memory
  nb::handle array;  // as it was given: for sentences, while the caller still holds it

  std::int64_t elements() const;
};

// The array behind an argument. ValueError for what is none, has more than 8 dimensions, or lies on another kind of device.
Tensor tensor_of(nb::handle array, const char* name);

// CUDA: the stream that was named; else the one that the array's framework works on now, where its type says so; else the default one.
void* stream_for(nb::handle array, Device device, std::optional<std::uintptr_t> named);

// --- Checks; each throws Error kInvalidArgument with a sentence that names the argument ---
[[noreturn]] void invalid(const std::string& sentence);
std::string shape_text(const Tensor& tensor);  // "[2, 8, 64]"
std::string dtype_text(nb::handle array);      // as its framework writes it: "float64", "torch.float64"
DType float_type(const Tensor& tensor);
void require_element(const Tensor& tensor, Element element, const char* needed);
void require_shape(const Tensor& tensor, std::initializer_list<std::int64_t> shape, const char* meaning);
void require_contiguous(const Tensor& tensor);
void require_writable(const Tensor& tensor);

}  // namespace leanattn::python
