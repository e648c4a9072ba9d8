# SPDX-License-Identifier: Apache-2.0
"""The call shapes of FlashAttention and FlashInfer: shapes, defaults and meanings are theirs, values are the reference's."""

import inspect

import numpy as np
import pytest

import leanattn
from check import assert_close, make_problem
from conftest import framework_or_skip
from test_frameworks import from_torch, to_torch

ARRAYS = {"numpy": (np.asarray, np.asarray), "torch": (to_torch, from_torch)}


@pytest.fixture(params=ARRAYS)
def arrays(request):
    framework_or_skip(request.param)
    return ARRAYS[request.param]


@pytest.mark.parametrize("layout", ["batched", "paged"])
@pytest.mark.parametrize(
    "rules", [{}, {"causal": True}, {"window_size": (20, 0)}, {"softcap": 5.0}, {"softmax_scale": 0.3}, {"num_splits": 3}]
)
def test_flash_attn_with_kvcache(rng, arrays, layout, rules):
    convert, back = arrays
    problem = make_problem(rng, layout=layout, dtype="bfloat16", q_len=4)
    table = problem.rules.get("block_table")
    out, lse = leanattn.flash_attn_with_kvcache(
        convert(problem.q),
        convert(problem.k),
        convert(problem.v),
        cache_seqlens=convert(problem.rules["kv_lens"]),
        block_table=None if table is None else convert(table),
        return_softmax_lse=True,
        **rules,
    )
    problem.rules |= {
        "causal": rules.get("causal", False) or "window_size" in rules,
        "window_left": rules.get("window_size", (-1, -1))[0],
        "softcap": rules.get("softcap", 0.0),
        "scale": rules.get("softmax_scale"),
    }
    assert lse.shape == (3, 6, 4)
    assert_close(back(out), back(lse).swapaxes(1, 2), problem.right(), "bfloat16")


