// SPDX-License-Identifier: Apache-2.0
// Every rejection of the library and its sentence.
#include "leanattn/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <utility>

#include "leanattn/attention.h"
#include "numeric.h"
#include "problem_view.h"

namespace leanattn {
namespace {

constexpr std::int64_t kMostInt32 = std::numeric_limits<std::int32_t>::max();
// A backend pads the rows of a KV head to whole blocks, of 16 at most, and counts those in int32 too.
constexpr std::int64_t kMostHeadRows = kMostInt32 - 15;
constexpr std::int32_t kMostWorkers = 65536;
constexpr std::int32_t kMostSplits = 1024;

template <class... Args>
[[noreturn]] void reject(Status status, fmt::format_string<Args...> sentence, Args&&... args) {
  throw Error(status, fmt::format(sentence, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> sentence, Args&&... args) {
  reject(Status::kInvalidArgument, sentence, std::forward<Args>(args)...);
}

void at_least(std::string_view name, std::int64_t value, std::int64_t least) {
  if (value < least) invalid("{} {}: at least {} is needed", name, value, least);
}

void in_range(std::string_view name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least || value > most) invalid("{} {}: must be {} to {}", name, value, least, most);
}

// What sentences call the values of an enum, which count from 0.
constexpr const char* kDTypes[] = {"float32", "float16", "bfloat16"};
constexpr const char* kLayouts[] = {"batched", "ragged", "paged"};
constexpr const char* kLseBases[] = {"natural", "two"};
constexpr const char* kBackends[] = {"auto", "cpu", "cuda"};
constexpr const char* kPolicies[] = {"lean", "fa2", "flashdecoding"};
constexpr const char* kHeadOrders[] = {"auto", "along", "beside"};

template <class Enum, std::size_t n>
void known_value(std::string_view name, Enum value, const char* const (&names)[n]) {
  const auto number = static_cast<std::int64_t>(value);
  if (number >= 0 && number < static_cast<std::int64_t>(n)) return;
  std::string known;
  for (std::size_t i = 0; i < n; ++i) known += fmt::format("{}{} ({})", i == 0 ? "" : ", ", i, names[i]);
  invalid("{} {}: known values are {}", name, number, known);
}

// Of a value that known_value let pass.
template <class Enum, std::size_t n>
const char* name_of(Enum value, const char* const (&names)[n]) {
  return names[static_cast<std::size_t>(value)];
}

void finite(std::string_view name, float value) {
  if (!std::isfinite(value)) invalid("{} {}: must be finite", name, value);
}

// Null is checked apart from alignment: many pointers are optional.
void aligned(std::string_view name, const void* pointer, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address % bytes != 0) invalid("{} at {:#x}: must be aligned to {} bytes", name, address, bytes);
}

// why: a sentence's end with its arguments, put together only when it is needed.
template <class... Args>
void not_null(std::string_view name, const void* pointer, fmt::format_string<Args...> why, Args&&... args) {
  if (pointer == nullptr) invalid("{} is null: needed with {}", name, fmt::format(why, std::forward<Args>(args)...));
}

// One index of a tensor: how many values it takes and how many elements lie between two of them.
struct Axis {
  const char* name;
  std::int64_t count;
  std::int64_t stride;
};

// Every address of the tensor fits in int64 bytes.
void addressable(std::string_view tensor, std::initializer_list<Axis> axes, int row_elements, DType dtype) {
  __int128 last = row_elements;
  for (const Axis& axis : axes) {
    if (axis.stride < 0) invalid("{}.{} {}: at least 0 is needed", tensor, axis.name, axis.stride);
    if (axis.count > 1) last += static_cast<__int128>(axis.count - 1) * axis.stride;
    if (last > std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(dtype_bytes(dtype))) {
      invalid("{}.{} {}: with {} of them the tensor spans more than 2^63 - 1 bytes", tensor, axis.name, axis.stride, axis.count);
    }
  }
}

// Rows of O must not overlap: in order of stride, each index steps over all that the smaller ones span. That holds for every view that
// slicing and permuting a contiguous tensor can give.
void rows_apart(std::string_view tensor, std::initializer_list<Axis> axes, int row_elements) {
  Axis sorted[3];
  int n = 0;
  for (const Axis& axis : axes) {
    if (axis.count <= 1) continue;
    int at = n++;
    for (; at > 0 && sorted[at - 1].stride > axis.stride; --at) sorted[at] = sorted[at - 1];
    sorted[at] = axis;
  }
  std::int64_t span = row_elements;
  for (int i = 0; i < n; ++i) {
    if (sorted[i].stride < span) {
      invalid("{}.{} {}: rows of {} would overlap, at least {} is needed", tensor, sorted[i].name, sorted[i].stride, tensor, span);
    }
    span += (sorted[i].count - 1) * sorted[i].stride;
  }
}

void validate_shapes(const Problem& p) {
  at_least("batch", p.batch, 0);
  at_least("q_heads", p.q_heads, 1);
  at_least("kv_heads", p.kv_heads, 1);
  if (p.q_heads % p.kv_heads != 0) invalid("q_heads {}: must be a multiple of kv_heads {}", p.q_heads, p.kv_heads);
  for (const auto& [name, dim] : {std::pair{"head_dim", p.head_dim}, std::pair{"head_dim_v", head_dim_v(p)}}) {
    if (dim < 32 || dim > 256 || dim % 8 != 0) {
      reject(dim < 1 ? Status::kInvalidArgument : Status::kUnsupported, "{} {}: supported are 32 to 256 in steps of 8", name, dim);
    }
  }
  at_least("q_len", p.q_len, 0);
  // Rows of a seq, and rows of the batch as far as they are known here, are counted in int32; check_data counts those of cu_seqlens_q.
  const std::int64_t seq_rows = static_cast<std::int64_t>(p.q_len) * p.q_heads;
  if (seq_rows > kMostInt32) invalid("q_len {} with q_heads {}: a seq has at most {} rows", p.q_len, p.q_heads, kMostInt32);
  if (seq_rows / p.kv_heads > kMostHeadRows) {
    invalid("q_len {} with q_heads {} and kv_heads {}: a KV head has at most {} rows", p.q_len, p.q_heads, p.kv_heads, kMostHeadRows);
  }
  if (p.cu_seqlens_q == nullptr && seq_rows * p.batch > kMostInt32) {
    invalid("batch {} with q_len {} and q_heads {}: at most {} rows", p.batch, p.q_len, p.q_heads, kMostInt32);
  }
  known_value("q_dtype", p.q_dtype, kDTypes);
  known_value("kv_dtype", p.kv_dtype, kDTypes);
  if (p.q_dtype != p.kv_dtype) {
    reject(Status::kUnsupported, "kv_dtype {} with q_dtype {}: supported are equal ones", name_of(p.kv_dtype, kDTypes),
           name_of(p.q_dtype, kDTypes));
  }
}

void validate_kv_shape(const Problem& p) {
  known_value("kv_layout", p.kv_layout, kLayouts);
  if (p.kv_layout == KvLayout::kPaged) {
    at_least("page_size", p.page_size, 1);
    at_least("num_pages", p.num_pages, 0);
    at_least("max_pages", p.max_pages, 0);
    if (block_table_stride(p) < p.max_pages) {
      invalid("block_table_stride {}: at least max_pages {} is needed", p.block_table_stride, p.max_pages);
    }
    if (static_cast<__int128>(p.batch) * block_table_stride(p) > std::numeric_limits<std::int64_t>::max() / 4) {
      invalid("block_table_stride {}: with batch {} the table spans more than 2^63 - 1 bytes", p.block_table_stride, p.batch);
    }
  } else {
    in_range("kv_capacity", p.kv_capacity, 0, kMostInt32);
  }
}

void validate_pointers(const Problem& p) {
  const std::size_t element_bytes = dtype_bytes(p.q_dtype);
  aligned("q", p.q.data, element_bytes);
  aligned("o", p.o.data, element_bytes);
  aligned("k", p.k.data, element_bytes);
  aligned("v", p.v.data, element_bytes);
  aligned("lse", p.lse, 4);
  aligned("cu_seqlens_q", p.cu_seqlens_q, 4);
  aligned("kv_lens", p.kv_lens, 4);
  aligned("cu_seqlens_kv", p.cu_seqlens_kv, 4);
  aligned("block_table", p.block_table, 4);
  aligned("tree_mask", p.tree_mask, 8);
  aligned("alibi_slopes", p.alibi_slopes, 4);
  aligned("sinks", p.sinks, 4);
  if (p.batch == 0) return;
  const bool paged = p.kv_layout == KvLayout::kPaged;
  if (p.kv_layout == KvLayout::kRagged) {
    not_null("cu_seqlens_kv", p.cu_seqlens_kv, "kv_layout ragged and batch {}", p.batch);
  } else {
    not_null("kv_lens", p.kv_lens, "kv_layout {} and batch {}", name_of(p.kv_layout, kLayouts), p.batch);
  }
  if (paged && p.max_pages > 0) not_null("block_table", p.block_table, "kv_layout paged and max_pages {}", p.max_pages);
  if (p.q_len == 0) return;
  not_null("q", p.q.data, "batch {} and q_len {}", p.batch, p.q_len);
  not_null("o", p.o.data, "batch {} and q_len {}", p.batch, p.q_len);
  // A cache without room, or of a ragged batch whose lengths may all be 0, has no address; check_data looks at the lengths.
  const bool roomless = max_kv_len(p) == 0 || (paged && p.num_pages == 0) || p.kv_layout == KvLayout::kRagged;
  if (!roomless) {
    not_null("k", p.k.data, "room for {} tokens a seq", max_kv_len(p));
    not_null("v", p.v.data, "room for {} tokens a seq", max_kv_len(p));
  }
}

void validate_o_rows(const Problem& p, std::int64_t seqs, std::int64_t tokens) {
  if (seqs == 0 || tokens == 0) return;
  rows_apart(
      "o", {{"seq_stride", seqs, p.o.seq_stride}, {"token_stride", tokens, p.o.token_stride}, {"head_stride", p.q_heads, p.o.head_stride}},
      head_dim_v(p));
}

void validate_strides(const Problem& p) {
  const int dv = head_dim_v(p);
  const bool packed = p.cu_seqlens_q != nullptr;
  // Packed: the number of tokens stands in cu_seqlens_q, which is not read here.
  const std::int64_t seqs = packed ? 1 : p.batch;
  const std::int64_t most_tokens = packed ? std::min(static_cast<std::int64_t>(p.batch) * p.q_len, kMostInt32) : p.q_len;
  addressable("q",
              {{"seq_stride", seqs, packed ? 0 : p.q.seq_stride},
               {"token_stride", most_tokens, p.q.token_stride},
               {"head_stride", p.q_heads, p.q.head_stride}},
              p.head_dim, p.q_dtype);
  addressable("o",
              {{"seq_stride", seqs, packed ? 0 : p.o.seq_stride},
               {"token_stride", most_tokens, p.o.token_stride},
               {"head_stride", p.q_heads, p.o.head_stride}},
              dv, p.q_dtype);
  // Packed rows are looked at in check_data, where their number is known.
  if (!packed) validate_o_rows(p, p.batch, p.q_len);
  std::int64_t outer = p.batch, tokens = p.kv_capacity;
  if (p.kv_layout == KvLayout::kRagged) outer = 1, tokens = kMostInt32;
  if (p.kv_layout == KvLayout::kPaged) outer = p.num_pages, tokens = p.page_size;
  const bool ragged = p.kv_layout == KvLayout::kRagged;
  addressable("k",
              {{"outer_stride", outer, ragged ? 0 : p.k.outer_stride},
               {"token_stride", tokens, p.k.token_stride},
               {"head_stride", p.kv_heads, p.k.head_stride}},
              p.head_dim, p.kv_dtype);
  addressable("v",
              {{"outer_stride", outer, ragged ? 0 : p.v.outer_stride},
               {"token_stride", tokens, p.v.token_stride},
               {"head_stride", p.kv_heads, p.v.head_stride}},
              dv, p.kv_dtype);
}

void validate_logits(const Problem& p) {
  at_least("window_left", p.window_left, -1);
  finite("scale", p.scale);
  finite("softcap", p.softcap);
  if (p.softcap < 0.0f) invalid("softcap {}: at least 0 is needed", p.softcap);
  known_value("lse_base", p.lse_base, kLseBases);
}

void validate_options(const Options& options) {
  known_value("backend", options.backend, kBackends);
  known_value("policy", options.policy, kPolicies);
  known_value("head_order", options.head_order, kHeadOrders);
  in_range("splits", options.splits, 0, kMostSplits);
  if (options.splits > 0 && options.policy != Policy::kFlashDecoding) {
    invalid("splits {} with policy {}: only policy flashdecoding takes splits", options.splits, name_of(options.policy, kPolicies));
  }
  in_range("workers", options.workers, 0, kMostWorkers);
  if (options.executor.run != nullptr && options.workers == 0) invalid("workers 0 with an executor: at least 1 is needed");
}

// What the kernels of variants.h do not do, and what only a device checks.
void validate_cuda(const Problem& p, const Options& options) {
  const auto unsupported = [](std::string_view what, std::string_view supported) {
    reject(Status::kUnsupported, "{} with backend cuda: supported {}", what, supported);
  };
  if (p.q_dtype == DType::kFloat32) unsupported("dtype float32", "are float16 and bfloat16");
  if (options.data_status != nullptr && !options.check_data) {
    invalid("data_status at {:#x} without check_data: nothing would be written there",
            reinterpret_cast<std::uintptr_t>(options.data_status));
  }
  aligned("data_status", options.data_status, sizeof(std::uint64_t));
}

// True when every id is in 0 … pages − 1. Sign bits say so without a branch: id is negative, or pages − 1 − id is.
bool pages_in_range(const std::int32_t* ids, std::int64_t count, std::int32_t pages) {
  const std::uint32_t last = static_cast<std::uint32_t>(pages) - 1;
  std::uint32_t signs = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t id = static_cast<std::uint32_t>(ids[i]);
    signs |= id | (last - id);
  }
  return count == 0 || (pages > 0 && signs >> 31 == 0);
}

[[noreturn]] void bad_data(const std::string& sentence) { throw Error(Status::kInvalidData, sentence); }

void check_offsets(const char* name, const std::int32_t* offsets, int batch) {
  if (offsets[0] != 0) bad_data(fmt::format("{}[0] is {}: must be 0", name, offsets[0]));
  for (int seq = 0; seq < batch; ++seq) {
    if (offsets[seq + 1] < offsets[seq]) {
      bad_data(fmt::format("seq {}: {} falls from {} to {}", seq, name, offsets[seq], offsets[seq + 1]));
    }
  }
}

void check_q_lens(const Problem& p) {
  check_offsets("cu_seqlens_q", p.cu_seqlens_q, p.batch);
  for (int seq = 0; seq < p.batch; ++seq) {
    if (seq_q_len(p, seq) > p.q_len) {
      bad_data(fmt::format("seq {}: {} tokens in cu_seqlens_q are more than q_len {}", seq, seq_q_len(p, seq), p.q_len));
    }
  }
  if (total_q(p) * p.q_heads > kMostInt32) {
    bad_data(fmt::format("cu_seqlens_q ends at {}: with q_heads {} at most {} rows", total_q(p), p.q_heads, kMostInt32));
  }
  validate_o_rows(p, 1, total_q(p));
}

void check_pages(const Problem& p, int seq) {
  const std::int64_t first = seq_first_token(p, seq) / p.page_size;
  const std::int64_t end = (static_cast<std::int64_t>(seq_kv_len(p, seq)) + p.page_size - 1) / p.page_size;
  const std::int32_t* ids = p.block_table + seq * block_table_stride(p);
  if (pages_in_range(ids + first, end - first, p.num_pages)) return;
  for (std::int64_t slot = first; slot < end; ++slot) {
    if (ids[slot] >= 0 && ids[slot] < p.num_pages) continue;
    bad_data(fmt::format("seq {} slot {}: page {} is outside num_pages {}", seq, slot, ids[slot], p.num_pages));
  }
}

}  // namespace

