// SPDX-License-Identifier: Apache-2.0
// From Python's arguments to a Problem, with the checks that only the arrays' own shapes allow, and the call itself.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "leanattn/attention.h"
#include "tensor.h"
#include "workspace.h"

namespace leanattn::python {

// leanattn::Options with names of its own.
struct OptionsObject {
  OptionsObject(const std::string& policy, int splits, const std::string& head_order, bool batch_invariant, int workers,
                bool programmatic_launch, std::optional<std::string> cpu_isa, std::optional<std::string> cuda_path, bool check_data,
                std::uintptr_t data_status);
  Options options() const;

  Policy policy = Policy::kLean;
  int splits = 0;
  HeadOrder head_order = HeadOrder::kAuto;
  bool batch_invariant = false;
  int workers = 0;
  bool programmatic_launch = false;
  std::optional<std::string> cpu_isa;
  std::optional<std::string> cuda_path;
  bool check_data = false;
  std::uintptr_t data_status = 0;  // a device's address; the Python object keeps its memory
};
Policy parse_policy(const std::string& name);
HeadOrder parse_head_order(const std::string& name);

// What decode and reference take; None where an array is not given. The meaning of each is that of Problem; shapes are in _core.pyi.
struct Arguments {
  nb::handle q, k, v, o, lse, kv_lens, block_table, cu_seqlens_q, cu_seqlens_kv, tree_mask, alibi_slopes, sinks;
  int q_len = 0;  // with cu_seqlens_q: at least the longest; 0: the CPU looks, CUDA takes the rows of q
  bool heads_first = false;
  bool causal = true;
  int window_left = -1;
  float scale = 0.0f;
  float softcap = 0.0f;
  LseBase lse_base = LseBase::kNatural;
};

// A checked call on arrays that it keeps alive.
class Call {
 public:
  // Without o: for reference only.
  Call(const Arguments& arguments, const OptionsObject* options);
  Call(const Call&) = delete;  // options_ points into names_
  Call& operator=(const Call&) = delete;

  // Runs without the GIL. stream: CUDA only; null: the one that q's framework works on.
  void run(Workspace* workspace, std::optional<std::uintptr_t> stream);

  // Lengths past the arrays' own ends, on the CPU: Error kInvalidData. run does it too.
  void check_ends() const;
  std::size_t bytes() const;  // of workspace
  const Problem& problem() const { return problem_; }
  Device device() const { return device_; }

 private:
  Tensor take(nb::handle array, const char* name);
  std::optional<Tensor> take_optional(nb::handle array, const char* name);
  const std::int32_t* lens(nb::handle array, const char* name, std::int64_t count, const char* meaning);
  const float* head_values(nb::handle array, const char* name);
  void set_queries(const Arguments& arguments);
  void set_keys(const Arguments& arguments);
  void set_lengths(const Arguments& arguments);
  void set_output(const Arguments& arguments);

  Problem problem_;
  std::optional<OptionsObject> names_;
  Options options_;
  Device device_;
  std::int64_t total_q_ = 0;
  std::int64_t total_kv_ = 0;            // rows of a ragged K
  std::vector<std::int32_t> full_lens_;  // CPU, without kv_lens
  nb::object q_;
  std::vector<nb::object> owners_;
};

}  // namespace leanattn::python
