// SPDX-License-Identifier: Apache-2.0
// The GPU side of a case: the same bytes at the same offsets, results and canaries that come back, a floor that ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "backend.h"
#include "numeric.h"
#include "problem_view.h"
#include "tools/device.h"
#include "tools/device_case.h"
#include "tools/floor_cuda.h"

namespace leanattn::tools {
namespace {

class DeviceCaseTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) GTEST_SKIP() << cuda::why_absent();
  }
};

constexpr const char* kCases[] = {
    "2 8 2 64 300",
    "- 8 2 64 700,1,64,0,513 layout=contiguous strided=1",
    "- 8 4 128 900,130,77 layout=head_major interleaved=1",
    "- 8 2 64 33,1000,65 interleaved=1 strided=1 dtype=f16",
    "- 8 2 128 100,31,257 page=3 strided=1 lse=2",
    "- 8 2 64 0,5,300,9 q_len=0,0,7,1 lse=none",
    "0 8 2 64 0",
};

std::vector<std::byte> on_host(const void* device, std::size_t bytes) {
  std::vector<std::byte> copy(bytes);
  if (bytes > 0) check_cuda(cudaMemcpy(copy.data(), device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return copy;
}

// Whether the device's view lies in its memory where the host's lies in its own, and the bytes are the same from there to the end.
void expect_same(const void* device, const void* host, std::span<const std::byte> host_memory, const std::string& what) {
  ASSERT_EQ(device == nullptr, host == nullptr) << what;
  if (host == nullptr) return;
  const auto* begin = static_cast<const std::byte*>(host);
  const std::size_t offset = static_cast<std::size_t>(begin - host_memory.data());
  const std::vector<std::byte> copy = on_host(static_cast<const std::byte*>(device) - offset, host_memory.size());
  EXPECT_TRUE(std::equal(copy.begin(), copy.end(), host_memory.begin(), host_memory.end())) << what;
}

template <typename Value>
void expect_same_array(const Value* device, const Value* host, std::int64_t count, const std::string& what) {
  if (host == nullptr || count == 0) return;
  const std::vector<std::byte> copy = on_host(device, static_cast<std::size_t>(count) * sizeof(Value));
  EXPECT_EQ(std::memcmp(copy.data(), host, copy.size()), 0) << what;
}

TEST_F(DeviceCaseTest, HoldsTheSameBytesAtTheSameOffsets) {
  for (const char* text : kCases) {
    CaseData data(parse_case(text));
    DeviceCase device(data, 3);
    const Problem host = data.problem();
    for (int copy = 0; copy < 3; ++copy) {
      const Problem problem = device.problem(copy);
      const std::string where = std::string(text) + ", copy " + std::to_string(copy);
      if (data.q_memory().size() > 0) expect_same(problem.q.data, host.q.data, data.q_memory(), where + ": q");
      expect_same(problem.k.data, host.k.data, data.k_memory(), where + ": k");
      const bool own = data.v_memory().size() > 0;
      expect_same(problem.v.data, host.v.data, own ? data.v_memory() : data.k_memory(), where + ": v");
      expect_same(problem.o.data, host.o.data, data.o_memory(), where + ": o");
      expect_same(problem.lse, host.lse, data.lse_memory(), where + ": lse");
      expect_same_array(problem.kv_lens, host.kv_lens, host.batch, where + ": kv_lens");
      expect_same_array(problem.cu_seqlens_q, host.cu_seqlens_q, host.batch + 1, where + ": cu_seqlens_q");
      expect_same_array(problem.cu_seqlens_kv, host.cu_seqlens_kv, host.batch + 1, where + ": cu_seqlens_kv");
      const std::int64_t slots = (host.batch - 1) * block_table_stride(host) + host.max_pages;
      expect_same_array(problem.block_table, host.block_table, slots, where + ": block_table");
      EXPECT_EQ(problem.k.data == device.problem(0).k.data, copy == 0) << where;
    }
  }
}

TEST_F(DeviceCaseTest, NamesEveryCanaryThatIsOverwritten) {
  CaseData data(parse_case("2 8 2 64 300 strided=1"));
  DeviceCase device(data);
  const std::span<std::byte> workspace = device.workspace(1000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.data()) % 32, 16u);
  const std::vector<std::byte> nan = on_host(workspace.data(), workspace.size());
  EXPECT_TRUE(std::all_of(nan.begin(), nan.end(), [](std::byte b) { return b == std::byte{0xff}; }));
  auto* o = static_cast<std::byte*>(device.problem().o.data);
  auto* lse = reinterpret_cast<std::byte*>(device.problem().lse);
  const std::pair<std::byte*, const char*> bytes[] = {
      {workspace.data() - 1, "workspace: written before"},
      {workspace.data() + 1000, "workspace: written behind"},
      {o - 1, "o: written before row 0"},
      {o + 64 * 2, "o: written before row 1"},
      {lse - 1, "lse: written before"},
      {lse + 2 * 8 * 4, "lse: written behind"},
  };
  {
    DeviceCase other(data);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(other.workspace(1000, 256).data()) % 256, 0u);
    other.copy_back();
    EXPECT_EQ(data.canary_fault(), "");
  }
  for (const auto& [byte, words] : bytes) {
    device.copy_back();
    EXPECT_EQ(data.canary_fault(), "");
    check_cuda(cudaMemset(byte, 1, 1), "cudaMemset");
    device.copy_back();
    EXPECT_NE(data.canary_fault().find(words), std::string::npos) << words << ": " << data.canary_fault();
    check_cuda(cudaMemset(byte, 0xa5, 1), "cudaMemset");
  }
}

