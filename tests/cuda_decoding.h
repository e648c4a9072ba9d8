// SPDX-License-Identifier: Apache-2.0
// Decode calls of the tests on a GPU: a host problem mirrored into guarded device memory at the same alignments, one call with any options
// and stream, and O, LSE and every overwritten byte brought back. Host rows are read and judged by decoding.h as on the CPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/variants.h"
#include "cuda_memory.h"
#include "decoding.h"
#include "tools/device_case.h"

namespace leanattn::testing {

// --- Problems ---

struct Axis {
  std::int64_t count;
  std::int64_t stride;
};

// Elements from the first row's first to the last row's last.
inline std::int64_t span_elements(std::initializer_list<Axis> axes, int row_elements) {
  std::int64_t last = 0;
  for (const Axis& axis : axes) {
    if (axis.count <= 0) return 0;
    last += (axis.count - 1) * axis.stride;
  }
  return last + row_elements;
}

template <class View>
std::int64_t span_of_rows(const Problem& p, const View& view, int row_elements) {
  if (p.cu_seqlens_q) return span_elements({{total_q(p), view.token_stride}, {p.q_heads, view.head_stride}}, row_elements);
  return span_elements({{p.batch, view.seq_stride}, {p.q_len, view.token_stride}, {p.q_heads, view.head_stride}}, row_elements);
}

inline std::int64_t span_of_tokens(const Problem& p, const KvView& view, int row_elements) {
  const Axis heads{p.kv_heads, view.head_stride};
  if (p.batch == 0) return 0;
  switch (p.kv_layout) {
    case KvLayout::kBatched: return span_elements({{p.batch, view.outer_stride}, {p.kv_capacity, view.token_stride}, heads}, row_elements);
    case KvLayout::kRagged: return span_elements({{p.cu_seqlens_kv[p.batch], view.token_stride}, heads}, row_elements);
    case KvLayout::kPaged: return span_elements({{p.num_pages, view.outer_stride}, {p.page_size, view.token_stride}, heads}, row_elements);
  }
  return 0;
}

// A host problem of float16 or bfloat16 in device memory. The host's K, V, Q and lengths are copied once; fetch writes the rows of O and
// LSE into the host's own.
class DeviceProblem {
 public:
  explicit DeviceProblem(const Problem& host, Room room = Room::kGuarded) : problem(host), host_(host), room_(room) {
    const auto element = static_cast<std::int64_t>(dtype_bytes(host.q_dtype));
    problem.q.data = copy_in("q", host.q.data, span_of_rows(host, host.q, host.head_dim) * element);
    copy_kv_in();
    o_ = GuardedBuffer(static_cast<std::size_t>(span_of_rows(host, host.o, head_dim_v(host)) * element), host.o.data, kCanaryByte, room);
    problem.o.data = o_.data();
    if (host.lse) {
      lse_ = GuardedBuffer(static_cast<std::size_t>(total_q(host) * host.q_heads * 4), host.lse, kCanaryByte, room);
      problem.lse = reinterpret_cast<float*>(lse_.data());
    }
    tools::copy_arrays(host, problem, [&](const char* name, const void* values, std::int64_t bytes) {
      if (values == host.kv_lens) kv_lens_ = inputs_.size();
      return copy_in(name, values, bytes);
    });
    reset_outputs();
  }
  DeviceProblem(const DeviceProblem&) = delete;

  Problem problem;  // pointers of the device

