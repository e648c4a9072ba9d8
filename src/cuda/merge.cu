// SPDX-License-Identifier: Apache-2.0
// Merging shards of a context on the device: a warp a row, its lanes on the row's dims, the shards in their order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "backend.h"
#include "numeric.h"
#include "partial.h"
#include "problem_view.h"

namespace leanattn::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kBlockWarps = 8;
constexpr int kLaneDims = 8;  // that a lane holds at a time

__device__ float as_float(float value) { return value; }
__device__ float as_float(__half value) { return __half2float(value); }
__device__ float as_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void store(float* to, float value) { *to = value; }
__device__ void store(__half* to, float value) { *to = __float2half_rn(value); }
__device__ void store(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }

template <class T>
__global__ void __launch_bounds__(kBlockWarps* kWarp) merge_kernel(MergeProblem problem, float to_natural) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, dims = problem.head_dim_v;
  const T* shard_o = static_cast<const T*>(problem.shard_o);
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kBlockWarps;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / kWarp; row < problem.rows; row += warps) {
    for (int first = lane; first - lane < dims; first += kLaneDims * kWarp) {
      RowPartial total;
      float base_lse = kMinusInfinity;  // in the caller's base, as given: a lone shard keeps its bits
      float values[kLaneDims] = {};
      for (std::int64_t shard = 0; shard < problem.shards; ++shard) {
        const std::int64_t at = shard * problem.rows + row;
        const float lse = problem.shard_lse[at];
        const RowPartial partial = shard_partial(lse * to_natural);
        if (partial.sum == 0.0f) continue;
        const RowMerge merge = merge_rows(total, partial);
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) {
          const int dim = first + i * kWarp;
          const float value = dim < dims ? as_float(shard_o[at * dims + dim]) : 0.0f;
          merge_values(merge, &values[i], &value, 1);
        }
        if (merge.swapped) base_lse = lse;
        total = merge.row;
      }
      const float factor = finish_factor(total);
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) {
        const int dim = first + i * kWarp;
        if (dim < dims) store(static_cast<T*>(problem.o) + row * dims + dim, values[i] * factor);
      }
      if (problem.lse != nullptr && first == 0) {
        problem.lse[row] = total.sum == 0.0f ? kMinusInfinity : base_lse + log_natural(total.sum) / to_natural;
      }
    }
  }
}

}  // namespace

void merge(const MergeProblem& problem, const Options& options) {
  if (problem.rows == 0) return;
  const float to_natural = problem.lse_base == LseBase::kTwo ? kLn2 : 1.0f;
  constexpr std::int64_t kMostBlocks = 4096;
  const auto blocks = static_cast<unsigned>(std::min((problem.rows + kBlockWarps - 1) / kBlockWarps, kMostBlocks));
  const auto stream = static_cast<cudaStream_t>(options.stream);
  switch (problem.dtype) {
    case DType::kFloat32: merge_kernel<float><<<blocks, kBlockWarps * kWarp, 0, stream>>>(problem, to_natural); break;
    case DType::kFloat16: merge_kernel<__half><<<blocks, kBlockWarps * kWarp, 0, stream>>>(problem, to_natural); break;
    case DType::kBFloat16: merge_kernel<__nv_bfloat16><<<blocks, kBlockWarps * kWarp, 0, stream>>>(problem, to_natural); break;
  }
  const cudaError_t answer = cudaGetLastError();
  if (answer != cudaSuccess) reject_cuda_answer("merge_kernel", cudaGetErrorString(answer));
}

}  // namespace leanattn::cuda
