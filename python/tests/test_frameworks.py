# SPDX-License-Identifier: Apache-2.0
"""The same problems as arrays of PyTorch, JAX and CuPy: the values of NumPy's, in arrays of their own, nothing copied."""

import importlib

import numpy as np
import pytest

import leanattn
from check import DTYPES, make_problem
from conftest import framework_or_skip


def to_torch(array):
    torch = framework_or_skip("torch")
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def from_torch(tensor):
    torch = framework_or_skip("torch")
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return tensor.cpu().numpy()


def to_jax(array):
    return framework_or_skip("jax").numpy.asarray(array)


def to_cupy(array):
    cupy = framework_or_skip("cupy")
    if array.dtype == DTYPES["bfloat16"]:
        pytest.skip("cupy has no bfloat16 to make an array from")
    return cupy.asarray(array)


CONVERSIONS = {
    "torch": (to_torch, from_torch),
    "jax": (to_jax, np.asarray),
    "cupy": (to_cupy, lambda array: array.get()),
}


@pytest.mark.parametrize("framework", CONVERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["batched", "ragged", "paged"])
def test_the_same_bits_as_numpy(rng, framework, dtype, layout):
    module = framework_or_skip(framework)
    if framework == "cupy" and dtype == "float32":
        pytest.skip("the CUDA backend has no float32")
    if framework == "jax" and module.default_backend() != "cpu":
        pytest.skip("JAX is on a GPU here; test_cuda.py looks at that")
    convert, back = CONVERSIONS[framework]
    problem = make_problem(rng, layout=layout, dtype=dtype, q_len=3)
    expected, expected_lse = problem.run(return_lse=True)
    o, lse = problem.run(convert, return_lse=True)
    assert type(o).__module__.partition(".")[0].removesuffix("lib") == framework
    assert o.dtype == convert(problem.q).dtype and str(lse.dtype).endswith("float32")
    if framework == "cupy":  # another backend
        np.testing.assert_allclose(back(o).astype(np.float32), expected.astype(np.float32), rtol=2e-2, atol=2e-3)
        np.testing.assert_allclose(back(lse), expected_lse, rtol=1e-3)
    else:
        np.testing.assert_array_equal(back(o).view(np.uint8), expected.view(np.uint8))
        np.testing.assert_array_equal(back(lse), expected_lse)


def test_torch_memory_is_used_in_place(rng):
    torch = framework_or_skip("torch")
    problem = make_problem(rng)
    arrays = [to_torch(array) for array in (problem.q, problem.k, problem.v)]
    lens = to_torch(problem.rules["kv_lens"])
    out = torch.empty_like(arrays[0])
    assert leanattn.decode(*arrays, kv_lens=lens, out=out) is out
    np.testing.assert_array_equal(out.numpy(), problem.run())
    lens[2] = 0
    leanattn.decode(*arrays, kv_lens=lens, out=out)
    assert (out[2] == 0).all()


def test_torch_parameters_and_views(rng):
    torch = framework_or_skip("torch")
    problem = make_problem(rng)
    arrays = [torch.nn.Parameter(to_torch(array), requires_grad=False) for array in (problem.q, problem.k, problem.v)]

    class Named(torch.Tensor):
        pass

    arrays[0] = arrays[0].as_subclass(Named)
    fused = torch.cat([arrays[0], arrays[0]], dim=1)
    o = leanattn.decode(fused[:, 6:], *arrays[1:], kv_lens=problem.rules["kv_lens"].tolist())
    np.testing.assert_array_equal(o.numpy(), problem.run())


def test_jax_arrays_are_not_written_to(rng):
    framework_or_skip("jax")
    problem = make_problem(rng)
    with pytest.raises(ValueError, match="JAX arrays are not written to"):
        problem.run(to_jax, out=to_jax(problem.q))
    with pytest.raises(ValueError, match="prepare with JAX arrays"):
        leanattn.prepare(to_jax(problem.q), to_jax(problem.k), to_jax(problem.v), to_jax(problem.q))


def test_merge_and_reference_of_torch(rng):
    torch = framework_or_skip("torch")
    problem = make_problem(rng, dtype="bfloat16")
    o, lse = problem.run(to_torch, return_lse=True)
    merged = leanattn.merge(o, lse, o, torch.full_like(lse, -np.inf))
    assert torch.equal(merged[0], o) and torch.equal(merged[1], lse)
    arrays = [to_torch(array) for array in (problem.q, problem.k, problem.v)]
    np.testing.assert_array_equal(leanattn.reference(*arrays, kv_lens=to_torch(problem.rules["kv_lens"])).o, problem.right().o)


def test_a_tensor_without_memory_is_refused(rng):
    torch = framework_or_skip("torch")
    problem = make_problem(rng)
    with pytest.raises(ValueError, match=r"^q: .*meta"):
        leanattn.decode(torch.empty(3, 6, 64, device="meta"), problem.k, problem.v, kv_lens=[1, 2, 3])


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_negation_that_torch_left_undone_is_refused(rng, name):
    torch = framework_or_skip("torch")
    problem = make_problem(rng)
    arrays = {"q": to_torch(problem.q), "k": to_torch(problem.k), "v": to_torch(problem.v)}
    arrays["out"] = torch.empty_like(arrays["q"])
    arrays[name] = torch._neg_view(arrays[name])
    lens = to_torch(problem.rules["kv_lens"])
    for call in (leanattn.decode, leanattn.prepare):
        positional = [arrays[key] for key in ("q", "k", "v", "out")]
        out = {} if call is leanattn.prepare else {"out": positional.pop()}
        with pytest.raises(ValueError, match="negative bit"):
            call(*positional, **out, kv_lens=lens)
    if name == "out":
        return
    with pytest.raises(ValueError, match="negative bit"):
        leanattn.reference(arrays["q"], arrays["k"], arrays["v"], kv_lens=lens)
    resolved = [arrays[key].resolve_neg() for key in ("q", "k", "v")]  # as the dispatcher does for an operator
    importlib.import_module("leanattn.ops")
    given = torch.ops.leanattn.decode(arrays["q"], arrays["k"], arrays["v"], kv_lens=lens)
    assert torch.equal(given, leanattn.decode(*resolved, kv_lens=lens))


@pytest.mark.parametrize("order", ["torch first", "leanattn first"])
def test_importing_needs_no_torch(order):
    """leanattn imports without torch, and its operators come with leanattn.ops."""
    import subprocess
    import sys

    framework_or_skip("torch")
    first = "import torch, leanattn"
    if order == "leanattn first":
        first = "import leanattn, sys; assert 'torch' not in sys.modules; import torch, leanattn.ops"
    subprocess.run([sys.executable, "-c", f"{first}; torch.ops.leanattn.decode.default"], check=True)
