// SPDX-License-Identifier: Apache-2.0
// Copies of K and V from where a problem has them to a stage in shared memory, by the producers' threads together: 16 bytes each, a row
// beside the next, and slower ones for what is aligned to less.
#pragma once

#include "cuda/faults.cuh"
#include "cuda/query.cuh"

namespace leanattn::cuda {

// Where the tokens of a seq lie, for one KV head and this thread's chunk of a row.
struct KvBase {
  const std::uint16_t* k;
  const std::uint16_t* v;
  const int* pages;  // null when not paged. Ordinary loads: a kernel that this one overlaps with may have written them
};

// One thread's share. A pass is as many rows as all threads copy at once.
template <class C>
class KvCopies {
 public:
  // stages_at: of the first stage.
  __device__ KvCopies(const Params& params, unsigned tid, std::uint32_t stages_at)
      : p_(params),
        tid_(tid),
        stages_at_(stages_at),
        policy_(ptx::evict_first_policy()),
        pass_token_(tid / C::kRowChunks),
        chunk_(tid % C::kRowChunks),
        warp_row_(pass_token_ - tid / kWarp * kWarp / C::kRowChunks),
        page_token_(page_token(tid)) {
    for (int i = 0; i < C::kPassPlaces; ++i) place_[i] = ptx::kept(stages_at + kv_place<C>(i * C::kPassTokens + pass_token_, chunk_));
  }

  __device__ __forceinline__ KvBase base(int kv_head, int seq) const {
    KvBase base{p_.k.data + kv_head * p_.k.head_stride + chunk_ * 8, p_.v.data + kv_head * p_.v.head_stride + chunk_ * 8, p_.block_table};
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

  // The page of this lane's token in the stage that begins at first_token, if the segment, which ends at `end`, goes so far. Fetched a
  // stage ahead: its latency hides behind the wait for room.
  __device__ __forceinline__ void fetch_page(const KvBase& base, int first_token, int end) {
    if (base.pages == nullptr) return;
    page_ = page_token_ < end - first_token ? base.pages[page_of(first_token + page_token_)] : 0;
    page_ = static_cast<int>(ptx::kept(static_cast<std::uint32_t>(page_)));
  }

  // Where this lane's token of a stage lies, whose page fetch_page has brought; then it brings that of the next stage.
  __device__ __forceinline__ void find_rows(const Stage& stage, const KvBase& base, int end) {
    if (base.pages == nullptr) return;
    const int token = stage.token_begin + (page_token_ < stage.tokens ? page_token_ : 0);
    const auto in_page = static_cast<std::uint32_t>(token - page_of(token) * p_.page_size);
    k_row_ = static_cast<std::uint32_t>(page_) * p_.k.page_units + in_page * p_.k.token_units;
    v_row_ = static_cast<std::uint32_t>(page_) * p_.v.page_units + in_page * p_.v.token_units;
    if (is_checked<C>(p_)) stage_page_ = page_;
    fetch_page(base, stage.token_begin + stage.tokens, end);
  }

  // Whether any thread finds a page id of the stage out of range, which it reports; the same for all of them. blind: K and V of the segment
  // lie where they cannot be.
  __device__ __forceinline__ bool is_faulty(const Stage& stage, const KvBase& base, int seq, bool blind) const {
    if (base.pages == nullptr) return blind;
    const bool faulty = page_token_ < stage.tokens && (stage_page_ < 0 || stage_page_ >= p_.num_pages);
    if (faulty) report_fault(p_, DataFaultKind::kPage, seq, page_of(stage.token_begin + page_token_));
    return ptx::named_barrier_any(kProducerBarrier, kProducerThreads, faulty);
  }

  // K and V of the stage that find_rows was called for, `at` bytes behind the first stage.
  __device__ __forceinline__ void load(const Stage& stage, const KvBase& base, std::uint32_t at) const {
    const std::uint32_t k_at = at, v_at = at + C::kStageBytes;
    if (is_general<C>(p_)) [[unlikely]] {
      load_general(k_at, base.k, p_.k, p_.head_dim, stage, base.pages);
      load_general(v_at, base.v, p_.v, p_.head_dim_v, stage, base.pages);
    } else if (C::kPassTokens * C::kRowChunks == kProducerThreads || pass_token_ < C::kPassTokens) {
      if (__builtin_expect(base.pages == nullptr, 1)) {
        load_rows(k_at, base.k, p_.k, p_.head_dim, stage);
        load_rows(v_at, base.v, p_.v, p_.head_dim_v, stage);
      } else {
        load_pages(k_at, v_at, base, stage);
      }
    }
  }

 private:
  // The token of a stage whose page this lane finds: of all that its warp copies, pass by pass, each is some lane's.
  __device__ __forceinline__ static int page_token(unsigned tid) {
    const unsigned warp = tid / kWarp, lane = tid % kWarp % (C::kPasses * C::kWarpRows);
    return lane / C::kWarpRows * C::kPassTokens + warp * kWarp / C::kRowChunks + lane % C::kWarpRows;
  }

  __device__ __forceinline__ int page_of(int token) const { return p_.page.of(token); }

  // In the first stage, this thread's chunk of the row of K that it copies in pass i.
  __device__ __forceinline__ std::uint32_t place(int i) const {
    return place_[i % C::kPassPlaces] + i / C::kPassPlaces * C::kPassPlaces * C::kPassTokens * C::kColumnBytes;
  }

  // Whether this thread's chunk is one of the row's. Tokens that a stage lacks are zeros: the matrix units take all of it.
  __device__ __forceinline__ bool writes(int dim) const { return !is_padded<C>(p_) || chunk_ * 8 < dim; }

  // K or V of a stage in 16-byte copies; tokens lie token_stride apart.
  __device__ __forceinline__ void load_rows(std::uint32_t to, const std::uint16_t* base, const KvRows& rows, int dim,
                                            const Stage& stage) const {
    const std::uint16_t* from = base + (stage.token_begin + pass_token_) * rows.token_stride;
    const std::int64_t step = C::kPassTokens * rows.token_stride;
    if (__builtin_expect(stage.tokens == (C::kFull ? p_.whole_tokens : C::kTokens), 1)) {
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i, from += step) ptx::cp_async_16(to + place(i), from, policy_);
    } else {
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i, from += step) {
        const int token = i * C::kPassTokens + pass_token_;
        ptx::cp_async_16_if(writes(dim), to + place(i), from, token < stage.tokens ? 16 : 0, policy_);
      }
    }
  }

