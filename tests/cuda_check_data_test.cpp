// SPDX-License-Identifier: Apache-2.0
// Hostile lengths, offsets and page ids on a GPU with check_data: the word names the first fault, the faulty sequence is empty, the others
// keep the bits that they have in a batch without it, and nothing outside a buffer is touched (the sanitizer runs CudaSmall and these).
#include <functional>

#include "cuda_decoding.h"
#include "respaced.h"

namespace leanattn::testing {
namespace {

using CudaCheckData = CudaTest;
using Lens = std::vector<std::int32_t>;

// A case whose lengths and tables a test spoils on the device alone; the host's stay good.
class Spoiled {
 public:
  // gaps: between the rows of K and V; without one they lie as the case says.
  explicit Spoiled(const std::string& line, const Gaps& gaps = {})
      : data_(parse_case(line)),
        spaced_(data_.problem(), {}, gaps, gaps, {}),
        host_(gaps.head > 0 ? spaced_.problem : data_.problem()),
        device_(host_) {
    must(cudaMalloc(reinterpret_cast<void**>(&status_), sizeof(std::uint64_t)), "cudaMalloc");
  }
  ~Spoiled() { cudaFree(status_); }
  Spoiled(const Spoiled&) = delete;

  const Problem& host() const { return host_; }
  Problem& problem() { return device_.problem; }

