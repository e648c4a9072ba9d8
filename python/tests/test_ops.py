# SPDX-License-Identifier: Apache-2.0
"""torch.ops.leanattn on the CPU: opcheck, eager, and whole under torch.compile."""

import numpy as np
import pytest

import leanattn
from check import assert_close, make_problem
from conftest import framework_or_skip
from test_frameworks import from_torch, to_torch

torch = framework_or_skip("torch")
import leanattn.ops  # noqa: E402

OPS = torch.ops.leanattn


def tensors(problem):
    rules = {name: to_torch(value) if isinstance(value, np.ndarray) else value for name, value in problem.rules.items()}
    return [to_torch(array) for array in (problem.q, problem.k, problem.v)], rules


def arguments(problem):
    """Positional and keyword arguments of the operator for a problem."""
    arrays, rules = tensors(problem)
    if problem.paged:
        positional = [*arrays, rules.pop("block_table"), rules.pop("kv_lens"), rules.pop("cu_seqlens_q", None)]
    else:
        positional = [*arrays, rules.pop("kv_lens", None), rules.pop("cu_seqlens_q", None), rules.pop("cu_seqlens_kv", None)]
    return tuple(positional), rules


@pytest.mark.parametrize("layout", ["batched", "ragged", "paged"])
@pytest.mark.parametrize("form", ["functional", "with LSE", "mutating"])
def test_opcheck(rng, layout, form):
    problem = make_problem(rng, layout=layout, q_len=2, causal=True, window_left=50, softcap=4.0)
    args, kwargs = arguments(problem)
    op = OPS.decode_paged if problem.paged else OPS.decode
    if form == "with LSE":
        op = OPS.decode_paged_lse if problem.paged else OPS.decode_lse
        kwargs |= {"policy": "flashdecoding:2"}
    if form == "mutating":
        op = OPS.decode_paged_out if problem.paged else OPS.decode_out
        args = (*args[:3], torch.empty_like(args[0]), torch.empty(args[0].shape[:-1]), *args[3:])
    torch.library.opcheck(op.default, args, kwargs)


def test_opcheck_with_every_array(rng):
    problem = make_problem(
        rng,
        layout="paged",
        q_lens=[1, 2, 0],
        alibi_slopes=rng.random(6, np.float32),
        sinks=rng.random(6, np.float32),
        tree_mask=np.full((3, 1), 3, np.int64),
    )
    args, kwargs = arguments(problem)
    torch.library.opcheck(OPS.decode_paged_lse.default, args, kwargs | {"q_len": 2})


def test_opcheck_of_merge(rng):
    o, lse = torch.randn(2, 3, 4, 64), torch.randn(2, 3, 4)
    torch.library.opcheck(OPS.merge.default, (o[0], lse[0], o[1], lse[1]), {"lse_base2": True})


