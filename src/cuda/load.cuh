// SPDX-License-Identifier: Apache-2.0
// The producer warps: find the block's stretch of the line from the lengths, then bring its tiles into shared memory, running ahead of
// the consumers across the borders of segments.
#pragma once

#include "cuda/config.cuh"
#include "cuda/timeline.cuh"

namespace leanattn::cuda {

constexpr int kProducerBarrier = 15, kStartBarrier = 14;

// The line's cut and the cursor of this block's stretch, found by all producer threads together: each sums a run of seqs, and the one
// whose run holds the stretch's first unit walks it. Both are left in shared memory. tid: 0 … kProducerThreads − 1.
template <class C>
__device__ __forceinline__ void find_stretch(const Line& line, long long stretch, int tid, Shared<C>& shared) {
  const int run = ceil_div(line.num_seqs, kProducerThreads);
  const int begin = min_of(tid * run, line.num_seqs), end = min_of(begin + run, line.num_seqs);
  long long units = 0, longest = 1;
  SeqLens first_lens;
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

// The line with what this kernel knows at compile time in it, so that the schedule's functions shrink to what is left.
template <class C>
__device__ __forceinline__ Line fixed_line(const Line& line) {
  Line fixed = line;
  fixed.tile_tokens = kTile;
  fixed.rows_per_block = C::kRows;
  fixed.chunk_tiles = 0;
  fixed.window_left = -1;
  fixed.seq_units = nullptr;
  fixed.runs = true;
  return fixed;
}

// One 16-byte chunk into shared memory in narrow accesses, of a row that is aligned to less than 16 bytes; 0 where it is not to be read.
// Ordinary stores serve rows aligned to 2 bytes.
__device__ __forceinline__ void copy_narrow(std::uint32_t to, const std::uint16_t* from, int access_bytes, bool read) {
  if (access_bytes == 8) {
    for (int i = 0; i < 2; ++i) ptx::cp_async_8(to + 8 * i, from + 4 * i, read ? 8 : 0);
  } else if (access_bytes == 4) {
    for (int i = 0; i < 4; ++i) ptx::cp_async_4(to + 4 * i, from + 2 * i, read ? 4 : 0);
  } else {
    auto* words = static_cast<std::uint32_t*>(__cvta_shared_to_generic(to));
    for (int i = 0; i < 4; ++i) words[i] = read ? from[2 * i] | static_cast<std::uint32_t>(from[2 * i + 1]) << 16 : 0u;
  }
}

// Where the tokens of a seq lie, for one KV head and this thread's chunk of a row.
struct KvBase {
  const std::uint16_t* k;
  const std::uint16_t* v;
  const int* pages;  // null when not paged
};

// The producers' walk over a stretch.
template <class C>
class Producer {
 public:
  __device__ Producer(const Params& params, int kv_head, long long stretch, int tid, std::uint32_t stages_at, std::uint32_t q_at,
                      Shared<C>& shared)
      : p_(params),
        shared_(shared),
        head_(kv_head),
        tid_(tid),
        stretch_(stretch),
        stages_at_(stages_at),
        q_at_(q_at),
        policy_(ptx::evict_first_policy()),
        general_(params.general),
        pass_token_(tid / C::kRowChunks),
        chunk_(tid % C::kRowChunks) {
    head_base_ = {p_.k.data + head_ * p_.k.head_stride + chunk_ * 8, p_.v.data + head_ * p_.v.head_stride + chunk_ * 8, p_.block_table};
    for (int i = 0; i < C::kPassPlaces; ++i) place_[i] = ptx::kept(swizzled<C::kRowChunks>(i * C::kPassTokens + pass_token_, chunk_) * 16);
  }

  __device__ void run(Cursor cursor, const Cut& cut) {
    const Line line = fixed_line<C>(p_.line);
    Line lean_line = line;  // a second time for the policy that everyone uses: half the instructions
    lean_line.policy = Policy::kLean;
    Segment segment;
    while (line.policy == Policy::kLean ? next_segment(lean_line, cursor, segment) : next_segment(line, cursor, segment)) {
      locate(line, segment);
      const KvBase base = kv_base(segment.seq);
      if (tid_ == 0 && round_ == 0 && slot_ == 0) mark(p_, Mark::kSegment);
      const int seen_by_all = segment.lens.kv_len - (p_.causal ? segment.lens.q_len - 1 : 0);
      const int first_token = seq_first_token(line, segment.lens), first_tile = first_token / kTile;
      const int begin = max_of((first_tile + segment.tile_begin) * kTile, first_token);
      const int end = min_of((first_tile + segment.tile_end) * kTile, segment.lens.kv_len);
      Stage stage;
      stage.token_begin = begin;
      do {  // once for an empty seq
        // Not as a clamp: nvcc 13.0 makes one instruction of it whose predicate then says that every stage is full.
        const int left = end - stage.token_begin;
        stage.tokens = left >= C::kTokens ? C::kTokens : left > 0 ? left : 0;
        const int stage_end = stage.token_begin + stage.tokens;
        stage.flags = (stage.token_begin == begin ? Stage::kFirst : 0) | (stage_end >= end ? Stage::kLast : 0) |
                      (stage.tokens < C::kTokens || stage_end > seen_by_all ? Stage::kMasked : 0);
        load_kv(stage, base);
        if (stage.flags & Stage::kFirst) load_segment(line, segment, cursor, cut);
        if (tid_ == 0) shared_.stages[slot_] = stage;
        arrive();
        stage.token_begin = stage_end;
      } while (stage.token_begin < end);
      if (++segment_slot_ == p_.stages) segment_slot_ = 0;
    }
    wait_for_room();
    if (tid_ == 0) shared_.stages[slot_] = {0, 0, Stage::kDone, 0};
    arrive();
  }

 private:
  // The segment's KV head and row block.
  __device__ __forceinline__ void locate(const Line& line, const Segment& segment) {
    kv_head_ = head_;
    row_block_ = segment.output;
    if (line.head_order == HeadOrder::kAlong) {
      const int row_blocks = seq_row_blocks(line, segment.lens);
      kv_head_ = row_blocks == 1 ? segment.output : segment.output / row_blocks;
      row_block_ -= kv_head_ * row_blocks;
    }
  }

  __device__ __forceinline__ KvBase kv_base(int seq) const {
    KvBase base = head_base_;
    if (kv_head_ != head_) {
      base.k += (kv_head_ - head_) * p_.k.head_stride;
      base.v += (kv_head_ - head_) * p_.v.head_stride;
    }
    if (p_.block_table != nullptr) {
      base.pages += seq * p_.block_table_stride;
    } else if (p_.ragged) {
      const std::int64_t first = p_.line.cu_seqlens_kv[seq];
      base.k += first * p_.k.token_stride;
      base.v += first * p_.v.token_stride;
    } else {
      base.k += seq * p_.k.outer_stride;
      base.v += seq * p_.v.outer_stride;
    }
    return base;
  }

  // Q and what the consumers need to know of the segment: behind the first copies of K and V, which everything waits for.
  __device__ __forceinline__ void load_segment(const Line& line, const Segment& segment, const Cursor& cursor, const Cut& cut) {
    SegmentInfo info;
    info.seq = segment.seq;
    info.q_head = kv_head_ * p_.group;
    info.kv_len = segment.lens.kv_len;
    info.q_len = segment.lens.q_len;
    info.first_row = row_block_ * C::kRows;
    info.rows = min_of(info.q_len * p_.group - info.first_row, C::kRows);
    load_q(info);
    info.parts = 1;
    info.part = info.first_stretch = 0;
    if (is_cut(segment)) {
      const long long output_unit = cursor.seq_unit + segment.output * output_units(line, segment.tiles);
      const MergeList list = part_list(line, cut, output_unit, segment.tiles);
      info.parts = static_cast<int>(list.last - list.first) + 1;
      info.part = static_cast<int>(stretch_ - list.first);
      info.first_stretch = static_cast<int>(list.first) + (line.head_order == HeadOrder::kAlong ? 0 : head_ * line.workers);
    }
    if (tid_ == 0) shared_.segments[segment_slot_] = info;
  }

  __device__ __forceinline__ void wait_for_room() {
    if (round_ > 0) ptx::mbarrier_wait(&shared_.empty[slot_], (round_ - 1) & 1);
  }

  // Every producer thread arrives once its copies have landed, thread 0 once more for the records that it wrote.
  __device__ __forceinline__ void arrive() {
    if (general_) [[unlikely]] {  // rows may have come by ordinary stores, which only an ordinary arrival publishes
      ptx::wait_for_copies();
      ptx::mbarrier_arrive(&shared_.full[slot_]);
    } else {
      ptx::mbarrier_arrive_after_copies(&shared_.full[slot_]);
    }
    if (tid_ == 0) ptx::mbarrier_arrive(&shared_.full[slot_]);
    if (++slot_ == p_.stages) {
      slot_ = 0;
      ++round_;
    }
  }

  __device__ __forceinline__ void load_kv(const Stage& stage, const KvBase& base) {
    const int filled = (stage.tokens + kMmaTokens - 1) / kMmaTokens * kMmaTokens;  // the matrix units read whole steps
    // Page ids are fetched before there is room: their latency hides behind the wait.
    int page[C::kPasses];
    if (base.pages != nullptr) {
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        const int token = i * C::kPassTokens + pass_token_;
        page[i] = token < stage.tokens ? __ldg(base.pages + page_of(stage.token_begin + token)) : 0;
      }
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) page[i] = static_cast<int>(ptx::kept(static_cast<std::uint32_t>(page[i])));
    }
    wait_for_room();
    const std::uint32_t k_at = stages_at_ + slot_ * 2 * C::kStageBytes, v_at = k_at + C::kStageBytes;
    if (general_) [[unlikely]] {
      load_general(k_at, base.k, p_.k, stage, filled, base.pages);
      load_general(v_at, base.v, p_.v, stage, filled, base.pages);
    } else if (pass_token_ < C::kPassTokens) {
      if (base.pages != nullptr) {
        load_pages(k_at, v_at, base, stage, filled, page);
      } else {
        load_rows(k_at, base.k, p_.k, stage, filled);
        load_rows(v_at, base.v, p_.v, stage, filled);
      }
    }
    if (tid_ == 0 && round_ == 0 && slot_ == 0) mark(p_, Mark::kIssued);
  }

