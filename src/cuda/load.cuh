// SPDX-License-Identifier: Apache-2.0
// The producer warps: they bring the tiles of the block's stretch into shared memory, running ahead of the consumers across the borders of
// segments.
#pragma once

#include "cuda/copies.cuh"
#include "cuda/faults.cuh"
#include "cuda/query.cuh"
#include "cuda/stretch.cuh"
#include "cuda/timeline.cuh"

namespace leanattn::cuda {

// The producers' walk over a stretch.
template <class C>
class Producer {
 public:
  __device__ Producer(const Params& params, unsigned tid, std::uint32_t stages_at, std::uint32_t q_at, Shared<C>& shared)
      : p_(params), shared_(shared), tid_(tid), q_at_(q_at), copies_(params, tid, stages_at) {}

  __device__ void run() {
    const Line line = fixed_line<C>(p_.line);
    const bool own = p_.line.output_stretches > 0 && (line.num_seqs == 1 || own_stretches_pay<C>(line, tid_, shared_));
    // A short call waits for its instructions, and those that lie behind each other come soonest: the two ways have code of their own down
    // to the copies, as has the first stage of the first. kept makes one branch of this, with run_own right behind it.
    if (__builtin_expect(ptx::kept(own), 1)) {
      run_own(line);
    } else {
      run_line(line);
    }
    wait_for_room();
    if (tid_ == 0) shared_.stages[slot_] = {0, 0, Stage::kDone, 0};
    arrive();
    if (is_checked<C>(p_) && block_index() == 0) report_lengths(p_, tid_);
  }

 private:
  // The block's stretch is of one output alone, which the grid names.
  __device__ __forceinline__ void run_own(const Line& line) {
    Line own = line;
    own.policy = Policy::kLean;
    own.head_order = HeadOrder::kAlong;
    own.output_stretches = p_.line.output_stretches;
    own.cluster_stretches = p_.line.cluster_stretches;
    own.cu_seqlens_q = nullptr;
    own = chunked_line<C>(own, p_);
    const int seq = blockIdx.z;
    const SeqLens lens = seq_lens(own, seq);
    kv_head_ = blockIdx.y;
    row_block_ = 0;
    const KvBase base = copies_.base(kv_head_, seq);  // while the length is on its way
    const int tiles = seq_tiles(own, lens);
    own_stretches_ = own_stretches(own, tiles);
    const int whole = own_stretches_ == own.output_stretches    ? p_.of_all.of(tiles)
                      : own_stretches_ == own.cluster_stretches ? p_.of_cluster.of(tiles)
                                                                : tiles >= own_stretches_;  // fewer tiles than stretches, or as many
    const Segment segment = own_segment(own, seq, lens, kv_head_, tiles, own_stretches_, whole, blockIdx.x);
    const bool idle = static_cast<int>(blockIdx.x) >= own_stretches_;
    Walk walk;
    if (!idle) {
      walk = start_walk(line, segment, base);
      load_stage<true>(line, segment, {}, {}, walk, true);
    }
    meet_consumers();
    if (idle) return;
    arrive();
    while (walk.stage.token_begin < walk.end) {
      load_stage<true>(line, segment, {}, {}, walk, false);
      arrive();
    }
  }

  __device__ __forceinline__ void run_line(const Line& line) {
    const long long stretch = along_or_beside(line);
    find_stretch<C>(line, stretch, tid_, shared_);
    Cursor cursor = shared_.cursor;
    const Cut cut = shared_.cut;
    meet_consumers();       // before a copy: they have brought Q where an output might have had stretches of its own
    Line lean_line = line;  // a second time for what most calls use: half the instructions
    lean_line.policy = Policy::kLean;
    const Line any_line = chunked_line<C>(line, p_);
    const bool lean = line.policy == Policy::kLean && !has_chunks<C>(p_);
    Segment segment;
    while (lean ? next_segment(lean_line, cursor, segment) : next_segment(any_line, cursor, segment)) {
      locate(line, segment);
      Walk walk = start_walk(line, segment, copies_.base(kv_head_, segment.seq));
      bool first = true;
      do {  // once for an empty seq
        load_stage<false>(line, segment, cursor, cut, walk, first);
        arrive();
        first = false;
      } while (walk.stage.token_begin < walk.end);
      if (++segment_slot_ == p_.stages) segment_slot_ = 0;
    }
  }

