// SPDX-License-Identifier: Apache-2.0
#include "tools/device_case.h"

#include <utility>

namespace leanattn::tools {
namespace {

constexpr std::size_t kGuardBytes = 256;
constexpr int kNaNByte = 0xff;
constexpr int kCanaryByte = 0xa5;

// The device's address of what lies at `view` in the host's `memory`.
template <typename Pointer>
Pointer moved(Pointer view, std::span<const std::byte> memory, const DeviceBuffer& buffer) {
  if (view == nullptr) return nullptr;
  const std::ptrdiff_t offset = reinterpret_cast<const std::byte*>(view) - memory.data();
  return reinterpret_cast<Pointer>(buffer.data() + offset);
}

}  // namespace

DeviceCase::DeviceCase(CaseData& data, int copies) : data_(data), problem_(data.problem()) {
  const Problem host = data.problem();
  copy_arrays(host, problem_, [&](const char*, const void* values, std::int64_t bytes) {
    arrays_.emplace_back(std::span(static_cast<const std::byte*>(values), static_cast<std::size_t>(bytes)));
    return arrays_.back().data();
  });
  o_ = DeviceBuffer(data.o_memory().size());
  lse_ = DeviceBuffer(data.lse_memory().size());
  problem_.o.data = moved(host.o.data, data.o_memory(), o_);
  problem_.lse = moved(host.lse, data.lse_memory(), lse_);
  reset_outputs();

  copies_.resize(static_cast<std::size_t>(copies));
  for (Copy& copy : copies_) {
    if (&copy == &copies_.front()) {
      copy = {DeviceBuffer(data.q_memory()), DeviceBuffer(data.k_memory()), DeviceBuffer(data.v_memory())};
      continue;
    }
    const Copy& first = copies_.front();
    for (const auto& [to, from] : {std::pair{&copy.q, &first.q}, std::pair{&copy.k, &first.k}, std::pair{&copy.v, &first.v}}) {
      *to = DeviceBuffer(from->bytes());
      if (from->bytes() == 0) continue;
      check_cuda(cudaMemcpyAsync(to->data(), from->data(), from->bytes(), cudaMemcpyDeviceToDevice, nullptr), "cudaMemcpyAsync");
    }
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Problem DeviceCase::problem(int copy) const {
  const Problem host = data_.problem();
  const Copy& from = copies_.at(static_cast<std::size_t>(copy));
  Problem problem = problem_;
  problem.q.data = moved(host.q.data, data_.q_memory(), from.q);
  problem.k.data = moved(host.k.data, data_.k_memory(), from.k);
  const bool own = data_.v_memory().size() > 0;
  problem.v.data = own ? moved(host.v.data, data_.v_memory(), from.v) : moved(host.v.data, data_.k_memory(), from.k);
  return problem;
}

std::span<const std::byte> DeviceCase::k_memory(int copy) const {
  const DeviceBuffer& k = copies_.at(static_cast<std::size_t>(copy)).k;
  return {k.data(), k.bytes()};
}

std::span<const std::byte> DeviceCase::v_memory(int copy) const {
  const DeviceBuffer& v = copies_.at(static_cast<std::size_t>(copy)).v;
  return {v.data(), v.bytes()};
}

void DeviceCase::reset_outputs() {
  data_.reset_outputs();
  o_.upload(data_.o_memory());
  lse_.upload(data_.lse_memory());
}

std::span<std::byte> DeviceCase::workspace(std::size_t bytes, std::size_t alignment) {
  data_.workspace(bytes);                                    // the host's guards, which copy_back overwrites with the device's
  workspace_begin_ = kGuardBytes + alignment % kGuardBytes;  // cudaMalloc aligns to 256
  workspace_bytes_ = bytes;
  workspace_ = DeviceBuffer();
  workspace_ = DeviceBuffer(workspace_begin_ + bytes + kGuardBytes);
  workspace_.fill(kCanaryByte);
  std::byte* begin = workspace_.data() + workspace_begin_;
  if (bytes > 0) check_cuda(cudaMemset(begin, kNaNByte, bytes), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return {begin, bytes};
}

void DeviceCase::copy_back() {
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  o_.download(data_.o_memory());
  lse_.download(data_.lse_memory());
  if (workspace_.bytes() == 0) return;
  const std::span<std::byte> host = data_.workspace_memory();
  workspace_.download(host.first(kGuardBytes), workspace_begin_ - kGuardBytes);
  workspace_.download(host.last(kGuardBytes), workspace_begin_ + workspace_bytes_);
}

}  // namespace leanattn::tools
