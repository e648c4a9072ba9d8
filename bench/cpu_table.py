# SPDX-License-Identifier: Apache-2.0
"""Decode attention on this CPU: leanattn, PyTorch and the read floor, in one process, turn by turn.

Every call reads K and V that the caches have lost: contenders rotate through a pool far larger than a case. A turn is a rest (the
threads of other contenders stop spinning), an untimed call, a timed call. The machine may be shared and noisy: figures are medians
over many rounds, a ratio is the median of the rounds' own ratios. What is wrong is not timed.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import leanattn_c
from cpu_case import DTYPES, PAGE_BYTES, Inputs, Pool, error_and_tolerance, read_cases

HERE = pathlib.Path(__file__).parent
REST_S = 0.002
MIB = 1 << 20


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def turn_us(call, first_set):
    time.sleep(REST_S)
    call(first_set)
    begin = time.perf_counter_ns()
    call(first_set + 1)
    return (time.perf_counter_ns() - begin) / 1000


def sdpa_calls(case, inputs, pool):
    """PyTorch as it is commonly called (enable_gqa), and with the rows of a group packed by hand so that K and V are read once.
    K and V are head-major, the layout PyTorch's own caches have."""
    shape = (case.batch, case.kv_heads, case.length, case.head_dim)
    q = inputs.q.unsqueeze(2)
    packed = inputs.q.view(case.batch, case.kv_heads, case.group, case.head_dim)
    sets = [tuple(part.view(shape) for part in pool.kv(case, index)) for index in range(pool.sets(case))]

    def plain(index):
        F.scaled_dot_product_attention(q, *sets[index % len(sets)], enable_gqa=case.group > 1)

    def by_hand(index):
        F.scaled_dot_product_attention(packed, *sets[index % len(sets)])

    return plain, by_hand


def measure(case, threads, pool, library, seconds, with_torch):
    inputs = Inputs(case)
    ours = leanattn_c.Decode(library, case, inputs, pool, threads)
    ours(0)
    error, tolerance = error_and_tolerance(case, inputs, *pool.kv(case, 0), ours.o)
    if not error <= tolerance:
        raise SystemExit(f"{case}: error {error:.3g} is above the tolerance {tolerance:.3g}")

    contenders = {"floor": leanattn_c.Floor(library, case, pool, threads, seconds / 2), "ours": ours}
    slow = {}
    if case.features():
        base = case.plain()
        contenders["base"] = leanattn_c.Decode(library, base, Inputs(base), pool, threads)
    elif with_torch:
        slow["torch"], slow["torch_packed"] = sdpa_calls(case, inputs, pool)

    times = {name: [] for name in (*contenders, *slow)}
    begin, rounds, index = time.monotonic(), 0, 1
    # At least seven rounds, at most sixty; PyTorch joins until it has seven, then one round in four.
    while rounds < 7 or (rounds < 60 and time.monotonic() - begin < seconds):
        joined = list(contenders.items()) + (list(slow.items()) if rounds < 7 or rounds % 4 == 0 else [])
        for name, call in joined[rounds % len(joined) :] + joined[: rounds % len(joined)]:
            times[name].append(turn_us(call, index))
            index += 2
        rounds += 1

    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = statistics.median(o / f for o, f in zip(times["ours"], times["floor"]))
    record = {
        "case": str(case), "threads": threads, "group": case.group, "kv_bytes": case.kv_bytes,
        "us": round(median["ours"], 1), "p10_us": round(percentile(times["ours"], 0.1), 1),
        "p90_us": round(percentile(times["ours"], 0.9), 1), "floor_us": round(median["floor"], 1), "ratio": round(ratio, 4),
        "gb_per_s": round(case.kv_bytes / median["ours"] / 1000, 2), "rounds": rounds, "error": error, "tolerance": tolerance,
    }
    if "base" in times:
        record["base_us"] = round(median["base"], 1)
        record["cost"] = round(statistics.median(o / b for o, b in zip(times["ours"], times["base"])), 4)
    for name in slow:
        record[f"{name}_us"] = round(median[name], 1)
    return record


def machine():
    model = platform.processor()
    for line in open("/proc/cpuinfo", encoding="utf-8"):
        if line.startswith("model name"):
            model = line.split(":")[1].strip()
            break
    commit = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "device": f"{model}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "torch": torch.__version__,
    }


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def span(values):
    return f"{geometric_mean(values):.2f} ({max(values):.2f})"


