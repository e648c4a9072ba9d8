// SPDX-License-Identifier: Apache-2.0
// The variants of is_warpgroup, built for compute capability 9.0 alone (cmake/cuda.cmake).
#include "cuda/instantiate.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "only sm_90a has wgmma"
#endif

namespace leanattn::cuda {

Kernel warpgroup_bfloat16_kernel(const Variant& variant) { return find_kernel<__nv_bfloat16, true>(variant); }
Kernel warpgroup_float16_kernel(const Variant& variant) { return find_kernel<__half, true>(variant); }

}  // namespace leanattn::cuda
