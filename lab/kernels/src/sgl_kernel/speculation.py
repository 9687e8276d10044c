"""EAGLE's token trees: build them from the drafter's choices, verify them greedily, prepare the next round.

A tree has n nodes per request, node 0 is the last verified token. Trees are kept as "first child" and "next sibling"
links, -1 for none. Names and parameters (also the spelling `retrive`) are SGLang's.
"""

from __future__ import annotations

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(  # noqa: PLR0913, PLR0917 - SGLang's signature
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and links of the trees whose nodes 1.. are the drafts `selected_index` [B, n - 1].

    A draft's number in the drafter's list, divided by topk, is its parent's place in parent_list [B, ...], which
    holds the parent's own number; place 0 is the root. tree_mask is flat: n rows per request, each the n tree nodes
    (QLEN_ONLY), or the verified tokens before them too, which are left as they are (FULL_MASK).
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"the lab's sgl_kernel has no tree mask mode {tree_mask_mode}")
    nodes = draft_token_num
    offset = 0
    lengths = verified_seq_len.tolist()
    for request, length in enumerate(lengths):
        parents = _parents(selected_index[request].tolist(), _row(parent_list, request, len(lengths)), topk)
        first_child, sibling = _links(parents)
        retrieve_index[request] = torch.arange(request * nodes, (request + 1) * nodes)
        for node in range(nodes):
            if first_child[node] is not None:
                retrieve_next_token[request, node] = first_child[node]
            if sibling[node] is not None:
                retrieve_next_sibling[request, node] = sibling[node]
        visible = torch.zeros(nodes, nodes, dtype=torch.bool)
        visible[:, 0] = True
        for node in range(nodes):
            path = _path(node, parents, depth)
            visible[node, path] = True
            positions[request * nodes + node] = length + len(path)
        width = nodes + (length if tree_mask_mode == FULL_MASK else 0)
        block = tree_mask.view(-1)[offset : offset + nodes * width].view(nodes, width)
        block[:, width - nodes :] = visible.to(block.dtype)
        offset += nodes * width


def _row(parent_list: Tensor, request: int, requests: int) -> list[int]:
    """The request's part of parent_list, which may be empty when every draft hangs on the root."""
    if parent_list.numel() == 0:
        return []
    return [int(value) for value in parent_list.reshape(requests, -1)[request].tolist()]


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int | None]:
    """The parent node of every node; None for the root and for a draft whose parent was not selected."""
    node_of: dict[int, int] = {}
    for node, number in enumerate(selected, start=1):
        node_of.setdefault(number, node)
    parents: list[int | None] = [None]
    for number in selected:
        place = number // topk
        parents.append(0 if place == 0 else node_of.get(parent_list[place]))
    return parents


def _links(parents: list[int | None]) -> tuple[list[int | None], list[int | None]]:
    """(first child, next sibling) of every node; siblings are in the order of their numbers."""
    first_child: list[int | None] = [None] * len(parents)
    sibling: list[int | None] = [None] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent is not None:
            sibling[node] = first_child[parent]
            first_child[parent] = node
    return first_child, sibling


def _path(node: int, parents: list[int | None], depth: int) -> list[int]:
    """The node and its ancestors, without the root, at most `depth` of them; empty for the root."""
    path: list[int] = []
    current: int | None = node
    while current and len(path) < depth:
        path.append(current)
        current = parents[current]
    return path


def verify_tree_greedy_cpu(  # noqa: PLR0913, PLR0917 - SGLang's signature
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree [B, n] along the target's own choices.

    target_predict [B, n] is the target's token after each node. Accepted nodes go to accept_index [B, steps + 1],
    their number (without the root) to accept_token_num [B], the target's tokens to predicts [B * n], at the node
    that each follows; the last of them is the bonus token.
    """
    chosen = target_predict.reshape(-1).tolist()
    for request in range(candidates.shape[0]):
        index = retrive_index[request].tolist()
        tokens = candidates[request].tolist()
        child, sibling = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        accepted, node = [index[0]], 0
        for _ in range(1, accept_index.shape[1]):
            node = child[node]
            while node != -1 and tokens[node] != chosen[accepted[-1]]:
                node = sibling[node]
            if node == -1:
                break
            accepted.append(index[node])
        accept_index[request, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[request] = len(accepted) - 1
        for position in accepted:
            predicts[position] = chosen[position]


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """The last accepted token of each request: accept_tokens is [B, accept_stride], accept_lens [B] count >= 1."""
    requests = accept_lens.shape[0]
    last = torch.arange(requests) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:requests] = accept_tokens.view(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """The cache slots of the accepted nodes (accept_index, -1 for none), closed up, in order."""
    flat = accept_index.view(-1)
    accepted = flat[flat >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and put its new token last, or at select_index [B] where given."""
    new_tokens = topk_index.view(-1)
    for request, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length <= 0:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        last = end - 1 if select_index is None else int(select_index[request])
        input_ids[last] = new_tokens[request].to(input_ids.dtype)
