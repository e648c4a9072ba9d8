# SPDX-License-Identifier: Apache-2.0
"""The C interface (include/leanattn/leanattn.h) and the command line's read floor (tools/floor.h), called on tensors without a copy."""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p

import torch

from leanattn_structs import Options, Problem, View

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
KV_BATCHED, KV_PAGED = 0, 2


class Library:
    def __init__(self, build):
        self.c = ctypes.CDLL(str(build / "libleanattn.so"))
        self.c.leanattn_last_error.restype = c_char_p
        for name, struct in (("problem", Problem), ("options", Options)):
            getattr(self.c, f"leanattn_{name}_init_sized").argtypes = [POINTER(struct), c_size_t]
        self.c.leanattn_workspace_bytes.argtypes = [POINTER(Problem), POINTER(Options), POINTER(c_size_t)]
        self.c.leanattn_decode.argtypes = [POINTER(Problem), POINTER(Options), c_void_p, c_size_t]
        self.floor = ctypes.CDLL(str(build / "tools/libleanattn_floor.so"))
        self.floor.leanattn_floor_new.argtypes = [POINTER(c_void_p), POINTER(c_int64), c_int64, c_int64, c_int32, c_double]
        self.floor.leanattn_floor_new.restype = c_void_p
        self.floor.leanattn_floor_read.argtypes = [c_void_p, c_int64]
        self.floor.leanattn_floor_read.restype = c_double
        self.floor.leanattn_floor_free.argtypes = [c_void_p]

    def check(self, status):
        if status:
            raise RuntimeError(self.c.leanattn_last_error().decode())


class Decode:
    """Calls leanattn_decode on the index-th set of a pool."""

    def __init__(self, library, case, inputs, pool, threads):
        self.api, self.inputs, self.pool = library, inputs, pool
        self.o = torch.empty_like(inputs.q)
        heads, d = case.kv_heads, case.head_dim
        p = self.problem = Problem()
        library.check(library.c.leanattn_problem_init_sized(byref(p), ctypes.sizeof(p)))
        p.batch, p.q_heads, p.kv_heads, p.head_dim = case.batch, case.q_heads, heads, d
        p.q_dtype = p.kv_dtype = DTYPE_CODES[inputs.q.dtype]
        row = case.q_heads * d
        p.q, p.o = View(inputs.q.data_ptr(), row, row, d), View(self.o.data_ptr(), row, row, d)
        p.kv_lens = inputs.kv_lens.data_ptr()
        if case.page:
            self.strides = (case.page * heads * d, heads * d, d)
            table = inputs.block_table
            p.kv_layout, p.page_size, p.num_pages, p.max_pages = KV_PAGED, case.page, table.numel(), table.shape[1]
            p.block_table = table.data_ptr()
        else:
            self.strides = (case.length * heads * d, *((d, case.length * d) if case.layout == "head_major" else (heads * d, d)))
            p.kv_layout, p.kv_capacity = KV_BATCHED, case.length
        p.window_left, p.softcap = case.window, case.softcap
        if case.alibi:
            p.alibi_slopes = inputs.alibi_slopes.data_ptr()
        if case.sink:
            p.sinks = inputs.sinks.data_ptr()

        self.options = Options()
        library.check(library.c.leanattn_options_init_sized(byref(self.options), ctypes.sizeof(self.options)))
        self.options.workers = threads
        # Made here, so that a timed call holds no work of Python that a caller of C would not have.
        self.views = [tuple(View(part.data_ptr(), *self.strides) for part in pool.kv(case, index)) for index in range(pool.sets(case))]
        self.problem_ref, self.options_ref = byref(p), byref(self.options)
        p.k, p.v = self.views[0]
        size = c_size_t()
        library.check(library.c.leanattn_workspace_bytes(byref(p), byref(self.options), byref(size)))
        self.workspace = torch.empty(size.value, dtype=torch.uint8)
        self.workspace_at, self.workspace_bytes = self.workspace.data_ptr(), self.workspace.numel()

    def __call__(self, index):
        self.problem.k, self.problem.v = self.views[index % len(self.views)]
        self.api.check(self.api.c.leanattn_decode(self.problem_ref, self.options_ref, self.workspace_at, self.workspace_bytes))


class Floor:
    """Reads as many bytes as the case must, on one of the pool's sets, in the way found fastest here for this case and thread count."""

    def __init__(self, library, case, pool, threads, seconds):
        self.api = library
        sets = pool.sets(case)
        parts = [part.data_ptr() for index in range(sets) for part in pool.kv(case, index)]
        sizes = [case.kv_bytes // 2] * len(parts)
        self.sets = sets
        self.floor = library.floor.leanattn_floor_new(
            (c_void_p * len(parts))(*parts), (c_int64 * len(parts))(*sizes), sets, 2, threads, seconds)

    def __call__(self, index):
        self.api.floor.leanattn_floor_read(self.floor, index % self.sets)

    def __del__(self):
        self.api.floor.leanattn_floor_free(self.floor)
