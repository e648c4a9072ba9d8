// SPDX-License-Identifier: Apache-2.0
// usage: fuzz_seeds FOLDER: writes what fuzzing starts from, 256 files of at most 192 bytes.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/fuzz/fuzz.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds FOLDER\n");
    return 2;
  }
  std::filesystem::create_directories(argv[1]);
  for (std::uint64_t index = 0; index < 256; ++index) {
    const std::vector<std::uint8_t> input = leanattn::fuzz::seed_input(index);
    const std::filesystem::path path = std::filesystem::path(argv[1]) / ("seed-" + std::to_string(index));
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
    if (!file.flush()) {
      std::fprintf(stderr, "fuzz_seeds: %s cannot be written\n", path.c_str());
      return 1;
    }
  }
  return 0;
}
