# SPDX-License-Identifier: Apache-2.0
"""The call shape of FlashInfer's BatchDecodeWithPagedKVCacheWrapper."""

from __future__ import annotations

from typing import Any

from . import _api, _arrays
from ._arrays import Array


class BatchDecodeWithPagedKVCacheWrapper:
    """plan() takes the pages of a step in FlashInfer's form (indptr, indices, last_page_len), run() computes, for any number of layers.

    There is no plan to make: plan() only writes the pages as a block table, which the kernel's own schedule reads. It copies indptr to
    the host once, as FlashInfer's does. float_workspace_buffer is taken and not used.

    kv_layout: "NHD", [pages, page_size, kv_heads, d], or "HND", [pages, kv_heads, page_size, d]. With use_cuda_graph the table and the
    lengths keep their addresses from plan to plan: paged_kv_indptr_buffer [batch + 1] fixes the batch, paged_kv_indices_buffer the most
    pages of a sequence. Arrays of torch, CuPy or NumPy.
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
    ):
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
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Takes the pages of a step.

        indptr             [batch + 1] int32
        indices            [indptr[-1]] int32: sequence b has the pages from indices[indptr[b]] up to indices[indptr[b + 1]]
        last_page_len      [batch] int32: tokens in the last page of each, 1 … page_size
        pos_encoding_mode  "NONE": ALiBi is alibi_slopes of run, rotary embedding is applied before
        q_data_type, kv_data_type, data_type  not looked at: the arrays given to run say it

        Raises ValueError for what does not fit.
        """
        if pos_encoding_mode != "NONE":
            raise ValueError(f"pos_encoding_mode {pos_encoding_mode}: supported is NONE")
        batch = indptr.shape[0] - 1
        if last_page_len.shape[0] != batch:
            raise ValueError(f"last_page_len of shape {list(last_page_len.shape)}: [batch] = [{batch}] is needed")
        on_host = _arrays.host(indptr)
        pages_of = [int(on_host[seq + 1]) - int(on_host[seq]) for seq in range(batch)]
        if any(pages < 0 for pages in pages_of) or (batch and int(on_host[batch]) > indices.shape[0]):
            raise ValueError(f"indptr: offsets that rise from 0 to at most {indices.shape[0]}, the length of indices, are needed")
        xp = _arrays.module(indices)
        where = {"device": indices.device} if _arrays.framework(indices) == "torch" else {}
        int32 = _arrays.int32(indices)
        max_pages = max(pages_of, default=0)
        starts = _arrays.from_list([int(on_host[seq]) for seq in range(batch)], int32, indices)
        counts = _arrays.from_list(pages_of, int32, indices)
        last = xp.asarray(last_page_len, dtype=int32, **where)
        lens = xp.where(counts > 0, (counts - 1) * page_size + last, counts)
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
        self._rules = {"window_left": window_left, "softcap": logits_soft_cap or 0.0, "scale": sm_scale}

    begin_forward = plan

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
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
    ) -> Any:
        """q [batch, q_heads, d]; paged_kv_cache: (k_cache, v_cache), or one array with both, [pages, 2, …]. Returns out, or (out, lse) with
        return_lse; lse [batch, q_heads] in base 2, as FlashInfer's. The scales of a quantised cache are None or 1."""
        if any(scale not in (None, 1.0) for scale in (q_scale, k_scale, v_scale)):
            raise ValueError(f"q_scale {q_scale}, k_scale {k_scale}, v_scale {v_scale}: supported are None and 1")
        if self._table is None:
            raise ValueError("run before plan")
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
            **self._rules,
        )

    forward = run

    def end_forward(self) -> None:
        """Nothing to do."""
