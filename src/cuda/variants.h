// SPDX-License-Identifier: Apache-2.0
// The one table of CUDA kernel variants: what is a template parameter of the kernel, and nothing else is. The instantiations
// (inst_*.cu), the launcher, validation, the command line and the tests read it. Plain C++; includes nothing.
#pragma once

namespace leanattn::cuda {

// What a variant has code for. A short call waits for its instructions, which come from cold memory: those of features that it does not
// use cost it a tenth to a third of its time (docs/kernel.md). So one variant in full serves every call, and others serve the calls
// that ask for one feature or none (needed_features in views.h), where the device has clusters of blocks.
enum class Features {
  kPlain,      // none
  kInvariant,  // the batch-invariant option, always
  kChecked,    // the check_data option, always
  kRules,      // window, tree, soft-cap, ALiBi and sinks, as run-time values
  kFull,       // all, as run-time values
};

struct Variant {
  int head_dim;  // columns of K and V in shared memory; those that a problem lacks are zeros there
  int rows;      // of a row block: packed rows (query tokens × group) of one output
  Features features;
};

// A call takes, of the features that serve it, the first that holds its head_dim and head_dim_v and the rows of its longest seq, or several
// row blocks of the largest. Registers hold Õ of no more than 32 rows of 256 columns.
constexpr Variant kVariants[] = {
    {64, 8, Features::kPlain},     {64, 16, Features::kPlain},     {64, 32, Features::kPlain},  {64, 64, Features::kPlain},
    {96, 8, Features::kPlain},     {96, 32, Features::kPlain},     {128, 8, Features::kPlain},  {128, 16, Features::kPlain},
    {128, 32, Features::kPlain},   {128, 64, Features::kPlain},    {256, 8, Features::kPlain},  {256, 32, Features::kPlain},
    {64, 8, Features::kInvariant}, {128, 8, Features::kInvariant}, {64, 8, Features::kChecked}, {128, 8, Features::kChecked},
    {64, 8, Features::kRules},     {128, 8, Features::kRules},     {64, 8, Features::kFull},    {64, 16, Features::kFull},
    {64, 64, Features::kFull},     {128, 8, Features::kFull},      {128, 16, Features::kFull},  {128, 64, Features::kFull},
    {256, 8, Features::kFull},     {256, 32, Features::kFull},
};

// Whether it is for wgmma, which compute capability 9.0 alone has (code for "sm_90a"): where rows of an output fill a warpgroup's 64. Not
// where bits may not depend on the row block, nor where rules take a warp's 16 tokens.
constexpr bool is_warpgroup(const Variant& variant) {
  return variant.features == Features::kPlain && variant.rows == 64 && (variant.head_dim == 64 || variant.head_dim == 128);
}

// Blocks of a cluster at most.
constexpr int kMaxCluster = 16;

// The columns of kVariants.
constexpr int kHeadDims[] = {64, 96, 128, 256};

// Kernel paths, fastest first. sm_90: clusters of blocks where they pay, compute capability 9.0 and later, and wgmma. portable: neither,
// 8.0 and later.
constexpr const char* kPortable = "portable";
constexpr const char* kPaths[] = {"sm_90", kPortable};

// The variant of a problem with these features; head_dim 0: there is none. Every problem has one with kFull: both dims are at most 256
// (problem.cpp).
constexpr Variant find_variant(int head_dim, int head_dim_v, int rows, Features features) {
  const int larger = head_dim > head_dim_v ? head_dim : head_dim_v;
  Variant found{0, 0, features};
  for (const Variant& one : kVariants) {
    if (one.features != features || one.head_dim < larger) continue;
    if (found.head_dim != 0 && one.head_dim != found.head_dim) break;
    found = one;
    if (rows <= one.rows) break;
  }
  return found;
}

}  // namespace leanattn::cuda
