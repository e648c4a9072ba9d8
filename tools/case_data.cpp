// SPDX-License-Identifier: Apache-2.0
#include "tools/case_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "inputs.h"
#include "numeric.h"
#include "problem_view.h"

namespace leanattn::tools {
namespace {

constexpr std::int32_t kMostInt32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kSlackTokens = 3;  // of poison behind the longest sequence
constexpr std::int64_t kViewOffset = 8;   // elements before a strided view: 16 bytes at least
}  // namespace

CaseData::CaseData(const Case& c, const CaseDataOptions& options) : case_(c) {
  problem_.batch = c.batch();
  problem_.q_heads = c.q_heads;
  problem_.kv_heads = c.kv_heads;
  problem_.head_dim = c.head_dim;
  problem_.head_dim_v = c.head_dim_v;
  problem_.q_len = c.max_q_len();
  problem_.q_dtype = problem_.kv_dtype = c.dtype;
  problem_.causal = c.causal;
  problem_.window_left = c.window_left;
  problem_.scale = c.scale;
  problem_.softcap = c.softcap;
  problem_.lse_base = c.lse == CaseLse::kTwo ? LseBase::kTwo : LseBase::kNatural;
  check_size(std::max(1, options.copies));
  lay_out_lengths();
  lay_out_kv();
  lay_out_q();
  make_logit_rules();
  make_tree();
  fill_q(options.threads);
  copies_.resize(static_cast<std::size_t>(std::max(1, options.copies)));
  const std::size_t element = dtype_bytes(c.dtype);
  copy_bytes_ = (k_elements_ + v_elements_) * static_cast<std::int64_t>(element);
  for (Copy& copy : copies_) {
    copy.k = Buffer(static_cast<std::size_t>(k_elements_) * element, options.huge_pages);
    copy.v = Buffer(static_cast<std::size_t>(v_elements_) * element, options.huge_pages);
    if (&copy == &copies_.front()) {
      fill_kv(copy, options.threads);
    } else {
      parallel_copy(copy.k.data(), copies_.front().k.data(), copy.k.bytes(), options.threads);
      parallel_copy(copy.v.data(), copies_.front().v.data(), copy.v.bytes(), options.threads);
    }
  }
}

// In double, before any product that could overflow.
void CaseData::check_size(int copies) const {
  const Case& c = case_;
  double tokens = 0.0, longest = 0.0, slots = 0.0;
  for (const std::int32_t len : c.kv_lens) {
    tokens += len;
    longest = std::max(longest, static_cast<double>(len));
  }
  if (c.layout == CaseLayout::kPaged) {
    slots = c.batch() * (longest / c.page_size + 3.0);
    tokens = std::min(tokens + static_cast<double>(c.batch()) * c.page_size, tokens * c.page_size) * 1.125 + 2.0 * c.page_size;
    if (c.strided) tokens *= 2.0;
  } else if (c.layout != CaseLayout::kRagged) {
    tokens = c.batch() * longest;
  }
  const double widths = (c.kv_heads + (c.strided ? c.q_heads : 0)) * (static_cast<double>(c.head_dim) + c.head_dim_v);
  const double q_widths = c.q_heads * (static_cast<double>(c.head_dim) + c.head_dim_v);
  const double elements = copies * tokens * widths + static_cast<double>(c.total_q()) * q_widths;
  const double bytes = elements * static_cast<double>(dtype_bytes(c.dtype)) + 4.0 * slots;
  const double available = static_cast<double>(available_memory_bytes());
  if (bytes > 1e18 || (available > 0.0 && bytes > available)) {
    throw OutOfMemory(fmt::format("about {:.0f} bytes ({:.1f} GiB) of memory wanted for the case \"{}\", {:.1f} GiB available", bytes,
                                  bytes / (1 << 30), to_string(c), available / (1 << 30)));
  }
}

void CaseData::lay_out_lengths() {
  const Case& c = case_;
  problem_.kv_lens = case_.kv_lens.data();
  if (!c.q_lens.empty()) {
    cu_seqlens_q_.assign(1, 0);
    for (const std::int32_t len : c.q_lens) {
      if (len > kMostInt32 - cu_seqlens_q_.back()) throw CaseError("q_len: more than 2^31 - 1 query tokens in all");
      cu_seqlens_q_.push_back(cu_seqlens_q_.back() + len);
    }
    problem_.cu_seqlens_q = cu_seqlens_q_.data();
  }
  for (std::int32_t seq = 0; seq < c.batch(); ++seq) {
    if (sees_no_token(seq)) continue;
    const std::int64_t tokens = c.kv_lens[static_cast<std::size_t>(seq)] - seq_first_token(problem_, seq);
    kv_bytes_ += tokens * c.kv_heads * (c.head_dim + c.head_dim_v) * static_cast<std::int64_t>(dtype_bytes(c.dtype));
  }
}

void CaseData::lay_out_kv() {
  const Case& c = case_;
  const std::int64_t longest = c.kv_lens.empty() ? 0 : *std::max_element(c.kv_lens.begin(), c.kv_lens.end());
  const std::int64_t heads = c.kv_heads, dk = c.head_dim, dv = c.head_dim_v;
  std::int64_t blocks = c.batch();               // sequences or pages that lie outer_stride apart
  std::int64_t tokens = longest + kSlackTokens;  // of a block
  problem_.kv_layout = KvLayout::kBatched;
  problem_.kv_capacity = std::min<std::int64_t>(tokens, kMostInt32);
  if (c.layout == CaseLayout::kRagged) {
    problem_.kv_layout = KvLayout::kRagged;
    problem_.kv_capacity = 0;
    cu_seqlens_kv_.assign(1, 0);
    for (std::size_t seq = 0; seq < c.kv_lens.size(); ++seq) {
      const std::int64_t room = c.kv_lens[seq] + (c.strided ? static_cast<std::int64_t>(seq) % 3 : 0);
      problem_.kv_capacity = std::max(problem_.kv_capacity, room);
      if (cu_seqlens_kv_.back() + room > kMostInt32) throw CaseError("layout ragged: more than 2^31 - 1 tokens in all");
      cu_seqlens_kv_.push_back(static_cast<std::int32_t>(cu_seqlens_kv_.back() + room));
    }
    problem_.cu_seqlens_kv = cu_seqlens_kv_.data();
    if (!c.strided) problem_.kv_lens = nullptr;
    blocks = 1;
    tokens = cu_seqlens_kv_.back() + kSlackTokens;
  } else if (c.layout == CaseLayout::kPaged) {
    problem_.kv_layout = KvLayout::kPaged;
    problem_.kv_capacity = 0;
    lay_out_pages();
    blocks = problem_.num_pages;
    tokens = c.page_size;
  }
  KvView& k = problem_.k;
  KvView& v = problem_.v;
  const std::int64_t own = c.interleaved ? 0 : 1;  // V in a buffer of its own
  std::int64_t k_block = 0, v_block = 0;           // elements of a block
  if (c.layout == CaseLayout::kHeadMajor) {
    const std::int64_t gap = c.strided ? 3 * kViewOffset : 0;
    k.token_stride = dk + gap;
    v.token_stride = dv + gap;
    k.head_stride = tokens * (own ? k.token_stride : k.token_stride + v.token_stride);  // interleaved: [batch, kv_heads, 2, n, d]
    v.head_stride = own ? tokens * v.token_stride : k.head_stride;
    v_first_ = own ? 0 : tokens * k.token_stride;
    k_block = heads * k.head_stride;
    v_block = heads * v.head_stride;
  } else {
    const bool paged = c.layout == CaseLayout::kPaged;
    const std::int64_t fused = (c.q_heads + heads) * dk + heads * dv;  // a token of a fused QKV buffer
    k.head_stride = dk;
    v.head_stride = dv;
    k.token_stride = c.strided && !paged ? fused : own || paged ? heads * dk : heads * (dk + dv);
    v.token_stride = c.strided && !paged ? fused : own || paged ? heads * dv : heads * (dk + dv);
    // Interleaved: [pages, 2, page, kv_heads, d] and [batch, n, 2, kv_heads, d].
    v_first_ = own ? 0 : paged ? tokens * heads * dk : heads * dk;
    k_block = tokens * k.token_stride + (own || !paged ? 0 : tokens * v.token_stride);
    v_block = own ? tokens * v.token_stride : k_block;
  }
  // strided: two layers inside each page, the case's own is the second; elsewhere a gap behind each sequence.
  const auto stretch = [&](std::int64_t block) {
    return !c.strided ? block : c.layout == CaseLayout::kPaged ? 2 * block : block + 5 * kViewOffset;
  };
  k.outer_stride = stretch(k_block);
  v.outer_stride = stretch(v_block);
  if (c.strided) {
    k_first_ = c.layout == CaseLayout::kPaged ? k_block : kViewOffset;
    v_first_ += c.layout == CaseLayout::kPaged ? v_block : kViewOffset;
  }
  // Up to the end of the last block plus what a first element beyond the start shifts it by.
  k_elements_ = blocks * k.outer_stride + kViewOffset;
  v_elements_ = own ? blocks * v.outer_stride + kViewOffset : 0;
}

void CaseData::lay_out_pages() {
  const Case& c = case_;
  std::int64_t used = 0, longest = 0;
  for (std::int32_t seq = 0; seq < c.batch(); ++seq) {
    const std::int64_t slots = (std::int64_t{c.kv_lens[static_cast<std::size_t>(seq)]} + c.page_size - 1) / c.page_size;
    used += slots - seq_first_token(problem_, seq) / c.page_size;
    longest = std::max(longest, slots);
  }
  const std::int64_t spare = std::min<std::int64_t>(2 + used / 8, 64);
  if (used + spare > kMostInt32 - 1) throw CaseError(fmt::format("page {}: {} pages, more than 2^31 - 1", c.page_size, used + spare));
  std::vector<std::int32_t> pages(static_cast<std::size_t>(used + spare));
  std::iota(pages.begin(), pages.end(), 0);
  for (std::size_t i = pages.size() - 1; i > 0; --i) {
    std::swap(pages[i], pages[input_hash(c.seed, Input::kBlockTable, i) % (i + 1)]);
  }
  problem_.page_size = c.page_size;
  problem_.num_pages = static_cast<std::int32_t>(pages.size());
  problem_.max_pages = static_cast<std::int32_t>(longest + 2);
  problem_.block_table_stride = problem_.max_pages + (c.strided ? 1 : 0);
  const std::int32_t unused[] = {-1, kMostInt32, pages.back()};
  block_table_.resize(static_cast<std::size_t>(problem_.block_table_stride * c.batch()));
  for (std::size_t i = 0; i < block_table_.size(); ++i) block_table_[i] = unused[i % 3];
  std::size_t next = 0;
  for (std::int32_t seq = 0; seq < c.batch(); ++seq) {
    const std::int64_t row = seq * problem_.block_table_stride;
    const std::int64_t slots = (std::int64_t{c.kv_lens[static_cast<std::size_t>(seq)]} + c.page_size - 1) / c.page_size;
    for (std::int64_t slot = seq_first_token(problem_, seq) / c.page_size; slot < slots; ++slot) {
      block_table_[static_cast<std::size_t>(row + slot)] = pages[next++];
    }
  }
  problem_.block_table = block_table_.data();
}

void CaseData::lay_out_q() {
  const Case& c = case_;
  const std::int64_t heads = c.q_heads;
  QView& q = problem_.q;
  q.head_stride = c.head_dim;
  q.token_stride = heads * c.head_dim + (c.strided ? c.kv_heads * (c.head_dim + c.head_dim_v) : 0);
  q.seq_stride = c.q_len * q.token_stride + (c.strided ? 5 * kViewOffset : 0);
  OView& o = problem_.o;
  o.head_stride = c.head_dim_v + (c.strided ? kViewOffset : 0);
  o.token_stride = heads * o.head_stride + (c.strided ? 3 * kViewOffset : 0);
  o.seq_stride = c.q_len * o.token_stride + (c.strided ? 5 * kViewOffset : 0);
  const auto elements = [&](const auto& view) { return c.q_lens.empty() ? c.batch() * view.seq_stride : c.total_q() * view.token_stride; };
  const auto element = static_cast<std::int64_t>(dtype_bytes(c.dtype));
  q_.first = c.strided ? kViewOffset : 0;
  q_.elements = elements(q) + q_.first;
  q_.buffer = Buffer(static_cast<std::size_t>(q_.elements * element));
  q.data = q_.buffer.data() + q_.first * element;
  o_.first = kGuardBytes / element;
  o_.elements = elements(o) + 2 * o_.first;
  o_.buffer = Buffer(static_cast<std::size_t>(o_.elements * element));
  o.data = o_.buffer.data() + kGuardBytes;
  if (c.lse != CaseLse::kNone) {
    lse_ = Buffer(static_cast<std::size_t>(rows() * 4 + 2 * kGuardBytes));
    problem_.lse = reinterpret_cast<float*>(lse_.data() + kGuardBytes);
  }
  reset_outputs();
}

void CaseData::make_logit_rules() {
  if (case_.alibi) {  // Press et al., ICLR 2022: 2^(−8(h + 1) / heads)
    const auto heads = static_cast<float>(case_.q_heads);
    for (int h = 0; h < case_.q_heads; ++h) alibi_slopes_.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / heads));
    problem_.alibi_slopes = alibi_slopes_.data();
  }
  if (case_.sink != CaseSink::kNone) {
    const float varied[] = {-2.0f, 0.5f, -INFINITY, 3.0f, 7.25f};
    for (int h = 0; h < case_.q_heads; ++h) sinks_.push_back(case_.sink == CaseSink::kVaried ? varied[h % 5] : case_.sink_value);
    problem_.sinks = sinks_.data();
  }
}

