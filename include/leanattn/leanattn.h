/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI: exact decode attention, with the names and the order of problem.h and attention.h. C99 and C++.

     leanattn_problem problem;
     leanattn_problem_init(&problem);                            // defaults; then set shapes, tensors, masks
     size_t bytes;
     if (leanattn_workspace_bytes(&problem, NULL, &bytes) != LEANATTN_OK) puts(leanattn_last_error());
     void* workspace = malloc(bytes);
     if (leanattn_decode(&problem, NULL, workspace, bytes) != LEANATTN_OK) puts(leanattn_last_error());

   Strides count elements, not bytes; the innermost stride (the head dimension) is always 1. Pointers are host pointers for the CPU
   backend. No function throws, prints, exits or aborts. Calls with different workspaces may run at once.

   Structs grow at the end only, and their first member says how large the caller's is: a library reads what it knows, gives defaults to
   what an older caller lacks, and rejects a newer caller's extra bytes unless they are 0. */
#ifndef LEANATTN_LEANATTN_H_
#define LEANATTN_LEANATTN_H_

#include <stddef.h>
#include <stdint.h>

#include "leanattn/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t leanattn_status;
enum {
  LEANATTN_OK = 0,
  LEANATTN_INVALID_ARGUMENT = 1, /* a shape, stride, pointer or option; nothing was computed */
  LEANATTN_UNSUPPORTED = 2,      /* well formed, but this build or machine has no kernel for it */
  LEANATTN_INVALID_DATA = 3,     /* a length or page id in use is out of range; nothing was computed */
  LEANATTN_WORKSPACE_TOO_SMALL = 4,
  LEANATTN_INTERNAL = 5 /* out of memory, or a fault of the library */
};

typedef int32_t leanattn_dtype;
enum { LEANATTN_FLOAT32 = 0, LEANATTN_FLOAT16 = 1, LEANATTN_BFLOAT16 = 2 };

/* How the tokens of a sequence are found in the K and V tensors. */
typedef int32_t leanattn_kv_layout;
enum {
  LEANATTN_KV_BATCHED = 0, /* token t of seq b at b*outer_stride + t*token_stride: [batch, n, kv_heads, d], [batch, kv_heads, n, d] */
  LEANATTN_KV_RAGGED = 1,  /* token t of seq b at (cu_seqlens_kv[b] + t)*token_stride: [total_kv, kv_heads, d] */
  LEANATTN_KV_PAGED = 2    /* token t at block_table[b, t / page_size]*outer_stride + (t % page_size)*token_stride:
                              [pages, page_size, kv_heads, d] */
};

typedef int32_t leanattn_lse_base;
enum { LEANATTN_LSE_NATURAL = 0, LEANATTN_LSE_TWO = 1 };

typedef int32_t leanattn_backend;
enum { LEANATTN_BACKEND_AUTO = 0, LEANATTN_BACKEND_CPU = 1, LEANATTN_BACKEND_CUDA = 2 };

typedef int32_t leanattn_policy;
enum {
  LEANATTN_LEAN = 0,         /* equal stretches of the whole line of tiles */
  LEANATTN_FA2 = 1,          /* one worker an output (FlashAttention-2) */
  LEANATTN_FLASHDECODING = 2 /* a fixed number of splits an output */
};

typedef int32_t leanattn_head_order;
enum { LEANATTN_HEADS_AUTO = 0, LEANATTN_HEADS_ALONG = 1, LEANATTN_HEADS_BESIDE = 2 };

/* One of K, V. Views into interleaved or layer-inside-page caches are strides and a base pointer. */
typedef struct leanattn_kv_view {
  const void* data;
  int64_t outer_stride; /* elements from one sequence (batched) or page (paged) to the next; unused when ragged */
  int64_t token_stride; /* elements from one token to the next */
  int64_t head_stride;  /* elements from one KV head to the next */
} leanattn_kv_view;

