# SPDX-License-Identifier: Apache-2.0
"""A real model: what SmolLM2-135M-Instruct says is the same with leanattn as with eager attention."""

import pathlib
import sys

import pytest

from conftest import framework_or_skip

torch = framework_or_skip("torch")
framework_or_skip("transformers")

import leanattn.hf  # noqa: E402
from hf_models import generate  # noqa: E402

BENCH = pathlib.Path(__file__).parents[2] / "bench"


def test_the_same_text():
    """300 tokens, greedy, float32."""
    if not (BENCH / "smollm2.py").exists():
        pytest.skip("bench/smollm2.py is not beside these tests")
    sys.path.insert(0, str(BENCH))
    import smollm2

    try:
        smollm2.source()
    except ImportError as missing:
        pytest.skip(str(missing))
    leanattn.hf.register()
    model, tokenizer = smollm2.load_model(torch.float32), smollm2.load_tokenizer()
    chat = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper and a whale."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    said = {}
    for attention in ("eager", "leanattn"):
        model.set_attn_implementation(attention)
        cache = leanattn.hf.KVCache(model.config) if attention == "leanattn" else None
        tokens = generate(model, ids, cache, max_new_tokens=300, min_new_tokens=300)
        said[attention] = tokenizer.decode(tokens[0, ids.shape[1] :])
    assert len(said["eager"]) > 600
    assert said["leanattn"] == said["eager"]
