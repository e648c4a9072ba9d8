// SPDX-License-Identifier: Apache-2.0
// Compiles tile-inl.h once for each instruction set and lists the results.
#include "src/cpu/tile.h"

#include <string_view>
#include <vector>

// SSSE3 and the finer AVX-512 levels add nothing that the kernel uses. SVE's vectors have no size and cannot stand in arrays, so SVE
// machines run the NEON code.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2)
// Highway's emulation of 128-bit vectors, the baseline with clang, makes numbers of infinity and NaN in float16 (1.0.3). Plain floats do
// not, and are the baseline with g++.
#define HWY_BROKEN_EMU128 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/tile.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/cpu/tile-inl.h"

#if HWY_ONCE
namespace leanattn::cpu {

std::span<const IsaKernels> highway_kernels() {
  static const std::vector<IsaKernels> list = [] {
    std::vector<IsaKernels> found;
    const std::int64_t supported = hwy::SupportedTargets();
#if HWY_TARGETS & HWY_AVX3
    if (supported & HWY_AVX3) found.push_back(N_AVX3::kernels());
#endif
#if HWY_TARGETS & HWY_AVX2
    if (supported & HWY_AVX2) found.push_back(N_AVX2::kernels());
#endif
#if HWY_TARGETS & HWY_SSE4
    if (supported & HWY_SSE4) found.push_back(N_SSE4::kernels());
#endif
#if HWY_TARGETS & HWY_NEON
    if (supported & HWY_NEON) found.push_back(N_NEON::kernels());
#endif
    const IsaKernels baseline = HWY_STATIC_DISPATCH(kernels)();
    if (found.empty() || std::string_view(found.back().isa) != baseline.isa) found.push_back(baseline);
    return found;
  }();
  return list;
}

WeightsStep avx3_weights_step() {
#if HWY_TARGETS & HWY_AVX3
  // Asking the processor is slow under virtualization: once.
  static const bool supported = (hwy::SupportedTargets() & HWY_AVX3) != 0;
  if (supported) return N_AVX3::weights_step;
#endif
  return nullptr;
}

std::span<const IsaKernels> isa_kernels() {
  static const std::vector<IsaKernels> list = [] {
    std::vector<IsaKernels> found;
    if (const IsaKernels* amx = amx_kernels()) found.push_back(*amx);
    const auto highway = highway_kernels();
    found.insert(found.end(), highway.begin(), highway.end());
    return found;
  }();
  return list;
}

}  // namespace leanattn::cpu
#endif  // HWY_ONCE
