// SPDX-License-Identifier: Apache-2.0
// What to compute (Problem: shapes, tensors, masks, logit rules of one decode-attention call) and how (Options).
//
// Every backend and every binding takes this one description. Strides count elements, not bytes; the innermost stride (the head
// dimension) is always 1. All pointers inside are host pointers for the CPU backend and device pointers for the CUDA backend, lengths and
// tables too: they are read when the call runs, so a captured graph may be replayed with other lengths in the same memory.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "leanattn/data_fault.h"
#include "leanattn/export.h"
#include "leanattn/schedule.h"

namespace leanattn {

enum class DType : std::int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// How the tokens of a sequence are found in the K and V tensors.
enum class KvLayout : std::int32_t {
  kBatched = 0,  // token t of seq b at b·outer_stride + t·token_stride: [batch, n, kv_heads, d] and head-major [batch, kv_heads, n, d]
  kRagged = 1,   // token t of seq b at (cu_seqlens_kv[b] + t)·token_stride: [total_kv, kv_heads, d]
  kPaged = 2,    // token t at block_table[b, t / page_size]·outer_stride + (t % page_size)·token_stride: [pages, page_size, kv_heads, d]
};

enum class LseBase : std::int32_t { kNatural = 0, kTwo = 1 };

// One of K, V. Views into interleaved [pages, 2, page, kv_heads, d] or layer-inside-page caches are strides and a base pointer.
struct KvView {
  const void* data = nullptr;
  std::int64_t outer_stride = 0;  // elements from one sequence (batched) or page (paged) to the next; unused when ragged
  std::int64_t token_stride = 0;  // elements from one token to the next
  std::int64_t head_stride = 0;   // elements from one KV head to the next
};

// Q: data is read only. Row (b, i, h) lies at b·seq_stride + i·token_stride + h·head_stride, or with cu_seqlens_q at
// (cu_seqlens_q[b] + i)·token_stride + h·head_stride.
struct QView {
  const void* data = nullptr;
  std::int64_t seq_stride = 0;  // unused with cu_seqlens_q
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// O: addressed like Q; rows of different (b, i, h) must not overlap.
struct OView {
  void* data = nullptr;
  std::int64_t seq_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

struct Problem {
  // Shapes.
  std::int32_t batch = 0;            // sequences, ≥ 0
  std::int32_t q_heads = 0;          // a multiple of kv_heads
  std::int32_t kv_heads = 0;         // group = q_heads / kv_heads, any value ≥ 1
  std::int32_t head_dim = 0;         // of Q and K; 32 … 256 in steps of 8
  std::int32_t head_dim_v = 0;       // of V and O; 0 means head_dim
  std::int32_t q_len = 1;            // new tokens of every seq; with cu_seqlens_q at least the longest of them
  DType q_dtype = DType::kFloat32;   // of Q and O
  DType kv_dtype = DType::kFloat32;  // of K and V; today equal to q_dtype

  // Tensors.
  QView q{};
  OView o{};
  KvView k{};
  KvView v{};
  float* lse = nullptr;                        // [total_q, q_heads] contiguous, or null: not wanted
  const std::int32_t* cu_seqlens_q = nullptr;  // [batch + 1] first Q token of each seq, starting at 0; null: q_len each
  const std::int32_t* kv_lens = nullptr;       // [batch] tokens of each seq, new tokens included; may be null when ragged

  // Where K and V rows lie.
  KvLayout kv_layout = KvLayout::kBatched;
  std::int64_t kv_capacity = 0;                 // batched: tokens a seq has room for (n). ragged: the most tokens of any seq. paged: unused
  const std::int32_t* cu_seqlens_kv = nullptr;  // ragged: [batch + 1] first KV token of each seq; a seq has room up to the next
  std::int32_t page_size = 0;                   // paged: tokens a page, ≥ 1
  std::int32_t num_pages = 0;                   // paged: pages in the cache; used ids are 0 … num_pages − 1
  std::int32_t max_pages = 0;                   // paged: block_table slots of a seq; its room is max_pages·page_size tokens
  const std::int32_t* block_table = nullptr;    // paged: [batch, max_pages]; slots past the length or before the window are not read
  std::int64_t block_table_stride = 0;          // paged: elements from one seq to the next; 0 means max_pages

  // Masks. The position of query token i of a seq is kv_len − q_len + i (bottom right); key t is visible when every rule allows it.
  bool causal = true;                        // t ≤ position
  std::int32_t window_left = -1;             // t ≥ position − window_left (a sliding window of W tokens is W − 1); −1: none
  const std::uint64_t* tree_mask = nullptr;  // [total_q, ⌈q_len / 64⌉]: bit j of a row allows the j-th of the seq's own last q_len
                                             // tokens; earlier tokens are always allowed. null: no tree. A bit above the
                                             // diagonal counts only with causal = false

