// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace leanattn::tools {

// Writes a whole file, its folders included. Throws std::runtime_error with a sentence that names the file.
void write_file(const std::string& path, const std::string& content);

}  // namespace leanattn::tools
