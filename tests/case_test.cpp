// SPDX-License-Identifier: Apache-2.0
// The case language: texts and back, and a sentence for everything that is no case.
#include "tools/case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>
#include <sstream>

#include "tools/golden.h"

namespace leanattn::tools {
namespace {

TEST(Case, ReadsEveryKey) {
  const Case c = parse_case(
      "- 12 4 96 64kx2,3,1m dtype=f16 head_dim_v=64 page=8 interleaved=1 strided=1 q_len=4,0x2,2 causal=0 window=1k tree=4 scale=0.25 "
      "softcap=30 alibi=1 sink=-1.5 lse=2 policy=flashdecoding:7 order=beside invariant=1 workers=3 seed=9 spread=2.5");
  EXPECT_EQ(c.kv_lens, (std::vector<std::int32_t>{65536, 65536, 3, 1048576}));
  EXPECT_EQ(c.q_heads, 12);
  EXPECT_EQ(c.kv_heads, 4);
  EXPECT_EQ(c.head_dim, 96);
  EXPECT_EQ(c.head_dim_v, 64);
  EXPECT_EQ(c.dtype, DType::kFloat16);
  EXPECT_EQ(c.layout, CaseLayout::kPaged);
  EXPECT_EQ(c.page_size, 8);
  EXPECT_TRUE(c.interleaved && c.strided && c.alibi && c.batch_invariant);
  EXPECT_EQ(c.q_lens, (std::vector<std::int32_t>{4, 0, 0, 2}));
  EXPECT_FALSE(c.causal);
  EXPECT_EQ(c.window_left, 1024);
  EXPECT_EQ(c.tree_tokens, 4);
  EXPECT_EQ(c.scale, 0.25f);
  EXPECT_EQ(c.softcap, 30.0f);
  EXPECT_EQ(c.sink, CaseSink::kValue);
  EXPECT_EQ(c.sink_value, -1.5f);
  EXPECT_EQ(c.lse, CaseLse::kTwo);
  EXPECT_EQ(c.policy, Policy::kFlashDecoding);
  EXPECT_EQ(c.splits, 7);
  EXPECT_EQ(c.head_order, HeadOrder::kBeside);
  EXPECT_EQ(c.workers, 3);
  EXPECT_EQ(c.seed, 9u);
  EXPECT_EQ(c.spread, 2.5f);
  EXPECT_EQ(c.total_q(), 6);
  EXPECT_EQ(c.total_kv(), 2 * 65536 + 3 + 1048576);
}

TEST(Case, Defaults) {
  EXPECT_EQ(parse_case("2 8 2 64 5").layout, CaseLayout::kContiguous);
  EXPECT_EQ(parse_case("- 8 2 64 5,5").layout, CaseLayout::kRagged);
  EXPECT_EQ(parse_case("2 8 2 64 5 page=7").layout, CaseLayout::kPaged);
  EXPECT_EQ(parse_case("2 8 2 64 5 layout=paged").page_size, 16);
  EXPECT_EQ(parse_case("2 8 2 64 5 tree=6").q_len, 6);
  EXPECT_EQ(parse_case("2 8 2 64 5").dtype, DType::kBFloat16);
  EXPECT_EQ(parse_case("1 8 2 64 5 q_len=3").q_lens.size(), 0u);
  EXPECT_EQ(parse_case("1 8 2 64 5 q_len=3x1").q_lens.size(), 1u);
  EXPECT_EQ(parse_case("2 8 2 64 5 sink=1").sink, CaseSink::kVaried);
  EXPECT_EQ(parse_case("2 8 2 64 5 sink=1.0").sink, CaseSink::kValue);
  EXPECT_EQ(parse_case("0 8 2 64 5").batch(), 0);
}

TEST(Case, ShortestText) {
  const std::pair<const char*, const char*> texts[] = {
      {"16 32 8 128 4096", "16 32 8 128 4k"},
      {"  1\t8 1 128 1048576 ", "1 8 1 128 1m"},
      {"- 8 2 64 2048,2048,2048,1", "- 8 2 64 2kx3,1"},
      {"- 8 2 64 7,7", "2 8 2 64 7 layout=ragged"},
      {"- 8 2 64 7,7 layout=contiguous dtype=bf16 causal=1 lse=e", "2 8 2 64 7"},
      {"2 8 2 64 7 layout=paged", "2 8 2 64 7 page=16"},
      {"2 8 2 64 7 q_len=4 tree=4 sink=1e0", "2 8 2 64 7 tree=4 sink=1.0"},
      {"2 8 2 64 7 policy=flashdecoding sink=-inf", "2 8 2 64 7 sink=-inf policy=flashdecoding"},
  };
  for (const auto& [text, expected] : texts) EXPECT_EQ(to_string(parse_case(text)), expected);
}

TEST(Case, GoldenTextsReturn) {
  std::set<std::string> names;
  for (const GoldenCase& golden : golden_cases()) {
    EXPECT_TRUE(names.insert(golden.name).second) << golden.name;
    const Case c = parse_case(golden.text);
    EXPECT_EQ(parse_case(to_string(c)), c) << golden.name << ": " << to_string(c);
  }
  EXPECT_GE(names.size(), 60u);
}

Case random_case(std::mt19937_64& random) {
  const auto pick = [&](std::int64_t low, std::int64_t high) { return std::uniform_int_distribution<std::int64_t>(low, high)(random); };
  const auto real = [&] { return std::uniform_real_distribution<float>(1e-3f, 100.0f)(random); };
  Case c;
  const std::int64_t batch = pick(0, 5);
  for (std::int64_t i = 0; i < batch; ++i) c.kv_lens.push_back(static_cast<std::int32_t>(pick(0, 1) ? pick(0, 3) * 1024 : pick(0, 9000)));
  c.kv_heads = static_cast<std::int32_t>(pick(1, 9));
  c.q_heads = static_cast<std::int32_t>(c.kv_heads * pick(1, 9));
  c.head_dim = static_cast<std::int32_t>(8 * pick(4, 32));
  c.head_dim_v = pick(0, 1) ? c.head_dim : static_cast<std::int32_t>(8 * pick(4, 32));
  c.dtype = static_cast<DType>(pick(0, 2));
  c.layout = static_cast<CaseLayout>(pick(0, 3));
  if (c.layout == CaseLayout::kPaged) c.page_size = static_cast<std::int32_t>(pick(1, 300));
  c.interleaved = pick(0, 1);
  c.strided = pick(0, 1);
  if (batch > 0 && pick(0, 2) == 0) {
    for (std::int64_t i = 0; i < batch; ++i) c.q_lens.push_back(static_cast<std::int32_t>(pick(0, 3)));
    c.q_lens[0] = std::max(c.q_lens[0], 1);
  } else {
    c.q_len = static_cast<std::int32_t>(pick(1, 9));
  }
  if (pick(0, 1)) c.tree_tokens = c.max_q_len();
  c.causal = pick(0, 1);
  c.window_left = static_cast<std::int32_t>(pick(-1, 500));
  if (pick(0, 1)) c.scale = real();
  if (pick(0, 1)) c.softcap = real();
  c.alibi = pick(0, 1);
  c.sink = static_cast<CaseSink>(pick(0, 2));
  if (c.sink == CaseSink::kValue) c.sink_value = pick(0, 1) ? 1.0f : pick(0, 1) ? -INFINITY : -real();
  c.lse = static_cast<CaseLse>(pick(0, 2));
  c.policy = static_cast<Policy>(pick(0, 2));
  if (c.policy == Policy::kFlashDecoding) c.splits = static_cast<std::int32_t>(pick(0, 9));
  c.head_order = static_cast<HeadOrder>(pick(0, 2));
  c.batch_invariant = pick(0, 1);
  c.check_data = pick(0, 1);
  c.workers = static_cast<std::int32_t>(pick(0, 9));
  c.seed = static_cast<std::uint64_t>(pick(0, INT64_MAX));
  if (pick(0, 1)) c.spread = real();
  return c;
}

TEST(Case, RandomCasesReturn) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 5000; ++i) {
    const Case c = random_case(random);
    ASSERT_EQ(parse_case(to_string(c)), c) << to_string(c);
  }
}

