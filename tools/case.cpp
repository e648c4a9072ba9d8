// SPDX-License-Identifier: Apache-2.0
#include "tools/case.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>

#include <fmt/format.h>

namespace leanattn::tools {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxBatch = 1 << 20;
constexpr std::int64_t kMaxHeads = 1 << 16;
constexpr std::int64_t kMaxHeadDim = 1 << 16;
constexpr std::int64_t kMaxSplits = 1024;  // as the library

[[noreturn]] void fail(std::string_view what, std::string_view token, std::string_view allowed) {
  throw CaseError(fmt::format("{} \"{}\": expected {}", what, token, allowed));
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::vector<std::string_view> words(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  std::vector<std::string_view> found;
  for (std::size_t begin = text.find_first_not_of(kBlank); begin != std::string_view::npos;) {
    const std::size_t end = text.find_first_of(kBlank, begin);
    found.push_back(text.substr(begin, end - begin));
    begin = end == std::string_view::npos ? end : text.find_first_not_of(kBlank, end);
  }
  return found;
}

// A count without sign; nothing when it is not one or does not fit.
std::optional<std::int64_t> count_of(std::string_view token) {
  std::int64_t unit = 1;
  if (!token.empty() && (token.back() == 'k' || token.back() == 'm')) {
    unit = token.back() == 'k' ? 1 << 10 : 1 << 20;
    token.remove_suffix(1);
  }
  std::uint64_t value = 0;
  const char* end = token.data() + token.size();
  const auto [stop, error] = std::from_chars(token.data(), end, value);
  if (token.empty() || error != std::errc() || stop != end) return std::nullopt;
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max() / unit)) return std::nullopt;
  return static_cast<std::int64_t>(value) * unit;
}

bool parse_flag(std::string_view key, std::string_view token) {
  if (token != "0" && token != "1") fail(key, token, "0 or 1");
  return token == "1";
}

float parse_real(std::string_view key, std::string_view token, bool positive, bool finite = true) {
  float value = 0.0f;
  const char* end = token.data() + token.size();
  const auto [stop, error] = std::from_chars(token.data(), end, value);
  const bool good = error == std::errc() && stop == end && !token.empty() && !std::isnan(value) && (!finite || std::isfinite(value));
  if (!good || (positive && !(value > 0.0f))) fail(key, token, positive ? "a number above 0" : finite ? "a finite number" : "a number");
  return value;
}

template <typename Value>
struct Word {
  const char* text;
  Value value;
};

constexpr Word<DType> kDTypes[] = {{"bf16", DType::kBFloat16}, {"f16", DType::kFloat16}, {"f32", DType::kFloat32}};
constexpr Word<CaseLayout> kLayouts[] = {{"contiguous", CaseLayout::kContiguous},
                                         {"head_major", CaseLayout::kHeadMajor},
                                         {"ragged", CaseLayout::kRagged},
                                         {"paged", CaseLayout::kPaged}};
constexpr Word<HeadOrder> kOrders[] = {{"auto", HeadOrder::kAuto}, {"along", HeadOrder::kAlong}, {"beside", HeadOrder::kBeside}};
constexpr Word<CaseLse> kLses[] = {{"e", CaseLse::kNatural}, {"2", CaseLse::kTwo}, {"none", CaseLse::kNone}};
constexpr Word<Policy> kPolicies[] = {{"lean", Policy::kLean}, {"fa2", Policy::kFa2}, {"flashdecoding", Policy::kFlashDecoding}};

template <typename Value, std::size_t n>
Value parse_word(std::string_view key, std::string_view token, const Word<Value> (&table)[n]) {
  std::string allowed;
  for (const Word<Value>& word : table) {
    if (token == word.text) return word.value;
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", word.text);
  }
  fail(key, token, "one of " + allowed);
}

template <typename Value, std::size_t n>
const char* word_text(Value value, const Word<Value> (&table)[n]) {
  for (const Word<Value>& word : table) {
    if (value == word.value) return word.text;
  }
  return "?";
}

