// SPDX-License-Identifier: Apache-2.0
#include "tools/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "leanattn/problem.h"

namespace leanattn {
namespace {

constexpr int kDefaultChunkTiles = 16;
constexpr int kBarColumns = 72;
constexpr int kMostRows = 64;  // workers that the text shows of each policy
constexpr long long kMostSegments = 2'000'000;

void require(bool good, const std::string& sentence) {
  if (!good) throw Error(Status::kInvalidArgument, sentence);
}

void check_request(const PlanRequest& request) {
  for (std::size_t seq = 0; seq < request.kv_lens.size(); ++seq) {
    require(request.kv_lens[seq] >= 0, fmt::format("kv_len {} of seq {}: at least 0", request.kv_lens[seq], seq));
  }
  require(request.kv_heads >= 1, fmt::format("kv_heads {}: at least 1", request.kv_heads));
  require(request.q_heads >= 1 && request.q_heads % request.kv_heads == 0,
          fmt::format("q_heads {}: a multiple of kv_heads {}", request.q_heads, request.kv_heads));
  require(request.q_len >= 0 && static_cast<long long>(request.q_len) * request.q_heads <= 0x7fffffffLL,
          fmt::format("q_len {}: 0 … {}", request.q_len, 0x7fffffff / request.q_heads));
  require(request.workers >= 1 && request.workers <= 1'000'000, fmt::format("workers {}: 1 … 1000000", request.workers));
  require(request.tile_tokens >= 1, fmt::format("tile_tokens {}: at least 1", request.tile_tokens));
  require(request.chunk_tiles >= 0, fmt::format("chunk_tiles {}: at least 0", request.chunk_tiles));
  require(request.fragment_cost_tiles >= 0, fmt::format("fragment_cost_tiles {}: at least 0", request.fragment_cost_tiles));
  require(request.window_left >= -1, fmt::format("window_left {}: at least -1", request.window_left));
  for (const PolicyChoice& choice : request.policies) {
    require(choice.splits >= 0, fmt::format("splits {}: at least 0", choice.splits));
  }
}

Line request_line(const PlanRequest& request) {
  Line line;
  line.num_seqs = static_cast<int>(request.kv_lens.size());
  line.kv_lens = request.kv_lens.data();
  line.q_len = request.q_len;
  line.kv_heads = request.kv_heads;
  line.group = request.q_heads / request.kv_heads;
  line.head_order = request.head_order == HeadOrder::kAuto ? HeadOrder::kAlong : request.head_order;
  line.window_left = request.window_left;
  line.tile_tokens = request.tile_tokens;
  if (request.batch_invariant) line.chunk_tiles = request.chunk_tiles > 0 ? request.chunk_tiles : kDefaultChunkTiles;
  line.fragment_cost_tiles = request.fragment_cost_tiles;
  line.workers = request.workers;
  return line;
}

// A letter an output where the alphabet is long enough, else a letter a seq.
struct Letters {
  std::vector<long long> first;  // [seqs]
  bool by_output = true;

