// SPDX-License-Identifier: Apache-2.0
// Rejections through C++, and what must not be rejected.
#include <gtest/gtest.h>

#include <cstddef>
#include <numeric>

#include "problem_view.h"
#include "rejections.h"

namespace leanattn {
namespace {

using testing::OwnedProblem;
using testing::Rejection;
using testing::right_problem;

template <class Call>
void expect_error(Call&& call, const Rejection& rejection) {
  try {
    call();
    FAIL() << rejection.name << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), rejection.status) << rejection.name << ": " << error.what();
    for (const std::string& word : rejection.words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << rejection.name << ": \"" << error.what() << "\" lacks " << word;
    }
  }
}

// A workspace large enough for anything in these tests.
std::vector<std::byte>& workspace() {
  static std::vector<std::byte> bytes(1 << 22);
  return bytes;
}

void expect_untouched(const OwnedProblem& owned, const char* name) {
  for (float x : owned.o) ASSERT_EQ(x, -7.0f) << name;
  for (float x : owned.lse) ASSERT_EQ(x, -7.0f) << name;
}

TEST(Validate, RightProblemsPass) {
  for (KvLayout layout : {KvLayout::kBatched, KvLayout::kRagged, KvLayout::kPaged}) {
    const auto owned = right_problem(layout);
    EXPECT_NO_THROW(validate(owned->problem, owned->options));
    EXPECT_NO_THROW(check_data(owned->problem));
    EXPECT_NO_THROW(decode(owned->problem, owned->options, workspace()));
    EXPECT_NE(owned->o[0], -7.0f);
  }
}

TEST(Validate, RejectsByNameAndNumber) {
  for (const Rejection& rejection : testing::validate_rejections()) {
    const auto owned = right_problem(rejection.layout);
    rejection.spoil(*owned);
    expect_error([&] { validate(owned->problem, owned->options); }, rejection);
    expect_error([&] { workspace_bytes(owned->problem, owned->options); }, rejection);
    expect_error([&] { decode(owned->problem, owned->options, workspace()); }, rejection);
    expect_untouched(*owned, rejection.name);
  }
}

TEST(Validate, LeavesBuildAndMachineToTheCall) {
  for (const Rejection& rejection : testing::backend_rejections()) {
    const auto owned = right_problem(rejection.layout);
    rejection.spoil(*owned);
    EXPECT_NO_THROW(validate(owned->problem, owned->options));
    expect_error([&] { decode(owned->problem, owned->options, workspace()); }, rejection);
    expect_untouched(*owned, rejection.name);
  }
}

TEST(CheckData, RejectsBySeqAndSlot) {
  for (const Rejection& rejection : testing::data_rejections()) {
    const auto owned = right_problem(rejection.layout);
    rejection.spoil(*owned);
    EXPECT_NO_THROW(validate(owned->problem, owned->options)) << rejection.name;
    expect_error([&] { check_data(owned->problem); }, rejection);
    expect_error([&] { decode(owned->problem, owned->options, workspace()); }, rejection);
    expect_untouched(*owned, rejection.name);
  }
}

// Zero sizes are data: whatever has no element may be null.
TEST(Validate, ZeroIsData) {
  Problem p;
  p.q_heads = p.kv_heads = 1;
  p.head_dim = 64;
  EXPECT_NO_THROW(validate(p));  // batch 0
  EXPECT_NO_THROW(check_data(p));
  EXPECT_NO_THROW(decode(p, {}, {}));

  auto owned = right_problem(KvLayout::kBatched);
  owned->problem.q_len = 0;
  owned->problem.q.data = owned->problem.k.data = owned->problem.v.data = nullptr;
  owned->problem.o.data = nullptr;
  EXPECT_NO_THROW(validate(owned->problem));
  EXPECT_NO_THROW(decode(owned->problem, {}, workspace()));

  for (KvLayout layout : {KvLayout::kBatched, KvLayout::kRagged, KvLayout::kPaged}) {
    owned = right_problem(layout);
    owned->problem.k.data = owned->problem.v.data = nullptr;
    owned->problem.kv_capacity = 0;
    owned->problem.max_pages = 0;
    owned->problem.block_table = nullptr;
    owned->kv_lens = {0, 0, 0};
    owned->problem.kv_lens = owned->kv_lens.data();
    EXPECT_NO_THROW(validate(owned->problem));
    EXPECT_NO_THROW(check_data(owned->problem));
    EXPECT_NO_THROW(decode(owned->problem, {}, workspace()));
    for (float x : owned->o) ASSERT_EQ(x, 0.0f);
  }
}

