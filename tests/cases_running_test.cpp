// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries: running it (docs/cases.md). Time is for the bench.
#include <algorithm>
#include <functional>
#include <memory>
#include <thread>

#include "decoding.h"

namespace leanattn::testing {
namespace {

// Fifty repeats, then sixteen calls on each of two threads with their own workspaces and outputs.
TEST(Cases, N6_RepeatsAndTwoThreadsAtOnce) {
  for (const char* line : {"- 8 2 64 2000,33,1,0 dtype=bf16", "- 8 2 64 700,130 q_len=3 page=16 dtype=f32"}) {
    CaseData data(parse_case(line)), other(parse_case(line));
    for (const Way& way : ways()) {
      const Options options = options_of(way);
      const Bits first = decoded_bits(data, options);
      const int repeats = &way - ways().data() < 3 ? 50 : 8;
      for (int repeat = 1; repeat < repeats; ++repeat) ASSERT_EQ(decoded_bits(data, options), first) << line << " " << text_of(options);
      int different[2] = {0, 0};
      const auto stream = [&](CaseData& own, int& count) {
        for (int repeat = 0; repeat < 16; ++repeat) count += decoded_bits(own, options) != first;
      };
      std::thread second(stream, std::ref(other), std::ref(different[1]));
      stream(data, different[0]);
      second.join();
      EXPECT_EQ(different[0] + different[1], 0) << line << " " << text_of(options);
    }
  }
}

// Exactly as large as the query said, at every misalignment, between guard bytes, full of NaN; then reused by another problem.
TEST(Cases, R3_ExactWorkspaceReusedByOthers) {
  constexpr std::size_t kGuard = 128;
  const char* lines[] = {"- 8 2 64 700,33,1,0 dtype=bf16", "- 6 3 80 500,64 q_len=4 page=16 dtype=f32 head_dim_v=96",
                         "2 16 1 128 300 dtype=f16", "- 4 4 32 5,0 q_len=0,3", "1 2 2 256 1000"};
  for (std::size_t way = 0; way < ways().size(); ++way) {
    const Options options = with_isa(options_of(ways()[way]), way);
    std::vector<std::unique_ptr<CaseData>> all;
    std::size_t most = 0;
    for (const char* line : lines) {
      all.push_back(std::make_unique<CaseData>(parse_case(line)));
      most = std::max(most, workspace_bytes(all.back()->problem(), options));
    }
    std::vector<std::byte> room(most + 2 * kGuard + 64, std::byte{0xff});
    for (std::size_t round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const Problem p = all[i]->problem();
        const Reference reference = compute_reference(p);
        const std::size_t bytes = workspace_bytes(p, options);
        for (std::size_t shift = round; shift < 64; shift += i == 0 ? 3 : 21) {
          std::byte* begin = room.data() + kGuard + shift;
          std::fill(begin - kGuard, begin, std::byte{0x3c});
          std::fill(begin + bytes, begin + bytes + kGuard, std::byte{0x3c});
          if (round == 1) std::fill(begin, begin + bytes, std::byte{0xff});
          all[i]->reset_outputs();
          decode(p, options, {begin, bytes});
          ASSERT_TRUE(is_right(p, reference)) << lines[i] << " shift " << shift << " " << text_of(options);
          const auto whole = [](std::byte b) { return b == std::byte{0x3c}; };
          ASSERT_TRUE(std::all_of(begin - kGuard, begin, whole)) << lines[i] << " " << text_of(options);
          ASSERT_TRUE(std::all_of(begin + bytes, begin + bytes + kGuard, whole)) << lines[i] << " shift " << shift << text_of(options);
        }
      }
    }
  }
}

// Many short calls back to back from two threads: none hangs, and each is right.
TEST(Cases, R4_BackToBackOnTwoThreads) {
  const int calls = short_run() ? 300 : 20000;
  CaseData first(parse_case("- 4 2 64 40,1,0,130 dtype=f32")), second(parse_case("2 8 1 64 300 page=16"));
  const Options options = options_of({Policy::kLean, 0, HeadOrder::kAlong, false, 2});
  int wrong[2] = {0, 0};
  const auto stream = [&](CaseData& data, int& count) {
    const Problem p = data.problem();
    const Bits right = decoded_bits(data, options);
    count += !compare(p, compute_reference(p, {.kv_heads_per_seq = 0, .threads = 1})).ok();
    std::vector<std::byte> workspace(workspace_bytes(p, options));
    for (int call = 0; call < calls; ++call) {
      decode(p, options, workspace);
      if (call % 64 == 0) count += output_bits(p) != right;
    }
    count += output_bits(p) != right;
  };
  std::thread other(stream, std::ref(second), std::ref(wrong[1]));
  stream(first, wrong[0]);
  other.join();
  EXPECT_EQ(wrong[0] + wrong[1], 0);
}

// Batch 1, 4 KV heads: right on every number of workers, more than tokens as well.
TEST(Cases, R7_AnyNumberOfWorkers) {
  for (const char* line : {"1 16 4 64 4k", "1 16 4 64 17 dtype=f32", "1 4 4 128 1k dtype=f16"}) {
    CaseData data(parse_case(line));
    const Reference reference = compute_reference(data.problem());
    for (const int workers : {1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 300}) {
      for (const bool invariant : {false, true}) {
        for (const HeadOrder order : {HeadOrder::kAuto, HeadOrder::kAlong, HeadOrder::kBeside}) {
          EXPECT_TRUE(is_right(data, options_of({Policy::kLean, 0, order, invariant, workers}), reference));
        }
      }
    }
  }
}

}  // namespace
}  // namespace leanattn::testing
