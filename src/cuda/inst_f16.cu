// SPDX-License-Identifier: Apache-2.0
#include "cuda/instantiate.cuh"

namespace leanattn::cuda {

Kernel float16_kernel(const Variant& variant) { return find_kernel<__half, false>(variant); }

}  // namespace leanattn::cuda
