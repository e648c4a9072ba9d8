# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a paged cache with PyTorch: requests of a real trace arrive, grow by a token a step, and leave their pages to
the next. usage: torch_paged.py [cpu | cuda]"""

import collections
import json
import pathlib
import sys
import time

import torch

import leanattn

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
dtype = torch.bfloat16
q_heads, kv_heads, head_dim, page_size, num_pages, max_batch = 8, 2, 64, 16, 160, 4
SHORTER = 64  # than in the trace, so that this takes a second

trace = pathlib.Path(__file__).parents[1] / "data" / "mooncake_sample.jsonl"
requests = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
waiting = collections.deque((i, r["input_length"] // SHORTER + 1, r["output_length"] // SHORTER + 1) for i, r in enumerate(requests))
max_pages = max(-(-(prompt + new) // page_size) for _, prompt, new in waiting)

k_cache = torch.zeros(num_pages, page_size, kv_heads, head_dim, device=device, dtype=dtype)
v_cache = torch.zeros_like(k_cache)
free_pages = list(range(num_pages))


class Sequence:
    def __init__(self, request: int, prompt: int, new: int):
        self.request, self.prompt, self.left = request, prompt, new
        self.kv_len = 0
        self.pages: list[int] = []
        self.keys: list[torch.Tensor] = []  # what the last check compares with
        self.values: list[torch.Tensor] = []

    def pages_for(self, tokens: int) -> int:
        return -(-(self.kv_len + tokens) // page_size) - len(self.pages)


def table_of(sequences: list[Sequence]) -> torch.Tensor:
    rows = [s.pages + [0] * (max_pages - len(s.pages)) for s in sequences]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def append(sequences: list[Sequence], tokens: int) -> None:
    """New K and V of each sequence (a model would compute them), written behind what is there."""
    for s in sequences:
        s.pages += [free_pages.pop() for _ in range(s.pages_for(tokens))]
    k, v = (torch.randn(len(sequences), tokens, kv_heads, head_dim, device=device).to(dtype) for _ in range(2))
    lens = torch.tensor([s.kv_len for s in sequences], dtype=torch.int32, device=device)
    leanattn.append_kv(k, v, k_cache, v_cache, lens, block_table=table_of(sequences))
    for i, s in enumerate(sequences):
        s.kv_len += tokens
        s.keys.append(k[i])
        s.values.append(v[i])


def difference(s: Sequence, q: torch.Tensor, o: torch.Tensor) -> float:
    """From PyTorch's own attention over the sequence's tokens, laid out whole."""
    k, v = (torch.cat(parts).transpose(0, 1).float().repeat_interleave(q_heads // kv_heads, 0) for parts in (s.keys, s.values))
    right = torch.nn.functional.scaled_dot_product_attention(q.float()[:, None], k, v)[:, 0]
    return (right - o.float()).abs().max().item()


active: list[Sequence] = []
steps = tokens = 0
worst, spent = 0.0, 0.0
torch.manual_seed(0)
while waiting or active:
    while waiting and len(active) < max_batch:
        s = Sequence(*waiting[0])
        if s.pages_for(s.prompt + s.left) > len(free_pages) - sum(a.pages_for(a.left) for a in active):
            break  # room for every token of those that run comes first
        waiting.popleft()
        append([s], s.prompt)
        active.append(s)
    append(active, 1)
    q = torch.randn(len(active), q_heads, head_dim, device=device).to(dtype)
    table, lens = table_of(active), torch.tensor([s.kv_len for s in active], dtype=torch.int32, device=device)
    begin = time.perf_counter()
    o = leanattn.decode_paged(q, k_cache, v_cache, table, lens)
    spent += time.perf_counter() - begin
    steps, tokens = steps + 1, tokens + len(active)
    for i, s in enumerate(active):
        s.left -= 1
        if s.left == 0:
            worst = max(worst, difference(s, q[i], o[i]))
            free_pages += s.pages
    active = [s for s in active if s.left]

print(f"{len(requests)} requests, {steps} steps, {tokens} tokens on {device}; attention took {spent * 1e3:.1f} ms")
print(f"pages free at the end: {len(free_pages)} of {num_pages}; largest difference from scaled_dot_product_attention: {worst:.1e}")
assert len(free_pages) == num_pages and worst < 2e-2
