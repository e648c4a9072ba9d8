// SPDX-License-Identifier: Apache-2.0
// The GPU under stress: a million calls back to back, two streams, another kernel on most multiprocessors (CASES R4, docs/cases.md).
#include <chrono>
#include <cstdio>
#include <thread>

#include "cuda_decoding.h"
#include "cuda_graph.h"
#include "cuda_kernels.h"

namespace leanattn::testing {
namespace {

using Clock = std::chrono::steady_clock;

bool ends_within(cudaEvent_t event, double seconds) {
  const auto begin = Clock::now();
  while (cudaEventQuery(event) == cudaErrorNotReady) {
    if (std::chrono::duration<double>(Clock::now() - begin).count() > seconds) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

class Event {
 public:
  Event() { must(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// A call, its own memory and its own stream, in graphs of a thousand.
struct Endless {
  Endless(const std::string& line, const DeviceWay& way, std::size_t path)
      : own(line), options(device_options(way, path, stream)), workspace(workspace_bytes(own.device.problem, options), options) {
    first = own.bits(device_options(way, path));
    stream.wait();
    graph = std::make_unique<CapturedGraph>(stream, [&](cudaStream_t) {
      for (int call = 0; call < 1000; ++call) decode(own.device.problem, options, workspace.span());
    });
    own.device.reset_outputs();
  }
  // The bits of the last call are those of the first.
  void expect_same() {
    EXPECT_EQ(own.device.fetch() + workspace.fault(), "");
    EXPECT_EQ(output_bits(own.host), first) << device_text_of(options);
    EXPECT_TRUE(is_right(own.host, own.reference)) << device_text_of(options);
    own.device.reset_outputs();
  }
  Stream stream;
  DeviceCase own;
  Options options;
  DeviceWorkspace workspace;
  Bits first;
  std::unique_ptr<CapturedGraph> graph;
};

TEST_F(CudaCases, R4_MillionCallsBackToBackLong) {
  const int graphs = short_run() ? 20 : 1000;
  const auto begin = Clock::now();
  Endless endless("- 8 2 64 3000,1,0,200", {}, 0);
  for (int i = 0; i < graphs; ++i) {
    endless.graph->launch(endless.stream);
    if (i % 100 == 99 && i + 1 < graphs) endless.expect_same();
  }
  endless.expect_same();
  std::printf("%d calls in %.1f s\n", graphs * 1000, std::chrono::duration<double>(Clock::now() - begin).count());
}

TEST_F(CudaCases, R4_TwoStreamsWithoutEndLong) {
  const int graphs = short_run() ? 5 : 100;
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    Endless one("- 8 2 64 3000,1,0,200", {}, path), two("1 16 2 128 9000 dtype=f16", {Policy::kFlashDecoding, 7, 50}, path);
    for (int i = 0; i < graphs; ++i) {
      one.graph->launch(one.stream);
      two.graph->launch(two.stream);
    }
    one.expect_same();
    two.expect_same();
  }
}

// Another kernel holds all multiprocessors but a few until the call has ended. A call whose blocks waited for blocks that cannot start
// would never end: then the others are let go after a while, and the test fails. Clusters start where the device has room for a whole one:
// a call that may use them is asked to be right once the other kernel is done; with `workers` it uses none.
TEST_F(CudaCases, R4_OtherKernelOnMostMultiprocessors) {
  constexpr double kPatience = 5.0, kLongest = 60.0;  // seconds
  const int all = multiprocessors();
  for (const char* line : {"- 8 2 64 2000,33,1,0", "1 8 1 128 16k", "1 8 1 128 1k dtype=f16", "- 32 8 128 9000,100x15", "2000 8 1 64 3"}) {
    DeviceCase own{std::string(line)};
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : {device_ways()[0], device_ways()[2], device_ways()[3], device_ways()[7]}) {
        if (enough_failures()) return;
        for (const int left_free : {12, 1}) {
          const Stream holding_stream, copying_stream, stream;
          const Event ended;
          GuardedBuffer words(8, nullptr, 0);  // holding, release
          auto* const holding = reinterpret_cast<int*>(words.data());
          int* const release = holding + 1;
          const Options options = device_options(way, path, stream);
          const DeviceWorkspace workspace(workspace_bytes(own.device.problem, options), options);
          own.device.reset_outputs();
          // Loads the kernel, which may wait for the whole device the first time.
          decode(own.device.problem, options, workspace.span());
          own.device.reset_outputs();
          const int held = all - left_free, one = 1;
          must(hold_multiprocessors(held, holding, release, kLongest, holding_stream), "hold_multiprocessors");
          int begun = 0;
          for (const auto begin = Clock::now(); begun < held;) {
            must(cudaMemcpyAsync(&begun, holding, 4, cudaMemcpyDeviceToHost, copying_stream), "cudaMemcpyAsync");
            copying_stream.wait();
            if (std::chrono::duration<double>(Clock::now() - begin).count() > kPatience) break;
          }
          EXPECT_EQ(begun, held) << "the other kernel did not get its multiprocessors";
          decode(own.device.problem, options, workspace.span());
          must(cudaEventRecord(ended, stream), "cudaEventRecord");
          const bool may_have_clusters = device_paths()[path] != "portable" && way.policy == Policy::kLean && way.workers == 0;
          if (!may_have_clusters) {
            EXPECT_TRUE(ends_within(ended, kPatience)) << "waits for multiprocessors that another kernel holds (" << held << " of " << all
                                                       << "): " << line << " " << device_text_of(options);
          }
          must(cudaMemcpyAsync(release, &one, 4, cudaMemcpyHostToDevice, copying_stream), "cudaMemcpyAsync");
          copying_stream.wait();
          holding_stream.wait();
          EXPECT_EQ(own.device.fetch() + workspace.fault(), "");
          EXPECT_TRUE(is_right(own.host, own.reference)) << line << " " << device_text_of(options);
        }
      }
    }
  }
}

}  // namespace
}  // namespace leanattn::testing