// A node sees itself and what its parent sees. Bits above the diagonal, which causal rules out, and past the seq's q_len are set at random.
void CaseData::make_tree() {
  if (case_.tree_tokens == 0) return;
  const std::int64_t words = tree_mask_words(problem_);
  tree_mask_.assign(static_cast<std::size_t>(case_.total_q() * words), 0);
  std::uint64_t counter = 0;
  const auto random = [&] { return input_hash(case_.seed, Input::kTreeMask, counter++); };
  for (std::int32_t seq = 0; seq < case_.batch(); ++seq) {
    std::uint64_t* rows = tree_mask_.data() + seq_q_begin(problem_, seq) * words;
    for (std::int64_t i = 0; i < case_.seq_q_len(seq); ++i) {
      std::uint64_t* row = rows + i * words;
      if (i > 0) {
        const auto parent = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(i));
        const std::uint64_t* seen = rows + parent * words;
        for (std::int64_t j = 0; j <= parent; ++j) row[j / 64] |= (seen[j / 64] >> (j % 64) & 1) << (j % 64);
      }
      row[i / 64] |= std::uint64_t{1} << (i % 64);
      for (std::int64_t j = i + 1; j < words * 64; ++j) row[j / 64] |= static_cast<std::uint64_t>(random() % 4 == 0) << (j % 64);
    }
  }
  problem_.tree_mask = tree_mask_.data();
}

Problem CaseData::problem(int copy) const {
  Problem problem = problem_;
  const Copy& from = copies_.at(static_cast<std::size_t>(copy));
  const auto element = static_cast<std::int64_t>(dtype_bytes(case_.dtype));
  problem.k.data = from.k.data() + k_first_ * element;
  problem.v.data = (case_.interleaved ? from.k.data() : from.v.data()) + v_first_ * element;
  return problem;
}

Options CaseData::options() const {
  Options options;
  options.policy = case_.policy;
  options.splits = case_.splits;
  options.head_order = case_.head_order;
  options.batch_invariant = case_.batch_invariant;
  options.workers = case_.workers;
  return options;
}

}  // namespace leanattn::tools
