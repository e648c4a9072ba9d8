// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>

namespace leanattn {
namespace {

constexpr int kTileTokens = 64;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// --- Stored values ---

// All float16 values by their bits.
std::vector<float> float16_values() {
  std::vector<float> values(65536);
  for (int bits = 0; bits < 65536; ++bits) {
    const int exponent = bits >> 10 & 31;
    const float fraction = static_cast<float>(bits & 1023);
    float value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.0f + fraction, exponent - 25);
    if (exponent == 31) value = fraction == 0 ? HUGE_VALF : std::nanf("");
    values[bits] = bits >> 15 ? -value : value;
  }
  return values;
}

// Element i of a tensor; every stored type fits in float32 exactly.
float stored(const void* data, DType dtype, std::int64_t i) {
  static const std::vector<float> kFloat16Values = float16_values();
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  if (dtype == DType::kFloat16) return kFloat16Values[bits];
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Bits of precision after the leading one, and the exponent of the smallest normal number.
int fraction_bits(DType dtype) { return dtype == DType::kFloat32 ? 23 : dtype == DType::kFloat16 ? 10 : 7; }
int least_exponent(DType dtype) { return dtype == DType::kFloat16 ? -14 : -126; }

// Distance of two neighbours of the type at a value; that of the subnormals near 0.
double ulp(DType dtype, double value) {
  const int exponent = value == 0.0 || !std::isfinite(value) ? -1000 : std::ilogb(value);
  return std::ldexp(1.0, std::max(exponent, least_exponent(dtype)) - fraction_bits(dtype));
}

// A probability, 0 … 1, rounded to the type, to nearest even.
float rounded_probability(DType dtype, float p) {
  if (dtype == DType::kFloat32 || !(p > 0.0f)) return p;
  if (dtype == DType::kFloat16 && p < 0x1p-14f) return (p + 0x1p-1f) - 0x1p-1f;
  const int dropped = 23 - fraction_bits(dtype);
  const auto bits = std::bit_cast<std::uint32_t>(p);
  const std::uint32_t rounded = (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) & ~((1u << dropped) - 1);
  return std::bit_cast<float>(rounded);
}

// --- Where things lie ---

struct Seq {
  int index = 0;
  std::int64_t q_first = 0;  // row of LSE and tree mask
  int q_len = 0;
  int kv_len = 0;
  int first_token = 0;  // that any row sees
};

Seq seq_of(const Problem& p, int index) {
  Seq seq{.index = index, .q_first = std::int64_t{index} * p.q_len, .q_len = p.q_len};
  if (p.cu_seqlens_q != nullptr) {
    seq.q_first = p.cu_seqlens_q[index];
    seq.q_len = p.cu_seqlens_q[index + 1] - p.cu_seqlens_q[index];
  }
  seq.kv_len = p.kv_lens != nullptr ? p.kv_lens[index] : p.cu_seqlens_kv[index + 1] - p.cu_seqlens_kv[index];
  if (p.window_left >= 0) {
    seq.first_token = static_cast<int>(std::max<std::int64_t>(0, std::int64_t{seq.kv_len} - seq.q_len - p.window_left));
  }
  return seq;
}

// First element of row (seq, token, head) of Q or O.
template <class View>
std::int64_t row_start(const Problem& p, const View& view, const Seq& seq, int token, int head) {
  const std::int64_t along =
      p.cu_seqlens_q != nullptr ? (seq.q_first + token) * view.token_stride : seq.index * view.seq_stride + token * view.token_stride;
  return along + head * view.head_stride;
}

// First element of a token of K or V.
std::int64_t token_start(const Problem& p, const KvView& view, int seq, std::int64_t token, int kv_head) {
  const std::int64_t head = kv_head * view.head_stride;
  if (p.kv_layout == KvLayout::kRagged) return head + (p.cu_seqlens_kv[seq] + token) * view.token_stride;
  if (p.kv_layout == KvLayout::kBatched) return head + seq * view.outer_stride + token * view.token_stride;
  const std::int64_t slots = p.block_table_stride != 0 ? p.block_table_stride : p.max_pages;
  const std::int64_t page = p.block_table[seq * slots + token / p.page_size];
  return head + page * view.outer_stride + token % p.page_size * view.token_stride;
}

bool sees(const Problem& p, const Seq& seq, int query_token, std::int64_t t) {
  const std::int64_t new_begin = std::int64_t{seq.kv_len} - seq.q_len;
  const std::int64_t position = new_begin + query_token;
  if (p.causal && t > position) return false;
  if (p.window_left >= 0 && t < position - p.window_left) return false;
  if (p.tree_mask != nullptr && t >= new_begin) {
    const std::int64_t bit = t - new_begin;
    const std::int64_t words = (std::int64_t{p.q_len} + 63) / 64;
    return p.tree_mask[(seq.q_first + query_token) * words + bit / 64] >> (bit % 64) & 1;
  }
  return true;
}

// --- Arithmetic, in float64 for what is right and in float32 for what is naive ---

// sum[j] += Σ_i a[i]·b[i, j], each sum in the order of i. b is [count, n]. All are of one thread: no work for ThreadSanitizer.
template <class Real>
__attribute__((no_sanitize("thread"))) void add_products(const Real* __restrict a, const Real* __restrict b, int count, int n,
                                                         Real* __restrict sum) {
  int i = 0;
  for (; i + 4 <= count; i += 4, b += 4 * n) {
    const Real a0 = a[i], a1 = a[i + 1], a2 = a[i + 2], a3 = a[i + 3];
    const Real *b1 = b + n, *b2 = b1 + n, *b3 = b2 + n;
    for (int j = 0; j < n; ++j) sum[j] = (((sum[j] + a0 * b[j]) + a1 * b1[j]) + a2 * b2[j]) + a3 * b3[j];
  }
  for (; i < count; ++i, b += n) {
    for (int j = 0; j < n; ++j) sum[j] += a[i] * b[j];
  }
}

// The same with the order turned to begin at i = first.
template <class Real>
void add_products_from(int first, const Real* a, const Real* b, int count, int n, Real* sum) {
  add_products(a + first, b + std::int64_t{first} * n, count - first, n, sum);
  add_products(a, b, first, n, sum);
}

// One row of scores over tokens [first_token, kv_len) and what becomes of it.
template <class Real>
struct RowValues {
  std::vector<Real> p;  // q·k, then the logit, then P; padded to whole tiles
  std::vector<Real> o;  // [head_dim_v]
  Real sum = 0;
  Real lse = 0;
};

// Two forms of the same arithmetic. Plain: as the formulas stand. Folded: q is multiplied by all that q·k needs before the product, and
// logits are in base 2, as kernels do it.
enum class Form { kPlain, kFolded };

template <class Real>
Real logits_a_nat(Form form) {
  return form == Form::kFolded ? static_cast<Real>(1.4426950408889634074) : Real{1};
}

// What q·k is multiplied by: the argument of tanh with a soft-cap, else the logit.
template <class Real>
Real product_factor(const Problem& p, Form form) {
  const Real scale = p.scale != 0.0f ? Real{p.scale} : Real{1} / std::sqrt(static_cast<Real>(p.head_dim));
  return p.softcap > 0.0f ? scale / Real{p.softcap} : scale * logits_a_nat<Real>(form);
}

// q·k becomes the logit; −inf where the row does not see the token. Returns the number of tokens seen.
template <class Real>
std::int64_t apply_logit_rules(const Problem& p, const Seq& seq, int query_token, int q_head, Form form, std::vector<Real>& scores) {
  const Real unit = logits_a_nat<Real>(form);
  const Real factor = form == Form::kFolded ? Real{1} : product_factor<Real>(p, form);
  const Real softcap = Real{p.softcap} * unit;
  const Real slope = p.alibi_slopes != nullptr ? Real{p.alibi_slopes[q_head]} * unit : Real{0};
  const std::int64_t position = std::int64_t{seq.kv_len} - seq.q_len + query_token;
  std::int64_t keys = 0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const std::int64_t t = seq.first_token + static_cast<std::int64_t>(j);
    if (t >= seq.kv_len || !sees(p, seq, query_token, t)) {
      scores[j] = -std::numeric_limits<Real>::infinity();
      continue;
    }
    Real s = factor * scores[j];
    if (softcap > 0) s = softcap * std::tanh(s);
    if (p.alibi_slopes != nullptr) s -= slope * static_cast<Real>(std::abs(position - t));
    scores[j] = s;
    ++keys;
  }
  return keys;
}

// Logits become P, Σ P and LSE; o becomes 0.
template <class Real>
void apply_softmax(const Problem& p, int q_head, Form form, RowValues<Real>& row) {
  constexpr Real kNone = -std::numeric_limits<Real>::infinity();
  const bool folded = form == Form::kFolded;
  const Real sink = p.sinks != nullptr ? Real{p.sinks[q_head]} * logits_a_nat<Real>(form) : kNone;
  Real most = sink;
  for (Real s : row.p) most = s > most ? s : most;
  const auto power = [&](Real s) { return s == kNone ? Real{0} : folded ? std::exp2(s - most) : std::exp(s - most); };
  row.sum = power(sink);
  for (Real& s : row.p) {
    s = power(s);
    row.sum += s;
  }
  row.lse = row.sum == 0 ? kNone : most + (folded ? std::log2(row.sum) : std::log(row.sum));
  if (p.lse_base == LseBase::kTwo && !folded) row.lse *= static_cast<Real>(1.4426950408889634074);
  if (p.lse_base == LseBase::kNatural && folded) row.lse *= static_cast<Real>(0.69314718055994530942);
  std::fill(row.o.begin(), row.o.end(), Real{0});
}

// P·V of one tile; p points at the tile's first token.
template <class Real>
void add_values(const Real* p, const Real* v, int first, int tokens, int dims, bool finite, Real* o) {
  if (finite) return add_products_from(first, p, v, tokens, dims, o);
  for (int t = 0; t < tokens; ++t) {  // 0·NaN must not reach a row that does not see the token
    if (p[t] != 0) add_products(p + t, v + std::int64_t{t} * dims, 1, dims, o);
  }
}

// One (seq, KV head) with all rows that share it.
class HeadRows {
 public:
  HeadRows(const Problem& problem, const Seq& seq, int kv_head, Reference& result)
      : p_(problem), seq_(seq), kv_head_(kv_head), result_(result) {
    d_ = p_.head_dim;
    dv_ = p_.head_dim_v != 0 ? p_.head_dim_v : p_.head_dim;
    group_ = p_.q_heads / p_.kv_heads;
    tokens_ = std::max(seq_.kv_len - seq_.first_token, 0);
    tiles_ = (tokens_ + kTileTokens - 1) / kTileTokens;
    const std::int64_t work = std::int64_t{tokens_} * seq_.q_len * p_.q_heads;
    orders_ = work <= 4096 ? 16 : work <= 65536 ? 8 : 2;
    single_.resize(std::size_t{kTileTokens} * std::max(d_, dv_));
    twice_.resize(single_.size());
  }