  // K and V where tokens lie in pages: each lane hands the place of its token to those that copy the row.
  __device__ __forceinline__ void load_pages(std::uint32_t k_at, std::uint32_t v_at, const KvBase& base, const Stage& stage) const {
    const auto from = [&](const std::uint16_t* rows, std::uint32_t row, int pass) {
      const std::uint32_t units = __shfl_sync(~0u, row, pass * C::kWarpRows + warp_row_);
      return reinterpret_cast<const unsigned char*>(rows) + static_cast<std::uint64_t>(units) * p_.page_unit;
    };
    if (__builtin_expect(stage.tokens == (C::kFull ? p_.whole_tokens : C::kTokens), 1)) {
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        ptx::cp_async_16(k_at + place(i), from(base.k, k_row_, i), policy_);
        ptx::cp_async_16(v_at + place(i), from(base.v, v_row_, i), policy_);
      }
    } else {
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        const int token = i * C::kPassTokens + pass_token_, bytes = token < stage.tokens ? 16 : 0;
        ptx::cp_async_16_if(writes(p_.head_dim), k_at + place(i), from(base.k, k_row_, i), bytes, policy_);
        ptx::cp_async_16_if(writes(p_.head_dim_v), v_at + place(i), from(base.v, v_row_, i), bytes, policy_);
      }
    }
  }

  // K or V in any layout: narrow accesses, strides of any size.
  __device__ __forceinline__ void load_general(std::uint32_t to, const std::uint16_t* base, const KvRows& rows, int dim, const Stage& stage,
                                               const int* pages) const {
#pragma unroll 1
    for (int index = tid_; index < C::kTokens * C::kRowChunks; index += kProducerThreads) {
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
      copy_narrow(stages_at_ + to + kv_place<C>(token, chunk), from, min_of(rows.access_bytes, 8), read);
    }
  }

  const Params& p_;
  const unsigned tid_;
  const std::uint32_t stages_at_;
  const std::uint64_t policy_;
  const int pass_token_, chunk_;         // of this thread in a pass
  const int warp_row_;                   // that row's place among those of the warp
  const int page_token_;                 // page_token of this lane
  int page_ = 0;                         // of that token, in the stage to come
  int stage_page_ = 0;                   // and in the stage that find_rows was called for
  std::uint32_t k_row_ = 0, v_row_ = 0;  // units of Params::page_unit to that token, in that stage
  std::uint32_t place_[C::kPassPlaces];
};

}  // namespace leanattn::cuda
