// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries, on the GPU: masks and logit rules (docs/cases.md).
#include <limits>

#include "cuda_decoding.h"
#include "inputs.h"
#include "partial.h"

namespace leanattn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// visit(options, bits) after a call with each of the ways.
template <class Visit>
void each_way(const Problem& host, DeviceProblem& device, Visit visit) {
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : device_ways()) {
      if (enough_failures()) return;
      const Options options = device_options(way, path);
      visit(options, device_bits(host, device, options));
    }
  }
}

// --- Rows without a key ---

TEST_F(CudaCases, H6_WindowOrMaskThatExcludesEveryKey) {
  for (const char* shape : {"- 4 2 64 500,70,40 q_len=70 tree=70 window=30", "- 8 1 128 500,70,40 q_len=70 tree=70 window=30 dtype=f16"}) {
    for (const char* causal : {"", " causal=0"}) {
      CaseData data(parse_case(std::string(shape) + causal));
      Problem p = data.problem();
      std::vector<std::uint64_t> mask(static_cast<std::size_t>(3 * 70 * 2));
      // Each seq sees its first new token alone: rows further on than the window see nothing.
      for (int row = 0; row < 3 * 70; ++row) mask[static_cast<std::size_t>(row) * 2] = 1;
      p.tree_mask = mask.data();
      const Reference reference = compute_reference(p);
      const auto empty = std::count(reference.row.begin(), reference.row.end(), Reference::kWithoutKeys);
      EXPECT_EQ(empty, (39 + 39 + 70) * p.q_heads);
      DeviceProblem device(p);
      each_way(p, device, [&](const Options& options, const Bits& bits) {
        EXPECT_TRUE(is_right(p, reference)) << device_text_of(options);
        EXPECT_EQ(std::count(bits.begin(), bits.end(), std::bit_cast<std::uint32_t>(kMinusInfinity)), empty) << device_text_of(options);
      });
    }
  }
}

// A row without a key is 0 whatever V holds for the rows that share its tile: in a seq of one part, and where a later part holds the NaN.
TEST_F(CudaCases, H6_EmptyRowsBesideRowsThatSeeNan) {
  for (const char* line :
       {"- 6 2 64 5,3,40 q_len=9", "- 6 2 128 5,3,40 q_len=9 dtype=f16", "1 2 1 64 700 q_len=702", "1 2 1 128 700 q_len=702"}) {
    CaseData data(parse_case(line));
    const Problem p = data.problem();
    for (int seq = 0; seq < p.batch; ++seq) {
      for (int i = 0; i < p.head_dim; ++i) set_kv(p, p.v, seq, seq_kv_len(p, seq) - 1, 0, i, i % 2 ? kNan : kInfinity);
    }
    DeviceProblem device(p);
    each_way(p, device, [&](const Options& options, const Bits&) {
      const int empty = (seq_q_len(p, 0) - seq_kv_len(p, 0)) * p.q_heads;
      for (int row = 0; row < empty; ++row) {  // the first tokens of seq 0 see no key
        for (int i = 0; i < p.head_dim; ++i) ASSERT_EQ(std::bit_cast<std::uint32_t>(data.o_at(row, i)), 0u) << device_text_of(options);
        ASSERT_EQ(data.lse_at(row), kMinusInfinity) << device_text_of(options);
      }
    });
  }
}

TEST_F(CudaCases, N7_SinkWithoutKeys) {
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* sink : {"-5", "-104", "-10000", "88", "10000"}) {
      for (const char* base : {"", " lse=2"}) {
        CaseData data(parse_case(std::string("- 4 2 64 130,0,1 q_len=200 dtype=") + dtype + " sink=" + sink + base));
        const Problem p = data.problem();
        const Reference reference = compute_reference(p, {.kv_heads_per_seq = 0, .threads = 0});
        DeviceProblem device(p);
        each_way(p, device, [&](const Options& options, const Bits&) {
          EXPECT_TRUE(is_right(p, reference)) << device_text_of(options) << " sink " << sink << base;
          expect_sinks_alone(data, reference, sink, (70 + 200 + 199) * 4, device_text_of(options));
        });
      }
    }
  }
}

// --- Windows ---

TEST_F(CudaCases, H9_NothingBeforeTheWindowIsAddressed) {
  for (const char* shape :
       {"- 8 2 64 20k,20003,1k,1030,7 window=1024 page=16", "- 8 2 128 20k,20003,1k,1030,7 window=1024 page=16 dtype=f16"}) {
    CaseData data(parse_case(shape));
    const Problem p = data.problem();
    ASSERT_EQ(seq_first_token(p, 1), 20003 - 1 - 1024);
    const Reference reference = compute_reference(p);
    with_unused_slots(p, [&](const Problem& changed, std::int32_t) { expect_right_on_device(changed, reference); });
  }
}

// Contexts of 2^31 − 1 tokens, of which a window reads the last: every token is the same row of memory. Nothing counts past an int.
TEST_F(CudaCases, WindowAtTheGreatestLength) {
  for (const char* shape : {"2 8 2 64 1 layout=contiguous window=300", "2 8 2 128 1 layout=contiguous window=300 dtype=f16",
                            "2 8 2 64 1 layout=contiguous window=70 q_len=3 alibi=1"}) {
    CaseData data(parse_case(shape));
    Problem p = data.problem();
    const std::vector<std::int32_t> lens = {std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::max() - 77};
    p.kv_lens = lens.data();
    p.kv_capacity = lens[0];
    p.k.token_stride = p.v.token_stride = 0;
    expect_right_on_device(p, compute_reference(p));
  }
}

