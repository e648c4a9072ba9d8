// SPDX-License-Identifier: Apache-2.0
#include <leanattn/attention.h>

#include <cstdio>

int main() {
  constexpr int batch = 2, q_heads = 8, kv_heads = 2, d = 64, capacity = 512;
  std::vector<float> q(batch * q_heads * d, 0.5f), o(q.size());                 // [batch, q_heads, d]
  std::vector<float> k(batch * capacity * kv_heads * d, 0.1f), v(k.size(), 2);  // [batch, capacity, kv_heads, d]
  const int kv_lens[batch] = {300, 512};

  leanattn::Problem problem{.batch = batch, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = d};
  problem.q = {.data = q.data(), .seq_stride = q_heads * d, .token_stride = q_heads * d, .head_stride = d};
  problem.o = {.data = o.data(), .seq_stride = q_heads * d, .token_stride = q_heads * d, .head_stride = d};
  problem.k = {.data = k.data(), .outer_stride = capacity * kv_heads * d, .token_stride = kv_heads * d, .head_stride = d};
  problem.v = {.data = v.data(), .outer_stride = capacity * kv_heads * d, .token_stride = kv_heads * d, .head_stride = d};
  problem.kv_lens = kv_lens;
  problem.kv_capacity = capacity;

  std::vector<std::byte> workspace(leanattn::workspace_bytes(problem));
  leanattn::decode(problem, {}, workspace);
  std::printf("O[0] = %.3f\n", o[0]);
}
