// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "backend.h"
#include "tools/buffer.h"
#include "tools/build_info.h"
#include "tools/commands.h"
#include "tools/device.h"
#include "tools/run.h"

namespace leanattn::tools {
namespace {

int print_info(bool json) {
  const std::vector<std::string> isas = cpu_isas();
  const std::string isa = isa_name({});
  const bool cpu = backend_available(Backend::kCpu), cuda = backend_available(Backend::kCuda);
  const std::optional<Device> gpu = current_device();
  if (json) {
    nlohmann::ordered_json out;
    out["version"] = version();
    out["commit"] = commit();
    out["backends"] = {{"cpu", cpu}, {"cuda", cuda}};
    out["device"] = cpu_model();
    out["threads"] = default_threads();
    out["isa"] = isa;
    out["isas"] = isas;
    out["memory_available_bytes"] = available_memory_bytes();
    if (gpu) {
      out["gpu"] = {{"name", gpu->name},
                    {"multiprocessors", gpu->multiprocessors},
                    {"compute_capability", fmt::format("{}.{}", gpu->compute_major, gpu->compute_minor)},
                    {"memory_bytes", gpu->memory_bytes},
                    {"l2_bytes", gpu->l2_bytes},
                    {"cuda_paths", cuda_paths()}};
    } else {
      out["gpu"] = nullptr;
      out["gpu_absent"] = cuda::why_absent();
    }
    fmt::print("{}\n", out.dump());
    return kExitOk;
  }
  const double gib = 1 << 30;
  fmt::print("leanattn {} ({})\n", version(), commit());
  fmt::print("backends   cpu: {}; cuda: {}\n", cpu ? "available" : "not available", cuda ? "available" : cuda::why_absent());
  fmt::print("CPU        {}\n", cpu_model());
  fmt::print("threads    {}\n", default_threads());
  fmt::print("ISA        {} in use; this machine runs {}\n", isa, fmt::join(isas, ", "));
  fmt::print("memory     {:.1f} GiB available\n", static_cast<double>(available_memory_bytes()) / gib);
  if (gpu) {
    fmt::print("GPU        {}, {} multiprocessors, compute capability {}.{}, {:.1f} GiB\n", gpu->name, gpu->multiprocessors,
               gpu->compute_major, gpu->compute_minor, static_cast<double>(gpu->memory_bytes) / gib);
    fmt::print("GPU paths  {} in use; this GPU runs {}\n", cuda_path_name({}), fmt::join(cuda_paths(), ", "));
  } else {
    fmt::print("GPU        none: {}\n", cuda::why_absent());
  }
  return kExitOk;
}

}  // namespace

Command add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Version, backends, instruction sets, threads, memory and GPU of this machine");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "one JSON object");
  return [json] { return print_info(*json); };
}

}  // namespace leanattn::tools
