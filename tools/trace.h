// SPDX-License-Identifier: Apache-2.0
// Request traces of LLM servers: one JSON object a line with input_length and output_length in tokens (Mooncake, FAST'25).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace leanattn::tools {

// The contexts of a decode step at which each request has generated half its output: input_length + output_length / 2.
// Throws CaseError, naming file and line.
std::vector<std::int32_t> trace_contexts(const std::string& path);

}  // namespace leanattn::tools
