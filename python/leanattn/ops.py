# SPDX-License-Identifier: Apache-2.0
"""torch.ops.leanattn: the calls as PyTorch operators, for the CPU and CUDA, whole under torch.compile and in CUDA graphs.

decode, decode_paged            functional: return (out, lse); lse has no elements unless return_lse
decode_out, decode_paged_out    write to out and, where it is given, to lse
merge                           (o1, lse1, o2, lse2) → (o, lse), in host memory

The arguments are those of leanattn.decode and leanattn.decode_paged, the options by their names. Shapes and lengths may be dynamic:
lengths and block tables are read when the kernel runs, so a captured graph serves other values in the same memory. For inference: there
is no backward. While Dynamo traces, leanattn.decode, decode_paged, merge and what is built on them become these operators.

CUDA graphs that are replayed at the same time need workspaces of their own: capture each inside `with leanattn.Workspace("cuda"):`.
"""

from __future__ import annotations

import functools
import sys

import torch

from . import _api, _arrays, _core

_RULES = (
    "SymInt q_len=0, str kv_layout='NHD', bool causal=True, int window_left=-1, Tensor? tree_mask=None, float? scale=None, "
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, bool lse_base2=False, "
    "str policy='lean', int splits=0, bool batch_invariant=False, int workers=0"
)
_CONTIGUOUS = "Tensor q, Tensor k, Tensor v, Tensor? kv_lens=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None"
_PAGED = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor kv_lens, Tensor? cu_seqlens_q=None"