// What the line said, for the rules that need the whole line.
struct Said {
  std::set<std::string, std::less<>> keys;
  bool operator()(std::string_view key) const { return keys.find(key) != keys.end(); }
};

struct Key {
  const char* name;
  const char* values;
  const char* fallback;  // what holds without it
};

constexpr Key kKeys[] = {
    {"dtype", "bf16, f16, f32", "bf16"},
    {"layout", "contiguous, head_major, ragged, paged", "contiguous; ragged for a list of lengths"},
    {"page", "tokens a page; implies layout=paged", "16 with layout=paged"},
    {"interleaved", "0, 1: K and V in one buffer", "0"},
    {"strided", "0, 1: views out of a wider buffer", "0"},
    {"head_dim_v", "N", "head_dim"},
    {"q_len", "N, or one length a sequence: 1,4x3", "1"},
    {"causal", "0, 1", "1"},
    {"window", "tokens to the left", "all"},
    {"tree", "N: a random tree over q_len = N tokens", "no tree"},
    {"scale", "a number above 0", "1 / sqrt(head_dim)"},
    {"softcap", "a number above 0", "off"},
    {"alibi", "0, 1", "0"},
    {"sink", "a number such as 1.0; 1: varies by head", "none"},
    {"lse", "e, 2, none", "e"},
    {"policy", "lean, fa2, flashdecoding, flashdecoding:N", "lean"},
    {"order", "auto, along, beside", "auto"},
    {"invariant", "0, 1: batch-invariant", "0"},
    {"checked", "0, 1: lengths and page ids checked on the GPU; the CPU always checks", "0"},
    {"workers", "N", "all threads"},
    {"seed", "N", "1"},
    {"spread", "standard deviation of the logits", "1"},
};

std::string key_names() {
  std::string names;
  for (const Key& key : kKeys) names += fmt::format("{}{}", names.empty() ? "" : ", ", key.name);
  return names;
}

void parse_key(Case& c, std::string_view key, std::string_view token) {
  if (key == "dtype") {
    c.dtype = parse_dtype(token);
  } else if (key == "layout") {
    c.layout = parse_word(key, token, kLayouts);
  } else if (key == "page") {
    c.page_size = static_cast<std::int32_t>(parse_count(token, key, 1, kMaxInt32));
  } else if (key == "interleaved") {
    c.interleaved = parse_flag(key, token);
  } else if (key == "strided") {
    c.strided = parse_flag(key, token);
  } else if (key == "head_dim_v") {
    c.head_dim_v = static_cast<std::int32_t>(parse_count(token, key, 1, kMaxHeadDim));
  } else if (key == "q_len") {
    c.q_lens = parse_lengths(token, key);
  } else if (key == "causal") {
    c.causal = parse_flag(key, token);
  } else if (key == "window") {
    c.window_left = static_cast<std::int32_t>(parse_count(token, key, 0, kMaxInt32));
  } else if (key == "tree") {
    c.tree_tokens = static_cast<std::int32_t>(parse_count(token, key, 1, 1 << 16));
  } else if (key == "scale") {
    c.scale = parse_real(key, token, true);
  } else if (key == "softcap") {
    c.softcap = parse_real(key, token, true);
  } else if (key == "alibi") {
    c.alibi = parse_flag(key, token);
  } else if (key == "sink") {
    c.sink = token == "1" ? CaseSink::kVaried : CaseSink::kValue;
    c.sink_value = token == "1" ? 0.0f : parse_real(key, token, false, false);
  } else if (key == "lse") {
    c.lse = parse_word(key, token, kLses);
  } else if (key == "policy") {
    parse_policy(token, c.policy, c.splits);
  } else if (key == "order") {
    c.head_order = parse_word(key, token, kOrders);
  } else if (key == "invariant") {
    c.batch_invariant = parse_flag(key, token);
  } else if (key == "checked") {
    c.check_data = parse_flag(key, token);
  } else if (key == "workers") {
    c.workers = static_cast<std::int32_t>(parse_count(token, key, 1, 1 << 16));
  } else if (key == "seed") {
    c.seed = static_cast<std::uint64_t>(parse_count(token, key, 0, std::numeric_limits<std::int64_t>::max()));
  } else if (key == "spread") {
    c.spread = parse_real(key, token, true);
  } else {
    fail("key", key, key_names());
  }
}

