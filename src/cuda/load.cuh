// SPDX-License-Identifier: Apache-2.0
// The producer warps: they bring the tiles of the block's stretch into shared memory, running ahead of the consumers across the borders of
// segments.
#pragma once

#include "cuda/stretch.cuh"
#include "cuda/timeline.cuh"

namespace leanattn::cuda {

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

// Q of a row block into shared memory, by kProducerThreads threads. Rows past the last and columns past head_dim are 0; padding to 16 rows
// is whatever it was: rows never mix.
template <class C>
__device__ __forceinline__ void load_q(const Params& p, int tid, std::uint32_t q_at, int seq, int q_len, int q_head, int first_row,
                                       int rows) {
  const int chunk = tid % C::kRowChunks;
  if (tid / C::kRowChunks >= C::kPassTokens) return;
  const std::uint16_t* const q = p.q.data + first_row_of(p.q, p.line, seq) + q_head * p.q.head_stride + chunk * 8;
  const std::uint64_t policy = ptx::evict_first_policy();
#pragma unroll 1
  for (int row = tid / C::kRowChunks; row < C::kRows; row += C::kPassTokens) {
    const bool valid = row < rows && chunk * 8 < p.head_dim;
    const std::uint16_t* from = q;
    if (valid) {
      const int packed = first_row + row, token = q_len == 1 ? 0 : packed / p.group;
      from += token * p.q.token_stride + (packed - token * p.group) * p.q.head_stride;
    }
    const int padded = row / C::kGroupRows * C::kPaddedRows + row % C::kGroupRows;
    const std::uint32_t to = q_at + swizzled<C::kRowChunks>(padded, chunk) * 16;
    if (p.general) [[unlikely]] {
      copy_narrow(to, from, min_of(p.q.access_bytes, 8), valid);
    } else {
      ptx::cp_async_16_if(true, to, from, valid ? 16 : 0, policy);
    }
  }
}

// The consumers bring Q of an output that the grid names, while producers wait for its length.
template <class C>
__device__ __forceinline__ void load_own_q(const Params& p, int tid, std::uint32_t q_at) {
  if (tid < kProducerThreads) {
    load_q<C>(p, tid, q_at, blockIdx.z, p.line.q_len, blockIdx.y * p.group, 0, p.line.q_len * p.group);
    ptx::wait_for_copies();
  }
}

// Columns that the problem does not have, in every stage: zeros once, and no copy ever writes there. tid: 0 … threads − 1.
template <class C>
__device__ __forceinline__ void clear_padding(unsigned char* stages, const Params& p, int tid, int threads) {
  auto* const chunks = reinterpret_cast<uint4*>(stages);
  for (int row = tid; row < p.stages * 2 * C::kTokens; row += threads) {  // a token of K or V
    const int dim = row / C::kTokens % 2 == 0 ? p.head_dim : p.head_dim_v;
#pragma unroll 1
    for (int chunk = dim / 8; chunk < C::kRowChunks; ++chunk) chunks[swizzled<C::kRowChunks>(row, chunk)] = make_uint4(0, 0, 0, 0);
  }
}

// Where the tokens of a seq lie, for one KV head and this thread's chunk of a row.
struct KvBase {
  const std::uint16_t* k;
  const std::uint16_t* v;
  const int* pages;  // null when not paged. Ordinary loads: a kernel that this one overlaps with may have written them
};

// The producers' walk over a stretch.
template <class C>
class Producer {
 public:
  __device__ Producer(const Params& params, int tid, std::uint32_t stages_at, std::uint32_t q_at, Shared<C>& shared)
      : p_(params),
        shared_(shared),
        tid_(tid),
        stages_at_(stages_at),
        q_at_(q_at),
        policy_(ptx::evict_first_policy()),
        general_(params.general),
        pass_token_(tid / C::kRowChunks),
        chunk_(tid % C::kRowChunks) {
    for (int i = 0; i < C::kPassPlaces; ++i) place_[i] = ptx::kept(swizzled<C::kRowChunks>(i * C::kPassTokens + pass_token_, chunk_) * 16);
  }

