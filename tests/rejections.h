// SPDX-License-Identifier: Apache-2.0
// One table of everything that the library rejects, each with its status and the words that its sentence must hold. The C++ and the C
// tests run the same table.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "leanattn/attention.h"

namespace leanattn::testing {

// A right problem with its own memory: 3 seqs, 8/2 heads, head_dim 64, q_len 2, kv_lens 10, 0, 7.
struct OwnedProblem {
  std::vector<std::int32_t> kv_lens{10, 0, 7};
  std::vector<std::int32_t> cu_seqlens_q{0, 2, 2, 3};
  std::vector<std::int32_t> cu_seqlens_kv{0, 10, 10, 17};
  std::vector<std::int32_t> block_table{3, 8, 0, -5, 77, -1, 5, 4, 99};  // [3, 3]; unused slots hold nonsense
  std::vector<float> q = std::vector<float>(3 * 2 * 8 * 64, 0.5f);
  std::vector<float> o = std::vector<float>(3 * 2 * 8 * 64, -7.0f);
  std::vector<float> k = std::vector<float>(36 * 2 * 64, 0.25f);
  std::vector<float> v = std::vector<float>(36 * 2 * 64, 0.125f);
  std::vector<float> lse = std::vector<float>(3 * 2 * 8, -7.0f);
  std::vector<float> heads = std::vector<float>(8, 0.5f);
  std::vector<std::uint64_t> tree = std::vector<std::uint64_t>(3 * 2, 3);
  Problem problem;
  Options options;
};

inline std::unique_ptr<OwnedProblem> right_problem(KvLayout layout) {
  auto owned = std::make_unique<OwnedProblem>();
  Problem& p = owned->problem;
  p.batch = 3;
  p.q_heads = 8;
  p.kv_heads = 2;
  p.head_dim = 64;
  p.q_len = 2;
  p.q = {owned->q.data(), 2 * 8 * 64, 8 * 64, 64};
  p.o = {owned->o.data(), 2 * 8 * 64, 8 * 64, 64};
  p.k = {owned->k.data(), 10 * 2 * 64, 2 * 64, 64};
  p.v = {owned->v.data(), 10 * 2 * 64, 2 * 64, 64};
  p.lse = owned->lse.data();
  p.kv_lens = owned->kv_lens.data();
  p.kv_layout = layout;
  p.kv_capacity = layout == KvLayout::kPaged ? 0 : 10;
  if (layout == KvLayout::kRagged) p.cu_seqlens_kv = owned->cu_seqlens_kv.data();
  if (layout == KvLayout::kPaged) {
    p.page_size = 4;
    p.num_pages = 9;
    p.max_pages = 3;
    p.block_table = owned->block_table.data();
    p.k.outer_stride = p.v.outer_stride = 4 * 2 * 64;
  }
  owned->options.workers = 1;
  return owned;
}

struct Rejection {
  const char* name;
  KvLayout layout;
  Status status;
  std::vector<std::string> words;
  std::function<void(OwnedProblem&)> spoil;
};

template <class Pointer>
void misalign(Pointer*& pointer) {
  pointer = reinterpret_cast<Pointer*>(reinterpret_cast<std::uintptr_t>(pointer) + 1);
}

// What validate rejects.
inline std::vector<Rejection> validate_rejections() {
  constexpr auto B = KvLayout::kBatched, R = KvLayout::kRagged, P = KvLayout::kPaged;
  constexpr auto kInvalid = Status::kInvalidArgument, kUnsupported = Status::kUnsupported;
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  using C = OwnedProblem;
  return {
      {"cuda", KvLayout::kBatched, Status::kUnsupported, {"backend cuda"}, [](C& c) { c.options.backend = Backend::kCuda; }},
      {"batch_negative", B, kInvalid, {"batch", "-1"}, [](C& c) { c.problem.batch = -1; }},
      {"q_heads_zero", B, kInvalid, {"q_heads", "0"}, [](C& c) { c.problem.q_heads = 0; }},
      {"q_heads_negative", B, kInvalid, {"q_heads", "-8"}, [](C& c) { c.problem.q_heads = -8; }},
      {"kv_heads_zero", B, kInvalid, {"kv_heads", "0"}, [](C& c) { c.problem.kv_heads = 0; }},
      {"kv_heads_least", B, kInvalid, {"kv_heads", "-2147483648"}, [=](C& c) { c.problem.kv_heads = kLeast; }},
      {"heads_do_not_divide", B, kInvalid, {"q_heads 8", "kv_heads 3"}, [](C& c) { c.problem.kv_heads = 3; }},
      {"head_dim_zero", B, kInvalid, {"head_dim 0", "32 to 256 in steps of 8"}, [](C& c) { c.problem.head_dim = 0; }},
      {"head_dim_100", B, kUnsupported, {"head_dim 100", "32 to 256 in steps of 8"}, [](C& c) { c.problem.head_dim = 100; }},
      {"head_dim_24", B, kUnsupported, {"head_dim 24", "32 to 256"}, [](C& c) { c.problem.head_dim = 24; }},
      {"head_dim_264", B, kUnsupported, {"head_dim 264", "32 to 256"}, [](C& c) { c.problem.head_dim = 264; }},
      {"head_dim_v_negative", B, kInvalid, {"head_dim_v -64"}, [](C& c) { c.problem.head_dim_v = -64; }},
      {"head_dim_v_36", B, kUnsupported, {"head_dim_v 36", "steps of 8"}, [](C& c) { c.problem.head_dim_v = 36; }},
      {"head_dim_v_512", B, kUnsupported, {"head_dim_v 512"}, [](C& c) { c.problem.head_dim_v = 512; }},
      {"q_len_negative", B, kInvalid, {"q_len", "-1"}, [](C& c) { c.problem.q_len = -1; }},
      {"rows_of_a_seq", B, kInvalid, {"q_len 2147483647", "q_heads 8"}, [=](C& c) { c.problem.q_len = kMost; }},
      {"rows_of_a_kv_head",
       B,
       kInvalid,
       {"q_len 2147483633", "q_heads 1", "2147483632"},
       [=](C& c) { c.problem.q_len = kMost - 14, c.problem.q_heads = c.problem.kv_heads = c.problem.batch = 1; }},
      {"rows_of_the_batch", B, kInvalid, {"batch 2147483647", "q_len 2", "q_heads 8"}, [=](C& c) { c.problem.batch = kMost; }},
      {"q_dtype_3",
       B,
       kInvalid,
       {"q_dtype 3", "0 (float32), 1 (float16), 2 (bfloat16)"},
       [](C& c) { c.problem.q_dtype = static_cast<DType>(3); }},
      {"kv_dtype_negative", B, kInvalid, {"kv_dtype -1"}, [](C& c) { c.problem.kv_dtype = static_cast<DType>(-1); }},
      {"kv_dtype_differs", B, kUnsupported, {"kv_dtype bfloat16", "q_dtype float32"}, [](C& c) { c.problem.kv_dtype = DType::kBFloat16; }},
      {"kv_layout_3", B, kInvalid, {"kv_layout 3", "2 (paged)"}, [](C& c) { c.problem.kv_layout = static_cast<KvLayout>(3); }},
      {"kv_capacity_negative", B, kInvalid, {"kv_capacity -1"}, [](C& c) { c.problem.kv_capacity = -1; }},
      {"kv_capacity_2_31", R, kInvalid, {"kv_capacity 2147483648"}, [](C& c) { c.problem.kv_capacity = 2147483648; }},
      {"page_size_zero", P, kInvalid, {"page_size 0"}, [](C& c) { c.problem.page_size = 0; }},
      {"num_pages_negative", P, kInvalid, {"num_pages -9"}, [](C& c) { c.problem.num_pages = -9; }},
      {"max_pages_negative", P, kInvalid, {"max_pages -3"}, [](C& c) { c.problem.max_pages = -3; }},
      {"block_table_stride_2", P, kInvalid, {"block_table_stride 2", "max_pages 3"}, [](C& c) { c.problem.block_table_stride = 2; }},
      {"block_table_stride_huge", P, kInvalid, {"block_table_stride", "batch 3"}, [=](C& c) { c.problem.block_table_stride = kHuge; }},
      {"block_table_stride_negative", P, kInvalid, {"block_table_stride -4"}, [](C& c) { c.problem.block_table_stride = -4; }},
      {"q_null", B, kInvalid, {"q is null", "batch 3"}, [](C& c) { c.problem.q.data = nullptr; }},
      {"o_null", B, kInvalid, {"o is null", "q_len 2"}, [](C& c) { c.problem.o.data = nullptr; }},
      {"k_null", B, kInvalid, {"k is null", "10 tokens"}, [](C& c) { c.problem.k.data = nullptr; }},
      {"v_null", P, kInvalid, {"v is null", "12 tokens"}, [](C& c) { c.problem.v.data = nullptr; }},
      {"kv_lens_null_batched", B, kInvalid, {"kv_lens is null", "batched"}, [](C& c) { c.problem.kv_lens = nullptr; }},
      {"kv_lens_null_paged", P, kInvalid, {"kv_lens is null", "paged"}, [](C& c) { c.problem.kv_lens = nullptr; }},
      {"cu_seqlens_kv_null", R, kInvalid, {"cu_seqlens_kv is null", "batch 3"}, [](C& c) { c.problem.cu_seqlens_kv = nullptr; }},
      {"block_table_null", P, kInvalid, {"block_table is null", "max_pages 3"}, [](C& c) { c.problem.block_table = nullptr; }},
      {"q_misaligned", B, kInvalid, {"q at 0x", "4 bytes"}, [](C& c) { misalign(c.problem.q.data); }},
      {"o_misaligned", B, kInvalid, {"o at 0x", "4 bytes"}, [](C& c) { misalign(c.problem.o.data); }},
      {"k_misaligned",
       B,
       kInvalid,
       {"k at 0x", "2 bytes"},
       [](C& c) { c.problem.q_dtype = c.problem.kv_dtype = DType::kFloat16, misalign(c.problem.k.data); }},
      {"v_misaligned", B, kInvalid, {"v at 0x", "4 bytes"}, [](C& c) { misalign(c.problem.v.data); }},
      {"lse_misaligned", B, kInvalid, {"lse at 0x", "4 bytes"}, [](C& c) { misalign(c.problem.lse); }},
      {"kv_lens_misaligned", B, kInvalid, {"kv_lens at 0x"}, [](C& c) { misalign(c.problem.kv_lens); }},
      {"cu_seqlens_q_misaligned",
       B,
       kInvalid,
       {"cu_seqlens_q at 0x"},
       [](C& c) { c.problem.cu_seqlens_q = c.cu_seqlens_q.data(), misalign(c.problem.cu_seqlens_q); }},
      {"cu_seqlens_kv_misaligned", R, kInvalid, {"cu_seqlens_kv at 0x"}, [](C& c) { misalign(c.problem.cu_seqlens_kv); }},
      {"block_table_misaligned", P, kInvalid, {"block_table at 0x"}, [](C& c) { misalign(c.problem.block_table); }},
      {"tree_mask_misaligned",
       B,
       kInvalid,
       {"tree_mask at 0x", "8 bytes"},
       [](C& c) { c.problem.tree_mask = c.tree.data(), misalign(c.problem.tree_mask); }},
      {"alibi_slopes_misaligned",
       B,
       kInvalid,
       {"alibi_slopes at 0x"},
       [](C& c) { c.problem.alibi_slopes = c.heads.data(), misalign(c.problem.alibi_slopes); }},
      {"sinks_misaligned", B, kInvalid, {"sinks at 0x"}, [](C& c) { c.problem.sinks = c.heads.data(), misalign(c.problem.sinks); }},
      {"q_stride_negative", B, kInvalid, {"q.head_stride -64"}, [](C& c) { c.problem.q.head_stride = -64; }},
      {"o_stride_negative", B, kInvalid, {"o.token_stride -512"}, [](C& c) { c.problem.o.token_stride = -512; }},
      {"k_stride_negative", B, kInvalid, {"k.outer_stride -1"}, [](C& c) { c.problem.k.outer_stride = -1; }},
      {"v_stride_negative", R, kInvalid, {"v.token_stride -128"}, [](C& c) { c.problem.v.token_stride = -128; }},
      {"q_spans_too_much", B, kInvalid, {"q.seq_stride 9223372036854775807"}, [=](C& c) { c.problem.q.seq_stride = kHuge; }},
      {"o_spans_too_much", B, kInvalid, {"o.seq_stride 9223372036854775807"}, [=](C& c) { c.problem.o.seq_stride = kHuge; }},
      {"k_spans_too_much", P, kInvalid, {"k.outer_stride", "9 of them"}, [=](C& c) { c.problem.k.outer_stride = kHuge / 8; }},
      {"v_spans_too_much", R, kInvalid, {"v.token_stride"}, [=](C& c) { c.problem.v.token_stride = kHuge / 8; }},
      {"o_heads_on_one_row", B, kInvalid, {"o.head_stride 0", "at least 64"}, [](C& c) { c.problem.o.head_stride = 0; }},
      {"o_tokens_on_one_row", B, kInvalid, {"o.token_stride 0", "at least 64"}, [](C& c) { c.problem.o.token_stride = 0; }},
      {"o_seqs_on_one_row", B, kInvalid, {"o.seq_stride 0", "at least 64"}, [](C& c) { c.problem.o.seq_stride = 0; }},
      {"o_heads_overlap", B, kInvalid, {"o.head_stride 63", "at least 64"}, [](C& c) { c.problem.o.head_stride = 63; }},
      {"o_tokens_overlap", B, kInvalid, {"o.token_stride 448", "at least 512"}, [](C& c) { c.problem.o.token_stride = 448; }},
      {"o_heads_overlap_by_head_dim_v", B, kInvalid, {"o.head_stride 64", "at least 128"}, [](C& c) { c.problem.head_dim_v = 128; }},
      {"window_left_minus_2", B, kInvalid, {"window_left -2"}, [](C& c) { c.problem.window_left = -2; }},
      {"scale_nan", B, kInvalid, {"scale nan"}, [=](C& c) { c.problem.scale = nan; }},
      {"scale_inf", B, kInvalid, {"scale inf"}, [=](C& c) { c.problem.scale = inf; }},
      {"softcap_nan", B, kInvalid, {"softcap nan"}, [=](C& c) { c.problem.softcap = nan; }},
      {"softcap_inf", B, kInvalid, {"softcap inf"}, [=](C& c) { c.problem.softcap = inf; }},
      {"softcap_negative", B, kInvalid, {"softcap -30"}, [](C& c) { c.problem.softcap = -30.0f; }},
      {"lse_base_2", B, kInvalid, {"lse_base 2", "1 (two)"}, [](C& c) { c.problem.lse_base = static_cast<LseBase>(2); }},
      {"backend_9", B, kInvalid, {"backend 9", "2 (cuda)"}, [](C& c) { c.options.backend = static_cast<Backend>(9); }},
      {"policy_3", B, kInvalid, {"policy 3", "1 (fa2)"}, [](C& c) { c.options.policy = static_cast<Policy>(3); }},
      {"head_order_3", B, kInvalid, {"head_order 3", "1 (along)"}, [](C& c) { c.options.head_order = static_cast<HeadOrder>(3); }},
      {"splits_negative", B, kInvalid, {"splits -1"}, [](C& c) { c.options.policy = Policy::kFlashDecoding, c.options.splits = -1; }},
      {"splits_1025",
       B,
       kInvalid,
       {"splits 1025", "1024"},
       [](C& c) { c.options.policy = Policy::kFlashDecoding, c.options.splits = 1025; }},
      {"splits_with_lean", B, kInvalid, {"splits 4", "policy lean:", "only policy flashdecoding"}, [](C& c) { c.options.splits = 4; }},
      {"workers_negative", B, kInvalid, {"workers -1"}, [](C& c) { c.options.workers = -1; }},
      {"workers_65537", B, kInvalid, {"workers 65537", "65536"}, [](C& c) { c.options.workers = 65537; }},
      {"executor_without_workers",
       B,
       kInvalid,
       {"workers 0", "executor"},
       [](C& c) {
         c.options.workers = 0;
         c.options.executor.run = [](void*, std::int32_t, void (*)(void*, std::int32_t), void*) {};
       }},
  };
}

// What validate lets pass and workspace_bytes and decode reject, because it depends on the build and the machine.
inline std::vector<Rejection> backend_rejections() {
  using C = OwnedProblem;
  return {
      {"cpu_isa", KvLayout::kBatched, Status::kUnsupported, {"cpu_isa Z80"}, [](C& c) { c.options.cpu_isa = "Z80"; }},
  };
}

// What check_data and decode reject.
inline std::vector<Rejection> data_rejections() {
  constexpr auto B = KvLayout::kBatched, R = KvLayout::kRagged, P = KvLayout::kPaged;
  constexpr auto kData = Status::kInvalidData;
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  using C = OwnedProblem;
  const auto packed = [](C& c) { c.problem.cu_seqlens_q = c.cu_seqlens_q.data(); };
  return {
      {"kv_len_negative", B, kData, {"seq 1", "kv_len -1", "0 to 10"}, [](C& c) { c.kv_lens[1] = -1; }},
      {"kv_len_least", P, kData, {"seq 2", "-2147483648"}, [=](C& c) { c.kv_lens[2] = kLeast; }},
      {"kv_len_beyond_capacity", B, kData, {"seq 2", "kv_len 11", "0 to 10"}, [](C& c) { c.kv_lens[2] = 11; }},
      {"kv_len_beyond_pages", P, kData, {"seq 0", "kv_len 13", "0 to 12"}, [](C& c) { c.kv_lens[0] = 13; }},
      {"kv_len_most", P, kData, {"seq 0", "2147483647", "0 to 12"}, [=](C& c) { c.kv_lens[0] = kMost; }},
      {"kv_len_beyond_ragged_room", R, kData, {"seq 1", "kv_len 1", "0 to 0"}, [](C& c) { c.kv_lens[1] = 1; }},
      {"ragged_room_beyond_capacity",
       R,
       kData,
       {"seq 2", "kv_len 11", "0 to 10"},
       [](C& c) { c.cu_seqlens_kv[3] = 21, c.problem.kv_lens = nullptr; }},
      {"cu_seqlens_kv_start", R, kData, {"cu_seqlens_kv[0]", "1"}, [](C& c) { c.cu_seqlens_kv[0] = 1; }},
      {"cu_seqlens_kv_falls", R, kData, {"seq 1", "cu_seqlens_kv", "10", "9"}, [](C& c) { c.cu_seqlens_kv[2] = 9; }},
      {"cu_seqlens_kv_falls_below_0",
       R,
       kData,
       {"seq 1", "-2147483648"},
       [=](C& c) { c.cu_seqlens_kv[2] = kLeast, c.problem.kv_lens = nullptr; }},
      {"ragged_k_null", R, kData, {"seq 0", "kv_len 10", "k null"}, [](C& c) { c.problem.k.data = nullptr; }},
      {"cu_seqlens_q_start", B, kData, {"cu_seqlens_q[0]", "-1"}, [=](C& c) { packed(c), c.cu_seqlens_q[0] = -1; }},
      {"cu_seqlens_q_falls", B, kData, {"seq 1", "cu_seqlens_q", "2", "1"}, [=](C& c) { packed(c), c.cu_seqlens_q[2] = 1; }},
      {"cu_seqlens_q_beyond_q_len", B, kData, {"seq 2", "3", "q_len 2"}, [=](C& c) { packed(c), c.cu_seqlens_q[3] = 5; }},
      {"packed_rows_overlap",
       B,
       Status::kInvalidArgument,
       {"o.token_stride 448", "at least 512"},
       [=](C& c) { packed(c), c.problem.o.token_stride = 448; }},
      {"page_at_the_end", P, kData, {"seq 0 slot 1", "page 9", "num_pages 9"}, [](C& c) { c.block_table[1] = 9; }},
      {"page_negative", P, kData, {"seq 2 slot 1", "page -1"}, [](C& c) { c.block_table[7] = -1; }},
      {"page_most", P, kData, {"seq 2 slot 0", "page 2147483647"}, [=](C& c) { c.block_table[6] = kMost; }},
      {"page_least", P, kData, {"seq 0 slot 2", "page -2147483648"}, [=](C& c) { c.block_table[2] = kLeast; }},
      {"no_pages", P, kData, {"seq 0 slot 0", "page 3", "num_pages 0"}, [](C& c) { c.problem.num_pages = 0; }},
      // Position 8 of 10 tokens: with a window of 3 token 5, in slot 1, is the first that is seen.
      {"page_at_the_window",
       P,
       kData,
       {"seq 0 slot 1", "page -1"},
       [](C& c) { c.problem.window_left = 3, c.block_table[0] = c.block_table[1] = -1; }},
  };
}

}  // namespace leanattn::testing
