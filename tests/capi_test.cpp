// SPDX-License-Identifier: Apache-2.0
// The C ABI: the rejections of rejections.h with their codes, struct sizes, nulls, defaults, and one sentence per thread.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "leanattn/leanattn.h"
#include "rejections.h"

extern "C" int capi_c99_run(void);

namespace leanattn {
namespace {

using testing::OwnedProblem;
using testing::Rejection;
using testing::right_problem;

static_assert(LEANATTN_OK == static_cast<int>(Status::kOk));
static_assert(LEANATTN_INVALID_ARGUMENT == static_cast<int>(Status::kInvalidArgument));
static_assert(LEANATTN_UNSUPPORTED == static_cast<int>(Status::kUnsupported));
static_assert(LEANATTN_INVALID_DATA == static_cast<int>(Status::kInvalidData));
static_assert(LEANATTN_WORKSPACE_TOO_SMALL == static_cast<int>(Status::kWorkspaceTooSmall));
static_assert(LEANATTN_INTERNAL == static_cast<int>(Status::kInternal));
static_assert(LEANATTN_FLOAT32 == static_cast<int>(DType::kFloat32) && LEANATTN_FLOAT16 == static_cast<int>(DType::kFloat16));
static_assert(LEANATTN_BFLOAT16 == static_cast<int>(DType::kBFloat16));
static_assert(LEANATTN_KV_BATCHED == static_cast<int>(KvLayout::kBatched) && LEANATTN_KV_RAGGED == static_cast<int>(KvLayout::kRagged));
static_assert(LEANATTN_KV_PAGED == static_cast<int>(KvLayout::kPaged));
static_assert(LEANATTN_LSE_NATURAL == static_cast<int>(LseBase::kNatural) && LEANATTN_LSE_TWO == static_cast<int>(LseBase::kTwo));
static_assert(LEANATTN_BACKEND_AUTO == static_cast<int>(Backend::kAuto) && LEANATTN_BACKEND_CPU == static_cast<int>(Backend::kCpu));
static_assert(LEANATTN_BACKEND_CUDA == static_cast<int>(Backend::kCuda));
static_assert(LEANATTN_LEAN == static_cast<int>(Policy::kLean) && LEANATTN_FA2 == static_cast<int>(Policy::kFa2));
static_assert(LEANATTN_FLASHDECODING == static_cast<int>(Policy::kFlashDecoding));
static_assert(LEANATTN_HEADS_AUTO == static_cast<int>(HeadOrder::kAuto) && LEANATTN_HEADS_ALONG == static_cast<int>(HeadOrder::kAlong));
static_assert(LEANATTN_HEADS_BESIDE == static_cast<int>(HeadOrder::kBeside));

leanattn_problem to_c(const Problem& p) {
  leanattn_problem c;
  leanattn_problem_init(&c);
  c.batch = p.batch, c.q_heads = p.q_heads, c.kv_heads = p.kv_heads, c.head_dim = p.head_dim;
  c.head_dim_v = p.head_dim_v, c.q_len = p.q_len;
  c.q_dtype = static_cast<std::int32_t>(p.q_dtype), c.kv_dtype = static_cast<std::int32_t>(p.kv_dtype);
  c.q = {p.q.data, p.q.seq_stride, p.q.token_stride, p.q.head_stride};
  c.o = {p.o.data, p.o.seq_stride, p.o.token_stride, p.o.head_stride};
  c.k = {p.k.data, p.k.outer_stride, p.k.token_stride, p.k.head_stride};
  c.v = {p.v.data, p.v.outer_stride, p.v.token_stride, p.v.head_stride};
  c.lse = p.lse, c.cu_seqlens_q = p.cu_seqlens_q, c.kv_lens = p.kv_lens;
  c.kv_layout = static_cast<std::int32_t>(p.kv_layout), c.kv_capacity = p.kv_capacity, c.cu_seqlens_kv = p.cu_seqlens_kv;
  c.page_size = p.page_size, c.num_pages = p.num_pages, c.max_pages = p.max_pages;
  c.block_table = p.block_table, c.block_table_stride = p.block_table_stride;
  c.causal = p.causal, c.window_left = p.window_left, c.tree_mask = p.tree_mask;
  c.scale = p.scale, c.softcap = p.softcap, c.alibi_slopes = p.alibi_slopes, c.sinks = p.sinks;
  c.lse_base = static_cast<std::int32_t>(p.lse_base);
  return c;
}

leanattn_options to_c(const Options& o) {
  leanattn_options c;
  leanattn_options_init(&c);
  c.backend = static_cast<std::int32_t>(o.backend), c.policy = static_cast<std::int32_t>(o.policy), c.splits = o.splits;
  c.head_order = static_cast<std::int32_t>(o.head_order), c.batch_invariant = o.batch_invariant, c.workers = o.workers;
  c.executor = {o.executor.run, o.executor.context}, c.cpu_isa = o.cpu_isa;
  c.check_data = o.check_data, c.data_status = o.data_status;
  return c;
}

std::vector<std::byte>& workspace() {
  static std::vector<std::byte> bytes(1 << 22);
  return bytes;
}

leanattn_status decode_c(const OwnedProblem& owned) {
  const leanattn_problem problem = to_c(owned.problem);
  const leanattn_options options = to_c(owned.options);
  return leanattn_decode(&problem, &options, workspace().data(), workspace().size());
}

void expect_rejected(leanattn_status status, const Rejection& rejection) {
  EXPECT_EQ(status, static_cast<leanattn_status>(rejection.status)) << rejection.name << ": " << leanattn_last_error();
  for (const std::string& word : rejection.words) {
    const std::string sentence = leanattn_last_error();
    EXPECT_NE(sentence.find(word), std::string::npos) << rejection.name << ": " << sentence << " lacks " << word;
  }
}

TEST(CApi, C99ProgramRuns) { EXPECT_EQ(capi_c99_run(), 0) << "line of capi_c99.c; " << leanattn_last_error(); }

TEST(CApi, RejectsLikeCpp) {
  for (const Rejection& rejection : testing::validate_rejections()) {
    const auto owned = right_problem(rejection.layout);
    rejection.spoil(*owned);
    const leanattn_problem problem = to_c(owned->problem);
    const leanattn_options options = to_c(owned->options);
    expect_rejected(leanattn_validate(&problem, &options), rejection);
    std::size_t bytes = 12345;
    expect_rejected(leanattn_workspace_bytes(&problem, &options, &bytes), rejection);
    EXPECT_EQ(bytes, 12345u);
    expect_rejected(decode_c(*owned), rejection);
    EXPECT_EQ(owned->o[0], -7.0f);
  }
  for (const Rejection& rejection : testing::backend_rejections()) {
    const auto owned = right_problem(rejection.layout);
    rejection.spoil(*owned);
    expect_rejected(decode_c(*owned), rejection);
  }
  for (const Rejection& rejection : testing::data_rejections()) {
    const auto owned = right_problem(rejection.layout);
    rejection.spoil(*owned);
    const leanattn_problem problem = to_c(owned->problem);
    expect_rejected(leanattn_check_data(&problem), rejection);
    expect_rejected(decode_c(*owned), rejection);
    EXPECT_EQ(owned->o[0], -7.0f);
  }
}

// check_data validates first: in C++ that is the caller's part, in C a wild problem must not crash.
TEST(CApi, CheckDataOfAnInvalidProblem) {
  auto owned = right_problem(KvLayout::kBatched);
  owned->problem.kv_lens = nullptr;
  const leanattn_problem problem = to_c(owned->problem);
  EXPECT_EQ(leanattn_check_data(&problem), LEANATTN_INVALID_ARGUMENT);
}

TEST(CApi, SameBitsAsCpp) {
  for (KvLayout layout : {KvLayout::kBatched, KvLayout::kRagged, KvLayout::kPaged}) {
    const auto cpp = right_problem(layout), c = right_problem(layout);
    decode(cpp->problem, cpp->options, workspace());
    ASSERT_EQ(decode_c(*c), LEANATTN_OK) << leanattn_last_error();
    EXPECT_EQ(std::memcmp(cpp->o.data(), c->o.data(), c->o.size() * 4), 0);
    EXPECT_EQ(std::memcmp(cpp->lse.data(), c->lse.data(), c->lse.size() * 4), 0);
    std::size_t bytes = 0;
    const leanattn_problem problem = to_c(c->problem);
    const leanattn_options options = to_c(c->options);
    ASSERT_EQ(leanattn_workspace_bytes(&problem, &options, &bytes), LEANATTN_OK);
    EXPECT_EQ(bytes, workspace_bytes(cpp->problem, cpp->options));
  }
}

// Every member reaches the C++ problem: each of these changes the result or the error, alone.
TEST(CApi, EveryMemberArrives) {
  const auto outputs = [](auto&& change, bool through_c) {
    const auto owned = right_problem(KvLayout::kPaged);
    for (std::size_t i = 0; i < owned->k.size(); ++i) owned->k[i] = static_cast<float>(i % 37) * 0.03f - 0.5f;
    for (std::size_t i = 0; i < owned->v.size(); ++i) owned->v[i] = static_cast<float>(i % 41) * 0.05f - 1.0f;
    change(*owned);
    if (through_c)
      EXPECT_EQ(decode_c(*owned), LEANATTN_OK) << leanattn_last_error();
    else
      decode(owned->problem, owned->options, workspace());
    std::vector<float> all = owned->o;
    all.insert(all.end(), owned->lse.begin(), owned->lse.end());
    return all;
  };
  const auto bits_equal = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  using C = OwnedProblem;
  const std::vector<std::pair<const char*, void (*)(C&)>> changes = {
      {"causal", [](C& c) { c.problem.causal = false; }},
      {"window_left", [](C& c) { c.problem.window_left = 2; }},
      {"tree_mask", [](C& c) { c.tree = {1, 2, 1, 2, 1, 2}, c.problem.tree_mask = c.tree.data(); }},
      {"scale", [](C& c) { c.problem.scale = 0.7f; }},
      {"softcap", [](C& c) { c.problem.softcap = 1.5f; }},
      {"alibi_slopes", [](C& c) { c.problem.alibi_slopes = c.heads.data(); }},
      {"sinks", [](C& c) { c.problem.sinks = c.heads.data(); }},
      {"lse_base", [](C& c) { c.problem.lse_base = LseBase::kTwo; }},
      {"cu_seqlens_q", [](C& c) { c.problem.cu_seqlens_q = c.cu_seqlens_q.data(); }},
      {"block_table_stride",
       [](C& c) {
         c.block_table.insert(c.block_table.begin() + 3, {1, 1}),
             c.block_table[8] = 6, c.block_table[9] = 1, c.problem.block_table = c.block_table.data(), c.problem.block_table_stride = 4;
       }},
      {"page_size", [](C& c) { c.block_table[1] = 6, c.problem.page_size = 5; }},
      {"kv_lens",
       [](C& c) {
         c.kv_lens = {9, 0, 6}, c.problem.kv_lens = c.kv_lens.data();
       }},
      {"head_dim_v", [](C& c) { c.problem.head_dim_v = 32; }},
      {"lse", [](C& c) { c.problem.lse = nullptr; }},
      {"q_stride", [](C& c) { c.q[0] = 9.0f, c.problem.q.head_stride = 0; }},
      {"o_stride",
       [](C& c) {
         c.problem.o = {c.o.data(), 128, 64, 384};
       }},
      {"k_stride", [](C& c) { c.problem.k.head_stride = 0; }},
      {"v_stride", [](C& c) { c.problem.v.token_stride = 64; }},
  };
  const std::vector<float> plain = outputs([](C&) {}, false);
  for (const auto& [name, change] : changes) {
    const std::vector<float> cpp = outputs(change, false);
    EXPECT_FALSE(bits_equal(cpp, plain)) << name << " changes nothing";
    EXPECT_TRUE(bits_equal(cpp, outputs(change, true))) << name;
  }
}

TEST(CApi, Defaults) {
  leanattn_problem p;
  std::memset(static_cast<void*>(&p), 0xff, sizeof(p));
  ASSERT_EQ(leanattn_problem_init(&p), LEANATTN_OK);
  const leanattn_problem expected = to_c(Problem{});  // member by member from the C++ defaults
  EXPECT_EQ(p.struct_size, sizeof(leanattn_problem));
  EXPECT_EQ(std::memcmp(&p, &expected, sizeof(p)), 0);
  leanattn_options o;
  std::memset(static_cast<void*>(&o), 0xff, sizeof(o));
  ASSERT_EQ(leanattn_options_init(&o), LEANATTN_OK);
  const leanattn_options expected_options = to_c(Options{});
  EXPECT_EQ(std::memcmp(&o, &expected_options, sizeof(o)), 0);
  leanattn_merge_problem m;
  ASSERT_EQ(leanattn_merge_problem_init(&m), LEANATTN_OK);
  EXPECT_EQ(m.struct_size, sizeof(m));
  EXPECT_EQ(m.shards, 0);
}

TEST(CApi, NullArguments) {
  const auto owned = right_problem(KvLayout::kBatched);
  const leanattn_problem problem = to_c(owned->problem);
  std::size_t bytes = 0;
  const auto null = [](leanattn_status status, const char* sentence) {
    EXPECT_EQ(status, LEANATTN_INVALID_ARGUMENT);
    EXPECT_STREQ(leanattn_last_error(), sentence);
  };
  null(leanattn_problem_init(nullptr), "problem is null");
  null(leanattn_options_init(nullptr), "options is null");
  null(leanattn_merge_problem_init(nullptr), "problem is null");
  null(leanattn_validate(nullptr, nullptr), "problem is null");
  null(leanattn_check_data(nullptr), "problem is null");
  null(leanattn_workspace_bytes(nullptr, nullptr, &bytes), "problem is null");
  null(leanattn_workspace_bytes(&problem, nullptr, nullptr), "bytes is null");
  null(leanattn_decode(nullptr, nullptr, nullptr, 0), "problem is null");
  null(leanattn_decode(&problem, nullptr, nullptr, 1 << 20), "workspace is null");
  null(leanattn_merge(nullptr), "problem is null");
  EXPECT_EQ(leanattn_validate(&problem, nullptr), LEANATTN_OK);  // options may be null
}

TEST(CApi, StructSizes) {
  const auto owned = right_problem(KvLayout::kBatched);
  struct Newer {
    leanattn_problem problem;
    std::uint64_t member;
  } newer{to_c(owned->problem), 0};
  newer.problem.struct_size = sizeof(Newer);
  EXPECT_EQ(leanattn_validate(&newer.problem, nullptr), LEANATTN_OK);
  newer.member = std::uint64_t{1} << 63;  // the last byte
  EXPECT_EQ(leanattn_validate(&newer.problem, nullptr), LEANATTN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(leanattn_last_error()), "problem sets a member at byte " + std::to_string(sizeof(Newer) - 1) +
                                                    ": this version knows " + std::to_string(sizeof(leanattn_problem)) + " bytes");
  for (std::size_t size : {std::size_t{0}, sizeof(leanattn_problem) - 1, std::size_t{4097}, ~std::size_t{0}}) {
    leanattn_problem problem = to_c(owned->problem);
    problem.struct_size = size;
    EXPECT_EQ(leanattn_validate(&problem, nullptr), LEANATTN_INVALID_ARGUMENT);
    const std::string words = "problem.struct_size " + std::to_string(size);
    EXPECT_NE(std::strstr(leanattn_last_error(), words.c_str()), nullptr) << leanattn_last_error();
    EXPECT_EQ(leanattn_problem_init_sized(&problem, size), LEANATTN_INVALID_ARGUMENT);
  }
  const leanattn_problem problem = to_c(owned->problem);
  leanattn_options options = to_c(owned->options);
  options.struct_size = sizeof(options) - 8;
  EXPECT_EQ(leanattn_validate(&problem, &options), LEANATTN_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(leanattn_last_error(), "options.struct_size"), nullptr);
  // A newer caller's init clears the bytes that this version does not know, and none behind them.
  struct Guarded {
    Newer newer;
    std::uint64_t guard;
  } guarded;
  std::memset(static_cast<void*>(&guarded), 0xff, sizeof(guarded));
  ASSERT_EQ(leanattn_problem_init_sized(&guarded.newer.problem, sizeof(Newer)), LEANATTN_OK);
  EXPECT_EQ(guarded.newer.problem.struct_size, sizeof(Newer));
  EXPECT_EQ(guarded.newer.member, 0u);
  EXPECT_EQ(guarded.guard, ~std::uint64_t{0});
}

TEST(CApi, WorkspaceTooSmall) {
  const auto owned = right_problem(KvLayout::kBatched);
  const leanattn_problem problem = to_c(owned->problem);
  const leanattn_options options = to_c(owned->options);
  std::size_t bytes = 0;
  ASSERT_EQ(leanattn_workspace_bytes(&problem, &options, &bytes), LEANATTN_OK);
  ASSERT_GT(bytes, 0u);
  EXPECT_EQ(leanattn_decode(&problem, &options, workspace().data(), bytes - 1), LEANATTN_WORKSPACE_TOO_SMALL);
  EXPECT_NE(std::strstr(leanattn_last_error(), std::to_string(bytes).c_str()), nullptr) << leanattn_last_error();
  EXPECT_EQ(leanattn_decode(&problem, &options, nullptr, 0), LEANATTN_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(owned->o[0], -7.0f);
}

TEST(CApi, LastErrorIsTheThreadsOwn) {
  EXPECT_EQ(leanattn_validate(nullptr, nullptr), LEANATTN_INVALID_ARGUMENT);
  std::string before, after;
  std::thread([&] {
    before = leanattn_last_error();
    leanattn_workspace_bytes(nullptr, nullptr, nullptr);
    after = leanattn_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_EQ(after, "bytes is null");
  EXPECT_STREQ(leanattn_last_error(), "problem is null");
  leanattn_problem p;
  leanattn_problem_init(&p);
  EXPECT_STREQ(leanattn_last_error(), "");
}

// Exceptions of a caller's executor become codes.
TEST(CApi, NothingIsThrown) {
  const auto owned = right_problem(KvLayout::kBatched);
  owned->options.workers = 2;
  owned->options.policy = Policy::kFa2;  // a stretch a seq: one stretch alone would run on the caller
  using Body = void (*)(void*, std::int32_t);
  owned->options.executor.run = [](void*, std::int32_t, Body, void*) { throw std::bad_alloc(); };
  EXPECT_EQ(decode_c(*owned), LEANATTN_INTERNAL);
  EXPECT_STREQ(leanattn_last_error(), "out of memory");
  owned->options.executor.run = [](void*, std::int32_t, Body, void*) { throw std::runtime_error("pool 7 is down"); };
  EXPECT_EQ(decode_c(*owned), LEANATTN_INTERNAL);
  EXPECT_STREQ(leanattn_last_error(), "pool 7 is down");
  owned->options.executor.run = [](void*, std::int32_t, Body, void*) { throw 7; };
  EXPECT_EQ(decode_c(*owned), LEANATTN_INTERNAL);
  EXPECT_STRNE(leanattn_last_error(), "");
}

TEST(CApi, Merge) {
  // Two shards of one row: weights 3/4 and 1/4.
  const float shard_o[2][2] = {{1.0f, 8.0f}, {5.0f, 0.0f}};
  const float shard_lse[2] = {std::log(3.0f), 0.0f};
  float o[2], lse;
  leanattn_merge_problem m;
  leanattn_merge_problem_init(&m);
  m.shards = 2, m.rows = 1, m.head_dim_v = 2, m.shard_o = shard_o, m.shard_lse = shard_lse, m.o = o, m.lse = &lse;
  ASSERT_EQ(leanattn_merge(&m), LEANATTN_OK);
  EXPECT_NEAR(o[0], 2.0f, 1e-6f);
  EXPECT_NEAR(o[1], 6.0f, 1e-6f);
  EXPECT_NEAR(lse, std::log(4.0f), 1e-6f);
  m.dtype = 7;
  EXPECT_EQ(leanattn_merge(&m), LEANATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(leanattn_last_error(), "dtype 7: known values are 0 (float32), 1 (float16), 2 (bfloat16)");
  m.dtype = 0, m.shards = 0;
  EXPECT_EQ(leanattn_merge(&m), LEANATTN_INVALID_ARGUMENT);
  m.shards = 2, m.rows = -1;
  EXPECT_EQ(leanattn_merge(&m), LEANATTN_INVALID_ARGUMENT);
  m.rows = 1, m.struct_size = 8;
  EXPECT_EQ(leanattn_merge(&m), LEANATTN_INVALID_ARGUMENT);
}

TEST(CApi, Information) {
  EXPECT_STREQ(leanattn_version(), version());
  const std::vector<std::string> isas = cpu_isas();
  for (std::size_t i = 0; i < isas.size(); ++i) EXPECT_EQ(isas[i], leanattn_cpu_isa(static_cast<std::int32_t>(i)));
  EXPECT_EQ(leanattn_cpu_isa(static_cast<std::int32_t>(isas.size())), nullptr);
  for (int b = 0; b < 3; ++b) EXPECT_EQ(leanattn_backend_available(b), backend_available(static_cast<Backend>(b)) ? 1 : 0);
}

}  // namespace
}  // namespace leanattn
