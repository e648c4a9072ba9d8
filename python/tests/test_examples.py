# SPDX-License-Identifier: Apache-2.0
"""The examples run and check themselves."""

import json
import pathlib
import subprocess
import sys

import pytest

import notebook
from conftest import cuda_or_skip, framework_or_skip

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_numpy_decode():
    assert "two shards merged" in run(EXAMPLES / "numpy_decode.py")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_paged(device):
    framework_or_skip("torch")
    if device == "cuda":
        cuda_or_skip()
    assert "pages free at the end: 160 of 160" in run(EXAMPLES / "torch_paged.py", device)


def test_speculative_tree():
    assert "7 draft tokens over 2000 in one call" in run(EXAMPLES / "speculative_tree.py")


def test_hf_generate():
    """With the small random model where the real one is not installed, else with that."""
    framework_or_skip("torch")
    framework_or_skip("transformers")
    assert "The same tokens both ways" in run(EXAMPLES / "hf_generate.py")


def test_schedule_notebook():
    """It runs, shows its pictures, and the outputs that are in it are those of today."""
    path = EXAMPLES / "schedule.ipynb"
    outputs = [[cell.get("outputs") for cell in book["cells"]] for book in (notebook.execute(path), json.loads(path.read_text("utf-8")))]
    assert outputs[0] == outputs[1], "python python/tests/notebook.py examples/schedule.ipynb writes them"
    assert sum("image/svg+xml" in shown.get("data", {}) for cell in outputs[0] for shown in cell or []) == 2


def test_the_readme_block():
    if not (ROOT / "README.md").exists():
        pytest.skip("the README is not beside these tests")
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    largest = float(run("-c", block))
    assert largest < 1e-5