  explicit Letters(const Line& line) {
    long long outputs = 0;
    for (int seq = 0; seq < line.num_seqs; ++seq) {
      first.push_back(outputs);
      outputs += seq_outputs(line, seq);
    }
    by_output = outputs <= 26;
    for (int seq = 0; !by_output && seq < line.num_seqs; ++seq) first[seq] = seq;
  }
  char of(const PlanSegment& segment) const {
    const long long letter = first[segment.segment.seq] + (by_output ? segment.segment.output : 0);
    return static_cast<char>((segment.merge >= 0 ? 'A' : 'a') + letter % 26);
  }
};

std::string segment_letters(const Plan& plan, int worker, long long span_tiles, const std::vector<std::vector<int>>& of_worker,
                            const Letters& letters) {
  std::string bar(kBarColumns, ' ');
  for (int column = 0; column < kBarColumns; ++column) {
    // What the worker does in the middle of the column.
    const double time = (column + 0.5) * static_cast<double>(span_tiles) / kBarColumns;
    if (time < static_cast<double>(plan.makespan_tiles)) bar[column] = '.';
    const std::vector<int>& segments = of_worker[worker];
    const auto after = std::partition_point(segments.begin(), segments.end(),
                                            [&](int i) { return static_cast<double>(plan.segments[i].end_tiles) <= time; });
    if (after == segments.end() || static_cast<double>(plan.segments[*after].start_tiles) > time) continue;
    bar[column] = letters.of(plan.segments[*after]);
  }
  return bar;
}

nlohmann::ordered_json segment_json(const PlanSegment& segment) {
  return {{"worker", segment.worker},
          {"stretch", segment.stretch},
          {"seq", segment.segment.seq},
          {"output", segment.segment.output},
          {"kv_heads", {segment.kv_head_begin, segment.kv_head_end}},
          {"row_block", segment.row_block},
          {"tiles", {segment.segment.tile_begin, segment.segment.tile_end}},
          {"tokens", {segment.token_begin, segment.token_end}},
          {"start_tiles", segment.start_tiles},
          {"end_tiles", segment.end_tiles},
          {"cut", segment.merge >= 0}};
}

}  // namespace

std::string with_commas(long long value) {
  std::string text = std::to_string(value);
  for (int i = static_cast<int>(text.size()) - 3; i > (value < 0 ? 1 : 0); i -= 3) text.insert(i, ",");
  return text;
}

std::vector<PlannedPolicy> make_plans(const PlanRequest& request) {
  check_request(request);
  std::vector<PolicyChoice> policies = request.policies;
  if (policies.empty()) policies = {{Policy::kLean, 0}, {Policy::kFlashDecoding, 0}, {Policy::kFa2, 0}};
  std::vector<PlannedPolicy> plans;
  for (const PolicyChoice& choice : policies) {
    Line line = request_line(request);
    line.policy = choice.policy;
    std::string name = choice.policy == Policy::kLean ? "lean" : "fa2";
    if (choice.policy == Policy::kFlashDecoding) {
      line.splits = choice.splits > 0 ? choice.splits : default_splits(line, request.workers);
      name = fmt::format("flashdecoding:{}", line.splits);
    }
    const long long stretches = make_cut(line).stretches;
    require(stretches <= kMostSegments, fmt::format("{}: {} stretches; a plan shows at most {}", name, stretches, kMostSegments));
    plans.push_back({name, make_plan(line, request.workers)});
  }
  return plans;
}

std::string plan_title(const PlanRequest& request) {
  const int seqs = static_cast<int>(request.kv_lens.size());
  std::string title = fmt::format("{} seq{}", with_commas(seqs), seqs == 1 ? "" : "s");
  if (seqs > 0) {
    const auto [least, most] = std::minmax_element(request.kv_lens.begin(), request.kv_lens.end());
    title +=
        *least == *most ? fmt::format(" of {}", with_commas(*most)) : fmt::format(" of {} to {}", with_commas(*least), with_commas(*most));
    title += *most == 1 ? " token" : " tokens";
  }
  title += fmt::format(", {}/{} heads", request.q_heads, request.kv_heads);
  if (request.head_order == HeadOrder::kBeside) title += " side by side";
  if (request.q_len != 1) title += fmt::format(", q_len {}", request.q_len);
  if (request.window_left >= 0) title += fmt::format(", window {}", with_commas(request.window_left));
  if (request.batch_invariant) title += ", batch-invariant";
  return title + fmt::format(", {} worker{}", with_commas(request.workers), request.workers == 1 ? "" : "s");
}

std::string plan_busy(const PlannedPolicy& planned, const PlannedPolicy& first) {
  const Plan& plan = planned.plan;
  // Rounded down, so that only a cut without a gap is called 100 %.
  std::string text = fmt::format("{} worker{} busy {} % of {} tile{}", with_commas(plan.workers), plan.workers == 1 ? "" : "s",
                                 static_cast<int>(std::floor(plan.busy_share * 100.0 + 1e-9)), with_commas(plan.makespan_tiles),
                                 plan.makespan_tiles == 1 ? "" : "s");
  if (&planned != &first && first.plan.makespan_tiles > 0) {
    text += fmt::format(", {:.2f} × the time of {}",
                        static_cast<double>(plan.makespan_tiles) / static_cast<double>(first.plan.makespan_tiles), first.name);
  }
  return text;
}

std::string plan_text(const PlanRequest& request) {
  const std::vector<PlannedPolicy> plans = make_plans(request);
  const Letters letters(request_line(request));
  std::string text = plan_title(request) + "\n";
  text += fmt::format("time in tiles of {} tokens; letter = {}, capital = cut, . = idle\n\n", with_commas(request.tile_tokens),
                      letters.by_output ? "output" : "seq");
  text +=
      fmt::format("{:<20} {:>10} {:>10} {:>10} {:>10} {:>12} {:>8}\n", "policy", "outputs", "cut", "stretches", "segments", "time", "busy");
  long long span = 1;
  for (const PlannedPolicy& planned : plans) {
    const Plan& plan = planned.plan;
    span = std::max(span, plan.makespan_tiles);
    text += fmt::format("{:<20} {:>10} {:>10} {:>10} {:>10} {:>12} {:>6.1f} %\n", planned.name, with_commas(plan.outputs),
                        with_commas(static_cast<long long>(plan.merges.size())), with_commas(plan.cut.stretches),
                        with_commas(static_cast<long long>(plan.segments.size())), with_commas(plan.makespan_tiles),
                        std::floor(plan.busy_share * 1000.0 + 1e-9) / 10.0);
  }
  for (const PlannedPolicy& planned : plans) {
    const Plan& plan = planned.plan;
    text += fmt::format("\n{}: {}\n", planned.name, plan_busy(planned, plans.front()));
    std::vector<std::vector<int>> of_worker(plan.workers);
    for (std::size_t i = 0; i < plan.segments.size(); ++i) of_worker[plan.segments[i].worker].push_back(static_cast<int>(i));
    const int rows = std::min(plan.workers, kMostRows);
    for (int worker = 0; worker < rows; ++worker) {
      text += fmt::format("{:>7} |{}| {:>10}\n", worker, segment_letters(plan, worker, span, of_worker, letters),
                          with_commas(plan.busy_tiles[worker]));
    }
    if (rows < plan.workers) text += fmt::format("        … and {} more workers\n", with_commas(plan.workers - rows));
  }
  return text;
}

std::string plan_json(const PlanRequest& request) {
  const std::vector<PlannedPolicy> plans = make_plans(request);
  nlohmann::ordered_json json{{"kv_lens", request.kv_lens},
                              {"q_heads", request.q_heads},
                              {"kv_heads", request.kv_heads},
                              {"q_len", request.q_len},
                              {"workers", request.workers},
                              {"tile_tokens", request.tile_tokens},
                              {"head_order", request.head_order == HeadOrder::kBeside ? "beside" : "along"},
                              {"chunk_tiles", request_line(request).chunk_tiles},
                              {"fragment_cost_tiles", request.fragment_cost_tiles},
                              {"window_left", request.window_left},
                              {"policies", nlohmann::ordered_json::array()}};
  for (const PlannedPolicy& planned : plans) {
    const Plan& plan = planned.plan;
    nlohmann::ordered_json segments = nlohmann::ordered_json::array(), merges = nlohmann::ordered_json::array();
    for (const PlanSegment& segment : plan.segments) segments.push_back(segment_json(segment));
    for (const PlanMerge& merge : plan.merges) {
      merges.push_back({{"seq", merge.seq}, {"output", merge.output}, {"segments", merge.segments}});
    }
    json["policies"].push_back({{"policy", planned.name},
                                {"outputs", plan.outputs},
                                {"units", plan.cut.units},
                                {"stretches", plan.cut.stretches},
                                {"makespan_tiles", plan.makespan_tiles},
                                {"busy_share", plan.busy_share},
                                {"busy_tiles", plan.busy_tiles},
                                {"segments", std::move(segments)},
                                {"merges", std::move(merges)}});
  }
  return json.dump() + "\n";
}

}  // namespace leanattn
