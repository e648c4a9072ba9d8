// SPDX-License-Identifier: Apache-2.0
#include "tools/floor_cuda.h"

#include <cuda/ptx>

#include "tools/device_error.h"

namespace leanattn::tools {
namespace {

namespace ptx = cuda::ptx;

constexpr int kStages = 12;
constexpr int kReaderWarps = 8;
constexpr int kReaders = 32 * kReaderWarps;
constexpr int kThreads = kReaders + 32;  // and one warp that asks for the bytes
constexpr int kSharedBytes = kStages * kFloorChunkBytes;
constexpr float kUnlikely = 12345.0f;  // a sum that keeps the compiler from dropping the loads

__device__ float sum_of(float4 v) { return v.x + v.y + v.z + v.w; }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ std::int64_t chunks_of(std::int64_t bytes) { return (bytes + kFloorChunkBytes - 1) / kFloorChunkBytes; }

struct Chunk {
  const std::byte* data;
  int bytes;
};

__device__ Chunk chunk_at(const FloorPieces& pieces, std::int64_t index) {
  const std::int64_t in_first = chunks_of(pieces.first_bytes);
  const bool second = index >= in_first;
  const std::int64_t at = (second ? index - in_first : index) * kFloorChunkBytes;
  const std::int64_t left = (second ? pieces.second_bytes : pieces.first_bytes) - at;
  return {(second ? pieces.second : pieces.first) + at, static_cast<int>(left < kFloorChunkBytes ? left : kFloorChunkBytes)};
}

__device__ std::uint64_t evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// cuda::ptx has this copy without its cache hint only.
__device__ void bulk_copy(std::byte* to, Chunk from, std::uint64_t* arrived, std::uint64_t policy) {
  const auto shared = [](const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); };
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared(to)),
      "l"(from.data), "r"(from.bytes), "r"(shared(arrived)), "l"(policy)
      : "memory");
}

__device__ void wait(std::uint64_t* barrier, std::uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

__device__ void read_bulk_body(const FloorPieces& pieces, float* sink) {
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ std::uint64_t full[kStages], empty[kStages];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full + stage, 1);
      ptx::mbarrier_init(empty + stage, kReaderWarps);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  __syncthreads();
  // In 32 bits, which divide fast: 2^24 chunks are 256 GB.
  const auto chunks = static_cast<std::uint32_t>(chunks_of(pieces.first_bytes) + chunks_of(pieces.second_bytes));
  const std::uint32_t begin = chunks * blockIdx.x / gridDim.x;
  const int count = static_cast<int>(chunks * (blockIdx.x + 1) / gridDim.x - begin);
  float sum = 0.0f;
  if (thread == kReaders) {
    const std::uint64_t policy = evict_first();
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages, use = i / kStages;
      if (use > 0) wait(empty + stage, (use - 1) & 1);
      const Chunk chunk = chunk_at(pieces, begin + i);
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full + stage, chunk.bytes);
      bulk_copy(stages + stage * kFloorChunkBytes, chunk, full + stage, policy);
    }
  } else if (thread < kReaders) {
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages, use = i / kStages;
      const int vectors = chunk_at(pieces, begin + i).bytes / 16;
      wait(full + stage, use & 1);
      const auto* data = reinterpret_cast<const float4*>(stages + stage * kFloorChunkBytes);
      if (vectors == kFloorChunkBytes / 16) {
#pragma unroll
        for (int at = 0; at < kFloorChunkBytes / 16; at += kReaders) sum += sum_of(data[at + thread]);
      } else {
        for (int at = thread; at < vectors; at += kReaders) sum += sum_of(data[at]);
      }
      __syncwarp();
      if (thread % 32 == 0) ptx::mbarrier_arrive(empty + stage);
    }
  }
  if (sum == kUnlikely) sink[thread] = sum;
}

#else

__device__ void read_bulk_body(const FloorPieces&, float*) {}  // never launched there

#endif

__global__ void __launch_bounds__(kThreads, 1) read_bulk(FloorPieces pieces, float* sink) { read_bulk_body(pieces, sink); }

constexpr int kWideThreads = 512;
constexpr int kWideBlocksPerMultiprocessor = 4;

__global__ void __launch_bounds__(kWideThreads) read_wide(FloorPieces pieces, float* sink) {
  constexpr int kUnroll = 8;  // loads in flight a thread
  const std::int64_t in_first = pieces.first_bytes / 16, all = in_first + pieces.second_bytes / 16;
  const auto* first = reinterpret_cast<const float4*>(pieces.first);
  const auto* second = reinterpret_cast<const float4*>(pieces.second);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kWideThreads;
  float sum = 0.0f;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kWideThreads + threadIdx.x; at < all; at += step * kUnroll) {
    float4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t index = at + i * step;
      values[i] = index < all ? __ldcs(index < in_first ? first + index : second + (index - in_first)) : float4{};
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) sum += sum_of(values[i]);
  }
  if (sum == kUnlikely) sink[threadIdx.x] = sum;
}

}  // namespace

DeviceFloor::DeviceFloor() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  bulk_ = major >= 9;
  if (bulk_) {
    check_cuda(cudaFuncSetAttribute(read_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "cudaFuncSetAttribute");
  }
  check_cuda(cudaMalloc(&sink_, sizeof(float) * kWideThreads), "cudaMalloc");
}

DeviceFloor::~DeviceFloor() {
  if (sink_) cudaFree(sink_);
}

void DeviceFloor::read(const FloorPieces& pieces, cudaStream_t stream) const {
  if (bulk_) {
    read_bulk<<<multiprocessors_, kThreads, kSharedBytes, stream>>>(pieces, sink_);
  } else {
    read_wide<<<multiprocessors_ * kWideBlocksPerMultiprocessor, kWideThreads, 0, stream>>>(pieces, sink_);
  }
  check_cuda(cudaGetLastError(), "the floor's launch");
}

}  // namespace leanattn::tools
