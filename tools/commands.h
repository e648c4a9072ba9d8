// SPDX-License-Identifier: Apache-2.0
// The subcommands of the command line. Each adds itself to the application and returns what runs it; that returns an exit code.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace leanattn::tools {

constexpr int kExitOk = 0;
// What each stands for is in the footer of --help (main.cpp).
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

using Command = std::function<int()>;

Command add_info(CLI::App& app);
Command add_check(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_timeline(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_demo(CLI::App& app);

}  // namespace leanattn::tools
