// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries: shapes and layouts (docs/cases.md).
#include <sys/mman.h>

#include <algorithm>
#include <numeric>

#include "decoding.h"
#include "inputs.h"
#include "src/cpu/tile.h"

namespace leanattn::testing {
namespace {

TEST(Cases, S1_Groups) {
  for (const char* heads : {"5 1", "6 1", "7 1", "28 4", "12 2", "16 1", "20 4", "64 1"}) {
    for (const char* shape : {" 64 200,17,1 dtype=bf16", " 128 200,17,1 dtype=f16", " 64 90,130 q_len=3 dtype=f32", " 128 77 q_len=2x1"}) {
      CaseData data(parse_case(std::string("- ") + heads + shape));
      const Problem p = data.problem();
      const Reference reference = compute_reference(p);
      for (std::size_t way = 0; way < ways().size(); ++way) {
        const Options options = with_isa(options_of(ways()[way]), way);
        EXPECT_TRUE(is_right(data, options, reference));
        for (int head = 0; head < p.q_heads; ++head) {
          const Comparison comparison = compare(p, of_head(reference, p.q_heads, head));
          EXPECT_TRUE(comparison.ok()) << "q_head " << head << " " << to_string(data.spec());
          EXPECT_EQ(comparison.rows, total_q(p));
        }
      }
    }
  }
}

// Around every border of a tile, alone and in one batch.
TEST(Cases, S2_EveryLengthEveryPolicyEverySplit) {
  constexpr int kLengths = 2 * cpu::kMaxTileTokens + 1;
  std::string all;
  for (int len = 1; len <= kLengths; ++len) all += (len > 1 ? "," : "") + std::to_string(len);
  std::size_t isa = 0;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    CaseData data(parse_case("- 2 1 32 " + all + " dtype=" + dtype));
    const Problem whole = data.problem();
    const Reference reference = compute_reference(whole);
    expect_right_every_way(data, reference);
    std::vector<Way> cuts = {
        {Policy::kFa2}, {Policy::kLean, 0, HeadOrder::kAuto, false, 4}, {Policy::kLean, 0, HeadOrder::kAlong, true, 9}};
    for (int splits = 1; splits <= 10; ++splits) cuts.push_back({Policy::kFlashDecoding, splits, HeadOrder::kAuto, splits % 3 == 0, 2});
    for (const Way& cut : cuts) {
      EXPECT_TRUE(is_right(data, with_isa(options_of(cut), isa++), reference));
      for (int seq = 0; seq < whole.batch; ++seq) {
        Part alone(whole, seq, seq + 1);
        const std::int64_t row = seq_q_begin(whole, seq) * whole.q_heads;
        std::fill_n(static_cast<std::byte*>(alone.problem.o.data), 2 * 32 * dtype_bytes(whole.q_dtype), std::byte{0xff});
        decode_alone(alone.problem, with_isa(options_of(cut), isa + static_cast<std::size_t>(seq)));
        Reference one = compute_reference(alone.problem, {.kv_heads_per_seq = 0, .threads = 1});
        EXPECT_TRUE(is_right(alone.problem, one)) << "length " << seq + 1 << " row " << row << " " << text_of(options_of(cut));
      }
    }
  }
}

// --- Caches that hold K and V side by side ---

// A small paged float32 problem whose cache is one buffer; K and V are views into it.
struct OneCache {
  OneCache(std::int64_t elements, std::int64_t k_first, std::int64_t v_first, std::int64_t page_stride, std::int64_t token_stride)
      : cache(static_cast<std::size_t>(elements), std::nanf("")) {
    std::iota(table.begin(), table.end(), 0);
    for (std::size_t i = table.size() - 1; i > 0; --i) std::swap(table[i], table[input_hash(8, Input::kBlockTable, i) % (i + 1)]);
    p.batch = 2, p.q_heads = 6, p.kv_heads = kKvHeads, p.head_dim = kDim;
    p.kv_layout = KvLayout::kPaged;
    p.page_size = kPage, p.num_pages = kPages, p.max_pages = kPages / 2;
    p.block_table = table.data();
    p.kv_lens = lens.data();
    p.q = {q.data(), 6 * kDim, 6 * kDim, kDim};
    p.o = {o.data(), 6 * kDim, 6 * kDim, kDim};
    p.lse = lse.data();
    p.k = {cache.data() + k_first, page_stride, token_stride, kDim};
    p.v = {cache.data() + v_first, page_stride, token_stride, kDim};
    fill_normal(q.data(), DType::kFloat32, 0, static_cast<std::int64_t>(q.size()), 8, Input::kQ);
    for (int seq = 0; seq < 2; ++seq) {
      for (int token = 0; token < lens[static_cast<std::size_t>(seq)]; ++token) {
        for (int head = 0; head < kKvHeads; ++head) {
          for (int i = 0; i < kDim; ++i) {
            const auto index = static_cast<std::uint64_t>(((seq * 1000 + token) * kKvHeads + head) * kDim + i);
            set_kv(p, p.k, seq, token, head, i, input_normal(8, Input::kK, index));
            set_kv(p, p.v, seq, token, head, i, input_normal(8, Input::kV, index));
          }
        }
      }
    }
  }
  static constexpr int kKvHeads = 2, kDim = 64, kPage = 8, kPages = 40;
  std::vector<float> cache, q = std::vector<float>(2 * 6 * kDim), o = q, lse = std::vector<float>(12);
  std::vector<std::int32_t> table = std::vector<std::int32_t>(kPages), lens = {157, 61};
  Problem p;
};

TEST(Cases, S3_InterleavedCacheAndLayerInsidePage) {
  constexpr std::int64_t kRow = OneCache::kKvHeads * OneCache::kDim, kPage = OneCache::kPage, kPages = OneCache::kPages, kLayers = 3;
  Bits bits[3];
  // [pages, 2, page, kv_heads, d] · [pages, page, 2, layers, kv_heads, d], layer 1 · [pages, layers, 2, page, kv_heads, d], layer 2
  OneCache unbound(kPages * 2 * kPage * kRow, 0, kPage * kRow, 2 * kPage * kRow, kRow);
  OneCache inside_token(kPages * kPage * 2 * kLayers * kRow, kRow, (kLayers + 1) * kRow, kPage * 2 * kLayers * kRow, 2 * kLayers * kRow);
  OneCache inside_page(kPages * kLayers * 2 * kPage * kRow, 4 * kPage * kRow, 5 * kPage * kRow, kLayers * 2 * kPage * kRow, kRow);
  OneCache* const caches[] = {&unbound, &inside_token, &inside_page};
  for (std::size_t way = 0; way < ways().size(); ++way) {
    for (int i = 0; i < 3; ++i) {
      const Problem& p = caches[i]->p;
      std::fill(caches[i]->o.begin(), caches[i]->o.end(), std::nanf(""));
      decode_alone(p, with_isa(options_of(ways()[way]), way));
      EXPECT_TRUE(is_right(p, compute_reference(p))) << "cache " << i << " " << text_of(options_of(ways()[way]));
      bits[i] = output_bits(p);
    }
    EXPECT_EQ(bits[0], bits[1]);
    EXPECT_EQ(bits[0], bits[2]);
  }
  for (const char* line : {"- 8 2 64 300,5 page=16 interleaved=1", "- 8 2 64 300,5 page=16 strided=1 dtype=f32",
                           "- 8 2 64 300,5 page=16 strided=1 interleaved=1 dtype=f16 head_dim_v=96"}) {
    expect_right_every_way(line);
  }
}

// --- Far addresses ---

// Address space of which only the pages that are written take memory.
struct FarMemory {
  explicit FarMemory(std::int64_t wanted_bytes) : bytes(static_cast<std::size_t>(wanted_bytes)) {
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~FarMemory() {
    if (data != MAP_FAILED) munmap(data, bytes);
  }
  FarMemory(const FarMemory&) = delete;
  std::size_t bytes;
  void* data;
};

void expect_right_far(Problem p, DType dtype, std::int64_t elements, int kv_heads) {
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  FarMemory memory(2 * elements * element_bytes);
  if (memory.data == MAP_FAILED) GTEST_SKIP() << "no " << memory.bytes << " bytes of address space to be had";
  const int heads = 2 * kv_heads, dim = 64;
  p.q_heads = heads, p.kv_heads = kv_heads, p.head_dim = dim;
  p.q_dtype = p.kv_dtype = dtype;
  p.k.data = memory.data;
  p.v.data = static_cast<std::byte*>(memory.data) + elements * element_bytes;
  std::vector<std::byte> q(static_cast<std::size_t>(p.batch * heads * dim * element_bytes)), o(q.size());
  std::vector<float> lse(static_cast<std::size_t>(p.batch * heads));
  fill_normal(q.data(), dtype, 0, p.batch * heads * dim, 4, Input::kQ);
  p.q = {q.data(), heads * dim, heads * dim, dim};
  p.o = {o.data(), heads * dim, heads * dim, dim};
  p.lse = lse.data();
  std::int64_t farthest = 0;
  std::uint64_t index = 0;
  for (int seq = 0; seq < p.batch; ++seq) {
    for (int token = 0; token < seq_kv_len(p, seq); ++token) {
      for (int head = 0; head < kv_heads; ++head) {
        farthest = std::max(farthest, kv_row_offset(p, p.k, seq, token, head));
        for (int i = 0; i < dim; ++i, ++index) {
          set_kv(p, p.k, seq, token, head, i, input_normal(4, Input::kK, index));
          set_kv(p, p.v, seq, token, head, i, input_normal(4, Input::kV, index));
        }
      }
    }
  }
  EXPECT_GT(farthest, std::int64_t{1} << 32);
  ASSERT_LT(farthest + dim, elements);
  const Reference reference = compute_reference(p);
  for (std::size_t way = 0; way < ways().size(); ++way) {
    std::fill(o.begin(), o.end(), std::byte{0xff});
    decode_alone(p, with_isa(options_of(ways()[way]), way));
    EXPECT_TRUE(is_right(p, reference)) << text_of(options_of(ways()[way]));
  }
}

TEST(Cases, S4_PageIdsBehind2To32Elements) {
  // Pages of 16 tokens, a mebi-element apart: id 2,048 lies at 2^31, id 4,096 at 2^32.
  constexpr std::int64_t kPageStride = 1 << 20;
  const std::vector<std::int32_t> table = {4099, 3, 2047, 2048, 4096, 2049, 4095, 0, 1, -1};
  const std::vector<std::int32_t> lens = {75, 33};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    Problem p;
    p.batch = 2;
    p.kv_layout = KvLayout::kPaged;
    p.page_size = 16, p.num_pages = 4100, p.max_pages = 5;
    p.block_table = table.data();
    p.kv_lens = lens.data();
    p.k = p.v = {nullptr, kPageStride, 2 * 64, 64};
    expect_right_far(p, dtype, 4100 * kPageStride, 2);
  }
}

TEST(Cases, S4_StridesBehind2To32Elements) {
  const std::vector<std::int32_t> lens = {40, 21, 3};
  const std::vector<std::int32_t> starts = {0, 19, 40, 43};
  constexpr std::int64_t kFar = 3LL << 30;
  Problem p;
  p.batch = 3;
  p.kv_capacity = 40;
  p.kv_lens = lens.data();
  p.k = p.v = {nullptr, kFar / 2 * 2, 2 * 64, 64};  // sequences
  expect_right_far(p, DType::kFloat16, 2 * kFar + (1 << 20), 2);
  p.k = p.v = {nullptr, 40 * 64, 64, kFar};  // heads
  expect_right_far(p, DType::kBFloat16, 3 * kFar + (1 << 20), 3);
  p.kv_layout = KvLayout::kRagged;  // tokens
  p.kv_lens = nullptr;
  p.cu_seqlens_kv = starts.data();
  p.k = p.v = {nullptr, 0, kFar / 8, 64};
  expect_right_far(p, DType::kBFloat16, 43 * kFar / 8 + (1 << 20), 2);
}

// --- Dims and pages ---

TEST(Cases, S5_HeadDims) {
  for (const int dim : {32, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256}) {
    for (const char* dtype : {"bf16", "f16", "f32"}) {
      const std::string line = "- 6 2 " + std::to_string(dim) + " 130,17 dtype=" + dtype;
      expect_right(line + " workers=2");
      expect_right(line + " head_dim_v=64 q_len=3 workers=3");
      expect_right(line + " head_dim_v=256 page=5 workers=1");
    }
  }
  expect_right_every_way("- 8 2 128 300,40 head_dim_v=64");
  CaseData data(parse_case("1 2 1 64 20"));
  for (const auto& [k, v] : {std::pair{100, 0}, std::pair{64, 100}, std::pair{24, 0}, std::pair{264, 0}}) {
    Problem p = data.problem();
    p.head_dim = k, p.head_dim_v = v;
    try {
      validate(p);
      ADD_FAILURE() << "head_dim " << k << " head_dim_v " << v;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(" " + std::to_string(v == 100 ? v : k)), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("supported are 32 to 256 in steps of 8"), std::string::npos) << error.what();
    }
  }
}

