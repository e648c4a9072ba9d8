// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "dlpack.h"

namespace leanattn::python {
namespace {

// A type is looked up once: its functions, or null. Types live as long as their framework, which is never unloaded.
const dlpack::ExchangeApi* exchange_api(nb::handle array) {
  struct Known {
    PyTypeObject* type = nullptr;
    const dlpack::ExchangeApi* api = nullptr;
  };
  constexpr int kMostTypes = 16;
  static Known known[kMostTypes];  // written under the GIL
  static int count = 0;
  PyTypeObject* type = Py_TYPE(array.ptr());
  for (int i = 0; i < count; ++i) {
    if (known[i].type == type) return known[i].api;
  }
  const dlpack::ExchangeApi* api = nullptr;
  nb::object capsule = nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->version.major != 1) api = api->older;
  }
  if (count < kMostTypes) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));  // its address must stay its own
    known[count++] = {type, api};
  }
  return api;
}

Element element_of(const dlpack::DataType& type) {
  if (type.lanes != 1) return Element::kOther;
  const auto is = [&](int code, int bits) { return type.code == code && type.bits == bits; };
  if (is(dlpack::kFloat, 32)) return Element::kFloat32;
  if (is(dlpack::kFloat, 16)) return Element::kFloat16;
  if (is(dlpack::kBfloat, 16)) return Element::kBFloat16;
  if (is(dlpack::kInt, 32)) return Element::kInt32;
  if (is(dlpack::kInt, 64)) return Element::kInt64;
  if (is(dlpack::kUInt, 64)) return Element::kUInt64;
  return Element::kOther;
}

// What an array says of itself, or what is said for one that has no such attribute.
std::string attribute_text(nb::handle array, const char* attribute, const std::string& otherwise) {
  const nb::object value = nb::getattr(array, attribute, nb::none());
  return value.is_none() ? otherwise : nb::str(value).c_str();
}

void require_dims(const char* name, std::int64_t ndim) {
  if (ndim > Tensor::kMostDims) invalid(fmt::format("{} has {} dimensions: at most {}", name, ndim, Tensor::kMostDims));
}

void fill_contiguous_strides(Tensor& tensor) {
  std::int64_t stride = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    tensor.strides[axis] = stride;
    stride *= tensor.shape[axis];
  }
}

void take(Tensor& tensor, const dlpack::Tensor& from) {
  require_dims(tensor.name, from.ndim);
  tensor.data = static_cast<std::byte*>(from.data) + from.byte_offset;
  tensor.ndim = from.ndim;
  for (int axis = 0; axis < from.ndim; ++axis) {
    tensor.shape[axis] = from.shape[axis];
    if (from.strides != nullptr) tensor.strides[axis] = from.strides[axis];
  }
  if (from.strides == nullptr || tensor.elements() == 0) fill_contiguous_strides(tensor);  // NumPy's strides of nothing are 0
  tensor.element = element_of(from.dtype);
  switch (from.device.device_type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost: tensor.device = {}; break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged: tensor.device = {true, from.device.device_id}; break;
    default:
      invalid(fmt::format("{} lies on {}: supported are the CPU and CUDA", tensor.name,
                          attribute_text(tensor.array, "device", fmt::format("DLPack's device type {}", from.device.device_type))));
  }
  if (tensor.elements() == 0) tensor.data = from.data;
}

bool take_capsule(Tensor& tensor, nb::object capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1) invalid(fmt::format("{}: DLPack {}: supported is 1", tensor.name, managed->version.major));
    take(tensor, managed->tensor);
    tensor.read_only = (managed->flags & dlpack::kReadOnly) != 0;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    take(tensor, static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor);
  } else {
    return false;
  }
  tensor.owner = std::move(capsule);
  return true;
}

std::int64_t integer(nb::handle value) {
  const long long number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return number;
}

