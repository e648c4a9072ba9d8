// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries, on the GPU: what lies round the data, caches and addresses (docs/cases.md).
#include <array>
#include <map>

#include "cuda_decoding.h"
#include "inputs.h"
#include "partial.h"
#include "respaced.h"

namespace leanattn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The bits of a call do not depend on what no row may look at.
void expect_blind_to_poison(const std::string& line, const std::vector<float>& colours) {
  DeviceCase own(line);
  const Poison poison(own.data);
  ASSERT_GT(poison.size(), 0u);
  std::map<std::string, Bits> clean;
  for (const float colour : colours) {
    poison.paint(colour);
    own.device.copy_kv_again();
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : device_ways()) {
        if (enough_failures()) return;
        const Options options = device_options(way, path);
        EXPECT_TRUE(own.judge(options)) << "poison " << colour;
        const Bits bits = output_bits(own.host);
        const auto [first, is_new] = clean.emplace(device_text_of(options), bits);
        EXPECT_EQ(bits, first->second) << line << " poison " << colour << " " << device_text_of(options);
      }
    }
  }
}

TEST_F(CudaCases, H1_NanAndInfPastEveryLength) {
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* layout : {"layout=contiguous", "layout=head_major", "page=16", "page=7", "strided=1"}) {
      expect_blind_to_poison(std::string("- 8 2 64 32,64,96,48 dtype=") + dtype + " " + layout,
                             {0.0f, kNan, kInfinity, -kInfinity, 60000.0f});
    }
  }
  expect_blind_to_poison("- 8 2 128 1000,700,3,65 layout=contiguous", {0.0f, kNan, kInfinity});
}

TEST_F(CudaCases, H2_LengthsOneAndThree) {
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* layout : {"layout=contiguous", "page=4", "layout=head_major", "strided=1"}) {
      expect_blind_to_poison(std::string("- 4 2 64 1,3 dtype=") + dtype + " " + layout, {0.0f, kNan, kInfinity});
    }
  }
}

// The other sequence's values may all be NaN: only its own rows are.
TEST_F(CudaCases, H3_LastPageTailAndForeignPages) {
  for (const char* line : {"- 8 2 64 13,29 page=4", "- 8 2 128 13,29 page=4 interleaved=1", "- 8 2 64 13,29 page=4 dtype=f16"}) {
    CaseData data(parse_case(line));
    const Problem p = data.problem();
    paint_seq(p, 1, kNan);
    Reference reference = compute_reference(p);
    std::fill(reference.row.begin() + p.q_heads, reference.row.end(), Reference::kNotComputed);
    for (const float colour : {kNan, kInfinity}) {
      Poison(data).paint(colour);  // the last page's tail, and seq 1
      expect_right_on_device(p, reference);
    }
  }
}

// Sequences of length 0 that pad a batch for a graph: their rows are 0 and −inf by bits, the others right.
TEST_F(CudaCases, H4_GraphPaddedBatch) {
  for (const char* layout : {"layout=contiguous", "page=16", "layout=ragged"}) {
    DeviceCase own(std::string("- 8 2 64 700,33,1,0,0,0 ") + layout);
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : device_ways()) {
        if (enough_failures()) return;
        EXPECT_TRUE(own.judge(device_options(way, path)));
        const Bits padded = output_bits(own.host);
        for (std::size_t row = 3u * 8; row < 6u * 8; ++row) {
          for (std::size_t i = 0; i < 64; ++i) ASSERT_EQ(padded[row * 65 + i], 0u);
          ASSERT_EQ(padded[row * 65 + 64], std::bit_cast<std::uint32_t>(kMinusInfinity));
        }
      }
    }
  }
}

