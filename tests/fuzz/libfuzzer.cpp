// SPDX-License-Identifier: Apache-2.0
// libFuzzer's entry. A broken promise ends the process with its sentence, as a crash does, and the input is kept.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  leanattn::fuzz::hold({data, size});
  return 0;
}
