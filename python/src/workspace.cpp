// SPDX-License-Identifier: Apache-2.0
#include "workspace.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "device.h"

namespace leanattn::python {
namespace {
thread_local std::vector<Workspace*> entered;
}

Workspace::~Workspace() {
  for (std::byte* block : blocks_) device_.cuda ? release_workspace(block) : ::operator delete[](block);
}

std::span<std::byte> Workspace::reserve(std::size_t bytes) {
  if (bytes > bytes_) {
    blocks_.reserve(blocks_.size() + 1);
    std::byte* memory = nullptr;
    if (device_.cuda) {
      const DeviceGuard guard(device_.id);
      memory = static_cast<std::byte*>(allocate_workspace(bytes));
    } else {
      memory = static_cast<std::byte*>(::operator new[](bytes));
      for (std::byte* block : blocks_) ::operator delete[](block);
      blocks_.clear();
    }
    blocks_.push_back(memory);
    bytes_ = bytes;
  }
  return {blocks_.empty() ? nullptr : blocks_.back(), bytes_};
}

Workspace& workspace_of(Device device, void* stream) {
  for (auto workspace = entered.rbegin(); workspace != entered.rend(); ++workspace) {
    if ((*workspace)->device() == device) return **workspace;
  }
  if (!device.cuda) {
    static thread_local Workspace kept{Device{}};
    return kept;
  }
  // Never destroyed: the driver may be gone by then.
  static std::mutex mutex;
  static auto& kept = *new std::map<std::tuple<int, void*>, Workspace>;
  const std::lock_guard<std::mutex> lock(mutex);
  return kept.try_emplace({device.id, stream}, device).first->second;
}

void enter(Workspace& workspace) { entered.push_back(&workspace); }

void leave(Workspace& workspace) {
  const auto last = std::find(entered.rbegin(), entered.rend(), &workspace);
  if (last != entered.rend()) entered.erase(std::next(last).base());
}

}  // namespace leanattn::python
