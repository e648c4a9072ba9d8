# SPDX-License-Identifier: Apache-2.0
"""The cache of leanattn.hf: a cache of transformers whose layers are written in place.

K and V of a layer lie as [batch, capacity, kv_heads, d], the order in which a decode step reads memory; what transformers sees are views
of it, [batch, kv_heads, tokens, d].
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

# The most new tokens that are a decode step. A layer with a window also keeps so many tokens beyond it, for crop() to go back to.
DECODE_TOKENS = 64
# Growing layers grow by an eighth of what they hold, in whole blocks: at most an eighth lies idle, and a token is moved eight times.
BLOCK_TOKENS = 256


def _heads_first(storage: torch.Tensor) -> torch.Tensor:
    return storage.transpose(1, 2)


class GrowingLayer(CacheLayerMixin):
    """A layer without a bound on its tokens. With sliding_window it holds that many tokens, DECODE_TOKENS for crop(), and a quarter of both
    as room: when the room is used up the tokens that can still be seen move to the front."""

    is_compileable = False
    is_croppable = True

    def __init__(self, sliding_window: int | None = None):
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.first = 0  # the position of the first stored token
        self.stored = 0
        self._k: Any = None  # [batch, capacity, kv_heads, d]
        self._v: Any = None

    @property
    def _kept(self) -> int:
        """Tokens that have to stay for those to come: sliding layers only."""
        assert self.sliding_window is not None
        return self.sliding_window - 1 + DECODE_TOKENS

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        for name, new in (("_k", key_states), ("_v", value_states)):
            batch, heads, _, head_dim = new.shape
            setattr(self, name, new.new_empty((batch, 0, heads, head_dim)))
        self.is_initialized = True
        self._show(0)

    def _show(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """keys and values: stored tokens from `first` on."""
        shown = _heads_first(self._k[:, first : self.stored]), _heads_first(self._v[:, first : self.stored])
        self.keys, self.values = shown
        return shown

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._k.shape[1]:
            return
        capacity = -(-(tokens + tokens // 8) // BLOCK_TOKENS) * BLOCK_TOKENS
        if self.sliding_window is not None and not self.record_past:
            capacity = max(tokens, min(capacity, self._limit))
        for name in ("_k", "_v"):
            old = getattr(self, name)
            new = old.new_empty((old.shape[0], capacity, *old.shape[2:]))
            new[:, : self.stored].copy_(old[:, : self.stored])
            setattr(self, name, new)

    @property
    def _limit(self) -> int:
        return self._kept + max(self._kept // 4, DECODE_TOKENS)

    def _slide(self) -> None:
        """Moves the last _kept tokens to the front."""
        away = self.stored - self._kept
        if away <= 0:
            return
        for storage in (self._k, self._v):
            moved = storage[:, away : self.stored]
            storage[:, : self._kept].copy_(moved if away >= self._kept else moved.clone())  # source and target may overlap
        self.first += away
        self.stored -= away

    def _before(self) -> int:
        """Stored tokens that the next ones are shown."""
        return self.stored if self.sliding_window is None else min(self.stored, self.sliding_window - 1)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens behind the stored ones and returns all that they may see, themselves included, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, before = key_states.shape[2], self._before()
        if self.sliding_window is not None and not self.record_past:
            if new > DECODE_TOKENS:
                return self._refill(key_states, value_states)
            if self.stored + new > self._limit:
                self._slide()
        end = self.stored + new
        self._reserve(end)
        self._k[:, self.stored : end].copy_(key_states.transpose(1, 2))
        self._v[:, self.stored : end].copy_(value_states.transpose(1, 2))
        self.stored = end
        return self._show(end - new - before)

    def _refill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A prompt for a layer with a window: all of it is seen once, its end is stored."""
        before, new = self._before(), key_states.shape[2]
        seen = [key_states, value_states]
        if before:
            old = (self._k, self._v)
            seen = [torch.cat([_heads_first(o[:, self.stored - before : self.stored]), s], 2) for o, s in zip(old, seen, strict=True)]
        total = self.first + self.stored + new
        kept = min(seen[0].shape[2], self._kept)
        self.stored = 0
        self._reserve(kept)
        for storage, tokens in zip((self._k, self._v), seen, strict=True):
            storage[:, :kept].copy_(_heads_first(tokens[:, :, -kept:]))
        self.first, self.stored = total - kept, kept
        self._show(0)
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = self._before()
        return before + query_length, self.first + self.stored - before

    def get_seq_length(self) -> int:
        return self.first + self.stored

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """From here on every token stays until crop()."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last −tokens_to_remove tokens. Raises ValueError where a window has passed what would be seen again."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): the number of tokens to remove is given as a negative number")
        left = self.stored + tokens_to_remove
        if left < 0 or (self.sliding_window is not None and left < min(self.sliding_window - 1, self.first + left)):
            raise ValueError(f"crop({tokens_to_remove}): {self.stored} tokens are stored, the first of them at position {self.first}")
        self.stored = left
        if self.sliding_window is not None and self.stored + DECODE_TOKENS > self._limit:
            self._slide()
        if self.is_initialized:
            self._show(0)

    def reset(self) -> None:
        self.first = self.stored = 0
        if self.is_initialized:
            self._show(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Sequence i becomes what beam_idx[i] was. Only those that change are copied."""
        if self.stored == 0:
            return
        source = beam_idx.to(self.device)
        changed = (source != torch.arange(source.shape[0], device=self.device)).nonzero().squeeze(1)
        if changed.numel() == 0:
            return
        for storage in (self._k, self._v):
            used = storage[:, : self.stored]
            used[changed] = used[source[changed]]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._k = self._k.repeat_interleave(repeats, 0)
            self._v = self._v.repeat_interleave(repeats, 0)
            self._show(0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._k, self._v = self._k[indices], self._v[indices]
            self._show(0)


class FixedLayer(StaticLayer):
    """A layer of max_cache_len tokens whose addresses stay, for torch.compile and CUDA graphs.

    Its tensors are written in the order in which they lie: a compiler then sees the strides that the kernel is given and copies nothing.
    """

    is_croppable = True
    cumulative_length: torch.Tensor

    def __init__(self, max_cache_len: int):
        super().__init__(max_cache_len=max_cache_len)
        self._k: Any = None  # [batch, capacity, kv_heads, d]
        self._v: Any = None

    @property
    def _capacity(self) -> int:
        return self.max_cache_len

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        # Zeros: what a mask leaves out is still multiplied, by 0, where PyTorch's own attention runs.
        self._k, self._v = (new.new_zeros((new.shape[0], self._capacity, new.shape[1], new.shape[3])) for new in (key_states, value_states))
        self.keys, self.values = _heads_first(self._k), _heads_first(self._v)
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (self._k, self._v, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        positions = torch.arange(key_states.shape[2], device=self.device) + self.cumulative_length
        self.cumulative_length.add_(key_states.shape[2])
        self._k.index_copy_(1, positions, key_states.transpose(1, 2))
        self._v.index_copy_(1, positions, value_states.transpose(1, 2))

    def _check_room(self, new: int) -> None:
        """Raises ValueError where it is known on the host that tokens do not fit: on a GPU the length is known there alone."""
        if torch.compiler.is_compiling() or self.is_sliding:
            return
        stored = int(self.cumulative_length) if self.is_initialized and self.device.type == "cpu" else 0
        if stored + new > self.max_cache_len:
            raise ValueError(f"max_len {self.max_cache_len} is full: {stored} tokens are stored, and {new} more do not fit")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens behind the others and returns the whole memory, as views. Raises ValueError, on the CPU and outside
        torch.compile, where they do not fit."""
        self._check_room(key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._write(key_states, value_states)
        return _heads_first(self._k), _heads_first(self._v)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): the number of tokens to remove is given as a negative number")
        self.cumulative_length.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            for tensor in (self._k, self._v):
                tensor.copy_(tensor.index_select(0, beam_idx.to(self.device)))


class FixedWindowLayer(FixedLayer):
    """A layer with a window whose addresses stay. A ring of `period` tokens, written twice side by side: the last tokens lie in one run
    wherever the ring's end is, so nothing moves, and the run's place is a number on the device."""

    is_sliding = True

    def __init__(self, max_cache_len: int, sliding_window: int):
        super().__init__(max_cache_len)
        self.sliding_window = sliding_window
        self.period = sliding_window - 1 + DECODE_TOKENS

    @property
    def _capacity(self) -> int:
        return 2 * self.period

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        new = key_states.shape[2]
        count = min(new, self.period)
        slots = (torch.arange(new - count, new, device=self.device) + self.cumulative_length) % self.period
        slots = torch.cat([slots, slots + self.period])
        self.cumulative_length.add_(new)
        for storage, given in ((self._k, key_states), (self._v, value_states)):
            tokens = given[:, :, new - count :].transpose(1, 2)
            storage.index_copy_(1, slots, torch.cat([tokens, tokens], 1))

    def _before(self) -> int:
        """For prompts, which are not compiled: this waits for the device."""
        return min(int(self.cumulative_length), self.sliding_window - 1) if self.is_initialized else 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to DECODE_TOKENS: writes them and returns the ring; get_mask_sizes says where its tokens are. More: returns those that are
        seen, in order."""
        if key_states.shape[2] <= DECODE_TOKENS:
            return super().update(key_states, value_states)
        before = self._before()
        seen = (key_states, value_states)
        if before:
            end = (int(self.cumulative_length) - 1) % self.period + 1 + self.period
            old = (_heads_first(storage[:, end - before : end]) for storage in (self._k, self._v))
            seen = (torch.cat([next(old), key_states], 2), torch.cat([next(old), value_states], 2))
        super().update(key_states, value_states)
        return seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Tokens, and the position of the first of them: negative while a ring is not full yet."""
        if query_length > DECODE_TOKENS:
            before = self._before()
            return before + query_length, (int(self.cumulative_length) if self.is_initialized else 0) - before
        total = self.cumulative_length + query_length
        return self._capacity, total - ((total - 1) % self.period + 1 + self.period)

    def crop(self, tokens_to_remove: int) -> None:
        """At most DECODE_TOKENS behind the farthest token that was written: the ring has passed what is before."""
        if tokens_to_remove < -DECODE_TOKENS:
            raise ValueError(f"crop({tokens_to_remove}): a fixed window goes back by at most {DECODE_TOKENS} tokens")
        super().crop(tokens_to_remove)


def _layer_like(layer: Any, max_len: int | None, chunked: bool) -> Any:
    """Our layer for one of transformers, or that one, if it is no attention. chunked: what it calls windows are chunks, for which a ring's
    order does not do."""
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingLayer(layer.sliding_window)
    if max_len is None or type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
        return layer
    window = None if type(layer) is StaticLayer or chunked else layer.max_cache_len
    if window is not None and 2 * (window - 1 + DECODE_TOKENS) < max_len:
        return FixedWindowLayer(max_len, window)
    return FixedLayer(max_len)


class KVCache(Cache):
    """K and V of a model, for generate(cache=…) and for calls of the model. One token costs one write: nothing is concatenated
    and nothing moves.

    config   the model's configuration: which layers have a window
    max_len  None: it grows, by an eighth at a time. A number of tokens: memory is taken at the first call and its addresses stay, for
             torch.compile and CUDA graphs; a step beyond it is a ValueError on the CPU

    Raises ValueError for a max_len below 1 or what is no configuration.

    A layer with a window w holds w − 1 tokens and 64 more that crop() can go back to: growing 1.25 of that, fixed twice that (all max_len
    tokens where these are fewer). Layers that are not attention are those of transformers.
    """

    def __init__(self, config: Any, max_len: int | None = None):
        if max_len is not None and (isinstance(max_len, bool) or not isinstance(max_len, Integral) or max_len < 1):
            raise ValueError(f"max_len {max_len!r}: a whole number of tokens above 0 is needed, or None")
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
        if not (hasattr(text, "num_hidden_layers") or hasattr(text, "layer_types")):
            hint = ": its config is" if isinstance(config, torch.nn.Module) else ": a configuration of transformers is"
            raise ValueError(f"config is a {type(config).__name__}{hint} needed, with num_hidden_layers or layer_types")
        theirs = DynamicCache(config=config) if max_len is None else StaticCache(config=config, max_cache_len=max_len)
        chunked = getattr(text, "attention_chunk_size", None) is not None
        super().__init__(layers=[_layer_like(layer, max_len, chunked) for layer in theirs.layers])

    @property
    def nbytes(self) -> int:
        """Bytes that K and V of this module's layers take, idle room included."""
        tensors = (getattr(layer, name, None) for layer in self.layers for name in ("_k", "_v"))
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
