"""Attention over the paged key/value cache, as `torch.ops.sgl_kernel.{decode,extend}_attention_cpu`.

Shapes: B requests, T query tokens, L tokens of context, H query heads, K key/value heads (K divides H), D and V the
head sizes of keys and values. `req_to_token[request, position]` is the cache slot of that token.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCHEMAS = (
    "decode_attention_cpu(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale,"
    " Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token,"
    " Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn,"
    " int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()",
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer,"
    " Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,"
    " Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap,"
    " bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask,"
    " bool is_causal) -> ()",
)


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """Softmax attention in float32: query [T, H, D], keys [L, K, D], values [L, K, V] give [T, H, V].

    visible [T, L] is True where a query may look.
    """
    tokens, heads, size = query.shape
    groups = keys.shape[1]
    grouped = query.float().view(tokens, groups, heads // groups, size)
    scores = torch.einsum("tkgd,lkd->kgtl", grouped, keys.float()) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("kgtl,lkv->tkgv", weights, values.float()).reshape(tokens, heads, -1)


def decode_attention(  # noqa: PLR0913, PLR0917 - SGLang's signature
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token per request: store key/value at `loc` where given, then fill output [B, H, V].

    sliding_window_size counts the tokens a query may see, itself included; 0 or less is no window.
    """
    _refuse(cross=is_cross_attn, scaled=k_scale != 1.0 or v_scale != 1.0, capped=logit_cap > 0, sinks=sinks is not None)
    if key is not None and value is not None:
        k_buffer[loc] = key.reshape(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.reshape(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - sliding_window_size) if sliding_window_size > 0 else 0
        slots = req_to_token[request, first:length].long()
        result = attend(query[row : row + 1], k_buffer[slots], v_buffer[slots], sm_scale)
        output[row : row + 1] = result.to(output.dtype)


def extend_attention(  # noqa: PLR0913, PLR0917 - SGLang's signature
    q_extend: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Several new tokens per request, after a cached prefix: fill o_extend [sum of extend lengths, H, V].

    seq_lens count prefix and new tokens. tree_mask is one flat [new, new] block per request, True where a new token
    (row) may see another; the prefix is always visible. Without k_extend/v_extend all keys come from the cache.
    """
    _refuse(cross=is_cross_attn, scaled=k_scale != 1.0 or v_scale != 1.0, capped=logit_cap > 0, sinks=sinks is not None)
    tree_offset = 0
    for request, length, new, start in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    ):
        if new == 0:
            continue
        prefix = length - new
        fresh = slice(start, start + new)
        query = q_extend[fresh]
        if k_extend is None or v_extend is None:
            slots = req_to_token[request, :length].long()
            keys, values = k_buffer[slots], v_buffer[slots]
        else:
            slots = req_to_token[request, :prefix].long()
            new_keys = k_extend[fresh].reshape(new, -1, q_extend.shape[-1])
            new_values = v_extend[fresh].reshape(new, -1, o_extend.shape[-1])
            # without a prefix the cache may hold other shapes: MLA keeps latents there and attends to full heads
            keys = torch.cat([k_buffer[slots].to(new_keys.dtype), new_keys]) if prefix else new_keys
            values = torch.cat([v_buffer[slots].to(new_values.dtype), new_values]) if prefix else new_values
        visible: Tensor | None = None
        if tree_mask is not None:
            block = tree_mask.view(-1)[tree_offset : tree_offset + new * new].view(new, new).bool()
            tree_offset += new * new
            visible = torch.cat([torch.ones(new, prefix, dtype=torch.bool), block], dim=1)
        elif is_causal:
            at = torch.arange(prefix, length).unsqueeze(1)
            seen = torch.arange(length).unsqueeze(0)
            visible = seen <= at
            if sliding_window_size > 0:
                visible &= seen > at - sliding_window_size
        result = attend(query, keys, values, sm_scale, visible)
        o_extend[fresh] = result.to(o_extend.dtype)


def _refuse(**asked: bool) -> None:
    """NotImplementedError for what no model of the lab uses and the stand-in would compute wrongly."""
    names = {"cross": "cross attention", "scaled": "a scaled (fp8) cache", "capped": "a logit cap", "sinks": "sinks"}
    for key, name in names.items():
        if asked[key]:
            raise NotImplementedError(f"the lab's sgl_kernel has no attention with {name}")


def register() -> torch.library.Library:
    """Define both operators in the namespace `sgl_kernel`; they live as long as the returned library."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("decode_attention_cpu", decode_attention, "CPU")
    library.impl("extend_attention_cpu", extend_attention, "CPU")
    return library
