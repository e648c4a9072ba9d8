// SPDX-License-Identifier: Apache-2.0
// The kernel. A block takes one stretch of the line (heads along) or of one KV head's line (heads side by side), from the lengths alone.
//
//   warps     consumers: groups of four, each for up to 32 packed rows, or one warpgroup for 64; then four producers
//   shared    stages × [K, V] · stages × Q of a segment · Shared (config.cuh). 16-byte chunks, swizzled
//   full      producers → consumers: its copies have landed and its record is written
//   empty     consumer warps → producers: the stage is no longer read
//   named     1 … groups: the warps of a group, where it has several, for the largest logit, for P and for ℓ; 13: consumers, at the
//             start; 14: producers wait there for what consumers have set up; 15: producers, while they find the stretch
//   bound     reading K and V once. `stages` stages are in flight, also across the borders of segments and while one is being finished
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/cluster.cuh"
#include "cuda/fixup.cuh"
#include "cuda/load.cuh"
#include "cuda/tile.cuh"
#include "cuda/tree.cuh"
#include "cuda/warpgroup.cuh"

namespace leanattn::cuda {

template <class C>
using TilePlaces = std::conditional_t<C::kWarpgroup, QPlaces<C>, Places<C>>;

// The consumers' way through the stretch, tile by tile.
template <class C>
__device__ __forceinline__ void consume(const Params& p, std::uint32_t stages_at, std::uint32_t q_ring_at, Shared<C>& shared) {
  const int consumer_warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = consumer_warp / C::kGroupWarps, warp = consumer_warp % C::kGroupWarps;
  const TilePlaces<C> places(warp, lane);
  RowState<C> state;
  NodeRow nodes;
  PendingOutputs pending;
  bool faulty = false;  // of the segment
  int slot = 0, parity = 0, segment_slot = 0;
  [[maybe_unused]] bool first_stage = true;
  for (;;) {
    ptx::mbarrier_wait(&shared.full[slot], parity);
    const Stage stage = shared.stages[slot];
    if (stage.flags & Stage::kDone) break;
    if (threadIdx.x == 0) mark(p, first_stage ? Mark::kFirstBytes : Mark::kLastBytes);
    first_stage = false;
    const std::uint32_t q_at = q_ring_at + segment_slot * C::kQBytes + group * C::kPaddedRows * C::kRowBytes;
    if (stage.flags & Stage::kFirst) {
      start_segment<C>(state, shared.segments[segment_slot], p, places.q, q_at, shared, group, warp, lane);
      if (has_chunks<C>(p)) nodes = {shared.segments[segment_slot].chunks.begin, 0};
      faulty = false;
    }
    if (is_checked<C>(p)) faulty |= (stage.flags & Stage::kFault) != 0;
    if (stage.tokens > 0) {
      const std::uint32_t k_at = stages_at + slot * 2 * C::kStageBytes;
      if constexpr (C::kWarpgroup) {
        attend_as_warpgroup<C>(state, stage, k_at, p, lane);
      } else {
        attend<C>(state, places, stage, shared.segments[segment_slot], k_at, q_at, p, shared, group, warp, lane);
      }
      keep_sums<C>(state, stage, shared, group, warp, lane);
    }
    if (stage.flags & (has_chunks<C>(p) ? Stage::kChunkEnd : Stage::kLast)) {
      const bool last = !has_chunks<C>(p) || (stage.flags & Stage::kLast);
      if (threadIdx.x == 0 && last) mark(p, Mark::kLastTile);
      const SegmentInfo info = shared.segments[segment_slot];
      RowPartial rows[C::kLaneRows];  // empty where the seq is
      if (stage.tokens > 0) finish_rows<C>(rows, state, shared, group, warp, lane);
      ptx::mbarrier_arrive(&shared.empty[slot]);
      if (has_chunks<C>(p)) [[unlikely]]
        end_chunk<C>(state, rows, nodes, last, info, p, shared, consumer_warp, lane);
      if (last && info.of_cluster) {
        finish_in_cluster<C>(state, rows, info, p, shared, faulty, group, warp, lane);
        break;  // the block's only segment
      }
      if (last) {
        if (has_chunks<C>(p) && info.parts > 1) [[unlikely]] {
          finish_cut_chunks<C>(nodes, info, p, shared, pending, faulty, consumer_warp, lane);
        } else {
          finish_segment<C>(state, rows, info, p, faulty, group, warp, lane);
        }
        if (++segment_slot == p.stages) segment_slot = 0;
      }
    } else {
      ptx::mbarrier_arrive(&shared.empty[slot]);
    }
    if (++slot == p.stages) {
      slot = 0;
      parity ^= 1;
    }
  }
#pragma unroll 1
  for (int starts = 0; has_chunks<C>(p) && starts < 2; ++starts) {
    if (!(starts ? pending.is_mine[1] : pending.is_mine[0])) continue;
    const bool of_faulty = starts ? pending.faulty[1] : pending.faulty[0];
    merge_rows_of_nodes<C>(shared.pending[consumer_warp][starts], p, shared.cut, of_faulty, consumer_warp, lane);
  }
  if (threadIdx.x == 0) mark(p, Mark::kExit);
}

// Parameters come through a cache that is cold: all lines that most calls need at once, not one after the other when each is first needed.
__device__ __forceinline__ void touch(const Params& p) {
  constexpr int kLineWords = 16;
  const auto* words = reinterpret_cast<const std::uint32_t*>(&p);
#pragma unroll
  for (unsigned i = 0; i < offsetof(Params, softcap_log2) / 4; i += kLineWords) ptx::used(words[i]);
}

// What the consumers do before there is work.
template <class C>
__device__ __forceinline__ void set_up(const Params& p, Shared<C>& shared) {
  if (threadIdx.x < kMaxStages) {
    ptx::mbarrier_init(&shared.full[threadIdx.x], kProducerThreads + 1);
    ptx::mbarrier_init(&shared.empty[threadIdx.x], C::kConsumers);
  }
  if (p.line.cluster_stretches > 1) {
    if (threadIdx.x == 0) expect_parts<C>(p, shared);
    ptx::cluster_arrive();
  }
}

template <class C>
__device__ __forceinline__ void decode_block(const Params& p) {
  extern __shared__ __align__(1024) unsigned char memory[];  // what wgmma's swizzle counts from
  const std::uint32_t stages_at = ptx::shared_address(memory);
  const std::uint32_t q_ring_at = stages_at + p.stages * 2 * C::kStageBytes;
  auto& shared = *reinterpret_cast<Shared<C>*>(memory + p.stages * (2 * C::kStageBytes + C::kQBytes));
  const bool produces = threadIdx.x >= C::kConsumers;
  touch(p);
  if (__builtin_expect(produces, 1)) {  // before any set-up: everything waits for the first copies, and instructions come from memory too
    Producer<C> producer(p, threadIdx.x - C::kConsumers, stages_at, q_ring_at, shared);
    ptx::let_next_kernel_start();
    ptx::wait_for_previous_kernel();
    producer.run();
  } else {
    if (threadIdx.x == 0) mark(p, Mark::kEntry);
    set_up<C>(p, shared);
    if (is_padded<C>(p)) clear_padding<C>(memory, p, threadIdx.x, C::kConsumers);
    ptx::let_next_kernel_start();
    ptx::wait_for_previous_kernel();
    if (p.line.output_stretches > 0) load_own_q<C>(p, threadIdx.x, q_ring_at);
    ptx::named_barrier_arrive(kStartBarrier, C::kThreads);  // producers wait for it (meet_consumers)
    ptx::named_barrier(kConsumerBarrier, C::kConsumers);
    if (p.line.cluster_stretches > 1) ptx::cluster_wait();  // all of the cluster run and expect their parts: here, where it costs nothing
    if (threadIdx.x == 0) mark(p, Mark::kStretch);
    consume<C>(p, stages_at, q_ring_at, shared);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) decode_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr bool kIsLaunched = C::kFull;  // choose_variant in backend.cu; the others are not worth the time to compile
#else
  constexpr bool kIsLaunched = true;
#endif
  if constexpr (kIsLaunched) decode_block<C>(p);
}

}  // namespace leanattn::cuda
