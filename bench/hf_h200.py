#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a token of a Llama-3-8B costs through transformers: random weights, bfloat16, K and V filled with random numbers, decode steps
compiled whole (torch.compile, fullgraph) and replayed as CUDA graphs.

usage: python bench/hf_h200.py --output FILE [--floor PROGRAM] [--budget SECONDS] [--only PART,…] [--tiny]

Prints and appends JSON lines, one a measurement, each as soon as it is there; a part that fails is a line with its error. Parts, in order:

  floor      reading the bytes of the weights, of K and V, and of both, and nothing else: by PROGRAM (usage: PROGRAM BYTES…, JSON lines with
             bytes and us), else by summing them in PyTorch
  leanattn   batch 1, contexts of 128K, 32K and 8K, the model fused (leanattn.hf.fuse): a token, its layers with and without their
             attention, the attention alone, the matrix products alone, and where a token's time goes, by kernel
  ragged     batch 16, the contexts of data/mooncake_sample.jsonl, left-padded
  flex, sdpa transformers' own implementations at the first context, compiled the same way, with transformers' StaticCache

A part does not start after SECONDS (default 300). --tiny: a small model and short contexts, for trying this without a GPU.
"""

import argparse
import collections
import datetime
import gc
import inspect
import itertools
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time
import traceback
import unittest.mock

import torch
import torch._inductor.config as inductor
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import StaticCache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import leanattn
import leanattn.hf

ROOM = 256  # tokens of a cache beyond its context: more than steps are run
LLAMA_3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072 + ROOM,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY = LLAMA_3_8B | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 1024,
}  # fmt: skip

KINDS = {  # of kernels, by what their names hold
    "attention": ("leanattn::cuda",),
    "products with norm, activation, residual": ("_product_kernel",),
    "rotation and write to the cache": ("_place_kernel",),
    "products, library": ("gemv", "gemm", "cutlass", "nvjet", "splitK"),
    "reductions": ("triton_red", "triton_per"),
    "copies": ("Memcpy", "Memset", "memcpy", "memset"),
}


def make_model(config, device):
    """Without initialisation on the CPU."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device=device).eval()
    torch.set_default_dtype(torch.float32)
    with torch.device(device):  # its frequencies are no parameters
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    return model


def fill(cache, model, batch, tokens):
    """A cache as if `tokens` tokens of each sequence had been read."""
    config = model.config
    like = torch.empty(batch, config.num_key_value_heads, 0, config.head_dim, dtype=model.dtype, device=model.device)
    for layer in cache.layers:
        if not layer.is_initialized:
            layer.lazy_initialization(like, like)
            layer.keys.normal_()
            layer.values.normal_()
        layer.cumulative_length.fill_(tokens)