TEST_F(CudaCases, H5_LengthsZeroAndOneSideBySide) {
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* layout : {"layout=contiguous", "page=16", "page=1", "strided=1"}) {
      DeviceCase own(std::string("- 6 2 64 0,1,0,0,1 dtype=") + dtype + " " + layout);
      own.expect_right();
      const Problem& p = own.host;
      for (const int seq : {1, 4}) {
        for (int head = 0; head < 6; ++head) {
          double s = 0.0;
          for (int i = 0; i < 64; ++i) {  // one weight of 1: v itself
            ASSERT_EQ(own.data.o_at(seq * 6 + head, i), get_kv(p, p.v, seq, 0, head / 3, i));
            const double q = load_as_float(p.q.data, p.q_dtype, q_row_offset(p, p.q, seq, 0, head) + i);
            s += q * get_kv(p, p.k, seq, 0, head / 3, i) / 8.0;
          }
          EXPECT_NEAR(own.data.lse_at(seq * 6 + head), s, 2e-6 * (1.0 + std::abs(s)));
        }
      }
    }
  }
}

// Whatever is empty: the batch, every sequence, every query, a part of a merge (more splits than tiles).
TEST_F(CudaCases, H7_Empties) {
  for (const char* line : {"0 8 2 64 0", "5 8 2 64 0", "- 8 2 128 0,0,40,0 page=16", "- 8 2 64 0,0,0 page=16 dtype=f16",
                           "- 8 2 64 0,9 q_len=0,0", "- 4 2 64 0,0 layout=head_major q_len=5", "- 8 2 64 700,0,5,0 q_len=0,0,0,3"}) {
    expect_right_on_device(line);
  }
  DeviceCase own("- 8 2 64 700,65,64,1,0");
  for (const int splits : {3, 12, 64, 300, 1024})
    own.expect_right({{Policy::kFlashDecoding, splits, 0}, {Policy::kFlashDecoding, splits, 3}});
}

// A view out of a fused [tokens, q_heads + 2·kv_heads, d] buffer, each row of Q from the newest token.
TEST_F(CudaCases, H8_FusedQkvView) {
  constexpr int kBatch = 3, kTokens = 90, kQHeads = 8, kKvHeads = 2, kDim = 64;
  constexpr std::int64_t kToken = (kQHeads + 2 * kKvHeads) * kDim;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<std::uint16_t> fused(kBatch * kTokens * kToken), o(kBatch * kQHeads * kDim);
    fill_normal(fused.data(), dtype, 0, kBatch * kTokens * kToken, 5, Input::kK);
    std::vector<float> lse(kBatch * kQHeads);
    const std::array<std::int32_t, kBatch> lens{kTokens, kTokens - 25, kTokens};
    Problem p;
    p.batch = kBatch, p.q_heads = kQHeads, p.kv_heads = kKvHeads, p.head_dim = kDim;
    p.q_dtype = p.kv_dtype = dtype;
    p.kv_capacity = kTokens;
    p.kv_lens = lens.data();
    p.q = {fused.data() + (kTokens - 1) * kToken, kTokens * kToken, kToken, kDim};
    p.k = {fused.data() + kQHeads * kDim, kTokens * kToken, kToken, kDim};
    p.v = {fused.data() + (kQHeads + kKvHeads) * kDim, kTokens * kToken, kToken, kDim};
    p.o = {o.data(), kQHeads * kDim, kQHeads * kDim, kDim};
    p.lse = lse.data();
    expect_right_on_device(p, compute_reference(p));
  }
  for (const char* line : {"4 8 2 64 77 strided=1", "4 8 2 128 77 strided=1 q_len=3 dtype=f16", "- 8 2 64 77,4 layout=ragged strided=1"}) {
    expect_right_on_device(line);
  }
}

// --- Caches ---