_library = torch.library.Library("leanattn", "DEF")
for _name, _arrays_of in (("decode", _CONTIGUOUS), ("decode_paged", _PAGED)):
    _library.define(f"{_name}({_arrays_of}, *, {_RULES}, bool return_lse=False) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
    _library.define(f"{_name}_out({_arrays_of}, *, {_RULES}, Tensor(a!) out, Tensor(b!)? lse=None) -> ()", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    "merge(Tensor o1, Tensor lse1, Tensor o2, Tensor lse2, *, bool lse_base2=False) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)


@functools.cache
def _options(policy: str, splits: int, batch_invariant: bool, workers: int) -> _core.Options:
    return _core.Options(policy=policy, splits=splits, batch_invariant=batch_invariant, workers=workers)


_DEFAULT = ("lean", 0, False, 0)


def _run(
    q,
    k,
    v,
    kv_lens,
    block_table,
    cu_seqlens_q,
    cu_seqlens_kv,
    out,
    lse,
    *,
    q_len=0,
    kv_layout="NHD",
    causal=True,
    window_left=-1,
    tree_mask=None,
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    lse_base2=False,
    policy="lean",
    splits=0,
    batch_invariant=False,
    workers=0,
):
    named = (policy, splits, batch_invariant, workers)
    heads_first = kv_layout != "NHD" and _api._heads_first(kv_layout)
    if kv_lens is None and cu_seqlens_kv is None:
        kv_lens = _api._full_lens(q, k, heads_first)
    _core.decode(
        q,
        k,
        v,
        out,
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
        scale or 0.0,
        softcap,
        lse_base2,
        None if named == _DEFAULT else _options(*named),
        None,
        None,
    )


def _outputs(q, v, return_lse):
    shape = q.shape
    out = q.new_empty((*shape[:-1], v.shape[-1]))
    return out, q.new_empty(shape[:-1] if return_lse else (0,), dtype=torch.float32)


def _decode(q, k, v, kv_lens=None, cu_seqlens_q=None, cu_seqlens_kv=None, *, return_lse=False, **rules):
    out, lse = _outputs(q, v, return_lse)
    _run(q, k, v, kv_lens, None, cu_seqlens_q, cu_seqlens_kv, out, lse if return_lse else None, **rules)
    return out, lse


def _decode_out(q, k, v, kv_lens=None, cu_seqlens_q=None, cu_seqlens_kv=None, *, out, lse=None, **rules):
    _run(q, k, v, kv_lens, None, cu_seqlens_q, cu_seqlens_kv, out, lse, **rules)


def _decode_paged(q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q=None, *, return_lse=False, **rules):
    out, lse = _outputs(q, v_cache, return_lse)
    _run(q, k_cache, v_cache, kv_lens, block_table, cu_seqlens_q, None, out, lse if return_lse else None, **rules)
    return out, lse


def _decode_paged_out(q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q=None, *, out, lse=None, **rules):
    _run(q, k_cache, v_cache, kv_lens, block_table, cu_seqlens_q, None, out, lse, **rules)


def _merge(o1, lse1, o2, lse2, *, lse_base2=False):
    return _api.merge_shards(torch.stack([o1, o2]).contiguous(), torch.stack([lse1, lse2]).contiguous(), lse_base=2 if lse_base2 else "e")


for _key in ("CPU", "CUDA"):
    for _name, _function in (
        ("decode", _decode),
        ("decode_out", _decode_out),
        ("decode_paged", _decode_paged),
        ("decode_paged_out", _decode_paged_out),
        ("merge", _merge),
    ):
        _library.impl(_name, _function, _key)


@torch.library.register_fake("leanattn::decode", lib=_library)
def _(q, k, v, kv_lens=None, cu_seqlens_q=None, cu_seqlens_kv=None, *, return_lse=False, **rules):
    return _outputs(q, v, return_lse)


@torch.library.register_fake("leanattn::decode_paged", lib=_library)
def _(q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q=None, *, return_lse=False, **rules):
    return _outputs(q, v_cache, return_lse)


@torch.library.register_fake("leanattn::decode_out", lib=_library)
def _(q, k, v, kv_lens=None, cu_seqlens_q=None, cu_seqlens_kv=None, *, out, lse=None, **rules):
    return None


@torch.library.register_fake("leanattn::decode_paged_out", lib=_library)
def _(q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q=None, *, out, lse=None, **rules):
    return None


@torch.library.register_fake("leanattn::merge", lib=_library)
def _(o1, lse1, o2, lse2, *, lse_base2=False):
    return torch.empty_like(o1), torch.empty_like(lse1)


def traced(q, k, v, out, lse, small, plain, return_lse, options, workspace, stream):
    """A call of leanattn.decode or decode_paged as an operator."""
    if workspace is not None or stream is not None:
        raise ValueError("workspace and stream inside torch.compile: supported are None; call under `with workspace:` instead")
    kv_lens, block_table, cu_seqlens_q, cu_seqlens_kv, tree_mask, alibi_slopes, sinks = small
    q_len, heads_first, causal, window_left, scale, softcap, base2 = plain
    rules = {
        "q_len": q_len,
        "kv_layout": "HND" if heads_first else "NHD",
        "causal": causal,
        "window_left": window_left,
        "tree_mask": tree_mask,
        "scale": scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "lse_base2": base2,
    }
    if options is not None:
        rules.update(policy=options.policy, splits=options.splits, batch_invariant=options.batch_invariant, workers=options.workers)
    operators = torch.ops.leanattn
    if block_table is None:
        functional, mutating, arrays = operators.decode, operators.decode_out, (q, k, v, kv_lens, cu_seqlens_q, cu_seqlens_kv)
    else:
        functional, mutating, arrays = operators.decode_paged, operators.decode_paged_out, (q, k, v, block_table, kv_lens, cu_seqlens_q)
    if out is None and lse is None:
        out, lse = functional(*arrays, return_lse=return_lse, **rules)
    else:
        new_out, new_lse = _outputs(q, v, return_lse)
        out = new_out if out is None else out
        lse = new_lse if lse is None and return_lse else lse
        mutating(*arrays, out=out, lse=lse, **rules)
    return (out, lse) if return_lse else out


def traced_merge(o1, lse1, o2, lse2, base2):
    return torch.ops.leanattn.merge(o1, lse1, o2, lse2, lse_base2=base2)


_arrays.torch = torch
_api._operators = sys.modules[__name__]
