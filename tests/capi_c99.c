/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled as C99: the header alone is enough for a C program. Returns 0, or the line that failed. */
#include "leanattn/leanattn.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition) \
  if (!(condition)) return __LINE__

enum { kDim = 32, kTokens = 3 };

int capi_c99_run(void);

/* Two heads over three tokens whose keys are 0: O is the mean of V, LSE is log 3. */
int capi_c99_run(void) {
  float q[2 * kDim], o[2 * kDim], k[kTokens * kDim], v[kTokens * kDim], lse[2];
  int32_t kv_lens[1] = {kTokens};
  size_t bytes = 0;
  void* workspace;
  leanattn_problem problem;
  leanattn_options options;
  int i;

  memset(k, 0, sizeof(k));
  for (i = 0; i < 2 * kDim; ++i) q[i] = (float)i;
  for (i = 0; i < kTokens * kDim; ++i) v[i] = (float)(i / kDim * 2); /* 0, 2, 4 */

  CHECK(leanattn_problem_init(&problem) == LEANATTN_OK);
  CHECK(leanattn_options_init(&options) == LEANATTN_OK);
  CHECK(problem.q_len == 1 && problem.causal == 1 && problem.window_left == -1);
  problem.batch = 1;
  problem.q_heads = 2;
  problem.kv_heads = 1;
  problem.head_dim = kDim;
  problem.q.data = q;
  problem.q.head_stride = kDim;
  problem.o.data = o;
  problem.o.head_stride = kDim;
  problem.k.data = k;
  problem.k.token_stride = kDim;
  problem.v.data = v;
  problem.v.token_stride = kDim;
  problem.lse = lse;
  problem.kv_lens = kv_lens;
  problem.kv_capacity = kTokens;
  options.policy = LEANATTN_FLASHDECODING;
  options.splits = 2;
  options.workers = 1;

  CHECK(leanattn_validate(&problem, &options) == LEANATTN_OK);
  CHECK(leanattn_check_data(&problem) == LEANATTN_OK);
  CHECK(leanattn_workspace_bytes(&problem, &options, &bytes) == LEANATTN_OK);
  workspace = malloc(bytes + 1);
  CHECK(workspace != NULL);
  CHECK(leanattn_decode(&problem, &options, workspace, bytes) == LEANATTN_OK);
  CHECK(leanattn_last_error()[0] == '\0');
  for (i = 0; i < 2 * kDim; ++i) CHECK(fabsf(o[i] - 2.0f) < 1e-6f);
  for (i = 0; i < 2; ++i) CHECK(fabsf(lse[i] - logf(3.0f)) < 1e-6f);

  kv_lens[0] = kTokens + 1;
  CHECK(leanattn_decode(&problem, &options, workspace, bytes) == LEANATTN_INVALID_DATA);
  CHECK(strstr(leanattn_last_error(), "kv_len 4") != NULL);
  free(workspace);
  CHECK(leanattn_version()[0] != '\0');
  CHECK(leanattn_cpu_isa(0) != NULL && leanattn_cpu_isa(-1) == NULL && leanattn_cpu_isa(1000) == NULL);
  CHECK(leanattn_backend_available(LEANATTN_BACKEND_CPU) == 1);
  return 0;
}
