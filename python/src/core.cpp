// SPDX-License-Identifier: Apache-2.0
// The module leanattn._core: the C++ calls on Python's arrays. Shapes, defaults and errors are in leanattn/_core.pyi; what users see is the
// package around it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <vector>

#include "backend.h"
#include "call.h"
#include "device.h"
#include "reference.h"
#include "src/cpu/threads.h"
#include "tools/plan.h"

namespace leanattn::python {
namespace {

using Stream = std::optional<std::uintptr_t>;

Arguments arguments_of(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle kv_lens, nb::handle block_table,
                       nb::handle cu_seqlens_q, nb::handle cu_seqlens_kv, nb::handle tree_mask, nb::handle alibi_slopes, nb::handle sinks,
                       int q_len, bool heads_first, bool causal, int window_left, double scale, double softcap, bool base2) {
  return {q,
          k,
          v,
          o,
          lse,
          kv_lens,
          block_table,
          cu_seqlens_q,
          cu_seqlens_kv,
          tree_mask,
          alibi_slopes,
          sinks,
          q_len,
          heads_first,
          causal,
          window_left,
          static_cast<float>(scale),
          static_cast<float>(softcap),
          base2 ? LseBase::kTwo : LseBase::kNatural};
}

// --- Reference ---

using DoubleArray = nb::ndarray<nb::numpy, double>;

DoubleArray numpy_of(std::vector<double>&& values, std::initializer_list<std::size_t> shape) {
  auto* kept = new std::vector<double>(std::move(values));
  const nb::capsule owner(kept, [](void* memory) noexcept { delete static_cast<std::vector<double>*>(memory); });
  return DoubleArray(kept->data(), shape, owner);
}

// On a thread of its own, so that this one can answer ^C; the computation then ends at its next (seq, KV head).
Reference interruptible_reference(const Problem& problem) {
  std::atomic<bool> stop{false};
  Sample sample;
  sample.stop = &stop;
  auto result = std::async(std::launch::async, [&] { return compute_reference(problem, sample); });
  for (;;) {
    {
      const nb::gil_scoped_release released;
      if (result.wait_for(std::chrono::milliseconds(20)) == std::future_status::ready) break;
    }
    if (PyErr_CheckSignals() != 0) {
      stop = true;
      nb::python_error error;
      const nb::gil_scoped_release released;
      result.wait();
      throw error;
    }
  }
  return result.get();
}

nb::tuple reference(const Arguments& arguments) {
  const Call call(arguments, nullptr);
  if (call.device().cuda) invalid("reference: arrays in host memory are needed");
  const Problem& problem = call.problem();
  validate(problem);
  check_data(problem);
  call.check_ends();
  Reference right = interruptible_reference(problem);
  const std::size_t heads = static_cast<std::size_t>(problem.q_heads), dims = static_cast<std::size_t>(problem.head_dim_v);
  const std::size_t tokens = right.lse.size() / heads, batch = static_cast<std::size_t>(problem.batch);
  return nb::make_tuple(numpy_of(std::move(right.o), {tokens, heads, dims}), numpy_of(std::move(right.lse), {tokens, heads}),
                        numpy_of(std::move(right.naive_o_error), {batch}), numpy_of(std::move(right.naive_lse_error), {batch}));
}

// --- Merge ---

void merge_shards(nb::handle shard_o, nb::handle shard_lse, nb::handle o, nb::handle lse, bool base2, Stream stream) {
  const Tensor from = tensor_of(shard_o, "o"), from_lse = tensor_of(shard_lse, "lse"), to = tensor_of(o, "out");
  MergeProblem problem;
  if (from.ndim < 2) invalid("o: [shards, …, head_dim_v] is needed");
  problem.shards = static_cast<std::int32_t>(from.shape[0]);
  problem.head_dim_v = static_cast<std::int32_t>(from.shape[from.ndim - 1]);
  problem.rows = 1;
  for (int axis = 1; axis < from.ndim - 1; ++axis) problem.rows *= from.shape[axis];
  problem.dtype = float_type(from);
  problem.lse_base = base2 ? LseBase::kTwo : LseBase::kNatural;
  std::vector<Tensor> all{from, from_lse, to};
  if (!lse.is_none()) all.push_back(tensor_of(lse, "out_lse"));
  for (const Tensor& tensor : all) {
    if (!(tensor.device == from.device)) {
      invalid(std::string(tensor.name) + " lies on " + device_name(tensor.device) + ", o on " + device_name(from.device));
    }
    require_contiguous(tensor);
  }
  for (const Tensor* tensor : {&all[1], &all.back()}) {
    if (all.size() == 3 && tensor == &all.back()) continue;
    require_element(*tensor, Element::kFloat32, "float32");
  }
  if (from_lse.elements() != problem.shards * problem.rows || to.elements() != problem.rows * problem.head_dim_v ||
      (all.size() == 4 && all[3].elements() != problem.rows) || float_type(to) != problem.dtype) {
    invalid("merge: o " + shape_text(from) + ", lse " + shape_text(from_lse) + " and out " + shape_text(to) + " do not fit");
  }
  require_writable(to);
  problem.shard_o = from.data;
  problem.shard_lse = static_cast<const float*>(from_lse.data);
  problem.o = to.data;
  if (all.size() == 4) problem.lse = static_cast<float*>(all[3].data);
  Options options;
  if (from.device.cuda) {
    options.backend = Backend::kCuda;
    options.stream = stream_for(shard_o, from.device, stream);
  }
  const nb::gil_scoped_release released;
  const DeviceGuard guard(from.device.cuda ? from.device.id : -1);
  merge(problem, options);
}

// --- Plan ---

PlanRequest plan_request(std::vector<int> kv_lens, int q_heads, int kv_heads, int q_len, int workers, int tile_tokens,
                         const std::vector<std::pair<std::string, int>>& policies, const std::string& head_order, bool batch_invariant,
                         int fragment_cost_tiles, int window_left) {
  PlanRequest request;
  request.kv_lens = std::move(kv_lens);
  request.q_heads = q_heads;
  request.kv_heads = kv_heads;
  request.q_len = q_len;
  request.workers = workers;
  request.tile_tokens = tile_tokens;
  for (const auto& [name, splits] : policies) request.policies.push_back({parse_policy(name), splits});
  request.head_order = parse_head_order(head_order);
  request.batch_invariant = batch_invariant;
  request.fragment_cost_tiles = fragment_cost_tiles;
  request.window_left = window_left;
  return request;
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(error.status() == Status::kInternal ? PyExc_RuntimeError : PyExc_ValueError, error.what());
  }
}

}  // namespace
}  // namespace leanattn::python

