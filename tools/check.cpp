// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tools/build_info.h"
#include "tools/commands.h"
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
void print_line(const NamedCase& named, const Accuracy& accuracy, bool own_case) {
  const std::string text = to_string(named.spec);
  const std::string& label = own_case ? text : named.name;
  if (!accuracy.refused.empty()) {
    fmt::print("refused: {}\n    case: {}{}\n", accuracy.refused, own_case ? "" : named.name + ": ", text);
  } else {
    fmt::print("error {:9.3e}  tolerance {:9.3e}  ratio {:5.3f}  {:<4}  {}", accuracy.error, accuracy.tolerance, accuracy.ratio,
               accuracy.ok ? "ok" : "FAIL", label);
    if (accuracy.rows < accuracy.all_rows) fmt::print("  ({} of {} rows)", accuracy.rows, accuracy.all_rows);
    if (!accuracy.ok) fmt::print("\n    {}\n    case: {}", accuracy.fault.empty() ? accuracy.where : accuracy.fault, text);
    fmt::print("\n");
  }
  std::fflush(stdout);
}

int run_check(const CaseChoice& choice, const RunSettings& settings) {
  check_settings(settings);
  std::vector<NamedCase> all;
  for (const NamedCase& named : named_cases(choice)) {
    for (const Case& c : expand({named.spec}, settings)) all.push_back({named.name, c});
  }
  Progress progress;
  std::size_t failed = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const NamedCase& named = all[i];
    progress.note(fmt::format("case {} of {}: {}", i + 1, all.size(), to_string(named.spec)));
    const Options options = run_options(named.spec, settings);
    Accuracy accuracy;
    try {
      CaseData data(named.spec);
      const Problem problem = data.problem();
      validate(problem, options);
      check_data(problem);
      accuracy = check_once(data, options, compute_reference(problem, affordable_sample(named.spec)));
    } catch (const Error& error) {
      accuracy.refused = error.what();
    } catch (const OutOfMemory& error) {  // the other cases may still fit
      accuracy.refused = error.what();
    }
    failed += !accuracy.ok;
    if (settings.json) {
      nlohmann::ordered_json out = case_record(named.spec, options);
      if (!named.name.empty()) out["name"] = named.name;
      add_accuracy(out, accuracy);
      add_origin(out);
      fmt::print("{}\n", out.dump());
      std::fflush(stdout);
    } else {
      print_line(named, accuracy, named.name.empty());
    }
  }
  if (!settings.json) fmt::print("{} of {} cases right\n", all.size() - failed, all.size());
  return failed == 0 ? kExitOk : kExitFailed;
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
