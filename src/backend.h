// SPDX-License-Identifier: Apache-2.0
// What a backend offers to attention.cpp. Backends see validated problems only and never each other.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "leanattn/problem.h"

namespace leanattn {

namespace cpu {
std::size_t workspace_bytes(const Problem& problem, const Options& options);
// workspace is large enough (attention.cpp has checked); throws Error kInvalidData before O or LSE is touched.
void decode(const Problem& problem, const Options& options, std::span<std::byte> workspace);
std::vector<std::string> isas();  // fastest first
}  // namespace cpu

}  // namespace leanattn
