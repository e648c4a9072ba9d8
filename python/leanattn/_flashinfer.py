# SPDX-License-Identifier: Apache-2.0
"""The call shape of FlashInfer's BatchDecodeWithPagedKVCacheWrapper."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from numbers import Integral
from typing import Any

from . import _api, _arrays
from ._api import Options
from ._arrays import Array

_TYPE_NAMES = {"half": "float16", "float": "float32"}


def _type_name(dtype: Any) -> str:
    """A type of any framework, or its name, as "float16"."""
    name = getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    return _TYPE_NAMES.get(name, name)


def _vector(name: str, array: Array, elements: str) -> Array:
    if len(getattr(array, "shape", ())) != 1 or (elements == "batch + 1" and array.shape[0] == 0):
        raise ValueError(f"{name} {_arrays.described(array)}: an int32 array [{elements}] is needed")
    if not _type_name(array.dtype).startswith(("int", "uint")):
        raise ValueError(f"{name} of {array.dtype}: int32 is needed")
    return array


def _refuse(name: str, value: Any, supported: tuple[Any, ...], hint: str) -> None:
    """For an argument of FlashInfer's without a counterpart: ValueError for all but the values that ask for nothing."""
    if value is not supported[0] and not any(value is known or (type(value) is type(known) and value == known) for known in supported):
        shown = f"of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
        raise ValueError(f"{name} {shown}: supported is {' and '.join(map(str, supported))}; {hint}")


def _rules_of(pos_encoding_mode: str, window_left: int, logits_soft_cap: float | None, sm_scale: float | None) -> dict[str, Any]:
    """decode_paged's arguments for FlashInfer's. Raises ValueError for an encoding inside the kernel."""
    if pos_encoding_mode != "NONE":
        raise ValueError(f"pos_encoding_mode {pos_encoding_mode}: supported is NONE")
    return {"window_left": window_left, "softcap": logits_soft_cap or 0.0, "scale": sm_scale}