@pytest.mark.parametrize("layout", ["batched", "paged"])
def test_flash_attn_appends_in_place(rng, arrays, layout):
    convert, back = arrays
    full = make_problem(rng, layout=layout, kv_lens=(70, 5, 48), q_len=3)
    lens, new = full.rules["kv_lens"], 3
    k_new, v_new = np.empty((3, new, 2, 64), np.float32), np.empty((3, new, 2, 64), np.float32)
    k_before, v_before = full.k.copy(), full.v.copy()
    for seq in range(3):
        for i in range(new):
            token = lens[seq] - new + i
            at = (seq, token) if layout == "batched" else (full.rules["block_table"][seq, token // 16], token % 16)
            k_new[seq, i], v_new[seq, i] = full.k[at], full.v[at]
            k_before[at] = v_before[at] = np.nan
    k_cache, v_cache, before = convert(k_before), convert(v_before), convert(lens - new)
    table = None if layout == "batched" else convert(full.rules["block_table"])
    out = leanattn.flash_attn_with_kvcache(
        convert(full.q), k_cache, v_cache, convert(k_new), convert(v_new), cache_seqlens=before, block_table=table, causal=True
    )
    assert_close(back(out), None, full.right(), "float32")
    np.testing.assert_array_equal(back(k_cache), full.k)
    np.testing.assert_array_equal(back(v_cache), full.v)
    np.testing.assert_array_equal(back(before), lens - new)


def test_flash_attn_cache_batch_idx_and_one_length(rng, arrays):
    convert, back = arrays
    problem = make_problem(rng, kv_lens=(40, 40, 40), q_len=2)
    rows = np.array([2, 0], np.int32)
    out = leanattn.flash_attn_with_kvcache(
        convert(problem.q[:2]), convert(problem.k), convert(problem.v), cache_seqlens=31, cache_batch_idx=convert(rows)
    )
    right = leanattn.reference(problem.q[:2], problem.k[rows], problem.v[rows], kv_lens=[31, 31], causal=False)
    assert_close(back(out), None, right, "float32")
    whole = leanattn.flash_attn_with_kvcache(convert(problem.q), convert(problem.k[:, :40]), convert(problem.v[:, :40]))
    right = leanattn.reference(problem.q, problem.k, problem.v, kv_lens=[40] * 3, causal=False)
    assert_close(back(whole), None, right, "float32")


@pytest.fixture
def options_seen(monkeypatch):
    """The options of each native call."""
    seen, native = [], leanattn._api._native
    monkeypatch.setattr(leanattn._api, "_native", lambda options: (seen.append(options), native(options))[1])
    return seen


@pytest.mark.parametrize("num_splits", [0, 3])
def test_flash_attn_passes_options_on(rng, options_seen, num_splits):
    problem = make_problem(rng, q_len=2)
    options = leanattn.Options(batch_invariant=True, workers=2)
    rules = {"cache_seqlens": problem.rules["kv_lens"], "num_splits": num_splits}
    out = leanattn.flash_attn_with_kvcache(problem.q, problem.k, problem.v, options=options, **rules)
    used = options_seen[-1]
    assert (used.batch_invariant, used.workers, used.splits) == (True, 2, num_splits)
    assert used.policy == ("flashdecoding" if num_splits else "lean")
    assert_close(out, None, problem.right(causal=False), "float32")


def new_tokens(*shape):
    return {"k": np.zeros(shape, np.float32), "v": np.zeros(shape, np.float32), "cache_seqlens": 5}


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"rotary_cos": np.zeros(3)}, "apply the embedding to q and k before the call"),
        ({"cache_leftpad": np.zeros(3)}, "cache_leftpad: supported is None"),
        ({"window_size": (3, 2)}, r"window_size \(3, 2\): the right side is -1 or 0"),
        ({"k": np.zeros((3, 1, 2, 64), np.float32)}, "k and v: both or none"),
        ({"k": np.zeros((3, 1, 2, 64), np.float32), "v": np.zeros((3, 1, 2, 64), np.float32)}, "k and v without cache_seqlens"),
        (
            {"k": np.zeros((3, 4, 2, 64), np.float32), "v": np.zeros((3, 4, 2, 64), np.float32), "cache_seqlens": [1, 130, 2]},
            "seq 1: kv_len 130 and 4 new tokens are outside 0 to 133, the room of the cache",
        ),
        (new_tokens(2, 1, 2, 64), r"k of shape \[2, 1, 2, 64\]: batch 3 of q is needed"),
        (new_tokens(3, 1, 2, 64) | {"v": np.zeros((2, 1, 2, 64), np.float32)}, r"v of shape .* = \[3, 1, 2, 64\] is needed"),
        (new_tokens(3, 2, 64), r"k of shape \[3, 2, 64\]: an array \[batch, new tokens, kv_heads, d\] is needed"),
        (new_tokens(3, 1, 2, 64) | {"k": [1.0]}, r"k is a list: an array \[batch, new tokens, kv_heads, d\] is needed"),
        ({"q": np.zeros((3, 6, 64), np.float32)}, r"q of shape \[3, 6, 64\]: an array \[batch, q_len, q_heads, d\] is needed"),
        ({"q": [1.0]}, "q is a list: an array"),
        ({"k_cache": np.zeros((133, 2, 64), np.float32)}, r"k_cache of shape \[133, 2, 64\]: an array \[batch, n, kv_heads, d\] or"),
        ({"k_cache": np.zeros((2, 133, 2, 64), np.float32)}, r"k_cache of shape \[2, 133, 2, 64\]: batch 3 of q is needed"),
        ({"k_cache": np.zeros((3, 133, 2, 32), np.float32)}, r"k_cache of shape \[3, 133, 2, 32\]: head_dim 64 of q is needed"),
        ({"k_cache": np.zeros((3, 133, 2, 64), np.float16)}, "k_cache of float16: float32 is needed, as q is"),
        ({"v_cache": np.zeros((3, 132, 2, 64), np.float32)}, r"v_cache of shape .*: all but its last dimension as in k_cache, \[3, 133, 2"),
        ({"cache_seqlens": np.zeros(3, np.int64)}, "cache_seqlens of int64: int32 is needed"),
        ({"cache_seqlens": np.zeros(2, np.int32)}, r"cache_seqlens of shape \[2\]: \[batch\] = \[3\] is needed"),
        ({"cache_seqlens": [1, 2, 2.5]}, r"cache_seqlens\[2\] is 2.5: an integer of 32 bits is needed"),
        ({"cache_seqlens": 2**40}, r"cache_seqlens\[0\] is 1099511627776: an integer"),
        ({"cache_seqlens": 1.5}, "cache_seqlens is a float: an int32 array"),
        ({"cache_seqlens": True}, "cache_seqlens is a bool: an int32 array"),
        ({"cache_batch_idx": np.zeros(3, np.int64)}, "cache_batch_idx of int64: int32 is needed"),
        ({"cache_batch_idx": np.zeros((3, 1), np.int32)}, r"cache_batch_idx of shape \[3, 1\]: \[batch\] = \[3\] is needed"),
        ({"block_table": np.zeros((3, 1), np.int64)}, "block_table of int64: int32 is needed"),
        ({"block_table": [[0.7]] * 3}, r"block_table\[0\]\[0\] is 0.7: an integer"),
        ({"softcap": None}, "softcap None: a number is needed"),
        ({"options": "lean"}, "options is a str: leanattn.Options is needed"),
        ({"num_splits": 2, "options": leanattn.Options(policy="fa2")}, "num_splits 2 with options of policy fa2: one of them"),
    ],
)
def test_flash_attn_refuses(rng, rules, sentence):
    problem = make_problem(rng, q_len=2)
    before = problem.k.copy()
    with pytest.raises(ValueError, match=sentence):
        leanattn.flash_attn_with_kvcache(**{"q": problem.q, "k_cache": problem.k, "v_cache": problem.v} | rules)
    np.testing.assert_array_equal(problem.k, before)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append_kv(rng, arrays, kv_layout):
    """Token by token into pages, against the same tokens laid down at once."""
    convert, back = arrays
    problem = make_problem(rng, layout="paged", kv_lens=(37, 2), kv_layout=kv_layout)
    cache = convert(np.zeros_like(problem.k)), convert(np.zeros_like(problem.v))
    dense = [problem.k, problem.v]
    if kv_layout == "HND":
        dense = [array.transpose(0, 2, 1, 3) for array in dense]
    table, lens = problem.rules["block_table"], problem.rules["kv_lens"]
    for token in range(37):
        active = [seq for seq in range(2) if token < lens[seq]]
        new = [np.stack([array[table[seq, token // 16], token % 16] for seq in active])[:, None] for array in dense]
        leanattn.append_kv(
            convert(new[0]),
            convert(new[1]),
            *cache,
            convert(np.full(len(active), token, np.int32)),
            block_table=convert(table[active]),
            kv_layout=kv_layout,
        )
    rules = {name: convert(value) if isinstance(value, np.ndarray) else value for name, value in problem.rules.items()}
    o = leanattn.decode_paged(convert(problem.q), *cache, rules.pop("block_table"), rules.pop("kv_lens"), **rules)
    np.testing.assert_array_equal(back(o), problem.run())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"v": np.ones((2, 3, 1, 64), np.float32)}, r"v of shape \[2, 3, 1, 64\]: .* = \[2, 3, 2, 64\] is needed"),
        ({"v": np.ones((2, 1, 2, 64), np.float32)}, r"v of shape \[2, 1, 2, 64\]"),
        ({"k": np.ones((2, 2, 64), np.float32)}, r"k of shape \[2, 2, 64\]"),
        ({"k": np.ones((2, 3, 2, 64))}, "k of float64: float32 is needed, as k_cache is"),
        ({"kv_lens": [2**31 - 1, 4]}, "seq 0: kv_len 2147483647 and 3 new tokens are outside 0 to 16"),
        ({"kv_lens": [0, 1.5]}, r"kv_lens\[1\] is 1.5: an integer of 32 bits is needed"),
        ({"v": [1.0]}, r"v is a list: an array \[batch, new tokens"),
        (
            {"k": np.ones((3, 3, 2, 64), np.float32), "v": np.ones((3, 3, 2, 64), np.float32), "kv_lens": [0, 4, 1]},
            r"k of shape \[3, 3, 2, 64\]: at most batch 2 of k_cache",
        ),
        ({"kv_lens": 3}, "kv_lens is a int: an int32 array"),
        ({"kv_lens": [0, 14]}, "seq 1: kv_len 14 and 3 new tokens"),
    ],
)
def test_append_kv_refuses_what_does_not_fit_and_writes_nothing(changes, sentence):
    cache = np.zeros((2, 16, 2, 64), np.float32)
    new = np.ones((2, 3, 2, 64), np.float32)
    arguments = {"k": new, "v": new, "kv_lens": [0, 4]} | changes
    with pytest.raises(ValueError, match=sentence), np.errstate(over="ignore"):
        leanattn.append_kv(arguments["k"], arguments["v"], cache, cache, arguments["kv_lens"])
    assert (cache == 0).all()


def test_append_kv_refuses_a_page_that_is_not_there():
    cache = np.zeros((4, 16, 2, 64), np.float32)
    new = np.ones((1, 1, 2, 64), np.float32)
    with pytest.raises(ValueError, match="seq 0 slot 1: page -7 is outside num_pages 4"):
        leanattn.append_kv(new, new, cache, cache, [16], block_table=np.array([[2, -7]], np.int32))
    assert (cache == 0).all()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("one_array", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_flashinfer_wrapper(rng, arrays, kv_layout, one_array, graph):
    convert, back = arrays
    wrapper = None
    for kv_lens in ((70, 5, 48), (3, 100, 17)):
        problem = make_problem(rng, layout="paged", dtype="float16", kv_lens=kv_lens, kv_layout=kv_layout)
        pages = [-(-length // 16) for length in kv_lens]
        indptr = np.cumsum([0, *pages]).astype(np.int32)
        indices = np.concatenate([problem.rules["block_table"][seq, : pages[seq]] for seq in range(3)])
        last = np.array([(length - 1) % 16 + 1 for length in kv_lens], np.int32)
        if wrapper is None:
            buffers = {"paged_kv_indptr_buffer": convert(indptr), "paged_kv_indices_buffer": convert(np.zeros(64, np.int32))}
            wrapper = leanattn.BatchDecodeWithPagedKVCacheWrapper(None, kv_layout, use_cuda_graph=graph, **(buffers if graph else {}))
        wrapper.plan(convert(indptr), convert(indices), convert(last), 6, 2, 64, 16, logits_soft_cap=5.0, window_left=30)
        cache = (convert(problem.k), convert(problem.v))
        if one_array:
            cache = convert(np.stack([problem.k, problem.v], axis=1))
        out, lse = wrapper.run(convert(problem.q), cache, return_lse=True)
        problem.rules |= {"softcap": 5.0, "window_left": 30}
        assert_close(back(out), back(lse), problem.right(lse_base=2), "float16")


def test_flashinfer_wrapper_refuses(rng):
    wrapper = leanattn.BatchDecodeWithPagedKVCacheWrapper()
    q, cache = np.zeros((1, 4, 64), np.float32), np.zeros((2, 16, 2, 64), np.float32)
    with pytest.raises(ValueError, match="run before plan"):
        wrapper.run(q, (cache, cache))
    pages = np.array([0, 2], np.int32), np.array([1, 0], np.int32), np.array([3], np.int32)
    with pytest.raises(ValueError, match="pos_encoding_mode ROPE_LLAMA: supported is NONE"):
        wrapper.plan(*pages, 4, 2, 64, 16, "ROPE_LLAMA")
    wrapper.plan(*pages, 4, 4, 64, 16)
    with pytest.raises(ValueError, match=r"q_scale None, k_scale 0\.5, v_scale None: supported are None and 1"):
        wrapper.run(q, (cache, cache), k_scale=0.5)
    with pytest.raises(ValueError, match=r"\(4, 2, 64, 16\): plan was told \(4, 4, 64, 16\)"):
        wrapper.run(q, (cache, cache))
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer and paged_kv_indices_buffer are needed"):
        leanattn.BatchDecodeWithPagedKVCacheWrapper(use_cuda_graph=True)


def planned(**rules):
    """A wrapper with a plan for one sequence of 19 tokens, and the arguments of its run."""
    rng = np.random.default_rng(3)
    q, cache = rng.standard_normal((1, 4, 64), np.float32), rng.standard_normal((2, 2, 16, 2, 64), np.float32)
    wrapper = leanattn.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(np.array([0, 2], np.int32), np.array([1, 0], np.int32), np.array([3], np.int32), 4, 2, 64, 16, **rules)
    return wrapper, (q, cache)


def test_flashinfer_plan_has_the_order_of_flashinfer():
    """Every argument by its place, sm_scale among them."""
    names = "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode window_left logits_soft_cap "
    names += "q_data_type kv_data_type o_data_type data_type sm_scale rope_scale rope_theta non_blocking block_tables seq_lens "
    names += "fixed_split_size disable_split_kv q_len_per_req"
    wrapper, arguments = planned(sm_scale=0.3, window_left=9, logits_soft_cap=4.0)
    parameters = inspect.signature(wrapper.plan).parameters.values()
    assert [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY] == names.split()
    right = wrapper.run(*arguments)
    pages = np.array([0, 2], np.int32), np.array([1, 0], np.int32), np.array([3], np.int32)
    types = ("float32", "float32", "float32", None)
    wrapper.plan(*pages, 4, 2, 64, 16, "NONE", 9, 4.0, *types, 0.3, 1.0, 1e4, True, None, None, None, False, 1)
    np.testing.assert_array_equal(wrapper.run(*arguments), right)


@pytest.mark.parametrize("o_data_type", [None, "float32", "float", np.float32, np.dtype(np.float32)])
def test_flashinfer_o_data_type_is_that_of_q(o_data_type):
    wrapper, arguments = planned(o_data_type=o_data_type, data_type="float16")
    assert wrapper.run(*arguments).dtype == np.float32


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"o_data_type": "bfloat16", "q_data_type": np.float32}, "o_data_type bfloat16: float32 is needed, as q_data_type is"),
        ({"block_tables": np.zeros((1, 2), np.int32)}, r"block_tables of shape \[1, 2\]: supported is None; the pages are those of indptr"),
        ({"seq_lens": np.zeros(1, np.int32)}, r"seq_lens of shape \[1\]: supported is None"),
        ({"fixed_split_size": 4}, "fixed_split_size 4: supported is None and -1"),
        ({"disable_split_kv": True}, "disable_split_kv True: supported is False"),
        ({"q_len_per_req": 2}, "q_len_per_req 2: supported is 1; leanattn.decode_paged takes several tokens"),
        ({"window_right": 3}, "window_right 3: supported is 0 and -1"),
    ],
)
def test_flashinfer_plan_refuses_what_it_has_no_counterpart_for(rules, sentence):
    with pytest.raises(ValueError, match=sentence):
        planned(**rules)


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"window_left": 8}, "window_left 8: plan was told 9"),
        ({"q_len_per_req": 2}, "q_len_per_req 2: supported is None and 1"),
        ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor 1.0: supported is None; attention is exact"),
        ({"kv_cache_sf": np.zeros(3)}, r"kv_cache_sf of shape \[3\]: supported is None"),
    ],
)
def test_flashinfer_run_refuses_what_it_has_no_counterpart_for(rules, sentence):
    wrapper, arguments = planned(window_left=9)
    with pytest.raises(ValueError, match=sentence):
        wrapper.run(*arguments, **rules)
    wrapper.run(*arguments, **({"window_left": 9} | dict.fromkeys(rules)))
    wrapper, arguments = planned(o_data_type="bfloat16")
    with pytest.raises(ValueError, match="o_data_type bfloat16 of plan: float32 is needed, as q is"):
        wrapper.run(*arguments)
    with pytest.raises(ValueError, match="jit_args 'a': supported is None"):
        leanattn.BatchDecodeWithPagedKVCacheWrapper(jit_args="a")


