// SPDX-License-Identifier: Apache-2.0
// The only inline assembly: one function an instruction, named after it. Shared-memory addresses are 32-bit.
#pragma once

#include <cstdint>

namespace leanattn::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same value, which the compiler may not compute again: it stays in its register.
__device__ __forceinline__ std::uint32_t kept(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }

// Makes the compiler load the value here.
__device__ __forceinline__ void used(std::uint32_t value) { asm volatile("" ::"r"(value)); }

// --- Copies from global to shared memory ---

// KV is read once: its lines leave L2 first.
__device__ __forceinline__ std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes past L1.
__device__ __forceinline__ void cp_async_16(std::uint32_t to, const void* from, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}
// Without a branch, and only `bytes` of the 16 are read, the rest become 0.
__device__ __forceinline__ void cp_async_16_if(bool wanted, std::uint32_t to, const void* from, int bytes, std::uint64_t policy) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %4, 0; @p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3; }" ::"r"(to),
               "l"(from), "r"(bytes), "l"(policy), "r"(static_cast<int>(wanted))
               : "memory");
}
__device__ __forceinline__ void cp_async_8(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_4(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Until all cp.async of this thread have landed.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --- mbarrier ---

__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives when all cp.async that this thread has issued so far have landed.
__device__ __forceinline__ void mbarrier_arrive_after_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ bool mbarrier_test(std::uint64_t* barrier, int parity) {
  std::uint32_t done;
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
#else
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
#endif
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, int parity) {
  while (!mbarrier_test(barrier, parity)) {
  }
}

// Barrier `id` (1 … 15) of `threads` threads of the block. Every warp comes to it whole; different warps may in different code.
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Comes to it without waiting for the others: what it wrote before is seen by those who wait.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same as named_barrier, and whether any of the threads came with `mine`.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool mine) {
  std::uint32_t any;
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(static_cast<std::uint32_t>(mine)), "r"(id), "r"(threads)
               : "memory");
  return any != 0;
}

// --- Matrix fragments ---

__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// c[16 × 8] += a[16 × 16]·b[16 × 8], float32 sums.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- Matrix products of a warpgroup: four neighbouring warps, 64 rows. Code for compute capability 9.0 alone has them ---

// What wgmma reads from shared memory, by the address of its first byte, in columns of 128 bytes, 1 KB for eight rows: swizzled as
// swizzled<8> does. next_column: bytes to the next 64 elements along a row; eight_rows: to the next eight rows.
__device__ __forceinline__ std::uint64_t wgmma_operand(std::uint32_t at, int next_column, int eight_rows) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return kSwizzle128 | static_cast<std::uint64_t>(eight_rows >> 4) << 32 | static_cast<std::uint64_t>(next_column >> 4) << 16 |
         (at >> 4 & 0x3fff);
}
// c[64 × 64] (+)= a[64 × 16]·b[16 × 64], float32 sums; each warp has 16 of the 64 rows. b: rows of 16 along the sum, or kTransposed, of 64
// across it. Issued, not done.
template <bool kTransposed>
__device__ __forceinline__ void wgmma_bf16(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38; }"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)), "n"(static_cast<int>(kTransposed)));
#endif
}
template <bool kTransposed>
__device__ __forceinline__ void wgmma_f16(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38; }"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)), "n"(static_cast<int>(kTransposed)));
#endif
}
// Before the first: registers and shared memory are as they were written.
__device__ __forceinline__ void wgmma_fence() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// All that were issued since the last, as one group; then wait for all groups.
__device__ __forceinline__ void wgmma_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_wait() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}
// wgmma reads what other instructions have written to shared memory.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// 2^x; exact for whole x ≥ −126, 0 below.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 ÷ x to an ulp; subnormals count as 0.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- Between thread blocks ---

// Adds and gives the value before. Everything this warp wrote before (after a __syncwarp) is seen by who reads the count, and the
// other way round.
__device__ __forceinline__ std::uint32_t atomic_add_acq_rel(std::uint32_t* counter, std::uint32_t more) {
  std::uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(more) : "memory");
  return before;
}

// The GPU's clock, the same on every multiprocessor.
__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
  return time;
}

// --- Clusters of blocks, compute capability 9.0: only called where a launch has them ---

// This block's place in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
// Barriers initialised before this are so for the whole cluster once it has met.
__device__ __forceinline__ void fence_mbarrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// The cluster meets: every thread of it arrives once; whoever waits has seen all who have not exited arrive. What was written before is not
// published by it, but for the barriers behind the fence above.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// The same shared-memory address in another block of the cluster.
__device__ __forceinline__ std::uint32_t in_block(std::uint32_t address, int rank) {
  std::uint32_t there = address;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}
// Stores into another block's shared memory; its barrier there counts the bytes as they land.
__device__ __forceinline__ void push_16(std::uint32_t to, float4 value, std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void push_8(std::uint32_t to, float2 value, std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(value.x), "f"(value.y),
               "r"(barrier)
               : "memory");
#endif
}
// One arrival, and so many bytes to come before the phase ends.
__device__ __forceinline__ void mbarrier_expect(std::uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}
// For bytes from other blocks of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(std::uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  }
#endif
}

// --- Programmatic dependent launch: nothing happens without it ---

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace leanattn::cuda::ptx