// q_len=N is one number for every seq; q_len=len,len,… one each; tree alone says q_len.
void settle_q_len(Case& c, const Said& said, std::string_view q_len_token) {
  if (said("q_len")) {
    const bool list = q_len_token.find_first_of(",x") != std::string_view::npos;
    if (!list) {
      c.q_len = c.q_lens.front();
      c.q_lens.clear();
      if (c.q_len < 1) fail("q_len", q_len_token, "1 or more, or a list with one length a sequence");
    } else if (c.q_lens.size() != c.kv_lens.size()) {
      fail("q_len", q_len_token, fmt::format("one number, or {} of them: one a sequence", c.kv_lens.size()));
    }
  } else if (c.tree_tokens > 0) {
    c.q_len = c.tree_tokens;
  }
  if (c.tree_tokens > 0 && c.tree_tokens != c.max_q_len()) {
    fail("tree", std::to_string(c.tree_tokens), fmt::format("the longest q_len, {}", c.max_q_len()));
  }
}

void settle_layout(Case& c, const Said& said, bool list) {
  if (!said("layout")) c.layout = said("page") ? CaseLayout::kPaged : list ? CaseLayout::kRagged : CaseLayout::kContiguous;
  if (c.layout == CaseLayout::kPaged && !said("page")) c.page_size = 16;
  if (c.layout != CaseLayout::kPaged && said("page")) {
    fail("layout", word_text(c.layout, kLayouts), "paged, because page is given");
  }
  if (c.layout == CaseLayout::kRagged && c.total_kv() > kMaxInt32) {
    fail("lengths of", std::to_string(c.total_kv()), fmt::format("at most {} tokens in all with layout ragged", kMaxInt32));
  }
}

}  // namespace

std::int32_t Case::max_q_len() const { return q_lens.empty() ? q_len : *std::max_element(q_lens.begin(), q_lens.end()); }

std::int64_t Case::total_q() const {
  return q_lens.empty() ? std::int64_t{q_len} * batch() : std::accumulate(q_lens.begin(), q_lens.end(), std::int64_t{0});
}

std::int64_t Case::total_kv() const { return std::accumulate(kv_lens.begin(), kv_lens.end(), std::int64_t{0}); }

std::int64_t parse_count(std::string_view token, std::string_view what, std::int64_t low, std::int64_t high) {
  const std::optional<std::int64_t> value = count_of(token);
  if (!value || *value < low || *value > high) {
    fail(what, token, fmt::format("a whole number from {} to {}, with k or m if you like", low, high));
  }
  return *value;
}

std::vector<std::int32_t> parse_lengths(std::string_view token, std::string_view what) {
  std::vector<std::int32_t> lengths;
  for (const std::string_view part : split(token, ',')) {
    const std::size_t cross = part.find('x');
    const std::optional<std::int64_t> length = count_of(part.substr(0, cross));
    const std::optional<std::int64_t> times = cross == std::string_view::npos ? 1 : count_of(part.substr(cross + 1));
    if (!length || *length > kMaxInt32 || !times || *times < 1) {
      fail(what, part, fmt::format("a length from 0 to {} with k or m if you like, or one x times, such as 2kx15", kMaxInt32));
    }
    if (*times > kMaxBatch - static_cast<std::int64_t>(lengths.size())) fail(what, part, fmt::format("at most {} sequences", kMaxBatch));
    lengths.insert(lengths.end(), static_cast<std::size_t>(*times), static_cast<std::int32_t>(*length));
  }
  return lengths;
}

