// SPDX-License-Identifier: Apache-2.0
#include "call.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "device.h"

namespace leanattn::python {
namespace {

constexpr std::int64_t kMostInt32 = std::numeric_limits<std::int32_t>::max();

std::int32_t int32_of(const Tensor& tensor, int axis) {
  if (tensor.shape[axis] > kMostInt32) invalid(fmt::format("{} of shape {}: at most {}", tensor.name, shape_text(tensor), kMostInt32));
  return static_cast<std::int32_t>(tensor.shape[axis]);
}

void require_unit_stride(const Tensor& tensor) {
  const int last = tensor.ndim - 1;
  if (tensor.shape[last] > 1 && tensor.strides[last] != 1) {
    invalid(fmt::format("{}: stride {} of the last dimension: 1 is needed", tensor.name, tensor.strides[last]));
  }
}

void require_int32(const Tensor& tensor) { require_element(tensor, Element::kInt32, "int32"); }

void require_float32(const Tensor& tensor) { require_element(tensor, Element::kFloat32, "float32"); }

// like: another argument, of a type that was looked at before.
void require_type_of(const Tensor& tensor, DType type, const char* like, nb::handle like_array) {
  if (float_type(tensor) != type) {
    invalid(fmt::format("{} of {}: {} is needed, as {} is", tensor.name, dtype_text(tensor.array), dtype_text(like_array), like));
  }
}

template <class Enum>
Enum parse(const char* what, const std::string& name, std::initializer_list<std::pair<const char*, Enum>> known) {
  std::string names;
  for (const auto& [text, value] : known) {
    if (name == text) return value;
    names += (names.empty() ? "" : ", ") + std::string(text);
  }
  invalid(fmt::format("{} {}: known are {}", what, name, names));
}

}  // namespace

Policy parse_policy(const std::string& name) {
  return parse<Policy>("policy", name, {{"lean", Policy::kLean}, {"fa2", Policy::kFa2}, {"flashdecoding", Policy::kFlashDecoding}});
}
HeadOrder parse_head_order(const std::string& name) {
  return parse<HeadOrder>("head_order", name, {{"auto", HeadOrder::kAuto}, {"along", HeadOrder::kAlong}, {"beside", HeadOrder::kBeside}});
}

OptionsObject::OptionsObject(const std::string& policy_text, int splits, const std::string& head_order_text, bool batch_invariant,
                             int workers, bool programmatic_launch, std::optional<std::string> cpu_isa,
                             std::optional<std::string> cuda_path, bool check_data, std::uintptr_t data_status)
    : policy(parse_policy(policy_text)),
      splits(splits),
      head_order(parse_head_order(head_order_text)),
      batch_invariant(batch_invariant),
      workers(workers),
      programmatic_launch(programmatic_launch),
      cpu_isa(std::move(cpu_isa)),
      cuda_path(std::move(cuda_path)),
      check_data(check_data),
      data_status(data_status) {}

Options OptionsObject::options() const {
  Options options;
  options.policy = policy;
  options.splits = splits;
  options.head_order = head_order;
  options.batch_invariant = batch_invariant;
  options.workers = workers;
  options.programmatic_launch = programmatic_launch;
  options.cpu_isa = cpu_isa ? cpu_isa->c_str() : nullptr;
  options.cuda_path = cuda_path ? cuda_path->c_str() : nullptr;
  options.check_data = check_data;
  options.data_status = reinterpret_cast<std::uint64_t*>(data_status);
  return options;
}

Call::Call(const Arguments& arguments, const OptionsObject* options) {
  if (options != nullptr) {
    names_ = *options;
    options_ = names_->options();
  }
  owners_.reserve(12);
  problem_.causal = arguments.causal;
  problem_.window_left = arguments.window_left;
  problem_.scale = arguments.scale;
  problem_.softcap = arguments.softcap;
  problem_.lse_base = arguments.lse_base;
  set_queries(arguments);
  options_.backend = device_.cuda ? Backend::kCuda : Backend::kCpu;
  set_keys(arguments);
  set_lengths(arguments);
  problem_.alibi_slopes = head_values(arguments.alibi_slopes, "alibi_slopes");
  problem_.sinks = head_values(arguments.sinks, "sinks");
  if (auto mask = take_optional(arguments.tree_mask, "tree_mask")) {
    if (mask->element != Element::kInt64) require_element(*mask, Element::kUInt64, "uint64 or int64");
    require_shape(*mask, {total_q_, (static_cast<std::int64_t>(problem_.q_len) + 63) / 64}, "[total_q, ceil(q_len / 64)]");
    require_contiguous(*mask);
    problem_.tree_mask = static_cast<const std::uint64_t*>(mask->data);
  }
  set_output(arguments);
}

// An array on the call's device; q, the first, says which that is.
Tensor Call::take(nb::handle array, const char* name) {
  Tensor tensor = tensor_of(array, name);
  if (owners_.empty()) {
    device_ = tensor.device;
  } else if (!(tensor.device == device_)) {
    invalid(fmt::format("{} lies on {}, q on {}", name, device_name(tensor.device), device_name(device_)));
  }
  owners_.push_back(tensor.owner);
  return tensor;
}

std::optional<Tensor> Call::take_optional(nb::handle array, const char* name) {
  if (array.is_none()) return std::nullopt;
  return take(array, name);
}

const std::int32_t* Call::lens(nb::handle array, const char* name, std::int64_t count, const char* meaning) {
  const Tensor tensor = take(array, name);
  require_int32(tensor);
  require_shape(tensor, {count}, meaning);
  require_contiguous(tensor);
  return static_cast<const std::int32_t*>(tensor.data);
}

const float* Call::head_values(nb::handle array, const char* name) {
  const auto tensor = take_optional(array, name);
  if (!tensor) return nullptr;
  require_float32(*tensor);
  require_shape(*tensor, {problem_.q_heads}, "[q_heads]");
  require_contiguous(*tensor);
  return static_cast<const float*>(tensor->data);
}

// q: [batch, q_heads, d], [batch, q_len, q_heads, d], or [total_q, q_heads, d] with cu_seqlens_q.
void Call::set_queries(const Arguments& arguments) {
  const Tensor q = take(arguments.q, "q");
  q_ = nb::borrow(arguments.q);
  const bool packed = !arguments.cu_seqlens_q.is_none();
  if (q.ndim != 3 && (packed || q.ndim != 4)) {
    invalid(fmt::format("q of shape {}: {} is needed", shape_text(q),
                        packed ? "[total_q, q_heads, head_dim]" : "[batch, q_heads, head_dim] or [batch, q_len, q_heads, head_dim]"));
  }
  require_unit_stride(q);
  Problem& p = problem_;
  p.q_dtype = float_type(q);
  p.q_heads = int32_of(q, q.ndim - 2);
  p.head_dim = int32_of(q, q.ndim - 1);
  p.q = {q.data, q.strides[0], q.ndim == 4 ? q.strides[1] : q.strides[0], q.strides[q.ndim - 2]};
  if (!packed) {
    p.batch = int32_of(q, 0);
    p.q_len = q.ndim == 4 ? int32_of(q, 1) : 1;
    if (arguments.q_len != 0 && arguments.q_len != p.q_len) {
      invalid(fmt::format("q_len {} with q of shape {}: it is for cu_seqlens_q", arguments.q_len, shape_text(q)));
    }
    total_q_ = static_cast<std::int64_t>(p.batch) * p.q_len;
    return;
  }
  total_q_ = int32_of(q, 0);
  const Tensor ends = take(arguments.cu_seqlens_q, "cu_seqlens_q");
  require_int32(ends);
  if (ends.ndim != 1 || ends.shape[0] < 1) invalid(fmt::format("cu_seqlens_q of shape {}: [batch + 1] is needed", shape_text(ends)));
  require_contiguous(ends);
  p.batch = int32_of(ends, 0) - 1;
  p.cu_seqlens_q = static_cast<const std::int32_t*>(ends.data);
  p.q_len = arguments.q_len;
  if (p.q_len == 0 && device_.cuda) p.q_len = static_cast<std::int32_t>(total_q_);
  if (p.q_len == 0) {
    for (int seq = 0; seq < p.batch; ++seq) p.q_len = std::max(p.q_len, p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq]);
  }
}

