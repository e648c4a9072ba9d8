// SPDX-License-Identifier: Apache-2.0
// How wide the CUDA kernel may read the rows of a problem: strides that no index uses do not narrow it. Needs no GPU.
#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/views.h"

namespace leanattn::cuda {
namespace {

struct alignas(256) Row {
  std::uint16_t elements[128];
};
Row row;

// A batch of one sequence with one KV head, one q_head, one query token and one token of room: no stride is used.
Problem lone() {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = p.q_len = 1;
  p.head_dim = 128;
  p.q_dtype = p.kv_dtype = DType::kBFloat16;
  p.kv_layout = KvLayout::kBatched;
  p.kv_capacity = 1;
  p.q.data = p.o.data = row.elements;
  p.k.data = p.v.data = row.elements;
  return p;
}

bool is_general(const Problem& problem) {
  Params params;
  set_views(params, problem);
  return params.general;
}

// Every stride of p becomes odd and long.
Problem with_odd_strides(Problem p) {
  constexpr std::int64_t kOdd = (std::int64_t{1} << 33) + 1;
  p.q.seq_stride = p.q.token_stride = p.q.head_stride = kOdd;
  p.o.seq_stride = p.o.token_stride = p.o.head_stride = kOdd;
  for (KvView* view : {&p.k, &p.v}) view->outer_stride = view->token_stride = view->head_stride = kOdd;
  return p;
}

Problem paged(Problem p) {
  p.kv_layout = KvLayout::kPaged;
  p.page_size = p.num_pages = p.max_pages = 1;
  return p;
}

TEST(CudaViews, StridesOfLoneIndicesDoNotCount) {
  for (const Problem& p : {with_odd_strides(lone()), paged(with_odd_strides(lone()))}) {
    Params params;
    set_views(params, p);
    EXPECT_FALSE(params.general);
    EXPECT_EQ(params.o.access_bytes, 16);
    for (const RowView& rows : {params.q, params.o}) {
      EXPECT_EQ(rows.seq_stride, 0);
      EXPECT_EQ(rows.token_stride, 0);
      EXPECT_EQ(rows.head_stride, 0);
    }
    for (const KvRows& rows : {params.k, params.v}) {
      EXPECT_EQ(rows.outer_stride, 0);
      EXPECT_EQ(rows.token_stride, 0);
      EXPECT_EQ(rows.head_stride, 0);
    }
  }
}

// With a second index of an axis its stride counts again.
TEST(CudaViews, EveryUsedStrideCounts) {
  const auto odd = [](auto change) {
    Problem p = with_odd_strides(lone());
    change(p);
    return is_general(p);
  };
  EXPECT_TRUE(odd([](Problem& p) { p.batch = 2; }));
  EXPECT_TRUE(odd([](Problem& p) { p.q_heads = 2; }));
  EXPECT_TRUE(odd([](Problem& p) { p.q_heads = p.kv_heads = 2; }));
  EXPECT_TRUE(odd([](Problem& p) { p.q_len = 2; }));
  EXPECT_TRUE(odd([](Problem& p) { p.kv_capacity = 2; }));
  EXPECT_TRUE(odd([](Problem& p) { (p = paged(p)).num_pages = 2; }));
  EXPECT_TRUE(odd([](Problem& p) { (p = paged(p)).page_size = 2; }));
  EXPECT_TRUE(odd([](Problem& p) { p.kv_layout = KvLayout::kRagged; }));  // seqs lie token strides apart
  const std::int32_t offsets[] = {0, 1, 2};
  EXPECT_TRUE(odd([&](Problem& p) {
    p.cu_seqlens_q = offsets;
    p.q_len = 2;
  }));
  // Packed, and still one token at most.
  EXPECT_FALSE(odd([&](Problem& p) { p.cu_seqlens_q = offsets; }));
}

// One feature has variants of its own; two, and whatever else is special, take those in full.
TEST(CudaViews, NeededFeatures) {
  Problem plain = lone();
  plain.head_dim = 128;
  const auto needed = [&](auto change) {
    Problem p = plain;
    Options options;
    change(p, options);
    return needed_features(p, options);
  };
  const float values[] = {0.0f};
  const std::uint64_t tree[] = {1};
  EXPECT_EQ(needed([](Problem&, Options&) {}), Features::kPlain);
  EXPECT_EQ(needed([](Problem&, Options& o) { o.batch_invariant = true; }), Features::kInvariant);
  EXPECT_EQ(needed([](Problem&, Options& o) { o.check_data = true; }), Features::kChecked);
  EXPECT_EQ(needed([](Problem& p, Options&) { p.window_left = 0; }), Features::kRules);
  EXPECT_EQ(needed([](Problem& p, Options&) { p.softcap = 1.0f; }), Features::kRules);
  EXPECT_EQ(needed([&](Problem& p, Options&) { p.alibi_slopes = values; }), Features::kRules);
  EXPECT_EQ(needed([&](Problem& p, Options&) { p.sinks = values; }), Features::kRules);
  EXPECT_EQ(needed([&](Problem& p, Options&) { p.tree_mask = tree; }), Features::kRules);
  EXPECT_EQ(needed([&](Problem& p, Options&) { p.window_left = 5, p.softcap = 1.0f, p.sinks = values; }), Features::kRules);
  EXPECT_EQ(needed([](Problem&, Options& o) { o.batch_invariant = o.check_data = true; }), Features::kFull);
  EXPECT_EQ(needed([](Problem& p, Options& o) { p.window_left = 0, o.check_data = true; }), Features::kFull);
  EXPECT_EQ(needed([](Problem& p, Options& o) { p.softcap = 1.0f, o.batch_invariant = true; }), Features::kFull);
  EXPECT_EQ(needed([](Problem&, Options& o) { o.policy = Policy::kFa2; }), Features::kFull);
  EXPECT_EQ(needed([](Problem& p, Options&) { p.head_dim_v = 64; }), Features::kFull);
  const std::int32_t offsets[] = {0, 1};
  EXPECT_EQ(needed([&](Problem& p, Options&) { p.cu_seqlens_q = offsets; }), Features::kFull);
  EXPECT_EQ(needed([](Problem& p, Options&) { p.k.data = row.elements + 1; }), Features::kFull);
}

// One stride at a time: odd, or aligned and too long.
TEST(CudaViews, OddAndLongStrides) {
  Problem p = lone();
  p.batch = 2, p.q_heads = 16, p.kv_heads = 2, p.q_len = 3, p.kv_capacity = 1000;
  p.q = {row.elements, 3 * 16 * 128, 16 * 128, 128};
  p.o = {row.elements, 3 * 16 * 128, 16 * 128, 128};
  p.k = p.v = {row.elements, 1000 * 256, 256, 128};
  EXPECT_FALSE(is_general(p));
  for (const int which : {0, 1, 2}) {
    for (const std::int64_t more : {1, 2, 4}) {
      for (const bool of_v : {false, true}) {
        Problem odd = p;
        KvView& view = of_v ? odd.v : odd.k;
        (which == 0 ? view.outer_stride : which == 1 ? view.token_stride : view.head_stride) += more;
        EXPECT_TRUE(is_general(odd)) << which << " by " << more;
        Params params;
        set_views(params, odd);
        EXPECT_EQ((of_v ? params.v : params.k).access_bytes, 2 * more);
      }
      Problem odd = p;
      (which == 0 ? odd.q.seq_stride : which == 1 ? odd.q.token_stride : odd.q.head_stride) += more;
      EXPECT_TRUE(is_general(odd)) << which << " by " << more;
      odd = p;
      (which == 0 ? odd.o.seq_stride : which == 1 ? odd.o.token_stride : odd.o.head_stride) += more;
      EXPECT_FALSE(is_general(odd));  // O is stored in pairs of elements, or singly
    }
  }
  Problem shifted = p;
  shifted.k.data = row.elements + 1;
  EXPECT_TRUE(is_general(shifted));
  Problem far = p;
  far.k.outer_stride = std::int64_t{1} << 30;  // of a seq: 64 bits everywhere
  EXPECT_FALSE(is_general(far));
  far = p;
  far.v.token_stride = std::int64_t{1} << 30;
  EXPECT_FALSE(is_general(far));
}

// Rows of pages lie a 32-bit number of units away from the first, the largest unit that all strides are multiples of.
TEST(CudaViews, PageUnits) {
  Problem p = lone();
  p.batch = 2, p.q_heads = 16, p.kv_heads = 2, p.kv_layout = KvLayout::kPaged, p.num_pages = 3, p.page_size = 16;
  p.q = {row.elements, 16 * 128, 16 * 128, 128};
  p.o = {row.elements, 16 * 128, 16 * 128, 128};
  p.k = p.v = {row.elements, 16 * 256, 256, 128};
  const auto params = [](const Problem& problem) {
    Params made;
    set_views(made, problem);
    return made;
  };
  EXPECT_EQ(params(p).page_unit, 512u);
  EXPECT_EQ(params(p).k.page_units, 16u);
  EXPECT_EQ(params(p).k.token_units, 1u);
  Problem apart = p;
  apart.v = {row.elements, 16 * 256 + 8, 128, 16 * 128};
  EXPECT_EQ(params(apart).page_unit, 16u);
  EXPECT_EQ(params(apart).k.page_units, 512u);
  EXPECT_EQ(params(apart).v.page_units, 513u);
  EXPECT_EQ(params(apart).v.token_units, 16u);

  Problem far = p;
  far.k.outer_stride = std::int64_t{1} << 38;  // half a terabyte a page, in units of 512 bytes: the third page ends below 2^32 of them
  EXPECT_FALSE(params(far).general);
  EXPECT_EQ(params(far).k.page_units, 1u << 30);
  far.k.outer_stride = std::int64_t{1} << 39;  // the third page begins at 2^32
  EXPECT_TRUE(params(far).general);
  far.num_pages = 2;
  EXPECT_FALSE(params(far).general);
  far.num_pages = 1;  // nothing is a page away
  EXPECT_FALSE(params(far).general);
  EXPECT_EQ(params(far).k.page_units, 0u);
  far = p;
  far.num_pages = 2;
  far.v.outer_stride = (std::int64_t{1} << 36) + 8;  // units of 16 bytes: 2^33 + 1 of them
  EXPECT_TRUE(params(far).general);
  far = p;
  far.v.token_stride = std::int64_t{1} << 36;  // 15 tokens of a page: 2^28 units of 512 bytes each
  EXPECT_FALSE(params(far).general);
  far.v.token_stride = std::int64_t{1} << 37;
  EXPECT_TRUE(params(far).general);
}

}  // namespace
}  // namespace leanattn::cuda
