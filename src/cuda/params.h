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
  std::uint32_t page_units = 0;  // paged: outer_stride and token_stride in units of Params::page_unit
  std::uint32_t token_units = 0;
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

  bool general = false;  // a row of Q, K or V is aligned to less than 16 bytes, or 32 bits of page_unit do not reach every row
  bool padded = false;   // head_dim or head_dim_v is less than the variant's: columns beyond are zeros that nobody reads or writes outside
  bool checks = false;   // lengths, offsets and page ids (faults.cuh)
  bool rules = false;    // there is a window, a tree, a soft-cap or ALiBi
  int whole_tokens = 0;  // tokens of a stage whose copies need no conditions: all that it has room for; −1: never, columns are padded
  RowView q;             // [total_q, q_heads, head_dim]
  RowView o;             // [total_q, q_heads, head_dim_v]
  KvRows k;              // see problem.h, KvLayout
  KvRows v;
  float* lse = nullptr;              // [total_q, q_heads], or null
  const int* block_table = nullptr;  // [batch, block_table_stride]; null when not paged
  std::int64_t block_table_stride = 0;
  int page_size = 0;
  Quotient page{};               // token ÷ page_size
  std::uint32_t page_unit = 16;  // bytes: of these there are less than 2^32 in all pages of K, and of V
  bool ragged = false;           // K and V of a seq start at line.cu_seqlens_kv

  int kv_heads = 1;
  int group = 1;
  int head_dim = 0;    // of Q and K: a multiple of 8, at most the variant's
  int head_dim_v = 0;  // of V and O, likewise
  bool causal = true;
  float scale_log2 = 0.0f;  // scale·log2(e): logits in units of log2
  float lse_factor = 1.0f;  // LSE in the caller's base ÷ LSE in base 2

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
  int slot_nodes = 1;                 // partials of a slot: 1, or as many nodes of the merge tree as a segment may leave (tree.cuh)
  int shared_nodes = 0;               // of them, the first that a block keeps in shared memory while it is in the segment
  int shared_nodes_at = 0;            // bytes behind Shared
  float4* partial_values = nullptr;   // [slots, slot_nodes, consumer warps, registers ÷ 4, 32 lanes]: Õ as the fragments lie
  float2* partial_rows = nullptr;     // [slots, slot_nodes, consumer warps, rows of the warp]: (m in log2 units, ℓ)
  std::uint64_t* timeline = nullptr;  // [grid, marks] nanoseconds (timeline.cuh); used in a build for it only
  std::uint32_t* counters = nullptr;  // [2 levels, slots, kMaxConsumerWarps] arrivals, 0 between calls

  // Of masks and logit rules (rules.cuh); the window is line.window_left. Last: a call without them does not read it.
  float softcap_log2 = 0.0f;            // softcap·log2(e); 0: off
  float softcap_scale = 0.0f;           // scale ÷ softcap
  const float* alibi_slopes = nullptr;  // [q_heads], or null
  // [total_q, tree_words], or null: bit j of a row allows the j-th of the seq's last q_len tokens
  const std::uint32_t* tree_mask = nullptr;
  std::int64_t tree_words = 0;
  const float* sinks = nullptr;  // [q_heads] natural-log logits, or null
  float sink_lse_factor = 1.0f;  // LSE in the caller's base ÷ natural

  // With checks. Lengths are held against line.most_kv_len and line.most_q_len.
  unsigned long long* data_status = nullptr;  // data_fault.h
  int num_pages = 0;
};

constexpr int kMaxConsumerWarps = 8;
constexpr int kMaxStages = 8;  // in flight

}  // namespace leanattn::cuda
