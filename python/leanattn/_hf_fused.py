# SPDX-License-Identifier: Apache-2.0
"""leanattn.hf.fuse: a decode step of a Llama layer as six kernels, each of which starts while the one before it is ending.

The matrix products of one token read each weight once, so they are bound by memory like the attention: a block takes a few rows of the
weights, asks for all of them, and only then waits for the kernel before, whose result it multiplies. Norm, activation and residual are
part of the products.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from . import _core
from ._hf_cache import FixedLayer, KVCache

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer")

if triton is not None:

    @triton.jit
    def _product_kernel(
        x, norm, residual, weights, second, out, n, eps,
        K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        if OVERLAP:
            gdc_launch_dependents()
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        at = rows[:, None].to(tl.int64) * K + columns[None, :]
        inside = (rows < n)[:, None] & (columns < K)[None, :]
        w = tl.load(weights + at, inside, other=0.0, eviction_policy="evict_first")
        if GATED:
            w2 = tl.load(second + at, inside, other=0.0, eviction_policy="evict_first")
        if NORM:
            g = tl.load(norm + columns, columns < K, other=0.0).to(tl.float32)
        if OVERLAP:
            gdc_wait()
        v = tl.load(x + columns, columns < K, other=0.0).to(tl.float32)
        scale = 1.0
        if NORM:
            scale = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
            v = v * g
        y = tl.sum(w.to(tl.float32) * v[None, :], 1) * scale
        if GATED:
            y = y * tl.sigmoid(y) * (tl.sum(w2.to(tl.float32) * v[None, :], 1) * scale)
        if ADD:
            y += tl.load(residual + rows, rows < n).to(tl.float32)
        tl.store(out + rows, y.to(out.dtype.element_ty), rows < n)

    @triton.jit
    def _place_kernel(
        qkv, cos, sin, lens, q, k, v, k_token, k_head, v_token, v_head, capacity,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Rotates the heads of q and k, and writes k and v into the cache at the last of lens tokens."""
        if OVERLAP:
            gdc_launch_dependents()
            gdc_wait()
        head = tl.program_id(0)
        i = tl.arange(0, HALF)
        here = i < D // 2
        first = tl.load(qkv + head * D + i, here)
        second = tl.load(qkv + head * D + D // 2 + i, here)
        at = tl.load(lens).to(tl.int64) - 1
        write = here & (at >= 0) & (at < capacity)
        if head < Q_HEADS + KV_HEADS:
            a, b = first.to(tl.float32), second.to(tl.float32)
            turned = a * tl.load(cos + i, here) - b * tl.load(sin + i, here)
            turned2 = b * tl.load(cos + D // 2 + i, here) + a * tl.load(sin + D // 2 + i, here)
            if head < Q_HEADS:
                tl.store(q + head * D + i, turned.to(q.dtype.element_ty), here)
                tl.store(q + head * D + D // 2 + i, turned2.to(q.dtype.element_ty), here)
            else:
                to = k + at * k_token + (head - Q_HEADS) * k_head
                tl.store(to + i, turned.to(k.dtype.element_ty), write)
                tl.store(to + D // 2 + i, turned2.to(k.dtype.element_ty), write)
        else:
            to = v + at * v_token + (head - Q_HEADS - KV_HEADS) * v_head
            tl.store(to + i, first, write)
            tl.store(to + D // 2 + i, second, write)


def _overlaps(device: torch.device) -> dict[str, bool]:
    """Programmatic dependent launch, where there is such a thing."""
    overlap = torch.cuda.get_device_capability(device)[0] >= 9
    return {"OVERLAP": overlap, "launch_pdl": True} if overlap else {"OVERLAP": False}


def product(x: Any, weights: Any, norm: Any = None, eps: float = 0.0, second: Any = None, residual: Any = None) -> torch.Tensor:
    """One row x times weights' rows: of x's norm where there is one; silu(x·weights) · (x·second); plus residual."""
    n, columns = weights.shape
    width = max(triton.next_power_of_2(columns), 256)
    warps = 4 if width <= 8192 else 8  # 128 weights a thread, all of them in flight: the fastest on an H200
    rows = min(warps * 4096 // width, 16) // (1 if second is None else 2)
    rows = max(rows, 1)
    out = x.new_empty((*x.shape[:-1], n))
    _product_kernel[(triton.cdiv(n, rows),)](
        x, x if norm is None else norm, x if residual is None else residual, weights, weights if second is None else second, out, n, eps,
        K=columns, WIDTH=width, ROWS=rows, NORM=norm is not None, GATED=second is not None, ADD=residual is not None,
        num_warps=warps, **_overlaps(x.device),
    )  # fmt: skip
    return out


_attention_options: Any = None


def _attend(q, k, v, out, lens, scale):
    global _attention_options
    if _attention_options is None:
        _attention_options = _core.Options(programmatic_launch=True)
    _core.decode(q, k, v, out, None, lens, None, None, None, None, None, None, 0, False, True, -1, scale, 0.0, False,
                 _attention_options, None, None)  # fmt: skip


def _layer_step(hidden, lens, cos, sin, k, v, norm, qkv, o, norm2, gate, up, down, eps, eps2, scale):
    _, capacity, kv_heads, d = k.shape
    q_heads = o.shape[1] // d
    projected = product(hidden, qkv, norm, eps)
    q, out = hidden.new_empty((1, 1, q_heads, d)), hidden.new_empty((1, 1, q_heads, d))
    _place_kernel[(q_heads + 2 * kv_heads,)](
        projected, cos, sin, lens, q, k, v, k.stride(1), k.stride(2), v.stride(1), v.stride(2), capacity,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, D=d, HALF=triton.next_power_of_2(d // 2), num_warps=1, **_overlaps(q.device),
    )  # fmt: skip
    _attend(q, k, v, out, lens, scale)
    hidden = product(out.view((*hidden.shape[:-1], q_heads * d)), o, residual=hidden)
    return product(product(hidden, gate, norm2, eps2, second=up), down, residual=hidden)


def _row_product(x, weights):
    return product(x, weights)


_library = torch.library.Library("leanattn", "FRAGMENT")
_library.define(
    "llama_layer(Tensor hidden, Tensor lens, Tensor cos, Tensor sin, Tensor(a!) k, Tensor(b!) v, Tensor norm, Tensor qkv, "
    "Tensor o, Tensor norm2, Tensor gate, Tensor up, Tensor down, float eps, float eps2, float scale) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define("row_product(Tensor x, Tensor weights) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
for _name, _function, _fake in (
    ("llama_layer", _layer_step, lambda hidden, *_: torch.empty_like(hidden)),
    ("row_product", _row_product, lambda x, weights: x.new_empty((*x.shape[:-1], weights.shape[0]))),
):
    _library.impl(_name, _function, "CUDA")
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"leanattn::{_name}", _fake, lib=_library)


def _one_row(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """True where x is one token on a GPU, for inference."""
    if not x.is_cuda or x.numel() != x.shape[-1] or x.dtype != weights.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return not torch.is_grad_enabled() or not (x.requires_grad or weights.requires_grad)


def _layer_forward(self, hidden_states, attention_mask=None, position_ids=None, position_embeddings=None, **kwargs):
    """A layer's forward: the fused step where it is one, else what it was."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    attention = self.self_attn
    if (
        isinstance(cache, KVCache)
        and attention_mask is not None
        and attention_mask.dtype == torch.int32
        and attention_mask.numel() == 1
        and attention.config._attn_implementation == self.leanattn_name
        and _one_row(hidden_states, self.leanattn_qkv)
        and position_embeddings[0].numel() == attention.head_dim
    ):
        layer = cache.layers[attention.layer_idx]
        if type(layer) is FixedLayer and layer.is_initialized:
            mlp, norm, norm2 = self.mlp, self.input_layernorm, self.post_attention_layernorm
            cos, sin = position_embeddings
            out = torch.ops.leanattn.llama_layer(
                hidden_states, attention_mask.view(-1), cos.reshape(-1), sin.reshape(-1), layer._k, layer._v,
                norm.weight, self.leanattn_qkv, attention.o_proj.weight, norm2.weight, mlp.gate_proj.weight, mlp.up_proj.weight,
                mlp.down_proj.weight, norm.variance_epsilon, norm2.variance_epsilon, attention.scaling,
            )  # fmt: skip
            # Not by the operator: inductor may compute lens, which come from it, again behind a mutation that it does not see into.
            layer.cumulative_length.add_(1)
            return out
    return type(self).forward(
        self, hidden_states, attention_mask=attention_mask, position_ids=position_ids, position_embeddings=position_embeddings, **kwargs
    )


def _head_forward(self, x):
    if self.bias is None and _one_row(x, self.weight):
        return torch.ops.leanattn.row_product(x, self.weight)
    return type(self).forward(self, x)


def _replace_forward(module: Any, forward: Any) -> None:
    module.forward = types.MethodType(forward, module)


def _refusal(layer: Any) -> str | None:
    """What is not as fuse() needs it."""
    if type(layer).__name__ not in _LAYERS:
        return f"{type(layer).__name__}; supported are {', '.join(_LAYERS)}"
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    linears = [getattr(attention, f"{name}_proj") for name in "qkvo"] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if any(type(linear) is not torch.nn.Linear or linear.bias is not None for linear in linears):
        return "projections that are not plain Linear modules without a bias"
    if attention.config.hidden_act not in ("silu", "swish"):
        return f"the activation {attention.config.hidden_act}; supported is silu"
    if getattr(attention.config, "sliding_window", None) is not None:
        return "a sliding window"
    if attention.head_dim % 8 or not 32 <= attention.head_dim <= 256:
        return f"head_dim {attention.head_dim}; supported are 32 to 256 in steps of 8"
    if any(linear.in_features % 8 or linear.in_features > 32768 for linear in linears):
        return "a width that is no multiple of 8, or above 32768"
    for linear in linears:
        if not linear.weight.is_cuda:
            return f"weights on {linear.weight.device}; supported is a GPU, with CUDA"
    return None


def fuse(model: Any, name: str = "leanattn") -> Any:
    """Makes decode steps of batch 1 with a fixed KVCache, on a GPU and in 16-bit floating point, a few kernels a layer. Returns model.

    Other calls go where they went. The weights of q, k and v become one tensor that theirs are parts of, and modules inside a layer are not
    called in a fused step: call this when the model is loaded and where it stays, and nothing hooks on to its layers. Raises ValueError,
    and changes nothing, where the layers are not those of a Llama, where they do not lie on a GPU, or without Triton.
    """
    layers: list[Any] = list(model.get_decoder().layers)
    for layer in layers:
        refusal = _refusal(layer)
        if refusal is not None:
            raise ValueError(f"fuse: {refusal}")
    if triton is None:
        raise ValueError("fuse: Triton is not installed")
    for layer in layers:
        projections = [getattr(layer.self_attn, f"{part}_proj") for part in "qkv"]
        packed = torch.cat([projection.weight.detach() for projection in projections])
        begin = 0
        for projection in projections:
            projection.weight.data = packed[begin : begin + projection.out_features]
            begin += projection.out_features
        layer.register_buffer("leanattn_qkv", packed, persistent=False)  # a buffer: CUDA graphs copy other tensors
        layer.leanattn_name = name
        _replace_forward(layer, _layer_forward)
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        _replace_forward(head, _head_forward)
    return model
