// SPDX-License-Identifier: Apache-2.0
// What Options::check_data finds in lengths, offsets and page ids on a device, and the word that tells it. Compiles with g++, clang, nvcc
// and NVRTC.
#pragma once

#include "leanattn/schedule.h"

namespace leanattn {

enum class DataFaultKind : int {
  kNone = 0,
  kQOffset = 1,   // cu_seqlens_q falls, or gives the seq more than q_len tokens
  kKvOffset = 2,  // cu_seqlens_kv falls, or gives the seq more than kv_capacity tokens
  kKvLen = 3,     // kv_lens[seq] is outside 0 … the seq's room
  kPage = 4,      // block_table[seq, slot] is outside 0 … num_pages − 1
};

struct DataFault {
  DataFaultKind kind = DataFaultKind::kNone;
  int seq = 0;
  int slot = 0;  // of the seq's block table; 0 for other kinds
};

// The status word: 0 is no fault, and of two faults the one of the lower seq, then kind, then slot is the larger number, so that the
// maximum of all that is found is the first fault: 63 bits, the complement of seq (31 bits), kind (1 bit: kPage or not, with the kind's own
// number in place of a slot) and slot (31 bits).
LEANATTN_HOST_DEVICE inline unsigned long long data_status_of(const DataFault& fault) {
  if (fault.kind == DataFaultKind::kNone) return 0;
  const bool page = fault.kind == DataFaultKind::kPage;
  const unsigned long long low = page ? (1ull << 31 | static_cast<unsigned>(fault.slot)) : static_cast<unsigned>(fault.kind);
  return ~(1ull << 63 | static_cast<unsigned long long>(fault.seq) << 32 | low);
}

LEANATTN_HOST_DEVICE inline DataFault data_fault_of(unsigned long long status) {
  DataFault fault;
  if (status == 0) return fault;
  const unsigned long long code = ~status & ~(1ull << 63);
  const int low = static_cast<int>(code & 0x7fffffff);
  const bool page = (code >> 31 & 1) != 0;
  fault.kind = page ? DataFaultKind::kPage : static_cast<DataFaultKind>(low);
  fault.seq = static_cast<int>(code >> 32);
  fault.slot = page ? low : 0;
  return fault;
}

}  // namespace leanattn
