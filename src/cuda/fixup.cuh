// SPDX-License-Identifier: Apache-2.0
// The end of a segment. A whole output is divided by its ℓ and stored. A cut one is published as a partial, each warp its own dims; the
// last warp to arrive merges the parts in tile order, whoever it is, and stores. Nobody waits. Outputs of many parts merge in two levels:
// groups of neighbours first, then the groups.
#pragma once

#include "cuda/tile.cuh"
#include "cuda/timeline.cuh"
#include "partial.h"

namespace leanattn::cuda {

// Parts that one arriver merges. Where an output has more, groups of neighbours are merged first, so that neither level is long.
__device__ __forceinline__ int parts_of_group(int parts) { return parts <= 16 ? parts : 12; }

// Some rows of a lane, of the dims of its warp.
template <class C, int kCount>
struct Rows {
  RowPartial row[kCount];
  float values[kCount][C::kRowVectors * 4];
};

// Where a row of the row block goes, for a warp's dims.
struct OutputRow {
  std::uint16_t* o;  // the lane's first element
  float* lse;        // null where another lane writes it, or nobody
  int q_head;

  template <class C>
  __device__ __forceinline__ static OutputRow of(const Params& p, const SegmentInfo& info, int row, int warp, int lane) {
    const int packed = info.first_row + row;
    const int token = info.q_len == 1 ? 0 : packed / p.group, head = packed - token * p.group;
    OutputRow to;
    to.q_head = info.q_head + head;
    to.o = p.o.data + first_row_of<C>(p.o, p.line, info.seq) + token * p.o.token_stride + (info.q_head + head) * p.o.head_stride +
           warp * C::kWarpDims + 2 * (lane % 4);
    to.lse = nullptr;
    if (p.lse != nullptr && warp == 0 && lane % 4 == 0) {
      to.lse = p.lse + (first_query<C>(p.line, info.seq) + token) * p.kv_heads * p.group + info.q_head + head;
    }
    return to;
  }
};

// Two neighbouring dims.
template <class C>
__device__ __forceinline__ void store_pair(std::uint16_t* o, float low, float high, int access_bytes) {
  const std::uint32_t pair = Element<typename C::T>::pack(low, high);
  if (!C::kFull || access_bytes >= 4) {
    *reinterpret_cast<std::uint32_t*>(o) = pair;
  } else {
    o[0] = static_cast<std::uint16_t>(pair);
    o[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

// What a final row becomes: O = Õ·factor.
struct FinishedRow {
  float factor;
  float lse;  // in the caller's base
};

// The end of a row of an output, once all its parts are merged. Its q_head's sink joins here and nowhere else.
template <class C>
__device__ __forceinline__ FinishedRow finish_row(const RowPartial& row, int q_head, const Params& p) {
  FinishedRow finished{finish_factor(row), finish_lse<LogUnit::kLog2>(row) * p.lse_factor};
  if (has_sinks<C>(p)) {
    const float sink = p.sinks[q_head];
    const RowMerge merge = merge_rows<LogUnit::kLog2>(row, sink_partial(sink * kLog2E));
    finished.factor = (merge.swapped ? merge.factor : 1.0f) * finish_factor(merge.row);
    // Without a key the LSE is the sink itself, not what is left of it after two conversions.
    finished.lse = row.sum == 0.0f ? sink * p.sink_lse_factor : finish_lse<LogUnit::kLog2>(merge.row) * p.lse_factor;
  }
  return finished;
}

// Lane rows first, first + 1 … of an output.
template <class C, int kCount>
__device__ __forceinline__ void store_rows(const Rows<C, kCount>& rows, int first, const SegmentInfo& info, const Params& p, int group,
                                           int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = group * C::kGroupRows + group_row<C>(first + i, lane);
    if (row >= info.rows) continue;
    const OutputRow to = OutputRow::of<C>(p, info, row, warp, lane);
    const FinishedRow finished = finish_row<C>(rows.row[i], to.q_head, p);
    const int dims = head_dim_v<C>(p) - warp * C::kWarpDims;
#pragma unroll
    for (int n = 0; n < C::kDimSteps; ++n) {
      if (n * 8 >= dims) continue;
      store_pair<C>(to.o + n * 8, rows.values[i][2 * n] * finished.factor, rows.values[i][2 * n + 1] * finished.factor, p.o.access_bytes);
    }
    if (to.lse != nullptr) *to.lse = finished.lse;
  }
}

// Where a vector of a partial belongs.
template <class C>
struct VectorPlace {
  int consumer_warp, lane_row, vector, lane;

  __device__ __forceinline__ explicit VectorPlace(int index)
      : consumer_warp(index / (C::kLaneRows * C::kRowVectors * kWarp)),
        lane_row(index / (C::kRowVectors * kWarp) % C::kLaneRows),
        vector(index / kWarp % C::kRowVectors),
        lane(index % kWarp) {}

  // Of the row block.
  __device__ __forceinline__ int row() const { return consumer_warp / C::kGroupWarps * C::kGroupRows + group_row<C>(lane_row, lane); }
};

// A merged vector of an output to O, and its row's LSE.
template <class C>
__device__ __forceinline__ void store_vector(const RowPartial& row, const float (&values)[4], const VectorPlace<C>& place,
                                             const OutputRow& to, const SegmentInfo& info, const Params& p) {
  if (place.row() >= info.rows) return;
  const FinishedRow finished = finish_row<C>(row, to.q_head, p);
  std::uint16_t* const o = to.o + place.vector * 16;
  const int dim = place.consumer_warp % C::kGroupWarps * C::kWarpDims + place.vector * 16;
  if (dim < head_dim_v<C>(p)) store_pair<C>(o, values[0] * finished.factor, values[1] * finished.factor, p.o.access_bytes);
  if ((C::kDimSteps % 2 == 0 || 2 * place.vector + 1 < C::kDimSteps) && dim + 8 < head_dim_v<C>(p)) {
    store_pair<C>(o + 8, values[2] * finished.factor, values[3] * finished.factor, p.o.access_bytes);
  }
  if (to.lse != nullptr && place.vector == 0) *to.lse = finished.lse;
}

// A warp's dims of a slot in the workspace.
struct SlotPlace {
  float4* values;  // [lane rows, row vectors, 32 lanes]
  float2* rows;    // [rows of the group]
};

template <class C>
__device__ __forceinline__ SlotPlace slot_place(const Params& p, long long slot, int consumer_warp) {
  const long long at = slot * C::kConsumerWarps + consumer_warp;
  return {p.partial_values + at * (C::kLaneRows * C::kRowVectors * kWarp), p.partial_rows + at * C::kGroupRows};
}

template <class C, int kCount>
__device__ __forceinline__ void publish_rows(const Rows<C, kCount>& rows, int first, const SlotPlace& to, int lane) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float(&v)[C::kRowVectors * 4] = rows.values[i];
#pragma unroll
    for (int j = 0; j < C::kRowVectors; ++j) {
      __stcg(to.values + ((first + i) * C::kRowVectors + j) * kWarp + lane,
             make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]));
    }
    if (lane % 4 == 0) __stcg(to.rows + group_row<C>(first + i, lane), make_float2(rows.row[i].max, rows.row[i].sum));
  }
}

