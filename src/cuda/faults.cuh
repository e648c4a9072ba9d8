// SPDX-License-Identifier: Apache-2.0
// Options::check_data on the device: which lengths, offsets and page ids are faulty, and how the first of them is told. What is faulty is
// never followed; its seq counts as empty.
#pragma once

#include "cuda/config.cuh"
#include "leanattn/data_fault.h"

namespace leanattn::cuda {

// The caller's word keeps the first fault of all that blocks report, in any order.
__device__ __forceinline__ void report_fault(const Params& p, DataFaultKind kind, int seq, int slot) {
  if (p.data_status != nullptr) atomicMax(p.data_status, static_cast<unsigned long long>(data_status_of({kind, seq, slot})));
}

// Whether an offset of cu_seqlens_kv or cu_seqlens_q can be: seqs before this one have no more than `most` rows each.
__device__ __forceinline__ bool is_offset(int offset, int seq, int most) {
  return offset >= 0 && offset <= static_cast<long long>(seq) * most;
}
// Where K and V of a seq lie behind those of others: that it begins where it can, and has room for kv_len tokens.
__device__ __forceinline__ bool is_kv_run_good(const Line& line, int seq, int kv_len) {
  if (line.cu_seqlens_kv == nullptr) return true;
  const int begin = line.cu_seqlens_kv[seq], end = line.cu_seqlens_kv[seq + 1];
  return is_offset(begin, seq, line.most_kv_len) && end >= begin && kv_len <= end - begin;
}
__device__ __forceinline__ bool are_q_offsets_good(const Line& line, int seq) {
  return line.cu_seqlens_q == nullptr || is_offset(line.cu_seqlens_q[seq], seq, line.most_q_len);
}

// Lengths and offsets of all seqs, by kProducerThreads threads. Of no block's speed: called when there is nothing left to bring.
__device__ inline void report_lengths(const Params& p, int tid) {
  const Line& line = p.line;
#pragma unroll 1
  for (int seq = tid; seq < line.num_seqs; seq += kProducerThreads) {
    if (line.cu_seqlens_q != nullptr) {
      const int q_len = line.cu_seqlens_q[seq + 1] - line.cu_seqlens_q[seq];
      if (q_len < 0 || q_len > line.most_q_len || !are_q_offsets_good(line, seq)) report_fault(p, DataFaultKind::kQOffset, seq, 0);
    }
    if (line.cu_seqlens_kv != nullptr) {
      const int room = line.cu_seqlens_kv[seq + 1] - line.cu_seqlens_kv[seq];
      if (room < 0 || room > line.most_kv_len || !is_kv_run_good(line, seq, 0)) report_fault(p, DataFaultKind::kKvOffset, seq, 0);
      if (line.kv_lens != nullptr && (line.kv_lens[seq] < 0 || line.kv_lens[seq] > room)) report_fault(p, DataFaultKind::kKvLen, seq, 0);
    } else if (line.kv_lens[seq] < 0 || line.kv_lens[seq] > line.most_kv_len) {
      report_fault(p, DataFaultKind::kKvLen, seq, 0);
    }
  }
}

}  // namespace leanattn::cuda
