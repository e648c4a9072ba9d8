// SPDX-License-Identifier: Apache-2.0
// CaseData's tensors in the memory of the current GPU: the same bytes, gaps and poison included, with every view at the same offset in its
// buffer. Results go back into CaseData's own buffers, so that compare() and canary_fault() see them. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tools/case_data.h"
#include "tools/device_error.h"

namespace leanattn::tools {

// Device memory of exactly these bytes, so that a memory checker sees every byte beyond.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);  // throws OutOfMemory
  explicit DeviceBuffer(std::span<const std::byte> host);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // The first bytes of the buffer, as many as the host's span has. Both wait for the device.
  void upload(std::span<const std::byte> host);
  void download(std::span<std::byte> host) const;

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class DeviceStream {
 public:
  DeviceStream();  // waits for no other stream
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const;

 private:
  cudaStream_t stream_ = nullptr;
};

class DeviceCase {
 public:
  // data must outlive it. Copies of Q, K and V at different addresses.
  explicit DeviceCase(CaseData& data, int copies = 1);

  int copies() const { return static_cast<int>(copies_.size()); }
  // Device pointers throughout; O, LSE, lengths and tables are the same for all copies.
  Problem problem(int copy = 0) const;
  std::span<const std::byte> k_memory(int copy = 0) const;
  std::span<const std::byte> v_memory(int copy = 0) const;  // empty when interleaved

  // Of [batch] int32 on the device; null where the case has none. Other lengths may be written there between calls.
  std::int32_t* kv_lens() const { return reinterpret_cast<std::int32_t*>(kv_lens_.data()); }

  // NaN into O and LSE, canaries round them.
  void reset_outputs();
  // New memory, full of NaN, aligned to this and no more (16 is what the library asks for, 256 what cudaMalloc gives), guarded on both
  // sides; not yet initialised.
  std::span<std::byte> workspace(std::size_t bytes, std::size_t alignment = 16);
  // Waits for the device, then O, LSE and what stands round them and round the workspace go into the CaseData.
  void copy_back();

 private:
  struct Copy {
    DeviceBuffer q, k, v;
  };

  CaseData& data_;
  Problem problem_;  // without Q, K and V
  std::vector<Copy> copies_;
  DeviceBuffer kv_lens_, cu_seqlens_q_, cu_seqlens_kv_, block_table_, tree_mask_, alibi_slopes_, sinks_;
  DeviceBuffer o_, lse_, workspace_;
  std::size_t workspace_begin_ = 0;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace leanattn::tools