  void compute() {
    constexpr std::int64_t kMostScores = std::int64_t{1} << 22;  // held at a time, to bound memory
    const std::int64_t rows = std::int64_t{seq_.q_len} * group_;
    const std::int64_t block = std::max<std::int64_t>(kMostScores / std::max<std::int64_t>(std::int64_t{tokens_} * orders_, 1), 1);
    for (std::int64_t begin = 0; begin < rows; begin += block) compute_rows(begin, std::min(begin + block, rows));
  }

  double o_error = 0.0;
  double lse_error = 0.0;

 private:
  void compute_rows(std::int64_t begin, std::int64_t end) {
    const int n = static_cast<int>(end - begin);
    const std::size_t padded = static_cast<std::size_t>(tiles_) * kTileTokens;
    right_.resize(n);
    naive_.resize(std::size_t{1} * n * orders_);
    for (auto& row : right_) row.p.assign(padded, 0.0), row.o.resize(dv_);
    for (auto& row : naive_) row.p.assign(padded, 0.0f), row.o.resize(dv_);
    std::vector<float> q(std::size_t{1} * n * d_);
    for (int r = 0; r < n; ++r) {
      const std::int64_t start = row_start(p_, p_.q, seq_, query_token(begin + r), q_head(begin + r));
      for (int i = 0; i < d_; ++i) q[std::size_t{1} * r * d_ + i] = stored(p_.q.data, p_.q_dtype, start + i);
    }
    const std::vector<double> q_twice(q.begin(), q.end());
    std::vector<float> q_folded(q);
    for (float& x : q_folded) x *= product_factor<float>(p_, Form::kFolded);
    for (int tile = 0; tile < tiles_; ++tile) {
      load_keys(tile);
      const std::size_t at = static_cast<std::size_t>(tile) * kTileTokens;
      for (int r = 0; r < n; ++r) {
        add_products(&q_twice[std::size_t{1} * r * d_], twice_.data(), d_, kTileTokens, &right_[r].p[at]);
        for (int order = 0; order < orders_; ++order) {
          const float* row = (form_of(order) == Form::kFolded ? q_folded : q).data() + std::size_t{1} * r * d_;
          add_products_from(order * d_ / orders_, row, single_.data(), d_, kTileTokens, &naive(r, order).p[at]);
        }
      }
    }
    std::vector<std::int64_t> keys(n);
    for (int r = 0; r < n; ++r) {
      const int token = query_token(begin + r), head = q_head(begin + r);
      keys[r] = apply_logit_rules(p_, seq_, token, head, Form::kPlain, right_[r].p);
      apply_softmax(p_, head, Form::kPlain, right_[r]);
      for (int order = 0; order < orders_; ++order) {
        apply_logit_rules(p_, seq_, token, head, form_of(order), naive(r, order).p);
        apply_softmax(p_, head, form_of(order), naive(r, order));
        for (float& p : naive(r, order).p) p = rounded_probability(p_.kv_dtype, p);
      }
    }
    for (int tile = 0; tile < tiles_; ++tile) {
      const bool finite = load_values(tile);
      const std::size_t at = static_cast<std::size_t>(tile) * kTileTokens;
      const int count = std::min(tokens_ - tile * kTileTokens, kTileTokens);
      for (int r = 0; r < n; ++r) {
        add_values(&right_[r].p[at], twice_.data(), 0, count, dv_, finite, right_[r].o.data());
        for (int order = 0; order < orders_; ++order) {
          add_values(&naive(r, order).p[at], single_.data(), order * count / orders_, count, dv_, finite, naive(r, order).o.data());
        }
      }
    }
    for (int r = 0; r < n; ++r) finish(begin + r, r, keys[r]);
  }

