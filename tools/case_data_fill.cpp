// SPDX-License-Identifier: Apache-2.0
// The bytes of CaseData: values and poison of the inputs, and what stands round the outputs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "inputs.h"
#include "numeric.h"
#include "problem_view.h"
#include "tools/case_data.h"

namespace leanattn::tools {
namespace {

constexpr unsigned char kNaNByte = 0xff;  // repeated, a NaN in every dtype
constexpr unsigned char kCanaryByte = 0xa5;
constexpr std::size_t kFillTokens = 64;  // a job

bool holds(const std::byte* data, std::int64_t bytes, unsigned char value) {
  return std::all_of(data, data + bytes, [value](std::byte b) { return b == std::byte{value}; });
}

// Elements [index, index + n) of an input tensor, times factor.
template <typename Bits, typename Convert>
void write_row(Bits* row, int n, std::uint64_t seed, Input tensor, std::uint64_t index, float factor, Convert convert) {
  for (int i = 0; i < n; ++i) row[i] = convert(factor * input_normal(seed, tensor, index + static_cast<std::uint64_t>(i)));
}

void write_row(void* data, DType dtype, std::int64_t at, int n, std::uint64_t seed, Input tensor, std::uint64_t index, float factor) {
  switch (dtype) {
    case DType::kFloat32: return write_row(static_cast<float*>(data) + at, n, seed, tensor, index, factor, [](float x) { return x; });
    case DType::kFloat16: return write_row(static_cast<std::uint16_t*>(data) + at, n, seed, tensor, index, factor, float16_from_float);
    case DType::kBFloat16: return write_row(static_cast<std::uint16_t*>(data) + at, n, seed, tensor, index, factor, bfloat16_from_float);
  }
}

struct Job {
  std::int32_t seq;
  std::int64_t begin, end;  // tokens
  std::int64_t logical;     // tokens of the sequences before
};

}  // namespace

void CaseData::fill_q(int threads) {
  parallel_set(q_.buffer.data(), kNaNByte, q_.buffer.bytes(), threads);
  const Case& c = case_;
  // Inputs have variance 1, and so have the logits q·k/sqrt(head_dim).
  const float factor = c.spread;
  void* data = q_.buffer.data() + q_.first * static_cast<std::int64_t>(dtype_bytes(c.dtype));
  for (std::int32_t seq = 0; seq < c.batch(); ++seq) {
    for (std::int64_t token = 0; token < c.seq_q_len(seq); ++token) {
      const std::int64_t row = (seq_q_begin(problem_, seq) + token) * c.q_heads;
      for (int head = 0; head < c.q_heads; ++head) {
        write_row(data, c.dtype, q_row_offset(problem_, problem_.q, seq, token, head), c.head_dim, c.seed, Input::kQ,
                  static_cast<std::uint64_t>((row + head) * c.head_dim), factor);
      }
    }
  }
}

void CaseData::fill_kv(Copy& copy, int threads) const {
  const Case& c = case_;
  const auto element = static_cast<std::int64_t>(dtype_bytes(c.dtype));
  parallel_set(copy.k.data(), kNaNByte, copy.k.bytes(), threads);
  parallel_set(copy.v.data(), kNaNByte, copy.v.bytes(), threads);
  std::vector<Job> jobs;
  std::int64_t before = 0;
  for (std::int32_t seq = 0; seq < c.batch(); ++seq) {
    const std::int64_t len = c.kv_lens[static_cast<std::size_t>(seq)];
    if (c.seq_q_len(seq) > 0) {
      for (std::int64_t begin = seq_first_token(problem_, seq); begin < len; begin += kFillTokens) {
        jobs.push_back({seq, begin, std::min<std::int64_t>(len, begin + kFillTokens), before});
      }
    }
    before += len;
  }
  void* k = copy.k.data() + k_first_ * element;
  void* v = (c.interleaved ? copy.k.data() : copy.v.data()) + v_first_ * element;
  parallel_pieces(jobs.size(), 4, threads, [&](std::size_t first, std::size_t last) {
    for (std::size_t j = first; j < last; ++j) {
      for (std::int64_t token = jobs[j].begin; token < jobs[j].end; ++token) {
        for (int head = 0; head < c.kv_heads; ++head) {
          const auto row = static_cast<std::uint64_t>((jobs[j].logical + token) * c.kv_heads + head);
          write_row(k, c.dtype, kv_row_offset(problem_, problem_.k, jobs[j].seq, token, head), c.head_dim, c.seed, Input::kK,
                    row * static_cast<std::uint64_t>(c.head_dim), 1.0f);
          write_row(v, c.dtype, kv_row_offset(problem_, problem_.v, jobs[j].seq, token, head), c.head_dim_v, c.seed, Input::kV,
                    row * static_cast<std::uint64_t>(c.head_dim_v), 1.0f);
        }
      }
    }
  });
}

// Element of O's buffer at which a row starts.
std::int64_t CaseData::o_element(std::int64_t row) const {
  const std::int64_t token = row / case_.q_heads, head = row % case_.q_heads;
  const OView& o = problem_.o;
  if (problem_.cu_seqlens_q) return o_.first + token * o.token_stride + head * o.head_stride;
  return o_.first + token / case_.q_len * o.seq_stride + token % case_.q_len * o.token_stride + head * o.head_stride;
}

float CaseData::o_at(std::int64_t row, std::int32_t column) const {
  return load_as_float(o_.buffer.data(), case_.dtype, o_element(row) + column);
}

float CaseData::lse_at(std::int64_t row) const { return problem_.lse[row]; }

std::vector<double> CaseData::o() const {
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(rows() * case_.head_dim_v));
  for (std::int64_t row = 0; row < rows(); ++row) {
    for (std::int32_t column = 0; column < case_.head_dim_v; ++column) values.push_back(o_at(row, column));
  }
  return values;
}

