// SPDX-License-Identifier: Apache-2.0
// Batch-invariant: chunks of an output merge as the nodes of one tree (leanattn/merge_tree.h), wherever the line was cut. A block merges
// siblings as its chunks end and keeps the others in its slot of the workspace. What is left at a segment's end is a row of nodes: an
// output of a single block, or of stretches of its own, folds it into one; where an output was cut across the line, the last warp to
// arrive puts the rows of all its segments through the same tree.
#pragma once

#include "cuda/fixup.cuh"
#include "cuda/stretch.cuh"
#include "leanattn/merge_tree.h"

namespace leanattn::cuda {

// Some vectors of a row of an output's Õ with its (m, ℓ): a node of the tree as one lane sees it.
template <int kVectors>
struct VectorNode {
  RowPartial row;
  float values[4 * kVectors] = {};

  VectorNode() = default;
  __device__ __forceinline__ VectorNode(float2 of_row, float4 vector) : row{of_row.x, of_row.y} { set(0, vector); }
  __device__ __forceinline__ void set(int i, float4 vector) {
    values[4 * i] = vector.x, values[4 * i + 1] = vector.y, values[4 * i + 2] = vector.z, values[4 * i + 3] = vector.w;
  }
  // Merges what lies left of it into it.
  __device__ __forceinline__ void take_left(const VectorNode& left) {
    const RowMerge merge = merge_rows<LogUnit::kLog2>(left.row, row);
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) {
      values[i] =
          merge.swapped ? merge_value(merge.factor, values[i], left.values[i]) : merge_value(merge.factor, left.values[i], values[i]);
    }
    row = merge.row;
  }
};

// Nodes of an output on their way to one, pushed in tile order from the first chunk on. In local memory: the place of a node depends on
// the chunks before it.
template <int kVectors>
class VectorStack {
 public:
  // index: of the node on its level.
  __device__ __forceinline__ void push(VectorNode<kVectors> node, int index) {
#pragma unroll 1
    for (; index & 1; index >>= 1) node.take_left(nodes_[--size_]);
    nodes_[size_++] = node;
  }
  // What is left, last first: the right side of the tree is missing.
  __device__ __forceinline__ VectorNode<kVectors> fold() {
    VectorNode<kVectors> all = nodes_[--size_];
#pragma unroll 1
    while (size_ > 0) all.take_left(nodes_[--size_]);
    return all;
  }

 private:
  static constexpr int kMostNodes = 9;  // a bit each of kMostGrownChunks
  static_assert(kMostGrownChunks < 1 << kMostNodes);
  int size_ = 0;
  VectorNode<kVectors> nodes_[kMostNodes];
};

// The i-th node that the segment has left.
template <class C>
__device__ __forceinline__ SlotPlace node_place(const Params& p, int slot, int i, int consumer_warp) {
  return slot_place<C>(p, static_cast<long long>(slot) * p.slot_nodes + i, consumer_warp);
}

// A consumer warp's row of nodes of the segment that it is in, but for the node that registers hold. In shared memory as far as that
// reaches: while K and V stream, the workspace answers as late as they do.
struct NodeRow {
  int chunk = 0;  // of the output, the next to end
  int size = 0;
};

template <class C>
__device__ __forceinline__ SlotPlace kept_place(const Params& p, Shared<C>& shared, int slot, int i, int consumer_warp) {
  if (i >= p.shared_nodes) return node_place<C>(p, slot, i, consumer_warp);
  unsigned char* const node = reinterpret_cast<unsigned char*>(&shared + 1) + p.shared_nodes_at + i * C::kNodeBytes;
  return {reinterpret_cast<float4*>(node) + consumer_warp * (C::kLaneRows * C::kRowVectors * kWarp),
          reinterpret_cast<float2*>(node + C::kVectors * 16) + consumer_warp * C::kGroupRows};
}

