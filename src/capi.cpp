// SPDX-License-Identifier: Apache-2.0
// The C ABI over the C++ API: structs are copied member by member, exceptions become codes.
#include "leanattn/leanattn.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "leanattn/attention.h"
#include "leanattn/problem.h"
#include "problem_view.h"

namespace {

using leanattn::Status;

// Fixed, so that reporting an error allocates nothing; a longer sentence is cut.
thread_local char last_error[1024] = "";

leanattn_status keep(Status status, const char* sentence) noexcept {
  const std::size_t length = std::min(std::strlen(sentence), sizeof(last_error) - 1);
  std::memcpy(last_error, sentence, length);
  last_error[length] = '\0';
  return static_cast<leanattn_status>(status);
}

// Runs a call and turns what it throws into a status.
template <class Call>
leanattn_status guarded(Call&& call) noexcept {
  try {
    call();
    return keep(Status::kOk, "");
  } catch (const leanattn::Error& error) {
    return keep(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return keep(Status::kInternal, "out of memory");
  } catch (const std::exception& error) {
    return keep(Status::kInternal, error.what());
  } catch (...) {
    return keep(Status::kInternal, "an executor threw an exception of unknown type");
  }
}

// Checks a struct that a caller handed in. All versions so far have today's size.
template <class Struct>
const Struct& known(const char* name, const Struct* given) {
  leanattn::check_argument(name, given);
  const std::size_t size = given->struct_size;
  leanattn::check_struct_size(name, size, sizeof(Struct));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  const auto* extra = std::find_if(bytes + sizeof(Struct), bytes + size, [](unsigned char byte) { return byte != 0; });
  if (extra != bytes + size) leanattn::reject_unknown_member(name, static_cast<std::size_t>(extra - bytes), sizeof(Struct));
  return *given;
}

template <class Struct>
leanattn_status init(const char* name, Struct* out, std::size_t size, const Struct& defaults) noexcept {
  return guarded([&] {
    leanattn::check_argument(name, out);
    leanattn::check_struct_size(name, size, sizeof(Struct));
    std::memset(static_cast<void*>(out), 0, size);
    *out = defaults;
    out->struct_size = size;
  });
}

leanattn::Problem from_c(const leanattn_problem& c) {
  leanattn::Problem p;
  p.batch = c.batch;
  p.q_heads = c.q_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.q_len = c.q_len;
  p.q_dtype = static_cast<leanattn::DType>(c.q_dtype);
  p.kv_dtype = static_cast<leanattn::DType>(c.kv_dtype);
  p.q = {c.q.data, c.q.seq_stride, c.q.token_stride, c.q.head_stride};
  p.o = {c.o.data, c.o.seq_stride, c.o.token_stride, c.o.head_stride};
  p.k = {c.k.data, c.k.outer_stride, c.k.token_stride, c.k.head_stride};
  p.v = {c.v.data, c.v.outer_stride, c.v.token_stride, c.v.head_stride};
  p.lse = c.lse;
  p.cu_seqlens_q = c.cu_seqlens_q;
  p.kv_lens = c.kv_lens;
  p.kv_layout = static_cast<leanattn::KvLayout>(c.kv_layout);
  p.kv_capacity = c.kv_capacity;
  p.cu_seqlens_kv = c.cu_seqlens_kv;
  p.page_size = c.page_size;
  p.num_pages = c.num_pages;
  p.max_pages = c.max_pages;
  p.block_table = c.block_table;
  p.block_table_stride = c.block_table_stride;
  p.causal = c.causal != 0;
  p.window_left = c.window_left;
  p.tree_mask = c.tree_mask;
  p.scale = c.scale;
  p.softcap = c.softcap;
  p.alibi_slopes = c.alibi_slopes;
  p.sinks = c.sinks;
  p.lse_base = static_cast<leanattn::LseBase>(c.lse_base);
  return p;
}

leanattn::Problem problem_from(const leanattn_problem* c) { return from_c(known("problem", c)); }

leanattn::Options options_from(const leanattn_options* given) {
  leanattn::Options options;
  if (given == nullptr) return options;
  const leanattn_options& c = known("options", given);
  options.backend = static_cast<leanattn::Backend>(c.backend);
  options.policy = static_cast<leanattn::Policy>(c.policy);
  options.splits = c.splits;
  options.head_order = static_cast<leanattn::HeadOrder>(c.head_order);
  options.batch_invariant = c.batch_invariant != 0;
  options.workers = c.workers;
  options.executor = {c.executor.run, c.executor.context};
  options.cpu_isa = c.cpu_isa;
  options.stream = c.stream;
  options.programmatic_launch = c.programmatic_launch != 0;
  options.cuda_path = c.cuda_path;
  options.check_data = c.check_data != 0;
  options.data_status = c.data_status;
  return options;
}

leanattn::MergeProblem merge_problem_from(const leanattn_merge_problem* given) {
  const leanattn_merge_problem& c = known("problem", given);
  leanattn::MergeProblem p;
  p.shards = c.shards;
  p.rows = c.rows;
  p.head_dim_v = c.head_dim_v;
  p.dtype = static_cast<leanattn::DType>(c.dtype);
  p.lse_base = static_cast<leanattn::LseBase>(c.lse_base);
  p.shard_o = c.shard_o;
  p.shard_lse = c.shard_lse;
  p.o = c.o;
  p.lse = c.lse;
  return p;
}

}  // namespace

extern "C" {

leanattn_status leanattn_problem_init_sized(leanattn_problem* problem, size_t struct_size) {
  leanattn_problem defaults{};
  defaults.q_len = 1;
  defaults.causal = 1;
  defaults.window_left = -1;
  return init("problem", problem, struct_size, defaults);
}

leanattn_status leanattn_options_init_sized(leanattn_options* options, size_t struct_size) {
  return init("options", options, struct_size, leanattn_options{});
}

leanattn_status leanattn_merge_problem_init_sized(leanattn_merge_problem* problem, size_t struct_size) {
  return init("problem", problem, struct_size, leanattn_merge_problem{});
}

leanattn_status leanattn_validate(const leanattn_problem* problem, const leanattn_options* options) {
  return guarded([&] { leanattn::validate(problem_from(problem), options_from(options)); });
}

leanattn_status leanattn_check_data(const leanattn_problem* problem) {
  return guarded([&] {
    const leanattn::Problem p = problem_from(problem);
    leanattn::validate(p);
    leanattn::check_data(p);
  });
}

const char* leanattn_data_fault_sentence(uint64_t data_status) {
  thread_local std::string sentence;
  return guarded([&] { sentence = leanattn::data_fault_sentence(data_status); }) == LEANATTN_OK ? sentence.c_str() : "";
}

leanattn_status leanattn_workspace_bytes(const leanattn_problem* problem, const leanattn_options* options, size_t* bytes) {
  return guarded([&] {
    leanattn::check_argument("bytes", bytes);
    *bytes = leanattn::workspace_bytes(problem_from(problem), options_from(options));
  });
}

leanattn_status leanattn_initialize_workspace(const leanattn_options* options, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    if (workspace_bytes > 0) leanattn::check_argument("workspace", workspace);
    leanattn::initialize_workspace(options_from(options), {static_cast<std::byte*>(workspace), workspace_bytes});
  });
}

