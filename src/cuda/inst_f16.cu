// SPDX-License-Identifier: Apache-2.0
#include "cuda/instantiate.cuh"

namespace leanattn::cuda {

Kernel float16_kernel(int head_dim, int rows) { return find_kernel<__half>(head_dim, rows); }

}  // namespace leanattn::cuda
