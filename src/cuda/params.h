// SPDX-License-Identifier: Apache-2.0
// What a launch passes to the kernel: one POD by value. Strides count elements.
#pragma once

#include <cstdint>

#include "leanattn/schedule.h"

namespace leanattn::cuda {

// Rows of Q or O: (seq, token, q_head) at seq·seq_stride + token·token_stride + q_head·head_stride, with cu_seqlens_q at
// (cu_seqlens_q[seq] + token)·token_stride + q_head·head_stride.
struct RowView {
  std::uint16_t* data = nullptr;  // Q: only read
  std::int64_t seq_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  int access_bytes = 16;  // the widest access that every row start is aligned to: 16, 8, 4 or 2
};

struct KvRows {
  const std::uint16_t* data = nullptr;
  std::int64_t outer_stride = 0;  // of a seq, or of a page
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  int access_bytes = 16;
};

// x ÷ a divisor that a launch fixes is x·factor >> shift for 0 ≤ x < 2^31 (Granlund & Montgomery, 1994).
struct Quotient {
  std::uint32_t factor = 0;
  int shift = 0;

  LEANATTN_HOST_DEVICE int of(int x) const {
    return static_cast<int>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(x)) * factor >> shift);
  }
};

struct Params {
  Line line;  // the schedule; its pointers are device pointers and tile_tokens is the kernel's

  bool general = false;  // a row of Q, K or V is aligned to less than 16 bytes, or a stride of K or V has more than 31 bits in bytes
  RowView q;             // [total_q, q_heads, head_dim]
  RowView o;             // [total_q, q_heads, head_dim_v]
  KvRows k;              // see problem.h, KvLayout
  KvRows v;
  float* lse = nullptr;              // [total_q, q_heads], or null
  const int* block_table = nullptr;  // [batch, block_table_stride]; null when not paged
  std::int64_t block_table_stride = 0;
  int page_size = 0;
  Quotient page{};      // token ÷ page_size
  bool ragged = false;  // K and V of a seq start at line.cu_seqlens_kv

  int kv_heads = 1;
  int group = 1;
  int head_dim = 0;  // of Q and K, and of V and O: multiples of 8, at most the variant's
  int head_dim_v = 0;
  bool padded = false;  // one of them is less: the columns beyond are zeros in shared memory that nobody reads or writes outside
  bool causal = true;
  float scale_log2 = 0.0f;  // scale·log2(e): logits in units of log2
  float lse_factor = 1.0f;  // LSE in the caller's base ÷ LSE in base 2

  // Masks and logit rules (rules.cuh); the window is line.window_left.
  bool rules = false;                   // there is a window, a tree, a soft-cap or ALiBi
  float softcap_log2 = 0.0f;            // softcap·log2(e); 0: off
  float softcap_scale = 0.0f;           // scale ÷ softcap
  const float* alibi_slopes = nullptr;  // [q_heads], or null
  // [total_q, tree_words], or null: bit j of a row allows the j-th of the seq's last q_len tokens
  const std::uint32_t* tree_mask = nullptr;
  std::int64_t tree_words = 0;
  const float* sinks = nullptr;  // [q_heads] natural-log logits, or null
  float sink_lse_factor = 1.0f;  // LSE in the caller's base ÷ natural

  int stages = 2;  // in flight

  // Where line.output_stretches is set, the grid is [batch, KV heads, output_stretches], an output is one row block, and clusters of
  // line.cluster_stretches blocks along the last axis merge their parts of an output in shared memory.
  Quotient of_all{};      // tiles ÷ line.output_stretches
  Quotient of_cluster{};  // tiles ÷ line.cluster_stretches
  int cluster_slice = 0;  // vectors of a partial that a block of a cluster merges (cluster.cuh)
  Quotient of_slice{};    // vector ÷ cluster_slice

  // Workspace. A slot is the partial of one cut segment: two a stretch (partial_slot), of one line after the other where KV heads lie side
  // by side. Within a slot each consumer warp has its own dims.
  int slots = 0;                      // 2 × the most stretches on this device
  float4* partial_values = nullptr;   // [slots, consumer warps, registers ÷ 4, 32 lanes]: Õ as the fragments lie
  float2* partial_rows = nullptr;     // [slots, consumer warps, rows of the warp]: (m in log2 units, ℓ)
  std::uint64_t* timeline = nullptr;  // [grid, marks] nanoseconds (timeline.cuh); used in a build for it only
  std::uint32_t* counters = nullptr;  // [2 levels, slots, kMaxConsumerWarps] arrivals, 0 between calls
};

constexpr int kMaxConsumerWarps = 8;
constexpr int kMaxStages = 8;  // in flight

}  // namespace leanattn::cuda
