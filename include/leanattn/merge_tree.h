// SPDX-License-Identifier: Apache-2.0
// The batch-invariant merge tree: in which order the chunks of an output merge, wherever the line was cut (schedule.h). Compiles with g++,
// clang, nvcc and NVRTC.
#pragma once

#include "leanattn/schedule.h"

namespace leanattn {

// The tree's leaves are the chunks of an output; node (level, index) covers chunks index·2^level up to (index + 1)·2^level; what lies past
// the last chunk is missing. A run of chunks is a row of the largest nodes that fit (next_node), and siblings merge as they meet. The row
// of a whole output then merges from its right end: a node without a right sibling counts as its parent. So the order of every addition
// is that of the one tree, wherever the line was cut.
struct TreeNode {
  int level = 0;
  int index = 0;
};

// The first node of the row for chunks [begin, end), begin < end. Goes on at (index + 1)·2^level.
LEANATTN_HOST_DEVICE inline TreeNode next_node(int begin, int end) {
  TreeNode node{0, begin};
  while (node.index % 2 == 0 && (node.index / 2 + 1LL) << (node.level + 1) <= end) {
    ++node.level;
    node.index /= 2;
  }
  return node;
}

LEANATTN_HOST_DEVICE inline bool are_siblings(const TreeNode& left, const TreeNode& right) {
  return left.level == right.level && left.index % 2 == 0 && right.index == left.index + 1;
}

// The most nodes in the row of any run of at most `chunks` chunks, while one more is being pushed.
LEANATTN_HOST_DEVICE inline int max_row_nodes(int chunks) {
  int levels = 1;
  while ((1LL << levels) < chunks) ++levels;
  return chunks <= 1 ? 1 : 2 * levels + 1;
}

}  // namespace leanattn
