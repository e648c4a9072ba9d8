// SPDX-License-Identifier: Apache-2.0
// The C++ API: exact decode attention, one call, no plan. The library allocates nothing inside a call (starting threads may).
//
//   leanattn::Problem problem = …;                                   // problem.h
//   std::vector<std::byte> workspace(leanattn::workspace_bytes(problem));
//   leanattn::decode(problem, {}, workspace);
//
// Thread-safe: calls with different workspaces may run at once. Nothing here is global, prints, exits or aborts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "leanattn/export.h"
#include "leanattn/problem.h"

namespace leanattn {

// Bytes of workspace that decode needs, exact, for these shapes and options (and, with workers 0, for the number of threads at the time of
// the call). Reads no tensor, length or table; a workspace serves any problem whose own query is no larger.
// CPU: with the lean policy it grows with workers × the rows of the longest seq, times about 2·log2(kv_len / 256) when batch_invariant;
// flashdecoding needs outputs × splits. CUDA: bounded by the multiprocessors of the current device, whatever the problem and the policy.
// Errors: kInvalidArgument, kUnsupported.
LEANATTN_API std::size_t workspace_bytes(const Problem& problem, const Options& options = {});

// Makes a workspace ready for its first call. CUDA: needed once for new or overwritten memory, queued on options.stream; every call leaves
// the workspace ready for the next one on the same device, of any problem that it is large enough for. CPU: nothing to do.
// Errors: kInvalidArgument (memory of the host, or not aligned to 16 bytes), kUnsupported, kInternal.
LEANATTN_API void initialize_workspace(const Options& options, std::span<std::byte> workspace);

// O and LSE of every row. workspace: at least workspace_bytes(problem, options) bytes; not shared with a call that runs at the same time.
// CPU: host memory, any contents, any alignment. With options.workers > 0 the same inputs give the same bits on every run.
// CUDA: device memory aligned to 16 bytes, once given to initialize_workspace. One kernel is queued on options.stream and nothing else: no
// allocation, copy or synchronisation. Lengths and page ids are read on the device and not checked: out of range they are undefined
// behaviour. The same inputs on the same device with the same options give the same bits.
// Errors: kInvalidArgument, kUnsupported, kInvalidData (CPU), kWorkspaceTooSmall, kInternal (a launch that CUDA refuses); O and LSE are
// untouched then.
LEANATTN_API void decode(const Problem& problem, const Options& options, std::span<std::byte> workspace);

// Merges attention over disjoint shards of a context by their LSE (LeanAttention §4, FlashDecoding): for every row
//   LSE = log Σ e^lse_i,  O = Σ e^(lse_i − LSE)·o_i. Shards with LSE −inf are empty and their O is not looked at.
struct MergeProblem {
  std::int32_t shards = 0;               // ≥ 1
  std::int64_t rows = 0;                 // total_q·q_heads
  std::int32_t head_dim_v = 0;           // ≥ 1
  DType dtype = DType::kFloat32;         // of the shards' O and of O
  LseBase lse_base = LseBase::kNatural;  // of the shards' LSE and of LSE
  const void* shard_o = nullptr;         // [shards, rows, head_dim_v] contiguous
  const float* shard_lse = nullptr;      // [shards, rows]
  void* o = nullptr;                     // [rows, head_dim_v]
  float* lse = nullptr;                  // [rows], or null: not wanted
};
// Of the options, backend and stream count. CPU: host memory, on the calling thread. CUDA: device memory; one kernel is queued on
// options.stream and nothing else. Errors: kInvalidArgument, kUnsupported, kInternal (a launch that CUDA refuses).
LEANATTN_API void merge(const MergeProblem& problem, const Options& options = {});

// Names of the instruction sets that the CPU backend can run here, fastest first, such as "AVX3", "AVX2"; "AVX3+AMX" with tile registers.
LEANATTN_API std::vector<std::string> cpu_isas();

// Names of the kernel paths that the CUDA backend can run on the current device, fastest first: "sm_90", with clusters of thread blocks
// where they pay, for compute capability 9.0 and later (and wgmma, on 9.0 alone), and "portable", for 8.0 and later. Empty where
// backend_available(kCuda) is false.
LEANATTN_API std::vector<std::string> cuda_paths();

// "0.1.0".
LEANATTN_API const char* version();
// True when the library was built with the backend and the machine can run it. kCuda: a device of compute capability 8.0 or later is the
// current one, and this build has code for it; the first call for a device makes its context.
LEANATTN_API bool backend_available(Backend backend);

}  // namespace leanattn
