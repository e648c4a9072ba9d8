// SPDX-License-Identifier: Apache-2.0
// What the module needs of the CUDA runtime beside the library's own calls. Built as device_absent.cpp without CUDA: then nothing is
// ever called, because the library has refused the call before.
#pragma once

#include <cstddef>

namespace leanattn::python {

// Makes a device the current one while it lives; −1 leaves things as they are.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;
};

// A workspace on the current device, initialised and ready when this returns. Allowed while a stream is being captured: nothing of it
// becomes part of the graph.
void* allocate_workspace(std::size_t bytes);
void release_workspace(void* memory);

// Waits for all that is queued on the stream.
void synchronize(void* stream);

}  // namespace leanattn::python
