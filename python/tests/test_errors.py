# SPDX-License-Identifier: Apache-2.0
"""What is wrong is a ValueError with a sentence that names it, and nothing is written."""

import ctypes

import numpy as np
import pytest

import leanattn
from check import make_problem


def changed(problem, **changes):
    for name, value in changes.items():
        if name in ("q", "k", "v"):
            setattr(problem, name, value)
        else:
            problem.rules[name] = value
    return problem


def f32(*shape):
    return np.zeros(shape, np.float32)


CASES = {
    "head_dim": (
        {"q": f32(3, 6, 100), "k": f32(3, 9, 2, 100), "v": f32(3, 9, 2, 100)},
        "head_dim 100: supported are 32 to 256 in steps of 8",
    ),
    "heads": ({"q": f32(3, 5, 64)}, "q_heads 5: must be a multiple of kv_heads 2"),
    "q dims": ({"q": f32(6, 64)}, r"q of shape \[6, 64\]: \[batch, q_heads, head_dim\] or"),
    "q dtype": ({"q": np.zeros((3, 6, 64))}, "q of float64: supported are float32, float16 and bfloat16"),
    "q of integers": ({"q": np.zeros((3, 6, 64), np.int8)}, "q of int8: supported are float32, float16 and bfloat16"),
    "k dtype": ({"k": np.zeros((3, 133, 2, 64))}, "k of float64: supported are float32, float16 and bfloat16"),
    "mixed dtypes": ({"q": np.zeros((3, 6, 64), np.float16)}, "k of float32: float16 is needed, as q is"),
    "v of another dtype": ({"v": np.zeros((3, 133, 2, 64), np.float16)}, "v of float16: float32 is needed, as q is"),
    "batch": ({"k": f32(4, 9, 2, 64), "v": f32(4, 9, 2, 64)}, r"k of shape \[4, 9, 2, 64\]: batch 3 of q is needed"),
    "v": ({"v": f32(3, 8, 2, 64)}, r"v of shape \[3, 8, 2, 64\]: all but its last dimension as in k"),
    "head_dim of k": ({"k": f32(3, 133, 2, 32)}, "head_dim 64 of q is needed"),
    "stride": ({"q": f32(3, 6, 128)[..., ::2]}, "q: stride 2 of the last dimension: 1 is needed"),
    "kv_lens dtype": ({"kv_lens": np.zeros(3, np.int64)}, "kv_lens of int64: int32 is needed"),
    "kv_lens shape": ({"kv_lens": np.zeros(2, np.int32)}, r"kv_lens of shape \[2\]: \[batch\] = \[3\] is needed"),
    "kv_len": ({"kv_lens": np.array([1, 500, 2], np.int32)}, "seq 1: kv_len 500 is outside 0 to 133, kv_capacity"),
    "alibi": ({"alibi_slopes": f32(5)}, r"alibi_slopes of shape \[5\]: \[q_heads\] = \[6\] is needed"),
    "sinks": ({"sinks": np.zeros(6)}, "sinks of float64: float32 is needed"),
    "tree": ({"tree_mask": np.zeros((3, 2), np.uint64)}, r"tree_mask of shape \[3, 2\]: \[total_q, ceil\(q_len / 64\)\] = \[3, 1\]"),
    "tree dtype": ({"tree_mask": np.zeros((3, 1), bool)}, "tree_mask of bool: uint64 or int64 is needed"),
    "window": ({"window_left": -2}, "window_left -2: at least -1 is needed"),
    "softcap": ({"softcap": -1.0}, "softcap -1: at least 0 is needed"),
    "kv_layout": ({"kv_layout": "DHN"}, "kv_layout 'DHN': known are 'NHD' and 'HND'"),
    "kv_lens of fractions": ({"kv_lens": [1.5, 2, 3]}, r"kv_lens\[0\] is 1.5: an integer of 32 bits is needed"),
    "kv_lens of text": ({"kv_lens": [1, "3", 2]}, r"kv_lens\[1\] is '3': an integer"),
    "kv_lens of truth": ({"kv_lens": [1, 2, True]}, r"kv_lens\[2\] is True: an integer"),
    "kv_lens of NumPy's fractions": ({"kv_lens": [1, 2, np.float32(2)]}, r"kv_lens\[2\] is "),
    "kv_len beyond 32 bits": ({"kv_lens": [1, 2**40, 2]}, r"kv_lens\[1\] is 1099511627776: an integer of 32 bits"),
    "cu_seqlens_q of fractions": ({"cu_seqlens_q": [0, 1, 2, 3.5]}, r"cu_seqlens_q\[3\] is 3.5: an integer"),
    "cu_seqlens_kv of fractions": ({"cu_seqlens_kv": (0, 0.5)}, r"cu_seqlens_kv\[1\] is 0.5: an integer"),
    "no softcap": ({"softcap": None}, "^softcap None: a number is needed"),
    "scale of text": ({"scale": "x"}, "^scale 'x': a number is needed"),
    "no window_left": ({"window_left": None}, "^window_left None: an integer of 32 bits is needed"),
    "q_len": ({"q_len": 1.0}, "^q_len 1.0: an integer of 32 bits is needed"),
    "causal": ({"causal": "no"}, "^causal 'no': True or False is needed"),
    "no array": ({"k": [1.0]}, "k is a list: an array with __dlpack__ is needed"),
    "no array either": ({"v": [1.0]}, "v is a list: an array with __dlpack__ is needed"),
    "table without pages": (
        {"cu_seqlens_kv": np.zeros(4, np.int32)},
        r"k of shape \[3, 133, 2, 64\]: \[total_kv, kv_heads, head_dim\] is needed",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_its_sentence(rng, name):
    changes, sentence = CASES[name]
    problem = changed(make_problem(rng), **changes)
    out = np.full((3, 6, 64), 7, np.float32)
    with pytest.raises(ValueError, match=sentence):
        problem.run(out=out if problem.q.shape == (3, 6, 64) and problem.q.dtype == np.float32 else None)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"out": np.zeros((3, 6, 32), np.float32)}, r"out of shape \[3, 6, 32\]: \[batch, q_heads, head_dim_v\] = \[3, 6, 64\]"),
        ({"out": np.zeros((3, 6, 64), np.float16)}, "out of float16: float32 is needed, as q is"),
        ({"out": np.broadcast_to(np.zeros((1, 6, 64), np.float32), (3, 6, 64))}, "out is read-only|rows of"),
        ({"lse": np.zeros((3, 6)), "return_lse": True}, "lse of float64: float32 is needed"),
        ({"lse_base": 10}, "lse_base 10: known are 'e' and 2"),
        ({"options": "lean"}, "options is a str: leanattn.Options is needed"),
        ({"options": leanattn.Options(splits=2)}, "only policy flashdecoding"),
        ({"options": leanattn.Options(cpu_isa="MMX")}, "cpu_isa MMX: this machine has"),
        ({"workspace": 3}, "workspace is a int: leanattn.Workspace is needed"),
        ({"workspace": leanattn.Workspace("cuda:3")}, "workspace lies on cuda:3, q on cpu"),
    ],
)
def test_refused_outputs_and_options(rng, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_problem(rng).run(**changes)


def test_block_table_as_lists(rng):
    problem = make_problem(rng, layout="paged")
    right = problem.run()
    rows = [row.tolist() for row in problem.rules["block_table"]]
    for table in (rows, tuple(tuple(row) for row in rows), list(problem.rules["block_table"])):
        np.testing.assert_array_equal(changed(problem, block_table=table).run(), right)
    for row, sentence in (
        ([0.7], r"block_table\[1\]\[0\] is 0.7: an integer of 32 bits is needed"),
        (rows[1][:-1], "block_table: rows of one length are needed"),
    ):
        with pytest.raises(ValueError, match=sentence):
            changed(problem, block_table=[rows[0], row, rows[2]]).run()


def test_prepare_and_reference_name_the_argument(rng):
    problem = make_problem(rng)
    arrays = problem.q, problem.k, problem.v
    for name in ("kv_lens", "cu_seqlens_q", "cu_seqlens_kv", "block_table"):
        with pytest.raises(ValueError, match=f"{name} is a list: prepare reads it again at each call, so an int32 array is needed"):
            leanattn.prepare(*arrays, np.empty_like(problem.q), **{name: [1, 2, 3]})
    with pytest.raises(ValueError, match=r"^softcap None: a number is needed"):
        leanattn.prepare(*arrays, np.empty_like(problem.q), softcap=None)
    with pytest.raises(ValueError, match=r"^window_left None: an integer"):
        leanattn.reference(*arrays, window_left=None)
    with pytest.raises(ValueError, match=r"kv_lens\[0\] is 0.5: an integer"):
        leanattn.reference(*arrays, kv_lens=[0.5, 1, 1])


def test_scale_0_is_not_the_default(rng):
    problem = make_problem(rng)
    for call in (leanattn.decode, leanattn.reference):
        with pytest.raises(ValueError, match="scale 0: a number above 0, or None"):
            call(problem.q, problem.k, problem.v, scale=0.0)


def test_options_know_their_names():
    with pytest.raises(ValueError, match="policy best: known are lean, fa2, flashdecoding"):
        leanattn.Options(policy="best")
    for bad in ("lean:3", "flashdecoding:", "flashdecoding:0", "flashdecoding:x"):
        with pytest.raises(ValueError, match=f"policy {bad}: only flashdecoding takes splits, a whole number above 0"):
            leanattn.Options(policy=bad)
    with pytest.raises(ValueError, match="splits 3 with policy flashdecoding:3: one of them"):
        leanattn.Options(policy="flashdecoding:3", splits=3)
    with pytest.raises(ValueError, match="head_order up: known are auto, along, beside"):
        leanattn.Options(head_order="up")
    with pytest.raises(ValueError, match="device tpu: cpu, cuda or cuda:N"):
        leanattn.Workspace("tpu")


class Elsewhere:
    """Memory that says of itself to be that of an Apple GPU."""

    device = "mps:0"

    def __dlpack_device__(self):
        return 8, 0

    def __dlpack__(self, **_):
        capsule = f32(3, 133, 2, 64).__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 8  # behind the address of the data
        return capsule


def test_another_device_is_named(rng, monkeypatch):
    array = Elsewhere()
    with pytest.raises(ValueError, match=r"^k lies on mps:0: supported are the CPU and CUDA"):
        changed(make_problem(rng), k=array).run()
    monkeypatch.delattr(Elsewhere, "device")
    with pytest.raises(ValueError, match=r"^k lies on DLPack's device type 8: supported are"):
        changed(make_problem(rng), k=array).run()


def test_policy_with_its_splits(rng):
    options = leanattn.Options(policy="flashdecoding:3", workers=2)
    assert options == leanattn.Options(policy="flashdecoding", splits=3, workers=2)
    problem = make_problem(rng)
    apart = problem.run(options=leanattn.Options(policy="flashdecoding", splits=3))
    np.testing.assert_array_equal(problem.run(options=options), apart)


def test_bad_data_names_sequence_and_slot(rng):
    problem = make_problem(rng, layout="paged")
    problem.rules["block_table"][2, 1] = 99
    with pytest.raises(ValueError, match="seq 2 slot 1: page 99 is outside num_pages"):
        problem.run()
    with pytest.raises(ValueError, match="seq 2 slot 1: page 99 is outside num_pages"):
        problem.right()


def test_offsets_past_the_arrays_are_refused(rng):
    problem = make_problem(rng, layout="ragged", q_lens=[1, 2, 1])
    problem.rules["cu_seqlens_q"][3] = 5
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 5: q has 4 rows"):
        problem.run()
    problem.rules["cu_seqlens_q"][3] = 4
    problem.rules["cu_seqlens_kv"][3] = 203
    with pytest.raises(ValueError, match="cu_seqlens_kv ends at 203: k has 202 tokens"):
        problem.run()
    with pytest.raises(ValueError, match="cu_seqlens_kv ends at 203: k has 202 tokens"):
        problem.right()


def test_merge_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        leanattn.merge_shards(f32(2, 3, 4, 64), f32(2, 3, 5))
    with pytest.raises(ValueError, match="lse of float64: float32 is needed"):
        leanattn.merge_shards(f32(2, 3, 64), np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"^o2 of shape \[3, 32\]: that of o1, \[3, 64\], is needed"):
        leanattn.merge(f32(3, 64), f32(3), f32(3, 32), f32(3))
    with pytest.raises(ValueError, match=r"^lse2 of shape \[4\]: that of lse1"):
        leanattn.merge(f32(3, 64), f32(3), f32(3, 64), f32(4))


def test_data_status_must_be_a_device_word():
    with pytest.raises(ValueError, match="data_status must be a CUDA array of one int64 or uint64"):
        leanattn.Options(check_data=True, data_status=np.zeros(1, np.int64))
    assert leanattn.data_fault_sentence(0) == ""