struct Rejection {
  const char* text;
  std::vector<const char*> says;
};

TEST(Case, NamesWhatItRejectsAndWhatIsAllowed) {
  const Rejection rejections[] = {
      {"", {"batch q_heads kv_heads head_dim length"}},
      {"1 8 1 128", {"1 8 1 128", "length"}},
      {"x 8 1 128 4k", {"batch \"x\"", "whole number"}},
      {"-1 8 1 128 4k", {"batch \"-1\""}},
      {"1 0 1 128 4k", {"q_heads \"0\"", "1 to"}},
      {"1 8 1.0 128 4k", {"kv_heads \"1.0\""}},
      {"1 8 1 99999999999999999999 4k", {"head_dim \"99999999999999999999\""}},
      {"1 8 1 128 4K", {"length \"4K\""}},
      {"1 8 1 128 k", {"length \"k\""}},
      {"1 8 1 128 2048m", {"length \"2048m\"", "2147483647"}},
      {"1 8 1 128 9223372036854775807k", {"length \"9223372036854775807k\""}},
      {"1 8 1 128 1,2", {"length \"1,2\""}},
      {"- 8 1 128 1,,2", {"length \"\""}},
      {"- 8 1 128 1,2,", {"length \"\""}},
      {"- 8 1 128 1x0", {"\"1x0\"", "2kx15"}},
      {"- 8 1 128 1x2x3", {"\"1x2x3\""}},
      {"- 8 1 128 1x9999999999", {"\"1x9999999999\"", "sequences"}},
      {"- 8 1 128 2047mx2", {"ragged"}},
      {"1 8 1 128 4k f16", {"\"f16\"", "key=value"}},
      {"1 8 1 128 4k colour=red", {"key \"colour\"", "dtype"}},
      {"1 8 1 128 4k dtype=f64", {"dtype \"f64\"", "bf16, f16, f32"}},
      {"1 8 1 128 4k dtype=", {"dtype \"\""}},
      {"1 8 1 128 4k dtype=f16 dtype=f16", {"key \"dtype\"", "once"}},
      {"1 8 1 128 4k layout=flat", {"layout \"flat\"", "head_major"}},
      {"1 8 1 128 4k layout=ragged page=8", {"layout \"ragged\"", "paged"}},
      {"1 8 1 128 4k page=0", {"page \"0\""}},
      {"1 8 1 128 4k causal=yes", {"causal \"yes\"", "0 or 1"}},
      {"2 8 1 128 4k q_len=1,2,3", {"q_len \"1,2,3\"", "2 of them"}},
      {"2 8 1 128 4k q_len=0", {"q_len \"0\"", "list"}},
      {"2 8 1 128 4k q_len=3 tree=4", {"tree \"4\"", "3"}},
      {"1 8 1 128 4k window=-1", {"window \"-1\""}},
      {"1 8 1 128 4k softcap=0", {"softcap \"0\"", "above 0"}},
      {"1 8 1 128 4k scale=nan", {"scale \"nan\""}},
      {"1 8 1 128 4k scale=1e999", {"scale \"1e999\""}},
      {"1 8 1 128 4k scale=1f", {"scale \"1f\""}},
      {"1 8 1 128 4k sink=deep", {"sink \"deep\"", "number"}},
      {"1 8 1 128 4k lse=10", {"lse \"10\"", "e, 2, none"}},
      {"1 8 1 128 4k policy=lean:3", {"policy \"lean:3\"", "flashdecoding:N"}},
      {"1 8 1 128 4k policy=flashdecoding:", {"policy \"flashdecoding:\""}},
      {"1 8 1 128 4k policy=flashdecoding:0", {"policy \"flashdecoding:0\""}},
      {"1 8 1 128 4k order=across", {"order \"across\"", "along, beside"}},
      {"1 8 1 128 4k workers=0", {"workers \"0\""}},
      {"1 8 1 128 4k seed=-2", {"seed \"-2\""}},
  };
  for (const Rejection& rejection : rejections) {
    try {
      parse_case(rejection.text);
      ADD_FAILURE() << "accepted: " << rejection.text;
    } catch (const CaseError& error) {
      for (const char* words : rejection.says) {
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << rejection.text << ": " << error.what() << " lacks " << words;
      }
    }
  }
}

