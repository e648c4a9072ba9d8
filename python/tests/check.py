# SPDX-License-Identifier: Apache-2.0
"""Problems in NumPy, and whether a result is within its earned tolerance: 2 × the error of the naive computation + 1 ulp of the output."""

import dataclasses

import ml_dtypes
import numpy as np

import leanattn

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def ulp(dtype, value):
    """Distance of two neighbours of the type at a value, in float64."""
    bits, least = {"float32": (23, -126), "float16": (10, -14), "bfloat16": (7, -126)}[str(dtype)]
    exponent = np.frexp(np.where(np.isfinite(value), np.abs(value), 0.0))[1] - 1
    return np.ldexp(1.0, np.maximum(np.where(value == 0, least, exponent), least) - bits)


def assert_close(o, lse, right, dtype, q_lens=None):
    """o and lse (or None) as NumPy arrays against a leanattn.Reference; q_lens of each sequence where the rows are packed."""
    batch = len(right.naive_o_error)
    seq = np.repeat(np.arange(batch), q_lens) if q_lens is not None else np.arange(batch)
    per_seq = (-1,) + (1,) * (right.o.ndim - 1)
    o = np.asarray(o).astype(np.float64)
    assert o.shape == right.o.shape
    without_keys = np.isneginf(right.lse)
    assert (o[without_keys] == 0).all(), "a row without keys is not 0"
    tolerance = 2 * right.naive_o_error[seq].reshape(per_seq) + ulp(dtype, right.o)
    error = np.abs(o - right.o)
    assert not (error > tolerance).any() and not np.isnan(error).any(), f"O: error {np.nanmax(error)} of {np.nanmax(tolerance)}"
    if lse is None:
        return
    lse = np.asarray(lse).astype(np.float64)
    assert lse.shape == right.lse.shape
    assert (np.isneginf(lse) == without_keys).all()
    tolerance = 2 * right.naive_lse_error[seq].reshape(per_seq[:-1]) + ulp("float32", right.lse)
    with_keys = ~without_keys
    error = np.abs(np.where(with_keys, lse, 0) - np.where(with_keys, right.lse, 0))
    assert not (error > tolerance).any() and not np.isnan(error).any(), f"LSE: error {np.nanmax(error)}"


@dataclasses.dataclass
class Problem:
    """Arguments of decode or, with block_table, of decode_paged and reference."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rules: dict
    q_lens: list | None = None  # where the rows of q are packed

    @property
    def paged(self):
        return "block_table" in self.rules

    def run(self, convert=lambda array: array, **more):
        rules = {name: convert(value) if isinstance(value, np.ndarray) else value for name, value in self.rules.items()} | more
        arrays = [convert(array) for array in (self.q, self.k, self.v)]
        if not self.paged:
            return leanattn.decode(*arrays, **rules)
        table, lens = rules.pop("block_table"), rules.pop("kv_lens")
        return leanattn.decode_paged(*arrays, table, lens, **rules)

    def right(self, **more):
        return leanattn.reference(self.q, self.k, self.v, **self.rules, **more)


def make_problem(
    rng,
    *,
    layout="batched",
    dtype="float32",
    kv_lens=(70, 0, 130),
    q_heads=6,
    kv_heads=2,
    head_dim=64,
    head_dim_v=None,
    q_len=1,
    q_lens=None,
    page_size=16,
    kv_layout="NHD",
    **rules,
):
    """layout: batched, ragged or paged. What no sequence uses is NaN in K and V, and a page id out of range in the table."""
    kind = DTYPES[dtype]
    batch, head_dim_v = len(kv_lens), head_dim_v or head_dim

    def values(*shape):
        return rng.standard_normal(shape).astype(np.float32).astype(kind)

    if q_lens is not None:
        q = values(sum(q_lens), q_heads, head_dim)
        rules["cu_seqlens_q"] = np.cumsum([0, *q_lens]).astype(np.int32)
    else:
        q = values(batch, q_len, q_heads, head_dim) if q_len > 1 else values(batch, q_heads, head_dim)
    lens = np.array(kv_lens, np.int32)
    longest = max(kv_lens, default=0)
    nan = np.float32(np.nan).astype(kind)
    if layout == "batched":
        k, v = values(batch, longest + 3, kv_heads, head_dim), values(batch, longest + 3, kv_heads, head_dim_v)
        for seq, length in enumerate(kv_lens):
            k[seq, length:] = nan
            v[seq, length:] = nan
        rules["kv_lens"] = lens
    elif layout == "ragged":
        k, v = values(sum(kv_lens) + 2, kv_heads, head_dim), values(sum(kv_lens) + 2, kv_heads, head_dim_v)
        k[sum(kv_lens) :] = nan
        v[sum(kv_lens) :] = nan
        rules["cu_seqlens_kv"] = np.cumsum([0, *kv_lens]).astype(np.int32)
    else:
        slots = [-(-length // page_size) for length in kv_lens]
        pages = sum(slots) + 2
        k, v = values(pages, page_size, kv_heads, head_dim), values(pages, page_size, kv_heads, head_dim_v)
        order = iter(rng.permutation(pages).tolist())
        table = np.full((batch, max(slots, default=0) + 1), -7, np.int32)
        for seq, length in enumerate(kv_lens):
            table[seq, : slots[seq]] = [next(order) for _ in range(slots[seq])]
            if length % page_size:
                k[table[seq, slots[seq] - 1], length % page_size :] = nan
                v[table[seq, slots[seq] - 1], length % page_size :] = nan
        for page in order:
            k[page] = nan
            v[page] = nan
        rules["block_table"], rules["kv_lens"] = table, lens
    if kv_layout == "HND":
        axes = (1, 0, 2) if layout == "ragged" else (0, 2, 1, 3)
        k, v = np.ascontiguousarray(k.transpose(axes)), np.ascontiguousarray(v.transpose(axes))
        rules["kv_layout"] = kv_layout
    return Problem(q, k, v, rules, q_lens)
