// SPDX-License-Identifier: Apache-2.0
#include "tools/trace.h"

#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/case.h"

namespace leanattn::tools {
namespace {

constexpr std::int64_t kMostTokens = 1 << 30;

std::int64_t tokens(const nlohmann::json& request, const char* key) {
  if (!request.is_object() || !request.contains(key) || !request[key].is_number_integer()) {
    throw CaseError(fmt::format("expected an object with a whole number \"{}\"", key));
  }
  const auto value = request[key].get<std::int64_t>();
  if (value < 0 || value > kMostTokens) throw CaseError(fmt::format("{} {}: expected 0 to {}", key, value, kMostTokens));
  return value;
}

}  // namespace

std::vector<std::int32_t> trace_contexts(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw CaseError(fmt::format("trace \"{}\": cannot be read; run it in the source tree, or name a trace", path));
  std::vector<std::int32_t> contexts;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      const nlohmann::json request = nlohmann::json::parse(line, nullptr, false);
      if (request.is_discarded()) throw CaseError("not JSON");
      contexts.push_back(static_cast<std::int32_t>(tokens(request, "input_length") + tokens(request, "output_length") / 2));
    } catch (const CaseError& error) {
      throw CaseError(fmt::format("{}:{}: {}", path, number, error.what()));
    }
  }
  if (contexts.empty()) throw CaseError(fmt::format("trace \"{}\": holds no request", path));
  return contexts;
}

}  // namespace leanattn::tools
