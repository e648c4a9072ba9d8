// SPDX-License-Identifier: Apache-2.0
#include "cuda/instantiate.cuh"

namespace leanattn::cuda {

Kernel bfloat16_kernel(int head_dim, int rows) { return find_kernel<__nv_bfloat16>(head_dim, rows); }

}  // namespace leanattn::cuda