/* Q. Row (b, i, h) lies at b*seq_stride + i*token_stride + h*head_stride, or with cu_seqlens_q at
   (cu_seqlens_q[b] + i)*token_stride + h*head_stride. */
typedef struct leanattn_q_view {
  const void* data;
  int64_t seq_stride; /* unused with cu_seqlens_q */
  int64_t token_stride;
  int64_t head_stride;
} leanattn_q_view;

/* O: addressed like Q; rows of different (b, i, h) must not overlap. */
typedef struct leanattn_o_view {
  void* data;
  int64_t seq_stride;
  int64_t token_stride;
  int64_t head_stride;
} leanattn_o_view;

/* What to compute. Defaults (of leanattn_problem_init) are 0 and NULL unless a member says otherwise. */
typedef struct leanattn_problem {
  size_t struct_size; /* sizeof(leanattn_problem) of the caller */

  /* Shapes. */
  int32_t batch;           /* sequences, >= 0 */
  int32_t q_heads;         /* a multiple of kv_heads */
  int32_t kv_heads;        /* group = q_heads / kv_heads, any value >= 1 */
  int32_t head_dim;        /* of Q and K; 32 to 256 in steps of 8 */
  int32_t head_dim_v;      /* of V and O; 0 means head_dim */
  int32_t q_len;           /* default 1: new tokens of every seq; with cu_seqlens_q the longest of them */
  leanattn_dtype q_dtype;  /* of Q and O */
  leanattn_dtype kv_dtype; /* of K and V; today equal to q_dtype */

  /* Tensors. */
  leanattn_q_view q;
  leanattn_o_view o;
  leanattn_kv_view k;
  leanattn_kv_view v;
  float* lse;                  /* [total_q, q_heads] contiguous, or NULL: not wanted */
  const int32_t* cu_seqlens_q; /* [batch + 1] first Q token of each seq, starting at 0; NULL: q_len each */
  const int32_t* kv_lens;      /* [batch] tokens of each seq, new tokens included; may be NULL when ragged */

  /* Where K and V rows lie. */
  leanattn_kv_layout kv_layout;
  int64_t kv_capacity;          /* batched: tokens a seq has room for (n). ragged: the most tokens of any seq. paged: unused */
  const int32_t* cu_seqlens_kv; /* ragged: [batch + 1] first KV token of each seq; a seq has room up to the next */
  int32_t page_size;            /* paged: tokens a page, >= 1 */
  int32_t num_pages;            /* paged: pages in the cache; used ids are 0 to num_pages - 1 */
  int32_t max_pages;            /* paged: block_table slots of a seq; its room is max_pages*page_size tokens */
  const int32_t* block_table;   /* paged: [batch, max_pages]; slots past the length or before the window are not read */
  int64_t block_table_stride;   /* paged: elements from one seq to the next; 0 means max_pages */

  /* Masks. The position of query token i of a seq is kv_len - q_len + i; key t is visible when every rule allows it. */
  int32_t causal;            /* default 1: t <= position. 0: off */
  int32_t window_left;       /* default -1: no window. Else t >= position - window_left; a window of W tokens is W - 1 */
  const uint64_t* tree_mask; /* [total_q, ceil(q_len / 64)]: bit j of a row allows the j-th of the seq's own last q_len tokens; earlier
                                tokens are always allowed. NULL: no tree. A bit above the diagonal counts only with causal = 0 */

  /* Logits: s = softcap*tanh(scale*q.k / softcap) - alibi_slope*|position - t|, then the sink joins the denominator. */
  float scale;                /* 0 means 1/sqrt(head_dim) */
  float softcap;              /* 0: off */
  const float* alibi_slopes;  /* [q_heads]; NULL: none */
  const float* sinks;         /* [q_heads] natural-log logits without a value; NULL: none; -inf: none */
  leanattn_lse_base lse_base; /* LSE = log_base of the sum of e^s, the sink included */
} leanattn_problem;

