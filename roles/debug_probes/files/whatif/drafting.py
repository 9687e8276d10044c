"""Drafting along a sequence, and acceptance as SGLang counts it."""

from __future__ import annotations

from typing import Dict, List, Sequence

import torch

from whatif.drafter import Drafter, Fed, Memory
from whatif.files import Json


class Replayed:
    """One replayed request: tokens [n], states by layer, and how many tokens were the prompt's."""

    def __init__(self, tokens: torch.Tensor, states: Dict[int, torch.Tensor], prompt: int) -> None:
        self.tokens, self.states, self.prompt = tokens, states, prompt


def fed_states(sequence: Replayed, layers: Sequence[int], repair: Json) -> List[torch.Tensor]:
    """The states of the chosen layers, with what a fault of serving may have done to them."""
    states = [sequence.states[layer] for layer in layers]
    if repair.get("shuffle"):
        order = torch.randperm(len(sequence.tokens), generator=torch.Generator().manual_seed(1))
        states = [state[order] for state in states]
    shifts = repair.get("shift") or [0] * len(states)
    return [
        torch.cat([state[:1].expand(shift, -1), state[: len(state) - shift]]) if shift else state
        for state, shift in zip(states, shifts, strict=True)
    ]


def draft(drafter: Drafter, sequence: Replayed, states: List[torch.Tensor], steps: int, topk: int) -> torch.Tensor:
    """Rank of the right token among the drafts, [rows that draft, steps]; topk when not among them, -1 when the
    sequence ends before. Row r drafts from prompt - 1 + r on; each step is fed the right tokens of those before.
    """
    tokens, device = sequence.tokens, drafter.device
    count = len(tokens) - 1  # the last token has no successor to draft for
    if drafter.shares_embedding:
        embeds = sequence.states[0].to(device)
    else:
        embeds = drafter.weights["embed_tokens.weight"][tokens.to(device)]
    rows = torch.arange(count)
    kept = rows[sequence.prompt - 1 :]
    hidden = drafter.project([state[:count].to(device) for state in states])
    memory = Memory()
    ranks = torch.full((len(kept), steps), -1)
    for step in range(steps):
        active = rows if step == 0 else kept
        there = (active + step + 1).clamp(max=len(tokens) - 1)
        fed = Fed(active, hidden, embeds[there.to(device)], drafter.rotation(active + step))
        fed.first = sequence.prompt - 1 if step == 0 else 0
        normed, hidden = drafter.step(fed, memory)
        guesses = drafter.guess(normed, topk)
        known = kept + step + 2 < len(tokens)
        right = tokens[(kept + step + 2).clamp(max=len(tokens) - 1)]
        hit = guesses == right[:, None]
        rank = torch.where(hit.any(-1), hit.int().argmax(-1), torch.full_like(right, topk))
        ranks[:, step] = torch.where(known, rank, torch.full_like(rank, -1))
    return ranks


def accept(ranks: torch.Tensor, within: int) -> Json:
    """Verifications over the whole answer. within: a draft counts when its rank is below that (1: a chain)."""
    rows, steps = ranks.shape
    tokens = rows + 1  # the first token is the prefill's
    histogram = [0] * (steps + 1)
    reached, passed = [0] * steps, [0] * steps
    known, verifications = 1, 0
    while known < tokens:
        accepted = 0
        for rank in ranks[known - 1].tolist():
            if rank < 0:
                break
            reached[accepted] += 1
            if rank >= within:
                break
            passed[accepted] += 1
            accepted += 1
        histogram[accepted] += 1
        verifications += 1
        known += accepted + 1
    return {
        "tokens": tokens,
        "verifications": verifications,
        "histogram": histogram,
        "reached": reached,
        "passed": passed,
        "length": round(tokens / verifications, 4) if verifications else None,
    }


def summary(results: Sequence[Json]) -> Json:
    """Over all sequences: tokens a verification, and the share of verifications that accept 1, 2, … drafts."""
    total = sum(result["verifications"] for result in results)
    shares, product = [], 1.0
    for step in range(len(results[0]["reached"]) if results else 0):
        reached = sum(result["reached"][step] for result in results)
        product *= sum(result["passed"][step] for result in results) / reached if reached else 0.0
        shares.append(round(product, 4))
    return {
        "length": round(sum(result["tokens"] for result in results) / total, 4) if total else None,
        "per_position": shares,
        "verifications": total,
    }