// Moves a row's total to the base `max`, which is no smaller than its own.
template <int kVectors>
__device__ __forceinline__ void rebase(RowPartial& row, float (&total)[kVectors * 4], float max) {
  const float kept = merge_weight<LogUnit::kLog2>(row.max, max);
  row = {max, row.sum * kept};
#pragma unroll
  for (int r = 0; r < kVectors * 4; ++r) total[r] *= kept;
}

// Adds some parts of a row to its total, in that order, weighed on the total's base, which is no smaller than theirs.
template <int kParts, int kVectors>
__device__ __forceinline__ void add_parts(RowPartial& row, float (&total)[kVectors * 4], const float2 (&rows)[kParts],
                                          const float4 (&values)[kParts][kVectors]) {
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    const float weight = merge_weight<LogUnit::kLog2>(rows[k].x, row.max);
    row.sum = fmaf(weight, rows[k].y, row.sum);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      total[4 * j] = fmaf(weight, values[k][j].x, total[4 * j]);
      total[4 * j + 1] = fmaf(weight, values[k][j].y, total[4 * j + 1]);
      total[4 * j + 2] = fmaf(weight, values[k][j].z, total[4 * j + 2]);
      total[4 * j + 3] = fmaf(weight, values[k][j].w, total[4 * j + 3]);
    }
  }
}

