// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "backend.h"
#include "tools/buffer.h"
#include "tools/build_info.h"
#include "tools/commands.h"
#include "tools/run.h"

namespace leanattn::tools {
namespace {

int print_info(bool json) {
  const std::vector<std::string> isas = cpu_isas();
  const std::string isa = isa_name({});
  const bool cuda = backend_available(Backend::kCuda);
  if (json) {
    nlohmann::ordered_json out;
    out["version"] = version();
    out["commit"] = commit();
    out["backends"] = {{"cpu", backend_available(Backend::kCpu)}, {"cuda", cuda}};
    out["device"] = cpu_model();
    out["threads"] = default_threads();
    out["isa"] = isa;
    out["isas"] = isas;
    out["memory_available_bytes"] = available_memory_bytes();
    fmt::print("{}\n", out.dump());
    return kExitOk;
  }
  fmt::print("leanattn {} ({})\n", version(), commit());
  fmt::print("backends   cpu: {}; cuda: {}\n", backend_available(Backend::kCpu) ? "available" : "not available",
             cuda ? "available" : "not built");
  fmt::print("CPU        {}\n", cpu_model());
  fmt::print("threads    {}\n", default_threads());
  fmt::print("ISA        {} in use; this machine runs {}\n", isa, fmt::join(isas, ", "));
  fmt::print("memory     {:.1f} GiB available\n", static_cast<double>(available_memory_bytes()) / (1 << 30));
  fmt::print("GPU        {}\n", cuda ? "available" : "CUDA backend not built");
  return kExitOk;
}

}  // namespace

Command add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Version, backends, instruction sets, threads and memory of this machine");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "one JSON object");
  return [json] { return print_info(*json); };
}

}  // namespace leanattn::tools
