// SPDX-License-Identifier: Apache-2.0
// What a backend offers to attention.cpp. Backends see validated problems only and never each other.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "leanattn/attention.h"
#include "leanattn/problem.h"

namespace leanattn {

namespace cpu {
std::size_t workspace_bytes(const Problem& problem, const Options& options);
// workspace is large enough (attention.cpp has checked); throws Error kInvalidData before O or LSE is touched.
void decode(const Problem& problem, const Options& options, std::span<std::byte> workspace);
std::vector<std::string> isas();  // fastest first
// Tokens of a tile and the cost of an output in tiles, as the schedule of this problem has them: for pictures of it.
struct Tiling {
  int tile_tokens = 0;
  int fragment_cost_tiles = 0;
};
Tiling tiling(const Problem& problem, const Options& options);
}  // namespace cpu

// Built as src/cuda/absent.cpp without a CUDA toolkit: then nothing is available and every call says why.
namespace cuda {
bool available();          // a device that some path runs on
std::string why_absent();  // of a call where available() is false: "this build has no CUDA", "no CUDA device …"
std::vector<std::string> paths();
std::string device_name();  // "NVIDIA H200"; empty when not available
std::size_t workspace_bytes(const Problem& problem, const Options& options);
void initialize_workspace(const Options& options, std::span<std::byte> workspace);
// Checks the workspace itself: its size comes out of the plan that the call makes anyway.
void decode(const Problem& problem, const Options& options, std::span<std::byte> workspace);
void merge(const MergeProblem& problem, const Options& options);
// The time line of a build with LEANATTN_TIMELINE (src/cuda/timeline.cuh): the names of its marks, the block's entry first, and the bytes
// at the end of the call's workspace that hold it as [blocks, marks] uint64, the GPU's time in ns. What a block does not come to keeps its
// value, 0 or an earlier call's. In other builds there are no marks and no bytes.
std::vector<std::string> timeline_marks();
std::size_t timeline_bytes(const Problem& problem, const Options& options);
}  // namespace cuda

}  // namespace leanattn