/* A caller's own threads. run must call body(argument, i) once for every i in 0 to tasks - 1, on any threads, and return after the last
   has returned; the calls may run one after another. Memory written by bodies must be visible to the caller after run. */
typedef struct leanattn_executor {
  void (*run)(void* context, int32_t tasks, void (*body)(void* argument, int32_t task), void* argument);
  void* context;
} leanattn_executor;

/* How to compute it. The values change speed and rounding, never meaning. Defaults are 0 and NULL. */
typedef struct leanattn_options {
  size_t struct_size; /* sizeof(leanattn_options) of the caller */
  leanattn_backend backend;
  leanattn_policy policy;
  int32_t splits; /* flashdecoding: splits an output, at most 1024; 0: the usual heuristic */
  leanattn_head_order head_order;
  int32_t batch_invariant;     /* not 0: a row's bits depend on its own sequence only, under every policy and worker count */
  int32_t workers;             /* CPU: stretches of the lean cut, at most 65536, on the machine's threads; 0: one a thread.
                                 CUDA: thread blocks, at most one a multiprocessor, and no clusters of them; 0: all */
  leanattn_executor executor;  /* CPU. run == NULL: the library's own threads; else workers must be given */
  const char* cpu_isa;         /* CPU: a name of leanattn_cpu_isa; NULL: the fastest */
  void* stream;                /* CUDA: the cudaStream_t of the current device; NULL: the default stream */
  int32_t programmatic_launch; /* CUDA, not 0: start while the kernel before it on the stream is ending */
  const char* cuda_path;       /* CUDA: a name of leanattn_cuda_path; NULL: the fastest */
  int32_t check_data;          /* CUDA, not 0: check lengths, offsets and used page ids on the device, in the same launch. A seq with a
                                 fault is not read and counts as empty, the others are right. The CPU always checks */
  uint64_t* data_status;       /* CUDA, with check_data: a word of device memory, aligned to 8 bytes, that keeps the first fault since
                                 it was set to 0 (leanattn_data_fault_sentence); NULL: nobody is told */
} leanattn_options;

/* Attention over disjoint shards of a context, merged by their LSE. A shard row with LSE -inf is empty and its O is not looked at. */
typedef struct leanattn_merge_problem {
  size_t struct_size;         /* sizeof(leanattn_merge_problem) of the caller */
  int32_t shards;             /* >= 1 */
  int64_t rows;               /* total_q*q_heads */
  int32_t head_dim_v;         /* >= 1 */
  leanattn_dtype dtype;       /* of the shards' O and of O */
  leanattn_lse_base lse_base; /* of the shards' LSE and of LSE */
  const void* shard_o;        /* [shards, rows, head_dim_v] contiguous */
  const float* shard_lse;     /* [shards, rows] */
  void* o;                    /* [rows, head_dim_v] */
  float* lse;                 /* [rows], or NULL: not wanted */
} leanattn_merge_problem;

/* Fill a struct of struct_size bytes with defaults. For other languages; in C and C++ use the functions without _sized below.
   Errors: LEANATTN_INVALID_ARGUMENT for NULL or a struct_size that no version of the struct has. */
LEANATTN_API leanattn_status leanattn_problem_init_sized(leanattn_problem* problem, size_t struct_size);
LEANATTN_API leanattn_status leanattn_options_init_sized(leanattn_options* options, size_t struct_size);
LEANATTN_API leanattn_status leanattn_merge_problem_init_sized(leanattn_merge_problem* problem, size_t struct_size);

/* The size is that of the header which the caller was compiled with, so a newer library never writes past an older struct. */
static inline leanattn_status leanattn_problem_init(leanattn_problem* problem) {
  return leanattn_problem_init_sized(problem, sizeof(leanattn_problem));
}
static inline leanattn_status leanattn_options_init(leanattn_options* options) {
  return leanattn_options_init_sized(options, sizeof(leanattn_options));
}
static inline leanattn_status leanattn_merge_problem_init(leanattn_merge_problem* problem) {
  return leanattn_merge_problem_init_sized(problem, sizeof(leanattn_merge_problem));
}

