// SPDX-License-Identifier: Apache-2.0
// Memory for calls. A caller's own Workspace, or one kept for it: on the CPU one a thread, on CUDA one a (device, stream), where the calls
// of a stream run one after another. Device memory that was handed out is not freed while its Workspace lives: a captured graph may use it.
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

#include "tensor.h"

namespace leanattn::python {

class Workspace {
 public:
  explicit Workspace(Device device) : device_(device) {}
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Held while memory is asked for and, on the CPU, used: two calls on one workspace then run one after the other.
  std::mutex& mutex() { return mutex_; }
  // At least so many bytes, ready for a call (CUDA: initialised).
  std::span<std::byte> reserve(std::size_t bytes);
  std::size_t bytes() const { return bytes_; }  // of the block in use
  Device device() const { return device_; }

 private:
  Device device_;
  std::mutex mutex_;
  std::size_t bytes_ = 0;
  std::vector<std::byte*> blocks_;  // the one in use last; CUDA: those before it too
};

// Where a call without a workspace works: the innermost `with workspace:` of this thread if it is on that device, else the kept one.
Workspace& workspace_of(Device device, void* stream);
void enter(Workspace& workspace);
void leave(Workspace& workspace);

}  // namespace leanattn::python
