// SPDX-License-Identifier: Apache-2.0
// The golden table on the GPU under every policy and worker count, and a suite of tiny shapes that reaches every kernel variant, for
// compute-sanitizer: CudaSmall.
#include <cstdio>

#include "cuda_decoding.h"
#include "respaced.h"
#include "tools/golden.h"

namespace leanattn::testing {
namespace {

// Says at the end how often a result was beyond its own tolerance and within that of its twins; more than one in a thousand would be a
// kernel that errs more than the naive computation.
class LuckReport : public ::testing::Environment {
 public:
  void TearDown() override {
    if (luck().judged == 0) return;
    std::printf("%d of %d results were beyond their own tolerance and within that of their twins\n", luck().missed, luck().judged);
    EXPECT_LE(luck().missed, luck().judged / 1000 + 2);
  }
};
const ::testing::Environment* const kLuckReport = ::testing::AddGlobalTestEnvironment(new LuckReport);

std::vector<DeviceWay> every_way() {
  std::vector<DeviceWay> ways;
  for (const int workers : {1, 2, 3, 0}) {
    ways.push_back({Policy::kLean, 0, workers});
    ways.push_back({Policy::kFa2, 0, workers});
    for (const int splits : {0, 1, 2, 7}) ways.push_back({Policy::kFlashDecoding, splits, workers});
  }
  return ways;
}

class CudaGolden : public CudaTest {};
class CudaSmall : public CudaTest {};

// A window that hides nothing takes the variants of masks and logit rules, with check_data those in full: the bits stay those of the plain
// ones, whether the window is cut off at the stage or not. Up to 32 rows: more have variants of their own (is_warpgroup).
TEST_F(CudaGolden, OneFeatureOrAllGiveTheSameBits) {
  for (const char* line : {"1 8 1 128 1000", "3 32 8 128 4096", "1 12 12 64 3000", "40 8 2 64 300", "- 32 8 128 20000,17,3000,1",
                           "2 8 4 128 700 q_len=3", "- 4 1 64 5000,64,1 page=16 q_len=2"}) {
    CaseData data(parse_case(line));
    Problem windowed = data.problem();
    windowed.window_left = 1 << 20;
    DeviceProblem plain_device(data.problem()), windowed_device(windowed);
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const int workers : {0, 3}) {
        Options options = device_options({Policy::kLean, 0, workers}, path);
        const Bits plain = device_bits(data.problem(), plain_device, options);
        EXPECT_EQ(plain, device_bits(windowed, windowed_device, options)) << line << device_text_of(options);
        options.check_data = true;
        EXPECT_EQ(plain, device_bits(data.problem(), plain_device, options)) << line << device_text_of(options);
        EXPECT_EQ(plain, device_bits(windowed, windowed_device, options)) << line << device_text_of(options);
        options.batch_invariant = true;
        const Bits invariant = device_bits(windowed, windowed_device, options);
        options.check_data = false;
        EXPECT_EQ(invariant, device_bits(data.problem(), plain_device, options)) << line << device_text_of(options);
        if (enough_failures()) return;
      }
    }
  }
}

// A case of a type that the backend lacks runs as float16.
TEST_F(CudaGolden, TableUnderEveryPolicy) {
  for (const tools::GoldenCase& golden : tools::golden_cases()) {
    Case c = parse_case(golden.text);
    if (c.dtype == DType::kFloat32) c.dtype = DType::kFloat16;
    c.batch_invariant = false;  // the ways below say how the line is cut
    SCOPED_TRACE(golden.name);
    DeviceCase(c).expect_right(every_way());
  }
}

TEST_F(CudaGolden, OwnOptionsOfTheCase) {
  for (const tools::GoldenCase& golden : tools::golden_cases()) {
    const Case c = parse_case(golden.text);
    Options options = CaseData(c).options();
    options.backend = Backend::kCuda;
    if (!device_refusal(CaseData(c).problem(), options).empty()) continue;
    SCOPED_TRACE(golden.name);
    DeviceCase own(c);
    for (const std::string& path : device_paths()) {
      options.cuda_path = path.c_str();
      EXPECT_TRUE(own.judge(options));
    }
  }
}

// --- Tiny shapes. Memory has no guards, so that compute-sanitizer sees every byte beyond a tensor ---

std::vector<DeviceWay> few_ways() {
  return {{Policy::kLean, 0, 0}, {Policy::kLean, 0, 2}, {Policy::kFa2, 0, 0}, {Policy::kFlashDecoding, 3, 0}};
}

void expect_small(const std::string& line) {
  SCOPED_TRACE(line);
  DeviceCase(line, {}, Room::kTight).expect_right(few_ways());
}

TEST_F(CudaSmall, HeadDimsAndRowBlocks) {
  for (const int dim : cuda::kHeadDims) {
    for (const int group : {1, 3, 7, 12, 16, 17, 31, 33, 64}) {
      const char* const dtype = group % 3 == 1 ? " dtype=bf16" : " dtype=f16";  // each with every row block
      expect_small("- " + std::to_string(2 * group) + " 2 " + std::to_string(dim) + " 130,1,0,65" + dtype);
    }
  }
}