NB_MODULE(_core, m) {
  using namespace leanattn;
  using namespace leanattn::python;
  nb::set_leak_warnings(false);  // objects that a program keeps until its end are no leak
  nb::register_exception_translator(translate);

  nb::class_<OptionsObject>(m, "Options")
      .def(nb::init<const std::string&, int, const std::string&, bool, int, bool, std::optional<std::string>, std::optional<std::string>,
                    bool, std::uintptr_t>(),
           nb::kw_only(), nb::arg("policy") = "lean", nb::arg("splits") = 0, nb::arg("head_order") = "auto",
           nb::arg("batch_invariant") = false, nb::arg("workers") = 0, nb::arg("programmatic_launch") = false,
           nb::arg("cpu_isa") = nb::none(), nb::arg("cuda_path") = nb::none(), nb::arg("check_data") = false, nb::arg("data_status") = 0);

  nb::class_<Workspace>(m, "Workspace")
      .def(
          "__init__", [](Workspace* self, const std::string& device) { new (self) Workspace(parse_device(device)); },
          nb::arg("device") = "cpu")
      .def(
          "reserve",
          [](Workspace& workspace, std::size_t bytes) {
            const nb::gil_scoped_release released;
            const std::lock_guard<std::mutex> lock(workspace.mutex());
            workspace.reserve(bytes);
          },
          nb::arg("nbytes"))
      .def_prop_ro("nbytes", &Workspace::bytes)
      .def_prop_ro("device", [](const Workspace& workspace) { return device_name(workspace.device()); })
      .def("__enter__",
           [](nb::handle self) {
             enter(nb::cast<Workspace&>(self));
             return nb::borrow(self);
           })
      .def("__exit__", [](Workspace& workspace, nb::args) { leave(workspace); });

  nb::class_<Call>(m, "Call")
      .def(
          "__init__",
          [](Call* self, nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle kv_lens, nb::handle block_table,
             nb::handle cu_seqlens_q, nb::handle cu_seqlens_kv, nb::handle tree_mask, nb::handle alibi_slopes, nb::handle sinks, int q_len,
             bool heads_first, bool causal, int window_left, double scale, double softcap, bool base2, const OptionsObject* options) {
            if (o.is_none()) invalid("out is None: an array is needed");
            new (self) Call(arguments_of(q, k, v, o, lse, kv_lens, block_table, cu_seqlens_q, cu_seqlens_kv, tree_mask, alibi_slopes, sinks,
                                         q_len, heads_first, causal, window_left, scale, softcap, base2),
                            options);
          },
          nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse").none(), nb::arg("kv_lens").none(),
          nb::arg("block_table").none(), nb::arg("cu_seqlens_q").none(), nb::arg("cu_seqlens_kv").none(), nb::arg("tree_mask").none(),
          nb::arg("alibi_slopes").none(), nb::arg("sinks").none(), nb::arg("q_len"), nb::arg("heads_first"), nb::arg("causal"),
          nb::arg("window_left"), nb::arg("scale"), nb::arg("softcap"), nb::arg("base2"), nb::arg("options").none())
      .def(
          "__call__", [](Call& call, Workspace* workspace, Stream stream) { call.run(workspace, stream); },
          nb::arg("workspace") = nb::none(), nb::arg("stream") = nb::none())
      .def_prop_ro("workspace_bytes", &Call::bytes);

  m.def(
      "decode",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle kv_lens, nb::handle block_table,
         nb::handle cu_seqlens_q, nb::handle cu_seqlens_kv, nb::handle tree_mask, nb::handle alibi_slopes, nb::handle sinks, int q_len,
         bool heads_first, bool causal, int window_left, double scale, double softcap, bool base2, const OptionsObject* options,
         Workspace* workspace, Stream stream) {
        if (o.is_none()) invalid("out is None: an array is needed");
        Call call(arguments_of(q, k, v, o, lse, kv_lens, block_table, cu_seqlens_q, cu_seqlens_kv, tree_mask, alibi_slopes, sinks, q_len,
                               heads_first, causal, window_left, scale, softcap, base2),
                  options);
        call.run(workspace, stream);
      },
      nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse").none(), nb::arg("kv_lens").none(),
      nb::arg("block_table").none(), nb::arg("cu_seqlens_q").none(), nb::arg("cu_seqlens_kv").none(), nb::arg("tree_mask").none(),
      nb::arg("alibi_slopes").none(), nb::arg("sinks").none(), nb::arg("q_len"), nb::arg("heads_first"), nb::arg("causal"),
      nb::arg("window_left"), nb::arg("scale"), nb::arg("softcap"), nb::arg("base2"), nb::arg("options").none(),
      nb::arg("workspace").none(), nb::arg("stream").none());

  m.def(
      "reference",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle kv_lens, nb::handle block_table, nb::handle cu_seqlens_q,
         nb::handle cu_seqlens_kv, nb::handle tree_mask, nb::handle alibi_slopes, nb::handle sinks, int q_len, bool heads_first,
         bool causal, int window_left, double scale, double softcap, bool base2) {
        return reference(arguments_of(q, k, v, nb::none(), nb::none(), kv_lens, block_table, cu_seqlens_q, cu_seqlens_kv, tree_mask,
                                      alibi_slopes, sinks, q_len, heads_first, causal, window_left, scale, softcap, base2));
      },
      nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("kv_lens").none(), nb::arg("block_table").none(), nb::arg("cu_seqlens_q").none(),
      nb::arg("cu_seqlens_kv").none(), nb::arg("tree_mask").none(), nb::arg("alibi_slopes").none(), nb::arg("sinks").none(),
      nb::arg("q_len"), nb::arg("heads_first"), nb::arg("causal"), nb::arg("window_left"), nb::arg("scale"), nb::arg("softcap"),
      nb::arg("base2"));

  m.def("merge", merge_shards, nb::arg("o"), nb::arg("lse"), nb::arg("out"), nb::arg("out_lse").none(), nb::arg("base2"),
        nb::arg("stream").none());

  m.def(
      "synchronize",
      [](std::uintptr_t stream) {
        const nb::gil_scoped_release released;
        synchronize(reinterpret_cast<void*>(stream));
      },
      nb::arg("stream"));

  nb::class_<PlanRequest>(m, "PlanRequest")
      .def(
          "__init__",
          [](PlanRequest* self, std::vector<int> kv_lens, int q_heads, int kv_heads, int q_len, int workers, int tile_tokens,
             const std::vector<std::pair<std::string, int>>& policies, const std::string& head_order, bool batch_invariant,
             int fragment_cost_tiles, int window_left) {
            new (self) PlanRequest(plan_request(std::move(kv_lens), q_heads, kv_heads, q_len, workers, tile_tokens, policies, head_order,
                                                batch_invariant, fragment_cost_tiles, window_left));
          },
          nb::arg("kv_lens"), nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("q_len"), nb::arg("workers"), nb::arg("tile_tokens"),
          nb::arg("policies"), nb::arg("head_order"), nb::arg("batch_invariant"), nb::arg("fragment_cost_tiles"), nb::arg("window_left"))
      .def("json", plan_json)
      .def("text", plan_text)
      .def("svg", plan_svg);

  m.def("version", version);
  m.def("cpu_isas", cpu_isas);
  m.def("cuda_paths", cuda_paths);
  m.def("data_fault_sentence", data_fault_sentence, nb::arg("data_status"));
  m.def("cuda_absent", [] { return backend_available(Backend::kCuda) ? std::string() : cuda::why_absent(); });
  m.def("cuda_device_name", cuda::device_name);
  m.def("default_workers", cpu::default_workers);
}
