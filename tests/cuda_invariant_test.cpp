// SPDX-License-Identifier: Apache-2.0
// Batch-invariant calls on a GPU: a row's bits are those of its sequence alone, whatever stands round it, however the line is cut, on how
// many multiprocessors, whatever bounds the host gave; and they are right.
#include "cuda_decoding.h"

namespace leanattn::testing {
namespace {

Options invariant(Options options) {
  options.batch_invariant = true;
  return options;
}

// Everything that the bits may not depend on: paths, policies, blocks, head orders.
std::vector<Options> invariant_ways() {
  std::vector<Options> all;
  std::size_t turn = 0;
  for (const int workers : {0, 1, 2, 7, 50, 131}) {
    for (const HeadOrder order : {HeadOrder::kAuto, HeadOrder::kAlong, HeadOrder::kBeside}) {
      const auto add = [&](Policy policy, int splits) {
        all.push_back(invariant(device_options({policy, splits, workers}, turn++)));
        all.back().head_order = order;
      };
      add(Policy::kLean, 0);
      add(Policy::kLean, 0);  // on the other path
      if (order != HeadOrder::kAuto) continue;
      add(Policy::kFa2, 0);
      add(Policy::kFlashDecoding, 0);
      add(Policy::kFlashDecoding, 1 + 3 * workers);
    }
  }
  return all;
}

constexpr const char* kBatches[] = {
    "- 8 1 128 700,1,300,257,0,33,1025,513,2000,16",
    "- 32 8 128 4100,64,900,1,0,20000",
    "- 8 2 64 700,1,300,257,0,33,1025,8000 dtype=f16",
    "- 6 3 72 700,1,300,257,0,33,1025 q_len=3 softcap=20 sink=1",
    "- 16 1 128 700,1,3000,257,0,33 dtype=f16 q_len=1,5,0,2,3,8",
    "- 8 2 96 5000,1,1300,257,0,33 window=700 alibi=1 lse=2",
    "- 5 1 256 900,80,3000 q_len=20 tree=20",
    "- 64 1 256 40,6000 q_len=2",
};
constexpr const char* kLayouts[] = {" layout=contiguous", " page=16", " page=7 strided=1", " layout=ragged", " layout=head_major"};

using CudaInvariant = CudaTest;

TEST_F(CudaInvariant, RowsAreTheSameAloneAndInAnyBatch) {
  std::size_t turn = 0;
  for (const char* batch : kBatches) {
    for (const char* layout : kLayouts) {
      const CaseData data(parse_case(std::string(batch) + layout));
      const Problem whole = data.problem();
      std::vector<Bits> alone;
      for (int seq = 0; seq < whole.batch; ++seq) {
        const Part part(whole, seq, seq + 1);
        DeviceProblem device(part.problem);
        alone.push_back(device_bits(part.problem, device, invariant(device_options({}, turn++))));
      }
      for (const Options& options : invariant_ways()) {
        const int begin = static_cast<int>(turn % 3) % whole.batch, end = whole.batch - static_cast<int>(turn % 4 == 3);
        ++turn;
        const Part part(whole, begin, std::max(begin + 1, end));
        DeviceProblem device(part.problem);
        Bits expected;
        for (int seq = begin; seq < begin + part.problem.batch; ++seq) {
          expected.insert(expected.end(), alone[static_cast<std::size_t>(seq)].begin(), alone[static_cast<std::size_t>(seq)].end());
        }
        if (enough_failures()) return;
        EXPECT_EQ(device_bits(part.problem, device, options), expected) << batch << layout << " " << device_text_of(options);
      }
    }
  }
}

// CASES N5.
TEST_F(CudaInvariant, N5_SameBitsAloneAndAmongOthers) {
  for (const int others : {1, 3, 15, 63}) {
    std::string lens = "777";
    for (int i = 0; i < others; ++i) lens += "," + std::to_string(i * 97 % 2500);
    const CaseData data(parse_case("- 32 8 128 " + lens + " page=16"));
    const Problem whole = data.problem();
    const Part first(whole, 0, 1);
    DeviceProblem alone(first.problem), batch(whole);
    for (const Options& options : invariant_ways()) {
      const Bits expected = device_bits(first.problem, alone, options);
      Bits all = device_bits(whole, batch, options);
      all.resize(expected.size());
      EXPECT_EQ(all, expected) << others << " others, " << device_text_of(options);
    }
  }
}

// Outputs of many chunks, cut into as many stretches as there are multiprocessors, in clusters of every size that the host may choose.
TEST_F(CudaInvariant, ManyChunksInAnyCut) {
  for (const char* line : {"- 8 1 128 1024", "- 8 1 128 1100", "- 8 1 128 4096", "- 8 1 128 16384", "- 8 1 128 17000", "- 8 1 128 70001",
                           "- 24 3 128 30000", "- 8 8 64 33000 dtype=f16", "- 20 5 64 1500", "- 64 1 128 9000", "- 8 1 128 300000"}) {
    const CaseData data(parse_case(line + std::string(" layout=contiguous")));
    const Problem host = data.problem();
    DeviceProblem device(host);
    Bits first;
    for (const Options& options : invariant_ways()) {
      const Bits bits = device_bits(host, device, options);
      if (first.empty()) first = bits;
      if (enough_failures()) return;
      EXPECT_EQ(bits, first) << line << " " << device_text_of(options);
    }
    // Bounds of the host: more room than the longest seq.
    DeviceProblem again(host);
    again.problem.kv_capacity = host.kv_capacity * 8;
    EXPECT_EQ(device_bits(host, again, invariant(device_options({}, 0))), first) << line;
  }
}

TEST_F(CudaInvariant, BitsDoNotDependOnTheLayout) {
  for (const char* batch : kBatches) {
    Bits first;
    std::size_t turn = 0;
    for (const char* layout : {" layout=contiguous", " page=1", " page=16", " page=7 strided=1", " page=1000 interleaved=1",
                               " layout=ragged", " layout=head_major", " layout=contiguous strided=1"}) {
      const CaseData data(parse_case(std::string(batch) + layout));
      const Problem host = data.problem();
      DeviceProblem device(host);
      const Bits bits = device_bits(host, device, invariant_ways()[7 * turn++ % invariant_ways().size()]);
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first) << batch << layout;
    }
  }
}

TEST_F(CudaInvariant, OutputsAreRight) {
  for (const char* batch : kBatches) {
    DeviceCase one(batch);
    for (const Options& options : invariant_ways()) {
      if (enough_failures()) return;
      EXPECT_TRUE(one.judge(options));
    }
  }
  DeviceCase long_one("- 8 1 128 100000");
  EXPECT_TRUE(long_one.judge(invariant(device_options({}, 0))));
}

// Workspaces at most so large, whatever the lengths, and never looked at again after the call.
TEST_F(CudaInvariant, WorkspaceIsBoundedByTheGrid) {
  const CaseData data(parse_case("- 8 1 128 1000000"));
  Problem problem = data.problem();
  const std::size_t one = workspace_bytes(problem, invariant(device_options({}, 0)));
  problem.batch = 4096;
  problem.kv_capacity = 1 << 30;
  EXPECT_EQ(workspace_bytes(problem, invariant(device_options({}, 0))), one);
  const std::size_t partial = 8 * 128 * 4 + 4 * 8 * 8;
  EXPECT_LE(one, 2 * 17 * partial * static_cast<std::size_t>(multiprocessors()) + (1u << 20));
}

}  // namespace
}  // namespace leanattn::testing
