# SPDX-License-Identifier: Apache-2.0
"""leanattn.hf on a GPU, in bfloat16: against float64 with eager attention as the measure, and in CUDA graphs."""

import pytest

from conftest import cuda_or_skip, framework_or_skip

torch = cuda_or_skip()
transformers = framework_or_skip("transformers")

import leanattn.hf  # noqa: E402
from hf_models import cached, call, make_models, prompt  # noqa: E402
from leanattn.hf import KVCache  # noqa: E402
from test_hf import assert_earned, run  # noqa: E402

leanattn.hf.register()


def models_on_gpu(name):
    """float64 holds the weights that bfloat16 has."""
    lean, eager, exact = (model.cuda() for model in make_models(name))
    lean.to(torch.bfloat16)
    exact.load_state_dict(lean.double().state_dict())
    return lean.to(torch.bfloat16), eager.to(torch.bfloat16), exact


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("max_len", [None, 400], ids=["growing", "fixed"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left-padded"])
def test_logits(name, max_len, padded):
    lean, eager, exact = models_on_gpu(name)
    ids, cuts, paddings = prompt(2, 150).cuda(), [70, 71, 76, *range(77, 151)], (9, 0) if padded else (0, 0)
    keep = torch.ones_like(ids)
    keep[0, : paddings[0]] = 0
    at = (keep.cumsum(1) - 1).clamp(min=0)
    logits = []
    for model, cache in ((lean, KVCache(lean.config, max_len)), (eager, transformers.DynamicCache(config=eager.config))):
        parts, begin = [], 0
        for end in cuts:
            more = {"attention_mask": keep[:, :end]} if padded else {}
            parts.append(call(model, ids[:, begin:end], cache, position_ids=at[:, begin:end], **more))
            begin = end
        logits.append(torch.cat(parts, 1))
    for row, padding in enumerate(paddings):
        right = call(exact, ids[row : row + 1, padding:], None)[0]
        assert_earned(logits[0][row, padding:], logits[1][row, padding:], right)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cuda_graphs(name):
    """Steps replayed as one graph give what they give one by one, at every length."""
    lean, _, _ = models_on_gpu(name)
    ids, cuts = prompt(2, 100).cuda(), [70, *range(71, 101)]
    right = run(lean, ids, KVCache(lean.config, 400), cuts)
    cache = KVCache(lean.config, 400)
    given = cached(lean, cache)
    whole = torch.compile(lambda ids: lean(input_ids=ids, **given).logits, fullgraph=True, mode="reduce-overhead", dynamic=False)
    parts = [call(lean, ids[:, :70], cache)]
    with torch.no_grad():
        for end in cuts[1:]:
            torch.compiler.cudagraph_mark_step_begin()
            parts.append(whole(ids[:, end - 1 : end].clone()).clone())
    largest = right.abs().max().item()
    assert (torch.cat(parts, 1) - right).abs().max().item() <= 2**-6 * largest  # fused differently: a few roundings of bfloat16
