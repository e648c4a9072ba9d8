// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "leanattn/attention.h"
#include "tools/case_data.h"
#include "tools/commands.h"

namespace leanattn::tools {
namespace {

int complain(const char* sentence, int exit_code) {
  std::fflush(stdout);
  fmt::print(stderr, "leanattn: {}\n", sentence);
  return exit_code;
}

int run(int argc, char** argv) {
  CLI::App app("Exact decode attention: look at the machine, check, measure and draw it", "leanattn");
  app.set_version_flag("--version", std::string("leanattn ") + version());
  app.require_subcommand(1);
  // Subcommands added from here on have it too.
  app.footer(
      "Exit codes:\n"
      "  0  all is right\n"
      "  1  a check failed, the library refuses a case, or the run ended early: no memory, a build or machine without the GPU that was "
      "asked\n"
      "     for, a file that cannot be written\n"
      "  2  the command line, a case or a file cannot be read");
  std::vector<Command> commands;
  for (const auto add : {add_info, add_check, add_bench, add_timeline, add_plan, add_demo}) commands.push_back(add(app));
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return app.exit(done);
  } catch (const CLI::RequiredError& error) {
    const std::vector<std::string> words = app.remaining();
    if (!app.get_subcommands().empty() || words.empty()) return complain(error.what(), kExitUsage);
    return complain(fmt::format("command \"{}\": expected info, check, bench, timeline, plan or demo", words.front()).c_str(), kExitUsage);
  } catch (const CLI::ParseError& error) {
    return complain(error.what(), kExitUsage);
  }
  const std::vector<CLI::App*> all = app.get_subcommands([](CLI::App*) { return true; });
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i]->parsed()) return commands[i]();
  }
  return complain("no command given; see leanattn --help", kExitUsage);
}

}  // namespace
}  // namespace leanattn::tools

int main(int argc, char** argv) {
  using namespace leanattn::tools;
  try {
    return run(argc, argv);
  } catch (const CaseError& error) {
    return complain(error.what(), kExitUsage);
  } catch (const std::bad_alloc&) {
    return complain("the system has no memory left for this", kExitFailed);
  } catch (const std::exception& error) {  // leanattn::Error and OutOfMemory among them
    return complain(error.what(), kExitFailed);
  }
}