// Of the array's type: "numpy", "torch.nn.parameter", "jaxlib._jax".
std::string module_of(nb::handle array) {
  const nb::object module = nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()))).attr("__module__");
  return nb::str(module).c_str();
}

// stream −1: the producer does not synchronise. The call is queued on the producer's own stream, or on one that the caller names.
bool take_dlpack(Tensor& tensor, nb::handle array) {
  if (!nb::hasattr(array, "__dlpack__") || !nb::hasattr(array, "__dlpack_device__")) return false;
  const auto device = nb::cast<nb::tuple>(array.attr("__dlpack_device__")());
  const std::int64_t type = integer(nb::int_(nb::object(device[0])));
  nb::object stream = nb::none();
  const bool cuda = type == dlpack::kCuda || type == dlpack::kCudaManaged;
  if (cuda && !module_of(array).starts_with("jax")) stream = nb::int_(-1);  // JAX knows none of −1, and waits itself
  static const nb::handle kVersion = nb::make_tuple(1, 1).release();
  nb::object capsule;
  try {
    capsule = array.attr("__dlpack__")(nb::arg("stream") = stream, nb::arg("max_version") = kVersion);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    capsule = array.attr("__dlpack__")(nb::arg("stream") = stream);  // DLPack before 1.0
  }
  return take_capsule(tensor, std::move(capsule));
}

// {"shape", "typestr", "data": (address, read_only), "strides": bytes or None}
bool take_array_interface(Tensor& tensor, nb::handle array) {
  const nb::object fields = nb::getattr(array, "__array_interface__", nb::none());
  if (!nb::isinstance<nb::dict>(fields)) return false;
  const nb::object dtype = array.attr("dtype"), shape = fields["shape"], strides = fields["strides"], data = fields["data"];
  const nb::str type(dtype);
  const struct {
    const char* name;
    Element element;
  } kTypes[] = {{"float32", Element::kFloat32}, {"float16", Element::kFloat16}, {"bfloat16", Element::kBFloat16},
                {"int32", Element::kInt32},     {"int64", Element::kInt64},     {"uint64", Element::kUInt64}};
  for (const auto& known : kTypes) {
    if (std::string_view(type.c_str()) == known.name) tensor.element = known.element;
  }
  const std::int64_t bytes = integer(dtype.attr("itemsize"));
  require_dims(tensor.name, static_cast<std::int64_t>(nb::len(shape)));
  tensor.ndim = static_cast<int>(nb::len(shape));
  for (int axis = 0; axis < tensor.ndim; ++axis) tensor.shape[axis] = integer(shape[axis]);
  fill_contiguous_strides(tensor);
  for (int axis = 0; !strides.is_none() && tensor.elements() > 0 && axis < tensor.ndim; ++axis) {
    const std::int64_t stride = integer(strides[axis]);
    if (stride % bytes != 0) invalid(fmt::format("{}: a stride of {} bytes is no multiple of {}", tensor.name, stride, bytes));
    tensor.strides[axis] = stride / bytes;
  }
  tensor.data = PyLong_AsVoidPtr(nb::object(data[0]).ptr());
  tensor.read_only = PyObject_IsTrue(nb::object(data[1]).ptr()) == 1;
  tensor.owner = nb::borrow(array);
  return true;
}

// What a framework says of an array that it does not hand out; its first line, since a trace of its own may follow.
[[noreturn]] void reject(const char* name, const nb::python_error& error) {
  const std::string said = nb::str(error.value()).c_str();
  invalid(fmt::format("{}: {}", name, said.substr(0, said.find('\n'))));
}

[[noreturn]] void reject_with_python_error(const char* name) {
  try {
    nb::raise_python_error();
  } catch (const nb::python_error& error) {
    reject(name, error);
  }
}

}  // namespace

std::string device_name(Device device) { return device.cuda ? fmt::format("cuda:{}", device.id) : "cpu"; }