leanattn_status leanattn_decode(const leanattn_problem* problem, const leanattn_options* options, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    if (workspace_bytes > 0) leanattn::check_argument("workspace", workspace);
    leanattn::decode(problem_from(problem), options_from(options), {static_cast<std::byte*>(workspace), workspace_bytes});
  });
}

leanattn_status leanattn_merge(const leanattn_merge_problem* problem) {
  return guarded([&] { leanattn::merge(merge_problem_from(problem)); });
}

const char* leanattn_last_error(void) { return last_error; }

const char* leanattn_version(void) { return leanattn::version(); }

const char* leanattn_cpu_isa(int32_t index) {
  const char* name = nullptr;
  guarded([&] {
    static const std::vector<std::string> kNames = leanattn::cpu_isas();
    if (index >= 0 && static_cast<std::size_t>(index) < kNames.size()) name = kNames[index].c_str();
  });
  return name;
}

const char* leanattn_cuda_path(int32_t index) {
  static thread_local std::string name;  // the current device may change between calls
  name.clear();
  guarded([&] {
    const std::vector<std::string> names = leanattn::cuda_paths();
    if (index >= 0 && static_cast<std::size_t>(index) < names.size()) name = names[index];
  });
  return name.empty() ? nullptr : name.c_str();
}

int32_t leanattn_backend_available(leanattn_backend backend) {
  int32_t available = 0;
  guarded([&] { available = leanattn::backend_available(static_cast<leanattn::Backend>(backend)) ? 1 : 0; });
  return available;
}

}  // extern "C"
