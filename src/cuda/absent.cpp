// SPDX-License-Identifier: Apache-2.0
// The CUDA backend of a build without a CUDA toolkit.
#include "backend.h"
#include "problem_view.h"

namespace leanattn::cuda {

bool available() { return false; }
std::string why_absent() { return "this build has no CUDA"; }
std::vector<std::string> paths() { return {}; }
std::string device_name() { return {}; }

// attention.cpp asks available() first.
std::size_t workspace_bytes(const Problem&, const Options&) { reject_cuda_answer("workspace_bytes", "not built"); }
void initialize_workspace(const Options&, std::span<std::byte>) { reject_cuda_answer("initialize_workspace", "not built"); }
void decode(const Problem&, const Options&, std::span<std::byte>) { reject_cuda_answer("decode", "not built"); }
void merge(const MergeProblem&, const Options&) { reject_cuda_answer("merge", "not built"); }
std::vector<std::string> timeline_marks() { return {}; }
std::size_t timeline_bytes(const Problem&, const Options&) { return 0; }

}  // namespace leanattn::cuda
