// SPDX-License-Identifier: Apache-2.0
// Contexts without end over a few pages: every page's keys and values are used again and again, so that the right values of any length are
// sums over pages, cheap in float64 and known without a kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_decoding.h"
#include "inputs.h"

namespace leanattn::testing {

struct SharedCache {
  static constexpr int kPages = 7;  // of the cache; page kPages of it is NaN and never used
  static constexpr int kDim = 64;

  // One query token, `group` rows of one KV head, every seq with the same Q. table_pages: slots of a seq.
  SharedCache(const std::vector<std::int32_t>& lens, int page_size, int group, DType dtype) : lens_(lens), page_(page_size), group_(group) {
    std::int32_t longest = 0;
    for (const std::int32_t len : lens) longest = std::max(longest, len);
    const int slots = (longest + page_size - 1) / page_size;
    const std::size_t cache = std::size_t{kPages + 1} * static_cast<std::size_t>(page_size * kDim);
    q_.resize(static_cast<std::size_t>(group * kDim) * 2);
    k_.assign(cache * 2, std::byte{kNanByte});
    v_.assign(cache * 2, std::byte{kNanByte});
    for (int i = 0; i < group * kDim; ++i)
      store_from_float(q_.data(), dtype, i, input_normal(11, Input::kQ, static_cast<std::uint64_t>(i)));
    for (std::int64_t i = 0; i < std::int64_t{kPages} * page_size * kDim; ++i) {
      store_from_float(k_.data(), dtype, i, input_normal(11, Input::kK, static_cast<std::uint64_t>(i)));
      // Away from 0, so that a weight too many or too few moves O.
      store_from_float(v_.data(), dtype, i, 1.0f + 0.5f * input_normal(11, Input::kV, static_cast<std::uint64_t>(i)));
    }
    table_.resize(lens.size() * static_cast<std::size_t>(slots), kPages);
    for (std::size_t seq = 0; seq < lens.size(); ++seq) {
      for (int slot = 0; slot * page_size < lens[seq]; ++slot)
        table_[seq * static_cast<std::size_t>(slots) + static_cast<std::size_t>(slot)] = page_of(seq, slot);
    }
    problem.batch = static_cast<std::int32_t>(lens.size());
    problem.q_heads = group, problem.kv_heads = 1, problem.head_dim = kDim;
    problem.q_dtype = problem.kv_dtype = dtype;
    problem.kv_layout = KvLayout::kPaged;
    problem.page_size = page_size, problem.num_pages = kPages + 1, problem.max_pages = slots;
    problem.q.token_stride = problem.o.token_stride = problem.o.seq_stride = group * kDim;
    problem.q.head_stride = problem.o.head_stride = kDim;
    problem.k = problem.v = {nullptr, std::int64_t{page_size} * kDim, kDim, kDim};
    o_.resize(lens.size() * static_cast<std::size_t>(group * kDim) * 2);
    lse_.resize(lens.size() * static_cast<std::size_t>(group));
    upload();
    add_up();
  }
  SharedCache(const SharedCache&) = delete;

  // One call. Empty, or a row that is wrong.
  std::string fault(const Options& options) {
    const DeviceWorkspace workspace(workspace_bytes(problem, options), options);
    device_o_.fill(kNanByte), device_lse_.fill(kNanByte);
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    decode(problem, options, workspace.span());
    must(cudaDeviceSynchronize(), "the kernel");
    device_o_.download(std::as_writable_bytes(std::span(o_)));
    device_lse_.download(std::as_writable_bytes(std::span(lse_)));
    std::mutex mutex;
    std::string first;
    tools::parallel_pieces(lens_.size(), 16, 0, [&](std::size_t begin, std::size_t end) {
      for (std::size_t seq = begin; seq < end; ++seq) {
        for (int row = 0; row < group_; ++row) {
          const std::string wrong = row_fault(seq, row);
          if (wrong.empty()) continue;
          const std::lock_guard lock(mutex);
          first = "seq " + std::to_string(seq) + " of " + std::to_string(lens_[seq]) + " tokens, row " + std::to_string(row) + ": " + wrong;
          return;
        }
      }
    });
    return first.empty() ? workspace.fault() : first;
  }

  Problem problem;  // pointers of the device

 private:
  struct Sums {
    double weight = 0.0;
    double values[kDim] = {}, sizes[kDim] = {};  // Σ e^s·v, Σ e^s·|v|
    void add(const Sums& other, double times = 1.0) {
      weight += times * other.weight;
      for (int i = 0; i < kDim; ++i) values[i] += times * other.values[i], sizes[i] += times * other.sizes[i];
    }
  };

  static std::int32_t page_of(std::size_t seq, int slot) {
    return static_cast<std::int32_t>((seq * 3 + static_cast<std::size_t>(slot) * 5 + static_cast<std::size_t>(slot) / 11) % kPages);
  }

  void upload() {
    const auto bytes_of = [](const auto& values) { return std::as_bytes(std::span(values)); };
    device_[0] = tools::DeviceBuffer(bytes_of(q_)), device_[1] = tools::DeviceBuffer(bytes_of(k_)),
    device_[2] = tools::DeviceBuffer(bytes_of(v_));
    device_[3] = tools::DeviceBuffer(bytes_of(table_)), device_[4] = tools::DeviceBuffer(bytes_of(lens_));
    device_o_ = tools::DeviceBuffer(o_.size()), device_lse_ = tools::DeviceBuffer(lse_.size() * sizeof(float));
    problem.q.data = device_[0].data(), problem.k.data = device_[1].data(), problem.v.data = device_[2].data();
    problem.block_table = reinterpret_cast<const std::int32_t*>(device_[3].data());
    problem.kv_lens = reinterpret_cast<const std::int32_t*>(device_[4].data());
    problem.o.data = device_o_.data();
    problem.lse = reinterpret_cast<float*>(device_lse_.data());
  }