// Adds some parts of a row to its total, in that order, weighed on the largest m of all.
template <int kParts, int kVectors>
__device__ __forceinline__ void merge_batch(RowPartial& row, float (&total)[kVectors * 4], const float2 (&rows)[kParts],
                                            const float4 (&values)[kParts][kVectors]) {
  float max = row.max;
#pragma unroll
  for (int k = 0; k < kParts; ++k) max = fmaxf(max, rows[k].x);
  rebase<kVectors>(row, total, max);
  add_parts<kParts, kVectors>(row, total, rows, values);
}

// Merges the rows first, first + 1 … of `count` slots in that order. The first lies at `begin`, the next ones `step` warps' places on,
// counted from `next`. Several are fetched at once.
template <class C, int kCount>
__device__ __forceinline__ Rows<C, kCount> merge_parts(int first, const SlotPlace& begin, const SlotPlace& next, int step, int count,
                                                       int lane) {
#if __CUDA_ARCH__ >= 900
  constexpr int kMostVectors = C::kLaneRows == 1 ? 32 : C::kThreads > 256 ? 8 : 16;  // of a batch: what registers allow
#else
  constexpr int kMostVectors = C::kThreads > 256 ? 8 : 16;
#endif
  constexpr int kBatch = 16;  // parts weighed together: as many in every variant, so that bits do not depend on which one serves a call
  constexpr int kAtOnce = min_of(max_of(kMostVectors / (kCount * C::kRowVectors), 1), kBatch);
  static_assert(kBatch % kAtOnce == 0);
  Rows<C, kCount> total = {};
  const float4* values_at = begin.values + first * C::kRowVectors * kWarp + lane;
  const float2* rows_at = begin.rows + group_row<C>(first, lane);
  const float4* next_values = next.values + first * C::kRowVectors * kWarp + lane;
  const float2* next_rows = next.rows + group_row<C>(first, lane);
#pragma unroll 1
  for (int done = 0; done < count; done += kAtOnce) {
    if (kAtOnce < kBatch && done % kBatch == 0) {  // the largest m of the batch, before its first parts
      float max[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) max[i] = total.row[i].max;
      const float2* row = rows_at;
      const float2* next_row = next_rows;
#pragma unroll 4
      for (int k = 0; k < kBatch && done + k < count; ++k) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) max[i] = fmaxf(max[i], __ldcg(row + group_row<C>(i, 0)).x);
        row = next_row;
        next_row += step * C::kGroupRows;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) rebase<C::kRowVectors>(total.row[i], total.values[i], max[i]);
    }
    float4 values[kCount][kAtOnce][C::kRowVectors];
    float2 rows[kCount][kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int j = 0; j < C::kRowVectors; ++j) values[i][k][j] = __ldcg(values_at + (i * C::kRowVectors + j) * kWarp);
        rows[i][k] = __ldcg(rows_at + group_row<C>(i, 0));
        if (done + k >= count) rows[i][k] = make_float2(kMinusInfinity, 0.0f);  // the last once more, but empty: it changes nothing
      }
      if (done + k + 1 < count) {
        values_at = next_values;
        rows_at = next_rows;
        next_values += static_cast<std::int64_t>(step) * (C::kLaneRows * C::kRowVectors * kWarp);
        next_rows += step * C::kGroupRows;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kAtOnce < kBatch) {
        add_parts<kAtOnce, C::kRowVectors>(total.row[i], total.values[i], rows[i], values[i]);
      } else {
        merge_batch<kAtOnce, C::kRowVectors>(total.row[i], total.values[i], rows[i], values[i]);
      }
    }
  }
  return total;
}