TEST_F(CudaCases, S3_InterleavedCacheAndLayerInsidePage) {
  // [pages, 2, page, kv_heads, d]; [pages, layers, page, kv_heads, d]; both at once.
  for (const char* line : {"- 8 2 64 300,5 page=16 interleaved=1", "- 8 2 64 300,5 page=16 strided=1 dtype=f16",
                           "- 8 2 128 300,5 page=16 strided=1 interleaved=1 dtype=f16"}) {
    expect_right_on_device(line);
  }
  // [pages, page, 2, layers, kv_heads, d]: K and V of three layers inside each token. The bits are those of the plain cache.
  DeviceCase plain("- 6 2 64 157,61 page=8");
  const Gaps inside_token{0, 5 * 2 * 64, 0, 64};
  const Respaced spaced(plain.host, {}, inside_token, inside_token, {});
  DeviceProblem device(spaced.problem);
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : device_ways()) {
      if (enough_failures()) return;
      const Options options = device_options(way, path);
      EXPECT_EQ(device_bits(spaced.problem, device, options), plain.bits(options)) << device_text_of(options);
      EXPECT_TRUE(is_right(spaced.problem, plain.reference));
    }
  }
}

// Bits do not depend on alignment: rows at any element.
TEST_F(CudaCases, S3_OddStridesLeaveTheBits) {
  for (const char* line : {"- 8 2 64 700,65,1,0 layout=contiguous", "- 8 2 128 700,65,1,0 layout=head_major dtype=f16",
                           "- 6 1 96 500,3 page=7", "- 16 2 256 300,3 layout=ragged q_len=3", "- 6 2 80 500,3 head_dim_v=48"}) {
    DeviceCase plain{std::string(line)};
    for (const Gaps& gaps : {Gaps{1, 0, 0, 0}, Gaps{0, 0, 0, 1}, Gaps{2, 1, 3, 5}, Gaps{4, 4, 4, 4}, Gaps{8, 0, 0, 8}}) {
      const Respaced spaced(plain.host, gaps, gaps, gaps, gaps);
      DeviceProblem device(spaced.problem);
      for (std::size_t path = 0; path < device_paths().size(); ++path) {
        for (const DeviceWay& way : device_ways()) {
          if (enough_failures()) return;
          const Options options = device_options(way, path);
          EXPECT_EQ(device_bits(spaced.problem, device, options), plain.bits(options)) << line << " " << device_text_of(options);
        }
      }
    }
  }
}

TEST_F(CudaCases, S6_PageSizes) {
  for (const char* shape : {"- 8 2 64 1001,257,16,1,0,999 dtype=bf16", "- 8 2 128 1001,257,16,1,0,999 dtype=f16"}) {
    DeviceCase contiguous(std::string(shape) + " layout=contiguous");
    for (const int page : {1, 3, 8, 16, 64, 128, 256, 1000}) {
      DeviceCase paged(std::string(shape) + " page=" + std::to_string(page));
      for (std::size_t path = 0; path < device_paths().size(); ++path) {
        for (DeviceWay way : device_ways()) {
          if (enough_failures()) return;
          // The default number of splits comes from the room of a sequence, which is not that of a padded table.
          if (way.policy == Policy::kFlashDecoding && way.splits == 0) way.splits = 5;
          const Options options = device_options(way, path);
          EXPECT_TRUE(paged.judge(options));
          EXPECT_EQ(output_bits(paged.host), contiguous.bits(options)) << "page " << page << " " << device_text_of(options);
        }
      }
    }
  }
}

// --- Far addresses ---

constexpr std::int64_t kValuesFirst = 1 << 20;  // bytes from the first key to the first value