  // prefix_[(row·kPages + page)·(page_ + 1) + n]: the sums of a page's first n tokens.
  void add_up() {
    prefix_.resize(static_cast<std::size_t>(group_ * kPages) * static_cast<std::size_t>(page_ + 1));
    const DType dtype = problem.q_dtype;
    for (int row = 0; row < group_; ++row) {
      for (int page = 0; page < kPages; ++page) {
        Sums* const sums = &prefix_[static_cast<std::size_t>(row * kPages + page) * static_cast<std::size_t>(page_ + 1)];
        for (int token = 0; token < page_; ++token) {
          const std::int64_t at = (std::int64_t{page} * page_ + token) * kDim;
          double dot = 0.0;
          for (int i = 0; i < kDim; ++i)
            dot += double{load_as_float(q_.data(), dtype, row * kDim + i)} * load_as_float(k_.data(), dtype, at + i);
          Sums one;
          one.weight = std::exp(dot / std::sqrt(double{kDim}));
          for (int i = 0; i < kDim; ++i) {
            const double value = load_as_float(v_.data(), dtype, at + i);
            one.values[i] = one.weight * value, one.sizes[i] = one.weight * std::abs(value);
          }
          sums[token + 1] = sums[token];
          sums[token + 1].add(one);
        }
      }
    }
  }

  // Error of the naive computation of O's first dim: float32, token after token, weights rounded to the inputs' type. It earns the
  // tolerance of contexts so long that float32 itself gives out, as in reference.h.
  double naive_error(std::size_t seq, int row, const Sums& all) const {
    const DType dtype = problem.q_dtype;
    std::vector<float> weights, products;  // of [page, token]
    for (int page = 0; page < kPages; ++page) {
      for (int token = 0; token < page_; ++token) {
        const double weight = sums_of(row, page, token + 1).weight - sums_of(row, page, token).weight;
        float rounded = 0.0f;  // room for any dtype
        store_from_float(&rounded, dtype, 0, static_cast<float>(weight));
        weights.push_back(static_cast<float>(weight));
        products.push_back(load_as_float(&rounded, dtype, 0) *
                           load_as_float(v_.data(), dtype, (std::int64_t{page} * page_ + token) * kDim));
      }
    }
    float sum = 0.0f, value = 0.0f;
    for (std::int32_t token = 0; token < lens_[seq]; ++token) {
      const std::size_t at = static_cast<std::size_t>(page_of(seq, token / page_) * page_ + token % page_);
      sum += weights[at], value += products[at];
    }
    return std::abs(value / sum - all.values[0] / all.weight);
  }

  const Sums& sums_of(int row, int page, int tokens) const {
    return prefix_[static_cast<std::size_t>(row * kPages + page) * static_cast<std::size_t>(page_ + 1) + static_cast<std::size_t>(tokens)];
  }

  std::string row_fault(std::size_t seq, int row) const {
    const std::int32_t len = lens_[seq];
    const auto at = static_cast<std::int64_t>(seq) * group_ + row;
    const float lse = lse_[static_cast<std::size_t>(at)];
    const auto o = [&](int i) { return load_as_float(o_.data(), problem.q_dtype, at * kDim + i); };
    if (len == 0) {
      for (int i = 0; i < kDim; ++i) {
        if (o(i) != 0.0f) return "O of an empty sequence is " + std::to_string(o(i));
      }
      return lse == -std::numeric_limits<float>::infinity() ? "" : "LSE of an empty sequence is " + std::to_string(lse);
    }
    int whole[kPages] = {};
    for (int slot = 0; slot < len / page_; ++slot) ++whole[page_of(seq, slot)];
    Sums all = sums_of(row, page_of(seq, len / page_), len % page_);
    for (int page = 0; page < kPages; ++page) all.add(sums_of(row, page, page_), whole[page]);
    // Weights are rounded to the inputs' type, O to the output's: half an ulp each, of |V| and of O. Float32 sums get as much again.
    const double ulp = problem.q_dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
    constexpr std::int32_t kVeryLong = 1 << 22;
    const double naive = len > kVeryLong ? 2.0 * naive_error(seq, row, all) : 0.0;
    for (int i = 0; i < kDim; ++i) {
      const double right = all.values[i] / all.weight, tolerance = naive + ulp * (all.sizes[i] / all.weight + std::abs(right));
      if (!(std::abs(o(i) - right) <= tolerance)) return "O is " + std::to_string(o(i)) + ", right is " + std::to_string(right);
    }
    // LSE is summed before weights are rounded; float32 sums walk at random, an ulp at each of a sequence's tiles. A tile too many or too
    // few among thousands shows.
    const double right = std::log(all.weight), tolerance = 1e-5 + 0x1p-23 * std::sqrt(len / 64.0);
    return std::abs(lse - right) <= tolerance ? "" : "LSE is " + std::to_string(lse) + ", right is " + std::to_string(right);
  }

  std::vector<std::int32_t> lens_, table_;
  int page_ = 0, group_ = 0;
  std::vector<std::byte> q_, k_, v_, o_;
  std::vector<float> lse_;
  std::vector<Sums> prefix_;
  tools::DeviceBuffer device_[5], device_o_, device_lse_;
};

}  // namespace leanattn::testing