  // NaN into every row of O and LSE, canaries into the gaps of O and round both.
  void reset_outputs() {
    std::vector<std::byte> image(o_.bytes(), std::byte{kCanaryByte});
    each_row([&](std::size_t at, std::size_t bytes, std::byte*) { std::memset(image.data() + at, kNanByte, bytes); });
    o_.fill(kCanaryByte);
    o_.upload(image.data());
    lse_.fill(kCanaryByte);
    if (lse_.bytes() > 0) must(cudaMemset(lse_.data(), kNanByte, lse_.bytes()), "cudaMemset");
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  // Lengths that a captured graph will find in the same memory.
  void set_kv_lens(const std::vector<std::int32_t>& lens) {
    inputs_[kv_lens_].buffer.upload(lens.data(), lens.size() * 4);
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  // Waits for the device. Empty when nothing but rows was written; else a sentence.
  std::string fetch() {
    must(cudaDeviceSynchronize(), "the kernel");
    std::vector<std::byte> image = o_.download();
    each_row([&](std::size_t at, std::size_t bytes, std::byte* row) {
      std::memcpy(row, image.data() + at, bytes);
      std::memset(image.data() + at, kCanaryByte, bytes);
    });
    if (host_.lse) {
      const std::vector<std::byte> lse = lse_.download();
      std::memcpy(host_.lse, lse.data(), lse.size());
    }
    for (const std::byte b : image) {
      if (b != std::byte{kCanaryByte}) return "o: written between its rows";
    }
    std::string fault = o_.fault("o");
    if (fault.empty()) fault = lse_.fault("lse");
    for (const Input& input : inputs_) {
      if (fault.empty()) fault = input.buffer.fault(input.name);
    }
    return fault;
  }

  // The whole host tensors, so that a test can bring changed values in.
  void copy_kv_again() {
    for (Input& input : inputs_) {
      if (input.is_kv) input.buffer.upload(input.host);
    }
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

 private:
  struct Input {
    const char* name;
    const void* host;
    GuardedBuffer buffer;
    bool is_kv = false;
  };

  const void* copy_in(const char* name, const void* host, std::int64_t bytes) {
    if (host == nullptr) return nullptr;
    inputs_.push_back({name, host, GuardedBuffer(static_cast<std::size_t>(bytes), host, kNanByte, room_)});
    inputs_.back().buffer.upload(host);
    return inputs_.back().buffer.data();
  }

  // K and V out of one buffer stay out of one buffer.
  void copy_kv_in() {
    const auto element = static_cast<std::int64_t>(dtype_bytes(host_.kv_dtype));
    const auto* k = static_cast<const std::byte*>(host_.k.data);
    const auto* v = static_cast<const std::byte*>(host_.v.data);
    const std::int64_t k_bytes = span_of_tokens(host_, host_.k, host_.head_dim) * element;
    const std::int64_t v_bytes = span_of_tokens(host_, host_.v, head_dim_v(host_)) * element;
    if (k && v && k < v + v_bytes && v < k + k_bytes) {
      const std::byte* first = std::min(k, v);
      const auto* device = static_cast<const std::byte*>(copy_in("k and v", first, std::max(k + k_bytes, v + v_bytes) - first));
      inputs_.back().is_kv = true;
      problem.k.data = device + (k - first);
      problem.v.data = device + (v - first);
      return;
    }
    problem.k.data = copy_in("k", host_.k.data, k_bytes);
    if (k) inputs_.back().is_kv = true;
    problem.v.data = copy_in("v", host_.v.data, v_bytes);
    if (v) inputs_.back().is_kv = true;
  }

  // visit(first byte in O's memory, bytes, the host's row)
  template <class Visit>
  void each_row(Visit visit) const {
    const std::size_t element = dtype_bytes(host_.q_dtype);
    for (int seq = 0; seq < host_.batch; ++seq) {
      for (int token = 0; token < seq_q_len(host_, seq); ++token) {
        for (int head = 0; head < host_.q_heads; ++head) {
          const std::size_t at = static_cast<std::size_t>(q_row_offset(host_, host_.o, seq, token, head)) * element;
          visit(at, static_cast<std::size_t>(head_dim_v(host_)) * element, static_cast<std::byte*>(host_.o.data) + at);
        }
      }
    }
  }

  Problem host_;
  Room room_;
  std::vector<Input> inputs_;
  std::size_t kv_lens_ = 0;
  GuardedBuffer o_, lse_;
};

// --- Ways to run ---

struct DeviceWay {
  Policy policy = Policy::kLean;
  int splits = 0;
  int workers = 0;  // 0: every multiprocessor
};

inline const std::vector<DeviceWay>& device_ways() {
  static const std::vector<DeviceWay> all = {
      {Policy::kLean, 0, 0},          {Policy::kLean, 0, 1},          {Policy::kLean, 0, 3},          {Policy::kFa2, 0, 0},
      {Policy::kFlashDecoding, 0, 0}, {Policy::kFlashDecoding, 1, 2}, {Policy::kFlashDecoding, 2, 0}, {Policy::kFlashDecoding, 7, 5},
  };
  return all;
}

inline const std::vector<std::string>& device_paths() {
  static const std::vector<std::string> names = cuda_paths();
  return names;
}

inline Options device_options(const DeviceWay& way, std::size_t path, cudaStream_t stream = nullptr) {
  Options options;
  options.backend = Backend::kCuda;
  options.policy = way.policy;
  options.splits = way.splits;
  options.workers = way.workers;
  options.stream = stream;
  options.cuda_path = device_paths()[path % device_paths().size()].c_str();
  return options;
}

inline std::string device_text_of(const Options& options) {
  return "policy=" + tools::policy_name(options.policy, options.splits) + " workers=" + std::to_string(options.workers) +
         " order=" + std::to_string(static_cast<int>(options.head_order)) + " path=" + (options.cuda_path ? options.cuda_path : "fastest") +
         (options.programmatic_launch ? " programmatic_launch" : "");
}

// One call on poisoned outputs and a new workspace of exactly the bytes asked for. Empty, or what was written outside every row.
inline std::string decode_on_device(DeviceProblem& device, const Options& options, Room room = Room::kGuarded) {
  const DeviceWorkspace workspace(workspace_bytes(device.problem, options), options, room);
  device.reset_outputs();
  decode(device.problem, options, workspace.span());
  const std::string fault = device.fetch();
  return fault.empty() ? workspace.fault() : fault;
}

// A call's O and LSE against the reference, every canary whole. host: where device came from.
inline ::testing::AssertionResult is_right(const Problem& host, DeviceProblem& device, const Options& options, const Reference& reference,
                                           Room room = Room::kGuarded) {
  std::string fault;
  try {
    fault = decode_on_device(device, options, room);
  } catch (const Error& error) {
    return ::testing::AssertionFailure() << error.what() << "\n  with " << device_text_of(options);
  }
  if (!fault.empty()) return ::testing::AssertionFailure() << fault << "\n  with " << device_text_of(options);
  const auto right = is_right(host, reference);
  return right ? right : ::testing::AssertionFailure() << right.message() << "\n  with " << device_text_of(options);
}

inline Bits device_bits(const Problem& host, DeviceProblem& device, const Options& options) {
  EXPECT_EQ(decode_on_device(device, options), "") << device_text_of(options);
  return output_bits(host);
}

// Empty when the backend takes the problem, else its sentence.
inline std::string device_refusal(const Problem& problem, const Options& options = device_options({}, 0)) {
  try {
    validate(problem, options);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// How many judgements of this process needed the twins of a case (with_twins in decoding.h), of how many.
struct Luck {
  int judged = 0;
  int missed = 0;
};
inline Luck& luck() {
  static Luck all;
  return all;
}

// A case, its device memory and its right values.
class DeviceCase {
 public:
  explicit DeviceCase(const Case& c, const Sample& sample = {}, Room room = Room::kGuarded)
      : data(c), host(data.problem()), device(host, room), reference(compute_reference(host, sample)), room_(room) {}
  explicit DeviceCase(const std::string& line) : DeviceCase(line, tools::affordable_sample(parse_case(line))) {}
  DeviceCase(const std::string& line, const Sample& sample, Room room = Room::kGuarded) : DeviceCase(parse_case(line), sample, room) {}

  // A naive computation may be close by luck: see with_twins.
  ::testing::AssertionResult judge(const Options& options) {
    ++luck().judged;
    const auto first = is_right(host, device, options, reference, room_);
    if (first) return first;
    if (!has_twins_) {
      twins_ = with_twins(reference, data.spec(), tools::affordable_sample(data.spec()));
      has_twins_ = true;
    }
    ++luck().missed;
    if (is_right(host, device, options, twins_, room_)) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << first.message() << "\n  case: " << to_string(data.spec());
  }
  void expect_right(const std::vector<DeviceWay>& ways = device_ways()) {
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : ways) {
        if (enough_failures()) return;
        EXPECT_TRUE(judge(device_options(way, path)));
      }
    }
  }
  Bits bits(const Options& options) { return device_bits(host, device, options); }

  CaseData data;
  Problem host;
  DeviceProblem device;
  Reference reference;

 private:
  Room room_;
  Reference twins_;
  bool has_twins_ = false;
};

inline void expect_right_on_device(const std::string& line) { DeviceCase(line).expect_right(); }

// Values that a test has set itself have no twins.
inline void expect_right_on_device(const Problem& host, const Reference& reference, const std::vector<DeviceWay>& ways = device_ways()) {
  DeviceProblem device(host);
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    for (const DeviceWay& way : ways) {
      if (enough_failures()) return;
      EXPECT_TRUE(is_right(host, device, device_options(way, path), reference));
    }
  }
}

}  // namespace leanattn::testing
