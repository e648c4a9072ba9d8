#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The end of `./dev demo`: a small model answers a question through leanattn, and says how fast it speaks at 8K tokens of context with
and without. usage: python bench/hf_demo.py [QUESTION]"""

import inspect
import statistics
import sys
import time

import torch
from transformers import TextStreamer

import leanattn.hf
from hf_cpu import measure
from smollm2 import load_model, load_tokenizer

CONTEXT, STEPS = 8192, 20


def main():
    question = " ".join(sys.argv[1:]) or "Why is the sky blue? Answer in two sentences."
    leanattn.hf.register()
    model, tokenizer = load_model(torch.float32, "leanattn"), load_tokenizer()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    print(
        f'SmolLM2-135M-Instruct, float32, {torch.get_num_threads()} threads, attn_implementation="leanattn"\n\n> {question}\n', flush=True
    )
    begin = time.perf_counter()
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    cache = leanattn.hf.KVCache(model.config)
    tokens = model.generate(**inputs, **{name: cache}, max_new_tokens=120, do_sample=False, streamer=streamer)
    new = tokens.shape[1] - inputs["input_ids"].shape[1]
    print(f"\n{new} tokens, {new / (time.perf_counter() - begin):.1f} a second\n", flush=True)
    with torch.inference_mode():
        times = measure(model, CONTEXT, STEPS)
    rates = {way: 1e3 / statistics.median(values) for way, values in times.items()}
    print(f"behind {CONTEXT} tokens of context: {rates['leanattn']:.1f} tokens a second with leanattn, {rates['sdpa']:.1f} with", end=" ")
    print(f"sdpa and transformers' DynamicCache: {rates['leanattn'] / rates['sdpa']:.2f} times as fast")


if __name__ == "__main__":
    main()
