// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace leanattn::tools {

// Throws std::runtime_error with a sentence that names both where the folder of a file to be written is not there; long work asks first.
// Folders are not made: a mistyped path would leave them behind.
void require_folder(const std::string& path);
// Writes a whole file, in place of one that is there. Throws std::runtime_error with a sentence that names the file.
void write_file(const std::string& path, const std::string& content);

}  // namespace leanattn::tools
