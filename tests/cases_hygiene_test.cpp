// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries: what lies round the data (docs/cases.md).
#include <algorithm>
#include <array>
#include <limits>

#include "decoding.h"
#include "inputs.h"
#include "partial.h"

namespace leanattn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The bits of a call do not depend on what no row may look at.
void expect_blind_to_poison(const std::string& line, const std::vector<float>& colours) {
  CaseData data(parse_case(line));
  const Reference reference = compute_reference(data.problem());
  const Poison poison(data);
  ASSERT_GT(poison.size(), 0u);
  for (std::size_t way = 0; way < ways().size(); ++way) {
    for (std::size_t isa = 0; isa < (way == 2 ? isas().size() : 1); ++isa) {
      const Options options = with_isa(options_of(ways()[way]), way + isa);
      poison.paint(0.0f);
      const Bits clean = decoded_bits(data, options);
      for (const float colour : colours) {
        poison.paint(colour);
        EXPECT_TRUE(is_right(data, options, reference)) << "poison " << colour;
        EXPECT_EQ(output_bits(data.problem()), clean) << line << " poison " << colour << " " << text_of(options);
      }
    }
  }
}

TEST(Cases, H1_NanAndInfPastEveryLength) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* layout : {"layout=contiguous", "layout=head_major", "page=16", "page=7", "strided=1"}) {
      expect_blind_to_poison(std::string("- 8 2 64 32,64,96,48 dtype=") + dtype + " " + layout, {kNan, kInfinity, -kInfinity, 60000.0f});
    }
  }
}

TEST(Cases, H2_LengthsOneAndThree) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* layout : {"layout=contiguous", "page=4", "layout=head_major", "strided=1"}) {
      expect_blind_to_poison(std::string("- 4 2 64 1,3 dtype=") + dtype + " " + layout, {kNan, kInfinity});
    }
  }
}

// The other sequence's values may all be NaN: only its own rows are.
TEST(Cases, H3_LastPageTailAndForeignPages) {
  for (const char* line : {"- 8 2 64 13,29 page=4", "- 8 2 64 13,29 page=4 dtype=f32 interleaved=1", "- 8 2 64 13,29 page=4 dtype=f16"}) {
    CaseData data(parse_case(line));
    const Problem p = data.problem();
    paint_seq(p, 1, kNan);
    Reference reference = compute_reference(p);
    std::fill(reference.row.begin() + p.q_heads, reference.row.end(), Reference::kNotComputed);
    for (const float colour : {kNan, kInfinity}) {
      Poison(data).paint(colour);  // the last page's tail, and seq 1
      expect_right_every_way(data, reference);
    }
  }
}

// Sequences of length 0 that pad a batch for a graph: their rows are 0 and −inf, and nobody else notices.
TEST(Cases, H4_GraphPaddedBatch) {
  for (const char* layout : {"layout=contiguous", "page=16", "layout=ragged"}) {
    CaseData data(parse_case(std::string("- 8 2 64 700,33,1,0,0,0 dtype=f32 ") + layout));
    const Problem p = data.problem();
    const Reference reference = compute_reference(p);
    const Part unpadded(p, 0, 3);
    for (std::size_t way = 0; way < ways().size(); ++way) {
      const Options options = with_isa(options_of(ways()[way]), way);
      EXPECT_TRUE(is_right(data, options, reference));
      const std::size_t row_words = static_cast<std::size_t>(p.head_dim_v) + 1;
      Bits padded = output_bits(p);
      const std::vector<std::uint32_t> zero_row(row_words - 1, 0);
      for (std::size_t row = 3u * 8; row < 6u * 8; ++row) {
        EXPECT_TRUE(std::equal(zero_row.begin(), zero_row.end(), padded.begin() + static_cast<std::ptrdiff_t>(row * row_words)));
        EXPECT_EQ(padded[row * row_words + row_words - 1], std::bit_cast<std::uint32_t>(kMinusInfinity));
      }
      // An empty output takes a place on the line and in the count of splits: without batch_invariant that moves the cuts of the others.
      const bool moves =
          options.policy == Policy::kLean ? options.workers > 1 : options.policy == Policy::kFlashDecoding && options.splits == 0;
      if (moves && !options.batch_invariant) continue;
      padded.resize(3 * 8 * row_words);
      EXPECT_EQ(padded, decoded_bits(data, unpadded.problem, options)) << text_of(options);
    }
  }
}