  __device__ __forceinline__ int page_of(int token) const {
    return static_cast<int>(static_cast<std::uint64_t>(static_cast<unsigned>(token)) * p_.page_factor >> p_.page_shift);
  }

  // This thread's chunk of the row that it copies in pass i.
  __device__ __forceinline__ std::uint32_t place(int i) const {
    return place_[i % C::kPassPlaces] + i / C::kPassPlaces * C::kPassPlaces * C::kPassTokens * C::kRowBytes;
  }

  // K or V of a stage in 16-byte copies; tokens lie token_stride apart.
  __device__ __forceinline__ void load_rows(std::uint32_t to, const std::uint16_t* base, const KvRows& rows, const Stage& stage,
                                            int filled) const {
    const std::uint16_t* from = base + (stage.token_begin + pass_token_) * rows.token_stride;
    const std::int64_t step = C::kPassTokens * rows.token_stride;
    if (stage.tokens == C::kTokens) {
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i, from += step) ptx::cp_async_16(to + place(i), from, policy_);
    } else {
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i, from += step) {
        const int token = i * C::kPassTokens + pass_token_;
        ptx::cp_async_16_if(token < filled, to + place(i), from, token < stage.tokens ? 16 : 0, policy_);
      }
    }
  }

  // Byte offset of a row; strides and page ids have 31 bits here.
  __device__ __forceinline__ static std::int64_t row_offset(const KvRows& rows, int page, int in_page) {
    return static_cast<std::int64_t>(page) * static_cast<int>(rows.outer_stride * 2) +
           static_cast<std::int64_t>(in_page) * static_cast<int>(rows.token_stride * 2);
  }

  // K and V where tokens lie in pages.
  __device__ __forceinline__ void load_pages(std::uint32_t k_at, std::uint32_t v_at, const KvBase& base, const Stage& stage, int filled,
                                             const int (&page)[C::kPasses]) const {
    const auto* k = reinterpret_cast<const unsigned char*>(base.k);
    const auto* v = reinterpret_cast<const unsigned char*>(base.v);
#pragma unroll
    for (int i = 0; i < C::kPasses; ++i) {
      const int token = i * C::kPassTokens + pass_token_, of_seq = stage.token_begin + token;
      const int in_page = of_seq - page_of(of_seq) * p_.page_size;
      const int bytes = token < stage.tokens ? 16 : 0;
      ptx::cp_async_16_if(token < filled, k_at + place(i), k + row_offset(p_.k, page[i], in_page), bytes, policy_);
      ptx::cp_async_16_if(token < filled, v_at + place(i), v + row_offset(p_.v, page[i], in_page), bytes, policy_);
    }
  }

  // K or V in any layout: narrow accesses, strides of any size.
  __device__ __forceinline__ void load_general(std::uint32_t to, const std::uint16_t* base, const KvRows& rows, const Stage& stage,
                                               int filled, const int* pages) const {
#pragma unroll 1
    for (int index = tid_; index < filled * C::kRowChunks; index += kProducerThreads) {
      const int token = index / C::kRowChunks, chunk = index % C::kRowChunks;
      const bool read = token < stage.tokens;
      const std::uint16_t* from = base + (chunk - chunk_) * 8;
      if (read) {
        const int of_seq = stage.token_begin + token;
        const int slot = pages != nullptr ? page_of(of_seq) : 0;
        from += (of_seq - slot * p_.page_size) * rows.token_stride;
        if (pages != nullptr) from += __ldg(pages + slot) * rows.outer_stride;
      }
      copy_narrow(to + swizzled<C::kRowChunks>(token, chunk) * 16, from, min_of(rows.access_bytes, 8), read);
    }
  }

  // Q of the segment's row block; rows past the last and padding are 0. Q of the segment `stages` segments ago is no longer in use: each
  // segment since has at least one stage, and the stage of that many stages ago is free.
  __device__ __forceinline__ void load_q(const SegmentInfo& info) const {
    const std::uint16_t* const q = p_.q.data + first_row_of(p_.q, p_.line, info.seq) + info.q_head * p_.q.head_stride;
#pragma unroll 1
    for (int index = tid_; index < C::kQRows * C::kRowChunks; index += kProducerThreads) {
      const int padded = index / C::kRowChunks, chunk = index % C::kRowChunks;
      const int in_group = padded % C::kPaddedRows, row = padded / C::kPaddedRows * C::kGroupRows + in_group;
      const bool valid = in_group < C::kGroupRows && row < info.rows;
      const std::uint16_t* from = q;
      if (valid) {
        const int packed = info.first_row + row, token = info.q_len == 1 ? 0 : packed / p_.group;
        from += token * p_.q.token_stride + (packed - token * p_.group) * p_.q.head_stride + chunk * 8;
      }
      const std::uint32_t to = q_at_ + segment_slot_ * C::kQBytes + swizzled<C::kRowChunks>(padded, chunk) * 16;
      if (general_) {
        copy_narrow(to, from, min_of(p_.q.access_bytes, 8), valid);
      } else {
        ptx::cp_async_16_if(true, to, from, valid ? 16 : 0, policy_);
      }
    }
  }

  const Params& p_;
  Shared<C>& shared_;
  const int head_;   // of this block when heads lie side by side
  int kv_head_ = 0;  // of the segment
  int row_block_ = 0;
  const int tid_;
  const long long stretch_;
  int slot_ = 0;
  int round_ = 0;         // times that the ring has been filled
  int segment_slot_ = 0;  // segments counted around the ring
  const std::uint32_t stages_at_, q_at_;
  const std::uint64_t policy_;
  const bool general_;            // Params::general
  const int pass_token_, chunk_;  // of this thread in a pass
  std::uint32_t place_[C::kPassPlaces];
  KvBase head_base_;  // of seq 0 and head_
};

}  // namespace leanattn::cuda