TEST(Validate, EveryHeadDimOfTheContract) {
  for (int dim = -8; dim <= 520; ++dim) {
    const auto owned = right_problem(KvLayout::kBatched);
    owned->problem.o.head_stride = 1024, owned->problem.o.token_stride = 8192, owned->problem.o.seq_stride = 16384;
    const bool supported = dim >= 32 && dim <= 256 && dim % 8 == 0;
    owned->problem.head_dim = dim;
    owned->problem.head_dim_v = 64;
    if (supported)
      EXPECT_NO_THROW(validate(owned->problem)) << dim;
    else
      EXPECT_THROW(validate(owned->problem), Error) << dim;
    owned->problem.head_dim = 64;
    owned->problem.head_dim_v = dim;
    if (supported || dim == 0)
      EXPECT_NO_THROW(validate(owned->problem)) << dim;
    else
      EXPECT_THROW(validate(owned->problem), Error) << dim;
  }
}

TEST(Validate, StridesThatAViewMayHave) {
  const auto accepted = [](auto&& change) {
    const auto owned = right_problem(KvLayout::kBatched);
    change(owned->problem);
    validate(owned->problem);
  };
  // Broadcast K, V and Q.
  EXPECT_NO_THROW(accepted([](Problem& p) { p.k.outer_stride = p.v.outer_stride = p.k.head_stride = p.v.token_stride = 0; }));
  EXPECT_NO_THROW(accepted([](Problem& p) { p.q = {p.q.data, 0, 0, 0}; }));
  // O as [q_heads, batch, q_len, d], as [q_len, batch, q_heads, d], and as a slice of wider rows.
  EXPECT_NO_THROW(accepted([](Problem& p) { p.o = {p.o.data, 128, 64, 384}; }));
  EXPECT_NO_THROW(accepted([](Problem& p) { p.o = {p.o.data, 512, 1536, 64}; }));
  EXPECT_NO_THROW(accepted([](Problem& p) { p.o = {p.o.data, 3 * 1024, 3 * 512, 64}; }));
  // The stride of an index with one value means nothing.
  EXPECT_NO_THROW(accepted([](Problem& p) { p.batch = p.q_len = 1, p.o.seq_stride = p.o.token_stride = 0; }));
  // A window, a negative scale and an infinite sink are values like others.
  EXPECT_NO_THROW(accepted([](Problem& p) { p.window_left = 2147483647, p.scale = -1.0f; }));
}

// Element offsets behind 2^32 are fine, and bounds are computed without overflow.
TEST(Validate, HugeButAddressable) {
  const auto owned = right_problem(KvLayout::kPaged);
  owned->problem.num_pages = 2147483647;
  owned->problem.max_pages = 2147483647;
  owned->problem.page_size = 2147483647;
  owned->problem.k.outer_stride = owned->problem.v.outer_stride = std::int64_t{1} << 29;
  owned->problem.k.token_stride = owned->problem.v.token_stride = 128;
  EXPECT_NO_THROW(validate(owned->problem));
  EXPECT_EQ(max_kv_len(owned->problem), 2147483647);
}

// As many rows as a KV head may have, which the last block fills, need more workspace than a block less.
TEST(Validate, MostRowsOfAKvHead) {
  const auto owned = right_problem(KvLayout::kBatched);
  Problem& p = owned->problem;
  p.batch = p.q_heads = p.kv_heads = 1;
  const auto bytes = [&](int q_len) {
    p.q_len = q_len;
    return workspace_bytes(p, owned->options);
  };
  constexpr int kMost = 2147483632;
  EXPECT_GE(bytes(kMost), bytes(kMost - 16) + 16 * sizeof(float) * static_cast<std::size_t>(p.head_dim));
  EXPECT_EQ(bytes(kMost), bytes(kMost - 1));
}

TEST(CheckData, UnusedSlotsAreNotLookedAt) {
  const auto owned = right_problem(KvLayout::kPaged);  // holds nonsense behind the lengths
  owned->problem.window_left = 0;                      // position 8: tokens 8 and 9, in slot 2, are all that is seen
  owned->block_table[0] = owned->block_table[1] = -1;
  EXPECT_NO_THROW(check_data(owned->problem));
  owned->problem.window_left = 1;  // token 7, in slot 1
  EXPECT_THROW(check_data(owned->problem), Error);
  // A seq without query tokens addresses no page.
  owned->problem.cu_seqlens_q = owned->cu_seqlens_q.data();
  owned->cu_seqlens_q = {0, 0, 0, 1};
  owned->problem.cu_seqlens_q = owned->cu_seqlens_q.data();
  EXPECT_NO_THROW(check_data(owned->problem));
}

