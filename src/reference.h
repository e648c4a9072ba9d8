// SPDX-License-Identifier: Apache-2.0
// What is right: attention in float64 over the stored inputs, and the tolerance that a result has to meet. Shares no code with the rest.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "leanattn/problem.h"

namespace leanattn {

// Which rows to compute. Every seq is looked at in any case.
struct Sample {
  int kv_heads_per_seq = 0;                 // KV heads of each seq, spread out and turning from seq to seq, with all their rows; 0: all
  int threads = 0;                          // 0: as many as the machine has
  const std::atomic<bool>* stop = nullptr;  // ends early once it is true, after the (seq, KV head) at hand; rows that are left stay NaN
};

// The right values, and how far off the naive computation is: float32 throughout, as a careful programmer would first write it. A dot
// product is summed in order, the softmax takes the row's maximum off first, P·V is summed in token order and divided by Σ P at the end.
// With 16-bit inputs P is rounded to their type before P·V, as the tensor cores of fused kernels ask for; Σ P is taken before that.
// A short row can come out exact by luck, so the naive computation runs in several orders (each starts at another dimension and token;
// every other one multiplies q by the scale before q·k and takes logits in base 2, as kernels do): 16 for short work, 2 for long. The worst
// error counts.
struct Reference {
  enum Row : std::uint8_t { kNotComputed = 0, kWithKeys = 1, kWithoutKeys = 2 };
  std::vector<double> o;                // [total_q, q_heads, head_dim_v]; NaN where not computed
  std::vector<double> lse;              // [total_q, q_heads], in lse_base; NaN where not computed
  std::vector<std::uint8_t> row;        // [total_q, q_heads] Row
  std::vector<double> naive_o_error;    // [batch] worst error of the naive O over the seq's rows and dims, before O is rounded to its type
  std::vector<double> naive_lse_error;  // [batch]
  std::int64_t rows = 0;                // rows computed
};

// Reads addressed rows only: no token past a length or before the window, no unused block-table slot. The problem has passed validate and
// check_data.
Reference compute_reference(const Problem& problem, const Sample& sample = {});

// The element that comes nearest to its tolerance, or exceeds it most.
struct Worst {
  double error = 0.0;
  double tolerance = 0.0;
  double ratio = 0.0;  // error / tolerance; 0 where both are 0, infinite where only the tolerance is or the error is not a number
  int seq = -1;
  int token = -1;
  int q_head = -1;
  int dim = -1;  // −1 for LSE
};

struct Comparison {
  Worst o;
  Worst lse;              // as it is where problem.lse is null
  std::int64_t rows = 0;  // rows compared
  bool ok() const { return o.ratio <= 1.0 && lse.ratio <= 1.0; }
};

// Compares problem.o and problem.lse with the reference. An element's tolerance is
//
//   2 × naive error + 1 ulp
//
// where the naive error is that of the element's seq (all its rows see the same tokens and err alike, a single row may err little by
// luck), and the ulp is that of the output type at the right value: it pays for the rounding of the output, of which half an ulp is
// inevitable. A row without keys has no tolerance: O is 0, LSE −inf; with a sink, LSE is the sink within 1 ulp.
Comparison compare(const Problem& problem, const Reference& reference);

}  // namespace leanattn
