# SPDX-License-Identifier: Apache-2.0
"""How a batch is cut among workers: `leanattn plan` as an object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import _api, _core


class Plan:
    """The cut of a batch under one or more policies. In a notebook it shows itself; print() gives the text of `leanattn plan`."""

    def __init__(self, request: _core.PlanRequest):
        self._request = request
        self._data: dict[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        """The request, and for each of "policies" its segments (worker, seq, KV heads, tiles, tokens, start and end in tiles of time), the
        merges between them, busy_tiles of each worker, makespan_tiles and busy_share."""
        if self._data is None:
            self._data = json.loads(self._request.json())
        return self._data

    @property
    def svg(self) -> str:
        """The picture: a row a worker, a colour an output."""
        return self._request.svg()

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self._request.text()

    def __repr__(self) -> str:
        names = ", ".join(policy["policy"] for policy in self.data["policies"])
        return f"<Plan of {len(self.data['kv_lens'])} seqs on {self.data['workers']} workers: {names}>"


def plan(
    kv_lens: Sequence[int],
    *,
    q_heads: int = 32,
    kv_heads: int = 8,
    q_len: int = 1,
    workers: int = 108,
    tile_tokens: int = 256,
    policies: str | Sequence[str] = (),
    head_order: str = "along",
    batch_invariant: bool = False,
    fragment_cost_tiles: int = 0,
    window_left: int = -1,
) -> Plan:
    """How a batch of these lengths is cut among workers. Time is modelled: a segment takes its tiles and fragment_cost_tiles.

    kv_lens         tokens of each sequence; an array or a list
    policies        of "lean", "fa2", "flashdecoding", "flashdecoding:SPLITS"; one or several. (): lean, flashdecoding and fa2
    head_order      KV heads "along" the line or "beside" each other
    batch_invariant cuts on chunk borders only

    Raises ValueError for a value out of range.
    """
    names = [policies] if isinstance(policies, str) else list(policies)
    request = _core.PlanRequest(
        [int(length) for length in kv_lens],
        q_heads,
        kv_heads,
        q_len,
        workers,
        tile_tokens,
        [_api.parse_policy(name) for name in names],
        head_order,
        batch_invariant,
        fragment_cost_tiles,
        window_left,
    )
    request.json()  # its errors belong here
    return Plan(request)