  // Tokens of a seq up to which every row sees all, and between which no rule of rules.cuh has a say.
  struct PlainTokens {
    int seen_end;
    int begin;
    int end;
  };
  // The way through a segment.
  struct Walk {
    KvBase base;
    PlainTokens plain;
    int first_tile;  // of the seq's line
    int end;         // token behind the segment's last
    Stage stage;     // token_begin: of the stage to come
    Chunks chunks;   // no stage has tokens of two
    int chunk = 0;
    int border = 0;  // token behind the chunk's last
  };

  __device__ __forceinline__ Walk start_walk(const Line& line, const Segment& segment, const KvBase& base) {
    Walk walk;
    walk.base = base;
    blind_ = is_checked<C>(p_) && !is_kv_run_good(line, segment.seq, segment.lens.kv_len);
    if (tid_ == 0 && round_ == 0 && slot_ == 0) mark(p_, Mark::kSegment);
    walk.plain = plain_tokens(segment.lens);
    const int first_token = seq_first_token(line, segment.lens);
    walk.first_tile = first_token / kTile;
    walk.end = segment.lens.kv_len;  // where the last tile would end, or one behind it begin, there may be no int
    if (!ends_output(segment)) walk.end = (walk.first_tile + segment.tile_end) * kTile;
    int begin = walk.end;  // of a stretch without a tile
    if (segment.tile_begin < segment.tiles) begin = max_of((walk.first_tile + segment.tile_begin) * kTile, first_token);
    walk.stage.token_begin = begin;
    walk.border = walk.end;
    if (has_chunks<C>(p_)) {
      walk.chunks = output_chunks(chunked_line<C>(line, p_), segment.tiles);
      walk.chunk = walk.chunks.of(segment.tile_begin);
      next_border(segment, walk);
    }
    copies_.fetch_page(walk.base, begin, walk.end);
    return walk;
  }

  __device__ __forceinline__ static void next_border(const Segment& segment, Walk& walk) {
    const int tile = walk.chunks.begin(++walk.chunk);
    walk.border = tile < segment.tile_end ? (walk.first_tile + tile) * kTile : walk.end;
  }

