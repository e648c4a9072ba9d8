// SPDX-License-Identifier: Apache-2.0
// The end of an output that clusters of blocks work on (compute capability 9.0). Each block of a cluster has a part of the context. It
// pushes its partial, cut into as many slices as there are blocks, into the shared memory of the blocks that own the slices; an owner
// merges its slice of all parts in tile order. Where an output has several clusters, the slices of one owner's place in each cluster meet
// as in fixup.cuh: the last to arrive merges them, in tile order. A block waits for blocks of its own cluster only, and those run at the
// same time.
//
// A slice is a run of the partial's float4, in the order consumer warp, lane row, vector, lane.
#pragma once

#include "cuda/fixup.cuh"
#include "cuda/tree.cuh"

namespace leanattn::cuda {

// What a block of a cluster receives, behind Shared.
template <class C>
struct Exchange {
  float4* parts;  // [blocks, vectors of the slice]
  float2* rows;   // [blocks, C::kRows]: (m, ℓ)

  __device__ __forceinline__ Exchange(Shared<C>& shared, int blocks, int slice)
      : parts(reinterpret_cast<float4*>(&shared + 1)), rows(reinterpret_cast<float2*>(parts + blocks * slice)) {}
};

// Vectors of the slice that this block owns: the last ones of a cluster may have fewer, or none.
template <class C>
__device__ __forceinline__ int own_vectors(const Params& p, int rank) {
  return max_of(min_of(p.cluster_slice, C::kVectors - rank * p.cluster_slice), 0);
}

template <class C>
__device__ __forceinline__ void expect_parts(const Params& p, Shared<C>& shared) {
  ptx::mbarrier_init(&shared.received, 1);
  const int vectors = own_vectors<C>(p, ptx::cluster_rank());
  ptx::mbarrier_expect(&shared.received, vectors > 0 ? p.line.cluster_stretches * (vectors * 16 + C::kRows * 8) : 0);
  ptx::fence_mbarrier_init();
}

template <class C>
__device__ __forceinline__ void push_partial(const RowState<C>& state, const RowPartial (&rows)[C::kLaneRows], const Exchange<C>& there,
                                             const Params& p, Shared<C>& shared, bool faulty, int group, int warp, int lane) {
  const int rank = ptx::cluster_rank(), blocks = p.line.cluster_stretches, slice = p.cluster_slice;
  const std::uint32_t barrier = ptx::shared_address(&shared.received);
  const std::uint32_t parts_at = ptx::shared_address(there.parts + rank * slice),
                      rows_at = ptx::shared_address(there.rows + rank * C::kRows);
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    const int tile = i / C::kHalves, half = i % C::kHalves;
#pragma unroll
    for (int j = 0; j < C::kRowVectors; ++j) {
      const int index = (((group * C::kGroupWarps + warp) * C::kLaneRows + i) * C::kRowVectors + j) * kWarp + lane;
      const int owner = p.of_slice.of(index);
      float v[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        v[r] = 4 * j + r < C::kRowValues ? state.values[tile][(4 * j + r) / 2 % C::kDimSteps][2 * half + r % 2] : 0.0f;
      ptx::push_16(ptx::in_block(parts_at + (index - owner * slice) * 16, owner), make_float4(v[0], v[1], v[2], v[3]),
                   ptx::in_block(barrier, owner));
    }
    // The four lanes of a row, in all warps that share it, tell all blocks.
#pragma unroll
    for (int more = 0; more < kMaxCluster; more += 4 * C::kGroupWarps) {
      const int reader = more + warp * 4 + lane % 4;
      if (reader >= blocks || reader * slice >= C::kVectors) continue;
      const std::uint32_t to = rows_at + (group * C::kGroupRows + group_row<C>(i, lane)) * 8;
      ptx::push_8(ptx::in_block(to, reader), make_float2(rows[i].max, is_checked<C>(p) && faulty ? -1.0f : rows[i].sum),
                  ptx::in_block(barrier, reader));
    }
  }
}

// As merge_vector, in the order of the merge tree: every part is a node of one level.
template <class C, bool kInWorkspace>
__device__ __forceinline__ VectorNode<1> merge_nodes(int count, const float4* values, int values_step, const float2* rows, int rows_step) {
  constexpr int kAtOnce = C::kThreads > 256 ? 4 : 8;  // a power of two: they are a node of a higher level
  [[maybe_unused]] VectorStack<1> stack;
  VectorNode<1> all;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kAtOnce) {
    VectorNode<1> nodes[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (begin + k < count) nodes[k] = VectorNode<1>(kInWorkspace ? __ldcg(rows) : *rows, kInWorkspace ? __ldcg(values) : *values);
      rows += rows_step;
      values += values_step;
    }
#pragma unroll
    for (int step = 1; step < kAtOnce; step *= 2) {  // what is missing is empty and changes nothing
#pragma unroll
      for (int k = 0; k < kAtOnce; k += 2 * step) {
        nodes[k + step].take_left(nodes[k]);
        nodes[k] = nodes[k + step];
      }
    }
    if constexpr (kInWorkspace || kAtOnce < 8) {
      stack.push(nodes[0], begin / kAtOnce);
    } else {  // of a cluster: two times at most
      if (begin > 0) nodes[0].take_left(all);
      all = nodes[0];
    }
  }
  if constexpr (kInWorkspace || kAtOnce < 8) all = stack.fold();
  return all;
}