  __device__ void run() {
    const Line line = fixed_line<C>(p_.line);
    Segment segment;
    Cursor cursor;
    Cut cut;
    own_ = p_.line.output_stretches > 0 && (line.num_seqs == 1 || own_stretches_pay<C>(line, tid_, shared_));
    if (own_) {
      segment = own_stretch(line);
    } else {
      const long long stretch = along_or_beside(line);
      find_stretch<C>(line, stretch, tid_, shared_);
      cursor = shared_.cursor;
      cut = shared_.cut;
      meet_consumers();  // before a copy: they have brought Q where an output might have had stretches of its own
    }
    const bool idle = own_ && static_cast<int>(blockIdx.x) >= own_stretches_;
    Line lean_line = line;  // a second time for the policy that everyone uses: half the instructions
    lean_line.policy = Policy::kLean;
    while (!idle &&
           (own_ || (line.policy == Policy::kLean ? next_segment(lean_line, cursor, segment) : next_segment(line, cursor, segment)))) {
      locate(line, segment);
      const KvBase base = kv_base(segment.seq);
      if (tid_ == 0 && round_ == 0 && slot_ == 0) mark(p_, Mark::kSegment);
      const PlainTokens plain = plain_tokens(segment.lens);
      const int first_token = seq_first_token(line, segment.lens), first_tile = first_token / kTile;
      int end = segment.lens.kv_len;  // where the last tile would end, or one behind it begin, there may be no int
      if (!ends_output(segment)) end = (first_tile + segment.tile_end) * kTile;
      int begin = end;  // of a stretch without a tile
      if (segment.tile_begin < segment.tiles) begin = max_of((first_tile + segment.tile_begin) * kTile, first_token);
      Stage stage;
      stage.token_begin = begin;
      do {  // once for an empty seq
        // Not as a clamp: nvcc 13.0 makes one instruction of it whose predicate then says that every stage is full.
        const int left = end - stage.token_begin;
        stage.tokens = left >= C::kTokens ? C::kTokens : left > 0 ? left : 0;
        const int stage_end = stage.token_begin + stage.tokens;
        stage.flags = (stage.token_begin == begin ? Stage::kFirst : 0) | (stage_end >= end ? Stage::kLast : 0) |
                      (stage.tokens < C::kTokens || stage_end > plain.end || stage.token_begin < plain.begin ? Stage::kMasked : 0);
        load_kv(stage, base);
        if (stage.flags & Stage::kFirst) load_segment(line, segment, cursor, cut);
        if (tid_ == 0) shared_.stages[slot_] = stage;
        arrive();
        stage.token_begin = stage_end;
      } while (stage.token_begin < end);
      if (own_) break;
      if (++segment_slot_ == p_.stages) segment_slot_ = 0;
    }
    wait_for_room();
    if (tid_ == 0) shared_.stages[slot_] = {0, 0, Stage::kDone, 0};
    arrive();
  }

 private:
  // The one segment of a block whose grid says what it does.
  __device__ __forceinline__ Segment own_stretch(const Line& line) {
    Line own = line;
    own.policy = Policy::kLean;
    own.head_order = HeadOrder::kAlong;
    own.output_stretches = p_.line.output_stretches;
    own.cluster_stretches = p_.line.cluster_stretches;
    own.cu_seqlens_q = nullptr;
    const int seq = blockIdx.z;
    const SeqLens lens = seq_lens(own, seq);
    const int tiles = seq_tiles(own, lens);
    own_stretches_ = own_stretches(own, tiles);
    const int whole = own_stretches_ == own.output_stretches    ? p_.of_all.of(tiles)
                      : own_stretches_ == own.cluster_stretches ? p_.of_cluster.of(tiles)
                                                                : tiles >= own_stretches_;  // fewer tiles than stretches, or as many
    return own_segment(seq, lens, blockIdx.y, tiles, own_stretches_, whole, blockIdx.x);
  }

  __device__ __forceinline__ bool line_clusters() const { return p_.line.cluster_stretches > 1; }

  // Once, before the first arrival at a barrier: the consumers have initialised them.
  __device__ __forceinline__ void meet_consumers() {
    if (line_clusters()) ptx::cluster_arrive();
    ptx::named_barrier(kStartBarrier, C::kThreads);
  }

