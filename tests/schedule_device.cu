// SPDX-License-Identifier: Apache-2.0
// Compiled without a GPU too: the shared headers are device code.
#include "schedule_device.h"

#include "schedule_digest.h"

namespace leanattn::schedule_test {
namespace {

constexpr int kThreads = 64;

// A block a line, a thread every kThreads-th stretch. The digests of the stretches are summed, so their order does not matter.
__global__ void digest_lines(const Line* lines, unsigned long long* digests) {
  const Line line = lines[blockIdx.x];
  const Cut cut = make_cut(line);
  unsigned long long sum = threadIdx.x == 0 ? digest_of_line(line, cut) : 0;
  const long long stretches = digested_stretches(cut);
  for (long long i = threadIdx.x; i < stretches; i += kThreads) sum += digest_of_stretch(line, cut, digested_stretch(cut, i));
  atomicAdd(&digests[blockIdx.x], sum);
}

__global__ void evaluate_prefix(Line line, long long* prefix) { seq_unit_prefix(line, prefix); }

__global__ void evaluate_merges(int count, const RowPartial* x, const RowPartial* y, const float* x_values, const float* y_values,
                                DeviceMerge* merges) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  DeviceMerge out;
  out.merge = merge_rows(x[i], y[i]);
  out.value = x_values[i];
  merge_values(out.merge, &out.value, &y_values[i], 1);
  out.o = out.value * finish_factor(out.merge.row);
  out.lse = finish_lse(out.merge.row);
  merges[i] = out;
}

}  // namespace

cudaError_t digest_on_device(int count, const Line* lines, unsigned long long* digests) {
  const cudaError_t answer = cudaMemset(digests, 0, sizeof(*digests) * static_cast<std::size_t>(count));
  if (answer != cudaSuccess) return answer;
  digest_lines<<<count, kThreads>>>(lines, digests);
  return cudaGetLastError();
}

cudaError_t prefix_on_device(const Line& line, long long* prefix) {
  evaluate_prefix<<<1, 1>>>(line, prefix);
  return cudaGetLastError();
}

cudaError_t merge_on_device(int count, const RowPartial* x, const RowPartial* y, const float* x_values, const float* y_values,
                            DeviceMerge* merges) {
  evaluate_merges<<<(count + 255) / 256, 256>>>(count, x, y, x_values, y_values, merges);
  return cudaGetLastError();
}

}  // namespace leanattn::schedule_test
