# SPDX-License-Identifier: Apache-2.0
"""Frameworks as test parameters; one that is not here skips with its reason."""

import importlib
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "leanattn",
    max_examples=int(os.environ.get("LEANATTN_TEST_EXAMPLES", "60")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("leanattn")


def framework_or_skip(name):
    """The module, or a skip that says why not: not installed, or no GPU for one that needs it."""
    module = pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
    if name == "cupy":
        try:
            module.cuda.runtime.getDeviceCount()
        except module.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"cupy: {error}", allow_module_level=True)
    return module


def cuda_or_skip():
    """torch on a GPU that leanattn runs on, or a skip that says what is missing."""
    torch = framework_or_skip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU for torch here", allow_module_level=True)
    leanattn = importlib.import_module("leanattn")
    absent = leanattn.info()["cuda_absent"]
    if absent:
        pytest.skip(absent, allow_module_level=True)
    return torch


@pytest.fixture
def rng():
    return np.random.default_rng(7)