TEST(Case, SplitsEndWhereTheLibraryEnds) {
  EXPECT_EQ(parse_case("1 8 1 128 4k policy=flashdecoding:1024").splits, 1024);
  try {
    parse_case("1 8 1 128 4k policy=flashdecoding:1025");
    FAIL();
  } catch (const CaseError& error) {
    EXPECT_NE(std::string(error.what()).find("N from 1 to 1024"), std::string::npos) << error.what();
  }
}

TEST(Case, TheTableOfKeysHasEveryKeyOnce) {
  std::istringstream table(case_keys_text());
  std::set<std::string> keys;
  std::string line;
  std::getline(table, line);  // header
  while (std::getline(table, line)) {
    std::string key;
    std::istringstream(line) >> key;
    EXPECT_TRUE(keys.insert(key).second) << key;
    try {
      parse_case("1 8 1 128 4k " + key + "=?");
      ADD_FAILURE() << "accepted ? for " << key;
    } catch (const CaseError& error) {  // the value is wrong, not the key
      EXPECT_EQ(std::string(error.what()).rfind(key + " \"?\"", 0), 0u) << error.what();
    }
  }
  const std::set<std::string> all{"dtype",  "layout",    "page",    "interleaved", "strided", "head_dim_v", "q_len", "causal",
                                  "window", "tree",      "scale",   "softcap",     "alibi",   "sink",       "lse",   "policy",
                                  "order",  "invariant", "checked", "workers",     "seed",    "spread"};
  EXPECT_EQ(keys, all);
}

