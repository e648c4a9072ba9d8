// SPDX-License-Identifier: Apache-2.0
// The plan as data, JSON, text and SVG, against hand-computed examples and sums spelled out here.
#include "tools/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "leanattn/problem.h"
#include "schedule_model.h"

namespace leanattn {
namespace {

using Json = nlohmann::json;

const Json& policy_of(const Json& json, const std::string& name) {
  for (const Json& policy : json.at("policies")) {
    if (policy.at("policy") == name) return policy;
  }
  throw std::runtime_error("no policy " + name);
}

PlanRequest two_heads_on_five_workers() {
  PlanRequest request;
  request.kv_lens = {160};
  request.q_heads = request.kv_heads = 2;
  request.workers = 5;
  request.tile_tokens = 16;
  request.policies = {{Policy::kLean, 0}, {Policy::kFlashDecoding, 2}, {Policy::kFa2, 0}};
  return request;
}

PlanRequest mixed_batch(int workers) {
  PlanRequest request;
  request.kv_lens = {6758, 7322, 123192, 1030, 2300, 18210, 35000, 5120, 64300, 9010, 7790, 3333, 15620, 88000, 41200, 12000};
  request.q_heads = 32;
  request.kv_heads = 8;
  request.workers = workers;
  return request;
}

// Two outputs of ten tiles. lean: five times four tiles. Two splits: four of five workers for five tiles. fa2: two workers for ten.
TEST(Plan, FigureOneByHand) {
  const Json json = Json::parse(plan_json(two_heads_on_five_workers()));
  const struct {
    const char* name;
    int makespan;
    double busy_share;
    std::vector<int> busy;
    std::size_t merges;
  } expected[] = {
      {"lean", 4, 1.0, {4, 4, 4, 4, 4}, 2}, {"flashdecoding:2", 5, 0.8, {5, 5, 5, 5, 0}, 2}, {"fa2", 10, 0.4, {10, 10, 0, 0, 0}, 0}};
  for (const auto& row : expected) {
    const Json& policy = policy_of(json, row.name);
    EXPECT_EQ(policy.at("makespan_tiles"), row.makespan);
    EXPECT_DOUBLE_EQ(policy.at("busy_share"), row.busy_share);
    EXPECT_EQ(policy.at("busy_tiles").get<std::vector<int>>(), row.busy);
    EXPECT_EQ(policy.at("merges").size(), row.merges);
  }
  const Json& lean = policy_of(json, "lean");
  EXPECT_EQ(lean.at("merges")[0].at("segments").get<std::vector<int>>(), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(lean.at("merges")[1].at("segments").get<std::vector<int>>(), (std::vector<int>{3, 4, 5}));
  const Json& fourth = lean.at("segments")[3];
  EXPECT_EQ(fourth.at("worker"), 2);
  EXPECT_EQ(fourth.at("output"), 1);
  EXPECT_EQ(fourth.at("tokens").get<std::vector<int>>(), (std::vector<int>{0, 32}));
  EXPECT_EQ(fourth.at("start_tiles"), 2);
  EXPECT_EQ(fourth.at("end_tiles"), 4);
}

// Outputs of 5, 1, 1, 4 tiles on two workers: worker 0 takes 5, worker 1 takes 1, 1, 4. With a fragment cost of 2: 7 and 3, 3, 6 → the
// last output goes to worker 1, free at 6 before 7.
TEST(Plan, OutputsGoToTheWorkerThatIsFreeFirst) {
  PlanRequest request;
  request.kv_lens = {50, 10, 10, 40};
  request.workers = 2;
  request.tile_tokens = 10;
  request.policies = {{Policy::kFa2, 0}};
  const std::vector<int> workers{0, 1, 1, 1};
  for (const int cost : {0, 2}) {
    request.fragment_cost_tiles = cost;
    const std::vector<PlannedPolicy> plans = make_plans(request);
    const Plan& plan = plans[0].plan;
    ASSERT_EQ(plan.segments.size(), 4u);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(plan.segments[i].worker, workers[i]);
    EXPECT_EQ(plan.busy_tiles, (cost == 0 ? std::vector<long long>{5, 6} : std::vector<long long>{7, 12}));
    EXPECT_EQ(plan.makespan_tiles, cost == 0 ? 6 : 12);
    EXPECT_DOUBLE_EQ(plan.busy_share, cost == 0 ? 11.0 / 12.0 : 19.0 / 24.0);
  }
}

// Every plan over random requests: tokens once, workers do one thing at a time, busy and makespan are the sums, merges are complete.
TEST(Plan, JsonAgreesWithSumsOverRandomRequests) {
  schedule_test::Random random(9);
  for (int round = 0; round < 400; ++round) {
    PlanRequest request;
    const int seqs = random.between(0, 8);
    request.tile_tokens = random.between(1, 64);
    for (int seq = 0; seq < seqs; ++seq) request.kv_lens.push_back(random.one_in(5) ? 0 : random.between(1, 40 * request.tile_tokens));
    request.kv_heads = random.between(1, 4);
    request.q_heads = request.kv_heads * random.between(1, 8);
    request.q_len = random.one_in(4) ? random.between(0, 5) : 1;
    request.workers = random.between(1, 40);
    request.policies = {{Policy::kLean, 0}, {Policy::kFlashDecoding, random.between(0, 6)}, {Policy::kFa2, 0}};
    request.head_order = random.one_in(2) ? HeadOrder::kBeside : HeadOrder::kAuto;
    request.batch_invariant = random.one_in(3);
    request.chunk_tiles = random.between(0, 5);
    request.fragment_cost_tiles = random.one_in(2) ? random.between(0, 5) : 0;
    const Json json = Json::parse(plan_json(request));
    ASSERT_EQ(json.at("policies").size(), 3u);
    for (const Json& policy : json.at("policies")) {
      std::vector<long long> busy(request.workers, 0), last_end(request.workers, 0);
      std::map<std::tuple<int, int>, std::vector<int>> tokens;  // (seq, KV head) → times each token is read
      std::map<std::tuple<int, int>, int> pieces;               // (seq, output)
      long long makespan = 0;
      for (const Json& segment : policy.at("segments")) {
        const int worker = segment.at("worker"), seq = segment.at("seq");
        const long long start = segment.at("start_tiles"), end = segment.at("end_tiles");
        ASSERT_EQ(start, last_end[worker]);  // no gap before the worker's last segment
        ASSERT_EQ(end - start, segment.at("tiles")[1].get<int>() - segment.at("tiles")[0].get<int>() + request.fragment_cost_tiles);
        last_end[worker] = end;
        busy[worker] += end - start;
        makespan = std::max(makespan, end);
        for (int head = segment.at("kv_heads")[0]; head < segment.at("kv_heads")[1]; ++head) {
          auto& times = tokens[{seq, head}];
          times.resize(request.kv_lens[seq]);
          for (int token = segment.at("tokens")[0]; token < segment.at("tokens")[1]; ++token) ++times[token];
        }
        ++pieces[{seq, segment.at("output").get<int>()}];
      }
      ASSERT_EQ(policy.at("busy_tiles").get<std::vector<long long>>(), busy);
      ASSERT_EQ(policy.at("makespan_tiles"), makespan);
      long long all = 0;
      for (const long long tiles : busy) all += tiles;
      ASSERT_NEAR(policy.at("busy_share").get<double>() * request.workers * makespan, all, 1e-6 * (1 + all));
      ASSERT_EQ(tokens.size(), request.q_len == 0 ? 0u : static_cast<std::size_t>(seqs) * request.kv_heads);
      for (const auto& [key, times] : tokens) ASSERT_EQ(std::count(times.begin(), times.end(), 1), static_cast<long>(times.size()));
      std::size_t merges = 0;
      for (const auto& [key, count] : pieces) merges += count > 1;
      ASSERT_EQ(policy.at("merges").size(), merges);
      for (const Json& merge : policy.at("merges")) {
        int tile = 0;
        for (const int index : merge.at("segments")) {
          const Json& segment = policy.at("segments")[index];
          ASSERT_EQ(segment.at("seq"), merge.at("seq"));
          ASSERT_EQ(segment.at("output"), merge.at("output"));
          ASSERT_TRUE(segment.at("cut").get<bool>());
          ASSERT_EQ(segment.at("tiles")[0], tile);
          tile = segment.at("tiles")[1];
        }
        ASSERT_EQ(static_cast<int>(merge.at("segments").size()), (pieces[{merge.at("seq").get<int>(), merge.at("output").get<int>()}]));
      }
      if (policy.at("policy") == "lean" && request.fragment_cost_tiles == 0 && !request.batch_invariant && all > 0) {
        const auto [least, most] = std::minmax_element(busy.begin(), busy.end());
        ASSERT_LE(*most - *least, 1);
      }
    }
  }
}

// Balanced tags, quoted attributes, no stray markup: enough of XML for what the picture uses.
void expect_well_formed(const std::string& svg) {
  std::vector<std::string> open;
  std::size_t at = 0;
  while (at < svg.size()) {
    if (svg[at] != '<') {
      ASSERT_NE(svg[at], '>') << svg.substr(at, 40);
      ASSERT_NE(svg[at], '&') << svg.substr(at, 40);
      ++at;
      continue;
    }
    const std::size_t end = svg.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = svg.substr(at + 1, end - at - 1);
    ASSERT_EQ(tag.find('<'), std::string::npos) << tag;
    ASSERT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty());
      ASSERT_EQ(open.back(), tag.substr(1));
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
    at = end + 1;
  }
  ASSERT_TRUE(open.empty());
  ASSERT_EQ(svg.find("nan"), std::string::npos);
  ASSERT_EQ(svg.find("inf"), std::string::npos);
}

TEST(Plan, SvgIsWellFormedSmallAndDeterministic) {
  std::vector<PlanRequest> requests{two_heads_on_five_workers(), mixed_batch(8), mixed_batch(2), mixed_batch(132), {}};
  requests.push_back(mixed_batch(8));
  requests.back().head_order = HeadOrder::kBeside;
  requests.push_back(mixed_batch(132));
  requests.back().policies = {{Policy::kLean, 0}, {Policy::kFlashDecoding, 16}, {Policy::kFa2, 0}};
  requests.push_back(mixed_batch(132));
  requests.back().batch_invariant = true;
  requests.push_back({});
  requests.back().kv_lens = {0, 0};
  requests.push_back(mixed_batch(3));
  requests.back().q_len = 0;
  for (const PlanRequest& request : requests) {
    const std::string svg = plan_svg(request);
    expect_well_formed(svg);
    if (HasFatalFailure()) return;
    EXPECT_LE(svg.size(), 200'000u);
    EXPECT_EQ(svg, plan_svg(request));
    EXPECT_EQ(svg.rfind("<svg ", 0), 0u);
  }
}

TEST(Plan, SvgShowsEverySegmentAndMerge) {
  const std::string svg = plan_svg(two_heads_on_five_workers());
  const auto count = [&](const std::string& text) {
    int found = 0;
    for (std::size_t at = svg.find(text); at != std::string::npos; at = svg.find(text, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("<title>worker "), 6 + 4 + 2);
  EXPECT_EQ(count("partials merge</title>"), 4);
  EXPECT_EQ(count(": 3 partials merge</title>"), 2);
  EXPECT_EQ(count("5 workers busy 100 % of 4 tiles<"), 1);
  EXPECT_EQ(count("5 workers busy 40 % of 10 tiles, 2.50 × the time of lean"), 1);
}

TEST(Plan, TextShowsBusySharesAndBars) {
  const std::string text = plan_text(two_heads_on_five_workers());
  EXPECT_NE(text.find("lean: 5 workers busy 100 % of 4 tiles\n"), std::string::npos) << text;
  EXPECT_NE(text.find("fa2: 5 workers busy 40 % of 10 tiles, 2.50 × the time of lean\n"), std::string::npos) << text;
  EXPECT_NE(text.find("AAAAAABBBBBB"), std::string::npos) << text;  // worker 2 of lean ends one output and starts the next
  EXPECT_NE(text.find("....."), std::string::npos) << text;
  EXPECT_NE(plan_text({}).find("0 seqs"), std::string::npos);
}

TEST(Plan, MixedBatchOf132Workers) {
  const std::vector<PlannedPolicy> plans = make_plans(mixed_batch(132));
  ASSERT_EQ(plans.size(), 3u);
  EXPECT_EQ(plans[0].name, "lean");
  EXPECT_EQ(plans[1].name, "flashdecoding:1");  // 128 outputs fill 80 % of 132 workers
  EXPECT_EQ(plans[2].name, "fa2");
  EXPECT_GT(plans[0].plan.busy_share, 0.99);
  EXPECT_LT(plans[2].plan.busy_share, 0.25);
  EXPECT_EQ(plans[2].plan.makespan_tiles, (123192 + 255) / 256);
}

TEST(Plan, RejectsWithNamesAndNumbers) {
  const auto sentence = [](auto change) -> std::string {
    PlanRequest request = two_heads_on_five_workers();
    change(request);
    try {
      plan_json(request);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(sentence([](PlanRequest& r) { r.kv_lens = {4, -1}; }), "kv_len -1 of seq 1: at least 0");
  EXPECT_EQ(sentence([](PlanRequest& r) { r.kv_heads = 0; }), "kv_heads 0: at least 1");
  EXPECT_EQ(sentence([](PlanRequest& r) { r.q_heads = 3; }), "q_heads 3: a multiple of kv_heads 2");
  EXPECT_EQ(sentence([](PlanRequest& r) { r.workers = 0; }), "workers 0: 1 … 1000000");
  EXPECT_EQ(sentence([](PlanRequest& r) { r.tile_tokens = 0; }), "tile_tokens 0: at least 1");
  EXPECT_EQ(sentence([](PlanRequest& r) { r.q_len = -1; }), "q_len -1: 0 … 1073741823");
  EXPECT_EQ(sentence([](PlanRequest& r) { r.window_left = -2; }), "window_left -2: at least -1");
  EXPECT_EQ(sentence([](PlanRequest& r) { r.policies = {{Policy::kFlashDecoding, -1}}; }), "splits -1: at least 0");
  EXPECT_EQ(sentence([](PlanRequest& r) {
              r.policies = {{Policy::kFlashDecoding, 2'000'000}};
            }),
            "flashdecoding:2000000: 4000000 stretches; a plan shows at most 2000000");
}

}  // namespace
}  // namespace leanattn
