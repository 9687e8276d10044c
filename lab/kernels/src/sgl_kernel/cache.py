"""Bookkeeping of the key/value cache's slots.

`req_to_token` [requests, positions] holds the slot of every token; `req_pool_indices` [B] are the rows of the
batch's requests. Names and parameters are SGLang's.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write out_cache_loc, request after request, into positions start_offset..end_offset [B] of the table."""
    taken = 0
    for request, start, end in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The inverse: collect positions start_offset..end_offset [B] of the table into out_cache_loc."""
    taken = 0
    for request, start, end in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[taken : taken + end - start] = req_to_token[request, start:end].to(out_cache_loc.dtype)
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Collect the topk * num_steps slots behind each request's seq_lens [B] into out_cache_loc."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """One table row per request and branch [B * topk, pool_len]: the committed prefix, then the branch's own slots.

    In `req_to_token` branch k of a request has its slots at seq_len + k * num_steps.
    """
    table = torch.zeros((req_pool_indices.shape[0] * topk, pool_len), dtype=req_to_token.dtype)
    row = 0
    for request, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        slots = req_to_token[request]
        for branch in range(topk):
            own = slots[length + branch * num_steps :][: min(num_steps, pool_len - length)]
            table[row, :length] = slots[:length]
            table[row, length : length + own.shape[0]] = own
            row += 1
    return table


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move the cache rows src_loc [N] to tgt_loc [N] in every layer's buffer.

    data_ptrs [layers] are the buffers' addresses, strides [layers] a row's size in bytes. All rows of a layer are
    read before the first is written: sources and targets may overlap.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + target * stride, row, stride)


def _spans(requests: Tensor, starts: Tensor, ends: Tensor) -> zip[tuple[int, int, int]]:
    """(row, start, end) of each request of the batch, as plain numbers."""
    return zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