DType parse_dtype(std::string_view token) { return parse_word("dtype", token, kDTypes); }

void parse_policy(std::string_view token, Policy& policy, std::int32_t& splits) {
  const std::size_t colon = token.find(':');
  std::optional<std::int64_t> count = 0;
  if (colon != std::string_view::npos) count = count_of(token.substr(colon + 1));
  const std::string_view name = token.substr(0, colon);
  for (const Word<Policy>& word : kPolicies) {
    if (name != word.text || (colon != std::string_view::npos && word.value != Policy::kFlashDecoding)) continue;
    if (!count || *count > kMaxSplits || (colon != std::string_view::npos && *count < 1)) break;
    policy = word.value;
    splits = static_cast<std::int32_t>(*count);
    return;
  }
  fail("policy", token, fmt::format("one of lean, fa2, flashdecoding, or flashdecoding:N with N from 1 to {}", kMaxSplits));
}

std::string case_keys_text() {
  std::string text = fmt::format("  {:<12} {:<42} {}\n", "key", "values", "default");
  for (const Key& key : kKeys) text += fmt::format("  {:<12} {:<42} {}\n", key.name, key.values, key.fallback);
  return text;
}

Case parse_case(std::string_view text) {
  const std::vector<std::string_view> tokens = words(text);
  if (tokens.size() < 5) {
    fail("case", text, "batch q_heads kv_heads head_dim length, or - q_heads kv_heads head_dim length,length,…");
  }
  Case c;
  const bool list = tokens[0] == "-";
  const std::int64_t batch = list ? 0 : parse_count(tokens[0], "batch", 0, kMaxBatch);
  c.q_heads = static_cast<std::int32_t>(parse_count(tokens[1], "q_heads", 1, kMaxHeads));
  c.kv_heads = static_cast<std::int32_t>(parse_count(tokens[2], "kv_heads", 1, kMaxHeads));
  c.head_dim = static_cast<std::int32_t>(parse_count(tokens[3], "head_dim", 1, kMaxHeadDim));
  c.head_dim_v = c.head_dim;
  if (list) {
    c.kv_lens = parse_lengths(tokens[4], "length");
  } else {
    const auto length = static_cast<std::int32_t>(parse_count(tokens[4], "length", 0, kMaxInt32));
    c.kv_lens.assign(static_cast<std::size_t>(batch), length);
  }
  Said said;
  std::string_view q_len_token;
  for (std::size_t i = 5; i < tokens.size(); ++i) {
    const std::size_t equals = tokens[i].find('=');
    if (equals == std::string_view::npos) fail("word", tokens[i], fmt::format("key=value with a key of {}", key_names()));
    const std::string_view key = tokens[i].substr(0, equals);
    const std::string_view value = tokens[i].substr(equals + 1);
    if (key == "q_len") q_len_token = value;
    parse_key(c, key, value);
    if (!said.keys.emplace(key).second) fail("key", key, "each key once");
  }
  settle_q_len(c, said, q_len_token);
  settle_layout(c, said, list);
  return c;
}

const char* dtype_name(DType dtype) { return word_text(dtype, kDTypes); }

std::string policy_name(Policy policy, std::int32_t splits) {
  const std::string name = word_text(policy, kPolicies);
  return policy == Policy::kFlashDecoding && splits > 0 ? fmt::format("{}:{}", name, splits) : name;
}

std::string length_text(std::int64_t length) {
  if (length > 0 && length % (1 << 20) == 0) return fmt::format("{}m", length >> 20);
  if (length > 0 && length % (1 << 10) == 0) return fmt::format("{}k", length >> 10);
  return std::to_string(length);
}

