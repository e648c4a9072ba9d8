// SPDX-License-Identifier: Apache-2.0
// One decode step of a real request mix, under every policy: checked, timed against the read floor, and drawn.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "backend.h"
#include "tools/build_info.h"
#include "tools/commands.h"
#include "tools/device.h"
#include "tools/options.h"
#include "tools/output_file.h"
#include "tools/plan.h"
#include "tools/record.h"
#include "tools/trace.h"

namespace leanattn::tools {
namespace {

constexpr int kQHeads = 32, kKvHeads = 8, kHeadDim = 128;  // Llama-3-8B
constexpr int kPageSize = 16;
constexpr TimingOptions kTiming{.min_seconds = 1.0, .min_pairs = 9, .max_seconds = 8.0};

struct DemoSettings {
  std::string trace = "data/mooncake_sample.jsonl";
  std::string output = "demo.svg";
  std::string backend = "auto";
  int threads = 0;
  bool json = false;
};

struct PolicyResult {
  Case spec;
  Options options;
  double busy_share = 0.0;
  Timing timing;
  Accuracy accuracy;
};

// On the CPU with these threads; on a GPU, which then chooses the order of heads and the thread blocks itself, threads is 0.
Case decode_step(const std::vector<std::int32_t>& contexts, int threads) {
  Case c;
  c.kv_lens = contexts;
  c.q_heads = kQHeads;
  c.kv_heads = kKvHeads;
  c.head_dim = c.head_dim_v = kHeadDim;
  c.dtype = DType::kBFloat16;
  c.layout = CaseLayout::kPaged;
  c.page_size = kPageSize;
  c.head_order = threads > 0 ? HeadOrder::kBeside : HeadOrder::kAuto;
  c.workers = threads;
  return c;
}

constexpr int kDeviceTileTokens = 64;

PlanRequest plan_of(const CaseData& data, const Options& options) {
  const Case& c = data.spec();
  const bool gpu = options.backend == Backend::kCuda;
  const cpu::Tiling tiling = gpu ? cpu::Tiling{kDeviceTileTokens, 0} : cpu::tiling(data.problem(), options);
  PlanRequest request;
  request.kv_lens = c.kv_lens;
  request.q_heads = c.q_heads;
  request.kv_heads = c.kv_heads;
  request.workers = worker_count(options);
  request.tile_tokens = tiling.tile_tokens;
  request.head_order = gpu ? HeadOrder::kAlong : HeadOrder::kBeside;
  request.fragment_cost_tiles = tiling.fragment_cost_tiles;
  // The usual number of splits is 1 where the threads are few, and the cut that of fa2.
  request.policies = {{Policy::kLean, 0}, {Policy::kFlashDecoding, 4}, {Policy::kFa2, 0}};
  return request;
}

// Where lean's cut has nothing to win over flashdecoding's: a sentence that says why, else empty.
std::string even_cuts_sentence(const std::vector<PolicyResult>& results) {
  constexpr double kSame = 0.01;  // of the workers' time
  const PolicyResult& lean = results[0];
  const PolicyResult& split = results[1];
  if (split.busy_share < lean.busy_share - kSame) return {};
  const int workers = worker_count(lean.options);
  return fmt::format("{} keeps {} worker{} as busy as lean does, so lean has no idle time to win back from it here.",
                     policy_name(split.spec.policy, split.spec.splits), workers, workers == 1 ? "" : "s");
}

void print_table(const std::vector<PolicyResult>& results, std::int64_t kv_bytes) {
  fmt::print("\n{:<16} {:>6} {:>9} {:>7} {:>8} {:>12}   {}\n", "policy", "busy", "ms", "GB/s", "÷ floor", "error ÷ tol.", "result");
  const int digits = results.front().options.backend == Backend::kCuda ? 4 : 2;  // of milliseconds
  std::vector<double> floor_times_us;                                            // of every policy's pairs: all read the same bytes
  for (const PolicyResult& result : results) {
    fmt::print("{:<16} {:>4} % {:>9.{}f} {:>7.2f} {:>8.3f} {:>12.3f}   {}\n", policy_name(result.spec.policy, result.spec.splits),
               static_cast<int>(std::floor(result.busy_share * 100.0 + 1e-9)), result.timing.us * 1e-3, digits,
               gb_per_s(kv_bytes, result.timing.us), result.timing.ratio, result.accuracy.ratio, result.accuracy.ok ? "right" : "WRONG");
    if (!result.accuracy.ok) fmt::print("    {}\n", result.accuracy.fault.empty() ? result.accuracy.where : result.accuracy.fault);
    floor_times_us.insert(floor_times_us.end(), result.timing.floor_times_us.begin(), result.timing.floor_times_us.end());
  }
  std::sort(floor_times_us.begin(), floor_times_us.end());
  const double p10_us = percentile(floor_times_us, 0.1), median_us = percentile(floor_times_us, 0.5),
               p90_us = percentile(floor_times_us, 0.9);
  fmt::print("{:<16} {:>6} {:>9.{}f} {:>7.2f}   p10–p90 {:.{}f}–{:.{}f} ms\n", "read floor", "", median_us * 1e-3, digits,
             gb_per_s(kv_bytes, median_us), p10_us * 1e-3, digits, p90_us * 1e-3, digits);
  if (const std::string busy = busy_sentence(floor_times_us); !busy.empty()) fmt::print("{}\n", busy);
  const Accuracy& accuracy = results.front().accuracy;
  fmt::print("\nright: {} of {} (request, head) rows compared with float64.\n", accuracy.rows, accuracy.all_rows);
}

void print_records(const std::vector<PolicyResult>& results, std::int64_t kv_bytes) {
  for (const PolicyResult& result : results) {
    nlohmann::ordered_json record = case_record(result.spec, result.options);
    record["busy_share"] = result.busy_share;
    add_timing(record, result.timing, kv_bytes);
    add_accuracy(record, result.accuracy);
    add_origin(record, result.options);
    fmt::print("{}\n", record.dump());
  }
}

// Checks and times one policy: on the GPU where there is a device, else on the CPU beside the floors.
void run_policy(CaseData& data, DeviceWorkload* device, const Reference& reference, const std::vector<ReadFloor>& floors,
                PolicyResult& result) {
  if (device == nullptr) {
    result.accuracy = check_once(data, result.options, reference);
    result.timing = time_pairs(data, result.options, floors, kTiming);
    return;
  }
  result.accuracy = device->check(result.options, reference);
  const DeviceTiming timing = device->time(result.options, {});
  result.timing = timing.timing;
  if (timing.fault.empty()) return;
  result.accuracy.ok = false;
  result.accuracy.fault = timing.fault;
}

void print_problem(const DemoSettings& settings, const Case& step, const Options& options) {
  const auto [shortest, longest] = std::minmax_element(step.kv_lens.begin(), step.kv_lens.end());
  fmt::print("One decode step of {} requests from {}: contexts of {} to {} tokens, {} in all.\n", step.batch(), settings.trace,
             with_commas(*shortest), with_commas(*longest), with_commas(step.total_kv()));
  const std::string machine =
      options.backend == Backend::kCuda
          ? fmt::format("{}, {} multiprocessors, path {}", cuda::device_name(), worker_count(options), cuda_path_name(options))
          : fmt::format("{}, {} threads, {}", cpu_model(), thread_count(options), isa_name(options));
  fmt::print("{} query heads, {} KV heads of {} dimensions, bfloat16, pages of {} tokens. {}.\n", kQHeads, kKvHeads, kHeadDim, kPageSize,
             machine);
  std::fflush(stdout);
}

int run_demo(const DemoSettings& settings) {
  const std::vector<std::int32_t> contexts = trace_contexts(settings.trace);
  require_folder(settings.output);
  RunSettings run_settings;
  run_settings.backend = settings.backend;
  if (settings.threads > 0) run_settings.threads = {settings.threads};
  check_settings(run_settings);
  const bool gpu = run_settings.backend != "cpu" && settings.threads == 0 && backend_available(Backend::kCuda);
  const Backend backend = gpu ? Backend::kCuda : Backend::kCpu;
  const Case step = decode_step(contexts, gpu ? 0 : settings.threads > 0 ? settings.threads : default_threads());
  const Options step_options = run_options(step, run_settings, backend);
  Progress progress;
  if (!settings.json) print_problem(settings, step, step_options);
  progress.note("making K and V");
  CaseData data(step, {.huge_pages = true});
  progress.note(fmt::format("made {:.2f} GB of K and V; computing the float64 reference", static_cast<double>(data.kv_bytes()) * 1e-9));
  Sample sample;
  sample.kv_heads_per_seq = 1;
  const Reference reference = compute_reference(data.problem(), sample);
  std::unique_ptr<DeviceWorkload> device;
  std::vector<ReadFloor> floors;
  if (gpu) {
    device = std::make_unique<DeviceWorkload>(data, device_copies(data.kv_bytes()));
  } else {
    progress.note("finding the fastest plain reading of the same bytes");
    floors = make_floors(data, step.workers, 1.0);
  }
  const PlanRequest request = plan_of(data, step_options);
  std::vector<PolicyResult> results;
  for (const PlannedPolicy& planned : make_plans(request)) {
    PolicyResult result;
    result.spec = step;
    parse_policy(planned.name, result.spec.policy, result.spec.splits);
    result.options = run_options(result.spec, run_settings, backend);
    result.busy_share = planned.plan.busy_share;
    progress.note(fmt::format("checking and timing {}", planned.name));
    run_policy(data, device.get(), reference, floors, result);
    results.push_back(result);
  }
  write_file(settings.output, plan_svg(request));
  if (settings.json) {
    print_records(results, data.kv_bytes());
  } else {
    print_table(results, data.kv_bytes());
    fmt::print(
        "busy: share of the {} time that the cut fills, by counting tiles. ÷ floor: median over {} pairs or more of kernel and "
        "floor.\n",
        gpu ? "multiprocessors'" : "threads'", gpu ? DeviceTimingOptions{}.replays : kTiming.min_pairs);
    if (const std::string even = even_cuts_sentence(results); !even.empty()) fmt::print("{}\n", even);
    fmt::print("Picture of the three cuts: {}\n", settings.output);
  }
  const bool all_right = std::all_of(results.begin(), results.end(), [](const PolicyResult& r) { return r.accuracy.ok; });
  return all_right ? kExitOk : kExitFailed;
}

}  // namespace

Command add_demo(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "demo", "One decode step of a request trace under lean, flashdecoding and fa2: checked, timed against the read floor, and drawn");
  auto settings = std::make_shared<DemoSettings>();
  command
      ->add_option("trace", settings->trace,
                   "JSON lines with input_length and output_length; each request is taken half way through its output")
      ->capture_default_str();
  command->add_option("--backend", settings->backend, "cpu, cuda, or auto: the GPU where there is one")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--threads", settings->threads, "this many threads of the CPU")->check(CLI::Range(1, 1 << 16));
  command->add_option("--output", settings->output, "where the picture goes (SVG), in a folder that is there")
      ->type_name("FILE")
      ->capture_default_str();
  command->add_flag("--json", settings->json, "one JSON object a policy and line");
  return [settings] { return run_demo(*settings); };
}

}  // namespace leanattn::tools
