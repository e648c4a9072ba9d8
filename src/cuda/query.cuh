// SPDX-License-Identifier: Apache-2.0
// Q of a row block into shared memory, zeros for the columns that a problem does not have, and chunks of rows that are aligned to less than
// 16 bytes.
#pragma once

#include "cuda/config.cuh"

namespace leanattn::cuda {

// One 16-byte chunk into shared memory in narrow accesses, of a row that is aligned to less than 16 bytes; 0 where it is not to be read.
// Ordinary stores serve rows aligned to 2 bytes.
__device__ __forceinline__ void copy_narrow(std::uint32_t to, const std::uint16_t* from, int access_bytes, bool read) {
  if (access_bytes == 8) {
    for (int i = 0; i < 2; ++i) ptx::cp_async_8(to + 8 * i, from + 4 * i, read ? 8 : 0);
  } else if (access_bytes == 4) {
    for (int i = 0; i < 4; ++i) ptx::cp_async_4(to + 4 * i, from + 2 * i, read ? 4 : 0);
  } else {
    auto* words = static_cast<std::uint32_t*>(__cvta_shared_to_generic(to));
    for (int i = 0; i < 4; ++i) words[i] = read ? from[2 * i] | static_cast<std::uint32_t>(from[2 * i + 1]) << 16 : 0u;
  }
}

// Q of a row block into shared memory, by kProducerThreads threads. Rows past the last and columns past head_dim are 0; padding to 16 rows
// is whatever it was: rows never mix.
template <class C>
__device__ __forceinline__ void load_q(const Params& p, int tid, std::uint32_t q_at, int seq, int q_len, int q_head, int first_row,
                                       int rows) {
  const int chunk = tid % C::kRowChunks;
  if (tid / C::kRowChunks >= C::kPassTokens) return;
  const std::uint16_t* const q = p.q.data + first_row_of<C>(p.q, p.line, seq) + q_head * p.q.head_stride + chunk * 8;
  const std::uint64_t policy = ptx::evict_first_policy();
#pragma unroll 1
  for (int row = tid / C::kRowChunks; row < C::kRows; row += C::kPassTokens) {
    const bool valid = row < rows && chunk * 8 < head_dim<C>(p);
    const std::uint16_t* from = q;
    if (valid) {
      const int packed = first_row + row, token = q_len == 1 ? 0 : packed / p.group;
      from += token * p.q.token_stride + (packed - token * p.group) * p.q.head_stride;
    }
    const int padded = row / C::kGroupRows * C::kPaddedRows + row % C::kGroupRows;
    const std::uint32_t to = q_at + swizzled<C::kRowChunks>(padded, chunk) * 16;
    if (is_general<C>(p)) [[unlikely]] {
      copy_narrow(to, from, min_of(p.q.access_bytes, 8), valid);
    } else {
      ptx::cp_async_16_if(true, to, from, valid ? 16 : 0, policy);
    }
  }
}

// The consumers bring Q of an output that the grid names, while producers wait for its length.
template <class C>
__device__ __forceinline__ void load_own_q(const Params& p, int tid, std::uint32_t q_at) {
  if (tid < kProducerThreads) {
    load_q<C>(p, tid, q_at, blockIdx.z, p.line.q_len, blockIdx.y * p.group, 0, p.line.q_len * p.group);
    ptx::wait_for_copies();
  }
}

// Columns that the problem does not have, in every stage: zeros once, and no copy ever writes there. tid: 0 … threads − 1.
template <class C>
__device__ __forceinline__ void clear_padding(unsigned char* stages, const Params& p, int tid, int threads) {
  auto* const chunks = reinterpret_cast<uint4*>(stages);
  for (int row = tid; row < p.stages * 2 * C::kTokens; row += threads) {  // a token of K or V
    const int dim = row / C::kTokens % 2 == 0 ? p.head_dim : p.head_dim_v;
#pragma unroll 1
    for (int chunk = dim / 8; chunk < C::kRowChunks; ++chunk) chunks[swizzled<C::kRowChunks>(row, chunk)] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace leanattn::cuda