/* In all functions below options may be NULL: the defaults. */

/* Checks every shape, stride, pointer and option; reads no tensor, length or table.
   Errors: LEANATTN_INVALID_ARGUMENT, LEANATTN_UNSUPPORTED. */
LEANATTN_API leanattn_status leanattn_validate(const leanattn_problem* problem, const leanattn_options* options);

/* Checks lengths, cu_seqlens and page ids in use, in host memory; the sentence names seq and slot.
   Errors: those of leanattn_validate, LEANATTN_INVALID_DATA. */
LEANATTN_API leanattn_status leanattn_check_data(const leanattn_problem* problem);

/* What a data_status word says: one sentence that names seq and slot, "" for 0. Valid until the thread's next call of this function. */
LEANATTN_API const char* leanattn_data_fault_sentence(uint64_t data_status);

/* *bytes becomes the workspace that leanattn_decode needs, exact, for these shapes and options. Reads no tensor, length or table.
   Errors: LEANATTN_INVALID_ARGUMENT, LEANATTN_UNSUPPORTED; *bytes is untouched then. */
LEANATTN_API leanattn_status leanattn_workspace_bytes(const leanattn_problem* problem, const leanattn_options* options, size_t* bytes);

/* Makes a workspace ready for its first call. CUDA: needed once for new or overwritten device memory, queued on options->stream; every
   call leaves it ready for the next on the same device. CPU: nothing to do. Errors: LEANATTN_INVALID_ARGUMENT (memory of the
   host, or not aligned to 16 bytes), LEANATTN_UNSUPPORTED, LEANATTN_INTERNAL. */
LEANATTN_API leanattn_status leanattn_initialize_workspace(const leanattn_options* options, void* workspace, size_t workspace_bytes);

/* O and LSE of every row. workspace: not shared with a call that runs at the same time; may be NULL when 0 bytes are needed.
   CPU: any contents, any alignment; with options->workers > 0 the same inputs give the same bits on every run.
   CUDA: device memory aligned to 16 bytes, initialised once; one kernel is queued on options->stream; lengths and page ids are read on the
   device and not checked; the same inputs give the same bits.
   Errors: all; O and LSE are untouched then. */
LEANATTN_API leanattn_status leanattn_decode(const leanattn_problem* problem, const leanattn_options* options, void* workspace,
                                             size_t workspace_bytes);

/* LSE = log of the sum of e^lse_i, O = sum of e^(lse_i - LSE)*o_i, for every row. Errors: LEANATTN_INVALID_ARGUMENT. */
LEANATTN_API leanattn_status leanattn_merge(const leanattn_merge_problem* problem);

/* The sentence of the calling thread's last call, made of names and numbers; "" when that call succeeded. Valid until the thread's next
   call. */
LEANATTN_API const char* leanattn_last_error(void);

/* "0.1.0". */
LEANATTN_API const char* leanattn_version(void);

/* Name of the index-th instruction set that the CPU backend can run here, from 0, fastest first; NULL behind the last. */
LEANATTN_API const char* leanattn_cpu_isa(int32_t index);

/* Name of the index-th kernel path that the CUDA backend can run on the current device, from 0, fastest first; NULL behind the last. Valid
   until the thread's next call. */
LEANATTN_API const char* leanattn_cuda_path(int32_t index);

/* 1 when the library was built with the backend and the machine can run it, else 0. LEANATTN_BACKEND_CUDA: on the current device; the first
   call for a device makes its context. */
LEANATTN_API int32_t leanattn_backend_available(leanattn_backend backend);

#ifdef __cplusplus
}
#endif

#endif /* LEANATTN_LEANATTN_H_ */
