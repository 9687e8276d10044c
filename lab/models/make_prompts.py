"""Step 4: the fixed prompts, from held-out files only, with what plain greedy decoding answers.

Runs with the engine's interpreter. Candidates are eight lines of each held-out file. A candidate is kept when the
answer does not repeat itself (loops inflate the accept length) and when the best token always leads the second best
clearly (so that another CPU's rounding gives the same tokens). The recorded answers are SGLang's, without speculation.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import recipe
import serve
import torch
from tokenizers import Tokenizer
from train_target import load

WANTED = 20
PER_FILE = 2
CANDIDATES_PER_FILE = 12
LINES = 8
SHORTEST, LONGEST = 120, 320  # characters
LONGEST_STRETCH = 12  # tokens
LEAST_VARIETY = 0.66  # share of different groups of four tokens
MARGIN = 0.01  # least distance of the two best logits; two implementations in fp32 differ by far less


def candidates(held: dict[str, str]) -> list[dict[str, Any]]:
    """Pieces of held-out files as file, line (from 1) and text, in a seeded order."""
    choice = random.Random(recipe.SEED)  # noqa: S311 - a choice of lines, not a secret
    found: list[dict[str, Any]] = []
    for name, text in sorted(held.items()):
        lines = text.split("\n")
        last = len(lines) - 20
        for start in sorted(choice.sample(range(20, last), min(CANDIDATES_PER_FILE, last - 20)) if last > 20 else []):
            piece = "\n".join(lines[start : start + LINES])[:LONGEST] + "\n"
            if len(piece) > SHORTEST:
                found.append({"file": name, "line": start + 1, "text": piece})
    choice.shuffle(found)
    return found


def repeats(tokens: list[int]) -> bool:
    """Whether an answer repeats itself: one pattern over LONGEST_STRETCH tokens, or few different groups of four."""
    for period in range(1, len(tokens) // 2):
        stretch = 0
        for new, old in zip(tokens[period:], tokens, strict=False):
            stretch = stretch + 1 if new == old else 0
            if stretch >= max(period, LONGEST_STRETCH):
                return True
    groups = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    return len(set(groups)) < LEAST_VARIETY * len(groups)


def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """`count` greedy tokens after `prompt`, and the smallest lead of the best logit over the second."""
    tokens: list[int] = []
    margin = float("inf")
    with torch.no_grad():
        result = model(torch.tensor([prompt]), use_cache=True)
        cache = result.past_key_values
        for _ in range(count):
            best = result.logits[0, -1].topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            tokens.append(int(best.indices[0]))
            result = model(best.indices[:1].view(1, 1), past_key_values=cache, use_cache=True)
    return tokens, margin


def choose(model: Any, tokenizer: Tokenizer, held: dict[str, str]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The first WANTED suitable candidates with transformers' answer, and how many were tried and left out."""
    chosen: list[dict[str, Any]] = []
    tally = {"tried": 0, "repeating": 0, "close call": 0}
    per_file: dict[str, int] = {}
    for candidate in candidates(held):
        if per_file.get(candidate["file"], 0) == PER_FILE:
            continue
        tally["tried"] += 1
        tokens, margin = greedy(model, tokenizer.encode(candidate["text"]).ids, recipe.NEW_TOKENS)
        if repeats(tokens):
            tally["repeating"] += 1
        elif margin < MARGIN:
            tally["close call"] += 1
        else:
            per_file[candidate["file"]] = per_file.get(candidate["file"], 0) + 1
            chosen.append({"id": f"p{len(chosen) + 1:02d}", **candidate, "output_ids": tokens})
            if len(chosen) == WANTED:
                return chosen, tally
    raise SystemExit(f"only {len(chosen)} of {WANTED} prompts are suitable ({tally}): train the target longer")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="step 1's directory")
    work: Path = parser.parse_args().work
    torch.set_num_threads(2)
    serve.end_on_terminate()
    tokenizer = Tokenizer.from_file(str(recipe.TARGET / "tokenizer.json"))
    chosen, tally = choose(load(recipe.TARGET), tokenizer, recipe.read_json(work / "held.json"))
    print(f"{len(chosen)} prompts chosen, {tally}; serving them without speculation", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        bench = serve.Bench(sys.executable, recipe.TARGET, recipe.DRAFTER, Path(scratch), Path(scratch))
        plain = serve.Wiring("plain", drafter=False)
        outcome = bench.run(plain, [prompt["text"] for prompt in chosen], recipe.NEW_TOKENS)
    same = 0
    for prompt, tokens, text in zip(chosen, outcome.outputs, outcome.texts, strict=True):
        same += prompt["output_ids"] == tokens
        prompt["output_ids"], prompt["output_text"] = tokens, text
    recipe.write_json(recipe.PROMPTS, {"format": 1, "max_new_tokens": recipe.NEW_TOKENS, "prompts": chosen})
    figures = {"candidates": tally, "margin": MARGIN, "transformers_equals_sglang": f"{same}/{len(chosen)}"}
    recipe.update_figures("prompts", figures)
    print(figures, flush=True)


if __name__ == "__main__":
    main()
