# SPDX-License-Identifier: Apache-2.0
"""The calls. Each is the C++ one of include/leanattn/attention.h on the caller's arrays."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _core
from ._arrays import Array
from ._core import Call, Workspace

_BASES = {"e": False, 2: True, "2": True}
_LAYOUTS = {"NHD": False, "HND": True}

# leanattn.ops, once it is imported: what a traced call becomes.
_operators: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to compute. The values change speed and rounding, never meaning; those that the call's backend does not know are ignored.

    policy               "lean": equal stretches of the whole batch; "flashdecoding": `splits` parts of each output, 0 for the usual
                         heuristic; "fa2": a worker an output. "flashdecoding:3", as the command line and plan() write it, sets splits
    head_order           KV heads "along" the line or "beside" each other; "auto" lets the backend choose
    batch_invariant      a row's bits depend on its own sequence only, under every policy and worker count
    workers              CPU: at most so many threads, 0: OpenMP's number. CUDA: thread blocks, and no clusters of them; 0: one a
                         multiprocessor
    programmatic_launch  CUDA: start while the kernel before is ending (compute capability 9.0)
    cpu_isa, cuda_path   a name that info() lists; None: the fastest
    check_data           CUDA: lengths, offsets and used page ids are checked on the device, in the same launch; a sequence with a fault
                         counts as empty, the others are right. The CPU always checks, and raises
    data_status          CUDA, with check_data: an array of one 8-byte integer on the device, 0 before the first call; it keeps the first
                         fault, which data_fault_sentence puts into words

    Raises ValueError for a name that is not known, or a data_status that is no such array. Ranges are checked by the call.
    """

    policy: str = "lean"
    splits: int = 0
    head_order: str = "auto"
    batch_invariant: bool = False
    workers: int = 0
    programmatic_launch: bool = False
    cpu_isa: str | None = None
    cuda_path: str | None = None
    check_data: bool = False
    data_status: Any = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and ":" in self.policy:
            if self.splits != 0:
                raise ValueError(f"splits {self.splits} with policy {self.policy}: one of them")
            name, splits = parse_policy(self.policy)
            object.__setattr__(self, "policy", name)  # so that the same options are equal, however they were written
            object.__setattr__(self, "splits", splits)
        if not _arrays.tracing():
            _ = self._native

    @functools.cached_property
    def _native(self) -> _core.Options:
        return _core.Options(
            policy=self.policy,
            splits=self.splits,
            head_order=self.head_order,
            batch_invariant=self.batch_invariant,
            workers=self.workers,
            programmatic_launch=self.programmatic_launch,
            cpu_isa=self.cpu_isa,
            cuda_path=self.cuda_path,
            check_data=self.check_data,
            data_status=_arrays.device_word(self.data_status),
        )


def parse_policy(name: str) -> tuple[str, int]:
    """A policy with its splits, as the command line writes it: "flashdecoding:4" → ("flashdecoding", 4)."""
    name, colon, splits = name.partition(":")
    if colon and not (name == "flashdecoding" and splits.isdecimal() and int(splits) > 0):
        raise ValueError(f"policy {name}:{splits}: only flashdecoding takes splits, a whole number above 0")
    return name, int(splits or 0)


def _native(options: Options | None) -> _core.Options | None:
    if options is not None and not isinstance(options, Options):
        raise ValueError(f"options is a {type(options).__name__}: leanattn.Options is needed")
    return None if options is None else options._native


def _scale(scale: float | None) -> float:
    """0 stands for the default from here on."""
    if scale is None:
        return 0.0
    if scale == 0:
        raise ValueError("scale 0: a number above 0, or None for 1/sqrt(head_dim)")
    return scale


def _base2(lse_base: Any) -> bool:
    try:
        return _BASES[lse_base]
    except (KeyError, TypeError):
        raise ValueError(f"lse_base {lse_base!r}: known are 'e' and 2") from None


def _heads_first(kv_layout: str) -> bool:
    try:
        return _LAYOUTS[kv_layout]
    except (KeyError, TypeError):
        raise ValueError(f"kv_layout {kv_layout!r}: known are 'NHD' and 'HND'") from None


def _out_shape(q: Array, v: Array) -> tuple[int, ...]:
    try:
        return (*q.shape[:-1], v.shape[-1])
    except AttributeError:
        name, array = ("v", v) if hasattr(q, "shape") else ("q", q)
        raise ValueError(f"{name} is a {type(array).__name__}: an array with __dlpack__ is needed") from None


def _full_lens(q: Array, k: Array, heads_first: bool) -> Array:
    """On the CPU the library takes a missing kv_lens as full; on CUDA lengths are read on the device."""
    if not _arrays.is_cuda(q):
        return None
    return _arrays.from_list([k.shape[2 if heads_first else 1]] * q.shape[0], _arrays.int32(q), q)