TEST(CheckData, RaggedWithoutLengthsOrCapacity) {
  const auto owned = right_problem(KvLayout::kRagged);
  owned->problem.kv_lens = nullptr;
  owned->problem.kv_capacity = 0;
  EXPECT_NO_THROW(validate(owned->problem));
  EXPECT_NO_THROW(check_data(owned->problem));
  EXPECT_EQ(seq_kv_len(owned->problem, 0), 10);
  EXPECT_EQ(seq_kv_len(owned->problem, 1), 0);
  EXPECT_EQ(seq_kv_len(owned->problem, 2), 7);
}

// The scan of a table of any length finds one bad entry anywhere.
TEST(CheckData, EverySlotIsScanned) {
  const auto owned = right_problem(KvLayout::kPaged);
  Problem& p = owned->problem;
  std::vector<std::int32_t> table(131), lens{131};
  std::iota(table.begin(), table.end(), 0);
  p.batch = 1;
  p.page_size = 1;
  p.num_pages = p.max_pages = 131;
  p.block_table = table.data();
  p.kv_lens = lens.data();
  EXPECT_NO_THROW(check_data(p));
  for (int slot = 0; slot < 131; ++slot) {
    for (std::int32_t bad : {-1, 131, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
      table[slot] = bad;
      EXPECT_THROW(check_data(p), Error) << slot << " " << bad;
    }
    table[slot] = slot;
  }
}

// The word of a device's check: 0 is no fault, and the largest of several words is the first fault by seq, kind and slot.
TEST(CheckData, TheLargestWordIsTheFirstFault) {
  const DataFault in_order[] = {{DataFaultKind::kQOffset, 0, 0},       {DataFaultKind::kKvLen, 0, 0},
                                {DataFaultKind::kPage, 0, 0},          {DataFaultKind::kPage, 0, 7},
                                {DataFaultKind::kPage, 0, 0x7fffffff}, {DataFaultKind::kKvOffset, 1, 0},
                                {DataFaultKind::kPage, 0x7fffffff, 5}};
  unsigned long long before = ~0ull;
  for (const DataFault& fault : in_order) {
    const unsigned long long word = data_status_of(fault);
    EXPECT_LT(word, before);
    before = word;
    const DataFault read = data_fault_of(word);
    EXPECT_TRUE(read.kind == fault.kind && read.seq == fault.seq && read.slot == fault.slot) << data_fault_sentence(word);
  }
  EXPECT_GT(before, 0u);
  EXPECT_EQ(data_fault_sentence(0), "");
  EXPECT_EQ(data_fault_sentence(data_status_of(in_order[3])), "seq 0 slot 7: page is outside num_pages");
}

TEST(Merge, Rejections) {
  float o[128] = {}, lse[2] = {};
  MergeProblem right;
  right.shards = 2, right.rows = 1, right.head_dim_v = 64, right.shard_o = o, right.shard_lse = lse, right.o = o, right.lse = lse;
  EXPECT_NO_THROW(validate_merge(right));
  const auto rejected = [&](std::vector<std::string> words, auto&& spoil) {
    MergeProblem p = right;
    spoil(p);
    expect_error([&] { merge(p); }, {"merge", KvLayout::kBatched, Status::kInvalidArgument, words, {}});
  };
  rejected({"shards 0"}, [](MergeProblem& p) { p.shards = 0; });
  rejected({"rows -1"}, [](MergeProblem& p) { p.rows = -1; });
  rejected({"rows 9223372036854775807", "shards 2"}, [](MergeProblem& p) { p.rows = std::numeric_limits<std::int64_t>::max(); });
  rejected({"head_dim_v 0"}, [](MergeProblem& p) { p.head_dim_v = 0; });
  rejected({"dtype 3"}, [](MergeProblem& p) { p.dtype = static_cast<DType>(3); });
  rejected({"lse_base -1"}, [](MergeProblem& p) { p.lse_base = static_cast<LseBase>(-1); });
  rejected({"shard_o is null", "rows 1"}, [](MergeProblem& p) { p.shard_o = nullptr; });
  rejected({"shard_lse is null"}, [](MergeProblem& p) { p.shard_lse = nullptr; });
  rejected({"o is null"}, [](MergeProblem& p) { p.o = nullptr; });
  rejected({"shard_o at 0x"}, [](MergeProblem& p) { testing::misalign(p.shard_o); });
  rejected({"shard_lse at 0x"}, [](MergeProblem& p) { testing::misalign(p.shard_lse); });
  rejected({"o at 0x"}, [](MergeProblem& p) { testing::misalign(p.o); });
  rejected({"lse at 0x"}, [](MergeProblem& p) { testing::misalign(p.lse); });
  MergeProblem nothing;
  nothing.shards = 1, nothing.head_dim_v = 64;
  EXPECT_NO_THROW(merge(nothing));  // no rows
}

TEST(Workspace, TooSmallOrNull) {
  Rejection small{"small", KvLayout::kBatched, Status::kWorkspaceTooSmall, {"99 bytes", "100"}, {}};
  std::byte bytes[1];
  expect_error([&] { check_workspace(bytes, 99, 100); }, small);
  Rejection null{"null", KvLayout::kBatched, Status::kInvalidArgument, {"workspace is null", "100 bytes"}, {}};
  expect_error([&] { check_workspace(nullptr, 100, 100); }, null);
  EXPECT_NO_THROW(check_workspace(nullptr, 0, 0));
}

// Packed queries with a bound of one token: batch and heads may each be 2^31 - 1, and their product times splits exceeds int64.
TEST(Workspace, HugeBatchesTimesHeadsTimesSplits) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  auto owned = right_problem(KvLayout::kRagged);
  Problem& p = owned->problem;
  p.batch = p.q_heads = p.kv_heads = kMost;
  p.head_dim = 32;
  p.q_len = 1;
  p.cu_seqlens_q = owned->cu_seqlens_q.data();
  p.q.token_stride = p.q.head_stride = p.o.token_stride = p.o.head_stride = 32;
  p.k.token_stride = p.k.head_stride = p.v.token_stride = p.v.head_stride = 0;
  for (const Policy policy : {Policy::kFa2, Policy::kFlashDecoding}) {
    for (const int splits : {0, 3, 4, 1024}) {
      if (policy == Policy::kFa2 && splits > 0) continue;
      owned->options.policy = policy;
      owned->options.splits = splits;
      owned->options.head_order = HeadOrder::kAlong;
      try {
        ADD_FAILURE() << "splits " << splits << ": " << workspace_bytes(p, owned->options) << " bytes";
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), Status::kInvalidArgument);
        EXPECT_NE(std::string(error.what()).find("more than 2^62"), std::string::npos) << error.what();
      }
    }
  }
}

