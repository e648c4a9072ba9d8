// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries, on the GPU: shapes, numerics, several query tokens (docs/cases.md).
#include <map>

#include "cuda_decoding.h"
#include "inputs.h"
#include "sharded.h"

namespace leanattn::testing {
namespace {

// --- Shapes ---

TEST_F(CudaCases, S1_Groups) {
  for (const char* heads : {"5 1", "6 1", "7 1", "28 4", "12 2", "16 1", "20 4", "64 1"}) {
    for (const char* shape : {" 64 200,17,1 dtype=bf16", " 128 200,17,1 dtype=f16", " 64 90,130 q_len=3 dtype=f16", " 128 77 q_len=2x1"}) {
      DeviceCase own(std::string("- ") + heads + shape);
      for (std::size_t path = 0; path < device_paths().size(); ++path) {
        for (const DeviceWay& way : device_ways()) {
          if (enough_failures()) return;
          EXPECT_TRUE(own.judge(device_options(way, path)));
          for (int head = 0; head < own.host.q_heads; ++head) {
            const Comparison comparison = compare(own.host, of_head(own.reference, own.host.q_heads, head));
            EXPECT_EQ(comparison.rows, total_q(own.host));
            EXPECT_LE(comparison.o.ratio, 2.0) << "q_head " << head << " " << to_string(own.data.spec());  // judged with its seq above
          }
        }
      }
    }
  }
}

// Around every border of a tile, in one batch and alone.
TEST_F(CudaCases, S2_EveryLengthEveryPolicyEverySplit) {
  constexpr int kLengths = 2 * 64 + 1;
  std::string all;
  for (int len = 1; len <= kLengths; ++len) all += (len > 1 ? "," : "") + std::to_string(len);
  std::vector<DeviceWay> ways = {
      {Policy::kLean, 0, 0}, {Policy::kLean, 0, 4}, {Policy::kFa2, 0, 0}, {Policy::kFa2, 0, 7}, {Policy::kFlashDecoding, 0, 0}};
  for (int splits = 1; splits <= 5; ++splits) ways.push_back({Policy::kFlashDecoding, splits, 0});
  for (const char* shape : {"2 1 64", "8 1 128"}) {
    for (const char* dtype : {"bf16", "f16"}) {
      DeviceCase together(std::string("- ") + shape + " " + all + " dtype=" + dtype);
      pool_lengths(together.host, together.reference);
      together.expect_right(ways);
      for (int len = 1; len <= kLengths; ++len) {
        DeviceCase alone(std::string("1 ") + shape + " " + std::to_string(len) + " dtype=" + dtype);
        alone.expect_right(ways);
        for (const std::uint32_t word : output_bits(alone.host)) ASSERT_FALSE(std::isnan(std::bit_cast<float>(word))) << len;
      }
    }
  }
}

TEST_F(CudaCases, S5_HeadDims) {
  for (const int dim : {32, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256}) {
    for (const char* dtype : {"bf16", "f16"}) {
      const std::string line = "- 6 2 " + std::to_string(dim) + " 130,17 dtype=" + dtype;
      expect_right_on_device(line);
      expect_right_on_device(line + " head_dim_v=64 q_len=3");
      expect_right_on_device(line + " head_dim_v=256 page=5");
    }
  }
  expect_right_on_device("- 32 8 192 1000,77 head_dim_v=128 page=64");
  expect_right_on_device("- 16 1 64 1000,77 head_dim_v=128 q_len=5");
  for (const auto& [k, v] : {std::pair{100, 0}, std::pair{64, 100}, std::pair{24, 0}, std::pair{264, 0}}) {
    Problem p = DeviceCase("1 2 1 64 20").device.problem;
    p.head_dim = k, p.head_dim_v = v;
    EXPECT_NE(device_refusal(p).find(" " + std::to_string(v == 100 ? v : k) + ": supported are 32 to 256 in steps of 8"),
              std::string::npos);
  }
}

TEST_F(CudaCases, S7_Batch1To50Long) {
  for (const char* line : {"50 40 8 64 512", "50 40 8 128 1k dtype=f16"}) {
    CaseData data(parse_case(line));
    const Problem all = data.problem();
    Reference reference = compute_reference(all, {.kv_heads_per_seq = 2, .threads = 0});
    pool_lengths(all, reference);
    for (int batch = 1; batch <= 50; ++batch) {
      const Part part(all, 0, batch);
      DeviceProblem device(part.problem);
      for (std::size_t path = 0; path < device_paths().size(); ++path) {
        for (const DeviceWay& way : {device_ways()[0], device_ways()[static_cast<std::size_t>(batch) % device_ways().size()]}) {
          if (enough_failures()) return;
          const Options options = device_options(way, path);
          EXPECT_TRUE(is_right(part.problem, device, options, reference)) << "batch " << batch;
          for (const std::uint32_t word : output_bits(part.problem)) ASSERT_FALSE(std::isnan(std::bit_cast<float>(word)));
        }
      }
    }
  }
}

TEST_F(CudaCases, S8_ThousandsOfShortSequences) {
  for (const char* line :
       {"1000 4 2 64 1", "1000 32 8 128 3", "- 4 2 64 1x500,0x20,2x300,5x180 page=4 dtype=f16", "4096 4 1 64 1 dtype=f16",
        "4096 8 1 128 2 page=16", "- 2 1 64 1x2000,3x2000,7x96 page=2 causal=0", "- 8 2 64 2x4000,0x95,3k"}) {
    DeviceCase own{std::string(line)};
    pool_lengths(own.host, own.reference);
    own.expect_right();
  }
}

TEST_F(CudaCases, S9_OneOfAMillionAmongShortLong) {
  DeviceCase own("- 16 8 128 64x21,1m,64x42 dtype=bf16", {.kv_heads_per_seq = 2, .threads = 0});
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : device_ways()) {
      if (enough_failures()) return;
      const bool slow = way.policy == Policy::kLean && way.workers > 0;  // gigabytes through one block
      if (slow && path > 0) continue;
      EXPECT_TRUE(is_right(own.host, own.device, device_options(way, path), own.reference));
      for (const std::uint32_t word : output_bits(own.host)) ASSERT_FALSE(std::isnan(std::bit_cast<float>(word)));
    }
  }
}

