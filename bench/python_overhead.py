# SPDX-License-Identifier: Apache-2.0
"""What a call from Python costs beside the work: microseconds of the smallest calls, by the way they are made.

usage: python bench/python_overhead.py [--device cpu|cuda] [--output FILE.jsonl]

"empty" is a batch of no sequences: binding, checks and nothing else. "smallest" is one sequence of 16 tokens with one head, on one
thread; on CUDA until the kernel is queued. CPU time of the calling thread, so that other programs count as little as they can: median of
rounds, and the fastest. The ways take turns, so that a busy minute is every row's. "an empty operator" has decode_out's schema and does
nothing: what PyTorch itself takes.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time

import numpy as np
import torch

import leanattn
import leanattn.ops

OPS = torch.ops.leanattn
EMPTY = torch.library.Library("leanattn_overhead", "DEF")
EMPTY.define(str(OPS.decode_out.default._schema).replace("leanattn::decode_out", "empty"))
for key in ("CPU", "CUDA"):
    EMPTY.impl("empty", lambda *arguments: None, key)
EMPTY.impl("empty", torch.library.fallthrough_kernel, "Autograd")


def times_us(ways, device, calls=300, rounds=200):
    """Key → median and fastest round, in microseconds a call, of the thread's CPU time. On CUDA the queue is emptied between rounds."""
    times = {key: [] for key in ways}
    for index in range(rounds + 1):
        for key, call in ways.items():
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.thread_time()
            for _ in range(calls):
                call()
            if index > 0:  # the first warms up
                times[key].append((time.thread_time() - begin) / calls * 1e6)
    return {key: (statistics.median(all_rounds), min(all_rounds)) for key, all_rounds in times.items()}


def ways(device, batch, tokens=16, head_dim=64):
    """Name → call, for a contiguous and a paged problem."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.randn(batch, 1, head_dim, device=device).to(dtype)
    k, v = (torch.randn(batch, tokens, 1, head_dim, device=device).to(dtype) for _ in range(2))
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    out = torch.empty_like(q)
    calls = {
        "prepared call": leanattn.prepare(q, k, v, out, kv_lens=lens),
        "leanattn.decode, torch, out given": lambda: leanattn.decode(q, k, v, kv_lens=lens, out=out),
        "leanattn.decode_paged, torch, out given": lambda: leanattn.decode_paged(q, k, v, table, lens, out=out),
        "an empty operator": lambda: torch.ops.leanattn_overhead.empty(q, k, v, out, None, lens),
        "torch.ops.leanattn.decode_out": lambda: OPS.decode_out(q, k, v, out, None, lens),
        "torch.ops.leanattn.decode_paged_out": lambda: OPS.decode_paged_out(q, k, v, out, None, table, lens),
        "torch.ops.leanattn.decode": lambda: OPS.decode(q, k, v, lens),
    }
    if device == "cpu":
        n = [array.numpy() for array in (q, k, v, lens, out)]
        calls["leanattn.decode, NumPy, out given"] = lambda: leanattn.decode(*n[:3], kv_lens=n[3], out=n[4])
        calls["leanattn.decode, NumPy"] = lambda: leanattn.decode(*n[:3], kv_lens=n[3])
    return calls


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        models = [line.split(": ")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def commit():
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", help="JSON lines, appended")
    parser.add_argument("--commit", help="what is measured, where git does not know it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # OpenMP's number, which is leanattn's default
    source = {
        "device": device_name(arguments.device),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": arguments.commit or commit(),
        "command": f"python bench/python_overhead.py --device {arguments.device}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    print(f"{source['device']}; {source['date']}, commit {source['commit']}, Python {source['python']}, PyTorch {source['torch']}\n")
    print("| call | empty, µs (fastest) | smallest, µs (fastest) |\n|---|---|---|")
    problems = {size: ways(arguments.device, batch) for size, batch in (("empty", 0), ("smallest", 1))}
    measured = times_us({(name, size): call for size, calls in problems.items() for name, call in calls.items()}, arguments.device)
    for name in problems["empty"]:
        times = {size: measured[name, size] for size in problems}
        print(f"| {name} | " + " | ".join(f"{median:.2f} ({fastest:.2f})" for median, fastest in times.values()) + " |", flush=True)
        if arguments.output:
            record = source | {"call": name}
            for size, (median, fastest) in times.items():
                record |= {f"{size}_us": round(median, 3), f"{size}_fastest_us": round(fastest, 3)}
            with open(arguments.output, "a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
