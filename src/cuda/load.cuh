// SPDX-License-Identifier: Apache-2.0
// The producer warps: they bring the tiles of the block's stretch into shared memory, running ahead of the consumers across the borders of
// segments.
#pragma once

#include "cuda/faults.cuh"
#include "cuda/query.cuh"
#include "cuda/stretch.cuh"
#include "cuda/timeline.cuh"

namespace leanattn::cuda {

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
        general_(is_general<C>(params)),
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
    Line lean_line = line;  // a second time for what most calls use: half the instructions
    lean_line.policy = Policy::kLean;
    const Line any_line = chunked_line<C>(line, p_);
    const bool lean = line.policy == Policy::kLean && !has_chunks<C>(p_);
    while (!idle && (own_ || (lean ? next_segment(lean_line, cursor, segment) : next_segment(any_line, cursor, segment)))) {
      locate(line, segment);
      const KvBase base = kv_base(segment.seq);
      blind_ = is_checked<C>(p_) && !is_kv_run_good(line, segment.seq, segment.lens.kv_len);
      if (tid_ == 0 && round_ == 0 && slot_ == 0) mark(p_, Mark::kSegment);
      const PlainTokens plain = plain_tokens(segment.lens);
      const int first_token = seq_first_token(line, segment.lens), first_tile = first_token / kTile;
      int end = segment.lens.kv_len;  // where the last tile would end, or one behind it begin, there may be no int
      if (!ends_output(segment)) end = (first_tile + segment.tile_end) * kTile;
      int begin = end;  // of a stretch without a tile
      if (segment.tile_begin < segment.tiles) begin = max_of((first_tile + segment.tile_begin) * kTile, first_token);
      Chunks chunks;
      int chunk = 0, border = end;  // no stage has tokens of two chunks
      const auto next_border = [&] {
        const int tile = chunks.begin(++chunk);
        border = tile < segment.tile_end ? (first_tile + tile) * kTile : end;
      };
      if (has_chunks<C>(p_)) {
        chunks = output_chunks(any_line, segment.tiles);
        chunk = chunks.of(segment.tile_begin);
        next_border();
      }
      Stage stage;
      stage.token_begin = begin;
      do {  // once for an empty seq
        // Not as a clamp: nvcc 13.0 makes one instruction of it whose predicate then says that every stage is full.
        const int left = border - stage.token_begin;
        stage.tokens = left >= C::kTokens ? C::kTokens : left > 0 ? left : 0;
        const int stage_end = stage.token_begin + stage.tokens;
        stage.flags = (stage.token_begin == begin ? Stage::kFirst : 0) | (stage_end >= end ? Stage::kLast : 0) |
                      (has_chunks<C>(p_) && stage_end >= border ? Stage::kChunkEnd : 0) |
                      (stage.tokens < C::kTokens || stage_end > plain.seen_end ? Stage::kMasked : 0) |
                      (has_rules<C>(p_) && (stage_end > plain.end || stage.token_begin < plain.begin) ? Stage::kRuled : 0);
        load_kv(stage, base, segment.seq);
        if (stage.flags & Stage::kFirst) load_segment(line, segment, cursor, cut, chunks);
        if (tid_ == 0) shared_.stages[slot_] = stage;
        arrive();
        stage.token_begin = stage_end;
        if (has_chunks<C>(p_) && stage_end >= border) next_border();
      } while (stage.token_begin < end);
      if (own_) break;
      if (++segment_slot_ == p_.stages) segment_slot_ = 0;
    }
    wait_for_room();
    if (tid_ == 0) shared_.stages[slot_] = {0, 0, Stage::kDone, 0};
    arrive();
    if (is_checked<C>(p_) && block_index() == 0) report_lengths(p_, tid_);
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
    own = chunked_line<C>(own, p_);
    const int seq = blockIdx.z;
    const SeqLens lens = seq_lens(own, seq);
    const int tiles = seq_tiles(own, lens);
    own_stretches_ = own_stretches(own, tiles);
    const int whole = own_stretches_ == own.output_stretches    ? p_.of_all.of(tiles)
                      : own_stretches_ == own.cluster_stretches ? p_.of_cluster.of(tiles)
                                                                : tiles >= own_stretches_;  // fewer tiles than stretches, or as many
    return own_segment(own, seq, lens, blockIdx.y, tiles, own_stretches_, whole, blockIdx.x);
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

