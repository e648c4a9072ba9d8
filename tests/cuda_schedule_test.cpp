// SPDX-License-Identifier: Apache-2.0
// The schedule and the merge on the GPU: the same integers as on the host for seeded random lines, and the laws of the merge bit for bit.
#include <bit>
#include <cmath>
#include <thread>

#include "cuda_decoding.h"
#include "schedule_device.h"
#include "schedule_digest.h"
#include "schedule_model.h"

namespace leanattn::testing {
namespace {

using schedule_test::DeviceMerge;
using schedule_test::OwnedLine;

class CudaSchedule : public CudaTest {};

int threads() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

unsigned long long digest_on_host(const Line& line) {
  const Cut cut = make_cut(line);
  unsigned long long sum = schedule_test::digest_of_line(line, cut);
  for (long long i = 0; i < schedule_test::digested_stretches(cut); ++i) {
    sum += schedule_test::digest_of_stretch(line, cut, schedule_test::digested_stretch(cut, i));
  }
  return sum;
}

// Lengths up to millions, batches up to thousands, and the prefix of units that the search needs there.
void long_line(std::uint64_t seed, OwnedLine& owned) {
  schedule_test::Random random(seed);
  Line line;
  line.num_seqs = random.one_in(4) ? random.between(100, 4096) : random.between(1, 40);
  owned.ragged = false;
  owned.lens.clear();
  owned.cu_q.clear();
  for (int seq = 0; seq < line.num_seqs; ++seq) owned.lens.push_back(random.between(0, random.one_in(20) ? 2000000000 : 9000));
  line.tile_tokens = 64;
  line.kv_heads = random.between(1, 64);
  line.group = random.between(1, 64);
  line.q_len = random.between(0, 16);
  line.rows_per_block = random.one_in(2) ? 64 : 16;
  line.head_order = random.one_in(2) ? HeadOrder::kBeside : HeadOrder::kAlong;
  line.policy = static_cast<Policy>(random.between(0, 4) % 3);
  line.splits = random.between(1, 1024);
  line.workers = random.between(1, 132);
  line.runs = random.one_in(2);
  line.fragment_cost_tiles = random.between(0, 8);
  if (random.one_in(3)) line.min_stretch_units = random.between(0, 12);
  if (random.one_in(3)) line.max_output_stretches = random.between(1, 132);
  owned.line = line;
  owned.point();
}

// Lines with their arrays in device memory, one array behind the other.
void expect_same_on_device(std::vector<OwnedLine>& owned, std::uint64_t first_seed, bool with_prefix) {
  std::vector<int> numbers;
  std::vector<long long> prefixes;
  std::vector<Line> lines;
  for (OwnedLine& one : owned) {
    one.point();
    numbers.insert(numbers.end(), one.lens.begin(), one.lens.end());
    numbers.insert(numbers.end(), one.cu_q.begin(), one.cu_q.end());
    lines.push_back(one.line);
    if (with_prefix) {
      const std::size_t at = prefixes.size();
      prefixes.resize(at + static_cast<std::size_t>(one.line.num_seqs) + 1);
      seq_unit_prefix(one.line, &prefixes[at]);
    }
  }
  GuardedBuffer device_numbers(numbers.size() * 4, nullptr, kNanByte), device_prefixes(prefixes.size() * 8, nullptr, kNanByte);
  GuardedBuffer device_lines(lines.size() * sizeof(Line), nullptr, kNanByte), digests(lines.size() * 8, nullptr, kCanaryByte);
  device_numbers.upload(numbers.data());
  const auto* next_number = reinterpret_cast<const int*>(device_numbers.data());
  auto* next_prefix = reinterpret_cast<long long*>(device_prefixes.data());
  std::size_t host_prefix = 0;
  for (std::size_t i = 0; i < owned.size(); ++i) {
    OwnedLine& one = owned[i];
    const int* lens = next_number;
    next_number += one.lens.size();
    lines[i].kv_lens = one.ragged ? nullptr : lens;
    lines[i].cu_seqlens_kv = one.ragged ? lens : nullptr;
    lines[i].cu_seqlens_q = one.cu_q.empty() ? nullptr : next_number;
    next_number += one.cu_q.size();
    if (with_prefix) {
      must(schedule_test::prefix_on_device(lines[i], next_prefix), "prefix_on_device");
      lines[i].seq_units = next_prefix;
      one.line.seq_units = &prefixes[host_prefix];
      next_prefix += one.line.num_seqs + 1;
      host_prefix += static_cast<std::size_t>(one.line.num_seqs) + 1;
    }
  }
  device_lines.upload(lines.data());
  must(schedule_test::digest_on_device(static_cast<int>(lines.size()), reinterpret_cast<const Line*>(device_lines.data()),
                                       reinterpret_cast<unsigned long long*>(digests.data())),
       "digest_on_device");
  std::vector<unsigned long long> host(lines.size());
  tools::parallel_pieces(lines.size(), 16, threads(), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) host[i] = digest_on_host(owned[i].line);
  });
  must(cudaDeviceSynchronize(), "the kernels");
  const std::vector<std::byte> found = digests.download();
  for (std::size_t i = 0; i < lines.size(); ++i) {
    unsigned long long device = 0;
    std::memcpy(&device, &found[i * 8], 8);
    ASSERT_EQ(device, host[i]) << "seed " << first_seed + i << ": " << schedule_test::describe(owned[i]).substr(0, 2000);
  }
  if (with_prefix) {
    const std::vector<std::byte> units = device_prefixes.download();
    ASSERT_EQ(std::memcmp(units.data(), prefixes.data(), units.size()), 0) << "seeds " << first_seed;
  }
}