// The longest context there is, 2^31 − 1 tokens, over one page again and again: the last tile ends behind what an int counts. Every logit
// is 0 and every V a power of two, so that all sums are exact.
TEST_F(CudaCases, S9_LongestContextLong) {
  constexpr std::int32_t kLen = std::numeric_limits<std::int32_t>::max(), kPage = 4096;
  for (const char* shape : {"1 8 1 128 ", "1 8 1 64 "}) {
    CaseData data(parse_case(shape + std::to_string(kPage) + " layout=paged page=" + std::to_string(kPage)));
    Problem host = data.problem();
    for (int token = 0; token < kPage; ++token) {
      for (int i = 0; i < host.head_dim; ++i) {
        set_kv(host, host.k, 0, token, 0, i, 0.0f);
        set_kv(host, host.v, 0, token, 0, i, std::exp2(static_cast<float>(i % 5 - 2)));
      }
    }
    const std::vector<std::int32_t> table(std::size_t{kLen} / kPage + 1, host.block_table[0]);
    host.kv_lens = &kLen;
    host.block_table = table.data();
    host.max_pages = static_cast<std::int32_t>(table.size());
    host.block_table_stride = 0;
    DeviceProblem device(host);
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : {DeviceWay{Policy::kLean, 0, 0}, DeviceWay{Policy::kFlashDecoding, 0, 0}}) {
        const Options options = device_options(way, path);
        EXPECT_EQ(decode_on_device(device, options), "") << device_text_of(options);
        for (int row = 0; row < host.q_heads; ++row) {
          for (int i = 0; i < host.head_dim; ++i) ASSERT_EQ(data.o_at(row, i), std::exp2(static_cast<float>(i % 5 - 2))) << "dim " << i;
          EXPECT_NEAR(data.lse_at(row), std::log(double{kLen}), 1e-5) << shape << device_text_of(options);
        }
      }
    }
  }
}

// --- Numerics ---

TEST_F(CudaCases, N1_MergedShardsAreTheSinglePass) {
  for (const int shards : {2, 61}) {
    for (const LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        expect_sharded_is_whole(shards, base, dtype, [](const Problem& p, int shard) {
          const auto turn = static_cast<std::size_t>(shard);
          DeviceProblem device(p);
          EXPECT_EQ(decode_on_device(device, device_options(device_ways()[turn % device_ways().size()], turn)), "");
        });
      }
    }
  }
}

TEST_F(CudaCases, N2_SpreadOfTenThousand) {
  for (const char* dtype : {"bf16", "f16"}) {
    // float16 holds no query of 1e4 standard deviations.
    const std::string spread = std::string(dtype) == "f16" ? " scale=100 spread=12 dtype=" : " spread=10000 dtype=";
    expect_right_on_device("- 8 2 64 700,65,3" + spread + dtype);
    expect_right_on_device("- 8 2 128 700,65,3 q_len=3" + spread + dtype);
  }
}

TEST_F(CudaCases, N2_OneKeyDominatesAtTheVeryEnd) {
  for (const char* dtype : {"bf16", "f16"}) {
    CaseData data(parse_case(std::string("- 2 2 64 1500,257,64,2 dtype=") + dtype));
    const Problem p = data.problem();
    let_last_key_dominate(p);
    expect_right_on_device(p, compute_reference(p));
    ASSERT_NO_FATAL_FAILURE(expect_last_values(data));
  }
}

