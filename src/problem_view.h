// SPDX-License-Identifier: Apache-2.0
// What a validated Problem says, read in one place: derived shapes, the rows and tokens of a seq, and where a row lies.
// Functions that take a seq read the length arrays (host memory); the others read the struct alone.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "leanattn/attention.h"
#include "leanattn/problem.h"

namespace leanattn {

// --- Shapes ---

inline int group(const Problem& problem) { return problem.q_heads / problem.kv_heads; }
inline int head_dim_v(const Problem& problem) { return problem.head_dim_v == 0 ? problem.head_dim : problem.head_dim_v; }
inline float scale(const Problem& problem) {
  return problem.scale == 0.0f ? 1.0f / std::sqrt(static_cast<float>(problem.head_dim)) : problem.scale;
}

// A bound on the kv_len of any seq, known without reading a length: the room of a seq. Ragged without kv_capacity: 2^31 − 1.
inline std::int64_t max_kv_len(const Problem& problem) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::int64_t room = problem.kv_capacity;
  if (problem.kv_layout == KvLayout::kPaged) room = static_cast<std::int64_t>(problem.max_pages) * problem.page_size;
  if (problem.kv_layout == KvLayout::kRagged && room == 0) room = kMost;
  return room < kMost ? room : kMost;
}

// Words of 64 bits in one row of tree_mask.
inline std::int64_t tree_mask_words(const Problem& problem) { return (static_cast<std::int64_t>(problem.q_len) + 63) / 64; }

inline std::int64_t block_table_stride(const Problem& problem) {
  return problem.block_table_stride == 0 ? problem.max_pages : problem.block_table_stride;
}

// --- Sequences ---

// Tokens of Q and O over all seqs.
inline std::int64_t total_q(const Problem& problem) {
  if (problem.batch == 0) return 0;
  return problem.cu_seqlens_q ? problem.cu_seqlens_q[problem.batch] : static_cast<std::int64_t>(problem.batch) * problem.q_len;
}

// The seq's first token in the order of LSE and tree_mask rows.
inline std::int64_t seq_q_begin(const Problem& problem, int seq) {
  return problem.cu_seqlens_q ? problem.cu_seqlens_q[seq] : static_cast<std::int64_t>(seq) * problem.q_len;
}

inline int seq_q_len(const Problem& problem, int seq) {
  return problem.cu_seqlens_q ? problem.cu_seqlens_q[seq + 1] - problem.cu_seqlens_q[seq] : problem.q_len;
}

inline int seq_kv_len(const Problem& problem, int seq) {
  return problem.kv_lens ? problem.kv_lens[seq] : problem.cu_seqlens_kv[seq + 1] - problem.cu_seqlens_kv[seq];
}

// First token that any row of the seq sees: the left end of the window of query token 0.
inline int seq_first_token(const Problem& problem, int seq) {
  if (problem.window_left < 0) return 0;
  const std::int64_t first = static_cast<std::int64_t>(seq_kv_len(problem, seq)) - seq_q_len(problem, seq) - problem.window_left;
  return first > 0 ? static_cast<int>(first) : 0;
}

// --- The line ---

// What the problem says of its line; tiles, policy and workers are the backend's.
inline Line problem_line(const Problem& problem) {
  Line line;
  line.num_seqs = problem.batch;
  line.kv_lens = problem.kv_lens;
  if (problem.kv_layout == KvLayout::kRagged) line.cu_seqlens_kv = problem.cu_seqlens_kv;  // others may leave anything in it
  line.cu_seqlens_q = problem.cu_seqlens_q;
  line.q_len = problem.q_len;
  line.kv_heads = problem.kv_heads;
  line.group = group(problem);
  line.window_left = problem.window_left;
  return line;
}

// --- Addresses, in elements ---

// Row (seq, token, head) of Q or O.
template <class View>
std::int64_t q_row_offset(const Problem& problem, const View& view, int seq, std::int64_t token, int head) {
  const std::int64_t first = problem.cu_seqlens_q ? problem.cu_seqlens_q[seq] * view.token_stride : seq * view.seq_stride;
  return first + token * view.token_stride + head * view.head_stride;
}

// Row (seq, token, kv_head) of K or V. Paged: reads the block table.
inline std::int64_t kv_row_offset(const Problem& problem, const KvView& view, int seq, std::int64_t token, int kv_head) {
  std::int64_t offset = kv_head * view.head_stride;
  switch (problem.kv_layout) {
    case KvLayout::kBatched: offset += seq * view.outer_stride + token * view.token_stride; break;
    case KvLayout::kRagged: offset += (problem.cu_seqlens_kv[seq] + token) * view.token_stride; break;
    case KvLayout::kPaged: {
      const std::int32_t page = problem.block_table[seq * block_table_stride(problem) + token / problem.page_size];
      offset += page * view.outer_stride + token % problem.page_size * view.token_stride;
      break;
    }
  }
  return offset;
}

// --- Rejections beyond validate and check_data; their sentences stand in problem.cpp too ---

// kInvalidArgument for a malformed merge.
void validate_merge(const MergeProblem& problem);
// kWorkspaceTooSmall when there is less than is needed, kInvalidArgument for a null workspace that is needed.
void check_workspace(const void* workspace, std::size_t workspace_bytes, std::size_t needed_bytes);
// kUnsupported, with what why_absent says, unless there is a device.
void require_cuda(bool available, std::string (*why_absent)());
// kInvalidArgument for a device workspace that is not aligned to 16 bytes.
void check_device_workspace(const void* workspace);
// kInvalidArgument unless the pointer is to device memory, as the backend found out.
void check_device_memory(const char* name, const void* pointer, bool on_device);
// kUnsupported, always: cuda_path is none of `known`.
[[noreturn]] void reject_cuda_path(const char* cuda_path, const std::string& known);
// kInternal, always: what CUDA answered to `what`.
[[noreturn]] void reject_cuda_answer(const char* what, const char* answer);
// kUnsupported, always: cpu_isa is none of `known`, such as "AVX3, AVX2".
[[noreturn]] void reject_cpu_isa(const char* cpu_isa, const char* known);
// kInvalidArgument, always: more bytes than can be counted.
[[noreturn]] void reject_workspace(double bytes);

// Of the C ABI: a null argument; a struct_size below the least of any version, or absurd; a byte that is not 0 in a member that a newer
// header added. kInvalidArgument.
void check_argument(const char* name, const void* pointer);
void check_struct_size(const char* name, std::size_t struct_size, std::size_t least);
[[noreturn]] void reject_unknown_member(const char* name, std::size_t offset, std::size_t known_size);

}  // namespace leanattn
