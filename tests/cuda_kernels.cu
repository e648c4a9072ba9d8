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

__global__ void wait_and_copy(LateCopy first, LateCopy second, long long clocks) {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const long long begin = clock64();
  while (clock64() - begin < clocks) __nanosleep(200);
  for (const LateCopy& copy : {first, second}) {
    for (int i = static_cast<int>(threadIdx.x); i < copy.words; i += static_cast<int>(blockDim.x)) {
      static_cast<int*>(copy.to)[i] = static_cast<const int*>(copy.from)[i];
    }
  }
}

// Clocks of the current device in so many seconds.
long long clocks_of(double seconds) {
  int device = 0, clock_khz = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device);
  return static_cast<long long>(seconds * 1e3 * clock_khz);
}

}  // namespace

cudaError_t hold_multiprocessors(int blocks, int* holding, const int* release, double seconds, cudaStream_t stream) {
  int device = 0, shared_bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const cudaError_t answer = cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (answer != cudaSuccess) return answer;
  hold<<<blocks, 32, shared_bytes, stream>>>(holding, release, clocks_of(seconds));
  return cudaGetLastError();
}

cudaError_t copy_late(const LateCopy& first, const LateCopy& second, double seconds, cudaStream_t stream) {
  wait_and_copy<<<1, 256, 0, stream>>>(first, second, clocks_of(seconds));
  return cudaGetLastError();
}

}  // namespace leanattn::testing