std::string lengths_text(const std::vector<std::int32_t>& lengths) {
  std::string text;
  for (std::size_t i = 0; i < lengths.size();) {
    std::size_t end = i + 1;
    while (end < lengths.size() && lengths[end] == lengths[i]) ++end;
    text += (i == 0 ? "" : ",") + length_text(lengths[i]);
    if (end - i > 1) text += fmt::format("x{}", end - i);
    i = end;
  }
  return text;
}

std::string to_string(const Case& c) {
  const Case defaults;
  const bool equal = std::adjacent_find(c.kv_lens.begin(), c.kv_lens.end(), std::not_equal_to<>()) == c.kv_lens.end();
  const std::string heads = fmt::format("{} {} {}", c.q_heads, c.kv_heads, c.head_dim);
  std::string text = equal ? fmt::format("{} {} {}", c.batch(), heads, length_text(c.kv_lens.empty() ? 0 : c.kv_lens[0]))
                           : fmt::format("- {} {}", heads, lengths_text(c.kv_lens));
  const auto add = [&text](bool wanted, std::string_view key, const auto& value) {
    if (wanted) text += fmt::format(" {}={}", key, value);
  };
  const CaseLayout usual = c.page_size > 0 ? CaseLayout::kPaged : equal ? CaseLayout::kContiguous : CaseLayout::kRagged;
  add(c.dtype != defaults.dtype, "dtype", dtype_name(c.dtype));
  add(c.head_dim_v != c.head_dim, "head_dim_v", c.head_dim_v);
  add(c.layout != usual, "layout", word_text(c.layout, kLayouts));
  add(c.page_size > 0, "page", c.page_size);
  add(c.interleaved, "interleaved", 1);
  add(c.strided, "strided", 1);
  if (c.q_lens.empty()) {
    add(c.q_len != 1 && c.q_len != c.tree_tokens, "q_len", c.q_len);
  } else {
    std::string lengths = lengths_text(c.q_lens);
    add(true, "q_len", c.q_lens.size() == 1 ? lengths + "x1" : lengths);  // a lone number would mean every seq, without cu_seqlens_q
  }
  add(!c.causal, "causal", 0);
  add(c.window_left >= 0, "window", c.window_left);
  add(c.tree_tokens > 0, "tree", c.tree_tokens);
  add(c.scale != 0.0f, "scale", c.scale);
  add(c.softcap != 0.0f, "softcap", c.softcap);
  add(c.alibi, "alibi", 1);
  add(c.sink == CaseSink::kVaried, "sink", 1);
  add(c.sink == CaseSink::kValue, "sink", c.sink_value == 1.0f ? std::string("1.0") : fmt::format("{}", c.sink_value));
  add(c.lse != defaults.lse, "lse", word_text(c.lse, kLses));
  add(c.policy != defaults.policy, "policy", policy_name(c.policy, c.splits));
  add(c.head_order != defaults.head_order, "order", word_text(c.head_order, kOrders));
  add(c.batch_invariant, "invariant", 1);
  add(c.check_data, "checked", 1);
  add(c.workers > 0, "workers", c.workers);
  add(c.seed != defaults.seed, "seed", c.seed);
  add(c.spread != defaults.spread, "spread", c.spread);
  return text;
}

std::vector<Case> read_cases(std::istream& in, const std::string& source) {
  std::vector<Case> cases;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const std::string_view text = std::string_view(line).substr(0, line.find('#'));
    if (words(text).empty()) continue;
    try {
      cases.push_back(parse_case(text));
    } catch (const CaseError& error) {
      throw CaseError(fmt::format("{}:{}: {}", source, number, error.what()));
    }
  }
  return cases;
}

std::vector<Case> read_case_file(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw CaseError(fmt::format("case file \"{}\": cannot be read", path));
  std::vector<Case> cases = read_cases(in, path);
  if (cases.empty()) throw CaseError(fmt::format("case file \"{}\": holds no case", path));  // a folder reads as nothing, too
  return cases;
}

}  // namespace leanattn::tools
