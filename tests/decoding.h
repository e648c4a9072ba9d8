// SPDX-License-Identifier: Apache-2.0
// Decode calls of the tests: a poisoned case through every instruction set and many cuts of the line, its outputs bit by bit, its poison
// in other colours, and parts of a batch as problems of their own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "isas.h"
#include "leanattn/attention.h"
#include "numeric.h"
#include "problem_view.h"
#include "reference.h"
#include "tools/case.h"
#include "tools/case_data.h"
#include "tools/run.h"

namespace leanattn::testing {

using tools::Case;
using tools::CaseData;
using tools::CaseLayout;
using tools::parse_case;

constexpr int kDefaultProblems = 10000;

// LEANATTN_TEST_PROBLEMS: how many random problems; sanitizer runs ask for fewer.
inline int test_problems() {
  const char* text = std::getenv("LEANATTN_TEST_PROBLEMS");
  const int problems = text ? std::atoi(text) : 0;
  return problems > 0 ? problems : kDefaultProblems;
}

// Long cases shrink with the number of random problems.
inline bool short_run() { return test_problems() < kDefaultProblems; }

inline Options with_isa(Options options, std::size_t index) {
  options.cpu_isa = isas()[index % isas().size()].c_str();
  return options;
}

// How the line is cut.
struct Way {
  Policy policy = Policy::kLean;
  int splits = 0;
  HeadOrder order = HeadOrder::kAuto;
  bool invariant = false;
  int workers = 1;
};

inline const std::vector<Way>& ways() {
  static const std::vector<Way> all = {
      {Policy::kLean, 0, HeadOrder::kAuto, false, 1},
      {Policy::kLean, 0, HeadOrder::kAlong, false, 3},
      {Policy::kLean, 0, HeadOrder::kBeside, false, 7},
      {Policy::kFa2, 0, HeadOrder::kAuto, false, 2},
      {Policy::kFlashDecoding, 0, HeadOrder::kAuto, false, 5},
      {Policy::kFlashDecoding, 3, HeadOrder::kAlong, false, 2},
      {Policy::kFlashDecoding, 7, HeadOrder::kBeside, true, 4},
      {Policy::kLean, 0, HeadOrder::kAuto, true, 5},
      {Policy::kFa2, 0, HeadOrder::kAlong, true, 2},
  };
  static const std::vector<Way> few = {all[2], all[4], all[6], all[1]};
  return short_run() ? few : all;
}

inline Options options_of(const Way& way) {
  Options options;
  options.policy = way.policy;
  options.splits = way.splits;
  options.head_order = way.order;
  options.batch_invariant = way.invariant;
  options.workers = way.workers;
  return options;
}

inline std::string text_of(const Options& options) {
  static const char* const orders[] = {"auto", "along", "beside"};
  std::string text = "policy=" + tools::policy_name(options.policy, options.splits);
  text += std::string(" order=") + orders[static_cast<int>(options.head_order)];
  text += " invariant=" + std::to_string(options.batch_invariant) + " workers=" + std::to_string(options.workers);
  return text + " isa=" + (options.cpu_isa ? options.cpu_isa : "fastest");
}

// --- Right values ---

// The outputs that a call left.
inline ::testing::AssertionResult is_right(const Problem& problem, const Reference& reference) {
  const Comparison comparison = compare(problem, reference);
  if (comparison.ok()) return ::testing::AssertionSuccess();
  const bool of_lse = comparison.lse.ratio > comparison.o.ratio;
  const Worst& worst = of_lse ? comparison.lse : comparison.o;
  return ::testing::AssertionFailure() << (of_lse ? "lse" : "o") << " of seq " << worst.seq << ", token " << worst.token << ", q_head "
                                       << worst.q_head << ", dim " << worst.dim << ": error " << worst.error << ", tolerance "
                                       << worst.tolerance;
}

// One call on poisoned outputs and workspace against the reference, with every canary whole.
inline ::testing::AssertionResult is_right(CaseData& data, const Options& options, const Reference& reference) {
  tools::Accuracy accuracy;
  try {
    accuracy = tools::check_once(data, options, reference);
  } catch (const Error& error) {
    return ::testing::AssertionFailure() << error.what() << "\n  case: " << to_string(data.spec()) << "\n  with " << text_of(options);
  }
  if (accuracy.ok) return ::testing::AssertionSuccess();
  auto failure = ::testing::AssertionFailure();
  failure << (accuracy.fault.empty() ? accuracy.where : accuracy.fault) << ": error " << accuracy.error << ", tolerance "
          << accuracy.tolerance << ", " << accuracy.rows << " rows\n  case: " << to_string(data.spec()) << "\n  with " << text_of(options);
  return failure;
}

// Each cut with one instruction set, and each instruction set with the first cuts.
inline void expect_right_every_way(CaseData& data, const Reference& reference) {
  for (std::size_t i = 0; i < ways().size(); ++i) {
    for (std::size_t isa = 0; isa < (i < 3 ? isas().size() : 1); ++isa) {
      EXPECT_TRUE(is_right(data, with_isa(options_of(ways()[i]), i + isa), reference));
    }
  }
}

inline void expect_right_every_way(const std::string& line) {
  CaseData data(parse_case(line));
  expect_right_every_way(data, compute_reference(data.problem(), tools::affordable_sample(data.spec())));
}

// The case as its line says it, with every instruction set.
inline void expect_right(const std::string& line, const Sample& sample = {}) {
  CaseData data(parse_case(line));
  const Reference reference = compute_reference(data.problem(), sample);
  for (std::size_t isa = 0; isa < isas().size(); ++isa) EXPECT_TRUE(is_right(data, with_isa(data.options(), isa), reference));
}

// The reference of one q_head's rows alone, so that no head hides behind a worse one.
inline Reference of_head(const Reference& all, int q_heads, int q_head) {
  Reference one = all;
  for (std::size_t row = 0; row < one.row.size(); ++row) {
    if (static_cast<int>(row) % q_heads != q_head) one.row[row] = Reference::kNotComputed;
  }
  return one;
}

// The worst of thousands of rows is held against the worst naive row of as many: all sequences of one length pool their naive errors.
inline void pool_lengths(const Problem& p, Reference& reference) {
  std::map<int, std::pair<double, double>> worst;
  for (int seq = 0; seq < p.batch; ++seq) {
    auto& [o, lse] = worst[seq_kv_len(p, seq)];
    o = std::max(o, reference.naive_o_error[static_cast<std::size_t>(seq)]);
    lse = std::max(lse, reference.naive_lse_error[static_cast<std::size_t>(seq)]);
  }
  for (int seq = 0; seq < p.batch; ++seq) {
    const auto at = static_cast<std::size_t>(seq);
    std::tie(reference.naive_o_error[at], reference.naive_lse_error[at]) = worst[seq_kv_len(p, seq)];
  }
}

// A naive computation may be close by luck, and among millions of rows some meet one that was. Such a result is judged again with the worst
// naive error of its twins, the same case with other values: what is wrong and not unlucky stays beyond.
inline Reference with_twins(Reference reference, const Case& spec, const Sample& sample) {
  constexpr std::uint64_t kTwins = 8;
  for (std::uint64_t twin = 1; twin <= kTwins; ++twin) {
    Case c = spec;
    c.seed += twin << 32;
    const CaseData other(c, {.copies = 1, .huge_pages = false, .threads = sample.threads});
    const Reference naive = compute_reference(other.problem(), sample);
    for (std::size_t seq = 0; seq < reference.naive_o_error.size(); ++seq) {
      reference.naive_o_error[seq] = std::max(reference.naive_o_error[seq], naive.naive_o_error[seq]);
      reference.naive_lse_error[seq] = std::max(reference.naive_lse_error[seq], naive.naive_lse_error[seq]);
    }
  }
  return reference;
}

// --- Bits ---

using Bits = std::vector<std::uint32_t>;

// O and LSE of every row as float32 bits: the 16-bit types fit in them exactly.
inline Bits output_bits(const Problem& p) {
  Bits bits;
  const int dims = head_dim_v(p);
  for (int seq = 0; seq < p.batch; ++seq) {
    for (int token = 0; token < seq_q_len(p, seq); ++token) {
      for (int head = 0; head < p.q_heads; ++head) {
        const std::int64_t at = q_row_offset(p, p.o, seq, token, head);
        for (int i = 0; i < dims; ++i) bits.push_back(std::bit_cast<std::uint32_t>(load_as_float(p.o.data, p.q_dtype, at + i)));
        if (p.lse) bits.push_back(std::bit_cast<std::uint32_t>(p.lse[(seq_q_begin(p, seq) + token) * p.q_heads + head]));
      }
    }
  }
  return bits;
}

inline void decode_alone(const Problem& problem, const Options& options) {
  std::vector<std::byte> workspace(workspace_bytes(problem, options), std::byte{0xff});
  decode(problem, options, workspace);
}

inline Bits decoded_bits(CaseData& data, const Problem& problem, const Options& options) {
  const std::span<std::byte> workspace = data.workspace(workspace_bytes(problem, options));
  data.reset_outputs();
  decode(problem, options, workspace);
  EXPECT_EQ(data.canary_fault(), "") << to_string(data.spec());
  return output_bits(problem);
}

inline Bits decoded_bits(CaseData& data, const Options& options) { return decoded_bits(data, data.problem(), options); }

// --- Poison ---

// Writes K or V of a case, which hands its memory out as constant.
inline void set_kv(const Problem& p, const KvView& view, int seq, std::int64_t token, int head, int i, float value) {
  store_from_float(const_cast<void*>(view.data), p.kv_dtype, kv_row_offset(p, view, seq, token, head) + i, value);
}
inline float get_kv(const Problem& p, const KvView& view, int seq, std::int64_t token, int head, int i) {
  return load_as_float(view.data, p.kv_dtype, kv_row_offset(p, view, seq, token, head) + i);
}

// K and V of every token of a seq become `value`.
inline void paint_seq(const Problem& p, int seq, float value) {
  for (int token = 0; token < seq_kv_len(p, seq); ++token) {
    for (int head = 0; head < p.kv_heads; ++head) {
      for (int i = 0; i < p.head_dim; ++i) set_kv(p, p.k, seq, token, head, i, value);
      for (int i = 0; i < head_dim_v(p); ++i) set_kv(p, p.v, seq, token, head, i, value);
    }
  }
}

// The last key of every seq becomes 60 times the query of its KV head's first row, so that nothing else counts; group 1, q_len 1.
inline void let_last_key_dominate(const Problem& p) {
  for (int seq = 0; seq < p.batch; ++seq) {
    for (int head = 0; head < p.kv_heads; ++head) {
      for (int i = 0; i < p.head_dim; ++i) {
        const float q = load_as_float(p.q.data, p.q_dtype, q_row_offset(p, p.q, seq, 0, head) + i);
        set_kv(p, p.k, seq, seq_kv_len(p, seq) - 1, head, i, 60.0f * q);
      }
    }
  }
}
// Then O is V of the last token.
inline void expect_last_values(const CaseData& data) {
  const Problem p = data.problem();
  for (int seq = 0; seq < p.batch; ++seq) {
    for (int head = 0; head < p.kv_heads; ++head) {
      for (int i = 0; i < head_dim_v(p); ++i) {
        ASSERT_EQ(data.o_at(seq * p.q_heads + head, i), get_kv(p, p.v, seq, seq_kv_len(p, seq) - 1, head, i));
      }
    }
  }
}

// Every key of a seq becomes its first.
inline void make_keys_equal(const Problem& p) {
  for (int seq = 0; seq < p.batch; ++seq) {
    for (int token = 1; token < seq_kv_len(p, seq); ++token) {
      for (int head = 0; head < p.kv_heads; ++head) {
        for (int i = 0; i < p.head_dim; ++i) set_kv(p, p.k, seq, token, head, i, get_kv(p, p.k, seq, 0, head, i));
      }
    }
  }
}

// All elements of K and V that no row may look at.
class Poison {
 public:
  explicit Poison(const CaseData& data) : dtype_(data.spec().dtype) {
    for (const auto memory : {data.k_memory(), data.v_memory()}) {
      auto* elements = const_cast<std::byte*>(memory.data());
      const auto count = static_cast<std::int64_t>(memory.size() / dtype_bytes(dtype_));
      for (std::int64_t i = 0; i < count; ++i) {
        if (std::isnan(load_as_float(elements, dtype_, i)))
          places_.push_back(elements + i * static_cast<std::int64_t>(dtype_bytes(dtype_)));
      }
    }
  }
  void paint(float value) const {
    for (std::byte* place : places_) store_from_float(place, dtype_, 0, value);
  }
  std::size_t size() const { return places_.size(); }

