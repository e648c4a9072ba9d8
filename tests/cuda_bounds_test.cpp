// SPDX-License-Identifier: Apache-2.0
// The bounds of the CUDA backend: very long lines, very many sequences, addresses beyond the device's memory, workers that change from call
// to call. Right values are float64 over few rows or few pages (docs/cases.md).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "cuda_decoding.h"
#include "cuda_far_memory.h"
#include "cuda_graph.h"
#include "cuda_shared_cache.h"

namespace leanattn::testing {
namespace {

class CudaBounds : public CudaTest {};

constexpr int kTileTokens = 64;  // of every kernel variant

void expect_no_fault(SharedCache& cache, const std::vector<DeviceWay>& ways) {
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : ways) {
      const Options options = device_options(way, path);
      EXPECT_EQ(cache.fault(options), "") << device_text_of(options);
    }
  }
}

// --- Long lines ---

// Ten million tiles: 4,000 sequences of about 160 K tokens, beside some of one token and none.
TEST_F(CudaBounds, LineOfTenMillionTilesLong) {
  std::vector<std::int32_t> lens;
  std::int64_t tiles = 0;
  for (int seq = 0; seq < 4000; ++seq) {
    lens.push_back(seq % 97 == 0 ? seq % 2 : 160 * 1024 + 61 * (seq % 1001));
    tiles += (lens.back() + kTileTokens - 1) / kTileTokens;
  }
  ASSERT_GT(tiles, 10'000'000);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    SharedCache cache(lens, 512, 4, dtype);
    expect_no_fault(cache, {{Policy::kLean, 0, 0}, {Policy::kLean, 0, 67}, {Policy::kFa2, 0, 0}, {Policy::kFlashDecoding, 5, 0}});
  }
}

// Half of it in one sequence, whose neighbours are short.
TEST_F(CudaBounds, OneSequenceOfFiveMillionTilesLong) {
  std::vector<std::int32_t> lens(200, 100);
  lens[77] = 5'000'000 * kTileTokens + 13;
  SharedCache cache(lens, 4096, 8, DType::kFloat16);
  expect_no_fault(cache, {{Policy::kLean, 0, 0}, {Policy::kLean, 0, 100}});
}

// The same in one block: float32 sums of V that is 1 in the mean, where rounding towards 0 in every step would pull O down.
TEST_F(CudaBounds, FiveMillionTilesInOneBlockLong) {
  std::vector<std::int32_t> lens(200, 100);
  lens[77] = 5'000'000 * kTileTokens + 13;
  SharedCache cache(lens, 4096, 8, DType::kFloat16);
  expect_no_fault(cache, {{Policy::kFlashDecoding, 0, 0}, {Policy::kFlashDecoding, 1024, 0}});
  SharedCache rows_of_a_warpgroup({5'000'000 * kTileTokens + 13}, 4096, 40, DType::kBFloat16);
  expect_no_fault(rows_of_a_warpgroup, {{Policy::kLean, 0, 1}});
}

// --- Many sequences ---

