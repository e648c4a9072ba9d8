// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/owned.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "inputs.h"
#include "numeric.h"
#include "problem_view.h"
#include "tests/executors.h"

namespace leanattn::fuzz {
namespace {

int draw_length(Bytes& bytes) {
  switch (bytes.below(6)) {
    case 0: return 1 + bytes.below(40);
    case 1: return 0;
    case 2: return bytes.of({15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129});
    case 3: return bytes.of({255, 256, 257, 511, 513});
    default: return bytes.below(200);
  }
}

std::size_t elements(std::int64_t count, DType dtype) {
  return static_cast<std::size_t>(std::max<std::int64_t>(count, 0)) * dtype_bytes(dtype);
}

std::vector<float> head_values(int heads, std::uint64_t salt, float low, float high) {
  std::vector<float> values(static_cast<std::size_t>(heads));
  for (std::size_t head = 0; head < values.size(); ++head) {
    const float at = static_cast<float>(input_hash(salt, Input::kLengths, head) >> 40) * 0x1p-24f;
    values[head] = low + (high - low) * at;
  }
  return values;
}

}  // namespace

Owned::Owned(Bytes& bytes) {
  draw_shapes(bytes);
  bound_work();
  draw_rules(bytes);
  lay_out_rows(bytes);
  lay_out_tokens(bytes);
  fill();
  reset_outputs();
}

void Owned::draw_shapes(Bytes& bytes) {
  Problem& p = problem;
  p.batch = bytes.of({1, 2, 3, 0, 5, 1});
  p.kv_heads = bytes.of({1, 2, 1, 3, 4});
  p.q_heads = p.kv_heads * (bytes.one_in(4) ? 1 + bytes.below(20) : bytes.of({1, 2, 4, 8}));
  p.head_dim = bytes.one_in(3) ? 32 + 8 * bytes.below(29) : bytes.of({32, 64, 40, 128});
  p.head_dim_v = bytes.one_in(4) ? 32 + 8 * bytes.below(29) : 0;
  p.q_dtype = p.kv_dtype = static_cast<DType>(bytes.below(3));
  p.q_len = bytes.of({1, 1, 2, 0, 3, 5});
  if (bytes.one_in(20)) p.q_len = 60 + bytes.below(12);
  for (int seq = 0; seq < p.batch; ++seq) kv_lens.push_back(draw_length(bytes));
  if (bytes.one_in(3)) {
    std::vector<std::int32_t> offsets{0};
    p.q_len = 0;
    for (int seq = 0; seq < p.batch; ++seq) {
      q_lens.push_back(bytes.one_in(30) ? bytes.below(72) : bytes.below(6));
      offsets.push_back(offsets.back() + q_lens.back());
      p.q_len = std::max(p.q_len, q_lens.back());
    }
    p.q_len += bytes.of({0, 0, 1, 70});  // a bound only
    cu_seqlens_q = Exact::of(offsets);
    p.cu_seqlens_q = cu_seqlens_q.as<std::int32_t>();
  } else {
    q_lens.assign(static_cast<std::size_t>(p.batch), p.q_len);
  }
}

// Thousands of inputs a second find more than large ones.
void Owned::bound_work() {
  constexpr std::int64_t kMostProducts = 200'000, kMostElements = 40'000;
  Problem& p = problem;
  const auto too_much = [&] {
    std::int64_t products = 0, tokens = 0;
    for (std::size_t seq = 0; seq < kv_lens.size(); ++seq) products += std::int64_t{kv_lens[seq]} * q_lens[seq], tokens += kv_lens[seq];
    const std::int64_t dims = p.head_dim + head_dim_v(p);
    return products * p.q_heads * dims > kMostProducts || tokens * p.kv_heads * dims > kMostElements;
  };
  if (too_much()) p.q_heads = p.kv_heads;
  if (too_much()) p.q_heads = p.kv_heads = 1;
  for (std::size_t seq = 0; seq < kv_lens.size() && too_much(); ++seq) kv_lens[seq] = std::min(kv_lens[seq], 35);
  if (too_much()) p.head_dim = 32, p.head_dim_v = 0;
}

void Owned::draw_rules(Bytes& bytes) {
  Problem& p = problem;
  p.causal = !bytes.one_in(4);
  if (bytes.one_in(3)) p.window_left = bytes.of({0, 1, 5, 15, 16, 63, 64, 100, 300, std::numeric_limits<std::int32_t>::max()});
  if (bytes.one_in(4)) {
    std::vector<std::uint64_t> words(static_cast<std::size_t>(total_q(p) * tree_mask_words(p)));
    for (std::uint64_t& word : words) word = bytes.raw(2) * 0x9e3779b97f4a7c15u;
    tree_mask = Exact::of(words);
    p.tree_mask = tree_mask.as<std::uint64_t>();
  }
  p.scale = bytes.of({0.0f, 0.0f, 0.5f, -0.25f, 1e-30f});
  p.softcap = bytes.of({0.0f, 0.0f, 30.0f, 1.0f});
  if (bytes.one_in(4)) {
    alibi_slopes = Exact::of(head_values(p.q_heads, 1, 0.0f, 0.5f));
    p.alibi_slopes = alibi_slopes.as<float>();
  }
  if (bytes.one_in(3)) {
    std::vector<float> values = head_values(p.q_heads, 2, -4.0f, 4.0f);
    if (bytes.one_in(2)) values[0] = bytes.of({-std::numeric_limits<float>::infinity(), 88.0f, -1e4f, 1e4f});
    sinks = Exact::of(values);
    p.sinks = sinks.as<float>();
  }
  p.lse_base = static_cast<LseBase>(bytes.below(2));
  if (!bytes.one_in(4)) {
    lse = Exact(static_cast<std::size_t>(total_q(p) * p.q_heads) * sizeof(float), kCanaryByte);
    p.lse = lse.as<float>();
  }
}

void Owned::lay_out_rows(Bytes& bytes) {
  Problem& p = problem;
  const auto lay_out = [&](auto& view, int dim, Exact& memory) {
    const auto gap = [&] { return bytes.of({0, 0, 1, 8}); };
    view.head_stride = dim + gap();
    view.token_stride = p.q_heads * view.head_stride + gap();
    view.seq_stride = p.q_len * view.token_stride + gap();
    const std::int64_t tokens = p.cu_seqlens_q ? total_q(p) : p.q_len, seqs = p.cu_seqlens_q ? 1 : p.batch;
    const bool none = tokens == 0 || seqs == 0;
    const std::int64_t span =
        none ? 0 : (seqs - 1) * view.seq_stride + (tokens - 1) * view.token_stride + (p.q_heads - 1) * view.head_stride + dim;
    memory = Exact(elements(span, p.q_dtype), kNanByte);
    view.data = memory.data();
  };
  lay_out(p.q, p.head_dim, q);
  lay_out(p.o, head_dim_v(p), o);
}

void Owned::lay_out_tokens(Bytes& bytes) {
  Problem& p = problem;
  p.kv_layout = static_cast<KvLayout>(bytes.below(3));
  std::int64_t blocks = p.batch, tokens = 0;
  const int longest = kv_lens.empty() ? 0 : *std::max_element(kv_lens.begin(), kv_lens.end());
  switch (p.kv_layout) {
    case KvLayout::kBatched: tokens = p.kv_capacity = longest + bytes.of({0, 0, 1, 9}); break;
    case KvLayout::kRagged: {
      const bool exact = bytes.one_in(2);  // lengths are the rooms
      std::vector<std::int32_t> offsets{0};
      for (const std::int32_t len : kv_lens) offsets.push_back(offsets.back() + len + (exact ? 0 : bytes.of({0, 1, 7})));
      cu_seqlens_kv = Exact::of(offsets);
      p.cu_seqlens_kv = cu_seqlens_kv.as<std::int32_t>();
      p.kv_capacity = bytes.one_in(2) ? 0 : longest + (exact ? 0 : 7);
      blocks = 1, tokens = offsets.back();
      if (!exact) lens = Exact::of(kv_lens);
      break;
    }
    case KvLayout::kPaged:
      lay_out_pages(bytes);
      blocks = p.num_pages, tokens = p.page_size;
      break;
  }
  if (p.kv_layout != KvLayout::kRagged) lens = Exact::of(kv_lens);
  p.kv_lens = lens.as<std::int32_t>();
  const auto lay_out = [&](KvView& view, int dim, Exact& memory) {
    const auto gap = [&] { return bytes.of({0, 0, 3, 8}); };
    if (bytes.one_in(3)) {  // head by head
      view.token_stride = dim + gap();
      view.head_stride = tokens * view.token_stride + gap();
      view.outer_stride = p.kv_heads * view.head_stride + gap();
    } else {
      view.head_stride = dim + gap();
      view.token_stride = p.kv_heads * view.head_stride + gap();
      view.outer_stride = tokens * view.token_stride + gap();
    }
    const bool none = blocks == 0 || tokens == 0;
    const std::int64_t span =
        none ? 0 : (blocks - 1) * view.outer_stride + (tokens - 1) * view.token_stride + (p.kv_heads - 1) * view.head_stride + dim;
    memory = Exact(elements(span, p.kv_dtype), kNanByte);
    view.data = memory.data();
  };
  lay_out(p.k, p.head_dim, k);
  lay_out(p.v, head_dim_v(p), v);
}

// Pages in reverse, some of them used by two seqs' slots; slots that no row needs hold absurd ids.
void Owned::lay_out_pages(Bytes& bytes) {
  Problem& p = problem;
  p.page_size = bytes.of({16, 1, 2, 3, 7, 64, 256, 1000});
  int most = 0, used = 0;
  for (const std::int32_t len : kv_lens) {
    const int pages = (len + p.page_size - 1) / p.page_size;
    most = std::max(most, pages), used += pages;
  }
  p.max_pages = most + bytes.of({0, 1, 4});
  p.num_pages = used + bytes.of({0, 1});
  const int gap = bytes.of({0, 0, 1, 5});
  p.block_table_stride = gap == 0 && bytes.one_in(2) ? 0 : p.max_pages + gap;
  const std::int64_t stride = block_table_stride(p);
  const std::int32_t absurd =
      bytes.of<std::int32_t>({-1, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()});
  const std::int64_t slots = p.batch == 0 ? 0 : (p.batch - 1) * stride + p.max_pages;
  std::vector<std::int32_t> table(static_cast<std::size_t>(slots), absurd);
  int next = p.num_pages;
  for (int seq = 0; seq < p.batch; ++seq) {
    const int len = kv_lens[static_cast<std::size_t>(seq)], q_len = q_lens[static_cast<std::size_t>(seq)];
    const int first = p.window_left < 0 ? 0 : static_cast<int>(std::max<std::int64_t>(0, std::int64_t{len} - q_len - p.window_left));
    for (int slot = q_len == 0 ? p.max_pages : first / p.page_size; slot * p.page_size < len; ++slot) {
      table[static_cast<std::size_t>(seq * stride + slot)] = --next;
    }
  }
  block_table = Exact::of(table);
  p.block_table = block_table.as<std::int32_t>();
}

// Values into the rows that a problem addresses; all else stays NaN.
void Owned::fill() {
  const Problem& p = problem;
  std::uint64_t index = 0;
  const auto write = [&](void* data, DType dtype, std::int64_t at, int dim, float factor) {
    float largest = 0.0f;
    for (int i = 0; i < dim; ++i) {
      const float value = input_normal(7, Input::kQ, index++) * factor;
      store_from_float(data, dtype, at + i, value);
      largest = std::max(largest, std::abs(value));
    }
    return largest;
  };
  for (int seq = 0; seq < p.batch; ++seq) {
    for (int token = 0; token < q_lens[static_cast<std::size_t>(seq)]; ++token) {
      for (int head = 0; head < p.q_heads; ++head) write(q.data(), p.q_dtype, q_row_offset(p, p.q, seq, token, head), p.head_dim, 1.0f);
    }
    if (q_lens[static_cast<std::size_t>(seq)] == 0) continue;
    for (int token = seq_first_token(p, seq); token < kv_lens[static_cast<std::size_t>(seq)]; ++token) {
      for (int head = 0; head < p.kv_heads; ++head) {
        write(k.data(), p.kv_dtype, kv_row_offset(p, p.k, seq, token, head), p.head_dim, 1.0f);
        largest_v = std::max(largest_v, write(v.data(), p.kv_dtype, kv_row_offset(p, p.v, seq, token, head), head_dim_v(p), 1.0f));
      }
    }
  }
}

void Owned::reset_outputs() {
  for (const Exact* memory : {&o, &lse}) {
    if (memory->bytes() > 0) std::memset(memory->data(), kCanaryByte, memory->bytes());
  }
}

leanattn_problem Owned::c() const {
  const Problem& p = problem;
  leanattn_problem c;
  leanattn_problem_init(&c);
  c.batch = p.batch, c.q_heads = p.q_heads, c.kv_heads = p.kv_heads;
  c.head_dim = p.head_dim, c.head_dim_v = p.head_dim_v, c.q_len = p.q_len;
  c.q_dtype = static_cast<leanattn_dtype>(p.q_dtype), c.kv_dtype = static_cast<leanattn_dtype>(p.kv_dtype);
  c.q = {p.q.data, p.q.seq_stride, p.q.token_stride, p.q.head_stride};
  c.o = {p.o.data, p.o.seq_stride, p.o.token_stride, p.o.head_stride};
  c.k = {p.k.data, p.k.outer_stride, p.k.token_stride, p.k.head_stride};
  c.v = {p.v.data, p.v.outer_stride, p.v.token_stride, p.v.head_stride};
  c.lse = p.lse, c.cu_seqlens_q = p.cu_seqlens_q, c.kv_lens = p.kv_lens;
  c.kv_layout = static_cast<leanattn_kv_layout>(p.kv_layout);
  c.kv_capacity = p.kv_capacity, c.cu_seqlens_kv = p.cu_seqlens_kv;
  c.page_size = p.page_size, c.num_pages = p.num_pages, c.max_pages = p.max_pages;
  c.block_table = p.block_table, c.block_table_stride = p.block_table_stride;
  c.causal = p.causal, c.window_left = p.window_left, c.tree_mask = p.tree_mask;
  c.scale = p.scale, c.softcap = p.softcap, c.alibi_slopes = p.alibi_slopes, c.sinks = p.sinks;
  c.lse_base = static_cast<leanattn_lse_base>(p.lse_base);
  return c;
}

leanattn_options draw_options(Bytes& bytes) {
  leanattn_options options;
  leanattn_options_init(&options);
  options.policy = bytes.of<leanattn_policy>({LEANATTN_LEAN, LEANATTN_LEAN, LEANATTN_FA2, LEANATTN_FLASHDECODING});
  if (options.policy == LEANATTN_FLASHDECODING && bytes.one_in(2)) options.splits = bytes.one_in(8) ? 1024 : 1 + bytes.below(9);
  options.head_order = bytes.below(3);
  options.batch_invariant = bytes.one_in(3);
  options.workers = bytes.one_in(16) ? 300 : 1 + bytes.below(9);
  const auto& executors = testing::executors();
  const Executor executor = bytes.one_in(12) ? executors[2].executor : executors[static_cast<std::size_t>(bytes.below(2))].executor;
  if (!bytes.one_in(12)) options.executor = {executor.run, executor.context};
  options.cpu_isa = leanattn_cpu_isa(bytes.below(4));  // null: the fastest
  return options;
}

}  // namespace leanattn::fuzz
