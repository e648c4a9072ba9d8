# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: attn_implementation="leanattn", and a cache that is written in place.

    import leanattn.hf
    leanattn.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="leanattn")
    model.generate(**inputs, cache=leanattn.hf.KVCache(model.config), max_new_tokens=100)

Decode steps (up to 64 new tokens behind cached ones) go to torch.ops.leanattn.decode, in place and through the strides that they have;
prompts, training and whatever the kernel does not take go to PyTorch's scaled_dot_product_attention, or, with sinks or a soft-cap, which
that does not know, to the same computation written out. Any cache of transformers works; KVCache is the one that copies nothing.
Older versions of transformers 5 call the argument past_key_values.
fuse(model) makes the other kernels of a Llama's decode step few as well.

Under torch.compile a padding mask is taken as left padding, unseen; elsewhere it is looked at, and others go to PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from . import ops as ops
from ._hf_cache import DECODE_TOKENS, KVCache
from ._hf_fused import fuse

__all__ = ["KVCache", "attention", "fuse", "mask", "register"]

# Rows of a prompt whose logits are held at a time, where attention is written out.
_CHUNK = 256


def register(name: str = "leanattn") -> None:
    """Makes attn_implementation=name known to transformers. Doing so again changes nothing."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def _describes(mask_function: Any, local_size: int | None, config: Any, use_vmap: bool) -> bool:
    """True where "causal, and at most the last sliding_window tokens" is the whole mask."""
    if use_vmap:
        return False
    if local_size is None:
        return mask_function is causal_mask_function
    text = config if config is None else config.get_text_config()
    if getattr(text, "attention_chunk_size", None) == local_size or getattr(text, "use_bidirectional_attention", None):
        return False
    return getattr(text, "sliding_window", None) == local_size and getattr(text, "is_causal", True)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """What transformers hands to attention() as attention_mask.

    A decode step: int32 [1, 1, 1, batch], the kv_lens, new tokens included; with left padding [2, 1, 1, batch], the tokens to skip at the
    front of each sequence and the kv_lens behind them. Other calls: what sdpa gets, a mask [batch, 1, q_len, n] of bools or None.
    """
    fixed = isinstance(kv_offset, torch.Tensor)
    plain = allow_is_causal_skip or q_length == 1
    if q_length <= DECODE_TOKENS and kv_length > q_length and plain and _describes(mask_function, local_size, config, use_vmap):
        bounds = _bounds(batch_size, q_offset + q_length, kv_offset, attention_mask, device)
        if bounds is not None:
            return bounds
    if fixed:
        raise ValueError("a fixed KVCache with a sliding window takes causal masks with left padding: use a growing one")
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )


def _bounds(batch: int, end: Any, kv_offset: Any, padding: torch.Tensor | None, device: Any) -> torch.Tensor | None:
    """end: tokens up to the last new one, an int or a tensor. None: padding is not left padding."""
    skipped = None
    if padding is not None:
        if torch.compiler.is_compiling():
            skipped = (padding.cumsum(-1) == 0).sum(-1)
        else:
            seen = padding[:, : int(end)]
            if not seen.all():
                skipped = (seen.cumsum(-1) == 0).sum(-1)
                if seen.shape[1] < int(end) or not (seen.sum(-1) + skipped == int(end)).all():
                    return None
            elif seen.shape[1] < int(end):
                return None
    last = end - kv_offset
    if skipped is None and not isinstance(kv_offset, torch.Tensor):
        if isinstance(last, torch.Tensor):
            return last.to(device=device, dtype=torch.int32).expand(1, 1, 1, batch).contiguous()
        return torch.full((1, 1, 1, batch), last, dtype=torch.int32, device=device)
    first = (0 if skipped is None else skipped) - kv_offset
    first = torch.as_tensor(first, device=device).clamp(min=0).expand(batch)
    return torch.stack([first, (last - first).clamp(min=0)]).to(torch.int32)[:, None, None]


def _dense(bounds: torch.Tensor, q_len: int, n: int, window_left: int) -> torch.Tensor:
    """The mask [batch, 1, q_len, n] of bools that bounds stands for."""
    first = bounds[0, 0, 0] if bounds.shape[0] == 2 else torch.zeros_like(bounds[0, 0, 0])
    last = first + bounds[-1, 0, 0]
    token = torch.arange(n, device=bounds.device)
    at = (last[:, None] - q_len + torch.arange(q_len, device=bounds.device))[:, :, None]
    keep = (token <= at) & (token >= first[:, None, None])
    if window_left >= 0:
        keep &= token >= at - window_left
    return keep[:, None]


def _takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True where the kernel computes this: dtypes, head dims, devices, and no gradient."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    if query.dtype != key.dtype or value.dtype != key.dtype or query.dtype not in (dtypes[:2] if query.is_cuda else dtypes):
        return False
    if any(d % 8 or not 32 <= d <= 256 for d in (query.shape[-1], value.shape[-1])) or query.device.type not in ("cpu", "cuda"):
        return False
    strided = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    return strided and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))


def _decode(query: Any, key: Any, value: Any, bounds: Any, window_left: int, scaling: Any, softcap: Any, sinks: Any) -> torch.Tensor:
    """query [batch, q_heads, q_len, d], key and value [batch, kv_heads, n, d] → [batch, q_len, q_heads, d of value]"""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    sinks = None if sinks is None else sinks.detach().float()
    rules = (True, window_left, None, scaling, softcap or 0.0, None, sinks)
    if bounds.shape[0] == 1:
        return torch.ops.leanattn.decode(query, key, value, bounds.view(-1), None, None, 0, "NHD", *rules)
    # Sequences begin behind their padding: a ragged batch over the same memory. Its first sequence has to begin at 0; it is an empty one.
    apart = [_row_tokens(tensor) for tensor in (key, value)]
    if apart[0] is None or apart[0] != apart[1]:
        key, value = key.contiguous(), value.contiguous()
        apart[0] = key.shape[1]
    first, lens = bounds[0, 0, 0], bounds[1, 0, 0]
    batch, n = key.shape[:2]
    starts = torch.arange(batch, dtype=torch.int32, device=first.device) * apart[0] + first
    total = (batch - 1) * apart[0] + n
    starts = torch.nn.functional.pad(torch.nn.functional.pad(starts, (1, 0)), (0, 1), value=total)
    key, value = (tensor.as_strided((total, *tensor.shape[2:]), tensor.stride()[1:]) for tensor in (key, value))
    query = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, 0, 1, 0))
    lens = torch.nn.functional.pad(lens, (1, 0))
    return torch.ops.leanattn.decode(query, key, value, lens, None, starts, 0, "NHD", *rules)[1:]


def _row_tokens(tensor: torch.Tensor) -> Any:
    """How many tokens apart two sequences of [batch, n, heads, d] lie, where that is a whole number of them, else None."""
    row, token = tensor.stride(0), tensor.stride(1)
    return row // token if token and row % token == 0 else None


def _written_out(query: Any, key: Any, value: Any, mask: Any, scaling: float, softcap: Any, sinks: Any) -> torch.Tensor:
    """Attention with sinks or a soft-cap, _CHUNK rows at a time. mask: as in attention(), None: causal.
    Returns [batch, q_len, q_heads, d of value]."""
    q_len, n, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if mask is None and n > q_len:  # a prompt for an empty cache of a fixed size
        key, value, n = key[:, :, :q_len], value[:, :, :q_len], q_len
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    token = torch.arange(n, device=query.device)
    outputs = []
    for begin in range(0, q_len, _CHUNK):
        end = min(begin + _CHUNK, q_len)
        logits = query[:, :, begin:end] @ key.transpose(2, 3) * scaling
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        keep = token <= token[begin:end, None] if mask is None else mask[:, :, begin:end]
        if keep.dtype == torch.bool:
            logits = logits.masked_fill(~keep, torch.finfo(logits.dtype).min)
        else:
            logits = logits + keep
        if sinks is not None:
            sink = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], 3)
        weights = torch.softmax(logits, 3, dtype=logits.dtype)[..., :n]
        outputs.append(weights.to(value.dtype) @ value)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    query           [batch, q_heads, q_len, d]; key, value [batch, kv_heads, n, d]; any strides
    attention_mask  what mask() gave, or a mask of bools or of numbers to add, [batch, 1, q_len, n], or None
    sliding_window  tokens that are seen, the own one included; softcap: 0 or None is off; s_aux: [q_heads], the sinks

    Returns (out [batch, q_len, q_heads, d of value], None).
    """
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        window_left = -1 if sliding_window is None else sliding_window - 1
        if dropout == 0.0 and kwargs.get("position_bias") is None and _takes(query, key, value):
            return _decode(query, key, value, attention_mask, window_left, scaling, softcap, s_aux), None
        attention_mask = _dense(attention_mask, query.shape[2], key.shape[2], window_left)
    if softcap or s_aux is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _written_out(query, key, value, attention_mask, scaling, softcap, s_aux), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