  // The stretch where the line is cut across outputs, and the KV head whose line it is.
  __device__ __forceinline__ long long along_or_beside(const Line& line) {
    const int index = block_index();
    const bool beside = line.head_order == HeadOrder::kBeside;
    head_ = beside ? index % p_.kv_heads : 0;
    stretch_ = beside ? index / p_.kv_heads : index;
    return stretch_;
  }

  // Tokens of a seq that every row sees and in which no rule of rules.cuh has a say.
  struct PlainTokens {
    int begin;
    int end;
  };
  __device__ __forceinline__ PlainTokens plain_tokens(const SeqLens& lens) const {
    PlainTokens plain{0, lens.kv_len - (p_.causal ? lens.q_len - 1 : 0)};
    if (p_.rules) {
      if (p_.line.window_left >= 0) plain.begin = lens.kv_len - 1 - p_.line.window_left;
      if (p_.tree_mask != nullptr) plain.end = min_of(plain.end, lens.kv_len - lens.q_len);
      if (p_.softcap_log2 > 0.0f || p_.alibi_slopes != nullptr) plain.end = -1;
    }
    return plain;
  }

  // The segment's KV head and row block.
  __device__ __forceinline__ void locate(const Line& line, const Segment& segment) {
    kv_head_ = head_;
    row_block_ = segment.output;
    if (own_) {
      kv_head_ = segment.output;
      row_block_ = 0;
    } else if (line.head_order == HeadOrder::kAlong) {
      const int row_blocks = seq_row_blocks(line, segment.lens);
      kv_head_ = row_blocks == 1 ? segment.output : segment.output / row_blocks;
      row_block_ -= kv_head_ * row_blocks;
    }
  }

