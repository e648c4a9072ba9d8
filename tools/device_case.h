// SPDX-License-Identifier: Apache-2.0
// CaseData's tensors in the memory of the current GPU: the same bytes, gaps and poison included, with every view at the same offset in its
// buffer. Results go back into CaseData's own buffers, so that compare() and canary_fault() see them. Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "problem_view.h"
#include "tools/case_data.h"
#include "tools/device_memory.h"

namespace leanattn::tools {

// The arrays that a problem holds beside its tensors, put on the device: copy(name, host pointer, bytes) gives the device's pointer, and is
// called for those that are there. Lengths are read.
template <class Copy>
void copy_arrays(const Problem& host, Problem& device, Copy copy) {
  const auto one = [&](const char* name, auto member, std::int64_t count) {
    const auto values = host.*member;
    if (values == nullptr) return;
    const void* const on_device = copy(name, values, count * static_cast<std::int64_t>(sizeof(*values)));
    device.*member = static_cast<decltype(values)>(on_device);
  };
  const std::int64_t batch = host.batch;
  one("kv_lens", &Problem::kv_lens, batch);
  one("cu_seqlens_q", &Problem::cu_seqlens_q, batch + 1);
  one("cu_seqlens_kv", &Problem::cu_seqlens_kv, batch + 1);
  one("block_table", &Problem::block_table, batch > 0 ? (batch - 1) * block_table_stride(host) + host.max_pages : 0);
  one("tree_mask", &Problem::tree_mask, total_q(host) * tree_mask_words(host));
  one("alibi_slopes", &Problem::alibi_slopes, host.q_heads);
  one("sinks", &Problem::sinks, host.q_heads);
}

class DeviceCase {
 public:
  // data must outlive it. Copies of Q, K and V at different addresses.
  explicit DeviceCase(CaseData& data, int copies = 1);

  int copies() const { return static_cast<int>(copies_.size()); }
  // Device pointers throughout; O, LSE, lengths and tables are the same for all copies.
  Problem problem(int copy = 0) const;
  std::span<const std::byte> k_memory(int copy = 0) const;
  std::span<const std::byte> v_memory(int copy = 0) const;  // empty when interleaved

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
  std::vector<DeviceBuffer> arrays_;
  DeviceBuffer o_, lse_, workspace_;
  std::size_t workspace_begin_ = 0;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace leanattn::tools
