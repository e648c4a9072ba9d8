# SPDX-License-Identifier: Apache-2.0
"""One case of the CPU table: its line, its tensors as views into a pool, and what is right for it."""

import dataclasses
import mmap
import pathlib

import numpy as np
import torch
import torch.nn.functional as F

PAGE_BYTES = {"2m": 2 << 20, "4k": 4096}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def parse_length(text):
    units = {"k": 1024, "m": 1024 * 1024}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    length: int
    dtype: str = "bf16"
    layout: str = "contiguous"
    page: int = 0
    window: int = -1
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False

    @property
    def group(self):
        return self.q_heads // self.kv_heads

    @property
    def elements(self):
        """Of K, and of V."""
        return self.batch * self.length * self.kv_heads * self.head_dim

    @property
    def kv_bytes(self):
        """What has to be read: with a window, the tokens inside it."""
        tokens = self.length if self.window < 0 else min(self.length, self.window + 1)
        return 2 * self.batch * tokens * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def plain(self):
        """The case without its features, reading as many bytes."""
        length = self.length if self.window < 0 else min(self.length, self.window + 1)
        return dataclasses.replace(self, length=length, layout="contiguous", page=0, window=-1, softcap=0.0, alibi=False, sink=False)

    def features(self):
        words = []
        if self.page:
            words.append(f"page={self.page}")
        elif self.layout != "contiguous":
            words.append(f"layout={self.layout}")
        if self.window >= 0:
            words.append(f"window={self.window}")
        if self.softcap:
            words.append(f"softcap={self.softcap:g}")
        words += [f"{name}=1" for name in ("alibi", "sink") if getattr(self, name)]
        return " ".join(words)

    def __str__(self):
        length = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        shape = f"{self.batch} {self.q_heads} {self.kv_heads} {self.head_dim} {length} dtype={self.dtype}"
        return f"{shape} {self.features()}".strip()


def parse_case(line):
    words = line.split()
    batch, q_heads, kv_heads, head_dim = map(int, words[:4])
    options = {}
    for word in words[5:]:
        key, value = word.split("=")
        if key == "page":
            options.update(layout="paged", page=parse_length(value))
        elif key == "window":
            options["window"] = parse_length(value)
        elif key == "softcap":
            options["softcap"] = float(value)
        elif key in ("alibi", "sink"):
            options[key] = value == "1"
        elif key in ("layout", "dtype"):
            options[key] = value
        else:
            raise ValueError(f"{line}: unknown word {word}")
    return Case(batch, q_heads, kv_heads, head_dim, parse_length(words[4]), **options)


def read_cases(path):
    lines = (line.split("#")[0].strip() for line in open(path, encoding="utf-8"))
    return [parse_case(line) for line in lines if line]


def huge_bytes():
    """Of this process in transparent huge pages."""
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


