# SPDX-License-Identifier: Apache-2.0
"""What this build can run here."""

from __future__ import annotations

import platform
from typing import Any

from . import _core


def info() -> dict[str, Any]:
    """version; backends: {"cpu", "cuda"} → whether it runs here; isas: instruction sets of the CPU backend, fastest first; threads of a
    call; cuda_device: its name or None; cuda_paths: kernels that run on it, fastest first; cuda_absent: why CUDA does not run, or ""."""
    absent = _core.cuda_absent()
    return {
        "version": _core.version(),
        "backends": {"cpu": True, "cuda": not absent},
        "isas": _core.cpu_isas(),
        "threads": _core.default_workers(),
        "cuda_device": _core.cuda_device_name() or None,
        "cuda_paths": _core.cuda_paths(),
        "cuda_absent": absent,
        "python": platform.python_version(),
    }


def info_text() -> str:
    facts = info()
    cuda = "available" if facts["backends"]["cuda"] else facts["cuda_absent"]
    lines = [
        f"leanattn {facts['version']}, Python {facts['python']}",
        f"backends   cpu: available; cuda: {cuda}",
        f"threads    {facts['threads']}",
        f"ISA        {facts['isas'][0]} in use; this machine runs {', '.join(facts['isas'])}",
    ]
    if facts["cuda_device"]:
        lines += [f"GPU        {facts['cuda_device']}", f"GPU paths  {', '.join(facts['cuda_paths'])}"]
    return "\n".join(lines)
