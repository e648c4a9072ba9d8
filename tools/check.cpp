// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tools/commands.h"
#include "tools/device.h"
#include "tools/golden.h"
#include "tools/options.h"
#include "tools/record.h"

namespace leanattn::tools {
namespace {

struct NamedCase {
  std::string name;
  Case spec;
};

std::vector<NamedCase> named_cases(const CaseChoice& choice) {
  std::vector<NamedCase> named;
  if (choice.words.empty() && choice.files.empty()) {
    for (const GoldenCase& golden : golden_cases()) named.push_back({golden.name, parse_case(golden.text)});
  } else {
    for (const Case& c : chosen_cases(choice)) named.push_back({"", c});
    if (named.empty()) throw CaseError("no case among those given");
  }
  return named;
}

// Numbers first: labels are as long as they like.
void print_line(const NamedCase& named, const Accuracy& accuracy, bool own_case, Backend backend) {
  const std::string text = to_string(named.spec);
  const std::string& label = own_case ? text : named.name;
  if (!accuracy.refused.empty()) {
    fmt::print("{}: {}\n    case: {}{}\n", accuracy.skipped ? "skipped" : "refused", accuracy.refused, own_case ? "" : named.name + ": ",
               text);
  } else {
    fmt::print("error {:9.3e}  tolerance {:9.3e}  ratio {:5.3f}  {:<4}  {:<4}  {}", accuracy.error, accuracy.tolerance, accuracy.ratio,
               accuracy.ok ? "ok" : "FAIL", backend_name(backend), label);
    if (accuracy.rows < accuracy.all_rows) fmt::print("  ({} of {} rows)", accuracy.rows, accuracy.all_rows);
    if (!accuracy.ok) fmt::print("\n    {}\n    case: {}", accuracy.fault.empty() ? accuracy.where : accuracy.fault, text);
    fmt::print("\n");
  }
  std::fflush(stdout);
}

// Sets options to what the case ran with.
Accuracy run_case(const Case& c, const RunSettings& settings, Options& options) {
  Accuracy accuracy;
  options = run_options(c, settings, settings.backend == "cuda" ? Backend::kCuda : Backend::kCpu);
  try {
    CaseData data(c);
    const Problem problem = data.problem();
    options = run_options(c, settings, chosen_backend(problem, c, settings));
    validate(problem, options);
    check_data(problem);
    const Reference reference = compute_reference(problem, affordable_sample(c));
    if (options.backend == Backend::kCuda) return DeviceWorkload(data, 1).check(options, reference);
    return check_once(data, options, reference);
  } catch (const Error& error) {
    accuracy.refused = error.what();
    accuracy.skipped = options.backend == Backend::kCuda && error.status() == Status::kUnsupported;
  } catch (const OutOfMemory& error) {  // the other cases may still fit
    accuracy.refused = error.what();
  } catch (const DeviceError& error) {  // none of the other cases can run
    throw DeviceError(fmt::format("case \"{}\": {}", to_string(c), error.what()));
  }
  return accuracy;
}

int run_check(const CaseChoice& choice, RunSettings settings) {
  check_settings(settings);
  std::vector<NamedCase> all;
  for (const NamedCase& named : named_cases(choice)) {
    for (const Case& c : expand({named.spec}, settings)) all.push_back({named.name, c});
  }
  Progress progress;
  std::size_t right = 0, skipped = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const NamedCase& named = all[i];
    progress.note(fmt::format("case {} of {}: {}", i + 1, all.size(), to_string(named.spec)));
    Options options;
    const Accuracy accuracy = run_case(named.spec, settings, options);
    right += accuracy.ok;
    skipped += accuracy.skipped;
    if (settings.json) {
      nlohmann::ordered_json out = case_record(named.spec, options);
      if (!named.name.empty()) out["name"] = named.name;
      add_accuracy(out, accuracy);
      add_origin(out, options);
      fmt::print("{}\n", out.dump());
      std::fflush(stdout);
    } else {
      print_line(named, accuracy, named.name.empty(), options.backend);
    }
  }
  if (!settings.json) {
    fmt::print("{} of {} cases right", right, all.size());
    if (skipped > 0) fmt::print(", {} skipped: the backend does not take them", skipped);
    fmt::print("\n");
  }
  // A run that compared nothing has shown nothing.
  return right > 0 && right + skipped == all.size() ? kExitOk : kExitFailed;
}

}  // namespace

Command add_check(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "check", "Compare decode with the float64 reference: the golden cases, or those given. A line a case with its error and tolerance");
  auto choice = std::make_shared<CaseChoice>();
  auto settings = std::make_shared<RunSettings>();
  add_case_options(*command, *choice);
  add_run_options(*command, *settings);
  return [choice, settings] { return run_check(*choice, *settings); };
}

}  // namespace leanattn::tools