TEST(Cases, S6_PageSizes) {
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    const std::string line = std::string("- 8 2 64 1001,257,16,1,0,999 dtype=") + dtype;
    CaseData contiguous(parse_case(line + " layout=contiguous"));
    for (const int page : {1, 3, 8, 16, 64, 128, 256, 1000}) {
      CaseData paged(parse_case(line + " page=" + std::to_string(page)));
      if (page == 1 || page == 1000) expect_right_every_way(paged, compute_reference(paged.problem()));
      for (std::size_t way = 0; way < ways().size(); ++way) {
        Options options = with_isa(options_of(ways()[way]), way);
        // The default number of splits comes from the room of a sequence, which is not that of a padded table.
        if (options.policy == Policy::kFlashDecoding && options.splits == 0) options.splits = 5;
        EXPECT_EQ(decoded_bits(paged, options), decoded_bits(contiguous, options)) << "page " << page << " " << text_of(options);
      }
    }
  }
}

// --- Batches ---

TEST(Cases, S7_Batch1To50) {
  for (const char* line : {"50 40 8 64 512", "50 40 8 32 1k dtype=f32"}) {
    CaseData data(parse_case(line));
    Problem p = data.problem();
    Reference reference = compute_reference(p, {.kv_heads_per_seq = 2, .threads = 0});
    pool_lengths(p, reference);
    for (int batch = 1; batch <= 50; batch += batch < 6 || !short_run() ? 1 : 11) {
      p.batch = batch;
      const Options options = with_isa(options_of(ways()[static_cast<std::size_t>(batch) % ways().size()]), 0);
      const Bits bits = decoded_bits(data, p, options);
      EXPECT_TRUE(is_right(p, reference)) << "batch " << batch << " " << text_of(options);
      for (const std::uint32_t word : bits) ASSERT_FALSE(std::isnan(std::bit_cast<float>(word)));
      if (batch < 50) {
        EXPECT_TRUE(std::isnan(data.o_at(batch * 40, 0)));
      }
    }
  }
}

