// SPDX-License-Identifier: Apache-2.0
#include "tools/output_file.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace leanattn::tools {

void write_file(const std::string& path, const std::string& content) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;  // the stream below says what is wrong
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  std::ofstream out(path, std::ios::binary);
  out << content;
  out.close();
  if (!out) throw std::runtime_error("file \"" + path + "\": cannot be written");
}

}  // namespace leanattn::tools
