// SPDX-License-Identifier: Apache-2.0
// The host's side of a call: which kernel, which cut of the line, how the workspace is laid out, one launch. Lengths are on the device and
// never looked at here.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <iterator>
#include <limits>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "backend.h"
#include "cuda/launch.h"
#include "cuda/own_cut.h"
#include "cuda/timeline.cuh"
#include "cuda/variants.h"
#include "cuda/views.h"
#include "leanattn/merge_tree.h"
#include "leanattn/splits.h"
#include "numeric.h"
#include "problem_view.h"

namespace leanattn::cuda {
namespace {

void require(cudaError_t answer, const char* what) {
  if (answer == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not meet it again
  reject_cuda_answer(what, cudaGetErrorString(answer));
}

struct Device {
  int id = 0;
  int sms = 0;
  int capability = 0;  // 90 for 9.0
  int most_shared_bytes = 0;
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  require(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

Device current_device() {
  int id = 0;
  require(cudaGetDevice(&id), "cudaGetDevice");
  Device device;
  device.id = id;
  device.sms = attribute(cudaDevAttrMultiProcessorCount, id);
  device.capability = attribute(cudaDevAttrComputeCapabilityMajor, id) * 10 + attribute(cudaDevAttrComputeCapabilityMinor, id);
  device.most_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  return device;
}

// The architecture that the kernels' code for the current device was compiled for, 90 for 9.0; negative: CUDA's answer why there is no
// such code. 0: CUDA says something else, such as an earlier kernel's fault, which the call that follows will meet. All kernels but those
// of is_warpgroup are built for the same architectures and the code stays the same, so each device is asked once; asking makes its
// context.
int code_architecture() {
  static std::atomic<int> of_devices[64];
  int id = 0;
  require(cudaGetDevice(&id), "cudaGetDevice");
  const bool kept = id < static_cast<int>(std::size(of_devices));
  if (const int known = kept ? of_devices[id].load(std::memory_order_relaxed) : 0; known != 0) return known;
  int found = 0;
  cudaFuncAttributes attributes{};
  const cudaError_t answer = cudaFuncGetAttributes(&attributes, bfloat16_kernel(kVariants[0]).function);
  if (answer != cudaSuccess) cudaGetLastError();
  switch (answer) {
    case cudaSuccess: found = attributes.ptxVersion; break;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled: found = -static_cast<int>(answer); break;
    default: return 0;
  }
  if (kept) of_devices[id].store(found, std::memory_order_relaxed);
  return found;
}

// Of kPaths, those that code for an architecture has, fastest first; all where the architecture is not known (code_architecture).
std::span<const char* const> paths_of(int architecture) {
  const std::span<const char* const> all(kPaths);
  return architecture > 0 && architecture < 90 ? all.last(1) : all;
}

// variant: one of kVariants.
Kernel kernel_of(DType dtype, const Variant& variant) {
  const bool bfloat16 = dtype == DType::kBFloat16;
  if (is_warpgroup(variant)) return bfloat16 ? warpgroup_bfloat16_kernel(variant) : warpgroup_float16_kernel(variant);
  return bfloat16 ? bfloat16_kernel(variant) : float16_kernel(variant);
}

// Why nothing can run on the current device; empty where it can.
std::string absence() {
  int devices = 0;
  const cudaError_t answer = cudaGetDeviceCount(&devices);
  if (answer != cudaSuccess) {
    cudaGetLastError();  // its own; a caller's is not touched
    return std::string("no CUDA device: ") + cudaGetErrorString(answer);
  }
  if (devices == 0) return "no CUDA device";
  const int capability = current_device().capability;
  const int code = capability >= 80 ? code_architecture() : 0;
  if (capability >= 80 && code >= 0) return {};
  const std::string name = "compute capability " + std::to_string(capability / 10) + "." + std::to_string(capability % 10);
  if (capability < 80) return name + ": at least 8.0 is needed";
  return name + ": this build has no kernels for it (" + cudaGetErrorString(static_cast<cudaError_t>(-code)) + ")";
}

// Everything about a launch that the problem's shape decides.
struct Plan {
  Device device;
  Kernel kernel;
  Line line;
  int architecture = 0;  // of the kernels' code (code_architecture)
  Variant variant{};
  int slot_nodes = 1;  // Params::slot_nodes, and what follows it
  int shared_nodes = 0;
  int shared_nodes_at = 0;
  dim3 grid{};
  int stages = 0;
  int shared_bytes = 0;
};

constexpr int kBytesInFlight = 96 << 10;  // of K and V, a multiprocessor: less is slower, and so is much more

bool is_portable(const Options& options) { return options.cuda_path != nullptr && std::string_view(options.cuda_path) == kPortable; }

// Vectors of a partial that each block of a cluster merges, but for the last: whole rows of four lanes.
int slice_vectors(const Kernel& kernel, int cluster) { return (kernel.slot_value_bytes / 64 + cluster - 1) / cluster * 4; }

// Shared memory for what the blocks of a cluster push to each other (cluster.cuh, Exchange).
int exchange_bytes(const Kernel& kernel, int cluster) { return cluster * (slice_vectors(kernel, cluster) * 16 + kernel.rows * 8); }

cudaLaunchConfig_t launch_config(const Plan& plan, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = plan.grid;
  config.blockDim = dim3(static_cast<unsigned>(plan.kernel.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(plan.shared_bytes);
  config.stream = stream;
  return config;
}

// What a launch may ask for. Always the same values: another host thread may be about to launch the kernel in another way.
void allow_all(const Plan& plan) {
  const auto allow = [&](cudaFuncAttribute which, int value) {
    require(cudaFuncSetAttribute(plan.kernel.function, which, value), "cudaFuncSetAttribute");
  };
  allow(cudaFuncAttributeMaxDynamicSharedMemorySize, plan.device.most_shared_bytes);
  if (plan.architecture >= 90) allow(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);  // 9 to 16 blocks
}

cudaLaunchAttribute cluster_attribute(int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// Clusters of each size that the device holds at once, asked for once a kernel and device.
std::array<int, kMaxCluster + 1> resident_clusters(Plan plan) {
  struct Known {
    int device;
    const void* function;
    int shared_bytes;
    std::array<int, kMaxCluster + 1> clusters;
  };
  static std::mutex mutex;
  static std::vector<Known> known;
  const std::lock_guard lock(mutex);
  for (const Known& one : known) {
    if (one.device == plan.device.id && one.function == plan.kernel.function && one.shared_bytes == plan.shared_bytes) return one.clusters;
  }
  std::array<int, kMaxCluster + 1> clusters{};
  allow_all(plan);
  const int bytes = plan.shared_bytes;
  for (int blocks = 2; blocks <= kMaxCluster; ++blocks) {
    plan.shared_bytes = bytes + exchange_bytes(plan.kernel, blocks);
    if (plan.shared_bytes > plan.device.most_shared_bytes) break;
    plan.grid = dim3(static_cast<unsigned>(blocks));
    cudaLaunchConfig_t config = launch_config(plan, nullptr);
    cudaLaunchAttribute attribute = cluster_attribute(blocks);
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&clusters[blocks], plan.kernel.function, &config) != cudaSuccess) {
      cudaGetLastError();
      clusters[blocks] = 0;  // the device has none so large
    }
  }
  known.push_back({plan.device.id, plan.kernel.function, bytes, clusters});
  return clusters;
}

// Gives the outputs stretches of their own where that promises to be faster (own_cut.h). plan.line holds the cut across outputs, which
// stays the kernel's choice for lengths that differ much.
void own_stretches(const Problem& problem, std::int64_t most_tiles, bool in_clusters, Plan& plan) {
  Line& line = plan.line;
  Work work;
  work.outputs = static_cast<std::int64_t>(problem.batch) * problem.kv_heads;
  work.tiles = most_tiles;
  work.tile_bytes = static_cast<std::int64_t>(plan.kernel.tile_tokens) * problem.head_dim * 4;
  work.blocks = plan.device.sms;
  work.chunk_tiles = line.chunk_tiles;
  if (work.outputs == 0 || work.outputs > work.blocks) return;
  if (in_clusters) work.clusters = resident_clusters(plan);
  const OwnCut cut = own_cut(work);
  if (cut.stretches == 0) return;
  line.output_stretches = cut.stretches;
  line.cluster_stretches = cut.cluster;
  line.join_cost_tiles = kJoinCostTiles;
  plan.grid = dim3(static_cast<unsigned>(cut.stretches), static_cast<unsigned>(problem.kv_heads), static_cast<unsigned>(problem.batch));
  const int blocks = cut.stretches * static_cast<int>(work.outputs);
  line.workers = line.head_order == HeadOrder::kBeside ? blocks / problem.kv_heads : blocks;
  if (cut.cluster > 1) plan.shared_bytes += exchange_bytes(plan.kernel, cut.cluster);
}

// Code for less than 9.0 has the variants in full only (decode.cuh). The portable path takes none that one architecture alone has.
Variant choose_variant(const Problem& problem, const Options& options, std::int64_t most_rows, const Plan& plan) {
  const int rows = static_cast<int>(std::min<std::int64_t>(most_rows, 1 << 20));
  const Features features = needed_features(problem, options);
  if (plan.architecture >= 90 && features != Features::kFull) {
    const Variant variant = find_variant(problem.head_dim, problem.head_dim, rows, features);
    const bool runs = !is_warpgroup(variant) || (plan.device.capability == 90 && !is_portable(options));
    if (runs && variant.head_dim == problem.head_dim && (rows <= variant.rows || features == Features::kPlain)) return variant;
  }
  return find_variant(problem.head_dim, head_dim_v(problem), rows, Features::kFull);
}

Plan make_plan(const Problem& problem, const Options& options) {
  Plan plan;
  plan.device = current_device();
  plan.architecture = code_architecture();
  const auto paths = paths_of(plan.architecture);
  if (options.cuda_path != nullptr && std::find(paths.begin(), paths.end(), std::string_view(options.cuda_path)) == paths.end()) {
    std::string names;
    for (const char* name : paths) names += (names.empty() ? "" : ", ") + std::string(name);
    reject_cuda_path(options.cuda_path, names);
  }
  const std::int64_t most_rows = static_cast<std::int64_t>(problem.q_len) * group(problem);
  plan.variant = choose_variant(problem, options, most_rows, plan);
  plan.kernel = kernel_of(problem.q_dtype, plan.variant);
  const int stage_bytes = plan.kernel.stage_tokens * (problem.head_dim + head_dim_v(problem)) * 2;  // that are read
  plan.stages = std::clamp((kBytesInFlight + stage_bytes - 1) / stage_bytes, 2, kMaxStages);
  const auto bytes = [&] { return plan.kernel.fixed_shared_bytes + plan.stages * plan.kernel.stage_shared_bytes; };
  while (plan.stages > 1 && bytes() > plan.device.most_shared_bytes) --plan.stages;
  plan.shared_bytes = bytes();

  const int blocks = options.workers > 0 ? std::min(options.workers, plan.device.sms) : plan.device.sms;
  Line& line = plan.line;
  line = problem_line(problem);
  line.rows_per_block = plan.variant.rows;
  line.tile_tokens = plan.kernel.tile_tokens;
  line.policy = options.policy;
  line.runs = true;
  line.chunk_tiles = options.batch_invariant ? plan.kernel.chunk_tiles : 0;
  line.chunks_grow = true;
  if (options.check_data) {
    line.most_kv_len = static_cast<int>(std::min<std::int64_t>(max_kv_len(problem), std::numeric_limits<std::int32_t>::max()));
    line.most_q_len = problem.q_len;
  }
  line.fragment_cost_tiles = options.policy == Policy::kLean ? 1 : 0;
  line.head_order = options.head_order;
  const int lines = std::min(problem.kv_heads, blocks);  // of heads side by side
  const int used_beside = problem.kv_heads <= blocks ? blocks / lines * lines : 0;
  if (line.head_order == HeadOrder::kAuto) {
    line.head_order = used_beside * 10 >= blocks * 9 ? HeadOrder::kBeside : HeadOrder::kAlong;
  } else if (line.head_order == HeadOrder::kBeside && used_beside == 0) {
    line.head_order = HeadOrder::kAlong;  // fewer blocks than heads
  }
  const bool beside = line.head_order == HeadOrder::kBeside;
  line.workers = beside ? blocks / lines : blocks;
  plan.grid = dim3(static_cast<unsigned>(beside ? line.workers * lines : line.workers));
  std::int64_t most_tokens = max_kv_len(problem);
  if (problem.window_left >= 0) {
    const std::int64_t seen = static_cast<std::int64_t>(problem.window_left) + problem.q_len;
    most_tokens = std::min(most_tokens, seen + line.tile_tokens - 1);  // the window may begin anywhere in a tile
  }
  const std::int64_t most_tiles = std::max<std::int64_t>((most_tokens + line.tile_tokens - 1) / line.tile_tokens, 1);
  if (options.batch_invariant) plan.slot_nodes = max_row_nodes(static_cast<int>(std::min<std::int64_t>(most_tiles, kMostGrownChunks)));
  if (options.policy == Policy::kLean && options.workers == 0 && problem.cu_seqlens_q == nullptr && most_rows <= plan.variant.rows) {
    own_stretches(problem, most_tiles, plan.architecture >= 90 && !is_portable(options), plan);
  }
  if (options.batch_invariant) {
    const int node_bytes = plan.kernel.slot_value_bytes + plan.kernel.slot_row_bytes;
    plan.shared_nodes = std::min(plan.slot_nodes, (plan.device.most_shared_bytes - plan.shared_bytes) / node_bytes);
    plan.shared_nodes_at = plan.shared_bytes - bytes();
    plan.shared_bytes += plan.shared_nodes * node_bytes;
  }
  if (options.policy == Policy::kFlashDecoding) {
    const std::int64_t row_blocks = (most_rows + plan.variant.rows - 1) / plan.variant.rows;
    const std::int64_t outputs = std::max<std::int64_t>(row_blocks * problem.batch * problem.kv_heads, 1);
    line.splits = options.splits > 0 ? options.splits
                                     : flashdecoding_splits(outputs, blocks, static_cast<int>(std::min<std::int64_t>(most_tiles, 1 << 24)));
  }
  return plan;
}

struct Layout {
  std::size_t counter_bytes = 0;  // at the front and the same for every problem on the device, so that they stay 0 between any two calls
  std::size_t row_bytes = 0;
  std::size_t value_bytes = 0;
  std::size_t timeline_bytes = 0;

  std::size_t bytes() const { return counter_bytes + row_bytes + value_bytes + timeline_bytes; }
};

Layout lay_out(const Plan& plan) {
  const std::size_t slots = 2 * static_cast<std::size_t>(plan.device.sms), partials = slots * static_cast<std::size_t>(plan.slot_nodes);
  Layout layout;
  layout.counter_bytes = 2 * slots * kMaxConsumerWarps * sizeof(std::uint32_t);
  layout.row_bytes = partials * plan.kernel.slot_row_bytes;
  layout.value_bytes = partials * plan.kernel.slot_value_bytes;
  if (kKeepsTimeline) {  // at the end
    const std::size_t blocks = std::size_t{plan.grid.x} * plan.grid.y * plan.grid.z;
    layout.timeline_bytes = std::max(blocks, slots / 2) * kMarks * sizeof(std::uint64_t);
  }
  return layout;
}

// 2^log2 ≥ divisor, so the factor has 32 bits and is rounded up by less than 31 bits can tell.
Quotient quotient(int divisor) {
  const int log2 = std::bit_width(static_cast<unsigned>(divisor) - 1u);
  Quotient by;
  by.shift = 31 + log2;
  by.factor = static_cast<std::uint32_t>((1ull << by.shift) / static_cast<unsigned>(divisor) + 1);
  return by;
}
Params make_params(const Problem& problem, const Options& options, const Plan& plan, std::byte* workspace) {
  Params p;
  p.line = plan.line;
  set_views(p, problem);
  p.ragged = problem.kv_layout == KvLayout::kRagged;
  p.lse = problem.lse;
  if (problem.kv_layout == KvLayout::kPaged) {
    p.block_table = problem.block_table;
    p.block_table_stride = block_table_stride(problem);
    p.page_size = problem.page_size;
    p.page = quotient(p.page_size);
  }
  p.kv_heads = problem.kv_heads;
  p.group = group(problem);
  p.head_dim = problem.head_dim;
  p.head_dim_v = head_dim_v(problem);
  p.padded = p.head_dim < plan.variant.head_dim || p.head_dim_v < plan.variant.head_dim;
  p.whole_tokens = p.padded ? -1 : plan.kernel.stage_tokens;
  p.causal = problem.causal;
  p.scale_log2 = scale(problem) * kLog2E;
  p.lse_factor = problem.lse_base == LseBase::kTwo ? 1.0f : kLn2;
  p.rules = has_rules(problem);
  p.softcap_log2 = problem.softcap * kLog2E;
  p.softcap_scale = problem.softcap > 0.0f ? scale(problem) / problem.softcap : 0.0f;
  p.alibi_slopes = problem.alibi_slopes;
  p.tree_mask = reinterpret_cast<const std::uint32_t*>(problem.tree_mask);  // words of 64 bits, low half first
  p.tree_words = 2 * tree_mask_words(problem);
  p.sinks = problem.sinks;
  p.sink_lse_factor = problem.lse_base == LseBase::kTwo ? kLog2E : 1.0f;
  p.checks = options.check_data;
  p.data_status = reinterpret_cast<unsigned long long*>(options.data_status);
  p.num_pages = problem.num_pages;
  p.stages = plan.stages;
  if (p.line.output_stretches > 0) {
    p.of_all = quotient(p.line.output_stretches);
    p.of_cluster = quotient(p.line.cluster_stretches);
    p.cluster_slice = slice_vectors(plan.kernel, p.line.cluster_stretches);
    p.of_slice = quotient(p.cluster_slice);
  }
  const Layout layout = lay_out(plan);
  p.slots = 2 * plan.device.sms;
  p.slot_nodes = plan.slot_nodes;
  p.shared_nodes = plan.shared_nodes;
  p.shared_nodes_at = plan.shared_nodes_at;
  p.counters = reinterpret_cast<std::uint32_t*>(workspace);
  p.partial_rows = reinterpret_cast<float2*>(workspace + layout.counter_bytes);
  p.partial_values = reinterpret_cast<float4*>(workspace + layout.counter_bytes + layout.row_bytes);
  p.timeline = reinterpret_cast<std::uint64_t*>(workspace + layout.counter_bytes + layout.row_bytes + layout.value_bytes);
  return p;
}

}  // namespace

bool available() { return absence().empty(); }

std::string why_absent() { return absence(); }

std::string device_name() {
  int id = 0;
  cudaDeviceProp properties{};
  if (!available() || cudaGetDevice(&id) != cudaSuccess || cudaGetDeviceProperties(&properties, id) != cudaSuccess) return {};
  return properties.name;
}

std::vector<std::string> paths() {
  if (!available()) return {};
  const auto paths = paths_of(code_architecture());
  return {paths.begin(), paths.end()};
}

std::size_t workspace_bytes(const Problem& problem, const Options& options) { return lay_out(make_plan(problem, options)).bytes(); }

void initialize_workspace(const Options& options, std::span<std::byte> workspace) {
  if (workspace.empty()) return;
  cudaPointerAttributes memory{};
  require(cudaPointerGetAttributes(&memory, workspace.data()), "cudaPointerGetAttributes");
  check_device_memory("workspace", workspace.data(), memory.type == cudaMemoryTypeDevice || memory.type == cudaMemoryTypeManaged);
  check_device_workspace(workspace.data());
  require(cudaMemsetAsync(workspace.data(), 0, workspace.size(), static_cast<cudaStream_t>(options.stream)), "cudaMemsetAsync");
}

void decode(const Problem& problem, const Options& options, std::span<std::byte> workspace) {
  const Plan plan = make_plan(problem, options);
  check_workspace(workspace.data(), workspace.size(), lay_out(plan).bytes());
  check_device_workspace(workspace.data());
  if (problem.batch == 0 || problem.q_len == 0) return;
  Params params = make_params(problem, options, plan, workspace.data());
  allow_all(plan);
  cudaLaunchConfig_t config = launch_config(plan, static_cast<cudaStream_t>(options.stream));
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (options.programmatic_launch && plan.architecture >= 90) {  // code for less does not wait for the kernel before (ptx.cuh)
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (plan.line.cluster_stretches > 1) attributes[config.numAttrs++] = cluster_attribute(plan.line.cluster_stretches);
  void* arguments[] = {&params};
  require(cudaLaunchKernelExC(&config, plan.kernel.function, arguments), "cudaLaunchKernelExC");
}

std::vector<std::string> timeline_marks() {
  if (!kKeepsTimeline) return {};
  return {std::begin(kMarkNames), std::end(kMarkNames)};
}

std::size_t timeline_bytes(const Problem& problem, const Options& options) { return lay_out(make_plan(problem, options)).timeline_bytes; }

}  // namespace leanattn::cuda