// Merges the last node of the row into the one in registers, to which it is left.
template <class C>
__device__ __forceinline__ void take_left(RowState<C>& state, RowPartial (&rows)[C::kLaneRows], const SlotPlace& left, int lane) {
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    const int tile = i / C::kHalves, half = i % C::kHalves;
    const float2 left_row = left.rows[group_row<C>(i, lane)];
    const RowMerge merge = merge_rows<LogUnit::kLog2>({left_row.x, left_row.y}, rows[i]);
    rows[i] = merge.row;
#pragma unroll
    for (int j = 0; j < C::kRowVectors; ++j) {
      const float4 vector = left.values[(i * C::kRowVectors + j) * kWarp + lane];
      const float values[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (4 * j + r >= C::kRowValues) continue;
        float& right = state.values[tile][(4 * j + r) / 2 % C::kDimSteps][2 * half + r % 2];
        right = merge.swapped ? merge_value(merge.factor, right, values[r]) : merge_value(merge.factor, values[r], right);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void store_node(const RowState<C>& state, const RowPartial (&rows)[C::kLaneRows], const SlotPlace& to,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    const int tile = i / C::kHalves, half = i % C::kHalves;
#pragma unroll
    for (int j = 0; j < C::kRowVectors; ++j) {
      float v[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        v[r] = 4 * j + r < C::kRowValues ? state.values[tile][(4 * j + r) / 2 % C::kDimSteps][2 * half + r % 2] : 0.0f;
      to.values[(i * C::kRowVectors + j) * kWarp + lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
    if (lane % 4 == 0) to.rows[group_row<C>(i, lane)] = make_float2(rows[i].max, rows[i].sum);
  }
}

// A chunk has ended; registers hold it. What it completes merges. Where the segment is all that merges here, its last chunk merges with the
// whole row; else the node joins the row and registers start anew.
template <class C>
__device__ __forceinline__ void end_chunk(RowState<C>& state, RowPartial (&rows)[C::kLaneRows], NodeRow& row, bool last_of_segment,
                                          const SegmentInfo& info, const Params& p, Shared<C>& shared, int consumer_warp, int lane) {
  __syncwarp();  // a row's (m, ℓ) is written by one lane and read by four
  const bool whole = last_of_segment && (info.parts == 1 || info.of_cluster);
#pragma unroll 1
  for (int index = row.chunk, level = 0; row.size > 0; index /= 2, ++level) {
    const bool completes = index % 2 == 1 && (index - 1) << level >= info.chunks.begin;
    if (!completes && !whole) break;
    take_left<C>(state, rows, kept_place<C>(p, shared, info.chunks.slot, --row.size, consumer_warp), lane);
  }
  if (whole) return;
  __syncwarp();
  store_node<C>(state, rows, kept_place<C>(p, shared, info.chunks.slot, row.size++, consumer_warp), lane);
  ++row.chunk;
  clear<C>(state);
}

// Fetches the nodes that the stretches of an output have left, in tile order.
template <class C>
class NodeWalk {
 public:
  __device__ __forceinline__ NodeWalk(const SegmentInfo& info, const Params& p, const Cut& cut, int consumer_warp, int lane)
      : info_(info), p_(p), cut_(cut), consumer_warp_(consumer_warp), lane_(lane), line_(chunked_line<C>(fixed_line<C>(p.line), p)) {}

  // The next node's place and index on its level; false behind the last.
  __device__ __forceinline__ bool next(SlotPlace& place, int& index) {
    while (begin_ >= end_) {
      if (++stretch_ >= info_.parts) return false;
      if (stretch_ % kWarp == 0) find_chunks();
      begin_ = __shfl_sync(~0u, lane_begin_, stretch_ % kWarp);
      end_ = __shfl_sync(~0u, lane_end_, stretch_ % kWarp);
      slot_ = 2 * (info_.first_stretch + stretch_) + (begin_ == 0 ? 1 : 0);
      nodes_ = 0;
    }
    const TreeNode node = next_node(begin_, end_);
    place = node_place<C>(p_, slot_, nodes_++, consumer_warp_);
    index = node.index;
    begin_ = (node.index + 1) << node.level;
    return true;
  }

 private:
  // Each lane finds the chunks of one of the next 32 stretches.
  __device__ __forceinline__ void find_chunks() {
    const int stretch = stretch_ + lane_;
    lane_begin_ = lane_end_ = 0;
    if (stretch >= info_.parts) return;
    const auto tile = [&](long long border) {
      return tile_at(line_, info_.chunks.tiles, stretch_begin(cut_, info_.chunks.first_of_line + border) - info_.chunks.output_unit);
    };
    const int begin = tile(stretch), end = tile(stretch + 1);
    if (begin == end) return;  // it may lie behind the last tile
    const Chunks chunks = output_chunks(line_, info_.chunks.tiles);
    lane_begin_ = chunks.of(begin);
    lane_end_ = chunks.of(end - 1) + 1;
  }

  const SegmentInfo& info_;
  const Params& p_;
  const Cut& cut_;
  const int consumer_warp_, lane_;
  Line line_;
  int stretch_ = -1;  // of the output
  int lane_begin_ = 0, lane_end_ = 0;
  int begin_ = 0, end_ = 0, slot_ = 0, nodes_ = 0;
};

// Cut outputs of a stretch whose rows of nodes are all there, and which this warp is to merge once it has no tiles left: the one that the
// stretch goes on with, and the one that it starts. Not at once: nearly always it is a stretch's last segment that completes an output.
struct PendingOutputs {
  bool is_mine[2] = {};
  bool faulty[2] = {};
};

// The end of a segment of an output that was cut across the line: all of the row of nodes to the workspace.
template <class C>
__device__ __forceinline__ void finish_cut_chunks(const NodeRow& row, const SegmentInfo& info, const Params& p, Shared<C>& shared,
                                                  PendingOutputs& pending, bool faulty, int consumer_warp, int lane) {
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < min_of(row.size, p.shared_nodes); ++i) {
    const SlotPlace from = kept_place<C>(p, shared, info.chunks.slot, i, consumer_warp);
    const SlotPlace to = node_place<C>(p, info.chunks.slot, i, consumer_warp);
#pragma unroll
    for (int j = 0; j < C::kLaneRows * C::kRowVectors; ++j) to.values[j * kWarp + lane] = from.values[j * kWarp + lane];
    for (int j = lane; j < C::kGroupRows; j += kWarp) to.rows[j] = from.rows[j];
  }
  // A stretch that goes on with one output starts no other that is cut, so its odd slot's counter is this output's.
  std::uint32_t* const counter = p.counters + (2 * info.first_stretch + 1) * kMaxConsumerWarps + consumer_warp;
  const Arrival arrival = arrive(counter, info.chunks.all, info.chunks.end - info.chunks.begin, faulty, lane);
  if (!arrival.last) return;
  const bool starts = info.chunks.slot % 2 == 1;
  (starts ? pending.is_mine[1] : pending.is_mine[0]) = true;
  (starts ? pending.faulty[1] : pending.faulty[0]) = arrival.faulty;
  shared.pending[consumer_warp][starts] = info;  // by every lane: each reads what it wrote
}

// Merges the rows of nodes of all segments of an output, and stores.
template <class C>
__device__ __forceinline__ void merge_rows_of_nodes(const SegmentInfo& info, const Params& p, const Cut& cut, bool faulty,
                                                    int consumer_warp, int lane) {
  constexpr int kAtOnce = C::kThreads > 256 ? 2 : 4;  // nodes: each push waits for the one before it, their loads do not
  __syncwarp();
#pragma unroll 1
  for (int lane_row = 0; lane_row < C::kLaneRows; ++lane_row) {
    const int first = (consumer_warp * C::kLaneRows + lane_row) * C::kRowVectors * kWarp + lane;
    if (VectorPlace<C>(first - lane).row() >= info.rows) continue;  // of all lanes: there are no rows behind
    NodeWalk<C> walk(info, p, cut, consumer_warp, lane);
    VectorStack<C::kRowVectors> stack;
    bool more = true;
#pragma unroll 1
    while (more) {
      VectorNode<C::kRowVectors> nodes[kAtOnce];
      int index[kAtOnce], count = 0;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        SlotPlace at;
        more = more && walk.next(at, index[k]);
        if (!more) continue;
        ++count;
        const float2 of_row = __ldcg(at.rows + group_row<C>(lane_row, lane));
        nodes[k].row = {of_row.x, of_row.y};
#pragma unroll
        for (int j = 0; j < C::kRowVectors; ++j) nodes[k].set(j, __ldcg(at.values + (lane_row * C::kRowVectors + j) * kWarp + lane));
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k < count) stack.push(nodes[k], index[k]);
      }
    }
    VectorNode<C::kRowVectors> all = stack.fold();
    if (is_checked<C>(p) && faulty) all = {};
    const VectorPlace<C> place(first);
    const OutputRow to = OutputRow::of<C>(p, info, place.row(), consumer_warp % C::kGroupWarps, lane);
#pragma unroll
    for (int j = 0; j < C::kRowVectors; ++j) {
      const float values[4] = {all.values[4 * j], all.values[4 * j + 1], all.values[4 * j + 2], all.values[4 * j + 3]};
      store_vector<C>(all.row, values, VectorPlace<C>(first + j * kWarp), to, info, p);
    }
  }
}

}  // namespace leanattn::cuda