// k, v: [batch, n, kv_heads, d], [total_kv, kv_heads, d] with cu_seqlens_kv, [pages, page_size, kv_heads, d] with block_table; heads before
// tokens with heads_first.
void Call::set_keys(const Arguments& arguments) {
  const Tensor k = take(arguments.k, "k"), v = take(arguments.v, "v");
  const bool ragged = !arguments.cu_seqlens_kv.is_none(), paged = !arguments.block_table.is_none();
  if (ragged && paged) invalid("block_table with cu_seqlens_kv: K and V are paged or ragged, not both");
  const int ndim = ragged ? 3 : 4;
  for (const Tensor* tensor : {&k, &v}) {
    if (tensor->ndim != ndim) {
      const char* tokens = arguments.heads_first ? "kv_heads, page_size" : "page_size, kv_heads";
      const char* batched = arguments.heads_first ? "kv_heads, n" : "n, kv_heads";
      invalid(fmt::format("{} of shape {}: [{}{}, head_dim] is needed", tensor->name, shape_text(*tensor),
                          ragged  ? ""
                          : paged ? "num_pages, "
                                  : "batch, ",
                          ragged  ? (arguments.heads_first ? "kv_heads, total_kv" : "total_kv, kv_heads")
                          : paged ? tokens
                                  : batched));
    }
    require_unit_stride(*tensor);
  }
  const int tokens = ndim - 3 + (arguments.heads_first ? 1 : 0), heads = ndim - 3 + (arguments.heads_first ? 0 : 1);
  Problem& p = problem_;
  p.kv_dtype = p.q_dtype;
  require_type_of(k, p.q_dtype, "q", arguments.q);
  require_type_of(v, p.q_dtype, "q", arguments.q);
  p.kv_heads = int32_of(k, heads);
  if (k.shape[ndim - 1] != p.head_dim) {
    invalid(fmt::format("k of shape {}: head_dim {} of q is needed", shape_text(k), p.head_dim));
  }
  p.head_dim_v = int32_of(v, ndim - 1);
  for (int axis = 0; axis < ndim - 1; ++axis) {
    if (k.shape[axis] != v.shape[axis]) {
      invalid(fmt::format("v of shape {}: all but its last dimension as in k, {}", shape_text(v), shape_text(k)));
    }
  }
  p.k = {k.data, ragged ? 0 : k.strides[0], k.strides[tokens], k.strides[heads]};
  p.v = {v.data, ragged ? 0 : v.strides[0], v.strides[tokens], v.strides[heads]};
  if (paged) {
    p.kv_layout = KvLayout::kPaged;
    p.num_pages = int32_of(k, 0);
    p.page_size = int32_of(k, tokens);
    const Tensor table = take(arguments.block_table, "block_table");
    require_int32(table);
    if (table.ndim != 2 || table.shape[0] != p.batch) {
      invalid(fmt::format("block_table of shape {}: [batch, max_pages] with batch {} is needed", shape_text(table), p.batch));
    }
    require_unit_stride(table);
    p.max_pages = int32_of(table, 1);
    p.block_table = static_cast<const std::int32_t*>(table.data);
    p.block_table_stride = p.batch > 1 ? table.strides[0] : 0;
    if (p.batch > 1 && p.max_pages > 0 && table.strides[0] < p.max_pages) invalid("block_table: its rows overlap");
  } else if (ragged) {
    p.kv_layout = KvLayout::kRagged;
    total_kv_ = k.shape[tokens];
    p.cu_seqlens_kv = lens(arguments.cu_seqlens_kv, "cu_seqlens_kv", std::int64_t{p.batch} + 1, "[batch + 1]");
  } else {
    if (k.shape[0] != p.batch) invalid(fmt::format("k of shape {}: batch {} of q is needed", shape_text(k), p.batch));
    p.kv_capacity = int32_of(k, tokens);
  }
}

