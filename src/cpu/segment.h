// SPDX-License-Identifier: Apache-2.0
// From a segment to partials: walks the tiles of a segment through the tile kernel, and merges and finishes what it leaves.
#pragma once

#include "leanattn/merge_tree.h"
#include "src/cpu/call.h"

namespace leanattn::cpu {

// Partials of one output on their way to one, in tile order, for rows [row_begin, row_end) of its heads·padded_rows packed rows.
// Siblings of the merge tree merge as they meet, the right one into the left one's memory.
class NodeStack {
 public:
  NodeStack(const Call& call, const Place& place, std::int64_t row_begin, std::int64_t row_end);
  // The next node in tile order; its memory becomes the stack's.
  void push(TreeNode node, std::byte* memory);
  int size() const { return size_; }
  // Merges what is left, last first, as the tree does where its right side is missing.
  const Node& collapse();

 private:
  void merge_top();

  static constexpr int kMostNodes = 64;  // a tree of 2^31 chunks has fewer open nodes
  const Call& call_;
  const Place place_;
  const TileKernel& kernel_;
  std::int64_t row_begin_;
  std::int64_t row_end_;
  int size_ = 0;
  TreeNode tree_[kMostNodes];
  Node nodes_[kMostNodes];
};

// Computes the segment. Its partials are those of the stack that it gives back; the i-th lies at memory + i·node_bytes.
NodeStack run_segment(const Call& call, const Segment& segment, std::byte* scratch, std::byte* memory);

// Pushes what run_segment left in memory. ordinal: number of the segment among those of its output; the leaf that it is when there are no
// chunks.
void push_segment(const Call& call, NodeStack& stack, const Segment& segment, int ordinal, std::byte* memory);

// Writes O and LSE of the rows from the output's one partial; a sink joins here.
void finish_rows(const Call& call, const Place& place, const Node& node, std::int64_t row_begin, std::int64_t row_end);

}  // namespace leanattn::cpu
