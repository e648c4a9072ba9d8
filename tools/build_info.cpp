// SPDX-License-Identifier: Apache-2.0
#include "tools/build_info.h"

#include <chrono>
#include <ctime>
#include <fstream>

#include "commit.h"
#include "src/cpu/threads.h"

namespace leanattn::tools {

std::string commit() { return LEANATTN_COMMIT; }

std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

std::string date_utc() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

int default_threads() { return cpu::default_workers(); }

}  // namespace leanattn::tools