TEST_F(CudaSmall, PaddedHeadDims) {
  for (const char* dims : {"32", "40", "72", "88", "120", "136", "248", "64 head_dim_v=128", "192 head_dim_v=128", "128 head_dim_v=256",
                           "72 head_dim_v=32", "96 head_dim_v=104"}) {
    const std::string heads = std::string(dims).substr(0, std::string(dims).find(' ')), more = std::string(dims).substr(heads.size());
    for (const char* layout : {"", " page=16 dtype=f16", " layout=head_major strided=1", " page=3 interleaved=1 dtype=f16"}) {
      expect_small("- 8 2 " + heads + " 130,1,0,65" + more + layout);
    }
    expect_small("- 20 1 " + heads + " 130,1,0,65 q_len=2 dtype=f16" + more);
  }
}

TEST_F(CudaSmall, Layouts) {
  for (const char* layout :
       {" layout=contiguous", " layout=head_major", " layout=ragged", " page=1", " page=3", " page=16", " page=64", " page=1000",
        " layout=contiguous strided=1", " layout=head_major strided=1", " layout=ragged strided=1", " page=16 strided=1",
        " page=16 interleaved=1", " page=5 strided=1 interleaved=1", " layout=contiguous interleaved=1"}) {
    expect_small(std::string("- 8 2 64 200,1,0,63,64,65") + layout);
    expect_small(std::string("- 6 2 128 70,0,129 q_len=3 dtype=f16") + layout);
  }
}

TEST_F(CudaSmall, OddStrides) {
  for (const char* layout :
       {" layout=contiguous", " layout=head_major", " layout=ragged", " page=3", " page=16", " page=16 head_dim_v=40"}) {
    for (const int odd : {1, 2, 4}) {  // rows at 2, 4 and 8 bytes
      const CaseData data(parse_case(std::string("- 8 2 64 130,1,0,65 q_len=2") + layout));
      const Gaps gaps{odd, 0, odd, odd};
      const Respaced respaced(data.problem(), gaps, gaps, gaps, gaps);
      DeviceProblem device(respaced.problem, Room::kTight);
      const Reference reference = compute_reference(respaced.problem);
      for (std::size_t path = 0; path < device_paths().size(); ++path) {
        for (const DeviceWay& way : few_ways()) {
          if (enough_failures()) return;
          EXPECT_TRUE(is_right(respaced.problem, device, device_options(way, path), reference, Room::kTight)) << layout << " odd " << odd;
        }
      }
    }
  }
}

TEST_F(CudaSmall, Queries) {
  for (const char* more : {" q_len=16", " q_len=16 causal=0", " q_len=1,0,9,16", " q_len=0x4", " q_len=5 lse=2", " q_len=2 lse=none"}) {
    expect_small(std::string("- 8 2 64 130,1,0,65") + more);
    expect_small(std::string("- 24 2 128 100,7,0,33 page=16 dtype=f16") + more);
  }
}

TEST_F(CudaSmall, MasksAndLogitRules) {
  for (const char* more : {" window=40", " window=0", " softcap=30 spread=50", " alibi=1", " sink=1", " tree=5", " tree=5 causal=0",
                           " tree=70 window=20", " q_len=5,0,1,9 tree=9 window=3", " q_len=3 causal=0 alibi=1 window=64",
                           " q_len=16 tree=16 window=70 softcap=20 alibi=1 sink=1 lse=2"}) {
    expect_small(std::string("- 8 2 64 200,1,0,65") + more);
    expect_small(std::string("- 6 1 128 130,7,0,64 page=16 dtype=f16") + more);
    expect_small(std::string("- 12 2 96 66,300,0,2 layout=head_major") + more);
  }
  expect_small("- 64 1 256 130,0,65 window=90 softcap=20 alibi=1 sink=1");
  expect_small("- 40 1 128 130,0,65 q_len=2 tree=2 window=90 softcap=20 alibi=1 sink=1 dtype=f16");
}

TEST_F(CudaSmall, Batches) {
  expect_small("0 8 2 64 0");
  expect_small("7 4 1 64 0");
  expect_small("300 4 2 64 3");
  expect_small("- 2 1 128 1x100,0x50,70x3,1x40 page=4");
}

TEST_F(CudaSmall, EveryPartOfAMerge) {
  expect_small("1 8 1 128 3000");
  expect_small("- 16 2 64 2500,100,1 page=16 dtype=f16");
  expect_small("1 8 8 64 700 q_len=4");
}

TEST_F(CudaSmall, ProgrammaticLaunch) {
  DeviceCase own("- 8 2 64 500,1,0,65", {}, Room::kTight);
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    Options options = device_options({}, path);
    options.programmatic_launch = true;
    EXPECT_TRUE(own.judge(options));
  }
}

}  // namespace
}  // namespace leanattn::testing
