# SPDX-License-Identifier: Apache-2.0
from typing import Any, final

from ._arrays import Array

@final
class Options:
    def __init__(
        self,
        *,
        policy: str = "lean",
        splits: int = 0,
        head_order: str = "auto",
        batch_invariant: bool = False,
        workers: int = 0,
        programmatic_launch: bool = False,
        cpu_isa: str | None = None,
        cuda_path: str | None = None,
        check_data: bool = False,
        data_status: int = 0,
    ) -> None: ...

@final
class Workspace:
    """Memory for calls on one device, "cpu", "cuda" or "cuda:N": it grows to what they need. On the CPU calls that share one run one after
    the other; on CUDA they must be on one stream or ordered otherwise. Calls inside `with workspace:` on this thread use it unless they
    are given another. A captured CUDA graph needs its workspace as long as it is replayed."""

    def __init__(self, device: str = "cpu") -> None: ...
    def reserve(self, nbytes: int) -> None:
        """Makes room ahead of the calls. Raises ValueError without the device."""
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def __enter__(self) -> Workspace: ...
    def __exit__(self, *args: Any) -> None: ...

@final
class Call:
    """A checked call on arrays that it keeps alive; made by prepare()."""

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array | None,
        kv_lens: Array | None,
        block_table: Array | None,
        cu_seqlens_q: Array | None,
        cu_seqlens_kv: Array | None,
        tree_mask: Array | None,
        alibi_slopes: Array | None,
        sinks: Array | None,
        q_len: int,
        heads_first: bool,
        causal: bool,
        window_left: int,
        scale: float,
        softcap: float,
        base2: bool,
        options: Options | None,
    ) -> None: ...
    def __call__(self, workspace: Workspace | None = None, stream: int | None = None) -> None:
        """Computes into out and lse. Lengths and page ids are read, and on the CPU checked (ValueError), each time."""
    @property
    def workspace_bytes(self) -> int:
        """What the call needs of a workspace, exact."""

@final
class PlanRequest:
    def __init__(
        self,
        kv_lens: list[int],
        q_heads: int,
        kv_heads: int,
        q_len: int,
        workers: int,
        tile_tokens: int,
        policies: list[tuple[str, int]],
        head_order: str,
        batch_invariant: bool,
        fragment_cost_tiles: int,
        window_left: int,
    ) -> None: ...
    def json(self) -> str: ...
    def text(self) -> str: ...
    def svg(self) -> str: ...

def decode(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    kv_lens: Array | None,
    block_table: Array | None,
    cu_seqlens_q: Array | None,
    cu_seqlens_kv: Array | None,
    tree_mask: Array | None,
    alibi_slopes: Array | None,
    sinks: Array | None,
    q_len: int,
    heads_first: bool,
    causal: bool,
    window_left: int,
    scale: float,
    softcap: float,
    base2: bool,
    options: Options | None,
    workspace: Workspace | None,
    stream: int | None,
) -> None: ...
def reference(
    q: Array,
    k: Array,
    v: Array,
    kv_lens: Array | None,
    block_table: Array | None,
    cu_seqlens_q: Array | None,
    cu_seqlens_kv: Array | None,
    tree_mask: Array | None,
    alibi_slopes: Array | None,
    sinks: Array | None,
    q_len: int,
    heads_first: bool,
    causal: bool,
    window_left: int,
    scale: float,
    softcap: float,
    base2: bool,
) -> tuple[Array, Array, Array, Array]: ...
def merge(o: Array, lse: Array, out: Array, out_lse: Array | None, base2: bool, stream: int | None) -> None: ...
def synchronize(stream: int) -> None: ...
def version() -> str: ...
def cpu_isas() -> list[str]: ...
def cuda_paths() -> list[str]: ...
def data_fault_sentence(data_status: int) -> str:
    """What the word that Options(data_status=…) names says: one sentence with sequence and slot, "" for 0, which is no fault."""

def cuda_absent() -> str: ...
def cuda_device_name() -> str: ...
def default_workers() -> int: ...