void Call::set_lengths(const Arguments& arguments) {
  Problem& p = problem_;
  if (!arguments.kv_lens.is_none()) {
    p.kv_lens = lens(arguments.kv_lens, "kv_lens", p.batch, "[batch]");
  } else if (p.kv_layout == KvLayout::kBatched && !device_.cuda) {
    full_lens_.assign(static_cast<std::size_t>(p.batch), static_cast<std::int32_t>(p.kv_capacity));
    p.kv_lens = full_lens_.data();
  }
}

// o: q's shape with head_dim_v; lse: q's shape without its last dimension, float32.
void Call::set_output(const Arguments& arguments) {
  Problem& p = problem_;
  if (arguments.o.is_none()) {
    const std::int64_t row = std::int64_t{p.q_heads} * p.head_dim_v;
    p.o = {const_cast<void*>(p.q.data), row * p.q_len, row, p.head_dim_v};
    return;
  }
  const Tensor o = take(arguments.o, "out");
  require_type_of(o, p.q_dtype, "q", arguments.q);
  const bool packed = p.cu_seqlens_q != nullptr;
  if (o.ndim == 4 && !packed) {
    require_shape(o, {p.batch, p.q_len, p.q_heads, p.head_dim_v}, "[batch, q_len, q_heads, head_dim_v]");
  } else if (packed) {
    require_shape(o, {total_q_, p.q_heads, p.head_dim_v}, "[total_q, q_heads, head_dim_v]");
  } else if (p.q_len == 1) {
    require_shape(o, {p.batch, p.q_heads, p.head_dim_v}, "[batch, q_heads, head_dim_v]");
  } else {
    require_shape(o, {p.batch, p.q_len, p.q_heads, p.head_dim_v}, "[batch, q_len, q_heads, head_dim_v]");
  }
  require_unit_stride(o);
  require_writable(o);
  p.o = {o.data, o.strides[0], o.ndim == 4 ? o.strides[1] : o.strides[0], o.strides[o.ndim - 2]};
  if (auto lse = take_optional(arguments.lse, "lse")) {
    require_float32(*lse);
    if (lse->ndim == 3 && !packed) {
      require_shape(*lse, {p.batch, p.q_len, p.q_heads}, "[batch, q_len, q_heads]");
    } else if (packed || p.q_len == 1) {
      require_shape(*lse, {total_q_, p.q_heads}, packed ? "[total_q, q_heads]" : "[batch, q_heads]");
    } else {
      require_shape(*lse, {p.batch, p.q_len, p.q_heads}, "[batch, q_len, q_heads]");
    }
    require_contiguous(*lse);
    require_writable(*lse);
    p.lse = static_cast<float*>(lse->data);
  }
}

