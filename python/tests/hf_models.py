# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights of the families that leanattn.hf is tested with, and what the tests measure them by."""

import copy
import inspect

import torch
import transformers
from transformers import AutoModelForCausalLM

WINDOW = 24
_SMALL = {
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

# Name → (configuration class of transformers, what differs from the small model above).
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 4}),
    "gemma2": ("Gemma2Config", {"head_dim": 64, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 256, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 256},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 64,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "opt": ("OPTConfig", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
}


def make_config(name, **more):
    kind, differs = FAMILIES[name]
    return getattr(transformers, kind)(**(_SMALL | differs | more))


def make_models(name, **more):
    """The same weights under leanattn and eager in float32 and under eager in float64."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(make_config(name, **more), attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # logits that say something, sinks that take part
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_()
    lean, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    lean.set_attn_implementation("leanattn")
    if name == "gpt-oss":
        exact.set_experts_implementation("eager")  # the others do not know float64
    return lean, model, exact


def cached(model, cache):
    """The cache as an argument, under the name that this transformers gives it."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def call(model, ids, cache, **more):
    """Logits of a call of a model; cache may be None."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=cache is not None, **cached(model, cache), **more).logits


def generate(model, ids, cache=None, **more):
    more = {"do_sample": False, "max_new_tokens": 24} | more
    return model.generate(ids, **({} if cache is None else cached(model, cache)), **more)


def prompt(batch, tokens, seed=5):
    return torch.randint(2, 257, (batch, tokens), generator=torch.Generator().manual_seed(seed))