Device parse_device(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {true, 0};
  int id = -1;
  const char* end = name.data() + name.size();
  if (name.starts_with("cuda:") && std::from_chars(name.data() + 5, end, id).ptr == end && id >= 0) return {true, id};
  invalid(fmt::format("device {}: cpu, cuda or cuda:N", name));
}

std::int64_t Tensor::elements() const {
  std::int64_t count = 1;
  for (int axis = 0; axis < ndim; ++axis) count *= shape[axis];
  return count;
}

Tensor tensor_of(nb::handle array, const char* name) {
  Tensor tensor;
  tensor.name = name;
  tensor.array = array;
  const dlpack::ExchangeApi* api = exchange_api(array);
  if (api != nullptr && api->tensor_of_object != nullptr) {
    dlpack::Tensor borrowed{};
    if (api->tensor_of_object(array.ptr(), &borrowed) != 0) reject_with_python_error(name);
    take(tensor, borrowed);
    tensor.owner = nb::borrow(array);
    return tensor;
  }
  try {
    if (take_dlpack(tensor, array)) return tensor;
  } catch (nb::python_error& error) {
    if (!nb::hasattr(array, "__array_interface__")) reject(name, error);
  }
  if (take_array_interface(tensor, array)) return tensor;
  const std::string type = nb::cast<std::string>(nb::str(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()))).attr("__name__")));
  invalid(fmt::format("{} is a {}: an array with __dlpack__ is needed", name, type));
}

void* stream_for(nb::handle array, Device device, std::optional<std::uintptr_t> named) {
  if (named) return reinterpret_cast<void*>(*named);
  void* stream = nullptr;
  const dlpack::ExchangeApi* api = exchange_api(array);
  if (api != nullptr && api->current_stream != nullptr) {
    if (api->current_stream(dlpack::kCuda, device.id, &stream) != 0) nb::raise_python_error();
  } else if (module_of(array).starts_with("torch")) {  // a version before the exchange functions
    const nb::object torch = nb::module_::import_("torch");
    stream = PyLong_AsVoidPtr(nb::object(torch.attr("cuda").attr("current_stream")(device.id).attr("cuda_stream")).ptr());
  }
  return stream;
}

void invalid(const std::string& sentence) { throw Error(Status::kInvalidArgument, sentence); }

std::string shape_text(const Tensor& tensor) { return fmt::format("[{}]", fmt::join(tensor.shape, tensor.shape + tensor.ndim, ", ")); }

std::string dtype_text(nb::handle array) { return attribute_text(array, "dtype", "another dtype"); }

DType float_type(const Tensor& tensor) {
  switch (tensor.element) {
    case Element::kFloat32: return DType::kFloat32;
    case Element::kFloat16: return DType::kFloat16;
    case Element::kBFloat16: return DType::kBFloat16;
    default: invalid(fmt::format("{} of {}: supported are float32, float16 and bfloat16", tensor.name, dtype_text(tensor.array)));
  }
}

void require_element(const Tensor& tensor, Element element, const char* needed) {
  if (tensor.element != element) invalid(fmt::format("{} of {}: {} is needed", tensor.name, dtype_text(tensor.array), needed));
}

void require_shape(const Tensor& tensor, std::initializer_list<std::int64_t> shape, const char* meaning) {
  if (tensor.ndim == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), tensor.shape)) return;
  invalid(fmt::format("{} of shape {}: {} = [{}] is needed", tensor.name, shape_text(tensor), meaning, fmt::join(shape, ", ")));
}

void require_contiguous(const Tensor& tensor) {
  std::int64_t stride = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] > 1 && tensor.strides[axis] != stride) {
      invalid(fmt::format("{}: stride {} of dimension {}: a contiguous array is needed", tensor.name, tensor.strides[axis], axis));
    }
    stride *= tensor.shape[axis];
  }
}

void require_writable(const Tensor& tensor) {
  if (tensor.read_only) invalid(fmt::format("{} is read-only: it is written to", tensor.name));
}

}  // namespace leanattn::python