class BatchDecodeWithPagedKVCacheWrapper:
    """plan() takes the pages of a step in FlashInfer's form (indptr, indices, last_page_len), run() computes, for any number of layers.

    There is no plan to make: plan() only writes the pages as a block table, which the kernel's own schedule reads. It copies indptr and
    last_page_len to the host once, as FlashInfer's does. float_workspace_buffer, use_tensor_cores and backend are taken and not used.

    kv_layout: "NHD", [pages, page_size, kv_heads, d], or "HND", [pages, kv_heads, page_size, d]. With use_cuda_graph the table and the
    lengths keep their addresses from plan to plan: paged_kv_indptr_buffer [batch + 1] fixes the batch, paged_kv_indices_buffer the most
    pages of a sequence. Arrays of torch, CuPy or NumPy. options: leanattn's own, Options for every run.

    Arguments of FlashInfer's without a counterpart here are taken where they ask for nothing, and are a ValueError elsewhere.
    """

    def __init__(
        self,
        float_workspace_buffer: Array | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Array | None = None,
        paged_kv_indices_buffer: Array | None = None,
        paged_kv_last_page_len_buffer: Array | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        *,
        options: Options | None = None,
    ):
        _refuse("jit_args", jit_args, (None,), "no kernel is made for a call")
        _ = _api._native(options)
        self._options: dict[bool | None, Options | None] = {None: options}
        self._heads_first = _api._heads_first(kv_layout)
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._fixed: tuple[int, int] | None = None
        if use_cuda_graph:
            if paged_kv_indptr_buffer is None or paged_kv_indices_buffer is None:
                raise ValueError("use_cuda_graph: paged_kv_indptr_buffer and paged_kv_indices_buffer are needed")
            self._fixed = (paged_kv_indptr_buffer.shape[0] - 1, paged_kv_indices_buffer.shape[0])
        self._table: Array = None
        self._lens: Array = None
        self._rules: dict[str, Any] = {}
        self._heads: tuple[int, int, int] = (0, 0, 0)
        self._page_size = 0
        self._o_type: str | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def plan(
        self,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Array | None = None,
        seq_lens: Array | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Takes the pages of a step.

        indptr             [batch + 1] int32, from 0
        indices            [indptr[-1]] int32: sequence b has the pages from indices[indptr[b]] up to indices[indptr[b + 1]]
        last_page_len      [batch] int32: tokens in the last page of each, 1 … page_size; not looked at where there are no pages
        pos_encoding_mode  "NONE": ALiBi is alibi_slopes of run, rotary embedding is applied before
        rope_scale, rope_theta, non_blocking  not looked at
        o_data_type        None or q's type, which run compares
        q_data_type, kv_data_type, data_type  not looked at: the arrays given to run say it
        block_tables, seq_lens, fixed_split_size, disable_split_kv, q_len_per_req, window_right  their defaults

        Raises ValueError for what does not fit; the plan before stays then.
        """
        rules = _rules_of(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        _refuse("block_tables", block_tables, (None,), "the pages are those of indptr and indices")
        _refuse("seq_lens", seq_lens, (None,), "the lengths are those of indptr and last_page_len")
        _refuse("fixed_split_size", fixed_split_size, (None, -1), "Options(batch_invariant=True) keeps a row's bits")
        _refuse("disable_split_kv", disable_split_kv, (False,), "the same inputs give the same bits without it")
        _refuse("q_len_per_req", q_len_per_req, (1,), "leanattn.decode_paged takes several tokens of a sequence")
        _refuse("window_right", window_right, (0, -1), "the query is the last token")
        o_type = None if o_data_type is None else _type_name(o_data_type)
        if o_type is not None and q_data_type is not None and o_type != _type_name(q_data_type):
            raise ValueError(f"o_data_type {o_type}: {_type_name(q_data_type)} is needed, as q_data_type is")
        starts_list, lens_list = self._host_pages(indptr, indices, last_page_len, page_size)
        batch = len(lens_list)
        pages_of = [-(-length // page_size) for length in lens_list]
        xp = _arrays.module(indices)
        where = {"device": indices.device} if _arrays.framework(indices) == "torch" else {}
        int32 = _arrays.int32(indices)
        max_pages = max(pages_of, default=0)
        starts, counts, lens = (_arrays.from_list(values, int32, indices) for values in (starts_list, pages_of, lens_list))
        slots = xp.arange(max_pages, dtype=int32, **where)[None, :]
        used = slots < counts[:, None]
        at = xp.where(used, starts[:, None] + slots, xp.zeros_like(slots))
        table = xp.where(used, xp.asarray(indices, dtype=int32)[at], xp.zeros_like(slots) - 1) if max_pages else at
        if self._fixed is None:
            self._table, self._lens = table, lens
        else:
            most_batch, most_pages = self._fixed
            if batch != most_batch or max_pages > most_pages:
                raise ValueError(f"batch {batch} with up to {max_pages} pages: the buffers hold {most_batch} with {most_pages}")
            if self._table is None:
                self._table = xp.zeros((most_batch, most_pages), dtype=int32, **where)
                self._lens = xp.zeros((most_batch,), dtype=int32, **where)
            self._table[:, :max_pages] = table
            self._lens[:] = lens
        self._heads = (num_qo_heads, num_kv_heads, head_dim)
        self._page_size = page_size
        self._o_type = o_type
        self._rules = rules

    begin_forward = plan

    @staticmethod
    def _host_pages(indptr: Array, indices: Array, last_page_len: Array, page_size: int) -> tuple[list[int], list[int]]:
        """Where the pages of each sequence begin in indices, and its tokens. Raises ValueError for what does not fit."""
        if not (isinstance(page_size, Integral) and page_size > 0):
            raise ValueError(f"page_size {page_size!r}: a whole number above 0 is needed")
        most = _vector("indices", indices, "indptr[-1]").shape[0]
        offsets = _arrays.integers(_arrays.host(_vector("indptr", indptr, "batch + 1")).tolist(), "indptr")
        last = _arrays.integers(_arrays.host(_vector("last_page_len", last_page_len, "batch")).tolist(), "last_page_len")
        batch = len(offsets) - 1
        if len(last) != batch:
            raise ValueError(f"last_page_len of shape {[len(last)]}: [batch] = [{batch}] is needed")
        if offsets[0] != 0 or offsets[-1] > most or any(begin > end for begin, end in itertools.pairwise(offsets)):
            raise ValueError(f"indptr: offsets that rise from 0 to at most {most}, the length of indices, are needed")
        lens = []
        for seq in range(batch):
            pages = offsets[seq + 1] - offsets[seq]
            if pages and not 1 <= last[seq] <= page_size:
                raise ValueError(f"seq {seq}: last_page_len {last[seq]} is outside 1 to {page_size}, the page size")
            lens.append((pages - 1) * page_size + last[seq] if pages else 0)
        return offsets[:-1], lens

    def _options_with(self, enable_pdl: bool | None) -> Options | None:
        """The options of a run, made once: a run is to cost little."""
        if enable_pdl not in self._options:
            self._options[enable_pdl] = dataclasses.replace(self._options[None] or Options(), programmatic_launch=bool(enable_pdl))
        return self._options[enable_pdl]

    def run(
        self,
        q: Array,
        paged_kv_cache: Array | tuple[Array, Array],
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """q [batch, q_heads, d]; paged_kv_cache: (k_cache, v_cache), or one array with both, [pages, 2, …]. Returns out, or (out, lse) with
        return_lse; lse [batch, q_heads] in base 2, as FlashInfer's. The scales of a quantised cache are None or 1, window_left is None or
        plan's. enable_pdl: programmatic_launch of Options; None: as the options say. Raises ValueError for what does not fit."""
        if any(scale not in (None, 1.0) for scale in (q_scale, k_scale, v_scale)):
            raise ValueError(f"q_scale {q_scale}, k_scale {k_scale}, v_scale {v_scale}: supported are None and 1")
        if self._table is None:
            raise ValueError("run before plan")
        if window_left is not None and window_left != self._rules["window_left"]:
            raise ValueError(f"window_left {window_left}: plan was told {self._rules['window_left']}")
        _refuse("q_len_per_req", q_len_per_req, (None, 1), "leanattn.decode_paged takes several tokens of a sequence")
        _refuse("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, (None,), "attention is exact")
        _refuse("kv_cache_sf", kv_cache_sf, (None,), "a quantised cache is not read")
        if self._o_type is not None and self._o_type != _type_name(q.dtype):
            raise ValueError(f"o_data_type {self._o_type} of plan: {_type_name(q.dtype)} is needed, as q is")
        k_cache, v_cache = paged_kv_cache if isinstance(paged_kv_cache, (tuple, list)) else (paged_kv_cache[:, 0], paged_kv_cache[:, 1])
        q_heads, kv_heads, head_dim = self._heads
        heads, tokens = (1, 2) if self._heads_first else (2, 1)
        given = (q.shape[1], k_cache.shape[heads], q.shape[2], k_cache.shape[tokens])
        if given != (q_heads, kv_heads, head_dim, self._page_size):
            told = (q_heads, kv_heads, head_dim, self._page_size)
            raise ValueError(f"q heads, KV heads, head_dim and page_size {given}: plan was told {told}")
        return _api.decode_paged(
            q,
            k_cache,
            v_cache,
            self._table,
            self._lens,
            kv_layout=self._kv_layout,
            lse_base=2,
            out=out,
            lse=lse,
            return_lse=return_lse,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            options=self._options_with(enable_pdl),
            **self._rules,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Array,
        paged_kv_cache: Array | tuple[Array, Array],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """run with the rules given here, which replace those of plan, also for the runs to come: so does FlashInfer's."""
        self._rules = _rules_of(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

    def end_forward(self) -> None:
        """Nothing to do."""
