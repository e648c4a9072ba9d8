// SPDX-License-Identifier: Apache-2.0
#include "tools/output_file.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace leanattn::tools {

void require_folder(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;  // a folder that cannot be looked at is none to write into
  if (folder.empty() || std::filesystem::is_directory(folder, ignored)) return;
  throw std::runtime_error("file \"" + path + "\": there is no folder \"" + folder.string() + "\"");
}

void write_file(const std::string& path, const std::string& content) {
  require_folder(path);
  std::ofstream out(path, std::ios::binary);
  out << content;
  out.close();
  if (!out) throw std::runtime_error("file \"" + path + "\": cannot be written");
}

}  // namespace leanattn::tools