  // Tokens of a seq up to which every row sees all, and between which no rule of rules.cuh has a say.
  struct PlainTokens {
    int seen_end;
    int begin;
    int end;
  };
  __device__ __forceinline__ PlainTokens plain_tokens(const SeqLens& lens) const {
    PlainTokens plain{lens.kv_len - (p_.causal ? lens.q_len - 1 : 0), 0, lens.kv_len};
    if (has_rules<C>(p_)) {
      if (p_.line.window_left >= 0) plain.begin = lens.kv_len - 1 - p_.line.window_left;
      if (p_.tree_mask != nullptr) plain.end = lens.kv_len - lens.q_len;
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
  __device__ __forceinline__ void load_segment(const Line& line, const Segment& segment, const Cursor& cursor, const Cut& cut,
                                               const Chunks& chunks) {
    SegmentInfo info;
    info.seq = segment.seq;
    info.q_head = kv_head_ * p_.group;
    info.kv_len = segment.lens.kv_len;
    info.q_len = segment.lens.q_len;
    info.first_row = row_block_ * C::kRows;
    info.rows = min_of(info.q_len * p_.group - info.first_row, C::kRows);
    if (is_checked<C>(p_) && !are_q_offsets_good(line, info.seq)) info.rows = 0;  // neither read nor written
    if (!own_) {                                                                  // the consumers have brought it then
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
    if (has_chunks<C>(p_)) describe_chunks(line, segment, cursor, cut, chunks, info);
    if (tid_ == 0) shared_.segments[segment_slot_] = info;
  }

  // Batch-invariant: what the consumers need to find the output's nodes (tree.cuh).
  __device__ void describe_chunks(const Line& line, const Segment& segment, const Cursor& cursor, const Cut& cut, const Chunks& of_output,
                                  SegmentInfo& info) const {
    SegmentChunks& chunks = info.chunks;
    chunks.all = of_output.count;
    chunks.begin = of_output.of(segment.tile_begin);
    chunks.end = of_output.of(segment.tile_end - 1) + 1;
    chunks.tiles = segment.tiles;
    chunks.first_of_line = 0;
    chunks.output_unit = 0;
    if (own_) {
      chunks.slot = p_.slots / 2 + block_index();  // below lies what clusters leave to each other
      return;
    }
    const int line_begin = line.head_order == HeadOrder::kAlong ? 0 : head_ * line.workers;
    chunks.slot = 2 * (line_begin + static_cast<int>(stretch_)) + (starts_output(segment) ? 1 : 0);
    if (is_cut(segment)) {
      const long long units = output_units(line, segment.tiles);
      chunks.output_unit = cursor.seq_unit + segment.output * units;
      chunks.first_of_line = static_cast<int>(stretch_of(cut, chunks.output_unit));
      info.parts = static_cast<int>(stretch_of(cut, chunks.output_unit + units - 1)) - chunks.first_of_line + 1;
      info.first_stretch = line_begin + chunks.first_of_line;
    }
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

  __device__ __forceinline__ void load_kv(Stage& stage, const KvBase& base, int seq) {
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
    const int tokens = stage.tokens;
    if (is_checked<C>(p_)) {
      if (is_faulty(stage, base, seq, page)) {  // zeros for what was not to be read
        stage.flags |= Stage::kFault;
        stage.tokens = 0;
      }
    }
    wait_for_room();
    const std::uint32_t k_at = stages_at_ + slot_ * 2 * C::kStageBytes, v_at = k_at + C::kStageBytes;
    if (C::kFull && p_.general_or_padded_pages) [[unlikely]] {
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
    stage.tokens = tokens;
    if (tid_ == 0 && round_ == 0 && slot_ == 0) mark(p_, Mark::kIssued);
  }

  // Whether any producer thread finds a page id of the stage out of range, which it reports; the same for all of them.
  __device__ bool is_faulty(const Stage& stage, const KvBase& base, int seq, const int (&page)[C::kPasses]) const {
    if (base.pages == nullptr) return blind_;
    bool faulty = false;
#pragma unroll
    for (int i = 0; i < C::kPasses; ++i) {
      const int token = i * C::kPassTokens + pass_token_;
      if (token >= stage.tokens || (page[i] >= 0 && page[i] < p_.num_pages)) continue;
      report_fault(p_, DataFaultKind::kPage, seq, page_of(stage.token_begin + token));
      faulty = true;
    }
    return ptx::named_barrier_any(kProducerBarrier, kProducerThreads, faulty);
  }

  __device__ __forceinline__ int page_of(int token) const { return p_.page.of(token); }

  // This thread's chunk of the row that it copies in pass i.
  __device__ __forceinline__ std::uint32_t place(int i) const {
    return place_[i % C::kPassPlaces] + i / C::kPassPlaces * C::kPassPlaces * C::kPassTokens * C::kRowBytes;
  }

  // How many tokens of `filled` this thread's chunk is written for: none where it lies beyond the row.
  __device__ __forceinline__ int filled_of(int dim, int filled) const { return is_padded<C>(p_) && chunk_ * 8 >= dim ? 0 : filled; }

  // K or V of a stage in 16-byte copies; tokens lie token_stride apart.
  __device__ __forceinline__ void load_rows(std::uint32_t to, const std::uint16_t* base, const KvRows& rows, int dim, const Stage& stage,
                                            int filled) const {
    const std::uint16_t* from = base + (stage.token_begin + pass_token_) * rows.token_stride;
    const std::int64_t step = C::kPassTokens * rows.token_stride;
    if (stage.tokens == (C::kFull ? p_.whole_tokens : C::kTokens)) {
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
  bool blind_ = false;     // the segment's K and V lie where they cannot be
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
