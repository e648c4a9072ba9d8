# SPDX-License-Identifier: Apache-2.0
"""leanattn.hf against transformers' eager attention: logits, greedy tokens, and every way of generating."""

import contextlib
import pathlib

import pytest

from conftest import framework_or_skip

torch = framework_or_skip("torch")
transformers = framework_or_skip("transformers")

import leanattn.hf  # noqa: E402
from hf_models import FAMILIES, WINDOW, cached, call, generate, make_models, prompt  # noqa: E402
from leanattn.hf import KVCache  # noqa: E402

leanattn.hf.register()
FAMILY = pytest.mark.parametrize("name", FAMILIES)
KIND = pytest.mark.parametrize("kind", ["growing", "fixed", "transformers'"])


def make_cache(kind, model, max_len=400):
    if kind == "transformers'":
        return transformers.DynamicCache(config=model.config)
    return KVCache(model.config, max_len if kind == "fixed" else None)


@contextlib.contextmanager
def count_kernel_calls(monkeypatch):
    calls = []
    decode = leanattn.hf._decode

    def counted(*arguments):
        calls.append(arguments[0].shape)
        return decode(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(leanattn.hf, "_decode", counted)
        yield calls


def run(model, ids, cache, cuts, **more):
    """Logits of ids read in pieces that end at the cuts."""
    parts, begin = [], 0
    for end in cuts:
        now = {key: value[:, :end] for key, value in more.items()}
        parts.append(call(model, ids[:, begin:end], cache, **now))
        begin = end
    return torch.cat(parts, 1)


def assert_earned(ours, eager, exact):
    """At most twice eager's own error, and one ulp of the largest logit."""
    ulp = exact.abs().max().item() * torch.finfo(eager.dtype).eps
    error, naive = ((logits.double() - exact).abs().max().item() for logits in (ours, eager))
    assert error <= 2 * naive + ulp, f"error {error:.3e}, eager's {naive:.3e}, ulp {ulp:.1e}"


@FAMILY
@KIND
def test_logits(name, kind, monkeypatch):
    """A prompt longer than a window and than 64 tokens, then steps of one and of several tokens, past the window's room."""
    lean, eager, exact = make_models(name)
    ids = prompt(2, 191)
    cuts = [70, 71, 72, 77, 78, 118, 119, *range(120, 150), 181, 191]
    with count_kernel_calls(monkeypatch) as calls:
        ours = run(lean, ids, make_cache(kind, lean), cuts)
    assert len(calls) == 2 * (len(cuts) - 1)
    assert_earned(ours, run(eager, ids, transformers.DynamicCache(config=eager.config), cuts), call(exact, ids, None))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "opt"])
@KIND
def test_left_padding(name, kind):
    """Each row of a left-padded batch is what it is alone. A padded row sees nothing of its padding."""
    lean, eager, exact = make_models(name)
    ids, keep = prompt(3, 150), torch.ones(3, 150, dtype=torch.long)
    for row, padding in enumerate((3, 0, 66)):
        ids[row, :padding], keep[row, :padding] = 0, 0
    at = (keep.cumsum(1) - 1).clamp(min=0)
    cuts = [80, 81, 82, 86, *range(87, 151)]
    parts, begin = {"ours": [], "eager": []}, 0
    caches = {"ours": make_cache(kind, lean), "eager": transformers.DynamicCache(config=eager.config)}
    for end in cuts:
        more = {"attention_mask": keep[:, :end]} | ({} if name == "opt" else {"position_ids": at[:, begin:end]})
        for who, model in (("ours", lean), ("eager", eager)):
            parts[who].append(call(model, ids[:, begin:end], caches[who], **more))
        begin = end
    alone = [call(exact, ids[row : row + 1, padding:], None)[0] for row, padding in enumerate((3, 0, 66))]
    ours, naive = (torch.cat(parts[who], 1) for who in ("ours", "eager"))
    for row, padding in enumerate((3, 0, 66)):
        assert_earned(ours[row, padding:], naive[row, padding:], alone[row])