std::vector<double> CaseData::lse() const {
  if (!problem_.lse) return {};
  return std::vector<double>(problem_.lse, problem_.lse + rows());
}

void CaseData::reset_outputs() {
  const auto element = static_cast<std::int64_t>(dtype_bytes(case_.dtype));
  std::memset(o_.buffer.data(), kCanaryByte, o_.buffer.bytes());
  const auto row_bytes = static_cast<std::size_t>(case_.head_dim_v * element);
  for (std::int64_t row = 0; row < rows(); ++row) std::memset(o_.buffer.data() + o_element(row) * element, kNaNByte, row_bytes);
  const auto guarded = [](const Buffer& buffer, std::int64_t head, std::size_t bytes) {
    if (buffer.bytes() == 0) return;
    std::memset(buffer.data(), kCanaryByte, buffer.bytes());
    std::memset(buffer.data() + head, kNaNByte, bytes);
  };
  guarded(lse_, kGuardBytes, static_cast<std::size_t>(rows()) * 4);
  guarded(workspace_, kGuardBytes + 1, workspace_bytes_);
}

std::span<std::byte> CaseData::workspace(std::size_t bytes) {
  workspace_bytes_ = bytes;
  workspace_ = Buffer(bytes + 2 * kGuardBytes + 1);
  std::memset(workspace_.data(), kCanaryByte, workspace_.bytes());
  std::memset(workspace_.data() + kGuardBytes + 1, kNaNByte, bytes);
  return {workspace_.data() + kGuardBytes + 1, bytes};
}

std::string CaseData::canary_fault() const {
  const auto element = static_cast<std::int64_t>(dtype_bytes(case_.dtype));
  std::int64_t end = 0;  // of the row before; rows lie in order of address
  for (std::int64_t row = 0; row <= rows(); ++row) {
    const std::int64_t begin = row < rows() ? o_element(row) : o_.elements;
    if (!holds(o_.buffer.data() + end * element, (begin - end) * element, kCanaryByte)) {
      return row < rows() ? fmt::format("o: written before row {}, outside every row", row) : "o: written behind the last row";
    }
    end = begin + case_.head_dim_v;
  }
  const auto guards = [](const char* name, const Buffer& buffer, std::int64_t head, std::size_t bytes) -> std::string {
    if (buffer.bytes() == 0) return {};
    if (!holds(buffer.data(), head, kCanaryByte)) return fmt::format("{}: written before its first byte", name);
    const std::byte* tail = buffer.data() + head + bytes;
    const bool whole = holds(tail, buffer.data() + buffer.bytes() - tail, kCanaryByte);
    return whole ? std::string() : fmt::format("{}: written behind its {} bytes", name, bytes);
  };
  const std::string lse_fault = guards("lse", lse_, kGuardBytes, static_cast<std::size_t>(rows()) * 4);
  return lse_fault.empty() ? guards("workspace", workspace_, kGuardBytes + 1, workspace_bytes_) : lse_fault;
}

}  // namespace leanattn::tools
