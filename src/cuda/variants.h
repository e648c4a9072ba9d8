// SPDX-License-Identifier: Apache-2.0
// The one table of CUDA kernel variants: what is a template parameter of the kernel, and nothing else is. The instantiations
// (inst_*.cu), the launcher, validation, the command line and the tests read it. Plain C++; includes nothing.
#pragma once

namespace leanattn::cuda {

// Columns of K and V in shared memory. A problem takes the first that holds its head_dim and head_dim_v; what it lacks is padding there.
constexpr int kHeadDims[] = {64, 96, 128, 256};

// Packed rows (query tokens × group) of one output. A problem takes the smallest block that holds the rows of its longest seq, or several
// of the largest.
constexpr int kRowBlocks[] = {8, 16, 32, 64};

// Kernel paths, fastest first. sm_90: clusters of blocks where they pay, compute capability 9.0 and later. portable: none, 8.0 and later.
constexpr const char* kPortable = "portable";
constexpr const char* kPaths[] = {"sm_90", kPortable};

// The variant of a problem; both are at most 256 (problem.cpp).
constexpr int padded_head_dim(int head_dim, int head_dim_v) {
  const int larger = head_dim > head_dim_v ? head_dim : head_dim_v;
  for (const int columns : kHeadDims) {
    if (larger <= columns) return columns;
  }
  return 0;
}

// Registers hold Õ of no more than 32 rows of head_dim 256.
constexpr bool has_variant(int head_dim, int rows) { return rows <= (head_dim > 128 ? 32 : 64); }

// The smallest row block that holds `rows`, else the largest.
constexpr int row_block(int head_dim, int rows) {
  int largest = 0;
  for (const int block : kRowBlocks) {
    if (!has_variant(head_dim, block)) continue;
    if (rows <= block) return block;
    largest = block;
  }
  return largest;
}

}  // namespace leanattn::cuda