// Whether a warp brings the last of `all` parts here, of which it has `own`; the counter is 0 again then. faulty: whether any part comes
// from data that did not pass a check.
struct Arrival {
  bool last;
  bool faulty;
};
__device__ __forceinline__ Arrival arrive(std::uint32_t* counter, int all, int own, bool faulty, int lane) {
  constexpr std::uint32_t kFault = 1 << 16;
  __syncwarp();
  const std::uint32_t mine = static_cast<std::uint32_t>(own) + (faulty ? kFault : 0);
  std::uint32_t after = 0;
  if (lane == 0) after = ptx::atomic_add_acq_rel(counter, mine) + mine;
  after = __shfl_sync(~0u, after, 0);
  const Arrival arrival{after % kFault == static_cast<std::uint32_t>(all), after >= kFault};
  if (arrival.last && lane == 0) *counter = 0;
  return arrival;
}

// A stretch has two slots (schedule.h, partial_slot): part 0 starts the output, the others go on with it.
__device__ __forceinline__ long long slot_of_part(const SegmentInfo& info, int part) {
  return 2LL * (info.first_stretch + part) + (part == 0 ? 1 : 0);
}

// The end of a segment whose rows have (m, ℓ) `rows`.
template <class C>
__device__ __forceinline__ void finish_segment(const RowState<C>& state, const RowPartial (&rows)[C::kLaneRows], const SegmentInfo& info,
                                               const Params& p, bool faulty, int group, int warp, int lane) {
  constexpr int kCount = min_of(C::kLaneRows, C::kRowVectors > 2 ? 1 : 2);  // rows at a time
  const int consumer_warp = group * C::kGroupWarps + warp;
  const SlotPlace own = slot_place<C>(p, slot_of_part(info, info.part), consumer_warp);
#pragma unroll
  for (int first = 0; first < C::kLaneRows; first += kCount) {
    Rows<C, kCount> of_segment = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      of_segment.row[i] = rows[first + i];
      const int tile = (first + i) / C::kHalves, half = (first + i) % C::kHalves;
#pragma unroll
      for (int r = 0; r < C::kRowValues; ++r) of_segment.values[i][r] = state.values[tile][r / 2][2 * half + r % 2];
    }
    if (info.parts == 1) {
      if (is_checked<C>(p) && faulty) of_segment = {};
      store_rows(of_segment, first, info, p, group, warp, lane);
    } else {
      publish_rows(of_segment, first, own, lane);
    }
  }
  if (info.parts == 1) return;
  const bool marks = consumer_warp == 0 && lane == 0;
  if (marks) mark(p, Mark::kPublished);

  const auto counter = [&](int level, long long slot) { return p.counters + (level * p.slots + slot) * kMaxConsumerWarps + consumer_warp; };
  const int group_parts = parts_of_group(info.parts);
  const int first_part = info.part / group_parts * group_parts;
  int count = min_of(group_parts, info.parts - first_part);
  Arrival arrival = arrive(counter(0, slot_of_part(info, first_part)), count, 1, faulty, lane);
  if (marks) mark(p, Mark::kCounted);
  if (!arrival.last) return;
  const auto place = [&](int part) { return slot_place<C>(p, slot_of_part(info, part), consumer_warp); };
  int step = 2 * C::kConsumerWarps;  // places from a part to the next: two slots
  SlotPlace begin = place(first_part), next = place(first_part + 1);
  if (info.parts > group_parts) {
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < C::kLaneRows; first += kCount) {
      const Rows<C, kCount> merged = merge_parts<C, kCount>(first, begin, next, step, count, lane);
      __syncwarp();  // lanes share (m, ℓ) of the slot that is overwritten
      publish_rows(merged, first, begin, lane);
    }
    count = (info.parts + group_parts - 1) / group_parts;
    arrival = arrive(counter(1, slot_of_part(info, 0)), count, 1, arrival.faulty, lane);
    if (!arrival.last) return;
    step *= group_parts;
    begin = place(0), next = place(group_parts);
  }
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < C::kLaneRows; first += kCount) {
    Rows<C, kCount> merged = merge_parts<C, kCount>(first, begin, next, step, count, lane);
    if (is_checked<C>(p) && arrival.faulty) merged = {};
    store_rows(merged, first, info, p, group, warp, lane);
  }
  if (marks) mark(p, Mark::kMerged);
}

}  // namespace leanattn::cuda
