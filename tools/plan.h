// SPDX-License-Identifier: Apache-2.0
// `leanattn plan`: the cut of a batch under one or more policies, as text, JSON or SVG. The same request gives the same characters.
#pragma once

#include <string>
#include <vector>

#include "schedule.h"

namespace leanattn {

struct PolicyChoice {
  Policy policy = Policy::kLean;
  int splits = 0;  // flashdecoding: splits an output; 0: the usual heuristic (flashdecoding_splits)
};

struct PlanRequest {
  std::vector<int> kv_lens;                 // tokens of each seq, ≥ 0
  int q_heads = 1;                          // a multiple of kv_heads
  int kv_heads = 1;                         // ≥ 1
  int q_len = 1;                            // new tokens of every seq, ≥ 0
  int workers = 1;                          // ≥ 1
  int tile_tokens = 256;                    // ≥ 1
  std::vector<PolicyChoice> policies;       // in the order shown; empty: lean, flashdecoding, fa2
  HeadOrder head_order = HeadOrder::kAuto;  // kAuto: along
  bool batch_invariant = false;             // cuts on chunk borders only
  int chunk_tiles = 0;                      // batch_invariant: tiles a chunk; 0: 16
  int fragment_cost_tiles = 0;              // fixed cost of a fragment, in tiles, ≥ 0
  int window_left = -1;                     // left window in tokens; −1: none
};

struct PlannedPolicy {
  std::string name;  // "lean", "fa2", "flashdecoding:8"
  Plan plan;
};

// All of these throw Error kInvalidArgument for a request outside the ranges above.
std::vector<PlannedPolicy> make_plans(const PlanRequest& request);
std::string plan_text(const PlanRequest& request);
std::string plan_json(const PlanRequest& request);
std::string plan_svg(const PlanRequest& request);

// Sentences that text and picture share.
std::string plan_title(const PlanRequest& request);  // "16 seqs of 1,024 to 123,192 tokens, 32/8 heads, 8 workers"
// "8 workers busy 41 % of 482 tiles", and behind it unless planned is first: ", 2.40 × the time of lean"
std::string plan_busy(const PlannedPolicy& planned, const PlannedPolicy& first);
std::string with_commas(long long value);  // "123,192"

}  // namespace leanattn
