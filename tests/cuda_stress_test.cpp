// SPDX-License-Identifier: Apache-2.0
// The GPU under stress: a million calls back to back, two streams, another kernel on most multiprocessors, lengths that change between
// replays of graphs (R4, docs/cases.md).
//
//   LEANATTN_TEST_SECONDS=N   how long CudaStress.* goes on, 10 by default
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "cuda_decoding.h"
#include "cuda_graph.h"
#include "cuda_kernels.h"
#include "inputs.h"

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

// --- For as long as one likes ---

double stress_seconds() {
  const char* text = std::getenv("LEANATTN_TEST_SECONDS");
  const double seconds = text ? std::atof(text) : 0.0;
  return seconds > 0.0 ? seconds : 10.0;
}

// Graphs of a stream whose lengths change between replays, on the device alone. Every replay's O and LSE is kept until the host looks.
class ChangingLengths {
 public:
  static constexpr int kCallsPerGraph = 10, kReplays = 40;

  // line: with the longest lengths; sets: [batch] lengths each, none longer.
  ChangingLengths(const std::string& line, const std::vector<std::vector<std::int32_t>>& sets, const DeviceWay& way, std::size_t path)
      : own_(line), options_(device_options(way, path, stream_)), workspace_(workspace_bytes(own_.device.problem, options_), options_) {
    o_bytes_ = static_cast<std::size_t>(span_of_rows(own_.host, own_.host.o, head_dim_v(own_.host))) * 2;
    lse_bytes_ = static_cast<std::size_t>(total_q(own_.host) * own_.host.q_heads) * 4;
    kept_ = GuardedBuffer(kReplays * (o_bytes_ + lse_bytes_), nullptr, kNanByte);
    stream_.wait();
    for (const std::vector<std::int32_t>& lens : sets) {
      lens_.emplace_back(lens.size() * 4, nullptr, kNanByte);
      lens_.back().upload(lens.data());
      own_.device.set_kv_lens(lens);
      own_.device.reset_outputs();
      decode(own_.device.problem, options_, workspace_.span());
      EXPECT_EQ(own_.device.fetch(), "");
      Problem host = own_.host;
      host.kv_lens = lens.data();
      EXPECT_TRUE(is_right(host, compute_reference(host))) << line << " " << device_text_of(options_);
      keep(0);
      stream_.wait();
      right_.push_back(image(0));
    }
    graph_ = std::make_unique<CapturedGraph>(stream_, [&](cudaStream_t) {
      for (int call = 0; call < kCallsPerGraph; ++call) decode(own_.device.problem, options_, workspace_.span());
    });
  }

