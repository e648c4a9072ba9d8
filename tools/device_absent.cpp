// SPDX-License-Identifier: Apache-2.0
// The tools' GPU in a build without a CUDA toolkit.
#include "tools/device.h"

namespace leanattn::tools {

class DeviceCase {};

std::optional<Device> current_device() { return std::nullopt; }

// Callers ask current_device() or the library first.
DeviceWorkload::DeviceWorkload(CaseData& data, int) : data_(data) { throw DeviceError("this build has no CUDA"); }
DeviceWorkload::~DeviceWorkload() = default;
Accuracy DeviceWorkload::check(const Options&, const Reference& reference) { return judge(data_, reference); }
DeviceTiming DeviceWorkload::time(const Options&, const DeviceTimingOptions&) { return {}; }
std::vector<Timeline> DeviceWorkload::timelines(const Options&, int) { return {}; }

}  // namespace leanattn::tools
