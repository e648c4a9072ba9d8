# SPDX-License-Identifier: Apache-2.0
"""The call shape of FlashAttention's flash_attn_with_kvcache."""

from __future__ import annotations

import dataclasses
from numbers import Integral
from typing import Any

from . import _api, _arrays
from ._api import Options
from ._arrays import Array


def _check_room(pos: Any, room: int, block_table: Any, pages: int, page_of: Any) -> None:
    """On the host, before anything is written. pos, page_of: [batch, new tokens]."""
    if pos.shape[0] == 0 or pos.shape[1] == 0:
        return
    for seq in range(pos.shape[0]):
        first, tokens = int(pos[seq, 0]), pos.shape[1]
        if first < 0 or first + tokens > room:
            raise ValueError(f"seq {seq}: kv_len {first} and {tokens} new tokens are outside 0 to {room}, the room of the cache")
        if block_table is None:
            continue
        for slot in sorted({int(slot) for slot in page_of[seq]}):
            page = int(block_table[seq, slot])
            if not 0 <= page < pages:
                raise ValueError(f"seq {seq} slot {slot}: page {page} is outside num_pages {pages}")


def _check_new(k: Any, v: Any, k_cache: Any, v_cache: Any, heads_axis: int) -> None:
    """What would otherwise be repeated along an axis, or rounded, without a word."""
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if getattr(new, "ndim", 0) != 4:
            raise ValueError(f"{name} {_arrays.described(new)}: an array [batch, new tokens, kv_heads, d] is needed")
        needed = [k.shape[0], k.shape[1], cache.shape[heads_axis], cache.shape[3]]
        if list(new.shape) != needed:
            raise ValueError(f"{name} of shape {list(new.shape)}: [batch, new tokens, kv_heads, d] = {needed} is needed")
        if new.dtype != cache.dtype:
            raise ValueError(f"{name} of {new.dtype}: {cache.dtype} is needed, as {name}_cache is")


def _int32(values: Any, name: str, like: Array, batch: int, dims: int = 1) -> Array:
    """An argument of the caller's as an int32 array, [batch] or, with dims 2, [batch, any]. Raises ValueError that names it."""
    array = _arrays.int32_list(values, name, like)
    needed = f"[batch] = [{batch}]" if dims == 1 else f"[batch, max_pages] = [{batch}, ...]"
    if not hasattr(array, "shape"):
        raise ValueError(f"{name} {_arrays.described(array)}: an int32 array {needed} is needed")
    if len(array.shape) != dims or array.shape[0] != batch:
        raise ValueError(f"{name} {_arrays.described(array)}: {needed} is needed")
    if array.dtype != _arrays.int32(array):
        raise ValueError(f"{name} of {array.dtype}: int32 is needed")
    return array


def append_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    kv_lens: Array | list[int],
    *,
    block_table: Array | list[list[int]] | None = None,
    kv_layout: str = "NHD",
) -> None:
    """Writes new tokens behind those in a cache, in place.

    k, v              [batch, new tokens, kv_heads, d]
    k_cache, v_cache  [batch, n, kv_heads, d], or with block_table [pages, page_size, kv_heads, d]; "HND": heads before tokens
    kv_lens           [batch] int32 tokens that are there already; it is not changed
    block_table       [batch, max_pages] int32

    Raises ValueError for shapes or dtypes that do not fit, where the cache has no room (in host memory; on CUDA that is not looked at),
    and for JAX arrays; then nothing is written.
    """
    if _arrays.framework(k_cache) == "jax":
        raise ValueError("append_kv with JAX arrays: JAX arrays are not written to")
    xp = _arrays.module(k_cache)
    heads_first = _api._heads_first(kv_layout)
    _check_new(k, v, k_cache, v_cache, 1 if heads_first else 2)
    kv_lens = _int32(kv_lens, "kv_lens", k_cache, k.shape[0])
    table = None if block_table is None else _int32(block_table, "block_table", k_cache, k.shape[0], 2)
    if table is None and k.shape[0] > k_cache.shape[0]:
        raise ValueError(f"k {_arrays.described(k)}: at most batch {k_cache.shape[0]} of k_cache")
    size = k_cache.shape[2 if heads_first else 1]
    where = {"device": kv_lens.device} if _arrays.framework(k_cache) == "torch" else {}
    pos = kv_lens[:, None] + xp.arange(k.shape[1], dtype=kv_lens.dtype, **where)[None, :]
    outer = xp.arange(k.shape[0], dtype=kv_lens.dtype, **where)[:, None]
    slot = pos // size if table is not None else None
    room = size if table is None else table.shape[1] * size
    if _arrays.is_checked(k_cache):
        _check_room(pos, room, table, k_cache.shape[0], slot)
    if table is not None:
        outer = table[outer, slot]
        pos = pos % size
    for new, cache in ((k, k_cache), (v, v_cache)):
        if heads_first:
            cache[outer, :, pos] = new
        else:
            cache[outer, pos] = new