TEST(Workspace, OfTheHost) {
  const int value = 0;
  Rejection host{"host", KvLayout::kBatched, Status::kInvalidArgument, {"workspace at 0x", "memory of the device"}, {}};
  expect_error([&] { check_device_memory("workspace", &value, false); }, host);
  EXPECT_NO_THROW(check_device_memory("workspace", &value, true));
}

TEST(ProblemView, Defaults) {
  Problem p;
  p.q_heads = 28, p.kv_heads = 4, p.head_dim = 64;
  EXPECT_EQ(group(p), 7);
  EXPECT_EQ(head_dim_v(p), 64);
  EXPECT_EQ(scale(p), 0.125f);
  EXPECT_EQ(p.q_len, 1);
  EXPECT_TRUE(p.causal);
  EXPECT_EQ(p.window_left, -1);
  p.head_dim_v = 128, p.scale = 2.0f;
  EXPECT_EQ(head_dim_v(p), 128);
  EXPECT_EQ(scale(p), 2.0f);
}

// Offsets that a layout does not use may be anything: none of them reaches the line, which a backend would follow.
TEST(Problem, OffsetsOfAnotherLayoutAreNotOfTheLine) {
  const std::int32_t offsets[] = {0, 0, 0};
  Problem problem;
  problem.q_heads = problem.kv_heads = 1;
  problem.cu_seqlens_kv = offsets;
  for (const KvLayout layout : {KvLayout::kBatched, KvLayout::kPaged}) {
    problem.kv_layout = layout;
    EXPECT_EQ(problem_line(problem).cu_seqlens_kv, nullptr);
  }
  problem.kv_layout = KvLayout::kRagged;
  EXPECT_EQ(problem_line(problem).cu_seqlens_kv, offsets);
}

}  // namespace
}  // namespace leanattn