 private:
  DType dtype_;
  std::vector<std::byte*> places_;
};

// --- Parts of a batch ---

// Seqs [begin, end) as a problem over the same tensors.
struct Part {
  Part(const Problem& whole, int begin, int end) : problem(whole) {
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(whole.q_dtype));
    const std::int64_t token = seq_q_begin(whole, begin);
    const std::int64_t first_q = q_row_offset(whole, whole.q, begin, 0, 0), first_o = q_row_offset(whole, whole.o, begin, 0, 0);
    problem.batch = end - begin;
    problem.q.data = static_cast<const std::byte*>(whole.q.data) + first_q * bytes;
    problem.o.data = static_cast<std::byte*>(whole.o.data) + first_o * bytes;
    if (whole.lse) problem.lse = whole.lse + token * whole.q_heads;
    if (whole.tree_mask) problem.tree_mask = whole.tree_mask + token * tree_mask_words(whole);
    if (whole.kv_lens) problem.kv_lens = whole.kv_lens + begin;
    if (whole.block_table) problem.block_table = whole.block_table + begin * block_table_stride(whole);
    std::int64_t first_k = 0, first_v = 0;
    if (whole.kv_layout == KvLayout::kBatched) first_k = begin * whole.k.outer_stride, first_v = begin * whole.v.outer_stride;
    if (whole.kv_layout == KvLayout::kRagged) {
      first_k = whole.cu_seqlens_kv[begin] * whole.k.token_stride;
      first_v = whole.cu_seqlens_kv[begin] * whole.v.token_stride;
      for (int seq = begin; seq <= end; ++seq) cu_seqlens_kv.push_back(whole.cu_seqlens_kv[seq] - whole.cu_seqlens_kv[begin]);
      problem.cu_seqlens_kv = cu_seqlens_kv.data();
    }
    problem.k.data = static_cast<const std::byte*>(whole.k.data) + first_k * bytes;
    problem.v.data = static_cast<const std::byte*>(whole.v.data) + first_v * bytes;
    if (whole.cu_seqlens_q) {
      for (int seq = begin; seq <= end; ++seq) cu_seqlens_q.push_back(whole.cu_seqlens_q[seq] - whole.cu_seqlens_q[begin]);
      problem.cu_seqlens_q = cu_seqlens_q.data();
    }
    // Its own length hints; the rows of a tree mask have their width from the longest q_len of the whole.
    if (whole.cu_seqlens_q && !whole.tree_mask) {
      problem.q_len = 0;
      for (int seq = begin; seq < end; ++seq) problem.q_len = std::max(problem.q_len, seq_q_len(whole, seq));
    }
    if (whole.kv_layout != KvLayout::kPaged) {
      problem.kv_capacity = 0;
      for (int seq = begin; seq < end; ++seq) {
        const bool ragged = whole.kv_layout == KvLayout::kRagged;
        const std::int64_t room = ragged ? whole.cu_seqlens_kv[seq + 1] - whole.cu_seqlens_kv[seq] : seq_kv_len(whole, seq);
        problem.kv_capacity = std::max(problem.kv_capacity, room);
      }
    }
  }
  Part(const Part&) = delete;

  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_kv;
  Problem problem;
};

