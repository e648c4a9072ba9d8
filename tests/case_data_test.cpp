// SPDX-License-Identifier: Apache-2.0
// What CaseData promises: the right values where a row may look, NaN everywhere else, canaries that notice; and that the read floor reads
// those bytes and no others.
#include "tools/case_data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "inputs.h"
#include "numeric.h"
#include "problem_view.h"
#include "tools/floor.h"
#include "tools/golden.h"

namespace leanattn::tools {
namespace {

float stored(float value, DType dtype) {
  if (dtype == DType::kFloat16) return float_from_float16(float16_from_float(value));
  return dtype == DType::kBFloat16 ? float_from_bfloat16(bfloat16_from_float(value)) : value;
}

std::int64_t numbers_in(std::span<const std::byte> memory, DType dtype) {
  std::int64_t count = 0;
  const auto elements = static_cast<std::int64_t>(memory.size() / dtype_bytes(dtype));
  for (std::int64_t i = 0; i < elements; ++i) count += !std::isnan(load_as_float(memory.data(), dtype, i));
  return count;
}

// Every element of K and V that some row may look at has its value, and there are no other numbers in the memory: the rest is NaN.
void expect_values_and_poison(const Case& c) {
  CaseData data(c);
  const Problem p = data.problem();
  std::int64_t addressed = 0, before = 0;
  for (int seq = 0; seq < p.batch; ++seq) {
    const std::int64_t len = c.kv_lens[static_cast<std::size_t>(seq)];
    ASSERT_EQ(len, seq_kv_len(p, seq));
    for (std::int64_t token = seq_first_token(p, seq); token < len && seq_q_len(p, seq) > 0; ++token) {
      for (int head = 0; head < p.kv_heads; ++head) {
        const auto row = static_cast<std::uint64_t>((before + token) * p.kv_heads + head);
        for (const auto& [view, tensor, dim] : {std::tuple{&p.k, Input::kK, c.head_dim}, std::tuple{&p.v, Input::kV, c.head_dim_v}}) {
          const std::int64_t at = kv_row_offset(p, *view, seq, token, head);
          for (int i = 0; i < dim; i += 7) {
            const float right =
                stored(input_normal(c.seed, tensor, row * static_cast<std::uint64_t>(dim) + static_cast<std::uint64_t>(i)), c.dtype);
            ASSERT_EQ(load_as_float(view->data, c.dtype, at + i), right) << "seq " << seq << " token " << token << " head " << head;
          }
          addressed += dim;
        }
      }
    }
    before += len;
  }
  EXPECT_EQ(numbers_in(data.k_memory(), c.dtype) + numbers_in(data.v_memory(), c.dtype), addressed);
  EXPECT_EQ(data.kv_bytes(), addressed * static_cast<std::int64_t>(dtype_bytes(c.dtype)));
  EXPECT_GT(data.copy_bytes(), data.kv_bytes());  // there is poison
  std::int64_t floor_bytes = 0;
  for (const FloorBlock& piece : kv_pieces(p)) {
    floor_bytes += piece.bytes;
    const std::span<const std::byte> memory(piece.data, static_cast<std::size_t>(piece.bytes));
    EXPECT_EQ(numbers_in(memory, c.dtype) * static_cast<std::int64_t>(dtype_bytes(c.dtype)), piece.bytes);
  }
  EXPECT_EQ(floor_bytes, data.kv_bytes());
  EXPECT_EQ(ReadFloor(p, 3).bytes(), data.kv_bytes());
  EXPECT_TRUE(data.canary_fault().empty()) << data.canary_fault();
  EXPECT_NO_THROW(validate(p, data.options()));
  EXPECT_NO_THROW(check_data(p));
}

TEST(CaseData, ValuesAndPoisonOfTheGoldenCases) {
  for (const GoldenCase& golden : golden_cases()) {
    SCOPED_TRACE(golden.name);
    expect_values_and_poison(parse_case(golden.text));
  }
}

TEST(CaseData, PagesAreShuffledAndUnusedSlotsAbsurd) {
  const CaseData data(parse_case("- 4 2 32 1000,0,500 page=16 window=300 q_len=2"));
  const Problem p = data.problem();
  ASSERT_EQ(p.max_pages, 63 + 2);
  std::vector<std::int32_t> used, unused;
  const std::pair<int, int> in_use[] = {{(1000 - 2 - 300) / 16, 63}, {0, 0}, {(500 - 2 - 300) / 16, 32}};
  for (int seq = 0; seq < 3; ++seq) {
    for (int slot = 0; slot < p.max_pages; ++slot) {
      const bool live = slot >= in_use[seq].first && slot < in_use[seq].second;
      (live ? used : unused).push_back(p.block_table[seq * block_table_stride(p) + slot]);
    }
  }
  EXPECT_FALSE(std::is_sorted(used.begin(), used.end()));
  EXPECT_TRUE(std::all_of(used.begin(), used.end(), [&](int id) { return id >= 0 && id < p.num_pages; }));
  std::sort(used.begin(), used.end());
  EXPECT_EQ(std::adjacent_find(used.begin(), used.end()), used.end());
  EXPECT_LT(static_cast<int>(used.size()), p.num_pages);
  for (const int absurd : {-1, std::numeric_limits<std::int32_t>::max()}) EXPECT_NE(std::count(unused.begin(), unused.end(), absurd), 0);
  for (const int id : unused) EXPECT_FALSE(std::binary_search(used.begin(), used.end(), id)) << id;
}

TEST(CaseData, ValuesDoNotDependOnThreadsOrCopies) {
  const Case c = parse_case("- 8 2 64 700,33,129 dtype=f16 page=8 strided=1");
  const CaseData one(c, {.copies = 1, .huge_pages = false, .threads = 1});
  const CaseData many(c, {.copies = 3, .huge_pages = true, .threads = 5});
  for (int copy = 0; copy < many.copies(); ++copy) {
    ASSERT_EQ(one.k_memory().size(), many.k_memory(copy).size());
    EXPECT_EQ(std::memcmp(one.k_memory().data(), many.k_memory(copy).data(), one.k_memory().size()), 0);
    EXPECT_EQ(std::memcmp(one.v_memory().data(), many.v_memory(copy).data(), one.v_memory().size()), 0);
    EXPECT_EQ(static_cast<const std::byte*>(many.problem(copy).k.data) - many.k_memory(copy).data(),
              static_cast<const std::byte*>(one.problem().k.data) - one.k_memory().data());
  }
  EXPECT_NE(many.problem(0).k.data, many.problem(2).k.data);
}

TEST(CaseData, OutputsAreNaNAndCanariesNoticeEveryByteOutside) {
  for (const char* text : {"2 6 2 64 50 strided=1 q_len=3", "- 6 2 64 50,7 q_len=2,3 dtype=f32", "1 4 2 32 5"}) {
    SCOPED_TRACE(text);
    CaseData data(parse_case(text));
    const Problem p = data.problem();
    const std::span<std::byte> workspace = data.workspace(100);
    EXPECT_TRUE(std::all_of(workspace.begin(), workspace.end(), [](std::byte b) { return b == std::byte{0xff}; }));
    for (std::int64_t row = 0; row < data.rows(); ++row) {
      EXPECT_TRUE(std::isnan(data.lse_at(row)));
      for (int column = 0; column < p.head_dim_v; ++column) EXPECT_TRUE(std::isnan(data.o_at(row, column)));
    }
    auto* o = static_cast<std::byte*>(p.o.data);
    auto* lse = reinterpret_cast<std::byte*>(p.lse);
    const auto element = static_cast<std::int64_t>(dtype_bytes(p.q_dtype));
    const std::int64_t o_end =
        (q_row_offset(p, p.o, p.batch - 1, data.spec().seq_q_len(p.batch - 1) - 1, p.q_heads - 1) + p.head_dim_v) * element;
    std::vector<std::pair<std::byte*, const char*>> outside = {{o - 1, "o"},
                                                               {o + o_end, "o"},
                                                               {lse - 1, "lse"},
                                                               {lse + 4 * data.rows(), "lse"},
                                                               {workspace.data() - 1, "workspace"},
                                                               {workspace.data() + 100, "workspace"}};
    if (data.spec().strided) outside.push_back({o + p.head_dim_v * element, "o"});
    for (const auto& [byte, name] : outside) {
      *byte ^= std::byte{1};
      EXPECT_EQ(data.canary_fault().rfind(std::string(name) + ":", 0), 0u) << name << ": " << data.canary_fault();
      *byte ^= std::byte{1};
      EXPECT_TRUE(data.canary_fault().empty());
    }
    *o = std::byte{0};  // inside a row: no fault
    lse[0] = workspace[0] = std::byte{0};
    EXPECT_TRUE(data.canary_fault().empty());
    data.reset_outputs();
    EXPECT_EQ(*o, std::byte{0xff});
    EXPECT_EQ(workspace[0], std::byte{0xff});
  }
}

TEST(CaseData, TreeRowsSeeThemselvesAndTheirParents) {
  const CaseData data(parse_case("- 4 2 32 200,90 q_len=70,3 tree=70"));
  const Problem p = data.problem();
  ASSERT_EQ(tree_mask_words(p), 2);
  const auto sees = [&](int seq, int i, int j) { return (p.tree_mask[(seq_q_begin(p, seq) + i) * 2 + j / 64] >> (j % 64) & 1) != 0; };
  std::int64_t above = 0;
  for (int seq = 0; seq < 2; ++seq) {
    for (int i = 0; i < seq_q_len(p, seq); ++i) {
      EXPECT_TRUE(sees(seq, i, i));
      EXPECT_TRUE(sees(seq, i, 0));  // the root
      int parent = -1;
      for (int j = 0; j < i; ++j) parent = sees(seq, i, j) ? j : parent;
      for (int j = 0; j < parent; ++j) EXPECT_EQ(sees(seq, i, j), sees(seq, parent, j)) << i << " " << j;
      for (int j = i + 1; j < 128; ++j) above += sees(seq, i, j);
    }
  }
  EXPECT_GT(above, 0);  // bits that causal has to rule out
}

TEST(CaseData, SaysHowMuchMemoryIsMissing) {
  for (const char* text : {"1048576 65536 65536 65536 2047m", "- 1 1 64 2000m layout=paged page=2000m head_dim_v=65536",
                           "1 65536 1 65536 1 q_len=1024m dtype=f32"}) {
    try {
      const CaseData data(parse_case(text));
      ADD_FAILURE() << text;
    } catch (const OutOfMemory& error) {
      EXPECT_NE(std::string(error.what()).find(" bytes"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("available"), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(Buffer(std::numeric_limits<std::size_t>::max() - 4096), OutOfMemory);
}

// The digest changes with every single byte, under every variant: none is skipped.
TEST(Floor, ReadsEveryByte) {
  std::vector<std::byte> memory(3 * 16384 + 777);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(input_hash(5, Input::kLengths, i));
  const std::vector<FloorBlock> blocks = {{memory.data(), 16384},
                                          {memory.data() + 16384, 100},
                                          {memory.data() + 16484, 16284},
                                          {memory.data() + 32768, 16384},
                                          {memory.data() + 49152, 777}};
  for (const FloorVariant variant : floor_variants()) {
    const std::uint64_t digest = read_blocks(blocks.data(), blocks.size(), variant);
    for (std::size_t i = 0; i < memory.size(); i += i < 16000 || i > 49000 ? 7 : 131) {
      memory[i] ^= std::byte{1};
      ASSERT_NE(read_blocks(blocks.data(), blocks.size(), variant), digest) << variant_name(variant) << " byte " << i;
      memory[i] ^= std::byte{1};
    }
  }
}

TEST(Floor, OfOtherLanguages) {
  std::vector<std::byte> memory(1 << 20);
  const void* data[] = {memory.data(), memory.data() + (1 << 19)};
  const std::int64_t bytes[] = {1 << 19, 1 << 18};
  void* floor = leanattn_floor_new(data, bytes, 2, 1, 2, 0.001);
  ASSERT_NE(floor, nullptr);
  for (const int set : {0, 1}) EXPECT_GT(leanattn_floor_read(floor, set), 0.0);
  leanattn_floor_free(floor);
}

}  // namespace
}  // namespace leanattn::tools
