# SPDX-License-Identifier: Apache-2.0
"""The structs of the C interface (include/leanattn/leanattn.h), member by member. tests/bench_structs_test.py holds their sizes."""

from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p


class View(Structure):
    """leanattn_kv_view, leanattn_q_view and leanattn_o_view: strides in elements."""

    _fields_ = [("data", c_void_p), ("outer_stride", c_int64), ("token_stride", c_int64), ("head_stride", c_int64)]


class Problem(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        *[(name, c_int32) for name in ("batch", "q_heads", "kv_heads", "head_dim", "head_dim_v", "q_len", "q_dtype", "kv_dtype")],
        *[(name, View) for name in ("q", "o", "k", "v")],
        ("lse", POINTER(c_float)), ("cu_seqlens_q", c_void_p), ("kv_lens", c_void_p),
        ("kv_layout", c_int32), ("kv_capacity", c_int64), ("cu_seqlens_kv", c_void_p),
        ("page_size", c_int32), ("num_pages", c_int32), ("max_pages", c_int32), ("block_table", c_void_p), ("block_table_stride", c_int64),
        ("causal", c_int32), ("window_left", c_int32), ("tree_mask", POINTER(c_uint64)),
        ("scale", c_float), ("softcap", c_float), ("alibi_slopes", c_void_p), ("sinks", c_void_p), ("lse_base", c_int32),
    ]


class Options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        *[(name, c_int32) for name in ("backend", "policy", "splits", "head_order", "batch_invariant", "workers")],
        ("executor_run", c_void_p), ("executor_context", c_void_p), ("cpu_isa", c_char_p),
        ("stream", c_void_p), ("programmatic_launch", c_int32), ("cuda_path", c_char_p),
        ("check_data", c_int32), ("data_status", c_void_p),
    ]
