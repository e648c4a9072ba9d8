// SPDX-License-Identifier: Apache-2.0
// From the host's side of a launch to the instantiations: a kernel and what it needs, by type, head_dim and row block.
#pragma once

#include "cuda/params.h"
#include "cuda/variants.h"

namespace leanattn::cuda {

struct Kernel {
  const void* function = nullptr;  // __global__ void(Params)
  int threads = 0;
  int rows = 0;
  int tile_tokens = 0;
  int stage_tokens = 0;
  int chunk_tiles = 0;       // batch-invariant: the grain of chunks (Chunks)
  int slot_value_bytes = 0;  // of partial_values, a slot
  int slot_row_bytes = 0;    // of partial_rows, a slot
  int fixed_shared_bytes = 0;
  int stage_shared_bytes = 0;  // more for each stage
};

// Defined in inst_*.cu. variant: one of kVariants, of is_warpgroup or not.
Kernel bfloat16_kernel(const Variant& variant);
Kernel float16_kernel(const Variant& variant);
Kernel warpgroup_bfloat16_kernel(const Variant& variant);
Kernel warpgroup_float16_kernel(const Variant& variant);

}  // namespace leanattn::cuda