TEST_F(CudaCases, WindowsRoundEveryBorderOfATile) {
  for (const char* shape : {"- 8 2 64 500,129,128,64,1,0", "- 6 1 128 500,129,128,64,1,0 dtype=f16 page=16", "- 4 4 96 300,65 q_len=3"}) {
    for (const int window : {0, 1, 15, 16, 62, 63, 64, 65, 126, 127, 128, 129, 498, 499, 500, std::numeric_limits<std::int32_t>::max()}) {
      expect_right_on_device(std::string(shape) + " window=" + std::to_string(window));
    }
  }
}

// --- Logit rules ---

TEST_F(CudaCases, N3_SinkLogits) {
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* sink : {" sink=-inf", " sink=0", " sink=10000", " sink=1"}) {
      for (const char* base : {"", " lse=2"}) {
        expect_right_on_device(std::string("- 6 2 64 500,33,1,0 q_len=2 dtype=") + dtype + sink + base);
        expect_right_on_device(std::string("- 8 1 128 1500,33,1,0 dtype=") + dtype + sink + base);
      }
    }
    const std::string line = std::string("- 6 2 64 500,33,1,0 dtype=") + dtype;
    DeviceCase without(line), none(line + " sink=-inf");
    for (const DeviceWay& way : device_ways()) EXPECT_EQ(without.bits(device_options(way, 0)), none.bits(device_options(way, 0)));
  }
}

TEST_F(CudaCases, N4_SoftcapFarBeyond) {
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* cap :
         {" softcap=30 spread=300", " softcap=50 spread=1000", " softcap=30 spread=2 scale=100", " softcap=50 spread=30"}) {
      expect_right_on_device(std::string("- 8 2 64 700,65,3 q_len=2 dtype=") + dtype + cap);
      expect_right_on_device(std::string("- 8 1 128 700,65,3 dtype=") + dtype + cap);
    }
  }
}

// Keys whose capped logit is nearly −cap: one padded key more, at −cap or at 0, would show.
TEST_F(CudaCases, N8_SoftcapOfPaddedKeys) {
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* layout : {" layout=contiguous", " page=16", " page=48", " layout=head_major"}) {
      CaseData data(parse_case(std::string("- 2 2 64 17,33,49,65,129,1,2 causal=0 softcap=30 dtype=") + dtype + layout));
      const Problem p = data.problem();
      for (int seq = 0; seq < p.batch; ++seq) {
        for (int token = 0; token < seq_kv_len(p, seq); ++token) {
          for (int head = 0; head < 2; ++head) {
            for (int i = 0; i < 64; ++i) {
              set_kv(p, p.k, seq, token, head, i, -20.0f * load_as_float(p.q.data, p.q_dtype, q_row_offset(p, p.q, seq, 0, head) + i));
            }
          }
        }
      }
      const Reference reference = compute_reference(p);
      EXPECT_NEAR(reference.lse[0], -30.0 + std::log(17.0), 0.1);
      expect_right_on_device(p, reference);
    }
  }
}

TEST_F(CudaCases, AlibiNearAndFar) {
  for (const char* more : {"", " causal=0 q_len=5", " q_len=4", " softcap=20 sink=1", " window=1000"}) {
    expect_right_on_device(std::string("- 12 4 64 3000,100,1 alibi=1") + more);
    expect_right_on_device(std::string("- 16 1 128 3000,100,1 alibi=1 dtype=f16") + more);
  }
}

// A NaN in a head's own slope or sink makes its rows NaN and no others.
TEST_F(CudaCases, NanInALogitRuleMakesItsHeadNan) {
  for (const char* line : {"- 4 2 64 700,65,1 alibi=1", "- 8 1 128 700,65,1 sink=1 dtype=f16"}) {
    CaseData data(parse_case(line));
    Problem p = data.problem();
    const float* const values = p.sinks ? p.sinks : p.alibi_slopes;
    std::vector<float> with_nan(values, values + p.q_heads);
    with_nan[1] = kNan;
    (p.sinks ? p.sinks : p.alibi_slopes) = with_nan.data();
    Reference reference = compute_reference(p);
    for (std::size_t row = 1; row < reference.row.size(); row += static_cast<std::size_t>(p.q_heads)) {
      reference.row[row] = Reference::kNotComputed;
    }
    DeviceProblem device(p);
    each_way(p, device, [&](const Options& options, const Bits&) {
      EXPECT_TRUE(is_right(p, reference)) << device_text_of(options);
      for (std::int64_t row = 1; row < data.rows(); row += p.q_heads) {
        for (int i = 0; i < p.head_dim; ++i) ASSERT_TRUE(std::isnan(data.o_at(row, i))) << "row " << row << " dim " << i;
        ASSERT_TRUE(std::isnan(data.lse_at(row))) << "row " << row;
      }
    });
  }
}

// --- Trees ---

TEST_F(CudaCases, Q2_TreeMasks) {
  const std::string context = short_run() ? "1k" : "8k";
  for (const char* tree : {" tree=5", " tree=64"}) {
    expect_right_on_device("1 4 1 64 " + context + tree);
    expect_right_on_device("1 8 1 128 " + context + tree + " window=100");
    expect_right_on_device(std::string("- 8 2 64 300,64,70 window=40 page=16 dtype=f16") + tree);
    expect_right_on_device(std::string("- 4 2 128 300,64,70 causal=0") + tree);
  }
  for (const char* line : {"- 8 2 128 300,64,0,70 q_len=7,64,1,0 tree=64", "- 4 2 64 500,90 q_len=70,3 tree=70 causal=0 dtype=f16",
                           "- 6 2 96 700,130 tree=130 window=90 softcap=30 alibi=1 sink=1"}) {
    expect_right_on_device(line);
  }
}

}  // namespace
}  // namespace leanattn::testing
