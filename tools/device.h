// SPDX-License-Identifier: Apache-2.0
// The current GPU, and a case on it: checked and timed. Without a CUDA toolkit it is built as device_absent.cpp, and there is no GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "reference.h"
#include "tools/case_data.h"
#include "tools/run.h"
#include "tools/timeline.h"

namespace leanattn::tools {

// What CUDA answered to a call of the tools, or of the kernel that ran before it: nothing on the device can be trusted after that.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Device {
  std::string name;
  int multiprocessors = 0;
  int compute_major = 0;
  int compute_minor = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
};

// Nothing where the library has no CUDA backend or no device that it runs on.
std::optional<Device> current_device();

struct DeviceTimingOptions {
  int replays = 25;  // of the floor's graph and the kernel's in turn
};

struct DeviceTiming {
  Timing timing;
  int copies = 0;
  int calls = 0;      // in one graph
  std::string floor;  // how the floor reads
  std::string fault;  // what the last replay left that the checked call did not; empty: the same bits
};

class DeviceCase;

// A case on the current GPU, with copies of Q, K and V that push each other out of the L2 cache. data must outlive it.
class DeviceWorkload {
 public:
  DeviceWorkload(CaseData& data, int copies);  // throws OutOfMemory, DeviceError
  ~DeviceWorkload();
  // One call on poisoned outputs and a new workspace, compared on the host. Throws leanattn::Error, DeviceError.
  Accuracy check(const Options& options, const Reference& reference);
  // Graphs of at least four calls over the copies in turn, floor and kernel turn by turn. After check, with the same options.
  DeviceTiming time(const Options& options, const DeviceTimingOptions& timing);
  // The last call of such a graph, each time it is replayed. Only in a build with LEANATTN_TIMELINE.
  std::vector<Timeline> timelines(const Options& options, int replays);

 private:
  CaseData& data_;
  std::unique_ptr<DeviceCase> case_;
};

// Copies of K and V that the L2 cache keeps nothing of from turn to turn: 256 MB of them.
inline int device_copies(std::int64_t kv_bytes) {
  constexpr std::int64_t kColdBytes = std::int64_t{256} << 20, kMostCopies = 640;
  return static_cast<int>(std::clamp<std::int64_t>((kColdBytes - 1) / std::max<std::int64_t>(kv_bytes, 1) + 1, 1, kMostCopies));
}

}  // namespace leanattn::tools