def _check_plain(plain: tuple[Any, ...], workspace: Any = None) -> None:
    """After a TypeError of the native call, whose text shows a signature that the caller never sees: raises ValueError for the argument
    that is to blame, if it is one of these. plain: as in _call."""
    q_len, _, causal, window_left, scale, softcap, _ = plain
    for name, value in (("q_len", q_len), ("window_left", window_left)):
        if not (hasattr(value, "__index__") and -(2**31) <= operator.index(value) < 2**31):
            raise ValueError(f"{name} {value!r}: an integer of 32 bits is needed") from None
    for name, value in (("scale", scale), ("softcap", softcap)):
        if not (hasattr(value, "__float__") or hasattr(value, "__index__")):
            raise ValueError(f"{name} {value!r}: a number is needed") from None
    if not isinstance(causal, bool):
        raise ValueError(f"causal {causal!r}: True or False is needed") from None
    if workspace is not None and not isinstance(workspace, Workspace):
        raise ValueError(f"workspace is a {type(workspace).__name__}: leanattn.Workspace is needed") from None


def _call(q, k, v, out, lse, small, plain, *, return_lse, options, workspace, stream):
    """small: the optional arrays from kv_lens to sinks; plain: the values from q_len to base2, both in the order of _core.decode."""
    if _arrays.tracing():
        return _operators.traced(q, k, v, out, lse, small, plain, return_lse, options, workspace, stream)
    name = _arrays.framework_of(type(q))
    new_out, new_lse = out is None, lse is None and return_lse
    if name == "jax":
        if not (new_out and lse is None):
            raise ValueError("out and lse with JAX arrays: JAX arrays are not written to")
        _arrays.wait_for((q, k, v, *(array for array in small if array is not None)))
    elif name == "torch":
        try:  # as quick as torch answers: 0.2 µs each
            negated = q.is_neg() or k.is_neg() or v.is_neg() or (not new_out and out.is_neg())
        except AttributeError:  # an array of another framework
            negated = True
        if negated or small[5] is not None or small[6] is not None:
            _arrays.refuse_negated(q, k, v, out, *small[5:])
    if new_out:
        out = _arrays.empty(_out_shape(q, v), q.dtype, q)
    if new_lse:
        lse = _arrays.empty(tuple(q.shape[:-1]), _arrays.float32(q), q)
    if stream is not None or name != "torch":
        stream = _arrays.stream_of(stream, q)
    try:
        _core.decode(q, k, v, out, lse, *small, *plain, _native(options), workspace, stream)
    except TypeError:
        _check_plain(plain, workspace)
        raise
    if name == "jax":
        out = _arrays.finish(out, q, stream)
        lse = None if lse is None else _arrays.finish(lse, q, stream)
    return (out, lse) if return_lse else out