class Pool:
    """Random K and V of one dtype, far larger than a case, so that successive calls find their part of it out of the caches. One anonymous
    mapping, in huge pages where asked for (madvise), as engines keep their KV caches; every contender reads it."""

    def __init__(self, dtype, nbytes, pages, seed=1):
        generator = torch.Generator().manual_seed(seed)
        block = torch.randn(16 * 1024 * 1024 - 4096, generator=generator).to(DTYPES[dtype])
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE if pages == "2m" else mmap.MADV_NOHUGEPAGE)
        huge_before = huge_bytes()
        self.data = torch.frombuffer(memory, dtype=block.dtype)
        for begin in range(0, self.data.numel(), block.numel()):
            end = min(begin + block.numel(), self.data.numel())
            self.data[begin:end] = block[: end - begin]
        got_huge = huge_bytes() - huge_before > 0.9 * nbytes
        if got_huge != (pages == "2m"):
            raise SystemExit(f"the system did not give pages of {PAGE_BYTES[pages]} bytes; see --pages")

    def sets(self, case):
        return max(1, self.data.numel() // (2 * case.elements))

    def kv(self, case, index):
        """K and V, flat, of one of the sets."""
        first = (index % self.sets(case)) * 2 * case.elements
        return self.data[first : first + case.elements], self.data[first + case.elements : first + 2 * case.elements]


class Inputs:
    """Q, and what a case needs beside K and V."""

    def __init__(self, case, seed=7):
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(case.batch, case.q_heads, case.head_dim, generator=generator).to(DTYPES[case.dtype])
        self.kv_lens = torch.full((case.batch,), case.length, dtype=torch.int32)
        heads = torch.arange(1, case.q_heads + 1, dtype=torch.float32)
        self.alibi_slopes = torch.exp2(-8 * heads / case.q_heads)
        self.sinks = heads / case.q_heads
        self.block_table = None
        if case.page:
            slots = -(-case.length // case.page)
            order = torch.randperm(case.batch * slots, generator=generator)
            self.block_table = order.reshape(case.batch, slots).to(torch.int32)

    def tokens(self, case, flat):
        """[batch, length, kv_heads, head_dim] of one flat K or V."""
        if case.page:
            pages = flat.view(-1, case.page, case.kv_heads, case.head_dim)
            return pages[self.block_table.long()].reshape(case.batch, -1, case.kv_heads, case.head_dim)[:, : case.length]
        if case.layout == "head_major":
            return flat.view(case.batch, case.kv_heads, case.length, case.head_dim).transpose(1, 2)
        return flat.view(case.batch, case.length, case.kv_heads, case.head_dim)


def attend(case, inputs, k_flat, v_flat, precision):
    """[batch, q_heads, head_dim]: attention written out in the given precision."""
    k_all, v_all = inputs.tokens(case, k_flat), inputs.tokens(case, v_flat)
    out = torch.empty(case.batch, case.q_heads, case.head_dim, dtype=precision)
    distance = torch.arange(case.length - 1, -1, -1, dtype=precision)
    for b in range(case.batch):
        for h in range(case.kv_heads):
            heads = slice(h * case.group, (h + 1) * case.group)
            s = inputs.q[b, heads].to(precision) @ k_all[b, :, h].to(precision).T / case.head_dim**0.5
            if case.softcap:
                s = case.softcap * torch.tanh(s / case.softcap)
            if case.alibi:
                s = s - inputs.alibi_slopes[heads, None].to(precision) * distance
            if case.window >= 0:
                s = s.masked_fill(distance > case.window, float("-inf"))
            if case.sink:
                s = torch.cat([s, inputs.sinks[heads, None].to(precision)], dim=1)
            p = torch.softmax(s, dim=1)[:, : case.length]
            out[b, heads] = p @ v_all[b, :, h].to(precision)
    return out


def naive_error(case, inputs, k_flat, v_flat, right):
    """The largest error of float32 attention summed in order, number by number, as src/reference.h defines the naive computation. First seq
    only: all are of one length."""
    k, v = (inputs.tokens(case, flat)[0].to(torch.float32).numpy() for flat in (k_flat, v_flat))
    worst = 0.0
    in_order = np.add.accumulate  # torch.cumsum adds in float64
    for head in range(case.q_heads):
        kv_head = head // case.group
        q = inputs.q[0, head].to(torch.float32).numpy()
        scores = in_order(k[:, kv_head] * q, axis=1)[:, -1] * np.float32(case.head_dim**-0.5)
        weights = np.exp(scores - scores.max())
        out = in_order(weights[:, None] * v[:, kv_head], axis=0)[-1] / in_order(weights)[-1]
        worst = max(worst, np.abs(out - right[0, head].numpy()).max().item())
    return worst


def error_and_tolerance(case, inputs, k_flat, v_flat, out):
    """The largest error of out, and what it may be: twice that of PyTorch's SDPA or, if that is more, of the naive computation, on the same
    tensors without window and logit rules, plus one ulp of the output."""
    right = attend(case, inputs, k_flat, v_flat, torch.float64)
    error = (out.to(torch.float64) - right).abs().max().item()
    ulp = torch.finfo(out.dtype).eps * right.abs().max().item()

    bare = dataclasses.replace(case, window=-1, softcap=0.0, alibi=False, sink=False)
    k, v = (inputs.tokens(case, flat).transpose(1, 2) for flat in (k_flat, v_flat))
    sdpa = F.scaled_dot_product_attention(inputs.q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)
    sdpa_right = right if bare == case else attend(bare, inputs, k_flat, v_flat, torch.float64)
    same_precision = (sdpa.to(torch.float64) - sdpa_right).abs().max().item()
    if case.dtype == "f32":
        same_precision = max(same_precision, naive_error(bare, inputs, k_flat, v_flat, sdpa_right))
    return error, 2 * same_precision + ulp
