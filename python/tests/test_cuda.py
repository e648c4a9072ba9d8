# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the same calls on CUDA tensors, streams, graphs, torch.compile, JAX and CuPy."""

import threading

import numpy as np
import pytest

import leanattn
from check import assert_close, make_problem
from conftest import cuda_or_skip, framework_or_skip
from test_frameworks import from_torch, to_torch
from test_ops import arguments

torch = cuda_or_skip()
OPS = torch.ops.leanattn


def to_cuda(array):
    return to_torch(array).cuda()


def sleep_on(stream):
    """Keeps the stream busy for some milliseconds, so that work on another one would come first."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("layout", ["batched", "ragged", "paged"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode(rng, layout, dtype, head_dim, q_len):
    problem = make_problem(rng, layout=layout, dtype=dtype, head_dim=head_dim, q_len=q_len, kv_lens=(700, 0, 130, 1))
    o, lse = problem.run(to_cuda, return_lse=True, lse_base=2)
    assert o.device.type == "cuda"
    assert_close(from_torch(o), from_torch(lse), problem.right(lse_base=2), dtype)


@pytest.mark.parametrize("policy", ["lean", "fa2", "flashdecoding"])
def test_policies_hnd_and_full_length(rng, policy):
    problem = make_problem(rng, dtype="bfloat16", kv_layout="HND", kv_lens=(500, 500))
    problem.k, problem.v = problem.k[:, :, :500], problem.v[:, :, :500]
    lens = problem.rules.pop("kv_lens")
    o = problem.run(to_cuda, options=leanattn.Options(policy=policy))
    problem.rules["kv_lens"] = lens
    assert_close(from_torch(o), None, problem.right(), "bfloat16")


@pytest.mark.parametrize("layout", ["batched", "paged"])
@pytest.mark.parametrize("rule", ["window_left", "softcap", "alibi_slopes", "sinks", "tree_mask", "all"])
def test_masks_and_logit_rules(rng, layout, rule):
    rules = {
        "window_left": 60,
        "softcap": 4.0,
        "alibi_slopes": rng.random(6, np.float32),
        "sinks": rng.standard_normal(6).astype(np.float32),
        "tree_mask": rng.integers(0, 8, (9, 1), np.int64) | np.tile(np.array([[1], [2], [4]]), (3, 1)),
    }
    chosen = rules if rule == "all" else {rule: rules[rule]}
    problem = make_problem(rng, layout=layout, dtype="bfloat16", q_len=3, kv_lens=(700, 40, 130), scale=0.2, **chosen)
    o, lse = problem.run(to_cuda, return_lse=True)
    assert_close(from_torch(o), None, problem.right(), "bfloat16")
    np.testing.assert_allclose(from_torch(lse), problem.right().lse, rtol=1e-4, atol=1e-4)


def test_packed_queries_without_a_bound(rng):
    problem = make_problem(rng, dtype="float16", q_lens=[1, 0, 4])
    assert_close(from_torch(problem.run(to_cuda)), None, problem.right(), "float16", problem.q_lens)


def test_what_is_not_there_yet_is_a_sentence(rng):
    problem = make_problem(rng, dtype="float32")
    with pytest.raises(ValueError, match="float32 with backend cuda: supported are float16 and bfloat16"):
        problem.run(to_cuda)
    problem = make_problem(rng, dtype="float16")
    with pytest.raises(ValueError, match="k lies on cpu, q on cuda:0"):
        leanattn.decode(to_cuda(problem.q), to_torch(problem.k), to_torch(problem.v), kv_lens=to_cuda(problem.rules["kv_lens"]))


def test_the_current_stream_is_used(rng):
    """The inputs are written on a busy side stream; only a call on that stream sees them."""
    problem = make_problem(rng, dtype="bfloat16", kv_lens=(300, 200))
    right = problem.right()
    q, k, v = (to_cuda(array) for array in (problem.q, problem.k, problem.v))
    lens = to_cuda(problem.rules["kv_lens"])
    late = torch.full_like(q, 100.0)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for stream in (None, side):  # as the current stream, and by name
        late.fill_(100.0)
        torch.cuda.synchronize()
        sleep_on(side)
        with torch.cuda.stream(side):
            late.copy_(q)
            o = torch.empty_like(q)
            if stream is None:
                leanattn.decode(late, k, v, kv_lens=lens, out=o)
        if stream is not None:
            leanattn.decode(late, k, v, kv_lens=lens, out=o, stream=stream)
        side.synchronize()
        assert_close(from_torch(o), None, right, "bfloat16")
    sleep_on(side)
    with torch.cuda.stream(side):
        late.fill_(7.0)
        late.copy_(q)
        o = OPS.decode(late, k, v, lens)
    side.synchronize()
    assert_close(from_torch(o), None, right, "bfloat16")


def test_two_streams_from_two_threads(rng):
    problem = make_problem(rng, dtype="bfloat16", kv_lens=(4000, 3000), kv_heads=2, q_heads=8)
    expected = problem.run(to_cuda)
    arrays = [to_cuda(array) for array in (problem.q, problem.k, problem.v)]
    lens, wrong = to_cuda(problem.rules["kv_lens"]), []
    torch.cuda.synchronize()

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(200):
                o = leanattn.decode(*arrays, kv_lens=lens)
            stream.synchronize()
            if not torch.equal(o, expected):
                wrong.append(o)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("form", ["operator", "prepared", "decode"])
def test_captured_in_a_graph_without_a_warm_up(rng, form):
    """Captured before any call on that stream; replayed with other lengths and pages in the same memory."""
    problem = make_problem(rng, layout="paged", dtype="bfloat16", kv_lens=(700, 1, 130))
    args, _ = arguments(problem)
    args = [array if array is None else array.cuda() for array in args]
    q, k, v, table, lens = args[:5]
    o = torch.zeros_like(q)
    call = leanattn.prepare(q, k, v, o, block_table=table, kv_lens=lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        if form == "operator":
            OPS.decode_paged_out(q, k, v, o, None, table, lens)
        elif form == "prepared":
            call()
        else:
            leanattn.decode_paged(q, k, v, table, lens, out=o)
    for kv_lens in ((700, 1, 130), (0, 0, 0), (688, 1, 5)):
        problem.rules["kv_lens"][:] = kv_lens
        lens.copy_(to_torch(problem.rules["kv_lens"]))
        if kv_lens[0]:
            order = rng.permutation(10)
            problem.rules["block_table"][0, :10] = problem.rules["block_table"][0, order]
            table.copy_(to_torch(problem.rules["block_table"]))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(from_torch(o), None, problem.right(), "bfloat16")


def test_graphs_at_the_same_time_with_a_workspace_each(rng):
    problem = make_problem(rng, dtype="bfloat16", kv_lens=(30000, 20000), kv_heads=1, q_heads=8)
    arrays = [to_cuda(array) for array in (problem.q, problem.k, problem.v)]
    lens = to_cuda(problem.rules["kv_lens"])
    expected = leanattn.decode(*arrays, kv_lens=lens)
    capture, graphs, outs, workspaces = torch.cuda.Stream(), [], [], []
    for _ in range(2):
        graph, workspace, o = torch.cuda.CUDAGraph(), leanattn.Workspace("cuda"), torch.zeros_like(expected)
        with torch.cuda.graph(graph, stream=capture), workspace:
            for _ in range(20):
                OPS.decode_out(*arrays, o, None, lens)
        assert workspace.nbytes > 0
        graphs.append(graph), outs.append(o), workspaces.append(workspace)
    for _ in range(20):
        for graph, stream in zip(graphs, [torch.cuda.Stream(), torch.cuda.Stream()], strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(o, expected) for o in outs)


@pytest.mark.parametrize("lse_base", ["e", 2])
def test_merge_of_shards(rng, lse_base):
    """Three shards of a context, one of them empty for one sequence, against the whole; an empty shard changes no bit."""
    problem = make_problem(rng, dtype="bfloat16", kv_lens=(700, 200), head_dim=128)
    arrays = [to_cuda(array) for array in (problem.q, problem.k, problem.v)]
    parts = []
    for begin, end in ((0, 150), (150, 300), (300, 703)):
        lens = torch.tensor([min(max(n - begin, 0), end - begin) for n in (700, 200)], dtype=torch.int32, device="cuda")
        shard = [array[:, begin:end] for array in arrays[1:]]
        parts.append(leanattn.decode(arrays[0], *shard, kv_lens=lens, causal=False, return_lse=True, lse_base=lse_base))
    o, lse = leanattn.merge_shards(torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]), lse_base=lse_base)
    right = problem.right(lse_base=lse_base)
    np.testing.assert_allclose(from_torch(o).astype(np.float64), right.o, rtol=2e-2, atol=2e-3)
    np.testing.assert_allclose(from_torch(lse), right.lse, rtol=1e-5, atol=1e-4)
    nothing = torch.full_like(o, torch.nan), torch.full_like(lse, -torch.inf)
    for merged in (leanattn.merge(o, lse, *nothing), OPS.merge(*nothing, o, lse)):
        assert torch.equal(merged[0], o) and torch.equal(merged[1], lse)
    torch.library.opcheck(OPS.merge.default, (o, lse, o, lse))


@pytest.mark.parametrize("form", ["functional", "mutating"])
def test_opcheck(rng, form):
    problem = make_problem(rng, layout="paged", dtype="bfloat16", q_len=2)
    args, kwargs = arguments(problem)
    args = tuple(array if array is None else array.cuda() for array in args)
    if form == "functional":
        torch.library.opcheck(OPS.decode_paged_lse.default, args, kwargs)
    else:
        args = (*args[:3], torch.empty_like(args[0]), torch.empty(args[0].shape[:-1], device="cuda"), *args[3:])
        torch.library.opcheck(OPS.decode_paged_out.default, args, kwargs)


def test_compiled_with_reduce_overhead_in_a_decode_loop(rng):
    """A whole graph, captured and replayed by PyTorch, with the cache growing in place and lengths changing at each step."""
    torch.compiler.reset()
    kv_heads, heads, d, n = 2, 8, 64, 300
    weights = torch.randn(heads * d, (heads + 2 * kv_heads) * d, device="cuda", dtype=torch.bfloat16) / 20

    def step(x, k_cache, v_cache, lens):
        q, k, v = (x @ weights).split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
        o = leanattn.flash_attn_with_kvcache(
            q.reshape(2, 1, heads, d),
            k_cache,
            v_cache,
            k.reshape(2, 1, kv_heads, d),
            v.reshape(2, 1, kv_heads, d),
            cache_seqlens=lens,
            causal=True,
        )
        return torch.nn.functional.rms_norm(o.reshape(2, heads * d) + x, (heads * d,))

    from torch._dynamo.utils import counters

    counters.clear()
    whole = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    caches = [[torch.zeros(2, n, kv_heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)]
    for cache in caches[0]:  # as a model's buffers are
        torch._dynamo.mark_static_address(cache)
    x = torch.randn(2, heads * d, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([0, 100], device="cuda", dtype=torch.int32)
    with torch.no_grad():
        for _ in range(150):
            torch.compiler.cudagraph_mark_step_begin()
            got = whole(x, *caches[0], lens).clone()
            expected = step(x, *caches[1], lens)
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
            for mine, twin in zip(*caches, strict=True):
                mine.copy_(twin)
            x = expected
            lens += 1
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_flashinfer_wrapper_in_a_graph(rng):
    wrapper, graph, problems = None, torch.cuda.CUDAGraph(), []
    for kv_lens in ((70, 5, 48), (3, 100, 17)):
        problem = make_problem(rng, layout="paged", dtype="float16", kv_lens=kv_lens)
        table = problem.rules["block_table"]
        pages = [-(-length // 16) for length in kv_lens]
        problems.append(
            (
                problem,
                np.cumsum([0, *pages]).astype(np.int32),
                np.concatenate([table[i, : pages[i]] for i in range(3)]),
                np.array([(length - 1) % 16 + 1 for length in kv_lens], np.int32),
            )
        )
    buffers = {"paged_kv_indptr_buffer": to_cuda(problems[0][1]), "paged_kv_indices_buffer": to_cuda(np.zeros(32, np.int32))}
    wrapper = leanattn.BatchDecodeWithPagedKVCacheWrapper(None, use_cuda_graph=True, **buffers)
    q = torch.empty(3, 6, 64, device="cuda", dtype=torch.float16)
    k, v = (torch.empty(16, 16, 2, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    for step, (problem, indptr, indices, last) in enumerate(problems):
        q.copy_(to_torch(problem.q))
        for mine, theirs in ((k, problem.k), (v, problem.v)):
            mine[: len(theirs)].copy_(to_torch(theirs))
        wrapper.plan(to_cuda(indptr), to_cuda(indices), to_cuda(last), 6, 2, 64, 16)
        torch.cuda.synchronize()
        if step == 0:
            with torch.cuda.graph(graph):
                out, lse = wrapper.run(q, (k, v), return_lse=True)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(from_torch(out), from_torch(lse), problem.right(lse_base=2), "float16")


def test_jax_on_the_gpu(rng):
    jax = framework_or_skip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX runs on {jax.default_backend()} here")
    for layout in ("batched", "paged"):
        problem = make_problem(rng, layout=layout, dtype="bfloat16", kv_lens=(700, 0, 130))
        o, lse = problem.run(lambda array: jax.numpy.asarray(array) * 1, return_lse=True)
        assert isinstance(o, jax.Array) and o.dtype == jax.numpy.bfloat16
        assert_close(np.asarray(o), np.asarray(lse), problem.right(), "bfloat16")
        assert_close(np.asarray(o * 1), None, problem.right(), "bfloat16")


def test_cupy_on_its_current_stream(rng):
    cupy = framework_or_skip("cupy")
    problem = make_problem(rng, layout="paged", dtype="float16", kv_lens=(700, 0, 130))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        o, lse = problem.run(cupy.asarray, return_lse=True)
        stream.synchronize()
    assert isinstance(o, cupy.ndarray)
    assert_close(o.get(), lse.get(), problem.right(), "float16")


def test_checked_data(rng):
    """A page id out of range empties its sequence alone, and the word on the device says which."""
    problem = make_problem(rng, layout="paged", dtype="bfloat16", head_dim=128, kv_lens=(700, 300, 130))
    k_cache = to_cuda(problem.k)
    status = torch.zeros(1, dtype=torch.int64, device="cuda")
    options = leanattn.Options(check_data=True, data_status=status, batch_invariant=True)
    table, kv_lens = to_cuda(problem.rules["block_table"]), to_cuda(problem.rules["kv_lens"])
    arguments = (to_cuda(problem.q), k_cache, to_cuda(problem.v))
    right = leanattn.decode_paged(*arguments, table, kv_lens, options=options)
    assert leanattn.data_fault_sentence(status.item()) == ""
    table[1, 0] = k_cache.shape[0]
    o = leanattn.decode_paged(*arguments, table, kv_lens, options=options)
    assert leanattn.data_fault_sentence(status.item()) == "seq 1 slot 0: page is outside num_pages"
    assert torch.equal(o[0], right[0]) and torch.equal(o[2], right[2]) and not o[1].any()
