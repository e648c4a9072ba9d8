// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <leanattn/attention.h>

#include <cstdio>

template <class T>
T* on_device(const std::vector<T>& host) {
  void* device = nullptr;
  cudaMalloc(&device, host.size() * sizeof(T));
  cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
  return static_cast<T*>(device);
}

int main() {
  if (!leanattn::backend_available(leanattn::Backend::kCuda)) return std::puts("no GPU for the CUDA backend"), 0;
  constexpr int batch = 2, q_heads = 8, kv_heads = 2, d = 64, capacity = 512;
  constexpr std::uint16_t half = 0x3800, two = 0x4000;  // 0.5 and 2 in float16
  std::vector<std::uint16_t> o(batch * q_heads * d), kv(batch * capacity * kv_heads * d, two);

  leanattn::Problem problem{.batch = batch, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = d};
  problem.q_dtype = problem.kv_dtype = leanattn::DType::kFloat16;
  problem.q = {.data = on_device(std::vector(o.size(), half)), .seq_stride = q_heads * d, .token_stride = q_heads * d, .head_stride = d};
  problem.o = {.data = on_device(o), .seq_stride = q_heads * d, .token_stride = q_heads * d, .head_stride = d};
  problem.k = {.data = on_device(kv), .outer_stride = capacity * kv_heads * d, .token_stride = kv_heads * d, .head_stride = d};
  problem.v = {.data = on_device(kv), .outer_stride = capacity * kv_heads * d, .token_stride = kv_heads * d, .head_stride = d};
  problem.kv_lens = on_device(std::vector<std::int32_t>{300, 512});  // read by the kernel: a graph may replay with others
  problem.kv_capacity = capacity;

  const leanattn::Options options{.backend = leanattn::Backend::kCuda};  // on the default stream
  std::vector<std::byte> zeros(leanattn::workspace_bytes(problem, options));
  const std::span workspace(on_device(zeros), zeros.size());
  leanattn::initialize_workspace(options, workspace);  // once: every call leaves it ready for the next
  leanattn::decode(problem, options, workspace);       // one kernel on the stream

  cudaMemcpy(o.data(), problem.o.data, o.size() * sizeof(o[0]), cudaMemcpyDeviceToHost);
  std::printf("O[0] is %s\n", o[0] == two ? "2" : "wrong");
}