std::vector<Case> bench_cases(const std::string& file) { return read_case_file(LEANATTN_SOURCE_DIR "/bench/" + file); }

TEST(Case, FilesHaveCommentsAndLineNumbers) {
  std::istringstream good("# a table\n\n1 8 1 128 4k # short\n   \n- 8 1 128 1,2\n");
  EXPECT_EQ(read_cases(good, "table").size(), 2u);
  std::istringstream bad("# a table\n1 8 1 128 4k\n1 8 1 128 4k page=x\n");
  try {
    read_cases(bad, "table");
    FAIL();
  } catch (const CaseError& error) {
    EXPECT_EQ(std::string(error.what()).rfind("table:3: page \"x\"", 0), 0u) << error.what();
  }
  EXPECT_THROW(read_case_file("/no/such/file"), CaseError);
  for (const char* table :
       {"table.txt", "cpu_table.txt", "gpu_features.txt", "gpu_limits.txt", "gpu_more.txt", "gpu_odd.txt", "gpu_small.txt"}) {
    EXPECT_GT(bench_cases(table).size(), 10u) << table;
  }
  EXPECT_GE(bench_cases("gpu_timeline.txt").size(), 4u);
}

// What bench/gpu_more.txt says of itself: thirty cases that are not in the table, of these kinds.
TEST(Case, MoreCasesOfTheBenchAreOfEveryKind) {
  const std::vector<Case> table = bench_cases("table.txt"), more = bench_cases("gpu_more.txt");
  std::set<std::string> distinct;
  int odd_groups = 0, odd_lengths = 0, batches = 0, mixed = 0;
  for (const Case& c : more) {
    distinct.insert(to_string(c));
    EXPECT_EQ(std::count(table.begin(), table.end(), c), 0) << to_string(c);
    const int group = c.q_heads / c.kv_heads;
    const bool equal = std::adjacent_find(c.kv_lens.begin(), c.kv_lens.end(), std::not_equal_to<>()) == c.kv_lens.end();
    odd_groups += (group & (group - 1)) != 0;
    odd_lengths += equal && c.kv_lens[0] % 16 != 0;
    batches += equal && c.batch() >= 2 && c.batch() <= 128;
    mixed += !equal;
  }
  EXPECT_GE(more.size(), 30u);
  EXPECT_EQ(distinct.size(), more.size());
  EXPECT_GE(odd_groups, 8);
  EXPECT_GE(odd_lengths, 5);
  EXPECT_GE(batches, 10);
  EXPECT_GE(mixed, 6);
}

}  // namespace
}  // namespace leanattn::tools