def decode(
    q: Array,
    k: Array,
    v: Array,
    *,
    kv_lens: Array | list[int] | None = None,
    cu_seqlens_q: Array | list[int] | None = None,
    cu_seqlens_kv: Array | list[int] | None = None,
    q_len: int = 0,
    kv_layout: str = "NHD",
    causal: bool = True,
    window_left: int = -1,
    tree_mask: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    lse_base: str | int = "e",
    out: Array | None = None,
    lse: Array | None = None,
    options: Options | None = None,
    workspace: Workspace | None = None,
    stream: Any = None,
) -> Any:
    """Attention of one or a few new tokens of each sequence to contiguous or ragged K and V.

    Arrays of one framework and device: float32, float16 or bfloat16 for q, k and v alike (CUDA: 16 bits), int32 for lengths and offsets.
    Any strides but the last dimension's, which is 1. What the CUDA backend does not do yet is refused with a sentence.

    q              [batch, q_heads, d], [batch, q_len, q_heads, d], or [total_q, q_heads, d] with cu_seqlens_q; d 32 … 256 in steps of 8
    k, v           [batch, n, kv_heads, d], with kv_layout "HND" [batch, kv_heads, n, d];
                   with cu_seqlens_kv [total_kv, kv_heads, d], "HND" [kv_heads, total_kv, d]. v may have another last dimension
    kv_lens        [batch] tokens of each sequence, the new ones included. None: all n; ragged: up to the next offset
    cu_seqlens_q   [batch + 1] first row of q of each sequence, from 0. q_len: at least the longest; 0: the CPU looks, CUDA takes total_q
    cu_seqlens_kv  [batch + 1] first token of each sequence in k and v, from 0
    causal         bottom right: query token i of a sequence sees keys up to kv_len − q_len + i
    window_left    keys from position − window_left on; −1: all
    tree_mask      [total_q, ⌈q_len / 64⌉] uint64 or int64: bit j allows the j-th of the sequence's own last q_len tokens
    scale          None: 1/√d
    softcap        cap·tanh(logit / cap); 0: off
    alibi_slopes   [q_heads] float32
    sinks          [q_heads] float32: natural-log logits without a value that join the denominator
    out, lse       where to write; made where they are None (lse: with return_lse). out: q's shape and dtype with v's last dimension;
                   lse: [batch, q_heads], [batch, q_len, q_heads] or [total_q, q_heads], float32, contiguous
    lse_base       "e" or 2
    options        the schedule and its like: Options
    workspace      memory that no other call uses at the same time. None: the innermost `with workspace:` of this thread, else memory
                   that is kept for it, one block a thread on the CPU, one a stream on CUDA
    stream         CUDA: a handle, or a stream of torch or CuPy. None: the current one of q's framework (JAX: the default one, waited for)

    Returns out, or (out, lse) with return_lse. An empty sequence gives 0 and −inf. The GIL is released while it computes.
    Raises ValueError for what is malformed or unsupported, and on the CPU for lengths that are out of range; out is untouched then.
    """
    heads_first = _heads_first(kv_layout)
    if kv_lens is None and cu_seqlens_kv is None:
        kv_lens = _full_lens(q, k, heads_first)
    elif isinstance(kv_lens, (list, tuple)):
        kv_lens = _arrays.int32_list(kv_lens, "kv_lens", q)
    if isinstance(cu_seqlens_q, (list, tuple)):
        cu_seqlens_q = _arrays.int32_list(cu_seqlens_q, "cu_seqlens_q", q)
    if isinstance(cu_seqlens_kv, (list, tuple)):
        cu_seqlens_kv = _arrays.int32_list(cu_seqlens_kv, "cu_seqlens_kv", q)
    small = (kv_lens, None, cu_seqlens_q, cu_seqlens_kv, tree_mask, alibi_slopes, sinks)
    plain = (q_len, heads_first, causal, window_left, _scale(scale), softcap, _base2(lse_base))
    return _call(q, k, v, out, lse, small, plain, return_lse=return_lse, options=options, workspace=workspace, stream=stream)


def decode_paged(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array | list[list[int]],
    kv_lens: Array | list[int],
    *,
    cu_seqlens_q: Array | list[int] | None = None,
    q_len: int = 0,
    kv_layout: str = "NHD",
    causal: bool = True,
    window_left: int = -1,
    tree_mask: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    lse_base: str | int = "e",
    out: Array | None = None,
    lse: Array | None = None,
    options: Options | None = None,
    workspace: Workspace | None = None,
    stream: Any = None,
) -> Any:
    """The same over a paged cache.

    k_cache, v_cache  [pages, page_size, kv_heads, d], with kv_layout "HND" [pages, kv_heads, page_size, d]; any page size
    block_table       [batch, max_pages] int32: the page of each slot; slots past a length or before the window are not read
    kv_lens           [batch] int32 tokens of each sequence, the new ones included

    The rest as in decode. On the CPU a length or a page in use that is out of range is a ValueError that names sequence and slot; on
    CUDA it is not looked at.
    """
    if isinstance(kv_lens, (list, tuple)):
        kv_lens = _arrays.int32_list(kv_lens, "kv_lens", q)
    if isinstance(block_table, (list, tuple)):
        block_table = _arrays.int32_list(block_table, "block_table", q)
    if isinstance(cu_seqlens_q, (list, tuple)):
        cu_seqlens_q = _arrays.int32_list(cu_seqlens_q, "cu_seqlens_q", q)
    small = (kv_lens, block_table, cu_seqlens_q, None, tree_mask, alibi_slopes, sinks)
    plain = (q_len, _heads_first(kv_layout), causal, window_left, _scale(scale), softcap, _base2(lse_base))
    return _call(q, k_cache, v_cache, out, lse, small, plain, return_lse=return_lse, options=options, workspace=workspace, stream=stream)


def prepare(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    *,
    lse: Array | None = None,
    kv_lens: Array | None = None,
    block_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    q_len: int = 0,
    kv_layout: str = "NHD",
    causal: bool = True,
    window_left: int = -1,
    tree_mask: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    lse_base: str | int = "e",
    options: Options | None = None,
) -> Call:
    """A call of decode or decode_paged (with block_table), checked once: `call()` then computes on the same arrays again, with whatever
    values, lengths and page ids they hold by then, in about the time of the C++ call.

    The arguments are those of decode and decode_paged; out has to be given, and lengths and tables are arrays, not lists. The call keeps
    its arrays alive. `call(workspace, stream)` takes both as decode does, a stream as its handle. Not for JAX, whose arrays are not
    written to. Raises ValueError as decode does.
    """
    if _arrays.framework(q) == "jax":
        raise ValueError("prepare with JAX arrays: JAX arrays are not written to")
    heads_first = _heads_first(kv_layout)
    if kv_lens is None and cu_seqlens_kv is None and block_table is None:
        kv_lens = _full_lens(q, k, heads_first)
    small = (kv_lens, block_table, cu_seqlens_q, cu_seqlens_kv, tree_mask, alibi_slopes, sinks)
    for name, array in zip(("kv_lens", "block_table", "cu_seqlens_q", "cu_seqlens_kv"), small, strict=False):
        if isinstance(array, (list, tuple)):
            raise ValueError(f"{name} is a {type(array).__name__}: prepare reads it again at each call, so an int32 array is needed")
    _arrays.refuse_negated(q, k, v, out, alibi_slopes, sinks)
    plain = (q_len, heads_first, causal, window_left, _scale(scale), softcap, _base2(lse_base))
    try:
        return Call(q, k, v, out, lse, *small, *plain, _native(options))
    except TypeError:
        _check_plain(plain)
        raise