@pytest.mark.parametrize("layout", ["batched", "ragged", "paged"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_eager(rng, layout, dtype):
    problem = make_problem(rng, layout=layout, dtype=dtype)
    args, kwargs = arguments(problem)
    op, with_lse = (OPS.decode_paged, OPS.decode_paged_lse) if problem.paged else (OPS.decode, OPS.decode_lse)
    o, lse = with_lse(*args, **kwargs, lse_base2=True)
    assert_close(from_torch(o), from_torch(lse), problem.right(lse_base=2), dtype)
    assert torch.equal(op(*args, **kwargs), o)


def test_errors_are_value_errors(rng):
    args, kwargs = arguments(make_problem(rng))
    with pytest.raises(ValueError, match="seq 1: kv_len 999 is outside"):
        OPS.decode(*args[:3], torch.tensor([1, 999, 2], dtype=torch.int32), **kwargs)
    with pytest.raises(ValueError, match="policy best"):
        OPS.decode(*args, **kwargs, policy="best")


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, **options)


@pytest.mark.parametrize("layout", ["batched", "ragged", "paged"])
@pytest.mark.parametrize("mode", ["functional", "out"])
def test_compiled_whole(rng, layout, mode):
    """leanattn.decode and decode_paged inside a graph, with work before and behind."""
    problem = make_problem(rng, layout=layout)
    arrays, rules = tensors(problem)
    lens = {name: rules.pop(name) for name in ("kv_lens", "block_table", "cu_seqlens_kv") if name in rules}

    def step(q, k, v, lens, out=None):
        lens = dict(lens)
        if "block_table" in lens:
            result = leanattn.decode_paged(q * 2, k, v, lens.pop("block_table"), lens.pop("kv_lens"), return_lse=True, out=out)
        else:
            result = leanattn.decode(q * 2, k, v, **lens, return_lse=True, out=out)
        return result[0] + 1, result[1]

    out = torch.empty_like(arrays[0]) if mode == "out" else None
    expected = step(*arrays, lens, None)
    o, lse = compiled(step)(*arrays, lens, out)
    torch.testing.assert_close(o, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=0)
    if out is not None:
        torch.testing.assert_close(out, expected[0] - 1, rtol=0, atol=1e-6)


def test_compiled_with_options_and_rules(rng):
    problem = make_problem(
        rng, q_heads=4, kv_heads=2, alibi_slopes=rng.random(4, np.float32), sinks=rng.random(4, np.float32), window_left=30
    )
    arrays, rules = tensors(problem)
    options = leanattn.Options(policy="flashdecoding", splits=3)

    def step(q, k, v, kv_lens, alibi_slopes, sinks):
        return leanattn.decode(
            q,
            k,
            v,
            kv_lens=kv_lens,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            window_left=30,
            scale=0.2,
            kv_layout="NHD",
            lse_base=2,
            options=options,
        )

    arrays = [*arrays, rules["kv_lens"], rules["alibi_slopes"], rules["sinks"]]
    torch.testing.assert_close(compiled(step)(*arrays), step(*arrays), rtol=0, atol=0)


def test_one_graph_serves_every_length(rng):
    """A decode loop: the cache grows in place, batches come in two sizes, and nothing is compiled again for a length."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    cache = torch.zeros(4, 64, 2, 32), torch.zeros(4, 64, 2, 32)

    def step(q, k, v, k_cache, v_cache, lens):
        return leanattn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True)

    whole = torch.compile(step, fullgraph=True, backend=count, dynamic=True)
    twin = tuple(array.clone() for array in cache)
    for token in range(40):
        rows = 4 if token % 2 else 3
        q, k, v = (torch.randn(rows, 1, heads, 32) for heads in (4, 2, 2))
        lens = torch.full((rows,), token, dtype=torch.int32)
        o = whole(q, k, v, cache[0][:rows], cache[1][:rows], lens)
        torch.testing.assert_close(o, step(q, k, v, twin[0][:rows], twin[1][:rows], lens), rtol=0, atol=0)
    for array, other in zip(cache, twin, strict=True):
        torch.testing.assert_close(array, other, rtol=0, atol=0)
    assert len(graphs) <= 2, f"{len(graphs)} graphs"


def test_flash_attn_and_merge_compiled(rng):
    problem = make_problem(rng, layout="paged", q_len=2)
    arrays, rules = tensors(problem)

    def step(q, k, v, table, lens):
        out, lse = leanattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, block_table=table, causal=True, return_softmax_lse=True)
        lse = lse.transpose(1, 2).contiguous()
        return leanattn.merge(out, lse, out, lse)

    arguments = [*arrays, rules["block_table"], rules["kv_lens"]]
    for got, expected in zip(compiled(step)(*arguments), step(*arguments), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_exported(rng):
    """torch.export keeps the operator, with a batch of any size."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, lens):
            return leanattn.decode(q, k, v, kv_lens=lens)

    problem = make_problem(rng)
    arrays, rules = tensors(problem)
    batch = torch.export.Dim("batch", min=2, max=64)
    dims = ({0: batch}, {0: batch}, {0: batch}, {0: batch})
    program = torch.export.export(Attention(), (*arrays, rules["kv_lens"]), dynamic_shapes=dims)
    assert any("leanattn.decode" in str(node.target) for node in program.graph.nodes)
    twice = [torch.cat([array, array]) for array in (*arrays, rules["kv_lens"])]
    torch.testing.assert_close(program.module()(*twice), Attention()(*twice), rtol=0, atol=0)


def test_results_carry_no_gradient(rng):
    args, kwargs = arguments(make_problem(rng))
    args[0].requires_grad_()
    assert not OPS.decode(*args, **kwargs).requires_grad
    assert not leanattn.decode(*args[:3], kv_lens=args[3]).requires_grad