TEST_F(CudaBounds, HundredThousandSequencesLong) {
  std::vector<std::int32_t> lens;
  for (int seq = 0; seq < 100'000; ++seq)
    lens.push_back(static_cast<std::int32_t>(input_hash(5, Input::kLengths, static_cast<std::uint64_t>(seq)) % 400));
  lens[0] = lens[99'999] = 0;
  lens[50'000] = 399;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    SharedCache cache(lens, 16, 8, dtype);
    expect_no_fault(cache, device_ways());
  }
}

// --- Far addresses ---

// Where a test's K and V rows lie in a range of `bytes`: strides, first value and page ids for the problem.
struct Place {
  std::size_t bytes = 0;
  std::int64_t values_first = 0;  // elements from the first key to the first value
  std::function<void(Problem&, std::vector<std::int32_t>& table)> spread;
};

void expect_right_at(const std::string& line, const Place& place) {
  const std::string why_not = FarMemory::why_not();
  if (!why_not.empty()) GTEST_SKIP() << why_not;
  const CaseData data(parse_case(line));
  const Problem host = data.problem();
  DeviceProblem device(host);
  Problem spread = host;
  std::vector<std::int32_t> table;
  if (host.block_table) table.assign(host.block_table, host.block_table + host.batch * block_table_stride(host));
  place.spread(spread, table);
  if (host.block_table) spread.block_table = table.data();

  struct Row {
    const std::byte* from;
    std::size_t at;  // byte of the range
  };
  std::vector<Row> rows;
  std::set<std::size_t> own;
  const std::size_t row_bytes = static_cast<std::size_t>(host.head_dim) * 2;
  for (int seq = 0; seq < host.batch; ++seq) {
    for (int token = 0; token < seq_kv_len(host, seq); ++token) {
      for (int head = 0; head < host.kv_heads; ++head) {
        const auto add = [&](const KvView& from, const KvView& to, std::int64_t first) {
          const auto at = static_cast<std::size_t>(first + kv_row_offset(spread, to, seq, token, head)) * 2;
          rows.push_back({static_cast<const std::byte*>(from.data) + kv_row_offset(host, from, seq, token, head) * 2, at});
          own.insert(at / FarMemory::kChunkBytes), own.insert((at + row_bytes - 1) / FarMemory::kChunkBytes);
        };
        add(host.k, spread.k, 0);
        add(host.v, spread.v, place.values_first);
      }
    }
  }
  ASSERT_LE(own.size() * FarMemory::kChunkBytes, std::size_t{10} << 30) << "device memory";
  std::size_t farthest = 0;
  for (const Row& row : rows) farthest = std::max(farthest, row.at);
  ASSERT_GT(farthest, std::size_t{100'000'000'000});
  ASSERT_LT(farthest, place.bytes);
  const FarMemory memory(place.bytes, own);
  for (const Row& row : rows)
    must(cudaMemcpy(memory.data() + row.at, row.from, row_bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");

  device.problem.k = spread.k, device.problem.v = spread.v;
  device.problem.k.data = memory.data();
  device.problem.v.data = memory.data() + place.values_first * 2;
  device.problem.num_pages = spread.num_pages;
  GuardedBuffer far_table(table.size() * 4, nullptr, kNanByte);
  far_table.upload(table.data());
  if (!table.empty()) device.problem.block_table = reinterpret_cast<const std::int32_t*>(far_table.data());
  const Reference reference = compute_reference(host);
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : device_ways()) EXPECT_TRUE(is_right(host, device, device_options(way, path), reference)) << line;
  }
}

constexpr std::size_t kRangeBytes = std::size_t{120} << 30;
constexpr std::int64_t kFarElements = std::int64_t{57} << 30;  // 114 GiB

TEST_F(CudaBounds, S4_PagesBeyondHundredGigabytesLong) {
  // Pages of 4 MB and some bytes, keys in the first half of a page, values in the second: id 28,000 lies at 117 GB. In units of what
  // divides all strides (KvRows::page_units) that is more than 32 bits hold, and more than 31.
  for (const std::int64_t more : {24, 16}) {
    const auto spread = [&](Problem& p, std::vector<std::int32_t>& table) {
      p.k.outer_stride = p.v.outer_stride = (std::int64_t{2} << 20) + more;
      p.num_pages = 30'000;
      int next = 0;
      for (int seq = 0; seq < p.batch; ++seq) {
        for (int slot = 0; slot * p.page_size < seq_kv_len(p, seq); ++slot)
          table[static_cast<std::size_t>(seq * block_table_stride(p) + slot)] = 28'000 - 3011 * next++;
      }
    };
    expect_right_at("- 4 2 64 75,33 page=16", {kRangeBytes, 1 << 20, spread});
    expect_right_at("- 8 2 128 75,33 page=16 dtype=f16 q_len=3", {kRangeBytes, 1 << 20, spread});
  }
}

TEST_F(CudaBounds, S4_StridesBeyondHundredGigabytesLong) {
  const auto sequences = [](Problem& p, std::vector<std::int32_t>&) { p.k.outer_stride = p.v.outer_stride = kFarElements / 2; };
  expect_right_at("- 4 2 64 40,21,3 layout=contiguous", {kRangeBytes, 1 << 20, sequences});
  const auto heads = [](Problem& p, std::vector<std::int32_t>&) { p.k = p.v = {nullptr, 43 * 64, 64, kFarElements / 2}; };
  expect_right_at("- 6 3 64 40,21,3 layout=contiguous dtype=f16", {kRangeBytes, 1 << 20, heads});
  const auto tokens = [](Problem& p, std::vector<std::int32_t>&) { p.k.token_stride = p.v.token_stride = kFarElements / 42; };
  expect_right_at("- 4 2 64 19,21,3 layout=ragged", {kRangeBytes, 1 << 20, tokens});
  // Values 114 GB behind the keys.
  const auto near = [](Problem&, std::vector<std::int32_t>&) {};
  expect_right_at("- 4 2 64 40,21,3 layout=contiguous", {kRangeBytes, kFarElements, near});
}

// --- Workers that change from call to call ---

// Calls queued behind each other without a wait, and captured into one graph, each with its own limit, policy and output, over one
// workspace.
TEST_F(CudaBounds, WorkersChangeWithEveryCall) {
  constexpr int kCalls = 60;
  for (const char* line : {"- 8 2 64 2000,33,1,0", "1 8 1 128 30000 dtype=f16", "40 8 8 128 200 page=16", "- 8 1 256 3000,1 q_len=5"}) {
    DeviceCase own{std::string(line)};
    const std::size_t o_bytes = static_cast<std::size_t>(span_of_rows(own.host, own.host.o, head_dim_v(own.host))) * 2;
    const std::size_t lse_bytes = static_cast<std::size_t>(total_q(own.host) * own.host.q_heads) * 4;
    const Stream stream;
    std::vector<Options> calls;
    for (int call = 0; call < kCalls; ++call) {
      const auto hash = input_hash(9, Input::kLengths, static_cast<std::uint64_t>(call));
      const int limits[] = {0, 1, 2, 5, 31, 66, 131, 1000};
      const Policy policies[] = {Policy::kLean, Policy::kLean, Policy::kFa2, Policy::kFlashDecoding};
      calls.push_back(device_options({policies[hash / 8 % 4], 0, limits[hash % 8]}, static_cast<std::size_t>(hash / 64), stream));
    }
    std::size_t most = 0;
    for (const Options& options : calls) most = std::max(most, workspace_bytes(own.device.problem, options));
    const DeviceWorkspace workspace(most, calls[0]);
    std::vector<GuardedBuffer> o, lse;
    for (int call = 0; call < kCalls; ++call) {
      o.emplace_back(o_bytes, own.host.o.data, kNanByte);
      lse.emplace_back(lse_bytes, own.host.lse, kNanByte);
    }
    const auto queue = [&](cudaStream_t) {
      for (std::size_t call = 0; call < calls.size(); ++call) {
        Problem p = own.device.problem;
        p.o.data = o[call].data();
        p.lse = reinterpret_cast<float*>(lse[call].data());
        decode(p, calls[call], workspace.span());
      }
    };
    for (const bool captured : {false, true}) {
      for (int call = 0; call < kCalls; ++call)
        o[static_cast<std::size_t>(call)].fill(kNanByte), lse[static_cast<std::size_t>(call)].fill(kNanByte);
      must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      if (captured) {
        const CapturedGraph graph(stream, queue);
        EXPECT_EQ(graph.nodes().size(), calls.size());
        graph.launch(stream);
        stream.wait();
      } else {
        queue(stream);
        stream.wait();
      }
      for (std::size_t call = 0; call < calls.size() && !enough_failures(); ++call) {
        const std::vector<std::byte> image = o[call].download(), lse_image = lse[call].download();
        Problem p = own.host;
        std::vector<float> host_lse(lse_bytes / 4);
        std::memcpy(host_lse.data(), lse_image.data(), lse_bytes);
        p.o.data = const_cast<std::byte*>(image.data());
        p.lse = host_lse.data();
        EXPECT_TRUE(is_right(p, own.reference))
            << "call " << call << (captured ? " of a graph " : " ") << line << " " << device_text_of(calls[call]);
        EXPECT_EQ(o[call].fault("o") + lse[call].fault("lse"), "") << device_text_of(calls[call]);
      }
    }
    EXPECT_EQ(workspace.fault(), "");
  }
}

}  // namespace
}  // namespace leanattn::testing