  template <class T>
  static void set(const T* device, std::int64_t index, T value) {
    must(cudaMemcpy(const_cast<T*>(device) + index, &value, sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
  }
  template <class T>
  static T get(const T* device, std::int64_t index) {
    T value{};
    must(cudaMemcpy(&value, device + index, sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
    return value;
  }

  Bits decode_checked(Options options, std::uint64_t* status) {
    options.check_data = true;
    options.data_status = status_;
    must(cudaMemset(status_, 0, sizeof(std::uint64_t)), "cudaMemset");
    EXPECT_EQ(decode_on_device(device_, options), "") << device_text_of(options);
    must(cudaMemcpy(status, status_, sizeof(std::uint64_t), cudaMemcpyDefault), "cudaMemcpy");
    return output_bits(host_);
  }

 private:
  CaseData data_;
  Respaced spaced_;
  Problem host_;
  DeviceProblem device_;
  std::uint64_t* status_ = nullptr;
};

// With clusters, with stretches across outputs, with whole outputs, batch-invariant, on both paths.
std::vector<Options> checked_ways() {
  std::vector<Options> all;
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : {DeviceWay{Policy::kLean, 0, 0}, DeviceWay{Policy::kLean, 0, 40}, DeviceWay{Policy::kFa2, 0, 0},
                                 DeviceWay{Policy::kFlashDecoding, 5, 0}}) {
      for (const bool invariant : {false, true}) {
        all.push_back(device_options(way, path));
        all.back().batch_invariant = invariant;
      }
    }
  }
  return all;
}

// spoil() makes some data of the device faulty, restore() makes it good again. The faulty seqs must be as with kv_len 0. The others have
// the batch-invariant bits of the good batch.
void expect_fault(Spoiled& c, const std::function<void()>& spoil, const std::function<void()>& restore, const std::vector<int>& faulty,
                  const std::string& sentence) {
  const Problem& host = c.host();
  const std::size_t element = dtype_bytes(host.q_dtype), row = static_cast<std::size_t>(head_dim_v(host)) * element;
  for (const Options& options : checked_ways()) {
    std::uint64_t status = 1;
    const Bits good = c.decode_checked(options, &status);
    EXPECT_EQ(data_fault_sentence(status), "");
    spoil();
    c.decode_checked(options, &status);
    EXPECT_EQ(data_fault_sentence(status), sentence) << device_text_of(options);
    const Bits spoiled = output_bits(host);
    EXPECT_EQ(spoiled.size(), good.size());
    for (int seq = 0; seq < host.batch; ++seq) {
      const bool empty = std::find(faulty.begin(), faulty.end(), seq) != faulty.end();
      for (int token = 0; token < seq_q_len(host, seq); ++token) {
        for (int head = 0; head < host.q_heads; ++head) {
          const auto* o =
              static_cast<const std::byte*>(host.o.data) + static_cast<std::size_t>(q_row_offset(host, host.o, seq, token, head)) * element;
          const float lse = host.lse[(seq_q_begin(host, seq) + token) * host.q_heads + head];
          if (!empty) continue;
          EXPECT_TRUE(std::all_of(o, o + row, [](std::byte b) { return b == std::byte{0}; })) << seq << " " << device_text_of(options);
          EXPECT_EQ(lse, -std::numeric_limits<float>::infinity()) << seq << " " << device_text_of(options);
        }
      }
    }
    restore();
    if (options.batch_invariant && faulty.size() == 1) {  // the others
      const std::size_t per_seq = good.size() / static_cast<std::size_t>(host.batch);
      for (int seq = 0; seq < host.batch; ++seq) {
        if (seq == faulty[0]) continue;
        const auto from = static_cast<std::ptrdiff_t>(per_seq) * seq, to = from + static_cast<std::ptrdiff_t>(per_seq);
        EXPECT_TRUE(std::equal(good.begin() + from, good.begin() + to, spoiled.begin() + from)) << seq << " " << device_text_of(options);
      }
    }
    if (enough_failures()) return;
  }
}

TEST_F(CudaCheckData, LengthsOutsideTheRoom) {
  for (const char* line : {"- 8 1 128 300,64,1000,7 layout=contiguous", "- 8 1 128 3000,2900,3100 page=16",
                           "- 32 8 128 500,500,20,500,1,70,90,110 layout=head_major"}) {
    Spoiled c(line);
    const std::int32_t was = Spoiled::get(c.problem().kv_lens, 1);
    const std::int64_t room = max_kv_len(c.host());
    for (const std::int64_t bad : {room + 1, std::int64_t{-1}, std::int64_t{0x7fffffff}, std::int64_t{-0x7fffffff - 1}}) {
      if (bad > 0x7fffffff) continue;
      expect_fault(
          c, [&] { Spoiled::set(c.problem().kv_lens, 1, static_cast<std::int32_t>(bad)); },
          [&] { Spoiled::set(c.problem().kv_lens, 1, was); }, {1}, "seq 1: kv_len is outside 0 … the seq's room");
    }
  }
}

void expect_page_faults(Spoiled& c) {
  const Problem& host = c.host();
  const int seq = host.batch > 1 ? 1 : 0, used = (host.kv_lens[seq] + host.page_size - 1) / host.page_size;
  const std::int64_t begin = seq * block_table_stride(host);
  for (const std::int32_t bad : {host.num_pages, -1, 0x7fffffff, -0x7fffffff - 1}) {
    for (const int slot : {0, used / 2, used - 1}) {
      const std::int32_t was = Spoiled::get(c.problem().block_table, begin + slot);
      expect_fault(
          c, [&] { Spoiled::set(c.problem().block_table, begin + slot, bad); },
          [&] { Spoiled::set(c.problem().block_table, begin + slot, was); }, {seq},
          "seq " + std::to_string(seq) + " slot " + std::to_string(slot) + ": page is outside num_pages");
    }
  }
}

TEST_F(CudaCheckData, PagesOutsideTheCache) {
  for (const char* line : {"- 8 1 128 5000 page=16", "- 8 1 64 300,3000,64 page=16", "- 32 8 128 3000,9000,3000,1 page=7 strided=1",
                           "- 16 2 96 900,70,900 page=64 q_len=3 interleaved=1", "- 40 1 256 2000,2000 page=1000"}) {
    Spoiled c(line);
    expect_page_faults(c);
  }
}

// Rows aligned to 2 and to 8 bytes, which are copied in narrow accesses.
TEST_F(CudaCheckData, PagesOutsideACacheOfOddStrides) {
  for (const int gap : {1, 4}) {
    for (const char* line : {"- 8 1 128 900 page=16", "- 8 2 64 300,700,64 page=16", "- 16 2 96 900,70,900 page=7 q_len=3"}) {
      Spoiled c(line, {gap, 0, 0, 0});
      expect_page_faults(c);
    }
  }
}

// Of several faults the word keeps the first by seq, then kind, then slot, whichever block found it first.
TEST_F(CudaCheckData, TheFirstFaultIsTold) {
  Spoiled c("- 32 8 128 3000,2000,2500,100 page=16");
  const std::int64_t stride = block_table_stride(c.host());
  const std::int32_t* table = c.problem().block_table;
  const std::int32_t one = Spoiled::get(table, stride + 90), two = Spoiled::get(table, stride + 40),
                     three = Spoiled::get(table, 2 * stride);
  const std::int32_t len = Spoiled::get(c.problem().kv_lens, 3);
  expect_fault(
      c,
      [&] {
        Spoiled::set(table, stride + 90, -5);
        Spoiled::set(table, stride + 40, 1 << 30);
        Spoiled::set(table, 2 * stride, -1);
        Spoiled::set(c.problem().kv_lens, 3, -1);
      },
      [&] {
        Spoiled::set(table, stride + 90, one);
        Spoiled::set(table, stride + 40, two);
        Spoiled::set(table, 2 * stride, three);
        Spoiled::set(c.problem().kv_lens, 3, len);
      },
      {1, 2, 3}, "seq 1 slot 40: page is outside num_pages");
}

TEST_F(CudaCheckData, OffsetsOfRaggedKeys) {
  Spoiled c("- 8 1 128 300,64,1000,7 layout=ragged");
  const std::int32_t* offsets = c.problem().cu_seqlens_kv;
  const std::int32_t was = Spoiled::get(offsets, 2);
  for (const std::int32_t bad : {-1, -0x7fffffff - 1}) {  // ends seq 1 and begins seq 2
    expect_fault(
        c, [&] { Spoiled::set(offsets, 2, bad); }, [&] { Spoiled::set(offsets, 2, was); }, {1, 2},
        "seq 1: cu_seqlens_kv falls or gives it more than kv_capacity tokens");
  }
  expect_fault(
      c, [&] { Spoiled::set(offsets, 2, 0x7fffffff); }, [&] { Spoiled::set(offsets, 2, was); }, {1, 2},
      "seq 1: cu_seqlens_kv falls or gives it more than kv_capacity tokens");
}

// Rows of O that a faulty cu_seqlens_q names are not written: DeviceProblem looks at everything round the rows.
TEST_F(CudaCheckData, OffsetsOfQueries) {
  Spoiled c("- 8 1 128 300,64,1000,7 q_len=2,4,1,3 tree=4 layout=contiguous");
  const std::int32_t* offsets = c.problem().cu_seqlens_q;
  const std::int32_t was = Spoiled::get(offsets, 2);
  for (const Options& options : checked_ways()) {
    for (const std::int32_t bad : {-1, 0x7fffffff, -0x7fffffff - 1, 1, 1 << 20}) {
      Spoiled::set(offsets, 2, bad);
      std::uint64_t status = 0;
      c.decode_checked(options, &status);
      EXPECT_EQ(data_fault_sentence(status), "seq 1: cu_seqlens_q falls or gives it more than q_len tokens") << bad;
    }
    Spoiled::set(offsets, 2, was);
    if (enough_failures()) return;
  }
}

// Good data: the same bits with the check and without, and a word that stays 0. Not so for more than 32 rows (is_warpgroup).
TEST_F(CudaCheckData, GoodDataKeepsItsBits) {
  for (const char* line :
       {"- 8 1 128 1000 layout=contiguous", "- 8 1 64 300,3000,64 page=16", "- 32 8 128 3000,9000,3000,1 page=7 strided=1",
        "- 8 2 72 700,1,300,257,0,33 q_len=3 layout=ragged sink=1", "- 16 1 128 700,1,3000,257,0,33 q_len=1,5,0,2,3,8"}) {
    Spoiled c(line);
    DeviceProblem plain(c.host());
    for (const Options& options : checked_ways()) {
      std::uint64_t status = 1;
      const Bits checked = c.decode_checked(options, &status);
      EXPECT_EQ(status, 0u) << line;
      EXPECT_EQ(checked, device_bits(c.host(), plain, options)) << line << " " << device_text_of(options);
    }
  }
}

}  // namespace
}  // namespace leanattn::testing
