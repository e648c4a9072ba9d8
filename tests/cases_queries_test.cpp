// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries: several query tokens (docs/cases.md).
#include "decoding.h"

namespace leanattn::testing {
namespace {

TEST(Cases, Q1_SeveralQueryTokensAfterLongContext) {
  const std::string context = short_run() ? "3k" : "31k";
  for (const int q_len : {2, 3, 4, 5, 8, 16}) {
    expect_right("1 4 2 64 " + context + " workers=3 q_len=" + std::to_string(q_len), {.kv_heads_per_seq = 1, .threads = 0});
    expect_right_every_way("2 6 2 64 700 dtype=f32 q_len=" + std::to_string(q_len));
  }
  expect_right("- 4 2 64 " + context + ",500,9k,16,3 q_len=2,16,5,16,1 dtype=f32 workers=4", {.kv_heads_per_seq = 1, .threads = 0});
  expect_right_every_way("- 8 2 64 900,500,100,16,3 q_len=2,16,5,16,1 dtype=f16");
}

TEST(Cases, Q2_TreeMasks) {
  const std::string context = short_run() ? "1k" : "8k";
  for (const char* tree : {" tree=5", " tree=64"}) {
    expect_right("1 4 1 64 " + context + tree + " workers=3");
    expect_right("1 4 1 64 " + context + tree + " window=100 dtype=f32 workers=2");
    expect_right_every_way(std::string("- 8 2 64 300,64,70 window=40 page=16 dtype=f16") + tree);
    expect_right_every_way(std::string("- 4 2 64 300,64,70 causal=0 dtype=f32") + tree);
  }
}

TEST(Cases, Q3_FewerKeysThanQueryTokens) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* more : {"", " window=2", " page=4 sink=1", " tree=9", " alibi=1 softcap=20"}) {
      CaseData data(parse_case(std::string("- 6 2 64 5,8,1,0,9,130 q_len=9 dtype=") + dtype + more));
      const Reference reference = compute_reference(data.problem());
      std::int64_t empty = 0;
      for (const std::uint8_t row : reference.row) empty += row == Reference::kWithoutKeys;
      EXPECT_EQ(empty, (4 + 1 + 8 + 9) * 6);
      expect_right_every_way(data, reference);
      for (std::int64_t row = 0; row < data.rows(); ++row) {
        if (reference.row[static_cast<std::size_t>(row)] != Reference::kWithoutKeys) continue;
        for (int i = 0; i < 64; ++i) ASSERT_EQ(std::bit_cast<std::uint32_t>(data.o_at(row, i)), 0u) << "row " << row;
      }
    }
  }
}

TEST(Cases, Q4_RaggedQueriesWithNone) {
  const std::string context = short_run() ? "3k" : "30k";
  for (const char* more : {"", " dtype=f32 page=16", " dtype=f16 strided=1"}) {
    CaseData data(parse_case("- 8 2 64 0,5," + context + ",9 q_len=0,0,7,1" + more));
    ASSERT_EQ(data.rows(), 8 * 8);
    expect_right_every_way(data, compute_reference(data.problem(), {.kv_heads_per_seq = 1, .threads = 0}));
  }
  expect_right_every_way("- 8 2 64 700,0,5,0 q_len=0,0,0,3");
  expect_right_every_way("- 8 2 64 700,0,5 q_len=0,0,0");
}

}  // namespace
}  // namespace leanattn::testing