TEST(Cases, H5_LengthsZeroAndOneSideBySide) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* layout : {"layout=contiguous", "page=16", "page=1", "strided=1"}) {
      CaseData data(parse_case(std::string("- 6 2 64 0,1,0,0,1 dtype=") + dtype + " " + layout));
      const Problem p = data.problem();
      expect_right_every_way(data, compute_reference(p));
      for (const int seq : {1, 4}) {
        for (int head = 0; head < 6; ++head) {
          for (int i = 0; i < 64; ++i) {  // one weight of 1: v itself
            ASSERT_EQ(data.o_at(seq * 6 + head, i), get_kv(p, p.v, seq, 0, head / 3, i));
          }
          double s = 0.0;
          for (int i = 0; i < 64; ++i) {
            const double q = load_as_float(p.q.data, p.q_dtype, q_row_offset(p, p.q, seq, 0, head) + i);
            s += q * get_kv(p, p.k, seq, 0, head / 3, i) / 8.0;
          }
          EXPECT_NEAR(data.lse_at(seq * 6 + head), s, 2e-6 * (1.0 + std::abs(s)));
        }
      }
    }
  }
}

// A tree that forbids all new tokens, and a window that holds no others.
TEST(Cases, H6_WindowOrMaskThatExcludesEveryKey) {
  for (const char* dtype : {"bf16", "f32"}) {
    for (const char* causal : {"", " causal=0"}) {
      CaseData data(parse_case(std::string("- 4 2 64 500,70,40 q_len=70 tree=70 window=30 dtype=") + dtype + causal));
      Problem p = data.problem();
      std::vector<std::uint64_t> mask(static_cast<std::size_t>(3 * 70 * 2));
      // Each seq sees its first new token alone: rows further on than the window see nothing.
      for (int row = 0; row < 3 * 70; ++row) mask[static_cast<std::size_t>(row) * 2] = 1;
      p.tree_mask = mask.data();
      const Reference reference = compute_reference(p);
      EXPECT_EQ(std::count(reference.row.begin(), reference.row.end(), Reference::kWithoutKeys), (39 + 39 + 70) * 4);
      for (std::size_t way = 0; way < ways().size(); ++way) {
        const Options options = with_isa(options_of(ways()[way]), way);
        const Bits bits = decoded_bits(data, p, options);
        const Comparison comparison = compare(p, reference);
        EXPECT_TRUE(comparison.ok()) << text_of(options) << " seq " << comparison.o.seq << " token " << comparison.o.token;
        EXPECT_EQ(std::count(bits.begin(), bits.end(), std::bit_cast<std::uint32_t>(kMinusInfinity)),
                  std::count(reference.row.begin(), reference.row.end(), Reference::kWithoutKeys));
      }
    }
  }
}

// A row without a key is 0 whatever V holds for the rows that share its tile.
TEST(Cases, H6_EmptyRowsBesideRowsThatSeeNan) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    CaseData data(parse_case(std::string("- 6 2 64 5,3,40 q_len=9 dtype=") + dtype));
    const Problem p = data.problem();
    for (int seq = 0; seq < 3; ++seq) {
      for (int i = 0; i < 64; ++i) set_kv(p, p.v, seq, seq_kv_len(p, seq) - 1, 0, i, i % 2 ? kNan : kInfinity);
    }
    for (std::size_t way = 0; way < ways().size(); ++way) {
      for (std::size_t isa = 0; isa < isas().size(); ++isa) {
        decoded_bits(data, with_isa(options_of(ways()[way]), isa));
        for (int row = 0; row < (4 * 6); ++row) {  // the first 4 tokens of seq 0 see no key
          for (int i = 0; i < 64; ++i) ASSERT_EQ(std::bit_cast<std::uint32_t>(data.o_at(row, i)), 0u) << isas()[isa] << " row " << row;
          ASSERT_EQ(data.lse_at(row), kMinusInfinity);
        }
      }
    }
  }
}

