// SPDX-License-Identifier: Apache-2.0
// Who runs a call and in what memory: concurrent calls, a caller's own executor, the workspace, no allocation, nothing written on an error.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>
#include <utility>

#include "decoding.h"
#include "executors.h"

// Sanitizers bring operators of their own, which the C++ library then uses in part: nothing is counted there.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LEANATTN_COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define LEANATTN_COUNTS_ALLOCATIONS 0
#endif
#endif
#ifndef LEANATTN_COUNTS_ALLOCATIONS
#define LEANATTN_COUNTS_ALLOCATIONS 1
#endif

#if LEANATTN_COUNTS_ALLOCATIONS
namespace {
std::atomic<long long> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* memory = alignment > alignof(std::max_align_t) ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                                                       : std::malloc(bytes > 0 ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
}  // namespace

// g++ inlines some of these into their callers and then takes malloc and free for a mismatch with new and delete (GCC bug 103993).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif
void* operator new(std::size_t bytes) { return counted(bytes, 0); }
void* operator new[](std::size_t bytes) { return counted(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return counted(bytes, static_cast<std::size_t>(alignment)); }
void* operator new[](std::size_t bytes, std::align_val_t alignment) { return counted(bytes, static_cast<std::size_t>(alignment)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
#endif

namespace leanattn::testing {
namespace {

constexpr const char* kLines[] = {"- 8 2 64 700,33,1,0", "- 6 3 80 500,64 q_len=4 page=16 dtype=f32 head_dim_v=96 window=100",
                                  "2 16 1 128 300 dtype=f16 softcap=30", "- 4 4 32 5,0 q_len=0,3 sink=1 alibi=1",
                                  "- 4 2 64 300,64,70 tree=70 q_len=70 layout=head_major strided=1"};

TEST(Threads, ConcurrentCallsWithTheirOwnWorkspaces) {
  constexpr int kCallers = 5;
  const int rounds = short_run() ? 3 : 20;
  std::vector<std::string> faults(kCallers);
  const auto caller = [&](int index) {
    CaseData data(parse_case(kLines[index]));
    const Reference reference = compute_reference(data.problem(), {.kv_heads_per_seq = 0, .threads = 1});
    for (int round = 0; round < rounds; ++round) {
      Options options =
          with_isa(options_of(ways()[static_cast<std::size_t>(round + index) % ways().size()]), static_cast<std::size_t>(round));
      if (round % 3 == 2) options.executor = executors()[static_cast<std::size_t>(index) % executors().size()].executor;
      const auto right = is_right(data, options, reference);
      if (!right) faults[static_cast<std::size_t>(index)] = right.message();
    }
  };
  std::vector<std::thread> threads;
  for (int index = 0; index < kCallers; ++index) threads.emplace_back(caller, index);
  for (std::thread& thread : threads) thread.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
}

// Calls of an executor: each task once.
struct Recorder {
  int runs = 0;
  std::vector<int> tasks_of_runs;
};
void run_recorded(void* context, std::int32_t tasks, TaskBody body, void* argument) {
  auto& recorder = *static_cast<Recorder*>(context);
  ++recorder.runs;
  recorder.tasks_of_runs.push_back(tasks);
  run_reversed(nullptr, tasks, body, argument);
}

TEST(Threads, ExecutorRunsEveryTaskOfEveryRound) {
  CaseData data(parse_case("- 8 2 64 3000,33,1,0"));
  const Reference reference = compute_reference(data.problem());
  for (const Way& way : ways()) {
    Recorder recorder;
    Options options = options_of(way);
    options.workers = 4;
    options.executor = {run_recorded, &recorder};
    EXPECT_TRUE(is_right(data, options, reference));
    EXPECT_GE(recorder.runs, 1);
    for (const int tasks : recorder.tasks_of_runs) {
      EXPECT_GE(tasks, 1);
      EXPECT_LE(tasks, 4);
    }
  }
  for (const NamedExecutor& executor : executors()) {
    Options options = options_of({Policy::kLean, 0, HeadOrder::kAuto, false, 6});
    options.executor = executor.executor;
    EXPECT_TRUE(is_right(data, options, reference)) << executor.name;
  }
  Options options;
  options.executor = executors()[0].executor;
  EXPECT_THROW(workspace_bytes(data.problem(), options), Error);  // an executor has to be told how many workers
}

TEST(Threads, WorkspaceOneByteShortIsRejectedAndNothingWritten) {
  for (const char* line : kLines) {
    for (const Way& way : ways()) {
      CaseData data(parse_case(line));
      const Problem p = data.problem();
      const Options options = options_of(way);
      const std::size_t bytes = workspace_bytes(p, options);
      ASSERT_GT(bytes, 0u);
      const Bits before = output_bits(p);
      for (const std::size_t given : {bytes - 1, std::size_t{0}}) {
        const std::span<std::byte> workspace = data.workspace(given);
        try {
          decode(p, options, workspace);
          ADD_FAILURE() << line << " " << text_of(options);
        } catch (const Error& error) {
          EXPECT_EQ(error.status(), Status::kWorkspaceTooSmall) << error.what();
          EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
        }
        EXPECT_TRUE(std::all_of(workspace.begin(), workspace.end(), [](std::byte b) { return b == std::byte{0xff}; }));
      }
      EXPECT_EQ(output_bits(p), before);
      EXPECT_EQ(data.canary_fault(), "");
    }
  }
}

TEST(Threads, OutputsAreUntouchedAfterAnError) {
  const auto expect_rejected = [](CaseData& data, const Problem& p, const Options& options, Status status, const char* words) {
    const Bits before = output_bits(data.problem());
    std::vector<std::byte> workspace(workspace_bytes(data.problem(), options_of(ways()[2])) + (1 << 20), std::byte{0xff});
    try {
      decode(p, options, workspace);
      ADD_FAILURE() << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), status) << error.what();
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
    EXPECT_EQ(output_bits(data.problem()), before) << words;
    EXPECT_EQ(data.canary_fault(), "");
  };
  CaseData paged(parse_case("- 8 2 64 700,33,90 page=16"));
  Problem p = paged.problem();
  const Options options = options_of(ways()[1]);
  std::vector<std::int32_t> table(p.block_table, p.block_table + 3 * block_table_stride(p));
  p.block_table = table.data();
  for (const std::int32_t id : {-1, p.num_pages, std::numeric_limits<std::int32_t>::max()}) {
    const auto at = static_cast<std::size_t>(2 * block_table_stride(p) + 5);  // the last slot in use of the last seq
    const std::int32_t own = std::exchange(table[at], id);
    expect_rejected(paged, p, options, Status::kInvalidData, "seq 2 slot 5");
    table[at] = own;
  }
  for (const std::int32_t len : {-1, static_cast<std::int32_t>(p.max_pages * p.page_size + 1)}) {
    const std::vector<std::int32_t> lens = {700, len, 90};
    p.kv_lens = lens.data();
    expect_rejected(paged, p, options, Status::kInvalidData, "seq 1");
  }
  p = paged.problem();
  p.head_dim = 100;
  expect_rejected(paged, p, options, Status::kUnsupported, "head_dim 100");
  p = paged.problem();
  p.q.data = nullptr;
  expect_rejected(paged, p, options, Status::kInvalidArgument, "q is null");
  Options unknown = options;
  unknown.cpu_isa = "ABACUS";
  expect_rejected(paged, paged.problem(), unknown, Status::kUnsupported, "cpu_isa ABACUS");
}

// Under every instruction set and policy. Tasks run on the calling thread: starting threads may allocate.
TEST(Threads, NoAllocationInsideACall) {
#if !LEANATTN_COUNTS_ALLOCATIONS
  GTEST_SKIP() << "allocations are not counted under a sanitizer";
#else
  for (const char* line : kLines) {
    CaseData data(parse_case(line));
    const Problem p = data.problem();
    for (std::size_t way = 0; way < ways().size(); ++way) {
      for (std::size_t isa = 0; isa < isas().size(); ++isa) {
        Options options = with_isa(options_of(ways()[way]), isa);
        options.executor = executors()[0].executor;
        std::vector<std::byte> workspace(workspace_bytes(p, options));
        decode(p, options, workspace);  // what is made once a process
        const long long before = allocations;
        decode(p, options, workspace);
        const long long during = allocations - before;
        EXPECT_EQ(during, 0) << line << " " << text_of(options);
        const long long before_query = allocations;
        const std::size_t bytes = workspace_bytes(p, options);
        EXPECT_EQ(allocations - before_query, 0) << line << " " << bytes;
      }
    }
  }
  EXPECT_GT(allocations, 0);
#endif
}

}  // namespace
}  // namespace leanattn::testing
