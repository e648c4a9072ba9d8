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


def replayed(model, ids, cache, cuts):
    """As run(), the steps as one graph."""
    given = cached(model, cache)
    whole = torch.compile(lambda ids: model(input_ids=ids, **given).logits, fullgraph=True, mode="reduce-overhead", dynamic=False)
    parts = [call(model, ids[:, : cuts[0]], cache)]
    with torch.no_grad():
        for end in cuts[1:]:
            torch.compiler.cudagraph_mark_step_begin()
            parts.append(whole(ids[:, end - 1 : end].clone()).clone())
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cuda_graphs(name):
    """Steps replayed as one graph, at every length."""
    lean, eager, exact = models_on_gpu(name)
    ids, cuts = prompt(2, 100).cuda(), [70, *range(71, 101)]
    ours = replayed(lean, ids, KVCache(lean.config, 400), cuts)
    assert_earned(ours, run(eager, ids, transformers.DynamicCache(config=eager.config), cuts), call(exact, ids, None))


@pytest.mark.parametrize("padded", [False, True], ids=["even", "left-padded"])
def test_values_narrower_than_keys(padded):
    """They go to the kernel: the mask that it takes is not one that PyTorch's attention does."""
    batch, n, lens, first = 2, 300, (300, 171) if not padded else (291, 171), (0, 0) if not padded else (9, 129)
    q = torch.randn(batch, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, n, 2, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for d in (128, 64))
    bounds = torch.tensor([first, lens] if padded else [lens], dtype=torch.int32, device="cuda")[:, None, None]
    assert leanattn.hf._takes(q, k, v)
    out = leanattn.hf.attention(None, q, k, v, bounds, scaling=0.125)[0]
    assert out.shape == (batch, 1, 8, 64)
    for row in range(batch):
        seen = slice(first[row], first[row] + lens[row])
        keys, values = (t[row, :, seen].double().repeat_interleave(4, 0) for t in (k, v))
        right = torch.softmax(q[row].double() @ keys.transpose(1, 2) * 0.125, -1) @ values
        assert (out[row, 0].double() - right[:, 0]).abs().max().item() <= 2**-8


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_fused(graphs):
    """fuse: a prompt and steps, one by one and replayed as one graph, within the error that eager attention has."""
    lean, eager, exact = models_on_gpu("llama")
    ids, cuts = prompt(1, 100).cuda(), [70, *range(71, 101)]
    plain = run(lean, ids, KVCache(lean.config, 400), cuts)
    names = list(lean.state_dict())
    assert leanattn.hf.fuse(lean) is lean and list(lean.state_dict()) == names
    cache = KVCache(lean.config, 400)
    fused = (replayed if graphs else run)(lean, ids, cache, cuts)
    assert not torch.equal(fused[:, 70:], plain[:, 70:])  # other kernels ran
    assert_earned(fused[0], run(eager, ids, transformers.DynamicCache(config=eager.config), cuts)[0], call(exact, ids, None)[0])
    assert cache.get_seq_length() == 100
    growing = run(lean, ids, KVCache(lean.config), cuts)  # goes where it went
    assert_earned(growing[0], run(eager, ids, transformers.DynamicCache(config=eager.config), cuts)[0], call(exact, ids, None)[0])
