// SPDX-License-Identifier: Apache-2.0
// A case on the GPU against the reference, and in graphs against the clock and the read floor.
#include "tools/device.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "tools/device_case.h"
#include "tools/floor_cuda.h"

namespace leanattn::tools {
namespace {

constexpr double kWarmSeconds = 0.05;  // for the clocks to rise
constexpr int kWarmReplays = 3;

// How long a graph takes on its stream.
class Stopwatch {
 public:
  explicit Stopwatch(const DeviceStream& stream) : stream_(stream) {
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Stopwatch() {
    if (begin_) cudaEventDestroy(begin_);
    if (end_) cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  double replay_us(const DeviceGraph& graph) const {
    check_cuda(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    graph.launch(stream_);
    check_cuda(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end_), "a graph of calls");
    float ms = 0.0f;
    check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(ms) * 1e3;
  }

 private:
  const DeviceStream& stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// A graph of at least four calls over the copies of a case in turn, on a stream of its own.
struct Calls {
  Calls(DeviceCase& on_device, const Options& options) : count(std::max(on_device.copies(), 4)) {
    Options on_stream = options;
    on_stream.stream = stream;
    workspace = on_device.workspace(workspace_bytes(on_device.problem(), on_stream), 256);
    on_device.reset_outputs();
    initialize_workspace(on_stream, workspace);
    graph.emplace(stream, [&](cudaStream_t) {
      for (int call = 0; call < count; ++call) decode(on_device.problem(call % on_device.copies()), on_stream, workspace);
    });
  }

  int count;
  DeviceStream stream;
  std::span<std::byte> workspace;
  std::optional<DeviceGraph> graph;
};

// As many bytes as a call must read, from the buffers that it reads them from: half of them from V's where it has one of its own.
FloorPieces floor_pieces(const DeviceCase& on_device, int copy, std::int64_t kv_bytes, const Case& c) {
  const std::span<const std::byte> k = on_device.k_memory(copy), v = on_device.v_memory(copy);
  const auto part = [](std::span<const std::byte> memory, std::int64_t bytes) {
    return std::min<std::int64_t>(bytes, static_cast<std::int64_t>(memory.size())) / 16 * 16;
  };
  FloorPieces pieces;
  pieces.first = k.data();
  if (v.empty()) {
    pieces.first_bytes = part(k, kv_bytes);
    return pieces;
  }
  const std::int64_t v_bytes = kv_bytes / (c.head_dim + c.head_dim_v) * c.head_dim_v;
  pieces.first_bytes = part(k, kv_bytes - v_bytes);
  pieces.second = v.data();
  pieces.second_bytes = part(v, v_bytes);
  return pieces;
}

std::vector<std::byte> outputs(CaseData& data) {
  std::vector<std::byte> bytes;
  for (const std::span<std::byte> memory : {data.o_memory(), data.lse_memory()}) bytes.insert(bytes.end(), memory.begin(), memory.end());
  return bytes;
}

}  // namespace

std::optional<Device> current_device() {
  if (!cuda::available()) return std::nullopt;
  int index = 0;
  cudaDeviceProp properties{};
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  Device device;
  device.name = properties.name;
  device.multiprocessors = properties.multiProcessorCount;
  device.compute_major = properties.major;
  device.compute_minor = properties.minor;
  device.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  device.l2_bytes = properties.l2CacheSize;
  return device;
}

DeviceWorkload::DeviceWorkload(CaseData& data, int copies) : data_(data), case_(std::make_unique<DeviceCase>(data, copies)) {}
DeviceWorkload::~DeviceWorkload() = default;

Accuracy DeviceWorkload::check(const Options& options, const Reference& reference) {
  const Problem problem = case_->problem();
  const DeviceStream stream;
  Options on_stream = options;
  on_stream.stream = stream;
  const std::span<std::byte> workspace = case_->workspace(workspace_bytes(problem, on_stream));
  case_->reset_outputs();
  initialize_workspace(on_stream, workspace);
  decode(problem, on_stream, workspace);
  stream.wait();
  case_->copy_back();
  return judge(data_, reference);
}

DeviceTiming DeviceWorkload::time(const Options& options, const DeviceTimingOptions& timing) {
  const std::vector<std::byte> expected = outputs(data_);
  const Calls calls(*case_, options);
  DeviceTiming result;
  result.copies = case_->copies();
  result.calls = calls.count;
  const DeviceFloor floor;
  result.floor = floor.name();
  const DeviceGraph floor_graph(calls.stream, [&](cudaStream_t stream) {
    for (int call = 0; call < result.calls; ++call) {
      floor.read(floor_pieces(*case_, call % result.copies, data_.kv_bytes(), data_.spec()), stream);
    }
  });
  const Stopwatch stopwatch(calls.stream);
  double warm_us = 0.0;
  for (int warm = 0; warm < kWarmReplays || warm_us < kWarmSeconds * 1e6; ++warm) {
    warm_us += stopwatch.replay_us(floor_graph) + stopwatch.replay_us(*calls.graph);
  }
  std::vector<double> kernel_times, floor_times;
  for (int replay = 0; replay < timing.replays; ++replay) {
    floor_times.push_back(stopwatch.replay_us(floor_graph) / result.calls);
    kernel_times.push_back(stopwatch.replay_us(*calls.graph) / result.calls);
  }
  result.timing = summarize(std::move(kernel_times), std::move(floor_times));
  case_->copy_back();
  result.fault = data_.canary_fault();
  if (result.fault.empty() && outputs(data_) != expected) result.fault = "the last call of the graph left other bits than the checked call";
  return result;
}

std::vector<Timeline> DeviceWorkload::timelines(const Options& options, int replays) {
  const Calls calls(*case_, options);
  const std::size_t bytes = cuda::timeline_bytes(case_->problem(), options), marks = cuda::timeline_marks().size();
  std::vector<std::uint64_t> times(bytes / sizeof(std::uint64_t));
  const Stopwatch stopwatch(calls.stream);
  double warm_us = 0.0;
  for (int warm = 0; warm < kWarmReplays || warm_us < kWarmSeconds * 1e6; ++warm) warm_us += stopwatch.replay_us(*calls.graph);
  std::vector<Timeline> all;
  for (int replay = 0; replay < replays; ++replay) {
    stopwatch.replay_us(*calls.graph);
    const std::byte* tail = calls.workspace.data() + calls.workspace.size() - bytes;
    check_cuda(cudaMemcpy(times.data(), tail, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
    all.push_back(make_timeline(times, marks));
  }
  return all;
}

}  // namespace leanattn::tools