void validate(const Problem& problem, const Options& options) {
  validate_shapes(problem);
  validate_kv_shape(problem);
  validate_pointers(problem);
  validate_strides(problem);
  validate_logits(problem);
  validate_options(options);
  if (options.backend == Backend::kCuda) validate_cuda(problem, options);
}

void check_data(const Problem& problem) {
  const Problem& p = problem;
  if (p.batch == 0) return;
  if (p.cu_seqlens_q) check_q_lens(p);
  const bool ragged = p.kv_layout == KvLayout::kRagged;
  if (ragged) check_offsets("cu_seqlens_kv", p.cu_seqlens_kv, p.batch);
  for (int seq = 0; seq < p.batch; ++seq) {
    std::int64_t room = max_kv_len(p);
    if (ragged) room = std::min<std::int64_t>(room, p.cu_seqlens_kv[seq + 1] - p.cu_seqlens_kv[seq]);
    const std::int32_t len = seq_kv_len(p, seq);
    if (len < 0 || len > room) {
      const char* limit = p.kv_layout == KvLayout::kPaged ? "max_pages·page_size" : ragged ? "the seq's room" : "kv_capacity";
      bad_data(fmt::format("seq {}: kv_len {} is outside 0 to {}, {}", seq, len, room, limit));
    }
    if (len == 0 || seq_q_len(p, seq) == 0) continue;  // addresses no token
    if (ragged && (p.k.data == nullptr || p.v.data == nullptr)) {
      bad_data(fmt::format("seq {}: kv_len {} with {} null", seq, len, p.k.data ? "v" : "k"));
    }
    if (p.kv_layout == KvLayout::kPaged) check_pages(p, seq);
  }
}

