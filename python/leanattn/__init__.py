# SPDX-License-Identifier: Apache-2.0
"""Exact decode attention on arrays you already have: NumPy, PyTorch, JAX and CuPy, on the CPU and on CUDA, nothing copied.

decode          contiguous, head-major or ragged K and V          decode_paged     a paged cache behind a block table
prepare         the same calls once checked, to run many times    merge            joins attention over shards of a context
reference       the right values in float64                       plan             how a batch is cut, as data and as a picture
Options         schedule, workers, bits that do not vary          Workspace        memory for calls
data_fault_sentence   what a check on the device has found
flash_attn_with_kvcache, BatchDecodeWithPagedKVCacheWrapper       the call shapes of FlashAttention and of FlashInfer
info            version, backends, instruction sets, devices
leanattn.hf     attn_implementation="leanattn" for Hugging Face transformers, and a cache; imported by itself

Inside torch.compile the same functions become the operators of `leanattn.ops`, once that is imported; it imports itself here when
torch was imported before. Errors are ValueError with a sentence that names the argument.
"""

import sys

from ._api import Options, Reference, Workspace, decode, decode_paged, merge, merge_shards, prepare, reference
from ._core import Call, data_fault_sentence
from ._core import version as _version
from ._flash_attention import append_kv, flash_attn_with_kvcache
from ._flashinfer import BatchDecodeWithPagedKVCacheWrapper
from ._info import info
from ._plan import Plan, plan

if "torch" in sys.modules:
    from . import ops as ops

__version__ = _version()

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "Call",
    "Options",
    "Plan",
    "Reference",
    "Workspace",
    "append_kv",
    "data_fault_sentence",
    "decode",
    "decode_paged",
    "flash_attn_with_kvcache",
    "info",
    "merge",
    "merge_shards",
    "plan",
    "prepare",
    "reference",
]
