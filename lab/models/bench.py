"""Serve the tiny pair with right and with wrong wiring, and print what each does to the accept length.

    python lab/models/bench.py --python /opt/sglang/current/bin/python [--prompts N] [--wiring NAME ...] [--save]

`--python` is the interpreter of an installed SGLang with the lab's CPU kernels. Exit status 1 when an output differs
from plain decoding.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import recipe
import serve

PLAIN = serve.Wiring("plain", drafter=False)
RIGHT = serve.Wiring("right", tuple(recipe.AUX_LAYERS))
WIRINGS = [
    PLAIN,
    RIGHT,
    serve.Wiring("key removed"),
    serve.Wiring("embedding first", (0, *recipe.AUX_LAYERS[:2])),
    serve.Wiring("ids - 1", tuple(layer - 1 for layer in recipe.AUX_LAYERS)),
]
HEADER = f"{'wiring':<16} {'layer ids':<11} {'accept length':>13} {'of right':>8}   {'per position':<15} {'tok/s':>6}"


def describe(wiring: serve.Wiring) -> str:
    """The layer ids of a wiring as the table shows them."""
    if not wiring.drafter:
        return "-"
    return str(list(wiring.layers)) if wiring.layers is not None else "(default)"


def row(outcome: serve.Outcome, right: serve.Outcome | None, equal: str) -> str:
    """One line of the table; `right` is the outcome of the right wiring, if it was run."""
    length, reference = outcome.accept_length, right.accept_length if right else None
    ratio = f"{length / reference:.0%}" if length and reference else "-"
    positions = " ".join(f"{share:.2f}" for share in outcome.per_position) or "-"
    return (
        f"{outcome.wiring.name:<16} {describe(outcome.wiring):<11} {f'{length:.3f}' if length else '-':>13} "
        f"{ratio:>8}   {positions:<15} {outcome.tokens_per_second:>6.1f}  {equal}"
    )


def figures(outcome: serve.Outcome, equal: str) -> dict[str, Any]:
    """One outcome as figures.json keeps it."""
    length = outcome.accept_length
    return {
        "layers": list(outcome.wiring.layers) if outcome.wiring.layers is not None else None,
        "accept_length": round(length, 3) if length else None,
        "per_position": [round(share, 3) for share in outcome.per_position],
        "tokens_per_second": round(outcome.tokens_per_second, 1),
        "start_seconds": round(outcome.start_seconds, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "equals_recorded_plain_output": equal,
    }


def parse() -> argparse.Namespace:
    """The command line; ends with a sentence when it asks for something that is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an installed engine")
    parser.add_argument("--prompts", type=int, help="use only the first N prompts")
    parser.add_argument("--wiring", action="append", choices=[wiring.name for wiring in WIRINGS])
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this directory")
    parser.add_argument("--save", action="store_true", help="keep the figures of a complete run in figures.json")
    arguments = parser.parse_args()
    if shutil.which(arguments.python) is None:
        parser.error(f"--python: {arguments.python} is not an executable file; give the engine's interpreter")
    if arguments.prompts is not None and arguments.prompts < 1:
        parser.error("--prompts: give a number of at least 1")
    if arguments.save and (arguments.prompts or arguments.wiring):
        parser.error("--save keeps only complete figures: leave out --prompts and --wiring")
    return arguments


def bench(arguments: argparse.Namespace, scratch: Path) -> bool:
    """Run the chosen wirings and print the table; whether every output equals the recorded plain one."""
    prompts = recipe.read_json(recipe.PROMPTS)
    chosen = prompts["prompts"][: arguments.prompts]
    texts, recorded = [prompt["text"] for prompt in chosen], [prompt["output_ids"] for prompt in chosen]
    logs: Path = arguments.logs or scratch
    logs.mkdir(parents=True, exist_ok=True)
    place = serve.Bench(arguments.python, recipe.TARGET, recipe.DRAFTER, scratch, logs)
    print(f"{len(chosen)} held-out prompts, {prompts['max_new_tokens']} greedy tokens each\n{HEADER}", flush=True)
    right: serve.Outcome | None = None
    kept: dict[str, Any] = {}
    all_equal = True
    for wiring in WIRINGS:
        if arguments.wiring and wiring.name not in arguments.wiring:
            continue
        outcome = place.run(wiring, texts, prompts["max_new_tokens"])
        right = outcome if wiring is RIGHT else right
        same = sum(output == wanted for output, wanted in zip(outcome.outputs, recorded, strict=True))
        all_equal &= same == len(recorded)
        equal = f"{same}/{len(recorded)}"
        kept[wiring.name] = figures(outcome, equal)
        print(row(outcome, right, f"{equal} equal plain"), flush=True)
    if arguments.save:
        recipe.update_figures("served", {"prompts": len(chosen), "new_tokens": prompts["max_new_tokens"], **kept})
    return all_equal


def main() -> int:
    """Command line entry."""
    arguments = parse()
    serve.end_on_terminate()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            return 0 if bench(arguments, Path(temporary)) else 1
        except (serve.ServeError, OSError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