  __device__ __forceinline__ KvBase kv_base(int seq) const {
    KvBase base{p_.k.data + kv_head_ * p_.k.head_stride + chunk_ * 8, p_.v.data + kv_head_ * p_.v.head_stride + chunk_ * 8, p_.block_table};
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
    if (!own_) {  // the consumers have brought it then
      // Q of the segment `stages` segments ago is no longer in use: each segment since has at least one stage, and the stage of that many
      // stages ago is free.
      load_q<C>(p_, tid_, q_at_ + segment_slot_ * C::kQBytes, info.seq, info.q_len, info.q_head, info.first_row, info.rows);
    }
    info.parts = 1;
    info.part = info.first_stretch = 0;
    info.of_cluster = own_ && line_clusters();
    if (own_) {
      info.parts = p_.of_cluster.of(own_stretches_);
      info.part = p_.of_cluster.of(blockIdx.x);
      info.first_stretch = block_index() - blockIdx.x;
    } else if (is_cut(segment)) {
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
    if (own_ && slot_ == 0 && round_ == 0) meet_consumers();
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
        page[i] = token < stage.tokens ? base.pages[page_of(stage.token_begin + token)] : 0;
      }
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) page[i] = static_cast<int>(ptx::kept(static_cast<std::uint32_t>(page[i])));
    }
    wait_for_room();
    const std::uint32_t k_at = stages_at_ + slot_ * 2 * C::kStageBytes, v_at = k_at + C::kStageBytes;
    if (p_.general_or_padded_pages) [[unlikely]] {
      if (general_) {
        load_general(k_at, base.k, p_.k, p_.head_dim, stage, filled, base.pages);
        load_general(v_at, base.v, p_.v, p_.head_dim_v, stage, filled, base.pages);
      } else if (pass_token_ < C::kPassTokens) {
        load_pages<true>(k_at, v_at, base, stage, filled, page);
      }
    } else if (pass_token_ < C::kPassTokens) {
      if (base.pages != nullptr) {
        load_pages<false>(k_at, v_at, base, stage, filled, page);
      } else {
        load_rows(k_at, base.k, p_.k, p_.head_dim, stage, filled);
        load_rows(v_at, base.v, p_.v, p_.head_dim_v, stage, filled);
      }
    }
    if (tid_ == 0 && round_ == 0 && slot_ == 0) mark(p_, Mark::kIssued);
  }

  __device__ __forceinline__ int page_of(int token) const { return p_.page.of(token); }

  // This thread's chunk of the row that it copies in pass i.
  __device__ __forceinline__ std::uint32_t place(int i) const {
    return place_[i % C::kPassPlaces] + i / C::kPassPlaces * C::kPassPlaces * C::kPassTokens * C::kRowBytes;
  }

  // How many tokens of `filled` this thread's chunk is written for: none where it lies beyond the row.
  __device__ __forceinline__ int filled_of(int dim, int filled) const { return p_.padded && chunk_ * 8 >= dim ? 0 : filled; }

  // K or V of a stage in 16-byte copies; tokens lie token_stride apart.
  __device__ __forceinline__ void load_rows(std::uint32_t to, const std::uint16_t* base, const KvRows& rows, int dim, const Stage& stage,
                                            int filled) const {
    const std::uint16_t* from = base + (stage.token_begin + pass_token_) * rows.token_stride;
    const std::int64_t step = C::kPassTokens * rows.token_stride;
    if (stage.tokens == p_.whole_tokens) {
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i, from += step) ptx::cp_async_16(to + place(i), from, policy_);
    } else {
      filled = filled_of(dim, filled);
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
  template <bool kPadded>
  __device__ __forceinline__ void load_pages(std::uint32_t k_at, std::uint32_t v_at, const KvBase& base, const Stage& stage, int filled,
                                             const int (&page)[C::kPasses]) const {
    const int filled_k = kPadded ? filled_of(p_.head_dim, filled) : filled, filled_v = kPadded ? filled_of(p_.head_dim_v, filled) : filled;
    const auto* k = reinterpret_cast<const unsigned char*>(base.k);
    const auto* v = reinterpret_cast<const unsigned char*>(base.v);
#pragma unroll
    for (int i = 0; i < C::kPasses; ++i) {
      const int token = i * C::kPassTokens + pass_token_, of_seq = stage.token_begin + token;
      const int in_page = of_seq - page_of(of_seq) * p_.page_size;
      const int bytes = token < stage.tokens ? 16 : 0;
      ptx::cp_async_16_if(token < filled_k, k_at + place(i), k + row_offset(p_.k, page[i], in_page), bytes, policy_);
      ptx::cp_async_16_if(token < filled_v, v_at + place(i), v + row_offset(p_.v, page[i], in_page), bytes, policy_);
    }
  }

  // K or V in any layout: narrow accesses, strides of any size.
  __device__ __forceinline__ void load_general(std::uint32_t to, const std::uint16_t* base, const KvRows& rows, int dim, const Stage& stage,
                                               int filled, const int* pages) const {
#pragma unroll 1
    for (int index = tid_; index < filled * C::kRowChunks; index += kProducerThreads) {
      const int token = index / C::kRowChunks, chunk = index % C::kRowChunks;
      if (chunk * 8 >= dim) continue;
      const bool read = token < stage.tokens;
      const std::uint16_t* from = base + (chunk - chunk_) * 8;
      if (read) {
        const int of_seq = stage.token_begin + token;
        const int slot = pages != nullptr ? page_of(of_seq) : 0;
        from += (of_seq - slot * p_.page_size) * rows.token_stride;
        if (pages != nullptr) from += pages[slot] * rows.outer_stride;
      }
      copy_narrow(to + swizzled<C::kRowChunks>(token, chunk) * 16, from, min_of(rows.access_bytes, 8), read);
    }
  }

  const Params& p_;
  Shared<C>& shared_;
  bool own_ = false;       // the block's stretch is of one output alone
  int own_stretches_ = 0;  // of that output
  int head_ = 0;           // of this block when heads lie side by side
  int kv_head_ = 0;        // of the segment
  int row_block_ = 0;
  const int tid_;
  long long stretch_ = 0;  // where the line is cut across outputs
  int slot_ = 0;
  int round_ = 0;         // times that the ring has been filled
  int segment_slot_ = 0;  // segments counted around the ring
  const std::uint32_t stages_at_, q_at_;
  const std::uint64_t policy_;
  const bool general_;            // Params::general
  const int pass_token_, chunk_;  // of this thread in a pass
  std::uint32_t place_[C::kPassPlaces];
};

}  // namespace leanattn::cuda
