// SPDX-License-Identifier: Apache-2.0
#include <fstream>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "tools/case.h"
#include "tools/commands.h"
#include "tools/output_file.h"
#include "tools/plan.h"

namespace leanattn::tools {
namespace {

struct PlanOptions {
  std::string lengths;
  std::string q_heads = "32";
  std::string kv_heads = "8";
  std::string q_len = "1";
  std::string window;
  std::string tile = "256";
  std::vector<std::string> policies;
  std::string order = "along";
  std::string format = "text";
  std::string output;
  int workers = 108;
  int fragment_cost = 0;
  bool invariant = false;
};

PlanRequest make_request(const PlanOptions& options) {
  PlanRequest request;
  request.kv_lens = parse_lengths(options.lengths, "length");
  request.q_heads = static_cast<int>(parse_count(options.q_heads, "--q-heads", 1, 1 << 16));
  request.kv_heads = static_cast<int>(parse_count(options.kv_heads, "--kv-heads", 1, 1 << 16));
  request.q_len = static_cast<int>(parse_count(options.q_len, "--q-len", 0, 1 << 16));
  request.tile_tokens = static_cast<int>(parse_count(options.tile, "--tile", 1, 1 << 30));
  if (!options.window.empty()) request.window_left = static_cast<int>(parse_count(options.window, "--window", 0, 2147483647));
  request.workers = options.workers;
  request.fragment_cost_tiles = options.fragment_cost;
  request.batch_invariant = options.invariant;
  request.head_order = options.order == "beside" ? HeadOrder::kBeside : HeadOrder::kAlong;
  for (const std::string& name : options.policies) {
    PolicyChoice choice;
    parse_policy(name, choice.policy, choice.splits);
    request.policies.push_back(choice);
  }
  return request;
}

int run_plan(const PlanOptions& options) {
  const PlanRequest request = make_request(options);
  const std::string picture = options.format == "svg"    ? plan_svg(request)
                              : options.format == "json" ? plan_json(request)
                                                         : plan_text(request);
  if (options.output.empty()) {
    fmt::print("{}", picture);
  } else {
    write_file(options.output, picture);
  }
  return kExitOk;
}

}  // namespace

Command add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Show how policies cut a batch: as text, JSON or a picture with one row a worker");
  auto options = std::make_shared<PlanOptions>();
  command->add_option("lengths", options->lengths, "context lengths, such as 128k,2kx15")->required();
  command->add_option("--q-heads", options->q_heads, "query heads")->capture_default_str();
  command->add_option("--kv-heads", options->kv_heads, "KV heads")->capture_default_str();
  command->add_option("--q-len", options->q_len, "new tokens of every sequence")->capture_default_str();
  command->add_option("--window", options->window, "left window in tokens");
  command->add_option("--workers", options->workers, "workers that share the line")->capture_default_str()->check(CLI::Range(1, 1000000));
  command->add_option("--tile", options->tile, "context tokens a tile")->capture_default_str();
  command
      ->add_option("--fragment-cost", options->fragment_cost, "what the cut charges an output, and the time shown a segment, beyond tiles")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000000));
  command->add_option("--policy", options->policies, "lean, fa2, flashdecoding or flashdecoding:N; may be repeated; all three by default")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command->add_option("--order", options->order, "KV heads along the line or beside each other")
      ->capture_default_str()
      ->check(CLI::IsMember({"along", "beside"}));
  command->add_flag("--invariant", options->invariant, "batch-invariant: cuts on chunk borders only");
  command->add_option("--format", options->format, "text, json or svg")
      ->capture_default_str()
      ->check(CLI::IsMember({"text", "json", "svg"}));
  command->add_option("--output", options->output, "a file, in a folder that is there, instead of the terminal")->type_name("FILE");
  return [options] { return run_plan(*options); };
}

}  // namespace leanattn::tools
