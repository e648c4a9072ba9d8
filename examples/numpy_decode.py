# SPDX-License-Identifier: Apache-2.0
"""One decode step of three sequences of different lengths on NumPy arrays, checked, with a picture of how it is cut."""

import numpy as np

import leanattn

q_heads, kv_heads, head_dim = 8, 2, 64
kv_lens = np.array([300, 4096, 17], np.int32)

rng = np.random.default_rng(0)
q = rng.standard_normal((3, q_heads, head_dim)).astype(np.float32)
k = rng.standard_normal((3, 4096, kv_heads, head_dim)).astype(np.float32)
v = rng.standard_normal((3, 4096, kv_heads, head_dim)).astype(np.float32)

o, lse = leanattn.decode(q, k, v, kv_lens=kv_lens, return_lse=True)

right = leanattn.reference(q, k, v, kv_lens=kv_lens)
print(f"O {o.shape}, LSE {lse.shape}; largest difference from float64: {np.abs(o - right.o).max():.1e}")

# Two shards of the context, merged.
head, tail = (leanattn.decode(q[1:2], k[1:2, part], v[1:2, part], return_lse=True) for part in (slice(0, 3000), slice(3000, 4096)))
merged, _ = leanattn.merge(*head, *tail)
print(f"two shards merged: largest difference {np.abs(merged - o[1:2]).max():.1e}")

print(leanattn.plan(kv_lens, q_heads=q_heads, kv_heads=kv_heads, workers=4, policies=["lean", "fa2"]))
assert np.abs(o - right.o).max() < 1e-5 and np.abs(merged - o[1:2]).max() < 1e-5