TEST(Cases, H7_MergeOfEmpties) {
  constexpr int kRows = 37, kDims = 300;  // more than a strip of dims
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
      const std::size_t shard_bytes = kRows * kDims * dtype_bytes(dtype);
      std::vector<std::byte> full(shard_bytes), empty(shard_bytes, std::byte{0xff});  // NaN: an empty shard's O is not looked at
      fill_normal(full.data(), dtype, 0, kRows * kDims, 3, Input::kV);
      std::vector<float> full_lse(kRows), empty_lse(kRows, kMinusInfinity);
      for (int row = 0; row < kRows; ++row) full_lse[static_cast<std::size_t>(row)] = 40.0f * input_normal(3, Input::kSinks, row);
      const auto merged = [&](const std::vector<bool>& shards) {
        std::vector<std::byte> o;
        std::vector<float> lse;
        for (const bool is_full : shards) {
          o.insert(o.end(), (is_full ? full : empty).begin(), (is_full ? full : empty).end());
          lse.insert(lse.end(), (is_full ? full_lse : empty_lse).begin(), (is_full ? full_lse : empty_lse).end());
        }
        std::pair<std::vector<std::byte>, std::vector<float>> out(shard_bytes, kRows);
        MergeProblem problem;
        problem.shards = static_cast<int>(shards.size());
        problem.rows = kRows;
        problem.head_dim_v = kDims;
        problem.dtype = dtype;
        problem.lse_base = base;
        problem.shard_o = o.data();
        problem.shard_lse = lse.data();
        problem.o = out.first.data();
        problem.lse = out.second.data();
        merge(problem);
        return out;
      };
      const auto nothing = merged({false, false});
      EXPECT_TRUE(std::all_of(nothing.first.begin(), nothing.first.end(), [](std::byte b) { return b == std::byte{0}; }));
      EXPECT_EQ(nothing.second, empty_lse);
      for (const auto& shards : {std::vector<bool>{true}, {true, false}, {false, true}, {false, false, true, false}}) {
        const auto one = merged(shards);
        EXPECT_EQ(one.first, full);
        EXPECT_EQ(one.second, full_lse) << "base " << static_cast<int>(base);  // no value is −0 or NaN: equal is bit for bit
      }
    }
  }
}

// A view out of a fused [tokens, q_heads + 2·kv_heads, d] buffer, each row of Q from the newest token.
TEST(Cases, H8_FusedQkvView) {
  constexpr int kBatch = 3, kTokens = 90, kQHeads = 8, kKvHeads = 2, kDim = 64;
  constexpr std::int64_t kToken = (kQHeads + 2 * kKvHeads) * kDim;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
    std::vector<std::byte> fused(static_cast<std::size_t>(kBatch * kTokens * kToken * bytes));
    fill_normal(fused.data(), dtype, 0, kBatch * kTokens * kToken, 5, Input::kK);
    std::vector<std::byte> o(static_cast<std::size_t>(kBatch * kQHeads * kDim * bytes));
    std::vector<float> lse(kBatch * kQHeads);
    const std::array<std::int32_t, kBatch> lens{kTokens, kTokens, kTokens};
    Problem p;
    p.batch = kBatch, p.q_heads = kQHeads, p.kv_heads = kKvHeads, p.head_dim = kDim;
    p.q_dtype = p.kv_dtype = dtype;
    p.kv_capacity = kTokens;
    p.kv_lens = lens.data();
    p.q = {fused.data() + (kTokens - 1) * kToken * bytes, kTokens * kToken, kToken, kDim};
    p.k = {fused.data() + kQHeads * kDim * bytes, kTokens * kToken, kToken, kDim};
    p.v = {fused.data() + (kQHeads + kKvHeads) * kDim * bytes, kTokens * kToken, kToken, kDim};
    p.o = {o.data(), kQHeads * kDim, kQHeads * kDim, kDim};
    p.lse = lse.data();
    const Reference reference = compute_reference(p);
    for (std::size_t way = 0; way < ways().size(); ++way) {
      std::fill(o.begin(), o.end(), std::byte{0xff});
      decode_alone(p, with_isa(options_of(ways()[way]), way));
      EXPECT_TRUE(is_right(p, reference)) << text_of(options_of(ways()[way]));
    }
  }
  for (const char* line : {"4 8 2 64 77 strided=1", "4 8 2 64 77 strided=1 q_len=3 dtype=f32", "- 8 2 64 77,4 layout=ragged strided=1"}) {
    expect_right_every_way(line);
  }
}

TEST(Cases, H9_NothingBeforeTheWindowIsAddressed) {
  for (const char* dtype : {"bf16", "f32"}) {
    CaseData data(parse_case(std::string("- 8 2 64 20k,20003,1k,1030,7 window=1024 page=16 dtype=") + dtype));
    const Problem p = data.problem();
    ASSERT_EQ(seq_first_token(p, 1), 20003 - 1 - 1024);
    const Reference reference = compute_reference(p);
    with_unused_slots(p, [&](const Problem& changed, std::int32_t entry) {
      for (std::size_t way = 0; way < ways().size(); ++way) {
        const Options options = with_isa(options_of(ways()[way]), way);
        decoded_bits(data, changed, options);
        EXPECT_TRUE(is_right(changed, reference)) << "entries " << entry << " " << text_of(options);
      }
    });
  }
}

}  // namespace
}  // namespace leanattn::testing