@FAMILY
def test_greedy(name):
    """256 tokens. Where they part, float64 has to see a near-tie: both logits closer than twice what eager is off."""
    lean, eager, exact = make_models(name)
    ids = prompt(1, 20)
    ours = generate(lean, ids, KVCache(lean.config), max_new_tokens=256)
    theirs = generate(eager, ids, max_new_tokens=256)
    assert ours.shape == (1, 276)
    differs = (ours != theirs).nonzero()
    if len(differs):
        first = differs[0, 1].item()
        right, naive = (call(model, theirs[:, :first], None)[0, -1] for model in (exact, eager))
        gap = (right[ours[0, first]] - right[theirs[0, first]]).abs().item()
        assert gap <= 4 * (naive.double() - right).abs().max().item(), f"token {first}: the logits are {gap} apart"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["growing", "fixed"])
@pytest.mark.parametrize("how", ["greedy", "sampling", "beams", "beams, sampling", "assisted", "prompt lookup"])
def test_generate(name, kind, how):
    """The same tokens as with eager attention: 60 of them, past the window of 24."""
    lean, eager, _ = make_models(name)
    batch = 1 if how in ("assisted", "prompt lookup") else 3
    ids = prompt(batch, 19)
    ids[:, 10:19] = ids[:, :9]  # something for prompt lookup to find
    keep = torch.ones_like(ids)
    if batch > 1:
        ids[1, :7], keep[1, :7] = 0, 0
    more = {
        "greedy": {},
        "sampling": {"do_sample": True, "top_k": 20},
        "beams": {"num_beams": 4},
        "beams, sampling": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
        "assisted": {"assistant_model": make_models(name, num_hidden_layers=2, intermediate_size=96)[1]},
        "prompt lookup": {"prompt_lookup_num_tokens": 5},
    }[how]
    tokens = []
    for model in (lean, eager):
        torch.manual_seed(3)
        cache = make_cache(kind, model) if model is lean else None
        tokens.append(generate(model, ids, cache, attention_mask=keep, max_new_tokens=60, **more))
    assert torch.equal(*tokens)


@KIND
def test_other_masks_go_to_pytorch(kind, monkeypatch):
    """A hole in the middle and padding at the right are no left padding: eager's logits all the same."""
    lean, eager, exact = make_models("llama")
    ids, keep = prompt(2, 90), torch.ones(2, 90, dtype=torch.long)
    keep[0, 50:53] = 0
    keep[1, 60:] = 0
    keep[1, 80:] = 1
    cuts = [80, 81, 90]
    with count_kernel_calls(monkeypatch) as calls:
        ours = run(lean, ids, make_cache(kind, lean), cuts, attention_mask=keep)
    assert not calls
    naive = run(eager, ids, transformers.DynamicCache(config=eager.config), cuts, attention_mask=keep)
    right = run(exact, ids, transformers.DynamicCache(config=exact.config), cuts, attention_mask=keep)
    assert_earned(ours, naive, right)


def test_what_the_kernel_does_not_take(monkeypatch):
    """float64 and gradients go to PyTorch, decode steps included."""
    lean, eager, exact = make_models("gpt-oss")
    ids = prompt(1, 80)
    with count_kernel_calls(monkeypatch) as calls:
        lean.set_experts_implementation("eager")
        double = run(lean.double(), ids, KVCache(lean.config), [70, 71, 80])
        assert (double - call(exact, ids, None)).abs().max() < 1e-9
        lean, eager, _ = make_models("gemma2")
        losses = [model(input_ids=ids, labels=ids).loss for model in (lean, eager)]
        gradients = [torch.autograd.grad(loss, next(model.parameters())) for loss, model in zip(losses, (lean, eager), strict=True)]
    assert not calls
    assert torch.allclose(gradients[0][0], gradients[1][0], rtol=1e-4, atol=1e-6)