// The library knows where the sequences end, the arrays how far they reach.
void Call::check_ends() const {
  const Problem& p = problem_;
  if (device_.cuda || p.batch == 0) return;
  if (p.cu_seqlens_q != nullptr && p.cu_seqlens_q[p.batch] > total_q_) {
    throw Error(Status::kInvalidData, fmt::format("cu_seqlens_q ends at {}: q has {} rows", p.cu_seqlens_q[p.batch], total_q_));
  }
  if (p.cu_seqlens_kv != nullptr && p.cu_seqlens_kv[p.batch] > total_kv_) {
    throw Error(Status::kInvalidData, fmt::format("cu_seqlens_kv ends at {}: k has {} tokens", p.cu_seqlens_kv[p.batch], total_kv_));
  }
}

std::size_t Call::bytes() const {
  const DeviceGuard guard(device_.cuda ? device_.id : -1);
  return workspace_bytes(problem_, options_);
}

void Call::run(Workspace* workspace, std::optional<std::uintptr_t> stream) {
  Options options = options_;
  if (device_.cuda) options.stream = stream_for(q_, device_, stream);
  if (workspace != nullptr && !(workspace->device() == device_)) {
    invalid(fmt::format("workspace lies on {}, q on {}", device_name(workspace->device()), device_name(device_)));
  }
  Workspace& used = workspace != nullptr ? *workspace : workspace_of(device_, options.stream);
  const nb::gil_scoped_release released;
  check_ends();
  const DeviceGuard guard(device_.cuda ? device_.id : -1);
  const std::size_t bytes = workspace_bytes(problem_, options);
  const std::lock_guard<std::mutex> lock(used.mutex());
  decode(problem_, options, used.reserve(bytes));
}

}  // namespace leanattn::python
