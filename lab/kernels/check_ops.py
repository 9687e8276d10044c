"""Compare the lab's `sgl_kernel` with SGLang's own Triton kernels and with PyTorch, on random cases.

Runs in an interpreter that has the engine and this distribution installed, e.g.
``ENGINE/bin/python lab/kernels/check_ops.py --seeds 12``. The Triton kernels run in Triton's interpreter on the CPU.
Every seed is one case of every function. Exit status 0: all equal; 1: the first difference is printed with its seed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"  # before SGLang imports Triton
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import sgl_kernel
import torch
from sglang.kernels.ops.kvcache import cache_move
from sglang.kernels.ops.speculative import cache_locs, eagle, multi_layer_eagle, spec_tree
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative.eagle_utils import organize_draft_results
from torch import Tensor

SHAPES = ((1, 3, 4), (4, 3, 8), (2, 4, 6), (8, 5, 32))  # topk, steps, nodes of the tree
VOCABULARY = 50
ROWS, POSITIONS = 6, 256


class Trees(NamedTuple):
    """A batch of draft trees, and the tokens of their nodes [B, n]."""

    topk: int
    steps: int
    nodes: int
    parents: Tensor
    selected: Tensor
    drafts: Tensor
    lengths: Tensor


def same(what: str, ours: Tensor, theirs: Tensor) -> None:
    """AssertionError with both tensors unless they are equal, bit by bit."""
    if not torch.equal(ours, theirs):
        raise AssertionError(f"{what}: ours {ours.tolist()}, SGLang's {theirs.tolist()}")


def number(low: int, high: int) -> int:
    """A random number, both ends included."""
    return int(torch.randint(low, high + 1, (1,)))


def random_trees(seed: int) -> Trees:
    """What the drafter hands over after its last step, built as SGLang builds it from scores."""
    topk, steps, nodes = SHAPES[seed % len(SHAPES)]
    batch = number(1, 3)
    scores, tokens, parents = [], [], []
    for step in range(steps):
        first = step == 0
        scores.append(torch.rand(batch, 1 if first else topk, topk) * 0.7**step)
        tokens.append(torch.randint(0, VOCABULARY, (batch, topk if first else topk * topk)))
        if first:
            parents.append(torch.arange(-1, topk).repeat(batch, 1))
        else:
            chosen = torch.stack([torch.randperm(topk * topk)[:topk] for _ in range(batch)])
            parents.append(chosen + topk + topk * topk * (step - 1))
    parent_list, selected, drafts = organize_draft_results(scores, tokens, parents, nodes)
    return Trees(topk, steps, nodes, parent_list.long(), selected, drafts, torch.randint(1, 20, (batch,)))


def build(function: Callable[..., None], trees: Trees, mode: int) -> tuple[Tensor, Tensor, Tensor]:
    """(mask, positions, links [3, B, n]) as the function fills them."""
    batch, nodes = trees.lengths.shape[0], trees.nodes
    prefix = int(trees.lengths.sum()) * nodes if mode == spec_tree.TreeMaskMode.FULL_MASK else 0
    mask = torch.ones(prefix + nodes * nodes * batch, dtype=torch.bool)
    positions = torch.zeros(batch * nodes, dtype=torch.long)
    links = torch.full((3, batch, nodes), -1, dtype=torch.long)
    function(
        trees.parents, trees.selected, trees.lengths, mask, positions, *links,
        trees.topk, trees.steps, nodes, spec_tree.TreeMaskMode(mode),
    )  # fmt: skip
    return mask, positions, links


def check_trees(seed: int) -> None:
    """Building in both mask modes, then greedy verification of a target that follows the tree part of the way."""
    trees = random_trees(seed)
    links = torch.empty(0)
    for mode in (spec_tree.TreeMaskMode.QLEN_ONLY, spec_tree.TreeMaskMode.FULL_MASK):
        ours = build(sgl_kernel.build_tree_kernel_efficient_cpu, trees, mode)
        theirs = build(spec_tree.sgl_build_tree_kernel_triton, trees, mode)
        for what, left, right in zip(("mask", "positions", "links"), ours, theirs, strict=True):
            same(f"build_tree {mode.name} {what}", left, right)
        links = ours[2]

    batch, nodes = trees.lengths.shape[0], trees.nodes
    candidates = torch.cat([torch.randint(0, VOCABULARY, (batch, 1)), trees.drafts], dim=1)
    target = torch.randint(0, VOCABULARY, (batch, nodes))
    for request in range(batch):
        node = int(links[1, request, 0])
        parent = 0
        while node != -1 and torch.rand(1) > 0.2:
            while int(links[2, request, node]) != -1 and torch.rand(1) < 0.4:
                node = int(links[2, request, node])
            target[request, parent] = candidates[request, node]
            parent, node = node, int(links[1, request, node])
    results = []
    for own in (True, False):
        predicts = torch.zeros(batch * nodes, dtype=torch.int32)
        accepted = torch.full((batch, trees.steps + 1), -1, dtype=torch.int32)
        count = torch.zeros(batch, dtype=torch.int32)
        arguments = (predicts, accepted, count, candidates, *links, target)
        if own:
            sgl_kernel.verify_tree_greedy_cpu(*arguments)
        else:
            spec_tree.verify_tree_greedy_kernel_triton[(batch,)](
                *arguments, batch_size=batch, num_speculative_tokens=trees.steps + 1, num_draft_tokens=nodes
            )
        results.append((predicts, accepted, count))
    for what, left, right in zip(("predicts", "accepted", "count"), *results, strict=True):
        same(f"verify_tree {what}", left, right)


def check_slots(seed: int) -> None:
    """Every function that reads or writes the table of cache slots."""
    batch = number(1, 3)
    topk, steps, _ = SHAPES[seed % len(SHAPES)]
    table = torch.randint(0, 999, (ROWS, POSITIONS), dtype=torch.int32)
    rows = torch.randperm(ROWS)[:batch]
    starts = torch.randint(0, 20, (batch,))
    ends = starts + torch.randint(1, 40, (batch,))
    total = int((ends - starts).sum())

    ours, theirs = torch.zeros(total, dtype=torch.long), torch.zeros(total, dtype=torch.long)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, starts, ends, ours, POSITIONS)
    cache_locs.assign_extend_cache_locs[(batch,)](rows, table, starts, ends, theirs, POSITIONS, 4)
    same("assign_extend_cache_locs", ours, theirs)

    fresh = torch.randint(0, 999, (total,))
    left, right = table.clone(), table.clone()
    sgl_kernel.assign_req_to_token_pool_cpu(rows, left, starts, ends, fresh, POSITIONS)
    allocation.assign_req_to_token_pool[(batch,)](rows, right, starts, ends, fresh, POSITIONS, 4)
    same("assign_req_to_token_pool", left, right)

    ours = torch.zeros(batch * topk * steps, dtype=torch.long)
    theirs = torch.zeros_like(ours)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, starts, ours, POSITIONS, topk, steps)
    cache_locs.assign_draft_cache_locs_contiguous[(batch,)](rows, table, starts, theirs, POSITIONS, topk, steps)
    same("assign_draft_cache_locs_contiguous", ours, theirs)

    check_draft_metadata(table, rows, starts, topk, steps)


def check_draft_metadata(table: Tensor, rows: Tensor, lengths: Tensor, topk: int, steps: int) -> None:
    """Our expanded table holds, row after row, what SGLang's kernel lists as flat indices for each draft step."""
    batch = rows.shape[0]
    ours = sgl_kernel.build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, POSITIONS)
    flat = torch.zeros((steps, batch * topk * POSITIONS), dtype=torch.int32)
    bounds = torch.zeros((steps, batch * topk + 1), dtype=torch.int32)
    positions = lengths.repeat_interleave(topk)
    cache_locs.generate_draft_decode_kv_indices[(steps, batch, topk)](
        rows, table, lengths, flat, bounds, positions, POSITIONS, flat.shape[1], bounds.shape[1], 4, 8, 32, 1
    )
    for step in range(steps):
        end = positions + step + 1
        listed = torch.cat([ours[row, : int(end[row])] for row in range(batch * topk)])
        same(f"build_draft_decode_metadata step {step}", listed, flat[step, : listed.numel()])


