// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries: numerics (docs/cases.md).
#include <algorithm>
#include <limits>

#include "decoding.h"
#include "inputs.h"
#include "partial.h"
#include "sharded.h"
#include "src/cpu/tile.h"

namespace leanattn::testing {
namespace {

TEST(Cases, N1_MergedShardsAreTheSinglePass) {
  for (const int shards : {2, 61}) {
    for (const LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        expect_sharded_is_whole(shards, base, dtype, [](const Problem& p, int shard) {
          decode_alone(p, options_of(ways()[static_cast<std::size_t>(shard) % ways().size()]));
        });
      }
    }
  }
}

TEST(Cases, N2_SpreadOfTenThousand) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    // float16 holds no query of 1e4 standard deviations.
    const std::string spread = std::string(dtype) == "f16" ? " scale=100 spread=12 dtype=" : " spread=10000 dtype=";
    expect_right_every_way("- 8 2 64 700,65,3" + spread + dtype);
    expect_right_every_way("- 8 2 64 700,65,3 q_len=3" + spread + dtype);
  }
}

TEST(Cases, N2_OneKeyDominatesAtTheVeryEnd) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    CaseData data(parse_case(std::string("- 2 2 64 1500,257,64,2 dtype=") + dtype));
    const Problem p = data.problem();
    let_last_key_dominate(p);
    expect_right_every_way(data, compute_reference(p));
    ASSERT_NO_FATAL_FAILURE(expect_last_values(data));
  }
}

TEST(Cases, N2_AllKeysEqual) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    CaseData data(parse_case(std::string("- 6 2 64 1025,300,1 dtype=") + dtype));
    const Problem p = data.problem();
    make_keys_equal(p);
    expect_right_every_way(data, compute_reference(p));
  }
}

TEST(Cases, N3_SinkLogits) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* sink : {" sink=-inf", " sink=0", " sink=10000", " sink=1"}) {
      for (const char* base : {"", " lse=2"}) {
        expect_right_every_way(std::string("- 6 2 64 500,33,1,0 q_len=2 dtype=") + dtype + sink + base);
      }
    }
    const std::string line = std::string("- 6 2 64 500,33,1,0 dtype=") + dtype;
    CaseData without(parse_case(line)), none(parse_case(line + " sink=-inf"));
    for (const Way& way : ways()) EXPECT_EQ(decoded_bits(without, options_of(way)), decoded_bits(none, options_of(way)));
  }
}

TEST(Cases, N4_SoftcapFarBeyond) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* cap :
         {" softcap=30 spread=300", " softcap=50 spread=1000", " softcap=30 spread=2 scale=100", " softcap=50 spread=30"}) {
      expect_right_every_way(std::string("- 8 2 64 700,65,3 q_len=2 dtype=") + dtype + cap);
    }
  }
}

// batch_invariant, every policy: the row's bits are those that it has alone.
TEST(Cases, N5_SameBitsAloneAndAmongOthers) {
  std::string lens;
  for (int i = 0; i < 65; ++i)
    lens += (i > 0 ? "," : "") + std::to_string(input_hash(2, Input::kLengths, static_cast<std::uint64_t>(i)) % 900);
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* layout : {" layout=contiguous", " page=16"}) {
      CaseData data(parse_case("- 4 2 64 " + lens + layout + " dtype=" + dtype));
      const Problem whole = data.problem();
      const bool every_isa = data.spec().dtype == DType::kBFloat16 && layout[1] == 'p';
      for (std::size_t isa = 0; isa < (every_isa ? isas().size() : 1); ++isa) {
        Bits alone;
        for (int seq = 0; seq < 65; ++seq) {
          Options options = with_isa(options_of({Policy::kLean, 0, HeadOrder::kAuto, true, 1}), isa);
          const Part part(whole, seq, seq + 1);
          const Bits bits = decoded_bits(data, part.problem, options);
          alone.insert(alone.end(), bits.begin(), bits.end());
        }
        const std::size_t seq_words = alone.size() / 65;
        for (std::size_t way = 0; way < ways().size(); ++way) {
          Options options = with_isa(options_of(ways()[way]), isa);
          options.batch_invariant = true;
          for (const int others : {1, 2, 7, 31, 64}) {
            const int begin = static_cast<int>(way * 5) % (65 - others);
            const Part part(whole, begin, begin + others + 1);
            const auto first = alone.begin() + static_cast<std::ptrdiff_t>(begin * seq_words);
            const Bits expected(first, first + static_cast<std::ptrdiff_t>((others + 1) * seq_words));
            EXPECT_EQ(decoded_bits(data, part.problem, options), expected) << others << " others, " << text_of(options);
          }
        }
      }
    }
  }
}

// A row that sees no key, with a sink: in a seq of any number of tiles, in one stretch or in many.
TEST(Cases, N7_SinkWithoutKeys) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* sink : {"-5", "-104", "-10000", "88", "10000"}) {
      for (const char* base : {"", " lse=2"}) {
        CaseData data(parse_case(std::string("- 4 2 64 130,0,1 q_len=200 dtype=") + dtype + " sink=" + sink + base));
        const Reference reference = compute_reference(data.problem(), {.kv_heads_per_seq = 0, .threads = 0});
        for (std::size_t way = 0; way < ways().size(); ++way) {
          const Options options = with_isa(options_of(ways()[way]), way);
          EXPECT_TRUE(is_right(data, options, reference));
          ASSERT_NO_FATAL_FAILURE(expect_sinks_alone(data, reference, sink, (70 + 200 + 199) * 4, text_of(options)));
        }
      }
    }
  }
}

// Keys whose capped logit is nearly −cap: one padded key more, at −cap or at 0, would show.
TEST(Cases, N8_SoftcapOfPaddedKeys) {
  constexpr int kTile = cpu::kMaxTileTokens;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* layout : {" layout=contiguous", " page=16", " page=48", " layout=head_major"}) {
      const std::string lens = "17,33,49," + std::to_string(kTile + 1) + "," + std::to_string(2 * kTile + 1) + ",1,2";
      CaseData data(parse_case("- 2 2 64 " + lens + " causal=0 softcap=30 dtype=" + dtype + layout));
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
      expect_right_every_way(data, reference);
    }
  }
}

}  // namespace
}  // namespace leanattn::testing