TEST_F(CudaCases, N2_AllKeysEqual) {
  for (const char* dtype : {"bf16", "f16"}) {
    CaseData data(parse_case(std::string("- 6 2 64 1025,300,1 dtype=") + dtype));
    const Problem p = data.problem();
    make_keys_equal(p);
    expect_right_on_device(p, compute_reference(p));
  }
}

// A NaN in a row's own query or in a key that it sees makes that row NaN and no other.
TEST_F(CudaCases, NanInSightMakesItsRowNan) {
  CaseData data(parse_case("- 4 2 64 200,130,65"));
  const Problem p = data.problem();
  const std::int64_t at = q_row_offset(p, p.q, 0, 0, 1);
  store_from_float(const_cast<void*>(p.q.data), p.q_dtype, at + 5, std::nanf(""));
  set_kv(p, p.k, 1, 77, 1, 3, std::nanf(""));
  Reference reference = compute_reference(p);
  const auto is_nan_row = [](int seq, int head) { return (seq == 0 && head == 1) || (seq == 1 && head >= 2); };
  for (int row = 0; row < 12; ++row) {
    if (is_nan_row(row / 4, row % 4)) reference.row[static_cast<std::size_t>(row)] = Reference::kNotComputed;
  }
  DeviceProblem device(p);
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : device_ways()) {
      if (enough_failures()) return;
      EXPECT_TRUE(is_right(p, device, device_options(way, path), reference));
      for (int row = 0; row < 12; ++row) {
        if (!is_nan_row(row / 4, row % 4)) continue;
        for (int i = 0; i < 64; ++i) ASSERT_TRUE(std::isnan(data.o_at(row, i))) << "row " << row << " dim " << i;
        ASSERT_TRUE(std::isnan(data.lse_at(row))) << "row " << row;
      }
    }
  }
}

// --- Several query tokens ---

TEST_F(CudaCases, Q1_SeveralQueryTokensAfterMuchContext) {
  const std::string context = short_run() ? "3k" : "31k";
  const Sample one_head{.kv_heads_per_seq = 1, .threads = 0};
  for (const int q_len : {2, 3, 4, 5, 8, 16}) {
    DeviceCase("1 8 2 128 " + context + " q_len=" + std::to_string(q_len), one_head).expect_right();
    expect_right_on_device("2 6 2 64 700 dtype=f16 q_len=" + std::to_string(q_len));
  }
  DeviceCase("- 4 2 64 " + context + ",500,9k,16,3 q_len=2,16,5,16,1 dtype=f16", one_head).expect_right();
  expect_right_on_device("- 8 2 64 900,500,100,16,3 q_len=2,16,5,16,1");
}

TEST_F(CudaCases, Q3_FewerKeysThanQueryTokens) {
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* more : {"", " page=4", " lse=2", " window=2", " page=4 sink=1", " tree=9", " alibi=1 softcap=20"}) {
      DeviceCase own(std::string("- 6 2 64 5,8,1,0,9,130 q_len=9 dtype=") + dtype + more);
      EXPECT_EQ(std::count(own.reference.row.begin(), own.reference.row.end(), Reference::kWithoutKeys), (4 + 1 + 8 + 9) * 6);
      own.expect_right();
      for (std::int64_t row = 0; row < own.data.rows(); ++row) {
        if (own.reference.row[static_cast<std::size_t>(row)] != Reference::kWithoutKeys) continue;
        for (int i = 0; i < 64; ++i) ASSERT_EQ(std::bit_cast<std::uint32_t>(own.data.o_at(row, i)), 0u) << "row " << row;
      }
    }
  }
}

// More rows than the largest row block, and every count of rows round its borders.
TEST_F(CudaCases, Q3_RowBlocks) {
  for (const char* more : {"8 1 64 300,5 q_len=16", "17 1 128 300,5 q_len=16", "128 2 64 130,1 q_len=9 dtype=f16", "66 2 64 130 q_len=1x1",
                           "65 1 256 70,0,5 q_len=3,1,2", "12 4 96 200,9 q_len=11,3 causal=0"}) {
    expect_right_on_device(std::string("- ") + more);
  }
}

TEST_F(CudaCases, Q4_RaggedQueriesWithNone) {
  const std::string context = short_run() ? "3k" : "30k";
  for (const char* more : {"", " dtype=f16 page=16", " dtype=f16 strided=1"}) {
    DeviceCase own("- 8 2 64 0,5," + context + ",9 q_len=0,0,7,1" + more, {.kv_heads_per_seq = 1, .threads = 0});
    ASSERT_EQ(own.data.rows(), 8 * 8);
    own.expect_right();
  }
  expect_right_on_device("- 8 2 64 700,0,5,0 q_len=0,0,0,3");
  expect_right_on_device("- 8 2 64 700,0,5 q_len=0,0,0");
}

}  // namespace
}  // namespace leanattn::testing