void validate_merge(const MergeProblem& problem) {
  const MergeProblem& p = problem;
  at_least("shards", p.shards, 1);
  at_least("rows", p.rows, 0);
  at_least("head_dim_v", p.head_dim_v, 1);
  known_value("dtype", p.dtype, kDTypes);
  known_value("lse_base", p.lse_base, kLseBases);
  const std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4;
  if (p.rows > most / p.shards / p.head_dim_v) {
    invalid("rows {} with shards {} and head_dim_v {}: more than 2^63 - 1 bytes", p.rows, p.shards, p.head_dim_v);
  }
  aligned("shard_o", p.shard_o, dtype_bytes(p.dtype));
  aligned("o", p.o, dtype_bytes(p.dtype));
  aligned("shard_lse", p.shard_lse, 4);
  aligned("lse", p.lse, 4);
  if (p.rows == 0) return;
  not_null("shard_o", p.shard_o, "rows {}", p.rows);
  not_null("shard_lse", p.shard_lse, "rows {}", p.rows);
  not_null("o", p.o, "rows {}", p.rows);
}

void check_workspace(const void* workspace, std::size_t workspace_bytes, std::size_t needed_bytes) {
  if (workspace_bytes < needed_bytes) {
    reject(Status::kWorkspaceTooSmall, "workspace of {} bytes: {} are needed", workspace_bytes, needed_bytes);
  }
  if (workspace == nullptr && needed_bytes > 0) invalid("workspace is null: {} bytes are needed", needed_bytes);
}