// Merges `count` parts of one vector in tile order: values[k·values_step] on rows[k·rows_step]. kInWorkspace: of other blocks' making.
template <bool kInWorkspace>
__device__ __forceinline__ RowPartial merge_vector(float (&total)[4], int count, const float4* values, int values_step, const float2* rows,
                                                   int rows_step) {
  constexpr int kAtOnce = kInWorkspace ? 8 : 4;  // the workspace answers late
  RowPartial row;
#pragma unroll
  for (int r = 0; r < 4; ++r) total[r] = 0.0f;
#pragma unroll 1
  for (;;) {
    float2 row_parts[kAtOnce];
    float4 value_parts[kAtOnce][1];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      row_parts[k] = make_float2(kMinusInfinity, 0.0f);
      value_parts[k][0] = {};
      if (k < count) {
        row_parts[k] = kInWorkspace ? __ldcg(rows) : *rows;
        value_parts[k][0] = kInWorkspace ? __ldcg(values) : *values;
      }
      rows += rows_step;
      values += values_step;
    }
    merge_batch<kAtOnce, 1>(row, total, row_parts, value_parts);
    if ((count -= kAtOnce) <= 0) return row;
  }
}

template <class C, bool kInWorkspace>
__device__ __forceinline__ RowPartial merge_vectors(float (&total)[4], const Params& p, int count, const float4* values, int values_step,
                                                    const float2* rows, int rows_step) {
  if (has_chunks<C>(p)) {
    const VectorNode<1> all = merge_nodes<C, kInWorkspace>(count, values, values_step, rows, rows_step);
#pragma unroll
    for (int r = 0; r < 4; ++r) total[r] = all.values[r];
    return all.row;
  }
  return merge_vector<kInWorkspace>(total, count, values, values_step, rows, rows_step);
}

// The end of the block's segment, whose rows have (m, ℓ) `rows`.
template <class C>
__device__ __forceinline__ void finish_in_cluster(const RowState<C>& state, const RowPartial (&rows)[C::kLaneRows], const SegmentInfo& info,
                                                  const Params& p, Shared<C>& shared, bool faulty, int group, int warp, int lane) {
  const int blocks = p.line.cluster_stretches, slice = p.cluster_slice, rank = ptx::cluster_rank();
  const Exchange<C> exchange(shared, blocks, slice);
  push_partial<C>(state, rows, exchange, p, shared, faulty, group, warp, lane);
  const int consumer_warp = group * C::kGroupWarps + warp, thread = consumer_warp * kWarp + lane;
  const bool marks = thread == 0;
  if (marks) mark(p, Mark::kPublished);
  const int vectors = own_vectors<C>(p, rank);
  if (consumer_warp * kWarp >= vectors) return;

  const long long first_slot = info.first_stretch + rank, slot = first_slot + info.part * blocks;
#pragma unroll 1
  for (int at = thread; at < vectors; at += C::kConsumers) {
    const VectorPlace<C> place(rank * slice + at);
    const OutputRow to = OutputRow::of<C>(p, info, place.row(), place.consumer_warp % C::kGroupWarps, place.lane);
    ptx::mbarrier_wait_cluster(&shared.received, 0);
    if (marks) mark(p, Mark::kCounted);
    float values[4];
    RowPartial row = merge_vectors<C, false>(values, p, blocks, exchange.parts + at, slice, exchange.rows + place.row(), C::kRows);
    if (is_checked<C>(p)) {  // ℓ is negative in a part from data that did not pass a check, and nowhere else
      faulty = false;
#pragma unroll 8
      for (int k = 0; k < blocks; ++k) faulty |= exchange.rows[k * C::kRows + place.row()].y < 0.0f;
    }
    if (info.parts == 1) {
      if (is_checked<C>(p) && faulty) row = {}, values[0] = values[1] = values[2] = values[3] = 0.0f;
      store_vector<C>(row, values, place, to, info, p);
    } else {
      __stcg(p.partial_values + slot * C::kVectors + rank * slice + at, make_float4(values[0], values[1], values[2], values[3]));
      float2* const own_row = slot_place<C>(p, slot, place.consumer_warp).rows + group_row<C>(place.lane_row, place.lane);
      if (lane % 4 == 0) __stcg(own_row, make_float2(row.max, row.sum));
    }
  }
  if (info.parts > 1) {
    const Arrival arrival = arrive(p.counters + first_slot * kMaxConsumerWarps + consumer_warp, info.parts, 1, faulty, lane);
    if (!arrival.last) return;
    __syncwarp();
#pragma unroll 1
    for (int at = thread; at < vectors; at += C::kConsumers) {
      const VectorPlace<C> place(rank * slice + at);
      const OutputRow to = OutputRow::of<C>(p, info, place.row(), place.consumer_warp % C::kGroupWarps, place.lane);
      const float4* const values_at = p.partial_values + first_slot * C::kVectors + rank * slice + at;
      const float2* const rows_at = slot_place<C>(p, first_slot, place.consumer_warp).rows + group_row<C>(place.lane_row, place.lane);
      float values[4];
      RowPartial row = merge_vectors<C, true>(values, p, info.parts, values_at, blocks * C::kVectors, rows_at,
                                              blocks * C::kConsumerWarps * C::kGroupRows);
      if (is_checked<C>(p) && arrival.faulty) row = {}, values[0] = values[1] = values[2] = values[3] = 0.0f;
      store_vector<C>(row, values, place, to, info, p);
    }
  }
  if (marks) mark(p, Mark::kMerged);
}

}  // namespace leanattn::cuda