  void finish(std::int64_t row, int r, std::int64_t keys) {
    const std::int64_t at = (seq_.q_first + query_token(row)) * p_.q_heads + q_head(row);
    const RowValues<double>& right = right_[r];
    result_.row[at] = keys > 0 ? Reference::kWithKeys : Reference::kWithoutKeys;
    result_.lse[at] = right.lse;
    for (int i = 0; i < dv_; ++i) result_.o[at * dv_ + i] = keys > 0 ? right.o[i] / right.sum : 0.0;
    if (keys == 0) return;
    for (int order = 0; order < orders_; ++order) {
      const RowValues<float>& row32 = naive(r, order);
      lse_error = std::max(lse_error, std::abs(row32.lse - right.lse));  // std::max passes a NaN over
      for (int i = 0; i < dv_; ++i) {
        o_error = std::max(o_error, std::abs(double{row32.o[i] / row32.sum} - result_.o[at * dv_ + i]));
      }
    }
  }

  // K of a tile as [d, kTileTokens], so that a dot product runs in order while tokens lie side by side. Tokens past the end are 0.
  void load_keys(int tile) {
    for (int t = 0; t < kTileTokens; ++t) {
      const int token = tile * kTileTokens + t;
      const bool exists = token < tokens_;
      const std::int64_t start = exists ? token_start(p_, p_.k, seq_.index, std::int64_t{seq_.first_token} + token, kv_head_) : 0;
      for (int i = 0; i < d_; ++i) {
        single_[std::size_t{1} * i * kTileTokens + t] = exists ? stored(p_.k.data, p_.kv_dtype, start + i) : 0.0f;
      }
    }
    for (std::size_t i = 0; i < std::size_t{1} * d_ * kTileTokens; ++i) twice_[i] = single_[i];
  }

