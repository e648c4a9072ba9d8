# SPDX-License-Identifier: Apache-2.0
"""A tree of draft tokens verified in one call: each sees the whole context, itself, and its ancestors in the tree, not its siblings.
usage: speculative_tree.py"""

import numpy as np

import leanattn

q_heads, kv_heads, head_dim, context = 8, 2, 64, 2000
# Who each draft token follows: −1 is the last token of the context. Two guesses, each with guesses of its own.
#
#   0 ── 2 ── 5
#   │    └─── 6
#   └─── 3
#   1 ── 4
parents = [-1, -1, 0, 0, 1, 2, 2]
nodes = len(parents)


def ancestors(node: int) -> list[int]:
    """The path from a root to the node, itself included."""
    return [*(ancestors(parents[node]) if parents[node] >= 0 else []), node]


# Bit j of a row's mask allows the j-th draft token: [nodes, ⌈nodes / 64⌉] uint64.
tree_mask = np.zeros((nodes, 1), np.uint64)
for node in range(nodes):
    for other in ancestors(node):
        tree_mask[node, 0] |= np.uint64(1 << other)

rng = np.random.default_rng(0)
k, v = (rng.standard_normal((1, context + nodes, kv_heads, head_dim), np.float32) for _ in range(2))
q = rng.standard_normal((1, nodes, q_heads, head_dim), np.float32)
o = leanattn.decode(q, k, v, tree_mask=tree_mask)

# The same, branch by branch: one call for each node over the context and its own path.
worst = 0.0
for node in range(nodes):
    seen = [*range(context), *(context + other for other in ancestors(node))]
    alone = leanattn.decode(q[:, node], k[:, seen], v[:, seen])
    worst = max(worst, float(np.abs(alone - o[:, node]).max()))

for node in range(nodes):
    print(f"draft token {node}: follows {parents[node]:2}, sees {ancestors(node)}, mask {int(tree_mask[node, 0]):07b}")
print(f"{nodes} draft tokens over {context} in one call; largest difference from a call each: {worst:.1e}")
assert worst < 1e-5