  // A NaN in Q, in a visible key or in a logit rule makes its row NaN, and so does a logit above float32's range (on CUDA in log2 units);
  // one below it counts as masked. V must be finite, and small enough to be summed in float32, for every token that some row of its seq
  // sees. AMX takes subnormal bfloat16 as zero.
  // Logits: s = softcap·tanh(scale·q·k / softcap) − alibi_slope·|position − t|, then the sink joins the denominator.
  float scale = 0.0f;                    // 0 means 1/sqrt(head_dim)
  float softcap = 0.0f;                  // 0: off (Gemma 2)
  const float* alibi_slopes = nullptr;   // [q_heads]; null: none (Press et al., ICLR 2022)
  const float* sinks = nullptr;          // [q_heads] natural-log logits without a value; null: none (gpt-oss); −inf: none
  LseBase lse_base = LseBase::kNatural;  // LSE = log_base Σ e^s, the sink included
};

// Same values as leanattn_status in leanattn.h.
enum class Status : std::int32_t {
  kOk = 0,
  kInvalidArgument = 1,  // a shape, stride, pointer or option; nothing was computed
  kUnsupported = 2,      // well formed, but this build or machine has no kernel for it
  kInvalidData = 3,      // a length or page id in use is out of range; nothing was computed
  kWorkspaceTooSmall = 4,
  kInternal = 5,
};

// what() is one sentence made of names and numbers.
class LEANATTN_API Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& sentence) : std::runtime_error(sentence), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

enum class Backend : std::int32_t { kAuto = 0, kCpu = 1, kCuda = 2 };  // kAuto: kCpu; a pointer does not say where it points

// A caller's own threads. run must call body(argument, i) once for every i in 0 … tasks − 1, on any threads, and return after the
// last has returned; the calls may run one after another. Memory written by bodies must be visible to the caller after run.
struct Executor {
  void (*run)(void* context, std::int32_t tasks, void (*body)(void* argument, std::int32_t task), void* argument) = nullptr;
  void* context = nullptr;
};

// How to compute it. The values change speed and rounding, never meaning.
struct Options {
  Backend backend = Backend::kAuto;
  Policy policy = Policy::kLean;            // schedule.h
  std::int32_t splits = 0;                  // flashdecoding: splits an output, at most 1024; 0: the usual heuristic (schedule.h)
  HeadOrder head_order = HeadOrder::kAuto;  // KV heads along the line or side by side
  bool batch_invariant = false;             // a row's bits depend on its own sequence only, under every policy and worker count
  std::int32_t workers = 0;                 // CPU: stretches of the lean cut, at most 65536, on at most as many threads as the machine
                                            // offers; 0: one a thread (OpenMP's count). An executor needs it.
                                            // CUDA: thread blocks, at most one a multiprocessor, so that the others stay free, and no
                                            // clusters of them, which start only where a whole one fits; 0: all
  Executor executor{};                      // CPU. run == null: the library's own threads
  const char* cpu_isa = nullptr;            // CPU: a name of cpu_isas(); null: the fastest. For tests and comparisons
  void* stream = nullptr;                // CUDA: the cudaStream_t of the current device that the call is queued on; null: the default one
  bool programmatic_launch = false;      // CUDA: start while the kernel before it on the stream is ending (programmatic dependent
                                         // launch, compute capability 9.0); that kernel's writes are waited for before any read
  const char* cuda_path = nullptr;       // CUDA: a name of cuda_paths(); null: the fastest. For tests and comparisons
  bool check_data = false;               // CUDA: check lengths, offsets and used page ids on the device, in the same launch. A seq with a
                                         // fault is not read and counts as empty (with faulty cu_seqlens_q its rows are not written), the
                                         // others are right. The CPU always checks, before it computes anything
  std::uint64_t* data_status = nullptr;  // CUDA, with check_data: a word of device memory, aligned to 8 bytes, that keeps the first
                                         // fault of all calls since it was set to 0 (data_fault.h reads it); null: nobody is told
};

// Throws Error for every shape, stride, pointer or option that is malformed (kInvalidArgument) or that no backend of this version runs
// (kUnsupported). Reads no tensor, length or table. The name in cpu_isa is looked up by workspace_bytes and decode.
LEANATTN_API void validate(const Problem& problem, const Options& options = {});

// Throws Error kInvalidData, naming seq and slot, for a kv_len outside 0 … the seq's room, a page id in use outside 0 … num_pages − 1, or
// cu_seqlens that fall, do not start at 0, or exceed q_len. Reads host memory; the problem must have passed validate.
LEANATTN_API void check_data(const Problem& problem);

// The sentence of a status word; empty for 0.
LEANATTN_API std::string data_fault_sentence(std::uint64_t data_status);

}  // namespace leanattn
