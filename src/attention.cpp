// SPDX-License-Identifier: Apache-2.0
// The C++ entry points: validation first, then the backend.
#include "leanattn/attention.h"

#include <algorithm>

#include "backend.h"
#include "numeric.h"
#include "partial.h"
#include "problem_view.h"

namespace leanattn {
std::size_t workspace_bytes(const Problem& problem, const Options& options) {
  validate(problem, options);
  if (options.backend != Backend::kCuda) return cpu::workspace_bytes(problem, options);
  require_cuda(cuda::available(), cuda::why_absent);
  return cuda::workspace_bytes(problem, options);
}

void initialize_workspace(const Options& options, std::span<std::byte> workspace) {
  if (options.backend != Backend::kCuda) return;
  require_cuda(cuda::available(), cuda::why_absent);
  cuda::initialize_workspace(options, workspace);
}

void decode(const Problem& problem, const Options& options, std::span<std::byte> workspace) {
  if (options.backend == Backend::kCuda) {
    validate(problem, options);
    require_cuda(cuda::available(), cuda::why_absent);
    cuda::decode(problem, options, workspace);
  } else {
    check_workspace(workspace.data(), workspace.size(), workspace_bytes(problem, options));
    cpu::decode(problem, options, workspace);
  }
}

void merge(const MergeProblem& problem, const Options& options) {
  validate_merge(problem);
  if (options.backend == Backend::kCuda) {
    require_cuda(cuda::available(), cuda::why_absent);
    return cuda::merge(problem, options);
  }
  const int dims = problem.head_dim_v;
  const float to_natural = problem.lse_base == LseBase::kTwo ? kLn2 : 1.0f;
  constexpr int kStrip = 256;  // dims at a time, on the stack
  float values[kStrip], shard_values[kStrip];
  for (std::int64_t row = 0; row < problem.rows; ++row) {
    for (int first = 0; first < dims; first += kStrip) {
      const int count = std::min(kStrip, dims - first);
      RowPartial total;
      float base_lse = kMinusInfinity;  // in the caller's base, as given: a lone shard keeps its bits
      std::fill(values, values + count, 0.0f);
      for (std::int64_t shard = 0; shard < problem.shards; ++shard) {
        const std::int64_t at = shard * problem.rows + row;
        const RowPartial partial = shard_partial(problem.shard_lse[at] * to_natural);
        if (partial.sum == 0.0f) continue;
        for (int i = 0; i < count; ++i) shard_values[i] = load_as_float(problem.shard_o, problem.dtype, at * dims + first + i);
        const RowMerge merge = merge_rows(total, partial);
        merge_values(merge, values, shard_values, count);
        if (merge.swapped) base_lse = problem.shard_lse[at];
        total = merge.row;
      }
      const float factor = finish_factor(total);
      for (int i = 0; i < count; ++i) store_from_float(problem.o, problem.dtype, row * dims + first + i, values[i] * factor);
      if (problem.lse && first == 0) problem.lse[row] = total.sum == 0.0f ? kMinusInfinity : base_lse + log_natural(total.sum) / to_natural;
    }
  }
}

std::vector<std::string> cpu_isas() { return cpu::isas(); }

std::vector<std::string> cuda_paths() { return cuda::paths(); }

const char* version() { return LEANATTN_VERSION; }

bool backend_available(Backend backend) {
  return backend == Backend::kAuto || backend == Backend::kCpu || (backend == Backend::kCuda && cuda::available());
}

}  // namespace leanattn
