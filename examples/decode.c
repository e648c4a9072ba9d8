// SPDX-License-Identifier: Apache-2.0
#include <leanattn/leanattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, Q_HEADS = 8, KV_HEADS = 2, D = 64, CAPACITY = 512 };
static float q[BATCH][Q_HEADS][D], o[BATCH][Q_HEADS][D], k[BATCH][CAPACITY][KV_HEADS][D], v[BATCH][CAPACITY][KV_HEADS][D];

int main(void) {
  const int32_t kv_lens[BATCH] = {300, 512};
  for (size_t i = 0; i < sizeof v / sizeof(float); ++i) (&v[0][0][0][0])[i] = 2.0f;

  leanattn_problem problem;
  leanattn_problem_init(&problem);
  problem.batch = BATCH, problem.q_heads = Q_HEADS, problem.kv_heads = KV_HEADS, problem.head_dim = D;
  problem.q = (leanattn_q_view){q, Q_HEADS * D, Q_HEADS * D, D};
  problem.o = (leanattn_o_view){o, Q_HEADS * D, Q_HEADS * D, D};
  problem.k = (leanattn_kv_view){k, CAPACITY * KV_HEADS * D, KV_HEADS * D, D};
  problem.v = (leanattn_kv_view){v, CAPACITY * KV_HEADS * D, KV_HEADS * D, D};
  problem.kv_lens = kv_lens, problem.kv_capacity = CAPACITY;

  size_t bytes = 0;
  leanattn_status status = leanattn_workspace_bytes(&problem, NULL, &bytes);
  void* workspace = malloc(bytes);
  if (status == LEANATTN_OK) status = leanattn_decode(&problem, NULL, workspace, bytes);
  if (status != LEANATTN_OK) return fprintf(stderr, "%s\n", leanattn_last_error()), 1;
  printf("O[0] = %.3f\n", o[0][0][0]);
  free(workspace);
  return 0;
}