// K and V of a small problem spread over one large buffer of NaN, by the strides (and page ids) that far(p, table) sets. Skips where memory
// is short.
template <class Far>
void expect_right_far(const std::string& line, std::int64_t elements, Far far) {
  CaseData data(parse_case(line));
  const Problem host = data.problem();
  std::size_t free_bytes = 0, all_bytes = 0;
  must(cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo");
  const auto bytes = static_cast<std::size_t>(elements) * 2;
  if (free_bytes < bytes + (std::size_t{1} << 30)) {
    GTEST_SKIP() << bytes << " bytes of device memory wanted, " << free_bytes << " are free";
  }
  GuardedBuffer cache(bytes, nullptr, kNanByte);
  DeviceProblem device(host);
  Problem spread = host;  // addresses on the host, for offsets only
  std::vector<std::int32_t> table;
  far(spread, table);
  device.problem.k = spread.k, device.problem.v = spread.v;
  device.problem.k.data = cache.data();
  device.problem.v.data = cache.data() + kValuesFirst;
  GuardedBuffer far_table(table.size() * 4, nullptr, kNanByte);
  far_table.upload(table.data());
  if (!table.empty()) {
    device.problem.block_table = reinterpret_cast<const std::int32_t*>(far_table.data());
    device.problem.num_pages = spread.num_pages;
    spread.block_table = table.data();
  }
  std::int64_t farthest = 0;
  const std::size_t row_bytes = static_cast<std::size_t>(host.head_dim) * 2;
  for (int seq = 0; seq < host.batch; ++seq) {
    for (int token = 0; token < seq_kv_len(host, seq); ++token) {
      for (int head = 0; head < host.kv_heads; ++head) {
        const auto copy_row = [&](const KvView& from, const KvView& to, const void* base) {
          const std::int64_t at = kv_row_offset(spread, to, seq, token, head);
          farthest = std::max(farthest, at);
          auto* target = static_cast<std::byte*>(const_cast<void*>(base)) + at * 2;
          const auto* source = static_cast<const std::byte*>(from.data) + kv_row_offset(host, from, seq, token, head) * 2;
          must(cudaMemcpy(target, source, row_bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
        };
        copy_row(host.k, spread.k, device.problem.k.data);
        copy_row(host.v, spread.v, device.problem.v.data);
      }
    }
  }
  EXPECT_GT(farthest, std::int64_t{1} << 32);
  const Reference reference = compute_reference(host);
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : device_ways()) EXPECT_TRUE(is_right(host, device, device_options(way, path), reference)) << line;
  }
}

TEST_F(CudaCases, S4_PageIdsBehind2To32ElementsLong) {
  // Pages a mebi-element apart: id 2,048 lies at 2^31, id 4,096 at 2^32. Half of a page holds keys, half values.
  constexpr std::int64_t kPageStride = 1 << 20;
  for (const char* line : {"- 4 2 64 75,33 page=16", "- 4 2 128 75,33 page=16 dtype=f16"}) {
    expect_right_far(line, 4101 * kPageStride, [](Problem& p, std::vector<std::int32_t>& table) {
      p.k.outer_stride = p.v.outer_stride = kPageStride;
      const std::int32_t far[] = {4099, 3, 2047, 2048, 4096, 2049, 4095, 0};
      table.assign(p.block_table, p.block_table + p.batch * block_table_stride(p));
      std::size_t next = 0;
      for (int seq = 0; seq < p.batch; ++seq) {
        for (int slot = 0; slot < (seq_kv_len(p, seq) + 15) / 16; ++slot) {
          table[static_cast<std::size_t>(seq * block_table_stride(p) + slot)] = far[next++];
        }
      }
      p.num_pages = 4100;
    });
  }
}

TEST_F(CudaCases, S4_StridesBehind2To32ElementsLong) {
  constexpr std::int64_t kFar = 3LL << 30;  // elements
  expect_right_far("- 4 2 64 40,21,3 layout=contiguous", 2 * kFar + (1 << 20),
                   [](Problem& p, std::vector<std::int32_t>&) { p.k.outer_stride = p.v.outer_stride = kFar; });
  expect_right_far("- 6 3 64 40,21,3 layout=contiguous dtype=f16", 2 * kFar + (1 << 20), [](Problem& p, std::vector<std::int32_t>&) {
    p.k = p.v = {nullptr, 43 * 64, 64, kFar};
  });
  expect_right_far("- 4 2 64 19,21,3 layout=ragged", 43 * kFar / 8 + (1 << 20),
                   [](Problem& p, std::vector<std::int32_t>&) { p.k.token_stride = p.v.token_stride = kFar / 8; });
}

}  // namespace
}  // namespace leanattn::testing