def percentiles(times):
    ordered = sorted(times)
    return {"median": statistics.median(ordered), "p10": ordered[len(ordered) // 10], "p90": ordered[len(ordered) * 9 // 10]}


class Bench:
    def __init__(self, arguments):
        self.arguments = arguments
        self.begin = time.monotonic()
        self.cuda = torch.cuda.is_available() and not arguments.tiny
        self.device = torch.device("cuda" if self.cuda else "cpu")
        config = TINY if arguments.tiny else LLAMA_3_8B
        self.config = LlamaConfig(**config, attn_implementation="leanattn")
        self.contexts = [512, 256, 64] if arguments.tiny else [131072, 32768, 8192]
        self.steps = 4 if arguments.tiny else 60
        self.source = {
            "device": torch.cuda.get_device_name() if self.cuda else platform.processor() or platform.machine(),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": arguments.commit or commit(),
            "command": " ".join(["python", "bench/hf_h200.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "leanattn": leanattn.__version__,
        }
        self.floors = {}

    def say(self, **record):
        record = {key: round(value, 5) if isinstance(value, float) else value for key, value in record.items()}
        line = json.dumps(record | {"at_s": round(time.monotonic() - self.begin, 1)} | self.source)
        print(line, flush=True)
        with open(self.arguments.output, "a", encoding="utf-8") as out:
            out.write(line + "\n")

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def time_ms(self, call, steps):
        """One number a call. On a GPU between events, without waiting in between: what it takes when the host is ahead."""
        for _ in range(5):
            call()
        self.synchronize()
        if not self.cuda:
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e3)
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        self.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def graphed(self, call):
        """call as a CUDA graph of its own."""
        if not self.cuda:
            return call
        stream = torch.cuda.Stream()
        self.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        workspace = leanattn.Workspace("cuda")
        with workspace, torch.cuda.graph(graph):
            call()
        graph.workspace = workspace
        return graph.replay

    # --- bytes a token has to read

    def weight_bytes(self):
        return sum(p.nbytes for name, p in self.model.named_parameters() if "embed_tokens" not in name)

    def kv_bytes(self, tokens):
        config = self.config
        return tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2

    def floor_ms(self, nbytes):
        """Reading so many bytes: measured, or between two that were by their rate."""
        if nbytes not in self.floors:
            nearest = min(self.floors, key=lambda known: abs(known - nbytes))
            return self.floors[nearest] * nbytes / nearest
        return self.floors[nbytes]

    def floor(self):
        weights, kv = self.weight_bytes(), [self.kv_bytes(context) for context in self.contexts]
        layers = self.config.num_hidden_layers
        kv.append(self.kv_bytes(sum(self.lens)))
        sizes = sorted({weights, *kv, *(weights + part for part in kv), *(part // layers for part in kv)})
        if self.arguments.floor:
            said = subprocess.run([self.arguments.floor, *map(str, sizes)], capture_output=True, text=True, check=True)
            for size, line in zip(sizes, said.stdout.splitlines(), strict=True):
                self.floors[size] = json.loads(line)["us"] / 1e3
        else:
            for size in sizes:
                memory = torch.zeros(size // 4, dtype=torch.int32, device=self.device)
                self.floors[size] = statistics.median(self.time_ms(lambda memory=memory: memory.sum(dtype=torch.int64), 5))
                del memory
        for size in sizes:
            rate = size / self.floors[size] / 1e6
            self.say(part="floor", by=self.arguments.floor or "torch.sum", bytes=size, ms=self.floors[size], gb_per_s=rate)

    # --- decode steps

    def stepper(self, cache, batch, mask, bump=None):
        """A function that makes one decode step, its token the next one's input. mask: attention_mask, made outside the graph."""
        model = self.model
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

        def forward(tokens, attention_mask, position_ids):
            out = model(input_ids=tokens, attention_mask=attention_mask, position_ids=position_ids, use_cache=True, **{name: cache})
            return out.logits[:, -1].argmax(-1, keepdim=True)

        compiled = torch.compile(forward, fullgraph=True, mode="reduce-overhead" if self.cuda else None, dynamic=False)
        state = {"tokens": torch.ones(batch, 1, dtype=torch.long, device=self.device), "steps": 0}

        def step():
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(state["tokens"], mask, state.get("position_ids"))
            state["tokens"].copy_(out)
            if bump is not None:
                bump(state)

        return step, state

    def token(self, part, step, tokens, context, **more):
        """Times steps that see `tokens` tokens of K and V together."""
        start = time.monotonic()
        for _ in range(3):  # compiles, warms up, records
            step()
        self.synchronize()
        compile_s = time.monotonic() - start
        times = percentiles(self.time_ms(step, self.steps))
        nbytes = self.weight_bytes() + self.kv_bytes(tokens)
        floor = self.floor_ms(nbytes)
        record = {"context": context, "ms_per_token": times["median"], "p10": times["p10"], "p90": times["p90"], "bytes": nbytes}
        record["floor_ms"] = floor
        self.say(part=part, what="token", **record, over_floor=times["median"] / floor, first_steps_s=compile_s, **more)

    def attention_alone(self, part, cache, batch, tokens, context, bounds):
        q = torch.randn(batch, self.config.num_attention_heads, 1, self.config.head_dim, device=self.device).to(self.model.dtype)

        def call():
            for layer in cache.layers:
                leanattn.hf.attention(None, q, layer.keys, layer.values, bounds, scaling=self.config.head_dim**-0.5)

        times = percentiles(self.time_ms(self.graphed(call), self.steps))
        floor = self.floor_ms(self.kv_bytes(tokens))
        record = {"context": context, "ms_per_token": times["median"], "p10": times["p10"], "p90": times["p90"]}
        record["bytes"] = self.kv_bytes(tokens)
        layers = self.config.num_hidden_layers
        apart = layers * self.floor_ms(self.kv_bytes(tokens) // layers)  # as many kernels that read a layer each
        record |= {"floor_ms": floor, "over_floor": times["median"] / floor}
        self.say(part=part, what="attention alone", **record, floor_by_layer_ms=apart, over_floor_by_layer=times["median"] / apart)

    def check(self, part, cache, batch, bounds):
        """The first layer's attention against float64 on the same numbers, and what SDPA's mathematics in this precision is off."""
        q = torch.randn(batch, self.config.num_attention_heads, 1, self.config.head_dim, device=self.device).to(self.model.dtype)
        layer, scale = cache.layers[0], self.config.head_dim**-0.5
        ours = leanattn.hf.attention(None, q, layer.keys, layer.values, bounds, scaling=scale)[0]
        worst, naive = 0.0, 0.0
        for row in range(batch):
            first = int(bounds[0, 0, 0, row]) if bounds.shape[0] == 2 else 0
            seen = slice(first, first + int(bounds[-1, 0, 0, row]))
            k, v = (t[row : row + 1, :, seen].repeat_interleave(4, 1) for t in (layer.keys, layer.values))
            right = torch.softmax(q[row : row + 1].double() @ k.double().transpose(2, 3) * scale, -1) @ v.double()
            logits = (q[row : row + 1] @ k.transpose(2, 3)).float() * scale
            theirs = torch.softmax(logits, -1).to(q.dtype) @ v
            worst = max(worst, (ours[row].double() - right[0, :, 0]).abs().max().item())
            naive = max(naive, (theirs[0, :, 0].double() - right[0, :, 0]).abs().max().item())
        self.say(part=part, what="check", error=worst, naive_error=naive, right=worst <= 2 * naive + 2**-9)

    def products_alone(self, batch, part="leanattn"):
        """The matrix products of a token as PyTorch's library does them, back to back in a graph."""
        linears = [module for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
        inputs = {n: torch.randn(batch, n, device=self.device).to(self.model.dtype) for n in {m.in_features for m in linears}}
        times = percentiles(self.time_ms(self.graphed(lambda: [m(inputs[m.in_features]) for m in linears]), self.steps))
        floor = self.floor_ms(self.weight_bytes())
        self.say(part=part, what="matrix products alone, F.linear", batch=batch, ms_per_token=times["median"], floor_ms=floor,
                 over_floor=times["median"] / floor)  # fmt: skip

    def layers_alone(self, cache, context):
        """The layers of a token as one graph of their own, with their attention and without: the difference is its part of a token."""
        position = self.model.model.rotary_emb(self.hidden, torch.full((1, 1), context, device=self.device))
        bounds = self.bounds_of(context, 1)
        name = "cache" if "cache" in inspect.signature(type(self.model.model.layers[0]).forward).parameters else "past_key_values"

        def call():
            hidden = self.hidden
            for layer in self.model.model.layers:
                hidden = layer(hidden, attention_mask=bounds, position_embeddings=position, **{name: cache})

        whole = statistics.median(self.time_ms(self.graphed(call), self.steps))
        with unittest.mock.patch.object(leanattn._hf_fused, "_attend", lambda *_: None):
            rest = statistics.median(self.time_ms(self.graphed(call), self.steps))
        floor = self.floor_ms(self.kv_bytes(context))
        self.say(part="leanattn", what="layers", context=context, ms_per_token=whole, without_attention_ms=rest,
                 attention_ms=whole - rest, attention_floor_ms=floor, attention_over_floor=(whole - rest) / floor)  # fmt: skip

    def where(self, part, step, context):
        """Time on the GPU by kind of kernel, a token, and the gaps between kernels."""
        rounds = 4
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(rounds):
                step()
            self.synchronize()
        kinds, counts, names = collections.Counter(), collections.Counter(), collections.Counter()
        begin, end = float("inf"), 0.0
        for event in profile.events():
            if event.device_type != torch.autograd.DeviceType.CUDA:
                continue
            name, elapsed_ms = event.name, event.time_range.elapsed_us() / rounds / 1e3
            kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other kernels")
            kinds[kind] += elapsed_ms
            counts[kind] += 1
            names[name[:80]] += elapsed_ms
            begin, end = min(begin, event.time_range.start), max(end, event.time_range.end)
        record = {
            "kinds_ms": dict(kinds),
            "kernels": {k: v // rounds for k, v in counts.items()},
            "slowest_ms": dict(names.most_common(12)),
        }
        self.say(part=part, what="where a token's time goes, profiled", context=context, span_ms=(end - begin) / rounds / 1e3, **record)

    def bounds_of(self, lens, batch):
        return torch.full((1, 1, 1, batch), lens, dtype=torch.int32, device=self.device)

    def leanattn(self):
        self.products_alone(1)
        fused = self.cuda and not self.arguments.unfused
        if fused:
            leanattn.hf.fuse(self.model)
        cache = leanattn.hf.KVCache(self.config, max_len=self.contexts[0] + ROOM)
        fill(cache, self.model, 1, self.contexts[0])
        step, _ = self.stepper(cache, 1, None)
        for context in self.contexts:
            fill(cache, self.model, 1, context)
            self.token("leanattn", step, context, context, batch=1)
            if self.cuda:
                self.where("leanattn", step, context)
            self.attention_alone("leanattn", cache, 1, context, context, self.bounds_of(context, 1))
            if fused:
                self.layers_alone(cache, context)
        self.check("leanattn", cache, 1, self.bounds_of(self.contexts[-1], 1))

    def ragged(self):
        """Left padding as generate() makes it: tokens to skip and lengths are given to the graph, which serves any."""
        batch, longest = len(self.lens), max(self.lens)
        cache = leanattn.hf.KVCache(self.config, max_len=longest + ROOM)
        fill(cache, self.model, batch, longest)
        lens = torch.tensor(self.lens, dtype=torch.int32, device=self.device)
        bounds = torch.stack([longest - lens, lens + 1])[:, None, None].contiguous()

        def bump(state):
            bounds[1] += 1
            state["position_ids"] += 1

        step, state = self.stepper(cache, batch, bounds, bump)
        state["position_ids"] = lens[:, None].long()
        self.token("ragged", step, sum(self.lens), self.lens, batch=batch)
        if self.cuda:
            self.where("ragged", step, self.lens)
        self.attention_alone("ragged", cache, batch, sum(self.lens), self.lens, bounds)
        self.check("ragged", cache, batch, bounds)
        self.products_alone(batch, "ragged")

    def own(self, implementation):
        """transformers' own attention, on its own cache."""
        context = self.contexts[0]
        self.model.config._attn_implementation = implementation
        cache = StaticCache(config=self.config, max_cache_len=context + ROOM)
        fill(cache, self.model, 1, context)
        mask = None
        if implementation == "flex_attention":  # made once: it costs the steps nothing
            embeds = torch.empty(1, 1, 0, device=self.device, dtype=self.model.dtype)
            key = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
            mask = create_causal_mask(config=self.model.config, inputs_embeds=embeds, attention_mask=None, **{key: cache})
        step, _ = self.stepper(cache, 1, mask)
        self.token(implementation, step, context, context, batch=1)

    def flex(self):
        self.own("flex_attention")

    def sdpa(self):
        self.own("sdpa")

    def run(self):
        self.lens = self.ragged_contexts()
        start = time.monotonic()
        self.model = make_model(self.config, self.device)
        self.hidden = torch.randn(1, 1, self.config.hidden_size, device=self.device).to(self.model.dtype)
        self.synchronize()
        self.say(part="model", parameters=sum(p.numel() for p in self.model.parameters()), made_in_s=time.monotonic() - start)
        for part in ("floor", "leanattn", "ragged", "flex", "sdpa"):
            if self.arguments.only and part not in self.arguments.only.split(",") and part != "floor":
                continue
            if time.monotonic() - self.begin > self.arguments.budget:
                self.say(part=part, skipped=f"the budget of {self.arguments.budget} s is used up")
                continue
            try:
                with torch.inference_mode(False), torch.no_grad():
                    getattr(self, part)()
            except Exception as error:  # the parts after it still run
                traceback.print_exc()
                self.say(part=part, error=f"{type(error).__name__}: {error}"[:600])
            torch.compiler.reset()
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def ragged_contexts(self):
        """16 contexts of the trace, none longer than lets 16 of the longest fit in 110 GB: left padding takes that much memory."""
        if self.arguments.tiny:
            return [64, 17, 50, 33]
        trace = pathlib.Path(__file__).parents[1] / "data" / "mooncake_sample.jsonl"
        requests = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        fits = 110 * 10**9 // self.kv_bytes(1) // 16 - ROOM
        lens = [r["input_length"] + r["output_length"] // 2 for r in requests]
        return [min(n, fits) for n in lens][:16]


def commit():
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="JSON lines, appended")
    parser.add_argument("--floor", help="a program that reads the bytes it is told to, and nothing else")
    parser.add_argument("--budget", type=float, default=300, help="seconds after which no part starts")
    parser.add_argument("--only", help="parts, with commas; the floor is always there")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tune", action="store_true", help="coordinate descent: PyTorch turns products of one row into reductions")
    parser.add_argument("--unfused", action="store_true", help="without leanattn.hf.fuse")
    parser.add_argument("--commit", help="what is measured, where git does not know it")
    arguments = parser.parse_args()
    leanattn.hf.register()
    inductor.coordinate_descent_tuning = arguments.tune
    Bench(arguments).run()


if __name__ == "__main__":
    main()
