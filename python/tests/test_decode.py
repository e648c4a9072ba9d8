# SPDX-License-Identifier: Apache-2.0
"""decode and decode_paged on NumPy arrays against the float64 reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import leanattn
from check import DTYPES, assert_close, make_problem


@st.composite
def problems(draw):
    """Shapes, dtypes, layouts, masks and logit rules in any combination."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kv_heads = draw(st.integers(1, 4))
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    kv_lens = draw(st.lists(st.integers(0, 300), min_size=0, max_size=4))
    layout = draw(st.sampled_from(["batched", "ragged", "paged"]))
    arguments = {
        "layout": layout,
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "kv_lens": kv_lens,
        "q_heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([32, 64, 72, 128])),
        "head_dim_v": draw(st.sampled_from([None, 32, 64])),
        "kv_layout": draw(st.sampled_from(["NHD", "HND"])),
        "page_size": draw(st.sampled_from([1, 5, 16, 64])),
        "causal": draw(st.booleans()),
        "window_left": draw(st.sampled_from([-1, -1, 0, 20, 200])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])),
    }
    if draw(st.booleans()):
        arguments["q_lens"] = [draw(st.integers(0, 5)) for _ in kv_lens]
        tokens, longest = sum(arguments["q_lens"]), max(arguments["q_lens"], default=0)
    else:
        arguments["q_len"] = draw(st.sampled_from([1, 1, 3, 8]))
        tokens, longest = len(kv_lens) * arguments["q_len"], arguments["q_len"]
    if draw(st.booleans()):
        arguments["alibi_slopes"] = rng.random(kv_heads * group, np.float32)
    if draw(st.booleans()):
        arguments["sinks"] = rng.standard_normal(kv_heads * group).astype(np.float32)
    if draw(st.booleans()):
        arguments["tree_mask"] = rng.integers(0, 2**63, (tokens, -(-longest // 64)), np.uint64)
    return make_problem(rng, **arguments), arguments["dtype"]


@given(problems(), st.sampled_from(["e", 2]), st.sampled_from(["lean", "fa2", "flashdecoding"]), st.booleans())
def test_any_problem_is_within_its_earned_tolerance(drawn, lse_base, policy, batch_invariant):
    problem, dtype = drawn
    right = problem.right(lse_base=lse_base)
    options = leanattn.Options(policy=policy, batch_invariant=batch_invariant, workers=3)
    o, lse = problem.run(return_lse=True, lse_base=lse_base, options=options)
    assert o.dtype == DTYPES[dtype] and lse.dtype == np.float32
    if problem.rules.get("sinks") is None:
        assert_close(o, lse, right, dtype, problem.q_lens)
    else:
        assert_close(o, None, right, dtype, problem.q_lens)
        np.testing.assert_allclose(lse, right.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["batched", "ragged", "paged"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_layouts_and_dtypes(rng, dtype, layout, kv_layout):
    problem = make_problem(rng, layout=layout, dtype=dtype, kv_layout=kv_layout)
    o, lse = problem.run(return_lse=True)
    assert_close(o, lse, problem.right(), dtype)
    assert (o[1] == 0).all() and np.isneginf(lse[1]).all(), "the empty sequence"


def formula(q, k, v, kv_len, token, q_len, head, rules):
    """One row as the formulas stand: (o, lse). q [d], k and v [tokens, d] of its KV head; token of the q_len last ones."""
    position, t = kv_len - q_len + token, np.arange(kv_len)
    logits = rules.get("scale", 1 / np.sqrt(len(q))) * (k[:kv_len].astype(float) @ q.astype(float))
    if "softcap" in rules:
        logits = rules["softcap"] * np.tanh(logits / rules["softcap"])
    if "alibi_slopes" in rules:
        logits -= rules["alibi_slopes"][head] * np.abs(position - t)
    seen = t >= position - rules["window_left"] if "window_left" in rules else t >= 0
    if rules.get("causal", True):
        seen &= t <= position
    if "tree_mask" in rules:
        new = t - (kv_len - q_len)
        seen &= (new < 0) | (int(rules["tree_mask"][token, 0]) >> np.maximum(new, 0) & 1).astype(bool)
    weights = np.where(seen, np.exp(logits), 0)
    total = weights.sum() + (np.exp(rules["sinks"][head].astype(float)) if "sinks" in rules else 0)
    return weights @ v[:kv_len].astype(float) / total, np.log(total)


RULES = {
    "none": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "not causal": {"causal": False},
    "window": {"window_left": 9},
    "alibi": {"alibi_slopes": np.array([0.1, 0.5, 0.02, 0.3], np.float32)},
    "sinks": {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)},
    "tree": {"tree_mask": np.array([[0b001], [0b011], [0b101]], np.uint64)},
}


@pytest.mark.parametrize("layout", ["batched", "ragged", "paged"])
@pytest.mark.parametrize("name", RULES)
def test_each_rule_against_its_formula(rng, layout, name):
    """decode and the reference, which take their arguments through the same code, against NumPy, which does not."""
    rules = RULES[name]
    problem = make_problem(rng, layout=layout, kv_lens=(40,), q_heads=4, kv_heads=2, head_dim=32, q_len=3, **rules)
    o, lse = problem.run(return_lse=True)
    right = problem.right()
    k, v = problem.k, problem.v
    if layout == "paged":
        k, v = (array[problem.rules["block_table"][0, :3]].reshape(48, 2, 32) for array in (k, v))
    elif layout == "batched":
        k, v = k[0], v[0]
    for token in range(3):
        for head in range(4):
            row, log = formula(problem.q[0, token, head], k[:, head // 2], v[:, head // 2], 40, token, 3, head, rules)
            np.testing.assert_allclose(right.o[0, token, head], row, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(o[0, token, head], row, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose([right.lse[0, token, head], lse[0, token, head]], log, rtol=1e-5)


def test_a_wrong_value_is_seen(rng):
    problem = make_problem(rng)
    o, lse = problem.run(return_lse=True)
    o[2, 1, 5] += 1e-3
    with pytest.raises(AssertionError, match="O: error"):
        assert_close(o, lse, problem.right(), "float32")
    o[2, 1, 5] -= 1e-3
    lse[0, 0] += 1e-4
    with pytest.raises(AssertionError, match="LSE"):
        assert_close(o, lse, problem.right(), "float32")


def test_views_are_taken_as_they_are(rng):
    """Q out of a fused buffer, K and V unbound from one interleaved cache, a transposed output."""
    fused = rng.standard_normal((2, 4 + 2 + 2, 64)).astype(np.float32)
    cache = rng.standard_normal((5, 2, 16, 2, 64)).astype(np.float32)
    table = np.array([[4, 0, 9], [2, 1, 3]], np.int32)
    lens = np.array([30, 48], np.int32)
    q, k, v = fused[:, :4], cache[:, 0], cache[:, 1]
    buffer = np.zeros((4, 2, 64), np.float32)
    o = leanattn.decode_paged(q, k, v, table, lens, out=buffer.transpose(1, 0, 2))
    assert_close(o, None, leanattn.reference(q, k, v, block_table=table, kv_lens=lens), "float32")
    assert np.shares_memory(o, buffer)


def test_lengths_may_be_lists_and_may_be_left_out(rng):
    problem = make_problem(rng, kv_lens=(20, 20))
    full = leanattn.decode(problem.q, problem.k[:, :20], problem.v[:, :20])
    np.testing.assert_array_equal(full, leanattn.decode(problem.q, problem.k, problem.v, kv_lens=[20, 20]))


def test_out_and_lse_are_written_in_place(rng):
    problem = make_problem(rng)
    out, lse = np.empty((3, 6, 64), np.float32), np.empty((3, 6), np.float32)
    result = problem.run(out=out, lse=lse, return_lse=True)
    assert result[0] is out and result[1] is lse
    np.testing.assert_array_equal(out, problem.run())


def test_a_read_only_input_and_not_a_read_only_output(rng):
    problem = make_problem(rng)
    expected = problem.run()
    for array in (problem.q, problem.k, problem.v):
        array.flags.writeable = False
    np.testing.assert_array_equal(problem.run(), expected)
    expected.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        problem.run(out=expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 199), st.sampled_from(["e", 2]))
def test_merge_of_two_shards_is_the_whole(seed, cut, lse_base):
    problem = make_problem(np.random.default_rng(seed), kv_lens=(200,))
    parts = [
        leanattn.decode(problem.q, problem.k[:, a:b], problem.v[:, a:b], causal=False, return_lse=True, lse_base=lse_base)
        for a, b in ((0, cut), (cut, 200))
    ]
    o, lse = leanattn.merge(*parts[0], *parts[1], lse_base=lse_base)
    right = problem.right(lse_base=lse_base)
    np.testing.assert_allclose(o, right.o, rtol=0, atol=4 * right.naive_o_error[0] + 1e-6)
    np.testing.assert_allclose(lse, right.lse, rtol=0, atol=4 * right.naive_lse_error[0] + 1e-6)
    swapped = leanattn.merge(*parts[1], *parts[0], lse_base=lse_base)
    np.testing.assert_array_equal(o, swapped[0])


def test_merge_with_an_empty_shard_changes_no_bit(rng):
    problem = make_problem(rng, kv_lens=(50,), dtype="bfloat16")
    o, lse = problem.run(return_lse=True)
    nothing = np.full_like(o, np.nan), np.full_like(lse, -np.inf)
    for merged in (leanattn.merge(o, lse, *nothing), leanattn.merge(*nothing, o, lse)):
        assert merged[0].tobytes() == o.tobytes() and merged[1].tobytes() == lse.tobytes()