def test_flashinfer_forward_has_rules_of_its_own():
    wrapper, arguments = planned(window_left=5, sm_scale=0.3)
    out, lse = wrapper.run_return_lse(*arguments)
    np.testing.assert_array_equal(out, wrapper.run(*arguments))
    assert lse.shape == (1, 4)
    plain, plain_arguments = planned()
    right = plain.run(*plain_arguments, return_lse=True)
    for got, expected in zip(wrapper.forward_return_lse(*arguments), right, strict=True):
        np.testing.assert_array_equal(got, expected)
    capped, _ = planned(window_left=7, logits_soft_cap=2.0, sm_scale=0.2)
    got = wrapper.forward(*arguments, window_left=7, logits_soft_cap=2.0, sm_scale=0.2)
    np.testing.assert_array_equal(got, capped.run(*arguments))
    with pytest.raises(ValueError, match="pos_encoding_mode ALIBI: supported is NONE"):
        wrapper.forward(*arguments, "ALIBI")


def test_flashinfer_options_and_pdl(options_seen):
    options = leanattn.Options(batch_invariant=True)
    wrapper = leanattn.BatchDecodeWithPagedKVCacheWrapper(options=options)
    wrapper.plan(np.array([0, 1], np.int32), np.array([0], np.int32), np.array([3], np.int32), 4, 2, 64, 16)
    arguments = np.zeros((1, 4, 64), np.float32), np.zeros((2, 2, 16, 2, 64), np.float32)
    for enable_pdl, used in ((None, False), (True, True), (False, False), (True, True)):
        wrapper.run(*arguments, enable_pdl=enable_pdl)
        assert options_seen[-1].batch_invariant and options_seen[-1].programmatic_launch is used
    with pytest.raises(ValueError, match="options is a str"):
        leanattn.BatchDecodeWithPagedKVCacheWrapper(options="lean")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"last": [3, 9, 0]}, "seq 2: last_page_len 0 is outside 1 to 16, the page size"),
        ({"last": [17, 9, 4]}, "seq 0: last_page_len 17 is outside 1 to 16"),
        ({"last": [3, 4]}, r"last_page_len of shape \[2\]: \[batch\] = \[3\] is needed"),
        ({"last": [3.5, 4, 1]}, "last_page_len of float64: int32 is needed"),
        ({"indptr": [1, 2, 2, 3]}, "indptr: offsets that rise from 0 to at most 3, the length of indices, are needed"),
        ({"indptr": [0, 2, 1, 3]}, "indptr: offsets that rise from 0"),
        ({"indptr": [0, 2, 2, 4]}, "indptr: offsets that rise from 0 to at most 3"),
        ({"indptr": [[0, 3]]}, r"indptr of shape \[1, 2\]: an int32 array \[batch \+ 1\] is needed"),
        ({"indices": [0.0, 1.0, 2.0]}, "indices of float64: int32 is needed"),
        ({"page_size": 0}, "page_size 0: a whole number above 0 is needed"),
    ],
)
def test_flashinfer_plan_looks_at_the_pages(arrays, changes, sentence):
    convert, _ = arrays
    given = {"indptr": [0, 2, 2, 3], "indices": [1, 0, 2], "last": [3, 9, 4], "page_size": 16}

    def plan(**changes):
        now = given | changes
        pages = [convert(np.array(now[name], np.float64 if "." in str(now[name]) else np.int32)) for name in ("indptr", "indices", "last")]
        wrapper.plan(*pages, 4, 2, 64, now["page_size"])

    wrapper = leanattn.BatchDecodeWithPagedKVCacheWrapper()
    for unused in (0, -1, 99):  # a sequence without pages has no last page
        plan(last=[3, unused, 4])
    assert wrapper._lens.tolist() == [19, 0, 4]
    with pytest.raises(ValueError, match=sentence.replace("float64", "(torch.)?float64")):
        plan(**changes)
    assert wrapper._lens.tolist() == [19, 0, 4]
