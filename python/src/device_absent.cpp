// SPDX-License-Identifier: Apache-2.0
#include "device.h"
#include "leanattn/problem.h"

namespace leanattn::python {
namespace {
[[noreturn]] void absent() { throw Error(Status::kUnsupported, "backend cuda: this build has no CUDA"); }
}  // namespace

DeviceGuard::DeviceGuard(int device) {
  if (device >= 0) absent();
}
DeviceGuard::~DeviceGuard() = default;

void* allocate_workspace(std::size_t) { absent(); }
void release_workspace(void*) {}
void synchronize(void*) { absent(); }

}  // namespace leanattn::python