void reject_workspace(double bytes) { invalid("workspace of {:.3g} bytes: more than 2^62", bytes); }

void require_cuda(bool available, std::string (*why_absent)()) {
  if (!available) reject(Status::kUnsupported, "backend cuda: {}", why_absent());
}

void check_device_workspace(const void* workspace) { aligned("workspace", workspace, 16); }

void check_device_memory(const char* name, const void* pointer, bool on_device) {
  if (!on_device) invalid("{} at {:#x}: backend cuda needs memory of the device", name, reinterpret_cast<std::uintptr_t>(pointer));
}

std::string data_fault_sentence(std::uint64_t data_status) {
  const DataFault fault = data_fault_of(data_status);
  switch (fault.kind) {
    case DataFaultKind::kNone: return {};
    case DataFaultKind::kQOffset: return fmt::format("seq {}: cu_seqlens_q falls or gives it more than q_len tokens", fault.seq);
    case DataFaultKind::kKvOffset: return fmt::format("seq {}: cu_seqlens_kv falls or gives it more than kv_capacity tokens", fault.seq);
    case DataFaultKind::kKvLen: return fmt::format("seq {}: kv_len is outside 0 … the seq's room", fault.seq);
    case DataFaultKind::kPage: return fmt::format("seq {} slot {}: page is outside num_pages", fault.seq, fault.slot);
  }
  return fmt::format("data_status {:#x} is no word of this version", data_status);
}

void reject_cuda_path(const char* cuda_path, const std::string& known) {
  reject(Status::kUnsupported, "cuda_path {}: this device has {}", cuda_path, known);
}

void reject_cuda_answer(const char* what, const char* answer) { reject(Status::kInternal, "{}: CUDA says \"{}\"", what, answer); }

void reject_cpu_isa(const char* cpu_isa, const char* known) {
  reject(Status::kUnsupported, "cpu_isa {}: this machine has {}", cpu_isa, known);
}

void check_argument(const char* name, const void* pointer) {
  if (pointer == nullptr) invalid("{} is null", name);
}

void check_struct_size(const char* name, std::size_t struct_size, std::size_t least) {
  constexpr std::size_t kMostBytes = 4096;  // a larger one is an uninitialised struct
  if (struct_size < least || struct_size > kMostBytes) {
    invalid("{}.struct_size {}: must be {} to {}", name, struct_size, least, kMostBytes);
  }
}

void reject_unknown_member(const char* name, std::size_t offset, std::size_t known_size) {
  invalid("{} sets a member at byte {}: this version knows {} bytes", name, offset, known_size);
}

}  // namespace leanattn