  // V of a tile as [tokens, dv]; false when a value is not finite.
  bool load_values(int tile) {
    const int count = std::min(tokens_ - tile * kTileTokens, kTileTokens);
    double zero = 0.0;  // stays 0 unless a value is NaN or infinite
    for (int t = 0; t < count; ++t) {
      const std::int64_t token = std::int64_t{seq_.first_token} + tile * kTileTokens + t;
      const std::int64_t start = token_start(p_, p_.v, seq_.index, token, kv_head_);
      for (int i = 0; i < dv_; ++i) single_[std::size_t{1} * t * dv_ + i] = stored(p_.v.data, p_.kv_dtype, start + i);
    }
    for (std::size_t i = 0; i < std::size_t{1} * count * dv_; ++i) {
      twice_[i] = single_[i];
      zero += twice_[i] * 0.0;
    }
    return zero == 0.0;
  }

  int query_token(std::int64_t row) const { return static_cast<int>(row / group_); }
  int q_head(std::int64_t row) const { return kv_head_ * group_ + static_cast<int>(row % group_); }
  static Form form_of(int order) { return order % 2 == 0 ? Form::kPlain : Form::kFolded; }
  RowValues<float>& naive(int r, int order) { return naive_[std::size_t{1} * r * orders_ + order]; }

  const Problem& p_;
  Seq seq_;
  int kv_head_, d_, dv_, group_, tokens_, tiles_, orders_;
  Reference& result_;
  std::vector<float> single_;  // a tile of K or V
  std::vector<double> twice_;  // the same in float64
  std::vector<RowValues<double>> right_;
  std::vector<RowValues<float>> naive_;  // [rows, orders]
};

void take(Worst& worst, double value, double right, double tolerance, int seq, int token, int q_head, int dim) {
  const bool same = value == right || (std::isnan(value) && std::isnan(right));
  double error = same ? 0.0 : std::abs(value - right);
  if (std::isnan(error)) error = kInfinity;
  const double ratio = error == 0.0 ? 0.0 : std::isinf(error) ? kInfinity : error / tolerance;
  if (worst.seq < 0 || ratio > worst.ratio) worst = Worst{error, tolerance, ratio, seq, token, q_head, dim};
}

}  // namespace

