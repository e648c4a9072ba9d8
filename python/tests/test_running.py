# SPDX-License-Identifier: Apache-2.0
"""Prepared calls, workspaces, threads, ^C."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import leanattn
from check import assert_close, make_problem


def test_a_prepared_call_reads_what_its_arrays_hold_by_then(rng):
    problem = make_problem(rng, layout="paged")
    out, lse = np.empty_like(problem.q), np.empty((3, 6), np.float32)
    call = leanattn.prepare(problem.q, problem.k, problem.v, out, lse=lse, **problem.rules)
    call()
    np.testing.assert_array_equal(out, problem.run())
    problem.rules["kv_lens"][0] = 33
    problem.q *= 2
    call(leanattn.Workspace())
    assert_close(out, lse, problem.right(), "float32")
    problem.rules["kv_lens"][0] = 5000
    with pytest.raises(ValueError, match="seq 0: kv_len 5000 is outside"):
        call()


def test_a_prepared_call_keeps_its_arrays(rng):
    problem = make_problem(rng)
    out, expected = np.empty_like(problem.q), problem.run()
    call = leanattn.prepare(problem.q.copy(), problem.k.copy(), problem.v.copy(), out, kv_lens=problem.rules["kv_lens"].copy())
    junk = [np.full_like(problem.k, np.nan) for _ in range(8)]
    call()
    np.testing.assert_array_equal(out, expected)
    del junk


def test_a_workspace_grows_to_the_need_and_serves_any_call(rng):
    workspace = leanattn.Workspace()
    assert workspace.nbytes == 0 and workspace.device == "cpu"
    small, large = make_problem(rng), make_problem(rng, kv_lens=(400,) * 4, q_heads=16, kv_heads=1, q_len=4)
    for problem in (small, large, small):
        np.testing.assert_array_equal(problem.run(workspace=workspace), problem.run())
    call = leanattn.prepare(large.q, large.k, large.v, np.empty_like(large.q), **large.rules)
    assert workspace.nbytes >= call.workspace_bytes > 0
    workspace.reserve(1 << 20)
    assert workspace.nbytes >= 1 << 20


def test_with_a_workspace(rng):
    problem = make_problem(rng, kv_lens=(400,) * 4)
    outer, inner = leanattn.Workspace(), leanattn.Workspace()
    with outer:
        with inner:
            problem.run()
        assert inner.nbytes > 0 and outer.nbytes == 0
        problem.run()
        assert outer.nbytes == inner.nbytes
    with pytest.raises(RuntimeError, match="mine"), inner:
        raise RuntimeError("mine")


def test_threads_on_one_workspace_take_turns(rng):
    problems = [make_problem(rng, kv_lens=(300 + 10 * i,) * 3) for i in range(4)]
    expected = [problem.run() for problem in problems]
    workspace, wrong = leanattn.Workspace(), []

    def work(i):
        for _ in range(50):
            if not np.array_equal(problems[i].run(workspace=workspace), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_gil_is_released(rng):
    """Another thread runs Python while a long call computes."""
    q = rng.standard_normal((1, 8, 128)).astype(np.float32)
    k = np.zeros((1, 200_000, 1, 128), np.float32)
    call = leanattn.prepare(q, k, k, np.empty_like(q), options=leanattn.Options(workers=1))
    call()
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    done.set()
    thread.join()
    assert sum(begin < t < end for t in ticks) >= 2, f"no tick in a call of {end - begin:.3f} s"


@pytest.mark.parametrize("what", ["decode", "reference"])
def test_control_c_ends_it(what):
    """A loop of calls, and one long reference, end with KeyboardInterrupt soon after the signal."""
    program = textwrap.dedent("""
        import signal, sys
        import numpy as np, leanattn
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so do their children
        q = np.ones((64, 32, 128), np.float32)
        k = np.zeros((64, 4096, 2, 128), np.float32)
        print("ready", flush=True)
        try:
            while True:
                leanattn.decode(q, k, k) if sys.argv[1] == "decode" else leanattn.reference(q, k, k)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", program, what], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        begin = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(timeout=30) == 0
        assert time.monotonic() - begin < 10
    finally:
        process.kill()


@pytest.mark.parametrize("isa", leanattn.info()["isas"])
def test_every_instruction_set(rng, isa):
    problem = make_problem(rng, dtype="bfloat16")
    o, lse = problem.run(return_lse=True, options=leanattn.Options(cpu_isa=isa))
    assert_close(o, lse, problem.right(), "bfloat16")


def test_plan_is_data_text_and_a_picture():
    plan = leanattn.plan([4096, 1000, 0], q_heads=8, kv_heads=2, workers=5, policies=["lean", "flashdecoding:4"])
    names = [policy["policy"] for policy in plan.data["policies"]]
    assert names == ["lean", "flashdecoding:4"] and plan.data["kv_lens"] == [4096, 1000, 0]
    for policy in plan.data["policies"]:
        tiles = sum(segment["tiles"][1] - segment["tiles"][0] for segment in policy["segments"])
        assert tiles == 2 * (16 + 4 + 1)
    assert plan._repr_svg_() == plan.svg and plan.svg.startswith("<svg")
    assert "lean" in str(plan) and repr(plan) == "<Plan of 3 seqs on 5 workers: lean, flashdecoding:4>"
    assert len(leanattn.plan(np.array([100, 20])).data["policies"]) == 3
    for bad, sentence in (({"workers": 0}, "workers 0: 1"), ({"policies": "lean:3"}, "only flashdecoding"), ({"q_heads": 7}, "q_heads 7")):
        with pytest.raises(ValueError, match=sentence):
            leanattn.plan([100], **bad)


def test_python_m_leanattn_answers_with_info():
    text = subprocess.run([sys.executable, "-m", "leanattn"], check=True, capture_output=True, text=True).stdout
    assert text.startswith(f"leanattn {leanattn.__version__}")
    facts = json.loads(
        subprocess.run([sys.executable, "-m", "leanattn", "info", "--json"], check=True, capture_output=True, text=True).stdout
    )
    assert facts == leanattn.info()
    assert facts["backends"]["cpu"] and facts["backends"]["cuda"] == (facts["cuda_absent"] == "")
