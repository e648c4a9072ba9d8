// SPDX-License-Identifier: Apache-2.0
#include "cuda_kernels.h"

namespace leanattn::testing {
namespace {

__global__ void hold(int* holding, const int* release, long long clocks) {
  extern __shared__ int whole[];
  if (threadIdx.x == 0) whole[0] = atomicAdd(holding, 1);
  const long long begin = clock64();
  while (*static_cast<const volatile int*>(release) == 0 && clock64() - begin < clocks) __nanosleep(200);
}

}  // namespace

cudaError_t hold_multiprocessors(int blocks, int* holding, const int* release, double seconds, cudaStream_t stream) {
  int device = 0, shared_bytes = 0, clock_khz = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device);
  const cudaError_t answer = cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (answer != cudaSuccess) return answer;
  hold<<<blocks, 32, shared_bytes, stream>>>(holding, release, static_cast<long long>(seconds * 1e3 * clock_khz));
  return cudaGetLastError();
}

}  // namespace leanattn::testing