// The outputs of all rows without a key, of which there are `rows`: O is 0 to the bit, and LSE, as a natural logarithm, the sink itself.
inline void expect_sinks_alone(const CaseData& data, const Reference& reference, const char* sink, int rows, const std::string& what) {
  const Problem p = data.problem();
  int empty = 0;
  for (std::int64_t row = 0; row < data.rows(); ++row) {
    if (reference.row[static_cast<std::size_t>(row)] != Reference::kWithoutKeys) continue;
    ++empty;
    for (int i = 0; i < head_dim_v(p); ++i) ASSERT_EQ(std::bit_cast<std::uint32_t>(data.o_at(row, i)), 0u) << what;
    if (p.lse_base == LseBase::kNatural) {
      ASSERT_EQ(data.lse_at(row), std::strtof(sink, nullptr)) << what;
    }
  }
  ASSERT_EQ(empty, rows) << what;
}

// visit(problem, entry) with `entry` in every slot of the block table that no row of the paged problem needs: −1, a page that no seq uses,
// the least int.
template <class Visit>
void with_unused_slots(Problem problem, Visit visit) {
  const std::int64_t stride = block_table_stride(problem);
  const std::vector<std::int32_t> used(problem.block_table, problem.block_table + stride * problem.batch);
  std::vector<bool> is_used(used.size());
  std::vector<bool> page_is_used(static_cast<std::size_t>(problem.num_pages));
  for (int seq = 0; seq < problem.batch; ++seq) {
    for (int token = seq_first_token(problem, seq); token < seq_kv_len(problem, seq); ++token) {
      const auto slot = static_cast<std::size_t>(seq * stride + token / problem.page_size);
      is_used[slot] = true;
      page_is_used[static_cast<std::size_t>(used[slot])] = true;
    }
  }
  const auto nan_page = std::find(page_is_used.begin(), page_is_used.end(), false) - page_is_used.begin();
  ASSERT_LT(nan_page, problem.num_pages);
  for (const std::int32_t entry : {-1, static_cast<std::int32_t>(nan_page), std::numeric_limits<std::int32_t>::min()}) {
    std::vector<std::int32_t> table = used;
    for (std::size_t slot = 0; slot < table.size(); ++slot) table[slot] = is_used[slot] ? table[slot] : entry;
    problem.block_table = table.data();
    visit(problem, entry);
  }
}

}  // namespace leanattn::testing
