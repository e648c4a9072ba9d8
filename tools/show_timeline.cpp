// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "backend.h"
#include "tools/build_info.h"
#include "tools/commands.h"
#include "tools/device.h"
#include "tools/options.h"
#include "tools/output_file.h"
#include "tools/record.h"
#include "tools/timeline.h"

namespace leanattn::tools {
namespace {

struct TimelineSettings {
  int replays = 25;
  std::string blocks_file;  // empty: not wanted
};

void print_table(const Case& c, const Options& options, const Timeline& timeline, const std::vector<std::string>& marks) {
  fmt::print("{}\n{} {}{}, {} blocks, {:.2f} µs from the first entry to the last mark\n", to_string(c), policy_name(c.policy, c.splits),
             cuda_path_name(options), options.programmatic_launch ? "+pdl" : "", timeline.blocks.size(),
             static_cast<double>(timeline.duration_ns()) * 1e-3);
  fmt::print("  {:<12} {:>6} {:>10} {:>10} {:>10} {:>10}\n", "mark", "blocks", "min ns", "median ns", "p90 ns", "max ns");
  for (std::size_t mark = 0; mark < marks.size(); ++mark) {
    const MarkQuantiles q = mark_quantiles(timeline, mark);
    if (q.blocks == 0) {
      fmt::print("  {:<12} {:>6}\n", marks[mark], 0);
      continue;
    }
    fmt::print("  {:<12} {:>6} {:>10.0f} {:>10.0f} {:>10.0f} {:>10.0f}\n", marks[mark], q.blocks, q.min_ns, q.median_ns, q.p90_ns,
               q.max_ns);
  }
  fmt::print("\n");
}

void print_record(const Case& c, const Options& options, const Timeline& timeline, const std::vector<std::string>& marks, int replays) {
  nlohmann::ordered_json record = case_record(c, options);
  record["replays"] = replays;
  record["blocks"] = timeline.blocks.size();
  record["duration_ns"] = timeline.duration_ns();
  for (std::size_t mark = 0; mark < marks.size(); ++mark) {
    const MarkQuantiles q = mark_quantiles(timeline, mark);
    nlohmann::ordered_json of_mark = {{"blocks", q.blocks}};
    if (q.blocks > 0) {
      of_mark.update({{"min_ns", q.min_ns}, {"median_ns", q.median_ns}, {"p90_ns", q.p90_ns}, {"max_ns", q.max_ns}});
    }
    record["marks"][marks[mark]] = of_mark;
  }
  add_origin(record, options);
  fmt::print("{}\n", record.dump());
}

// A JSON line a block: case, block, then ns by mark, null where it did not come.
std::string block_lines(const Case& c, const Timeline& timeline, const std::vector<std::string>& marks) {
  std::string text;
  for (std::size_t block = 0; block < timeline.blocks.size(); ++block) {
    nlohmann::ordered_json line = {{"case", to_string(c)}, {"block", block}};
    for (std::size_t mark = 0; mark < marks.size(); ++mark) {
      const std::int64_t ns = timeline.blocks[block][mark];
      line[marks[mark]] = ns == Timeline::kNever ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(ns);
    }
    text += line.dump() + "\n";
  }
  return text;
}

int run_timeline(const CaseChoice& choice, RunSettings settings, const TimelineSettings& own) {
  const std::vector<std::string> marks = cuda::timeline_marks();
  if (marks.empty()) throw DeviceError("timeline: this build keeps none; configure with the preset timeline (LEANATTN_TIMELINE)");
  settings.backend = "cuda";
  check_settings(settings);
  const std::vector<Case> cases = expand(chosen_cases(choice), settings);
  if (cases.empty()) throw CaseError("timeline: expected a case, or --cases FILE such as bench/gpu_timeline.txt");
  require_folder(own.blocks_file);
  Progress progress;
  std::string lines;
  bool all_right = true;
  if (!settings.json) fmt::print("{}, {}\n\n", cuda::device_name(), commit());
  for (const Case& c : cases) {
    progress.note(to_string(c));
    CaseData data(c);
    const Options options = run_options(c, settings, Backend::kCuda);
    validate(data.problem(), options);
    check_data(data.problem());
    DeviceWorkload workload(data, device_copies(data.kv_bytes()));
    const Accuracy accuracy = workload.check(options, compute_reference(data.problem(), affordable_sample(c)));
    if (!accuracy.ok) {
      fmt::print(stderr, "leanattn: wrong, so no time line: {}: {}\n", to_string(c),
                 accuracy.fault.empty() ? accuracy.where : accuracy.fault);
      all_right = false;
      continue;
    }
    const std::vector<Timeline> all = workload.timelines(options, own.replays);
    const Timeline& timeline = median_timeline(all);
    settings.json ? print_record(c, options, timeline, marks, own.replays) : print_table(c, options, timeline, marks);
    std::fflush(stdout);
    if (!own.blocks_file.empty()) lines += block_lines(c, timeline, marks);
  }
  if (!own.blocks_file.empty()) write_file(own.blocks_file, lines);
  return all_right ? kExitOk : kExitFailed;
}

}  // namespace

Command add_timeline(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "timeline",
      "GPU, in a build with LEANATTN_TIMELINE: when the thread blocks of a call come to which point of the kernel, in ns after the first "
      "block's entry: least, median, ninth decile and most over the blocks. Each case is checked, then run in graphs as by bench, and the "
      "last call of a graph is looked at");
  auto choice = std::make_shared<CaseChoice>();
  auto settings = std::make_shared<RunSettings>();
  auto own = std::make_shared<TimelineSettings>();
  add_case_options(*command, *choice);
  add_gpu_options(*command, *settings);
  command->add_option("--replays", own->replays, "replays of a case's graph of calls; that of median duration is shown")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  command
      ->add_option("--blocks", own->blocks_file,
                   "a file, in a folder that is there: a JSON line a thread block with its ns at each mark, null where it did not come")
      ->type_name("FILE");
  return [=] { return run_timeline(*choice, *settings, *own); };
}

}  // namespace leanattn::tools