  // Queues as many replays as are kept; no two neighbours have the same lengths.
  void queue(std::uint64_t round) {
    for (int replay = 0; replay < kReplays; ++replay) {
      const auto hash = input_hash(round, Input::kLengths, static_cast<std::uint64_t>(replay));
      last_ = (last_ + 1 + hash % (lens_.size() - 1)) % lens_.size();
      set_of_replay_[replay] = last_;
      auto* const lens = const_cast<std::int32_t*>(own_.device.problem.kv_lens);
      must(cudaMemcpyAsync(lens, lens_[last_].data(), lens_[last_].bytes(), cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
      graph_->launch(stream_);
      keep(replay);
    }
    must(cudaEventRecord(ended_, stream_), "cudaEventRecord");
  }
  bool ends(double seconds) const { return ends_within(ended_, seconds); }

  // The number of replays whose bits are not those of the first call with their lengths.
  int wrong() const {
    int count = 0;
    for (int replay = 0; replay < kReplays; ++replay) count += image(replay) != right_[set_of_replay_[replay]];
    return count;
  }
  std::string fault() { return own_.device.fetch() + workspace_.fault() + kept_.fault("kept outputs"); }
  std::string text() const { return to_string(own_.data.spec()) + " " + device_text_of(options_); }

 private:
  void keep(int replay) {
    std::byte* const to = kept_.data() + static_cast<std::size_t>(replay) * (o_bytes_ + lse_bytes_);
    must(cudaMemcpyAsync(to, own_.device.problem.o.data, o_bytes_, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
    must(cudaMemcpyAsync(to + o_bytes_, own_.device.problem.lse, lse_bytes_, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
  }
  std::vector<std::byte> image(int replay) const {
    std::vector<std::byte> bytes(o_bytes_ + lse_bytes_);
    must(cudaMemcpy(bytes.data(), kept_.data() + static_cast<std::size_t>(replay) * bytes.size(), bytes.size(), cudaMemcpyDeviceToHost),
         "cudaMemcpy to the host");
    return bytes;
  }

  Stream stream_;
  Event ended_;
  DeviceCase own_;
  Options options_;
  DeviceWorkspace workspace_;
  std::size_t o_bytes_ = 0, lse_bytes_ = 0, last_ = 0;
  std::size_t set_of_replay_[kReplays] = {};
  GuardedBuffer kept_;
  std::vector<GuardedBuffer> lens_;
  std::vector<std::vector<std::byte>> right_;
  std::unique_ptr<CapturedGraph> graph_;
};

class CudaStress : public CudaTest {};

// Two streams, and every other round a third kernel that holds most multiprocessors for a while.
TEST_F(CudaStress, GraphsOfChangingLengthsOnTwoStreamsLong) {
  constexpr double kPatience = 60.0;  // seconds for a round that takes a fraction of one
  const std::vector<std::vector<std::int32_t>> four = {
      {6000, 1, 0, 300}, {1, 1, 1, 1}, {0, 0, 0, 0}, {63, 6000, 64, 65}, {6000, 6000, 6000, 6000}};
  const std::vector<std::vector<std::int32_t>> one = {{20000}, {1}, {0}, {4096}, {19999}, {777}};
  std::vector<std::unique_ptr<ChangingLengths>> all;
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    all.push_back(std::make_unique<ChangingLengths>("4 8 2 64 6000 page=16", four, DeviceWay{}, path));
    all.push_back(std::make_unique<ChangingLengths>("1 8 1 128 20000 dtype=f16", one, DeviceWay{}, path));
    all.push_back(std::make_unique<ChangingLengths>("4 32 4 128 6000", four, DeviceWay{Policy::kLean, 0, 41}, path));
    all.push_back(std::make_unique<ChangingLengths>("1 8 2 64 20000 q_len=4 page=64", one, DeviceWay{Policy::kFlashDecoding, 7, 0}, path));
  }
  const Stream holding_stream;
  GuardedBuffer words(8, nullptr, 0);  // how many hold; never released, they end by themselves
  auto* const holding = reinterpret_cast<int*>(words.data());
  const auto begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  long long calls = 0;
  std::uint64_t round = 0;
  for (; seconds() < stress_seconds() && !HasFailure(); ++round) {
    ChangingLengths& first = *all[round % all.size()];
    ChangingLengths& second = *all[(round * 3 + 1) % all.size()];  // never the first: an even number of them
    if (round % 2 == 1)
      must(hold_multiprocessors(multiprocessors() - 5, holding, holding + 1, 0.01, holding_stream), "hold_multiprocessors");
    first.queue(round);
    second.queue(round + (std::uint64_t{1} << 32));
    for (ChangingLengths* one_of : {&first, &second}) {
      if (!one_of->ends(kPatience)) GTEST_FAIL() << "round " << round << " hangs: " << one_of->text();
      EXPECT_EQ(one_of->wrong(), 0) << "of " << ChangingLengths::kReplays << " replays of round " << round << ": " << one_of->text();
    }
    calls += 2 * ChangingLengths::kReplays * ChangingLengths::kCallsPerGraph;
    holding_stream.wait();
  }
  for (const auto& one_of : all) EXPECT_EQ(one_of->fault(), "") << one_of->text();
  EXPECT_EQ(words.fault("words"), "");
  std::printf("%lld calls in %llu rounds and %.1f s\n", calls, static_cast<unsigned long long>(round), seconds());
}

}  // namespace
}  // namespace leanattn::testing
