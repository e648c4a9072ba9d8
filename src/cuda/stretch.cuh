// SPDX-License-Identifier: Apache-2.0
// Which part of the work is a block's, found by its producer warps from the lengths alone.
#pragma once

#include "cuda/config.cuh"

namespace leanattn::cuda {

// The line with what this kernel knows at compile time in it, so that the schedule's functions shrink to what is left.
template <class C>
__device__ __forceinline__ Line fixed_line(const Line& line) {
  Line fixed = line;
  fixed.tile_tokens = kTile;
  fixed.rows_per_block = C::kRows;
  fixed.chunk_tiles = 0;
  if (!C::kFull) {
    fixed.policy = Policy::kLean;
    fixed.cu_seqlens_q = nullptr;
    if (C::kFeatures != Features::kRules) fixed.window_left = -1;
    if (C::kFeatures != Features::kChecked) fixed.most_kv_len = fixed.most_q_len = 0x7fffffff;
  }
  fixed.seq_units = nullptr;
  fixed.output_stretches = 0;
  fixed.cluster_stretches = 1;
  fixed.runs = true;
  return fixed;
}

// The same with the chunks that there are.
template <class C>
__device__ __forceinline__ Line chunked_line(const Line& fixed, const Params& p) {
  Line line = fixed;
  line.chunk_tiles = has_chunks<C>(p) ? C::kChunkTiles : 0;
  line.chunks_grow = true;
  return line;
}

// Whether all outputs are to have their own stretches, decided from the lengths by all producer threads together: the same in every block.
template <class C>
__device__ __forceinline__ bool own_stretches_pay(const Line& line, int tid, Shared<C>& shared) {
  constexpr int kMostTiles = 1 << 24;  // so that the sum of a block's few seqs has 32 bits: for what is longer, a quarter is moot
  unsigned sum = 0, longest = 0;
#pragma unroll 1
  for (int seq = tid; seq < line.num_seqs; seq += kProducerThreads) {
    const unsigned tiles = static_cast<unsigned>(min_of(seq_tiles(line, seq), kMostTiles));
    sum += tiles;
    longest = tiles > longest ? tiles : longest;
  }
  sum = __reduce_add_sync(~0u, sum);
  longest = __reduce_max_sync(~0u, longest);
  if (tid % kWarp == 0) shared.scan_units[tid / kWarp] = static_cast<long long>(longest) << 32 | sum;
  ptx::named_barrier(kProducerBarrier, kProducerThreads);
  unsigned long long all = 0;
  longest = 0;
#pragma unroll
  for (int w = 0; w < kProducerThreads / kWarp; ++w) {
    all += shared.scan_units[w] & 0xffffffff;
    const unsigned of_warp = static_cast<unsigned>(shared.scan_units[w] >> 32);
    longest = of_warp > longest ? of_warp : longest;
  }
  ptx::named_barrier(kProducerBarrier, kProducerThreads);  // find_stretch may use the same words
  return outputs_are_even(static_cast<long long>(all), longest, line.num_seqs);
}

// The line's cut and the cursor of this block's stretch, found by all producer threads together: each sums a run of seqs, and the one
// whose run holds the stretch's first unit walks it. Both are left in shared memory. tid: 0 … kProducerThreads − 1.
template <class C>
__device__ __forceinline__ void find_stretch(const Line& line, long long stretch, int tid, Shared<C>& shared) {
  const int run = ceil_div(line.num_seqs, kProducerThreads);
  const int begin = min_of(tid * run, line.num_seqs), end = min_of(begin + run, line.num_seqs);
  long long units = 0, longest = 1;
  SeqLens first_lens;
#pragma unroll 1
  for (int seq = begin; seq < end; ++seq) {
    const SeqLens lens = seq_lens(line, seq);
    if (seq == begin) first_lens = lens;
    const long long of_output = output_units(line, seq_tiles(line, lens));
    const int outputs = seq_outputs(line, lens);
    units += outputs * of_output;
    if (outputs > 0 && of_output > longest) longest = of_output;
  }
  const int lane = tid % kWarp, warp = tid / kWarp;
  long long before = units;  // inclusive within the warp, then exclusive over all
#pragma unroll 1
  for (int step = 1; step < kWarp; step *= 2) {
    const long long left = __shfl_up_sync(~0u, before, step);
    const long long other = __shfl_xor_sync(~0u, longest, step);
    if (lane >= step) before += left;
    if (other > longest) longest = other;
  }
  if (lane == kWarp - 1) shared.scan_units[warp] = before;
  if (lane == 0) shared.scan_longest[warp] = longest;
  ptx::named_barrier(kProducerBarrier, kProducerThreads);
  long long all = 0;
  before -= units;
#pragma unroll 1
  for (int w = 0; w < kProducerThreads / kWarp; ++w) {
    if (w < warp) before += shared.scan_units[w];
    all += shared.scan_units[w];
    if (shared.scan_longest[w] > longest) longest = shared.scan_longest[w];
  }
  const Cut cut = cut_of_units(line, all, longest);
  Cursor cursor;
  bool mine = false;
  if (stretch < cut.stretches) {
    cursor.unit = stretch_begin(cut, stretch);
    cursor.end_unit = stretch_begin(cut, stretch + 1);
    mine = cursor.unit >= before && cursor.unit < before + units;
  } else {
    mine = tid == 0;  // no stretch: an empty cursor
  }
  if (mine) {
    if (stretch < cut.stretches) {
      cursor.seq = begin;
      cursor.seq_unit = before;
      cursor.lens = first_lens;
      for (long long next; cursor.unit >= (next = cursor.seq_unit + seq_unit_count(line, cursor.lens)); cursor.seq_unit = next) {
        cursor.lens = seq_lens(line, ++cursor.seq);
      }
    }
    shared.cursor = cursor;
    shared.cut = cut;
  }
  ptx::named_barrier(kProducerBarrier, kProducerThreads);
}

}  // namespace leanattn::cuda
