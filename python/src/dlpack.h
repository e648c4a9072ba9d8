// SPDX-License-Identifier: Apache-2.0
// The part of DLPack 1.x that arrays come in through: the ABI of a tensor, of the two capsules, and of the exchange functions that a
// framework's tensor type may offer (__dlpack_c_exchange_api__, DLPack 1.2). Names in the capsules are the standard's.
#pragma once

#include <cstdint>

namespace leanattn::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };

struct Device {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // elements; null: contiguous
  std::uint64_t byte_offset;
};

// Capsule "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor* self);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

constexpr std::uint64_t kReadOnly = 1;

// Capsule "dltensor_versioned".
struct ManagedTensorVersioned {
  Version version;
  void* manager_context;
  void (*deleter)(ManagedTensorVersioned* self);
  std::uint64_t flags;
  Tensor tensor;
};

// Capsule "dlpack_exchange_api", an attribute of the tensor type. Members that are not used here have no type.
struct ExchangeApi {
  Version version;
  ExchangeApi* older;  // the same type's functions for an earlier major version, or null
  void* allocate_tensor;
  void* managed_tensor_of_object;
  void* object_of_managed_tensor;
  int (*tensor_of_object)(void* object, Tensor* out);  // borrowed and not synchronised; may be null; −1 with a Python error
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

}  // namespace leanattn::python::dlpack