TEST_F(DeviceCaseTest, ResultsComeBack) {
  CaseData data(parse_case("2 8 2 64 300"));
  const Reference reference = compute_reference(data.problem());
  DeviceCase device(data);
  device.copy_back();
  EXPECT_FALSE(judge(data, reference).ok);  // NaN
  std::vector<std::uint16_t> right(static_cast<std::size_t>(data.rows() * 64));
  std::transform(reference.o.begin(), reference.o.end(), right.begin(), [](double x) {
    std::uint16_t bits = 0;
    store_from_float(&bits, DType::kBFloat16, 0, static_cast<float>(x));
    return bits;
  });
  const std::vector<float> lse(reference.lse.begin(), reference.lse.end());
  const Problem problem = device.problem();
  check_cuda(cudaMemcpy(problem.o.data, right.data(), right.size() * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
  check_cuda(cudaMemcpy(problem.lse, lse.data(), lse.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  device.copy_back();
  const Accuracy accuracy = judge(data, reference);
  EXPECT_TRUE(accuracy.ok) << accuracy.where << accuracy.fault;
  EXPECT_GT(accuracy.relative_error, 0.0);
  EXPECT_LT(accuracy.relative_error, 0.01);
}

TEST_F(DeviceCaseTest, WorkloadChecksAndTimes) {
  for (const char* text : {"2 8 2 64 300", "- 32 8 128 700,1,64,0,513 page=16", "2 28 4 128 1000 layout=head_major dtype=f16"}) {
    const Case c = parse_case(text);
    CaseData data(c);
    const Reference reference = compute_reference(data.problem());
    DeviceWorkload workload(data, 3);
    const Options options = run_options(c, {}, Backend::kCuda);
    const Accuracy accuracy = workload.check(options, reference);
    EXPECT_TRUE(accuracy.ok) << text << ": " << accuracy.where << accuracy.fault;
    const DeviceTiming timing = workload.time(options, {.replays = 3});
    EXPECT_EQ(timing.fault, "") << text;
    EXPECT_EQ(timing.copies, 3);
    EXPECT_EQ(timing.calls, 4);
    EXPECT_EQ(timing.timing.pairs, 3);
    EXPECT_GT(timing.timing.us, 0.0);
    EXPECT_GT(timing.timing.floor_us, 0.0);
  }
}

// Every block enters, starts its stretch and leaves, in that order; a merge needs a count. Marks that a change adds need no change here.
TEST_F(DeviceCaseTest, TimelineOfEveryBlock) {
  const std::vector<std::string> marks = cuda::timeline_marks();
  if (marks.empty()) GTEST_SKIP() << "a build without LEANATTN_TIMELINE";
  const auto index = [&](const char* name) {
    return static_cast<std::size_t>(std::find(marks.begin(), marks.end(), name) - marks.begin());
  };
  ASSERT_LT(index("stretch"), marks.size());
  ASSERT_EQ(index("entry"), 0u);
  ASSERT_EQ(index("exit"), marks.size() - 1);
  for (const char* text : {"1 8 1 128 16k", "- 32 8 128 700,1,64,0,513 page=16", "2 8 2 64 300 workers=3"}) {
    const Case c = parse_case(text);
    CaseData data(c);
    DeviceWorkload workload(data, 3);
    const Options options = run_options(c, {}, Backend::kCuda);
    ASSERT_TRUE(workload.check(options, compute_reference(data.problem())).ok) << text;
    for (const Timeline& timeline : workload.timelines(options, 3)) {
      ASSERT_FALSE(timeline.blocks.empty()) << text;
      EXPECT_LE(static_cast<int>(timeline.blocks.size()), worker_count(options)) << text;
      EXPECT_GT(timeline.duration_ns(), 500);
      EXPECT_LT(timeline.duration_ns(), 10'000'000);
      for (const std::vector<std::int64_t>& block : timeline.blocks) {
        EXPECT_LE(block.front(), block[index("stretch")]) << text;
        EXPECT_LE(block[index("stretch")], block.back()) << text;
        EXPECT_EQ(block.back(), *std::max_element(block.begin(), block.end())) << text;
      }
    }
  }
}

// Any length that is a multiple of 16 bytes, in one piece or in two.
TEST_F(DeviceCaseTest, TheFloorEnds) {
  const DeviceBuffer memory(std::size_t{40} << 20);
  const DeviceFloor floor;
  const DeviceStream stream;
  for (const std::int64_t bytes : {0, 16, kFloorChunkBytes - 16, kFloorChunkBytes, kFloorChunkBytes + 16, 20 << 20}) {
    for (const std::int64_t more : {0, 48, 3 * kFloorChunkBytes + 32}) {
      floor.read({memory.data(), bytes, memory.data() + (20 << 20), more}, stream);
      stream.wait();
    }
  }
}

TEST(DeviceCopies, KeepTheCacheCold) {
  EXPECT_EQ(device_copies(std::int64_t{1} << 32), 1);
  EXPECT_EQ(device_copies(256 << 20), 1);
  EXPECT_EQ(device_copies((256 << 20) - 1), 2);
  EXPECT_EQ(device_copies(1 << 20), 256);
  EXPECT_EQ(device_copies(0), 640);
}

}  // namespace
}  // namespace leanattn::tools