def check_bookkeeping(seed: int) -> None:
    """Bonus tokens, accepted slots, rotation of the input, and rows moved inside the cache."""
    batch, stride = number(1, 3), number(2, 5)
    tokens = torch.randint(0, VOCABULARY, (batch * stride,), dtype=torch.int32)
    counts = torch.randint(1, stride + 1, (batch,), dtype=torch.int32)
    ours, theirs = torch.zeros(batch, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, counts, ours, stride)
    eagle.fill_bonus_tokens[(batch,)](tokens, counts, theirs, stride)
    same("fill_bonus_tokens", ours, theirs)

    size = batch * stride
    index = torch.where(torch.rand(size) < 0.4, torch.tensor(-1), torch.randint(0, 5, (size,)))
    slots = torch.randint(0, 999, (30,))
    ours, theirs = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, slots, ours)
    eagle.fill_accept_out_cache_loc[(size,)](index, slots, theirs, 16)
    same("fill_accept_out_cache_loc", ours, theirs)

    lengths = torch.randint(0, 7, (batch,))
    starts = torch.cumsum(lengths, 0) - lengths
    ids = torch.randint(0, VOCABULARY, (int(lengths.sum()) + 1,))
    new = torch.randint(0, VOCABULARY, (batch, 1))
    select = starts + torch.clamp(lengths - number(1, 2), min=0) if seed % 2 else None
    left, right = ids.clone(), ids.clone()
    sgl_kernel.rotate_input_ids_cpu(left, starts, lengths, new, select)
    block = 4096 if select is not None else 8
    multi_layer_eagle.rotate_input_ids_kernel[(batch,)](right, starts, lengths, new, select, BLOCK_SIZE=block)
    same("rotate_input_ids", left, right)

    layers = [torch.rand(16, width) for width in (3, 8)]
    left_layers, right_layers = [layer.clone() for layer in layers], [layer.clone() for layer in layers]
    moved = number(1, 8)
    source, target = torch.randperm(16)[:moved], torch.randperm(16)[:moved]
    strides = torch.tensor([layer.shape[1] * layer.element_size() for layer in layers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(addresses(left_layers), strides, target, source)
    cache_move.copy_all_layer_kv_cache_tiled[(len(layers), 1)](
        addresses(right_layers).to(torch.uint64), strides, target, source, moved, 8, BYTES_PER_TILE=64
    )
    for layer, (ours, theirs) in enumerate(zip(left_layers, right_layers, strict=True)):
        same(f"copy_all_layer_kv_cache layer {layer}", ours, theirs)


def addresses(tensors: list[Tensor]) -> Tensor:
    """Where the tensors' data lie."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def check_attention(seed: int) -> None:
    """Both operators against PyTorch's scaled_dot_product_attention, float32, to 2e-6 (sums are ordered otherwise)."""
    batch, groups, heads = number(2, 4), *((1, 4), (2, 4), (4, 4))[seed % 3]
    size, value_size = 12, (12, 8)[seed % 4 // 2]
    keys, values = torch.randn(400, groups, size), torch.randn(400, groups, value_size)
    table = torch.randperm(400)[: batch * 60].view(batch, 60).to(torch.int32)
    rows = torch.randperm(batch)
    new = torch.randint(1, 6, (batch,))
    lengths = new + torch.randint(0, 40, (batch,))
    starts = torch.cumsum(new, 0) - new
    window = (0, 5)[number(0, 1)]
    tree = seed % 2 == 1
    blocks = [torch.rand(int(count), int(count)) < 0.5 for count in new]
    for block in blocks:
        block.fill_diagonal_(True)  # a row that sees nothing has no defined result
    query = torch.randn(int(new.sum()), heads, size)
    output = torch.zeros(query.shape[0], heads, value_size)
    own_keys, own_values = _gather(table, rows, lengths, new, keys), _gather(table, rows, lengths, new, values)
    torch.ops.sgl_kernel.extend_attention_cpu(
        query, own_keys, own_values, output, keys, values, 1.0, 1.0, table, rows, lengths, new, starts,
        int(new.max()), 0.3, 0.0, False, 0 if tree else window, None, None,
        torch.cat([block.flatten() for block in blocks]) if tree else None, True,
    )  # fmt: skip
    for request in range(batch):
        count, length = int(new[request]), int(lengths[request])
        at, seen = torch.arange(length - count, length).unsqueeze(1), torch.arange(length).unsqueeze(0)
        visible = seen <= at
        if tree:
            visible = torch.cat([torch.ones(count, length - count, dtype=torch.bool), blocks[request]], 1)
        elif window:
            visible &= seen > at - window
        part = slice(int(starts[request]), int(starts[request]) + count)
        slots = table[rows[request], :length].long()
        _close("extend_attention", output[part], _reference(query[part], keys[slots], values[slots], visible))
    check_decode(batch, heads, (keys, values), (table, rows, lengths), window)
    check_latent_cache(new, heads, groups)


def check_latent_cache(new: Tensor, heads: int, groups: int) -> None:
    """A prompt without a cached prefix, as MLA sends it: full heads come along, the cache holds latents."""
    batch, total = new.shape[0], int(new.sum())
    query, keys, values = torch.randn(total, heads, 12), torch.randn(total, groups, 12), torch.randn(total, groups, 8)
    output = torch.zeros(total, heads, 8)
    latents = torch.randn(40, 1, 20)
    starts = torch.cumsum(new, 0) - new
    torch.ops.sgl_kernel.extend_attention_cpu(
        query, keys, values, output, latents, latents[..., :16], 1.0, 1.0, torch.zeros(batch, 40, dtype=torch.int32),
        torch.arange(batch), new, new, starts, int(new.max()), 0.3, 0.0, False, 0, None, None, None, True,
    )  # fmt: skip
    for start, count in zip(starts.tolist(), new.tolist(), strict=True):
        part = slice(start, start + count)
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        _close("extend_attention of a prompt", output[part], _reference(query[part], keys[part], values[part], visible))


def check_decode(
    batch: int, heads: int, cache: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor, Tensor], window: int
) -> None:
    """The decode operator, which also stores the new token's key and value."""
    (keys, values), (table, rows, lengths) = cache, context
    query = torch.randn(batch, heads, keys.shape[2])
    output = torch.zeros(batch, heads, values.shape[2])
    loc = torch.stack([table[row, length - 1] for row, length in zip(rows, lengths, strict=True)]).long()
    new_keys, new_values = torch.randn(batch, *keys.shape[1:]), torch.randn(batch, *values.shape[1:])
    torch.ops.sgl_kernel.decode_attention_cpu(
        query, keys, values, 1.0, 1.0, output, new_keys, new_values, loc, torch.empty(0), table, rows, lengths,
        0.3, 0.0, False, window, None, None,
    )  # fmt: skip
    same("decode_attention stored keys", keys[loc], new_keys)
    same("decode_attention stored values", values[loc], new_values)
    for request in range(batch):
        length = int(lengths[request])
        first = max(0, length - window) if window else 0
        slots = table[rows[request], first:length].long()
        visible = torch.ones(1, length - first, dtype=torch.bool)
        part = slice(request, request + 1)
        _close("decode_attention", output[part], _reference(query[part], keys[slots], values[slots], visible))


def _gather(table: Tensor, rows: Tensor, lengths: Tensor, new: Tensor, buffer: Tensor) -> Tensor:
    """The new tokens' rows of a cache buffer, one request after the other."""
    parts = [
        buffer[table[row, length - count : length].long()]
        for row, length, count in zip(rows.tolist(), lengths.tolist(), new.tolist(), strict=True)
    ]
    return torch.cat(parts)


def _reference(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """PyTorch's attention on [T, H, D], [L, K, D], [L, K, V]."""
    repeat = query.shape[1] // keys.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.repeat_interleave(repeat, dim=1).transpose(0, 1),
        values.repeat_interleave(repeat, dim=1).transpose(0, 1),
        attn_mask=visible,
        scale=0.3,
    ).transpose(0, 1)


def _close(what: str, ours: Tensor, theirs: Tensor) -> None:
    """AssertionError when the largest difference exceeds 2e-6."""
    worst = float((ours - theirs).abs().max())
    if not worst <= 2e-6:
        raise AssertionError(f"{what}: differs from PyTorch's by {worst:.2e}")


CHECKS: tuple[Callable[[int], Any], ...] = (check_trees, check_slots, check_bookkeeping, check_attention)


def main() -> int:
    """Run every check on every seed."""
    parser = argparse.ArgumentParser(description="compare the lab's sgl_kernel with SGLang's Triton kernels")
    parser.add_argument("--seeds", type=int, default=12, help="how many random cases of every function (12)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    begin = time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        for check in CHECKS:
            torch.manual_seed(seed)
            try:
                check(seed)
            except AssertionError as error:
                print(f"FAIL {check.__name__}, seed {seed}: {error}", file=sys.stderr)
                return 1
    print(f"ok: {arguments.seeds} seeds x {len(CHECKS)} checks in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