def test_half_precision():
    """bfloat16 end to end, against float64 of the same rounded weights."""
    lean, eager, exact = make_models("llama")
    for model in (lean, eager):
        model.to(torch.bfloat16)
    exact.load_state_dict(lean.double().state_dict())
    lean.to(torch.bfloat16)
    ids, cuts = prompt(2, 120), [70, *range(71, 121)]
    ours = run(lean, ids, KVCache(lean.config), cuts)
    assert_earned(ours, run(eager, ids, transformers.DynamicCache(config=eager.config), cuts), call(exact, ids, None))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_compiled_whole(name):
    """One graph, traced once, for every step of a fixed cache."""
    lean, _, _ = make_models(name)
    ids = prompt(2, 170)
    cuts = [70, *range(71, 80)]
    right = run(lean, ids, KVCache(lean.config, 400), cuts)
    cache, graphs = KVCache(lean.config, 400), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    given = cached(lean, cache)
    whole = torch.compile(lambda ids: lean(input_ids=ids, **given).logits, fullgraph=True, backend=backend, dynamic=False)
    parts = [call(lean, ids[:, :70], cache)]
    with torch.no_grad():
        parts += [whole(ids[:, end - 1 : end]) for end in cuts[1:]]
    assert len(graphs) == 1
    assert torch.allclose(torch.cat(parts, 1), right, rtol=0, atol=1e-5)


def test_window_of_one_block_is_all_that_stays():
    """What a layer with a window takes does not grow with the context."""
    lean, _, _ = make_models("mistral")
    sizes = {}
    for tokens in (100, 900):
        for kind in ("growing", "fixed"):
            cache = make_cache(kind, lean, 1000)
            run(lean, prompt(1, tokens), cache, [80, *range(81, tokens + 1)])
            sizes[kind, tokens] = cache.nbytes
    token = 2 * 2 * 2 * 32 * 4  # K and V, layers, heads, head_dim, float32
    kept = WINDOW - 1 + 64
    assert sizes["growing", 900] <= (kept + 64) * token
    assert sizes["fixed", 900] == 2 * kept * token == sizes["fixed", 100]


def test_compiled_in_place():
    """The code for a step makes nothing of a cache's size: new tokens are written where they stay, and the kernel reads them there."""
    from torch._inductor.utils import run_and_get_code

    layer, size = leanattn._hf_cache.FixedLayer(7777), "7777"
    q, new = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 1, 32)
    layer.lazy_initialization(new, new)

    def step(q, k, v):
        bounds = leanattn.hf.mask(1, 1, *layer.get_mask_sizes(1)[:1], q_offset=layer.get_seq_length())
        return leanattn.hf.attention(None, q, *layer.update(k, v), bounds)[0]

    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(step, fullgraph=True, dynamic=False), q, new, 2 * new)
    made = [line for text in code for line in text.splitlines() if "empty_strided" in line]
    assert any(size in text for text in code) and not any(size in line for line in made)
    assert layer.values[0, 0, 0].equal(2 * new[0, 0, 0]) and layer.values[0, 0, 1:].abs().max() == 0


@pytest.mark.filterwarnings("error")
def test_the_snippet_of_the_docs_runs_without_a_warning(tmp_path):
    make_models("llama")[0].save_pretrained(tmp_path)
    docs = pathlib.Path(__file__).parents[2] / "docs" / "huggingface.md"
    snippet = docs.read_text().split("```python\n")[1].split("```")[0]
    known = {"name": tmp_path, "inputs": {"input_ids": prompt(1, 20)}}
    exec(snippet, known)
    assert known["tokens"].shape == (1, 120)


def test_fuse_refuses_the_cpu_and_other_models():
    """It says why, with Triton or without, and the model stays what it was: the same bits, and the names of the weights."""
    model, _, _ = make_models("llama")
    ids, cuts = prompt(1, 60), [50, *range(51, 61)]
    names, right = list(model.state_dict()), run(model, ids, KVCache(model.config, 400), cuts)
    with pytest.raises(ValueError, match=r"^fuse: weights on cpu; supported is a GPU, with CUDA$"):
        leanattn.hf.fuse(model)
    assert list(model.state_dict()) == names
    assert torch.equal(run(model, ids, KVCache(model.config, 400), cuts), right)
    for name, words in (("qwen2", "Qwen2DecoderLayer; supported are"), ("mistral", "a sliding window")):
        with pytest.raises(ValueError, match=words):
            leanattn.hf.fuse(make_models(name)[0])