def _refuse_dims(arrays: dict[str, Any]) -> None:
    for name, array in arrays.items():
        if getattr(array, "ndim", 0) != 4:
            needed = "[batch, q_len, q_heads, d]" if name == "q" else "[batch, n, kv_heads, d] or [pages, page_size, kv_heads, d]"
            raise ValueError(f"{name} {_arrays.described(array)}: an array {needed} is needed")


def _check_caches(q: Any, k_cache: Any, v_cache: Any, paged: bool) -> None:
    """What decode would refuse as k and v, which here are the new tokens."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != q.dtype:
            raise ValueError(f"{name} of {cache.dtype}: {q.dtype} is needed, as q is")
        if not paged and cache.shape[0] != q.shape[0]:
            raise ValueError(f"{name} {_arrays.described(cache)}: batch {q.shape[0]} of q is needed")
    if k_cache.shape[3] != q.shape[3]:
        raise ValueError(f"k_cache {_arrays.described(k_cache)}: head_dim {q.shape[3]} of q is needed")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"v_cache {_arrays.described(v_cache)}: all but its last dimension as in k_cache, {list(k_cache.shape)}")


def _with_splits(options: Options | None, num_splits: int) -> Options:
    if options is None:
        return Options(policy="flashdecoding", splits=num_splits)
    _ = _api._native(options)
    if options.policy != "lean":
        raise ValueError(f"num_splits {num_splits} with options of policy {options.policy}: one of them")
    return dataclasses.replace(options, policy="flashdecoding", splits=num_splits)


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: Array | list[int] | int | None = None,
    cache_batch_idx: Array | list[int] | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | list[list[int]] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    options: Options | None = None,
) -> Any:
    """FlashAttention's decode call, argument for argument.

    q                 [batch, q_len, q_heads, d]
    k_cache, v_cache  [batch, n, kv_heads, d], or with block_table [pages, page_size, kv_heads, d]; any page size
    k, v              [batch, new tokens, kv_heads, d]: first written in place behind cache_seqlens tokens, then attended to; they stay
                      written where the call is refused for its other arguments
    cache_seqlens     [batch] int32, or one number for all: tokens in the cache before k. None: the whole cache
    cache_batch_idx   [batch] int32: the row of the cache of each sequence; not with block_table
    block_table       [batch, max_pages] int32
    window_size       (left, right): right is 0, or −1 without a bound
    alibi_slopes      [q_heads] float32
    num_splits        0: the lean schedule; else that many splits of each output
    options           leanattn's own: Options, whose policy num_splits replaces

    Returns out [batch, q_len, q_heads, d], or (out, lse [batch, q_heads, q_len]) with return_softmax_lse; a row without keys has O = 0
    and LSE = −inf. Raises ValueError for rotary embedding, left padding, a bounded right window and num_splits beside options with a
    policy of their own, and as decode does.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin: apply the embedding to q and k before the call")
    if cache_leftpad is not None:
        raise ValueError("cache_leftpad: supported is None")
    left, right = window_size
    if right not in (-1, 0):
        raise ValueError(f"window_size ({left}, {right}): the right side is -1 or 0")
    if (k is None) != (v is None):
        raise ValueError("k and v: both or none")
    for array in (q, k_cache, v_cache):
        if getattr(array, "ndim", 0) != 4:
            _refuse_dims({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    batch = q.shape[0]
    if cache_batch_idx is not None and block_table is not None:
        raise ValueError("cache_batch_idx with block_table: one of them")
    table: Array = None
    if cache_batch_idx is not None:  # a row of the cache is a page
        table = _int32(cache_batch_idx, "cache_batch_idx", q, batch)[:, None]
    elif block_table is not None:
        table = _int32(block_table, "block_table", q, batch, 2)
    if isinstance(cache_seqlens, Integral) and not isinstance(cache_seqlens, bool):
        cache_seqlens = [int(cache_seqlens)] * batch
    if cache_seqlens is not None:
        cache_seqlens = _int32(cache_seqlens, "cache_seqlens", q, batch)
    _check_caches(q, k_cache, v_cache, table is not None)
    if num_splits != 0:
        options = _with_splits(options, num_splits)
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise ValueError("k and v without cache_seqlens: how many tokens are in the cache before them?")
        if getattr(k, "shape", None) and k.shape[0] != batch:
            raise ValueError(f"k {_arrays.described(k)}: batch {batch} of q is needed")
        append_kv(k, v, k_cache, v_cache, cache_seqlens, block_table=table)
        cache_seqlens = cache_seqlens + k.shape[1]
    rules: dict[str, Any] = {
        "causal": causal or right == 0,
        "window_left": left,
        "scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "return_lse": return_softmax_lse,
        "options": options,
    }
    if table is None:
        result = _api.decode(q, k_cache, v_cache, kv_lens=cache_seqlens, **rules)
    else:
        if cache_seqlens is None:
            cache_seqlens = [table.shape[1] * k_cache.shape[1]] * batch
        result = _api.decode_paged(q, k_cache, v_cache, table, cache_seqlens, **rules)
    if not return_softmax_lse:
        return result
    out, lse = result
    return out, lse.swapaxes(1, 2)
