// SPDX-License-Identifier: Apache-2.0
#include "tools/device_case.h"

#include <utility>

#include <fmt/format.h>

#include "problem_view.h"
#include "tools/device.h"

namespace leanattn::tools {
namespace {

constexpr std::size_t kGuardBytes = 256;
constexpr int kNaNByte = 0xff;
constexpr int kCanaryByte = 0xa5;

template <typename Value>
std::span<const std::byte> bytes_of(const Value* values, std::int64_t count) {
  if (values == nullptr) return {};
  return {reinterpret_cast<const std::byte*>(values), static_cast<std::size_t>(count) * sizeof(Value)};
}

// The device's address of what lies at `view` in the host's `memory`.
template <typename Pointer>
Pointer moved(Pointer view, std::span<const std::byte> memory, const DeviceBuffer& buffer) {
  if (view == nullptr) return nullptr;
  const std::ptrdiff_t offset = reinterpret_cast<const std::byte*>(view) - memory.data();
  return reinterpret_cast<Pointer>(buffer.data() + offset);
}

template <typename Value>
const Value* start_of(const DeviceBuffer& buffer) {
  return reinterpret_cast<const Value*>(buffer.data());
}

}  // namespace

void check_cuda(cudaError_t answer, const char* call) {
  if (answer == cudaSuccess) return;
  throw DeviceError(fmt::format("{}: CUDA says \"{}\" ({})", call, cudaGetErrorString(answer), cudaGetErrorName(answer)));
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory = nullptr;
  const cudaError_t answer = cudaMalloc(&memory, bytes);
  if (answer == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // the next call must not meet this answer
    std::size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    throw OutOfMemory(fmt::format("{} bytes of GPU memory wanted, {} of {} free", bytes, free, total));
  }
  check_cuda(answer, "cudaMalloc");
  data_ = static_cast<std::byte*>(memory);
}

DeviceBuffer::DeviceBuffer(std::span<const std::byte> host) : DeviceBuffer(host.size()) { upload(host); }

DeviceBuffer::~DeviceBuffer() {
  if (data_) cudaFree(data_);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceBuffer::upload(std::span<const std::byte> host) {
  if (!host.empty()) check_cuda(cudaMemcpy(data_, host.data(), host.size(), cudaMemcpyHostToDevice), "cudaMemcpy to the device");
}

void DeviceBuffer::download(std::span<std::byte> host) const {
  if (!host.empty()) check_cuda(cudaMemcpy(host.data(), data_, host.size(), cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
}

DeviceStream::DeviceStream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }

DeviceStream::~DeviceStream() {
  if (stream_) cudaStreamDestroy(stream_);
}

void DeviceStream::wait() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

DeviceCase::DeviceCase(CaseData& data, int copies) : data_(data), problem_(data.problem()) {
  const Problem host = data.problem();
  const std::int64_t batch = host.batch;
  kv_lens_ = DeviceBuffer(bytes_of(host.kv_lens, batch));
  cu_seqlens_q_ = DeviceBuffer(bytes_of(host.cu_seqlens_q, batch + 1));
  cu_seqlens_kv_ = DeviceBuffer(bytes_of(host.cu_seqlens_kv, batch + 1));
  block_table_ = DeviceBuffer(bytes_of(host.block_table, batch * block_table_stride(host)));
  tree_mask_ = DeviceBuffer(bytes_of(host.tree_mask, total_q(host) * tree_mask_words(host)));
  alibi_slopes_ = DeviceBuffer(bytes_of(host.alibi_slopes, host.q_heads));
  sinks_ = DeviceBuffer(bytes_of(host.sinks, host.q_heads));
  problem_.kv_lens = start_of<std::int32_t>(kv_lens_);
  problem_.cu_seqlens_q = start_of<std::int32_t>(cu_seqlens_q_);
  problem_.cu_seqlens_kv = start_of<std::int32_t>(cu_seqlens_kv_);
  problem_.block_table = start_of<std::int32_t>(block_table_);
  problem_.tree_mask = start_of<std::uint64_t>(tree_mask_);
  problem_.alibi_slopes = start_of<float>(alibi_slopes_);
  problem_.sinks = start_of<float>(sinks_);

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
  check_cuda(cudaMemset(workspace_.data(), kCanaryByte, workspace_.bytes()), "cudaMemset");
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
  const auto guards = [&](std::span<std::byte> host, std::size_t at) {
    check_cuda(cudaMemcpy(host.data(), workspace_.data() + at, host.size(), cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
  };
  const std::span<std::byte> host = data_.workspace_memory();
  guards(host.first(kGuardBytes), workspace_begin_ - kGuardBytes);
  guards(host.last(kGuardBytes), workspace_begin_ + workspace_bytes_);
}

}  // namespace leanattn::tools