void expect_right_pooled(const std::string& line) {
  CaseData data(parse_case(line));
  Reference reference = compute_reference(data.problem());
  pool_lengths(data.problem(), reference);
  expect_right_every_way(data, reference);
}

TEST(Cases, S8_ThousandsOfShortSequences) {
  expect_right_pooled("1000 4 2 64 1");
  expect_right_pooled("- 4 2 32 1x500,0x20,2x300,5x180 page=4 dtype=f32");
  expect_right_pooled("4096 4 1 32 1 dtype=f16");
  expect_right_pooled("- 2 1 64 1x2000,3x2000,7x96 page=2 causal=0");
}

// Pages shared by every sequence keep it small; the longest meets each page many times.
TEST(Cases, S9_OneOfAMillionAmongShort) {
  const int longest = short_run() ? 1 << 17 : 1 << 20;
  constexpr int kPage = 16, kPages = 509, kHeads = 8, kDim = 32;
  std::vector<std::int32_t> lens(64, 64);
  lens[21] = longest;
  std::vector<std::int32_t> table(static_cast<std::size_t>(64) * static_cast<std::size_t>(longest / kPage), -1);
  for (std::size_t seq = 0; seq < 64; ++seq) {
    for (int slot = 0; slot < lens[seq] / kPage; ++slot) {
      const std::size_t at = seq * static_cast<std::size_t>(longest / kPage) + static_cast<std::size_t>(slot);
      table[at] = static_cast<std::int32_t>(input_hash(9, Input::kBlockTable, at) % kPages);
    }
  }
  const std::int64_t cache = std::int64_t{kPages} * kPage * kHeads * kDim;
  std::vector<float> k(static_cast<std::size_t>(cache)), v(k.size()), q(64 * kHeads * kDim), o(q.size()), lse(64 * kHeads);
  fill_normal(k.data(), DType::kFloat32, 0, cache, 9, Input::kK);
  fill_normal(v.data(), DType::kFloat32, 0, cache, 9, Input::kV);
  fill_normal(q.data(), DType::kFloat32, 0, 64 * kHeads * kDim, 9, Input::kQ);
  Problem p;
  p.batch = 64, p.q_heads = kHeads, p.kv_heads = kHeads, p.head_dim = kDim;
  p.kv_layout = KvLayout::kPaged;
  p.page_size = kPage, p.num_pages = kPages, p.max_pages = longest / kPage;
  p.block_table = table.data();
  p.kv_lens = lens.data();
  p.q = {q.data(), kHeads * kDim, kHeads * kDim, kDim};
  p.o = {o.data(), kHeads * kDim, kHeads * kDim, kDim};
  p.k = {k.data(), kPage * kHeads * kDim, kHeads * kDim, kDim};
  p.v = {v.data(), kPage * kHeads * kDim, kHeads * kDim, kDim};
  p.lse = lse.data();
  const Reference reference = compute_reference(p, {.kv_heads_per_seq = 2, .threads = 0});
  for (const Way& way : {Way{Policy::kLean, 0, HeadOrder::kAuto, false, 1}, Way{Policy::kLean, 0, HeadOrder::kAlong, true, 7},
                         Way{Policy::kLean, 0, HeadOrder::kBeside, false, 5}, Way{Policy::kFlashDecoding, 0, HeadOrder::kAuto, false, 5}}) {
    std::fill(o.begin(), o.end(), std::nanf(""));
    decode_alone(p, options_of(way));
    EXPECT_TRUE(is_right(p, reference)) << text_of(options_of(way));
    EXPECT_TRUE(std::none_of(o.begin(), o.end(), [](float x) { return std::isnan(x); }));
  }
}

}  // namespace
}  // namespace leanattn::testing