  // The segment's next stage, which arrive() hands over. first: of the segment.
  template <bool kOwn>
  __device__ __forceinline__ void load_stage(const Line& line, const Segment& segment, const Cursor& cursor, const Cut& cut, Walk& walk,
                                             bool first) {
    Stage& stage = walk.stage;
    // Not as a clamp: nvcc 13.0 makes one instruction of it whose predicate then says that every stage is full.
    const int left = walk.border - stage.token_begin;
    stage.tokens = left >= C::kTokens ? C::kTokens : left > 0 ? left : 0;
    const int stage_end = stage.token_begin + stage.tokens;
    stage.flags = (first ? Stage::kFirst : 0) | (stage_end >= walk.end ? Stage::kLast : 0) |
                  (has_chunks<C>(p_) && stage_end >= walk.border ? Stage::kChunkEnd : 0) |
                  (stage.tokens < C::kTokens || stage_end > walk.plain.seen_end ? Stage::kMasked : 0) |
                  (has_rules<C>(p_) && (stage_end > walk.plain.end || stage.token_begin < walk.plain.begin) ? Stage::kRuled : 0);
    copies_.find_rows(stage, walk.base, walk.end);
    const int tokens = stage.tokens;
    if (is_checked<C>(p_) &&
        copies_.is_faulty(stage, walk.base, segment.seq, blind_)) {  // zeros are copied, and what comes of them is thrown away
      stage.flags |= Stage::kFault;
      stage.tokens = 0;
    }
    wait_for_room();
    copies_.load(stage, walk.base, slot_ * 2 * C::kStageBytes);
    stage.tokens = tokens;
    if (tid_ == 0 && round_ == 0 && slot_ == 0) mark(p_, Mark::kIssued);
    if (first) load_segment<kOwn>(line, segment, cursor, cut, walk.chunks);
    if (tid_ == 0) shared_.stages[slot_] = stage;
    stage.token_begin = stage_end;
    if (has_chunks<C>(p_) && stage_end >= walk.border) next_border(segment, walk);
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

  __device__ __forceinline__ PlainTokens plain_tokens(const SeqLens& lens) const {
    PlainTokens plain{lens.kv_len - (p_.causal ? lens.q_len - 1 : 0), 0, lens.kv_len};
    if (has_rules<C>(p_)) {
      if (p_.line.window_left >= 0) plain.begin = lens.kv_len - 1 - p_.line.window_left;
      if (p_.tree_mask != nullptr) plain.end = lens.kv_len - lens.q_len;
      if (p_.softcap_log2 > 0.0f || p_.alibi_slopes != nullptr) plain.end = -1;
    }
    return plain;
  }

  // The KV head and row block of a segment of the line.
  __device__ __forceinline__ void locate(const Line& line, const Segment& segment) {
    kv_head_ = head_;
    row_block_ = segment.output;
    if (line.head_order == HeadOrder::kAlong) {
      const int row_blocks = seq_row_blocks(line, segment.lens);
      kv_head_ = row_blocks == 1 ? segment.output : segment.output / row_blocks;
      row_block_ -= kv_head_ * row_blocks;
    }
  }

  // Q and what the consumers need to know of the segment: behind the first copies of K and V, which everything waits for.
  template <bool kOwn>
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
    if (!kOwn) {                                                                  // the consumers have brought it then
      // Q of the segment `stages` segments ago is no longer in use: each segment since has at least one stage, and the stage of that many
      // stages ago is free.
      load_q<C>(p_, tid_, q_at_ + segment_slot_ * C::kQBytes, info.seq, info.q_len, info.q_head, info.first_row, info.rows);
    }
    info.parts = 1;
    info.part = info.first_stretch = 0;
    info.of_cluster = kOwn && line_clusters();
    if (kOwn) {
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
    if (has_chunks<C>(p_)) describe_chunks<kOwn>(line, segment, cursor, cut, chunks, info);
    if (tid_ == 0) shared_.segments[segment_slot_] = info;
  }

  // Batch-invariant: what the consumers need to find the output's nodes (tree.cuh).
  template <bool kOwn>
  __device__ void describe_chunks(const Line& line, const Segment& segment, const Cursor& cursor, const Cut& cut, const Chunks& of_output,
                                  SegmentInfo& info) const {
    SegmentChunks& chunks = info.chunks;
    chunks.all = of_output.count;
    chunks.begin = of_output.of(segment.tile_begin);
    chunks.end = of_output.of(segment.tile_end - 1) + 1;
    chunks.tiles = segment.tiles;
    chunks.first_of_line = 0;
    chunks.output_unit = 0;
    if (kOwn) {
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
    if (is_general<C>(p_)) [[unlikely]] {  // rows may have come by ordinary stores, which only an ordinary arrival publishes
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

  const Params& p_;
  Shared<C>& shared_;
  bool blind_ = false;     // the segment's K and V lie where they cannot be
  int own_stretches_ = 0;  // of that output
  int head_ = 0;           // of this block when heads lie side by side
  int kv_head_ = 0;        // of the segment
  int row_block_ = 0;
  const unsigned tid_;
  long long stretch_ = 0;  // where the line is cut across outputs
  int slot_ = 0;
  int round_ = 0;         // times that the ring has been filled
  int segment_slot_ = 0;  // segments counted around the ring
  const std::uint32_t q_at_;
  KvCopies<C> copies_;
};

}  // namespace leanattn::cuda