TEST_F(CudaSchedule, SameIntegersAsOnTheHost) {
  const int all = short_run() ? 10 * test_problems() : 100000;
  constexpr int kAtOnce = 5000;
  std::vector<OwnedLine> owned;
  for (int first = 0; first < all; first += kAtOnce) {
    owned.assign(static_cast<std::size_t>(std::min(kAtOnce, all - first)), {});
    for (std::size_t i = 0; i < owned.size(); ++i) schedule_test::random_line(static_cast<std::uint64_t>(first) + i, owned[i]);
    expect_same_on_device(owned, static_cast<std::uint64_t>(first), false);
  }
}

TEST_F(CudaSchedule, SameIntegersOfHugeLines) {
  const int all = short_run() ? 100 : 1000;
  std::vector<OwnedLine> owned(static_cast<std::size_t>(all));
  for (std::size_t i = 0; i < owned.size(); ++i) long_line(900000 + i, owned[i]);
  expect_same_on_device(owned, 900000, true);
}

// --- The merge ---

std::vector<DeviceMerge> merged(const std::vector<RowPartial>& x, const std::vector<RowPartial>& y, const std::vector<float>& x_values,
                                const std::vector<float>& y_values) {
  const auto in_device = [](const auto& values) {
    GuardedBuffer buffer(values.size() * sizeof(values[0]), nullptr, kNanByte);
    buffer.upload(values.data());
    return buffer;
  };
  const GuardedBuffer dx = in_device(x), dy = in_device(y), dx_values = in_device(x_values), dy_values = in_device(y_values);
  const GuardedBuffer out(x.size() * sizeof(DeviceMerge), nullptr, kCanaryByte);
  must(schedule_test::merge_on_device(static_cast<int>(x.size()), reinterpret_cast<const RowPartial*>(dx.data()),
                                      reinterpret_cast<const RowPartial*>(dy.data()), reinterpret_cast<const float*>(dx_values.data()),
                                      reinterpret_cast<const float*>(dy_values.data()), reinterpret_cast<DeviceMerge*>(out.data())),
       "merge_on_device");
  must(cudaDeviceSynchronize(), "the kernel");
  const std::vector<std::byte> bytes = out.download();
  std::vector<DeviceMerge> merges(x.size());
  std::memcpy(merges.data(), bytes.data(), bytes.size());
  return merges;
}

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

TEST_F(CudaSchedule, MergeIsCommutativeAndKnowsEmpties) {
  constexpr std::size_t kPairs = 200000;
  std::vector<RowPartial> x(kPairs), y(kPairs);
  std::vector<float> x_values(kPairs), y_values(kPairs);
  schedule_test::Random random(77);
  const auto draw = [&](RowPartial& row, float& value) {
    row = {}, value = 0.0f;
    if (random.one_in(6)) return;  // an empty
    row.max = static_cast<float>(random.between(-4000000, 4000000)) / (random.one_in(4) ? 100.0f : 250000.0f);
    row.sum = 1.0f + static_cast<float>(random.between(0, 1 << 20)) / 1024.0f;
    value = static_cast<float>(random.between(-1000000, 1000000)) / 65536.0f;
  };
  for (std::size_t i = 0; i < kPairs; ++i) {
    draw(x[i], x_values[i]);
    draw(y[i], y_values[i]);
    if (random.one_in(20)) y[i].max = x[i].max, y[i].sum = x[i].sum, y_values[i] = x_values[i];
  }
  const std::vector<DeviceMerge> one = merged(x, y, x_values, y_values), other = merged(y, x, y_values, x_values);
  for (std::size_t i = 0; i < kPairs; ++i) {
    ASSERT_EQ(bits_of(one[i].merge.row.max), bits_of(other[i].merge.row.max)) << i;
    ASSERT_EQ(bits_of(one[i].merge.row.sum), bits_of(other[i].merge.row.sum)) << i;
    ASSERT_EQ(bits_of(one[i].value), bits_of(other[i].value)) << i;
    ASSERT_EQ(bits_of(one[i].lse), bits_of(other[i].lse)) << i;
    if (x[i].sum == 0.0f) {  // the other side, bit for bit
      ASSERT_EQ(bits_of(one[i].merge.row.max), bits_of(y[i].max)) << i;
      ASSERT_EQ(bits_of(one[i].merge.row.sum), bits_of(y[i].sum)) << i;
      ASSERT_EQ(bits_of(one[i].value), bits_of(y_values[i])) << i;
      if (y[i].sum == 0.0f) {
        ASSERT_EQ(bits_of(one[i].o), 0u) << i;
        ASSERT_EQ(one[i].lse, kMinusInfinity) << i;
      }
      continue;
    }
    const double most = std::max(x[i].max, y[i].max);
    const double wx = std::exp(x[i].max - most), wy = y[i].sum == 0.0f ? 0.0 : std::exp(y[i].max - most);
    const double sum = wx * x[i].sum + wy * y[i].sum, value = wx * x_values[i] + wy * y_values[i];
    const double scale = wx * std::abs(x_values[i]) + wy * std::abs(y_values[i]);
    ASSERT_NEAR(one[i].merge.row.sum, sum, 1e-6 * sum) << i;
    ASSERT_NEAR(one[i].value, value, 1e-6 * scale) << i;
    ASSERT_NEAR(one[i].lse, most + std::log(sum), 1e-6 * (1.0 + std::abs(most) + std::log(sum))) << i;
  }
}

}  // namespace
}  // namespace leanattn::testing
