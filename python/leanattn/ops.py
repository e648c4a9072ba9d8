# SPDX-License-Identifier: Apache-2.0
"""torch.ops.leanattn: the calls as PyTorch operators, for the CPU and CUDA, whole under torch.compile and in CUDA graphs.

decode, decode_paged            functional: return out
decode_lse, decode_paged_lse    functional: return (out, lse)
decode_out, decode_paged_out    write to out and, where it is given, to lse
merge                           (o1, lse1, o2, lse2) → (o, lse)

The arguments are those of leanattn.decode and leanattn.decode_paged, the options by their names. Shapes and lengths may be dynamic:
lengths and block tables are read when the kernel runs, so a captured graph serves other values in the same memory. For inference:
results carry no gradient. While Dynamo traces, leanattn.decode, decode_paged, merge and what is built on them become these operators.

CUDA graphs that are replayed at the same time need workspaces of their own: capture each inside `with leanattn.Workspace("cuda"):`.
"""

from __future__ import annotations

import functools
import sys

import torch

from . import _api, _arrays, _core

# Positional, and few: an operator's call is parsed argument by argument.
_RULES = (
    "SymInt q_len=0, str kv_layout='NHD', bool causal=True, int window_left=-1, Tensor? tree_mask=None, float? scale=None, "
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, bool lse_base2=False, "
    "str policy='lean', bool batch_invariant=False, int workers=0"
)
_CONTIGUOUS = "Tensor? kv_lens=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None"
_PAGED = "Tensor block_table, Tensor kv_lens, Tensor? cu_seqlens_q=None"
_OUTPUTS = "Tensor(a!) out, Tensor(b!)? lse"

_library = torch.library.Library("leanattn", "DEF")
for _schema in (
    f"decode(Tensor q, Tensor k, Tensor v, {_CONTIGUOUS}, {_RULES}) -> Tensor",
    f"decode_lse(Tensor q, Tensor k, Tensor v, {_CONTIGUOUS}, {_RULES}) -> (Tensor, Tensor)",
    f"decode_out(Tensor q, Tensor k, Tensor v, {_OUTPUTS}, {_CONTIGUOUS}, {_RULES}) -> ()",
    f"decode_paged(Tensor q, Tensor k_cache, Tensor v_cache, {_PAGED}, {_RULES}) -> Tensor",
    f"decode_paged_lse(Tensor q, Tensor k_cache, Tensor v_cache, {_PAGED}, {_RULES}) -> (Tensor, Tensor)",
    f"decode_paged_out(Tensor q, Tensor k_cache, Tensor v_cache, {_OUTPUTS}, {_PAGED}, {_RULES}) -> ()",
    "merge(Tensor o1, Tensor lse1, Tensor o2, Tensor lse2, *, bool lse_base2=False) -> (Tensor, Tensor)",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)


@functools.cache
def _options(policy: str, batch_invariant: bool, workers: int) -> _core.Options:
    name, splits = _api.parse_policy(policy)
    return _core.Options(policy=name, splits=splits, batch_invariant=batch_invariant, workers=workers)


def _run(
    block_table,
    q,
    k,
    v,
    out,
    lse,
    kv_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
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
    batch_invariant=False,
    workers=0,
):
    # Defaults are looked at here: beside a call of a few microseconds, a function's own call shows.
    heads_first = kv_layout != "NHD" and _api._heads_first(kv_layout)
    if kv_lens is None and cu_seqlens_kv is None:
        kv_lens = _api._full_lens(q, k, heads_first)
    scale = 0.0 if scale is None else _api._scale(scale)
    plain = policy == "lean" and not batch_invariant and workers == 0
    _core.decode(
        q, k, v, out, lse, kv_lens, block_table, cu_seqlens_q, cu_seqlens_kv, tree_mask, alibi_slopes, sinks, q_len, heads_first, causal,
        window_left, scale, softcap, lse_base2, None if plain else _options(policy, batch_invariant, workers), None, None,
    )  # fmt: skip


_decode_out = functools.partial(_run, None)


def _decode_paged_out(q, k_cache, v_cache, out, lse, block_table, kv_lens, cu_seqlens_q=None, *rules, **named):
    _run(block_table, q, k_cache, v_cache, out, lse, kv_lens, cu_seqlens_q, None, *rules, **named)


def _new_out(q, v):
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _new_lse(q):
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _decode(q, k, v, *rules, **named):
    out = _new_out(q, v)
    _decode_out(q, k, v, out, None, *rules, **named)
    return out


def _decode_lse(q, k, v, *rules, **named):
    out, lse = _new_out(q, v), _new_lse(q)
    _decode_out(q, k, v, out, lse, *rules, **named)
    return out, lse


def _decode_paged(q, k_cache, v_cache, *rules, **named):
    out = _new_out(q, v_cache)
    _decode_paged_out(q, k_cache, v_cache, out, None, *rules, **named)
    return out


def _decode_paged_lse(q, k_cache, v_cache, *rules, **named):
    out, lse = _new_out(q, v_cache), _new_lse(q)
    _decode_paged_out(q, k_cache, v_cache, out, lse, *rules, **named)
    return out, lse


def _merge(o1, lse1, o2, lse2, *, lse_base2=False):
    o, lse = torch.stack([o1, o2]).contiguous(), torch.stack([lse1, lse2]).contiguous()
    return _api.merge_shards(o, lse, lse_base=2 if lse_base2 else "e")


def _fake_out(*arguments, **named):
    return None


def _fake_decode(q, k, v, *rules, **named):
    return _new_out(q, v)


def _fake_decode_lse(q, k, v, *rules, **named):
    return _new_out(q, v), _new_lse(q)


def _fake_merge(o1, lse1, o2, lse2, *, lse_base2=False):
    return torch.empty_like(o1), torch.empty_like(lse1)


for _name, _function, _fake in (
    ("decode", _decode, _fake_decode),
    ("decode_lse", _decode_lse, _fake_decode_lse),
    ("decode_out", _decode_out, _fake_out),
    ("decode_paged", _decode_paged, _fake_decode),
    ("decode_paged_lse", _decode_paged_lse, _fake_decode_lse),
    ("decode_paged_out", _decode_paged_out, _fake_out),
    ("merge", _merge, _fake_merge),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"leanattn::{_name}", _fake, lib=_library)


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
        "scale": scale or None,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "lse_base2": base2,
    }
    if options is not None:
        policy = f"{options.policy}:{options.splits}" if options.splits else options.policy
        rules.update(policy=policy, batch_invariant=options.batch_invariant, workers=options.workers)
    operators = torch.ops.leanattn
    if block_table is None:
        lens = (kv_lens, cu_seqlens_q, cu_seqlens_kv)
        functional, with_lse, mutating = operators.decode, operators.decode_lse, operators.decode_out
    else:
        lens = (block_table, kv_lens, cu_seqlens_q)
        functional, with_lse, mutating = operators.decode_paged, operators.decode_paged_lse, operators.decode_paged_out
    if out is None and lse is None:
        return (with_lse if return_lse else functional)(q, k, v, *lens, **rules)
    out = _new_out(q, v) if out is None else out
    lse = _new_lse(q) if lse is None and return_lse else lse
    mutating(q, k, v, out, lse, *lens, **rules)
    return (out, lse) if return_lse else out


def traced_merge(o1, lse1, o2, lse2, base2):
    return torch.ops.leanattn.merge(o1, lse1, o2, lse2, lse_base2=base2)


_arrays.torch = torch
_api._operators = sys.modules[__name__]
