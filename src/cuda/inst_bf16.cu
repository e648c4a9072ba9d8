// SPDX-License-Identifier: Apache-2.0
#include "cuda/instantiate.cuh"

namespace leanattn::cuda {

Kernel bfloat16_kernel(const Variant& variant) { return find_kernel<__nv_bfloat16, false>(variant); }

}  // namespace leanattn::cuda