class Reference(NamedTuple):
    """The right values, in float64, and how far off a careful float32 computation is: what a tolerance is earned from."""

    o: np.ndarray  # the shape of decode's out
    lse: np.ndarray  # that without the last dimension
    naive_o_error: np.ndarray  # [batch] worst error of the naive O over the sequence's rows, before it is rounded to q's dtype
    naive_lse_error: np.ndarray  # [batch]


def reference(
    q: Array,
    k: Array,
    v: Array,
    *,
    kv_lens: Array | list[int] | None = None,
    block_table: Array | list[list[int]] | None = None,
    cu_seqlens_q: Array | list[int] | None = None,
    cu_seqlens_kv: Array | list[int] | None = None,
    q_len: int = 0,
    kv_layout: str = "NHD",
    causal: bool = True,
    window_left: int = -1,
    tree_mask: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    lse_base: str | int = "e",
) -> Reference:
    """What decode and decode_paged (with block_table) should give: attention in float64 over the stored values.

    Takes their arguments; arrays on a GPU are copied to the host. Slow, on all cores; ^C ends it. Raises ValueError as they do.
    """
    given = {"kv_lens": kv_lens, "block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    lens = [_arrays.host(_arrays.int32_list(array, name, q)) for name, array in given.items()]
    _arrays.refuse_negated(q, k, v, alibi_slopes, sinks)
    rules = [_arrays.host(array) for array in (tree_mask, alibi_slopes, sinks)]
    plain = (q_len, _heads_first(kv_layout), causal, window_left, _scale(scale), softcap, _base2(lse_base))
    arguments: list[Any] = [*(_arrays.host(array) for array in (q, k, v)), *lens, *rules, *plain]
    try:
        o, lse, o_error, lse_error = _core.reference(*arguments)
    except TypeError:
        _check_plain(plain)
        raise
    shape = _out_shape(q, v)
    return Reference(o.reshape(shape), lse.reshape(shape[:-1]), o_error, lse_error)


def merge_shards(o: Array, lse: Array, *, lse_base: str | int = "e", stream: Any = None) -> tuple[Array, Array]:
    """Joins attention over disjoint shards of a context: LSE = log Σ e^lse_i, O = Σ e^(lse_i − LSE)·o_i.

    o       [shards, …, d] float32, float16 or bfloat16, contiguous
    lse     [shards, …] float32, contiguous, in base lse_base; −inf: an empty shard, whose o is not looked at
    stream  CUDA: as in decode

    Returns (o [… , d], lse […]). Raises ValueError where shapes or dtypes do not fit.
    """
    _arrays.refuse_negated(o, lse)
    out = _arrays.empty(tuple(o.shape[1:]), o.dtype, o)
    out_lse = _arrays.empty(tuple(lse.shape[1:]), _arrays.float32(o), o)
    _arrays.wait_for((o, lse))
    stream = _arrays.stream_of(stream, o)
    _core.merge(o, lse, out, out_lse, _base2(lse_base), stream)
    return _arrays.finish(out, o, stream), _arrays.finish(out_lse, o, stream)


def merge(o1: Array, lse1: Array, o2: Array, lse2: Array, *, lse_base: str | int = "e") -> tuple[Array, Array]:
    """merge_shards of two: o1 and o2 [… , d], lse1 and lse2 […]. Bitwise the same in either order."""
    if _arrays.tracing():
        return _operators.traced_merge(o1, lse1, o2, lse2, _base2(lse_base))
    for name, array, like, other in (("o2", o2, "o1", o1), ("lse2", lse2, "lse1", lse1)):
        if tuple(array.shape) != tuple(other.shape):
            raise ValueError(f"{name} {_arrays.described(array)}: that of {like}, {list(other.shape)}, is needed")
    xp = _arrays.module(o1)
    return merge_shards(xp.stack([o1, o2]), xp.stack([lse1, lse2]), lse_base=lse_base)