def summary(records):
    """The README's tables: time ÷ floor by group, speed against PyTorch, what features cost, and the cases one by one."""
    parts = []
    plain = [r for r in records if "torch_us" in r]
    dtypes = list(dict.fromkeys(r["case"].split("dtype=")[1].split()[0] for r in records))
    thread_counts = sorted({r["threads"] for r in records})

    def of(some, dtype, threads, group=None):
        return [r for r in some if f"dtype={dtype}" in r["case"] and r["threads"] == threads and group in (None, r["group"])]

    columns = [f"{d}, {t} thread{'s' * (t > 1)}" for t in thread_counts for d in dtypes]
    for page_bytes in dict.fromkeys(r["page_bytes"] for r in records):
        here = [r for r in records if r["page_bytes"] == page_bytes and "cost" not in r]
        large = [r for r in here if r["kv_bytes"] >= 16 * MIB] or here
        rows = []
        for group in sorted({r["group"] for r in large}):
            cells = [of(large, d, t, group) for t in thread_counts for d in dtypes]
            rows.append([group] + [span([r["ratio"] for r in cell]) if cell else "" for cell in cells])
        size = f"{page_bytes >> 20} MB" if page_bytes >= MIB else f"{page_bytes >> 10} KB"
        parts.append(f"Time ÷ read floor, K and V in pages of {size}, KV of 16 MiB and more, geometric mean (worst):\n\n"
                     + table(["group", *columns], rows))

    rows = []
    for group in sorted({r["group"] for r in plain}):
        for name, key in (("SDPA, enable_gqa", "torch_us"), ("SDPA, rows packed by hand", "torch_packed_us")):
            cells = [[r[key] / r["us"] for r in of(plain, d, t, group)] for t in thread_counts for d in dtypes]
            rows.append([group, name] + [f"{geometric_mean(cell):.1f} ({min(cell):.1f})" if cell else "" for cell in cells])
    parts.append("Times faster than PyTorch, all shapes, geometric mean (least):\n\n" + table(["group", "against", *columns], rows))

    costs = [r for r in records if "cost" in r]
    if costs:
        rows = [[r["case"], r["threads"], f"{r['us']:.0f}", f"{r['base_us']:.0f}", f"{(r['cost'] - 1) * 100:+.1f} %"] for r in costs]
        parts.append("What a feature costs:\n\n" + table(["case", "threads", "µs", "µs without", "cost"], rows))

    rows = [
        [r["case"], r["threads"], f"{r['kv_bytes'] / 1e6:.1f}", f"{r['floor_us']:.0f}", f"{r['us']:.0f}",
         f"{r['p10_us']:.0f}–{r['p90_us']:.0f}", f"{r['ratio']:.2f}", f"{r['gb_per_s']:.1f}",
         f"{r['torch_us']:.0f}", f"{r['torch_packed_us']:.0f}"]
        for r in plain if r["threads"] == thread_counts[-1]
    ]
    header = ["case", "threads", "KV MB", "floor µs", "µs", "p10–p90", "÷ floor", "GB/s", "SDPA µs", "packed µs"]
    parts.append("Every shape:\n\n" + table(header, rows))
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parent / "build/release", help="build folder with the shared libraries")
    parser.add_argument("--cases", type=pathlib.Path, default=HERE / "cpu_table.txt")
    parser.add_argument("--dtypes", default="f32,f16,bf16")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}")
    parser.add_argument("--pool-mib", type=int, default=1152, help="K and V to rotate through, per dtype (default 1152)")
    parser.add_argument("--pages", default="2m,4k", help="of K and V; PyTorch and features on the first only (default 2m,4k)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of rounds a case (default 1.5)")
    parser.add_argument("--quick", action="store_true", help="bf16, all threads, 2 MB pages, a third of the time")
    parser.add_argument("--only", default="", help="cases whose line holds this text")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results/cpu-table.jsonl")
    options = parser.parse_args()
    if options.quick:
        options.dtypes, options.threads, options.pages, options.seconds = "bf16", str(os.cpu_count()), "2m", 0.5

    library = leanattn_c.Library(options.build)
    about = machine()
    cases = [case for case in read_cases(options.cases) if options.only in str(case)]
    thread_counts = sorted({int(text) for text in options.threads.split(",")})
    records = []
    for turn, (pages, dtype) in enumerate(itertools.product(options.pages.split(","), options.dtypes.split(","))):
        first_pages = turn < len(options.dtypes.split(","))
        pool = Pool(dtype, options.pool_mib * MIB, pages)
        chosen = [type(case)(**{**vars(case), "dtype": dtype}) for case in cases if first_pages or not case.features()]
        for number, case in enumerate(chosen):
            if 2 * case.elements * DTYPES[dtype].itemsize > options.pool_mib * MIB:
                raise SystemExit(f"{case}: larger than the pool; raise --pool-mib")
            for threads in thread_counts:
                torch.set_num_threads(threads)
                record = measure(case, threads, pool, library, options.seconds, first_pages)
                records.append(record | {"page_bytes": PAGE_BYTES[pages]} | about)
                print(f"{pages} {dtype} {number + 1}/{len(chosen)} {record['case']} threads={threads}: {record['us']} µs, "
                      f"{record['ratio']} × floor, torch {record.get('torch_us', '-')}", file=sys.stderr, flush=True)
        del pool

    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    print(f"{about['device']}; {about['date']}, commit {about['commit']}, PyTorch {about['torch']}\n")
    print(summary(records))


if __name__ == "__main__":
    main()