Reference compute_reference(const Problem& problem, const Sample& sample) {
  Reference result;
  const std::int64_t dims = problem.head_dim_v != 0 ? problem.head_dim_v : problem.head_dim;
  const bool packed = problem.batch > 0 && problem.cu_seqlens_q != nullptr;
  const std::int64_t tokens = packed ? problem.cu_seqlens_q[problem.batch] : std::int64_t{problem.batch} * problem.q_len;
  result.o.assign(tokens * problem.q_heads * dims, std::nan(""));
  result.lse.assign(tokens * problem.q_heads, std::nan(""));
  result.row.assign(tokens * problem.q_heads, Reference::kNotComputed);
  result.naive_o_error.assign(problem.batch, 0.0);
  result.naive_lse_error.assign(problem.batch, 0.0);
  const int heads = sample.kv_heads_per_seq > 0 ? std::min(sample.kv_heads_per_seq, problem.kv_heads) : problem.kv_heads;
  // Longest seqs first, so that the threads end together.
  std::vector<Seq> seqs(problem.batch);
  for (int seq = 0; seq < problem.batch; ++seq) seqs[seq] = seq_of(problem, seq);
  std::stable_sort(seqs.begin(), seqs.end(), [](const Seq& a, const Seq& b) { return a.kv_len > b.kv_len; });
  double cost = 0;
  for (const Seq& seq : seqs) {
    result.rows += std::int64_t{seq.q_len} * (problem.q_heads / problem.kv_heads) * heads;
    cost += static_cast<double>(seq.kv_len) * seq.q_len * problem.q_heads;
  }

  const std::int64_t items = std::int64_t{problem.batch} * heads;
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (std::int64_t item = next++; item < items; item = next++) {
        if (sample.stop != nullptr && sample.stop->load(std::memory_order_relaxed)) return;
        const Seq& seq = seqs[item / heads];
        const std::int64_t kv_head = (seq.index + item % heads * problem.kv_heads / heads) % problem.kv_heads;
        HeadRows rows(problem, seq, static_cast<int>(kv_head), result);
        rows.compute();
        const std::lock_guard<std::mutex> lock(mutex);
        result.naive_o_error[seq.index] = std::max(result.naive_o_error[seq.index], rows.o_error);
        result.naive_lse_error[seq.index] = std::max(result.naive_lse_error[seq.index], rows.lse_error);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
    }
  };
  std::int64_t threads = sample.threads > 0 ? sample.threads : std::max(1u, std::thread::hardware_concurrency());
  threads = cost < 4096 ? 1 : std::min(threads, items);  // for less, starting a thread takes longer
  std::vector<std::thread> others;
  while (static_cast<std::int64_t>(others.size()) + 1 < threads) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
  return result;
}

Comparison compare(const Problem& problem, const Reference& reference) {
  Comparison result;
  const int dims = problem.head_dim_v != 0 ? problem.head_dim_v : problem.head_dim;
  for (int index = 0; index < problem.batch; ++index) {
    const Seq seq = seq_of(problem, index);
    for (int token = 0; token < seq.q_len; ++token) {
      for (int head = 0; head < problem.q_heads; ++head) {
        const std::int64_t at = (seq.q_first + token) * problem.q_heads + head;
        if (reference.row[at] == Reference::kNotComputed) continue;
        ++result.rows;
        const bool keys = reference.row[at] == Reference::kWithKeys;
        const std::int64_t start = row_start(problem, problem.o, seq, token, head);
        for (int i = 0; i < dims; ++i) {
          const double right = reference.o[at * dims + i];
          const double tolerance = keys ? 2.0 * reference.naive_o_error[index] + ulp(problem.q_dtype, right) : 0.0;
          take(result.o, stored(problem.o.data, problem.q_dtype, start + i), right, tolerance, index, token, head, i);
        }
        if (problem.lse == nullptr) continue;
        const double right = reference.lse[at];
        const double naive = keys ? 2.0 * reference.naive_lse_error[index] : 0.0;
        take(result.lse, problem.lse[at], right, std::isinf(right) ? 0.0 : naive + ulp(DType::kFloat32, right), index, token, head, -1);
      }
    }
  }
  return result;
}

}  // namespace leanattn
